//! The loader of the gang scheduler. docs/sched-ext.md describes its commands and its socket.

mod machine;
mod scheduler;
mod service;
mod tasks;

use gangs::quantum::{GangFootprint, QuantumRefusal, TurnRequirements, access_ns, turn_ns};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const USAGE: &str = "usage:
  gangs run [--socket PATH] [--journal PATH] [--all]    attach, take plans over the socket, until it is told to stop
  gangs send [--socket PATH]                            send the lines of standard input, print the answers
  gangs reset [--journal PATH]                          restore the threads of a run that was killed
  gangs check                                           what is missing here for sched_ext
  gangs turn --footprint-bytes N --hit-ns N --miss-ns N --without-ns N --gangs N --longest-wait-ms N
                                                        how long a turn must be, or why there are no gangs";
const SOCKET: &str = "/run/gangs.sock";
const JOURNAL: &str = "/run/gangs.journal";
const LINE_BYTES: f64 = 64.0;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run_command(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("gangs: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_command(arguments: &[String]) -> Result<ExitCode, String> {
    let Some((name, rest)) = arguments.split_first() else {
        return Err(format!("found no command\n{USAGE}"));
    };
    let known_options: &[&str] = match name.as_str() {
        "run" => &["--socket", "--journal", "--all"],
        "send" => &["--socket"],
        "reset" => &["--journal"],
        "check" => &[],
        "turn" => &[
            "--footprint-bytes",
            "--hit-ns",
            "--miss-ns",
            "--without-ns",
            "--gangs",
            "--longest-wait-ms",
        ],
        other => return Err(format!("found the command '{other}'\n{USAGE}")),
    };
    let options = parse_options(rest, known_options)?;
    let path_option = |option: &str, standard: &str| {
        PathBuf::from(options.get(option).map_or(standard, String::as_str))
    };
    match name.as_str() {
        "run" => run(
            &path_option("--socket", SOCKET),
            &path_option("--journal", JOURNAL),
            options.contains_key("--all"),
        ),
        "send" => send_requests(&path_option("--socket", SOCKET)),
        "reset" => {
            let (_, restored) = tasks::PolicyJournal::open(&path_option("--journal", JOURNAL))?;
            println!("{restored} threads restored");
            Ok(ExitCode::SUCCESS)
        }
        "check" => {
            let missing_prerequisites = machine::missing_prerequisites();
            missing_prerequisites
                .iter()
                .for_each(|prerequisite| println!("missing: {prerequisite}"));
            Ok(if missing_prerequisites.is_empty() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
        _ => print_turn(&options),
    }
}

/// Parses options of the form `--name value`, and `--all`, which has no value.
fn parse_options(
    arguments: &[String],
    known_options: &[&str],
) -> Result<HashMap<String, String>, String> {
    let mut options = HashMap::new();
    let mut remaining_words = arguments.iter();
    while let Some(name) = remaining_words.next() {
        if !known_options.contains(&name.as_str()) {
            return Err(format!(
                "found '{name}', expected some of: {}\n{USAGE}",
                known_options.join(" ")
            ));
        }
        let value = if name == "--all" {
            Some(String::new())
        } else {
            remaining_words.next().cloned()
        };
        options.insert(
            name.clone(),
            value.ok_or_else(|| format!("{name}: found no value"))?,
        );
    }
    Ok(options)
}

fn run(socket: &Path, journal: &Path, schedules_all: bool) -> Result<ExitCode, String> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, stop.clone())
            .map_err(|error| format!("signals: {error}"))?;
    }
    service::Service::start(journal, schedules_all)?.run(socket, &stop)?;
    Ok(ExitCode::SUCCESS)
}

/// Sends each line of standard input over its own connection. The exit code is 1 if an answer is an error.
fn send_requests(socket: &Path) -> Result<ExitCode, String> {
    let describe_error = |error: std::io::Error| format!("{}: {error}", socket.display());
    let mut has_failed = false;
    for line in std::io::stdin().lines() {
        let line = line.map_err(|error| format!("standard input: {error}"))?;
        let mut client = std::os::unix::net::UnixStream::connect(socket).map_err(describe_error)?;
        client
            .write_all(format!("{line}\n").as_bytes())
            .map_err(describe_error)?;
        let mut answer = String::new();
        BufReader::new(&client)
            .read_line(&mut answer)
            .map_err(describe_error)?;
        has_failed |= answer.is_empty() || answer.starts_with("{\"error\"");
        print!("{answer}");
    }
    Ok(if has_failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn print_turn(options: &HashMap<String, String>) -> Result<ExitCode, String> {
    let number_option = |name: &str| -> Result<f64, String> {
        let text = options
            .get(name)
            .ok_or_else(|| format!("{name}: expected, not found"))?;
        text.parse()
            .map_err(|_| format!("{name}: found '{text}', expected a number"))
    };
    let footprint = GangFootprint {
        lines: number_option("--footprint-bytes")? / LINE_BYTES,
        hit_ns: number_option("--hit-ns")?,
        miss_ns: number_option("--miss-ns")?,
    };
    let requirements = TurnRequirements {
        without_ns: number_option("--without-ns")?,
        gangs: number_option("--gangs")? as u32,
        longest_wait_ns: number_option("--longest-wait-ms")? * 1e6,
    };
    match turn_ns(&footprint, &requirements) {
        Ok(turn) => {
            println!(
                "turn {:.1} ms, {:.1} ns an access",
                turn / 1e6,
                access_ns(&footprint, turn)
            );
            return Ok(ExitCode::SUCCESS);
        }
        Err(QuantumRefusal::NotMeasured) => {
            println!("no gangs: a figure is not positive, or a miss is not dearer than a hit")
        }
        Err(QuantumRefusal::NothingToGain) => println!("no gangs: there is nothing to gain"),
        Err(QuantumRefusal::WaitTooLong {
            pays_ns,
            allowed_ns,
        }) => println!(
            "no gangs: a turn pays from {:.1} ms on, the longest wait allows {:.1} ms",
            pays_ns / 1e6,
            allowed_ns / 1e6
        ),
    }
    Ok(ExitCode::FAILURE)
}
