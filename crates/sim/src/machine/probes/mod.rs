//! Probes at work: measurements that a plan asks for, answered from the simulated hardware.
//!
//! Three kinds. *Together* watches who runs beside whom below a cache, and brings rows of tasks together where it may.
//! *Attached* probes sit on a task's thread in the hardware: traces, samples, reuses, super sets. *Outside* probes run
//! threads of the machine's own beside a task or between two CPUs. Whoever needs CPUs for itself holds them, one probe
//! at a time; what that and the interrupts cost is charged to the programs and told in the answer.

mod attached;
mod outside;
mod sources;
mod together;

use cachemate_core::{Evidence, Item, Plan, Probe, ProbeId, ProbeResult, ProbeWhat, Refused, RefusedBecause, TaskId};

use super::SimMachine;
use attached::Attached;
use outside::Outside;
use together::Together;

/// Why a probe cannot be done.
pub(crate) type Refusal = (RefusedBecause, String);

/// One probe of the plan.
pub(crate) struct Active {
    probe: Probe,
    work: Work,
    stage: Stage,
    told_cost_cycles: Vec<(Option<TaskId>, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Working,
    /// Everything is in; the answer is due.
    Complete,
    /// Its budget is used up; what there is will be told.
    Stopped,
    Told,
}

enum Work {
    Together(Together),
    Attached(Attached),
    Outside(Outside),
}

impl Work {
    fn new(what: &ProbeWhat, id: ProbeId, budget_cycles: u64, machine: &mut SimMachine) -> Result<Self, Refusal> {
        match what {
            ProbeWhat::Rows { .. } | ProbeWhat::Beside { .. } => Together::new(what, id, machine).map(Work::Together),
            ProbeWhat::Neighbor { .. } | ProbeWhat::PingPong { .. } => {
                Outside::new(what, id, budget_cycles, machine).map(Work::Outside)
            }
            _ => Attached::new(what, machine).map(Work::Attached),
        }
    }
}

impl SimMachine {
    /// Starts, keeps and drops probes as the plan says.
    pub(crate) fn apply_probes(&mut self, plan: &Plan, refusals: &mut Vec<Refused>) {
        let (kept, dropped): (Vec<Active>, Vec<Active>) =
            std::mem::take(&mut self.probes).into_iter().partition(|active| plan.probes.contains(&active.probe));
        for mut active in dropped {
            active.end(self);
        }
        self.probes = kept;
        for probe in &plan.probes {
            if self.probes.iter().any(|active| active.probe == *probe) {
                continue;
            }
            let budget_cycles = self.clock.cycles(probe.budget_ns);
            match Work::new(&probe.what, probe.id, budget_cycles, self) {
                Ok(work) => self.probes.push(Active {
                    probe: probe.clone(),
                    work,
                    stage: Stage::Working,
                    told_cost_cycles: Vec::new(),
                }),
                Err((because, said)) => refusals.push(Refused { item: Item::Probe(probe.id), because, said }),
            }
        }
        self.tend_probes();
    }

    /// Lets every probe look at the machine as it is now; true if one has its answer.
    pub(crate) fn tend_probes(&mut self) -> bool {
        let mut probes = std::mem::take(&mut self.probes);
        for active in probes.iter_mut().filter(|active| active.stage == Stage::Working) {
            active.tend(self);
        }
        let answered = probes.iter().any(|active| matches!(active.stage, Stage::Complete | Stage::Stopped));
        self.probes = probes;
        answered
    }

    /// When a probe wants to look again, at the latest.
    pub(crate) fn probes_due(&self) -> u64 {
        let working = self.probes.iter().filter(|active| active.stage == Stage::Working);
        let due = |active: &Active| match &active.work {
            Work::Together(together) => together.next_due(),
            Work::Outside(outside) => outside.next_due(),
            Work::Attached(attached) => attached.next_due(),
        };
        working.map(due).min().unwrap_or(u64::MAX)
    }

    /// Does any probe care for every switch?
    pub(crate) fn probes_watch_switches(&self) -> bool {
        let together = |active: &Active| active.stage == Stage::Working && matches!(active.work, Work::Together(_));
        self.probes.iter().any(together)
    }

    pub(crate) fn probes_in_force(&self) -> Vec<ProbeId> {
        self.probes.iter().filter(|active| active.stage != Stage::Told).map(|active| active.probe.id).collect()
    }

    /// What the probes have at the end of a window, and which had to be stopped.
    pub(crate) fn answers(&mut self) -> (Vec<ProbeResult>, Vec<Refused>) {
        let (mut answers, mut stopped) = (Vec::new(), Vec::new());
        let mut probes = std::mem::take(&mut self.probes);
        for active in probes.iter_mut().filter(|active| active.stage != Stage::Told) {
            let complete = active.stage != Stage::Working;
            if active.stage == Stage::Stopped {
                let said = format!("stopped: its budget of {} ns is used up", active.probe.budget_ns);
                stopped.push(Refused { item: Item::Probe(active.probe.id), because: RefusedBecause::Failed, said });
            }
            active.answer(self, complete, &mut answers);
            if complete {
                active.end(self);
                active.stage = Stage::Told;
            }
        }
        self.probes = probes;
        (answers, stopped)
    }
}

impl Active {
    fn tend(&mut self, machine: &mut SimMachine) {
        let complete = match &mut self.work {
            Work::Together(together) => together.tend(machine),
            Work::Attached(attached) => attached.tend(machine),
            Work::Outside(outside) => outside.tend(machine),
        };
        let spent: u64 = self.cost_cycles(machine).iter().map(|(_, cycles)| cycles).sum();
        if complete {
            self.stage = Stage::Complete;
        } else if spent > machine.clock.cycles(self.probe.budget_ns) {
            self.stage = Stage::Stopped;
        }
    }

    fn cost_cycles(&self, machine: &SimMachine) -> Vec<(Option<TaskId>, u64)> {
        match &self.work {
            Work::Together(together) => vec![(None, together.idle_cycles())],
            Work::Attached(attached) => attached.cost_cycles(machine),
            Work::Outside(outside) => vec![(None, outside.cost_cycles())],
        }
    }

    fn answer(&mut self, machine: &mut SimMachine, complete: bool, answers: &mut Vec<ProbeResult>) {
        let cost = self.cost_cycles(machine);
        let before = self.told_cost_cycles.clone();
        let told = |who: &Option<TaskId>| before.iter().find(|(of, _)| of == who).map_or(0, |(_, cycles)| *cycles);
        let new = cost.iter().map(|(who, cycles)| (*who, machine.clock.nominal_ns(cycles - told(who))));
        let mut cost_ns: Vec<(Option<TaskId>, u64)> = new.filter(|(_, ns)| *ns > 0).collect();
        let evidence: Vec<Evidence> = match &mut self.work {
            Work::Together(together) => together.take(machine).into_iter().collect(),
            Work::Attached(attached) => attached.take(machine, complete),
            Work::Outside(outside) => outside.take(complete).into_iter().collect(),
        };
        if !evidence.is_empty() {
            self.told_cost_cycles = cost;
        }
        let last = evidence.len().saturating_sub(1);
        for (at, evidence) in evidence.into_iter().enumerate() {
            // Several pieces of one probe: the cost stands with the first, the end with the last.
            let cost_ns = std::mem::take(&mut cost_ns);
            answers.push(ProbeResult { probe: self.probe.id, evidence, complete: complete && at == last, cost_ns });
        }
    }

    fn end(&mut self, machine: &mut SimMachine) {
        if self.stage == Stage::Told {
            return;
        }
        match &mut self.work {
            Work::Together(_) => {}
            Work::Attached(attached) => attached.end(machine),
            Work::Outside(outside) => outside.end(machine),
        }
        if machine.holder == Some(self.probe.id) {
            machine.holder = None;
            machine.system.set_hold(None);
        }
    }
}
