//! The speeds of every process, with the plan under which they were measured.
//!
//! The *reference* is the last settled state: its plan, and the speeds of its last windows. A change of the plan puts
//! the new state on *trial*, together with any further changes, until one plan has been in force long enough to be
//! compared, or the whole series has. A state that is kept becomes the next reference. The *baseline* is the reference
//! before the first small loss that was kept: the changes of each process are summed from there, so that small losses
//! do not accumulate unnoticed.
//!
//! Tasks arrive and exit, so plans are compared for the tasks that are in both, and speeds by process. The window in
//! which a process arrived does not count for it.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{Observation, Plan, PlanItem, ProcessId, View};

use super::comparison::CumulativeSpeedup;
use super::home_restore::{HomeCpus, record_last_cpus};
use super::live_tasks::{LiveTasks, is_same_placement};
use super::speeds::{WindowSpeeds, is_disturbing, measure_speeds};

/// Number of reference windows kept for the noise, and of windows back at the reference after which a trial is
/// forgotten, in multiples of the windows compared.
const REFERENCE_LENGTHS: usize = 4;
/// Number of windows after which a series of changes is compared as a whole, in multiples of the windows compared.
const SERIES_LENGTHS: usize = 3;
/// Longest wait for slow actions and for the end of disturbing probes, in multiples of the windows compared.
const MAX_PENDING_LENGTHS: usize = 10;
/// Smallest number of windows of a reference.
const MIN_REFERENCE_WINDOWS: usize = 2;

/// A plan that was in force, its processes, and their speeds.
#[derive(Clone, Debug)]
pub struct PlanRecord {
    pub plan: Plan,
    pub tasks: LiveTasks,
    pub windows: VecDeque<WindowSpeeds>,
    /// CPUs of the cache on which each of the plan's tasks ran most, in the last window in which it ran.
    pub last_cpus: HomeCpus,
}

/// The state since the reference was left.
#[derive(Clone, Debug)]
struct TrialPlanRecord {
    /// The latest plan.
    plan: Plan,
    /// Settled windows under that plan, which are compared if there are enough.
    windows_under_plan: VecDeque<WindowSpeeds>,
    /// Settled windows since the reference was left, for plans that change too often to be compared one by one.
    settled_windows: Vec<WindowSpeeds>,
    /// All measured windows since, in case nothing settles.
    windows_since: Vec<WindowSpeeds>,
    /// Number of windows, including those in which nothing was measured.
    window_count: usize,
    /// Number of windows for which the reference has been in force again.
    windows_back_at_reference: usize,
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
    current_plan: Plan,
    /// CPUs on which tasks ran last, under any plan.
    last_cpus: HomeCpus,
    /// Processes for which the plan was decided. Tasks that arrived later are placed by the next plan; that placement
    /// does not count as a change.
    deciding_tasks: LiveTasks,
    live_tasks: LiveTasks,
    /// Number of windows since the placement was changed; `None` if settled.
    settling_windows: Option<usize>,
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
            last_cpus: HomeCpus::new(),
        };

        History {
            current_plan: reference.plan.clone(),
            last_cpus: HomeCpus::new(),
            deciding_tasks: LiveTasks::default(),
            live_tasks: LiveTasks::default(),
            reference,
            baseline: None,
            totals: BTreeMap::new(),
            trial: None,
            settling_windows: None,
            observed_windows: 0,
            disturbed_windows: 0,
        }
    }

    /// Observes a window under the plan that was decided before it. Returns whether a speed was measured.
    pub fn observe(&mut self, view: &View<'_>, trial_windows: usize) -> bool {
        self.observed_windows += 1;
        record_last_cpus(&mut self.last_cpus, view);
        let live_tasks = LiveTasks::from_samples(&view.observation.tasks);
        let common_tasks = live_tasks.intersection(&self.live_tasks);
        if !is_same_placement(
            view.previous_plan,
            &self.current_plan,
            &common_tasks.intersection(&self.deciding_tasks),
        ) {
            self.settling_windows = Some(0);
        }

        let is_settled = self.advance_settling(view.observation, trial_windows);
        let mut speeds = measure_speeds(view);
        speeds.retain(|process, _| common_tasks.processes.contains(process));
        let is_disturbed = self.record_disturbance(view.previous_plan, trial_windows);
        let is_measured = !is_disturbed && speeds.values().any(|speed| !speed.log_rates.is_empty());
        let known_tasks = common_tasks.intersection(&self.reference.tasks);
        let lacks_reference =
            self.trial.is_none() && self.reference.windows.len() < MIN_REFERENCE_WINDOWS;
        if lacks_reference
            || is_same_placement(view.previous_plan, &self.reference.plan, &known_tasks)
        {
            // If the plan changes all the time from the start, changing is the normal state.
            self.extend_reference(
                view,
                speeds,
                is_measured && (is_settled || lacks_reference),
                trial_windows,
            );
        } else {
            self.record_trial_window(
                view.previous_plan,
                &common_tasks.intersection(&self.deciding_tasks),
                speeds,
                is_settled,
                is_measured,
            );
        }
        self.current_plan = view.previous_plan.clone();
        self.deciding_tasks = std::mem::replace(&mut self.live_tasks, live_tasks);
        is_measured
    }

    /// Whether probes of this plan stopped or slowed programs in the window. Probes that go on
    /// are the normal state after a while, and do not count as a disturbance then.
    fn record_disturbance(&mut self, plan: &Plan, trial_windows: usize) -> bool {
        let has_disturbing_probe = plan.probes.iter().any(|probe| is_disturbing(&probe.kind));
        self.disturbed_windows = if has_disturbing_probe {
            self.disturbed_windows + 1
        } else {
            0
        };
        has_disturbing_probe && self.disturbed_windows <= MAX_PENDING_LENGTHS * trial_windows
    }

    /// Whether a plan other than the reference is in force.
    pub fn is_on_trial(&self) -> bool {
        self.trial
            .as_ref()
            .is_some_and(|trial| trial.windows_back_at_reference == 0)
    }

    /// Counts a window of settling. Returns whether the machine has applied the plan and has had one window for caches
    /// and queues to settle.
    fn advance_settling(&mut self, observation: &Observation, trial_windows: usize) -> bool {
        let Some(settling_windows) = &mut self.settling_windows else {
            return true;
        };
        *settling_windows += 1;
        let is_acting = |item: &PlanItem| !matches!(item, PlanItem::Probe(_) | PlanItem::Window);
        let is_pending = observation
            .applied
            .pending
            .iter()
            .any(|pending| is_acting(&pending.item));
        if *settling_windows > 1
            && (!is_pending || *settling_windows > MAX_PENDING_LENGTHS * trial_windows)
        {
            self.settling_windows = None;
        }
        self.settling_windows.is_none()
    }

    fn extend_reference(
        &mut self,
        view: &View<'_>,
        speeds: WindowSpeeds,
        is_counted: bool,
        trial_windows: usize,
    ) {
        self.reference.plan = view.previous_plan.clone();
        self.reference.tasks = self.live_tasks.clone();
        self.reference.last_cpus = self.last_cpus.clone();
        if is_counted {
            self.reference.windows.push_back(speeds);
        }

        while self.reference.windows.len() > REFERENCE_LENGTHS * trial_windows {
            self.reference.windows.pop_front();
        }

        // A trial continues if the reference was in force again only temporarily.
        if let Some(trial) = &mut self.trial {
            trial.windows_back_at_reference += 1;
        }
        self.trial
            .take_if(|trial| trial.windows_back_at_reference > REFERENCE_LENGTHS * trial_windows);
    }

    fn record_trial_window(
        &mut self,
        plan: &Plan,
        common_tasks: &LiveTasks,
        speeds: WindowSpeeds,
        is_settled: bool,
        is_measured: bool,
    ) {
        let trial = self.trial.get_or_insert_with(|| TrialPlanRecord {
            plan: plan.clone(),
            windows_under_plan: VecDeque::new(),
            settled_windows: Vec::new(),
            windows_since: Vec::new(),
            window_count: 0,
            windows_back_at_reference: 0,
        });
        if !is_same_placement(plan, &trial.plan, common_tasks) {
            trial.windows_under_plan.clear();
        }

        trial.plan = plan.clone();
        (trial.window_count, trial.windows_back_at_reference) = (trial.window_count + 1, 0);
        if is_measured {
            trial.windows_since.push(speeds.clone());
        }

        if is_measured && is_settled {
            trial.settled_windows.push(speeds.clone());
            trial.windows_under_plan.push_back(speeds);
        }
    }

    /// The windows by which the plan on trial can be judged now; `None` if there are not enough yet, or there is no
    /// trial.
    pub fn windows_to_compare(&self, trial_windows: usize) -> Option<Vec<WindowSpeeds>> {
        let trial = self
            .trial
            .as_ref()
            .filter(|trial| trial.windows_back_at_reference == 0)?;
        if trial.windows_under_plan.len() >= trial_windows {
            return Some(trial.windows_under_plan.iter().cloned().collect());
        }
        let is_series_complete = trial.window_count >= SERIES_LENGTHS * trial_windows;
        let windows = if trial.settled_windows.len() >= trial_windows {
            &trial.settled_windows
        } else {
            &trial.windows_since
        };
        is_series_complete.then(|| windows.clone())
    }

    /// Makes the state on trial the reference. `totals` covers all compared processes; without it, the sums start anew
    /// from this state, because it is no worse than the baseline or pays for a goal.
    pub fn accept(
        &mut self,
        windows: Vec<WindowSpeeds>,
        totals: Option<BTreeMap<ProcessId, CumulativeSpeedup>>,
    ) {
        let (plan, tasks, last_cpus) = (
            self.current_plan.clone(),
            self.deciding_tasks.clone(),
            self.last_cpus.clone(),
        );
        let state = PlanRecord {
            plan,
            tasks,
            windows: windows.into(),
            last_cpus,
        };
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

    /// Goes back to the reference, or to the baseline, which then becomes the reference.
    pub fn revert(&mut self, reverts_to_baseline: bool) {
        self.trial = None;
        if let Some(baseline) = self.baseline.take_if(|_| reverts_to_baseline) {
            self.reference = baseline;
            self.totals.clear();
        }
    }

    /// The number of measured windows that are missing for a comparison; `None` if there are enough, or if nothing has
    /// been measured for so long that none is expected.
    pub fn missing_windows(&self, trial_windows: usize) -> Option<usize> {
        let measured_windows = self.reference.windows.len();
        let is_unmeasurable =
            measured_windows == 0 && self.observed_windows > SERIES_LENGTHS * trial_windows;
        let has_reference =
            self.trial.is_some() || measured_windows >= MIN_REFERENCE_WINDOWS || is_unmeasurable;
        (!has_reference).then(|| MIN_REFERENCE_WINDOWS - measured_windows)
    }

    /// The tasks for which the plan in force was decided.
    pub fn deciding_tasks(&self) -> &LiveTasks {
        &self.deciding_tasks
    }

    /// The live tasks that the reference covers.
    pub fn known_tasks(&self) -> LiveTasks {
        self.reference.tasks.intersection(&self.live_tasks)
    }
}
