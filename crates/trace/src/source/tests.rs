use cachemate_core::{Access, AccessKind, AccessSource, BatchEnd};

use crate::{AccessRecord, CmtSource, CmtWriter, ThreadTotals, TraceHeader, TraceTotals};

/// A file with two threads: thread 1 has three records in 21 instructions, two of them after its last record.
fn two_thread_file(instructions_known: bool) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let access_record = |thread, address, gap, store| AccessRecord {
        address,
        gap,
        thread,
        size: 8,
        store,
        ..AccessRecord::default()
    };
    let records = [
        access_record(1, 0x1000, 5, false),
        access_record(0, 0x9000, 1, false),
        access_record(1, 0x2000, 0, true),
        access_record(1, 0x3000, 14, false),
    ];

    let header = TraceHeader::for_import("test", instructions_known);
    let mut writer = CmtWriter::new(file.reopen().unwrap(), "x", &header, 1).unwrap();
    writer.push_all(&records).unwrap();
    let threads = vec![ThreadTotals {
        thread: 1,
        instructions: Some(21),
        ..Default::default()
    }];
    writer
        .finish(TraceTotals {
            threads,
            ..Default::default()
        })
        .unwrap();
    file
}

fn first_accesses(source: &mut CmtSource, accesses: usize) -> Vec<Access> {
    let mut batch = Vec::new();
    assert_eq!(source.next_batch(&mut batch), BatchEnd::More);
    batch.truncate(accesses);
    batch
}

/// Is one thread read in a loop and shifted, executing exactly its recorded instructions per round?
#[test]
fn a_thread_loops_at_an_offset_with_its_own_instructions() {
    let file = two_thread_file(true);
    let mut source = CmtSource::open(file.path(), 1, 0x10_0000, 0).unwrap();
    let accesses = first_accesses(&mut source, 301);
    let addresses: Vec<u64> = accesses
        .iter()
        .take(4)
        .map(|access| access.address())
        .collect();
    assert_eq!(addresses, [0x10_1000, 0x10_2000, 0x10_3000, 0x10_1000]);
    assert_eq!(accesses[1].kind(), AccessKind::Store);

    // Each round has 5 + 0 + 14 instructions and a tail of 2, because the access without its own instruction borrows
    // one.
    let instructions: u64 = accesses[..300]
        .iter()
        .map(|access| access.instructions())
        .sum();
    assert_eq!(instructions, 100 * 21 - 2);
    let mut again = CmtSource::open(file.path(), 1, 0x10_0000, 0).unwrap();
    assert_eq!(first_accesses(&mut again, 301), accesses);
}

/// Does a start in the middle keep the loop's order, and does a file without instructions give each access one?
#[test]
fn a_phase_starts_in_the_middle_in_the_loops_order() {
    let file = two_thread_file(false);
    let mut source = CmtSource::open(file.path(), 1, 0, 4).unwrap();
    let accesses = first_accesses(&mut source, 3);
    assert_eq!(
        accesses
            .iter()
            .map(|access| access.address())
            .collect::<Vec<_>>(),
        [0x2000, 0x3000, 0x1000]
    );
    assert!(accesses.iter().all(|access| access.instructions() == 1));
}

/// Is a thread that the file lacks rejected, with the list of its threads?
#[test]
fn a_thread_without_records_is_rejected_with_the_list() {
    let error = CmtSource::open(two_thread_file(true).path(), 7, 0, 0)
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.ends_with("found no record of thread 7, expected a thread among the 2 it has"),
        "{error}"
    );
}

/// Does a recording that claims to know its instructions, and has none, give each access one?
#[test]
fn a_recording_with_no_instruction_gives_each_access_one() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let header = TraceHeader::for_import("csv", true);
    let mut writer = CmtWriter::new(file.reopen().unwrap(), "x", &header, 1).unwrap();
    writer.push_all(&[AccessRecord::default(); 3]).unwrap();
    writer.finish(TraceTotals::default()).unwrap();
    let source = CmtSource::open(file.path(), 0, 0, 0).unwrap();
    assert_eq!(source.instructions_per_round(), 3);
}

/// Does an access wait for no load if it depends on one further back than a dependence reaches?
#[test]
fn a_far_dependence_waits_for_no_load() {
    let mut records = vec![AccessRecord::default()];
    records.extend(
        [AccessRecord {
            store: true,
            ..AccessRecord::default()
        }; 254],
    );
    records.push(AccessRecord {
        dependence: 255,
        ..AccessRecord::default()
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    let header = TraceHeader::for_import("test", true);
    let mut writer = CmtWriter::new(file.reopen().unwrap(), "x", &header, 1).unwrap();
    writer.push_all(&records).unwrap();
    writer.finish(TraceTotals::default()).unwrap();
    let mut source = CmtSource::open(file.path(), 0, 0, 0).unwrap();
    assert!(!first_accesses(&mut source, 256)[255].is_dependent());
}

/// Is an access dependent if it states the thread's preceding load, whatever stores and other threads lie between, and
/// otherwise not?
#[test]
fn a_dependence_on_the_preceding_load_is_kept() {
    let record = |thread, store, dependence| AccessRecord {
        address: 64,
        gap: 1,
        thread,
        store,
        dependence,
        ..AccessRecord::default()
    };
    let records = [
        record(0, false, 0),
        record(0, false, 1),
        record(1, false, 0),
        record(0, true, 0),
        record(0, false, 2),
        record(0, false, 2),
        record(0, true, 1),
        record(0, false, 255),
    ];

    let file = tempfile::NamedTempFile::new().unwrap();
    let header = TraceHeader {
        has_dependences: true,
        ..TraceHeader::for_import("test", true)
    };
    let mut writer = CmtWriter::new(file.reopen().unwrap(), "x", &header, 1).unwrap();
    writer.push_all(&records).unwrap();
    writer.finish(TraceTotals::default()).unwrap();
    let mut source = CmtSource::open(file.path(), 0, 0, 0).unwrap();
    let mut batch = Vec::new();
    source.next_batch(&mut batch);
    let dependent: Vec<bool> = batch[..7]
        .iter()
        .map(|access| access.is_dependent())
        .collect();
    assert_eq!(dependent, [false, true, false, true, false, true, false]);
}
