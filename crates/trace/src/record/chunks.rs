//! The stream of the Valgrind tool: chunks of varints, from many processes through one FIFO
//! (`recorders/valgrind/README.md` describes them).

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use cachemate_core::{BranchLoads, CoreSamples, CoreStretch, InstructionTiming};

use crate::cmt::{u32_at, u64_at};
use crate::record_type::MAX_THREADS;
use crate::{AccessRecord, FilePosition, ProcessTotals, ThreadTotals, TraceError, TraceTotals};

const CHUNK_MAGIC: u32 = 0x344b_4d43;
pub(super) const HEADER_BYTES: usize = 80;
const MAX_PAYLOAD_BYTES: usize = 4096 - HEADER_BYTES;
/// Bytes of a record: two numbers, the dependence and the site.
const MIN_RECORD_BYTES: usize = 2 + 1 + 2;
const FLAG_START: u32 = 1;
const FLAG_END: u32 = 2;
const FLAG_MAX: u32 = 4;
const FLAG_BURST: u32 = 8;
const FLAG_BRANCH_LOADS: u32 = 16;
/// Marks a chunk of the process rather than of a thread.
const NO_THREAD: u32 = u32::MAX;
/// The address bits from here on contain the process.
pub(super) const PROCESS_SHIFT: u32 = 48;
const MAX_PROCESSES: usize = 1 << 16;
const MAX_BURSTS: usize = 1 << 20;
/// Stretches of core timing; if there are twice as many, neighbors merge.
const CORE_STRETCHES: usize = 64;

/// Turns chunks into records with dense threads and processes, and computes totals.
#[derive(Default)]
pub(super) struct ChunkDecoder {
    /// Bytes of a chunk that has not arrived completely.
    pending_bytes: Vec<u8>,
    offset: u64,
    process_of_pid: BTreeMap<u32, u32>,
    thread_numbers: BTreeMap<(u32, u32), u32>,
    pub(super) processes: Vec<ProcessTotals>,
    threads: Vec<ThreadTotals>,
    record_count: u64,
    /// Number of the first record of each burst.
    bursts: Vec<u64>,
    core: Vec<CoreStretch>,
    /// Loads by site, and those of them for which a branch waited.
    branch_loads: BTreeMap<NonZeroU16, (u64, u64)>,
    pub(super) is_max_reached: bool,
    /// Whether a process has reported its end. A process that replaced itself by another program does not.
    pub(super) has_reported_end: bool,
    follows_children: bool,
}

struct ChunkHeader {
    payload_bytes: usize,
    pid: u32,
    thread: u32,
    instructions: u64,
    accesses: u64,
    records: u32,
    flags: u32,
    os_thread: u32,
    core: InstructionTiming,
}

impl ChunkDecoder {
    /// Builds a decoder. With `follows_children`, addresses contain their process.
    pub(super) fn new(follows_children: bool) -> Self {
        ChunkDecoder {
            follows_children,
            ..Default::default()
        }
    }

    fn chunk_error<T>(&self, found: String, expected: &str) -> Result<T, TraceError> {
        Err(TraceError::format_error(
            "the recorder's stream",
            FilePosition::Byte(self.offset),
            found,
            expected,
        ))
    }

    /// Appends the records of every complete chunk in the earlier remainder and `bytes`.
    pub(super) fn decode(
        &mut self,
        bytes: &[u8],
        records: &mut Vec<AccessRecord>,
    ) -> Result<(), TraceError> {
        self.pending_bytes.extend_from_slice(bytes);
        let unread_bytes = std::mem::take(&mut self.pending_bytes);
        let mut position = 0;
        while unread_bytes.len() - position >= HEADER_BYTES {
            let head = self.parse_header(&unread_bytes[position..position + HEADER_BYTES])?;
            let end = position + HEADER_BYTES + head.payload_bytes;
            let Some(payload) = unread_bytes.get(position + HEADER_BYTES..end) else {
                break;
            };
            self.decode_chunk(&head, payload, records)?;
            self.offset += (end - position) as u64;
            position = end;
        }

        self.pending_bytes = unread_bytes;
        self.pending_bytes.drain(..position);
        Ok(())
    }

    fn parse_header(&self, bytes: &[u8]) -> Result<ChunkHeader, TraceError> {
        if u32_at(bytes, 0) != CHUNK_MAGIC {
            return self.chunk_error(
                format!("'{}'", bytes[..4].escape_ascii()),
                "'CMK4', a chunk",
            );
        }
        let head = ChunkHeader {
            payload_bytes: u32_at(bytes, 4) as usize,
            pid: u32_at(bytes, 8),
            thread: u32_at(bytes, 12),
            instructions: u64_at(bytes, 16),
            accesses: u64_at(bytes, 24),
            records: u32_at(bytes, 32),
            flags: u32_at(bytes, 36),
            os_thread: u32_at(bytes, 40),
            core: InstructionTiming {
                instructions: u64::from(u32_at(bytes, 44)),
                cycles: std::array::from_fn(|window| u64::from(u32_at(bytes, 48 + 4 * window))),
                mispredicted: u64::from(u32_at(bytes, 68)),
                unfetched: Some(u64::from(u32_at(bytes, 72))),
            },
        };
        if head.payload_bytes > MAX_PAYLOAD_BYTES
            || head.records as usize * MIN_RECORD_BYTES > head.payload_bytes
        {
            let found = format!("{} records in {} bytes", head.records, head.payload_bytes);
            let expected =
                format!("at most {MAX_PAYLOAD_BYTES} bytes, {MIN_RECORD_BYTES} or more a record");
            return self.chunk_error(found, &expected);
        }
        Ok(head)
    }

    fn decode_chunk(
        &mut self,
        head: &ChunkHeader,
        payload: &[u8],
        records: &mut Vec<AccessRecord>,
    ) -> Result<(), TraceError> {
        if head.flags & FLAG_START != 0 {
            return self.add_process(head.pid, payload);
        }
        self.is_max_reached |= head.flags & FLAG_MAX != 0;
        self.has_reported_end |= head.flags & FLAG_END != 0;
        let Some(&process) = self.process_of_pid.get(&head.pid) else {
            return self.chunk_error(
                format!("a chunk of process {}", head.pid),
                "a process that has started",
            );
        };
        if head.flags & FLAG_BURST != 0 {
            if self.bursts.len() == MAX_BURSTS {
                return self.chunk_error(
                    "one burst more".into(),
                    &format!("at most {MAX_BURSTS} bursts in one recording"),
                );
            }
            self.bursts.push(self.record_count);
        }
        if head.flags & FLAG_BRANCH_LOADS != 0 {
            return self.add_branch_loads(payload);
        }
        if head.thread == NO_THREAD {
            return Ok(());
        }
        let thread = self.number_thread(process, head.thread)?;
        let totals = &mut self.threads[thread as usize];
        (totals.instructions, totals.accesses) = (Some(head.instructions), Some(head.accesses));
        totals.os_thread = totals
            .os_thread
            .or((head.os_thread != 0).then_some(head.os_thread));
        self.decode_records(head.records, process, thread, payload, records)?;
        self.add_core_timing(head.core);
        Ok(())
    }

    /// Adds what the records up to here have told, so that a recording of any length has a bounded number of stretches.
    fn add_core_timing(&mut self, timing: InstructionTiming) {
        if timing.instructions == 0 {
            return;
        }
        if self.core.len() == 2 * CORE_STRETCHES {
            let merge = |pair: &[CoreStretch]| {
                let mut merged = pair[1];
                merged.timing.add(&pair[0].timing);
                merged
            };
            self.core = self.core.chunks_exact(2).map(merge).collect();
        }
        self.core.push(CoreStretch {
            end_record: self.record_count,
            timing,
        });
    }

    fn add_branch_loads(&mut self, payload: &[u8]) -> Result<(), TraceError> {
        let mut remaining_bytes = payload;
        while !remaining_bytes.is_empty() {
            let mut next_number = || read_varint(&mut remaining_bytes);
            let numbers = (next_number(), next_number(), next_number());
            let (Some(site), Some(loads), Some(waited)) = numbers else {
                return self.chunk_error("loads that their chunk cuts off".into(), "three numbers");
            };
            let Some(site) = u16::try_from(site).ok().and_then(NonZeroU16::new) else {
                return self.chunk_error(format!("loads of site {site}"), "1 to 65535");
            };
            if waited > loads {
                let found = format!("{waited} loads of {loads}");
                return self.chunk_error(found, "branches that wait for no more than all");
            }

            let (all_loads, all_waited) = self.branch_loads.entry(site).or_default();
            *all_loads = all_loads.saturating_add(loads);
            *all_waited = all_waited.saturating_add(waited);
        }

        Ok(())
    }

    fn add_process(&mut self, pid: u32, payload: &[u8]) -> Result<(), TraceError> {
        if self.processes.len() == MAX_PROCESSES {
            return self.chunk_error(
                "one process more".into(),
                "at most 65536 processes in one recording",
            );
        }
        let process = self.processes.len() as u32;
        let words = payload
            .strip_suffix(&[0])
            .unwrap_or(payload)
            .split(|&byte| byte == 0);
        let command = words
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        self.process_of_pid.insert(pid, process);
        self.processes.push(ProcessTotals {
            process,
            pid: Some(pid),
            command,
        });
        Ok(())
    }

    fn number_thread(&mut self, process: u32, thread: u32) -> Result<u32, TraceError> {
        let next_number = self.threads.len() as u32;
        if let Some(&known_number) = self.thread_numbers.get(&(process, thread)) {
            return Ok(known_number);
        }
        if next_number as usize == MAX_THREADS {
            return self.chunk_error(
                "one thread more".into(),
                "at most 1048576 threads in one recording",
            );
        }
        self.thread_numbers.insert((process, thread), next_number);
        self.threads.push(ThreadTotals {
            thread: next_number,
            process,
            created: Some(thread),
            ..Default::default()
        });
        Ok(next_number)
    }

    fn decode_records(
        &mut self,
        count: u32,
        process: u32,
        thread: u32,
        payload: &[u8],
        records: &mut Vec<AccessRecord>,
    ) -> Result<(), TraceError> {
        let mut remaining_bytes = payload;
        let mut address = 0u64;
        let process_bits = if self.follows_children {
            u64::from(process) << PROCESS_SHIFT
        } else {
            0
        };
        let mask = if self.follows_children {
            (1 << PROCESS_SHIFT) - 1
        } else {
            u64::MAX
        };

        for _ in 0..count {
            let record = (|| {
                let head = read_varint(&mut remaining_bytes)?;
                let size = match head >> 1 & 7 {
                    7 => u16::try_from(read_varint(&mut remaining_bytes)?).ok()?,
                    code => 1 << code,
                };
                let difference = read_varint(&mut remaining_bytes)?;
                address = address.wrapping_add(difference >> 1 ^ (difference & 1).wrapping_neg());
                let store = head & 1 != 0;
                let (&[dependence, low_site, high_site], later_bytes) =
                    remaining_bytes.split_first_chunk()?;
                remaining_bytes = later_bytes;

                Some(AccessRecord {
                    address: address & mask | process_bits,
                    gap: head >> 4,
                    thread,
                    size,
                    store,
                    dependence,
                    site: NonZeroU16::new(u16::from_le_bytes([low_site, high_site])),
                })
            })();

            match record {
                Some(record) => records.push(record),
                None => {
                    return self
                        .chunk_error("a record that its chunk cuts off".into(), "whole records");
                }
            }
        }

        self.record_count += u64::from(count);
        if remaining_bytes.is_empty() {
            Ok(())
        } else {
            self.chunk_error(
                format!("{} bytes behind the records", remaining_bytes.len()),
                "none",
            )
        }
    }

    /// Threads whose accesses are unknown do not count.
    pub(super) fn accesses(&self) -> u64 {
        self.threads
            .iter()
            .filter_map(|thread| thread.accesses)
            .fold(0, u64::saturating_add)
    }

    /// The totals so far, without incomplete chunks.
    pub(super) fn totals(&self) -> TraceTotals {
        let sum_over_threads = |value: fn(&ThreadTotals) -> Option<u64>| {
            Some(
                self.threads
                    .iter()
                    .filter_map(value)
                    .fold(0u64, u64::saturating_add),
            )
        };

        TraceTotals {
            program_accesses: sum_over_threads(|thread| thread.accesses),
            instructions: sum_over_threads(|thread| thread.instructions),
            threads: self.threads.clone(),
            processes: self.processes.clone(),
            bursts: self.bursts.clone(),
            core: CoreSamples {
                stretches: self.core.clone(),
                branch_loads: self.branch_loads.iter().map(loads_of_site).collect(),
            },
            ..TraceTotals::default()
        }
    }
}

fn loads_of_site((&site, &(loads, waited)): (&NonZeroU16, &(u64, u64))) -> BranchLoads {
    BranchLoads {
        site,
        loads,
        waited,
    }
}

fn read_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, remaining) = bytes.split_first()?;
        *bytes = remaining;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OS_THREAD: u32 = 4711;
    /// Instructions, cycles by window, mispredicted branches and misses of code of each chunk, and what fills the header.
    const CORE_WORDS: [u32; 9] = [3072, 900, 800, 700, 600, 500, 9, 4, 0];

    fn chunk_bytes(pid: u32, thread: u32, records: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [CHUNK_MAGIC, payload.len() as u32, pid, thread] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for long in [100u64, 10] {
            bytes.extend_from_slice(&long.to_le_bytes());
        }
        for word in [records, flags, OS_THREAD].into_iter().chain(CORE_WORDS) {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(payload);
        bytes
    }

    fn sample_stream() -> Vec<u8> {
        [
            chunk_bytes(7, NO_THREAD, 0, FLAG_START, b"/bin/a\0x\0"),
            // gap 2, 8 bytes, store, +64, no dependence, site 0x0105; then gap 0, size 3 spelled out, load, -1, on the record
            // before, no site.
            chunk_bytes(
                7,
                0,
                2,
                0,
                &[2 << 4 | 3 << 1 | 1, 0x80, 1, 0, 5, 1, 7 << 1, 3, 1, 1, 0, 0],
            ),
            chunk_bytes(7, NO_THREAD, 0, FLAG_START, b"/bin/b\0"),
            chunk_bytes(7, 3, 1, 0, &[1 << 4, 2, 0, 0, 0]),
            chunk_bytes(7, NO_THREAD, 0, FLAG_BRANCH_LOADS, &[5, 10, 4, 9, 2, 2]),
            chunk_bytes(7, NO_THREAD, 0, FLAG_BRANCH_LOADS, &[5, 2, 0]),
            chunk_bytes(7, 3, 0, FLAG_MAX, &[]),
        ]
        .concat()
    }

    /// Are records, threads and processes decoded, with a reused process id as a separate process?
    #[test]
    fn a_stream_decodes_and_a_reused_pid_is_a_new_process() {
        let mut decoder = ChunkDecoder::new(true);
        let mut records = Vec::new();
        decoder.decode(&sample_stream(), &mut records).unwrap();
        let second = 1 << PROCESS_SHIFT;

        assert_eq!(
            records,
            [
                AccessRecord {
                    address: 64,
                    gap: 2,
                    thread: 0,
                    size: 8,
                    store: true,
                    dependence: 0,
                    site: NonZeroU16::new(0x0105),
                },
                AccessRecord {
                    address: 63,
                    gap: 0,
                    thread: 0,
                    size: 3,
                    store: false,
                    dependence: 1,
                    site: None,
                },
                AccessRecord {
                    address: second + 1,
                    gap: 1,
                    thread: 1,
                    size: 1,
                    ..AccessRecord::default()
                },
            ]
        );
        let totals = decoder.totals();
        assert_eq!(
            (totals.instructions, totals.program_accesses),
            (Some(200), Some(20))
        );
        assert_eq!(totals.processes[0].command, ["/bin/a", "x"]);
        let timing = InstructionTiming {
            instructions: 3072,
            cycles: [900, 800, 700, 600, 500],
            mispredicted: 9,
            unfetched: Some(4),
        };
        let ends = [2, 3, 3];
        assert_eq!(
            totals.core.stretches,
            ends.map(|end_record| CoreStretch { end_record, timing })
        );
        let of_site = |site| NonZeroU16::new(site).unwrap();
        let shares = [5, 9, 7].map(|site| totals.core.waited_share(of_site(site)));
        assert_eq!(shares, [4.0 / 12.0, 1.0, 0.0]);
        assert!(decoder.is_max_reached);
        let thread_ids: Vec<_> = totals
            .threads
            .iter()
            .map(|thread| (thread.created, thread.os_thread))
            .collect();
        assert_eq!(
            thread_ids,
            [(Some(0), Some(OS_THREAD)), (Some(3), Some(OS_THREAD))]
        );
    }

    /// Do stretches of core timing merge when there are many, without losing any?
    #[test]
    fn stretches_of_core_timing_merge_without_loss() {
        let mut decoder = ChunkDecoder::new(false);
        for chunk in 1..=1000 {
            decoder.record_count = 10 * chunk;
            decoder.add_core_timing(InstructionTiming {
                instructions: 3072,
                cycles: [5 * chunk; 5],
                mispredicted: chunk,
                unfetched: Some(2 * chunk),
            });
        }
        let stretches = decoder.totals().core.stretches;
        assert!(stretches.len() <= 2 * CORE_STRETCHES, "{}", stretches.len());
        assert!(stretches.is_sorted_by_key(|stretch| stretch.end_record));
        assert_eq!(
            stretches.last().map(|stretch| stretch.end_record),
            Some(10_000)
        );
        let mut sum = InstructionTiming::default();
        stretches
            .iter()
            .for_each(|stretch| sum.add(&stretch.timing));
        let all = 1000 * 1001 / 2;
        assert_eq!(
            (
                sum.instructions,
                sum.cycles,
                sum.mispredicted,
                sum.unfetched
            ),
            (3_072_000, [5 * all; 5], all, Some(2 * all))
        );
    }

    proptest! {
        /// Is the result independent of the division into reads, and does no change cause a panic?
        #[test]
        fn pieces_decode_as_the_whole_and_damage_never_panics(
            cuts in prop::collection::vec(1usize..40, 1..20), at in any::<prop::sample::Index>(), value in any::<u8>()
        ) {
            let mut bytes = sample_stream();
            let (mut whole, mut pieces) = (Vec::new(), Vec::new());
            ChunkDecoder::new(true).decode(&bytes, &mut whole).unwrap();
            let mut decoder = ChunkDecoder::new(true);
            let (mut rest, mut cut) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(*cut.next().unwrap_or(&1).min(&rest.len()));
                decoder.decode(piece, &mut pieces).unwrap();
                rest = after;
            }
            prop_assert_eq!(whole, pieces);
            let index = at.index(bytes.len());
            bytes[index] = value;
            ChunkDecoder::new(false).decode(&bytes, &mut Vec::new()).ok();
        }
    }
}
