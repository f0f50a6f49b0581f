//! Memory nodes of the pages of processes, by `/proc/PID/numa_maps` (numa(7)).
//!
//! Problem: for that file the kernel walks a process's page tables with its map locked against changes, which takes
//! long for many pages. Method: one process at a time is read, the one with the oldest reading; after each read, the
//! next one waits for a thousand times the read's duration. Nothing is read on hosts with one node. Properties: reading
//! costs at most a thousandth of the time; a process that could not be read has no value.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cachemate_core::{ProcessId, Topology};

use super::topology::MAX_NODES;
use crate::kernel::Kernel;

/// Reading takes at most one part in this many of the time between two reads.
const READ_TIME_DIVISOR: u32 = 1000;
/// Units in which pages are counted: the size of the smallest ones.
const PAGE_KIB: u64 = 4;

/// See the module's documentation.
#[derive(Default, Debug)]
pub struct MemoryNodes {
    /// Pages by node, with the number of the read that reported them.
    pages_by_process: BTreeMap<ProcessId, (u64, Option<Vec<u64>>)>,
    read_count: u64,
    next_read_time: Option<Instant>,
}

impl MemoryNodes {
    /// Forgets the processes that `processes` does not list, and reads one of those listed if the next read is due. On
    /// hosts with one node it does nothing.
    pub fn refresh(
        &mut self,
        kernel: &impl Kernel,
        topology: &Topology,
        processes: impl FnOnce() -> BTreeMap<ProcessId, i32>,
    ) {
        if topology.memory_latency.len() < 2 {
            return;
        }
        let processes = processes();
        self.pages_by_process
            .retain(|process, _| processes.contains_key(process));
        let now = Instant::now();
        if self.next_read_time.is_some_and(|earliest| now < earliest) {
            return;
        }
        let last_read = |process: &ProcessId| {
            self.pages_by_process
                .get(process)
                .map_or(0, |(read, _)| *read)
        };
        let Some((&process, pid)) = processes
            .iter()
            .min_by_key(|(process, _)| last_read(process))
        else {
            return;
        };
        let numa_maps = kernel.read(&PathBuf::from(format!("/proc/{pid}/numa_maps")));
        self.read_count += 1;
        self.pages_by_process.insert(
            process,
            (
                self.read_count,
                numa_maps.ok().and_then(|text| parse_pages_per_node(&text)),
            ),
        );
        self.next_read_time = Some(
            now + now
                .elapsed()
                .saturating_mul(READ_TIME_DIVISOR)
                .max(Duration::from_millis(1)),
        );
    }

    /// Pages by node at the last read, in units of 4 KiB; `None` if the process has not been read.
    pub fn node_pages(&self, process: ProcessId) -> Option<Vec<u64>> {
        self.pages_by_process.get(&process)?.1.clone()
    }
}

/// Pages by node, in units of 4 KiB; `None` if nothing is resident, or the text is not understood.
fn parse_pages_per_node(text: &str) -> Option<Vec<u64>> {
    let mut pages: Vec<u64> = Vec::new();
    for line in text.lines() {
        let field_value = |key: &'static str| {
            line.split_whitespace()
                .find_map(move |word| word.strip_prefix(key))
        };
        let size_kib: u64 = field_value("kernelpagesize_kB=")
            .and_then(|kib| kib.parse().ok())
            .unwrap_or(PAGE_KIB);
        let parse_node_pages = |word: &str| {
            let (node, count) = word.strip_prefix('N')?.split_once('=')?;
            Some((node.parse::<usize>().ok()?, count.parse::<u64>().ok()?))
        };
        for (node, count) in line.split_whitespace().filter_map(parse_node_pages) {
            if node >= MAX_NODES as usize {
                return None;
            }
            pages.resize(pages.len().max(node + 1), 0);
            pages[node] = pages[node].saturating_add(count.saturating_mul(size_kib / PAGE_KIB));
        }
    }
    pages.iter().any(|&pages| pages > 0).then_some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::LinuxHost;

    const TEXT: &str = "\
55d0c0000000 default file=/usr/bin/program mapped=3 N1=3 kernelpagesize_kB=4
7f0000000000 bind:0-1 anon=2 dirty=2 active=0 N0=1 N1=1 kernelpagesize_kB=2048
7ffc00000000 default stack anon=4 dirty=4 N0=4 kernelpagesize_kB=4
7ffd00000000 default
";

    /// Are pages of all sizes added up by node, and lines without pages skipped?
    #[test]
    fn pages_are_added_up_by_node() {
        assert_eq!(parse_pages_per_node(TEXT), Some(vec![516, 515]));
        assert_eq!(parse_pages_per_node("7ffd00000000 default\n"), None);
        assert_eq!(
            parse_pages_per_node("7ffd00000000 default N4096=1 kernelpagesize_kB=4"),
            None
        );
    }

    /// Are processes read in turn, no more often than the time limit allows, and never on hosts with one node?
    #[test]
    fn processes_are_read_in_turn() {
        let root = tempfile::tempdir().unwrap();
        for (pid, pages) in [(10, 1), (11, 2)] {
            let dir = root.path().join(format!("proc/{pid}"));
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(
                dir.join("numa_maps"),
                format!("7f00 default N0={pages} kernelpagesize_kB=4\n"),
            )
            .unwrap();
        }
        let kernel = LinuxHost::new(root.path());
        let processes: BTreeMap<ProcessId, i32> =
            [(ProcessId(0), 10), (ProcessId(1), 11), (ProcessId(2), 12)].into();
        let (one, two) = (
            Topology::default(),
            Topology {
                memory_latency: vec![vec![1.0, 2.0]; 2],
                ..Topology::default()
            },
        );
        let mut nodes = MemoryNodes::default();
        nodes.refresh(&kernel, &one, || processes.clone());
        assert_eq!(
            (nodes.read_count, nodes.node_pages(ProcessId(0))),
            (0, None)
        );
        nodes.refresh(&kernel, &two, || processes.clone());
        nodes.refresh(&kernel, &two, || processes.clone());
        assert_eq!(nodes.read_count, 1, "at once is too soon");
        for _ in 0..3 {
            nodes.next_read_time = None;
            nodes.refresh(&kernel, &two, || processes.clone());
        }
        assert_eq!(
            [0, 1, 2].map(|id| nodes.node_pages(ProcessId(id))),
            [Some(vec![1]), Some(vec![2]), None]
        );
        nodes.refresh(&kernel, &two, || [(ProcessId(1), 11)].into());
        assert_eq!(nodes.pages_by_process.len(), 1, "who is gone is forgotten");
    }
}
