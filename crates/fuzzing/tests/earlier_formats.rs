//! Files that earlier versions wrote.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cachemate_spec::{parse_machine, parse_scenario};
use cachemate_trace::{CmtReader, ProfileFile, RunLogReader, TraceReader};

fn path_in_crate(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Are run logs, profiles, recordings and sweeps of earlier versions read, and are scenarios and machines, which people
/// write, refused with the first key that has another name now?
#[test]
fn files_of_earlier_versions_are_read_or_refused_by_name() {
    for (path, format, windows) in [
        ("../trace/tests/earlier/run-log-4.jsonl", 4, 1),
        ("corpus/run-log/small", 3, 3),
    ] {
        let mut log = RunLogReader::open(path_in_crate(path)).unwrap();
        assert_eq!(log.header().format, format);
        assert_eq!(
            (0..)
                .take_while(|_| log.next_record().unwrap().is_some())
                .count(),
            windows,
            "{path}"
        );
    }

    let profile = ProfileFile::read(path_in_crate("corpus/profile/loop.json")).unwrap();
    assert!(
        profile
            .profile
            .misses_per_kilo_instr()
            .is_some_and(|curve| !curve.is_empty())
    );
    assert!(profile.curves[0].points[0].misses_per_kilo_instr.is_some());

    let bytes = std::fs::read(path_in_crate("corpus/trace/cmt-loop")).unwrap();
    let (mut records, mut batch) = (0, Vec::new());
    // The first byte chooses the reader of the fuzz target.
    let mut recording = CmtReader::new(&bytes[1..], "cmt-loop").unwrap();
    while recording.read_batch(&mut batch).unwrap() {
        records += batch.len();
    }
    assert!(records > 0);

    let sweep = path_in_crate("tests/earlier/sweep");
    let store = cachemate_sweep::Store::open_to_read(&sweep).unwrap();
    let manifest = store.manifest().unwrap();
    let point = BTreeMap::from([
        ("scenario".to_string(), "one.toml".into()),
        ("seed".to_string(), 1.into()),
    ]);
    assert_eq!(manifest.tasks[0].values().unwrap(), point);
    assert!(store.read(manifest.tasks[0].id).unwrap().is_some());

    let read_input = |dir: &BTreeMap<String, String>, name: &str| {
        std::fs::read_to_string(sweep.join(&dir[name])).unwrap()
    };
    let scenario = parse_scenario(
        "one.toml",
        &read_input(&manifest.header.scenarios, "one.toml"),
    )
    .unwrap_err()
    .to_string();
    assert_eq!(
        scenario,
        "one.toml:4:9: 'model' is now 'simulator'\n\
         one.toml:12:48: 'programs.goal.degradation_at_most' is now 'programs.goal.max_slowdown'"
    );
    let machine = parse_machine(
        "small.toml",
        &read_input(&manifest.header.machines, "small.toml"),
    )
    .unwrap_err()
    .to_string();
    assert_eq!(
        machine,
        "small.toml:55:16: 'memory.scheduling.demand_first' is now 'memory.scheduling.demand_priority'\n\
         small.toml:60:20: 'pages.move_page_cycles' is now 'pages.migration_cycles'"
    );
}
