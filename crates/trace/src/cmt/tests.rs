use std::io::Cursor;
use std::num::NonZeroU16;

use proptest::prelude::*;

use super::*;
use crate::{
    AccessRecord, FilePosition, L1Filter, ProcessTotals, ThreadTotals, TraceError, TraceHeader,
    TraceReader, TraceTotals,
};

fn sample_header() -> TraceHeader {
    TraceHeader {
        command: vec!["gzip".into(), "-9".into()],
        ..TraceHeader::for_import("valgrind", true)
    }
}

fn written_file(records: &[AccessRecord], totals: TraceTotals) -> Vec<u8> {
    let mut writer = CmtWriter::new(Vec::new(), "test.cmt", &sample_header(), 1).unwrap();
    writer.push_all(records).unwrap();
    writer.finish(totals).unwrap().0
}

fn read_all<R: std::io::Read + Send>(
    reader: &mut CmtReader<R>,
) -> (Vec<AccessRecord>, Option<TraceError>) {
    let (mut records, mut batch) = (Vec::new(), Vec::new());
    loop {
        match reader.read_batch(&mut batch) {
            Ok(true) => records.extend_from_slice(&batch),
            Ok(false) => return (records, None),
            Err(error) => return (records, Some(error)),
        }
    }
}

/// A program-like stream: strides, jumps, several threads, rare wide accesses.
fn sample_records(count: usize) -> Vec<AccessRecord> {
    let mut state = 1u64;

    (0..count)
        .map(|i| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let random = state >> 33;
            AccessRecord {
                address: if random.is_multiple_of(5) {
                    random << 12
                } else {
                    0x7000_0000 + 8 * i as u64
                },
                gap: random % 9,
                thread: (i / 1000 % 3) as u32,
                size: if random.is_multiple_of(97) {
                    512
                } else {
                    1 << (random % 4)
                },
                store: random.is_multiple_of(3),
                dependence: (random % 7) as u8,
                site: NonZeroU16::new((random % 500) as u16),
            }
        })
        .collect()
}

fn any_record() -> impl Strategy<Value = AccessRecord> {
    let wide = prop_oneof![0u64..4096, any::<u64>()];

    (
        wide.clone(),
        wide,
        prop_oneof![0u32..4, any::<u32>()],
        any::<u16>(),
        any::<bool>(),
        prop_oneof![Just(0u8), any::<u8>()],
        prop_oneof![Just(0u16), any::<u16>()],
    )
        .prop_map(
            |(address, gap, thread, size, store, dependence, site)| AccessRecord {
                address,
                gap,
                thread,
                size,
                store,
                dependence,
                site: NonZeroU16::new(site),
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Is every record, with any value of any field, read back as it was written, in both ways of reading?
    #[test]
    fn every_record_is_read_back_as_written(records in prop::collection::vec(any_record(), 0..300)) {
        let bytes = written_file(&records, TraceTotals::default());
        let mut reader = CmtReader::new(&bytes[..], "test.cmt").unwrap();
        prop_assert_eq!(reader.header(), &sample_header());
        let (read_records, error) = read_all(&mut reader);
        prop_assert!(error.is_none());
        prop_assert_eq!(&read_records, &records);
        let mut reader = CmtReader::new(&bytes[..], "test.cmt").unwrap();
        let (mut addresses, mut batch) = (Vec::new(), Vec::new());
        while reader.read_addresses(&mut batch).unwrap() {
            addresses.extend_from_slice(&batch);
        }
        prop_assert_eq!(addresses, records.iter().map(|record| record.address).collect::<Vec<_>>());
    }

    /// Does any damage, anywhere, give an error or the same records, and never a panic or other records?
    #[test]
    fn one_changed_byte_never_gives_other_records(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let records = sample_records(3000);
        let mut bytes = written_file(&records, TraceTotals::default());
        let index = at.index(bytes.len());
        bytes[index] ^= 1 << bit;
        if let Ok(mut reader) = CmtReader::new(&bytes[..], "test.cmt") {
            let (read_records, _) = read_all(&mut reader);
            prop_assert!(records.starts_with(&read_records));
        }
    }
}

/// Are several blocks, totals and threads read back, and does a seek reach the block before?
#[test]
fn blocks_totals_and_threads_of_a_long_trace_are_read_back() {
    let records = sample_records(3 * BLOCK_RECORDS + 17);
    let given_totals = TraceTotals {
        program_accesses: Some(1 << 40),
        instructions: Some(1 << 41),
        threads: vec![ThreadTotals {
            thread: 1,
            accesses: Some(5),
            instructions: Some(6),
            ..Default::default()
        }],
        processes: vec![ProcessTotals {
            process: 0,
            pid: Some(77),
            command: vec!["gzip".into()],
        }],
        ended: Some("exit 0".into()),
        ..TraceTotals::default()
    };

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), written_file(&records, given_totals.clone())).unwrap();
    let mut reader = CmtReader::open(file.path()).unwrap();
    let totals = reader.totals().unwrap().clone();
    assert_eq!(totals.records, records.len() as u64);
    assert_eq!(
        (totals.program_accesses, &totals.processes, &totals.ended),
        (
            given_totals.program_accesses,
            &given_totals.processes,
            &given_totals.ended
        )
    );
    let of_thread = |thread| {
        records
            .iter()
            .filter(|record| record.thread == thread)
            .count() as u64
    };
    let counts: Vec<_> = totals
        .threads
        .iter()
        .map(|totals| (totals.thread, totals.records, totals.accesses))
        .collect();
    assert_eq!(
        counts,
        [
            (0, of_thread(0), None),
            (1, of_thread(1), Some(5)),
            (2, of_thread(2), None)
        ]
    );
    assert_eq!(read_all(&mut reader).0, records);
    let near = 2 * BLOCK_RECORDS as u64;
    assert_eq!(reader.seek_near(near + 5).unwrap(), near);
    assert_eq!(read_all(&mut reader).0, records[near as usize..]);
    reader.rewind().unwrap();
    assert_eq!(read_all(&mut reader).0, records);
}

/// Is a block written without a search through all of its threads at each access, and are the totals of each found at once?
/// If not, this takes half a minute.
#[test]
fn a_trace_of_many_threads_is_written_quickly() {
    let threads = BLOCK_RECORDS as u32 / 2;
    let record = |thread| AccessRecord {
        thread,
        ..AccessRecord::default()
    };
    let mut writer = CmtWriter::new(Vec::new(), "x.cmt", &sample_header(), 1).unwrap();
    for thread in (0..threads).rev().chain(0..threads) {
        writer.push(&record(thread)).unwrap();
    }
    let (_, totals) = writer.finish(TraceTotals::default()).unwrap();
    assert_eq!(totals.threads.len(), threads as usize);
    assert!(totals.threads.iter().all(|thread| thread.records == 2));
}

/// Are threads of a recording that predates the order of creation read, without one?
#[test]
fn older_totals_have_no_order_of_creation() {
    let older = r#"{"thread":3,"process":0,"records":1,"accesses":null,"instructions":5}"#;
    let thread: ThreadTotals = serde_json::from_str(older).unwrap();
    assert_eq!(
        (thread.thread, thread.created, thread.os_thread),
        (3, None, None)
    );
    assert_eq!(serde_json::to_string(&thread).unwrap(), older);
}

/// Is a file of version 1 read, whose blocks end after the addresses, and are its dependences and sites unknown?
#[test]
fn version_1_is_read_without_dependences_and_sites() {
    let json = serde_json::to_string(&sample_header()).unwrap();
    let json = json.replace(",\"has_dependences\":false", "");
    let mut bytes = FILE_MAGIC.to_vec();
    bytes.extend_from_slice(&1u32.to_le_bytes());
    bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
    bytes.extend_from_slice(json.as_bytes());
    bytes.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&bytes).to_le_bytes());

    // One thread with one run of one record: a load of eight bytes at 32, the third instruction.
    let mut raw = Vec::new();
    for word in [1u32, 1, 0, 1, 1, 0, 0, 1] {
        raw.extend_from_slice(&word.to_le_bytes());
    }
    raw.extend_from_slice(&[0x11, 8, 3, 64]);
    let packed = zstd::bulk::compress(&raw, 1).unwrap();
    let mut block = BLOCK_MAGIC.to_vec();
    for word in [1, packed.len() as u32, raw.len() as u32, 0, 0] {
        block.extend_from_slice(&word.to_le_bytes());
    }

    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(&block);
    hash.update(&packed);
    block.extend_from_slice(&hash.digest().to_le_bytes());
    bytes.extend_from_slice(&block);
    bytes.extend_from_slice(&packed);
    let mut reader = CmtReader::new(&bytes[..], "old.cmt").unwrap();
    assert!(!reader.header().has_dependences);
    reader.salvage();
    let expected = AccessRecord {
        address: 32,
        gap: 3,
        size: 8,
        ..AccessRecord::default()
    };
    assert_eq!(read_all(&mut reader).0, [expected]);
}

/// Does a file truncated at any length give its complete blocks, and then an error with the next one?
#[test]
fn a_truncated_file_gives_its_complete_blocks_and_an_error() {
    let records = sample_records(2 * BLOCK_RECORDS + 100);
    let bytes = written_file(&records, TraceTotals::default());
    let starts: Vec<usize> = bytes
        .windows(4)
        .enumerate()
        .filter(|(_, four)| *four == b"CMTB")
        .map(|(index, _)| index)
        .collect();
    assert_eq!(starts.len(), 3);

    for (cut, whole_blocks) in [
        (starts[1], 1),
        (starts[1] + 3, 1),
        (starts[2] - 1, 1),
        (starts[2] + 40, 2),
    ] {
        let mut reader = CmtReader::new(&bytes[..cut], "cut.cmt").unwrap();
        let (read_records, error) = read_all(&mut reader);
        assert_eq!(read_records, records[..whole_blocks * BLOCK_RECORDS]);
        let text = error.expect("an error").to_string();
        let place = format!(
            "cut.cmt: block {whole_blocks} at byte {}: found the end of the file",
            starts[whole_blocks]
        );
        assert!(text.starts_with(&place), "{text}");
        let mut reader = CmtReader::new(&bytes[..cut], "cut.cmt").unwrap();
        reader.salvage();
        let (read_records, error) = read_all(&mut reader);
        assert!(error.is_none() && read_records.len() == whole_blocks * BLOCK_RECORDS);
        assert_eq!(reader.first_damage().map(ToString::to_string), Some(text));
    }
}

/// Does a damaged block end the reading with an error that names it, with the blocks before it intact?
#[test]
fn a_damaged_block_is_named_and_those_before_it_are_read() {
    let records = sample_records(2 * BLOCK_RECORDS);
    let mut bytes = written_file(&records, TraceTotals::default());
    let second = bytes.windows(4).rposition(|four| four == b"CMTB").unwrap();
    bytes[second + 100] ^= 0x10;
    let (read_records, error) =
        read_all(&mut CmtReader::new(Cursor::new(&bytes), "x.cmt").unwrap());
    assert_eq!(read_records, records[..BLOCK_RECORDS]);
    match error {
        Some(TraceError::Bad {
            place: FilePosition::Block { block: 1, offset },
            ..
        }) => {
            assert_eq!(offset, second as u64)
        }
        other => panic!("{other:?}"),
    }
}

/// Is a forged length rejected before anything of that size is allocated?
#[test]
fn a_forged_length_is_rejected_before_allocation() {
    let bytes = written_file(&sample_records(10), TraceTotals::default());
    let block = bytes.windows(4).position(|four| four == b"CMTB").unwrap();
    for field in [8, 12] {
        let mut forged = bytes.clone();
        forged[block + field..block + field + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = read_all(&mut CmtReader::new(&forged[..], "x.cmt").unwrap())
            .1
            .unwrap()
            .to_string();
        assert!(
            error.contains("block 0") && error.contains("4294967295"),
            "{error}"
        );
    }
    let mut forged = bytes.clone();
    forged[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = CmtReader::new(&forged[..], "x.cmt")
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("a header of 4294967295 bytes"), "{error}");
}

/// Are totals rejected whose threads make more accesses or instructions than the file, or so many that sums wrap?
#[test]
fn threads_that_exceed_the_totals_are_rejected() {
    let thread = |thread, accesses, instructions| ThreadTotals {
        thread,
        accesses: Some(accesses),
        instructions: Some(instructions),
        ..ThreadTotals::default()
    };
    let problem_of = |program_accesses, threads: [ThreadTotals; 2]| {
        let totals = TraceTotals {
            program_accesses,
            instructions: Some(9),
            threads: threads.to_vec(),
            ..TraceTotals::default()
        };
        totals.check().err().map(|(found, _)| found)
    };
    let wrapping = [thread(0, 1 << 63, 1), thread(1, 1 << 63, 1)];
    let found = Some(format!("threads with {} accesses", u64::MAX));
    assert_eq!(problem_of(None, wrapping.clone()), found);
    assert_eq!(problem_of(Some(u64::MAX), wrapping), found);
    let excess = [thread(0, 3, 5), thread(1, 3, 5)];
    let found = Some("threads with 10 instructions".to_string());
    assert_eq!(problem_of(Some(6), excess), found);
    assert_eq!(
        problem_of(Some(6), [thread(0, 3, 4), thread(1, 3, 5)]),
        None
    );
}

/// Is a header with an impossible page size, line size, shift or filter rejected with the field?
#[test]
fn headers_with_impossible_fields_are_rejected_by_field() {
    let cases: [(&str, fn(&mut TraceHeader)); 7] = [
        ("page_bytes = 0", |header| header.page_bytes = 0),
        ("page_bytes = 4095", |header| header.page_bytes = 4095),
        ("line_bytes = 0", |header| header.line_bytes = 0),
        ("process_shift = 200", |header| {
            header.process_shift = Some(200)
        }),
        ("process_shift = 64", |header| {
            header.process_shift = Some(64)
        }),
        ("process_shift = 0", |header| header.process_shift = Some(0)),
        ("an impossible filter", |header| {
            header.filter = Some(L1Filter {
                size_bytes: 1 << 63,
                ..L1Filter::default()
            })
        }),
    ];

    for (found, spoil) in cases {
        let mut header = sample_header();
        spoil(&mut header);
        let writer = CmtWriter::new(Vec::new(), "x.cmt", &header, 1).unwrap();
        let bytes = writer.finish(TraceTotals::default()).unwrap().0;
        let message = CmtReader::new(&bytes[..], "x.cmt")
            .err()
            .unwrap()
            .to_string();
        assert!(
            message.contains(found) && message.contains("byte 16"),
            "{message}"
        );
    }
}
