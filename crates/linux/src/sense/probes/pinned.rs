//! A probe thread that is pinned to one CPU and measures its own cost.

use std::io;

use cachemate_core::{CpuId, CpuSet};

use crate::kernel::{Kernel, LinuxHost, clock_ns};

/// Proof that the calling thread is on one CPU; dropping it restores the previous affinity. Probe threads are our own,
/// so none of this needs the journal.
#[derive(Debug)]
pub struct PinnedThread {
    tid: i32,
    previous_affinity: CpuSet,
    cpu_time_at_start_ns: u64,
}

impl PinnedThread {
    /// Moves the calling thread to `cpu`.
    ///
    /// # Errors
    /// The CPU is offline, or outside the thread's cpuset.
    pub fn new(cpu: CpuId) -> io::Result<Self> {
        let host = LinuxHost::new("/");
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        let previous_affinity = host.affinity(tid)?;
        host.set_affinity(tid, &[cpu.0].into_iter().collect())?;
        Ok(PinnedThread {
            tid,
            previous_affinity,
            cpu_time_at_start_ns: thread_time_ns(),
        })
    }

    /// Processor time of this thread since it was pinned.
    pub fn cost_ns(&self) -> u64 {
        thread_time_ns() - self.cpu_time_at_start_ns
    }
}

impl Drop for PinnedThread {
    fn drop(&mut self) {
        // A failure does no harm, because the thread is ours and about to end or to continue as before.
        let _ = LinuxHost::new("/").set_affinity(self.tid, &self.previous_affinity);
    }
}

/// Processor time of the calling thread.
pub(crate) fn thread_time_ns() -> u64 {
    clock_ns(rustix::time::ClockId::ThreadCPUTime)
}

/// A cycle counter with a constant rate, for distinguishing hits from misses; serialized against earlier loads.
#[inline]
pub fn cycles_now() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        let mut core = 0;
        // SAFETY: rdtscp and lfence exist on every x86-64 processor that runs a kernel this crate supports; they
        // touch no memory but the local variable.
        unsafe {
            let now = core::arch::x86_64::__rdtscp(&raw mut core);
            core::arch::x86_64::_mm_lfence();
            now
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    clock_ns(rustix::time::ClockId::Monotonic)
}

/// Removes the cache line of this word from all caches; without effect on processors other than x86-64.
pub(crate) fn flush_line<T>(word: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: flushing a line of memory that we hold a reference to changes no content.
    unsafe {
        core::arch::x86_64::_mm_clflush(std::ptr::from_ref(word).cast());
        core::arch::x86_64::_mm_mfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}
