//! The scoreboard microbenchmark of the thread-clustering chapter, and the two controls without clusters.
//!
//! Method (papers TC, section 3.5.2): each thread reads and modifies the scoreboard of its group, and works on a
//! private region that is large enough to miss often. With one thread per board, no data are shared; with a single
//! board, all threads share it.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::servers::{Membership, add_collectors, group_members, group_users};
use super::setup::KernelSpec;
use super::setup::{KernelSetup, Region, RegionUsers, WorkloadKernel};
use super::{AccessPace, CodeLayout};

const PACE: AccessPace = AccessPace { instructions_per_access: 2.8, stack_per_access: 0.5 };
const PACE_SOURCE: &str = "estimate: integer mix";
const CODE: CodeLayout = CodeLayout { functions: 2, function_instr: 96 };
const CODE_SOURCE: &str = "estimate: a loop and its helpers";
const FOOTPRINT: u64 = 16 << 20;
const FOOTPRINT_SOURCE: &str = "papers TC, section 3.5.2: private regions \"fairly large\"; chosen: 1 MB per thread";

pub(super) const PROGRAMS: &[KernelSpec] = &[
    KernelSpec {
        name: "scoreboards",
        stands_for: "the synthetic microbenchmark of papers TC",
        algorithm: "threads of a group read and modify one scoreboard beside private data",
        footprint_bytes: FOOTPRINT,
        footprint_source: FOOTPRINT_SOURCE,
        pace: PACE,
        pace_source: PACE_SOURCE,
        code: CODE,
        code_source: CODE_SOURCE,
        phases: "optional change of boards midway",
        unit: "rounds",
        threads: (4, 4),
        make: |setup| set_up_boards(setup, SharingMode::Groups),
    },
    KernelSpec {
        name: "share-nothing",
        stands_for: "negative control: no clusters to find",
        algorithm: "as scoreboards, with one board per thread",
        footprint_bytes: FOOTPRINT,
        footprint_source: FOOTPRINT_SOURCE,
        pace: PACE,
        pace_source: PACE_SOURCE,
        code: CODE,
        code_source: CODE_SOURCE,
        phases: "none",
        unit: "rounds",
        threads: (16, 1),
        make: |setup| set_up_boards(setup, SharingMode::Nothing),
    },
    KernelSpec {
        name: "share-everything",
        stands_for: "negative control: one cluster of all",
        algorithm: "as scoreboards, with one board for all threads",
        footprint_bytes: FOOTPRINT,
        footprint_source: FOOTPRINT_SOURCE,
        pace: PACE,
        pace_source: PACE_SOURCE,
        code: CODE,
        code_source: CODE_SOURCE,
        phases: "none",
        unit: "rounds",
        threads: (16, 1),
        make: |setup| set_up_boards(setup, SharingMode::Everything),
    },
];

#[derive(Clone, Copy, PartialEq)]
enum SharingMode {
    Groups,
    Nothing,
    Everything,
}

const BOARD_BYTES: u64 = 4096;
/// Number of reads and updates of the board, and of reads of private data, in one round.
const BOARD_TOUCHES: u64 = 16;
const PRIVATE_TOUCHES: u64 = 48;

struct Worker {
    boards: Vec<Region>,
    membership: Membership,
    private: Region,
    rounds: u64,
    rng: Rng,
}

fn set_up_boards(setup: &mut KernelSetup, sharing: SharingMode) {
    let members = group_members(setup);
    let count = if sharing == SharingMode::Groups { setup.sizes.len() } else { 1 };
    let board_users = |setup: &KernelSetup, group| {
        if sharing == SharingMode::Everything { RegionUsers::All } else { group_users(setup, group) }
    };
    let mut shared_boards = Vec::new();
    if sharing != SharingMode::Nothing {
        for group in 0..count as u32 {
            let users = board_users(setup, group);
            shared_boards.push(setup.add_region("scoreboard", BOARD_BYTES, users));
        }
    }
    let private_bytes = |setup: &KernelSetup| {
        let boards = if sharing == SharingMode::Nothing { members.len() } else { count } as u64;
        let marks = if setup.options.background_threads.unwrap_or(0) > 0 { 4096 } else { 0 };
        (setup.data_bytes() - boards * BOARD_BYTES - marks) / members.len() as u64
    };
    let bytes = private_bytes(setup);
    let mut heap = shared_boards.clone();
    for (thread, &(group, place)) in members.iter().enumerate() {
        let private = setup.add_region("private data", bytes, RegionUsers::Thread(thread as u32));
        let mut boards = shared_boards.clone();
        if sharing == SharingMode::Nothing {
            boards.push(setup.add_region("scoreboard", BOARD_BYTES, RegionUsers::Thread(thread as u32)));
        }
        let mut membership = Membership::new(group, place, setup);
        if boards.len() == 1 {
            membership = Membership::single_member();
        }
        let rng = Rng::new(setup.rng.bits());
        setup.add_member(group, place, Worker { boards, membership, private, rounds: 0, rng });
    }
    if setup.options.background_threads.unwrap_or(0) > 0 {
        let marks = setup.add_region("marks", 4096, RegionUsers::All);
        heap.truncate(shared_boards.len());
        if heap.is_empty() {
            heap.push(marks);
        }
        add_collectors(setup, &heap, marks);
    }
}

impl WorkloadKernel for Worker {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        let board = self.boards[self.membership.phase_at(self.rounds)];
        out.enter_function(0);
        for touch in 0..BOARD_TOUCHES {
            let cell = board.element_address(self.rng.draw_below(BOARD_BYTES / 8), 8);
            out.load(cell);
            if touch.is_multiple_of(4) {
                out.store(cell);
            }
        }
        out.enter_function(1);
        for touch in 0..PRIVATE_TOUCHES {
            let word = self.private.element_address(self.rng.draw_below(self.private.bytes / 8), 8);
            out.load(word);
            if touch.is_multiple_of(4) {
                out.store(word);
            }
        }
        self.rounds += 1;
        BatchEnd::More
    }

    fn progress(&self) -> f64 {
        self.rounds as f64
    }
}
