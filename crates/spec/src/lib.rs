//! Machines, scenarios and configuration from TOML, matrices from CSV.
//!
//! Users write these files by hand, and a machine has many ways to be wrong that a parser of TOML
//! accepts: twelve ways under tree-PLRU, a cache that five of eight cores share. An error is then
//! only useful if it shows the place. So one reader records the position of every value
//! ([`parse_toml`]) and is used for all of these files; later checks, which compare several fields,
//! report the field's path, and the reader finds its line.
//!
//! For example, `machines/x.toml, line 12, caches[2].ways: found 12, expected a power of two, as
//! replacement is tree-plru`. A name that nobody knows is answered with the known ones and the
//! nearest.
//!
//! The papers' machines are built into the program, so that it works from any directory.
//!
//! # Invariants
//! - An error has the file, the field, the value found and the values expected, and line and column
//!   if there are any.
//! - All errors of a configuration are reported at once, except those that follow from another one.
//! - A value that is returned has passed every check, so that no reader of it checks again.

#![warn(missing_docs)]

mod error;
mod goals;
mod interval;
mod located_toml;
mod machines;
mod manage;
mod matrix;
mod overrides;
mod scenario;

use std::io::Read;

pub use error::SpecError;
pub use interval::{
    Distribution, IntervalSpec, MixSpec, SimModel, TimeSharingModel, WeightedProgram,
};
pub use located_toml::{Located, parse_toml};
pub use machines::{
    built_in_machine_text, load_machine, load_topology, machine_names, parse_machine,
};
pub use manage::{
    ManageConfig, ManageMode, PromiseSource, RollbackSection, RuleAction, RuleConfig, User,
    load_manage_config, parse_manage_config,
};
pub use matrix::{load_measured_matrix, parse_measured_matrix};
pub use scenario::{
    PolicyChoice, Scenario, ScenarioProgram, load_scenario, load_varied_scenario, parse_scenario,
};

/// Files larger than this are not specifications.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Reads a specification; `-` is standard input.
pub(crate) fn read_text(path: &str) -> Result<String, SpecError> {
    if path == "-" {
        return read_standard_input();
    }
    let metadata = std::fs::metadata(path)
        .map_err(|error| SpecError::for_file(path, error.to_string(), "a readable file"))?;
    if metadata.len() > MAX_FILE_BYTES {
        return Err(SpecError::for_file(
            path,
            format!("{} bytes", metadata.len()),
            "a file of at most 16 MiB",
        ));
    }
    cachemate_files::read_text_limited(path.as_ref(), MAX_FILE_BYTES)
        .map_err(|error| read_error(path, &error))
}

fn read_standard_input() -> Result<String, SpecError> {
    let mut text = String::new();
    let error = |found: String, expected| SpecError::for_file("standard input", found, expected);
    let length = std::io::stdin()
        .lock()
        .take(MAX_FILE_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(|failure| error(failure.to_string(), "readable text"))?;
    if length as u64 > MAX_FILE_BYTES {
        return Err(error("more".to_string(), "at most 16 MiB"));
    }
    Ok(text)
}

/// The read error as an error of this crate: a rejection gives the path, the kind of file found, and the kind expected.
fn read_error(path: &str, error: &std::io::Error) -> SpecError {
    let text = error.to_string();
    match text
        .strip_prefix(&format!("{path}: found "))
        .and_then(|rest| rest.split_once(", expected "))
    {
        Some((found, expected)) => SpecError::for_file(path, found, expected),
        None if error.kind() == std::io::ErrorKind::NotFound => {
            SpecError::for_file(path, "no such file", "a readable text file")
        }
        None => SpecError::for_file(path, text, "a readable text file"),
    }
}
