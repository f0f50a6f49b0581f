//! One program for all tests of the public interface, because each test program links all crates below.

mod coschedule;
mod hotplug;
mod intensity;
mod placement;
mod reference_predictor;
mod statcc_against_exact;
