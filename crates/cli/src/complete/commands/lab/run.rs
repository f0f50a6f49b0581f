//! `cachemate lab run`: runs a user's own programs on a modeled machine.
//!
//! Problem: predict the effect of a policy, or of cache allocation, on a machine that is not at hand. Method: the lab's
//! scripts (a separate package) boot a guest on the machine and run each program alone, all programs together, and all
//! programs under the policy. This file writes the job, starts the script and reports the results.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use cachemate_pipeline::POLICIES;
use cachemate_report::Table;
use cachemate_report::text::{format_count, format_size};
use cachemate_spec::{PolicyChoice, parse_toml};
use clap::Args;
use serde::Serialize;

use super::find_script;
use crate::args::JsonArg;
use crate::session::Session;

/// Maximum size of a guest's `results.tsv`.
const MAX_RESULTS_BYTES: u64 = 16 << 20;
const PROGRAMS_SCRIPT: &str = "programs.sh";
/// Phases of the script, in order; the last one runs only with a policy.
const PHASES: [&str; 3] = [ALONE_PHASE, "together", "managed"];
const ALONE_PHASE: &str = "alone";
/// Exit codes of a shell whose program cannot be executed, or does not exist.
const START_FAILURE_CODES: [u8; 2] = [126, 127];

/// Run your own programs on a modeled machine: each alone, all together, and all together under a policy
///
/// Every figure is that of a modeled machine. In each phase, programs are killed after --seconds of the guest's time.
/// The slowdown compares user instructions per second with those of the program alone. Needs the lab's scripts, QEMU
/// and a kernel from Debian packages (docs/lab.md).
#[derive(Args)]
pub struct LabRunArgs {
    /// Bundled machine (lab-2x16M, lab-vm, ...) or TOML file
    #[arg(long, short, value_name = "MACHINE", default_value = "lab-2x16M")]
    machine: String,
    /// The daemon's policy [default: programs run only alone and together]
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// The policy's parameters, as in the daemon's configuration: an inline table such as { steps = [...] }
    #[arg(long, value_name = "TOML", requires = "policy")]
    parameters: Option<String>,
    /// Directory that becomes /programs in the guest, the working directory of the programs
    #[arg(long, value_name = "DIR")]
    programs_dir: Option<PathBuf>,
    /// Seconds of the guest's time for each phase
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    #[command(flatten)]
    json: JsonArg,
    /// One command line each, in quotes: a path on this host or in the directory ('./solve -n 5')
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    programs: Vec<String>,
}

/// One program in one phase. `None` means that the script has no line, or the truth file no entry, for a value.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct PhaseResult {
    phase: String,
    program: String,
    seconds: Option<f64>,
    /// Whether the program ended before the phase was over.
    ended: Option<bool>,
    /// Exit code of a program that ended.
    exit_code: Option<u8>,
    /// The last line that the program printed.
    last_line: Option<String>,
    #[serde(flatten)]
    counts: PhaseCounts,
    /// Slowdown relative to the run alone, based on user instructions per second.
    slowdown: Option<f64>,
}

/// Ground truth of a program's process in one phase.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct PhaseCounts {
    instructions: Option<u64>,
    user_instructions: Option<u64>,
    cycles: Option<u64>,
    l3_misses: Option<u64>,
    /// Misses on lines that another task had evicted.
    displaced_by_others: Option<u64>,
    memory_bytes: Option<u64>,
    /// Sum of the maximum L3 occupancies of the process' threads.
    held_bytes: Option<u64>,
}

#[derive(Serialize)]
struct LabRunJson {
    /// Always "modeled", because no figure in this result was measured on hardware.
    machine_is: &'static str,
    machine: String,
    policy: Option<String>,
    programs: Vec<PhaseResult>,
}

impl LabRunArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let script = find_script(PROGRAMS_SCRIPT)?;
        let machine = cachemate_spec::load_machine(&self.machine)?;
        let config =
            super::config::render_config(&machine, super::config::ProcessorOptions::default())?;
        let job_dir = tempfile::tempdir().context("cannot create a temporary directory")?;
        self.write_job(job_dir.path(), &config)?;
        session.note("booting the modeled machine; each second of the guest takes several seconds of a host CPU");
        let errors_path = job_dir.path().join("errors");
        run_script(&script, job_dir.path(), &errors_path, session)?;
        let results_path = job_dir.path().join("results.tsv");
        let Ok(text) = cachemate_files::read_text_limited(&results_path, MAX_RESULTS_BYTES) else {
            let stderr = cachemate_files::read_text_limited(&errors_path, MAX_RESULTS_BYTES)
                .unwrap_or_default();
            let console_dir = job_dir.keep(); // the guest's console is there
            bail!(
                "{}: {} ({} is kept)",
                script.display(),
                stderr.trim(),
                console_dir.display()
            );
        };
        let phases = if self.policy.is_some() {
            &PHASES[..]
        } else {
            &PHASES[..2]
        };
        let programs = parse_phase_results(&text, &self.programs, phases)?;
        check_started(&programs)?;
        let result = LabRunJson {
            machine_is: "modeled",
            machine: machine.name,
            policy: self.policy.clone(),
            programs,
        };
        session.print_result(self.json.json, &result, || render(&result))
    }

    fn write_job(&self, job_dir: &Path, config: &str) -> anyhow::Result<()> {
        let write_job_file = |name: &str, text: &str| {
            cachemate_files::replace(&job_dir.join(name), text.as_bytes())
                .with_context(|| format!("{}: cannot be written", job_dir.display()))
        };
        if let Some(invalid_line) = self
            .programs
            .iter()
            .find(|line| line.contains(['\n', '\t']) || line.trim().is_empty())
        {
            bail!(crate::exit::UsageError(format!(
                "PROGRAM: found {invalid_line:?}, expected one command line"
            )));
        }
        write_job_file("machine", config)?;
        let commands: Vec<String> = self
            .programs
            .iter()
            .map(|line| self.guest_command(line))
            .collect::<Result<_, _>>()?;
        write_job_file("programs", &format!("{}\n", commands.join("\n")))?;
        write_job_file("seconds", &format!("{}\n", self.seconds))?;
        if let Some(policy) = &self.policy {
            let parameters = self
                .parameters
                .as_ref()
                .map(|table| format!("parameters = {table}\n"));
            let policy_text = format!("name = \"{policy}\"\n{}", parameters.unwrap_or_default());
            let policy_choice: PolicyChoice =
                parse_toml("--policy and --parameters", &policy_text)?;
            POLICIES.build(
                &policy_choice.name,
                &policy_choice.parameters.to_string(),
                0,
            )?;
            write_job_file("policy.toml", &format!("[policy]\n{policy_text}"))?;
        }
        if let Some(dir) = &self.programs_dir {
            let source_dir = dir
                .canonicalize()
                .with_context(|| format!("{}: cannot be read", dir.display()))?;
            std::os::unix::fs::symlink(source_dir, job_dir.join("files"))?;
        }
        Ok(())
    }

    /// Command line for the guest. A relative path is one of --programs-dir, or without it of this directory.
    fn guest_command(&self, line: &str) -> anyhow::Result<String> {
        let line = line.trim();
        let (program, arguments) = line.split_at(line.find(' ').unwrap_or(line.len()));
        if !program.contains('/') {
            return Ok(line.to_string()); // the guest's own
        }
        let relative_path = program
            .strip_prefix("/programs/")
            .or((!program.starts_with('/')).then_some(program));
        let (file, command) = match (&self.programs_dir, relative_path) {
            (Some(dir), Some(relative)) => (dir.join(relative), line.to_string()),
            _ => {
                let file = std::path::absolute(program)
                    .with_context(|| format!("{program}: cannot be resolved"))?;
                let command = format!("{}{arguments}", file.display());
                (file, command)
            }
        };
        let path_text = file.display().to_string();
        if !file.is_file() || path_text.contains(char::is_whitespace) {
            bail!(crate::exit::UsageError(format!(
                "PROGRAM: found {path_text:?}, expected a file, in a path without spaces"
            )));
        }
        Ok(command)
    }
}

/// Runs the script and reports each line of its output as progress; its errors go to a file.
fn run_script(
    script: &Path,
    job_dir: &Path,
    errors_path: &Path,
    session: &Session,
) -> anyhow::Result<()> {
    let binary = std::env::current_exe().context("this command's own file")?;
    let stderr = cachemate_files::create(errors_path, true)
        .with_context(|| format!("{}: cannot be written", errors_path.display()))?;
    let child = Command::new(script)
        .arg(job_dir)
        .arg(&binary)
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn();
    let mut child = child.with_context(|| format!("{}: cannot be started", script.display()))?;
    for line in child
        .stdout
        .take()
        .into_iter()
        .flat_map(|stdout| BufReader::new(stdout).lines())
        .map_while(Result::ok)
    {
        session.note(&line);
    }
    child
        .wait()
        .with_context(|| format!("{}: cannot be waited for", script.display()))?;
    Ok(())
}

/// Fails if the guest's shell could not start a program, because the counts of the failed start would look like a
/// result.
fn check_started(results: &[PhaseResult]) -> anyhow::Result<()> {
    let has_failed = |result: &&PhaseResult| {
        result
            .exit_code
            .is_some_and(|code| START_FAILURE_CODES.contains(&code))
    };
    if let Some(result) = results.iter().find(has_failed) {
        let message = result
            .last_line
            .as_deref()
            .unwrap_or("the guest gives no reason");
        bail!(
            "{}: exit code {} in the guest: {message}",
            result.program,
            result.exit_code.unwrap_or_default()
        );
    }
    Ok(())
}

/// Parses the script's table. Returns every program in every phase, in the order of the run.
fn parse_phase_results(
    text: &str,
    programs: &[String],
    phases: &[&str],
) -> anyhow::Result<Vec<PhaseResult>> {
    let mut results_by_phase: BTreeMap<(usize, usize), PhaseResult> = BTreeMap::new();
    for (index, line) in text.lines().enumerate() {
        let problem = || {
            format!(
                "results.tsv, line {}: found {line:?}, expected 14 fields of the lab's script",
                index + 1
            )
        };
        let fields: Vec<&str> = line.split('\t').collect();
        let &[
            phase,
            number,
            _,
            seconds,
            ended,
            exit_code,
            last_line,
            ref counts @ ..,
        ] = &fields[..]
        else {
            bail!(problem())
        };
        let phase_index = phases
            .iter()
            .position(|known| *known == phase)
            .with_context(problem)?;
        let program_index: usize = number.parse().with_context(problem)?;
        let exit_code: u8 = exit_code.parse().with_context(problem)?;
        let has_ended = ended == "yes";
        let phase_result = PhaseResult {
            phase: phase.to_string(),
            program: programs.get(program_index).with_context(problem)?.clone(),
            seconds: Some(seconds.parse().with_context(problem)?),
            ended: Some(has_ended),
            exit_code: Some(exit_code).filter(|_| has_ended),
            last_line: Some(last_line.to_string()).filter(|line| !line.is_empty()),
            counts: parse_counts(counts).with_context(problem)?,
            slowdown: None,
        };
        results_by_phase.insert((phase_index, program_index), phase_result);
    }
    let mut phase_results = Vec::new();
    for (phase_index, phase) in phases.iter().enumerate() {
        for (program_index, program) in programs.iter().enumerate() {
            let (phase_name, program) = (phase.to_string(), program.clone());
            let missing = || PhaseResult {
                phase: phase_name,
                program,
                ..PhaseResult::default()
            };
            let known = results_by_phase.get(&(phase_index, program_index)).cloned();
            let mut phase_result = known.unwrap_or_else(missing);
            let alone_result = results_by_phase
                .get(&(0, program_index))
                .filter(|_| *phase != ALONE_PHASE);
            phase_result.slowdown =
                alone_result.and_then(|alone_result| slowdown_of(alone_result, &phase_result));
            phase_results.push(phase_result);
        }
    }
    Ok(phase_results)
}

/// Parses the counts of one process; a dash stands for an unknown count.
fn parse_counts(fields: &[&str]) -> Option<PhaseCounts> {
    let parse_field = |field: &&str| {
        if *field == "-" {
            Some(None)
        } else {
            field.parse().ok().map(Some)
        }
    };
    let counts: Vec<Option<u64>> = fields.iter().map(parse_field).collect::<Option<_>>()?;
    let &[
        instructions,
        user_instructions,
        cycles,
        l3_misses,
        displaced_by_others,
        memory_bytes,
        held_bytes,
    ] = &counts[..]
    else {
        return None;
    };
    Some(PhaseCounts {
        instructions,
        user_instructions,
        cycles,
        l3_misses,
        displaced_by_others,
        memory_bytes,
        held_bytes,
    })
}

fn slowdown_of(alone_result: &PhaseResult, compared_result: &PhaseResult) -> Option<f64> {
    let instructions_per_second = |phase_result: &PhaseResult| {
        Some(phase_result.counts.user_instructions? as f64 / phase_result.seconds?)
    };
    let ratio = instructions_per_second(alone_result)? / instructions_per_second(compared_result)?;
    ratio.is_finite().then_some(ratio - 1.0)
}

const UNKNOWN_CELL: &str = "–";

fn render(result: &LabRunJson) -> String {
    let mut table = Table::with_columns(
        "phase | program",
        "seconds | slowdown | user instructions | L3 misses | evicted by others | memory | occupancy",
    );
    let count_or_unknown =
        |count: Option<u64>| count.map_or(UNKNOWN_CELL.to_string(), format_count);
    let size_or_unknown = |bytes: Option<u64>| bytes.map_or(UNKNOWN_CELL.to_string(), format_size);
    for program in &result.programs {
        let end_text = match (program.ended, program.exit_code) {
            (Some(false), _) => " (killed)".to_string(),
            (_, Some(code)) if code != 0 => format!(" (exit code {code})"),
            _ => String::new(),
        };
        table.add_row([
            program.phase.clone(),
            program.program.clone(),
            program.seconds.map_or(UNKNOWN_CELL.to_string(), |seconds| {
                format!("{seconds:.2}{end_text}")
            }),
            program
                .slowdown
                .map_or(UNKNOWN_CELL.to_string(), |slowdown| {
                    format!("{:.0} %", (100.0 * slowdown).round() + 0.0)
                }),
            count_or_unknown(program.counts.user_instructions),
            count_or_unknown(program.counts.l3_misses),
            count_or_unknown(program.counts.displaced_by_others),
            size_or_unknown(program.counts.memory_bytes),
            size_or_unknown(program.counts.held_bytes),
        ]);
    }
    let policy = result.policy.as_ref().map_or(String::new(), |policy| {
        format!(", managed = policy {policy}")
    });
    format!(
        "{} (modeled machine){policy}\n{}",
        result.machine,
        table.text()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_results(text: &str, programs: &[String]) -> Vec<PhaseResult> {
        parse_phase_results(text, programs, &PHASES[..2]).unwrap()
    }

    fn render_programs(programs: Vec<PhaseResult>) -> String {
        render(&LabRunJson {
            machine_is: "modeled",
            machine: "m".into(),
            policy: None,
            programs,
        })
    }

    /// Is a program compared with its run alone by work per second, whether it ended or was killed?
    #[test]
    fn programs_are_compared_with_their_runs_alone_by_work_rate() {
        let programs = ["./a".to_string(), "./b -n 5".to_string()];
        let text = "alone\t0\t./a\t2\tyes\t0\t\t1500\t1000\t4000\t10\t0\t640\t64\n\
                    alone\t1\t./b\t5\tno\t137\t\t5001\t5000\t9000\t10\t0\t640\t64\n\
                    together\t0\t./a\t3\tyes\t0\t\t9000\t1000\t6000\t90\t80\t640\t64\n\
                    together\t1\t./b\t5\tno\t137\t\t9000\t2500\t9000\t10\t0\t640\t64\n";
        let results = parse_results(text, &programs);
        let slower: Vec<Option<f64>> = results.iter().map(|result| result.slowdown).collect();
        assert_eq!(slower, [None, None, Some(0.5), Some(1.0)]);
        assert_eq!(
            (
                results[2].counts.displaced_by_others,
                results[3].program.as_str()
            ),
            (Some(80), "./b -n 5")
        );
        assert!(render_programs(results).contains("modeled machine"));
    }

    /// Does a program with a fixed amount of work that is killed in one phase have a slowdown by work rather than by
    /// time?
    #[test]
    fn a_killed_program_has_a_slowdown_by_work_not_by_time() {
        let text = "alone\t0\t./a\t2\tyes\t0\t\t900\t800\t4000\t1\t0\t64\t64\n\
                    together\t0\t./a\t4\tno\t137\t\t900\t400\t8000\t1\t0\t64\t64\n";
        let mut phase_results = parse_results(text, &["./a".to_string()]);
        assert_eq!(phase_results[1].slowdown, Some(3.0));
        phase_results[1].slowdown = Some(-0.001);
        assert!(
            render_programs(phase_results).contains(" 0 %"),
            "no negative zero"
        );
    }

    /// Is a program without ground truth null in JSON and a dash in the table, never 0?
    #[test]
    fn a_program_without_ground_truth_is_null_or_a_dash() {
        let text = "alone\t0\t./a\t2\tno\t137\t\t900\t800\t4000\t1\t0\t64\t64\n\
                    together\t0\t./a\t2.5\tno\t137\t\t-\t-\t-\t-\t-\t-\t-\n";
        let phase_results = parse_results(text, &["./a".to_string()]);
        let json = serde_json::to_value(&phase_results[1]).unwrap();
        let keys = [
            "instructions",
            "user_instructions",
            "cycles",
            "l3_misses",
            "displaced_by_others",
            "memory_bytes",
        ];
        for key in keys.into_iter().chain(["held_bytes", "slowdown"]) {
            assert!(
                json.get(key).is_some_and(serde_json::Value::is_null),
                "{key}: {json}"
            );
        }
        assert_eq!(json["seconds"], 2.5);
        let table = render_programs(phase_results);
        assert_eq!(
            table.lines().last().unwrap().matches(UNKNOWN_CELL).count(),
            6,
            "{table}"
        );
    }

    /// Is every program listed in every phase, even if the script has no line for it?
    #[test]
    fn every_program_is_listed_in_every_phase() {
        let programs = ["./a".to_string(), "./b".to_string()];
        let text = "alone\t1\t./b\t2\tno\t137\t\t900\t800\t4000\t1\t0\t64\t64\n\
                    managed\t0\t./a\t2\tno\t137\t\t900\t800\t4000\t1\t0\t64\t64\n";
        let phase_results = parse_phase_results(text, &programs, &PHASES).unwrap();
        let listed: Vec<(&str, &str, bool)> = phase_results
            .iter()
            .map(|result| {
                (
                    result.phase.as_str(),
                    result.program.as_str(),
                    result.seconds.is_some(),
                )
            })
            .collect();
        let expected = [
            ("alone", "./a", false),
            ("alone", "./b", true),
            ("together", "./a", false),
            ("together", "./b", false),
            ("managed", "./a", true),
            ("managed", "./b", false),
        ];
        assert_eq!(listed, expected);
        assert!(phase_results.iter().all(|result| result.slowdown.is_none()));
    }

    /// Is a program that the guest could not start an error with the guest's reason, and a failing program a result?
    #[test]
    fn a_program_that_does_not_start_is_an_error() {
        let line = |code: &str| {
            format!("alone\t0\t./a\t0.02\tyes\t{code}\tsh: ./a: not found\t9\t8\t7\t0\t0\t64\t64\n")
        };
        let check_started_with =
            |code: &str| check_started(&parse_results(&line(code), &["./a".to_string()]));
        assert!(
            check_started_with("127")
                .unwrap_err()
                .to_string()
                .contains("./a: not found")
        );
        assert!(check_started_with("1").is_ok());
        assert!(
            render_programs(parse_results(&line("1"), &["./a".to_string()]))
                .contains("(exit code 1)")
        );
    }

    /// Is a relative path resolved, and a missing file refused before the guest boots?
    #[test]
    fn paths_are_checked_before_the_guest_boots() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            run: LabRunArgs,
        }
        let parse_run = |arguments: &[&str]| {
            <Line as clap::Parser>::parse_from([&["run"], arguments].concat()).run
        };
        let here = std::env::current_dir().unwrap();
        let plain = parse_run(&["x"]);
        assert_eq!(
            plain.guest_command("./Cargo.toml 5 6").unwrap(),
            format!("{}/Cargo.toml 5 6", here.display())
        );
        assert_eq!(
            plain.guest_command("lab-program load").unwrap(),
            "lab-program load"
        );
        assert!(
            plain
                .guest_command("./nowhere 5")
                .unwrap_err()
                .to_string()
                .contains("nowhere")
        );
        let in_dir = parse_run(&["--programs-dir", "src", "x"]);
        assert_eq!(in_dir.guest_command("./main.rs 5").unwrap(), "./main.rs 5");
        assert_eq!(
            in_dir.guest_command("/programs/main.rs").unwrap(),
            "/programs/main.rs"
        );
        assert!(in_dir.guest_command("./Cargo.toml").is_err());
    }

    /// Is a table that the script could not have written rejected with its line?
    #[test]
    fn a_table_the_script_could_not_have_written_is_rejected() {
        let programs = ["./a".to_string()];
        let read_all_phases = |text: &str| parse_phase_results(text, &programs, &PHASES);
        assert!(
            read_all_phases("alone\t0\t./a\n")
                .unwrap_err()
                .to_string()
                .contains("line 1")
        );
        assert!(read_all_phases("alone\t7\t./a\t2\tyes\t0\t\t1\t1\t1\t1\t1\t1\t1\n").is_err());
        assert!(read_all_phases("alone\t0\t./a\t2\tyes\t0\t\t1\t1\t1\t1\t1\t1\tmany\n").is_err());
        assert!(read_all_phases("beside\t0\t./a\t2\tyes\t0\t\t1\t1\t1\t1\t1\t1\t1\n").is_err());
    }
}
