//! Default schedulers: the queue of a waiting task, its position, its slice, and the balancing of queues.
//!
//! A scheduler keeps numbers per task (virtual run time, priority, ...) and answers queries; the dispatcher manages
//! queues, switches, the CPUs of gangs, and affinity, in the same way under every scheduler.

mod linux;
mod round_robin;
mod solaris;

use serde::{Deserialize, Serialize};

pub(crate) use linux::LinuxLike;
pub(crate) use round_robin::RoundRobinScheduler;
pub(crate) use solaris::SolarisTimeSharing;

use super::queues::{SchedulerView, Slot};

/// Which default scheduler the machine runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulerKind {
    /// Fair share by virtual run time, wake-up placement, periodic and idle balancing.
    #[default]
    Linux,
    /// Multi-level feedback by the default dispatch table.
    Solaris,
    /// One queue in order of arrival, equal slices.
    RoundRobin,
}

/// The machine's times, scaled, in cycles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SchedulerTimes {
    /// Slice of the default scheduler.
    pub slice_cycles: u64,
    /// One millisecond of nominal time, at least 1.
    pub millisecond_cycles: u64,
}

/// Why a task comes to a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EnqueueReason {
    New,
    Woken,
    /// It used up its slice.
    Expired,
    /// Another task took its CPU, or an assignment or an affinity changed.
    Displaced,
    /// The task comes from another queue, by balancing.
    Balanced,
}

/// The rules of one default scheduler.
pub(crate) trait CpuScheduler: Send {
    /// Chooses the CPU on whose queue the task waits; must be a CPU that the task may use.
    fn place(&mut self, slot: Slot, why: EnqueueReason, view: &SchedulerView<'_>) -> u32;
    /// Records that the task has joined the queue of `cpu`, or is about to run there from another queue.
    fn enqueue(&mut self, slot: Slot, cpu: u32, why: EnqueueReason, view: &SchedulerView<'_>);
    /// Order within a queue: smaller first, then first come first served.
    fn key(&self, slot: Slot) -> i64;
    /// How long it may run now.
    fn slice_cycles(&self, slot: Slot, cpu: u32, view: &SchedulerView<'_>) -> u64;
    /// Charges the task for `cycles` that it ran at this weight.
    fn charge_cycles(&mut self, slot: Slot, cycles: u64, weight: f64);
    /// Does the newcomer to a queue take the CPU at once?
    fn should_preempt(&self, newcomer: Slot, running: Slot) -> bool;
    /// May a waiting task be picked for its co-runners although `first` is next? If shares are kept, yes while it is at
    /// most a slice ahead: the order of turns changes but no share does, because no task gets further ahead. AV's Linux
    /// 2.6 is similar: every task had its turn before the next round began.
    fn may_overtake(&self, _slot: Slot, _first: Slot) -> bool {
        true
    }
    /// One queue for all CPUs.
    fn has_single_queue(&self) -> bool {
        false
    }
    /// When [`CpuScheduler::balance`] is due.
    fn next_balance_cycle(&self) -> u64 {
        u64::MAX
    }
    /// Queued tasks to move, and where to.
    fn balance(&mut self, _sight: &SchedulerView<'_>) -> Vec<(Slot, u32)> {
        Vec::new()
    }
    /// A queued task for a CPU that has nothing to do, from another queue.
    fn steal(&mut self, cpu: u32, view: &SchedulerView<'_>) -> Option<Slot>;
}

/// A scheduler at its start.
pub(crate) fn scheduler(kind: SchedulerKind, times: SchedulerTimes) -> Box<dyn CpuScheduler> {
    match kind {
        SchedulerKind::Linux => Box::new(LinuxLike::new(times)),
        SchedulerKind::Solaris => Box::new(SolarisTimeSharing::new(times)),
        SchedulerKind::RoundRobin => Box::new(RoundRobinScheduler::new(times)),
    }
}

/// The slot's number in a table that grows with the tasks.
fn entry<T: Default>(table: &mut Vec<T>, slot: Slot) -> &mut T {
    if table.len() <= slot {
        table.resize_with(slot + 1, T::default);
    }
    &mut table[slot]
}
