//! `cachemate page-color run`: runs a program on frames of some colors.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use cachemate_core::IndexSet;
use cachemate_linux::act::colors::agents::{AgentReport, ResidentPages, color_mask};
use cachemate_linux::act::colors::discover::PATIENCE;
use cachemate_linux::act::colors::refusal::last_refusal;
use cachemate_linux::act::colors::{ColorError, migration, reference_set};
use cachemate_report::text::{format_count, format_size};
use clap::Args;
use serde::Serialize;

use super::discover;
use crate::args::ByteSize;
use crate::exit::{ProgramExitCode, UsageError};
use crate::files::write_json;
use crate::session::Session;
use cachemate_daemon::colored_program::{ColoredCommand, ColoredProgram, available_bytes};

/// Run an unmodified program on frames of some colors only
///
/// The program's heap, mappings and thread stacks get frames of these colors when they are touched; the pages that
/// exist at its start are migrated. Programs that it executes are confined as well, whereas a fork without exec gets
/// frames of any color. Needs root; static and set-user-id programs are refused. The exit code is that of the program.
#[derive(Args)]
pub struct ColorRunArgs {
    /// Colors such as 0-7,12
    #[arg(long, value_name = "LIST")]
    colors: IndexSet,
    /// Maximum memory that a program's agent may hold, frames of other colors included [default: an eighth of the
    /// available memory]
    #[arg(long, value_name = "SIZE")]
    max_held: Option<ByteSize>,
    /// Write a report as JSON to this file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// CMD [ARG...]
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<String>,
}

/// Content of the file that `--report` writes.
#[derive(Serialize)]
struct ColorRunReport {
    colors: IndexSet,
    exit_code: i32,
    seconds: f64,
    max_held_bytes: u64,
    /// Pages of the program and its descendants by color, counted from the kernel's page map.
    resident: Option<ResidentPages>,
    processes: Vec<ProcessReport>,
}

#[derive(Serialize)]
struct ProcessReport {
    pid: i32,
    agent: AgentReport,
}

impl ColorRunArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let mask = color_mask(&self.colors)
            .ok_or_else(|| UsageError("--colors: found no color, or one above 63".into()))?;
        migration::measure_page_move_ns_with_frames()?;
        let color_count = ensure_color_count(session)?;
        if self.colors.iter().any(|color| color >= color_count) {
            bail!(UsageError(format!(
                "--colors {}: this host has colors 0-{}",
                self.colors,
                color_count - 1
            )));
        }
        let available_memory = available_bytes().unwrap_or(1 << 30);
        let max_held_bytes = self.max_held.map_or(available_memory / 8, |size| size.0);
        let start = ColoredCommand {
            command: &self.command,
            mask,
            hold_bytes: max_held_bytes,
            variables: &[],
            output: None,
            ends_with_parent: false,
        };
        let mut program = ColoredProgram::start(&start)?;
        let start_time = std::time::Instant::now();
        let stop = session.interrupt_flag();
        let status = program.wait(&stop, Duration::from_millis(500))?;
        let report = ColorRunReport {
            colors: self.colors.clone(),
            exit_code: status,
            seconds: start_time.elapsed().as_secs_f64(),
            max_held_bytes,
            resident: program.last_resident_pages(),
            processes: program
                .agent_reports()
                .into_iter()
                .map(|(pid, agent)| ProcessReport { pid, agent })
                .collect(),
        };
        if let Some(path) = &self.report {
            write_json(path, &report, true)?;
        }
        print_report(session, &report);
        if status == 0 {
            Ok(())
        } else {
            bail!(ProgramExitCode(status))
        }
    }
}

/// If the reference set is not usable, the colors are discovered first.
fn ensure_color_count(session: &Session) -> anyhow::Result<u32> {
    match reference_set::open(Path::new(reference_set::BASE)) {
        Ok(opened_set) => Ok(opened_set.frames.colors()),
        Err(error @ (ColorError::NoReferenceSet(_) | ColorError::BadReferenceSet(..))) => {
            if let Some(refusal) = last_refusal(Path::new(reference_set::BASE)) {
                bail!(
                    "{}; 'cachemate page-color discover' tries again",
                    refusal.describe()
                );
            }
            session.warn(&format!(
                "{error}: discovering them first, up to {} s",
                PATIENCE.as_secs()
            ));
            Ok(discover::discover_colors(session, 64 << 20, PATIENCE, 1)?.colors)
        }
        Err(error) => Err(error.into()),
    }
}

fn print_report(session: &Session, report: &ColorRunReport) {
    for ProcessReport { pid, agent } in &report.processes {
        let counter = |name: &str| agent.counter(name).unwrap_or(0);
        let message = match &agent.account {
            Err(reason) => format!("process {pid} was not confined: {reason}"),
            Ok(_) => format!(
                "process {pid}: {} of {} pages in allowed colors; {} faults at {:.1} us, {} fallback frames of other colors, {} frames from the kernel; {} pages migrated; at most {} held",
                format_count(counter("allowed_pages")),
                format_count(
                    counter("allowed_pages") + counter("other_pages") + counter("unknown_pages")
                ),
                format_count(counter("faults")),
                counter("fault_ns") as f64 / 1e3 / (counter("faults") as f64).max(1.0),
                format_count(counter("fallback_frames")),
                format_count(counter("kernel_frames")),
                format_count(counter("moved_pages")),
                format_size(counter("max_held") * 4096),
            ),
        };
        session.note(&message);
    }
    if report.processes.is_empty() {
        session.warn("no agent reported, so the program was not confined");
    }
}
