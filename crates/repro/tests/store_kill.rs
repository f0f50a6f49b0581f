//! Does a store stay correct when its writers are killed?

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cachemate_repro::store::{MAX_DIR_BYTES, RunDir, StoredEntry, StoredLookup};

const DIR: &str = "CACHEMATE_TEST_STORE";
const KILLS: u64 = 20;
const ENTRIES: u64 = 40;

/// An entry of up to 200 KB that is determined by its number, so that a reader can verify it.
fn entry(number: u64) -> StoredEntry {
    let byte = |index: u64| {
        (index
            .wrapping_mul(number | 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            >> 40) as u8
    };
    let (kind, label, sources) = ("test".to_string(), "a run".to_string(), "s".to_string());
    let answer = (0..(number * 7_919) % 200_000).map(byte).collect();
    StoredEntry {
        kind,
        label,
        sources,
        inputs: number.to_string(),
        cpu_seconds: number as f64,
        answer,
    }
}

/// A writer that never ends; only the test below starts it.
#[test]
#[ignore = "a process of the other test"]
fn writer() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let dir = RunDir::new(Path::new(&dir), MAX_DIR_BYTES).unwrap();
    loop {
        (0..ENTRIES).for_each(|number| dir.store_entry(&entry(number)).unwrap());
    }
}

fn start(dir: &Path) -> std::process::Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "writer"])
        .env(DIR, dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.spawn().unwrap()
}

/// After two concurrent writers were killed at 20 moments, is every entry either whole or missing, and does a later
/// writer fill the gaps?
#[test]
fn entries_are_whole_or_missing_after_writers_are_killed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = RunDir::new(dir.path(), MAX_DIR_BYTES).unwrap();
    let mut intact_entries = 0;
    for kill in 0..KILLS {
        let mut writers = [start(dir.path()), start(dir.path())];
        // Kills fall between the time before the first entry and some entries later.
        std::thread::sleep(Duration::from_micros(5_000 + kill * kill * 997 % 60_000));
        writers.iter_mut().for_each(|writer| {
            writer.kill().unwrap();
            writer.wait().unwrap();
        });

        for file in dir.files().unwrap() {
            let stored = dir
                .read(&file)
                .unwrap()
                .unwrap()
                .unwrap_or_else(|error| panic!("{}: {error}", file.subpath().display()));
            let number = stored.inputs.parse().unwrap();
            assert_eq!(stored, entry(number), "kill {kill}");
            intact_entries += 1;
        }
    }

    assert!(intact_entries > 0, "the writers never came to write");
    (0..ENTRIES).for_each(|number| dir.store_entry(&entry(number)).unwrap());
    let is_hit = |number: u64| {
        matches!(
            dir.find_entry("test", "s", &number.to_string()),
            StoredLookup::Hit(_)
        )
    };
    assert!((0..ENTRIES).all(is_hit));
}
