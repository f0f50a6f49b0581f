//! A reference for the fast path: it works record by record, keeps no state in registers, and reads every bound again.

use proptest::prelude::*;

use super::*;
use crate::hw::burst::{Burst, SlowPathCause};
use crate::hw::cache_unit::DataOrigin;
use crate::hw::context::StallSource;
use crate::hw::core_kind::{AnyCore, CoreKindName};
use crate::hw::front_end::{CoreEnvironment, CoreFrontEnd};
use crate::hw::store::{LineMeta, PENDING};

impl CoreFrontEnd {
    /// The same as [`CoreFrontEnd::run_fast_path`], for caches of any shape.
    pub(in crate::hw) fn step(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> SlowPathCause {
        loop {
            let nth = burst.run.context_index;
            let Some(&access) = thread.batch.get(thread.position) else {
                return SlowPathCause::BatchEnd;
            };

            burst.stop_tick =
                burst.find_issue_limit(self.is_in_order, burst.tick, &mut self.contexts[nth]);
            match access.kind() {
                AccessKind::Jump => return SlowPathCause::Jump,
                AccessKind::Compute => return SlowPathCause::Compute,
                AccessKind::Load | AccessKind::Store => {}
            }

            let needed = access.instructions() - burst.issued_in_record;
            let budget = (burst.stop_tick - burst.tick).min(thread.instructions_until_fetch);
            if needed > budget {
                burst.issue_instructions(budget, thread, &mut self.contexts[nth]);
                return if thread.instructions_until_fetch > 0 {
                    SlowPathCause::Budget
                } else {
                    SlowPathCause::Fetch
                };
            }

            burst.issue_instructions(needed - 1, thread, &mut self.contexts[nth]);
            if access.is_dependent() && self.contexts[nth].value_tick > burst.tick {
                return SlowPathCause::PendingAddress;
            }
            let page = access.address() >> environment.page_shift;
            if page != burst.page {
                let Some(frame) = thread.tlb.find(page) else {
                    return SlowPathCause::TranslationMiss;
                };
                (burst.page, burst.frame_address) = (page, frame << environment.page_shift);
            }

            if self.step_in_cache(access, burst, thread, environment) {
                continue;
            }
            if let Some(event) = self.step_beyond(access, burst, thread, environment) {
                return event;
            }
        }
    }

    /// Handles an access that is not a plain hit, at its tick. `Some` if the fast path would end.
    fn step_beyond(
        &mut self,
        access: Access,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<SlowPathCause> {
        let (nth, issue, store) = (burst.run.context_index, burst.tick, access.is_store());
        let address = burst.frame_address | access.address() & ((1 << environment.page_shift) - 1);
        let unit = &environment.caches.units[self.l1d];
        let line = address >> unit.line_shift;
        let place = unit.store.find(line);
        let arriving = place.is_some_and(|place| {
            let meta = unit.store.line_meta(place).0;
            let filled_meta = LineMeta(meta & !PENDING);
            meta & PENDING != 0
                && !filled_meta.needs_slow_path(store, unit.write_policy == WritePolicy::Through)
        });
        let waits = issue > burst.run.shared_bound && !arriving;
        if waits
            && !environment
                .caches
                .can_next_level_serve(self.l1d, place, address, store)
        {
            return Some(SlowPathCause::ObservableAccess);
        }

        if burst.has_probes || arriving {
            return Some(SlowPathCause::Memory);
        }

        let nearest = issue + environment.caches.units[self.l1d].latency_ticks;
        let mut joined = false;
        if self.contexts[nth].mshrs_in_use >= burst.max_outstanding {
            joined = self.can_join_miss(nth, address, issue, environment.caches);
            if !joined && !self.try_reclaim_mshrs(nth, issue) {
                return Some(SlowPathCause::Memory);
            }
            burst.max_outstanding = self.max_outstanding(nth);
        }

        let request = self.build_request(address, issue, store, thread);
        let response = environment.caches.access_first_level::<AnyCore>(
            self.l1d,
            place,
            &request,
            &mut thread.counters,
        );
        let wait = StallSource {
            origin: response.origin,
            queue_ticks: response.queue_ticks,
            is_joined: joined,
        };
        let context = &mut self.contexts[nth];
        burst.issue_access(thread, context);
        context
            .complete_access(
                response.ready_tick,
                wait,
                nearest,
                burst.tick,
                store && !self.stores_block,
                self.is_in_order,
            )
            .then_some(SlowPathCause::PendingValue)
    }

    /// Handles a plain hit of the data cache. Returns false for another kind of access.
    fn step_in_cache(
        &mut self,
        access: Access,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> bool {
        let unit = &mut environment.caches.units[self.l1d];
        let line = (burst.frame_address | access.address() & ((1 << environment.page_shift) - 1))
            >> unit.line_shift;
        let Some(place) = unit.store.find(line) else {
            return false;
        };

        let store = access.kind() == AccessKind::Store;
        let filled_meta = LineMeta(unit.store.line_meta(place).0 & !PENDING);
        let is_late = unit.store.line_meta(place) != filled_meta
            && !unit
                .pending_fills
                .has_arrived(line, burst.tick + unit.latency_ticks);
        if is_late || filled_meta.needs_slow_path(store, unit.write_policy == WritePolicy::Through)
        {
            return false;
        }

        unit.store.set_meta(place, filled_meta.after_hit(store));
        unit.store.touch(line, place);
        let context = &mut self.contexts[burst.run.context_index];
        if !store {
            (context.value_tick, context.value_origin) = (
                burst.tick + unit.latency_ticks,
                DataOrigin::Hit(CacheLevel::L1Data),
            );
        }
        burst.hits += 1;
        burst.issue_access(thread, context);
        true
    }
}

/// The same machine with cores of a kind for which the engine is compiled.
fn of_kind(kind: CoreKindName, spec: MachineSpec) -> MachineSpec {
    let (replacement, write, ways, code_ways) = match kind {
        CoreKindName::Any => return spec,
        CoreKindName::InOrderThrough => (ReplacementPolicy::Random, WritePolicy::Through, 4, 4),
        CoreKindName::WindowThrough => (ReplacementPolicy::Lru, WritePolicy::Through, 4, 2),
        CoreKindName::Back2 => (ReplacementPolicy::Lru, WritePolicy::Back, 2, 2),
        CoreKindName::Back4 => (ReplacementPolicy::Lru, WritePolicy::Back, 4, 4),
        CoreKindName::Back8 => (ReplacementPolicy::Lru, WritePolicy::Back, 8, 8),
    };

    let in_order = matches!(spec.pipeline, CoreModel::InOrder { .. });
    let pipeline = match kind {
        CoreKindName::InOrderThrough => CoreModel::in_order(1),
        CoreKindName::WindowThrough if in_order => CoreModel::OutOfOrder {
            issue_width: 4,
            window: 64,
            mshrs: 8,
            loads_pass: true,
        },
        _ => spec.pipeline,
    };

    let caches = spec.caches.into_iter().map(|cache| {
        let size_with_ways = |ways: u32| cache.size_bytes / u64::from(cache.ways) * u64::from(ways);
        match cache.level {
            CacheLevel::L1Instruction => CacheSpec {
                replacement: ReplacementPolicy::Lru,
                size_bytes: size_with_ways(code_ways),
                ways: code_ways,
                ..cache
            },
            CacheLevel::L1Data => CacheSpec {
                replacement,
                write,
                size_bytes: size_with_ways(ways),
                ways,
                ..cache
            },
            _ => cache,
        }
    });

    let spec = MachineSpec {
        pipeline,
        caches: caches.collect(),
        ..spec
    };
    assert_eq!(CoreKindName::from_machine(&spec), kind);
    spec
}

/// Two packages of two cores, of every kind for which the engine is compiled, and of others.
fn machine_strategy() -> impl Strategy<Value = MachineSpec> {
    let pipeline = prop_oneof![
        Just(CoreModel::in_order(1)),
        Just(CoreModel::in_order(2)),
        Just(CoreModel::InOrder {
            issue_width: 1,
            store_buffer: 0
        }),
        Just(CoreModel::OutOfOrder {
            issue_width: 3,
            window: 24,
            mshrs: 3,
            loads_pass: false
        }),
        Just(CoreModel::OutOfOrder {
            issue_width: 4,
            window: 64,
            mshrs: 8,
            loads_pass: true
        }),
    ];

    let replacement = prop_oneof![
        Just(ReplacementPolicy::Lru),
        Just(ReplacementPolicy::Random),
        Just(ReplacementPolicy::TreePlru)
    ];
    let write = prop_oneof![Just(WritePolicy::Back), Just(WritePolicy::Through)];
    let ways = || prop_oneof![Just(1u32), Just(2), Just(4), Just(8)];
    let index = prop_oneof![Just(SetIndexing::Physical), Just(SetIndexing::Virtual)];
    let kind = prop_oneof![
        Just(CoreKindName::Any),
        Just(CoreKindName::InOrderThrough),
        Just(CoreKindName::WindowThrough),
        Just(CoreKindName::Back2),
        Just(CoreKindName::Back4),
        Just(CoreKindName::Back8),
    ];

    (
        pipeline,
        replacement,
        write,
        (ways(), ways()),
        (index, kind),
        1..=2u32,
        1..=2u32,
    )
        .prop_map(
            |(
                pipeline,
                replacement,
                write,
                (ways, code_ways),
                (index, kind),
                contexts_per_core,
                per_l2,
            )| {
                let mut spec = MachineSpec {
                    pipeline,
                    packages: 2,
                    cores_per_package: 2,
                    contexts_per_core,
                    ..sample_machine()
                };

                // In a virtually indexed cache a way is two pages.
                let way_bytes = if index == SetIndexing::Virtual {
                    8 << 10
                } else {
                    256
                };
                let data =
                    sample_cache(CacheLevel::L1Data, way_bytes * u64::from(ways), ways, 3, 1);
                spec.caches = vec![
                    CacheSpec {
                        replacement,
                        ..sample_cache(
                            CacheLevel::L1Instruction,
                            256 * u64::from(code_ways),
                            code_ways,
                            1,
                            1,
                        )
                    },
                    CacheSpec {
                        replacement,
                        write,
                        index,
                        line_bytes: 32,
                        ..data
                    },
                    CacheSpec {
                        bandwidth_bytes_per_cycle: Some(16.0),
                        ..sample_cache(CacheLevel::L2, 8 << 10, 8, 14, per_l2)
                    },
                ];
                spec.prefetchers = vec![PrefetcherSpec::AdjacentLine {
                    level: CacheLevel::L2,
                }];
                of_kind(kind, spec)
            },
        )
}

/// Threads on all contexts that load, store, jump and compute at random, on private and shared pages.
fn load_threads(hw: &mut Hardware, dice: &mut TestRng) {
    for cpu in 0..hw.spec().cpus() {
        let mut draw_access = || {
            let page = if dice.draw_below(5) == 0 {
                4
            } else {
                u64::from(cpu % 4)
            };
            let lines = [6, 120][dice.draw_below(2) as usize];
            let address = page << 12 | dice.draw_below(2) << 16 | (dice.draw_below(lines) * 32);
            let gap = dice.draw_below(8) as u32;
            match dice.draw_below(10) {
                0 => Access::jump((1 << 20) + dice.draw_below(20) * 96, gap),
                1 => Access::dependent_load(address, gap),
                2 => Access::compute(dice.draw_below(30)),
                3..=5 => Access::store(address, gap),
                _ => Access::load(address, gap),
            }
        };

        let accesses = (0..1_500).map(|_| draw_access()).collect();
        hw.load(CpuId(cpu), scripted_thread(cpu, 0, accesses, true), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Do the engine compiled for a kind of core, the general engine and the slow path leave every counter and every
    /// line in the same state, including stops in between?
    #[test]
    fn compiled_general_and_slow_engines_leave_the_same_state(spec in machine_strategy(), seed in any::<u64>()) {
        let run_engine = |general: bool, step_by_step: bool| {
            let mut hw = build_hardware(&spec);
            hw.caches.skips_fast_path = step_by_step;
            if general {
                hw.cores.iter_mut().for_each(|core| core.front_end.kind = CoreKindName::Any);
            }
            load_threads(&mut hw, &mut TestRng::new(seed));
            hw.run(7_001, &mut IdentityFrames);
            final_state(&mut hw, 20_000)
        };
        let (quick, slow) = (run_engine(false, false), run_engine(true, true));
        quick.0.iter().for_each(assert_balanced);
        prop_assert_eq!(&quick, &run_engine(true, false));
        prop_assert_eq!(quick, slow);
    }
}
