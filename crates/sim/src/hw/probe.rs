//! Observation of single accesses: traces of L1 data misses, sampled accesses, watched locations, super sets,
//! overflows.
//!
//! Probes belong to a thread and move with it. They cost nothing on the hot path unless they are on: a thread with a
//! watch or with super-set counts on the L1 runs a variant of the engine compiled for that.

use cachemate_core::{
    AccessSample, CacheLevel, CounterEvent, ReuseSample, SplitMix64, SuperSetCount,
};

/// All probes of one thread. The operating system attaches them and reads the results.
#[derive(Clone, Debug, Default)]
pub struct Probes {
    pub trace: Option<TraceProbe>,
    pub samples: Option<SampleProbe>,
    pub watch: Option<WatchProbe>,
    /// Counts of super sets, at most one probe per level.
    pub activity: Vec<ActivityProbe>,
    pub overflows: Vec<Overflow>,
    /// Ticks of the task that interrupts of these probes took.
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

/// Logs the line of every L1 data miss, as the machine's sampler can (RM), and of code fetches that missed, if
/// requested. Each entry costs an interrupt. When the log is full, [`super::StopReason::Interrupt`] is raised once.
#[derive(Clone, Debug, Default)]
pub struct TraceProbe {
    pub max_entries: u32,
    /// Whether code fetches are logged too: the interrupt's own address register provides them, whatever the data
    /// sampler.
    pub logs_code: bool,
    /// Physical lines, in the size of the L1 data cache's lines.
    pub lines: Vec<u64>,
    /// Positions of the code fetches in the log.
    pub code_positions: Vec<u32>,
    /// Number of L1 data misses that are not in the log. Known to the simulator only; a real register does not reveal
    /// it.
    pub lost_misses: u64,
    /// Number of entries by the number of misses lost right after them: 0, 1, 2, or more.
    pub entries_by_lost_count: [u32; 4],
    /// Number of entries that repeat the last address because a prefetch counted as a miss.
    pub stale_entries: u64,
    pub(crate) last_instruction: u64,
    pub(crate) lost_since_last_entry: usize,
    pub(crate) last_address: Option<u64>,
}

/// Samples L1 data misses, one in `sample_period` on average, with jitter. Each sample costs an interrupt.
#[derive(Clone, Debug, Default)]
pub struct SampleProbe {
    pub sample_period: u32,
    /// Whether only hits in remote caches count.
    pub counts_remote_only: bool,
    pub max_samples: u32,
    pub samples: Vec<AccessSample>,
    /// Number of events that passed, sampled or not.
    pub event_count: u64,
    pub(crate) countdown: u64,
    pub(crate) armed_instruction: Option<u64>,
}

/// Watches single locations (virtual lines of data or code) until they are touched again (BS, StatCache). There is one
/// watch point per location, up to `max_locations`, and one is set in `watch_period` accesses on average. A fetch of a
/// line of code counts as an access, because a cache that holds both code and data is shared by both.
#[derive(Clone, Debug, Default)]
pub struct WatchProbe {
    pub max_locations: u32,
    pub watch_period: u32,
    /// Number of doublings by which watched lines are larger than those of the L1 data and instruction caches.
    pub data_line_doublings: u32,
    pub code_line_doublings: u32,
    pub samples: Vec<ReuseSample>,
    /// Line, number of accesses of the task when the watch was set, and tick at which it was set.
    pub(crate) open_watches: Vec<(u64, u64, u64)>,
    pub(crate) accesses: u64,
    pub(crate) next_watch_access: u64,
    pub(crate) watch_count: u32,
}

/// Accesses and misses of groups of cache sets (AV 2.1) by this thread.
#[derive(Clone, Debug)]
pub struct ActivityProbe {
    pub level: CacheLevel,
    /// Whether super sets are contiguous ranges of sets; otherwise they are selected by low set bits.
    pub is_contiguous: bool,
    pub super_sets: Vec<SuperSetCount>,
}

impl WatchProbe {
    /// Records a touch of a line; `elapsed_ns` converts the ticks since a watch was set into time.
    pub(crate) fn touch(&mut self, line: u64, tick: u64, elapsed_ns: impl Fn(u64) -> u64) {
        if let Some(index) = self.open_watches.iter().position(|open| open.0 == line) {
            let (_, start_accesses, start_tick) = self.open_watches.swap_remove(index);
            let accesses = Some(self.accesses - start_accesses - 1);
            self.samples.push(ReuseSample {
                accesses,
                elapsed_ns: elapsed_ns(tick - start_tick),
                reused: true,
            });
        }
        if self.accesses >= self.next_watch_access && self.watch_count < self.max_locations {
            self.open_watches.push((line, self.accesses, tick));
            self.watch_count += 1;
            self.next_watch_access = self.accesses
                + draw_jitter(
                    self.watch_period,
                    u64::from(self.watch_count) ^ self.accesses << 20,
                );
        }
        self.accesses += 1;
    }
}

impl SampleProbe {
    pub(crate) fn is_full(&self) -> bool {
        self.samples.len() >= self.max_samples as usize
    }
}

impl ActivityProbe {
    fn super_set_mut(&mut self, set: u64, set_count: u64) -> Option<&mut SuperSetCount> {
        let count = self.super_sets.len() as u64;
        let super_set = if self.is_contiguous {
            set * count / set_count
        } else {
            set % count.max(1)
        };
        self.super_sets.get_mut(super_set as usize)
    }
    pub(crate) fn count_access(&mut self, set: u64, set_count: u64, is_miss: bool) {
        if let Some(counts) = self.super_set_mut(set, set_count) {
            counts.accesses += 1;
            counts.misses += u64::from(is_miss);
        }
    }
    /// Records that an access that was already counted is a miss.
    pub(crate) fn record_miss(&mut self, set: u64, set_count: u64) {
        if let Some(counts) = self.super_set_mut(set, set_count) {
            counts.misses += 1;
        }
    }
}

/// Raises [`super::StopReason::Interrupt`] each time the task's count passes another `threshold_step`, at most one
/// burst late (skid).
#[derive(Clone, Debug)]
pub struct Overflow {
    pub event: CounterEvent,
    pub threshold_step: u64,
    pub next_threshold: u64,
    /// Number of interrupts so far.
    pub interrupt_count: u64,
}

/// Uniform in 1 ..= 2 `mean` - 1, which is `mean` on average and never in step with a loop.
pub(super) fn draw_jitter(mean: u32, seed: u64) -> u64 {
    let span = 2 * u64::from(mean.max(1)) - 1;
    1 + ((u128::from(SplitMix64::scatter(seed ^ 0x5851_f42d_4c95_7f2d)) * u128::from(span)) >> 64)
        as u64
}
