//! Pairwise slowdowns as a square matrix over programs.

use serde::{Deserialize, Serialize};

/// The meaning of the entries of [`PairCosts`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CostKind {
    /// Run time with the column's program over run time alone, minus one (0.28 = 28 % slower).
    Degradation,
    /// A weight without a unit, where larger is worse. It orders assignments but predicts no slowdown.
    Weight,
}

/// The costs of programs beside each other: `cost[i][j]` is that of program `i` beside program `j`, and the diagonal is
/// that beside a copy of itself. The matrix is square and finite; entries may be negative.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PairCosts {
    /// Meaning and unit of the entries.
    pub kind: CostKind,
    /// Entries row by row, in the unit of `kind`.
    pub cost: Vec<Vec<f64>>,
}

impl PairCosts {
    /// Builds costs from slowdowns by row and column.
    pub fn from_slowdowns(cost: Vec<Vec<f64>>) -> Self {
        PairCosts {
            kind: CostKind::Degradation,
            cost,
        }
    }
    /// Programs, which are the rows and the columns.
    pub fn len(&self) -> usize {
        self.cost.len()
    }
    /// Whether there are no programs.
    pub fn is_empty(&self) -> bool {
        self.cost.is_empty()
    }
    /// The sum of both programs' costs beside each other, which is the edge weight of a matching (CA 2.1.1).
    pub fn mutual_cost(&self, a: usize, b: usize) -> f64 {
        self.cost[a][b] + self.cost[b][a]
    }
}
