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

/// Does a forecast from an exported profile equal that from the profile that was stored, and is its curve shown? Does a wrong
/// service name those that are stored, and is a file not overwritten?
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
    let original: serde_json::Value =
        serde_json::from_slice(&std::fs::read(at.join("original.profile.json")).unwrap()).unwrap();
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
