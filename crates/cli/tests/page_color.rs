//! Programs on frames of some colors: is the output the same, whichever process is killed meanwhile?
//!
//! If pages cannot be moved, or colors cannot be distinguished now, the tests report it and end.

mod common;

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;
use cachemate_linux::act::colors::agents::AgentReport;
use cachemate_linux::act::colors::discover::PATIENCE;
use cachemate_linux::act::colors::migration;
use cachemate_linux::kernel::{Kernel, LinuxHost};
use common::not_shown::report_unchecked;
use common::{ChildGuard, acting_config, command, run, start_daemon, status_when, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The message of a run if the host moved frames, or disturbed the verification, after the colors were distinguished:
/// this can happen on a noisy host at any time, and the refusal is correct.
const MOVED: &str = "no longer of one color";

/// The reason why programs cannot be colored here, if any. Tried once and for twenty seconds, of which a host
/// whose colors can be distinguished needs a few.
fn unusable_reason() -> Option<&'static str> {
    static CAUSE: OnceLock<Option<String>> = OnceLock::new();
    let tried = CAUSE.get_or_init(|| {
        if let Err(unusable) = migration::measure_page_move_ns() {
            return Some(unusable.reason);
        }
        let dir = tempfile::tempdir().unwrap();
        let outcome = run(dir.path(), &["page-color", "discover", "--timeout", "20"]);
        (outcome.code != Some(0)).then_some(outcome.err)
    });
    tried.as_deref()
}

/// Variable with the number of additions by each of two threads, if this file's program is run for another test.
const ADDITIONS: &str = "CACHEMATE_TEST_ADDITIONS";

/// Two threads add to counters on pages that are not moved: is every addition there at the end?
///
/// The other tests color this program, and move its pages meanwhile.
#[test]
fn no_addition_is_lost_on_pages_that_do_not_move() {
    let each = std::env::var(ADDITIONS).map_or(1_000_000, |each| each.parse().unwrap());
    let stop = Arc::default();
    signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop)).unwrap();
    cachemate_bench::loads::run("count", each, stop).unwrap();
}

/// The program that counts, followed by a marker that distinguishes it from others.
fn counting_command(marker: &str) -> [String; 4] {
    let own_path = std::env::current_exe().unwrap().display().to_string();
    [
        own_path,
        "--exact".to_string(),
        "no_addition_is_lost_on_pages_that_do_not_move".to_string(),
        marker.to_string(),
    ]
}

/// Does a colored program print its usual output, exit with its own code, and have its pages in the right colors?
///
/// Cost: twenty seconds of wall time on a host whose colors cannot be distinguished.
#[test]
fn a_colored_program_prints_its_usual_output() {
    let dir = tempfile::tempdir().unwrap();
    if let Some(reason) = unusable_reason() {
        report_unchecked("a program in colors", reason);
        return;
    }
    let numbers: String = (0..60_000u64)
        .map(|index| format!("{}\n", index.wrapping_mul(7_919) % 100_003))
        .collect();
    std::fs::write(dir.path().join("numbers"), numbers).unwrap();
    let sort = ["sort", "--parallel=2", "-S", "8M", "numbers"];
    let args = [
        &[
            "page-color",
            "run",
            "--colors",
            "0-7",
            "--report",
            "r.json",
            "--",
        ][..],
        &sort[..],
    ]
    .concat();
    let colored = run(dir.path(), &args);
    if colored.code == Some(1) && colored.err.contains(MOVED) {
        report_unchecked("a program in colors", colored.err);
        return;
    }
    let colored = colored.ok();
    let plain = std::process::Command::new("sort")
        .args(&sort[1..])
        .current_dir(&dir)
        .output()
        .unwrap();
    assert!(colored.out.as_bytes() == plain.stdout, "another output");
    let report = std::fs::read_to_string(dir.path().join("r.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let figures = &report["processes"][0]["agent"]["account"]["Ok"];
    let figure_of = |name: &str| figures[name].as_u64().unwrap();
    assert!(
        figure_of("faults") > 0 && figure_of("allowed_pages") > 0,
        "{figures}"
    );
    assert_eq!(
        (
            figure_of("lost_pages"),
            figure_of("max_held") <= figure_of("max_hold")
        ),
        (0, true),
        "{figures}"
    );
    let exits = run(
        dir.path(),
        &[
            "page-color",
            "run",
            "--colors",
            "0-7",
            "--",
            "sh",
            "-c",
            "exit 7",
        ],
    );
    assert!(
        exits.code == Some(7) || exits.err.contains(MOVED),
        "{:?}: {}",
        exits.code,
        exits.err
    );
}

/// The directory of the counting process, once its agent is running.
/// The agent's directory of the program with this marker, or its process and the reason why the agent did not start.
/// A refusal is no fault: a noisy host may hide the difference between hits and misses just then, and the program runs
/// as usual.
fn agent_of(marker: &str) -> Option<Result<PathBuf, (i32, String)>> {
    for session in std::fs::read_dir("/dev/shm/cachemate-color")
        .ok()?
        .flatten()
    {
        for process in std::fs::read_dir(session.path())
            .into_iter()
            .flatten()
            .flatten()
        {
            let pid = process.file_name().to_string_lossy().into_owned();
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let counts = String::from_utf8_lossy(&line).ends_with(&format!("moves\0{marker}\0"));
            let report = counts
                .then(|| AgentReport::read(&LinuxHost::new("/"), &process.path()).ok())
                .flatten();
            if let Some(report) = report {
                let refusal = |reason| (pid.parse().unwrap(), reason);
                return Some(report.account.map(|_| process.path()).map_err(refusal));
            }
        }
    }
    None
}

/// If the launcher is killed repeatedly while the program's pages change color: does the program end as usual, without
/// losing an addition?
///
/// Cost: 10 s of CPU, because two threads add until their pages have moved.
#[test]
fn a_recolored_program_ends_as_usual_if_its_launcher_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    if let Some(reason) = unusable_reason() {
        report_unchecked("a launcher that is killed", reason);
        return;
    }
    let each = format!("300{:05}", std::process::id() % 100_000); // tells our program from others
    let line = format!(
        "'{}' && echo right >result || echo wrong >result",
        counting_command(&each).join("' '")
    );
    let args = [
        "page-color",
        "run",
        "--colors",
        "0-7",
        "--",
        "sh",
        "-c",
        &line,
    ];
    let mut launcher = command(dir.path(), &args)
        .env(ADDITIONS, &each)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let (mut turns, mut killed) = (0u32, false);
    let result = dir.path().join("result");
    while std::fs::read_to_string(&result).map_or(0, |text| text.len()) < 6 {
        assert!(
            start.elapsed() < PATIENCE + Duration::from_secs(180),
            "the program did not end, {turns} turns"
        );
        let agent = agent_of(&each);
        if let Some(Err((_, reason))) = &agent {
            launcher.wait().unwrap(); // ends with the program, whose additions are few
            report_unchecked("a launcher that is killed", reason);
            return;
        }
        if let Some(Ok(agent)) = agent {
            let wanted = if turns % 2 == 0 {
                "00000000ffffff00a\n"
            } else {
                "00000000000000ffa\n"
            };
            let written = std::fs::OpenOptions::new()
                .write(true)
                .open(agent.join("wanted"))
                .and_then(|mut file| std::io::Write::write_all(&mut file, wanted.as_bytes()));
            turns += u32::from(written.is_ok());
        }
        // Rejected before the program started.
        if turns == 0
            && launcher
                .try_wait()
                .unwrap()
                .is_some_and(|status| !status.success())
            && !result.exists()
        {
            report_unchecked(
                "a launcher that is killed",
                "the colors are no longer told apart",
            );
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

fn signal(pid: i32, signal: Signal) {
    // A process that has exited needs no signal.
    let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
}

/// Half of the program's colors and the other half alternately, twice a second.
const HALVES: &str = "[policy.parameters]\nperiod_ns = 1_000_000_000\n\
    [[policy.parameters.steps]]\nshares = [\"4-7\"]\n\
    [[policy.parameters.steps]]\nfrom_ns = 500_000_000\nshares = [\"0-3\"]\n";

/// A colored program that counts, its agent's directory, and a daemon that changes its colors twice a second; with
/// `shake` also its CPUs, weights and turns, five times a second.
struct RecoloredProgram {
    dir: tempfile::TempDir,
    program: ChildGuard,
    agent: PathBuf,
    daemon: ChildGuard,
    cpus_before: CpuSet,
}

/// The initial colors of the program, in the form of its `wanted` file.
const BEFORE: &str = "00000000000000ffa\n";

impl RecoloredProgram {
    /// Starts both.
    ///
    /// # Errors
    /// The reason why the program cannot be colored now.
    fn start(case: usize, shake: bool) -> Result<Self, String> {
        let dir = tempfile::tempdir().unwrap();
        // Practically endless, and distinguishes this program from others.
        let each = format!("9000000{case:02}{:05}", std::process::id() % 100_000);
        let counting = counting_command(&each);
        let mut args = vec!["page-color", "run", "--colors", "0-7", "--"];
        args.extend(counting.iter().map(String::as_str));
        let mut program = command(dir.path(), &args);
        let mut program = ChildGuard(
            program
                .env(ADDITIONS, &each)
                .stdout(Stdio::null())
                .spawn()
                .unwrap(),
        );
        let start = Instant::now();
        let agent = loop {
            match agent_of(&each) {
                Some(Ok(agent)) => break agent,
                Some(Err((pid, reason))) => {
                    signal(pid, Signal::KILL);
                    return Err(reason);
                }
                None => {}
            }
            if program.0.try_wait().unwrap().is_some() {
                return Err("the colors are no longer told apart".to_string());
            }
            assert!(
                start.elapsed() < PATIENCE + Duration::from_secs(180),
                "no agent came"
            );
            std::thread::sleep(Duration::from_millis(10));
        };
        let pid = agent.file_name().unwrap().to_string_lossy().into_owned();
        let cpus_before = LinuxHost::new("/").affinity(pid.parse().unwrap()).unwrap();
        let config = if shake {
            acting_config("shake", 200, &pid)
        } else {
            acting_config("static-partition", 50, &pid) + HALVES
        };
        let daemon = start_daemon(dir.path(), &config);
        Ok(RecoloredProgram {
            dir,
            program,
            agent,
            daemon,
            cpus_before,
        })
    }

    /// The first status that meets the condition, which may hold for only a few milliseconds.
    fn until(&self, subject: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let patience = (Duration::from_millis(3), Duration::from_secs(180));
        status_when(self.dir.path(), subject, patience, wanted)
    }

    /// Waits until the agent has just started to change colors, according to its own report, which is polled far more
    /// often than a window ends.
    fn until_moving(&self) {
        let read_mask = || {
            AgentReport::read(&LinuxHost::new("/"), &self.agent)
                .ok()?
                .counter("mask")
        };
        let (mask_before, start) = (read_mask(), Instant::now());
        while read_mask() == mask_before {
            assert!(
                start.elapsed() < Duration::from_secs(180),
                "the agent takes up no other colors: {mask_before:?}"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn wanted(&self) -> String {
        std::fs::read_to_string(self.agent.join("wanted")).unwrap_or_default()
    }

    fn journal(&self) -> PathBuf {
        self.dir.path().join("state/restore.journal")
    }

    /// Waits until everything that the daemon changed is restored.
    fn put_back(&self, case: &str) {
        until(&format!("{case}: the end of the journal"), || {
            !self.journal().exists()
        });
    }
}

/// Does a share in colors move the pages of a running program, shown as pending until the move ends? If the daemon, the
/// guardian, both, or the program with its agent are killed meanwhile: does everything else continue or end as usual,
/// without losing an addition, with the colors restored?
///
/// Cost: 30 s of CPU if colors can be distinguished, because five programs compute until they have been recolored.
#[test]
fn a_plan_recolors_a_running_program_despite_kills() {
    if let Some(reason) = unusable_reason() {
        report_unchecked("a plan in colors", reason);
        return;
    }
    for (index, case) in ["nobody", "daemon", "guardian", "both", "program"]
        .into_iter()
        .enumerate()
    {
        let mut shown = match RecoloredProgram::start(index, case == "both") {
            Ok(shown) => shown,
            Err(reason) => {
                report_unchecked("a plan in colors", reason);
                return;
            }
        };
        let under_way = |status: &Value| {
            status["pending"]
                .as_array()
                .is_some_and(|pending| !pending.is_empty())
        };
        if case == "nobody" {
            let there = |share: &Value| {
                share["colors"].is_string() && share["allowed_page_share"].as_f64() >= Some(0.99)
            };
            let pending = shown.until("pages under way", under_way);
            assert!(pending["shares"][0]["colors"].is_string(), "{pending}");
            shown.until("all pages there", |status| {
                !under_way(status)
                    && status["shares"]
                        .as_array()
                        .is_some_and(|shares| shares.iter().any(there))
            });
        }
        let status = shown.until("a guardian", |status| status["guardian_pid"].is_u64());
        let (daemon, guardian) = (
            shown.daemon.pid(),
            status["guardian_pid"].as_u64().unwrap() as i32,
        );
        let program: i32 = shown
            .agent
            .file_name()
            .unwrap()
            .to_string_lossy()
            .parse()
            .unwrap();
        shown.until_moving();
        match case {
            "daemon" => signal(daemon, Signal::KILL),
            "guardian" => signal(guardian, Signal::KILL),
            "both" => [guardian, daemon]
                .into_iter()
                .for_each(|pid| signal(pid, Signal::KILL)),
            "program" => signal(program, Signal::KILL),
            _ => {}
        }
        match case {
            "daemon" => shown.put_back(case),
            "both" => {
                let _ = shown.daemon.0.wait();
                run(shown.dir.path(), &["restore", "--state-dir", "state"]).ok();
                shown.put_back(case);
            }
            _ => {
                if case == "program" {
                    shown.until("life without the program", |status| {
                        status["tasks"] == Value::Array(Vec::new())
                    });
                }
                signal(daemon, Signal::TERM);
                let ended = shown.daemon.0.wait().unwrap();
                assert!(ended.success(), "{case}: the daemon ended with {ended}");
                shown.put_back(case);
            }
        }
        if case != "program" {
            assert!(
                LinuxHost::new("/")
                    .stat(program)
                    .is_ok_and(|stat| stat.state != 'Z'),
                "{case}: the program ended early"
            );
            assert_eq!(shown.wanted(), BEFORE, "{case}");
            assert_eq!(
                LinuxHost::new("/").affinity(program).unwrap(),
                shown.cpus_before,
                "{case}"
            );
        }
        signal(program, Signal::TERM);
        let code = shown.program.0.wait().unwrap().code();
        assert_eq!(
            code,
            Some(if case == "program" { 137 } else { 0 }),
            "{case}: an addition was lost, or it crashed"
        );
    }
}
