//! BerkeleyDB, an embedded database, and the B-tree that the server programs share with it.
//!
//! Method: the pages of a tree are cached. A descent goes from the root over one internal page per level to a leaf. In
//! each page, it searches the slot array by bisection and reads the key behind each probed slot. The papers' database
//! has 100 MB and directs 80 % of the accesses to 30 % of it (papers CASC, section 5.2).

use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value};
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] =
    &[("berkeleydb", |setup| setup.add_single_kernel(Database::new))];

pub(super) const PAGE_BYTES: u64 = 8192;
const RECORD_BYTES: u64 = 128;
const RECORDS: u64 = PAGE_BYTES / RECORD_BYTES - 1;
/// Number of children of an internal page.
const FANOUT: u64 = 256;

/// A tree of pages in one region: the root first, then each level in turn, leaves last.
#[derive(Clone, Copy)]
pub(super) struct BTree {
    pages: Region,
    leaf_count: u64,
}

impl BTree {
    pub fn new(pages: Region) -> Self {
        let page_count = pages.bytes / PAGE_BYTES;
        // Internal pages number leaves / FANOUT, and so on up to one root.
        let mut leaf_count = (page_count * FANOUT).div_ceil(FANOUT + 1).max(1);
        while Self::count_internal_pages(leaf_count) + leaf_count > page_count && leaf_count > 1 {
            leaf_count -= 1;
        }
        BTree { pages, leaf_count }
    }

    fn count_internal_pages(leaves: u64) -> u64 {
        let (mut level_pages, mut sum) = (leaves, 0);
        while level_pages > 1 {
            level_pages = level_pages.div_ceil(FANOUT);
            sum += level_pages;
        }
        sum
    }

    pub fn leaf_count(&self) -> u64 {
        self.leaf_count
    }

    /// Leaves follow the internal pages.
    pub fn leaf_address(&self, index: u64) -> u64 {
        self.pages.element_address(
            Self::count_internal_pages(self.leaf_count) + index,
            PAGE_BYTES,
        )
    }

    /// Emits a binary search among a page's slots. The slot array follows the header, and each key is stored at the
    /// place of its insertion.
    fn emit_page_search(page: u64, slot_count: u64, key: u64, out: &mut AccessEmitter) {
        out.load(page);
        out.load(page + 16);
        let (mut low_slot, mut high_slot) = (0, slot_count);
        while high_slot - low_slot > 1 {
            let middle = (low_slot + high_slot) / 2;
            out.load(page + 32 + middle * 2);
            out.load_dependent(
                page + PAGE_BYTES
                    - (1 + hash_value(middle ^ page) % slot_count) * (PAGE_BYTES - 1024)
                        / slot_count
                        / 8
                        * 8
                    - 8,
            );
            if middle <= key {
                low_slot = middle
            } else {
                high_slot = middle
            }
        }
    }

    /// Descends from the root to the leaf that contains record `slot` of leaf `index`, and returns the record's
    /// address.
    pub fn descend(&self, index: u64, slot: u64, out: &mut AccessEmitter) -> u64 {
        let mut pages_by_level = [0; 8];
        let (mut level_pages, mut depth) = (self.leaf_count, 0);
        while level_pages > 1 {
            level_pages = level_pages.div_ceil(FANOUT);
            pages_by_level[depth] = level_pages;
            depth += 1;
        }
        let (mut first_page, mut leaves_per_page) = (0, FANOUT.pow(depth as u32));
        for level in (0..depth).rev() {
            let page = self
                .pages
                .element_address(first_page + index / leaves_per_page, PAGE_BYTES);
            Self::emit_page_search(
                page,
                FANOUT,
                index % leaves_per_page * FANOUT / leaves_per_page,
                out,
            );
            first_page += pages_by_level[level];
            leaves_per_page /= FANOUT;
        }
        let leaf = self.leaf_address(index);
        Self::emit_page_search(leaf, RECORDS, slot % RECORDS, out);
        leaf + 192 + slot % (RECORDS - 1) * RECORD_BYTES
    }
}

/// Emits the accesses that read a whole record, or write it.
pub(super) fn emit_record_access(record: u64, is_write: bool, out: &mut AccessEmitter) {
    for word in 0..RECORD_BYTES / 8 {
        if is_write {
            out.store(record + word * 8)
        } else {
            out.load(record + word * 8)
        }
    }
}

/// Draws from `0..limit` such that 80 % of the draws fall on the lowest 30 % of the values.
pub(super) fn draw_hot_set(rng: &mut Rng, limit: u64) -> u64 {
    let hot_count = (limit * 3 / 10).max(1);
    if rng.draw_below(10) < 8 || hot_count == limit {
        rng.draw_below(hot_count)
    } else {
        hot_count + rng.draw_below(limit - hot_count)
    }
}

struct Database {
    tree: BTree,
    /// Lock table, buffer headers and cursors, which every operation touches.
    environment: Region,
    log: Region,
    log_offset: u64,
    rng: Rng,
}

impl Database {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let environment = setup.add_shared_region("environment", (256 << 10).min(bytes / 16));
        let log = setup.add_shared_region("log buffer", (128 << 10).min(bytes / 16));
        let pages = (bytes - environment.bytes - log.bytes) / PAGE_BYTES;
        let tree = BTree::new(setup.add_shared_region("database", pages.max(1) * PAGE_BYTES));
        let rng = setup.rng.clone();
        Database {
            tree,
            environment,
            log,
            log_offset: 0,
            rng,
        }
    }

    /// Emits the accesses that find and pin a page: hash bucket of the buffer, header, lock.
    fn emit_pin(&mut self, page: u64, out: &mut AccessEmitter) {
        let line_count = self.environment.bytes / 64;
        let header = self
            .environment
            .element_address(hash_value(page) % line_count, 64);
        out.load(header);
        out.load(header + 16);
        out.store(header + 24);
        let lock = self
            .environment
            .element_address(self.rng.draw_skewed(line_count), 64);
        out.load(lock);
        out.store(lock + 8);
    }
}

impl WorkloadKernel for Database {
    fn step(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.function_count());
        let leaf = draw_hot_set(&mut self.rng, self.tree.leaf_count());
        let slot = self.rng.next_bits();
        for part in 0..6 {
            out.enter_function(self.rng.draw_function(functions));
            self.emit_pin(leaf * 8 + part, out);
        }

        out.enter_function(self.rng.draw_function(functions));
        let record = self.tree.descend(leaf, slot, out);
        out.enter_function(self.rng.draw_function(functions));
        let is_write = self.rng.draw_below(5) == 0;
        emit_record_access(record, is_write, out);
        if is_write {
            for _ in 0..RECORD_BYTES / 8 {
                out.store(self.log.base + self.log_offset);
                self.log_offset = (self.log_offset + 8) % self.log.bytes;
            }
        }
        out.work_done += 1;
    }
}
