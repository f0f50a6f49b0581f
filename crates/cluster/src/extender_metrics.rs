//! Metrics of the extender for Prometheus: how long answers take, and what they are based on.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Upper bounds of the histogram in seconds, around the target of one millisecond.
const BOUNDS: [f64; 12] = [
    2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1,
];

type TimesByVerb = Family<[(&'static str, &'static str); 1], Histogram>;

/// The metrics of a running extender.
pub struct ExtenderMetrics {
    registry: Registry,
    times: TimesByVerb,
    refused_requests: Counter,
    fresh_nodes: Gauge<f64, AtomicU64>,
    placements_in_flight: Gauge<f64, AtomicU64>,
}

impl Default for ExtenderMetrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("cachemate_extender");
        let times = TimesByVerb::new_with_constructor(|| Histogram::new(BOUNDS));
        let help = "Time from the complete request to its answer, with the wait for other requests";
        registry.register_with_unit("request", help, Unit::Seconds, times.clone());
        let refused_requests = Counter::default();
        registry.register(
            "refused_requests",
            "Requests that are no valid ExtenderArgs",
            refused_requests.clone(),
        );
        let (fresh_nodes, placements_in_flight) = (Gauge::default(), Gauge::default());
        registry.register(
            "fresh_nodes",
            "Nodes whose state is at most a minute old",
            fresh_nodes.clone(),
        );
        let help = "Placements that no node has published yet";
        registry.register("placements_in_flight", help, placements_in_flight.clone());
        ExtenderMetrics {
            registry,
            times,
            refused_requests,
            fresh_nodes,
            placements_in_flight,
        }
    }
}

impl ExtenderMetrics {
    /// Records a response to `filter` or `prioritize`.
    pub fn record_response(&self, verb: &'static str, seconds: f64) {
        self.times.get_or_create(&[("verb", verb)]).observe(seconds);
    }

    /// Records a request that was refused.
    pub fn record_refusal(&self) {
        self.refused_requests.inc();
    }

    /// All metrics in Prometheus's text format, with these two gauges as they are now.
    pub fn page(&self, fresh_nodes: usize, placements_in_flight: usize) -> String {
        self.fresh_nodes.set(fresh_nodes as f64);
        self.placements_in_flight.set(placements_in_flight as f64);
        let mut page = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut page, &self.registry);
        page
    }
}
