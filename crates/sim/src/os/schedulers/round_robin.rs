//! Round robin: one queue for all CPUs in order of arrival, with equal slices (times weight).

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
    fn choose_queue(
        &mut self,
        slot: Slot,
        _reason: EnqueueReason,
        view: &SchedulerView<'_>,
    ) -> u32 {
        view.last_cpu(slot)
            .filter(|&cpu| view.is_idle(cpu) && view.is_allowed_on(slot, cpu))
            .unwrap_or_else(|| {
                view.best_cpu(slot, |cpu| {
                    (!view.is_idle(cpu), view.count_waiting(cpu), cpu)
                })
            })
    }
    fn enqueue(
        &mut self,
        _slot: Slot,
        _cpu: u32,
        _reason: EnqueueReason,
        _view: &SchedulerView<'_>,
    ) {
    }
    fn queue_key(&self, _slot: Slot) -> i64 {
        0
    }
    fn slice_cycles(&self, slot: Slot, _cpu: u32, view: &SchedulerView<'_>) -> u64 {
        ((self.times.slice_cycles as f64 * view.weight(slot)) as u64).max(1)
    }
    fn charge_cycles(&mut self, _slot: Slot, _cycles: u64, _weight: f64) {}
    fn should_preempt(&self, _newcomer: Slot, _running: Slot) -> bool {
        false
    }
    fn has_single_queue(&self) -> bool {
        true
    }
    fn steal(&mut self, cpu: u32, view: &SchedulerView<'_>) -> Option<Slot> {
        view.queued_tasks()
            .filter(|&slot| view.is_allowed_on(slot, cpu))
            .min_by_key(|&slot| view.enqueue_number(slot))
    }
}
