//! A core: contexts that share an issue slot (or several a cycle), in order or out of order.
//!
//! Contexts are served first come, first served by the tick they became ready, one *turn* at a time while others are
//! ready too. Time goes from one access to the next, never instruction by instruction. L1 hits of a core are private: it
//! runs ahead with them, at most [`RUN_AHEAD_CYCLES`] past the core that is furthest behind; whatever others can see
//! (misses, stores to shared lines, translations, the operating system) happens in order of time over all cores.

use cachemate_core::{AccessKind, CpuId, Level, MachineSpec, Pipeline, Turn, WritePolicy};

use super::caches::{Ask, Caches};
use super::context::{Context, Outstanding, Spent, Wait};
use super::sampling::{Miss, Sampling};
use super::store::{MODIFIED, SHARED, SPECIAL};
use super::thread::Thread;
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

enum Outcome {
    /// Its time is up, or the turn is.
    Yield,
    /// Something that others see is due and must wait for the cores behind.
    Held,
    Blocked,
    Turn(Turn),
    Interrupt,
}

/// Why the fast way ended.
enum Event {
    BatchEnd,
    /// Out of budget: time, window, or fetched instructions.
    Budget,
    Jump,
    Compute,
    Depends,
    Translate,
    Memory,
}

pub(crate) struct Core {
    pub contexts: Vec<Context>,
    /// Tick up to which its issue slots are used.
    pub now: u64,
    /// Who had the last turn, and until when it lasts.
    turn: (usize, u64),
    l1d: usize,
    l1i: Option<usize>,
    package: u32,
    in_order: bool,
    window: u64,
    mshrs: usize,
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
            let watched = thread.probes.watches_all();
            let (outcome, now) = match watched {
                true => self.execute::<true>(nth, &mut thread, start, limit, other, bounds.shared, around),
                false => self.execute::<false>(nth, &mut thread, start, limit, other, bounds.shared, around),
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

    /// Runs one context from `t` to `limit` at most. On return `ready` and `wait` of the context say what is next.
    #[allow(clippy::too_many_arguments)]
    fn execute<const WATCHED: bool>(
        &mut self,
        nth: usize,
        thread: &mut Thread,
        mut t: u64,
        limit: u64,
        other: u64,
        shared: u64,
        around: &mut Around<'_>,
    ) -> (Outcome, u64) {
        let loaded = 1 + self.contexts.iter().filter(|context| context.thread.is_some()).count() as u64;
        let window = self.window / loaded;
        let (l1d, l1i) = (self.l1d, self.l1i);
        let slot = thread.slot();
        let page_shift = around.page_shift;
        let page_mask = (1u64 << page_shift) - 1;
        let unit = &around.caches.units[l1d];
        let (l1_shift, l1_latency) = (unit.line_shift, unit.latency);
        let through = unit.write == WritePolicy::Through;
        let (mut page, mut frame) = (u64::MAX, 0);
        let begun = t;
        let mut hits = 0u64;
        let mut spent = Spent::default();
        let mut skip = thread.skip;
        let outcome = loop {
            let context = &mut self.contexts[nth];
            let mut budget = (limit - t).min(thread.fetch_left);
            if !self.in_order {
                budget = budget.min(window_left(context, window, t));
            }
            let whole = budget;
            let event = {
                let store = &mut around.caches.units[l1d].store;
                let mut position = thread.position;
                let event = loop {
                    let Some(&access) = thread.batch.get(position) else { break Event::BatchEnd };
                    let kind = access.kind();
                    match kind {
                        AccessKind::Load | AccessKind::Store => {}
                        AccessKind::Jump => break Event::Jump,
                        AccessKind::Compute => break Event::Compute,
                    }
                    let n = u64::from(access.gap()) + 1 - skip;
                    if n > budget {
                        break Event::Budget;
                    }
                    let issue = t + (whole - budget) + n - 1;
                    if access.is_dependent() && context.value_at > issue {
                        break Event::Depends;
                    }
                    let address = access.address();
                    if address >> page_shift != page {
                        let Some(found) = thread.tlb.find(address >> page_shift) else { break Event::Translate };
                        (page, frame) = (address >> page_shift, found << page_shift);
                    }
                    let line = (frame | address & page_mask) >> l1_shift;
                    let Some(place) = store.find(line) else { break Event::Memory };
                    let meta = store.meta(place);
                    if meta.0 & SPECIAL != 0 {
                        break Event::Memory;
                    }
                    if kind == AccessKind::Store {
                        if through || meta.state() == SHARED {
                            break Event::Memory;
                        }
                        store.set_meta(place, meta.with_state(MODIFIED));
                    } else {
                        context.value_at = issue + l1_latency;
                        context.value_from = Served::Hit(Level::L1Data);
                    }
                    store.touch(line, place);
                    if WATCHED {
                        thread.probes.on_access(
                            address >> l1_shift,
                            issue,
                            store.set_of(line),
                            store.all_sets(),
                            around.sampling,
                        );
                    }
                    hits += 1;
                    budget -= n;
                    skip = 0;
                    position += 1;
                };
                thread.position = position;
                event
            };
            let issued = whole - budget;
            t += issued;
            context.issued += issued;
            thread.fetch_left -= if thread.fetch_left == u64::MAX { 0 } else { issued };
            let access = thread.batch.get(thread.position).copied();
            // What is left of the gap before the event, issued on the way to it.
            let mut pass = |wanted: u64, thread: &mut Thread, context: &mut Context, t: &mut u64| {
                let done = wanted.min(budget);
                *t += done;
                context.issued += done;
                thread.fetch_left -= if thread.fetch_left == u64::MAX { 0 } else { done };
                budget -= done;
                done
            };
            match (event, access) {
                (Event::BatchEnd, _) | (_, None) => {
                    skip = 0;
                    if thread.turn != Turn::More {
                        if t > shared {
                            context.ready = t;
                            break Outcome::Held;
                        }
                        context.ready = t;
                        break Outcome::Turn(std::mem::replace(&mut thread.turn, Turn::More));
                    }
                    if t >= limit {
                        context.ready = t;
                        break Outcome::Yield;
                    }
                    thread.refill();
                    if thread.batch.is_empty() && thread.turn == Turn::More {
                        // A source that says "more" and gives nothing must not stop time.
                        Context::wait_in_place(&mut thread.counters, 1, context.value_from);
                        (spent.in_place, t) = (spent.in_place + 1, t + 1);
                    }
                }
                (Event::Compute, Some(access)) => {
                    let room = (limit - t).min(if self.in_order { u64::MAX } else { window_left(context, window, t) });
                    let left = access.instructions() - skip;
                    let done = left.min(room);
                    t += done;
                    context.issued += done;
                    skip += done;
                    if done == left {
                        skip = 0;
                        thread.position += 1;
                    } else if let Some(outcome) = out_of_budget(context, t, limit) {
                        break outcome;
                    }
                }
                (Event::Jump, Some(access)) => {
                    let left = access.instructions() - skip;
                    let done = pass(left, thread, context, &mut t);
                    skip += done;
                    if done == left {
                        skip = 0;
                        thread.position += 1;
                        if let Some(l1i) = l1i {
                            thread.jump(access.address(), 1 << around.caches.units[l1i].line_shift);
                        }
                    } else if thread.fetch_left == 0 {
                        if let Some(outcome) = self.fetch(nth, thread, t, shared, &mut spent, around) {
                            break outcome;
                        }
                    } else if let Some(outcome) = out_of_budget(context, t, limit) {
                        break outcome;
                    }
                }
                (Event::Budget, Some(_)) => {
                    skip += pass(u64::MAX, thread, context, &mut t);
                    if thread.fetch_left == 0 {
                        if let Some(outcome) = self.fetch(nth, thread, t, shared, &mut spent, around) {
                            break outcome;
                        }
                    } else if let Some(outcome) = out_of_budget(context, t, limit) {
                        break outcome;
                    }
                }
                (Event::Depends, Some(access)) => {
                    skip += pass(u64::from(access.gap()) - skip, thread, context, &mut t);
                    let until = context.value_at;
                    if until <= other.min(limit) {
                        Context::wait_in_place(&mut thread.counters, until - t, context.value_from);
                        (spent.in_place, t) = (spent.in_place + until - t, until);
                    } else {
                        context.wait = Some(Wait { served: context.value_from, queue: 0 });
                        context.ready = until;
                        break Outcome::Blocked;
                    }
                }
                (Event::Translate, Some(access)) => {
                    skip += pass(u64::from(access.gap()) - skip, thread, context, &mut t);
                    if t > shared {
                        context.ready = t;
                        break Outcome::Held;
                    }
                    let store = access.kind() == AccessKind::Store;
                    let cost = translate(thread, access.address() >> page_shift, context, store, around);
                    if cost > 0 {
                        spent.faults += cost;
                        context.ready = t + cost;
                        break Outcome::Blocked;
                    }
                }
                (Event::Memory, Some(access)) => {
                    skip += pass(u64::from(access.gap()) - skip, thread, context, &mut t);
                    if t > shared {
                        context.ready = t;
                        break Outcome::Held;
                    }
                    if let Some(outcome) = self.no_room(nth, t) {
                        break outcome;
                    }
                    let context = &mut self.contexts[nth];
                    let store = access.kind() == AccessKind::Store;
                    let ask = Ask {
                        address: frame | access.address() & page_mask,
                        at: t,
                        store,
                        through: false,
                        prefetch: false,
                        task: slot,
                        class: thread.class,
                        package: self.package,
                    };
                    let probed = !thread.probes.is_empty();
                    let before = if probed { thread.counters.levels[1].all_misses() } else { 0 };
                    if WATCHED {
                        let store = &around.caches.units[l1d].store;
                        let line = ask.address >> l1_shift;
                        let (set, sets) = (store.set_of(line), store.all_sets());
                        thread.probes.on_access(access.address() >> l1_shift, t, set, sets, around.sampling);
                    }
                    let answer = around.caches.first_level(l1d, &ask, &mut thread.counters);
                    thread.position += 1;
                    skip = 0;
                    let issue = t;
                    t += 1;
                    context.issued += 1;
                    thread.fetch_left -= u64::from(thread.fetch_left != u64::MAX);
                    let wait = Wait { served: answer.served, queue: answer.queue };
                    let late = answer.done > issue + l1_latency;
                    context.ready = t;
                    context.wait = None;
                    let mut blocked = false;
                    if !store {
                        (context.value_at, context.value_from) = (answer.done, answer.served);
                        if late && self.in_order && answer.done > t {
                            (context.wait, context.ready, blocked) = (Some(wait), answer.done, true);
                        }
                    }
                    if late && !blocked {
                        let instruction = (!store).then_some(context.issued - 1);
                        context.outstanding.push(Outstanding { done: answer.done, instruction, wait });
                    }
                    if probed && thread.counters.levels[1].all_misses() > before {
                        let seen = Miss {
                            virtual_address: access.address(),
                            physical_address: ask.address,
                            line_shift: l1_shift,
                            at: issue,
                            latency: answer.done - issue,
                            served: answer.served,
                            instruction: context.issued,
                            traced: !(store && through),
                            dependent: access.is_dependent(),
                            prefetches: around.caches.first_level_prefetches,
                        };
                        thread.probes.on_path(&seen, l1d, around.caches);
                        let found = thread.probes.on_miss(&seen, thread.task, around.sampling);
                        if found.ticks > 0 {
                            thread.probes.cost_ticks += found.ticks;
                            spent.interrupts += found.ticks;
                            context.ready += found.ticks;
                            blocked = true;
                        }
                        if found.full {
                            break Outcome::Interrupt;
                        }
                    }
                    if blocked {
                        break Outcome::Blocked;
                    }
                }
            }
        };
        thread.skip = skip;
        let level = &mut thread.counters.levels[Level::L1Data as usize];
        level.references += hits;
        around.caches.units[l1d].counters.demand.references += hits;
        self.contexts[nth].spent(&mut thread.counters, t - begun, t, spent);
        (outcome, t)
    }

    /// Is there a miss register (or a place in the store buffer) for another miss? If not, waits for the first.
    fn no_room(&mut self, nth: usize, t: u64) -> Option<Outcome> {
        let in_order = self.in_order;
        self.contexts.iter_mut().for_each(|context| context.retire(t));
        let used = if in_order {
            self.contexts[nth].outstanding.len()
        } else {
            self.contexts.iter().map(|context| context.outstanding.len()).sum()
        };
        if used < self.mshrs {
            return None;
        }
        let own = &self.contexts[nth].outstanding;
        let all = self.contexts.iter().flat_map(|context| &context.outstanding);
        let first = if in_order { own.iter().min_by_key(|miss| miss.done) } else { all.min_by_key(|miss| miss.done) };
        let first = *first?;
        let context = &mut self.contexts[nth];
        context.ready = first.done;
        context.wait = Some(first.wait);
        Some(Outcome::Blocked)
    }

    /// The next line of code. `Some` = the context cannot go on at once.
    fn fetch(
        &mut self,
        nth: usize,
        thread: &mut Thread,
        t: u64,
        shared: u64,
        spent: &mut Spent,
        around: &mut Around<'_>,
    ) -> Option<Outcome> {
        let context = &mut self.contexts[nth];
        let l1i = self.l1i?;
        let address = thread.next_code;
        let (page_shift, shift) = (around.page_shift, around.caches.units[l1i].line_shift);
        let Some(frame) = thread.tlb.find(address >> page_shift) else {
            if t > shared {
                context.ready = t;
                return Some(Outcome::Held);
            }
            // Comes here again with the translation at hand.
            spent.faults += translate(thread, address >> page_shift, context, false, around);
            context.ready = t + spent.faults;
            return Some(Outcome::Blocked);
        };
        let physical = frame << page_shift | address & ((1 << page_shift) - 1);
        let unit = &mut around.caches.units[l1i];
        let line = physical >> shift;
        let quick = unit.store.find(line).filter(|&place| unit.store.meta(place).0 & SPECIAL == 0);
        if let Some(place) = quick {
            unit.store.touch(line, place);
            unit.counters.demand.references += 1;
            thread.counters.levels[Level::L1Instruction as usize].references += 1;
            thread.fetched(1 << shift);
            return None;
        }
        if t > shared {
            context.ready = t;
            return Some(Outcome::Held);
        }
        let ask = Ask {
            address: physical,
            at: t,
            store: false,
            through: false,
            prefetch: false,
            task: thread.slot(),
            class: thread.class,
            package: self.package,
        };
        let late = t + unit.latency;
        let answer = around.caches.first_level(l1i, &ask, &mut thread.counters);
        thread.fetched(1 << shift);
        if answer.done <= late {
            return None;
        }
        context.ready = answer.done;
        context.wait = Some(Wait { served: answer.served, queue: answer.queue });
        Some(Outcome::Blocked)
    }
}

/// Instructions that still fit into the context's part of the window.
fn window_left(context: &mut Context, window: u64, t: u64) -> u64 {
    if context.outstanding.is_empty() {
        return u64::MAX;
    }
    context.retire(t);
    let oldest = context.outstanding.iter().find_map(|miss| miss.instruction);
    oldest.map_or(u64::MAX, |oldest| (oldest + window).saturating_sub(context.issued))
}

/// The time is up, or the window is full (then the oldest load is waited for). `None` = neither.
fn out_of_budget(context: &mut Context, t: u64, limit: u64) -> Option<Outcome> {
    context.ready = t;
    if t >= limit {
        return Some(Outcome::Yield);
    }
    let oldest = context.outstanding.iter().find(|miss| miss.instruction.is_some() && miss.done > t)?;
    (context.ready, context.wait) = (oldest.done, Some(oldest.wait));
    Some(Outcome::Blocked)
}

/// Asks the operating system; ticks it took.
fn translate(thread: &mut Thread, page: u64, context: &Context, store: bool, around: &mut Around<'_>) -> u64 {
    let framed = around.frames.frame(thread.process, page, context.cpu, store);
    thread.tlb.insert(page, framed.frame);
    framed.cost_cycles * around.ticks_per_cycle
}
