//! Sampled data accesses as the kernel writes them into a ring: from bytes to samples, without any system call.
//!
//! perf_event_open(2) is the source of the layout: a record is a header of eight bytes (type, misc, size), followed in
//! a sample by the requested fields in the order of their bits, here those of [`FIELDS`].

use cachemate_core::{CacheLevel, DataSource};
use perf_event_open_sys::bindings as perf;

/// Fields of every sample: thread, time, address, period, latency, and data source.
pub const FIELDS: u64 = (perf::PERF_SAMPLE_TID
    | perf::PERF_SAMPLE_TIME
    | perf::PERF_SAMPLE_ADDR
    | perf::PERF_SAMPLE_PERIOD
    | perf::PERF_SAMPLE_WEIGHT
    | perf::PERF_SAMPLE_DATA_SRC) as u64;
/// Header, and six fields of eight bytes.
const SAMPLE_BYTES: usize = 8 + 6 * 8;
/// Fields of every record of a trace: thread and address. Without a time, the kernel need not interrupt the thread for
/// every record.
pub const TRACE_FIELDS: u64 = (perf::PERF_SAMPLE_TID | perf::PERF_SAMPLE_ADDR) as u64;
/// Header, and two fields of eight bytes.
pub const TRACE_RECORD_BYTES: usize = 8 + 2 * 8;
/// Bits of a header's `misc` that contain the processor's mode.
const MODE_MASK: u16 = 7;
const MODE_USER: u16 = 2;

/// One sample of a program's own access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RawSample {
    /// The thread that made the access.
    pub tid: i32,
    /// Its time on the monotonic clock.
    pub time_ns: u64,
    /// Virtual address, below the kernel's half, and not 0.
    pub address: u64,
    /// Events that this sample stands for.
    pub period: u64,
    /// Its latency; 0 if the processor does not report it.
    pub latency_cycles: u64,
    /// `union perf_mem_data_src`, to be read by [`decode_source`].
    pub data_source: u64,
}

/// Contents of a part of the ring.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RingContents {
    /// Accesses by programs, with their addresses.
    pub samples: Vec<RawSample>,
    /// Records that the kernel had no room for.
    pub lost_count: u64,
    /// Events without an address, or from within the kernel.
    pub unusable_count: u64,
    /// Number of events that all samples stand for, usable or not.
    pub events: u64,
}

/// The bytes of a ring between `tail` and `head`, two positions that never wrap.
pub fn unroll_ring(ring: &[u8], tail: u64, head: u64) -> Vec<u8> {
    if ring.is_empty() {
        return Vec::new();
    }
    let count = head.saturating_sub(tail).min(ring.len() as u64) as usize;
    let start = (tail % ring.len() as u64) as usize;
    let first_len = count.min(ring.len() - start);
    let mut bytes = ring[start..start + first_len].to_vec();
    bytes.extend_from_slice(&ring[..count - first_len]);
    bytes
}

/// Reads records until the bytes end; a record that is cut or has an impossible size ends the reading.
pub fn parse_samples(bytes: &[u8], contents: &mut RingContents) {
    let mut remaining_records = bytes;
    while let Some((record_type, misc, record)) = take_record(&mut remaining_records) {
        match record_type {
            perf::PERF_RECORD_SAMPLE if record.len() >= SAMPLE_BYTES => {
                record_sample(misc, record, contents)
            }
            _ => {
                contents.lost_count = contents
                    .lost_count
                    .saturating_add(lost_records(record_type, record))
            }
        }
    }
}

/// Contents of a part of a trace's ring.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TraceContents {
    /// Virtual addresses in the order of the accesses.
    pub addresses: Vec<u64>,
    /// Records that the kernel or the processor had no room for.
    pub lost_count: u64,
    /// Records without a usable address: from within the kernel, of another thread, or without an address.
    pub unusable_count: u64,
    /// A record was cut or had an impossible size, and everything after it is missing.
    pub is_cut: bool,
}

/// Reads records of the thread `tid` that were written with [`TRACE_FIELDS`]; a record that is cut or has an impossible
/// size ends the reading.
pub fn parse_trace(bytes: &[u8], tid: i32, contents: &mut TraceContents) {
    let mut remaining_records = bytes;
    while let Some((record_type, misc, record)) = take_record(&mut remaining_records) {
        if record_type != perf::PERF_RECORD_SAMPLE {
            contents.lost_count = contents
                .lost_count
                .saturating_add(lost_records(record_type, record));
            continue;
        }
        if record.len() < TRACE_RECORD_BYTES {
            contents.unusable_count += 1;
            continue;
        }
        let address = u64_at(record, 16);
        if thread_id(u64_at(record, 8)) == tid && is_program_access(misc, address) {
            contents.addresses.push(address);
        } else {
            contents.unusable_count += 1;
        }
    }
    contents.is_cut |= !remaining_records.is_empty();
}

/// The number of records that a record reports as lost; 0 for throttling and all others.
fn lost_records(record_type: u32, record: &[u8]) -> u64 {
    match record_type {
        // An id and the number of records for which the ring had no room.
        perf::PERF_RECORD_LOST if record.len() >= 24 => u64_at(record, 16),
        // The number of records that the processor's buffer could not attribute.
        perf::PERF_RECORD_LOST_SAMPLES if record.len() >= 16 => u64_at(record, 8),
        _ => 0,
    }
}

/// The thread in the field of process and thread ids.
fn thread_id(field: u64) -> i32 {
    field.to_ne_bytes()[4..]
        .try_into()
        .map_or(0, i32::from_ne_bytes)
}

/// Is the access one of a program? IBS samples all operations, and most of them touch no memory; the upper half
/// of the addresses is the kernel's.
fn is_program_access(misc: u16, address: u64) -> bool {
    misc & MODE_MASK == MODE_USER && address != 0 && address >> 63 == 0
}

/// The type, the `misc` and the bytes of the first record, which is taken off; `None` if it is cut.
pub(crate) fn take_record<'a>(bytes: &mut &'a [u8]) -> Option<(u32, u16, &'a [u8])> {
    let header: [u8; 8] = bytes.get(..8)?.try_into().ok()?;
    let record_type = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
    let misc = u16::from_ne_bytes([header[4], header[5]]);
    let size = usize::from(u16::from_ne_bytes([header[6], header[7]]));
    let (record, rest) = bytes.split_at_checked(size).filter(|_| size >= 8)?;
    *bytes = rest;
    Some((record_type, misc, record))
}

/// The field of eight bytes at `index`, which the record must contain.
pub(crate) fn u64_at(record: &[u8], index: usize) -> u64 {
    u64::from_ne_bytes(
        record[index..index + 8]
            .try_into()
            .expect("checked: the record is that long"),
    )
}

fn record_sample(misc: u16, record: &[u8], contents: &mut RingContents) {
    let field = |index: usize| u64_at(record, 8 + 8 * index);
    let sample = RawSample {
        tid: thread_id(field(0)),
        time_ns: field(1),
        address: field(2),
        period: field(3),
        latency_cycles: field(4),
        data_source: field(5),
    };
    contents.events = contents.events.saturating_add(sample.period);
    if is_program_access(misc, sample.address) {
        contents.samples.push(sample);
    } else {
        contents.unusable_count += 1;
    }
}

/// `union perf_mem_data_src`: bits of the kernel's encoding that describe the source of the data.
mod bits {
    pub const LEVEL_HIT: u64 = 0x02;
    pub const L1: u64 = 0x08;
    pub const L2: u64 = 0x20;
    pub const L3: u64 = 0x40;
    pub const LOCAL_RAM: u64 = 0x80;
    pub const REMOTE_RAM: u64 = 0x100 | 0x200;
    pub const REMOTE_CACHE: u64 = 0x400 | 0x800;
    pub const SNOOP_HITM: u64 = 0x10;
    pub const SNOOP_PEER: u64 = 0x02;
}

/// Source of the data. A line that another core had modified comes from a remote cache, whatever level passed it on
/// (shared writes appear like this, TC 4.2); fill buffers, and unreported sources, are unknown.
pub fn decode_source(data_source: u64) -> DataSource {
    let bit_field = |shift: u32, width: u32| data_source >> shift & ((1 << width) - 1);
    let (level, snoop, level_number, is_remote) = (
        bit_field(5, 14),
        bit_field(19, 5),
        bit_field(33, 4),
        bit_field(37, 1) == 1,
    );
    if snoop & bits::SNOOP_HITM != 0
        || bit_field(38, 2) & bits::SNOOP_PEER != 0
        || level & bits::REMOTE_CACHE != 0
    {
        return DataSource::RemoteCache;
    }
    match level_number {
        // PERF_MEM_LVLNUM_*: newer kernels report the level by its number.
        1 => return DataSource::Cache(CacheLevel::L1Data),
        2 => return DataSource::Cache(CacheLevel::L2),
        3 if is_remote => return DataSource::RemoteCache,
        3 => return DataSource::Cache(CacheLevel::L3),
        4 => return DataSource::Cache(CacheLevel::L4),
        0x0b if is_remote => return DataSource::RemoteCache,
        0x0d | 0x0e => return DataSource::Memory,
        _ => {}
    }
    if level & bits::LEVEL_HIT == 0 {
        return DataSource::Unknown;
    }
    match level {
        level if level & (bits::LOCAL_RAM | bits::REMOTE_RAM) != 0 => DataSource::Memory,
        level if level & bits::L1 != 0 => DataSource::Cache(CacheLevel::L1Data),
        level if level & bits::L2 != 0 => DataSource::Cache(CacheLevel::L2),
        level if level & bits::L3 != 0 => DataSource::Cache(CacheLevel::L3),
        _ => DataSource::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u32, misc: u16, words: &[u64]) -> Vec<u8> {
        let mut bytes = kind.to_ne_bytes().to_vec();
        bytes.extend(misc.to_ne_bytes());
        bytes.extend((8 + 8 * words.len() as u16).to_ne_bytes());
        words
            .iter()
            .for_each(|word| bytes.extend(word.to_ne_bytes()));
        bytes
    }

    fn tid(pid: u32, tid: u32) -> u64 {
        let mut bytes = [0u8; 8];
        bytes[..4].copy_from_slice(&pid.to_ne_bytes());
        bytes[4..].copy_from_slice(&tid.to_ne_bytes());
        u64::from_ne_bytes(bytes)
    }

    /// A ring as filled by a load-latency event: two loads of a program, one of the kernel, lost records, throttling.
    fn ring() -> Vec<u8> {
        let sample = |misc, thread, address, latency, source| {
            record(
                perf::PERF_RECORD_SAMPLE,
                misc,
                &[tid(40, thread), 1_000, address, 2_000, latency, source],
            )
        };
        [
            sample(MODE_USER, 41, 0x7f12_3456_7840, 230, 0x6810_1042),
            record(perf::PERF_RECORD_THROTTLE, 0, &[5, 6, 7]),
            sample(1, 41, 0xffff_8880_0000_1000, 90, 0x6810_0142),
            record(perf::PERF_RECORD_LOST, 0, &[9, 17]),
            sample(MODE_USER, 42, 0x5555_0000_0040, 12, 0x6810_0442),
            sample(MODE_USER, 42, 0, 0, 0),
        ]
        .concat()
    }

    /// Are all fields of samples read correctly, samples of the kernel or without an address only counted, and losses
    /// reported?
    #[test]
    fn all_fields_of_a_rings_samples_are_read() {
        let mut read = RingContents::default();
        parse_samples(&ring(), &mut read);
        let expected = RawSample {
            tid: 41,
            time_ns: 1_000,
            address: 0x7f12_3456_7840,
            period: 2_000,
            latency_cycles: 230,
            data_source: 0x6810_1042,
        };
        assert_eq!(read.samples[0], expected);
        assert_eq!((read.samples.len(), read.samples[1].tid), (2, 42));
        assert_eq!(
            (read.lost_count, read.unusable_count, read.events),
            (17, 2, 8_000)
        );
    }

    /// Is a ring read the same wherever it wraps within a record, and do cut or invalid records cause no panic?
    #[test]
    fn wrapped_rings_read_the_same_and_cut_records_do_not_panic() {
        let straight = ring();
        let mut whole = RingContents::default();
        parse_samples(&straight, &mut whole);
        let size = 512usize;
        for turn in (0..size).step_by(8) {
            let mut ring = vec![0xAAu8; size];
            straight
                .iter()
                .enumerate()
                .for_each(|(index, byte)| ring[(turn + index) % size] = *byte);
            let tail = (3 * size + turn) as u64;
            let mut read = RingContents::default();
            parse_samples(
                &unroll_ring(&ring, tail, tail + straight.len() as u64),
                &mut read,
            );
            assert_eq!(read, whole, "{turn}");
        }
        for end in 0..straight.len() {
            parse_samples(&straight[..end], &mut RingContents::default());
        }
        parse_samples(&[0xFF; 64], &mut RingContents::default());
        parse_samples(&[0; 64], &mut RingContents::default());
        assert!(unroll_ring(&[], 0, 8).is_empty());
        assert!(unroll_ring(&[1, 2], 5, 4).is_empty());
    }

    /// Are the addresses of one thread read in their order, and is every fault that the kernel reports counted: records
    /// lost in the ring and in the processor, records of the kernel, of another thread, and without an address?
    #[test]
    fn a_trace_keeps_its_order_and_counts_its_faults() {
        let access = |misc, thread, address| {
            record(perf::PERF_RECORD_SAMPLE, misc, &[tid(40, thread), address])
        };
        let parts = [
            access(MODE_USER, 41, 0x7000),
            access(MODE_USER, 41, 0x3000),
            record(perf::PERF_RECORD_LOST, 0, &[9, 17]),
            access(1, 41, 0x5000),
            access(MODE_USER, 42, 0x6000),
            access(MODE_USER, 41, 0),
            record(perf::PERF_RECORD_LOST_SAMPLES, 0, &[4]),
            record(perf::PERF_RECORD_THROTTLE, 0, &[5, 6, 7]),
            access(MODE_USER, 41, 0x7000),
            record(perf::PERF_RECORD_SAMPLE, MODE_USER, &[tid(40, 41)]),
        ];
        let whole_bytes = parts.concat();
        let mut contents = TraceContents::default();
        parse_trace(&whole_bytes, 41, &mut contents);
        let addresses = vec![0x7000, 0x3000, 0x7000];
        assert_eq!(
            contents,
            TraceContents {
                addresses,
                lost_count: 21,
                unusable_count: 4,
                is_cut: false
            }
        );
        // If the ring is cut anywhere but between two records, the remainder is missing, and the trace reports this.
        let mut ends: Vec<usize> = Vec::new();
        parts
            .iter()
            .for_each(|part| ends.push(ends.last().copied().unwrap_or(0) + part.len()));
        for end in 1..whole_bytes.len() {
            let mut cut = TraceContents::default();
            parse_trace(&whole_bytes[..end], 41, &mut cut);
            assert_eq!(cut.is_cut, !ends.contains(&end), "{end}");
            assert!(contents.addresses.starts_with(&cut.addresses), "{end}");
        }
        let mut strange = TraceContents::default();
        parse_trace(&[0; 64], 41, &mut strange);
        assert!(
            strange.is_cut && strange.addresses.is_empty(),
            "a record of no size"
        );
    }

    /// Do the kernel's encodings yield the source that `perf mem report` prints for them?
    #[test]
    fn encodings_yield_the_source_that_perf_mem_prints() {
        for (encoded, expected) in [
            (0x6810_0142, DataSource::Cache(CacheLevel::L1Data)), // L1 hit
            (0x6810_0242, DataSource::Unknown),                   // line fill buffer
            (0x6810_0442, DataSource::Cache(CacheLevel::L2)),     // L2 hit
            (0x6810_0842, DataSource::Cache(CacheLevel::L3)),     // L3 hit, snoop none
            (0x6880_0842, DataSource::RemoteCache),               // L3 hit, snoop hit modified
            (0x6810_1042, DataSource::Memory),                    // local memory
            (0x6a10_2042 | 1 << 37, DataSource::Memory),          // remote memory, one hop
            (0x6810_8042, DataSource::RemoteCache),               // remote cache, one hop
            (0x2 | 0x3 << 33, DataSource::Cache(CacheLevel::L3)), // by number only
            (0x2 | 0xd << 33, DataSource::Memory),                // by number only
            (0x2 | 0xb << 33 | 1 << 37, DataSource::RemoteCache), // any cache, remote
            (0x0508_0021, DataSource::Unknown),                   // PERF_MEM_NA
        ] {
            assert_eq!(decode_source(encoded), expected, "{encoded:#x}");
        }
    }
}
