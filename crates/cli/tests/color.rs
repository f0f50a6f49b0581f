//! Programs on frames of some colours: the same output, and the same whoever is killed meanwhile.
//!
//! Where pages cannot be moved, or colours not be told now, the tests say so in their output and end.

mod common;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use cachemate_linux::colors::moving;
use common::{command, run};

/// What a run says when the host moved frames, or the proof was disturbed, since the colours were told apart: a noisy host
/// may do so at any time, and refusing is right.
const MOVED: &str = "no longer of one colour";

/// Why programs cannot be coloured here, if so.
fn unusable(folder: &Path) -> Option<String> {
    if let Err(unusable) = moving::page_ns() {
        return Some(unusable.why);
    }
    let ran = run(folder, &["color", "run", "--colors", "0-7", "--", "true"]);
    (ran.code != Some(0)).then_some(ran.err)
}

fn own() -> &'static str {
    env!("CARGO_BIN_EXE_cachemate")
}

/// Does a coloured program print what it prints otherwise, end with its own exit code, and have its pages where they belong?
#[test]
fn a_coloured_program_does_what_it_does_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    if let Some(why) = unusable(folder.path()) {
        println!("not shown here: {why}");
        return;
    }
    let numbers: String = (0..60_000u64).map(|at| format!("{}\n", at.wrapping_mul(7_919) % 100_003)).collect();
    std::fs::write(folder.path().join("numbers"), numbers).unwrap();
    let sort = ["sort", "--parallel=2", "-S", "8M", "numbers"];
    let args = [&["color", "run", "--colors", "0-7", "--report", "r.json", "--"][..], &sort[..]].concat();
    let coloured = run(folder.path(), &args);
    if coloured.code == Some(1) && coloured.err.contains(MOVED) {
        println!("not shown here: {}", coloured.err);
        return;
    }
    let coloured = coloured.ok();
    let plain = std::process::Command::new("sort").args(&sort[1..]).current_dir(&folder).output().unwrap();
    assert!(coloured.out.as_bytes() == plain.stdout, "another output");
    let report = std::fs::read_to_string(folder.path().join("r.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let figures = &report["processes"][0]["agent"]["account"]["Ok"];
    let figure = |name: &str| figures[name].as_u64().unwrap();
    assert!(figure("faults") > 0 && figure("inside_pages") > 0, "{figures}");
    assert_eq!((figure("lost_pages"), figure("held_most") <= figure("hold_at_most")), (0, true), "{figures}");
    let exits = run(folder.path(), &["color", "run", "--colors", "0-7", "--", "sh", "-c", "exit 7"]);
    assert!(exits.code == Some(7) || exits.err.contains(MOVED), "{:?}: {}", exits.code, exits.err);
}

/// The folder of the process that counts, once its agent is at work.
fn agent_of(marker: &str) -> Option<PathBuf> {
    for session in std::fs::read_dir("/dev/shm/cachemate-color").ok()?.flatten() {
        for process in std::fs::read_dir(session.path()).into_iter().flatten().flatten() {
            let pid = process.file_name().to_string_lossy().into_owned();
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let counts = String::from_utf8_lossy(&line).ends_with(&format!("count\0{marker}\0"));
            if counts && std::fs::read_to_string(process.path().join("status")).is_ok_and(|text| text.contains("turn"))
            {
                return Some(process.path());
            }
        }
    }
    None
}

/// The launcher is killed while the program's pages change colour, again and again: does the program end as it would have,
/// no addition lost?
#[test]
fn a_program_whose_launcher_is_killed_while_it_is_recoloured_ends_right() {
    let folder = tempfile::tempdir().unwrap();
    if let Some(why) = unusable(folder.path()) {
        println!("not shown here: {why}");
        return;
    }
    let each = format!("300{:05}", std::process::id() % 100_000); // tells our program from others
    let line = format!("'{}' live-program count {each} && echo right >result || echo wrong >result", own());
    let args = ["color", "run", "--colors", "0-7", "--", "sh", "-c", &line];
    let mut launcher = command(folder.path(), &args).stdout(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let (mut turns, mut killed) = (0u32, false);
    let result = folder.path().join("result");
    while std::fs::read_to_string(&result).map_or(0, |text| text.len()) < 6 {
        assert!(start.elapsed() < Duration::from_secs(90), "the program did not end, {turns} turns");
        if let Some(agent) = agent_of(&each) {
            let wanted = if turns % 2 == 0 { "00000000ffffff00a\n" } else { "00000000000000ffa\n" };
            let written = std::fs::OpenOptions::new()
                .write(true)
                .open(agent.join("wanted"))
                .and_then(|mut file| std::io::Write::write_all(&mut file, wanted.as_bytes()));
            turns += u32::from(written.is_ok());
        }
        // Refused before the program began: nothing to see.
        if turns == 0 && launcher.try_wait().unwrap().is_some_and(|status| !status.success()) && !result.exists() {
            println!("not shown here: the colours are no longer told apart");
            return;
        }
        if turns == 2 && !killed {
            launcher.kill().unwrap();
            launcher.wait().unwrap();
            killed = true;
        }
        std::thread::sleep(Duration::from_millis(30));
    }
    let _ = launcher.kill();
    let _ = launcher.wait();
    assert_eq!(std::fs::read_to_string(&result).unwrap(), "right\n");
    println!("{turns} turns, launcher killed: {killed}");
}
