//! The account of probes: the processor time that they cost, and processor time in all.

use cachemate_core::{ProbeEvidence, View};

/// Sums since the policy began.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProbeLedger {
    /// Processor time that probes have cost.
    pub spent_ns: f64,
    processor_ns: f64,
    /// Time that one entry of the last log of [`MIN_ENTRIES`] took; `None` until one with a cost was recorded.
    pub entry_ns: Option<f64>,
}

/// A shorter log tells nothing about the cost of an entry: that of a program that hardly misses costs time and has hardly
/// an entry, and would make every later log look unaffordable.
const MIN_ENTRIES: usize = 1_000;

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
                && lines.len() >= MIN_ENTRIES
            {
                self.entry_ns = Some(cost_ns / lines.len() as f64);
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

#[cfg(test)]
mod tests {
    use cachemate_core::test_support::{
        NullPredictor, capabilities_fixture, observation_fixture, topology_fixture,
    };
    use cachemate_core::{
        AddressKind, EventCounts, Plan, ProbeId, ProbeResult, Profiles, TaskId, WindowLength,
    };

    use super::*;

    /// Does the log of a program that misses nothing, which costs time and has one entry, leave others affordable?
    #[test]
    fn a_log_without_entries_does_not_make_others_dear() {
        let log = |entries: usize, cost_ns: u64| ProbeResult {
            probe: ProbeId(1),
            evidence: ProbeEvidence::Trace {
                task: TaskId(0),
                space: AddressKind::Virtual,
                line_bytes: 64,
                lines: vec![0; entries],
                code_positions: Vec::new(),
                lost: None,
                counts: EventCounts::exact([]),
                elapsed_ns: 1,
            },
            cost_ns: vec![(Some(TaskId(0)), cost_ns)],
            complete: true,
        };
        let mut ledger = ProbeLedger::default();
        let mut record = |results: Vec<ProbeResult>| {
            let mut observation = observation_fixture(1, 1);
            observation.probe_results = results;
            ledger.record_window(&View {
                topology: &topology_fixture(2),
                capabilities: &capabilities_fixture(&[]),
                observation: &observation,
                profiles: &Profiles::new(),
                previous_plan: &Plan::idle(WindowLength::Time { ns: 1 }),
                predictor: &NullPredictor,
                verdicts: &(),
            });
            ledger.entry_ns
        };
        assert_eq!(record(vec![log(1, 1_000_000)]), None);
        assert_eq!(record(vec![log(2_000, 3_000_000)]), Some(1_500.0));
        assert_eq!(record(vec![log(1, 1_000_000)]), Some(1_500.0));
        assert_eq!(record(vec![log(1_000, 2_000_000)]), Some(2_000.0));
    }
}
