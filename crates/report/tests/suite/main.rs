//! One program for all tests of the public interface, because each test program links all crates below.

mod figures;
mod page;
#[path = "../common/sample_study.rs"]
mod study;
