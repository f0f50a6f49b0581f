//! Builds the preloaded library of `cachemate color run` with the same compiler, so that it can be part of the command.
//!
//! Cargo cannot make one crate's shared library an input of another; the agent has no dependencies, so one call of the
//! compiler does.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

/// Whatever a simulated result depends on: rooms, data that comes with the program, versions of what it is built from.
const RESULTS_DEPEND_ON: &[&str] = &[
    "../core/src",
    "../locality/src",
    "../pipeline/src",
    "../policy/src",
    "../repro/src",
    "../sim/src",
    "../spec/src",
    "../sweep/src/job.rs",
    "../trace/src",
    "src/commands/mrc.rs",
    "src/commands/sim.rs",
    "src/sweeping.rs",
    "../../machines",
    "../../Cargo.lock",
];

fn main() {
    fingerprint_sources();
    name_version();
    build_agent();
}

/// The version, with the commit in what is released. Builds for work leave it out: each commit would build them anew.
fn name_version() {
    println!("cargo::rerun-if-env-changed=CACHEMATE_COMMIT");
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let released = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    // Sources without their history, such as an archive, name it themselves or not at all.
    let commit =
        env::var("CACHEMATE_COMMIT").ok().or_else(|| git(&["rev-parse", "--short=12", "HEAD"]).filter(|_| released));
    if released {
        for file in ["HEAD", "logs/HEAD"].iter().filter_map(|file| git(&["rev-parse", "--git-path", file])) {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    let commit = commit.filter(|commit| !commit.is_empty()).map_or(String::new(), |commit| format!(" ({commit})"));
    println!("cargo::rustc-env=CACHEMATE_VERSION={version}{commit}");
}

fn git(args: &[&str]) -> Option<String> {
    let answer = Command::new("git").args(args).output().ok().filter(|answer| answer.status.success())?;
    Some(String::from_utf8(answer.stdout).ok()?.trim().to_string())
}

/// A sweep's results are of one version; this names it, the same on every host that builds the same sources.
fn fingerprint_sources() {
    let (mut files, mut left) = (Vec::new(), RESULTS_DEPEND_ON.iter().map(PathBuf::from).collect::<Vec<_>>());
    while let Some(path) = left.pop() {
        println!("cargo::rerun-if-changed={}", path.display());
        match std::fs::read_dir(&path) {
            Ok(entries) => left.extend(entries.flatten().map(|entry| entry.path())),
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
        // FNV-1a over names and contents: tells versions apart, nothing more.
        for byte in file.to_string_lossy().bytes().chain(bytes) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    println!("cargo::rustc-env=CACHEMATE_SOURCES={hash:016x}");
}

fn build_agent() {
    let agent = PathBuf::from("../agent/src");
    println!("cargo::rerun-if-changed={}", agent.display());
    println!("cargo::rerun-if-changed=build.rs");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let library = PathBuf::from(variable("OUT_DIR")).join("libcachemate_color.so");
    let mut compiler = Command::new(variable("RUSTC"));
    compiler.args(["--edition", "2024", "--crate-name", "cachemate_color", "--crate-type", "cdylib"]);
    compiler.args(["-C", "opt-level=3", "-C", "panic=abort", "-C", "strip=debuginfo"]);
    // Everything is bound when it is loaded: the handler's thread must not run the dynamic linker.
    compiler.args(["-C", "link-arg=-Wl,-z,now", "-C", "link-arg=-nostartfiles", "--cfg", "feature=\"preload\""]);
    if variable("TARGET") != variable("HOST") {
        compiler.args(["--target", &variable("TARGET")]);
    }
    compiler.arg(agent.join("lib.rs")).arg("-o").arg(&library);
    match compiler.status() {
        Ok(status) if status.success() => {}
        Ok(status) => {
            eprintln!("the agent of 'cachemate color run' was not built: {compiler:?} ended with {status}");
            exit(1);
        }
        Err(error) => {
            eprintln!("the agent of 'cachemate color run' was not built: {compiler:?}: {error}");
            exit(1);
        }
    }
}
