//! A sample of a program's accesses in a profile file: numbers in JSON, and the accesses as compressed columns.
//!
//! Problem: a sample has up to 98 304 accesses, which would take megabytes of JSON. Method: the accesses of a stretch are
//! seven columns of bytes, compressed by zstd and written in base64; so are the counts by distance. Properties: an access takes some four bytes; every
//! length is checked before anything is allocated, so that a file cannot request unbounded memory.

use std::num::NonZeroU16;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cachemate_core::{
    InstructionTiming, MEASURED_ACCESSES, SampledAccess, StreamPhase, StreamSample,
    WARM_UP_ACCESSES,
};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::record_type::MAX_COUNT;

/// Maximum number of accesses of a sample.
const ACCESSES_LIMIT: usize = 1 << 20;
/// Maximum number of stretches of a sample; the sampler makes up to eight.
const PHASES_LIMIT: usize = 64;
/// Maximum number of distances of a stretch.
const DISTANCES_LIMIT: usize = 1 << 12;
const COLUMN_COUNT: usize = 7;
/// Maximum bytes of an access in all columns: three numbers of up to ten bytes, a thread of five, and four more.
const MAX_ACCESS_BYTES: usize = 3 * 10 + 5 + 4;
/// The accesses are written once and read often.
const COMPRESSION_LEVEL: i32 = 12;

const STORE_FLAG: u8 = 1;
const COLD_FLAG: u8 = 2;
const BRANCH_FLAG: u8 = 4;

#[derive(Serialize, Deserialize)]
struct StoredSample {
    line_bytes: u32,
    page_bytes: u32,
    footprint_lines: u64,
    has_dependences: bool,
    phases: Vec<StoredPhase>,
}

#[derive(Serialize, Deserialize)]
struct StoredPhase {
    instructions: u64,
    cold: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    core: Option<InstructionTiming>,
    /// Distances and their counts, in base64.
    distances: String,
    /// Accesses of each part.
    parts: Vec<usize>,
    /// The columns of all accesses, in base64.
    accesses: String,
}

pub(crate) fn serialize<S: Serializer>(
    sample: &Option<StreamSample>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let Some(sample) = sample else {
        return serializer.serialize_none();
    };
    let phases = sample.phases.iter().map(|phase| {
        Ok(StoredPhase {
            instructions: phase.instructions,
            cold: phase.cold_count,
            core: phase.core,
            distances: pack(&encode_distances(&phase.distances))?,
            parts: phase.parts.iter().map(Vec::len).collect(),
            accesses: pack(&encode_parts(&phase.parts))?,
        })
    });

    let phases: Result<Vec<StoredPhase>, std::io::Error> = phases.collect();
    let stored = StoredSample {
        line_bytes: sample.line_bytes,
        page_bytes: sample.page_bytes,
        footprint_lines: sample.footprint_lines,
        has_dependences: sample.has_dependences,
        phases: phases.map_err(serde::ser::Error::custom)?,
    };
    stored.serialize(serializer)
}

/// Reads a sample and checks it.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<StreamSample>, D::Error> {
    let Some(stored) = Option::<StoredSample>::deserialize(deserializer)? else {
        return Ok(None);
    };
    decode_sample(stored).map(Some).map_err(D::Error::custom)
}

fn decode_sample(stored: StoredSample) -> Result<StreamSample, String> {
    let (line_bytes, page_bytes) = (stored.line_bytes, stored.page_bytes);
    if !line_bytes.is_power_of_two() || !page_bytes.is_power_of_two() || page_bytes < line_bytes {
        return Err(format!(
            "sample: found lines of {line_bytes} bytes and pages of {page_bytes}, expected powers of two, pages no smaller \
             than lines"
        ));
    }

    let access_count = stored
        .phases
        .iter()
        .flat_map(|phase| &phase.parts)
        .fold(0usize, |sum, count| sum.saturating_add(*count));
    if access_count > ACCESSES_LIMIT {
        return Err(format!(
            "sample: found {access_count} accesses, expected at most {ACCESSES_LIMIT}"
        ));
    }
    if stored.phases.len() > PHASES_LIMIT {
        let found = stored.phases.len();
        return Err(format!(
            "sample: found {found} phases, expected at most {PHASES_LIMIT}"
        ));
    }

    let mut phases = Vec::with_capacity(stored.phases.len());
    for (index, phase) in stored.phases.into_iter().enumerate() {
        let phase =
            decode_phase(&phase).map_err(|problem| format!("sample.phases[{index}]: {problem}"))?;
        phases.push(phase);
    }
    Ok(StreamSample {
        line_bytes,
        page_bytes,
        footprint_lines: stored.footprint_lines,
        has_dependences: stored.has_dependences,
        phases,
    })
}

fn decode_phase(phase: &StoredPhase) -> Result<StreamPhase, String> {
    let part_lengths = WARM_UP_ACCESSES + 1..=WARM_UP_ACCESSES + MEASURED_ACCESSES;
    let is_odd = |count: &&usize| !part_lengths.contains(count);
    if let Some(found) = phase.parts.iter().find(is_odd) {
        let (least, most) = part_lengths.into_inner();
        return Err(format!(
            "found a part of {found} accesses, expected {least} to {most}"
        ));
    }

    let access_count: usize = phase.parts.iter().sum();
    let raw_limit = 4 * COLUMN_COUNT + MAX_ACCESS_BYTES * access_count;
    let columns = unpack(&phase.accesses, raw_limit, "accesses")?;
    let parts = decode_parts(&columns, &phase.parts).ok_or_else(|| {
        format!(
            "accesses: found columns that do not fit, expected those of {access_count} accesses"
        )
    })?;

    let distances = unpack(&phase.distances, 20 * DISTANCES_LIMIT, "distances")?;
    let distances = decode_distances(&distances).ok_or_else(|| {
        format!("distances: found pairs out of order or cut off, expected at most {DISTANCES_LIMIT} of ascending bounds")
    })?;
    let counts = distances.iter().map(|(_, count)| *count);
    let accesses = counts.fold(phase.cold, u64::saturating_add);
    if accesses > MAX_COUNT {
        return Err(format!(
            "distances: found {accesses} accesses, expected at most {MAX_COUNT}"
        ));
    }
    Ok(StreamPhase {
        instructions: phase.instructions,
        cold_count: phase.cold,
        core: phase.core,
        distances,
        parts,
    })
}

fn pack(raw: &[u8]) -> std::io::Result<String> {
    Ok(STANDARD.encode(zstd::bulk::compress(raw, COMPRESSION_LEVEL)?))
}

fn unpack(text: &str, raw_limit: usize, field: &str) -> Result<Vec<u8>, String> {
    let packed = STANDARD
        .decode(text)
        .map_err(|error| format!("{field}: {error}, expected base64"))?;
    zstd::bulk::decompress(&packed, raw_limit)
        .map_err(|error| format!("{field}: {error}, expected at most {raw_limit} bytes by zstd"))
}

fn encode_distances(distances: &[(u64, u64)]) -> Vec<u8> {
    let mut raw = Vec::new();
    for &(bound, count) in distances {
        put_varint(&mut raw, bound);
        put_varint(&mut raw, count);
    }
    raw
}

fn decode_distances(raw: &[u8]) -> Option<Vec<(u64, u64)>> {
    let mut reader = ColumnReader { bytes: raw };
    let mut distances = Vec::new();
    while !reader.bytes.is_empty() {
        distances.push((reader.varint()?, reader.varint()?));
    }
    let is_valid = distances.len() <= DISTANCES_LIMIT && distances.is_sorted_by(|a, b| a.0 < b.0);
    is_valid.then_some(distances)
}

fn put_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

fn encode_parts(parts: &[Vec<SampledAccess>]) -> Vec<u8> {
    let mut columns: [Vec<u8>; COLUMN_COUNT] = Default::default();
    let [flags, gaps, lines, distances, dependences, sites, threads] = &mut columns;

    for part in parts {
        let mut previous_line = 0u64;
        for access in part {
            let store_flag = if access.is_store { STORE_FLAG } else { 0 };
            let cold_flag = if access.distance.is_none() {
                COLD_FLAG
            } else {
                0
            };
            let branch_flag = if access.delays_branch { BRANCH_FLAG } else { 0 };
            flags.push(store_flag | cold_flag | branch_flag);
            put_varint(gaps, access.gap);
            let difference = access.line.wrapping_sub(previous_line);
            put_varint(lines, difference << 1 ^ (difference as i64 >> 63) as u64);
            previous_line = access.line;
            if let Some(distance) = access.distance {
                put_varint(distances, distance);
            }

            dependences.push(access.dependence);
            let site = access.site.map_or(0, NonZeroU16::get);
            sites.extend_from_slice(&site.to_le_bytes());
            put_varint(threads, u64::from(access.thread));
        }
    }

    let mut raw = Vec::new();
    for column in &columns {
        raw.extend_from_slice(&(column.len() as u32).to_le_bytes());
    }
    for column in &columns {
        raw.extend_from_slice(column);
    }
    raw
}

/// Reads one column from its start.
struct ColumnReader<'a> {
    bytes: &'a [u8],
}

impl ColumnReader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(first)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }
}

/// The parts with these numbers of accesses; `None` unless the columns fit exactly.
fn decode_parts(raw: &[u8], part_lengths: &[usize]) -> Option<Vec<Vec<SampledAccess>>> {
    let (heads, mut rest) = raw.split_at_checked(4 * COLUMN_COUNT)?;
    let mut columns = Vec::with_capacity(COLUMN_COUNT);
    for head in heads.chunks_exact(4) {
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let (bytes, later_columns) = rest.split_at_checked(length)?;
        columns.push(ColumnReader { bytes });
        rest = later_columns;
    }
    let [flags, gaps, lines, distances, dependences, sites, threads] = columns.as_mut_slice()
    else {
        return None;
    };

    let mut parts = Vec::with_capacity(part_lengths.len());
    for &length in part_lengths {
        let mut part = Vec::with_capacity(length);
        let mut line = 0u64;
        for _ in 0..length {
            let flag = flags.byte()?;
            let coded_line = lines.varint()?;
            line = line.wrapping_add(coded_line >> 1 ^ (coded_line & 1).wrapping_neg());
            let distance = if flag & COLD_FLAG == 0 {
                Some(distances.varint()?)
            } else {
                None
            };

            let site = u16::from_le_bytes([sites.byte()?, sites.byte()?]);
            part.push(SampledAccess {
                line,
                distance,
                gap: gaps.varint()?,
                thread: u32::try_from(threads.varint()?).ok()?,
                is_store: flag & STORE_FLAG != 0,
                dependence: dependences.byte()?,
                site: NonZeroU16::new(site),
                delays_branch: flag & BRANCH_FLAG != 0,
            });
        }
        parts.push(part);
    }
    let is_complete = rest.is_empty() && columns.iter().all(|column| column.bytes.is_empty());
    is_complete.then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn some_accesses() -> impl Strategy<Value = Vec<SampledAccess>> {
        let access = (
            any::<u64>(),
            proptest::option::of(any::<u64>()),
            any::<u64>(),
            any::<u32>(),
            any::<bool>(),
            any::<u8>(),
            any::<u16>(),
            any::<bool>(),
        )
            .prop_map(
                |(line, distance, gap, thread, is_store, dependence, site, delays_branch)| {
                    SampledAccess {
                        line,
                        distance,
                        gap,
                        thread,
                        is_store,
                        dependence,
                        site: NonZeroU16::new(site),
                        delays_branch,
                    }
                },
            );
        proptest::collection::vec(access, 0..20)
    }

    proptest! {
        /// Does every sample read back equal, and does no changed byte of its columns panic or give more accesses?
        #[test]
        fn samples_read_back_and_damage_never_panics(
            first in some_accesses(), second in some_accesses(), place in any::<prop::sample::Index>(), value in any::<u8>()
        ) {
            let parts = vec![first, second];
            let lengths: Vec<usize> = parts.iter().map(Vec::len).collect();
            let mut raw = encode_parts(&parts);
            prop_assert_eq!(decode_parts(&raw, &lengths), Some(parts));
            let index = place.index(raw.len());
            raw[index] = value;
            decode_parts(&raw, &lengths);
            prop_assert_eq!(decode_parts(&raw[..raw.len() - 1], &lengths), None);
        }
    }

    fn stored_sample(phases: impl IntoIterator<Item = StoredPhase>) -> StoredSample {
        StoredSample {
            line_bytes: 64,
            page_bytes: 4096,
            footprint_lines: 1,
            has_dependences: false,
            phases: phases.into_iter().collect(),
        }
    }

    fn stored_phase(parts: Vec<usize>) -> StoredPhase {
        StoredPhase {
            instructions: 1,
            cold: 0,
            core: None,
            distances: String::new(),
            parts,
            accesses: String::new(),
        }
    }

    /// Is a sample refused before anything is unpacked if its lengths promise too much, or parts that measure nothing?
    #[test]
    fn samples_of_impossible_lengths_are_refused() {
        let problem = |parts| decode_sample(stored_sample([stored_phase(parts)])).unwrap_err();
        assert!(problem(vec![usize::MAX, 5]).contains("expected at most 1048576"));
        assert!(problem(vec![385]).contains("found a part of 385 accesses"));
        assert!(problem(vec![384]).contains("sample.phases[0]: accesses: "));
        for parts in [vec![0; 1000], vec![128]] {
            assert!(problem(parts).contains("expected 129 to 384"));
        }
        let phases = (0..65).map(|_| stored_phase(Vec::new()));
        let problem = decode_sample(stored_sample(phases)).unwrap_err();
        assert!(problem.contains("found 65 phases, expected at most 64"));
    }

    /// Is a stretch refused whose accesses do not add up to less than 2^53, which sums of misses would wrap?
    #[test]
    fn stretches_of_too_many_accesses_are_refused() {
        let problem_of = |cold: u64, count: u64| {
            let phase = StoredPhase {
                cold,
                distances: pack(&encode_distances(&[(0, count), (1, 5)])).unwrap(),
                accesses: pack(&encode_parts(&[])).unwrap(),
                ..stored_phase(Vec::new())
            };
            decode_sample(stored_sample([phase])).err()
        };
        assert_eq!(problem_of(1, 3), None);
        for (cold, count) in [(0, u64::MAX), (u64::MAX, 0), (1 << 52, 1 << 52)] {
            assert!(
                problem_of(cold, count).is_some_and(|problem| problem.contains("distances: found")),
                "{cold} {count}"
            );
        }
    }
}
