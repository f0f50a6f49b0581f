//! The list of programs, and building one by name.

use cachemate_core::{AccessSource, nearest};
use serde::{Deserialize, Serialize};

use super::setup::{Region, Setup};
use super::{Code, Pace};

/// What a scenario may change of a program. Everything left out keeps the table's value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Bytes of data the whole program touches, its stacks included.
    pub footprint_bytes: Option<u64>,
    /// Threads of each group (warehouse, scoreboard, database), clients of each room.
    pub threads: Option<u32>,
    /// Groups of threads that share data: warehouses, scoreboards, rooms, databases.
    pub groups: Option<u32>,
    /// Threads of each group where they differ; replaces `threads` and `groups`.
    pub group_sizes: Vec<u32>,
    /// Collector-like threads that now and then walk everything.
    pub background_threads: Option<u32>,
    /// After this many operations of its own, every other thread of a group moves on to the next group's data: a change
    /// of phase, after which the partition is another one.
    pub regroup_after: Option<u64>,
}

/// One row of the table of programs.
#[derive(Clone, Copy, Debug)]
pub struct ProgramSpec {
    pub name: &'static str,
    /// What it stands for.
    pub stands_for: &'static str,
    /// The algorithm that runs.
    pub algorithm: &'static str,
    /// Data touched, stacks included.
    pub footprint_bytes: u64,
    pub footprint_source: &'static str,
    pub pace: Pace,
    pub pace_source: &'static str,
    pub code: Code,
    pub code_source: &'static str,
    /// What the program's behaviour alternates between, if anything.
    pub phases: &'static str,
    /// What `progress()` counts.
    pub unit: &'static str,
    /// Threads of each group and groups; (1, 1) where single-threaded.
    pub threads: (u32, u32),
    pub(crate) make: fn(&mut Setup),
}

/// A program ready to run.
pub struct Program {
    /// Its threads, in one address space, in the order of their groups.
    pub threads: Vec<Box<dyn AccessSource>>,
    /// Group of each thread; `None` for background threads.
    pub groups: Vec<Option<u32>>,
    /// The same after `regroup_after`; as before where it is not asked for.
    pub groups_later: Vec<Option<u32>>,
    /// Everything the threads may touch besides code.
    pub regions: Vec<Region>,
}

/// Why a program could not be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    #[error("no program '{name}' is simulated; there are {known}{meant}")]
    Unknown { name: String, known: String, meant: String },
    #[error("program {program:?}: {option} = {found}, expected {expected}")]
    Refused { program: &'static str, option: &'static str, found: String, expected: String },
}

const FAMILIES: &[&[ProgramSpec]] = &[
    super::neural::PROGRAMS,
    super::stencil::PROGRAMS,
    super::chat::PROGRAMS,
    super::database::PROGRAMS,
    super::scoreboard::PROGRAMS,
    super::btree::PROGRAMS,
    super::search::PROGRAMS,
    super::interpreter::PROGRAMS,
    super::media::PROGRAMS,
    super::events::PROGRAMS,
    super::compiler::PROGRAMS,
    super::gauge::PROGRAMS,
    super::lattice::PROGRAMS,
    super::compress::PROGRAMS,
    super::molecules::PROGRAMS,
    super::sparse::PROGRAMS,
    super::network::PROGRAMS,
    super::placement::PROGRAMS,
];

/// Every program, in the order of the table.
pub fn programs() -> impl Iterator<Item = &'static ProgramSpec> {
    FAMILIES.iter().flat_map(|family| family.iter())
}

/// The threads of one process running program `name`.
///
/// # Errors
/// An unknown name (with the nearest known one), or an option that the program does not take.
pub fn program(name: &str, seed: u64, options: &Options) -> Result<Vec<Box<dyn AccessSource>>, ProgramError> {
    build(name, seed, options).map(|program| program.threads)
}

/// As [`program`], with the groups and regions beside the threads.
///
/// # Errors
/// As [`program`].
pub fn build(name: &str, seed: u64, options: &Options) -> Result<Program, ProgramError> {
    let Some(spec) = programs().find(|spec| spec.name == name) else {
        let known: Vec<&'static str> = programs().map(|spec| spec.name).collect();
        let meant =
            nearest(name, known.iter().copied()).map_or(String::new(), |meant| format!(" (did you mean '{meant}'?)"));
        return Err(ProgramError::Unknown { name: name.into(), known: known.join(", "), meant });
    };
    check(spec, options)?;
    let mut setup = Setup::new(spec, seed, options);
    (spec.make)(&mut setup);
    Ok(setup.finish())
}

fn check(spec: &'static ProgramSpec, options: &Options) -> Result<(), ProgramError> {
    let refuse = |option, found: String, expected: String| {
        Err(ProgramError::Refused { program: spec.name, option, found, expected })
    };
    if spec.threads == (1, 1) {
        let given = [
            ("threads", options.threads.map(|n| n.to_string())),
            ("groups", options.groups.map(|n| n.to_string())),
            ("group_sizes", (!options.group_sizes.is_empty()).then(|| format!("{:?}", options.group_sizes))),
            ("background_threads", options.background_threads.map(|n| n.to_string())),
            ("regroup_after", options.regroup_after.map(|n| n.to_string())),
        ];
        for (option, found) in given {
            if let Some(found) = found {
                return refuse(option, found, "nothing: the program has one thread".into());
            }
        }
    }
    if !options.group_sizes.is_empty() && (options.threads.is_some() || options.groups.is_some()) {
        return refuse(
            "group_sizes",
            format!("{:?}", options.group_sizes),
            "not together with threads or groups".into(),
        );
    }
    let sizes = group_sizes(spec, options);
    let threads: u64 = sizes.iter().map(|&n| u64::from(n)).sum();
    if sizes.is_empty() || sizes.contains(&0) || threads > 4096 {
        return refuse("threads", format!("{sizes:?}"), "1 to 4096 threads, none of the groups empty".into());
    }
    if options.background_threads.is_some_and(|n| n > 256) {
        return refuse("background_threads", format!("{:?}", options.background_threads), "at most 256".into());
    }
    if options.regroup_after == Some(0) {
        return refuse("regroup_after", "0".into(), "at least 1 operation".into());
    }
    let least = (64 << 10) * (threads + u64::from(options.background_threads.unwrap_or(0)));
    match options.footprint_bytes {
        Some(bytes) if bytes < least || bytes > 1 << 40 => {
            refuse("footprint_bytes", bytes.to_string(), format!("{least} (64 KiB a thread) to 2^40"))
        }
        _ => Ok(()),
    }
}

/// Threads of each group under these options.
pub(super) fn group_sizes(spec: &ProgramSpec, options: &Options) -> Vec<u32> {
    if !options.group_sizes.is_empty() {
        return options.group_sizes.clone();
    }
    let groups = options.groups.unwrap_or(spec.threads.1).min(4097);
    vec![options.threads.unwrap_or(spec.threads.0); groups as usize]
}
