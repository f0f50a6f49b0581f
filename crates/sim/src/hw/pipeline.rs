//! A core: contexts that share an issue slot (or several a cycle), in order or out of order.
//!
//! Contexts are served first come, first served by the tick they became ready, one *turn* at a time while others are
//! ready too. Time goes from one access to the next, never instruction by instruction. L1 hits of a core are private: it
//! runs ahead with them, at most [`RUN_AHEAD_CYCLES`] past the core that is furthest behind; whatever others can see
//! (misses, stores to shared lines, translations, the operating system) happens in order of time over all cores.

use cachemate_core::{CpuId, Level, MachineSpec, Pipeline};

use super::burst::Outcome;
use super::caches::Caches;
use super::context::Context;
use super::sampling::Sampling;
use super::unit::Served;
use super::{Charge, Frames, Stop};

/// How far a core may run ahead with what nobody else sees. A line that another core takes away is still hit for so
/// long at most.
pub(crate) const RUN_AHEAD_CYCLES: u64 = 400;
/// A context's turn while others are ready.
const TURN_CYCLES: u64 = 32;
/// Stores in flight per context of an in-order core.
const STORE_BUFFER: usize = 8;

/// What a core needs around it.
pub(crate) struct Around<'a> {
    pub caches: &'a mut Caches,
    pub frames: &'a mut dyn Frames,
    pub page_shift: u32,
    pub ticks_per_cycle: u64,
    pub sampling: Sampling,
}

/// How far a core may go.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// Last tick at which it may do what others see.
    pub shared: u64,
    /// First tick that it must not run into.
    pub end: u64,
}

/// One run of a context: from `start` to `limit` at most.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    pub nth: usize,
    pub start: u64,
    pub limit: u64,
    /// Tick at which another context of the core is ready.
    pub other: u64,
    pub shared: u64,
}

pub(crate) struct Core {
    pub contexts: Vec<Context>,
    /// Tick up to which its issue slots are used.
    pub now: u64,
    /// Who had the last turn, and until when it lasts.
    turn: (usize, u64),
    pub l1d: usize,
    pub l1i: Option<usize>,
    pub package: u32,
    pub in_order: bool,
    pub window: u64,
    pub mshrs: usize,
}

impl Core {
    pub fn new(machine: &MachineSpec, number: u32, l1d: usize, l1i: Option<usize>) -> Self {
        let first = number * machine.contexts_per_core;
        let cpus = first..first + machine.contexts_per_core;
        let (in_order, window, mshrs) = match machine.pipeline {
            Pipeline::InOrder { .. } => (true, u64::MAX, STORE_BUFFER),
            Pipeline::OutOfOrder { window, mshrs, .. } => (false, u64::from(window), mshrs as usize),
        };
        let nearest = Served::Hit(Level::L1Data);
        Core {
            contexts: cpus.map(|cpu| Context::new(CpuId(cpu), nearest)).collect(),
            now: 0,
            turn: (0, 0),
            l1d,
            l1i,
            package: number / machine.cores_per_package,
            in_order,
            window,
            mshrs,
        }
    }

    /// Tick of the next thing it could do; `u64::MAX` = nothing.
    pub fn next_tick(&self) -> u64 {
        let loaded = self.contexts.iter().filter(|context| context.thread.is_some());
        loaded.map(|context| context.ready).min().map_or(u64::MAX, |ready| ready.max(self.now))
    }

    /// Whose turn it is, when it is ready, and when the next other one is.
    fn pick(&self) -> Option<(usize, u64, u64)> {
        let (last, ends) = self.turn;
        let count = self.contexts.len();
        let goes_on = &self.contexts[last];
        let mut best: Option<(usize, u64)> = None;
        let mut other = u64::MAX;
        if goes_on.thread.is_some() && goes_on.ready <= self.now && self.now < ends {
            best = Some((last, goes_on.ready));
        }
        let fixed = best.is_some();
        for step in 1..=count {
            let at = if last + step >= count { last + step - count } else { last + step };
            let context = &self.contexts[at];
            if context.thread.is_none() || (fixed && at == last) {
                continue;
            }
            match best {
                Some((_, ready)) if fixed || context.ready >= ready => other = other.min(context.ready),
                _ => {
                    other = other.min(best.map_or(u64::MAX, |(_, ready)| ready));
                    best = Some((at, context.ready));
                }
            }
        }
        best.map(|(at, ready)| (at, ready, other))
    }

    /// Runs until its bounds; `Some` = a thread wants the operating system.
    pub fn advance(&mut self, bounds: Bounds, around: &mut Around<'_>) -> Option<Stop> {
        loop {
            let (nth, ready, other) = self.pick()?;
            let start = self.now.max(ready);
            if start >= bounds.end {
                return None;
            }
            if nth != self.turn.0 || start >= self.turn.1 {
                self.turn = (nth, start + TURN_CYCLES * around.ticks_per_cycle);
            }
            let limit = bounds.end.min(self.turn.1.max(other));
            let context = &mut self.contexts[nth];
            context.settle(start);
            let mut thread = context.thread.take()?;
            let run = Run { nth, start, limit, other, shared: bounds.shared };
            let (outcome, now) = match thread.probes.watches_all() {
                true => self.execute::<true>(run, &mut thread, around),
                false => self.execute::<false>(run, &mut thread, around),
            };
            self.now = now;
            let context = &mut self.contexts[nth];
            let overflowed = !thread.probes.overflows.is_empty() && thread.probes.overflowed(&thread.counters);
            let (cpu, task) = (context.cpu, thread.task);
            context.thread = Some(thread);
            let at_cycle = now / around.ticks_per_cycle;
            let stop = match outcome {
                Outcome::Turn(turn) => Some(Stop::Turn { cpu, turn, at_cycle }),
                Outcome::Interrupt => Some(Stop::Interrupt { cpu, task, at_cycle }),
                _ if overflowed => {
                    context.charge(now, around.sampling.interrupt_ticks, Charge::Interrupt);
                    Some(Stop::Interrupt { cpu, task, at_cycle })
                }
                Outcome::Held => return None,
                Outcome::Yield | Outcome::Blocked => None,
            };
            if stop.is_some() {
                return stop;
            }
        }
    }

    /// Is there a miss register (or a place in the store buffer) for another miss? If not, waits for the first.
    #[inline]
    pub fn no_room(&mut self, nth: usize, t: u64) -> Option<Outcome> {
        // Those that are back are only looked for when it matters.
        if self.used(nth) < self.mshrs {
            return None;
        }
        self.contexts.iter_mut().for_each(|context| context.retire(t));
        if self.used(nth) < self.mshrs {
            return None;
        }
        let in_order = self.in_order;
        let own = &self.contexts[nth].outstanding;
        let all = self.contexts.iter().flat_map(|context| &context.outstanding);
        let first = if in_order { own.iter().min_by_key(|miss| miss.done) } else { all.min_by_key(|miss| miss.done) };
        let first = *first?;
        let context = &mut self.contexts[nth];
        context.ready = first.done;
        context.wait = Some(first.wait);
        Some(Outcome::Blocked)
    }

    /// Miss registers that the context shares with others out of order, or its own store buffer's places.
    #[inline]
    fn used(&self, nth: usize) -> usize {
        if self.in_order {
            return self.contexts[nth].outstanding.len();
        }
        self.contexts.iter().map(|context| context.outstanding.len()).sum()
    }
}
