//! The scoreboard microbenchmark of the thread-clustering chapter, and the two controls without clusters.
//!
//! Method (papers TC, section 3.5.2): each thread reads and modifies the scoreboard of its group, and works on a
//! private region that is large enough to miss often. With one thread per board, no data are shared; with a single
//! board, all threads share it.

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::servers::{Membership, add_collectors, group_members, group_users};
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("scoreboards", |setup| {
        set_up_boards(setup, SharingMode::Groups)
    }),
    ("share-nothing", |setup| {
        set_up_boards(setup, SharingMode::Nothing)
    }),
    ("share-everything", |setup| {
        set_up_boards(setup, SharingMode::Everything)
    }),
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
    private_region: Region,
    rng: Rng,
}

fn set_up_boards(setup: &mut KernelSetup, sharing: SharingMode) {
    let members = group_members(setup);
    let count = if sharing == SharingMode::Groups {
        setup.sizes.len()
    } else {
        1
    };
    let users_of_board = |setup: &KernelSetup, group| {
        if sharing == SharingMode::Everything {
            RegionUsers::All
        } else {
            group_users(setup, group)
        }
    };

    let mut shared_boards = Vec::new();
    if sharing != SharingMode::Nothing {
        for group in 0..count as u32 {
            let users = users_of_board(setup, group);
            shared_boards.push(setup.add_region("scoreboard", BOARD_BYTES, users));
        }
    }

    let private_bytes_per_thread = |setup: &KernelSetup| {
        let boards = if sharing == SharingMode::Nothing {
            members.len()
        } else {
            count
        } as u64;
        let mark_bytes = if setup.options.background_threads.unwrap_or(0) > 0 {
            4096
        } else {
            0
        };
        (setup.data_bytes() - boards * BOARD_BYTES - mark_bytes) / members.len() as u64
    };
    let bytes = private_bytes_per_thread(setup);
    let mut heap = shared_boards.clone();

    for (thread, &(group, member_index)) in members.iter().enumerate() {
        let private_region =
            setup.add_region("private data", bytes, RegionUsers::Thread(thread as u32));
        let mut boards = shared_boards.clone();
        if sharing == SharingMode::Nothing {
            boards.push(setup.add_region(
                "scoreboard",
                BOARD_BYTES,
                RegionUsers::Thread(thread as u32),
            ));
        }
        let mut membership = Membership::new(group, member_index, setup);
        if boards.len() == 1 {
            membership = Membership::fixed_member();
        }
        let rng = Rng::new(setup.rng.next_bits());
        setup.add_member(
            group,
            member_index,
            Worker {
                boards,
                membership,
                private_region,
                rng,
            },
        );
    }
    if setup.options.background_threads.unwrap_or(0) > 0 {
        let mark_region = setup.add_shared_region("marks", 4096);
        heap.truncate(shared_boards.len());
        if heap.is_empty() {
            heap.push(mark_region);
        }
        add_collectors(setup, &heap, mark_region);
    }
}

impl WorkloadKernel for Worker {
    fn step(&mut self, out: &mut AccessEmitter) {
        let board = self.boards[self.membership.current_group(out.work_done)];
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
            let word = self
                .private_region
                .element_address(self.rng.draw_below(self.private_region.bytes / 8), 8);
            out.load(word);
            if touch.is_multiple_of(4) {
                out.store(word);
            }
        }
        out.work_done += 1;
    }
}
