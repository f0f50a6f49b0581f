//! Names of the policies that choose a host.

use serde::{Deserialize, Serialize};

/// A policy of the cluster's scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementPolicy {
    /// Prefers hosts with the most unrequested CPUs and memory, the default of kube-scheduler.
    Requests,
    /// Prefers hosts with the fewest services of the same kind, then those with the fewest services.
    Spread,
    /// Prefers hosts with the fewest unrequested CPUs and memory.
    BinPack,
    /// Like `requests`, with additional scores for hosts whose residents fill fewer lines.
    Misses,
    /// Like `requests`, with the extender's filter and scores.
    Forecast,
}

impl PlacementPolicy {
    /// Every policy, in the order in which reports list them.
    pub fn all() -> Vec<Self> {
        use PlacementPolicy::{BinPack, Forecast, Misses, Requests, Spread};
        vec![Requests, Spread, BinPack, Misses, Forecast]
    }

    /// The name of the policy in files and results.
    pub fn name(self) -> &'static str {
        match self {
            PlacementPolicy::Requests => "requests",
            PlacementPolicy::Spread => "spread",
            PlacementPolicy::BinPack => "bin-pack",
            PlacementPolicy::Misses => "misses",
            PlacementPolicy::Forecast => "forecast",
        }
    }

    /// Whether the policy moves services that exceed their limits. Only policies that measure slowdowns can.
    pub fn moves_services(self) -> bool {
        matches!(self, PlacementPolicy::Misses | PlacementPolicy::Forecast)
    }
}
