//! The columns of one block.
//!
//! Uncompressed layout, little-endian: seven u32 (threads T, runs R, wide sizes W, gap bytes G, address bytes A, dependence
//! bytes D, site bytes S); then T x u32 thread ids; R x (u32 index of the thread, u32 records); N control bytes; N size
//! bytes; W x u16; G bytes of gaps; A bytes of addresses; D = N dependences, or none if all are 0; S = 2 N, a u16 site each,
//! or none if no site is known. Version 1 ends after the addresses, and has five u32. A control byte contains the length of the record's address difference (low nibble, 0-8)
//! and of its gap (high nibble, 0-8), so that decoding needs no loop over continuation bits. The difference is to the
//! thread's previous address in the block (0 at its start), in zigzag encoding.

use std::collections::BTreeMap;
use std::num::NonZeroU16;

use super::{BLOCK_RECORDS, u32_at, u64_at};
use crate::AccessRecord;

/// Bytes of the lengths that come first, also in version 1.
const COUNTS_BYTES: usize = 28;
const VERSION_1_COUNTS_BYTES: usize = 20;
/// Marks a size that does not fit the low seven bits, and is in the wide column.
const WIDE_SIZE: u8 = 127;
const STORE_BIT: u8 = 0x80;
/// Number of zero bytes after the columns in memory, because decoding reads eight bytes at a time.
pub(super) const PADDING_BYTES: usize = 8;

/// Maximum uncompressed size of a block with the full number of records.
pub(super) const MAX_RAW_BYTES: usize =
    COUNTS_BYTES + BLOCK_RECORDS * (4 + 8 + 1 + 1 + 2 + 8 + 8 + 1 + 2);

fn zigzag(difference: u64) -> u64 {
    (difference << 1) ^ ((difference as i64 >> 63) as u64)
}
fn unzigzag(coded: u64) -> u64 {
    (coded >> 1) ^ (coded & 1).wrapping_neg()
}
fn byte_length(value: u64) -> usize {
    8 - value.leading_zeros() as usize / 8
}
fn low_bytes_mask(length: usize) -> u64 {
    if length == 8 {
        u64::MAX
    } else {
        (1 << (8 * length)) - 1
    }
}

/// Column buffers of the block being written; reused for the next block.
#[derive(Default)]
pub(super) struct Columns {
    threads: Vec<(u32, u64)>,
    thread_indices: BTreeMap<u32, usize>,
    runs: Vec<(u32, u32)>,
    control: Vec<u8>,
    sizes: Vec<u8>,
    wide_sizes: Vec<u8>,
    gaps: Vec<u8>,
    addresses: Vec<u8>,
    dependences: Vec<u8>,
    sites: Vec<u8>,
}

impl Columns {
    /// The thread and the number of records of each run in the pending block; a thread may have several runs.
    pub(super) fn records_by_run(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.runs
            .iter()
            .map(|&(index, records)| (self.threads[index as usize].0, u64::from(records)))
    }

    pub(super) fn len(&self) -> usize {
        self.control.len()
    }

    fn ensure_run(&mut self, thread: u32) -> usize {
        if let Some(&(index, _)) = self.runs.last()
            && self.threads[index as usize].0 == thread
        {
            return index as usize;
        }
        let next_index = self.threads.len();
        let index = *self.thread_indices.entry(thread).or_insert(next_index);
        if index == next_index {
            self.threads.push((thread, 0));
        }
        self.runs.push((index as u32, 0));
        index
    }

    pub(super) fn push(&mut self, record: &AccessRecord) {
        let index = self.ensure_run(record.thread);
        if let Some(run) = self.runs.last_mut() {
            run.1 += 1;
        }

        let difference = zigzag(record.address.wrapping_sub(self.threads[index].1));
        self.threads[index].1 = record.address;
        let (address_bytes, gap_bytes) = (byte_length(difference), byte_length(record.gap));
        self.control.push((address_bytes | gap_bytes << 4) as u8);
        self.addresses
            .extend_from_slice(&difference.to_le_bytes()[..address_bytes]);
        self.gaps
            .extend_from_slice(&record.gap.to_le_bytes()[..gap_bytes]);
        self.dependences.push(record.dependence);
        let site = record.site.map_or(0, NonZeroU16::get);
        self.sites.extend_from_slice(&site.to_le_bytes());
        let store_flag = if record.store { STORE_BIT } else { 0 };
        if record.size < u16::from(WIDE_SIZE) {
            self.sizes.push(record.size as u8 | store_flag);
        } else {
            self.sizes.push(WIDE_SIZE | store_flag);
            self.wide_sizes
                .extend_from_slice(&record.size.to_le_bytes());
        }
    }

    /// Writes the columns to `raw`, and empties them.
    pub(super) fn take_columns(&mut self, raw: &mut Vec<u8>) {
        raw.clear();
        for column in [&mut self.dependences, &mut self.sites] {
            if column.iter().all(|byte| *byte == 0) {
                column.clear();
            }
        }

        let counts = [
            self.threads.len(),
            self.runs.len(),
            self.wide_sizes.len() / 2,
            self.gaps.len(),
            self.addresses.len(),
            self.dependences.len(),
            self.sites.len(),
        ];
        counts
            .iter()
            .for_each(|&count| raw.extend_from_slice(&(count as u32).to_le_bytes()));

        self.threads
            .iter()
            .for_each(|&(id, _)| raw.extend_from_slice(&id.to_le_bytes()));
        for &(index, records) in &self.runs {
            raw.extend_from_slice(&index.to_le_bytes());
            raw.extend_from_slice(&records.to_le_bytes());
        }
        self.threads.clear();
        self.thread_indices.clear();
        self.runs.clear();

        for column in [
            &mut self.control,
            &mut self.sizes,
            &mut self.wide_sizes,
            &mut self.gaps,
            &mut self.addresses,
            &mut self.dependences,
            &mut self.sites,
        ] {
            raw.append(column);
        }
    }
}

/// The checked columns of an uncompressed block.
pub(super) struct Block<'a> {
    records: usize,
    threads: &'a [u8],
    runs: &'a [u8],
    control: &'a [u8],
    sizes: &'a [u8],
    wide_sizes: &'a [u8],
    gaps: &'a [u8],
    addresses: &'a [u8],
    dependences: &'a [u8],
    sites: &'a [u8],
}

impl<'a> Block<'a> {
    /// Checks every length and index. `padded` contains the uncompressed bytes and [`PADDING_BYTES`] more.
    ///
    /// # Errors
    /// The value found and the value expected.
    pub(super) fn check(
        padded: &'a [u8],
        records: usize,
        version: u32,
    ) -> Result<Self, (String, String)> {
        let raw_bytes = padded.len() - PADDING_BYTES;
        let counts_bytes = if version < 2 {
            VERSION_1_COUNTS_BYTES
        } else {
            COUNTS_BYTES
        };
        if raw_bytes < counts_bytes {
            return Err((
                format!("{raw_bytes} unpacked bytes"),
                format!("at least {counts_bytes}"),
            ));
        }

        let [threads, runs, wide, gaps, addresses, dependences, sites] = [0, 4, 8, 12, 16, 20, 24]
            .map(|offset| {
                if offset < counts_bytes {
                    u32_at(padded, offset) as usize
                } else {
                    0
                }
            });
        if ![0, records].contains(&dependences) || ![0, 2 * records].contains(&sites) {
            return Err((
                format!("{dependences} bytes of dependences and {sites} of sites"),
                format!("none, or those of {records} records"),
            ));
        }

        let lengths = [
            4 * threads,
            8 * runs,
            records,
            records,
            2 * wide,
            gaps,
            addresses,
            dependences,
            sites,
        ];
        let total_bytes = counts_bytes + lengths.iter().sum::<usize>();
        if total_bytes != raw_bytes {
            return Err((
                format!("{raw_bytes} unpacked bytes"),
                format!("{total_bytes} by the column lengths"),
            ));
        }

        let mut offset = counts_bytes;
        let [
            threads,
            runs,
            control,
            sizes,
            wide,
            gaps,
            addresses,
            dependences,
            sites,
        ] = lengths.map(|length| {
            offset += length;
            &padded[offset - length..]
        });
        let threads = &threads[..lengths[0]];
        let block = Block {
            records,
            threads,
            runs: &runs[..lengths[1]],
            control: &control[..records],
            sizes: &sizes[..records],
            wide_sizes: &wide[..lengths[4]],
            gaps: &gaps[..lengths[5] + PADDING_BYTES],
            addresses: &addresses[..lengths[6] + PADDING_BYTES],
            dependences: &dependences[..lengths[7]],
            sites: &sites[..lengths[8]],
        };
        block.check_columns()?;
        Ok(block)
    }

    fn check_columns(&self) -> Result<(), (String, String)> {
        let (mut address_bytes, mut gap_bytes, mut has_long_length) = (0usize, 0usize, false);
        for &control in self.control {
            let (address, gap) = (control & 15, control >> 4);
            address_bytes += usize::from(address);
            gap_bytes += usize::from(gap);
            has_long_length |= address > 8 || gap > 8;
        }
        let wide_count = self
            .sizes
            .iter()
            .filter(|&&size| size & !STORE_BIT == WIDE_SIZE)
            .count();
        let lengths = (
            address_bytes + PADDING_BYTES,
            gap_bytes + PADDING_BYTES,
            2 * wide_count,
        );
        if has_long_length
            || lengths != (self.addresses.len(), self.gaps.len(), self.wide_sizes.len())
        {
            return Err((
                "lengths that disagree with their columns".into(),
                "control bytes that add up".into(),
            ));
        }
        let threads = self.threads.len() / 4;
        let mut remaining_records = self.records as u64;
        for run in self.runs.chunks_exact(8) {
            let (thread, records) = (u32_at(run, 0), u64::from(u32_at(run, 4)));
            if thread as usize >= threads || records > remaining_records || records == 0 {
                return Err((
                    format!("a run of {records} of thread index {thread}"),
                    format!("{remaining_records} records left"),
                ));
            }
            remaining_records -= records;
        }
        if remaining_records != 0 {
            return Err((
                format!("{remaining_records} records without a thread"),
                "runs that cover all".into(),
            ));
        }
        Ok(())
    }

    /// The (thread id, index of the thread, number of records) of every run.
    fn runs(&self) -> impl Iterator<Item = (u32, usize, usize)> + '_ {
        self.runs.chunks_exact(8).map(|run| {
            let index = u32_at(run, 0) as usize;
            (
                u32_at(self.threads, 4 * index),
                index,
                u32_at(run, 4) as usize,
            )
        })
    }

    /// Appends the block's records.
    pub(super) fn decode(&self, batch: &mut Vec<AccessRecord>) {
        let mut previous_addresses = vec![0u64; self.threads.len() / 4];
        let (mut position, mut address_offset, mut gap_offset, mut wide_offset) = (0, 0, 0, 0);
        batch.reserve(self.records);

        for (thread, index, records) in self.runs() {
            let mut address = previous_addresses[index];
            let control = &self.control[position..position + records];
            let sizes = &self.sizes[position..position + records];

            batch.extend(control.iter().zip(sizes).map(|(&control, &size)| {
                let (address_bytes, gap_bytes) =
                    (usize::from(control & 15), usize::from(control >> 4));
                let coded = u64_at(self.addresses, address_offset) & low_bytes_mask(address_bytes);
                address = address.wrapping_add(unzigzag(coded));
                address_offset += address_bytes;
                let gap = u64_at(self.gaps, gap_offset) & low_bytes_mask(gap_bytes);
                gap_offset += gap_bytes;
                let mut size_bytes = u16::from(size & !STORE_BIT);
                if size_bytes == u16::from(WIDE_SIZE) {
                    size_bytes = u16::from_le_bytes([
                        self.wide_sizes[wide_offset],
                        self.wide_sizes[wide_offset + 1],
                    ]);
                    wide_offset += 2;
                }

                AccessRecord {
                    address,
                    gap,
                    thread,
                    size: size_bytes,
                    store: size & STORE_BIT != 0,
                    dependence: 0,
                    site: None,
                }
            }));

            let run_start = batch.len() - records;
            let run = &mut batch[run_start..];
            for (record, dependence) in run
                .iter_mut()
                .zip(self.dependences.get(position..).unwrap_or_default())
            {
                record.dependence = *dependence;
            }

            let sites = self.sites.get(2 * position..).unwrap_or_default();
            for (record, site) in run.iter_mut().zip(sites.chunks_exact(2)) {
                record.site = NonZeroU16::new(u16::from_le_bytes([site[0], site[1]]));
            }
            previous_addresses[index] = address;
            position += records;
        }
    }

    /// The addresses of [`Self::decode`], without the rest of the records.
    pub(super) fn decode_addresses(&self, batch: &mut Vec<u64>) {
        let mut previous_addresses = vec![0u64; self.threads.len() / 4];
        let (mut position, mut address_offset) = (0, 0);
        batch.reserve(self.records);
        for (_, index, records) in self.runs() {
            let mut address = previous_addresses[index];
            batch.extend(
                self.control[position..position + records]
                    .iter()
                    .map(|&control| {
                        let address_bytes = usize::from(control & 15);
                        let coded =
                            u64_at(self.addresses, address_offset) & low_bytes_mask(address_bytes);
                        address = address.wrapping_add(unzigzag(coded));
                        address_offset += address_bytes;
                        address
                    }),
            );
            previous_addresses[index] = address;
            position += records;
        }
    }
}
