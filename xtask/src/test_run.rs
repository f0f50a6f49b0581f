//! Runs the workspace's tests as `cargo test` does, but two test programs at a time, and measures each test.
//!
//! Tests of one program run one after another, so that the CPU time between two results belongs to one test. Programs
//! that manage this host run one at a time, because the host has only one set of masks, cgroups and colors.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use serde::Deserialize;

use crate::ci_time::{StageCost, append, process_cpu_s};

/// Packages whose tests change this host, or fail if other processes change it meanwhile.
const HOST_PACKAGES: [&str; 5] = ["agent", "bench", "cli", "daemon", "linux"];
/// The test program of these packages that only reads files and computes.
const PURE_PROGRAM: &str = "cli/offline";
const TEST_STAGE: &str = "tests";

/// One compiled test program.
#[derive(Clone, PartialEq, Debug)]
struct TestProgram {
    name: String,
    executable: PathBuf,
    dir: PathBuf,
    uses_host: bool,
}

/// A message of cargo; only fields about test programs are read.
#[derive(Deserialize)]
struct CargoMessage {
    reason: String,
    #[serde(default)]
    manifest_path: PathBuf,
    executable: Option<PathBuf>,
    profile: Option<CargoProfile>,
    target: Option<CargoTarget>,
}

#[derive(Deserialize)]
struct CargoProfile {
    test: bool,
}

#[derive(Deserialize)]
struct CargoTarget {
    name: String,
    kind: Vec<String>,
}

/// One event of a test program in libtest's JSON.
#[derive(Deserialize)]
struct TestEvent {
    #[serde(rename = "type")]
    kind: String,
    event: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    stdout: String,
}

/// Results of all programs so far.
#[derive(Default)]
struct TestSummary {
    passed: usize,
    ignored: usize,
    failures: Vec<String>,
    costs: Vec<StageCost>,
}

/// Builds and runs all tests, including those in doc comments. `filter` contains parts of tests' names, or is empty.
pub fn run(root: &Path, filter: &[&str]) -> Result<(), String> {
    let (start, start_cpu_s) = (Instant::now(), process_cpu_s("self").unwrap_or_default());
    let programs = build(root)?;
    let build_end_s = process_cpu_s("self").unwrap_or_default();
    append(
        root,
        &StageCost {
            name: "test build".into(),
            cpu_s: build_end_s - start_cpu_s,
            wall_s: start.elapsed().as_secs_f64(),
            tests: Vec::new(),
        },
    )?;

    let start = Instant::now();
    let summary = Mutex::new(TestSummary::default());
    let queue = Mutex::new(programs);
    let host = Mutex::new(());
    std::thread::scope(|scope| {
        // One lane starts with programs that change the host, the other with all other programs.
        for prefers_host in [true, false] {
            let (summary, queue, host) = (&summary, &queue, &host);
            scope.spawn(move || {
                while let Some(program) = next_program(queue, prefers_host) {
                    let guard = program.uses_host.then(|| host.lock());
                    run_program(root, &program, filter, summary);
                    drop(guard);
                }
            });
        }
    });

    let mut summary = summary
        .into_inner()
        .map_err(|_| "a lane of tests panicked")?;
    if filter.is_empty() {
        run_doc_tests(root, &mut summary);
    }

    summary.costs.sort_by(|a, b| {
        b.cpu_s
            .total_cmp(&a.cpu_s)
            .then_with(|| a.name.cmp(&b.name))
    });
    let cost = StageCost {
        name: TEST_STAGE.into(),
        cpu_s: process_cpu_s("self").unwrap_or_default() - build_end_s,
        wall_s: start.elapsed().as_secs_f64(),
        tests: summary.costs,
    };
    append(root, &cost)?;
    for name in &summary.failures {
        println!("failed: {name}");
    }

    println!(
        "{} passed, {} failed, {} skipped",
        summary.passed,
        summary.failures.len(),
        summary.ignored
    );
    if summary.failures.is_empty() {
        Ok(())
    } else {
        Err(format!("{} tests failed", summary.failures.len()))
    }
}

/// A call of cargo without the variables that `cargo run` sets for this package. Build scripts that
/// depend on them would run again, and everything that depends on their crates would be built
/// again.
fn cargo_command() -> Command {
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_string()));
    for (name, _) in std::env::vars().filter(|(name, _)| {
        ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    }) {
        command.env_remove(name);
    }
    command
}

/// Compiles everything, and lists the test programs.
fn build(root: &Path) -> Result<Vec<TestProgram>, String> {
    let output = cargo_command()
        .args([
            "test",
            "--workspace",
            "--locked",
            "--no-run",
            "--message-format",
            "json-render-diagnostics",
        ])
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err("the tests do not compile".to_string());
    }

    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(parse_test_program)
        .collect())
}

/// `None` if the message of cargo names no test program.
fn parse_test_program(line: &str) -> Option<TestProgram> {
    let message: CargoMessage = serde_json::from_str(line).ok()?;
    let (executable, target) = (message.executable?, message.target?);
    if message.reason != "compiler-artifact" || !message.profile?.test {
        return None;
    }

    let dir = message.manifest_path.parent()?.to_path_buf();
    let package = dir.file_name()?.to_string_lossy().into_owned();
    let is_test_file = target.kind.iter().any(|kind| kind == "test");
    let name = if is_test_file {
        format!("{package}/{}", target.name)
    } else {
        package.clone()
    };
    let uses_host = HOST_PACKAGES.contains(&package.as_str()) && name != PURE_PROGRAM;
    Some(TestProgram {
        name,
        executable,
        uses_host,
        dir,
    })
}

/// Takes the next program for a lane, preferably of the kind with which the lane starts.
fn next_program(queue: &Mutex<Vec<TestProgram>>, prefers_host: bool) -> Option<TestProgram> {
    let mut queue = queue.lock().ok()?;
    let preferred_index = queue
        .iter()
        .position(|program| program.uses_host == prefers_host);
    if queue.is_empty() {
        None
    } else {
        Some(queue.remove(preferred_index.unwrap_or(0)))
    }
}

/// One test at a time, so that each one's CPU time is known.
fn run_program(root: &Path, program: &TestProgram, filter: &[&str], summary: &Mutex<TestSummary>) {
    let spawn_result = Command::new(&program.executable)
        .args([
            "-Z",
            "unstable-options",
            "--format",
            "json",
            "--test-threads",
            "1",
        ])
        .args(filter)
        .current_dir(&program.dir)
        .env("RUSTC_BOOTSTRAP", "1") // libtest's JSON is for the nightly compiler otherwise
        .env("CARGO_MANIFEST_DIR", &program.dir)
        .env("CARGO_WORKSPACE_DIR", root)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();

    let mut child = match spawn_result {
        Ok(child) => child,
        Err(error) => {
            return update_summary(summary, |totals| {
                totals.failures.push(format!("{}: {error}", program.name))
            });
        }
    };
    let pid = child.id().to_string();
    let (mut cpu_s, mut test_start, mut is_complete) = (0.0, Instant::now(), false);
    let (mut passed, start_time) = (0, Instant::now());

    for line in BufReader::new(child.stdout.take().expect("piped above"))
        .lines()
        .map_while(Result::ok)
    {
        let Ok(event) = serde_json::from_str::<TestEvent>(&line) else {
            println!("{line}");
            continue;
        };
        is_complete |= event.kind == "suite" && event.event != "started";
        if event.kind != "test" {
            continue;
        }

        let name = format!("{}::{}", program.name, event.name);
        match event.event.as_str() {
            "ignored" => update_summary(summary, |totals| totals.ignored += 1),
            "ok" | "failed" => {
                let used_s = process_cpu_s(&pid).unwrap_or(cpu_s);
                let wall_s = test_start.elapsed().as_secs_f64();
                let cost = StageCost {
                    name: name.clone(),
                    cpu_s: used_s - cpu_s,
                    wall_s,
                    tests: Vec::new(),
                };
                cpu_s = used_s;
                let is_ok = event.event == "ok";
                passed += usize::from(is_ok);
                if !is_ok {
                    println!("---- {name} failed:\n{}", event.stdout);
                }

                update_summary(summary, |totals| {
                    totals.costs.push(cost);
                    if is_ok {
                        totals.passed += 1
                    } else {
                        totals.failures.push(name)
                    }
                });
            }
            _ => continue,
        }
        test_start = Instant::now();
    }

    let status = child.wait();
    if !is_complete {
        update_summary(summary, |totals| {
            totals
                .failures
                .push(format!("{} ended early: {status:?}", program.name))
        });
    }

    println!(
        "{:<40} {passed:>4} passed {cpu_s:>7.1} CPU s {:>7.1} s",
        program.name,
        start_time.elapsed().as_secs_f64()
    );
}

fn update_summary(summary: &Mutex<TestSummary>, change: impl FnOnce(&mut TestSummary)) {
    if let Ok(mut summary) = summary.lock() {
        change(&mut summary);
    }
}

/// Runs the examples in doc comments with rustdoc.
fn run_doc_tests(root: &Path, summary: &mut TestSummary) {
    let doc_run = cargo_command()
        .args(["test", "--workspace", "--locked", "--doc", "--quiet"])
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output();

    match doc_run {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            summary.passed += text.lines().filter_map(parse_passed_count).sum::<usize>();
            if !output.status.success() {
                println!("{text}");
                summary
                    .failures
                    .push("examples in doc comments".to_string());
            }
        }
        Err(error) => summary
            .failures
            .push(format!("examples in doc comments: {error}")),
    }
}

/// Parses the number in "test result: ok. 3 passed; ...".
fn parse_passed_count(line: &str) -> Option<usize> {
    line.strip_prefix("test result: ")?
        .split_once(". ")?
        .1
        .split_once(" passed")?
        .0
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARTIFACT: &str = r#"{"reason":"compiler-artifact","package_id":"x","manifest_path":"/w/crates/cli/Cargo.toml",
        "target":{"kind":["test"],"name":"kill"},"profile":{"test":true},"executable":"/w/target/kill-1"}"#;

    fn program(name: &str, uses_host: bool) -> TestProgram {
        TestProgram {
            name: name.into(),
            executable: PathBuf::new(),
            dir: PathBuf::new(),
            uses_host,
        }
    }

    /// Are only test programs taken from cargo's messages, each under its package's name?
    #[test]
    fn programs_of_tests_are_taken_from_cargos_messages() {
        let kill = parse_test_program(ARTIFACT).unwrap();
        assert_eq!((kill.name.as_str(), kill.uses_host), ("cli/kill", true));
        let unit = ARTIFACT
            .replace("[\"test\"]", "[\"lib\"]")
            .replace("crates/cli", "crates/core");
        let unit = parse_test_program(&unit).unwrap();
        assert_eq!((unit.name.as_str(), unit.uses_host), ("core", false));
        assert_eq!(
            parse_test_program(&ARTIFACT.replace("{\"test\":true}", "{\"test\":false}")),
            None
        );
        assert_eq!(
            parse_test_program("{\"reason\":\"build-finished\",\"success\":true}"),
            None
        );
    }

    /// Does each lane begin with its own kind and end with the other, so that nothing is left?
    #[test]
    fn lanes_share_all_programs() {
        let queue = Mutex::new(vec![
            program("a", true),
            program("b", false),
            program("c", true),
        ]);
        let take_next =
            |prefers_host| next_program(&queue, prefers_host).map(|program| program.name);
        assert_eq!(
            [
                take_next(false),
                take_next(false),
                take_next(true),
                take_next(true)
            ]
            .map(Option::unwrap_or_default),
            ["b", "a", "c", ""]
        );
    }

    /// Is the number of passed examples read, and no other line?
    #[test]
    fn passed_examples_are_counted() {
        assert_eq!(
            parse_passed_count("test result: ok. 12 passed; 0 failed; 1 ignored"),
            Some(12)
        );
        assert_eq!(parse_passed_count("running 12 tests"), None);
    }
}
