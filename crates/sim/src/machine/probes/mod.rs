//! Probes in progress: measurements that a plan requests, answered from the simulated hardware.
//!
//! There are three kinds. *Together* probes record which tasks co-run below a cache, and co-schedule rows of tasks if
//! allowed. *Attached* probes belong to a task's thread in the hardware: traces, samples, reuse times, super sets.
//! *Outside* probes run threads of the machine itself beside a task or between two CPUs. A probe that needs CPUs to
//! itself reserves them, one probe at a time. The cost of the probe and of its interrupts is charged to the programs
//! and reported in the answer.

mod attached;
mod co_run;
mod external;
mod injected;

use cachemate_core::{
    Plan, PlanItem, ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, ProbeResult, RefusalReason, RefusedItem, TaskId,
};

use super::SimMachine;
use attached::AttachedProbe;
use co_run::CoRunProbe;
use external::ExternalProbe;

/// The reason why a probe is refused, with an explanation.
pub(crate) type ProbeRefusal = (RefusalReason, String);

/// A probe of the plan, with its progress.
pub(crate) struct ActiveProbe {
    probe: ProbeRequest,
    work: ProbeWork,
    stage: ProbeStage,
    reported_cost_cycles: Vec<(Option<TaskId>, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProbeStage {
    Working,
    /// All results are present, and the answer is due.
    Complete,
    /// The budget is used up, and the results so far will be reported.
    Stopped,
    Reported,
}

enum ProbeWork {
    CoRun(CoRunProbe),
    Attached(AttachedProbe),
    External(ExternalProbe),
}

impl ProbeWork {
    fn new(
        probe_kind: &ProbeKind,
        id: ProbeId,
        budget_cycles: u64,
        machine: &mut SimMachine,
    ) -> Result<Self, ProbeRefusal> {
        match probe_kind {
            ProbeKind::CoRunRows { .. } | ProbeKind::PairedRows { .. } => {
                CoRunProbe::new(probe_kind, id, machine).map(ProbeWork::CoRun)
            }
            ProbeKind::Neighbor { .. } | ProbeKind::PingPong { .. } => {
                ExternalProbe::new(probe_kind, id, budget_cycles, machine).map(ProbeWork::External)
            }
            _ => AttachedProbe::new(probe_kind, machine).map(ProbeWork::Attached),
        }
    }
}

impl SimMachine {
    /// Starts, keeps and drops probes according to the plan.
    pub(crate) fn apply_probes(&mut self, plan: &Plan, refusals: &mut Vec<RefusedItem>) {
        let (continuing, dropped): (Vec<ActiveProbe>, Vec<ActiveProbe>) =
            std::mem::take(&mut self.probes).into_iter().partition(|active| plan.probes.contains(&active.probe));
        for mut active in dropped {
            active.end(self);
        }
        self.probes = continuing;
        for probe in &plan.probes {
            if self.probes.iter().any(|active| active.probe == *probe) {
                continue;
            }
            let budget_cycles = self.clock.to_cycles(probe.budget_ns);
            match ProbeWork::new(&probe.kind, probe.id, budget_cycles, self) {
                Ok(work) => self.probes.push(ActiveProbe {
                    probe: probe.clone(),
                    work,
                    stage: ProbeStage::Working,
                    reported_cost_cycles: Vec::new(),
                }),
                Err((because, said)) => {
                    refusals.push(RefusedItem { item: PlanItem::Probe(probe.id), reason: because, message: said })
                }
            }
        }
        self.poll_probes();
    }

    /// Lets every probe check the machine's present state, and returns whether any answer is due.
    pub(crate) fn poll_probes(&mut self) -> bool {
        let mut probes = std::mem::take(&mut self.probes);
        for active in probes.iter_mut().filter(|active| active.stage == ProbeStage::Working) {
            active.poll_probe(self);
        }
        let answered = probes.iter().any(|active| matches!(active.stage, ProbeStage::Complete | ProbeStage::Stopped));
        self.probes = probes;
        answered
    }

    /// Returns the cycle by which some probe must check again.
    pub(crate) fn probes_due(&self) -> u64 {
        let working = self.probes.iter().filter(|active| active.stage == ProbeStage::Working);
        let work_due_cycle = |active: &ActiveProbe| match &active.work {
            ProbeWork::CoRun(together) => together.next_due(),
            ProbeWork::External(outside) => outside.next_due(),
            ProbeWork::Attached(attached) => attached.next_due(),
        };
        working.map(work_due_cycle).min().unwrap_or(u64::MAX)
    }

    /// Returns whether any probe must observe every switch.
    pub(crate) fn must_watch_switches(&self) -> bool {
        let watches_switches =
            |active: &ActiveProbe| active.stage == ProbeStage::Working && matches!(active.work, ProbeWork::CoRun(_));
        self.probes.iter().any(watches_switches)
    }

    pub(crate) fn active_probes(&self) -> Vec<ProbeId> {
        self.probes.iter().filter(|active| active.stage != ProbeStage::Reported).map(|active| active.probe.id).collect()
    }

    /// Returns the results of the probes at the end of a window, and the probes that had to be stopped.
    pub(crate) fn take_results(&mut self) -> (Vec<ProbeResult>, Vec<RefusedItem>) {
        let (mut results, mut stopped) = (Vec::new(), Vec::new());
        let mut probes = std::mem::take(&mut self.probes);
        for active in probes.iter_mut().filter(|active| active.stage != ProbeStage::Reported) {
            let complete = active.stage != ProbeStage::Working;
            if active.stage == ProbeStage::Stopped {
                let message = format!("stopped: its budget of {} ns is used up", active.probe.budget_ns);
                stopped.push(RefusedItem {
                    item: PlanItem::Probe(active.probe.id),
                    reason: RefusalReason::Failed,
                    message,
                });
            }
            active.answer_probe(self, complete, &mut results);
            if complete {
                active.end(self);
                active.stage = ProbeStage::Reported;
            }
        }
        self.probes = probes;
        (results, stopped)
    }
}

impl ActiveProbe {
    fn poll_probe(&mut self, machine: &mut SimMachine) {
        let complete = match &mut self.work {
            ProbeWork::CoRun(together) => together.poll(machine),
            ProbeWork::Attached(attached) => attached.poll(machine),
            ProbeWork::External(outside) => outside.poll(machine),
        };
        let spent: u64 = self.cost_cycles(machine).iter().map(|(_, cycles)| cycles).sum();
        if complete {
            self.stage = ProbeStage::Complete;
        } else if spent > machine.clock.to_cycles(self.probe.budget_ns) {
            self.stage = ProbeStage::Stopped;
        }
    }

    fn cost_cycles(&self, machine: &SimMachine) -> Vec<(Option<TaskId>, u64)> {
        match &self.work {
            ProbeWork::CoRun(together) => vec![(None, together.idle_cycles())],
            ProbeWork::Attached(attached) => attached.cost_cycles(machine),
            ProbeWork::External(outside) => vec![(None, outside.cost_cycles())],
        }
    }

    fn answer_probe(&mut self, machine: &mut SimMachine, complete: bool, answers: &mut Vec<ProbeResult>) {
        let cost = self.cost_cycles(machine);
        let reported_costs = self.reported_cost_cycles.clone();
        let reported_cycles = |payer: &Option<TaskId>| {
            reported_costs.iter().find(|(earlier_payer, _)| earlier_payer == payer).map_or(0, |(_, cycles)| *cycles)
        };
        let new =
            cost.iter().map(|(payer, cycles)| (*payer, machine.clock.nominal_ns(cycles - reported_cycles(payer))));
        let mut cost_ns: Vec<(Option<TaskId>, u64)> = new.filter(|(_, ns)| *ns > 0).collect();
        let evidence: Vec<ProbeEvidence> = match &mut self.work {
            ProbeWork::CoRun(together) => together.take_evidence(machine).into_iter().collect(),
            ProbeWork::Attached(attached) => attached.take_evidence(machine, complete),
            ProbeWork::External(outside) => outside.take_evidence(complete).into_iter().collect(),
        };
        if !evidence.is_empty() {
            self.reported_cost_cycles = cost;
        }
        let last = evidence.len().saturating_sub(1);
        for (at, evidence) in evidence.into_iter().enumerate() {
            // If one probe has several pieces of evidence, the first one carries the cost, and the last one the end.
            let cost_ns = std::mem::take(&mut cost_ns);
            answers.push(ProbeResult { probe: self.probe.id, evidence, complete: complete && at == last, cost_ns });
        }
    }

    fn end(&mut self, machine: &mut SimMachine) {
        if self.stage == ProbeStage::Reported {
            return;
        }
        match &mut self.work {
            ProbeWork::CoRun(_) => {}
            ProbeWork::Attached(attached) => attached.end(machine),
            ProbeWork::External(outside) => outside.end(machine),
        }
        if machine.holder == Some(self.probe.id) {
            machine.holder = None;
            machine.system.set_hold(None);
        }
    }
}
