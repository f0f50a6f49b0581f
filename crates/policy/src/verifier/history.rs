//! The speeds of every process, with the plan under which they were measured.
//!
//! The *reference* is the last settled state: its plan, and the speeds of its last windows. A change of the plan puts
//! the new state on *trial*, together with any further changes, until one plan has been in force long enough to be
//! compared, or the whole series has. A state that is kept becomes the next reference. Until then, losses and gains of
//! processes are summed relative to the *baseline*, the reference before the first loss, so that small losses do not
//! accumulate unnoticed.
//!
//! Tasks arrive and exit, so plans are compared for the tasks that are in both, and speeds by process. The window in
//! which a process arrived does not count for it.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{Observation, Plan, PlanItem, ProcessId, View};

use super::comparison::CumulativeSpeedup;
use super::home_restore::{HomeCpus, record_homes};
use super::live_tasks::{LiveTasks, same_placement};
use super::speeds::{WindowSpeeds, speeds_of};
use crate::partition::speed_history::is_disturbing;

/// Number of reference windows kept for the noise, in multiples of the windows compared.
const KEPT: usize = 4;
/// Number of windows after which a series of changes is compared as a whole, in multiples of the windows compared.
const SERIES: usize = 3;
/// Longest wait for slow actions and for the end of disturbing probes, in multiples of the windows compared.
const MAX_PENDING: usize = 10;
/// Smallest number of windows of a reference.
const MIN_REFERENCE: usize = 2;

/// How the plan in force is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PlanComparison {
    /// Compared with the reference.
    #[default]
    BeforeAndAfter,
    /// Compared with the other plan of a trial.
    Trial,
    /// Found faster by a trial.
    Measured,
}

/// A plan that was in force, its processes, and their speeds.
#[derive(Clone, Debug)]
pub struct PlanRecord {
    pub plan: Plan,
    pub tasks: LiveTasks,
    pub windows: VecDeque<WindowSpeeds>,
    /// CPUs on which the plan's tasks ran in the last of its windows.
    pub homes: HomeCpus,
}

/// The state since the reference was left.
#[derive(Clone, Debug)]
struct TrialPlanRecord {
    /// The latest plan.
    plan: Plan,
    /// Settled windows under that plan.
    under_plan: VecDeque<WindowSpeeds>,
    /// Settled windows since the reference was left, and all windows since.
    settled_windows: Vec<WindowSpeeds>,
    windows_since: Vec<WindowSpeeds>,
    /// Number of windows, including those in which nothing was measured.
    windows: usize,
    /// Number of windows for which the reference has been in force again.
    paused: usize,
}

/// The history of a guard.
#[derive(Clone, Debug)]
pub struct History {
    pub reference: PlanRecord,
    /// The reference before the first loss, if there was a loss.
    pub baseline: Option<PlanRecord>,
    /// Changes of the reference relative to the baseline.
    pub totals: BTreeMap<ProcessId, CumulativeSpeedup>,
    trial: Option<TrialPlanRecord>,
    /// Settled windows of a policy's own trial, by plan.
    legs: Vec<(Plan, Vec<WindowSpeeds>)>,
    current_plan: Plan,
    /// CPUs on which tasks ran last, under any plan.
    homes: HomeCpus,
    /// Processes for which the plan was decided. Later arrivals are placed by the next plan, which does not count as a
    /// change.
    decided_for: LiveTasks,
    live_tasks: LiveTasks,
    /// Number of windows since the placement was changed; `None` if settled.
    settling: Option<usize>,
    /// Number of observed windows.
    observed_windows: usize,
    /// Number of windows in a row in which probes disturbed programs.
    disturbed_windows: usize,
}

impl History {
    /// Starts with the first observed window; its speeds do not count, because all processes may have arrived in it.
    pub fn new(view: &View<'_>) -> Self {
        let reference = PlanRecord {
            plan: view.previous_plan.clone(),
            tasks: LiveTasks::from_samples(&view.observation.tasks),
            windows: VecDeque::new(),
            homes: HomeCpus::new(),
        };
        History {
            current_plan: reference.plan.clone(),
            homes: HomeCpus::new(),
            decided_for: LiveTasks::default(),
            live_tasks: LiveTasks::default(),
            reference,
            baseline: None,
            totals: BTreeMap::new(),
            trial: None,
            legs: Vec::new(),
            settling: None,
            observed_windows: 0,
            disturbed_windows: 0,
        }
    }

    /// Observes a window under the plan that was decided before it. Returns whether a speed was measured.
    pub fn observe(&mut self, view: &View<'_>, compared: usize, comparison: PlanComparison) -> bool {
        self.observed_windows += 1;
        record_homes(&mut self.homes, view);
        let live_tasks = LiveTasks::from_samples(&view.observation.tasks);
        let common_tasks = live_tasks.common_tasks(&self.live_tasks);
        if !same_placement(view.previous_plan, &self.current_plan, &common_tasks.common_tasks(&self.decided_for)) {
            self.settling = Some(0);
        }
        let is_settled = self.settle(view.observation, compared);
        let mut speeds = speeds_of(view);
        speeds.retain(|process, _| common_tasks.processes.contains(process));
        let is_disturbed = self.is_disturbed(view.previous_plan, compared);
        let is_measured = !is_disturbed && speeds.values().any(|speed| !speed.log_rates.is_empty());
        match comparison {
            PlanComparison::BeforeAndAfter => self.legs.clear(),
            PlanComparison::Trial if is_settled && is_measured => {
                self.record_leg(view.previous_plan, &common_tasks, &speeds)
            }
            PlanComparison::Trial | PlanComparison::Measured => {}
        }
        let known_tasks = common_tasks.common_tasks(&self.reference.tasks);
        let no_reference = self.trial.is_none() && self.reference.windows.len() < MIN_REFERENCE;
        if no_reference || same_placement(view.previous_plan, &self.reference.plan, &known_tasks) {
            // If the plan changes all the time from the start, changing is the normal state.
            self.extend_trial(view, speeds, is_measured && (is_settled || no_reference), compared);
        } else {
            self.try_out(
                view.previous_plan,
                &common_tasks.common_tasks(&self.decided_for),
                speeds,
                is_settled,
                is_measured,
            );
        }
        self.current_plan = view.previous_plan.clone();
        self.decided_for = std::mem::replace(&mut self.live_tasks, live_tasks);
        is_measured
    }

    /// Did probes stop or slow programs in the window after this plan? If they always do, that is the normal state.
    fn is_disturbed(&mut self, plan: &Plan, compared: usize) -> bool {
        let is_disturbed = plan.probes.iter().any(|probe| is_disturbing(&probe.kind));
        self.disturbed_windows = if is_disturbed { self.disturbed_windows + 1 } else { 0 };
        is_disturbed && self.disturbed_windows <= MAX_PENDING * compared
    }

    /// Is a plan other than the reference in force?
    pub fn is_on_trial(&self) -> bool {
        self.trial.as_ref().is_some_and(|trial| trial.paused == 0)
    }

    /// Has the machine applied the plan, and have caches and queues settled? They get one window for that.
    fn settle(&mut self, observation: &Observation, compared: usize) -> bool {
        let Some(windows) = &mut self.settling else { return true };
        *windows += 1;
        let is_acting = |item: &PlanItem| !matches!(item, PlanItem::Probe(_) | PlanItem::Window);
        let pending = observation.applied.pending.iter().any(|pending| is_acting(&pending.item));
        if *windows > 1 && (!pending || *windows > MAX_PENDING * compared) {
            self.settling = None;
        }
        self.settling.is_none()
    }

    fn extend_trial(&mut self, view: &View<'_>, speeds: WindowSpeeds, counts: bool, compared: usize) {
        self.reference.plan = view.previous_plan.clone();
        self.reference.tasks = self.live_tasks.clone();
        self.reference.homes = self.homes.clone();
        if counts {
            self.reference.windows.push_back(speeds);
        }
        while self.reference.windows.len() > KEPT * compared {
            self.reference.windows.pop_front();
        }
        // A trial continues if the reference was in force again only temporarily.
        if let Some(trial) = &mut self.trial {
            trial.paused += 1;
        }
        self.trial.take_if(|trial| trial.paused > KEPT * compared);
    }

    fn try_out(
        &mut self,
        plan: &Plan,
        common_tasks: &LiveTasks,
        speeds: WindowSpeeds,
        is_settled: bool,
        is_measured: bool,
    ) {
        let trial = self.trial.get_or_insert_with(|| TrialPlanRecord {
            plan: plan.clone(),
            under_plan: VecDeque::new(),
            settled_windows: Vec::new(),
            windows_since: Vec::new(),
            windows: 0,
            paused: 0,
        });
        if !same_placement(plan, &trial.plan, common_tasks) {
            trial.under_plan.clear();
        }
        trial.plan = plan.clone();
        (trial.windows, trial.paused) = (trial.windows + 1, 0);
        if is_measured {
            trial.windows_since.push(speeds.clone());
        }
        if is_measured && is_settled {
            trial.settled_windows.push(speeds.clone());
            trial.under_plan.push_back(speeds);
        }
    }

    /// Returns the windows by which the plan on trial can be judged now; `None` if there are not enough yet, or there
    /// is no trial.
    pub fn windows_to_compare(&self, compared: usize) -> Option<Vec<WindowSpeeds>> {
        let trial = self.trial.as_ref().filter(|trial| trial.paused == 0)?;
        if trial.under_plan.len() >= compared {
            return Some(trial.under_plan.iter().cloned().collect());
        }
        let series = trial.windows >= SERIES * compared;
        let windows =
            if trial.settled_windows.len() >= compared { &trial.settled_windows } else { &trial.windows_since };
        series.then(|| windows.clone())
    }

    /// Makes the state on trial the reference. `totals` covers all compared processes; without it, the state is no
    /// worse than the baseline, and becomes the next baseline.
    pub fn accept(&mut self, windows: Vec<WindowSpeeds>, totals: Option<BTreeMap<ProcessId, CumulativeSpeedup>>) {
        let (plan, decided_for, homes) = (self.current_plan.clone(), self.decided_for.clone(), self.homes.clone());
        let state = PlanRecord { plan, tasks: decided_for, windows: windows.into(), homes };
        let old_reference = std::mem::replace(&mut self.reference, state);
        match totals {
            Some(totals) => {
                self.baseline.get_or_insert(old_reference);
                self.totals = totals;
            }
            None => {
                self.baseline = None;
                self.totals.clear();
            }
        }
        self.trial = None;
    }

    fn record_leg(&mut self, plan: &Plan, common_tasks: &LiveTasks, speeds: &WindowSpeeds) {
        match self.legs.iter_mut().find(|(leg_plan, _)| same_placement(leg_plan, plan, common_tasks)) {
            Some((_, windows)) => windows.push(speeds.clone()),
            None => self.legs.push((plan.clone(), vec![speeds.clone()])),
        }
    }

    /// Returns the windows of a policy's trial under its other plans, and those under the plan in force.
    pub fn trial_windows(&self) -> (Vec<WindowSpeeds>, Vec<WindowSpeeds>) {
        let is_own = |plan: &Plan| same_placement(plan, &self.current_plan, &self.live_tasks);
        let (own_legs, other_legs): (Vec<_>, Vec<_>) = self.legs.iter().partition(|(plan, _)| is_own(plan));
        let windows_of = |legs: Vec<&(Plan, Vec<WindowSpeeds>)>| {
            legs.into_iter().flat_map(|(_, windows_of_leg)| windows_of_leg.clone()).collect()
        };
        (windows_of(other_legs), windows_of(own_legs))
    }

    /// Makes the plan in force, which a trial of the policy measured with these windows, the reference of later
    /// changes.
    pub fn adopt(&mut self, windows: Vec<WindowSpeeds>) {
        let (plan, tasks, homes) = (self.current_plan.clone(), self.decided_for.clone(), self.homes.clone());
        self.reference = PlanRecord { plan, tasks, windows: windows.into(), homes };
        (self.trial, self.baseline) = (None, None);
        self.totals.clear();
        self.legs.clear();
    }

    /// Returns to the reference, or to the baseline, which then becomes the reference.
    pub fn revert(&mut self, to_baseline: bool) {
        self.trial = None;
        if let Some(baseline) = self.baseline.take_if(|_| to_baseline) {
            self.reference = baseline;
            self.totals.clear();
        }
    }

    /// Returns the number of measured windows that are missing for a comparison; `None` if there are enough, or if
    /// nothing has been measured for so long that a comparison is not expected.
    pub fn missing_windows(&self, compared: usize) -> Option<usize> {
        let measured = self.reference.windows.len();
        let hopeless = measured == 0 && self.observed_windows > SERIES * compared;
        let begun = self.trial.is_some() || measured >= MIN_REFERENCE || hopeless;
        (!begun).then(|| MIN_REFERENCE - measured)
    }

    /// Returns the tasks for which the plan in force was decided.
    pub fn deciding_tasks(&self) -> &LiveTasks {
        &self.decided_for
    }

    /// Returns the live tasks that the reference covers.
    pub fn known_tasks(&self) -> LiveTasks {
        self.reference.tasks.common_tasks(&self.live_tasks)
    }
}
