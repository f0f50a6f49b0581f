//! Rules for every policy (ARCHITECTURE: invariants), and a test for them.
//!
//! Problem: a policy is one file by one author, but every machine must be able to rely on it. Method: from a seed, a
//! generator builds machines (several caches, offline CPUs, no caches at all), tasks that arrive and exit, pinned
//! tasks, and evidence with gaps. The policy runs through several windows, and each rule compares two such runs. The
//! rules are:
//! - The plan is always valid, so no task starves in gangs.
//! - The same input gives the same output.
//! - Renaming tasks renames the plan.
//! - An empty machine causes no error.
//! - Without evidence, the affinities, gangs and shares stay unchanged.
//! - Replaying a recorded run gives the same decisions.

use cachemate_core::test_support::ScriptedMachine;
use cachemate_core::*;

use crate::reference_predictor::ReferencePredictor;

/// A violated rule, with the machine and the window in which it was violated.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{rule} (machine seed {seed}, window {window}): {what}")]
pub struct RuleViolation {
    /// Description of the rule.
    pub rule: &'static str,
    /// Seed of the generated machine.
    pub seed: u64,
    /// The window, from 0, in which it was violated.
    pub window: usize,
    /// Description of the actual and the expected values.
    pub what: String,
}

/// A function that builds a fresh policy from a seed.
pub type PolicyFactory<'a> = &'a dyn Fn(u64) -> Box<dyn Policy>;

const WINDOWS: usize = 8;
const REFERENCE: ReferencePredictor = ReferencePredictor {
    miss_penalty_cycles: 150.0,
};

/// Runs a policy on `machine_count` generated machines.
///
/// # Errors
/// The first violated rule.
pub fn check_policy(
    policy_factory: PolicyFactory<'_>,
    machine_count: u64,
) -> Result<(), RuleViolation> {
    for seed in 0..machine_count {
        let script = ObservationScript::generate(seed);
        let decisions = script.run(policy_factory, |task| task)?;
        let repeated_decisions = script.run(policy_factory, |task| task)?;
        script.check_equal("same input, same output", &decisions, &repeated_decisions)?;

        // New ids are larger and in reverse order, which exposes policies that break ties by the value of the id.
        let rename_task = |task: TaskId| TaskId(1000 - task.0);
        let renamed_decisions = script.run(policy_factory, rename_task)?;
        let expected: Vec<Decision> = decisions
            .iter()
            .map(|decision| rename_decision(decision, &rename_task))
            .collect();
        script.check_equal(
            "renaming tasks renames the plan",
            &expected,
            &renamed_decisions,
        )?;
        script.check_keeps_plan_without_evidence(policy_factory)?;
        script.check_replay(policy_factory)?;
    }

    Ok(())
}

/// A generated machine, with its observations window by window.
struct ObservationScript {
    seed: u64,
    topology: Topology,
    capabilities: Capabilities,
    windows: Vec<(Observation, Profiles)>,
}

impl ObservationScript {
    fn generate(seed: u64) -> Self {
        let mut generator = SplitMix64::new(seed ^ 0xc0f0_0000);
        let topology = draw_topology(&mut generator, seed);
        let capabilities = draw_capabilities(&mut generator, &topology);

        let mut tasks: Vec<TaskSample> = Vec::new();
        let mut next_id = 0;
        let mut known_profiles = Profiles::new();
        let mut windows = Vec::new();
        for window in 0..WINDOWS as u64 {
            tasks.retain(|task| !task.exited);
            for task in &mut tasks {
                task.exited = generator.draw_below(12) == 0;
            }

            // On the first machine, no tasks arrive in the first two windows; on every eighth machine, none ever
            // arrive.
            let arrivals = if seed % 8 == 7 || (seed == 0 && window < 2) {
                0
            } else {
                generator.draw_below(5)
            };
            for _ in 0..arrivals {
                tasks.push(draw_arrival(&mut generator, next_id, window));
                next_id += 1;
            }
            for task in &mut tasks {
                fill_counts(&mut generator, task, &topology);
            }

            let mut probe_results = Vec::new();
            known_profiles.retain(|id, _| tasks.iter().any(|task| task.task == *id));
            for task in &mut tasks {
                task.stored_profile = None;
                if generator.draw_below(3) == 0 {
                    let profile = draw_profile(&mut generator, task.process);
                    known_profiles.insert(task.task, profile.clone());
                    task.stored_profile = Some(Box::new(profile));
                    // An answer without evidence, which may end a probe that a policy requested.
                    probe_results.push(ProbeResult {
                        probe: ProbeId(generator.draw_below(4) as u32),
                        evidence: ProbeEvidence::Rows(Vec::new()),
                        complete: true,
                        cost_ns: Vec::new(),
                    });
                }
            }
            if let Some(probe_result) = draw_access_samples(&mut generator, &tasks) {
                probe_results.push(probe_result);
            }

            let span = TimeSpan {
                start_ns: window * 1_000_000,
                elapsed_ns: 1_000_000,
                elapsed_cycles: None,
            };
            let end_reason = if generator.draw_below(2) == 0 {
                WindowEnd::Elapsed
            } else {
                WindowEnd::TasksChanged
            };

            let applied_plan = AppliedPlan::default();
            let observation = Observation {
                window,
                span,
                end_reason,
                tasks: tasks.clone(),
                shared_counts: Vec::new(),
                probe_results,
                applied: applied_plan,
            };
            windows.push((observation, known_profiles.clone()));
        }

        ObservationScript {
            seed,
            topology,
            capabilities,
            windows,
        }
    }

    fn build_violation(
        &self,
        rule: &'static str,
        window: usize,
        difference: String,
    ) -> RuleViolation {
        RuleViolation {
            rule,
            seed: self.seed,
            window,
            what: difference,
        }
    }

    fn run(
        &self,
        policy_factory: PolicyFactory<'_>,
        rename: impl Fn(TaskId) -> TaskId,
    ) -> Result<Vec<Decision>, RuleViolation> {
        let mut policy = policy_factory(self.seed);
        let mut previous_plan = Plan::idle(WindowLength::Time { ns: 1 });
        let mut decisions = Vec::new();
        for (index, (observation, profiles)) in self.windows.iter().enumerate() {
            let observation = rename_observation(observation, &rename);
            let profiles = profiles
                .iter()
                .map(|(&task, profile)| (rename(task), profile.clone()))
                .collect();
            let decision = self.decide(
                policy.as_mut(),
                &observation,
                &profiles,
                &previous_plan,
                index,
            )?;
            previous_plan = decision.plan.clone();
            decisions.push(decision);
        }

        Ok(decisions)
    }

    fn decide(
        &self,
        policy: &mut dyn Policy,
        observation: &Observation,
        profiles: &Profiles,
        previous_plan: &Plan,
        window: usize,
    ) -> Result<Decision, RuleViolation> {
        let (topology, capabilities) = (&self.topology, &self.capabilities);
        let view = View {
            topology,
            capabilities,
            observation,
            profiles,
            previous_plan,
            predictor: &REFERENCE,
            verdicts: &(),
        };
        let decision = policy.decide(&view);
        check_plan(&decision.plan, &view).map_err(|plan_error| {
            self.build_violation("the plan is always valid", window, plan_error.to_string())
        })?;

        let is_missing =
            |task: &TaskId| observation.tasks.iter().all(|sample| sample.task != *task);
        if let Some(reason) = decision
            .reasons
            .iter()
            .find(|reason| reason.tasks.iter().any(is_missing))
        {
            return Err(self.build_violation(
                "reasons name tasks of this window",
                window,
                format!("{reason:?}"),
            ));
        }

        Ok(decision)
    }

    fn check_equal(
        &self,
        rule: &'static str,
        expected: &[Decision],
        found: &[Decision],
    ) -> Result<(), RuleViolation> {
        // A run with fewer decisions differs at the first one that it lacks.
        match (0..expected.len().max(found.len()))
            .find(|&window| expected.get(window) != found.get(window))
        {
            None => Ok(()),
            Some(window) => Err(self.build_violation(
                rule,
                window,
                format!(
                    "expected {:?}, found {:?}",
                    expected.get(window),
                    found.get(window)
                ),
            )),
        }
    }

    /// Checks that the plan stays when, after the last window, the same tasks are observed without profiles or
    /// measurements.
    fn check_keeps_plan_without_evidence(
        &self,
        policy_factory: PolicyFactory<'_>,
    ) -> Result<(), RuleViolation> {
        let rule = "without evidence allowed, gangs and shares stay";

        let mut policy = policy_factory(self.seed);
        let mut previous_plan = Plan::idle(WindowLength::Time { ns: 1 });
        for (index, (observation, profiles)) in self.windows.iter().enumerate() {
            previous_plan = self
                .decide(
                    policy.as_mut(),
                    observation,
                    profiles,
                    &previous_plan,
                    index,
                )?
                .plan;
            let mut blind_observation = observation.clone();
            blind_observation.probe_results.clear();
            for task in &mut blind_observation.tasks {
                (task.counts, task.stored_profile) = (EventCounts::default(), None);
            }

            // A lack of evidence must not undo a decision that was made with evidence.
            let plan = self
                .decide(
                    policy.as_mut(),
                    &blind_observation,
                    &Profiles::new(),
                    &previous_plan,
                    index,
                )?
                .plan;
            if (&plan.affinity, &plan.gangs, &plan.shares)
                != (
                    &previous_plan.affinity,
                    &previous_plan.gangs,
                    &previous_plan.shares,
                )
            {
                return Err(self.build_violation(
                    rule,
                    index,
                    format!("before {previous_plan:?}, now {plan:?}"),
                ));
            }
            previous_plan = plan;
        }

        Ok(())
    }

    /// Checks that a fresh policy makes the same decisions from a record of the run, which passes through the control
    /// loop and JSON.
    fn check_replay(&self, policy_factory: PolicyFactory<'_>) -> Result<(), RuleViolation> {
        let record_windows =
            |windows: Vec<Observation>| -> Result<Vec<WindowRecord>, RuleViolation> {
                let machine =
                    ScriptedMachine::new(self.topology.clone(), self.capabilities.clone(), windows);
                let profilers: Vec<Box<dyn Profiler>> = vec![Box::new(RecognizedProfiler)];
                let first_window = WindowLength::Time { ns: 1 };
                let mut control_loop = ControlLoop::new(
                    machine,
                    ProfilerChain::new(profilers, None),
                    Box::new(REFERENCE),
                    "conforming",
                    policy_factory(self.seed),
                    first_window,
                );
                let mut records = Vec::new();
                while let Some(record) = control_loop.step().map_err(|error| {
                    self.build_violation(
                        "the loop accepts every plan",
                        records.len(),
                        error.to_string(),
                    )
                })? {
                    records.push(record);
                }
                Ok(records)
            };
        let recorded_windows = record_windows(
            self.windows
                .iter()
                .map(|(observation, _)| observation.clone())
                .collect(),
        )?;
        let replayed_records = record_windows(
            recorded_windows
                .iter()
                .map(|record| record.observation.clone())
                .collect(),
        )?;
        let decisions_of = |records: Vec<WindowRecord>| {
            records.into_iter().map(|r| r.decision).collect::<Vec<_>>()
        };
        self.check_equal(
            "record -> replay gives the same decisions",
            &decisions_of(recorded_windows),
            &decisions_of(replayed_records),
        )
    }
}

/// A profiler that only adds the stored profiles of recognized recordings.
struct RecognizedProfiler;

impl Profiler for RecognizedProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("recognized recordings", Some(EvidenceKind::StoredProfiles))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        profiles.retain(|id, _| observation.tasks.iter().any(|task| task.task == *id));
        for task in &observation.tasks {
            if let Some(profile) = &task.stored_profile {
                profiles.insert(task.task, (**profile).clone());
            }
        }
    }
}

fn draw_topology(generator: &mut SplitMix64, seed: u64) -> Topology {
    // Every sixth machine reports no caches.
    let cache_count = if seed % 6 == 5 {
        0
    } else {
        1 + generator.draw_below(4) as u32
    };

    let cpus_per_cache = 1 + generator.draw_below(4) as u32;
    let cpu_count = cache_count.max(1) * cpus_per_cache;
    let build_cpu = |id: u32, online| Cpu {
        id: CpuId(id),
        core: id,
        package: id / cpus_per_cache / 2,
        memory_node: 0,
        online,
        hertz: Some(1_000_000_000),
    };
    let cpus: Vec<Cpu> = (0..cpu_count)
        .map(|id| build_cpu(id, id == 0 || generator.draw_below(6) > 0))
        .collect();
    let build_cache = |id: u32| Cache {
        id: CacheId(id),
        level: CacheLevel::L3,
        cpus: (id * cpus_per_cache..(id + 1) * cpus_per_cache).collect(),
        last_level: true,
        size_bytes: Some(4 << 20),
        ways: Some(16),
        line_bytes: Some(64),
    };
    Topology {
        cpus,
        caches: (0..cache_count).map(build_cache).collect(),
        ..Topology::default()
    }
}

fn draw_capabilities(generator: &mut SplitMix64, topology: &Topology) -> Capabilities {
    let ways = PartitionSupport::Ways {
        ways: 16,
        min_ways: 1,
        contiguous: true,
        max_groups: 16,
        device_ways: 0,
    };

    let colors = PartitionSupport::Colors {
        colors: 16,
        page_bytes: 4096,
        page_migration_ns: 7_000.0,
    };
    let support = [Some(ways), Some(colors), None][generator.draw_below(3) as usize];
    let partitions = topology
        .caches
        .iter()
        .filter_map(|cache| Some((cache.id, support?)))
        .collect();

    let support_of = |is_supported: bool| match is_supported {
        true => Support::Yes { note: None },
        false => Support::No {
            reason: "not on this machine".to_string(),
            remedy: None,
        },
    };
    let abilities = Ability::ALL
        .into_iter()
        .map(|ability| (ability, support_of(generator.draw_below(5) > 0)))
        .collect();
    Capabilities {
        abilities,
        partitions,
        bandwidth: Vec::new(),
        min_window_ns: 1_000,
        min_slice_ns: Some(1_000),
    }
}

fn draw_arrival(generator: &mut SplitMix64, id: u32, window: u64) -> TaskSample {
    let goal = Goal {
        priority: 1.0 + generator.draw_unit(),
        max_slowdown: Some(0.1),
        min_rate: Some(1e9),
        ..Goal::default()
    };
    TaskSample {
        name: format!("program-{}", generator.draw_below(5)),
        arrival_ns: window * 1_000_000,
        unmovable: generator.draw_below(8) == 0,
        goal: (generator.draw_below(6) == 0).then_some(goal),
        ..TaskSample::new(TaskId(id), ProcessId(id / 2))
    }
}

/// Sampled remote accesses of the tasks as a probe result, or `None` in some cases, so that the evidence has gaps.
fn draw_access_samples(generator: &mut SplitMix64, tasks: &[TaskSample]) -> Option<ProbeResult> {
    if tasks.is_empty() || generator.draw_below(2) == 0 {
        return None;
    }

    let draw_sample = |generator: &mut SplitMix64| AccessSample {
        task: tasks[generator.draw_below(tasks.len() as u64) as usize].task,
        virtual_line: generator.draw_below(32),
        physical_line: None,
        source: DataSource::RemoteCache,
        latency_cycles: None,
        at_ns: 0,
    };
    let samples = (0..generator.draw_below(100))
        .map(|_| draw_sample(generator))
        .collect();
    let evidence = ProbeEvidence::Samples {
        sample_period: 1,
        events: 100,
        line_bytes: 128,
        samples,
    };
    let (probe, complete) = (
        ProbeId(generator.draw_below(3) as u32),
        generator.draw_below(2) == 0,
    );
    Some(ProbeResult {
        probe,
        evidence,
        complete,
        cost_ns: vec![(None, generator.draw_below(1000))],
    })
}

/// Fills in readings with gaps: some events are multiplexed, never counted, or missing.
fn fill_counts(generator: &mut SplitMix64, task: &mut TaskSample, topology: &Topology) {
    let online: Vec<CpuId> = topology
        .cpus
        .iter()
        .filter(|cpu| cpu.online)
        .map(|cpu| cpu.id)
        .collect();
    task.cpu = (generator.draw_below(4) > 0)
        .then(|| online[generator.draw_below(online.len() as u64) as usize]);
    task.on_cpu_ns = task
        .cpu
        .map(|cpu| (cpu, 1 + generator.draw_below(1_000_000)))
        .into_iter()
        .collect();

    let stall_event = CounterEvent::StallCycles(StallCause::RemoteCache);
    let events = [
        CounterEvent::Instructions,
        CounterEvent::Cycles,
        CounterEvent::References(CacheLevel::L3),
        CounterEvent::Misses(CacheLevel::L3),
        stall_event,
    ];
    let event_counts = events.into_iter().filter_map(|event| {
        let event_count = EventCount {
            event,
            count: generator.draw_below(1 << 20),
            enabled_share: generator.draw_below(3) as f64 / 2.0,
        };
        (generator.draw_below(4) > 0).then_some(event_count)
    });
    task.counts = EventCounts(event_counts.collect());
}

/// Builds a profile of which any part may be missing.
fn draw_profile(generator: &mut SplitMix64, process: ProcessId) -> Profile {
    let mut maybe_estimate = |low: f64, high: f64| {
        let value = low + (high - low) * generator.draw_unit();
        (generator.draw_below(4) > 0).then_some(Estimate {
            value,
            low: value * 0.9,
            high: value * 1.1,
        })
    };
    let miss_curve = maybe_estimate(1.0, 40.0).map(|max_rate| {
        let point_at = |size: u64| {
            let value = max_rate.value / (1.0 + size as f64 / 1e6);
            (
                size,
                Estimate {
                    value,
                    low: value * 0.9,
                    high: value * 1.1,
                },
            )
        };
        (1..=16).map(|step| point_at(step << 18)).collect()
    });

    // There are three kinds of threads, by the regions that they share; some of them have no evidence.
    let sharing = maybe_estimate(0.0, 3.0).map(|kind| {
        let region_group = kind.value as usize;
        (0..32)
            .map(|entry| {
                if entry / 8 == region_group {
                    200
                } else {
                    entry as u8 % 5
                }
            })
            .collect()
    });

    let hits_by_position = maybe_estimate(1.0, 1000.0).map(|first| {
        (0..17)
            .map(|way| first.value / f64::from(way + 1))
            .collect()
    });
    let observed_mpki = maybe_estimate(0.0, 30.0);
    let (pcmr, intensity, sensitivity) = (
        maybe_estimate(-5.0, 60.0),
        maybe_estimate(0.0, 1.0),
        maybe_estimate(0.0, 1.0),
    );
    let (llc_references, solo_instr_per_cycle) =
        (maybe_estimate(1e3, 5e4), maybe_estimate(0.1, 2.0));
    let has_activity = generator.draw_below(4) > 0;
    let mut draw_count = |_| SuperSetCount {
        accesses: generator.draw_below(1000),
        misses: generator.draw_below(100),
    };
    let super_set_counts = has_activity.then(|| {
        (
            CacheLevel::L3,
            oracle_fact_of((0..8).map(&mut draw_count).collect()),
        )
    });
    let known_fact = |estimate: Option<Estimate>| {
        estimate.map(|value| Fact::from_measurement(value, FactSource::Oracle, 0))
    };
    Profile {
        process: Some(process),
        locality: LocalityFacts {
            misses_per_kilo_instr: miss_curve
                .map(|curve| (CacheLevel::L3, oracle_fact_of(curve)))
                .into_iter()
                .collect(),
            stack_positions: hits_by_position.map(oracle_fact_of),
            activity: super_set_counts.into_iter().collect(),
            ..LocalityFacts::default()
        },
        rates: RateFacts {
            llc_refs_per_mega_instr: known_fact(llc_references),
            solo_instr_per_cycle: known_fact(solo_instr_per_cycle),
            observed_misses_per_kilo_instr: known_fact(observed_mpki),
            pcmr: known_fact(pcmr),
            ..RateFacts::default()
        },
        contention: ContentionFacts {
            intensity: known_fact(intensity),
            sensitivity: known_fact(sensitivity),
            ..ContentionFacts::default()
        },
        sharing: SharingFacts {
            map: sharing.map(|counters| {
                oracle_fact_of(SharingMap {
                    counters,
                    machine_wide: false,
                })
            }),
            ..SharingFacts::default()
        },
        ..Profile::default()
    }
}

fn oracle_fact_of<T>(value: T) -> Fact<T> {
    Fact::new(value, FactSource::Oracle, 0)
}

fn rename_observation(
    observation: &Observation,
    rename: &impl Fn(TaskId) -> TaskId,
) -> Observation {
    let mut renamed_observation = observation.clone();
    for task in &mut renamed_observation.tasks {
        task.task = rename(task.task);
    }
    for probe_result in &mut renamed_observation.probe_results {
        if let ProbeEvidence::Samples { samples, .. } = &mut probe_result.evidence {
            for sample in samples {
                sample.task = rename(sample.task);
            }
        }
    }
    renamed_observation
}

fn rename_decision(decision: &Decision, rename: &impl Fn(TaskId) -> TaskId) -> Decision {
    let mut decision = decision.clone();
    let plan = &mut decision.plan;
    plan.affinity = std::mem::take(&mut plan.affinity)
        .into_iter()
        .map(|(task, cpus)| (rename(task), cpus))
        .collect();
    plan.weights = plan
        .weights
        .iter()
        .map(|(&task, &weight)| (rename(task), weight))
        .collect();
    for (task, _) in plan
        .gangs
        .iter_mut()
        .flat_map(|s| &mut s.gangs)
        .flat_map(|gang| &mut gang.members)
    {
        *task = rename(*task);
    }

    for member in plan.shares.iter_mut().flat_map(|share| &mut share.members) {
        if let ShareMember::Task(task) = member {
            *task = rename(*task);
        }
    }

    for penalty in &mut plan.penalties {
        penalty.tasks = (rename(penalty.tasks.0), rename(penalty.tasks.1));
    }
    plan.probes
        .iter_mut()
        .for_each(|probe| rename_probe(&mut probe.kind, rename));
    decision
        .reasons
        .iter_mut()
        .flat_map(|reason| &mut reason.tasks)
        .for_each(|task| *task = rename(*task));

    if let Some(forecast) = &mut decision.forecast {
        forecast.tasks = std::mem::take(&mut forecast.tasks)
            .into_iter()
            .map(|(task, estimate)| (rename(task), estimate))
            .collect();
        forecast
            .unknown
            .iter_mut()
            .for_each(|task| *task = rename(*task));
    }

    decision
}

fn rename_probe(kind: &mut ProbeKind, rename: &impl Fn(TaskId) -> TaskId) {
    match kind {
        ProbeKind::CoRunRows { rows, .. } => rows
            .iter_mut()
            .flatten()
            .for_each(|task| *task = rename(*task)),
        ProbeKind::PairedRows { task, peers, .. } => {
            *task = rename(*task);
            peers.iter_mut().for_each(|peer| *peer = rename(*peer));
        }
        ProbeKind::MissTrace { task, .. }
        | ProbeKind::ReuseTimes { task, .. }
        | ProbeKind::Neighbor { task, .. }
        | ProbeKind::PrimeProbe { task, .. } => {
            *task = rename(*task);
        }
        ProbeKind::SuperSets { tasks, .. } => {
            tasks.iter_mut().for_each(|task| *task = rename(*task))
        }
        ProbeKind::AccessSamples { .. } | ProbeKind::PingPong { .. } => {}
    }
}

#[cfg(test)]
mod tests;
