//! Looking at single accesses: traces of L1 data misses, sampled accesses, watched locations, super sets, overflows.
//!
//! Probes belong to a thread and travel with it. They are off the hot path unless on: a thread with a watch or
//! super-set counts on the L1 runs a variant of the engine compiled for that.

use cachemate_core::{AccessSample, CacheLevel, CounterEvent, ReuseSample, SplitMix64, SuperSetCount};

/// All probes of one thread. The operating system attaches them and takes the results.
#[derive(Clone, Debug, Default)]
pub struct Probes {
    pub trace: Option<TraceProbe>,
    pub samples: Option<SampleProbe>,
    pub watch: Option<WatchProbe>,
    /// One per level at most.
    pub activity: Vec<ActivityProbe>,
    pub overflows: Vec<Overflow>,
    /// Ticks of interrupts that these probes took from the task.
    pub cost_ticks: u64,
}

impl Probes {
    pub fn is_empty(&self) -> bool {
        self.trace.is_none()
            && self.samples.is_none()
            && self.watch.is_none()
            && self.activity.is_empty()
            && self.overflows.is_empty()
    }
}

/// Logs the line of every L1 data miss, as the machine's sampler can (RM), and of fetches of code that missed, if
/// requested. Each entry costs an interrupt. When the log is full, [`super::StopReason::Interrupt`] is raised once.
#[derive(Clone, Debug, Default)]
pub struct TraceProbe {
    pub max_entries: u32,
    /// Fetches of code too: the interrupt's own address register has them, whatever the data's sampler.
    pub code_too: bool,
    /// Physical lines of the L1 data cache.
    pub lines: Vec<u64>,
    /// Places in the log of fetches of code.
    pub code: Vec<u32>,
    /// L1 data misses that are not in the log. Known to the simulator; a real register cannot tell.
    pub lost: u64,
    /// Entries by how many misses were lost right after them: none, one, two, more.
    pub lost_after: [u32; 4],
    /// Entries that repeat the register because a prefetch counted as a miss.
    pub stale: u64,
    pub(crate) last_instruction: u64,
    pub(crate) lost_since: usize,
    pub(crate) register: Option<u64>,
}

/// Samples L1 data misses, one in `one_in` on average, jittered. Each sample costs an interrupt.
#[derive(Clone, Debug, Default)]
pub struct SampleProbe {
    pub one_in: u32,
    /// Only hits in remote caches count.
    pub remote_only: bool,
    pub at_most: u32,
    pub samples: Vec<AccessSample>,
    /// Events passed, sampled or not.
    pub events: u64,
    pub(crate) countdown: u64,
    pub(crate) armed_at: Option<u64>,
}

/// Watches single locations (virtual lines of data or code) until they are touched again (BS, StatCache): one watch
/// point per location, as many as `locations`, set one in `one_in` accesses on average. Fetching a line of code is an
/// access like another: a cache that holds both is shared by both.
#[derive(Clone, Debug, Default)]
pub struct WatchProbe {
    pub locations: u32,
    pub one_in: u32,
    /// Watched lines are so many doublings larger than those of the L1 data and instruction caches.
    pub coarser: u32,
    pub coarser_code: u32,
    pub samples: Vec<ReuseSample>,
    /// Line, accesses of the task when it was set, tick when it was set.
    pub(crate) open: Vec<(u64, u64, u64)>,
    pub(crate) accesses: u64,
    pub(crate) next_at: u64,
    pub(crate) begun: u32,
}

/// Accesses and misses of groups of cache sets (AV 2.1) by this thread.
#[derive(Clone, Debug)]
pub struct ActivityProbe {
    pub level: CacheLevel,
    /// Super sets go by low set bits; `true`: contiguous ranges of sets.
    pub contiguous: bool,
    pub super_sets: Vec<SuperSetCount>,
}

impl WatchProbe {
    /// `elapsed_ns` turns the ticks since a watch was set into time.
    pub(crate) fn touch(&mut self, line: u64, tick: u64, elapsed_ns: impl Fn(u64) -> u64) {
        if let Some(found) = self.open.iter().position(|open| open.0 == line) {
            let (_, accesses, begun) = self.open.swap_remove(found);
            let accesses = Some(self.accesses - accesses - 1);
            self.samples.push(ReuseSample { accesses, elapsed_ns: elapsed_ns(tick - begun), reused: true });
        }
        if self.accesses >= self.next_at && self.begun < self.locations {
            self.open.push((line, self.accesses, tick));
            self.begun += 1;
            self.next_at = self.accesses + jitter(self.one_in, u64::from(self.begun) ^ self.accesses << 20);
        }
        self.accesses += 1;
    }
}

impl SampleProbe {
    pub(crate) fn is_full(&self) -> bool {
        self.samples.len() >= self.at_most as usize
    }
}

impl ActivityProbe {
    fn super_set(&mut self, set: u64, sets: u64) -> Option<&mut SuperSetCount> {
        let count = self.super_sets.len() as u64;
        let at = if self.contiguous { set * count / sets } else { set % count.max(1) };
        self.super_sets.get_mut(at as usize)
    }
    pub(crate) fn count(&mut self, set: u64, sets: u64, missed: bool) {
        if let Some(counts) = self.super_set(set, sets) {
            counts.accesses += 1;
            counts.misses += u64::from(missed);
        }
    }
    /// An access that was counted already turned out a miss.
    pub(crate) fn record_miss(&mut self, set: u64, sets: u64) {
        if let Some(counts) = self.super_set(set, sets) {
            counts.misses += 1;
        }
    }
}

/// Raises [`super::StopReason::Interrupt`] each time the task's count passes another `period`, at most one burst late
/// (skid).
#[derive(Clone, Debug)]
pub struct Overflow {
    pub event: CounterEvent,
    pub period: u64,
    pub next_at: u64,
    /// Interrupts so far.
    pub raised: u64,
}

/// Uniform in 1 ..= 2 `one_in` - 1: `one_in` on average, never in step with a loop.
pub(super) fn jitter(one_in: u32, seed: u64) -> u64 {
    let span = 2 * u64::from(one_in.max(1)) - 1;
    1 + ((u128::from(SplitMix64::scatter(seed ^ 0x5851_f42d_4c95_7f2d)) * u128::from(span)) >> 64) as u64
}
