//! The one report of the live machine: what people want to know of the host beside the observation of a window.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cachemate_core::{
    CacheId, CacheUse, CpuId, GroupId, HostReport, HostThread, OriginalState, Units,
};

use super::LiveMachine;
use crate::act::resctrl::WayController;
use crate::kernel::{Kernel, lock};
use crate::safety::journal::{JournalObject, ObjectState};
use crate::sense::cpu_load::CpuLoadReader;
use crate::sense::tasks::ManagedThread;

/// Time between two reads of what changes slowly.
const SLOW_PERIOD: Duration = Duration::from_secs(1);

/// Readings of the host that are repeated once in [`SLOW_PERIOD`].
#[derive(Default)]
pub(super) struct SlowReadings {
    read_at: Option<Instant>,
    loads: CpuLoadReader,
    busy_share_by_cpu: BTreeMap<CpuId, f64>,
    cache_use: Vec<CacheUse>,
}

impl SlowReadings {
    fn refresh(&mut self, kernel: &dyn Kernel, ways: Option<&WayController>) {
        if self
            .read_at
            .is_some_and(|read_at| read_at.elapsed() < SLOW_PERIOD)
        {
            return;
        }

        self.read_at = Some(Instant::now());
        let loads = self.loads.read(kernel);
        self.busy_share_by_cpu = loads
            .into_iter()
            .map(|(cpu, share)| (CpuId(cpu), share))
            .collect();
        self.cache_use = ways.map(|ways| ways.cache_use(kernel)).unwrap_or_default();
    }
}

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// The state of the host after the last window, with readings that are at most a second old.
    pub fn host_report(&mut self) -> HostReport {
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        self.slow_readings
            .refresh(&*kernel, self.way_controller.as_ref());
        let threads = self.tasks.tasks();
        let overrides = self.overrides.changed_groups();
        let originals = self.actuator.originals();

        HostReport {
            is_acting: self.options.should_act,
            guardian_pid: self.actuator.guardian_pid(),
            threads: threads.iter().map(|thread| host_thread(thread)).collect(),
            idle_threads: self.tasks.idle_counts(),
            unread_programs: self.tasks.unread_programs().cloned(),
            profiled_programs: self.options.known_profiles.keys().cloned().collect(),
            busy_share_by_cpu: self.slow_readings.busy_share_by_cpu.clone(),
            cache_use: self.slow_readings.cache_use.clone(),
            confined_groups: self.confined_groups.clone(),
            overridden_groups: overrides.map(ToString::to_string).collect(),
            share_notes: self.share_notes(&*kernel),
            planned_changes: self.planned_changes.clone(),
            originals: originals
                .iter()
                .take(HostReport::MAX_ORIGINALS)
                .map(|(object, state)| describe_original(object, state, &threads))
                .collect(),
        }
    }

    fn share_notes(&self, kernel: &dyn Kernel) -> BTreeMap<(GroupId, CacheId), Vec<String>> {
        let Some(ways) = &self.way_controller else {
            return BTreeMap::new();
        };
        let way_shares = self
            .applied_plan
            .shares
            .iter()
            .filter(|active_share| matches!(active_share.share.units, Units::Ways { .. }));
        way_shares
            .map(|active_share| {
                let key = (active_share.share.group, active_share.share.cache);
                (key, ways.explain(kernel, active_share))
            })
            .collect()
    }
}

fn host_thread(thread: &ManagedThread) -> HostThread {
    HostThread {
        task: thread.task,
        pid: thread.pid,
        tid: thread.thread.tid,
        name: thread.name.clone(),
        last_cpu: thread.last_cpu,
    }
}

fn describe_original(
    object: &JournalObject,
    state: &ObjectState,
    threads: &[&ManagedThread],
) -> OriginalState {
    let describe_thread = |pid: i32, tid: i32| {
        let process = threads.iter().find(|thread| thread.pid == pid);
        let name = process.map_or("", |thread| thread.name.as_str());
        match tid == pid {
            true => format!("{name}({pid})"),
            false => format!("{name}({pid}), thread {tid}"),
        }
    };
    let object = match object {
        JournalObject::Affinity { pid, thread } => {
            format!("CPUs of {}", describe_thread(*pid, thread.tid))
        }
        JournalObject::Nice { pid, thread } => {
            format!("nice value of {}", describe_thread(*pid, thread.tid))
        }
        JournalObject::Policy { pid, thread } => {
            format!("scheduling of {}", describe_thread(*pid, thread.tid))
        }
        JournalObject::Membership {
            hierarchy,
            pid,
            thread,
        } => {
            let member = describe_thread(*pid, thread.tid);
            format!("group of {member} in {}", hierarchy.display())
        }
        JournalObject::File { path }
        | JournalObject::Schemata { path }
        | JournalObject::Directory { path } => path.display().to_string(),
    };
    let original = match state {
        ObjectState::Cpus(cpus) => cpus.to_string(),
        ObjectState::Nice(nice) => nice.to_string(),
        ObjectState::Policy(policy) => format!("policy {policy}"),
        ObjectState::Scheduling(scheduling) => format!("{scheduling:?}"),
        ObjectState::Group(path) => path.display().to_string(),
        ObjectState::Text(text) => text.trim_end().to_string(),
        ObjectState::Absent => "absent".to_string(),
        ObjectState::Present => "there".to_string(),
    };
    OriginalState { object, original }
}
