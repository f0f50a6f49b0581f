//! Profile files: how one program uses a cache (`docs/formats.md`).
//!
//! A profile is made once and used for years, on other machines and by other models than those that
//! its maker had in mind, so it must state what was measured and how, and not what somebody
//! concluded. It is versioned JSON around [`cachemate_core::Profile`], with what only files
//! contain: complete curves, stack positions by cache geometry, histograms, intervals.
//!
//! For example, a profile that a daemon measured while its program ran has a curve with three sizes
//! and an error for each, and no stack distances; one from a recording has distances, and therefore
//! every size. A model that needs distances refuses the first one by name and field, where a format
//! that filled them in with zeros would let it forecast a program that never misses.
//!
//! Missing evidence is a missing field; every number reads back bit for bit; a malformed file is
//! rejected with line and column, an invalid value with its field's name.

use std::path::Path;

use cachemate_core::{
    CacheLevel, Estimate, Fact, FieldError, Profile, StreamSample, SuperSetCount,
};
use serde::{Deserialize, Serialize};

use crate::record_type::MAX_COUNT;
use crate::run_log::FormatVersion;
use crate::{FilePosition, L1Filter, TraceError};

/// The version that this library writes.
pub const PROFILE_VERSION: u32 = 3;
/// The oldest version that this library reads: version 2 has no sample of the accesses.
const OLDEST_PROFILE_VERSION: u32 = 2;
/// Larger files are rejected, so that a wrong path cannot request unbounded memory.
const PROFILE_BYTES_LIMIT: u64 = 256 << 20;

/// A profile file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProfileFile {
    /// [`PROFILE_VERSION`], or an older version that is still read.
    pub format: u32,
    /// The program's name for users and rules.
    pub program: String,
    /// The measured command, word by word; empty if it is unknown, or if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// The tool that made the profile, and its input.
    pub source: ProfileSource,
    /// Data accesses of the program, before filtering.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses: Option<u64>,
    /// Accesses that reached the profiled cache: the records of the trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records: Option<u64>,
    /// Instructions of all threads in the measured window; `None` if not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<u64>,
    /// Miss-rate curves, by policy, method and thread; empty if none was computed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<StoredCurve>,
    /// One entry per cache geometry; empty if none was simulated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack_positions: Vec<StackPositions>,
    /// Distances and reuse times; empty if none were computed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histograms: Vec<StoredHistogram>,
    /// Activity vectors in order of time; empty if none were counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub activity: Vec<ActivityVector>,
    /// Misses over time; `None` if not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intervals: Option<StoredIntervals>,
    /// A sample of the accesses, from which the timing on any machine follows; `None` without a recording that counts
    /// instructions and has no pauses.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "crate::stored_sample"
    )]
    pub sample: Option<StreamSample>,
    /// The facts that policies and predictors use.
    pub profile: Profile,
}

/// The origin of a profile.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct ProfileSource {
    /// Name and version of the tool that wrote the file.
    pub tool: String,
    /// `trace`, `live`, `simulator`, ...
    pub kind: String,
    /// The trace file, or the host on which it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The L1 cache in front of the profiled one; `None` if every access reached the profiled cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter: Option<L1Filter>,
}

/// One miss-rate curve.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredCurve {
    /// `lru`, `random`, `plru`.
    pub policy: String,
    /// `exact`, `sampled`, `statstack`, `statcache`, `set-associative`, ...
    pub method: String,
    /// Line size in bytes.
    pub line_bytes: u32,
    /// The thread; `None` for all threads together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thread: Option<u32>,
    /// Points in ascending order of size.
    pub points: Vec<StoredCurvePoint>,
}

/// Misses at one cache size.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredCurvePoint {
    /// Size of the cache.
    pub size_bytes: u64,
    /// Misses per access that reached the cache.
    pub miss_ratio: Estimate,
    /// Misses per thousand instructions; `None` if instructions were not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub misses_per_kilo_instr: Option<Estimate>,
}

/// Hits by LRU position in every set of one cache, most recent first (SDC, Animal, Pain).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StackPositions {
    /// Size of the cache; the number of ways is the length of `hits`.
    pub size_bytes: u64,
    /// Line size of this cache in bytes.
    pub line_bytes: u32,
    /// One count per way.
    pub hits: Vec<u64>,
    /// Accesses that hit at no position, including first touches.
    pub misses: u64,
}

/// A histogram of distances.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredHistogram {
    /// `stack-distance` (distinct lines between two touches) or `reuse-time` (accesses between them).
    pub kind: String,
    /// Line size in bytes; two touches of a line count, whichever of its bytes they touch.
    pub line_bytes: u32,
    /// First touches.
    pub cold: u64,
    /// (inclusive upper bound of the bucket, count), ascending.
    pub buckets: Vec<(u64, u64)>,
}

/// Use and misses per super set, sample by sample (AV 2.1).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ActivityVector {
    /// The cache whose sets were counted.
    pub level: CacheLevel,
    /// Start of the sample, in instructions from the start of the run.
    pub start_instruction: u64,
    /// Counts of each super set, by its index.
    pub super_sets: Vec<SuperSetCount>,
}

/// Miss counts over time (RM: phases).
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredIntervals {
    /// Size of the cache in which the misses were counted.
    pub size_bytes: u64,
    /// Line size of this cache in bytes.
    pub line_bytes: u32,
    /// The intervals, in order of time and without gaps.
    pub every: Vec<StoredInterval>,
}

/// One interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoredInterval {
    /// Accesses that reached the cache.
    pub accesses: u64,
    /// Instructions in the interval; `None` if not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<u64>,
    /// Accesses that missed the cache.
    pub misses: u64,
    /// Number of the phase, incremented at each new one.
    pub phase: u32,
}

impl ProfileFile {
    /// Builds a file without measurements.
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
            sample: None,
            profile: Profile::default(),
        }
    }

    /// Reads a file and checks its values.
    ///
    /// # Errors
    /// [`TraceError`] with the line or the field, the value found and the value expected.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let name = path.as_ref().display().to_string();
        let metadata =
            std::fs::metadata(path.as_ref()).map_err(TraceError::io_error(&name, "open"))?;
        if metadata.len() > PROFILE_BYTES_LIMIT {
            let found = format!("{} bytes", metadata.len());
            let expected = "a profile of at most 256 MiB";
            return Err(TraceError::format_error(
                &name,
                FilePosition::File,
                found,
                expected,
            ));
        }
        let bytes = cachemate_files::read_limited(path.as_ref(), PROFILE_BYTES_LIMIT)
            .map_err(TraceError::io_error(&name, "read"))?;
        Self::parse(&bytes, &name)
    }

    /// Does the same as [`ProfileFile::read`], from bytes; `file` names them in errors.
    pub fn parse(bytes: &[u8], file: &str) -> Result<Self, TraceError> {
        let json_error = |error: serde_json::Error| {
            let position = FilePosition::Line(error.line() as u64);
            TraceError::format_error(
                file,
                position,
                error.to_string(),
                "a cachemate profile in JSON (docs/formats.md)",
            )
        };
        let version: FormatVersion = serde_json::from_slice(bytes).map_err(json_error)?;
        if !(OLDEST_PROFILE_VERSION..=PROFILE_VERSION).contains(&version.format) {
            let found = format!("profile format {}", version.format);
            let expected = format!("format {OLDEST_PROFILE_VERSION} to {PROFILE_VERSION}");
            return Err(TraceError::format_error(
                file,
                FilePosition::File,
                found,
                expected,
            ));
        }

        let profile: ProfileFile = serde_json::from_slice(bytes).map_err(json_error)?;
        profile.check(file)?;
        Ok(profile)
    }

    /// Writes the file; an existing one is overwritten only with `force`.
    ///
    /// # Errors
    /// [`TraceError::Exists`], [`TraceError::Io`], or [`TraceError::Bad`] for a value that no reader accepts.
    pub fn write(&self, path: impl AsRef<Path>, force: bool) -> Result<(), TraceError> {
        let name = path.as_ref().display().to_string();
        self.check(&name)?;
        let mut text = serde_json::to_vec_pretty(self).map_err(|error| {
            TraceError::format_error(
                &name,
                FilePosition::File,
                error.to_string(),
                "values that JSON can hold",
            )
        })?;
        text.push(b'\n');
        let mut out = crate::create_output(path.as_ref(), force)?;
        std::io::Write::write_all(&mut out, &text).map_err(TraceError::io_error(&name, "write"))
    }

    fn check(&self, file: &str) -> Result<(), TraceError> {
        self.check_fields().map_err(
            |FieldError {
                 field,
                 found,
                 expected,
             }| {
                TraceError::format_error(
                    file,
                    FilePosition::File,
                    format!("{field} = {found}"),
                    expected,
                )
            },
        )
    }

    fn check_fields(&self) -> Result<(), FieldError> {
        for (index, curve) in self.curves.iter().enumerate() {
            check_line_bytes(&format!("curves[{index}]"), curve.line_bytes)?;
            let field_path = format!("curves[{index}].points");
            check_ascending(&field_path, "sizes", &curve.points, |point| {
                point.size_bytes
            })?;

            for (point_index, point) in curve.points.iter().enumerate() {
                check_range(
                    &format!("{field_path}[{point_index}].miss_ratio"),
                    Some(point.miss_ratio),
                    0.0,
                    1.0,
                )?;
                let rate = point.misses_per_kilo_instr;
                check_range(
                    &format!("{field_path}[{point_index}].misses_per_kilo_instr"),
                    rate,
                    0.0,
                    MAX_PER_KILO,
                )?;
            }
        }

        for (index, histogram) in self.histograms.iter().enumerate() {
            let field_path = format!("histograms[{index}]");
            check_line_bytes(&field_path, histogram.line_bytes)?;
            let counts = histogram.buckets.iter().map(|(_, count)| *count);
            check_sum(&field_path, counts.chain([histogram.cold]))?;
            check_ascending(
                &format!("{field_path}.buckets"),
                "bounds",
                &histogram.buckets,
                |bucket| bucket.0,
            )?;
        }

        for (index, positions) in self.stack_positions.iter().enumerate() {
            let field_path = format!("stack_positions[{index}]");
            check_line_bytes(&field_path, positions.line_bytes)?;
            let counts = positions.hits.iter().copied();
            check_sum(&field_path, counts.chain([positions.misses]))?;
        }
        self.check_profile()
    }

    fn check_profile(&self) -> Result<(), FieldError> {
        let (locality, rates, contention) = (
            &self.profile.locality,
            &self.profile.rates,
            &self.profile.contention,
        );
        for (name, curves) in [
            ("misses_per_kilo_instr", &locality.misses_per_kilo_instr),
            ("stalls_per_kilo_instr", &locality.stalls_per_kilo_instr),
        ] {
            for (level, curve) in curves {
                let field_path = format!("profile.locality.{name}.{level:?}");
                check_ascending(&field_path, "sizes", &curve.value, |point| point.0)?;
                for (index, (_, rate)) in curve.value.iter().enumerate() {
                    check_range(
                        &format!("{field_path}[{index}]"),
                        Some(*rate),
                        0.0,
                        MAX_PER_KILO,
                    )?;
                }
            }
        }
        for (index, (_, weight)) in locality
            .reuse_times
            .iter()
            .flat_map(|times| &times.value)
            .enumerate()
        {
            check_number(
                &format!("profile.locality.reuse_times.value[{index}]"),
                *weight,
                0.0,
                1.0,
            )?;
        }
        for (index, count) in locality
            .stack_positions
            .iter()
            .flat_map(|counts| &counts.value)
            .enumerate()
        {
            check_number(
                &format!("profile.locality.stack_positions.value[{index}]"),
                *count,
                0.0,
                MAX_PER_MEGA,
            )?;
        }
        // A slowdown may be measured as a small gain.
        for (name, fact, min, max) in [
            (
                "rates.solo_instr_per_cycle",
                &rates.solo_instr_per_cycle,
                0.0,
                MAX_PER_CYCLE,
            ),
            (
                "rates.llc_refs_per_mega_instr",
                &rates.llc_refs_per_mega_instr,
                0.0,
                MAX_PER_MEGA,
            ),
            (
                "rates.observed_misses_per_kilo_instr",
                &rates.observed_misses_per_kilo_instr,
                0.0,
                MAX_PER_KILO,
            ),
            (
                "rates.observed_read_bytes_per_kilo_instr",
                &rates.observed_read_bytes_per_kilo_instr,
                0.0,
                MAX_PER_MEGA,
            ),
            (
                "rates.observed_instr_per_cycle",
                &rates.observed_instr_per_cycle,
                0.0,
                MAX_PER_CYCLE,
            ),
            ("rates.pcmr", &rates.pcmr, 0.0, 100.0),
            (
                "rates.remote_stall_share",
                &rates.remote_stall_share,
                0.0,
                1.0,
            ),
            (
                "contention.intensity",
                &contention.intensity,
                0.0,
                MAX_SLOWDOWN,
            ),
            (
                "contention.sensitivity",
                &contention.sensitivity,
                -1.0,
                MAX_SLOWDOWN,
            ),
            (
                "contention.neighbor_slowdown",
                &contention.neighbor_slowdown,
                -1.0,
                MAX_SLOWDOWN,
            ),
        ] {
            check_range(
                &format!("profile.{name}"),
                fact.as_ref().map(Fact::estimate),
                min,
                max,
            )?;
        }
        for (task, share) in &self.profile.sharing.with {
            check_range(
                &format!("profile.sharing.with.{}", task.0),
                Some(share.estimate()),
                0.0,
                1.0,
            )?;
        }
        Ok(())
    }
}

/// Bounds that no program exceeds: 10^6 misses or stalled cycles per thousand instructions; 10^9 references per million
/// instructions, or bytes per thousand; a thousand instructions per cycle; a slowdown by a factor of a million.
const MAX_PER_KILO: f64 = 1e6;
const MAX_PER_MEGA: f64 = 1e9;
const MAX_PER_CYCLE: f64 = 1e3;
const MAX_SLOWDOWN: f64 = 1e6;

fn check_number(field: &str, found: f64, min: f64, max: f64) -> Result<(), FieldError> {
    if (min..=max).contains(&found) {
        return Ok(());
    }
    Err(FieldError::new(
        field,
        format!("{found:e}"),
        format!("{min} to {max}"),
    ))
}

/// Checks that the value is within its range and between the ends of its interval. The ends are finite, but may lie
/// outside of the range.
fn check_range(
    field: &str,
    estimate: Option<Estimate>,
    min: f64,
    max: f64,
) -> Result<(), FieldError> {
    let Some(Estimate { value, low, high }) = estimate else {
        return Ok(());
    };
    check_number(&format!("{field}.value"), value, min, max)?;
    if low.is_finite() && high.is_finite() && low <= value && value <= high {
        return Ok(());
    }
    let interval_text = format!("{value:e} in {low:e} to {high:e}");
    Err(FieldError::new(
        field,
        interval_text,
        "a finite interval around the value",
    ))
}

fn check_line_bytes(field: &str, line_bytes: u32) -> Result<(), FieldError> {
    if line_bytes.is_power_of_two() {
        return Ok(());
    }
    let field = format!("{field}.line_bytes");
    Err(FieldError::new(field, line_bytes, "a power of two"))
}

fn check_sum(field: &str, counts: impl Iterator<Item = u64>) -> Result<(), FieldError> {
    let sum = counts.fold(0, u64::saturating_add);
    if sum <= MAX_COUNT {
        return Ok(());
    }
    let found = format!("{sum} accesses");
    Err(FieldError::new(
        field,
        found,
        format!("at most {MAX_COUNT}"),
    ))
}

fn check_ascending<T>(
    field: &str,
    subject: &str,
    items: &[T],
    key: impl Fn(&T) -> u64,
) -> Result<(), FieldError> {
    match items
        .windows(2)
        .position(|pair| key(&pair[0]) >= key(&pair[1]))
    {
        None => Ok(()),
        Some(index) => {
            let (found, expected) = (
                format!("{subject} out of order"),
                format!("ascending {subject}"),
            );
            Err(FieldError::new(
                format!("{field}[{}]", index + 1),
                found,
                expected,
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{FactSource, SampledAccess, StreamPhase};

    fn full_profile_file() -> ProfileFile {
        let third = Estimate {
            value: 1.0 / 3.0,
            low: f64::MIN_POSITIVE,
            high: 0.1 + 0.3,
        };
        let mut file = ProfileFile::new(
            "gzip",
            ProfileSource {
                tool: "t".into(),
                kind: "trace".into(),
                ..Default::default()
            },
        );
        file.accesses = Some(u64::MAX);
        file.curves.push(StoredCurve {
            policy: "lru".into(),
            method: "exact".into(),
            line_bytes: 64,
            thread: None,
            points: vec![StoredCurvePoint {
                size_bytes: 1 << 20,
                miss_ratio: third,
                misses_per_kilo_instr: Some(third),
            }],
        });
        file.stack_positions.push(StackPositions {
            size_bytes: 1 << 20,
            line_bytes: 64,
            hits: vec![1, 2],
            misses: 3,
        });
        file.histograms.push(StoredHistogram {
            kind: "reuse-time".into(),
            line_bytes: 64,
            cold: 1,
            buckets: vec![(0, 5), (9, 1)],
        });
        let super_sets = vec![SuperSetCount {
            accesses: 1,
            misses: 0,
        }];
        file.activity.push(ActivityVector {
            level: CacheLevel::L2,
            start_instruction: 0,
            super_sets: super_sets.clone(),
        });
        let interval = StoredInterval {
            accesses: 9,
            instructions: None,
            misses: 1,
            phase: 0,
        };
        file.intervals = Some(StoredIntervals {
            size_bytes: 1,
            line_bytes: 64,
            every: vec![interval],
        });
        let mut part = vec![
            SampledAccess {
                line: u64::MAX,
                gap: 3,
                dependence: 2,
                site: std::num::NonZeroU16::new(7),
                ..SampledAccess::default()
            };
            cachemate_core::WARM_UP_ACCESSES
        ];
        part.push(SampledAccess {
            distance: Some(7),
            thread: 9,
            is_store: true,
            ..SampledAccess::default()
        });
        file.sample = Some(StreamSample {
            line_bytes: 64,
            page_bytes: 4096,
            footprint_lines: 3,
            has_dependences: true,
            phases: vec![StreamPhase {
                instructions: u64::MAX,
                cold_count: 1,
                core: Some(cachemate_core::InstructionTiming {
                    instructions: 3072,
                    cycles: [5, 4, 3, 2, 1],
                    mispredicted: 7,
                    unfetched: Some(u64::MAX),
                }),
                distances: vec![(0, 2), (7, MAX_COUNT - 3)],
                parts: vec![part],
            }],
        });
        let times = vec![(Some(1), 0.1), (None, 1e-300)];
        file.profile.locality.reuse_times = Some(Fact::new(times, FactSource::ExactTrace, 0));
        file.profile.locality.activity.insert(
            CacheLevel::L1Data,
            Fact::new(super_sets, FactSource::SuperSets, 3),
        );
        file.profile.rates.pcmr = Some(Fact::from_measurement(third, FactSource::CoRunRows, 7));
        file
    }

    /// Does every field read back bit for bit, is an existing file kept, and does an empty profile stay empty?
    #[test]
    fn a_written_profile_reads_back_equal_and_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.json");
        full_profile_file().write(&path, false).unwrap();
        assert_eq!(ProfileFile::read(&path).unwrap(), full_profile_file());
        assert!(matches!(
            full_profile_file().write(&path, false),
            Err(TraceError::Exists { .. })
        ));
        let empty = ProfileFile::new("x", ProfileSource::default());
        empty.write(&path, true).unwrap();
        assert_eq!(ProfileFile::read(&path).unwrap(), empty);
    }

    /// Is a malformed file rejected with its place, and an invalid value with its field?
    #[test]
    fn malformed_profiles_are_rejected_with_line_or_field() {
        let parse_error = |text: &str| {
            ProfileFile::parse(text.as_bytes(), "p.json")
                .unwrap_err()
                .to_string()
        };
        assert!(
            parse_error("{\n\"format\": 9}")
                .starts_with("p.json: the file: found profile format 9, expected format 2 to 3")
        );
        assert!(
            parse_error("{\"format\": 3,\n \"program\": 7}")
                .starts_with("p.json: line 2: found invalid type: integer")
        );
        assert!(parse_error("nonsense").starts_with("p.json: line 1: "));
        let mut file = full_profile_file();
        file.curves[0].points[0].miss_ratio.high = f64::NAN;
        let refused = file
            .write("never-written.json", false)
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains("curves[0].points[0].miss_ratio"),
            "{refused}"
        );
    }

    /// Are counts rejected with their field that sums would wrap, and lines whose size is no power of two?
    #[test]
    fn counts_that_wrap_and_impossible_lines_are_rejected_by_field() {
        let cases: [(&str, fn(&mut ProfileFile)); 6] = [
            ("histograms[0] = ", |file| file.histograms[0].cold = 1 << 60),
            ("histograms[0] = ", |file| {
                file.histograms[0].buckets = vec![(1, u64::MAX), (2, 5)]
            }),
            ("stack_positions[0] = ", |file| {
                file.stack_positions[0].hits = vec![u64::MAX, 5]
            }),
            ("curves[0].line_bytes = 0", |file| {
                file.curves[0].line_bytes = 0
            }),
            ("histograms[0].line_bytes = 48", |file| {
                file.histograms[0].line_bytes = 48
            }),
            ("stack_positions[0].line_bytes = 0", |file| {
                file.stack_positions[0].line_bytes = 0
            }),
        ];
        for (place, spoil) in cases {
            let mut file = full_profile_file();
            spoil(&mut file);
            let message = file.check("p.json").unwrap_err().to_string();
            assert!(message.contains(place), "{place}: {message}");
        }
    }

    /// Are impossible values rejected with their place: negative, huge, not finite, outside of their interval?
    #[test]
    fn impossible_values_are_rejected_with_their_place() {
        let estimate_near = |value: f64| Estimate {
            value,
            low: value - 1.0,
            high: value + 1.0,
        };
        let crossed = Estimate {
            value: 0.5,
            low: 0.6,
            high: 0.4,
        };

        let cases: [(&str, fn(&mut ProfileFile, Estimate), Estimate); 8] = [
            (
                "curves[0].points[0].miss_ratio.value",
                |f, e| f.curves[0].points[0].miss_ratio = e,
                estimate_near(-50.0),
            ),
            (
                "curves[0].points[0].miss_ratio",
                |f, e| f.curves[0].points[0].miss_ratio = e,
                crossed,
            ),
            (
                "curves[0].points[0].misses_per_kilo_instr.value",
                |f, e| f.curves[0].points[0].misses_per_kilo_instr = Some(e),
                estimate_near(1e308),
            ),
            (
                "profile.locality.misses_per_kilo_instr.L3[0]",
                |f, e| {
                    let curve = Fact::new(vec![(1, e)], FactSource::ExactTrace, 0);
                    f.profile
                        .locality
                        .misses_per_kilo_instr
                        .insert(CacheLevel::L3, curve);
                },
                crossed,
            ),
            (
                "profile.locality.stack_positions.value[0]",
                |f, e| {
                    f.profile.locality.stack_positions =
                        Some(Fact::new(vec![e.value], FactSource::ExactTrace, 0));
                },
                estimate_near(1e308),
            ),
            (
                "profile.locality.reuse_times.value[0]",
                |f, e| {
                    let times = vec![(None, e.value)];
                    f.profile.locality.reuse_times =
                        Some(Fact::new(times, FactSource::ExactTrace, 0));
                },
                estimate_near(-0.5),
            ),
            (
                "profile.rates.solo_instr_per_cycle.value",
                |f, e| {
                    f.profile.rates.solo_instr_per_cycle =
                        Some(Fact::from_measurement(e, FactSource::Counters, 0))
                },
                estimate_near(f64::NAN),
            ),
            (
                "profile.contention.sensitivity.value",
                |f, e| {
                    f.profile.contention.sensitivity =
                        Some(Fact::from_measurement(e, FactSource::Neighbor, 0))
                },
                estimate_near(-1.5),
            ),
        ];

        for (place, spoil, value) in cases {
            let mut file = full_profile_file();
            spoil(&mut file, value);
            let message = file
                .write("never-written.json", false)
                .unwrap_err()
                .to_string();
            assert!(
                message.contains(&format!("{place} = ")),
                "{place}: {message}"
            );
        }
        full_profile_file().check("p.json").unwrap();
        let mut file = full_profile_file();
        file.profile.contention.sensitivity = Some(Fact::from_measurement(
            estimate_near(-0.02),
            FactSource::Neighbor,
            0,
        ));
        file.check("p.json").unwrap();
    }
}
