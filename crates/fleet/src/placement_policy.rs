//! Names of the policies that choose a host.

use serde::{Deserialize, Serialize};

/// A policy of the cluster's scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementPolicy {
    /// The most unrequested CPUs and memory, the default of kube-scheduler.
    Requests,
    /// The fewest services of the same kind, then the fewest services.
    Spread,
    /// The fewest unrequested CPUs and memory.
    BinPack,
    /// As `requests`, with scores for hosts that fill fewer lines.
    Misses,
    /// As `requests`, with the extender's filter and scores.
    Forecast,
}

impl PlacementPolicy {
    /// Every policy, in the order of reports.
    pub fn all() -> Vec<Self> {
        use PlacementPolicy::{BinPack, Forecast, Misses, Requests, Spread};
        vec![Requests, Spread, BinPack, Misses, Forecast]
    }

    /// The name in files and results.
    pub fn name(self) -> &'static str {
        match self {
            PlacementPolicy::Requests => "requests",
            PlacementPolicy::Spread => "spread",
            PlacementPolicy::BinPack => "bin-pack",
            PlacementPolicy::Misses => "misses",
            PlacementPolicy::Forecast => "forecast",
        }
    }

    /// Does it move services that exceed their limits? Only policies that measure can do this.
    pub fn moves_services(self) -> bool {
        matches!(self, PlacementPolicy::Misses | PlacementPolicy::Forecast)
    }
}
