//! The speeds of every process, with the plan under which they were measured.
//!
//! The *reference* is the last settled state: its plan, and the speeds of its last windows. A change of the plan leaves it;
//! what follows is on *trial*, further changes included, until one plan was in force long enough to be compared, or until
//! the whole series was. Where the state on trial is kept, it is the next reference. What processes lost or gained on the
//! way is added up against the *baseline*, the reference before the first loss, so that small losses do not add up unseen.
//!
//! Tasks come and go: plans are compared as far as they speak of tasks that are in both, speeds by process. A window in
//! which a process arrived does not count for it.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{Observation, Plan, PlanItem, ProcessId, View};

use super::comparison::CumulativeSpeedup;
use super::home_restore::{HomeCpus, record_homes};
use super::live_tasks::{LiveTasks, same_placement};
use super::speeds::{WindowSpeeds, speeds_of};

/// Windows of the reference that are remembered, to tell its noise, in times of the windows compared.
const REMEMBERED: usize = 4;
/// Windows after which a series of changes is judged as a whole, in times of the windows compared.
const SERIES: usize = 3;
/// Longest wait for slow actions, in times of the windows compared.
const PENDING_AT_MOST: usize = 10;
/// Fewer windows are no reference.
const REFERENCE_AT_LEAST: usize = 2;

/// A plan that was in force, the processes that it knew, and their speeds.
#[derive(Clone, Debug)]
pub struct PlanRecord {
    pub plan: Plan,
    pub tasks: LiveTasks,
    pub windows: VecDeque<WindowSpeeds>,
    /// Where its tasks ran in the last of them.
    pub homes: HomeCpus,
}

/// What is in force since the reference was left.
#[derive(Clone, Debug)]
struct TrialPlanRecord {
    /// The latest plan.
    plan: Plan,
    /// Settled windows under that plan.
    under_plan: VecDeque<WindowSpeeds>,
    /// Settled windows since the reference was left, and all of them.
    settled: Vec<WindowSpeeds>,
    all: Vec<WindowSpeeds>,
    /// Windows, with those in which nothing was measured.
    windows: usize,
    /// The reference is in force again since so many windows.
    paused: usize,
}

/// What a guard remembers.
#[derive(Clone, Debug)]
pub struct History {
    pub reference: PlanRecord,
    /// The reference before the first loss, while there is any.
    pub baseline: Option<PlanRecord>,
    /// Totals of the reference over the baseline.
    pub totals: BTreeMap<ProcessId, CumulativeSpeedup>,
    trial: Option<TrialPlanRecord>,
    in_force: Plan,
    /// Where tasks ran last, whatever is in force.
    homes: HomeCpus,
    /// Processes for which it was decided. Later arrivals are placed by the next plan, and that is no change.
    decided_for: LiveTasks,
    present: LiveTasks,
    /// Windows since the placement was changed; `None` = settled.
    settling: Option<usize>,
    /// Windows seen.
    followed: usize,
}

impl History {
    /// Begins with the first window that is seen; nothing of it counts, as all processes may have arrived in it.
    pub fn new(view: &View<'_>) -> Self {
        let reference = PlanRecord {
            plan: view.previous_plan.clone(),
            tasks: LiveTasks::of(&view.observation.tasks),
            windows: VecDeque::new(),
            homes: HomeCpus::new(),
        };
        History {
            in_force: reference.plan.clone(),
            homes: HomeCpus::new(),
            decided_for: LiveTasks::default(),
            present: LiveTasks::default(),
            reference,
            baseline: None,
            totals: BTreeMap::new(),
            trial: None,
            settling: None,
            followed: 0,
        }
    }

    /// Takes in a window, under the plan that was decided before it.
    pub fn observe(&mut self, view: &View<'_>, compared: usize) {
        self.followed += 1;
        record_homes(&mut self.homes, view);
        let present = LiveTasks::of(&view.observation.tasks);
        let stayed = present.common(&self.present);
        if !same_placement(view.previous_plan, &self.in_force, &stayed.common(&self.decided_for)) {
            self.settling = Some(0);
        }
        let settled = self.settle(view.observation, compared);
        let mut speeds = speeds_of(view);
        speeds.retain(|process, _| stayed.processes.contains(process));
        let measured = speeds.values().any(|speed| !speed.log_rates.is_empty());
        let known = stayed.common(&self.reference.tasks);
        let no_reference = self.trial.is_none() && self.reference.windows.len() < REFERENCE_AT_LEAST;
        if no_reference || same_placement(view.previous_plan, &self.reference.plan, &known) {
            // Where the plan changes all the time from the start, that is what is normal.
            self.extend_trial(view, speeds, measured && (settled || no_reference), compared);
        } else {
            self.try_out(view.previous_plan, &stayed.common(&self.decided_for), speeds, settled, measured);
        }
        self.in_force = view.previous_plan.clone();
        self.decided_for = std::mem::replace(&mut self.present, present);
    }

    /// Is the machine as it was told, caches and queues included? One window is left for them.
    fn settle(&mut self, seen: &Observation, compared: usize) -> bool {
        let Some(windows) = &mut self.settling else { return true };
        *windows += 1;
        let acts = |item: &PlanItem| !matches!(item, PlanItem::Probe(_) | PlanItem::Window);
        let pending = seen.applied.pending.iter().any(|pending| acts(&pending.item));
        if *windows > 1 && (!pending || *windows > PENDING_AT_MOST * compared) {
            self.settling = None;
        }
        self.settling.is_none()
    }

    fn extend_trial(&mut self, view: &View<'_>, speeds: WindowSpeeds, counts: bool, compared: usize) {
        self.reference.plan = view.previous_plan.clone();
        self.reference.tasks = self.present.clone();
        self.reference.homes = self.homes.clone();
        if counts {
            self.reference.windows.push_back(speeds);
        }
        while self.reference.windows.len() > REMEMBERED * compared {
            self.reference.windows.pop_front();
        }
        // Whoever comes back and leaves again goes on with the trial.
        if let Some(trial) = &mut self.trial {
            trial.paused += 1;
        }
        self.trial.take_if(|trial| trial.paused > REMEMBERED * compared);
    }

    fn try_out(&mut self, plan: &Plan, stayed: &LiveTasks, speeds: WindowSpeeds, settled: bool, measured: bool) {
        let trial = self.trial.get_or_insert_with(|| TrialPlanRecord {
            plan: plan.clone(),
            under_plan: VecDeque::new(),
            settled: Vec::new(),
            all: Vec::new(),
            windows: 0,
            paused: 0,
        });
        if !same_placement(plan, &trial.plan, stayed) {
            trial.under_plan.clear();
        }
        trial.plan = plan.clone();
        (trial.windows, trial.paused) = (trial.windows + 1, 0);
        if measured {
            trial.all.push(speeds.clone());
        }
        if measured && settled {
            trial.settled.push(speeds.clone());
            trial.under_plan.push_back(speeds);
        }
    }

    /// The windows by which the plan on trial is to be judged now; `None` = not yet, or nothing is on trial.
    pub fn windows_to_compare(&self, compared: usize) -> Option<Vec<WindowSpeeds>> {
        let trial = self.trial.as_ref().filter(|trial| trial.paused == 0)?;
        if trial.under_plan.len() >= compared {
            return Some(trial.under_plan.iter().cloned().collect());
        }
        let series = trial.windows >= SERIES * compared;
        let windows = if trial.settled.len() >= compared { &trial.settled } else { &trial.all };
        series.then(|| windows.clone())
    }

    /// What is in force is settled from now on. `totals` are those of all processes that were compared; without them the
    /// state is no worse than the baseline, and is the next one.
    pub fn accept(&mut self, windows: Vec<WindowSpeeds>, totals: Option<BTreeMap<ProcessId, CumulativeSpeedup>>) {
        let (plan, knew, homes) = (self.in_force.clone(), self.decided_for.clone(), self.homes.clone());
        let state = PlanRecord { plan, tasks: knew, windows: windows.into(), homes };
        let left = std::mem::replace(&mut self.reference, state);
        match totals {
            Some(totals) => {
                self.baseline.get_or_insert(left);
                self.totals = totals;
            }
            None => {
                self.baseline = None;
                self.totals.clear();
            }
        }
        self.trial = None;
    }

    /// The reference is to be in force again, or the baseline, which is the reference from now on.
    pub fn revert(&mut self, to_baseline: bool) {
        self.trial = None;
        if let Some(baseline) = self.baseline.take_if(|_| to_baseline) {
            self.reference = baseline;
            self.totals.clear();
        }
    }

    /// Measured windows that are missing until a change could be judged; `None` = enough, or nothing was measured for so long
    /// that nothing will be.
    pub fn missing(&self, compared: usize) -> Option<usize> {
        let measured = self.reference.windows.len();
        let hopeless = measured == 0 && self.followed > SERIES * compared;
        let begun = self.trial.is_some() || measured >= REFERENCE_AT_LEAST || hopeless;
        (!begun).then(|| REFERENCE_AT_LEAST - measured)
    }

    /// The tasks for which the plan in force was decided.
    pub fn decided_for(&self) -> &LiveTasks {
        &self.decided_for
    }

    /// Tasks that the reference knew and that are still there.
    pub fn known(&self) -> LiveTasks {
        self.reference.tasks.common(&self.present)
    }
}
