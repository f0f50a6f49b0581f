//! A policy under guard: a decision that measures worse than before, beyond noise, is taken back.
//!
//! Problem: forecasts err, and evidence grows old; an operator wants no decision to stay that made things worse. Method:
//! every task's speed is noted window by window (work reported, else instructions, else an event that stands in for work, per
//! second: [`crate::work`]). When what holds on the
//! machine changes, the windows before are the reference; after one window to settle, as many windows under the new plan
//! are compared: the mean over tasks of the logarithm of new over old median speed, weighted by priority. If it lies below
//! the smallest loss worth acting on *and* below twice its own standard error (from the spread of the windows on both
//! sides), the plan before comes back, and the one that failed stays out for a while.
//! Properties: pure; without speeds nothing is ever judged, and so nothing is taken back; tasks that come or go end a
//! trial without a verdict; probes and the window are the inner policy's own and pass through; says what it did.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{Decision, Event, Member, Observation, Plan, Policy, Reason, TaskId, View};

/// Begins the reason of every roll-back.
pub const ROLLED_BACK: &str = "rolled back:";

use crate::work::{Work, works};

/// A stand-in that varies more than this from window to window says nothing (standard deviation of its logarithm).
const STEADY: f64 = 0.25;

/// Speeds of one window, by task and by what they count.
type Speeds = BTreeMap<(TaskId, Work), f64>;

/// When a decision is taken back.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Guard {
    pub enabled: bool,
    /// Windows that are compared on each side.
    pub windows: usize,
    /// Smaller losses are not worth it (share).
    pub loss_at_least: f64,
    /// A plan that failed stays out for so many windows.
    pub keep_out_windows: u64,
}

impl Default for Guard {
    fn default() -> Self {
        Guard { enabled: true, windows: 5, loss_at_least: 0.03, keep_out_windows: 60 }
    }
}

/// A policy and its guard.
pub struct Guarded<P> {
    inner: P,
    guard: Guard,
    /// Speeds of the last windows under the plan in force.
    speeds: VecDeque<Speeds>,
    /// The tasks they are of.
    there: Vec<TaskId>,
    trial: Option<Trial>,
    /// Plans that failed, what was instead, and the window from which they may come again.
    out: Vec<(Plan, Plan, u64)>,
}

struct Trial {
    before: Plan,
    reference: Vec<Speeds>,
    /// Windows under the new plan, the first of which does not count.
    seen: usize,
}

/// How much faster the tasks are than before, as a natural logarithm, and how sure that is.
#[derive(Clone, PartialEq, Debug)]
pub struct Change {
    pub log_ratio: f64,
    pub standard_error: f64,
    /// Tasks that were judged by a stand-in, and by which.
    pub stood_in: Vec<(TaskId, Event)>,
}

impl<P: Policy> Guarded<P> {
    pub fn new(inner: P, guard: Guard) -> Self {
        Guarded { inner, guard, speeds: VecDeque::new(), there: Vec::new(), trial: None, out: Vec::new() }
    }

    /// Another policy, from the next window on; what failed before says nothing about it.
    pub fn replace(&mut self, inner: P, guard: Guard) {
        *self = Guarded::new(inner, guard);
    }

    /// Is a trial over with a loss? Then the plan that held before, and the change that was measured.
    fn verdict(&mut self, view: &View<'_>) -> Option<(Plan, Change)> {
        let there: Vec<TaskId> = view.seen.tasks.iter().filter(|task| !task.exited).map(|task| task.task).collect();
        if there != self.there {
            self.there = there;
            self.speeds.clear();
            self.trial = None;
        }
        let now = speeds_of(view.seen);
        if let Some(trial) = &mut self.trial {
            trial.seen += 1;
            if trial.seen == 1 {
                return None; // caches and queues settle
            }
        }
        if !now.is_empty() {
            self.speeds.push_back(now);
        }
        while self.speeds.len() > self.guard.windows {
            self.speeds.pop_front();
        }
        let trial = self.trial.as_ref().filter(|_| self.speeds.len() == self.guard.windows)?;
        let after: Vec<_> = self.speeds.iter().cloned().collect();
        let change = compare(&trial.reference, &after, view.seen);
        let trial = self.trial.take()?;
        let loss = change.log_ratio < -2.0 * change.standard_error
            && change.log_ratio < libm::log1p(-self.guard.loss_at_least.min(0.99));
        loss.then_some((trial.before, change))
    }

    fn keep_out(&self, plan: &Plan, window: u64) -> Option<&(Plan, Plan, u64)> {
        self.out.iter().find(|(failed, _, until)| same_placement(failed, plan) && window < *until)
    }
}

impl<P: Policy> Policy for Guarded<P> {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut decision = self.inner.decide(view);
        if !self.guard.enabled {
            return decision;
        }
        let window = view.seen.window;
        let verdict = self.verdict(view);
        self.out.retain(|(_, _, until)| window < *until);
        if let Some((before, change)) = verdict {
            let until = window + self.guard.keep_out_windows;
            self.out.push((view.before.clone(), before.clone(), until));
            decision.why.insert(0, taken_back(&change, self.guard, view));
            put_placement(&mut decision.plan, &before, view);
        } else if let Some((_, instead, until)) = self.keep_out(&decision.plan, window).cloned() {
            let text = format!("{ROLLED_BACK} the plan that made things worse stays out until window {until}");
            decision.why = vec![Reason { tasks: Vec::new(), text, numbers: Vec::new() }];
            put_placement(&mut decision.plan, &instead, view);
        }
        if !same_placement(&decision.plan, view.before) {
            let reference: Vec<_> = self.speeds.drain(..).collect();
            // Without a full reference nobody can say whether it became worse.
            let full = reference.len() == self.guard.windows;
            self.trial = full.then(|| Trial { before: view.before.clone(), reference, seen: 0 });
        }
        decision
    }
}

fn taken_back(change: &Change, guard: Guard, view: &View<'_>) -> Reason {
    let percent = 100.0 * libm::expm1(change.log_ratio);
    let arrived = view.seen.tasks.iter().map(|task| task.task);
    let tasks: Vec<TaskId> = arrived.filter(|task| view.before.allowed.contains_key(task)).collect();
    let text = format!(
        "{ROLLED_BACK} the programs run {percent:+.1} % since the last decision{}; it stays out for {} windows",
        by_stand_ins(&change.stood_in),
        guard.keep_out_windows
    );
    let numbers = vec![
        ("change_percent".to_string(), percent),
        ("standard_error_percent".to_string(), 100.0 * change.standard_error),
    ];
    Reason { tasks, text, numbers }
}

/// In words, which events stood in for work.
fn by_stand_ins(stood_in: &[(TaskId, Event)]) -> String {
    let mut names: Vec<&str> = stood_in.iter().map(|(_, event)| Work::StandIn(*event).words()).collect();
    names.sort_unstable();
    names.dedup();
    match stood_in.len() {
        0 => String::new(),
        count => format!(" ({count} of them judged by {}, as they report no work)", names.join(" and ")),
    }
}

/// The part of a plan that moves programs.
fn same_placement(a: &Plan, b: &Plan) -> bool {
    a.allowed == b.allowed && a.weights == b.weights && a.gangs == b.gangs && a.shares == b.shares
}

/// As far as it speaks of tasks that are still there; gangs and shares with somebody gone are left out whole.
fn put_placement(plan: &mut Plan, from: &Plan, view: &View<'_>) {
    let there = |task: &TaskId| view.seen.tasks.iter().any(|seen| seen.task == *task && !seen.exited && !seen.fixed);
    plan.allowed = from.allowed.iter().filter(|(task, _)| there(task)).map(|(t, c)| (*t, c.clone())).collect();
    plan.weights = from.weights.iter().filter(|(task, _)| there(task)).map(|(t, w)| (*t, *w)).collect();
    let whole = from.gangs.iter().flat_map(|s| &s.gangs).flat_map(|gang| &gang.members).all(|(task, _)| there(task));
    let movable = view.seen.tasks.iter().filter(|task| !task.exited && !task.fixed);
    let has_turn = |task: TaskId| {
        from.gangs.iter().flat_map(|s| &s.gangs).flat_map(|gang| &gang.members).any(|(member, _)| *member == task)
    };
    let complete = from.gangs.is_empty() || movable.map(|task| task.task).all(has_turn);
    plan.gangs = if whole && complete { from.gangs.clone() } else { Vec::new() };
    let lives = |member: &Member| match member {
        Member::Task(task) => there(task),
        Member::Process(process) => view.seen.tasks.iter().any(|seen| seen.process == *process && !seen.exited),
    };
    plan.shares = from.shares.iter().filter(|share| share.members.iter().all(lives)).cloned().collect();
}

/// Everything that says how fast a task went, per second.
fn speeds_of(seen: &Observation) -> Speeds {
    let seconds = seen.span.elapsed_ns as f64 / 1e9;
    let mut speeds = Speeds::new();
    for task in seen.tasks.iter().filter(|task| !task.exited && seconds > 0.0) {
        speeds.extend(works(task, seen.span.elapsed_ns).map(|(work, count)| ((task.task, work), count / seconds)));
    }
    speeds
}

/// Mean over tasks of ln(new median / old median), weighted by priority.
fn compare(before: &[Speeds], after: &[Speeds], seen: &Observation) -> Change {
    let (mut sum, mut variance, mut weights, mut stood_in) = (0.0, 0.0, 0.0, Vec::new());
    for task in &seen.tasks {
        let Some((work, old, new)) = Work::BEST_FIRST.iter().find_map(|&work| sides(before, after, task.task, work))
        else {
            continue;
        };
        if let Work::StandIn(event) = work {
            stood_in.push((task.task, event));
        }
        let weight = task.goal.map_or(1.0, |goal| goal.priority);
        sum += weight * (new.0 - old.0);
        variance += weight * weight * (old.1 + new.1);
        weights += weight;
    }
    if weights == 0.0 {
        return Change { log_ratio: 0.0, standard_error: f64::MAX, stood_in };
    }
    Change { log_ratio: sum / weights, standard_error: libm::sqrt(variance) / weights, stood_in }
}

/// A task's middle speed and its variance on both sides, where that kind of work was seen on both and, if it only stands
/// in, was steady before.
fn sides(before: &[Speeds], after: &[Speeds], task: TaskId, work: Work) -> Option<(Work, (f64, f64), (f64, f64))> {
    let of = |windows: &[Speeds]| {
        let logs: Vec<f64> = windows.iter().filter_map(|w| w.get(&(task, work)).map(|s| libm::log(*s))).collect();
        // A kind of work that shows now and then only is no measure of speed.
        (logs.len() >= 2 && 2 * logs.len() > windows.len()).then(|| (logs.len(), middle_and_variance(logs)))
    };
    let ((count, old), (_, new)) = of(before).zip(of(after))?;
    let spread = libm::sqrt(old.1 * count as f64 / std::f64::consts::FRAC_PI_2);
    (!matches!(work, Work::StandIn(_)) || spread <= STEADY).then_some((work, old, new))
}

/// Median, and the variance of a median of so many normal readings (pi/2 of the mean's).
fn middle_and_variance(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    let middle = (values[(count - 1) / 2] + values[count / 2]) / 2.0;
    let mean = values.iter().sum::<f64>() / count as f64;
    let spread = values.iter().map(|value| (value - mean) * (value - mean)).sum::<f64>() / (count - 1) as f64;
    (middle, std::f64::consts::FRAC_PI_2 * spread / count as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::check_policy;
    use crate::policies;
    use cachemate_core::*;

    struct Silent;
    impl Predictor for Silent {
        fn forecast(&self, _: &Topology, _: &Profiles, _: &Plan) -> Forecast {
            Forecast::default()
        }
    }

    /// Stays idle for seven windows, then wants task 0 on CPU 1 for ever.
    struct Wants;
    impl Policy for Wants {
        fn decide(&mut self, view: &View<'_>) -> Decision {
            let mut plan = Plan::idle(Window::Time { ns: 1 });
            if view.seen.window >= 7 {
                plan.allowed.insert(TaskId(0), [1].into_iter().collect());
            }
            Decision { plan, why: Vec::new() }
        }
    }

    fn seen(window: u64, works: &[f64]) -> Observation {
        let task = |(at, work): (usize, &f64)| TaskSeen {
            progress: (*work > 0.0).then_some(*work),
            ..TaskSeen::new(TaskId(at as u32), ProcessId(at as u32))
        };
        Observation {
            window,
            span: Span { start_ns: 0, elapsed_ns: 1_000_000_000, elapsed_cycles: None },
            ended: WindowEnd::Elapsed,
            tasks: works.iter().enumerate().map(task).collect(),
            places: Vec::new(),
            answers: Vec::new(),
            in_force: Applied::default(),
        }
    }

    /// Windows in which the decision held, when its speed is `factor` times that before, with some noise.
    fn held(factor: f64, noise: f64, guard: Guard) -> Vec<u64> {
        let cpu = |id| Cpu { id: CpuId(id), core: id, package: 0, memory_node: 0, online: true, hertz: None };
        let topology = Topology { cpus: vec![cpu(0), cpu(1)], caches: Vec::new() };
        let capabilities = Capabilities {
            abilities: BTreeMap::new(),
            partitions: Vec::new(),
            shortest_window_ns: 1,
            shortest_slice_ns: None,
        };
        let (mut guarded, profiles) = (Guarded::new(Wants, guard), Profiles::new());
        let mut before = Plan::idle(Window::Time { ns: 1 });
        let mut held = Vec::new();
        let mut generator = crate::rng::SplitMix64::new(1);
        for window in 0..60 {
            let moved = !before.allowed.is_empty();
            let speed = if factor == 0.0 { 0.0 } else { 100.0 * if moved { factor } else { 1.0 } };
            let mut noisy = || speed * (1.0 + noise * (generator.unit() - 0.5));
            let observation = seen(window, &[noisy(), noisy()]);
            let view = View {
                topology: &topology,
                capabilities: &capabilities,
                seen: &observation,
                profiles: &profiles,
                before: &before,
                predictor: &Silent,
            };
            before = guarded.decide(&view).plan;
            if !before.allowed.is_empty() {
                held.push(window);
            }
        }
        held
    }

    const GUARD: Guard = Guard { enabled: true, windows: 5, loss_at_least: 0.03, keep_out_windows: 20 };

    /// Is a decision that costs a fifth taken back after its trial, kept out for its time, and tried again afterwards?
    #[test]
    fn a_decision_that_hurts_is_taken_back_and_kept_out() {
        let held = held(0.8, 0.05, GUARD);
        assert_eq!(&held[..7], [7, 8, 9, 10, 11, 12, 33], "{held:?}");
    }

    /// Does one that helps stay, one within the noise too, and one that nobody can measure?
    #[test]
    fn what_helps_or_cannot_be_told_stays() {
        for (factor, noise) in [(1.2, 0.05), (0.99, 0.02), (0.9, 1.0), (0.0, 0.0)] {
            assert_eq!(held(factor, noise, GUARD).len(), 53, "{factor} {noise}");
        }
        assert_eq!(held(0.5, 0.0, Guard { enabled: false, ..GUARD }).len(), 53);
    }

    /// Do system calls stand in where no work is reported, say so, and only where they are steady?
    #[test]
    fn stand_ins_judge_where_they_are_steady() {
        let side = |rates: &[f64]| -> Vec<Speeds> {
            let calls = Work::StandIn(Event::SystemCalls);
            rates.iter().map(|rate| Speeds::from([((TaskId(0), calls), *rate)])).collect()
        };
        let tasks = seen(0, &[0.0]);
        let change = compare(&side(&[100.0, 104.0, 98.0]), &side(&[50.0, 51.0, 50.0]), &tasks);
        assert_eq!(change.stood_in, [(TaskId(0), Event::SystemCalls)]);
        assert!((change.log_ratio + core::f64::consts::LN_2).abs() < 0.01, "{change:?}");
        assert!(by_stand_ins(&change.stood_in).contains("1 of them judged by system calls"));
        let unsteady = compare(&side(&[100.0, 10.0, 300.0]), &side(&[50.0, 51.0, 50.0]), &tasks);
        assert_eq!((unsteady.log_ratio, unsteady.standard_error), (0.0, f64::MAX));
    }

    /// Does a guarded policy keep what every policy must?
    #[test]
    fn guarded_policies_conform() {
        for entry in policies::ENTRIES {
            let make = |seed| {
                let inner = policies::build(entry.name, "", seed).unwrap();
                Box::new(Guarded::new(inner, Guard { windows: 2, ..Guard::default() })) as Box<dyn Policy>
            };
            check_policy(&make, 20).unwrap_or_else(|broken| panic!("guarded '{}': {broken}", entry.name));
        }
    }
}
