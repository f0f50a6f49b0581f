//! Profiles that a daemon has stored, exported to files.

use std::path::Path;

use crate::common::run;

/// Writes a state directory with the profile of one program of a unit.
fn write_state(dir: &Path, profile: &serde_json::Value) {
    let key = serde_json::json!({ "kind": "unit", "service": "store.service", "program": "store" });
    let profiles = serde_json::json!([{ "key": key, "profile": profile, "last_use": 1 }]);
    let state = serde_json::json!({ "format": 1, "profiles": profiles });
    std::fs::create_dir(dir.join("state")).unwrap();
    std::fs::write(dir.join("state/service-profiles.json"), state.to_string()).unwrap();
}

/// Does a forecast from an exported profile equal that from the profile that was stored, and is its curve shown? Does a
/// wrong service name those that are stored, and is a file not overwritten?
#[test]
fn an_exported_profile_forecasts_like_its_original() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let machine = "xeon-x5365-4";
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings/gzip.cmt");
    run(
        at,
        &[
            "profile",
            recording,
            "--machine",
            machine,
            "-o",
            "original.profile.json",
        ],
    )
    .ok();
    let mut original: serde_json::Value =
        serde_json::from_slice(&std::fs::read(at.join("original.profile.json")).unwrap()).unwrap();
    // A daemon samples no accesses, so the comparison is with a profile without them.
    original.as_object_mut().unwrap().remove("sample").unwrap();
    std::fs::write(at.join("original.profile.json"), original.to_string()).unwrap();
    write_state(at, &original["profile"]);
    let list = run(
        at,
        &["profile", "export", "unit/store", "--state-dir", "state"],
    )
    .ok();
    assert!(
        list.out.contains("store.service-store.profile.json"),
        "{}",
        list.out
    );
    let view = run(at, &["profile", "store.service-store.profile.json"]).ok();
    let is_shown = |words: &str| view.out.contains(words);
    assert!(
        is_shown("store: measured while it ran") && is_shown("misses per 1000 instructions"),
        "{}",
        view.out
    );
    let slowdowns = |file: &str| {
        let prediction = run(
            at,
            &["predict", file, recording, "--machine", machine, "--json"],
        )
        .json();
        prediction["matrix"]["values"].clone()
    };
    let exported = slowdowns("store.service-store.profile.json");
    assert!(exported.is_array(), "{exported}");
    assert_eq!(exported, slowdowns("original.profile.json"));
    run(at, &["profile", "export", "--state-dir", "state"]).exits_with(1, &["the file exists"]);
    let words = "found web, expected one of the stored services: unit/store.service";
    run(at, &["profile", "export", "web", "--state-dir", "state"]).exits_with(1, &[words]);
}

/// Does a service with a name longer than a file's get a file, and do the others get theirs although one cannot be
/// written?
#[test]
fn a_long_service_name_does_not_end_the_export() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings/gzip.cmt");
    let machine = "xeon-x5365-4";
    run(
        at,
        &["profile", recording, "--machine", machine, "-o", "p.json"],
    )
    .ok();
    let profile: serde_json::Value =
        serde_json::from_slice(&std::fs::read(at.join("p.json")).unwrap()).unwrap();
    let entry = |service: &str| {
        let key = serde_json::json!({ "kind": "unit", "service": service, "program": "x" });
        serde_json::json!({ "key": key, "profile": profile["profile"], "last_use": 1 })
    };
    let long_name = "y".repeat(250);
    let profiles = serde_json::json!([entry("a.service"), entry(&long_name), entry("z.service")]);
    let state = serde_json::json!({ "format": 1, "profiles": profiles });
    std::fs::create_dir(at.join("state")).unwrap();
    std::fs::write(at.join("state/service-profiles.json"), state.to_string()).unwrap();
    let export = [
        "profile",
        "export",
        "--state-dir",
        "state",
        "-o",
        "out",
        "--force",
    ];
    std::fs::create_dir(at.join("out")).unwrap();
    run(at, &export).ok();
    let names = || std::fs::read_dir(at.join("out")).unwrap().count();
    assert_eq!(names(), 3);

    std::fs::remove_dir_all(at.join("out")).unwrap();
    std::fs::create_dir_all(at.join("out/a.service-x.profile.json")).unwrap();
    run(at, &export).exits_with(1, &["a.service-x.profile.json"]);
    assert_eq!(names(), 3, "the others are written");
}
