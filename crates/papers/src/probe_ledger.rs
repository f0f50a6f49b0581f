//! The account of probes: the processor time that they cost, and processor time in all.

use cachemate_core::{ProbeEvidence, View};

/// Sums since the policy began.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProbeLedger {
    /// Processor time that probes have cost.
    pub spent_ns: f64,
    processor_ns: f64,
    /// Time that one entry of the last log took; `None` until a log with a cost was recorded.
    pub entry_ns: Option<f64>,
}

impl ProbeLedger {
    /// Records the costs of a window.
    pub fn record_window(&mut self, view: &View<'_>) {
        self.processor_ns +=
            view.observation.span.elapsed_ns as f64 * f64::from(view.online().count());
        for result in &view.observation.probe_results {
            let cost_ns = result.cost_ns.iter().map(|(_, ns)| *ns as f64).sum::<f64>();
            self.spent_ns += cost_ns;
            if let ProbeEvidence::Trace { lines, .. } = &result.evidence
                && cost_ns > 0.0
            {
                self.entry_ns = Some(cost_ns / lines.len().max(1) as f64);
            }
        }
    }

    /// The share of processor time that probes have cost.
    pub fn spent_share(&self) -> f64 {
        self.spent_ns / self.processor_ns.max(1.0)
    }

    /// The time by which probes have cost more than this share of processor time; negative if they have cost less.
    pub fn excess_ns(&self, max_share: f64) -> f64 {
        self.spent_ns - max_share * self.processor_ns
    }
}
