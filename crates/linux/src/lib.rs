//! The live machine. Nothing on the host is changed without the restore journal, and every path is below an injected
//! root, so that tests can use artificial trees.
#![warn(missing_docs)]

pub mod act;
pub mod kernel;
pub mod machine;
pub mod nri;
pub mod safety;
pub mod sense;

#[cfg(test)]
mod fake_tests;
#[cfg(test)]
mod faults_tests;
#[cfg(test)]
mod skip_test;
#[cfg(test)]
mod stranger_tests;
