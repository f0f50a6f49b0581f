//! Do digests of sources change with sources that can change a run, and with no others?

// The build script's `main` runs when the crate is built.
#[allow(dead_code)]
#[path = "../build.rs"]
mod build;

use std::fs;
use std::path::Path;

use build::{Workspace, module_digests};

const FILES: [(&str, &str); 12] = [
    (
        "Cargo.lock",
        "[[package]]\nname = \"libm\"\nversion = \"0.2.1\"\n\n[[package]]\nname = \"clap\"\nversion = \"4.0.0\"\n",
    ),
    ("crates/core/Cargo.toml", "[dependencies]\n"),
    ("crates/core/src/lib.rs", "pub mod plan;\n"),
    ("crates/core/src/plan.rs", "//! A plan.\npub struct Plan;\n"),
    (
        "crates/sim/Cargo.toml",
        "[dependencies]\ncachemate-core.workspace = true\nlibm.workspace = true\n",
    ),
    (
        "crates/sim/src/lib.rs",
        "pub fn run() -> u32 { 1 }\n#[cfg(test)]\nmod tests;\n",
    ),
    ("crates/sim/src/tests.rs", "#[test]\nfn runs() {}\n"),
    ("crates/sim/src/programs.toml", "footprint_bytes = 1\n"),
    (
        "crates/papers/Cargo.toml",
        "[dependencies]\ncachemate-core.workspace = true\n",
    ),
    ("crates/papers/src/lib.rs", "pub fn decide() {}\n"),
    (
        "crates/repro/src/work.rs",
        "use cachemate_sim::run;\npub struct Work;\n",
    ),
    (
        "crates/repro/src/steered.rs",
        "use cachemate_papers::decide;\nuse crate::{Work, work::other};\n",
    ),
];

fn write(root: &Path, path: &str, text: &str) {
    let file = root.join(path);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, text).unwrap();
}

/// Whether the digests of `work` and of `steered` change when these files change.
fn changed_digests(edits: &[(&str, &str)]) -> [bool; 2] {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let manifest = "[dependencies]\ncachemate-sim.workspace = true\ncachemate-papers.workspace = true\nclap = \"4\"\n";
    write(root, "crates/repro/Cargo.toml", manifest);
    FILES
        .iter()
        .for_each(|(path, text)| write(root, path, text));
    let digests_before = module_digests(root, &Workspace::read(root));
    edits
        .iter()
        .for_each(|(path, text)| write(root, path, text));
    let after = module_digests(root, &Workspace::read(root));
    ["work", "steered"].map(|module| digests_before[module] != after[module])
}

/// Does code change the digests of all modules that reach it, through modules, crates, and locked versions?
#[test]
fn code_changes_the_digests_of_all_modules_that_reach_it() {
    assert_eq!(
        changed_digests(&[("crates/sim/src/lib.rs", "pub fn run() -> u32 { 2 }\n")]),
        [true, true]
    );
    assert_eq!(
        changed_digests(&[("crates/sim/src/programs.toml", "footprint_bytes = 2\n")]),
        [true, true]
    );
    assert_eq!(
        changed_digests(&[("crates/core/src/plan.rs", "pub struct Plan(u32);\n")]),
        [true, true]
    );
    assert_eq!(
        changed_digests(&[("crates/papers/src/lib.rs", "pub fn decide() { () }\n")]),
        [false, true]
    );
    assert_eq!(
        changed_digests(&[(
            "crates/repro/src/work.rs",
            "use cachemate_sim::run;\npub struct Work(u32);\n"
        )]),
        [true, true]
    );
    assert_eq!(
        changed_digests(&[(
            "crates/repro/src/steered.rs",
            "use cachemate_papers::decide;\nuse crate::Work;\n"
        )]),
        [false, true]
    );
    let lock_file_text = |libm: &str, clap: &str| {
        let package = |name: &str, version: &str| {
            format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n\n")
        };
        package("libm", libm) + &package("clap", clap)
    };
    assert_eq!(
        changed_digests(&[("Cargo.lock", &lock_file_text("0.2.2", "4.0.0"))]),
        [true, true],
        "a library that simulates"
    );
    assert_eq!(
        changed_digests(&[("Cargo.lock", &lock_file_text("0.2.1", "4.0.1"))]),
        [false, false],
        "one that does not"
    );
}

/// Do comments, blank lines, tests and other modules change no digest?
#[test]
fn comments_and_tests_change_no_digest() {
    let sim = "//! The simulator.\n\n/// Runs.\npub fn run() -> u32 { 1 }\n    // One.\n#[cfg(test)]\nmod tests;\n";
    assert_eq!(
        changed_digests(&[("crates/sim/src/lib.rs", sim)]),
        [false, false]
    );
    assert_eq!(
        changed_digests(&[(
            "crates/sim/src/tests.rs",
            "#[test]\nfn runs() { panic!() }\n"
        )]),
        [false, false]
    );
    let inline = "pub struct Work;\n#[cfg(test)]\nmod tests {\n    fn other() {}\n}\n";
    assert_eq!(
        changed_digests(&[(
            "crates/repro/src/work.rs",
            &format!("use cachemate_sim::run;\n{inline}")
        )]),
        [false, false]
    );
    assert_eq!(
        changed_digests(&[("crates/repro/src/figures.rs", "pub struct Figure;\n")]),
        [false, false]
    );
}
