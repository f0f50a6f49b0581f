//! Profile files: what is known of one program's use of a cache (`docs/profile-format.md`).
//!
//! Problem: profiles are made once and used on other days and machines, so the file has to say what was measured,
//! how, and of what. Method: versioned JSON around [`cachemate_core::Profile`], with room for what only files carry:
//! whole curves, stack positions per cache shape, histograms, intervals. Properties: absent evidence is an absent
//! field; every number reads back bit for bit; a wrong file is refused with line and column, a wrong value with its
//! field's name.

use std::path::Path;

use cachemate_core::{Estimate, Level, Profile, SuperSetCount};
use serde::{Deserialize, Serialize};

use crate::{L1Filter, Place, TraceError};

/// The version this library writes and reads.
pub const PROFILE_VERSION: u32 = 2;
/// Larger files are refused, so that a wrong path cannot ask for unbounded memory.
const PROFILE_BYTES_LIMIT: u64 = 256 << 20;

/// A profile file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProfileFile {
    /// [`PROFILE_VERSION`].
    pub format: u32,
    /// The name by which people and rules call it.
    pub program: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    pub source: ProfileSource,
    /// Data accesses of the program, before any filter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accesses: Option<u64>,
    /// Accesses that reached the profiled cache: the records of the trace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<Curve>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack_positions: Vec<StackPositions>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histograms: Vec<Histogram>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub activity: Vec<ActivityVector>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intervals: Option<Intervals>,
    /// What policies and predictors read.
    pub profile: Profile,
}

/// Where a profile comes from.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ProfileSource {
    /// Name and version of what wrote the file.
    pub tool: String,
    /// `trace`, `live`, `simulator`, ...
    pub kind: String,
    /// The trace file or the host it was measured on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<L1Filter>,
}

/// One miss-rate curve.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Curve {
    /// `lru`, `random`, `plru`.
    pub policy: String,
    /// `exact`, `sampled`, `statstack`, `statcache`, `set-associative`, ...
    pub method: String,
    pub line_bytes: u32,
    /// `None` = all threads together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<u32>,
    /// Ascending sizes.
    pub points: Vec<CurvePoint>,
}

/// Misses at one cache size.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct CurvePoint {
    pub size_bytes: u64,
    /// Misses per access that reached the cache.
    pub miss_ratio: Estimate,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub misses_per_kilo_instr: Option<Estimate>,
}

/// Hits per LRU position in every set of one cache, most recent first (SDC, Animal, Pain).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StackPositions {
    pub size_bytes: u64,
    pub line_bytes: u32,
    /// One count per way.
    pub hits: Vec<u64>,
    pub misses: u64,
}

/// A histogram of distances.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Histogram {
    /// `stack-distance` (distinct lines between two touches) or `reuse-time` (accesses between them).
    pub kind: String,
    pub line_bytes: u32,
    /// First touches.
    pub cold: u64,
    /// (upper bound of the bucket, itself included; count), ascending.
    pub buckets: Vec<(u64, u64)>,
}

/// Use and misses per super set, sample by sample (AV 2.1).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ActivityVector {
    pub level: Level,
    pub start_instruction: u64,
    pub super_sets: Vec<SuperSetCount>,
}

/// Miss counts over time (RM: phases).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Intervals {
    pub size_bytes: u64,
    pub line_bytes: u32,
    pub every: Vec<Interval>,
}

/// One interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Interval {
    pub accesses: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instructions: Option<u64>,
    pub misses: u64,
    /// Raised by one where a new phase was found.
    pub phase: u32,
}

impl ProfileFile {
    /// A file with nothing known but where it comes from.
    pub fn new(program: impl Into<String>, source: ProfileSource) -> Self {
        ProfileFile {
            format: PROFILE_VERSION,
            program: program.into(),
            command: Vec::new(),
            source,
            accesses: None,
            records: None,
            instructions: None,
            curves: Vec::new(),
            stack_positions: Vec::new(),
            histograms: Vec::new(),
            activity: Vec::new(),
            intervals: None,
            profile: Profile::default(),
        }
    }

    /// Reads a file and checks its values.
    ///
    /// # Errors
    /// [`TraceError`] naming the line or the field, what was found and what was expected.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let name = path.as_ref().display().to_string();
        let metadata = std::fs::metadata(path.as_ref()).map_err(TraceError::io(&name, "open"))?;
        if metadata.len() > PROFILE_BYTES_LIMIT {
            let found = format!("{} bytes", metadata.len());
            return Err(TraceError::bad(&name, Place::File, found, "a profile of at most 256 MiB"));
        }
        let bytes = std::fs::read(path.as_ref()).map_err(TraceError::io(&name, "read"))?;
        Self::parse(&bytes, &name)
    }

    /// As [`ProfileFile::read`], from bytes; `file` names them in errors.
    ///
    /// # Errors
    /// As [`ProfileFile::read`].
    pub fn parse(bytes: &[u8], file: &str) -> Result<Self, TraceError> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let bad = |error: serde_json::Error| {
            let place = Place::Line(error.line() as u64);
            TraceError::bad(file, place, error.to_string(), "a cachemate profile in JSON (docs/profile-format.md)")
        };
        // The version first: another version's fields would only give a misleading error.
        let version: Version = serde_json::from_slice(bytes).map_err(bad)?;
        if version.format != PROFILE_VERSION {
            let found = format!("profile format {}", version.format);
            return Err(TraceError::bad(file, Place::File, found, format!("format {PROFILE_VERSION}")));
        }
        let profile: ProfileFile = serde_json::from_slice(bytes).map_err(bad)?;
        profile.check(file)?;
        Ok(profile)
    }

    /// Writes the file; an existing one only with `force`.
    ///
    /// # Errors
    /// [`TraceError::Exists`], [`TraceError::Io`], or [`TraceError::Bad`] where a value is none that a reader takes.
    pub fn write(&self, path: impl AsRef<Path>, force: bool) -> Result<(), TraceError> {
        let name = path.as_ref().display().to_string();
        self.check(&name)?;
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|error| TraceError::bad(&name, Place::File, error.to_string(), "values that JSON can hold"))?;
        text.push(b'\n');
        let mut out = crate::create_output(path.as_ref(), force)?;
        std::io::Write::write_all(&mut out, &text).map_err(TraceError::io(&name, "write"))
    }

    fn check(&self, file: &str) -> Result<(), TraceError> {
        let bad = |field: String, found: String, expected: &str| {
            Err(TraceError::bad(file, Place::File, format!("{field} = {found}"), expected))
        };
        for (at, curve) in self.curves.iter().enumerate() {
            if !curve.points.is_sorted_by(|a, b| a.size_bytes < b.size_bytes) {
                return bad(format!("curves[{at}].points"), "sizes out of order".into(), "ascending sizes");
            }
            for (of, point) in curve.points.iter().enumerate() {
                for (name, estimate) in
                    [("miss_ratio", Some(point.miss_ratio)), ("misses_per_kilo_instr", point.misses_per_kilo_instr)]
                {
                    let Some(estimate) = estimate else { continue };
                    if ![estimate.low, estimate.value, estimate.high].iter().all(|number| number.is_finite()) {
                        let field = format!("curves[{at}].points[{of}].{name}");
                        return bad(field, format!("{estimate:?}"), "finite numbers");
                    }
                }
            }
        }
        for (at, histogram) in self.histograms.iter().enumerate() {
            if !histogram.buckets.is_sorted_by(|a, b| a.0 < b.0) {
                return bad(format!("histograms[{at}].buckets"), "bounds out of order".into(), "ascending bounds");
            }
        }
        let locality = &self.profile.locality;
        for (name, curves) in [
            ("misses_per_kilo_instr", &locality.misses_per_kilo_instr),
            ("stalls_per_kilo_instr", &locality.stalls_per_kilo_instr),
        ] {
            let wrong = curves.iter().find(|(_, curve)| !curve.value.is_sorted_by(|a, b| a.0 < b.0));
            if let Some((level, _)) = wrong {
                let field = format!("profile.locality.{name}.{level:?}");
                return bad(field, "sizes out of order".into(), "ascending sizes");
            }
        }
        if let Some(position) = self
            .profile
            .stack_positions()
            .and_then(|positions| positions.iter().position(|number| !number.is_finite() || *number < 0.0))
        {
            let field = format!("profile.locality.stack_positions.value[{position}]");
            return bad(field, "no count".into(), "a finite number that is not negative");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{Fact, FactSource};

    fn full() -> ProfileFile {
        let third = Estimate { value: 1.0 / 3.0, low: 0.1 + 0.2, high: f64::MIN_POSITIVE };
        let mut file =
            ProfileFile::new("gzip", ProfileSource { tool: "t".into(), kind: "trace".into(), ..Default::default() });
        file.accesses = Some(u64::MAX);
        file.curves.push(Curve {
            policy: "lru".into(),
            method: "exact".into(),
            line_bytes: 64,
            thread: None,
            points: vec![CurvePoint { size_bytes: 1 << 20, miss_ratio: third, misses_per_kilo_instr: Some(third) }],
        });
        file.stack_positions.push(StackPositions { size_bytes: 1 << 20, line_bytes: 64, hits: vec![1, 2], misses: 3 });
        file.histograms.push(Histogram {
            kind: "reuse-time".into(),
            line_bytes: 64,
            cold: 1,
            buckets: vec![(0, 5), (9, 1)],
        });
        let super_sets = vec![SuperSetCount { accesses: 1, misses: 0 }];
        file.activity.push(ActivityVector { level: Level::L2, start_instruction: 0, super_sets: super_sets.clone() });
        let interval = Interval { accesses: 9, instructions: None, misses: 1, phase: 0 };
        file.intervals = Some(Intervals { size_bytes: 1, line_bytes: 64, every: vec![interval] });
        let times = vec![(Some(1), 0.1), (None, 1e-300)];
        file.profile.locality.reuse_times = Some(Fact::new(times, FactSource::ExactTrace, 0));
        file.profile.locality.activity.insert(Level::L1Data, Fact::new(super_sets, FactSource::SuperSets, 3));
        file.profile.rates.pcmr = Some(Fact::measured(third, FactSource::CoRunRows, 7));
        file
    }

    /// Does every field read back bit for bit, is an existing file kept, and does an empty profile stay empty?
    #[test]
    fn a_written_profile_reads_back_equal_and_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.json");
        full().write(&path, false).unwrap();
        assert_eq!(ProfileFile::read(&path).unwrap(), full());
        assert!(matches!(full().write(&path, false), Err(TraceError::Exists { .. })));
        let empty = ProfileFile::new("x", ProfileSource::default());
        empty.write(&path, true).unwrap();
        assert_eq!(ProfileFile::read(&path).unwrap(), empty);
    }

    /// Is a wrong file refused with its place, and a wrong value with its field?
    #[test]
    fn wrong_profiles_are_refused_with_line_or_field() {
        let error = |text: &str| ProfileFile::parse(text.as_bytes(), "p.json").unwrap_err().to_string();
        assert!(error("{\n\"format\": 9}").starts_with("p.json: the file: found profile format 9, expected format 2"));
        assert!(error("{\"format\": 2,\n \"program\": 7}").starts_with("p.json: line 2: found invalid type: integer"));
        assert!(error("nonsense").starts_with("p.json: line 1: "));
        let mut file = full();
        file.curves[0].points[0].miss_ratio.high = f64::NAN;
        let refused = file.write("never-written.json", false).unwrap_err().to_string();
        assert!(refused.contains("curves[0].points[0].miss_ratio"), "{refused}");
    }
}
