//! One run of a context: a fast path through accesses that no other context observes, then the
//! event that ended it.
//!
//! Most accesses hit the L1 of their own core, where nobody else can see them, so their order among
//! the cores does not matter, and asking the queue of events after each of them would be most of
//! the work. `run_fast_path` is the loop through which nearly all accesses pass: L1 hits, and
//! fetches of code that is present. It ends with a `SlowPathCause`, which is handled at its tick.
//! The loop is then entered again, until the run has a `BurstOutcome`.
//!
//! For example, a core at cycle 1,000 may go on with hits to cycle 1,400 while the slowest core is
//! still at 1,000; its first miss at 1,120 waits until all cores have reached that cycle. The price
//! is one inaccuracy: within these 400 cycles it may still hit a line that another core has just
//! invalidated.

use cachemate_core::{Access, AccessKind, BatchEnd, CacheLevel};

use super::cache_unit::CacheUnit;
use super::caches::Caches;
use super::context::{HwContext, OutstandingMiss, StallSource, UnattributedTicks};
use super::core_kind::{ANY_SHAPE, AnyCore, CoreKind, SPECIALIZED_PAGE_SHIFT, WatchedCore};
use super::front_end::{ContextRun, CoreEnvironment, CoreFrontEnd};
use super::store::{LineMeta, PENDING, PREFETCHED};
use super::thread::HwThread;

/// The reason why a run ended.
pub(crate) enum BurstOutcome {
    /// The end of the context's time or of its turn.
    Yield,
    /// An access that other cores can observe is due, and must wait for the cores that lag behind.
    AheadOfCores,
    Blocked,
    BatchEnd(BatchEnd),
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
    /// The address of the access is the value of a load that has not returned.
    PendingAddress,
    TranslationMiss,
    /// The context waits, for the value of a load or for a miss register.
    PendingValue,
    /// The access affects more than the L1, and cores that lag behind come first.
    ObservableAccess,
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
    pub is_watched: bool,
    /// Whether the thread has probes.
    pub has_probes: bool,
    /// The tick that the run has reached.
    pub tick: u64,
    /// Tick up to which time and window allow instructions to issue.
    pub stop_tick: u64,
    /// Number of instructions of the next record that have been issued.
    pub issued_in_record: u64,
    /// This context's share of the window.
    window: u64,
    /// Number of misses that may be outstanding.
    pub max_outstanding: usize,
    /// Whether the current access was held at its tick, because it is not a plain hit.
    pub was_held: bool,
    pub page: u64,
    pub frame_address: u64,
    /// L1 hits of data and of code that have not been added to the counters yet.
    pub hits: u64,
    pub fetches: u64,
    pub unattributed: UnattributedTicks,
}

impl Burst {
    #[inline]
    pub fn start_burst(
        &mut self,
        run: ContextRun,
        thread: Box<HwThread>,
        window: u64,
        max_outstanding: usize,
    ) {
        (self.run, self.tick, self.window, self.max_outstanding) =
            (run, run.start_tick, window, max_outstanding);
        (self.issued_in_record, self.has_probes) =
            (thread.issued_in_record, !thread.probes.is_empty());
        self.is_watched = self.has_probes && thread.probes.must_observe_all();
        (self.page, self.hits, self.fetches, self.was_held) = (u64::MAX, 0, 0, false);
        self.unattributed = UnattributedTicks::default();
        self.thread = Some(thread);
    }

    /// Whether a probe of the thread counts events until an overflow interrupts it.
    #[inline]
    pub fn has_overflow_count(&self) -> bool {
        self.has_probes
            && self
                .thread
                .as_ref()
                .is_some_and(|thread| !thread.probes.overflows.is_empty())
    }

    #[inline]
    pub fn issue_instructions(
        &mut self,
        count: u64,
        thread: &mut HwThread,
        context: &mut HwContext,
    ) {
        self.tick += count;
        self.issued_in_record += count;
        context.issued_count += count;
        thread.instructions_until_fetch -= if thread.instructions_until_fetch == u64::MAX {
            0
        } else {
            count
        };
    }

    /// Issues the access itself, and advances to the next record.
    #[inline]
    pub fn issue_access(&mut self, thread: &mut HwThread, context: &mut HwContext) {
        thread.position += 1;
        self.issue_instructions(1, thread, context);
        self.issued_in_record = 0;
    }

    /// The tick up to which time and window allow instructions to issue.
    #[inline]
    pub fn find_issue_limit(&self, is_in_order: bool, now: u64, context: &mut HwContext) -> u64 {
        if is_in_order {
            return self.run.end_tick;
        }
        let window_end = now.saturating_add(context.update_remaining_window(self.window, now));
        self.run
            .end_tick
            .min(window_end)
            .min(context.next_deferred_tick.max(now))
    }

    /// Counts the wait until a tick if no other context could use the time. Returns false, and counts nothing, if one
    /// could.
    #[inline]
    pub fn wait_in_place(
        &mut self,
        now: u64,
        until_tick: u64,
        wait: StallSource,
        thread: &mut HwThread,
    ) -> bool {
        if until_tick >= self.run.other_ready_tick || until_tick > self.run.end_tick {
            return false;
        }
        HwContext::count_stall(&mut thread.counters, until_tick - now, wait);
        self.unattributed.in_place += until_tick - now;
        true
    }

    /// Sets the context's `ready_at`, and returns whether an access that is due then must wait for cores that lag
    /// behind.
    #[inline]
    pub fn should_hold_access(&self, context: &mut HwContext) -> bool {
        context.ready_at = self.tick;
        self.tick > self.run.shared_bound
    }

    /// Sets the context's `ready_at` and `stall_source`. Returns the outcome if the time is over or the window is full;
    /// `None` if the context can issue.
    fn outcome_of_spent_budget(&self, context: &mut HwContext) -> Option<BurstOutcome> {
        context.ready_at = self.tick;
        if self.tick >= self.run.end_tick {
            return Some(BurstOutcome::Yield);
        }
        // The bound was that of a load that has returned in the meantime.
        if context.update_remaining_window(self.window, self.tick) > 0
            && context.next_deferred_tick > self.tick
        {
            return None;
        }

        let oldest_load = context
            .outstanding_misses
            .iter()
            .find(|miss| miss.instruction.is_some() && miss.returns_at > self.tick);
        let (arrival, wait) = oldest_load.map_or((u64::MAX, context.value_wait()), |oldest| {
            (oldest.returns_at, oldest.stall_source)
        });
        let wake_tick = arrival.min(context.next_deferred_tick);
        if wake_tick == u64::MAX {
            return None;
        }
        (context.ready_at, context.stall_source) = (wake_tick, Some(wait));
        Some(BurstOutcome::Blocked)
    }
}

impl CoreFrontEnd {
    /// Does the same as [`CoreFrontEnd::execute`] for a thread whose probes observe every access.
    #[inline(never)]
    pub fn execute_watched(
        &mut self,
        burst: &mut Burst,
        environment: &mut CoreEnvironment<'_>,
    ) -> BurstOutcome {
        self.execute::<WatchedCore>(burst, environment)
    }

    /// Runs one context. On return, `ready_at` and `stall_source` of the context describe its next event.
    #[inline(always)]
    pub fn execute<K: CoreKind>(
        &mut self,
        burst: &mut Burst,
        environment: &mut CoreEnvironment<'_>,
    ) -> BurstOutcome {
        let Some(mut thread) = burst.thread.take() else {
            return BurstOutcome::Yield;
        };
        let outcome = loop {
            let cause = self.run_fast_path::<K>(burst, &mut thread, environment);
            if cause == SlowPathCause::PendingValue {
                break BurstOutcome::Blocked;
            }
            if cause == SlowPathCause::ObservableAccess {
                self.contexts[burst.run.context_index].ready_at = burst.tick;
                break BurstOutcome::AheadOfCores;
            }
            if let Some(outcome) = self.run_slow_path(cause, burst, &mut thread, environment) {
                break outcome;
            }
        };
        if matches!(outcome, BurstOutcome::AheadOfCores) {
            // Translations are looked up again.
            burst.page = u64::MAX;
        }

        burst.thread = Some(thread);
        outcome
    }

    /// Adds the counts of a run to the counters, and returns its thread.
    #[inline]
    pub fn close_run(
        &mut self,
        burst: &Burst,
        mut thread: Box<HwThread>,
        caches: &mut Caches,
    ) -> Box<HwThread> {
        thread.issued_in_record = burst.issued_in_record;
        thread.counters.levels[CacheLevel::L1Data as usize].references += burst.hits;
        caches.units[self.l1d].counters.demand.references += burst.hits;
        if let Some(l1i) = self.l1i.filter(|_| burst.fetches > 0) {
            thread.counters.levels[CacheLevel::L1Instruction as usize].references += burst.fetches;
            caches.units[l1i].counters.demand.references += burst.fetches;
        }
        let start = burst.run.start_tick;
        self.contexts[burst.run.context_index].attribute_run(
            &mut thread.counters,
            burst.tick - start,
            burst.tick,
            burst.unattributed,
        );
        thread
    }

    /// Handles the event that ended the fast path. Returns `Some` if the run ends too.
    #[inline(never)]
    fn run_slow_path(
        &mut self,
        event: SlowPathCause,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.context_index];
        let access = thread.batch.get(thread.position).copied();
        let (cause, access) = match access {
            Some(access) => (event, access),
            None => (SlowPathCause::BatchEnd, Access::compute(0)),
        };

        match cause {
            SlowPathCause::Memory => self.access_beyond_l1(access, burst, thread, environment),
            SlowPathCause::PendingValue => Some(BurstOutcome::Blocked),
            SlowPathCause::ObservableAccess => Some(BurstOutcome::AheadOfCores),
            SlowPathCause::Budget => self.wait_or_unpark(burst, thread, environment),
            SlowPathCause::Fetch => self.fetch_line(burst, thread, environment),
            SlowPathCause::Jump => self.handle_jump(access, burst, thread, environment),
            SlowPathCause::Compute => self.run_compute(access, burst, thread, environment),
            SlowPathCause::BatchEnd
                if thread.batch_end != BatchEnd::More && !context.deferred_accesses.is_empty() =>
            {
                self.issue_all_deferred(burst, thread, environment)
            }
            SlowPathCause::BatchEnd => handle_batch_end(burst, thread, context),
            SlowPathCause::PendingAddress => self.defer_access(access, burst, thread, environment),
            SlowPathCause::TranslationMiss => {
                if burst.should_hold_access(context) {
                    return Some(BurstOutcome::AheadOfCores);
                }
                let is_store = access.kind() == AccessKind::Store;
                let cost = translate(
                    thread,
                    access.address() >> environment.page_shift,
                    context,
                    is_store,
                    environment,
                    self.l1d,
                    burst.tick,
                );
                burst.unattributed.faults += cost;
                context.ready_at = burst.tick + cost;
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
        let context = &mut self.contexts[burst.run.context_index];
        let remaining_count = access.instructions() - burst.issued_in_record;
        let issued_count = remaining_count
            .min(burst.stop_tick - burst.tick)
            .min(thread.instructions_until_fetch);
        burst.issue_instructions(issued_count, thread, context);

        if issued_count == remaining_count {
            burst.issued_in_record = 0;
            thread.position += 1;
            if let Some(l1i) = self.l1i {
                thread.jump_to(
                    access.address(),
                    1 << environment.caches.units[l1i].line_shift,
                );
            }
            None
        } else if thread.instructions_until_fetch == 0 {
            self.fetch_line(burst, thread, environment)
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
        let context = &mut self.contexts[burst.run.context_index];
        if context.next_deferred_tick <= burst.tick && burst.tick < burst.run.end_tick {
            return self.issue_due_access(burst, thread, environment);
        }
        burst.outcome_of_spent_budget(context)
    }

    fn run_compute(
        &mut self,
        access: Access,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.context_index];
        let issue_slots =
            burst.find_issue_limit(self.is_in_order, burst.tick, context) - burst.tick;
        let remaining_count = access.instructions() - burst.issued_in_record;
        let issued_count = remaining_count.min(issue_slots);
        burst.tick += issued_count;
        context.issued_count += issued_count;
        burst.issued_in_record += issued_count;
        if issued_count < remaining_count {
            return self.wait_or_unpark(burst, thread, environment);
        }

        burst.issued_in_record = 0;
        thread.position += 1;
        None
    }

    /// Fetches the next line of code. Returns `Some` if the context cannot continue at once.
    fn fetch_line(
        &mut self,
        burst: &mut Burst,
        thread: &mut HwThread,
        environment: &mut CoreEnvironment<'_>,
    ) -> Option<BurstOutcome> {
        let context = &mut self.contexts[burst.run.context_index];
        let l1i = self.l1i?;
        let address = thread.next_code_address;
        let (page_shift, tick) = (environment.page_shift, burst.tick);
        let unit = &mut environment.caches.units[l1i];
        if try_fetch_present_line(unit, thread, page_shift, tick, ANY_SHAPE, burst.is_watched) {
            burst.fetches += 1;
            if burst.is_watched {
                thread.report_code_line(unit.line_shift, tick, environment.sampling);
            }
            return None;
        }

        if burst.should_hold_access(context) {
            return Some(BurstOutcome::AheadOfCores);
        }

        let Some(frame) = thread.tlb.find(address >> page_shift) else {
            // The same fetch follows again, with the translation present.
            burst.unattributed.faults += translate(
                thread,
                address >> page_shift,
                context,
                false,
                environment,
                self.l1d,
                tick,
            );
            context.ready_at = tick + burst.unattributed.faults;
            return Some(BurstOutcome::Blocked);
        };
        let request = self.build_request(
            frame << page_shift | address & ((1 << page_shift) - 1),
            tick,
            false,
            thread,
        );
        let context = &mut self.contexts[burst.run.context_index];
        let (hit_tick, line_bytes) = (tick + unit.latency_ticks, 1 << unit.line_shift);
        let tag_index = unit.store.find(request.address >> unit.line_shift);
        let observes_path = !(thread.probes.activity.is_empty() && thread.probes.trace.is_none());
        let prior_counts = observes_path.then_some(thread.counters.levels);
        let response = environment.caches.access_first_level::<AnyCore>(
            l1i,
            tag_index,
            &request,
            &mut thread.counters,
        );
        let mut sample_effect = super::sampling::SampleEffect {
            ticks: 0,
            is_full: false,
        };
        if let Some(prior_counts) = &prior_counts {
            thread.probes.observe_path(
                l1i,
                request.address,
                prior_counts,
                &thread.counters.levels,
                environment.caches,
            );
            if thread.counters.levels[0].all_misses() > prior_counts[0].all_misses() {
                let address = environment.caches.dram.physical_address(request.address);
                let line = address >> environment.caches.units[self.l1d].line_shift;
                sample_effect = thread.probes.observe_code_miss(line, environment.sampling);
            }
        }
        thread.advance_past_fetched_line(line_bytes);
        if burst.is_watched {
            thread.report_code_line(line_bytes.ilog2(), tick, environment.sampling);
        }
        if response.ready_tick <= hit_tick {
            return None;
        }
        thread.probes.cost_ticks += sample_effect.ticks;
        burst.unattributed.interrupts += sample_effect.ticks;
        context.ready_at = response.ready_tick + sample_effect.ticks;
        context.stall_source = Some(StallSource {
            origin: response.origin,
            queue_ticks: response.queue_ticks,
            is_joined: false,
        });
        Some(if sample_effect.is_full {
            BurstOutcome::Interrupt
        } else {
            BurstOutcome::Blocked
        })
    }
}

impl HwContext {
    /// Completes an access that was issued in the tick before `tick` and whose data arrives at the tick `arrival`. A
    /// posted access is a store for which nothing waits. The result is true if the context has to wait.
    #[inline(always)]
    pub fn complete_access(
        &mut self,
        arrival: u64,
        wait: StallSource,
        hit_tick: u64,
        tick: u64,
        is_posted: bool,
        is_in_order: bool,
    ) -> bool {
        let is_late = arrival > hit_tick;
        (self.ready_at, self.stall_source) = (tick, None);
        let mut is_blocked = false;
        if !is_posted {
            (self.value_tick, self.value_origin) = (arrival, wait.origin);
            if is_late && is_in_order && arrival > tick {
                (self.stall_source, self.ready_at, is_blocked) = (Some(wait), arrival, true);
            }
        }

        if is_late && !is_blocked {
            let instruction = (!is_posted).then_some(self.issued_count - 1);
            self.add_outstanding(OutstandingMiss {
                returns_at: arrival,
                instruction,
                stall_source: wait,
            });
        }
        is_blocked
    }
}

/// Handles the end of a batch: requests the next batch, or returns the request with which the thread ended its turn.
fn handle_batch_end(
    burst: &mut Burst,
    thread: &mut HwThread,
    context: &mut HwContext,
) -> Option<BurstOutcome> {
    burst.issued_in_record = 0;
    context.ready_at = burst.tick;
    if thread.batch_end != BatchEnd::More {
        if burst.tick > burst.run.shared_bound {
            return Some(BurstOutcome::AheadOfCores);
        }
        return Some(BurstOutcome::BatchEnd(std::mem::replace(
            &mut thread.batch_end,
            BatchEnd::More,
        )));
    }

    if burst.tick >= burst.run.end_tick {
        return Some(BurstOutcome::Yield);
    }
    thread.fetch_next_batch();
    if thread.batch.is_empty() && thread.batch_end == BatchEnd::More {
        // A source that returns "more" without any access must not stop time.
        HwContext::count_stall(&mut thread.counters, 1, context.value_wait());
        (burst.unattributed.in_place, burst.tick) =
            (burst.unattributed.in_place + 1, burst.tick + 1);
    }

    None
}

/// Waits for the value of the last load; the context keeps its issue slot if no other context could use the time.
pub(super) fn wait_for_value(
    burst: &mut Burst,
    thread: &mut HwThread,
    context: &mut HwContext,
) -> Option<BurstOutcome> {
    let arrival = context.value_tick;
    if burst.wait_in_place(burst.tick, arrival, context.value_wait(), thread) {
        burst.tick = arrival;
        return None;
    }
    context.stall_source = Some(context.value_wait());
    context.ready_at = arrival;
    Some(BurstOutcome::Blocked)
}

/// Fetches the next line of code if page and line are present. Returns whether it did.
#[inline(always)]
pub(super) fn try_fetch_present_line(
    l1i_unit: &mut CacheUnit,
    thread: &mut HwThread,
    page_shift: u32,
    now: u64,
    shape: usize,
    is_watched: bool,
) -> bool {
    let page_shift = if shape == ANY_SHAPE {
        page_shift
    } else {
        SPECIALIZED_PAGE_SHIFT
    };
    let address = thread.next_code_address;
    let (is_mapped, frame) = thread.tlb.probe_entry(address >> page_shift);
    if !is_mapped {
        return false;
    }

    let line = (frame << page_shift | address & ((1 << page_shift) - 1)) >> l1i_unit.line_shift;
    if let Err(tag_index) = l1i_unit.store.record_hit(line, false, false, shape) {
        let Some(tag_index) = tag_index else {
            return false;
        };
        let meta = l1i_unit.store.line_meta(tag_index);
        if meta.0 & PREFETCHED != 0
            || !l1i_unit
                .pending_fills
                .has_arrived(line, now + l1i_unit.latency_ticks)
        {
            return false;
        }

        l1i_unit
            .store
            .set_meta(tag_index, LineMeta(meta.0 & !PENDING));
        l1i_unit.store.touch(line, tag_index);
    }

    if is_watched {
        thread
            .probes
            .observe_fetch(l1i_unit.store.set_of(line), l1i_unit.store.total_sets());
    }
    thread.advance_past_fetched_line(1 << l1i_unit.line_shift);
    true
}

/// Requests a translation from the operating system. Returns the ticks that this took.
pub(super) fn translate(
    thread: &mut HwThread,
    page: u64,
    context: &HwContext,
    is_store: bool,
    environment: &mut CoreEnvironment<'_>,
    l1d: usize,
    now: u64,
) -> u64 {
    let frame_result = environment
        .frames
        .find_frame(thread.process, page, context.cpu, is_store);
    let named_frame = environment
        .caches
        .pages
        .name_frame(frame_result.frame, page);
    thread.tlb.insert(page, named_frame);

    if frame_result.is_copied {
        environment.caches.insert_copied(
            l1d,
            named_frame << environment.page_shift,
            1 << environment.page_shift,
            thread.slot_number(),
            now,
        );
    }
    frame_result.cost_cycles * environment.ticks_per_cycle
}
