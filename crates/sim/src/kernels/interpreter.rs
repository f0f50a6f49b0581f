//! perl, gap and vortex: programs whose data are objects behind handles.
//!
//! Method, perl: an op tree is followed op by op, and variables are slots of a pad. Occasionally a key is hashed, its
//! bucket's chain is followed and the value read, or a string is appended to.
//!
//! Method, gap: bags behind master pointers contain big integers. Products are allocated one after the other until the
//! workspace is full; then live bags are marked and compacted.
//!
//! Method, vortex: handles lead over chunk tables to objects of several lines, which an index tree finds.

use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value, scatter};
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("perl", |setup| setup.add_single_kernel(Interpreter::new)),
    ("gap", |setup| setup.add_single_kernel(GapWorkspace::new)),
    ("vortex", |setup| setup.add_single_kernel(ObjectStore::new)),
];

struct Interpreter {
    ops: Region,
    pads: Region,
    buckets: Region,
    entries: Region,
    strings: Region,
    op_index: u64,
    string_offset: u64,
    rng: Rng,
}

impl Interpreter {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let ops = setup.add_shared_region("op tree", (128 << 10).min(bytes / 8));
        let pads = setup.add_shared_region("pads", (16 << 10).min(bytes / 16));
        let table_bytes = bytes - ops.bytes - pads.bytes;
        let buckets = setup.add_shared_region("hash buckets", table_bytes / 16);
        let entries = setup.add_shared_region("hash entries and values", table_bytes / 2);
        let strings =
            setup.add_shared_region("strings", table_bytes - buckets.bytes - entries.bytes);
        let rng = setup.rng.clone();

        Interpreter {
            ops,
            pads,
            buckets,
            entries,
            strings,
            op_index: 0,
            string_offset: 0,
            rng,
        }
    }

    /// Emits the fetch of a value by its key: bucket, chain, key comparison, value.
    fn emit_hash_lookup(&mut self, out: &mut AccessEmitter) {
        let records = self.entries.bytes / 128;
        // Keys repeat in programs, so most are drawn from a distribution that is skewed twice, and one in eight from
        // all keys.
        let skew_limit = self.rng.draw_skewed(records);
        let key = if self.rng.draw_below(8) == 0 {
            self.rng.draw_below(records)
        } else {
            self.rng.draw_skewed(skew_limit + 1)
        };
        let key = scatter(key, records);
        out.load(
            self.buckets
                .element_address(key * (self.buckets.bytes / 8) / records, 8),
        );
        for link in 0..1 + self.rng.draw_below(2) {
            let entry = self.entries.element_address((key + link) % records, 128);
            out.load_dependent(entry);
            out.load(entry + 8);
            out.load(entry + 16);
        }
        out.load_dependent(self.entries.element_address(key, 128) + 64);
        if self.rng.draw_below(3) == 0 {
            out.store(self.entries.element_address(key, 128) + 72);
        }
    }

    fn emit_string_append(&mut self, out: &mut AccessEmitter) {
        for _ in 0..4 {
            out.store(self.strings.base + self.string_offset);
            self.string_offset = (self.string_offset + 8) % self.strings.bytes;
        }
    }
}

impl WorkloadKernel for Interpreter {
    fn step(&mut self, out: &mut AccessEmitter) {
        let ops = self.ops.bytes / 64;

        for _ in 0..8 {
            // Straight runs of ops alternate with loops back to hot ones.
            self.op_index = if self.rng.draw_below(12) == 0 {
                self.rng.draw_skewed(ops)
            } else {
                (self.op_index + 1) % ops
            };
            let op = self.ops.element_address(self.op_index, 64);
            out.load_dependent(op);
            out.load(op + 16);
            let functions = u64::from(out.function_count());

            // A few op bodies serve most ops; the others call string, hash and matching routines.
            let is_call = hash_value(self.op_index ^ 7).is_multiple_of(8);
            out.enter_function(if is_call {
                self.rng.draw_function(functions)
            } else {
                (hash_value(self.op_index) % (functions / 8)) as u32
            });
            for _ in 0..4 {
                let slot = self.rng.draw_skewed(self.pads.bytes / 8);
                out.load(self.pads.element_address(slot, 8));
            }

            let slot = self.rng.draw_skewed(self.pads.bytes / 8);
            out.store(self.pads.element_address(slot, 8));
            match self.rng.draw_below(64) {
                0 => self.emit_hash_lookup(out),
                1 => self.emit_string_append(out),
                _ => {}
            }
        }

        out.work_done += 8;
    }
}

/// Number of operations of which one works on bags. The others have small integers, which are immediate: their value is
/// in the handle ("about 99 % of all integers that usually occur in GAP", GAP 3, `integer.c`).
const OPERATIONS_PER_BAG_OPERATION: u64 = 100;
/// Number of expressions in the body of the loop that is evaluated.
const LOOP_EXPRESSIONS: u64 = 16;

struct GapWorkspace {
    masters: Region,
    workspace: Region,
    /// Address offset of each live bag, and its length in words.
    live_bags: Vec<(u64, u32)>,
    used_bytes: u64,
    next_bag_to_move: Option<usize>,
    rng: Rng,
}

impl GapWorkspace {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let count = (bytes / 2048).clamp(16, 16_384);
        let masters = setup.add_shared_region("master pointers", count * 8);
        let workspace = setup.add_shared_region("workspace", bytes - masters.bytes);
        let mut rng = setup.rng.clone();
        let mut used_bytes = 0;
        let live_bags = (0..count)
            .map(|_| {
                let words = 2 + rng.draw_skewed(24) as u32;
                let bag = (used_bytes, words);
                used_bytes += u64::from(words) * 8 + 8;
                bag
            })
            .collect();

        GapWorkspace {
            masters,
            workspace,
            live_bags,
            used_bytes,
            next_bag_to_move: None,
            rng,
        }
    }

    /// Emits reads of the words of a live bag, and returns their number; usage of bags is skewed.
    fn emit_operand_read(&mut self, out: &mut AccessEmitter) -> u32 {
        let skew_limit = self.rng.draw_skewed(self.live_bags.len() as u64);
        let bag = self.rng.draw_skewed(skew_limit + 1);
        let (offset, words) = self.live_bags[bag as usize];
        out.load(self.masters.element_address(bag, 8));
        out.load_dependent(self.workspace.base + offset);
        for word in 1..u64::from(words) {
            out.load(self.workspace.base + offset + word * 8);
        }
        words
    }

    fn emit_operation(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.function_count());
        out.enter_function(self.rng.draw_function(functions));
        if self.rng.draw_below(OPERATIONS_PER_BAG_OPERATION) != 0 {
            return self.emit_small_integer_operation(out);
        }

        let words = self.emit_operand_read(out)
            + if self.rng.draw_below(2) == 0 {
                self.emit_operand_read(out)
            } else {
                1
            };
        let words = words.min(96);
        let bytes = u64::from(words) * 8 + 8;
        if self.used_bytes + bytes > self.workspace.bytes {
            self.next_bag_to_move = Some(0);
            self.used_bytes = 0;
            return;
        }

        out.enter_function(self.rng.draw_function(functions));
        for word in 0..u64::from(words) {
            out.store(self.workspace.base + self.used_bytes + word * 8);
        }

        // One result in eight outlives its statement: it replaces an older value.
        if self.rng.draw_below(8) == 0 {
            let bag = self.rng.draw_below(self.live_bags.len() as u64);
            self.live_bags[bag as usize] = (self.used_bytes, words);
            out.store(self.masters.element_address(bag, 8));
        }
        self.used_bytes += bytes;
        out.work_done += 1;
    }

    /// Emits the evaluation of an expression of the loop: its bag holds the handles of both operands.
    fn emit_small_integer_operation(&mut self, out: &mut AccessEmitter) {
        let bag = out.work_done % LOOP_EXPRESSIONS;
        let expression = self.workspace.base + self.live_bags[bag as usize].0;
        out.load(self.masters.element_address(bag, 8));
        out.load_dependent(expression);
        out.load(expression + 8);
        out.work_done += 1;
    }

    /// Emits the move of one live bag to a lower address; after the collection, bags are in the order of their masters.
    fn emit_bag_move(&mut self, bag: usize, out: &mut AccessEmitter) {
        let (offset, words) = self.live_bags[bag];
        out.load(self.masters.element_address(bag as u64, 8));
        for word in 0..u64::from(words) {
            out.load(self.workspace.base + offset + word * 8);
            out.store(self.workspace.base + self.used_bytes + word * 8);
        }
        self.live_bags[bag].0 = self.used_bytes;
        self.used_bytes += u64::from(words) * 8 + 8;
        out.store(self.masters.element_address(bag as u64, 8));
        self.next_bag_to_move = (bag + 1 < self.live_bags.len()).then_some(bag + 1);
    }
}

impl WorkloadKernel for GapWorkspace {
    fn step(&mut self, out: &mut AccessEmitter) {
        match self.next_bag_to_move {
            Some(bag) => self.emit_bag_move(bag, out),
            None => self.emit_operation(out),
        }
    }
}

const OBJECT_BYTES: u64 = 256;
const INDEX_FANOUT: u64 = 16;

struct ObjectStore {
    objects: Region,
    chunks: Region,
    index: Region,
    object_count: u64,
    transaction_kind: u64,
    rng: Rng,
}

impl ObjectStore {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let index = setup.add_shared_region("index", bytes / 8);
        let chunks = setup.add_shared_region("chunk tables", bytes / 32);
        let objects = setup.add_shared_region("objects", bytes - index.bytes - chunks.bytes);
        let object_count = objects.bytes / OBJECT_BYTES;
        let rng = setup.rng.clone();
        ObjectStore {
            objects,
            chunks,
            index,
            object_count,
            transaction_kind: 0,
            rng,
        }
    }

    /// Emits a search in the index, whose first levels are small and stay cached.
    fn emit_index_search(&mut self, object: u64, out: &mut AccessEmitter) {
        let nodes = self.index.bytes / 128;
        let mut level = 1;
        while level < nodes {
            let node = (level + object * level / self.object_count).min(nodes - 1);
            let record = self.index.element_address(node, 128);
            out.load_dependent(record);
            out.load(record + 32);
            out.load(record + 8 * (object % INDEX_FANOUT));
            level *= INDEX_FANOUT;
        }
        let leaf = self
            .index
            .element_address(object * nodes / self.object_count, 128);
        out.load_dependent(leaf);
        out.load(leaf + 8 * (object % INDEX_FANOUT));
    }

    fn emit_object_fetch(&mut self, object: u64, out: &mut AccessEmitter) -> u64 {
        let entry_count = self.chunks.bytes / 8;
        out.load_dependent(
            self.chunks
                .element_address(object * entry_count / self.object_count, 8),
        );
        let record = self.objects.element_address(object, OBJECT_BYTES);
        out.load_dependent(record);
        record
    }

    fn emit_transaction(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.function_count());
        // Most transactions use recently created and often used objects.
        let newest_object = out.work_done / 4 % self.object_count;
        let object = match self.rng.draw_below(64) {
            0 => self.rng.draw_below(self.object_count),
            1..4 => self.rng.draw_skewed(self.object_count),
            _ => {
                (newest_object + self.object_count
                    - 1
                    - self.rng.draw_skewed((self.object_count / 256).max(2)) % self.object_count)
                    % self.object_count
            }
        };

        for part in 0..6 {
            out.enter_function(self.rng.draw_function(functions));
            match part {
                0 => self.emit_index_search(object, out),
                1 | 3 => {
                    self.emit_object_fetch(object, out);
                }
                _ => {
                    let record = self.emit_object_fetch(object, out);
                    for word in 0..8 {
                        out.load(record + (part * 4 + word * 24) % OBJECT_BYTES / 8 * 8);
                    }
                    if self.transaction_kind != 0 {
                        out.store(record + 8 * (object % 32));
                        out.store(record + 64);
                    }
                }
            }
        }

        if self.transaction_kind == 2 {
            // An insert fills a new object and its index entry.
            let record = self.objects.element_address(newest_object, OBJECT_BYTES);
            for word in 0..OBJECT_BYTES / 8 {
                out.store(record + word * 8);
            }
            out.store(self.index.element_address(
                newest_object * (self.index.bytes / 8) / self.object_count,
                8,
            ));
        }
    }
}

impl WorkloadKernel for ObjectStore {
    fn step(&mut self, out: &mut AccessEmitter) {
        self.emit_transaction(out);
        out.work_done += 1;
        if out.work_done.is_multiple_of(4096) {
            self.transaction_kind = (self.transaction_kind + 1) % 3;
        }
    }
}
