//! The state on which a core's runs operate, and the rules for its miss registers.

use super::FrameProvider;
use super::caches::{CacheRequest, Caches};
use super::context::{HwContext, OutstandingMiss};
use super::core_kind::CoreKindName;
use super::sampling::SamplingUnit;
use super::thread::HwThread;

/// The environment of a core: state that it shares with others.
pub(crate) struct CoreEnvironment<'a> {
    pub caches: &'a mut Caches,
    pub frames: &'a mut dyn FrameProvider,
    pub page_shift: u32,
    pub ticks_per_cycle: u64,
    pub sampling: SamplingUnit,
}

/// The bounds of one run of a context: from `start` to `end_tick` at most.
#[derive(Clone, Copy, Default)]
pub(crate) struct ContextRun {
    pub context_index: usize,
    pub start_tick: u64,
    pub end_tick: u64,
    /// Tick at which another context of the core is ready.
    pub other_ready_tick: u64,
    pub shared_bound: u64,
}

/// The state on which a core's runs operate.
pub(crate) struct CoreFrontEnd {
    pub contexts: Vec<HwContext>,
    pub l1d: usize,
    pub l1i: Option<usize>,
    pub package: u32,
    pub core: u32,
    pub is_in_order: bool,
    /// Whether a store that misses blocks its context, for want of a store buffer.
    pub stores_block: bool,
    /// Whether instructions that do not need the value of a load may overtake it.
    pub can_overtake_loads: bool,
    pub kind: CoreKindName,
    /// Whether the core's second level may serve accesses that others do not notice.
    pub is_next_level_private: bool,
    /// Whether there are so many caches that the host's caches do not hold their state.
    pub uses_host_hints: bool,
    pub window: u64,
    /// Each loaded context's share of the window, as computed by [`super::pipeline::Core::update_contexts`].
    pub window_share: u64,
    pub mshr_count: usize,
}

impl CoreFrontEnd {
    /// The thread belongs to this core, and `address` is physical.
    #[inline(always)]
    pub fn build_request(
        &self,
        address: u64,
        tick: u64,
        is_store: bool,
        thread: &HwThread,
    ) -> CacheRequest {
        let (task, class) = (thread.slot_number(), thread.class);
        CacheRequest {
            address,
            tick,
            is_store,
            is_write_through: false,
            is_prefetch: false,
            task,
            class,
            package: self.package,
            core: self.core,
        }
    }

    /// The miss that returns first if there is no miss register (or entry of the store buffer) for
    /// another miss.
    #[inline(never)]
    pub fn find_blocking_miss(
        &mut self,
        context_index: usize,
        now: u64,
    ) -> Option<OutstandingMiss> {
        if self.try_reclaim_mshrs(context_index, now) {
            return None;
        }

        let contexts = if self.is_in_order {
            &self.contexts[context_index..context_index + 1]
        } else {
            &self.contexts[..]
        };
        let context_with_first_return = contexts
            .iter()
            .min_by_key(|context| context.first_return_tick)?;
        context_with_first_return
            .outstanding_misses
            .iter()
            .find(|miss| miss.returns_at == context_with_first_return.first_return_tick)
            .copied()
    }

    /// Frees the registers of misses that have returned; this is checked only when it matters. Returns whether there is
    /// room now.
    #[inline(never)]
    pub fn try_reclaim_mshrs(&mut self, context_index: usize, now: u64) -> bool {
        self.contexts
            .iter_mut()
            .for_each(|context| context.drop_returned_misses(now));
        self.contexts[context_index].mshrs_in_use < self.max_outstanding(context_index)
    }

    /// Out of order, the context shares the registers; in order, it has a store buffer.
    #[inline(always)]
    pub fn max_outstanding(&self, context_index: usize) -> usize {
        let contexts = if self.is_in_order {
            &[]
        } else {
            &self.contexts[..]
        };
        let other_contexts = contexts
            .iter()
            .zip(0..)
            .filter(|&(_, index)| index != context_index);
        self.mshr_count.saturating_sub(
            other_contexts
                .map(|(context, _)| context.mshrs_in_use)
                .sum(),
        )
    }
}
