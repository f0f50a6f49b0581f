//! Probes in progress: measurements that a plan requests, answered from the simulated hardware.
//!
//! There are two kinds. *Co-run* probes record which tasks co-run below a cache, and co-schedule rows of tasks if
//! allowed. *Attached* probes belong to a task's thread in the hardware: traces, samples, reuse times, super sets. A
//! probe that needs CPUs to itself reserves them, one probe at a time. The cost of the probe and of its interrupts is
//! charged to the programs and reported with the results. Probes from outside, with threads of their own beside a task or
//! between two CPUs, are refused, because counters tell more here.

mod attached;
mod co_run;

use cachemate_core::{
    Plan, PlanItem, ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, ProbeResult, RefusalReason,
    RefusedItem, TaskId,
};

use super::SimMachine;
use attached::AttachedProbe;
use co_run::CoRunProbe;

/// The reason why a probe is refused, with an explanation.
pub(crate) type ProbeRefusal = (RefusalReason, String);

/// A probe of the plan, with its progress.
pub(crate) struct ActiveProbe {
    probe: ProbeRequest,
    probe_work: ProbeWork,
    stage: ProbeStage,
    reported_costs: Vec<(Option<TaskId>, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProbeStage {
    Working,
    /// All results are present, and must be reported.
    Complete,
    /// The budget is used up, and the results so far will be reported.
    Stopped,
    Reported,
}

enum ProbeWork {
    CoRun(Box<CoRunProbe>),
    Attached(AttachedProbe),
}

impl ProbeWork {
    fn new(
        probe_kind: &ProbeKind,
        id: ProbeId,
        machine: &mut SimMachine,
    ) -> Result<Self, ProbeRefusal> {
        match probe_kind {
            ProbeKind::CoRunRows { .. } | ProbeKind::PairedRows { .. } => {
                CoRunProbe::new(probe_kind, id, machine)
                    .map(Box::new)
                    .map(ProbeWork::CoRun)
            }
            _ => AttachedProbe::new(probe_kind, machine).map(ProbeWork::Attached),
        }
    }
}

impl SimMachine {
    /// Starts, keeps and drops probes according to the plan.
    pub(crate) fn apply_probes(&mut self, plan: &Plan, refusals: &mut Vec<RefusedItem>) {
        let (continuing_probes, dropped_probes): (Vec<ActiveProbe>, Vec<ActiveProbe>) =
            std::mem::take(&mut self.probes)
                .into_iter()
                .partition(|active| plan.probes.contains(&active.probe));
        for mut active_probe in dropped_probes {
            active_probe.end(self);
        }

        self.probes = continuing_probes;
        for probe in &plan.probes {
            if self.probes.iter().any(|active| active.probe == *probe) {
                continue;
            }

            match ProbeWork::new(&probe.kind, probe.id, self) {
                Ok(work) => self.probes.push(ActiveProbe {
                    probe: probe.clone(),
                    probe_work: work,
                    stage: ProbeStage::Working,
                    reported_costs: Vec::new(),
                }),
                Err((reason, message)) => refusals.push(RefusedItem {
                    item: PlanItem::Probe(probe.id),
                    reason,
                    message,
                }),
            }
        }
        self.poll_probes();
    }

    /// Lets every probe check the machine's present state. Returns whether any probe must report its results.
    pub(crate) fn poll_probes(&mut self) -> bool {
        let mut probes = std::mem::take(&mut self.probes);
        for active_probe in probes
            .iter_mut()
            .filter(|active| active.stage == ProbeStage::Working)
        {
            active_probe.poll_probe(self);
        }
        let has_result = probes
            .iter()
            .any(|active| matches!(active.stage, ProbeStage::Complete | ProbeStage::Stopped));
        self.probes = probes;
        has_result
    }

    /// Earliest cycle at which a probe must check the machine again; `u64::MAX` if none must.
    pub(crate) fn next_probe_check(&self) -> u64 {
        let working_probes = self
            .probes
            .iter()
            .filter(|active| active.stage == ProbeStage::Working);
        let next_check_of = |active: &ActiveProbe| match &active.probe_work {
            ProbeWork::CoRun(co_run_probe) => co_run_probe.next_check_cycle(),
            // Traces and samples raise interrupts, and watches are checked whenever the machine stops.
            ProbeWork::Attached(_) => u64::MAX,
        };
        working_probes.map(next_check_of).min().unwrap_or(u64::MAX)
    }

    pub(crate) fn must_watch_switches(&self) -> bool {
        let watches_switches = |active: &ActiveProbe| {
            active.stage == ProbeStage::Working && matches!(active.probe_work, ProbeWork::CoRun(_))
        };
        self.probes.iter().any(watches_switches)
    }

    pub(crate) fn active_probes(&self) -> Vec<ProbeId> {
        self.probes
            .iter()
            .filter(|active| active.stage != ProbeStage::Reported)
            .map(|active| active.probe.id)
            .collect()
    }

    /// Results at the end of a window, and the probes that had to be stopped.
    pub(crate) fn take_results(&mut self) -> (Vec<ProbeResult>, Vec<RefusedItem>) {
        let (mut results, mut stopped_probes) = (Vec::new(), Vec::new());
        let mut probes = std::mem::take(&mut self.probes);
        for active_probe in probes
            .iter_mut()
            .filter(|active| active.stage != ProbeStage::Reported)
        {
            let is_complete = active_probe.stage != ProbeStage::Working;
            if active_probe.stage == ProbeStage::Stopped {
                let message = format!(
                    "stopped: its budget of {} ns is used up",
                    active_probe.probe.budget_ns
                );
                stopped_probes.push(RefusedItem {
                    item: PlanItem::Probe(active_probe.probe.id),
                    reason: RefusalReason::Failed,
                    message,
                });
            }
            active_probe.report_evidence(self, is_complete, &mut results);
            if is_complete {
                active_probe.end(self);
                active_probe.stage = ProbeStage::Reported;
            }
        }
        self.probes = probes;
        (results, stopped_probes)
    }
}

impl ActiveProbe {
    fn poll_probe(&mut self, machine: &mut SimMachine) {
        let is_complete = match &mut self.probe_work {
            ProbeWork::CoRun(co_run_probe) => co_run_probe.poll(machine),
            ProbeWork::Attached(attached_probe) => attached_probe.poll(machine),
        };
        let spent_cycles: u64 = self
            .cost_cycles(machine)
            .iter()
            .map(|(_, cycles)| cycles)
            .sum();
        if is_complete {
            self.stage = ProbeStage::Complete;
        } else if spent_cycles > machine.clock.to_cycles(self.probe.budget_ns) {
            self.stage = ProbeStage::Stopped;
        }
    }

    fn cost_cycles(&self, machine: &SimMachine) -> Vec<(Option<TaskId>, u64)> {
        match &self.probe_work {
            ProbeWork::CoRun(co_run_probe) => vec![(None, co_run_probe.idle_cycles())],
            ProbeWork::Attached(attached_probe) => attached_probe.cost_cycles(machine),
        }
    }

    fn report_evidence(
        &mut self,
        machine: &mut SimMachine,
        is_complete: bool,
        results: &mut Vec<ProbeResult>,
    ) {
        let cost = self.cost_cycles(machine);
        let reported_costs = self.reported_costs.clone();
        let reported_cycles = |payer: &Option<TaskId>| {
            reported_costs
                .iter()
                .find(|(earlier_payer, _)| earlier_payer == payer)
                .map_or(0, |(_, cycles)| *cycles)
        };
        let new_costs = cost.iter().map(|(payer, cycles)| {
            (
                *payer,
                machine.clock.to_nominal_ns(cycles - reported_cycles(payer)),
            )
        });
        let mut cost_ns: Vec<(Option<TaskId>, u64)> = new_costs.filter(|(_, ns)| *ns > 0).collect();

        let evidence: Vec<ProbeEvidence> = match &mut self.probe_work {
            ProbeWork::CoRun(co_run_probe) => {
                co_run_probe.take_evidence(machine).into_iter().collect()
            }
            ProbeWork::Attached(attached_probe) => {
                attached_probe.take_evidence(machine, is_complete)
            }
        };
        if !evidence.is_empty() {
            self.reported_costs = cost;
        }

        let last_index = evidence.len().saturating_sub(1);
        for (index, evidence) in evidence.into_iter().enumerate() {
            // If one probe has several pieces of evidence, the first one contains the cost, and only the last one is
            // marked complete.
            let cost_ns = std::mem::take(&mut cost_ns);
            results.push(ProbeResult {
                probe: self.probe.id,
                evidence,
                complete: is_complete && index == last_index,
                cost_ns,
            });
        }
    }

    fn end(&mut self, machine: &mut SimMachine) {
        if self.stage == ProbeStage::Reported {
            return;
        }
        match &mut self.probe_work {
            ProbeWork::CoRun(_) => {}
            ProbeWork::Attached(attached_probe) => attached_probe.end(machine),
        }
        if machine.cpu_holder == Some(self.probe.id) {
            machine.cpu_holder = None;
            machine.system.set_hold(None);
        }
    }
}
