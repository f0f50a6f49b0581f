//! One run of a context: a fast path through accesses that no other context observes, then the event that ended it.
//!
//! `quick` is the loop through which nearly all accesses pass: L1 hits, and fetches of code that is present. It ends
//! with a `SlowPathCause`, which is handled at its tick; then the loop is entered again, until the run has a
//! `BurstOutcome`.

use cachemate_core::{Access, AccessKind, BatchEnd, CacheLevel};

use super::caches::Caches;
use super::context::{HwContext, OutstandingMiss, StallSource, UnattributedTicks};
use super::core_kind::{ANY, AnyCore, CoreKind, WatchedCore};
use super::fast_path::quick_fetch;
use super::pipeline::{ContextRun, CoreEnvironment, CoreFrontEnd};
use super::thread::HwThread;

/// The reason why a run ended.
pub(crate) enum BurstOutcome {
    /// The end of the context's time or of its turn.
    Yield,
    /// An access that other cores can observe is due, and must wait for the cores that lag behind.
    Held,
    Blocked,
    Turn(BatchEnd),
    Interrupt,
}

/// The reason why the fast path ended. For all but `BatchEnd`, `Jump` and `Compute`, the preceding instructions have
/// been issued.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlowPathCause {
    BatchEnd,
    /// Time or window is used up.
    Budget,
    /// The next line of code is not present.
    Fetch,
    Jump,
    Compute,
    Depends,
    Translate,
    /// The access needs the value of the previous load.
    Waits,
    /// The access affects more than the L1, and cores that lag behind come first.
    Early,
    /// The access must take the slow path.
    Memory,
}

/// A run in progress. It can be suspended whenever the fast path has ended, and resumed there.
#[derive(Default)]
pub(crate) struct Burst {
    pub run: ContextRun,
    /// `None` if there is no run.
    pub thread: Option<Box<HwThread>>,
    /// Whether the thread's probes observe every single access.
    pub watched: bool,
    /// Whether the thread has probes.
    pub probed: bool,
    /// The tick that the run has reached.
    pub now: u64,
    /// Tick up to which time and window allow instructions to issue.
    pub stop: u64,
    /// Number of instructions of the next record that have been issued.
    pub skip: u64,
    /// This context's share of the window.
    window: u64,
    /// Number of misses that may be outstanding.
    pub room: usize,
    /// Whether the current access was held at its tick, because it is not a plain hit.
    pub was_early: bool,
    pub page: u64,
    pub frame: u64,
    /// L1 hits of data and of code that have not been added to the counters yet.
    pub hits: u64,
    pub fetches: u64,
    pub spent: UnattributedTicks,
}

impl Burst {
    #[inline]
    pub fn start_burst(&mut self, run: ContextRun, thread: Box<HwThread>, window: u64, room: usize) {
        (self.run, self.now, self.window, self.room) = (run, run.start, window, room);
        (self.skip, self.probed) = (thread.skip, !thread.probes.is_empty());
        self.watched = self.probed && thread.probes.is_watching_all();
        (self.page, self.hits, self.fetches, self.was_early) = (u64::MAX, 0, 0, false);
        self.spent = UnattributedTicks::default();
        self.thread = Some(thread);
    }

    /// Must every stop check for overflow interrupts?
    #[inline]
    pub fn has_overflow_count(&self) -> bool {
        self.probed && self.thread.as_ref().is_some_and(|thread| !thread.probes.overflows.is_empty())
    }

    /// Issues `count` instructions of the next record.
    #[inline]
    pub fn issue(&mut self, count: u64, thread: &mut HwThread, context: &mut HwContext) {
        self.now += count;
        self.skip += count;
        context.issued += count;
        thread.fetch_left -= if thread.fetch_left == u64::MAX { 0 } else { count };
    }

    /// Issues the access itself, and advances to the next record.
    #[inline]
    pub fn skip_one(&mut self, thread: &mut HwThread, context: &mut HwContext) {
        thread.position += 1;
        self.issue(1, thread, context);
        self.skip = 0;
    }

    /// Returns the tick up to which time and window allow instructions to issue.
    #[inline]
    pub fn issue_limit(&self, in_order: bool, now: u64, context: &mut HwContext) -> u64 {
        if in_order {
            return self.run.limit;
        }
        let issue = now.saturating_add(context.remaining_window(self.window, now));
        self.run.limit.min(issue).min(context.next_parked.max(now))
    }

    /// Counts the wait until a tick if no other context could use the time. Returns false, and counts nothing, if one
    /// could.
    #[inline]
    pub fn wait_in_place(&mut self, now: u64, until: u64, wait: StallSource, thread: &mut HwThread) -> bool {
        if until >= self.run.other || until > self.run.limit {
            return false;
        }
        HwContext::count_stall(&mut thread.counters, until - now, wait);
        self.spent.in_place += until - now;
        true
    }

    /// Must an access that is due at this tick wait for cores that are behind?
    #[inline]
    pub fn must_wait(&self, context: &mut HwContext) -> bool {
        context.ready = self.now;
        self.now > self.run.shared
    }

    /// Returns the outcome if the time is over or the window is full (the context then waits for the oldest load);
    /// `None` if neither.
    fn exceeds_budget(&self, context: &mut HwContext) -> Option<BurstOutcome> {
        context.ready = self.now;
        if self.now >= self.run.limit {
            return Some(BurstOutcome::Yield);
        }
        // The bound was that of a load that has returned in the meantime.
        if context.remaining_window(self.window, self.now) > 0 && context.next_parked > self.now {
            return None;
        }
        let oldest = context.outstanding.iter().find(|miss| miss.instruction.is_some() && miss.returns_at > self.now);
        let (arrival, wait) =
            oldest.map_or((u64::MAX, context.value_wait()), |oldest| (oldest.returns_at, oldest.wait));
        let wake_tick = arrival.min(context.next_parked);
        if wake_tick == u64::MAX {
            return None;
        }
        (context.ready, context.wait) = (wake_tick, Some(wait));
        Some(BurstOutcome::Blocked)
    }
}

impl CoreFrontEnd {
    /// Does the same as [`CoreFrontEnd::execute`] for a thread whose probes observe every access.
    #[inline(never)]
    pub fn execute_watched(&mut self, burst: &mut Burst, environment: &mut CoreEnvironment<'_>) -> BurstOutcome {
        self.execute::<WatchedCore>(burst, environment)
    }

    /// Runs one context. On return, `ready` and `wait` of the context describe the next event.
    #[inline(always)]
    pub fn execute<K: CoreKind>(&mut self, burst: &mut Burst, environment: &mut CoreEnvironment<'_>) -> BurstOutcome {
        let Some(mut thread) = burst.thread.take() else { return BurstOutcome::Yield };
        let outcome = loop {
            let event = self.run_fast_path::<K>(burst, &mut thread, environment);
            if event == SlowPathCause::Waits {
                break BurstOutcome::Blocked;
            }
            if event == SlowPathCause::Early {
                self.contexts[burst.run.nth].ready = burst.now;
                break BurstOutcome::Held;
            }
            if let Some(outcome) = self.run_slow_path(event, burst, &mut thread, environment) {
                break outcome;
            }
        };
        if matches!(outcome, BurstOutcome::Held) {
            // Translations are looked up again.
            burst.page = u64::MAX;
        }
        burst.thread = Some(thread);
        outcome
    }

    /// Adds the counts of a run to the counters, and returns its thread.
    #[inline]
    pub fn close(&mut self, burst: &Burst, mut thread: Box<HwThread>, caches: &mut Caches) -> Box<HwThread> {
        thread.skip = burst.skip;
        thread.counters.levels[CacheLevel::L1Data as usize].references += burst.hits;
        caches.units[self.l1d].counters.demand.references += burst.hits;
        if let Some(l1i) = self.l1i.filter(|_| burst.fetches > 0) {
            thread.counters.levels[CacheLevel::L1Instruction as usize].references += burst.fetches;
            caches.units[l1i].counters.demand.references += burst.fetches;
        }
        let start = burst.run.start;
        self.contexts[burst.run.nth].account_run(&mut thread.counters, burst.now - start, burst.now, burst.spent);
        thread
    }

    /// Handles the event that ended the fast path. `Some` if the run ends too.
    #[inline(never)]
    fn run_slow_path(
        &mut self,
        event: SlowPathCause,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.nth];
        let access = thread.batch.get(thread.position).copied();
        let (event, access) = match access {
            Some(access) => (event, access),
            None => (SlowPathCause::BatchEnd, Access::compute(0)),
        };
        match event {
            SlowPathCause::Memory => self.access_beyond_l1(access, burst, thread, environment),
            SlowPathCause::Waits => Some(BurstOutcome::Blocked),
            SlowPathCause::Early => Some(BurstOutcome::Held),
            SlowPathCause::Budget => self.wait_or_unpark(burst, thread, environment),
            SlowPathCause::Fetch => self.fetch(burst, thread, environment),
            SlowPathCause::Jump => self.handle_jump(access, burst, thread, environment),
            SlowPathCause::Compute => self.compute(access, burst, thread, environment),
            SlowPathCause::BatchEnd if thread.turn != BatchEnd::More && !context.parked.is_empty() => {
                self.drain(burst, thread, environment)
            }
            SlowPathCause::BatchEnd => batch_end(burst, thread, context),
            SlowPathCause::Depends => self.defer_access(access, burst, thread, environment),
            SlowPathCause::Translate => {
                if burst.must_wait(context) {
                    return Some(BurstOutcome::Held);
                }
                let store = access.kind() == AccessKind::Store;
                let cost = translate(
                    thread,
                    access.address() >> environment.page_shift,
                    context,
                    store,
                    environment,
                    self.l1d,
                    burst.now,
                );
                burst.spent.faults += cost;
                context.ready = burst.now + cost;
                (cost > 0).then_some(BurstOutcome::Blocked)
            }
        }
    }

    fn handle_jump(
        &mut self,
        access: Access,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.nth];
        let remaining = access.instructions() - burst.skip;
        let issued = remaining.min(burst.stop - burst.now).min(thread.fetch_left);
        burst.issue(issued, thread, context);
        if issued == remaining {
            burst.skip = 0;
            thread.position += 1;
            if let Some(l1i) = self.l1i {
                thread.jump_to(access.address(), 1 << environment.caches.units[l1i].line_shift);
            }
            None
        } else if thread.fetch_left == 0 {
            self.fetch(burst, thread, environment)
        } else {
            self.wait_or_unpark(burst, thread, environment)
        }
    }

    /// Handles the end of time or window, or a deferred access that is due.
    fn wait_or_unpark(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.nth];
        if context.next_parked <= burst.now && burst.now < burst.run.limit {
            return self.unpark(burst, thread, environment);
        }
        burst.exceeds_budget(context)
    }

    fn compute(
        &mut self,
        access: Access,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.nth];
        let room = burst.issue_limit(self.in_order, burst.now, context) - burst.now;
        let remaining = access.instructions() - burst.skip;
        let issued = remaining.min(room);
        burst.now += issued;
        context.issued += issued;
        burst.skip += issued;
        if issued < remaining {
            return self.wait_or_unpark(burst, thread, environment);
        }
        burst.skip = 0;
        thread.position += 1;
        None
    }

    /// Fetches the next line of code. `Some` if the context cannot continue at once.
    fn fetch(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.nth];
        let l1i = self.l1i?;
        let address = thread.next_code;
        let (page_shift, tick) = (environment.page_shift, burst.now);
        let unit = &mut environment.caches.units[l1i];
        if quick_fetch(unit, thread, page_shift, tick, ANY, burst.watched) {
            burst.fetches += 1;
            if burst.watched {
                thread.report_code_line(unit.line_shift, tick, environment.sampling);
            }
            return None;
        }
        if burst.must_wait(context) {
            return Some(BurstOutcome::Held);
        }
        let Some(frame) = thread.tlb.find(address >> page_shift) else {
            // The same fetch follows again, with the translation present.
            burst.spent.faults += translate(thread, address >> page_shift, context, false, environment, self.l1d, tick);
            context.ready = tick + burst.spent.faults;
            return Some(BurstOutcome::Blocked);
        };
        let request = self.build_request(frame << page_shift | address & ((1 << page_shift) - 1), tick, false, thread);
        let context = &mut self.contexts[burst.run.nth];
        let (late, line_bytes) = (tick + unit.latency, 1 << unit.line_shift);
        let place = unit.store.find(request.address >> unit.line_shift);
        let probed = !(thread.probes.activity.is_empty() && thread.probes.trace.is_none());
        let prior_counts = probed.then_some(thread.counters.levels);
        let response = environment.caches.first_level::<AnyCore>(l1i, place, &request, &mut thread.counters);
        let mut traced = super::sampling::SampleEffect { ticks: 0, full: false };
        if let Some(prior_counts) = &prior_counts {
            thread.probes.observe_path(l1i, request.address, prior_counts, &thread.counters.levels, environment.caches);
            if thread.counters.levels[0].all_misses() > prior_counts[0].all_misses() {
                let address = environment.caches.dram.physical_address(request.address);
                let line = address >> environment.caches.units[self.l1d].line_shift;
                traced = thread.probes.observe_code_miss(line, environment.sampling);
            }
        }
        thread.charge_fetch(line_bytes);
        if burst.watched {
            thread.report_code_line(line_bytes.ilog2(), tick, environment.sampling);
        }
        if response.ready_tick <= late {
            return None;
        }
        thread.probes.cost_ticks += traced.ticks;
        burst.spent.interrupts += traced.ticks;
        context.ready = response.ready_tick + traced.ticks;
        context.wait = Some(StallSource { served: response.served, queue: response.queue, joined: false });
        Some(if traced.full { BurstOutcome::Interrupt } else { BurstOutcome::Blocked })
    }
}

impl HwContext {
    /// Completes an access that was issued in the tick before `tick` and whose data arrives at the tick `arrival`.
    /// Returns whether the context has to wait.
    #[inline(always)]
    pub fn complete_access(
        &mut self,
        arrival: u64,
        wait: StallSource,
        nearest: u64,
        tick: u64,
        store: bool,
        in_order: bool,
    ) -> bool {
        let is_late = arrival > nearest;
        (self.ready, self.wait) = (tick, None);
        let mut blocked = false;
        if !store {
            (self.value_at, self.value_from) = (arrival, wait.served);
            if is_late && in_order && arrival > tick {
                (self.wait, self.ready, blocked) = (Some(wait), arrival, true);
            }
        }
        if is_late && !blocked {
            let instruction = (!store).then_some(self.issued - 1);
            self.send(OutstandingMiss { returns_at: arrival, instruction, wait });
        }
        blocked
    }
}

/// Handles the end of a batch: a further batch, or the request with which the thread ended it.
fn batch_end(burst: &mut Burst, thread: &mut HwThread, context: &mut HwContext) -> Option<BurstOutcome> {
    burst.skip = 0;
    context.ready = burst.now;
    if thread.turn != BatchEnd::More {
        if burst.now > burst.run.shared {
            return Some(BurstOutcome::Held);
        }
        return Some(BurstOutcome::Turn(std::mem::replace(&mut thread.turn, BatchEnd::More)));
    }
    if burst.now >= burst.run.limit {
        return Some(BurstOutcome::Yield);
    }
    thread.refill();
    if thread.batch.is_empty() && thread.turn == BatchEnd::More {
        // A source that returns "more" without any access must not stop time.
        HwContext::count_stall(&mut thread.counters, 1, context.value_wait());
        (burst.spent.in_place, burst.now) = (burst.spent.in_place + 1, burst.now + 1);
    }
    None
}

/// Waits for the value of the last load; the context keeps its issue slot if no other context could use the time.
pub(super) fn wait_for_value(
    burst: &mut Burst,
    thread: &mut HwThread,
    context: &mut HwContext,
) -> Option<BurstOutcome> {
    let arrival = context.value_at;
    if burst.wait_in_place(burst.now, arrival, context.value_wait(), thread) {
        burst.now = arrival;
        return None;
    }
    context.wait = Some(context.value_wait());
    context.ready = arrival;
    Some(BurstOutcome::Blocked)
}

/// Requests a translation from the operating system. Returns the ticks that this took.
pub(super) fn translate(
    thread: &mut HwThread,
    page: u64,
    context: &HwContext,
    store: bool,
    environment: &mut CoreEnvironment<'_>,
    l1d: usize,
    now: u64,
) -> u64 {
    let framed = environment.frames.find_frame(thread.process, page, context.cpu, store);
    let frame_name = environment.caches.pages.name_frame(framed.frame, page);
    thread.tlb.insert(page, frame_name);
    if framed.copied {
        environment.caches.insert_copied(
            l1d,
            frame_name << environment.page_shift,
            1 << environment.page_shift,
            thread.slot(),
            now,
        );
    }
    framed.cost_cycles * environment.ticks_per_cycle
}
