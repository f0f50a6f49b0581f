//! warehouses and rubis: threads that work on B-trees of their group.
//!
//! Method, warehouses (SPECjbb2000; papers TC, section 3.5.2): each thread runs orders on its warehouse, a tree of 25
//! MB. An order consists of descents, record updates, district and stock counters that every order of the warehouse
//! changes, and new objects in a private allocation buffer.
//!
//! Method, rubis: there are one server, two databases, and a thread per connection. Transactions pin pages in a buffer
//! pool whose headers belong to the database, write its log, and update locks and statistics of the whole server.

use super::btree::{BTree, PAGE_BYTES, draw_hot_set, emit_record_access};
use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value};
use super::servers::{Membership, add_collectors, group_members, group_users};
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("warehouses", |setup| set_up_databases(setup, &WAREHOUSE)),
    ("rubis", |setup| set_up_databases(setup, &RUBIS)),
];

/// The parameters in which the two servers differ.
struct ServerShape {
    tree: &'static str,
    /// Part of the footprint that is private to threads, as a numerator and a denominator.
    private_share: fn(threads: u64, groups: u64) -> (u64, u64),
    /// Number of touches of the group's counters per operation; `process_touches` counts those of the whole process.
    group_touches: u64,
    process_touches: u64,
    /// Number of descents per operation, of which `writes_per_operation` write.
    descents_per_operation: u64,
    writes_per_operation: u64,
}

const WAREHOUSE: ServerShape = ServerShape {
    tree: "warehouse",
    private_share: |threads, groups| (threads * 300_000, threads * 300_000 + groups * 25_000_000),
    group_touches: 12,
    process_touches: 1,
    descents_per_operation: 10,
    writes_per_operation: 5,
};

const RUBIS: ServerShape = ServerShape {
    tree: "database",
    private_share: |threads, groups| (threads * 100_000, threads * 100_000 + groups * 32_000_000),
    group_touches: 24,
    process_touches: 8,
    descents_per_operation: 8,
    writes_per_operation: 2,
};

/// The data that the threads of one group share.
#[derive(Clone, Copy)]
struct ServerGroup {
    tree: BTree,
    /// Counters, page headers, latches and log tail, which every operation of the group changes.
    shared_counters: Region,
}

struct ServerConnection {
    groups: Vec<ServerGroup>,
    membership: Membership,
    process: Region,
    private_buffer: Region,
    allocation_offset: u64,
    shape: &'static ServerShape,
    rng: Rng,
}

const HOT_BYTES: u64 = 64 << 10;

fn set_up_databases(setup: &mut KernelSetup, shape: &'static ServerShape) {
    let members = group_members(setup);
    let groups = setup.sizes.len() as u64;
    let (numerator, denominator) = (shape.private_share)(members.len() as u64, groups);
    let data = setup.data_bytes();
    let process_bytes = (64 << 10).min(data / 64);
    let private_bytes = ((data as u128 * u128::from(numerator) / u128::from(denominator)) as u64
        / members.len() as u64)
        .max(4096);

    let hot_bytes = HOT_BYTES.min(data / 16 / groups);
    let tree_bytes =
        data - process_bytes - private_bytes * members.len() as u64 - hot_bytes * groups;
    let pages = (tree_bytes / groups / PAGE_BYTES).max(1);
    let mut shared_regions = Vec::new();
    let mut heap = Vec::new();
    for group in 0..groups as u32 {
        let users = group_users(setup, group);
        let tree = setup.add_region(shape.tree, pages * PAGE_BYTES, users);
        let shared_counters = setup.add_region("counters and headers", hot_bytes, users);
        heap.push(tree);
        shared_regions.push(ServerGroup {
            tree: BTree::new(tree),
            shared_counters,
        });
    }

    let process = setup.add_shared_region("process-wide", process_bytes);
    for (thread, &(group, member_index)) in members.iter().enumerate() {
        let private_buffer = setup.add_region(
            "allocation buffer",
            private_bytes,
            RegionUsers::Thread(thread as u32),
        );
        let membership = Membership::new(group, member_index, setup);
        let rng = Rng::new(setup.rng.next_bits());
        let groups = shared_regions.clone();
        let connection = ServerConnection {
            groups,
            membership,
            process,
            private_buffer,
            allocation_offset: 0,
            shape,
            rng,
        };
        setup.add_member(group, member_index, connection);
    }
    add_collectors(setup, &heap, process);
}

/// Emits a read of a word of shared bookkeeping and, two times in three, also a write.
fn emit_bookkeeping_access(region: Region, rng: &mut Rng, out: &mut AccessEmitter) {
    let word = region.element_address(rng.draw_skewed(region.bytes / 8), 8);
    out.load(word);
    if rng.draw_below(3) > 0 {
        out.store(word);
    }
}

impl WorkloadKernel for ServerConnection {
    fn step(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.function_count());
        let group = self.groups[self.membership.current_group(out.work_done)];
        for descent in 0..self.shape.descents_per_operation {
            out.enter_function(self.rng.draw_function(functions));
            let leaf = draw_hot_set(&mut self.rng, group.tree.leaf_count());
            let header = group
                .shared_counters
                .element_address(hash_value(leaf) % (group.shared_counters.bytes / 64), 64);
            out.load(header);
            out.store(header + 8);
            out.enter_function(self.rng.draw_function(functions));
            let record = group.tree.descend(leaf, self.rng.next_bits(), out);
            out.enter_function(self.rng.draw_function(functions));
            emit_record_access(record, descent < self.shape.writes_per_operation, out);

            // The data that was read is copied to an object, a row buffer or a reply.
            for _ in 0..24 {
                out.store(self.private_buffer.base + self.allocation_offset);
                self.allocation_offset = (self.allocation_offset + 8) % self.private_buffer.bytes;
            }
        }

        for _ in 0..self.shape.group_touches {
            emit_bookkeeping_access(group.shared_counters, &mut self.rng, out);
        }

        for _ in 0..self.shape.process_touches {
            emit_bookkeeping_access(self.process, &mut self.rng, out);
        }
        out.work_done += 1;
    }
}
