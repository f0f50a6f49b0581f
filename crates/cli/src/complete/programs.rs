//! Loads programs as the command line names them: a profile file, a recording, or the name of a bundled recording.

use std::io::Read;
use std::path::Path;

use anyhow::Context;
use cachemate_core::Profile;
use cachemate_locality::animal::{AnimalThresholds, classify};
use cachemate_papers::placement::number_names;
use cachemate_report::text::{escape_controls, format_size};
use cachemate_report::{CurvePoint, ProgramSummary};
use cachemate_study::{
    ProfilePass, ProfileTarget, burst_reach_bytes, profile_for_target, whole_curve,
};
use cachemate_trace::{ProfileFile, TraceReader};

use super::traces::{TraceArgs, TraceInput, recording_path};
use crate::session::Session;

/// One program that is ready for predictions.
pub struct ProfiledInput {
    /// Name without control characters, because files come from untrusted sources.
    pub name: String,
    pub file: ProfileFile,
    /// Profile for the target's cache.
    pub profile: Profile,
}

/// Loads the program named `program_name`, for the target's cache.
pub fn load(
    session: &Session,
    program_name: &str,
    target: Option<ProfileTarget>,
) -> anyhow::Result<ProfiledInput> {
    let (program, completeness) = load_partial(session, program_name, target)?;
    completeness.map(|()| program)
}

/// Loads a program as [`load`] does, but returns the part read before Ctrl-C, and whether everything was read.
pub fn load_partial(
    session: &Session,
    program_name: &str,
    target: Option<ProfileTarget>,
) -> anyhow::Result<(ProfiledInput, anyhow::Result<()>)> {
    let path = recording_path(program_name)?;
    let file_name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let name = file_name
        .split('.')
        .next()
        .filter(|name| !name.is_empty())
        .unwrap_or(program_name)
        .to_string();
    let path_text = path.display().to_string();
    let (file, completeness) = if is_profile(&path)? {
        (ProfileFile::read(&path)?, Ok(()))
    } else {
        let mut trace = TraceInput::open(session, &path_text, &TraceArgs::default(), "profiling")?;
        let file = profile_trace(session, &mut trace, &name, &path_text, target)?;
        (file, trace.check_whole())
    };
    if let (Some(reach), Some(target)) = (burst_reach_bytes(&file), target)
        && reach < target.size_bytes
    {
        session.warn(&format!(
            "{path_text}: found a curve from bursts that ends at {}, expected one up to the cache's {}; forecasts use its \
             last point, which overstates misses; record longer bursts, or the whole program",
            format_size(reach),
            format_size(target.size_bytes)
        ));
    }
    let profile = match target {
        Some(target) => profile_for_target(&file, target)?,
        None => file.profile.clone(),
    };
    Ok((
        ProfiledInput {
            name: escape_controls(&file.program),
            file,
            profile,
        },
        completeness,
    ))
}

/// Profiles a trace for the target's cache (or a default one) under the name `name`.
fn profile_trace(
    session: &Session,
    trace: &mut TraceInput,
    name: &str,
    source: &str,
    target: Option<ProfileTarget>,
) -> anyhow::Result<ProfileFile> {
    let bursts = trace.burst_starts().to_vec();
    let mut profiling = ProfilePass::new(target, trace.expected_records(), &bursts)?;
    let mut records = Vec::new();
    while trace.next_records(&mut records)? {
        profiling.push(&records)?;
    }
    let totals = trace.finish(session);
    Ok(profiling.finish(name, source, trace.header(), totals.as_ref())?)
}

/// Checks that each name is one of a file or of a bundled recording, before anything that takes time.
///
/// # Errors
/// The first name that is neither.
pub fn check_names(names: &[String]) -> anyhow::Result<()> {
    names
        .iter()
        .try_for_each(|name| is_profile(&recording_path(name)?).map(drop))
}

/// Loads all programs, in the order given. Copies of a name are numbered.
pub fn load_all(
    session: &Session,
    names: &[String],
    target: ProfileTarget,
) -> anyhow::Result<Vec<ProfiledInput>> {
    let mut programs: Vec<ProfiledInput> = names
        .iter()
        .map(|name| load(session, name, Some(target)))
        .collect::<Result<_, _>>()?;
    let names: Vec<String> = programs
        .iter()
        .map(|program| program.name.clone())
        .collect();
    programs
        .iter_mut()
        .zip(number_names(&names))
        .for_each(|(program, name)| program.name = name);
    Ok(programs)
}

pub fn name_without_number(name: &str) -> &str {
    match name.rsplit_once('#') {
        Some((name, number)) if number.parse::<usize>().is_ok() => name,
        _ => name,
    }
}

/// The first bytes decide whether a file is a profile or a recording, and not its name.
pub fn is_profile(path: &Path) -> anyhow::Result<bool> {
    let mut first_bytes = Vec::new();
    let file = cachemate_files::open_plain(path)
        .with_context(|| format!("{}: cannot be opened", path.display()))?;
    file.take(64)
        .read_to_end(&mut first_bytes)
        .with_context(|| format!("{}: cannot be read", path.display()))?;
    Ok(first_bytes.trim_ascii_start().starts_with(b"{"))
}

impl ProfiledInput {
    /// For tables and pages.
    pub fn summary(&self) -> ProgramSummary {
        let positions = self.profile.stack_positions();
        let class =
            positions.and_then(|positions| classify(positions, &AnimalThresholds::default()));
        let misses_and_hits = positions.and_then(<[f64]>::split_last);
        let sum = |hits: &[f64]| hits.iter().sum::<f64>();
        // Share of the hits that are lost with half of the ways.
        let lost_and_total_hits =
            misses_and_hits.map(|(_, hits)| (sum(&hits[hits.len().div_ceil(2)..]), sum(hits)));
        ProgramSummary {
            name: self.name.clone(),
            command: (!self.file.command.is_empty())
                .then(|| escape_controls(&self.file.command.join(" "))),
            class: class.map(|class| class.name().to_string()),
            instructions: self.file.instructions,
            accesses_per_kilo_instr: self
                .profile
                .rates
                .llc_refs_per_mega_instr
                .map(|refs| refs.value / 1000.0),
            solo_mpki: misses_and_hits.map(|(misses, _)| misses / 1000.0),
            half_cache_mpki: misses_and_hits
                .map(|(misses, hits)| (misses + sum(&hits[hits.len().div_ceil(2)..])) / 1000.0),
            lost_hits_share: lost_and_total_hits
                .filter(|(_, total)| *total > 0.0)
                .map(|(lost, total)| lost / total),
        }
    }

    /// Empty without a curve.
    pub fn curve(&self) -> Vec<CurvePoint> {
        whole_curve(&self.file).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the name of a numbered copy found again?
    #[test]
    fn the_number_of_a_copy_is_removed() {
        let numbered_names = number_names(&["xz", "sort", "xz"].map(String::from));
        assert_eq!(numbered_names, ["xz", "sort", "xz#2"]);
        assert_eq!(
            numbered_names
                .iter()
                .map(|name| name_without_number(name))
                .collect::<Vec<_>>(),
            ["xz", "sort", "xz"]
        );
        assert_eq!(name_without_number("c#"), "c#");
    }
}
