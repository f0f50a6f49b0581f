//! Confinement of services that a pause has measured to slow a promised service down: they share a few ways.
//!
//! Problem: programs that live shorter than a log of their misses takes have no curve, so no search can divide a cache
//! between them and others. Method: a pause ([`super::evidence::service_pauses`]) measures the speed of a service with
//! a promised slowdown without one co-runner. If the co-runner alone costs more than the promise allows, all of its
//! programs, present and future ones, get a quarter of the ways; all other programs may fill the whole cache. The
//! promised service is measured for a few seconds, and the ways are halved until its promise is kept, or until a
//! halving no longer speeds it up. A later pause may find that another service needs the confinement too; the ways are
//! then halved until the promises of both are kept.
//!
//! Properties: no curve is needed. A step that does not help is undone. A confinement ends if the verifier rolls it
//! back or refuses it, if a search divides the cache, when the last service that it protects has ended, and after half
//! an hour, so that it is measured again. Only ways are used, because a program that lives for less than a second would
//! pay more for copying its pages to other colors than it could win.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    CacheId, CacheShare, GroupId, IndexSet, PartitionSupport, Plan, ProcessId, Reason, RowInterval,
    ServiceIdentity, ShareMember, TaskId, TaskSample, Units, VerificationOutcome, View,
};
use cachemate_papers::partition::units::assign;

use super::evidence::probe_planner::are_probes_harmless;
use super::evidence::service_pauses::is_promised;
use crate::service_losses::{CountedWork, ProbeRows};

/// Time for the cache to fill after a change of ways.
const SETTLE_NS: u64 = 1_000_000_000;
/// Time for which the promised service is measured before a pause, and under each number of ways.
const MEASURE_NS: u64 = 2_000_000_000;
/// Time after which a confinement ends, and for which a released service is not confined again.
const MAX_HOLD_NS: u64 = 1_800_000_000_000;
/// Time without programs after which a service is no longer confined.
const MAX_ABSENCE_NS: u64 = 60_000_000_000;
/// Divisor of the ways for the first confinement.
const FIRST_DIVISOR: u32 = 4;
/// Smallest gain of the promised service for which a number of ways stays, as a share: less is noise.
const MIN_STEP_GAIN: f64 = 0.02;

/// Mean life of a count in the work before a pause, because the promised service may do other work later.
const DECAY_NS: f64 = 5e9;

/// Work of the services with a promise since a change of ways.
#[derive(Clone, Debug, Default)]
struct WorkMeasurement {
    work: BTreeMap<ServiceIdentity, CountedWork>,
    measured_ns: u64,
    changed_ns: u64,
}

impl WorkMeasurement {
    /// A measurement that begins once the cache has filled after a change at this time.
    fn after_change(now_ns: u64) -> Self {
        WorkMeasurement {
            changed_ns: now_ns,
            ..WorkMeasurement::default()
        }
    }

    fn observe(&mut self, view: &View<'_>) {
        let span = &view.observation.span;
        if !are_probes_harmless(view) || span.start_ns < self.changed_ns + SETTLE_NS {
            return;
        }

        let decay = libm::exp(-(span.elapsed_ns as f64) / DECAY_NS);
        for work in self.work.values_mut() {
            work.instructions *= decay;
            work.cycles *= decay;
        }

        let promised_tasks = view.observation.tasks.iter();
        for task in promised_tasks.filter(|task| is_promised(task)) {
            let service = task.service_or_command().into_owned();
            let work = self.work.entry(service).or_default();
            *work = work.plus(CountedWork::from_counts(&task.counts).unwrap_or_default());
        }
        self.measured_ns += span.elapsed_ns;
    }

    fn is_complete(&self) -> bool {
        self.measured_ns >= MEASURE_NS
    }

    /// Instructions per cycle of a service; `None` if it did no work.
    fn speed_of(&self, service: &ServiceIdentity) -> Option<f64> {
        self.work.get(service)?.instr_per_cycle()
    }
}

/// The effect of a pause on a service with a promise, in instructions per cycle.
#[derive(Clone, Debug)]
struct PauseEffect {
    max_slowdown: f64,
    /// The speed before the last change of ways; at first, before the pause.
    previous_speed: f64,
    /// The speed without the paused service: the speed before, times the ratio of the speeds in the pause and in the
    /// probe's intervals with all tasks.
    speed_without_paused: f64,
}

impl PauseEffect {
    /// The slowdown at this speed, relative to the speed without the paused service.
    fn slowdown(&self, speed: f64) -> f64 {
        self.speed_without_paused / speed - 1.0
    }

    /// The part of the slowdown at this speed that the promise does not allow.
    fn excess(&self, speed: f64) -> f64 {
        self.slowdown(speed) - self.max_slowdown
    }
}

/// Services that share a few ways of a cache.
#[derive(Clone, Debug)]
struct WayConfinement {
    /// Confined services, with the time at which they last had a program.
    services: BTreeMap<ServiceIdentity, u64>,
    ways: u32,
    /// The number of ways before the last step.
    previous_ways: u32,
    /// The services with a promise that pauses of the confined services have sped up.
    protected_services: BTreeMap<ServiceIdentity, PauseEffect>,
    start_ns: u64,
    /// Work since the last change of this cache's ways.
    measurement: WorkMeasurement,
    /// Whether the ways stay as they are until the next pause.
    is_held: bool,
}

impl WayConfinement {
    fn is_confined(&self, task: &TaskSample) -> bool {
        self.services.contains_key(&*task.service_or_command())
    }

    /// The share of the live programs that may be confined.
    fn share(&self, cache: CacheId, view: &View<'_>) -> CacheShare {
        let confined_tasks = view.live_tasks().filter(|task| self.is_confined(task));
        let (unmovable, movable): (Vec<&TaskSample>, Vec<&TaskSample>) =
            confined_tasks.partition(|task| task.unmovable);
        let mut members: BTreeSet<ProcessId> =
            movable.into_iter().map(|task| task.process).collect();
        unmovable
            .into_iter()
            .for_each(|task| _ = members.remove(&task.process));
        let partition = PartitionSupport::preferred(view.partitions_of(cache));
        let mask = match partition {
            Some(partition) => {
                assign(&[IndexSet::default()], &[self.ways], &partition).swap_remove(0)
            }
            None => (0..self.ways).collect(),
        };
        CacheShare {
            group: group_of_cache(cache),
            members: members.into_iter().map(ShareMember::Process).collect(),
            cache,
            units: Units::Ways { mask },
        }
    }

    /// A reason with the present number of ways. `describe` forms the text from the names of the protected service and
    /// of the confined ones.
    fn explain(
        &self,
        protected_service: &ServiceIdentity,
        view: &View<'_>,
        describe: impl FnOnce(&str, &str) -> String,
    ) -> Reason {
        let mut tasks: Vec<TaskId> = Vec::new();
        let mut name_task = |task: Option<&TaskSample>| {
            let number = tasks.len();
            tasks.extend(task.map(|task| task.task));
            task.map(|_| format!("{{{number}}}"))
        };
        let protected = name_task(
            view.live_tasks()
                .find(|task| *task.service_or_command() == *protected_service),
        );
        let confined = name_task(view.live_tasks().find(|task| self.is_confined(task)));

        let text = describe(
            protected.as_deref().unwrap_or("a service"),
            &confined.map_or("another service".to_string(), |name| {
                format!("{name} and its service")
            }),
        );
        let numbers = vec![("ways".to_string(), f64::from(self.ways))];
        Reason::new(tasks, text, numbers)
    }

    /// Forgets the confined services without programs, and the protected ones that have ended or have no promise any
    /// more.
    fn forget_ended(&mut self, view: &View<'_>) {
        let now_ns = view.observation.span.end_ns();
        let mut promised_services = BTreeSet::new();
        for task in view.live_tasks() {
            let service = task.service_or_command();
            if let Some(last_ns) = self.services.get_mut(&*service) {
                *last_ns = now_ns;
            }
            if is_promised(task) {
                promised_services.insert(service.into_owned());
            }
        }

        self.services
            .retain(|_, last_ns| now_ns.saturating_sub(*last_ns) < MAX_ABSENCE_NS);
        self.protected_services
            .retain(|service, _| promised_services.contains(service));
    }

    /// Whether services are confined for others that are still promised, and not for too long.
    fn is_needed(&self, now_ns: u64) -> bool {
        !self.services.is_empty()
            && !self.protected_services.is_empty()
            && now_ns.saturating_sub(self.start_ns) <= MAX_HOLD_NS
    }

    /// Judges the number of ways once it is measured: halves it while a promise is not kept, or undoes the last step if
    /// that helped none of the services whose promises are not kept. A service that did no work meanwhile is not
    /// judged. The result is the reason of the verdict; `None` before it.
    fn adjust_ways(&mut self, view: &View<'_>, partition: PartitionSupport) -> Option<Reason> {
        if self.is_held || !self.measurement.is_complete() {
            return None;
        }
        let protected_services = self.protected_services.iter();
        let judged_services: Vec<(&ServiceIdentity, &PauseEffect, f64)> = protected_services
            .filter_map(|(service, effect)| {
                Some((service, effect, self.measurement.speed_of(service)?))
            })
            .collect();
        let (worst_service, worst_effect, worst_speed) =
            judged_services.iter().copied().max_by(|a, b| {
                let (_, first_effect, first_speed) = a;
                let (_, second_effect, second_speed) = b;
                first_effect
                    .excess(*first_speed)
                    .total_cmp(&second_effect.excess(*second_speed))
            })?;
        let worst_service = worst_service.clone();
        let worst_slowdown = worst_effect.slowdown(worst_speed);
        let are_kept = worst_effect.excess(worst_speed) <= 0.0;
        let has_gained = judged_services.iter().any(|(_, effect, speed)| {
            effect.excess(*speed) > 0.0 && *speed >= effect.previous_speed * (1.0 + MIN_STEP_GAIN)
        });

        let ways = self.ways;
        self.is_held = are_kept || !has_gained || ways <= partition.min_units();
        if !are_kept {
            self.ways = if has_gained {
                (ways / 2).max(partition.min_units())
            } else {
                self.previous_ways
            };
            self.set_previous(ways);
        }
        let consequence = if self.ways == ways {
            String::new()
        } else {
            format!(", so the latter gets {}", self.ways)
        };
        Some(self.explain(&worst_service, view, |protected, confined| {
            format!(
                "{protected} is {:.1} % slower while {confined} has {ways} ways{consequence}",
                100.0 * worst_slowdown
            )
        }))
    }

    /// Takes these ways, and the speeds that were measured under them, for those before the step that begins now.
    fn set_previous(&mut self, ways: u32) {
        self.previous_ways = ways;
        for (service, effect) in &mut self.protected_services {
            if let Some(speed) = self.measurement.speed_of(service) {
                effect.previous_speed = speed;
            }
        }
    }
}

/// All confinements; see the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct ServiceConfinements {
    by_cache: BTreeMap<CacheId, WayConfinement>,
    /// Work since the last change of ways of any cache, with which the next pause is compared.
    measurement: WorkMeasurement,
    /// Services that are not confined again for some time, with the time at which their confinement ended.
    released: BTreeMap<ServiceIdentity, u64>,
}

impl ServiceConfinements {
    /// Whether a pause can be compared with the speeds before it.
    pub fn has_speeds(&self) -> bool {
        self.measurement.is_complete()
    }

    /// Observes a window in which no plan was being measured, and starts, changes or ends confinements. `pause` is the
    /// paused service with the intervals of its pause, if the window reports one.
    pub fn observe(
        &mut self,
        view: &View<'_>,
        pause: Option<(&ServiceIdentity, &[RowInterval])>,
        reasons: &mut Vec<Reason>,
    ) {
        let now_ns = view.observation.span.end_ns();
        self.released
            .retain(|_, released_ns| now_ns.saturating_sub(*released_ns) < MAX_HOLD_NS);

        self.measurement.observe(view);
        for confinement in self.by_cache.values_mut() {
            confinement.measurement.observe(view);
        }
        if let Some((service, rows)) = pause
            && !self.released.contains_key(service)
        {
            self.confine(view, service, rows, reasons);
        }

        for (cache, mut confinement) in std::mem::take(&mut self.by_cache) {
            let partition = PartitionSupport::preferred(view.partitions_of(cache));
            confinement.forget_ended(view);
            let (true, Some(partition)) = (confinement.is_needed(now_ns), partition) else {
                self.measurement = WorkMeasurement::after_change(now_ns);
                continue;
            };
            let previous_ways = confinement.ways;
            reasons.extend(confinement.adjust_ways(view, partition));
            if confinement.ways != previous_ways {
                confinement.measurement = WorkMeasurement::after_change(now_ns);
                self.measurement = WorkMeasurement::after_change(now_ns);
            }
            if confinement.ways < partition.units() {
                self.by_cache.insert(cache, confinement);
            } else {
                self.release(&confinement, view);
            }
        }
    }

    /// Confines a paused service, if the pause sped a service with a promise up by more than the promise allows.
    fn confine(
        &mut self,
        view: &View<'_>,
        service: &ServiceIdentity,
        rows: &[RowInterval],
        reasons: &mut Vec<Reason>,
    ) {
        let Some(cache) = rows.first().map(|row| row.cache) else {
            return;
        };
        let Some((protected_service, effect)) = self.largest_effect(view, rows) else {
            return;
        };
        let partition = PartitionSupport::preferred(view.partitions_of(cache));
        let Some(partition) = partition.filter(|partition| {
            matches!(partition, PartitionSupport::Ways { .. }) && partition.max_shares() > 0
        }) else {
            return;
        };

        let now_ns = view.observation.span.end_ns();
        let confinement = self
            .by_cache
            .entry(cache)
            .and_modify(|confinement| confinement.set_previous(confinement.ways))
            .or_insert_with(|| WayConfinement {
                services: BTreeMap::new(),
                ways: (partition.units() / FIRST_DIVISOR).max(partition.min_units()),
                previous_ways: partition.units(),
                protected_services: BTreeMap::new(),
                start_ns: now_ns,
                measurement: WorkMeasurement::default(),
                is_held: false,
            });
        confinement.services.insert(service.clone(), now_ns);
        confinement.start_ns = now_ns;
        confinement.measurement = WorkMeasurement::after_change(now_ns);
        confinement.is_held = false;

        let slowdown = effect.slowdown(effect.previous_speed);
        confinement
            .protected_services
            .insert(protected_service.clone(), effect);
        reasons.push(
            confinement.explain(&protected_service, view, |protected, confined| {
                format!(
                    "{protected} ran {:.0} % slower than while {confined} was paused, so the latter gets {} of {} ways",
                    100.0 * slowdown,
                    confinement.ways,
                    partition.units()
                )
            }),
        );
        self.measurement = WorkMeasurement::after_change(now_ns);
    }

    /// The effect of a pause on the service whose limit it exceeds most.
    fn largest_effect(
        &self,
        view: &View<'_>,
        rows: &[RowInterval],
    ) -> Option<(ServiceIdentity, PauseEffect)> {
        let rows = ProbeRows::new(rows);
        let mut limits: BTreeMap<ServiceIdentity, (BTreeSet<TaskId>, f64)> = BTreeMap::new();
        for task in &view.observation.tasks {
            let Some(max_slowdown) = task.goal.and_then(|goal| goal.max_slowdown) else {
                continue;
            };
            let (tasks, limit) = limits
                .entry(task.service_or_command().into_owned())
                .or_insert((BTreeSet::new(), max_slowdown));
            *limit = limit.min(max_slowdown);
            tasks.insert(task.task);
        }

        let mut largest: Option<(ServiceIdentity, PauseEffect)> = None;
        let mut largest_excess = 0.0;
        for (service, (tasks, max_slowdown)) in limits {
            let speed_in =
                |rows: &[&RowInterval]| CountedWork::of_tasks(rows, &tasks).instr_per_cycle();
            let speeds = speed_in(&rows.with_pause).zip(speed_in(&rows.without_pause));
            let Some((previous_speed, (speed_in_pause, speed_with_all))) =
                self.measurement.speed_of(&service).zip(speeds)
            else {
                continue;
            };
            let effect = PauseEffect {
                max_slowdown,
                previous_speed,
                speed_without_paused: previous_speed * speed_in_pause / speed_with_all,
            };
            let excess = effect.excess(previous_speed);
            if excess > largest_excess {
                largest = Some((service, effect));
                largest_excess = excess;
            }
        }
        largest
    }

    fn release(&mut self, confinement: &WayConfinement, view: &View<'_>) {
        let now_ns = view.observation.span.end_ns();
        self.released.extend(
            confinement
                .services
                .keys()
                .map(|service| (service.clone(), now_ns)),
        );
        self.measurement = WorkMeasurement::after_change(now_ns);
    }

    /// Ends the confinements that the plan of a verdict leaves out. A service whose confinement was rolled back is not
    /// confined again for some time, while one that was refused, perhaps because of another plan, was never tried.
    pub fn observe_verdict(&mut self, view: &View<'_>) {
        let Some(verdict) = view.verdicts.latest() else {
            return;
        };
        let is_failed = verdict.outcome == VerificationOutcome::Slower;
        for (cache, confinement) in std::mem::take(&mut self.by_cache) {
            let share = confinement.share(cache, view);
            let is_in_force =
                |other: &CacheShare| (other.cache, &other.units) == (cache, &share.units);
            if share.members.is_empty() || verdict.plan.shares.iter().any(is_in_force) {
                self.by_cache.insert(cache, confinement);
            } else if is_failed {
                self.release(&confinement, view);
            }
        }
    }

    /// Writes the shares of all confined programs into a plan, and removes those of ended confinements. A cache that
    /// the plan divides in another way is left alone. While the plan is on trial, only newcomers are added.
    pub fn write_into_plan(&self, view: &View<'_>, plan: &mut Plan, is_on_trial: bool) {
        let is_current = |share: &CacheShare| {
            share.group != group_of_cache(share.cache) || self.by_cache.contains_key(&share.cache)
        };
        plan.shares.retain(|share| is_on_trial || is_current(share));

        for (&cache, confinement) in &self.by_cache {
            let tasks = view
                .observation
                .tasks
                .iter()
                .filter(|task| confinement.is_confined(task));
            let processes: BTreeSet<ProcessId> = tasks.map(|task| task.process).collect();
            let is_confined = |member: &ShareMember| matches!(member, ShareMember::Process(process) if processes.contains(process));
            let is_own = |share: &CacheShare| share.members.iter().all(is_confined);
            let share = confinement.share(cache, view);
            let shares = plan.shares.iter().filter(|share| share.cache == cache);
            let is_ours = shares.clone().all(is_own);
            let is_in_force = shares.clone().any(|other| other.units == share.units);
            if is_ours && (!is_on_trial || is_in_force) {
                plan.shares.retain(|share| share.cache != cache);
                plan.shares
                    .extend(Some(share).filter(|share| !share.members.is_empty()));
            }
        }
    }
}

fn group_of_cache(cache: CacheId) -> GroupId {
    GroupId(u32::MAX - cache.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::model::decided_plan::DecidedPlan;
    use crate::auto::model::layout::SiteLayout;
    use crate::auto::proposal::Proposal;
    use crate::auto::proposal::ProposalOrigin;
    use crate::auto::{Auto, Parameters};
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches,
    };
    use cachemate_core::{
        Ability, CacheLevel, ChangeVerdict, CounterEvent, EventCounts, Forecast, Goal, Plan,
        TimeSpan, Verdicts, VerificationMethod, WindowLength,
    };

    const SECOND_NS: u64 = 1_000_000_000;

    fn work(instructions: u64) -> EventCounts {
        EventCounts::exact([
            (CounterEvent::Instructions, instructions),
            (CounterEvent::Cycles, 1_000),
        ])
    }

    /// An interval of a probe, with the instructions of each task.
    fn row(cache: CacheId, instructions: &[(u32, u64)]) -> RowInterval {
        RowInterval {
            tasks: instructions.iter().map(|(task, _)| TaskId(*task)).collect(),
            cache,
            span: TimeSpan {
                start_ns: 0,
                elapsed_ns: SECOND_NS,
                elapsed_cycles: None,
            },
            ended_by_task: None,
            cache_counts: EventCounts::default(),
            task_counts: instructions.iter().map(|(_, count)| work(*count)).collect(),
        }
    }

    /// The ways of a cache.
    const WAYS: PartitionSupport = PartitionSupport::Ways {
        ways: 16,
        min_ways: 1,
        contiguous: true,
        max_groups: 8,
        device_ways: 0,
    };

    /// So many caches, the first of which has ways, with a store and a loop of programs.
    fn store_beside_loop(caches: u32) -> ViewFixture {
        let capabilities = capabilities_fixture(&[Ability::Ways]).with_partition(CacheId(0), WAYS);
        let topology = last_level_caches(caches, 2, CacheLevel::L3, 1 << 20);
        let mut fixture = ViewFixture::new(topology, capabilities, 2);
        let tasks = &mut fixture.observation.tasks;
        (tasks[0].name, tasks[1].name) = ("store".to_string(), "loop".to_string());
        fixture
    }

    /// Two caches with a store and a loop of programs, which is confined to four ways of the first cache.
    fn confined_loop() -> (ViewFixture, ServiceConfinements) {
        let fixture = store_beside_loop(2);
        let tasks = &fixture.observation.tasks;
        let identity = |task: &TaskSample| task.service_or_command().into_owned();
        let confinement = WayConfinement {
            services: [(identity(&tasks[1]), 0)].into(),
            ways: 4,
            previous_ways: 16,
            protected_services: [(
                identity(&tasks[0]),
                PauseEffect {
                    max_slowdown: 0.05,
                    previous_speed: 1.0,
                    speed_without_paused: 1.3,
                },
            )]
            .into(),
            start_ns: 0,
            measurement: WorkMeasurement::default(),
            is_held: false,
        };
        let confinements = ServiceConfinements {
            by_cache: [(CacheId(0), confinement)].into(),
            ..ServiceConfinements::default()
        };
        (fixture, confinements)
    }

    /// A verdict with this plan.
    struct Verdict(ChangeVerdict);

    impl Verdicts for Verdict {
        fn latest(&self) -> Option<&ChangeVerdict> {
            Some(&self.0)
        }
    }

    fn observe_verdict(
        confinements: &mut ServiceConfinements,
        fixture: &ViewFixture,
        outcome: VerificationOutcome,
        plan: &Plan,
    ) {
        let verdict = Verdict(ChangeVerdict {
            outcome,
            plan: plan.clone(),
            forecast_gain: None,
            measured: None,
        });
        confinements.observe_verdict(&View {
            verdicts: &verdict,
            ..fixture.view(&NullPredictor)
        });
    }

    /// A search moves a task and divides no cache: is the confinement in its plan, and is it in force after the
    /// verdict?
    #[test]
    fn does_a_plan_for_another_cache_keep_a_confinement() {
        let (fixture, confinements) = confined_loop();
        let view = fixture.view(&NullPredictor);
        let mut policy = Auto::new(Parameters::default(), 1);
        policy.confinements = confinements;
        let idle = Plan::idle(WindowLength::Time { ns: SECOND_NS });
        let mut new_plan = idle.clone();
        new_plan.affinity.insert(TaskId(0), (2..4).collect());
        let proposal = Proposal {
            origin: ProposalOrigin::Plan,
            method: VerificationMethod::Confirmation,
            new_plan: DecidedPlan(new_plan),
            speeds: Vec::new(),
            goal_processes: Vec::new(),
            gain: 0.02,
            forecast: Forecast::default(),
            layout_before: SiteLayout::default(),
        };
        let (plan, _) = policy.propose(&view, DecidedPlan(idle), Some(proposal));
        let units = |plan: &Plan| {
            plan.shares
                .iter()
                .map(|share| share.units.set().count())
                .collect()
        };
        let all_units: Vec<u32> = units(&plan);
        assert_eq!(all_units, [4]);
        let (pending, _) = policy.propose(&view, DecidedPlan(plan.clone()), None);
        assert_eq!(pending.shares, plan.shares);

        let outcome = VerificationOutcome::NotSlower;
        observe_verdict(&mut policy.confinements, &fixture, outcome, &plan);
        policy.open_change = None;
        let (kept, _) = policy.propose(&view, DecidedPlan(plan.clone()), None);
        assert_eq!(kept.shares, plan.shares);
    }

    /// Is a service whose confinement was refused, because changes are paused, confined after the next pause of it, and
    /// one whose confinement was rolled back not for some time?
    #[test]
    fn is_a_refused_confinement_tried_again_after_the_next_pause() {
        let idle = Plan::idle(WindowLength::Time { ns: SECOND_NS });
        for (outcome, released) in [
            (VerificationOutcome::Refused, 0),
            (VerificationOutcome::Slower, 1),
        ] {
            let (fixture, mut confinements) = confined_loop();
            observe_verdict(&mut confinements, &fixture, outcome, &idle);
            assert!(confinements.by_cache.is_empty());
            assert_eq!(confinements.released.len(), released);
        }
    }

    /// Runs windows of one second in which a loop of programs runs beside a task with a limit of 5 %: after three
    /// seconds, a probe reports that task with a pause of the loop and without. The probe speeds it up by a factor of
    /// 1.3: to 1,300 instructions per 1,000 cycles in the pause. Otherwise, these follow from the ways of the loop's
    /// programs. One number of ways for each window.
    fn ways_by_window(instructions_beside: fn(u32) -> u64) -> Vec<u32> {
        let mut fixture = store_beside_loop(1);
        let tasks = &mut fixture.observation.tasks;
        tasks[0].goal = Some(Goal {
            max_slowdown: Some(0.05),
            ..Goal::default()
        });
        let service = fixture.observation.tasks[1]
            .service_or_command()
            .into_owned();
        let (pause, reference) = (
            row(CacheId(0), &[(0, 1_300)]),
            row(
                CacheId(0),
                &[0, 1].map(|task| (task, 13 * instructions_beside(16) / 10)),
            ),
        );
        let rows = [pause.clone(), pause, reference.clone(), reference];
        let mut confinements = ServiceConfinements::default();
        let (mut all_ways, mut current_ways) = (Vec::new(), 16);
        for window in 0..24 {
            let observation = &mut fixture.observation;
            observation.span = TimeSpan {
                start_ns: window * SECOND_NS,
                elapsed_ns: SECOND_NS,
                elapsed_cycles: None,
            };
            observation.tasks[0].counts = work(instructions_beside(current_ways));
            // Each program of the loop is another process.
            observation.tasks[1].process = ProcessId(10 + window as u32);
            let view = fixture.view(&NullPredictor);
            let pause = (window == 3).then_some((&service, rows.as_slice()));
            assert!(pause.is_none() || confinements.has_speeds());
            confinements.observe(&view, pause, &mut Vec::new());
            let mut plan = Plan::idle(WindowLength::Time { ns: SECOND_NS });
            confinements.write_into_plan(&view, &mut plan, false);
            current_ways = plan.shares.first().map_or(16, |share| {
                assert_eq!(
                    share.members,
                    [ShareMember::Process(ProcessId(10 + window as u32))]
                );
                share.units.set().count()
            });
            all_ways.push(current_ways);
            fixture.previous_plan = plan;
        }
        all_ways
    }

    /// Is a loop of programs confined to the most ways with which the promise is kept?
    #[test]
    fn ways_are_halved_until_the_promise_is_kept() {
        let ways = ways_by_window(|ways| 1_000 - 20 * u64::from(ways));
        assert_eq!((ways[2], ways[3], ways[23]), (16, 4, 2), "{ways:?}");
    }

    /// Is a step undone if it does not help, and a loop of programs never confined if the promise is kept?
    #[test]
    fn useless_steps_are_undone() {
        let ways = ways_by_window(|_| 800);
        assert_eq!((ways[3], ways[23]), (4, 16), "{ways:?}");
        let ways = ways_by_window(|ways| if ways <= 4 { 900 } else { 800 });
        assert!(
            ways.contains(&2) && ways[23] == 4,
            "fewer ways do not help: {ways:?}"
        );
        assert_eq!(ways_by_window(|_| 960), [16; 24]);
    }

    /// Windows of one second in which the services `store` and `index`, with a limit of 5 %, run beside a `loop` and a
    /// `batch`; these are tasks 0 to 3.
    struct ConfinedScene {
        fixture: ViewFixture,
        confinements: ServiceConfinements,
    }

    impl ConfinedScene {
        fn new(caches: u32) -> Self {
            let capabilities = (0..caches).fold(
                capabilities_fixture(&[Ability::Ways]),
                |capabilities, cache| capabilities.with_partition(CacheId(cache), WAYS),
            );
            let topology = last_level_caches(caches, 4, CacheLevel::L3, 1 << 20);
            let mut fixture = ViewFixture::new(topology, capabilities, 4);
            let names = ["store", "index", "loop", "batch"];
            for (task, name) in fixture.observation.tasks.iter_mut().zip(names) {
                task.name = name.to_string();
                let is_promised = matches!(name, "store" | "index");
                task.goal = is_promised.then_some(Goal {
                    max_slowdown: Some(0.05),
                    ..Goal::default()
                });
            }
            ConfinedScene {
                fixture,
                confinements: ServiceConfinements::default(),
            }
        }

        /// Runs the next window, with the instructions of both services in it. `pause` is the paused service, the
        /// cache, and the factors by which the pause sped both services up.
        fn run(&mut self, instructions: [u64; 2], pause: Option<(&str, CacheId, [f64; 2])>) {
            let observation = &mut self.fixture.observation;
            for (task, count) in observation.tasks.iter_mut().zip(instructions) {
                task.counts = work(count);
            }
            let view = self.fixture.view(&NullPredictor);
            let pause = pause.map(|(service, cache, factors)| {
                let alone = [0, 1].map(|task| (task as u32, (1_000.0 * factors[task]) as u64));
                let together = [(0, 1_000), (1, 1_000), (2, 1_000), (3, 1_000)];
                let (alone, together) = (row(cache, &alone), row(cache, &together));
                let rows = [alone.clone(), alone, together.clone(), together];
                (ServiceIdentity::command(service), rows)
            });
            let pause = pause
                .as_ref()
                .map(|(service, rows)| (service, rows.as_slice()));
            self.confinements.observe(&view, pause, &mut Vec::new());
            let span = &mut self.fixture.observation.span;
            span.start_ns += SECOND_NS;
        }

        fn ways_of(&self, cache: CacheId) -> Option<u32> {
            Some(self.confinements.by_cache.get(&cache)?.ways)
        }
    }

    /// Is the promise of the first service still kept after a pause has found a second one, and when the second has
    /// ended?
    #[test]
    fn a_second_pause_forgets_no_service() {
        let mut scene = ConfinedScene::new(1);
        scene.fixture.observation.span.elapsed_ns = SECOND_NS;
        (0..3).for_each(|_| scene.run([1_000, 1_000], None));
        scene.run([1_000, 1_000], Some(("loop", CacheId(0), [1.3, 1.0])));
        assert_eq!(scene.ways_of(CacheId(0)), Some(4));
        (0..3).for_each(|_| scene.run([1_150, 1_000], None));
        assert_eq!(scene.ways_of(CacheId(0)), Some(2));
        (0..2).for_each(|_| scene.run([1_200, 1_000], None));
        scene.run([1_200, 1_000], Some(("batch", CacheId(0), [1.0, 1.3])));
        assert_eq!(scene.ways_of(CacheId(0)), Some(2));
        // The second service's promise is kept now, and the first one's is not.
        (0..3).for_each(|_| scene.run([1_235, 1_290], None));
        assert_eq!(scene.ways_of(CacheId(0)), Some(1));

        scene.fixture.observation.tasks.remove(1);
        scene.run([1_260, 0], None);
        assert_eq!(scene.ways_of(CacheId(0)), Some(1), "the first one is there");
        scene.fixture.observation.tasks.remove(0);
        scene.run([0, 0], None);
        assert_eq!(scene.ways_of(CacheId(0)), None);
    }

    /// Are the ways of a cache judged in time although those of another cache change meanwhile?
    #[test]
    fn a_step_on_one_cache_delays_no_other() {
        let mut scene = ConfinedScene::new(2);
        scene.fixture.observation.span.elapsed_ns = SECOND_NS;
        (0..3).for_each(|_| scene.run([1_000, 1_000], None));
        scene.run([1_000, 1_000], Some(("loop", CacheId(0), [1.3, 1.0])));
        scene.run([1_150, 1_000], None);
        scene.run([1_150, 1_000], Some(("batch", CacheId(1), [1.0, 1.3])));
        assert_eq!(scene.ways_of(CacheId(1)), Some(4));
        assert_eq!(scene.ways_of(CacheId(0)), Some(4));
        scene.run([1_150, 1_000], None);
        assert_eq!(scene.ways_of(CacheId(0)), Some(2));
        assert_eq!(scene.ways_of(CacheId(1)), Some(4), "it is not measured yet");
    }
}
