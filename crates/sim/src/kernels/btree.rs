//! BerkeleyDB, an embedded database, and the B-tree that the server programs share with it.
//!
//! Method: the pages of a tree are cached. A descent goes from the root over one internal page per level to a leaf. In
//! each page, it searches the slot array by bisection and reads the key behind each probed slot. The papers' database
//! has 100 MB and directs 80 % of the accesses to 30 % of it (papers CASC, section 5.2).

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::random::{Rng, mix};
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[("berkeleydb", |setup| setup.add_single_kernel(Database::new))];

pub(super) const PAGE_BYTES: u64 = 8192;
const RECORD_BYTES: u64 = 128;
const RECORDS: u64 = PAGE_BYTES / RECORD_BYTES - 1;
/// Number of children of an internal page.
const FANOUT: u64 = 256;

/// A tree of pages in one region: the root first, then each level in turn, leaves last.
#[derive(Clone, Copy)]
pub(super) struct BTree {
    pages: Region,
    leaves: u64,
}

impl BTree {
    pub fn new(pages: Region) -> Self {
        let total = pages.bytes / PAGE_BYTES;
        // Internal pages number leaves / FANOUT, and so on up to one root.
        let mut leaves = (total * FANOUT).div_ceil(FANOUT + 1).max(1);
        while Self::internal_pages(leaves) + leaves > total && leaves > 1 {
            leaves -= 1;
        }
        BTree { pages, leaves }
    }

    fn internal_pages(leaves: u64) -> u64 {
        let (mut level, mut sum) = (leaves, 0);
        while level > 1 {
            level = level.div_ceil(FANOUT);
            sum += level;
        }
        sum
    }

    pub fn leaves(&self) -> u64 {
        self.leaves
    }

    /// Returns the address of leaf `index`.
    pub fn leaf_address(&self, index: u64) -> u64 {
        self.pages.element_address(Self::internal_pages(self.leaves) + index, PAGE_BYTES)
    }

    /// Emits a binary search among a page's slots: the slot array follows the header, and keys are where they were
    /// inserted.
    fn search_page(page: u64, slots: u64, key: u64, out: &mut AccessEmitter) {
        out.load(page);
        out.load(page + 16);
        let (mut low, mut high) = (0, slots);
        while high - low > 1 {
            let middle = (low + high) / 2;
            out.load(page + 32 + middle * 2);
            out.chase(page + PAGE_BYTES - (1 + mix(middle ^ page) % slots) * (PAGE_BYTES - 1024) / slots / 8 * 8 - 8);
            if middle <= key { low = middle } else { high = middle }
        }
    }

    /// Descends from the root to the leaf that contains record `slot` of leaf `index`, and returns the record's
    /// address.
    pub fn descend(&self, index: u64, slot: u64, out: &mut AccessEmitter) -> u64 {
        let mut levels = [0; 8];
        let (mut width, mut depth) = (self.leaves, 0);
        while width > 1 {
            width = width.div_ceil(FANOUT);
            levels[depth] = width;
            depth += 1;
        }
        let (mut first, mut span) = (0, FANOUT.pow(depth as u32));
        for level in (0..depth).rev() {
            let page = self.pages.element_address(first + index / span, PAGE_BYTES);
            Self::search_page(page, FANOUT, index % span * FANOUT / span, out);
            first += levels[level];
            span /= FANOUT;
        }
        let leaf = self.leaf_address(index);
        Self::search_page(leaf, RECORDS, slot % RECORDS, out);
        leaf + 192 + slot % (RECORDS - 1) * RECORD_BYTES
    }
}

/// Emits the accesses that read or write a whole record.
pub(super) fn copy_record(record: u64, write: bool, out: &mut AccessEmitter) {
    for word in 0..RECORD_BYTES / 8 {
        if write { out.store(record + word * 8) } else { out.load(record + word * 8) }
    }
}

/// Draws from `0..limit` such that 80 % of the draws fall on 30 % of the values, which are scattered.
pub(super) fn draw_hot(rng: &mut Rng, limit: u64) -> u64 {
    let hot = (limit * 3 / 10).max(1);
    if rng.draw_below(10) < 8 || hot == limit { rng.draw_below(hot) } else { hot + rng.draw_below(limit - hot) }
}

struct Database {
    tree: BTree,
    /// Lock table, buffer headers and cursors, which every operation touches.
    environment: Region,
    log: Region,
    logged: u64,
    operations: u64,
    rng: Rng,
}

impl Database {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let environment = setup.add_region("environment", (256 << 10).min(bytes / 16), RegionUsers::All);
        let log = setup.add_region("log buffer", (128 << 10).min(bytes / 16), RegionUsers::All);
        let pages = (bytes - environment.bytes - log.bytes) / PAGE_BYTES;
        let tree = BTree::new(setup.add_region("database", pages.max(1) * PAGE_BYTES, RegionUsers::All));
        let rng = setup.rng.clone();
        Database { tree, environment, log, logged: 0, operations: 0, rng }
    }

    /// Emits the accesses that find and pin a page: hash bucket of the buffer, header, lock.
    fn pin(&mut self, page: u64, out: &mut AccessEmitter) {
        let lines = self.environment.bytes / 64;
        let header = self.environment.element_address(mix(page) % lines, 64);
        out.load(header);
        out.load(header + 16);
        out.store(header + 24);
        let lock = self.environment.element_address(self.rng.draw_skewed(lines), 64);
        out.load(lock);
        out.store(lock + 8);
    }
}

impl WorkloadKernel for Database {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        let functions = u64::from(out.functions());
        let leaf = draw_hot(&mut self.rng, self.tree.leaves());
        let slot = self.rng.bits();
        for part in 0..6 {
            out.enter_function(self.rng.draw_function(functions));
            self.pin(leaf * 8 + part, out);
        }
        out.enter_function(self.rng.draw_function(functions));
        let record = self.tree.descend(leaf, slot, out);
        out.enter_function(self.rng.draw_function(functions));
        let write = self.rng.draw_below(5) == 0;
        copy_record(record, write, out);
        if write {
            for _ in 0..RECORD_BYTES / 8 {
                out.store(self.log.base + self.logged);
                self.logged = (self.logged + 8) % self.log.bytes;
            }
        }
        self.operations += 1;
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.operations as f64
    }
}
