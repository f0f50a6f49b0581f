//! Who hurts whom, as a square matrix over programs.

use serde::{Deserialize, Serialize};

/// What the entries of a [`PairCosts`] are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CostKind {
    /// Run time beside the column's program over run time alone, minus one (0.28 = 28 % slower).
    Degradation,
    /// Larger is worse, without a unit: good for ordering assignments, not for expecting a slowdown.
    Weight,
}

/// `cost[i][j]`: what program `i` suffers beside program `j` (row suffers from column; the diagonal is a copy of
/// itself). Square, finite; entries may be negative.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PairCosts {
    /// What the entries are.
    pub kind: CostKind,
    /// The entries, row by row; `cost[i][j]` in the unit of `kind`.
    pub cost: Vec<Vec<f64>>,
}

impl PairCosts {
    /// Programs.
    pub fn len(&self) -> usize {
        self.cost.len()
    }
    /// Is there no program?
    pub fn is_empty(&self) -> bool {
        self.cost.is_empty()
    }
    /// What the two suffer together: the edge weight of a matching (CA 2.1.1).
    pub fn mutual(&self, a: usize, b: usize) -> f64 {
        self.cost[a][b] + self.cost[b][a]
    }
}
