//! A core: contexts that share an issue slot (or several per cycle), in order or out of order.
//!
//! Contexts are served in the order of the ticks at which they became ready, for one *turn* at a time while others are
//! ready too. Time advances from one access to the next, never instruction by instruction. L1 hits of a core are
//! private: the core runs ahead with them, at most [`RUN_AHEAD_CYCLES`] past the core that is furthest behind.
//! Everything that others can see (misses, stores to shared lines, translations, the operating system) happens in order
//! of time over all cores.

use cachemate_core::{CacheLevel, CoreModel, CpuId, MachineSpec};

use super::burst::{Burst, BurstOutcome};
use super::cache_unit::DataOrigin;
use super::caches::Caches;
use super::context::HwContext;
use super::core_kind::{
    AnyCore, CoreKind, CoreKindName, InOrderWriteThroughCore, LRU_2, LRU_4, LRU_8,
    OutOfOrderWriteThroughCore, WriteBackCore,
};
use super::front_end::{ContextRun, CoreEnvironment, CoreFrontEnd};
use super::{Charge, StopReason};

/// Cycles by which a core may run ahead with accesses that no other core observes. A line that another core invalidates
/// can still be hit for at most this long.
pub(crate) const RUN_AHEAD_CYCLES: u64 = 400;
/// Length of a context's turn while others are ready.
const TURN_CYCLES: u64 = 32;
/// Number of bits below the tick in a key, which order equal ticks.
const ORDER_BITS: u32 = 8;
/// Tick in the key of a context that is never ready.
const NEVER_READY: u64 = u64::MAX >> ORDER_BITS;
/// Number of cores whose cache state mostly fits the host's second cache.
const MAX_CORES_WITHOUT_HINTS: u32 = 8;

/// The bounds up to which a core may run.
#[derive(Clone, Copy)]
pub(crate) struct RunBounds {
    /// Last tick at which the core may do something that others see.
    pub shared_bound: u64,
    /// First tick into which the core must not run.
    pub end_tick: u64,
}

pub(crate) struct Core {
    pub front_end: CoreFrontEnd,
    /// [`HwContext::ready_tick`] of each context in one array, because every turn begins by reading all of them.
    /// Meaningless for the context whose run is in progress.
    ready_ticks: Vec<u64>,
    /// Tick up to which the issue slots are used.
    used_until: u64,
    /// The context that has the turn or had it last, and the end of that turn.
    current_turn: (usize, u64),
    /// The run in progress, or suspended in the middle of an access that must wait for cores that are behind.
    burst: Burst,
    /// The result of [`Core::next_tick`] after [`Core::advance`] reached its bounds.
    pub next_advance_tick: u64,
}

/// A key orders contexts by tick, then in turn after the last context, with the last one itself at
/// the end. The next context is unpredictable, so the loop has no branches.
#[inline(always)]
fn two_smallest_keys(ready_ticks: &[u64], last_context: usize) -> (u64, u64) {
    let (mut first_key, mut second_key) = (u64::MAX, u64::MAX);
    for (context_index, &tick) in ready_ticks.iter().enumerate() {
        let order = context_index
            + if context_index > last_context {
                0
            } else {
                ready_ticks.len()
            }
            - last_context
            - 1;
        let key = tick.min(NEVER_READY) << ORDER_BITS | order as u64;
        second_key = second_key.min(first_key.max(key));
        first_key = first_key.min(key);
    }
    (first_key, second_key)
}

impl Core {
    pub fn new(machine: &MachineSpec, number: u32, l1d: usize, l1i: Option<usize>) -> Self {
        let first_cpu = number * machine.contexts_per_core;
        let cpus = first_cpu..first_cpu + machine.contexts_per_core;
        let (is_in_order, window, loads_pass) = match machine.pipeline {
            CoreModel::InOrder { .. } => (true, u64::MAX, false),
            CoreModel::OutOfOrder {
                window, loads_pass, ..
            } => (false, u64::from(window), loads_pass),
        };
        let l1d_origin = DataOrigin::Hit(CacheLevel::L1Data);
        let contexts: Vec<HwContext> = cpus
            .map(|cpu| HwContext::new(CpuId(cpu), l1d_origin))
            .collect();
        let ready_ticks = vec![u64::MAX; contexts.len()];
        let package = number / machine.cores_per_package;

        let front_end = CoreFrontEnd {
            contexts,
            l1d,
            l1i,
            package,
            core: number,
            is_in_order,
            stores_block: matches!(
                machine.pipeline,
                CoreModel::InOrder {
                    store_buffer: 0,
                    ..
                }
            ),
            can_overtake_loads: loads_pass,
            kind: CoreKindName::from_machine(machine),
            is_next_level_private: false,
            uses_host_hints: machine.cores() > MAX_CORES_WITHOUT_HINTS,
            window,
            window_share: window,
            mshr_count: machine.pipeline.max_misses_in_flight() as usize,
        };

        Core {
            front_end,
            ready_ticks,
            used_until: 0,
            current_turn: (0, 0),
            burst: Burst::default(),
            next_advance_tick: u64::MAX,
        }
    }

    /// Tick of the core's next possible action; `u64::MAX` if there is none.
    #[inline]
    pub fn next_tick(&self) -> u64 {
        if self.burst.thread.is_some() {
            return self.used_until;
        }
        let min_ready_tick = self
            .ready_ticks
            .iter()
            .fold(u64::MAX, |least, &ready| ready.min(least));
        if min_ready_tick == u64::MAX {
            min_ready_tick
        } else {
            min_ready_tick.max(self.used_until)
        }
    }

    /// Updates the core after a thread was loaded or removed, or its time moved.
    pub fn update_contexts(&mut self) {
        self.ready_ticks
            .iter_mut()
            .zip(&self.front_end.contexts)
            .for_each(|(ready, context)| *ready = context.ready_tick());
        if !self.front_end.is_in_order {
            let loaded_count = self
                .front_end
                .contexts
                .iter()
                .filter(|context| context.thread.is_some())
                .count() as u64;
            self.front_end.window_share = self.front_end.window / loaded_count.max(1);
        }
    }

    /// The context whose turn it is, the tick at which it is ready, and the tick at which the next
    /// other one is. `u64::MAX` means never.
    #[inline]
    fn pick_context(&self) -> (usize, u64, u64) {
        let ((last_context, turn_end), context_count) = (self.current_turn, self.ready_ticks.len());
        let (first_key, second_key) = match <&[u64; 4]>::try_from(self.ready_ticks.as_slice()) {
            Ok(ready) => two_smallest_keys(ready, last_context),
            Err(_) => two_smallest_keys(&self.ready_ticks, last_context),
        };
        let tick_of_key = |key: u64| {
            if key >> ORDER_BITS == NEVER_READY {
                u64::MAX
            } else {
                key >> ORDER_BITS
            }
        };

        let distance = (first_key & ((1 << ORDER_BITS) - 1)) as usize;
        let last_ready_tick = self.ready_ticks[last_context];
        if last_ready_tick <= self.used_until && self.used_until < turn_end {
            return (
                last_context,
                last_ready_tick,
                tick_of_key(if distance + 1 == context_count {
                    second_key
                } else {
                    first_key
                }),
            );
        }
        let index = last_context + 1 + distance;
        (
            if index < context_count {
                index
            } else {
                index - context_count
            },
            tick_of_key(first_key),
            tick_of_key(second_key),
        )
    }

    /// Runs until the bounds. Returns `Some` if a thread needs the operating system.
    #[inline]
    pub fn advance(
        &mut self,
        bounds: RunBounds,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<StopReason> {
        match self.front_end.kind {
            CoreKindName::Any => self.advance_as::<AnyCore>(bounds, environment),
            CoreKindName::InOrderThrough => {
                self.advance_as::<InOrderWriteThroughCore>(bounds, environment)
            }
            CoreKindName::WindowThrough => {
                self.advance_as::<OutOfOrderWriteThroughCore>(bounds, environment)
            }
            CoreKindName::Back2 => self.advance_as::<WriteBackCore<LRU_2>>(bounds, environment),
            CoreKindName::Back4 => self.advance_as::<WriteBackCore<LRU_4>>(bounds, environment),
            CoreKindName::Back8 => self.advance_as::<WriteBackCore<LRU_8>>(bounds, environment),
        }
    }

    #[inline(never)]
    fn advance_as<K: CoreKind>(
        &mut self,
        bounds: RunBounds,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<StopReason> {
        loop {
            // The turn may be over while another context is ready.
            if self.burst.thread.is_some()
                && self.burst.tick >= self.current_turn.1.max(self.burst.run.other_ready_tick)
            {
                self.end_run(environment.caches);
            }

            if self.burst.thread.is_some() {
                if self.burst.tick >= bounds.end_tick {
                    self.next_advance_tick = self.used_until;
                    return None;
                }
            } else if !self.start_run(bounds, environment.ticks_per_cycle) {
                return None;
            }

            self.burst.run.end_tick = bounds
                .end_tick
                .min(self.current_turn.1.max(self.burst.run.other_ready_tick));
            self.burst.run.shared_bound = bounds.shared_bound;
            let outcome = match self.burst.is_watched {
                true => self.front_end.execute_watched(&mut self.burst, environment),
                false => self.front_end.execute::<K>(&mut self.burst, environment),
            };
            self.used_until = self.burst.tick;
            if !self.burst.has_probes
                && matches!(outcome, BurstOutcome::Yield | BurstOutcome::Blocked)
            {
                self.end_run(environment.caches);
                continue;
            }

            let is_held = matches!(outcome, BurstOutcome::AheadOfCores);
            if is_held && !self.burst.has_overflow_count() {
                self.next_advance_tick = self.used_until;
                return None;
            }
            let stop = self.finish_run(outcome, environment);
            if stop.is_some() || is_held {
                self.next_advance_tick = self.next_tick();
                return stop;
            }
        }
    }

    /// Begins the run of the next context. Returns false if none is ready in time.
    #[inline]
    fn start_run(&mut self, bounds: RunBounds, ticks_per_cycle: u64) -> bool {
        debug_assert!(
            self.ready_ticks
                .iter()
                .zip(&self.front_end.contexts)
                .all(|(&ready, context)| ready == context.ready_tick())
        );
        let (context_index, ready_tick, other_ready_tick) = self.pick_context();
        let start = self.used_until.max(ready_tick);
        if start >= bounds.end_tick {
            self.next_advance_tick = if ready_tick == u64::MAX {
                ready_tick
            } else {
                start
            };
            return false;
        }
        // A turn begins only with a change of contexts: a context that is alone after its turn yields as soon as
        // another is ready, wherever the bounds cut its run.
        if context_index != self.current_turn.0 || self.current_turn.1 == 0 {
            self.current_turn = (context_index, start + TURN_CYCLES * ticks_per_cycle);
        }
        let front_end = &mut self.front_end;
        let max_outstanding = front_end.max_outstanding(context_index);
        let window = front_end.window_share;
        let context = &mut front_end.contexts[context_index];
        context.attribute_ticks(start);
        let Some(thread) = context.thread.take() else {
            return false;
        };
        self.burst.start_burst(
            ContextRun {
                context_index,
                start_tick: start,
                end_tick: start,
                other_ready_tick,
                shared_bound: 0,
            },
            thread,
            window,
            max_outstanding,
        );
        true
    }

    /// Ends the run with this outcome. Returns `Some` if the operating system is needed.
    #[inline]
    fn finish_run(
        &mut self,
        outcome: BurstOutcome,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<StopReason> {
        let (context_index, now) = (self.burst.run.context_index, self.burst.tick);
        let has_overflow_count = self.burst.has_overflow_count();
        self.end_run(environment.caches);
        let context = &mut self.front_end.contexts[context_index];
        let (cpu, current_cycle) = (context.cpu, || now / environment.ticks_per_cycle);
        let has_overflowed = has_overflow_count
            && context
                .thread
                .as_mut()
                .is_some_and(|thread| thread.probes.advance_overflows(&thread.counters));

        match outcome {
            BurstOutcome::BatchEnd(turn) => Some(StopReason::BatchEnd {
                cpu,
                batch_end: turn,
                end_cycle: current_cycle(),
            }),
            BurstOutcome::Interrupt => Some(StopReason::Interrupt {
                cpu,
                task: context.task()?,
                interrupt_cycle: current_cycle(),
            }),
            _ if has_overflowed => {
                context.charge_ticks(now, environment.sampling.interrupt_ticks, Charge::Interrupt);
                self.ready_ticks[context_index] = context.ready_tick();
                Some(StopReason::Interrupt {
                    cpu,
                    task: context.task()?,
                    interrupt_cycle: current_cycle(),
                })
            }
            _ => None,
        }
    }

    /// Ends the run, if there is one: its counts are added, and its thread can be observed and removed.
    #[inline]
    pub fn end_run(&mut self, caches: &mut Caches) {
        if let Some(thread) = self.burst.thread.take() {
            let context_index = self.burst.run.context_index;
            let thread = self.front_end.close_run(&self.burst, thread, caches);
            let context = &mut self.front_end.contexts[context_index];
            context.thread = Some(thread);
            self.ready_ticks[context_index] = context.ready_at;
        }
    }
}
