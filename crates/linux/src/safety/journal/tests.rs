use super::*;

fn affinity(tid: i32) -> JournalObject {
    JournalObject::Affinity {
        pid: tid,
        thread: ThreadKey {
            tid,
            start_ticks: 7,
        },
    }
}
fn cpus(cpu: u32) -> ObjectState {
    ObjectState::Cpus([cpu].into_iter().collect())
}
fn change(tid: i32, now: u32, wanted: u32) -> IntendedChange {
    IntendedChange {
        object: affinity(tid),
        current: cpus(now),
        target: cpus(wanted),
        follows_cpuset: false,
    }
}

/// The entry of an object that was on CPU 0, after these changes.
fn entry_with(applied_cpus: [u32; 2]) -> JournalEntry {
    JournalEntry {
        applied_states: applied_cpus.map(cpus).to_vec(),
        ..crate::fake_tests::journal_entry(cpus(0))
    }
}

fn new_journal() -> (tempfile::TempDir, Journal) {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::create(dir.path(), "boot", 70).unwrap();
    (dir, journal)
}

/// A journal of threads 1 to `count`, and the bytes of its file.
fn journal_file(count: i32) -> (tempfile::TempDir, Journal, PathBuf, Vec<u8>) {
    let (dir, mut journal) = new_journal();
    (1..=count).for_each(|tid| journal.journal_changes(&[change(tid, 0, 1)]).unwrap());
    let path = dir.path().join(Journal::FILE_NAME);
    let bytes = fs::read(&path).unwrap();
    (dir, journal, path, bytes)
}

fn read_back(dir: &tempfile::TempDir) -> RecoveredJournal {
    read_left_behind(dir.path()).unwrap().unwrap()
}

/// Is the original kept, and never an intermediate state?
#[test]
fn the_original_is_kept_and_never_an_intermediate_state() {
    let (dir, mut journal) = new_journal();
    journal
        .journal_changes(&[change(1, 0, 1), change(2, 0, 2)])
        .unwrap();
    journal.journal_changes(&[change(1, 1, 3)]).unwrap();
    let recovered = read_back(&dir);
    assert_eq!(recovered.entries[&affinity(1)], entry_with([1, 3]));
    assert_eq!(&recovered.entries, journal.entries());
    assert_eq!(
        (recovered.boot_id.as_deref(), recovered.is_torn),
        (Some("boot"), false)
    );
    assert!(
        Journal::create(dir.path(), "boot", 70).is_err(),
        "a journal left behind must not be overwritten"
    );
    journal.remove().unwrap();
    assert_eq!(read_left_behind(dir.path()).unwrap(), None);
}

/// If a crash cuts the file at any byte: is everything before the torn line read?
#[test]
fn a_journal_cut_anywhere_keeps_all_whole_lines() {
    let (dir, _, path, bytes) = journal_file(4);
    for cut in 0..bytes.len() {
        fs::write(&path, &bytes[..cut]).unwrap();
        let recovered = read_back(&dir);
        // A line that lacks only its newline is complete.
        let complete_lines = (0..=cut).filter(|&index| bytes[index] == b'\n').count();
        assert_eq!(
            recovered.entries.len(),
            complete_lines.saturating_sub(1),
            "cut at {cut}"
        );
        assert!(recovered.damaged_lines.is_empty());
    }
}

/// Does one flipped bit cost only one line, which is named?
#[test]
fn a_damaged_line_is_named_and_the_others_are_read() {
    let (dir, _, path, mut bytes) = journal_file(3);
    let second = bytes.iter().position(|&byte| byte == b'\n').unwrap() + 40;
    bytes[second] ^= 1;
    fs::write(&path, bytes).unwrap();
    let recovered = read_back(&dir);
    assert_eq!(
        (recovered.damaged_lines, recovered.entries.len()),
        (vec![2], 2)
    );
}

/// If any single bit of a journal flips: is every line but the one with the bit read, and that one reported?
#[test]
fn every_flipped_bit_costs_one_line_and_is_reported() {
    let (dir, journal, path, good) = journal_file(3);
    for bit in 0..8 * good.len() {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &bytes).unwrap();
        let Ok(recovered) = read_left_behind(dir.path()) else {
            continue;
        };
        let recovered = recovered.unwrap();
        let is_complete = recovered.boot_id.is_some() && &recovered.entries == journal.entries();
        assert!(
            is_complete || !recovered.damaged_lines.is_empty(),
            "bit {bit}: {recovered:?}"
        );
        // A damaged newline also costs the next line.
        assert!(
            recovered.entries.len() + 2 >= journal.entries().len(),
            "bit {bit}"
        );
    }
}

/// Does the file stay small when ten thousand threads come and go, and does it keep every live thread?
#[test]
fn short_lived_threads_do_not_make_the_file_grow() {
    let (dir, mut journal) = new_journal();
    journal.journal_changes(&[change(1, 0, 1)]).unwrap();
    for batch in 0..100 {
        let changes: Vec<IntendedChange> = (0..100)
            .map(|index| change(1_000 + batch * 100 + index, 0, 1))
            .collect();
        journal.journal_changes(&changes).unwrap();
        journal.retain(|object| *object == affinity(1)).unwrap();
    }
    assert!(
        fs::metadata(dir.path().join(Journal::FILE_NAME))
            .unwrap()
            .len()
            < 2 * COMPACT_FROM_BYTES
    );
    journal.compact().unwrap();
    journal.journal_changes(&[change(1, 1, 2)]).unwrap();
    let recovered = read_back(&dir);
    assert_eq!(recovered.entries.len(), 1);
    assert_eq!(recovered.entries[&affinity(1)].original, cpus(0));
}

/// The disk's next failure.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fails {
    /// Bytes of the next batch that the disk accepts before it is full.
    pub room_bytes: Option<usize>,
    pub sync: bool,
    /// Whether the truncation of a partly accepted write fails as well.
    pub cut: bool,
}

thread_local! {
    /// Failure of the next disk of this thread.
    pub(super) static NEXT: std::cell::Cell<Fails> = const {
        std::cell::Cell::new(Fails { room_bytes: None, sync: false, cut: false })
    };
}

/// If the disk is full at the first change: is a journal begun once there is room, whatever fragment remains?
#[test]
fn a_journal_begins_once_a_full_disk_has_room() {
    for room in [0, 1, 40] {
        let dir = tempfile::tempdir().unwrap();
        NEXT.set(Fails {
            room_bytes: Some(room),
            ..Fails::default()
        });
        assert!(Journal::create(dir.path(), "boot", 70).is_err());
        let mut journal = Journal::create(dir.path(), "boot", 70).unwrap();
        journal.journal_changes(&[change(1, 0, 1)]).unwrap();
        drop(journal);
        assert!(
            Journal::create(dir.path(), "boot", 70).is_err(),
            "it holds something"
        );
        // Even the remaining fragment could not be removed.
        fs::write(
            dir.path().join(Journal::FILE_NAME),
            &b"0123456789abcdef {\"header\":{"[..room.min(27)],
        )
        .unwrap();
        Journal::create(dir.path(), "boot", 70).unwrap();
    }
}

/// After the file was rewritten, or could not be: are later lines appended to the file that a restore reads?
#[test]
fn lines_after_a_compaction_are_found() {
    for sync in [false, true] {
        let (dir, mut journal) = new_journal();
        journal.journal_changes(&[change(1, 0, 1)]).unwrap();
        NEXT.set(Fails {
            sync,
            ..Fails::default()
        });
        assert_eq!(journal.compact().is_err(), sync);
        NEXT.set(Fails::default());
        journal.journal_changes(&[change(2, 0, 1)]).unwrap();
        assert_eq!(read_back(&dir).entries.len(), 2);
    }
}

/// If a disk accepts any part of a batch, or loses all of it, whether or not the part can be cut off: are the changes
/// refused, and the originals before and after it kept, without invented ones?
#[test]
fn a_short_write_refuses_the_batch_and_keeps_all_originals() {
    let batch = [change(2, 0, 1), change(1, 1, 3), change(3, 0, 1)];
    let mut text = Vec::new();
    for IntendedChange {
        object,
        current: now,
        target: wanted,
        follows_cpuset: follows,
    } in batch.clone()
    {
        append_line(
            &mut text,
            &JournalRecord::Original {
                object,
                original: now,
                ours: vec![wanted],
                follows,
                family: None,
            },
        );
    }
    for room in (0..=text.len() + 1).step_by(3).chain([text.len()]) {
        for cut in [false, true] {
            let (dir, mut journal) = new_journal();
            journal.journal_changes(&[change(1, 0, 1)]).unwrap();
            let entries_before = journal.entries().clone();
            let room_bytes = (room <= text.len()).then_some(room);
            journal.file.fails = Fails {
                room_bytes,
                sync: room_bytes.is_none(),
                cut,
            };
            assert!(
                journal.journal_changes(&batch).is_err(),
                "{room} bytes taken"
            );
            assert_eq!(
                journal.entries(),
                &entries_before,
                "{room} bytes taken, cut {cut}"
            );
            // Another process changes the object that we could not change: its new state is now the original.
            journal
                .journal_changes(&[change(2, 5, 1), change(4, 0, 1)])
                .unwrap();
            journal.file.fails = Fails::default();
            journal.journal_changes(&[change(1, 1, 2)]).unwrap();
            let recovered = read_back(&dir);
            for (object, entry) in journal.entries() {
                assert_eq!(
                    recovered.entries[object].original, entry.original,
                    "{room} bytes taken, cut fails: {cut}"
                );
                assert!(
                    entry
                        .applied_states
                        .iter()
                        .all(|state| recovered.entries[object].applied_states.contains(state))
                );
            }
            // An object of the failed batch may be in it, in its original state: restoring that changes nothing.
            let extra = recovered
                .entries
                .keys()
                .filter(|object| !journal.entries().contains_key(object));
            assert!(
                extra.clone().count() <= usize::from(cut) && recovered.damaged_lines.is_empty()
            );
            assert!(!cut || extra.clone().all(|object| *object == affinity(3)));
        }
    }
}

/// If a disk stays full: is every change refused, and does everything work as before once there is room again?
#[test]
fn a_full_disk_refuses_the_change_and_keeps_the_journal() {
    let (dir, mut journal) = new_journal();
    journal.journal_changes(&[change(1, 0, 1)]).unwrap();
    let good = std::mem::replace(
        &mut journal.file.file,
        OpenOptions::new().write(true).open("/dev/full").unwrap(),
    );
    for _ in 0..3 {
        assert!(journal.journal_changes(&[change(2, 0, 1)]).is_err());
        assert!(!journal.entries().contains_key(&affinity(2)));
    }
    journal.file.file = good;
    journal.journal_changes(&[change(3, 0, 1)]).unwrap();
    assert_eq!(read_back(&dir).entries.len(), 2);
}
