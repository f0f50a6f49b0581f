//! Default schedulers, which decide in which queue and position a task waits, how long its slice is, and how queues are
//! balanced.
//!
//! A scheduler stores numbers per task (virtual run time, priority, ...) and answers queries. The dispatcher manages
//! queues, switches, the CPUs of gangs, and affinity, in the same way under every scheduler.

mod linux;
mod round_robin;
mod solaris;

use serde::{Deserialize, Serialize};

pub(crate) use linux::LinuxLike;
pub(crate) use round_robin::RoundRobinScheduler;
pub(crate) use solaris::SolarisTimeSharing;

use super::queues::{SchedulerView, Slot};

/// The default scheduler of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulerKind {
    /// Fair sharing by virtual run time, with wake-up placement and with periodic and idle balancing.
    #[default]
    Linux,
    /// Multi-level feedback by the default dispatch table of Solaris.
    Solaris,
    /// One queue in order of arrival, with equal slices.
    RoundRobin,
}

/// Scaled time constants of the machine, in cycles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SchedulerTimes {
    /// Length of a slice of the default scheduler.
    pub slice_cycles: u64,
    /// Length of one nominal millisecond, at least 1.
    pub millisecond_cycles: u64,
}

/// The reason why a task joins a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EnqueueReason {
    New,
    Woken,
    /// The task used up its slice.
    Expired,
    /// Another task took its CPU, or an assignment or an affinity changed.
    Displaced,
    /// The task comes from another queue, by balancing.
    Balanced,
}

/// The rules of one default scheduler.
pub(crate) trait CpuScheduler: Send {
    /// Chooses the CPU on whose queue the task waits; the task must be allowed to use it.
    fn choose_queue(&mut self, slot: Slot, reason: EnqueueReason, view: &SchedulerView<'_>) -> u32;
    /// Records that the task has joined the queue of `cpu`, or is about to run there from another queue.
    fn enqueue(&mut self, slot: Slot, cpu: u32, reason: EnqueueReason, view: &SchedulerView<'_>);
    /// Smaller keys come first, then first come, first served.
    fn queue_key(&self, slot: Slot) -> i64;
    /// Cycles for which the task may run now.
    fn slice_cycles(&self, slot: Slot, cpu: u32, view: &SchedulerView<'_>) -> u64;
    /// Charges the task for `cycles` that it ran at this weight.
    fn charge_cycles(&mut self, slot: Slot, cycles: u64, weight: f64);
    /// Whether the task that joins a queue takes the CPU at once.
    fn should_preempt(&self, newcomer: Slot, running_slot: Slot) -> bool;
    /// Whether a waiting task may be picked for its co-runners although another task,
    /// `_first_choice`, is next.  If shares are kept, it may while it is at most a slice ahead: the
    /// order of turns changes but no share does, because no task gets further ahead. AV's Linux 2.6
    /// is similar: every task had its turn before the next round began.
    fn may_overtake(&self, _slot: Slot, _first_choice: Slot) -> bool {
        true
    }
    /// One queue for all CPUs, instead of one for each.
    fn has_single_queue(&self) -> bool {
        false
    }
    /// When [`CpuScheduler::plan_moves`] is due.
    fn next_balance_cycle(&self) -> u64 {
        u64::MAX
    }
    /// Plans moves of queued tasks, and returns the tasks with their new CPUs.
    fn plan_moves(&mut self, _view: &SchedulerView<'_>) -> Vec<(Slot, u32)> {
        Vec::new()
    }
    /// A task of another queue for a CPU that has nothing to run; `None` if there is none.
    fn steal(&mut self, cpu: u32, view: &SchedulerView<'_>) -> Option<Slot>;
}

pub(crate) fn build_scheduler(kind: SchedulerKind, times: SchedulerTimes) -> Box<dyn CpuScheduler> {
    match kind {
        SchedulerKind::Linux => Box::new(LinuxLike::new(times)),
        SchedulerKind::Solaris => Box::new(SolarisTimeSharing::new(times)),
        SchedulerKind::RoundRobin => Box::new(RoundRobinScheduler::new(times)),
    }
}

/// The table grows with the number of tasks.
fn slot_entry_mut<T: Default>(table: &mut Vec<T>, slot: Slot) -> &mut T {
    if table.len() <= slot {
        table.resize_with(slot + 1, T::default);
    }
    &mut table[slot]
}
