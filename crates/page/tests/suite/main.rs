//! One program for all tests of the public interface, because each test program links all crates below.

mod chromium;
#[path = "../common/mod.rs"]
mod common;
mod live;
#[path = "../../../linux/src/skip_test.rs"]
mod not_shown;
mod screenshots;
#[path = "../../../report/tests/common/sample_study.rs"]
mod study;
