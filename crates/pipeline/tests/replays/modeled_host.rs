//! A host modeled in closed loop without a kernel: two victims and two streams on two last-level caches. The
//! programs' speeds follow from the caches that they share. Probes are answered as on a live machine, with counters
//! or without.

use std::collections::BTreeMap;

use cachemate_core::test_support::observation_of;
use cachemate_core::*;

pub const WINDOW_NS: u64 = 1_000_000_000;
const TASKS: u32 = 4;
const COUNTED_FROM: u64 = 6;

/// The modeled host.
pub struct ModeledHost {
    topology: Topology,
    capabilities: Capabilities,
    counters: bool,
    window: u64,
    windows: u64,
    plan: Plan,
}

impl ModeledHost {
    /// Creates a host with counters, or one that resembles a virtual machine without counters.
    pub fn new(counters: bool, windows: u64) -> Self {
        let topology = test_support::last_level_caches(2, 2, CacheLevel::L3, 16 << 20);
        let mut can = vec![
            Ability::ProbeFromOutside,
            Ability::Affinity,
            Ability::Weights,
            Ability::Gangs,
        ];
        can.push(Ability::SampleReuses);
        if counters {
            can.extend([Ability::CountPerTask, Ability::SampleAccesses]);
        }
        let mut capabilities = test_support::capabilities_fixture(&can);

        let absent = [
            Ability::CountPerTask,
            Ability::TraceAddresses,
            Ability::CountSuperSets,
            Ability::CountPerCache,
        ];
        for ability in absent.into_iter().filter(|ability| !can.contains(ability)) {
            let unsupported = Support::No {
                reason: "not on this host".to_string(),
                remedy: None,
            };
            capabilities.abilities.insert(ability, unsupported);
        }

        let plan = Plan::idle(WindowLength::Time { ns: WINDOW_NS });
        ModeledHost {
            topology,
            capabilities,
            counters,
            window: 0,
            windows,
            plan,
        }
    }

    fn cpu_of(&self, task: u32) -> u32 {
        let default_cpu = task; // victims 0 and 1 share the first cache, streams 2 and 3 the second
        let pinned_cpu = self
            .plan
            .affinity
            .get(&TaskId(task))
            .and_then(IndexSet::first);
        pinned_cpu.unwrap_or(default_cpu).min(TASKS - 1)
    }

    fn is_stream(task: u32) -> bool {
        task >= 2
    }

    /// A victim beside a stream goes to memory (figures of the modeled lab).
    fn access_ns(&self, task: u32) -> f64 {
        let cache = |task: u32| self.cpu_of(task) / 2;
        let beside_stream = (2..TASKS).any(|stream| stream != task && cache(stream) == cache(task));
        match (Self::is_stream(task), beside_stream) {
            (true, _) => 14.0,
            (false, true) => 127.0,
            (false, false) => 27.0,
        }
    }

    /// A few percent that vary between windows and are identical in every run.
    fn noise_factor(&self, task: u32) -> f64 {
        let mixed = (self.window * 7 + u64::from(task) * 13) % 11;
        1.0 + (mixed as f64 - 5.0) / 200.0
    }

    fn task_sample(&self, id: u32) -> TaskSample {
        let accesses = WINDOW_NS as f64 / self.access_ns(id) * self.noise_factor(id);
        let cpu = CpuId(self.cpu_of(id));
        let readings = [
            (CounterEvent::Instructions, 4.0 * accesses),
            (CounterEvent::Cycles, 2e9),
            (CounterEvent::References(CacheLevel::L3), accesses),
            (
                CounterEvent::Misses(CacheLevel::L3),
                if self.access_ns(id) == 27.0 {
                    0.01
                } else {
                    0.9
                } * accesses,
            ),
        ];

        // Counting starts late, as in the modeled lab, where programs start one after the other.
        let counts = if self.counters && self.window >= COUNTED_FROM {
            EventCounts::exact(readings.map(|(event, count)| (event, count as u64)))
        } else {
            EventCounts::default()
        };
        TaskSample {
            name: if Self::is_stream(id) {
                "stream"
            } else {
                "victim"
            }
            .to_string(),
            cpu: Some(cpu),
            on_cpu_ns: vec![(cpu, WINDOW_NS)],
            progress: Some(accesses),
            counts,
            ..TaskSample::new(TaskId(id), ProcessId(id))
        }
    }

    fn probe_evidence(&self, kind: &ProbeKind) -> Option<ProbeEvidence> {
        let stream = |task: &TaskId| Self::is_stream(task.0);

        Some(match kind {
            ProbeKind::PrimeProbe { task, samples } => {
                let share = if stream(task) { 900 } else { 20 };
                let sample = |index: u32| PrimeProbeSample {
                    target_running: index.is_multiple_of(2),
                    evicted: if index.is_multiple_of(2) {
                        share + index
                    } else {
                        index
                    },
                    reloads: 1000,
                    elapsed_ns: 1_000_000,
                    round_trips_ns: Some((60.0, 61.0)),
                };
                let samples = (0..(*samples).max(8)).map(sample).collect();
                ProbeEvidence::PrimeProbe {
                    task: *task,
                    buffer_bytes: 1 << 20,
                    wait_ns: 1_000_000,
                    samples,
                }
            }
            ProbeKind::Neighbor { task, neighbor } => ProbeEvidence::NeighborSlowdown {
                task: *task,
                neighbor: *neighbor,
                neighbor_alone_ns: 10.0,
                neighbor_corun_ns: if stream(task) { 40.0 } else { 11.0 },
                task_alone_rate: Some(100.0),
                task_corun_rate: Some(if stream(task) { 99.0 } else { 25.0 }),
                rate_event: None,
            },
            ProbeKind::PingPong { cpus } => {
                let is_same_cache = cpus.0.0 / 2 == cpus.1.0 / 2;
                ProbeEvidence::PingPong {
                    cpus: *cpus,
                    round_trip_ns: if is_same_cache { 60.0 } else { 320.0 },
                }
            }
            ProbeKind::ReuseTimes { task, locations } => {
                let reuse = |index: u32| ReuseSample {
                    accesses: Some(if stream(task) {
                        1 << 30
                    } else {
                        1 << (index % 12)
                    }),
                    elapsed_ns: 1_000,
                    reused: !stream(task),
                };
                ProbeEvidence::Reuses {
                    task: *task,
                    samples: (0..*locations).map(reuse).collect(),
                }
            }
            _ => return None,
        })
    }
}

impl Machine for ModeledHost {
    fn topology(&self) -> &Topology {
        &self.topology
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        if self.window == self.windows {
            return Ok(None);
        }

        let answer_probe = |probe: &ProbeRequest| {
            let evidence = self.probe_evidence(&probe.kind)?;
            Some(ProbeResult {
                probe: probe.id,
                evidence,
                complete: true,
                cost_ns: vec![(None, 5)],
            })
        };
        let observation = Observation {
            probe_results: self.plan.probes.iter().filter_map(answer_probe).collect(),
            applied: self.applied_plan(),
            ..observation_of(
                self.window,
                WINDOW_NS,
                (0..TASKS).map(|id| self.task_sample(id)),
            )
        };
        self.window += 1;
        Ok(Some(observation))
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        self.plan = plan.clone();
        Ok(self.applied_plan())
    }
}

impl ModeledHost {
    fn applied_plan(&self) -> AppliedPlan {
        let (affinity, gangs) = (self.plan.affinity.clone(), self.plan.gangs.clone());
        AppliedPlan {
            affinity,
            gangs,
            weights: BTreeMap::new(),
            ..AppliedPlan::default()
        }
    }
}
