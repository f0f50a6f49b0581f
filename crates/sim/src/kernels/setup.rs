//! Builds a program: its address space, and the wrapper that turns a kernel into an endless source.

use cachemate_core::{Access, AccessSource, BatchEnd};
use serde::{Deserialize, Serialize};

use super::emitter::{AccessEmitter, STACK_BYTES};
use super::random::{Rng, hash_value};
use super::{AccessPace, CodeLayout};

/// Parameters of a program that a scenario may change; the table's value applies to a parameter that is omitted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Number of bytes of data that the whole program touches, including its stacks.
    pub footprint_bytes: Option<u64>,
    /// Number of threads of each group (warehouse, scoreboard, database), or of clients of each room.
    pub threads: Option<u32>,
    /// Number of groups of threads that share data: warehouses, scoreboards, rooms, databases.
    pub groups: Option<u32>,
    /// Number of threads of each group if the groups differ; replaces `threads` and `groups`.
    pub group_sizes: Vec<u32>,
    /// Number of collector-like threads that occasionally walk through all data.
    pub background_threads: Option<u32>,
    /// Number of its own operations after which every other thread of a group moves to the data of the next group. This
    /// is a change of phase, after which the groups are different.
    pub regroup_after: Option<u64>,
}

/// One row of the table of programs, `programs.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelSpec {
    /// Name of the program in scenarios.
    pub name: String,
    /// Licensed program that it models.
    pub stands_for: String,
    /// Algorithm that the kernel runs.
    pub algorithm: String,
    /// Number of bytes of data that the program touches, including stacks.
    pub footprint_bytes: u64,
    /// Publication that states the footprint, or `estimate`.
    pub footprint_source: String,
    /// Instructions and stack accesses in addition to the algorithm's own.
    pub pace: AccessPace,
    /// Publication that states the pace, or `estimate`.
    pub pace_source: String,
    /// Size of the code and of its loops.
    pub code: CodeLayout,
    /// Publication that states the size of the code, or `estimate`.
    pub code_source: String,
    /// Description of the behaviors between which the program alternates, if any.
    pub phases: String,
    /// Unit of `progress()`.
    pub unit: String,
    /// Number of threads in each group, and number of groups; (1, 1) if single-threaded.
    pub threads: (u32, u32),
}

/// A program's name, and the function that sets up its kernels.
pub(super) type KernelMaker = (&'static str, fn(&mut KernelSetup));

/// A program that is ready to run.
pub struct KernelProgram {
    /// Threads of the program, in one address space, in the order of their groups.
    pub threads: Vec<Box<dyn AccessSource>>,
    /// Group of each thread; `None` for background threads.
    pub groups: Vec<Option<u32>>,
    /// Groups after `regroup_after`; unchanged if that is not set.
    pub later_groups: Vec<Option<u32>>,
    /// All memory that the threads may touch besides code.
    pub regions: Vec<Region>,
}

pub(super) fn group_sizes(spec: &KernelSpec, options: &Options) -> Vec<u32> {
    if !options.group_sizes.is_empty() {
        return options.group_sizes.clone();
    }
    let groups = options.groups.unwrap_or(spec.threads.1).min(4097);
    vec![options.threads.unwrap_or(spec.threads.0); groups as usize]
}

/// Every other member moves on at a change of phase, so that the groups differ; if all moved, the
/// groups would only change their data.
pub(super) fn later_group(group: u32, member_index: u32, groups: u32) -> u32 {
    (group + member_index % 2) % groups
}

/// The threads that may touch a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionUsers {
    /// Every thread of the program.
    All,
    /// The threads of one group, and background threads.
    Group(u32),
    /// One thread, by its index in the program's list.
    Thread(u32),
}

/// A range of the address space that a program declares to touch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Description of the content.
    pub name: &'static str,
    /// Address of the first byte, a multiple of 4096.
    pub base: u64,
    /// Size in bytes, a multiple of 64-byte lines.
    pub bytes: u64,
    /// Threads that may touch the region.
    pub users: RegionUsers,
}

impl Region {
    /// The end of the region lies outside of it.
    pub fn contains(&self, address: u64) -> bool {
        address >= self.base && address - self.base < self.bytes
    }

    /// Elements have `size` bytes each; one outside of the region is an error of the kernel.
    #[inline]
    pub(crate) fn element_address(&self, index: u64, size: u64) -> u64 {
        debug_assert!(
            (index + 1) * size <= self.bytes,
            "{self:?}: element {index} of {size} bytes lies outside"
        );
        self.base + index * size
    }
}

/// The algorithm of a program, as a sequence of operations.
pub(crate) trait WorkloadKernel: Send {
    /// Emits the accesses of the next operation, up to about a thousand.
    fn step(&mut self, out: &mut AccessEmitter);

    /// [`AccessEmitter::work_done`] in the unit of the program's table row.
    fn progress(&self, work_done: u64) -> f64 {
        work_done as f64
    }
}

/// A kernel as an access source, which runs operations until a batch is full or the kernel leaves the processor.
struct EndlessSource<K> {
    kernel: K,
    out: AccessEmitter,
}

const BATCH_ACCESSES: usize = 1024;

impl<K: WorkloadKernel> AccessSource for EndlessSource<K> {
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd {
        std::mem::swap(batch, &mut self.out.batch);
        let full_length = self.out.len() + BATCH_ACCESSES;
        self.out.batch.reserve(2 * BATCH_ACCESSES);
        self.out.batch_end = BatchEnd::More;
        while self.out.batch_end == BatchEnd::More && self.out.len() < full_length {
            self.kernel.step(&mut self.out);
        }
        std::mem::swap(batch, &mut self.out.batch);
        self.out.batch_end
    }

    fn progress(&self) -> Option<f64> {
        Some(self.kernel.progress(self.out.work_done))
    }
}

/// The inputs from which a family of programs builds its threads.
pub(crate) struct KernelSetup<'a> {
    pub spec: &'static KernelSpec,
    pub options: &'a Options,
    pub rng: Rng,
    /// Number of threads of each group.
    pub sizes: Vec<u32>,
    footprint_bytes: u64,
    next_region_base: u64,
    program: KernelProgram,
}

/// Address within 64 GiB above which data starts; regions follow upward.
const DATA_BASE: u64 = 0x10_0000_0000;
const PAGE_BYTES: u64 = 4096;

impl<'a> KernelSetup<'a> {
    pub(super) fn new(spec: &'static KernelSpec, seed: u64, options: &'a Options) -> Self {
        let salt = spec
            .name
            .bytes()
            .fold(0, |hash, byte| hash_value(hash ^ u64::from(byte)));
        let mut rng = Rng::new(seed ^ salt);
        let next_region_base = DATA_BASE + rng.draw_below(1 << 24) * PAGE_BYTES;
        let footprint_bytes = options.footprint_bytes.unwrap_or(spec.footprint_bytes);
        let sizes = group_sizes(spec, options);
        let program = KernelProgram {
            threads: Vec::new(),
            groups: Vec::new(),
            later_groups: Vec::new(),
            regions: Vec::new(),
        };

        KernelSetup {
            spec,
            options,
            rng,
            sizes,
            footprint_bytes,
            next_region_base,
            program,
        }
    }

    pub(super) fn finish(self) -> KernelProgram {
        self.program
    }

    /// Background threads count, and so do threads that were not added yet.
    pub fn total_threads(&self) -> u64 {
        let grouped_threads: u64 = self.sizes.iter().map(|&n| u64::from(n)).sum();
        grouped_threads + u64::from(self.options.background_threads.unwrap_or(0))
    }

    /// What is left for the program's data after every thread has its stack window.
    pub fn data_bytes(&self) -> u64 {
        self.footprint_bytes - self.total_threads() * STACK_BYTES
    }

    /// Declares a region of whole lines on its own pages, several unused pages after the preceding region.
    pub fn add_region(&mut self, name: &'static str, bytes: u64, users: RegionUsers) -> Region {
        let bytes = bytes.max(64).next_multiple_of(64);
        let base = self.next_region_base;
        let gap_pages = 1 + self.rng.draw_below(61);
        self.next_region_base =
            (base + bytes).next_multiple_of(PAGE_BYTES) + gap_pages * PAGE_BYTES;
        let region = Region {
            name,
            base,
            bytes,
            users,
        };
        self.program.regions.push(region);
        region
    }

    /// Declares a region that every thread may touch.
    pub fn add_shared_region(&mut self, name: &'static str, bytes: u64) -> Region {
        self.add_region(name, bytes, RegionUsers::All)
    }

    /// Threads added so far, which is the index of the next one.
    pub fn thread_count(&self) -> u32 {
        self.program.threads.len() as u32
    }

    /// Adds a program of one thread.
    pub fn add_single_kernel<K: WorkloadKernel + 'static>(
        &mut self,
        build_kernel: fn(&mut Self) -> K,
    ) {
        let kernel = build_kernel(self);
        self.add_member(0, 0, kernel);
    }

    /// With `regroup_after`, group and index also say which group the thread works for later.
    pub fn add_member(
        &mut self,
        group: u32,
        member_index: u32,
        kernel: impl WorkloadKernel + 'static,
    ) {
        let later_group = match self.options.regroup_after {
            Some(_) => later_group(group, member_index, self.sizes.len() as u32),
            None => group,
        };
        self.add_thread((Some(group), Some(later_group)), kernel);
    }

    /// Adds a thread that belongs to no group.
    pub fn add_background(&mut self, kernel: impl WorkloadKernel + 'static) {
        self.add_thread((None, None), kernel);
    }

    fn add_thread(
        &mut self,
        (group, later): (Option<u32>, Option<u32>),
        kernel: impl WorkloadKernel + 'static,
    ) {
        let index = self.program.threads.len() as u32;
        let stack = self.add_region("stack", STACK_BYTES, RegionUsers::Thread(index));
        let out = AccessEmitter::new(self.spec.pace, self.spec.code, stack.base);
        self.program
            .threads
            .push(Box::new(EndlessSource { kernel, out }));
        self.program.groups.push(group);
        self.program.later_groups.push(later);
    }
}
