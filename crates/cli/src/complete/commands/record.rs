//! `cachemate record`: records the data accesses of a real program as a `.cmt` file.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cachemate_report::text::{format_count, format_count_of, format_size};
use cachemate_trace::{
    BurstSampling, ChildProcesses, L1Filter, Recorder, RecordingEnd, RecordingSummary,
};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::args::{ByteSize, JsonArg, OutputArgs};
use crate::complete::traces::{TraceArgs, TraceInput};
use crate::exit::{InterruptedError, ProgramExitCode, UsageError};
use crate::files::OutputFile;
use crate::session::Session;

/// Record the data accesses of a program as it runs (needs the valgrind package), or convert another tool's trace
///
/// Standard output and the exit code are those of the program. The summary goes to standard error, with --json as one
/// object; --quiet omits the text. If signal N ends the program, the exit code is 128 + N. Ctrl-C ends the program and
/// keeps the recorded part.
#[derive(Args)]
pub struct Record {
    #[command(flatten)]
    options: RecordArgs,
    /// Convert this trace of another tool instead (lackey, Dinero din, CSV, drmemtrace, raw u64, ChampSim,
    /// oracleGeneral)
    ///
    /// '-' is standard input. After Ctrl-C, the records converted so far form an intact file, and --salvage makes one
    /// of a damaged trace.
    #[arg(long, value_name = "TRACE", conflicts_with_all = ["command", "json", "pid", "skip_accesses", "max_accesses",
        "skip_seconds", "max_seconds", "burst_accesses", "max_size", "kill_at_max", "l1", "children"])]
    from: Option<String>,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    json: JsonArg,
    /// The program and its arguments, after --
    #[arg(last = true, required_unless_present_any = ["pid", "from"], value_name = "CMD")]
    command: Vec<String>,
}

/// The part of a run to record.
#[derive(Args, Clone)]
pub struct RecordArgs {
    /// Skip this many data accesses of all threads, counted before the filter
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip_accesses: u64,
    /// Then record this many data accesses; the program runs to its end unrecorded. A child that is followed counts on
    /// from its parent's number
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_accesses: Option<u64>,
    /// First let the program run for this long, at Valgrind's bare speed
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = parse_seconds)]
    skip_seconds: Duration,
    /// Then record for this long; the program runs to its end unrecorded
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    max_seconds: Option<Duration>,
    /// Record bursts of this many data accesses; between them, the program runs at Valgrind's bare speed, which is half
    /// of its own for a compressor and a tenth for an interpreter. The curve then has an error bar, and reaches as far
    /// as the lines of one burst
    #[arg(long, value_name = "N", conflicts_with = "skip_accesses", value_parser = clap::value_parser!(u64).range(1..))]
    burst_accesses: Option<u64>,
    /// Share of the run to record in bursts, in percent
    #[arg(long, value_name = "PERCENT", requires = "burst_accesses", default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=99))]
    burst_share: u8,
    /// Stop writing once the file has this size; the program runs to its end
    #[arg(long, value_name = "SIZE", default_value = "4G")]
    max_size: ByteSize,
    /// Kill the program when the maximum of accesses, time or size is reached
    #[arg(long)]
    kill_at_max: bool,
    /// Rejected, because Valgrind cannot attach to a running program; the message names tools that can
    #[arg(long, value_name = "PID", hide = true)]
    pid: Option<u32>,
    /// Keep only misses of this cache, SIZE:WAYS[:LINE], one per thread; 'none' keeps every access
    #[arg(long, value_name = "L1", default_value = "32K:8", value_parser = parse_filter)]
    l1: Filter,
    /// Handling of child processes
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    children: ChildrenArg,
    /// zstd level: higher levels are smaller and slower
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(i32).range(1..=19))]
    compression_level: i32,
}

/// Parses a time of at most ten days, in seconds.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds_problem =
        || format!("found '{text}', expected seconds from 0 to 864000, such as 30 or 0.5");
    let seconds: f64 = text.parse().map_err(|_| seconds_problem())?;
    if (0.0..=864_000.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(seconds_problem())
    }
}

#[derive(Clone, Copy)]
struct Filter(Option<L1Filter>);

fn parse_filter(text: &str) -> Result<Filter, String> {
    if text == "none" {
        Ok(Filter(None))
    } else {
        L1Filter::parse(text).map(|filter| Filter(Some(filter)))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum ChildrenArg {
    /// Record them into the same file
    Follow,
    /// Let them run unrecorded
    #[default]
    Ignore,
}

/// `cachemate record --json`.
#[derive(Serialize)]
struct RecordResult {
    file: String,
    command: Vec<String>,
    /// The way in which the program ended: `exit 0`, `signal 15`, ...
    ended: String,
    /// Exit status of the program; `None` if a signal ended it.
    exit_status: Option<i32>,
    records: u64,
    program_accesses: Option<u64>,
    instructions: Option<u64>,
    threads: usize,
    bytes: u64,
    note: Option<String>,
}

impl RecordArgs {
    /// Runs the command and records it to `output`. The program keeps the standard output and error of this process.
    pub fn record(
        &self,
        session: &Session,
        command: &[String],
        output: &Path,
        force: bool,
    ) -> anyhow::Result<RecordingSummary> {
        if self.burst_accesses.is_some() && self.children == ChildrenArg::Follow {
            anyhow::bail!(UsageError(
                "--burst-accesses: found --children follow, expected ignore: bursts of several \
                 processes have no common curve"
                    .to_string(),
            ));
        }
        if let Some(pid) = self.pid {
            return Err(UsageError(attach_refusal(pid)).into());
        }
        let mut recorder = Recorder::new(command.to_vec(), output);
        recorder.force = force;
        recorder.skip_accesses = self.skip_accesses;
        recorder.max_accesses = self.max_accesses;
        recorder.skip_time = self.skip_seconds;
        recorder.max_time = self.max_seconds;
        recorder.bursts = self.burst_accesses.map(|accesses| BurstSampling {
            accesses,
            percent: self.burst_share,
        });
        recorder.max_bytes = self.max_size.0;
        recorder.kill_at_max = self.kill_at_max;
        recorder.filter = self.l1.0;
        recorder.level = self.compression_level;
        recorder.children = match self.children {
            ChildrenArg::Follow => ChildProcesses::Follow,
            ChildrenArg::Ignore => ChildProcesses::Ignore,
        };
        let bar = session.progress_bar("recording", self.max_accesses);
        let run_result = recorder.run(&session.interrupt_flag(), |progress| {
            bar.set_position(progress.program_accesses);
        });
        bar.finish_and_clear();
        let summary = run_result?;
        if let Some(note) = &summary.note {
            session.log(note);
        }
        Ok(summary)
    }
}

impl Record {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let path: &PathBuf = &self.output.output;
        if let Some(trace) = &self.from {
            return self.convert(session, trace);
        }
        if self.trace.salvage || self.trace.format.is_some() {
            let problem = "--format, --salvage: expected --from TRACE, which they describe";
            return Err(UsageError(problem.to_string()).into());
        }
        let summary = self
            .options
            .record(session, &self.command, path, self.output.force)?;
        let result = RecordResult {
            file: path.display().to_string(),
            command: self.command.clone(),
            ended: summary.recording_end.to_string(),
            exit_status: if let RecordingEnd::Exit(status) = summary.recording_end {
                Some(status)
            } else {
                None
            },
            records: summary.totals.records,
            program_accesses: summary.totals.program_accesses,
            instructions: summary.totals.instructions,
            threads: summary.totals.threads.len(),
            bytes: summary.bytes,
            note: summary.note.clone(),
        };
        session.print_result_beside_programs(self.json.json, None, &result, || render(&result))?;
        match summary.recording_end {
            RecordingEnd::Interrupted => Err(InterruptedError(format!(
                "{} keeps {} records",
                result.file, result.records
            ))
            .into()),
            ended => program_result(ended),
        }
    }

    /// Converts a trace of another tool.
    fn convert(&self, session: &Session, trace: &str) -> anyhow::Result<()> {
        let path = &self.output.output;
        if path.extension().is_none_or(|ending| ending != "cmt") {
            anyhow::bail!(UsageError(format!(
                "{}: found another ending than .cmt, the written format",
                path.display()
            )));
        }
        let mut output = OutputFile::create(path, self.output.force)?;
        let mut trace = TraceInput::open(session, trace, &self.trace, "converting")?;
        let name = path.display().to_string();
        let conversion = cachemate_trace::convert(
            &mut trace,
            output.file(),
            &name,
            self.options.compression_level,
            |_| {},
        )?;
        trace.finish(session);
        output.persist()?;
        let records = format_count(conversion.totals.records);
        session.note(&format!(
            "{name}: {records} records, {}",
            format_size(conversion.bytes)
        ));
        trace.check_whole()
    }
}

/// Why a running process cannot be recorded, with two alternatives.
fn attach_refusal(pid: u32) -> String {
    format!(
        "--pid {pid}: Valgrind cannot attach to a running program. Start it with 'cachemate record --skip-seconds N', which \
         runs it at Valgrind's bare speed until the part of interest; or measure it as it runs, without a recording: \
         'cachemate manage --observe-only' with a rule for pid = {pid}, then 'cachemate explain {pid}'"
    )
}

/// The program's exit code as the result of this command; signal N becomes 128 + N, as in a shell.
pub fn program_result(recording_end: RecordingEnd) -> anyhow::Result<()> {
    match recording_end {
        RecordingEnd::Exit(0) | RecordingEnd::AtMax | RecordingEnd::Interrupted => Ok(()),
        RecordingEnd::Exit(code) => Err(ProgramExitCode(code).into()),
        RecordingEnd::Signal(signal) => Err(ProgramExitCode(128 + signal).into()),
    }
}

fn render(result: &RecordResult) -> String {
    let access_text = result
        .program_accesses
        .map(|n| format!(" of {} data accesses", format_count(n)))
        .unwrap_or_default();
    let instructions_text = result
        .instructions
        .map(|n| format!(", {} instructions", format_count(n)))
        .unwrap_or_default();
    format!(
        "{}: {}{access_text}{instructions_text}, {}, {}\nprogram: {}\n",
        result.file,
        format_count_of(result.records, "record"),
        format_count_of(result.threads as u64, "thread"),
        format_size(result.bytes),
        result.ended
    )
}
