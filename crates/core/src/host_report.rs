//! What a live host knows beside the observation of a window.

use std::collections::BTreeMap;

use crate::{CacheId, Change, CpuId, CpusetGroup, GroupId, ServiceIdentity, TaskId};

/// The state of a live host after a window, beyond what the window's record contains. A replay has none of it, so no
/// policy may read it; it is for people.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct HostReport {
    /// Does the machine change the host? It does if the configuration requests it and root does not overrule it.
    pub is_acting: bool,
    /// Process id of the guardian; `None` if nothing has been changed.
    pub guardian_pid: Option<u32>,
    /// The managed threads, in order of arrival.
    pub threads: Vec<HostThread>,
    /// Number of threads of each service that have not run for a while and are no tasks.
    pub idle_threads: BTreeMap<ServiceIdentity, u32>,
    /// Programs of each service that ended before any window read them; `None` if the kernel sends no process events.
    pub unread_programs: Option<BTreeMap<ServiceIdentity, u64>>,
    /// Programs whose profiles the operator configured.
    pub profiled_programs: Vec<String>,
    /// Share of time in which each CPU was busy, whichever programs used it; a CPU without a reading is absent.
    pub busy_share_by_cpu: BTreeMap<CpuId, f64>,
    /// Use of the caches by all programs; empty if no hardware counts it.
    pub cache_use: Vec<CacheUse>,
    /// Confined groups, as last read back.
    pub confined_groups: Vec<CpusetGroup>,
    /// Confined groups whose CPUs their owner or a user has changed since, one sentence each.
    pub overridden_groups: Vec<String>,
    /// The reasons why the lines of a share differ from its mask.
    pub share_notes: BTreeMap<(GroupId, CacheId), Vec<String>>,
    /// The changes that the last plan required, whether they were made or only observed.
    pub planned_changes: Vec<Change>,
    /// Objects to restore, with their originals, from the journal; the first [`HostReport::MAX_ORIGINALS`].
    pub originals: Vec<OriginalState>,
}

impl HostReport {
    /// Maximum number of originals in a report.
    pub const MAX_ORIGINALS: usize = 200;
}

/// A managed thread, as the kernel identifies it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostThread {
    /// Its task in observations and plans.
    pub task: TaskId,
    /// Process id.
    pub pid: i32,
    /// Thread id.
    pub tid: i32,
    /// Command name, as the kernel has it.
    pub name: String,
    /// CPU on which it last ran.
    pub last_cpu: Option<CpuId>,
}

/// Use of one monitored or partitionable cache by all programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheUse {
    /// The topology's number of the cache.
    pub cache: CacheId,
    /// Bytes that the lines of all groups occupy; `None` if the hardware does not count them.
    pub occupancy_bytes: Option<u64>,
    /// Classes of service that no group uses; `None` if the cache cannot be partitioned.
    pub free_classes: Option<u32>,
}

/// A changed object with the state that it will have again, both for display.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct OriginalState {
    /// The changed object, such as `CPUs of gzip(1234)`.
    pub object: String,
    /// Original value that cachemate will restore.
    pub original: String,
}
