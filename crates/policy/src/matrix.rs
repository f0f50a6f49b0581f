//! Pairwise slowdowns as a square matrix over programs.

use serde::{Deserialize, Serialize};

/// Meaning of the entries of a [`PairCosts`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CostKind {
    /// Run time with the column's program over run time alone, minus one (0.28 = 28 % slower).
    Degradation,
    /// A weight without a unit, where larger is worse: it orders assignments, but predicts no slowdown.
    Weight,
}

/// `cost[i][j]` is the cost of program `i` beside program `j`; on the diagonal, beside a copy of itself. Square and
/// finite; entries may be negative.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PairCosts {
    /// Meaning of the entries.
    pub kind: CostKind,
    /// The entries, row by row; `cost[i][j]` in the unit of `kind`.
    pub cost: Vec<Vec<f64>>,
}

impl PairCosts {
    /// Number of programs.
    pub fn len(&self) -> usize {
        self.cost.len()
    }
    /// Are there no programs?
    pub fn is_empty(&self) -> bool {
        self.cost.is_empty()
    }
    /// Returns the sum of both costs: the edge weight of a matching (CA 2.1.1).
    pub fn mutual_cost(&self, a: usize, b: usize) -> f64 {
        self.cost[a][b] + self.cost[b][a]
    }
}
