//! One program for all tests of the public interface, because each test program links all crates below.

mod machines;
mod manage;
mod published;
mod scenarios;
