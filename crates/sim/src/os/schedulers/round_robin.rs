//! Round robin: one queue for all CPUs in order of arrival, equal slices (times weight).

use super::{CpuScheduler, EnqueueReason, SchedulerTimes};
use crate::os::queues::{SchedulerView, Slot};

pub(crate) struct RoundRobinScheduler {
    times: SchedulerTimes,
}

impl RoundRobinScheduler {
    pub fn new(times: SchedulerTimes) -> Self {
        RoundRobinScheduler { times }
    }
}

impl CpuScheduler for RoundRobinScheduler {
    fn place(&mut self, slot: Slot, _why: EnqueueReason, sight: &SchedulerView<'_>) -> u32 {
        sight
            .last_cpu(slot)
            .filter(|&cpu| sight.is_idle(cpu) && sight.may_run(slot, cpu))
            .unwrap_or_else(|| sight.best_cpu(slot, |cpu| (!sight.is_idle(cpu), sight.waiting(cpu), cpu)))
    }
    fn queued(&mut self, _slot: Slot, _cpu: u32, _why: EnqueueReason, _sight: &SchedulerView<'_>) {}
    fn key(&self, _slot: Slot) -> i64 {
        0
    }
    fn slice_cycles(&self, slot: Slot, _cpu: u32, sight: &SchedulerView<'_>) -> u64 {
        ((self.times.slice_cycles as f64 * sight.weight(slot)) as u64).max(1)
    }
    fn ran(&mut self, _slot: Slot, _cycles: u64, _weight: f64) {}
    fn preempts(&self, _newcomer: Slot, _running: Slot) -> bool {
        false
    }
    fn one_queue(&self) -> bool {
        true
    }
    fn steal(&mut self, cpu: u32, sight: &SchedulerView<'_>) -> Option<Slot> {
        sight.all_queued().filter(|&slot| sight.may_run(slot, cpu)).min_by_key(|&slot| sight.queued_at(slot))
    }
}
