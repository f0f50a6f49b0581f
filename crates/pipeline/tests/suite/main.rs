//! One program for all tests of the public interface, because each test program links all crates below.

mod bandwidth;
mod culprit;
mod harmless;
mod observing;
mod sweeps;
mod writing_a_policy;
