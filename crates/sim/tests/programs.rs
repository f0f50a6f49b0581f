//! Compares the programs with the statements of their table.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{Access, AccessKind, AccessSource, BatchEnd};
use cachemate_locality::stack::{DistanceHistogram, StackDistances};
use cachemate_sim::kernels::{
    CODE_BASE, INSTRUCTION_BYTES, KernelProgram, KernelSpec, Options, ProgramError, RegionUsers,
    build_program, build_threads, programs,
};

const LINE: u64 = 64;

/// Small enough for a test to touch all data, with room for the stacks of many threads.
fn small_options(spec: &KernelSpec) -> Options {
    let threads = u64::from(spec.threads.0) * u64::from(spec.threads.1);
    Options {
        footprint_bytes: Some((256 << 10) + threads * (68 << 10)),
        ..Options::default()
    }
}

fn known_program(name: &str, seed: u64, options: &Options) -> KernelProgram {
    build_program(name, seed, options).expect("the program is known and takes the options")
}

/// `count` accesses of one thread or a few more. Threads that wait or sleep simply continue,
/// because no stream here depends on the other threads.
fn take(source: &mut dyn AccessSource, count: usize) -> Vec<Access> {
    let (mut accesses, mut batch) = (Vec::new(), Vec::new());
    while accesses.len() < count {
        batch.clear();
        source.next_batch(&mut batch);
        accesses.extend_from_slice(&batch);
    }
    accesses
}

/// Collects some tens of thousands of accesses at a time.
fn take_batches(source: &mut dyn AccessSource, batch: &mut Vec<Access>) {
    batch.clear();
    while batch.len() < 50_000 {
        source.next_batch(batch);
    }
}

fn data_accesses(accesses: &[Access]) -> impl Iterator<Item = Access> {
    accesses
        .iter()
        .copied()
        .filter(|access| matches!(access.kind(), AccessKind::Load | AccessKind::Store))
}

/// Is the stream the same however it is cut into batches, and when it is built again?
#[test]
fn a_seed_gives_one_stream_however_it_is_batched() {
    for spec in programs() {
        let mut cleared = known_program(&spec.name, 7, &small_options(spec));
        let mut appended = known_program(&spec.name, 7, &small_options(spec));
        let last = cleared.threads.len() - 1;
        let accesses = take(&mut *cleared.threads[last], 20_000);
        let mut own_accesses = vec![Access::load(0, 0)];
        while own_accesses.len() <= accesses.len() {
            appended.threads[last].next_batch(&mut own_accesses);
        }
        assert!(
            accesses[..20_000] == own_accesses[1..=20_000],
            "{}",
            spec.name
        );
    }
}

/// Do copies with other seeds differ in their stream, but not in the data that they declare to touch?
#[test]
fn copies_differ_in_stream_but_not_in_footprint() {
    for spec in programs() {
        let [mut one, mut two] =
            [1, 2].map(|seed| known_program(&spec.name, seed, &Options::default()));
        let region_bytes = |program: &KernelProgram| {
            program
                .regions
                .iter()
                .map(|region| region.bytes)
                .sum::<u64>()
        };
        assert_eq!(region_bytes(&one), region_bytes(&two), "{}", spec.name);
        assert!(
            take(&mut *one.threads[0], 5000) != take(&mut *two.threads[0], 5000),
            "{}",
            spec.name
        );
    }
}

/// Do the regions that a program declares add up to its footprint, without overlap?
#[test]
fn regions_add_up_to_the_declared_footprint() {
    for spec in programs() {
        let program = known_program(&spec.name, 3, &Options::default());
        let bytes: u64 = program.regions.iter().map(|region| region.bytes).sum();
        let ratio = bytes as f64 / spec.footprint_bytes as f64;
        assert!(
            (0.95..=1.05).contains(&ratio),
            "{}: {bytes} of {} bytes declared",
            spec.name,
            spec.footprint_bytes
        );
        let mut sorted = program.regions.clone();
        sorted.sort_by_key(|region| region.base);
        assert!(
            sorted
                .windows(2)
                .all(|pair| pair[0].base + pair[0].bytes <= pair[1].base),
            "{}",
            spec.name
        );
        assert!(
            sorted
                .iter()
                .all(|region| region.base + region.bytes <= Access::ADDRESS_LIMIT)
        );
        assert!(
            CODE_BASE + spec.code.bytes() < sorted[0].base,
            "{}: code under the data",
            spec.name
        );
    }
}

/// The lines of the declared regions that have been touched, with the threads that touched them.
struct TouchedLines {
    program: KernelProgram,
    /// By base address, the index of the region and a mark per line.
    marks: BTreeMap<u64, (usize, Vec<bool>)>,
    lines: u64,
    touched: u64,
}

impl TouchedLines {
    fn new(program: KernelProgram) -> Self {
        let mut marks = BTreeMap::new();
        for (index, region) in program.regions.iter().enumerate() {
            marks.insert(
                region.base,
                (index, vec![false; region.bytes.div_ceil(LINE) as usize]),
            );
        }
        let lines = program
            .regions
            .iter()
            .map(|region| region.bytes.div_ceil(LINE))
            .sum();
        TouchedLines {
            program,
            marks,
            lines,
            touched: 0,
        }
    }

    fn touch(&mut self, name: &str, thread: usize, address: u64) {
        let nearest = self.marks.range_mut(..=address).next_back();
        let (base, (at, marks)) =
            nearest.unwrap_or_else(|| panic!("{name}: {address:#x} is in no region"));
        let region = self.program.regions[*at];
        assert!(
            region.contains(address),
            "{name}: {address:#x} is past {region:?}"
        );
        let group = self.program.groups[thread];
        let allowed = match region.users {
            RegionUsers::All => true,
            RegionUsers::Group(users) => group.is_none_or(|group| group == users),
            RegionUsers::Thread(user) => user as usize == thread,
        };
        assert!(
            allowed,
            "{name}: thread {thread} of group {group:?} touches {region:?}"
        );
        let mark = &mut marks[((address - base) / LINE) as usize];
        self.touched += u64::from(!*mark);
        *mark = true;
    }

    /// Shares of each region's lines that were touched, for messages.
    fn shares(&self) -> Vec<(&'static str, f64)> {
        let marked_share =
            |marks: &[bool]| marks.iter().filter(|mark| **mark).count() as f64 / marks.len() as f64;
        self.marks
            .values()
            .map(|(at, marks)| (self.program.regions[*at].name, marked_share(marks)))
            .collect()
    }
}

/// Does a program touch everything that it declares, nothing else, and only the data of its thread or group?
///
/// Cost: 10 s of CPU, because every program runs until it has touched all that it declares.
#[test]
fn programs_touch_their_declared_regions_and_nothing_else() {
    let mut short = Vec::new();
    for spec in programs() {
        let mut options = small_options(spec);
        if spec.threads != (1, 1) {
            options.background_threads = Some(1);
        }

        let mut program = known_program(&spec.name, 11, &options);
        let mut threads = std::mem::take(&mut program.threads);
        let mut touched = TouchedLines::new(program);
        let mut batch = Vec::new();
        let mut accesses = 0;
        while accesses < 96_000_000 && touched.touched * 100 < touched.lines * 96 {
            for (thread, source) in threads.iter_mut().enumerate() {
                batch.clear();
                source.next_batch(&mut batch);
                data_accesses(&batch)
                    .for_each(|access| touched.touch(&spec.name, thread, access.address()));
                accesses += batch.len();
            }
        }

        let share = touched.touched as f64 / touched.lines as f64;
        if share < 0.95 {
            short.push(format!(
                "{}: {share:.3} after {accesses} accesses: {:?}",
                spec.name,
                touched.shares()
            ));
        }
    }

    assert!(short.is_empty(), "{}", short.join("\n"));
}

/// Are instructions per access as declared, and is exactly the declared code fetched?
#[test]
fn instructions_per_access_and_code_are_as_declared() {
    for spec in programs() {
        // Data are small so that all phases occur, but large enough for perl's whole op tree.
        let mut options = small_options(spec);
        options.footprint_bytes = options.footprint_bytes.map(|bytes| bytes + (1 << 20));
        let mut program = known_program(&spec.name, 5, &options);

        let (mut instructions, mut accesses) = (0, 0);
        let mut fetched = vec![false; (spec.code.bytes().div_ceil(LINE) + 1) as usize];
        let (mut counter, limit) = (CODE_BASE, CODE_BASE + spec.code.bytes());
        let mut batch = Vec::new();
        let covered_bytes = |fetched: &[bool]| {
            let lines = fetched.iter().filter(|line| **line).count() as u64;
            (lines * LINE) as f64 / spec.code.bytes() as f64
        };

        // It takes time until functions in the tail of a steep profile are called.
        while accesses < 1_000_000 || accesses < 40_000_000 && covered_bytes(&fetched) < 0.8 {
            take_batches(&mut *program.threads[0], &mut batch);
            for access in &batch {
                let end = counter + access.instructions() * INSTRUCTION_BYTES;
                assert!(
                    end <= limit,
                    "{}: code runs to {end:#x}, past {limit:#x}",
                    spec.name
                );
                for line in (counter - CODE_BASE) / LINE..(end - CODE_BASE).div_ceil(LINE) {
                    fetched[line as usize] = true;
                }
                counter = if access.kind() == AccessKind::Jump {
                    access.address()
                } else {
                    end
                };
                instructions += access.instructions();
            }
            accesses += data_accesses(&batch).count() as u64;
        }
        let mean = instructions as f64 / accesses as f64;
        let declared = spec.pace.instructions_per_access;
        assert!(
            (mean / declared - 1.0).abs() < 0.01,
            "{}: {mean} instead of {declared}",
            spec.name
        );
        let share = covered_bytes(&fetched);
        assert!(
            share > 0.75,
            "{}: only {:.0} % of the code is ever fetched",
            spec.name,
            share * 100.0
        );
    }
}

/// Distances of the data accesses of a program's first thread.
fn stack_distances(name: &str, footprint_bytes: u64, count: usize) -> DistanceHistogram {
    let options = Options {
        footprint_bytes: Some(footprint_bytes),
        ..Options::default()
    };
    let mut program = known_program(name, 9, &options);
    let accesses = take(&mut *program.threads[0], count);
    let lines: Vec<u64> = data_accesses(&accesses)
        .map(|access| access.address() / LINE)
        .collect();
    let mut engine = StackDistances::new();
    engine
        .push(&lines)
        .and_then(|()| engine.finish())
        .expect("few lines")
}

/// Does a cyclic sweep miss equally at every size below its footprint, and never above it?
#[test]
fn a_cyclic_sweep_has_one_step_at_its_footprint() {
    let footprint = 1 << 20;
    let histogram = stack_distances("libquantum", footprint, 4_000_000);
    let misses_at_share =
        |share: f64| histogram.misses_at((footprint as f64 * share) as u64 / LINE) as f64;
    assert!(
        misses_at_share(0.1) / misses_at_share(0.95) < 1.02,
        "flat below: {} and {}",
        misses_at_share(0.1),
        misses_at_share(0.95)
    );
    assert!(
        misses_at_share(1.05) < misses_at_share(0.5) / 20.0,
        "only cold misses above: {}",
        misses_at_share(1.05)
    );
}

/// Do streams gain nothing from a cache of between a sixteenth and a quarter of the data of one of their loops?
#[test]
fn streams_gain_nothing_from_a_part_of_their_data() {
    // A loop of milc passes over a tenth to a quarter of the program's data.
    for (name, footprint) in [("milc", 64 << 20), ("swim", 16 << 20)] {
        let histogram = stack_distances(name, footprint, 3_000_000);
        let [less, more] =
            [1 << 20, 4 << 20].map(|bytes: u64| histogram.misses_at(bytes / LINE) as f64);
        assert!(
            less / more < 1.15,
            "{name}: {less} misses at 1 MB, {more} at 4 MB"
        );
    }
}

/// Does milc read its links in runs of four matrices, and its sites by their stride, as often as published?
#[test]
fn milc_walks_contiguous_links_and_strided_sites() {
    let mut program = known_program("milc", 1, &Options::default());
    let region_span = |name: &str| {
        program
            .regions
            .iter()
            .find(|region| region.name == name)
            .map(|region| (region.base, region.bytes))
    };
    let (fat, sites) = (
        region_span("fat links").expect("a region"),
        region_span("sites").expect("a region"),
    );
    let lattice = sites.1 / 1808;
    assert_eq!(
        (lattice, fat.1),
        (160_000, 160_000 * 576),
        "20^4 sites, four matrices of 144 bytes each"
    );
    let accesses = take(&mut *program.threads[0], 40_000_000);
    let is_inside = |(base, bytes): (u64, u64), access: &Access| {
        (base..base + bytes).contains(&access.address())
    };
    let links: Vec<u64> = data_accesses(&accesses)
        .filter(|access| is_inside(fat, access))
        .map(|access| access.address() / LINE)
        .collect();
    let steps = links.windows(2).filter(|pair| pair[1] != pair[0]);
    let (next, steps) = steps.fold((0, 0), |(next, total), pair| {
        (next + u64::from(pair[1] == pair[0] + 1), total + 1)
    });
    assert!(
        next * 100 > steps * 85,
        "lines of the fat links in a row: {next} of {steps}"
    );
    // Fermion force, gauge force and fat links work on whole sites. They are 41 % of the program's work, and half of
    // their accesses are not stack, pointer or vector accesses.
    let share = data_accesses(&accesses)
        .filter(|access| is_inside(sites, access))
        .count() as f64
        / data_accesses(&accesses).count() as f64;
    assert!(
        (0.1..0.3).contains(&share),
        "accesses to whole sites: {share}"
    );
}

/// Do 80 % of the database's operations go to 30 % of its leaves?
#[test]
fn four_fifths_of_operations_reach_three_tenths_of_the_leaves() {
    let mut program = known_program(
        "berkeleydb",
        4,
        &Options {
            footprint_bytes: Some(8 << 20),
            ..Options::default()
        },
    );
    let database = *program
        .regions
        .iter()
        .find(|region| region.name == "database")
        .expect("it has one");
    let mut visits = BTreeMap::new();
    for access in take(&mut *program.threads[0], 6_000_000) {
        // The header at the start of a page is read once per visit.
        if database.contains(access.address())
            && (access.address() - database.base).is_multiple_of(8192)
        {
            *visits.entry(access.address()).or_insert(0_u64) += 1;
        }
    }
    let mut counts: Vec<u64> = visits.into_values().collect();
    counts.sort_unstable_by(|left, right| right.cmp(left));
    // Internal pages are visited by many descents, so they are the few pages at the top of the list.
    let internal = counts
        .iter()
        .filter(|count| **count > 10 * counts[counts.len() / 2].max(20))
        .count();
    let leaves = &counts[internal..];
    let hot: u64 = leaves[..leaves.len() * 3 / 10].iter().sum();
    let share = hot as f64 / leaves.iter().sum::<u64>() as f64;
    assert!(
        (0.78..0.83).contains(&share),
        "{share} with {internal} internal pages"
    );
}

/// Do waits and posts pair up, so that a chat server never deadlocks and no message is lost or duplicated?
#[test]
fn waits_and_posts_balance() {
    for (sizes, regroup_after) in [(vec![8, 8], None), (vec![3, 7, 1], Some(20))] {
        let options = Options {
            group_sizes: sizes,
            regroup_after,
            ..Options::default()
        };
        let mut program = known_program("chatrooms", 2, &options);
        let mut posted: BTreeMap<u32, i64> = BTreeMap::new();
        let mut awaited_channels: Vec<Option<u32>> = vec![None; program.threads.len()];
        let mut batch = Vec::new();
        for _ in 0..20_000 {
            let mut has_run = false;
            for (source, wait) in program.threads.iter_mut().zip(&mut awaited_channels) {
                if let Some(channel) = *wait {
                    let count = posted.entry(channel).or_default();
                    if *count == 0 {
                        continue;
                    }
                    *count -= 1;
                    *wait = None;
                }

                has_run = true;
                batch.clear();
                match source.next_batch(&mut batch) {
                    BatchEnd::Wait { channel } => *wait = Some(channel),
                    BatchEnd::Post { channel } => *posted.entry(channel).or_default() += 1,
                    BatchEnd::More => assert!(!batch.is_empty()),
                    turn => panic!("{turn:?}"),
                }
            }

            assert!(has_run, "every thread waits");
        }
        let progress: Vec<f64> = program
            .threads
            .iter()
            .filter_map(|thread| thread.progress())
            .collect();
        assert!(
            progress.iter().all(|&messages| messages > 50.0),
            "{progress:?}"
        );
        assert!(
            posted.values().all(|&remaining| remaining <= 16),
            "posts pile up: {posted:?}"
        );
    }
}

/// Do threads of a group use lines that others of the group write, and no such lines if nothing is shared?
#[test]
fn groups_pass_written_lines_between_their_threads() {
    for name in ["scoreboards", "warehouses", "rubis", "chatrooms"] {
        let mut program = known_program(name, 6, &Options::default());
        // The users of each line, and whether any of them writes it.
        let mut users: BTreeMap<u64, (BTreeSet<usize>, bool)> = BTreeMap::new();
        for (thread, source) in program.threads.iter_mut().enumerate() {
            for access in data_accesses(&take(&mut **source, 60_000)) {
                let line = users.entry(access.address() / LINE).or_default();
                line.0.insert(thread);
                line.1 |= access.kind() == AccessKind::Store;
            }
        }

        let shared = users
            .values()
            .filter(|(threads, written)| *written && threads.len() > 1);
        let groups_of = |threads: &BTreeSet<usize>| {
            threads
                .iter()
                .map(|&t| program.groups[t])
                .collect::<BTreeSet<_>>()
        };
        let (inside_group, across): (Vec<_>, Vec<_>) =
            shared.partition(|(threads, _)| groups_of(threads).len() == 1);

        assert!(
            inside_group.len() >= 60,
            "{name}: {} lines of one group passed between its threads",
            inside_group.len()
        );
        assert_eq!(
            across.is_empty(),
            name == "scoreboards",
            "{name}: {} lines across groups",
            across.len()
        );
    }
    let mut alone = known_program("share-nothing", 6, &Options::default());
    let mut owner = BTreeMap::new();
    for (thread, source) in alone.threads.iter_mut().enumerate() {
        for access in data_accesses(&take(&mut **source, 50_000)) {
            assert_eq!(
                *owner.entry(access.address() / LINE).or_insert(thread),
                thread,
                "share-nothing"
            );
        }
    }
}

/// Does a change of phase give different groups, rather than the same groups on other data?
#[test]
fn regrouping_changes_the_partition() {
    for (name, sizes) in [
        ("scoreboards", vec![4; 4]),
        ("rubis", vec![20, 12]),
        ("chatrooms", vec![8, 8]),
    ] {
        let options = Options {
            group_sizes: sizes,
            regroup_after: Some(100),
            ..Options::default()
        };
        let program = known_program(name, 8, &options);
        let (before, after) = (&program.groups, &program.later_groups);
        let all_pairs = || (0..before.len()).flat_map(|a| (0..a).map(move |b| (a, b)));
        let are_together = |groups: &[Option<u32>], (a, b): (usize, usize)| groups[a] == groups[b];
        assert!(
            all_pairs().any(|pair| are_together(before, pair) && !are_together(after, pair)),
            "{name}"
        );
        assert!(
            all_pairs().any(|pair| !are_together(before, pair) && are_together(after, pair)),
            "{name}"
        );
        let unchanged = known_program(
            name,
            8,
            &Options {
                regroup_after: None,
                ..options
            },
        );
        assert_eq!(unchanged.groups, unchanged.later_groups, "{name}");
    }
}

/// Does a thread that a change of phase moves go to the next group's data after the requested number of operations, and
/// does its neighbor stay?
#[test]
fn regrouping_moves_threads_to_other_data() {
    let options = Options {
        regroup_after: Some(100),
        ..Options::default()
    };
    let mut program = known_program("scoreboards", 8, &options);
    let boards: Vec<_> = program
        .regions
        .iter()
        .filter(|region| region.name == "scoreboard")
        .copied()
        .collect();

    let mut boards_of = |thread: usize| -> Vec<usize> {
        let accesses = take(&mut *program.threads[thread], 60_000);
        data_accesses(&accesses)
            .filter_map(|access| {
                boards
                    .iter()
                    .position(|board| board.contains(access.address()))
            })
            .collect()
    };
    assert!(
        boards_of(0).windows(2).all(|pair| pair[0] == pair[1]),
        "the first of a group stays"
    );
    let visited_boards = boards_of(1);
    let first_other = visited_boards
        .iter()
        .position(|&board| board != visited_boards[0])
        .expect("it moves");
    assert!(
        visited_boards[first_other..]
            .iter()
            .all(|&board| board == visited_boards[first_other])
    );
    assert_eq!(first_other, 100 * 20, "a round reads 16 cells and writes 4");
}

/// Are the loads of pointer chasers marked as dependent, and those of streams not?
#[test]
fn dependent_loads_are_marked_where_the_algorithm_chases() {
    for (name, expected) in [
        ("mcf", true),
        ("omnetpp", true),
        ("berkeleydb", true),
        ("swim", false),
        ("lbm", false),
    ] {
        let mut program = known_program(name, 1, &Options::default());
        let accesses = take(&mut *program.threads[0], 50_000);
        assert_eq!(
            accesses.iter().any(|access| access.is_dependent()),
            expected,
            "{name}"
        );
    }
}

/// Does the error for an unknown name or an invalid option contain the found and expected values?
#[test]
fn errors_contain_found_and_expected_values() {
    let build_error = |name: &str, options: Options| {
        build_threads(name, 1, &options)
            .map(|_| ())
            .expect_err("it is wrong")
    };
    let unknown = build_error("sopplex", Options::default());
    assert!(
        matches!(&unknown, ProgramError::Unknown { meant, .. } if meant.contains("'soplex'")),
        "{unknown}"
    );
    let refused = [
        (
            "art",
            Options {
                threads: Some(2),
                ..Options::default()
            },
            "threads",
        ),
        (
            "art",
            Options {
                footprint_bytes: Some(100),
                ..Options::default()
            },
            "footprint_bytes",
        ),
        (
            "rubis",
            Options {
                groups: Some(0),
                ..Options::default()
            },
            "threads",
        ),
        (
            "rubis",
            Options {
                group_sizes: vec![4, 0],
                ..Options::default()
            },
            "group_sizes",
        ),
        (
            "rubis",
            Options {
                group_sizes: vec![4],
                threads: Some(2),
                ..Options::default()
            },
            "group_sizes",
        ),
        (
            "rubis",
            Options {
                regroup_after: Some(0),
                ..Options::default()
            },
            "regroup_after",
        ),
    ];
    for (name, options, wrong) in refused {
        match build_error(name, options) {
            ProgramError::Refused { option, .. } => assert_eq!(option, wrong),
            other => panic!("{other}"),
        }
    }
    let names: BTreeSet<&str> = programs().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names.len(), programs().count(), "names are unique");
}

/// The rows of the table of docs/programs.md. Figures of the instruction mix, phases and sources are in programs.toml
/// only.
fn documented_rows() -> Vec<String> {
    let row = |spec: &KernelSpec| {
        let threads = match spec.threads {
            (each, 1) => each.to_string(),
            (each, groups) => format!("{groups} x {each}"),
        };
        let (name, footprint_mb) = (&spec.name, spec.footprint_bytes as f64 / 1e6);
        format!(
            "| `{name}` | {} | {threads} | {footprint_mb:.1} | {} |",
            spec.stands_for, spec.algorithm
        )
    };
    programs().map(row).collect()
}

/// Does the table of docs/programs.md match the programs? (`UPDATE_EXPECT=1 cargo test` writes it.)
#[test]
fn the_documented_table_matches_the_programs() {
    let page = include_str!("../../../docs/programs.md");
    let (before, after) = page
        .split_once("| program | stands for |")
        .expect("the table has its header on the page");
    let header = after.lines().take(2).collect::<Vec<_>>().join("\n");
    let (_, behind) = after.split_once("\n\n").expect("a paragraph follows");
    let rows = documented_rows().join("\n");
    let updated_page = format!("{before}| program | stands for |{header}\n{rows}\n\n{behind}");
    expect_test::expect_file!["../../../docs/programs.md"].assert_eq(&updated_page);
}
