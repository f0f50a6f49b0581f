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
use super::caches::{CacheRequest, Caches};
use super::context::{HwContext, OutstandingMiss};
use super::core_kind::{
    AnyCore, BackCore, CoreKind, CoreKindName, InOrderThroughCore, LRU_2, LRU_4, LRU_8, WindowThroughCore,
};
use super::sampling::SamplingUnit;
use super::thread::HwThread;
use super::{Charge, FrameProvider, StopReason};

/// Cycles by which a core may run ahead with accesses that no other core observes. A line that another core invalidates
/// can still be hit for at most this long.
pub(crate) const RUN_AHEAD_CYCLES: u64 = 400;
/// Length of a context's turn while others are ready.
const TURN_CYCLES: u64 = 32;
/// Number of bits below a tick that order equal ticks, and the tick of a context that is never ready.
const ORDER_BITS: u32 = 8;
const NEVER_READY: u64 = u64::MAX >> ORDER_BITS;
/// Number of cores whose cache state mostly fits the host's second cache.
const CORES_WITHOUT_HINTS: u32 = 8;

/// The environment of a core: state that it shares with others.
pub(crate) struct CoreEnvironment<'a> {
    pub caches: &'a mut Caches,
    pub frames: &'a mut dyn FrameProvider,
    pub page_shift: u32,
    pub ticks_per_cycle: u64,
    pub sampling: SamplingUnit,
}

/// The bounds up to which a core may run.
#[derive(Clone, Copy)]
pub(crate) struct RunBounds {
    /// Last tick at which the core may do something that others see.
    pub shared: u64,
    /// First tick into which the core must not run.
    pub end: u64,
}

/// The bounds of one run of a context: from `start` to `limit` at most.
#[derive(Clone, Copy, Default)]
pub(crate) struct ContextRun {
    pub nth: usize,
    pub start: u64,
    pub limit: u64,
    /// Tick at which another context of the core is ready.
    pub other: u64,
    pub shared: u64,
}

/// The state on which a core's runs operate.
pub(crate) struct CoreFrontEnd {
    pub contexts: Vec<HwContext>,
    pub l1d: usize,
    pub l1i: Option<usize>,
    pub package: u32,
    pub in_order: bool,
    /// Whether instructions that do not need the value of a load may overtake it.
    pub loads_pass: bool,
    pub kind: CoreKindName,
    /// Whether the core's second level may serve accesses that others do not notice.
    pub owns_next: bool,
    /// Whether there are so many caches that the host's caches do not hold their state.
    pub hints: bool,
    window: u64,
    /// Each loaded context's share of the window, as computed by [`Core::renew`].
    window_share: u64,
    mshrs: usize,
}

pub(crate) struct Core {
    pub front: CoreFrontEnd,
    /// [`HwContext::ready_tick`] of each context in one array, because every turn begins by reading all of them.
    /// Meaningless for the context whose run is in progress.
    ready: Vec<u64>,
    /// Tick up to which the issue slots are used.
    now: u64,
    /// The context with the last turn, and the end of that turn.
    turn: (usize, u64),
    /// The run in progress, or suspended in the middle of an access that must wait for cores that are behind.
    burst: Burst,
    /// The result of [`Core::next_tick`] after [`Core::advance`] reached its bounds.
    pub next: u64,
}

/// The two smallest keys of tick and order: in turn after the last context, with the last one itself at the end. The
/// next context is unpredictable, so the loop has no branches.
#[inline(always)]
fn two_least_keys(ready: &[u64], last: usize) -> (u64, u64) {
    let (mut first, mut second) = (u64::MAX, u64::MAX);
    for (at, &tick) in ready.iter().enumerate() {
        let order = at + if at > last { 0 } else { ready.len() } - last - 1;
        let key = tick.min(NEVER_READY) << ORDER_BITS | order as u64;
        second = second.min(first.max(key));
        first = first.min(key);
    }
    (first, second)
}

impl Core {
    pub fn new(machine: &MachineSpec, number: u32, l1d: usize, l1i: Option<usize>) -> Self {
        let first = number * machine.contexts_per_core;
        let cpus = first..first + machine.contexts_per_core;
        let (in_order, window, loads_pass) = match machine.pipeline {
            CoreModel::InOrder { .. } => (true, u64::MAX, false),
            CoreModel::OutOfOrder { window, loads_pass, .. } => (false, u64::from(window), loads_pass),
        };
        let nearest = DataOrigin::Hit(CacheLevel::L1Data);
        let contexts: Vec<HwContext> = cpus.map(|cpu| HwContext::new(CpuId(cpu), nearest)).collect();
        let ready = vec![u64::MAX; contexts.len()];
        let package = number / machine.cores_per_package;
        let front = CoreFrontEnd {
            contexts,
            l1d,
            l1i,
            package,
            in_order,
            loads_pass,
            kind: CoreKindName::from_machine(machine),
            owns_next: false,
            hints: machine.cores() > CORES_WITHOUT_HINTS,
            window,
            window_share: window,
            mshrs: machine.pipeline.max_misses_in_flight() as usize,
        };
        Core { front, ready, now: 0, turn: (0, 0), burst: Burst::default(), next: u64::MAX }
    }

    /// Returns the tick of the core's next possible action; `u64::MAX` if there is none.
    #[inline]
    pub fn next_tick(&self) -> u64 {
        if self.burst.thread.is_some() {
            return self.now;
        }
        let ready = self.ready.iter().fold(u64::MAX, |least, &ready| ready.min(least));
        if ready == u64::MAX { ready } else { ready.max(self.now) }
    }

    /// Updates the core after a thread was loaded or removed, or its time moved.
    pub fn renew(&mut self) {
        self.ready.iter_mut().zip(&self.front.contexts).for_each(|(ready, context)| *ready = context.ready_tick());
        if !self.front.in_order {
            let loaded = self.front.contexts.iter().filter(|context| context.thread.is_some()).count() as u64;
            self.front.window_share = self.front.window / loaded.max(1);
        }
    }

    /// Returns the context whose turn it is, the tick at which it is ready, and the tick at which the next other one
    /// is. `u64::MAX` means never.
    #[inline]
    fn pick(&self) -> (usize, u64, u64) {
        let ((last, ends), count) = (self.turn, self.ready.len());
        let (first, second) = match <&[u64; 4]>::try_from(self.ready.as_slice()) {
            Ok(ready) => two_least_keys(ready, last),
            Err(_) => two_least_keys(&self.ready, last),
        };
        let tick_of_key = |key: u64| if key >> ORDER_BITS == NEVER_READY { u64::MAX } else { key >> ORDER_BITS };
        let order = (first & ((1 << ORDER_BITS) - 1)) as usize;
        let of_last = self.ready[last];
        if of_last <= self.now && self.now < ends {
            return (last, of_last, tick_of_key(if order + 1 == count { second } else { first }));
        }
        let at = last + 1 + order;
        (if at < count { at } else { at - count }, tick_of_key(first), tick_of_key(second))
    }

    /// Runs until the bounds. `Some` if a thread needs the operating system.
    #[inline]
    pub fn advance(&mut self, bounds: RunBounds, environment: &mut CoreEnvironment<'_>) -> Option<StopReason> {
        match self.front.kind {
            CoreKindName::Any => self.advance_as::<AnyCore>(bounds, environment),
            CoreKindName::InOrderThrough => self.advance_as::<InOrderThroughCore>(bounds, environment),
            CoreKindName::WindowThrough => self.advance_as::<WindowThroughCore>(bounds, environment),
            CoreKindName::Back2 => self.advance_as::<BackCore<LRU_2>>(bounds, environment),
            CoreKindName::Back4 => self.advance_as::<BackCore<LRU_4>>(bounds, environment),
            CoreKindName::Back8 => self.advance_as::<BackCore<LRU_8>>(bounds, environment),
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
            if self.burst.thread.is_some() && self.burst.now >= self.turn.1.max(self.burst.run.other) {
                self.end_run(environment.caches);
            }
            if self.burst.thread.is_some() {
                if self.burst.now >= bounds.end {
                    self.next = self.now;
                    return None;
                }
            } else if !self.start_run(bounds, environment.ticks_per_cycle) {
                return None;
            }
            self.burst.run.limit = bounds.end.min(self.turn.1.max(self.burst.run.other));
            self.burst.run.shared = bounds.shared;
            let outcome = match self.burst.watched {
                true => self.front.execute_watched(&mut self.burst, environment),
                false => self.front.execute::<K>(&mut self.burst, environment),
            };
            self.now = self.burst.now;
            if !self.burst.probed && matches!(outcome, BurstOutcome::Yield | BurstOutcome::Blocked) {
                self.end_run(environment.caches);
                continue;
            }
            let is_held = matches!(outcome, BurstOutcome::Held);
            if is_held && !self.burst.has_overflow_count() {
                self.next = self.now;
                return None;
            }
            let stop = self.end(outcome, environment);
            if stop.is_some() || is_held {
                self.next = self.next_tick();
                return stop;
            }
        }
    }

    /// Begins the run of the next context. Returns false if none is ready in time.
    #[inline]
    fn start_run(&mut self, bounds: RunBounds, ticks_per_cycle: u64) -> bool {
        debug_assert!(
            self.ready.iter().zip(&self.front.contexts).all(|(&ready, context)| ready == context.ready_tick())
        );
        let (nth, ready, other) = self.pick();
        let start = self.now.max(ready);
        if start >= bounds.end {
            self.next = if ready == u64::MAX { ready } else { start };
            return false;
        }
        // A turn begins only with a change of contexts: a context that is alone after its turn yields as soon as
        // another is ready, wherever the bounds cut its run.
        if nth != self.turn.0 || self.turn.1 == 0 {
            self.turn = (nth, start + TURN_CYCLES * ticks_per_cycle);
        }
        let front = &mut self.front;
        let room = front.free_mshrs(nth);
        let window = front.window_share;
        let context = &mut front.contexts[nth];
        context.account(start);
        let Some(thread) = context.thread.take() else { return false };
        self.burst.start_burst(ContextRun { nth, start, limit: start, other, shared: 0 }, thread, window, room);
        true
    }

    /// Ends the run with this outcome. `Some` if the operating system is needed.
    #[inline]
    fn end(&mut self, outcome: BurstOutcome, environment: &mut CoreEnvironment<'_>) -> Option<StopReason> {
        let (nth, now) = (self.burst.run.nth, self.burst.now);
        let overflows = self.burst.has_overflow_count();
        self.end_run(environment.caches);
        let context = &mut self.front.contexts[nth];
        let (cpu, at_cycle) = (context.cpu, || now / environment.ticks_per_cycle);
        let overflowed =
            overflows && context.thread.as_mut().is_some_and(|thread| thread.probes.has_overflowed(&thread.counters));
        match outcome {
            BurstOutcome::Turn(turn) => Some(StopReason::Turn { cpu, turn, at_cycle: at_cycle() }),
            BurstOutcome::Interrupt => Some(StopReason::Interrupt { cpu, task: context.task()?, at_cycle: at_cycle() }),
            _ if overflowed => {
                context.charge_ticks(now, environment.sampling.interrupt_ticks, Charge::Interrupt);
                self.ready[nth] = context.ready_tick();
                Some(StopReason::Interrupt { cpu, task: context.task()?, at_cycle: at_cycle() })
            }
            _ => None,
        }
    }

    /// Ends the run, if there is one: its counts are added, and its thread can be observed and removed.
    #[inline]
    pub fn end_run(&mut self, caches: &mut Caches) {
        if let Some(thread) = self.burst.thread.take() {
            let nth = self.burst.run.nth;
            let thread = self.front.close(&self.burst, thread, caches);
            let context = &mut self.front.contexts[nth];
            context.thread = Some(thread);
            self.ready[nth] = context.ready;
        }
    }
}

impl CoreFrontEnd {
    /// Returns the request of a thread of this core for a physical address.
    #[inline(always)]
    pub fn build_request(&self, address: u64, tick: u64, store: bool, thread: &HwThread) -> CacheRequest {
        let (task, class, package) = (thread.slot(), thread.class, self.package);
        CacheRequest { address, tick, store, through: false, prefetch: false, task, class, package }
    }

    /// Returns the miss that returns first if there is no miss register (or entry of the store buffer) for another
    /// miss.
    #[inline(never)]
    pub fn first_blocking_miss(&mut self, nth: usize, now: u64) -> Option<OutstandingMiss> {
        if self.reclaim_mshrs(nth, now) {
            return None;
        }
        let contexts = if self.in_order { &self.contexts[nth..nth + 1] } else { &self.contexts[..] };
        let soonest = contexts.iter().min_by_key(|context| context.soonest)?;
        soonest.outstanding.iter().find(|miss| miss.returns_at == soonest.soonest).copied()
    }

    /// Frees the registers of misses that have returned; this is checked only when it matters. Returns whether there is
    /// room now.
    #[inline(never)]
    pub fn reclaim_mshrs(&mut self, nth: usize, now: u64) -> bool {
        self.contexts.iter_mut().for_each(|context| context.retire(now));
        self.contexts[nth].mshrs_in_use < self.free_mshrs(nth)
    }

    /// Returns the number of misses that the context may have outstanding: out of order it shares the registers, in
    /// order it has a store buffer.
    #[inline(always)]
    pub fn free_mshrs(&self, nth: usize) -> usize {
        let contexts = if self.in_order { &[] } else { &self.contexts[..] };
        let other_contexts = contexts.iter().zip(0..).filter(|&(_, at)| at != nth);
        self.mshrs.saturating_sub(other_contexts.map(|(context, _)| context.mshrs_in_use).sum())
    }
}
