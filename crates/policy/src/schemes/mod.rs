//! Classification schemes: what two programs do to each other on a shared cache, guessed from their profiles.
//!
//! One scheme = one file, listed in [`all`]. A scheme says either how much slower each gets
//! ([`CostKind::Degradation`]) or a weight that only orders pairs ([`CostKind::Weight`]); a matching can use both.

use cachemate_core::{Profile, nearest};

use crate::matrix::PairCosts;

#[allow(unused_imports)] // for the links above and the schemes' files
use crate::matrix::CostKind;

/// The shared cache that the programs would meet on, and what a miss of it costs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SharedCache {
    pub size_bytes: u64,
    pub ways: u32,
    pub line_bytes: u32,
    /// From the miss to the data, beyond a hit.
    pub miss_penalty_cycles: f64,
}

/// A profile lacks what the scheme needs. `program` is the index into the profiles given.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("scheme '{scheme}' needs {what} of program {program}, which its profile does not have")]
pub struct MissingEvidence {
    pub scheme: &'static str,
    pub program: usize,
    pub what: &'static str,
}

/// One classification scheme. Pure; results depend on nothing but the arguments.
pub trait Scheme {
    /// As given on the command line.
    fn name(&self) -> &'static str;

    /// What each program suffers beside each other one, on a cache that the two have for themselves.
    ///
    /// # Errors
    /// The first program without the evidence needed: nothing is invented.
    fn pair_costs(&self, profiles: &[&Profile], cache: &SharedCache) -> Result<PairCosts, MissingEvidence>;
}

/// Every scheme there is, in the order of their names.
pub fn all() -> Vec<Box<dyn Scheme>> {
    Vec::new()
}

/// No scheme of that name.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("no scheme '{name}'; there are {known}{meant}")]
pub struct UnknownScheme {
    pub name: String,
    pub known: String,
    meant: String,
}

/// The scheme called `name`.
///
/// # Errors
/// An unknown name, with the known ones and the nearest.
pub fn by_name(name: &str) -> Result<Box<dyn Scheme>, UnknownScheme> {
    let schemes = all();
    let known: Vec<&str> = schemes.iter().map(|scheme| scheme.name()).collect();
    let meant =
        nearest(name, known.iter().copied()).map_or(String::new(), |meant| format!(" (did you mean '{meant}'?)"));
    let unknown = UnknownScheme { name: name.to_string(), known: known.join(", "), meant };
    schemes.into_iter().find(|scheme| scheme.name() == name).ok_or(unknown)
}
