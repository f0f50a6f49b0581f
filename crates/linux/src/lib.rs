//! The live host as a machine that policies can observe and change. Every change is preceded by an entry in the
//! restore journal. All paths are below an injected root, so that tests can use artificial trees.
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
