//! Sets the version of the command, and the fingerprint of the sources on which results depend.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

/// Inputs of a simulated result: crates, bundled data, and the versions of dependencies.
const RESULTS_DEPEND_ON: &[&str] = &[
    "../auto/src",
    "../core/src",
    "../fleet/src",
    "../forecast/src",
    "../interval/src",
    "../locality/src",
    "../papers/src",
    "../pipeline/src",
    "../repro/src",
    "../scenario/src",
    "../sim/src",
    "../spec/src",
    "../study/src",
    "../trace/src",
    "src/complete/commands/sim.rs",
    "src/complete/interval_programs.rs",
    "../../machines",
    "../../Cargo.lock",
];

fn main() {
    fingerprint_sources();
    name_version();
    println!("cargo::rerun-if-changed=build.rs");
}

/// Sets the version. In release builds, the last tag, the number of commits since and the commit follow, as in
/// `v0.2.0-3-g0123456789ab`; without a tag, the commit alone. Development builds omit them, because they would otherwise
/// be rebuilt for each commit.
fn name_version() {
    println!("cargo::rerun-if-env-changed=CACHEMATE_COMMIT");
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let released = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    // Sources without their Git history, such as an archive, may provide the commit in this variable.
    let describe = ["describe", "--tags", "--long", "--always", "--abbrev=12"];
    let commit = env::var("CACHEMATE_COMMIT")
        .ok()
        .or_else(|| git(&describe).filter(|_| released));
    if released {
        for file in ["HEAD", "logs/HEAD", "refs/tags"]
            .iter()
            .filter_map(|file| git(&["rev-parse", "--git-path", file]))
            .filter(|file| Path::new(file).exists())
        {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    let commit = commit
        .filter(|commit| !commit.is_empty())
        .map_or(String::new(), |commit| format!(" ({commit})"));
    println!("cargo::rustc-env=CACHEMATE_VERSION={version}{commit}");
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .args(args)
        .output()
        .ok()
        .filter(|answer| answer.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_string())
}

/// Sets the fingerprint of the sources, which identifies the version to which a stored run belongs. It is the
/// same on every host that builds the same sources.
fn fingerprint_sources() {
    let (mut files, mut pending) = (
        Vec::new(),
        RESULTS_DEPEND_ON
            .iter()
            .map(PathBuf::from)
            .collect::<Vec<_>>(),
    );
    while let Some(path) = pending.pop() {
        println!("cargo::rerun-if-changed={}", path.display());
        match std::fs::read_dir(&path) {
            Ok(entries) => pending.extend(entries.flatten().map(|entry| entry.path())),
            Err(_) => files.push(path),
        }
    }
    files.sort();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        let Ok(bytes) = std::fs::read(&file) else {
            eprintln!("{}: cannot be read", file.display());
            exit(1);
        };
        // FNV-1a over names and contents suffices, because the fingerprint only distinguishes versions.
        for byte in file.to_string_lossy().bytes().chain(bytes) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    println!("cargo::rustc-env=CACHEMATE_SOURCES={hash:016x}");
}
