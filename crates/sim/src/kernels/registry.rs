//! The list of programs, and their construction by name.

use std::sync::LazyLock;

use cachemate_core::{AccessSource, nearest_name, suggestion};
use serde::Deserialize;

use super::setup::{KernelMaker, KernelProgram, KernelSetup, KernelSpec, Options, group_sizes};

/// The error for a program that cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// The name is not in the table.
    #[error("no program '{name}' is simulated; there are {known}{meant}")]
    Unknown {
        /// The requested name.
        name: String,
        /// All known names, separated by commas.
        known: String,
        /// Most similar known name, as a question; empty if none is similar.
        meant: String,
    },
    /// The program does not accept this option, or this value.
    #[error("program {program:?}: {option} = {found}, expected {expected}")]
    Refused {
        /// Name of the program.
        program: &'static str,
        /// Field of [`Options`].
        option: &'static str,
        /// The given value.
        found: String,
        /// Description of the accepted values.
        expected: String,
    },
}

const FAMILIES: &[&[KernelMaker]] = &[
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

#[derive(Deserialize)]
struct ProgramTable {
    program: Vec<KernelSpec>,
}

static TABLE: LazyLock<ProgramTable> = LazyLock::new(|| {
    toml::from_str(include_str!("programs.toml"))
        .expect("programs.toml is built in, and tests read all of it")
});

/// Programs in the order of the table.
pub fn programs() -> impl Iterator<Item = &'static KernelSpec> {
    TABLE.program.iter()
}

/// The threads of one process that runs program `name`.
///
/// # Errors
/// The name is unknown (the error has the most similar known one), or the program does not accept
/// an option.
pub fn build_threads(
    name: &str,
    seed: u64,
    options: &Options,
) -> Result<Vec<Box<dyn AccessSource>>, ProgramError> {
    build_program(name, seed, options).map(|program| program.threads)
}

/// Like [`build_threads`], but also returns groups and regions.
pub fn build_program(
    name: &str,
    seed: u64,
    options: &Options,
) -> Result<KernelProgram, ProgramError> {
    let Some(spec) = programs().find(|spec| spec.name == name) else {
        let names: Vec<&str> = programs().map(|spec| spec.name.as_str()).collect();
        let meant = suggestion(nearest_name(name, names.iter().copied()));
        return Err(ProgramError::Unknown {
            name: name.into(),
            known: names.join(", "),
            meant,
        });
    };
    check_options(spec, options)?;
    let mut setup = KernelSetup::new(spec, seed, options);

    let (_, make) = FAMILIES
        .iter()
        .copied()
        .flatten()
        .find(|(name, _)| *name == spec.name)
        .expect("programs have kernels");
    make(&mut setup);
    Ok(setup.finish())
}

fn check_options(spec: &'static KernelSpec, options: &Options) -> Result<(), ProgramError> {
    let refuse_option = |option, found: String, expected: String| {
        Err(ProgramError::Refused {
            program: &spec.name,
            option,
            found,
            expected,
        })
    };

    if spec.threads == (1, 1) {
        let thread_options = [
            ("threads", options.threads.map(|n| n.to_string())),
            ("groups", options.groups.map(|n| n.to_string())),
            (
                "group_sizes",
                (!options.group_sizes.is_empty()).then(|| format!("{:?}", options.group_sizes)),
            ),
            (
                "background_threads",
                options.background_threads.map(|n| n.to_string()),
            ),
            (
                "regroup_after",
                options.regroup_after.map(|n| n.to_string()),
            ),
        ];

        for (option, found) in thread_options {
            if let Some(found) = found {
                return refuse_option(option, found, "nothing: the program has one thread".into());
            }
        }
    }

    if !options.group_sizes.is_empty() && (options.threads.is_some() || options.groups.is_some()) {
        return refuse_option(
            "group_sizes",
            format!("{:?}, and threads or groups", options.group_sizes),
            "one of the two".into(),
        );
    }
    let sizes = group_sizes(spec, options);
    let thread_count: u64 = sizes.iter().map(|&n| u64::from(n)).sum();
    if sizes.is_empty() || sizes.contains(&0) || thread_count > 4096 {
        let option = match options.group_sizes.is_empty() {
            true => "threads",
            false => "group_sizes",
        };
        return refuse_option(
            option,
            format!("{sizes:?}"),
            "1 to 4096 threads, none of the groups empty".into(),
        );
    }
    if let Some(count) = options.background_threads.filter(|&count| count > 256) {
        return refuse_option(
            "background_threads",
            count.to_string(),
            "at most 256".into(),
        );
    }
    if options.regroup_after == Some(0) {
        return refuse_option("regroup_after", "0".into(), "at least 1 operation".into());
    }
    let min_bytes =
        (64 << 10) * (thread_count + u64::from(options.background_threads.unwrap_or(0)));
    match options.footprint_bytes {
        Some(bytes) if bytes < min_bytes || bytes > 1 << 40 => refuse_option(
            "footprint_bytes",
            bytes.to_string(),
            format!("{min_bytes} (64 KiB a thread) to 2^40"),
        ),
        _ => Ok(()),
    }
}
