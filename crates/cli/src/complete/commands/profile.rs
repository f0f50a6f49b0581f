//! `cachemate profile`: profiles a program's use of caches, and writes a file that predictions and plans read.

use std::path::{Path, PathBuf};

use anyhow::Context;
use cachemate_report::terminal::{CurveLine, curve_picture};
use cachemate_report::text::{
    escape_controls, format_count, format_count_of, format_number, format_percent, format_size,
    value_or_dash,
};
use cachemate_study::{KernelFootprint, ProfileTarget};
use cachemate_trace::RecordingEnd;
use clap::{Args, Subcommand};

use super::profile_export::{LIVE_SOURCE, ProfileExport};
use super::record::{RecordArgs, program_result};
use crate::args::JsonArg;
use crate::complete::programs::{ProfiledInput, load_partial};
use crate::exit::InterruptedError;
use crate::files::{check_output_path, write_json};
use crate::host_machine::load_machine;
use crate::session::Session;

/// Profile a recording or a running program: write a profile file and draw the miss-rate curve
///
/// FILE is a recording, a profile file (which is only shown) or the name of a bundled recording. The profile is written
/// to NAME.profile.json or to the file given by -o; --json prints it instead. With -- CMD, standard output and the exit
/// code are those of the program: the summary, or with --json and without -o the profile, goes to standard error.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct ProfileArgs {
    #[command(subcommand)]
    action: Option<ProfileAction>,
    /// A recording, a profile file or the name of a bundled recording
    #[arg(
        value_name = "FILE",
        required_unless_present = "command",
        conflicts_with = "command"
    )]
    file: Option<String>,
    /// Also measure LRU positions on this machine's shared cache; 'host' means this one
    #[arg(long, short, value_name = "MACHINE")]
    machine: Option<String>,
    /// File to write [default: NAME.profile.json]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Overwrite the file if it exists
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    record: RecordArgs,
    #[command(flatten)]
    json: JsonArg,
    /// A program to record and profile, with its arguments, after --
    #[arg(last = true, value_name = "CMD")]
    command: Vec<String>,
}

#[derive(Subcommand)]
enum ProfileAction {
    Export(ProfileExport),
}

impl ProfileArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if let Some(ProfileAction::Export(export)) = &self.action {
            return export.run(session);
        }
        let machine = self
            .machine
            .as_deref()
            .map(|name| load_machine(session, name))
            .transpose()?;
        let target = machine
            .as_ref()
            .map(ProfileTarget::from_machine)
            .transpose()?;
        let (program, completeness) = match &self.file {
            Some(file) => {
                self.check_output_free(&profile_name(file))?;
                load_partial(session, file, target)?
            }
            None => self.record_and_load(session, target)?,
        };
        let is_view = self
            .file
            .as_deref()
            .is_some_and(|file| file.ends_with(".json"));
        let output = self.output.clone().or_else(|| {
            let default_output = || PathBuf::from(format!("{}.profile.json", program.name));
            (!self.json.json && !is_view).then(default_output)
        });
        if let Some(path) = &output {
            write_json(path, &program.file, self.force)?;
        }
        let cache_bytes = target.map(|target| target.size_bytes);
        let render_profile = || render(&program, cache_bytes, output.as_deref(), session);
        if self.file.is_some() {
            session.print_result(self.json.json, &program.file, render_profile)?;
        } else if !self.json.json || output.is_none() {
            session.print_result_beside_programs(
                self.json.json,
                None,
                &program.file,
                render_profile,
            )?;
        }
        completeness
    }

    /// A recording is no calculation: it first ends its program, which may take longer.
    pub fn is_calculation(&self) -> bool {
        self.file.is_some()
    }

    /// Rejects an output file that could not be written, before the work rather than after it.
    fn check_output_free(&self, name: &str) -> anyhow::Result<()> {
        match &self.output {
            Some(path) => check_output_path(path, self.force),
            None if self.json.json
                || self
                    .file
                    .as_deref()
                    .is_some_and(|file| file.ends_with(".json")) =>
            {
                Ok(())
            }
            None => check_output_path(Path::new(&format!("{name}.profile.json")), self.force),
        }
    }

    /// The profiled program; the second result is an error if the recording was truncated.
    fn record_and_load(
        &self,
        session: &Session,
        target: Option<ProfileTarget>,
    ) -> anyhow::Result<(ProfiledInput, anyhow::Result<()>)> {
        let name = profile_name(&self.command[0]);
        self.check_output_free(&name)?;
        let dir = tempfile::tempdir().context("cannot create a temporary directory")?;
        let recording = dir.path().join(format!("{name}.cmt"));
        let recording_summary = self
            .record
            .record(session, &self.command, &recording, false)?;
        session.note(&format!(
            "{}: {}",
            self.command[0], recording_summary.recording_end
        ));
        let recording_end = recording_summary.recording_end;
        let is_interrupted = recording_end == RecordingEnd::Interrupted;
        if is_interrupted {
            // Ctrl-C ended the program; its recording is still to be profiled.
            session.clear_interrupt();
        }
        session.limit_calculation();
        let (mut program, completeness) =
            load_partial(session, &recording.display().to_string(), target)?;
        // The recording is deleted with its directory, so the profile names the command as its source.
        program.file.source.from = Some(self.command.join(" "));
        let partial_profile_error =
            || Err(InterruptedError("the profile covers the recorded part".to_string()).into());
        Ok((
            program,
            if is_interrupted {
                partial_profile_error()
            } else {
                completeness.and_then(|()| program_result(recording_end))
            },
        ))
    }
}

/// `gzip` for `/usr/bin/gzip` and for `gzip.cmt`.
fn profile_name(program: &str) -> String {
    let file_name = Path::new(program)
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    file_name
        .split('.')
        .next()
        .filter(|name| !name.is_empty())
        .unwrap_or("program")
        .to_string()
}

fn render(
    program: &ProfiledInput,
    cache_bytes: Option<u64>,
    output: Option<&Path>,
    session: &Session,
) -> String {
    let file = &program.file;
    let summary = program.summary();
    let mut text = match (file.source.kind.as_str(), file.records) {
        (LIVE_SOURCE, None) => format!(
            "{}: measured while it ran{}\n",
            program.name,
            file.source
                .from
                .as_deref()
                .map(|host| format!(" on {}", escape_controls(host)))
                .unwrap_or_default()
        ),
        (_, records) => format!(
            "{}: {} accesses that reached the cache{}, {} instructions\n",
            program.name,
            value_or_dash(records.map(format_count)),
            file.accesses
                .map(|n| format!(" of {} by the program", format_count(n)))
                .unwrap_or_default(),
            value_or_dash(file.instructions.map(format_count)),
        ),
    };
    let curve = program.curve();
    let has_mpki = curve.iter().all(|point| point.mpki.is_some());
    let points = curve
        .iter()
        .map(|p| (p.bytes, p.mpki.unwrap_or(p.miss_ratio * 100.0)))
        .collect();
    let label = if has_mpki {
        "misses per 1000 instructions"
    } else {
        "misses, % of accesses"
    };
    text.push_str(&curve_picture(
        &[CurveLine {
            name: program.name.clone(),
            points,
        }],
        label,
        session.terminal_style(),
    ));
    if let Some(positions) = file.stack_positions.first() {
        let other_cache = match (cache_bytes, file.source.kind.as_str()) {
            (None, kind) if kind != LIVE_SOURCE => " (-m host: on this host's cache)",
            _ => "",
        };
        text.push_str(&format!(
            "on {} {}-way{other_cache}: {}{} MPKI, {} of the hits lost with half of it\n",
            format_size(positions.size_bytes),
            positions.hits.len(),
            summary
                .class
                .map(|class| format!("a {class}, "))
                .unwrap_or_default(),
            value_or_dash(summary.solo_mpki.map(format_number)),
            value_or_dash(
                summary
                    .lost_hits_share
                    .map(|share| format_percent(share, 1))
            )
        ));
    }
    let footprint = cache_bytes.and_then(|bytes| KernelFootprint::from_profile(file, bytes));
    if let Some(judged) = footprint.filter(KernelFootprint::is_misjudged) {
        text.push_str(&format!("on Linux 7.2 and later it {judged}\n"));
    }
    if let Some(intervals) = &file.intervals {
        let phase_count = intervals
            .every
            .iter()
            .map(|interval| interval.phase)
            .max()
            .map_or(0, |last| last + 1);
        let (phases_text, interval_count) = (
            format_count_of(phase_count.into(), "phase"),
            intervals.every.len() as u64,
        );
        text.push_str(&format!(
            "{phases_text} in {}\n",
            format_count_of(interval_count, "interval")
        ));
    }
    if let Some(path) = output {
        text.push_str(&format!("wrote {}\n", path.display()));
    }
    text
}
