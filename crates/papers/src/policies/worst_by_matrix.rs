//! Chooses the assignment with the largest sum of measured slowdowns (CA 2.1), as the other end of the scale.
//!
//! Problem: how much can scheduling lose at most? Method: like [`super::best_by_matrix`], with the same parameters, but
//! for the largest sum. Properties: the same as there.

use cachemate_core::Policy;

use super::ParameterError;
use crate::solvers;

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    super::best_by_matrix::build_matrix_policy(parameters, solvers::worst_assignment)
}
