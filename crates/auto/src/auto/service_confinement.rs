//! Confinement of services that a pause has measured to slow a promised service down: they share a few ways.
//!
//! Problem: programs that live shorter than a log of their misses takes have no curve, so no search can divide a cache
//! between them and others. Method: a pause ([`super::evidence::service_pauses`]) measures the speed of a service with
//! a promised slowdown without one co-runner. If the co-runner alone costs more than the promise allows, all of its
//! programs, present and future ones, get a quarter of the ways; all other programs may fill the whole cache. The
//! promised service is measured for a few seconds, and the ways are halved until its promise is kept, or until a
//! halving no longer speeds it up.
//!
//! Properties: no curve is needed. A step that does not help is undone. A confinement ends if the verifier rolls it back
//! or refuses it, if a search divides the cache, and after half an hour, so that it is measured again. Only ways are
//! used, because a program that lives for less than a second would pay more for copying its pages to other colors than
//! it could win.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{
    CacheId, CacheShare, CounterEvent, EventCounts, GroupId, PartitionSupport, Plan, ProcessId,
    Reason, RowInterval, ServiceIdentity, ShareMember, TaskId, TaskSample, Units,
    VerificationOutcome, View,
};

use super::evidence::probe_planner::are_probes_harmless;
use super::evidence::service_pauses::is_promised;
use crate::service_losses::{ProbeRows, counts_of_tasks};

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

/// Counted work of a service.
#[derive(Clone, Copy, Debug, Default)]
struct CountedWork {
    instructions: f64,
    cycles: f64,
}

impl CountedWork {
    fn add(&mut self, counts: &EventCounts) {
        if let Some((instructions, cycles)) = counts
            .get(CounterEvent::Instructions)
            .zip(counts.get(CounterEvent::Cycles))
        {
            (self.instructions, self.cycles) =
                (self.instructions + instructions, self.cycles + cycles);
        }
    }

    fn instr_per_cycle(self) -> Option<f64> {
        (self.instructions > 0.0 && self.cycles > 0.0).then(|| self.instructions / self.cycles)
    }
}

/// The effect of a pause on the service that suffered most.
#[derive(Clone, Debug)]
struct PauseEffect {
    protected_service: ServiceIdentity,
    max_slowdown: f64,
    /// Instructions per cycle before the pause.
    speed_before: f64,
    /// The same without the paused service: the speed before, times the ratio of the speeds in the pause and in the
    /// probe's intervals with all tasks.
    speed_during: f64,
}

impl PauseEffect {
    /// The slowdown at this speed, relative to the speed during the pause.
    fn slowdown(&self, speed: f64) -> f64 {
        self.speed_during / speed - 1.0
    }
}

/// Services that share a few ways of a cache.
#[derive(Clone, Debug)]
struct WayConfinement {
    /// Confined services, with the time at which they last had a program.
    services: BTreeMap<ServiceIdentity, u64>,
    ways: u32,
    /// The number of ways before the last step, and the speed of the protected service then.
    previous_step: (u32, f64),
    effect: PauseEffect,
    start_ns: u64,
    /// Whether the measurement under this number of ways is over.
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
        CacheShare {
            group: group_of_cache(cache),
            members: members.into_iter().map(ShareMember::Process).collect(),
            cache,
            units: Units::Ways {
                mask: (0..self.ways).collect(),
            },
        }
    }

    fn explain(&self, text: &str, view: &View<'_>, numbers: Vec<(String, f64)>) -> Reason {
        let is_protected =
            |task: &&TaskSample| *task.service_or_command() == self.effect.protected_service;
        let protected_task = view.live_tasks().find(is_protected).map(|task| task.task);
        let confined_tasks = view
            .live_tasks()
            .filter(|task| self.is_confined(task))
            .map(|task| task.task);
        let tasks: Vec<TaskId> = protected_task
            .into_iter()
            .chain(confined_tasks.take(1))
            .collect();

        let protected = if protected_task.is_some() {
            "{0}"
        } else {
            "a service"
        };
        let confined = match tasks.len() - usize::from(protected_task.is_some()) {
            0 => "another service".to_string(),
            _ => format!("{{{}}} and its service", tasks.len() - 1),
        };
        let text = text
            .replace("PROTECTED", protected)
            .replace("CONFINED", &confined);
        Reason::new(tasks, text, numbers)
    }
}

/// All confinements; see the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct ServiceConfinements {
    by_cache: BTreeMap<CacheId, WayConfinement>,
    /// Work of services with a promise since the last change of ways.
    work: BTreeMap<ServiceIdentity, CountedWork>,
    measured_ns: u64,
    changed_ns: u64,
    /// Services that are not confined again for some time, with the time at which their confinement ended.
    released: BTreeMap<ServiceIdentity, u64>,
}

impl ServiceConfinements {
    /// Whether a pause can be compared with the speeds before it.
    pub fn has_speeds(&self) -> bool {
        self.measured_ns >= MEASURE_NS
    }

    /// Observes a window in which no plan was being measured, and starts, changes or ends confinements. `pause` is the
    /// paused service with the intervals of its pause, if the window reports one.
    pub fn observe(
        &mut self,
        view: &View<'_>,
        pause: Option<(&ServiceIdentity, &[RowInterval])>,
        reasons: &mut Vec<Reason>,
    ) {
        let span = &view.observation.span;
        let now_ns = span.end_ns();
        self.released
            .retain(|_, released_ns| now_ns.saturating_sub(*released_ns) < MAX_HOLD_NS);

        if are_probes_harmless(view) && span.start_ns >= self.changed_ns + SETTLE_NS {
            let decay = libm::exp(-(span.elapsed_ns as f64) / DECAY_NS);
            for work in self.work.values_mut() {
                (work.instructions, work.cycles) = (decay * work.instructions, decay * work.cycles);
            }

            for task in view
                .observation
                .tasks
                .iter()
                .filter(|task| is_promised(task))
            {
                self.work
                    .entry(task.service_or_command().into_owned())
                    .or_default()
                    .add(&task.counts);
            }
            self.measured_ns += span.elapsed_ns;
        }

        if let Some((service, rows)) =
            pause.filter(|(service, _)| !self.released.contains_key(*service))
        {
            self.confine(view, service, rows, reasons);
        }

        for (cache, mut confinement) in std::mem::take(&mut self.by_cache) {
            for task in view.live_tasks() {
                if let Some(last_ns) = confinement.services.get_mut(&*task.service_or_command()) {
                    *last_ns = now_ns;
                }
            }

            confinement
                .services
                .retain(|_, last_ns| now_ns.saturating_sub(*last_ns) < MAX_ABSENCE_NS);
            let is_protected = |task: &TaskSample| {
                is_promised(task)
                    && *task.service_or_command() == confinement.effect.protected_service
            };
            let is_over = confinement.services.is_empty()
                || now_ns.saturating_sub(confinement.start_ns) > MAX_HOLD_NS
                || !view.live_tasks().any(is_protected);
            if is_over || !self.adjust_ways(view, cache, &mut confinement, reasons) {
                self.restart_measurement(now_ns);
            } else {
                self.by_cache.insert(cache, confinement);
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
        let Some((cache, effect)) = rows
            .first()
            .map(|row| row.cache)
            .zip(self.largest_effect(view, rows))
        else {
            return;
        };
        let units = PartitionSupport::preferred(view.partitions_of(cache));
        let Some(units) = units.filter(|units| {
            matches!(units, PartitionSupport::Ways { .. }) && units.max_shares() > 0
        }) else {
            return;
        };

        let span = &view.observation.span;
        let now_ns = span.end_ns();
        let confinement = self
            .by_cache
            .entry(cache)
            .or_insert_with(|| WayConfinement {
                services: BTreeMap::new(),
                ways: (units.units() / FIRST_DIVISOR).max(units.min_units()),
                previous_step: (units.units(), effect.speed_before),
                effect: effect.clone(),
                start_ns: now_ns,
                is_held: false,
            });
        if !confinement.services.is_empty() {
            confinement.previous_step = (confinement.ways, effect.speed_before);
        }

        confinement.services.insert(service.clone(), now_ns);
        (
            confinement.is_held,
            confinement.start_ns,
            confinement.effect,
        ) = (false, now_ns, effect);
        let text = format!(
            "PROTECTED ran {:.0} % slower than while CONFINED was paused, so the latter gets {} of {} ways",
            100.0 * confinement.effect.slowdown(confinement.effect.speed_before),
            confinement.ways,
            units.units()
        );
        let numbers = vec![("ways".to_string(), f64::from(confinement.ways))];
        reasons.push(confinement.explain(&text, view, numbers));
        self.restart_measurement(now_ns);
    }

    /// The effect of a pause on the service whose limit it exceeds most.
    fn largest_effect(&self, view: &View<'_>, rows: &[RowInterval]) -> Option<PauseEffect> {
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
        let speed_in = |rows: &[&RowInterval], tasks: &BTreeSet<TaskId>| {
            let (instructions, cycles) = counts_of_tasks(rows, tasks);
            CountedWork {
                instructions,
                cycles,
            }
            .instr_per_cycle()
        };

        let effects =
            limits
                .into_iter()
                .filter_map(|(protected_service, (tasks, max_slowdown))| {
                    let speed_before = self.work.get(&protected_service)?.instr_per_cycle()?;
                    let speed_ratio =
                        speed_in(&rows.partial, &tasks)? / speed_in(&rows.complete, &tasks)?;
                    let speed_during = speed_before * speed_ratio;
                    Some(PauseEffect {
                        protected_service,
                        max_slowdown,
                        speed_before,
                        speed_during,
                    })
                });

        let excess =
            |effect: &PauseEffect| effect.slowdown(effect.speed_before) - effect.max_slowdown;
        effects
            .filter(|effect| excess(effect) > 0.0)
            .max_by(|a, b| excess(a).total_cmp(&excess(b)))
    }

    /// Judges the number of ways once it is measured: halves it if the promise is not kept, or undoes the last step if
    /// it did not help. Returns whether the confinement goes on.
    fn adjust_ways(
        &mut self,
        view: &View<'_>,
        cache: CacheId,
        confinement: &mut WayConfinement,
        reasons: &mut Vec<Reason>,
    ) -> bool {
        let effect = &confinement.effect;
        let speed = self
            .work
            .get(&effect.protected_service)
            .and_then(|work| work.instr_per_cycle());
        let Some(speed) = speed.filter(|_| self.has_speeds() && !confinement.is_held) else {
            return true;
        };
        let Some(units) = PartitionSupport::preferred(view.partitions_of(cache)) else {
            return false;
        };

        let slowdown = effect.slowdown(speed);
        let (ways, (previous_ways, previous_speed)) = (confinement.ways, confinement.previous_step);
        let has_gained = speed >= previous_speed * (1.0 + MIN_STEP_GAIN);
        confinement.is_held =
            slowdown <= effect.max_slowdown || !has_gained || ways <= units.min_units();
        if slowdown > effect.max_slowdown {
            confinement.ways = match has_gained {
                true => (ways / 2).max(units.min_units()),
                false => previous_ways,
            };
            confinement.previous_step = (ways, speed);
        }

        let goes_on = confinement.ways < units.units();
        let text = format!(
            "PROTECTED is {:.1} % slower while CONFINED has {ways} ways, so the latter gets {}",
            100.0 * slowdown,
            confinement.ways
        );
        let numbers = vec![("ways".to_string(), f64::from(confinement.ways))];
        reasons.push(confinement.explain(&text, view, numbers));
        if !goes_on {
            self.release(confinement, view);
        } else if confinement.ways != ways {
            self.restart_measurement(view.observation.span.end_ns());
        }
        goes_on
    }

    fn release(&mut self, confinement: &WayConfinement, view: &View<'_>) {
        let now_ns = view.observation.span.end_ns();
        self.released.extend(
            confinement
                .services
                .keys()
                .map(|service| (service.clone(), now_ns)),
        );
        self.restart_measurement(now_ns);
    }

    fn restart_measurement(&mut self, now_ns: u64) {
        self.work.clear();
        (self.measured_ns, self.changed_ns) = (0, now_ns);
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
    /// the plan divides in another way is left alone. `is_proposed` is set while the verifier measures the plan: only
    /// newcomers are added then.
    pub fn write_into_plan(&self, view: &View<'_>, plan: &mut Plan, is_proposed: bool) {
        let is_current = |share: &CacheShare| {
            share.group != group_of_cache(share.cache) || self.by_cache.contains_key(&share.cache)
        };
        plan.shares.retain(|share| is_proposed || is_current(share));

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
            let mut shares = plan.shares.iter().filter(|share| share.cache == cache);
            let has_other_division = match is_proposed {
                true => {
                    !shares.clone().any(|other| other.units == share.units) || !shares.all(is_own)
                }
                false => !shares.all(is_own),
            };
            if !has_other_division {
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
    use crate::auto::{Auto, ChangeOrigin, Parameters};
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches,
    };
    use cachemate_core::{
        Ability, CacheLevel, ChangeVerdict, Forecast, Goal, Plan, TimeSpan, Verdicts,
        VerificationMethod, WindowLength,
    };

    const SECOND_NS: u64 = 1_000_000_000;

    fn work(instructions: u64) -> EventCounts {
        EventCounts::exact([
            (CounterEvent::Instructions, instructions),
            (CounterEvent::Cycles, 1_000),
        ])
    }

    /// Two caches with a store and a loop of programs, which is confined to four ways of the first cache.
    fn confined_loop() -> (ViewFixture, ServiceConfinements) {
        let ways = PartitionSupport::Ways {
            ways: 16,
            min_ways: 1,
            contiguous: true,
            max_groups: 8,
        };
        let capabilities = capabilities_fixture(&[Ability::Ways]).with_partition(CacheId(0), ways);
        let topology = last_level_caches(2, 2, CacheLevel::L3, 1 << 20);
        let mut fixture = ViewFixture::new(topology, capabilities, 2);
        let tasks = &mut fixture.observation.tasks;
        (tasks[0].name, tasks[1].name) = ("store".to_string(), "loop".to_string());
        let identity = |task: &TaskSample| task.service_or_command().into_owned();
        let confinement = WayConfinement {
            services: [(identity(&tasks[1]), 0)].into(),
            ways: 4,
            previous_step: (16, 1.0),
            effect: PauseEffect {
                protected_service: identity(&tasks[0]),
                max_slowdown: 0.05,
                speed_before: 1.0,
                speed_during: 1.3,
            },
            start_ns: 0,
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

    /// A search moves a task and divides no cache: is the confinement in its plan, and is it in force after the verdict?
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
            method: VerificationMethod::Confirmation,
            new_plan: DecidedPlan(new_plan),
            speeds: Vec::new(),
            goal_processes: Vec::new(),
            gain: 0.02,
            forecast: Forecast::default(),
            layout_before: SiteLayout::default(),
        };
        let origin = ChangeOrigin::Plan;
        let (plan, _) = policy.propose(&view, DecidedPlan(idle), Some((origin, proposal)));
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
        policy.unverified_change = None;
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
    /// seconds, a probe reports that task with a pause of the loop and without. The probe speeds it up by a factor of 1.3: to
    /// 1,300 instructions per 1,000 cycles in the pause. Otherwise, these follow from the ways of the loop's programs.
    /// Returns the ways after each window.
    fn ways_by_window(instructions_beside: fn(u32) -> u64) -> Vec<u32> {
        let ways = PartitionSupport::Ways {
            ways: 16,
            min_ways: 1,
            contiguous: true,
            max_groups: 8,
        };
        let capabilities = capabilities_fixture(&[Ability::Ways]).with_partition(CacheId(0), ways);
        let mut fixture = ViewFixture::new(
            last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
            capabilities,
            2,
        );
        let tasks = &mut fixture.observation.tasks;
        (tasks[0].name, tasks[1].name) = ("store".to_string(), "loop".to_string());
        tasks[0].goal = Some(Goal {
            max_slowdown: Some(0.05),
            ..Goal::default()
        });
        let service = fixture.observation.tasks[1]
            .service_or_command()
            .into_owned();
        let row = |tasks: &[u32], instructions: u64| RowInterval {
            tasks: tasks.iter().map(|id| TaskId(*id)).collect(),
            cache: CacheId(0),
            span: TimeSpan {
                start_ns: 0,
                elapsed_ns: SECOND_NS,
                elapsed_cycles: None,
            },
            ended_by_task: None,
            cache_counts: EventCounts::default(),
            task_counts: tasks.iter().map(|_| work(instructions)).collect(),
        };
        let (pause, reference) = (
            row(&[0], 1_300),
            row(&[0, 1], 13 * instructions_beside(16) / 10),
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
}
