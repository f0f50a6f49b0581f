//! The shared parts of the multithreaded programs: groups of threads, the data of each thread, and collectors.
//!
//! Problem: thread clustering must find groups that share data from remote accesses alone, so the groups must come from
//! real sharing. The programs therefore have records that several threads read and write, in addition to private data,
//! data of the whole process, and threads without a group.
//!
//! Method: every program declares its regions with their users. A thread's group determines the regions on which it
//! works, and may change midway ([`Membership`]). Background threads behave like a collector: they sleep, then walk
//! through all data.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::setup::{KernelSetup, Region, RegionUsers, WorkloadKernel, later_group};

/// The group on whose data a thread currently works.
#[derive(Clone, Copy)]
pub(super) struct Membership {
    group: u32,
    later_group: u32,
    regroup_after: Option<u64>,
}

impl Membership {
    pub fn new(group: u32, member_index: u32, setup: &KernelSetup) -> Self {
        let later_group = later_group(group, member_index, setup.sizes.len() as u32);
        Membership {
            group,
            later_group,
            regroup_after: setup.options.regroup_after,
        }
    }

    /// A thread that works on the same data throughout, whatever its group.
    pub fn fixed_member() -> Self {
        Membership {
            group: 0,
            later_group: 0,
            regroup_after: None,
        }
    }

    /// The group on whose data the thread works after this many operations of its own.
    pub fn current_group(&self, operations: u64) -> usize {
        let has_moved = self
            .regroup_after
            .is_some_and(|group_operations| operations >= group_operations);
        (if has_moved {
            self.later_group
        } else {
            self.group
        }) as usize
    }
}

/// The group, or all threads if threads change groups.
pub(super) fn group_users(setup: &KernelSetup, group: u32) -> RegionUsers {
    if setup.options.regroup_after.is_some() {
        RegionUsers::All
    } else {
        RegionUsers::Group(group)
    }
}

/// Threads to build, as pairs of group and index within the group.
pub(super) fn group_members(setup: &KernelSetup) -> Vec<(u32, u32)> {
    let sizes = setup.sizes.iter().enumerate();
    sizes
        .flat_map(|(group, &size)| (0..size).map(move |member_index| (group as u32, member_index)))
        .collect()
}

/// A collector, which alternates between sleeping and marking: it reads a stretch of every region.
struct Collector {
    heap: Vec<Region>,
    marks: Region,
    lines_left: u64,
    position: u64,
    rng: Rng,
}

/// Number of lines walked between two sleeps.
const WALK_LINES: u64 = 4096;
/// Time that a collector sleeps; the time scale of a run does not change it.
///
/// The papers found that collectors run too rarely to show sharing (TC, section 3.6.1). The time is long relative to a
/// thread's turn, and short enough that runs of several milliseconds contain collections.
const SLEEP_NS: u64 = 1_500_000;

/// Adds the background threads that the options request, which walk through `heap`.
pub(super) fn add_collectors(setup: &mut KernelSetup, heap: &[Region], marks: Region) {
    for _ in 0..setup.options.background_threads.unwrap_or(0) {
        let rng = Rng::new(setup.rng.next_bits());
        setup.add_background(Collector {
            heap: heap.to_vec(),
            marks,
            lines_left: 0,
            position: 0,
            rng,
        });
    }
}

impl WorkloadKernel for Collector {
    fn step(&mut self, out: &mut AccessEmitter) {
        if self.lines_left == 0 {
            self.lines_left = WALK_LINES;
            self.position = self.rng.next_bits();
            out.work_done += 1;
            return out.end_batch(BatchEnd::Sleep { ns: SLEEP_NS });
        }
        out.enter_function(out.function_count() - 1);
        for _ in 0..64 {
            let region = self.heap[(self.position % self.heap.len() as u64) as usize];
            let object = self.position / 64 % (region.bytes / 64);
            out.load_dependent(region.element_address(object, 64));
            out.load(region.element_address(object, 64) + 8);
            out.store(
                self.marks
                    .element_address(object % (self.marks.bytes / 8), 8),
            );
            self.position = self.position.wrapping_add(1);
        }
        self.lines_left -= 64;
    }
}
