//! Co-runs without a PMU: aggressors are kept away from their victims, in space or in time.
//!
//! Problem: on a virtual machine nobody counts misses, and the kernel's word on who shares a cache need not hold from
//! one minute to the next. Method: the machine is asked three things, a probe at a time. Cache-line ping-pong tells
//! which CPUs share a cache *now*; evicted lines tell each active task's intensity; a stream of our own beside it tells
//! its sensitivity. What `i` suffers beside `j` is taken as the product of `i`'s sensitivity and `j`'s intensity
//! (Pain's form, CA 2.2.4, with measured factors). Then, cache by cache as measured:
//! - with several caches, the solver spreads tasks over them so that the sum of what they suffer is least;
//! - with one cache and more tasks than CPUs, the same solver forms gangs that take turns on it (balance-set's idea with
//!   another criterion), where that takes enough of the harm away;
//! - where measured CPUs share nothing there is nothing to gain, and nothing is done.
//!
//! Properties: without evidence about every active task, or about who shares, what is in force stays; a single ping-pong
//! decides nothing (two of the last three); every gang has equal turns, and every movable task is in one; probing takes
//! one survey's time and then a quarter of a per cent of the processors' at most, and none where there is nothing to choose.

mod gangs;

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{
    CpuId, CpuSet, Decision, Fact, Neighbor, Plan, Policy, ProbeEvidence, ProbeId, ProbeKind, ProbeRequest, Reason,
    ReasonKind, TaskId, TaskSample, View, WindowLength,
};
use cachemate_locality::profilers::EVICTED_SAMPLES_AT_LEAST;
use serde::Deserialize;

use self::gangs::OvercommittedCache;
use super::ParameterError;
use crate::gang_quantum::MAX_WAIT_NS;
use crate::solvers::{Seats, best};

/// Parameters, with what they were chosen for.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// A gang's turn. Absent: by the law of turns ([`crate::gang_quantum`]), or 50 ms where nobody's footprint is known.
    pub slice_ns: Option<u64>,
    /// Gangs are refused where turns that pay make a task wait longer than this.
    pub max_wait_ns: u64,
    /// Samples beside each task.
    pub samples: u32,
    /// Processor time of one probe at most.
    pub probe_ns: u64,
    /// Round trips below this are within one cache; from `split_min_ns` across two.
    pub shared_max_ns: f64,
    pub split_min_ns: f64,
    /// Mean slowdown that gangs must take away to be worth their turns.
    pub min_gain: f64,
    /// More tasks than this are not ganged: the turns of a full circle would be too far apart.
    pub max_ganged: usize,
    /// Tasks that use less of a CPU are not probed, and count as quiet.
    pub min_cpu_share: f64,
    /// Windows after which a task is probed again; 0 = never.
    pub probe_again_windows: u64,
    /// Processor time that the first survey may take, for each task. On a host a bracket's phases are long (150 ms):
    /// the two probes of a task take 1.8 s with an 8 MiB cache, the time that they keep it off its CPU included.
    pub survey_ns: u64,
    /// Share of all processor time that probing may take besides. Programs that a probe keeps off its CPUs lose about twice
    /// that again (measured in the simulator), so that a quarter of a per cent costs them less than one.
    pub max_probe_share: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 1_000_000_000,
            slice_ns: None,
            max_wait_ns: MAX_WAIT_NS,
            samples: 8,
            probe_ns: 4_000_000_000,
            shared_max_ns: 160.0,
            split_min_ns: 200.0,
            min_gain: 0.05,
            max_ganged: 16,
            min_cpu_share: 0.1,
            probe_again_windows: 0,
            survey_ns: 3_000_000_000,
            max_probe_share: 0.0025,
        }
    }
}

/// Ping-pongs that are remembered of every pair of CPUs.
const REMEMBERED: usize = 3;
/// Windows after which a probe that came to nothing is asked for again.
const RETRY_WINDOWS: u64 = 120;
/// Pairs asked about in one window.
const PAIRS_AT_MOST: usize = 16;

struct IntensityGangs {
    parameters: Parameters,
    next_probe: u32,
    /// Answers for each pair of CPUs: near or far, latest last.
    pairs: BTreeMap<(u32, u32), VecDeque<bool>>,
    /// Tasks whose sensitivity was asked for, and when; not every task can tell.
    sensitivity_asked: BTreeMap<TaskId, u64>,
    intensity_asked: BTreeMap<TaskId, u64>,
    /// The task's probe under way.
    asked: Option<ProbeRequest>,
    /// Ping-pongs under way, and when they were asked for.
    pinging: Vec<ProbeRequest>,
    pinged_ns: Option<u64>,
    ledger: ProbeBudget,
}

/// Processor time that probing has taken, and when it began.
#[derive(Clone, Copy, Debug, Default)]
struct ProbeBudget {
    started_ns: Option<u64>,
    spent_ns: u64,
}

impl ProbeBudget {
    fn charge_probes(&mut self, view: &View<'_>) {
        self.started_ns.get_or_insert(view.observation.span.start_ns);
        let costs = view.observation.probe_results.iter().flat_map(|answer| &answer.cost_ns);
        self.spent_ns += costs.map(|(_, ns)| ns).sum::<u64>();
    }

    /// Is there something left of a share of all time since the start? What is asked for the first time has a survey's worth
    /// for each task besides; what is asked again waits until that has been made up for.
    fn allows(&self, first: bool, view: &View<'_>, parameters: &Parameters) -> bool {
        let tasks = if first { view.movable().count() as u64 } else { 0 };
        let survey_ns = parameters.survey_ns.saturating_mul(tasks);
        let since_ns = now_ns(view).saturating_sub(self.started_ns.unwrap_or(0));
        let share_ns = parameters.max_probe_share * since_ns as f64 * f64::from(view.online().count());
        (self.spent_ns as f64) <= survey_ns as f64 + share_ns
    }
}

fn now_ns(view: &View<'_>) -> u64 {
    view.observation.span.start_ns + view.observation.span.elapsed_ns
}

impl Policy for IntensityGangs {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = view.previous_plan.clone();
        plan.window = WindowLength::Time { ns: self.parameters.window_ns };
        self.carry_over(view, &mut plan);
        self.ledger.charge_probes(view);
        self.learn(view);
        self.ping(view);
        plan.probes.clone_from(&self.pinging);
        let mut why = Vec::new();
        match self.sharing(view) {
            Some(domains) => self.place(view, &domains, &mut plan, &mut why),
            None => why.push(reason(&[], "who shares a cache is being measured".to_string(), Vec::new())),
        }
        plan.probes.extend(self.asked.clone());
        Decision { plan, reasons: why }
    }
}

/// One program, or one cache with a CPU for each: no evidence could change anything.
fn nothing_to_choose(domains: &[CpuSet], shared: &[&CpuSet], active: &[TaskId]) -> bool {
    match (domains, shared) {
        ([_], [cpus]) => active.len() <= cpus.count() as usize,
        _ => active.len() <= 1,
    }
}

fn reason(tasks: &[TaskId], text: String, numbers: Vec<(String, f64)>) -> Reason {
    Reason { kind: ReasonKind::Explanation, tasks: tasks.to_vec(), text, numbers }
}

impl IntensityGangs {
    /// What is in force, as far as it may still stand: tasks that are gone leave, and gangs that lack somebody end.
    fn carry_over(&self, view: &View<'_>, plan: &mut Plan) {
        let there: Vec<TaskId> = view.movable().map(|task| task.task).collect();
        plan.affinity.retain(|task, _| there.contains(task));
        plan.weights.clear();
        plan.penalties.clear();
        let members = plan.gangs.iter().flat_map(|s| &s.gangs).flat_map(|gang| &gang.members);
        let mut ganged: Vec<TaskId> = members.map(|(task, _)| *task).collect();
        ganged.sort_unstable();
        let mut all = there.clone();
        all.sort_unstable();
        if ganged != all {
            plan.gangs.clear();
        }
    }

    /// Takes the window's answers in.
    fn learn(&mut self, view: &View<'_>) {
        for answer in &view.observation.probe_results {
            match &answer.evidence {
                ProbeEvidence::PingPong { cpus, round_trip_ns } => {
                    let near = *round_trip_ns < self.parameters.shared_max_ns;
                    if near || *round_trip_ns >= self.parameters.split_min_ns {
                        let history = self.pairs.entry((cpus.0.0, cpus.1.0)).or_default();
                        history.push_back(near);
                        if history.len() > REMEMBERED {
                            history.pop_front();
                        }
                    }
                }
                ProbeEvidence::PrimeProbe { task, .. } => {
                    self.intensity_asked.insert(*task, view.observation.window);
                }
                ProbeEvidence::NeighborSlowdown { task, .. } => {
                    self.sensitivity_asked.insert(*task, view.observation.window);
                }
                _ => {}
            }
            let answered = |probe: &mut ProbeRequest| answer.complete && probe.id == answer.probe;
            self.asked.take_if(answered);
            self.pinging.retain(|probe| !answer.complete || probe.id != answer.probe);
        }
        let there = |task: &TaskId| view.movable().any(|seen| seen.task == *task);
        self.sensitivity_asked.retain(|task, _| there(task));
        self.intensity_asked.retain(|task, _| there(task));
        let refused = |probe: &mut ProbeRequest| {
            let items = view.observation.applied.refused.iter().map(|refused| &refused.item);
            items.into_iter().any(|item| *item == cachemate_core::PlanItem::Probe(probe.id))
        };
        self.pinging.retain_mut(|probe| !refused(probe));
        if let Some(refused) = self.asked.take_if(refused) {
            // It will not be answered: not asked again before its time.
            match refused.kind {
                ProbeKind::PrimeProbe { task, .. } => self.intensity_asked.insert(task, view.observation.window),
                ProbeKind::Neighbor { task, .. } => self.sensitivity_asked.insert(task, view.observation.window),
                _ => None,
            };
        }
        self.asked.take_if(|probe| match probe.kind {
            ProbeKind::PrimeProbe { task, .. } | ProbeKind::Neighbor { task, .. } => !there(&task),
            _ => true,
        });
    }

    fn id(&mut self) -> ProbeId {
        self.next_probe = self.next_probe.wrapping_add(1) & 0x7fff_ffff;
        ProbeId(self.next_probe)
    }

    /// The first CPU of every cache against its others: again and again, as caches of virtual machines change, but once in
    /// a window's time at most. Windows end when probes are answered, so their number is no measure of time.
    fn ping(&mut self, view: &View<'_>) {
        let early = self.pinged_ns.is_some_and(|at| now_ns(view) < at + self.parameters.window_ns);
        let first = self.sharing(view).is_none();
        if early || !self.pinging.is_empty() || !self.ledger.allows(first, view, &self.parameters) {
            return;
        }
        self.pinged_ns = Some(now_ns(view));
        self.pinging = self.ping_pongs(view);
    }

    fn ping_pongs(&mut self, view: &View<'_>) -> Vec<ProbeRequest> {
        let mut wanted = Vec::new();
        for domain in view.last_level_domains() {
            let first = domain.first().unwrap_or(0);
            wanted.extend(domain.iter().filter(|cpu| *cpu != first).map(|cpu| (CpuId(first), CpuId(cpu))));
        }
        // Those that least is known of first; every pair gets its turn.
        wanted.sort_by_key(|(a, b)| self.pairs.get(&(a.0, b.0)).map_or(0, VecDeque::len));
        wanted.truncate(PAIRS_AT_MOST);
        let budget_ns = 100_000_000;
        wanted
            .into_iter()
            .map(|cpus| ProbeRequest { id: self.id(), kind: ProbeKind::PingPong { cpus }, budget_ns })
            .collect()
    }

    /// CPUs that share a cache by measurement; `None` while it is not known.
    fn sharing(&self, view: &View<'_>) -> Option<Vec<CpuSet>> {
        let mut measured = Vec::new();
        for domain in view.last_level_domains() {
            let first = domain.first()?;
            let mut together: CpuSet = [first].into_iter().collect();
            let mut apart = Vec::new();
            for cpu in domain.iter().filter(|cpu| *cpu != first) {
                let history = self.pairs.get(&(first, cpu)).filter(|told| told.len() >= 2)?;
                let near = history.iter().filter(|near| **near).count();
                if 2 * near > history.len() {
                    together.insert(cpu);
                } else {
                    apart.push([cpu].into_iter().collect());
                }
            }
            measured.push(together);
            measured.extend(apart);
        }
        Some(measured)
    }

    fn place(&mut self, view: &View<'_>, domains: &[CpuSet], plan: &mut Plan, why: &mut Vec<Reason>) {
        let shared: Vec<&CpuSet> = domains.iter().filter(|cpus| cpus.count() > 1).collect();
        if shared.is_empty() {
            let text = "by measurement no two CPUs share a cache now: nothing is done".to_string();
            why.push(reason(&[], text, vec![("caches".to_string(), domains.len() as f64)]));
            plan.gangs.clear();
            plan.affinity.clear();
            return;
        }
        let tasks: Vec<&TaskSample> = view.movable().collect();
        let active: Vec<TaskId> =
            tasks.iter().filter(|task| self.is_active(view, task)).map(|task| task.task).collect();
        if nothing_to_choose(domains, &shared, &active) {
            let text =
                "every active program has a CPU of the one shared cache, or there is one program: nothing to choose"
                    .to_string();
            why.push(reason(&[], text, Vec::new()));
            plan.gangs.clear();
            plan.affinity.clear();
            self.asked = None;
            return;
        }
        if self.request_next_probe(view, &active, why) {
            return; // evidence first; what is in force stays
        }
        let Some(costs) = costs(view, &active) else {
            let text = "no task's sensitivity was measured, or no task's intensity: nothing is decided".to_string();
            why.push(reason(&[], text, Vec::new()));
            return;
        };
        if domains.len() > 1 {
            self.spread(view, domains, &active, &costs, plan, why);
        } else if let [cpus] = shared[..] {
            let crowd = OvercommittedCache { view, cpus, tasks: &tasks, active: &active, costs: &costs };
            crowd.gang(&self.parameters, plan, why);
        }
    }

    fn is_active(&self, view: &View<'_>, task: &TaskSample) -> bool {
        let ran = task.ran_ns();
        let waited = task.run_queue_wait_ns.unwrap_or(0);
        let known = self.intensity_asked.contains_key(&task.task);
        known || (ran + waited) as f64 >= self.parameters.min_cpu_share * view.observation.span.elapsed_ns as f64
    }

    /// Asks for the next thing that is not known of the active tasks; false = everything was asked.
    fn request_next_probe(&mut self, view: &View<'_>, active: &[TaskId], why: &mut Vec<Reason>) -> bool {
        let again = self.parameters.probe_again_windows;
        // What came to nothing (the CPUs were apart, the task could not tell) is tried again, but seldom.
        let period = if again > 0 { again } else { RETRY_WINDOWS };
        let due = |asked: Option<&u64>| asked.is_none_or(|at| view.observation.window >= at + period);
        let first = active
            .iter()
            .any(|task| !self.intensity_asked.contains_key(task) || !self.sensitivity_asked.contains_key(task));
        if self.asked.is_none() && self.ledger.allows(first, view, &self.parameters) {
            let evicted = |task| ProbeKind::PrimeProbe { task, samples: self.parameters.samples };
            // Beside the hardest aggressor there is; scaled by the intensity that the others really have.
            let stream = |task| ProbeKind::Neighbor { task, neighbor: Neighbor::Stream };
            let has = |task: &TaskId, of: fn(&cachemate_core::Profile) -> bool| view.profiles.get(task).is_some_and(of);
            let without_intensity = active.iter().find(|task| {
                due(self.intensity_asked.get(task))
                    && (again > 0 || !has(task, |profile| profile.contention.intensity.is_some()))
            });
            // Where nobody's intensity is known, sensitivity decides nothing.
            let known = active.iter().any(|task| has(task, |profile| profile.contention.intensity.is_some()));
            let without_sensitivity = active.iter().filter(|_| known).find(|task| {
                due(self.sensitivity_asked.get(task))
                    && (again > 0 || !has(task, |profile| profile.contention.sensitivity.is_some()))
            });
            let what =
                without_intensity.map(|task| evicted(*task)).or_else(|| without_sensitivity.map(|task| stream(*task)));
            let budget_ns = self.parameters.probe_ns;
            if let Some(what) = what {
                self.asked = Some(ProbeRequest { id: self.id(), kind: what, budget_ns });
            }
        }
        let Some(open_probe) = &self.asked else { return false };
        let (task, what) = match open_probe.kind {
            ProbeKind::PrimeProbe { task, .. } => (task, "intensity"),
            ProbeKind::Neighbor { task, .. } => (task, "sensitivity"),
            _ => return true,
        };
        why.push(reason(&[task], format!("the {what} of {{0}} is being probed"), Vec::new()));
        true
    }

    fn spread(
        &self,
        view: &View<'_>,
        domains: &[CpuSet],
        active: &[TaskId],
        costs: &[Vec<f64>],
        plan: &mut Plan,
        why: &mut Vec<Reason>,
    ) {
        let seats = Seats { cpus_per_cache: domains.iter().map(CpuSet::count).collect() };
        let solved = best(costs, &seats);
        plan.gangs.clear();
        plan.affinity.clear();
        for (cpus, members) in domains.iter().zip(&solved.seating.by_cache) {
            for &member in members.iter().flatten() {
                plan.affinity.insert(active[member], cpus.clone());
            }
        }
        let suffered = solved.seating.costs_by_program(costs);
        for (at, task) in active.iter().enumerate() {
            let cpus = &plan.affinity[task];
            let numbers = vec![("expected_degradation".to_string(), suffered[at])];
            let percent = 100.0 * suffered[at];
            let text =
                format!("{{0}} goes to CPUs {cpus}: {percent:.0} % slower there, by the probes{}", known(view, *task));
            why.push(reason(&[*task], text, numbers));
        }
    }
}

/// What was probed of it, in brackets.
fn known(view: &View<'_>, task: TaskId) -> String {
    let profile = view.profiles.get(&task);
    let intensity = profile.and_then(|profile| profile.contention.intensity);
    let sensitivity = profile.and_then(|profile| profile.contention.sensitivity);
    match (intensity, sensitivity) {
        (Some(intensity), Some(sensitivity)) => {
            format!(" (intensity {:.2}, sensitivity {:.2})", intensity.value, sensitivity.value)
        }
        (Some(intensity), None) => format!(" (intensity {:.2})", intensity.value),
        (None, Some(sensitivity)) => format!(" (sensitivity {:.2})", sensitivity.value),
        (None, None) => String::new(),
    }
}

/// What each suffers beside each other; `None` while nobody's sensitivity or nobody's intensity is known. A task of unknown sensitivity cannot
/// be said to suffer, one of unknown intensity cannot be said to hurt.
fn costs(view: &View<'_>, active: &[TaskId]) -> Option<Vec<Vec<f64>>> {
    let value = |task: &TaskId, of: fn(&cachemate_core::Profile) -> Option<Fact<f64>>| {
        view.profiles.get(task).and_then(of).map(|fact| fact.value.max(0.0))
    };
    let sensitivity: Vec<Option<f64>> =
        active.iter().map(|task| value(task, |profile| profile.contention.sensitivity)).collect();
    let intensity: Vec<Option<f64>> =
        active.iter().map(|task| value(task, |profile| profile.contention.intensity)).collect();
    let known = |values: &[Option<f64>]| values.iter().any(Option::is_some);
    (known(&sensitivity) && known(&intensity)).then(|| {
        let cost = |own: Option<f64>, other: Option<f64>| own.zip(other).map_or(0.0, |(own, other)| own * other);
        sensitivity.iter().map(|own| intensity.iter().map(|other| cost(*own, *other)).collect()).collect()
    })
}

/// See the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters: Parameters = super::parameters(parameters)?;
    let slice_ns = parameters.slice_ns.unwrap_or(1);
    for (name, value) in [("window_ns", parameters.window_ns), ("slice_ns", slice_ns)] {
        if value == 0 {
            return Err(ParameterError::value(name, "0", "1 or more"));
        }
    }
    // With fewer no intensity would ever be known.
    if (parameters.samples as usize) < EVICTED_SAMPLES_AT_LEAST {
        let expected = format!("{EVICTED_SAMPLES_AT_LEAST} or more");
        return Err(ParameterError::value("samples", parameters.samples, expected));
    }
    if !(0.0..=1.0).contains(&parameters.max_probe_share) {
        return Err(ParameterError::value("max_probe_share", parameters.max_probe_share, "a share from 0 to 1"));
    }
    Ok(Box::new(IntensityGangs {
        parameters,
        next_probe: 0,
        pairs: BTreeMap::new(),
        sensitivity_asked: BTreeMap::new(),
        intensity_asked: BTreeMap::new(),
        asked: None,
        pinging: Vec::new(),
        pinged_ns: None,
        ledger: ProbeBudget::default(),
    }))
}

#[cfg(test)]
mod tests;
