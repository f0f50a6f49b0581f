//! State that all commands share: output, capabilities of the terminal, progress and interruption.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use cachemate_report::terminal::TerminalStyle;
use cachemate_report::text::EscapedText;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::args::{ColorChoice, Global};
use crate::exit::INTERRUPTED_CODE;
use crate::files::write_file;

/// Interval between lines about progress where no progress bar can be drawn.
const PROGRESS_LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Time that a calculation has to end by itself after an interruption.
const CALCULATION_GRACE: Duration = Duration::from_secs(1);

/// State of one run of the command.
#[derive(Clone)]
pub struct Session {
    /// Whether standard error is a terminal, and `--quiet` was not given.
    shows_notes: bool,
    is_quiet: bool,
    /// Whether `--json` was given.
    prints_json: bool,
    terminal_style: TerminalStyle,
    /// Columns of the terminal; `None` if standard output is not a terminal.
    columns: Option<usize>,
    interrupted: Arc<AtomicBool>,
}

impl Session {
    pub fn new(global: &Global, prints_json: bool) -> Self {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // The first signal only sets the flag, and a second one ends the process at once. If the handler cannot
            // be set, the signal's default action remains, which ends the process.
            let _ = signal_hook::flag::register_conditional_shutdown(
                signal,
                INTERRUPTED_CODE,
                Arc::clone(&interrupted),
            );
            let _ = signal_hook::flag::register(signal, Arc::clone(&interrupted));
        }
        let is_terminal = io::stdout().is_terminal();
        let wants_color = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let color = match global.color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => is_terminal && wants_color,
        };
        let width = if is_terminal {
            rustix::termios::tcgetwinsize(io::stdout()).ok()
        } else {
            None
        };
        let width = width
            .map(|size| usize::from(size.ws_col))
            .filter(|columns| *columns >= 40);
        Session {
            is_quiet: global.quiet,
            prints_json,
            shows_notes: io::stderr().is_terminal() && !global.quiet,
            terminal_style: TerminalStyle {
                color,
                width: width.unwrap_or(100).min(160),
            },
            columns: if is_terminal {
                Some(width.unwrap_or(100))
            } else {
                None
            },
            interrupted,
        }
    }

    /// For concurrent work: it shares the interruption flag, but shows no progress and no messages.
    pub fn silent(&self) -> Self {
        Session {
            is_quiet: true,
            shows_notes: false,
            ..self.clone()
        }
    }

    /// Width to which lines are truncated; `None` for a pipe or file, where lines are not truncated.
    pub fn columns(&self) -> Option<usize> {
        self.columns
    }

    pub fn terminal_style(&self) -> TerminalStyle {
        self.terminal_style
    }

    /// Ctrl-C and termination signals set this flag.
    pub fn interrupt_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.interrupted)
    }

    /// Ends the process if a calculation that leaves nothing behind has not ended [`CALCULATION_GRACE`] after an
    /// interruption, because a simulation or a search may look at the flag only after minutes.
    pub fn limit_calculation(&self) {
        let flag = self.interrupt_flag();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(CALCULATION_GRACE);
                if !flag.load(Ordering::Relaxed) {
                    continue;
                }
                std::thread::sleep(CALCULATION_GRACE);
                // The interruption may have ended a part of the work after which the command finishes.
                if flag.load(Ordering::Relaxed) {
                    let _ = writeln!(
                        io::stderr(),
                        "cachemate: interrupted: the calculation has no result yet"
                    );
                    std::process::exit(INTERRUPTED_CODE);
                }
            }
        });
    }

    /// Clears the interruption after the interrupted work has ended, so that the command can finish.
    pub fn clear_interrupt(&self) {
        self.interrupted.store(false, Ordering::Relaxed);
    }

    /// Prints a message to standard error if that is a terminal, unless `--quiet` was given.
    pub fn note(&self, message: &str) {
        if self.shows_notes {
            let _ = writeln!(io::stderr(), "{}", EscapedText::for_output(message));
        }
    }

    /// Prints a warning to standard error, even if it is not a terminal.
    pub fn warn(&self, message: &str) {
        let _ = writeln!(
            io::stderr(),
            "cachemate: warning: {}",
            EscapedText::for_output(message)
        );
    }

    /// Prints a line to standard error even if that is no terminal, such as of a daemon's log, unless `--quiet` was
    /// given.
    pub fn log(&self, message: &str) {
        if !self.is_quiet {
            let _ = writeln!(
                io::stderr(),
                "cachemate: {}",
                EscapedText::for_line(message)
            );
        }
    }

    /// Progress bar over `total` units, or a counter if the total is unknown; drawn only if [`Session::note`] prints.
    /// Off a terminal, a line of text takes its place every ten seconds, unless `--quiet` or `--json` was given.
    pub fn progress_bar(&self, stage: &'static str, total: Option<u64>) -> ProgressBar {
        let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
        let template = match total {
            Some(_) => {
                "{prefix} [{bar:30}] {percent} %  {human_pos}/{human_len}  {per_sec}  {eta} left  {msg}"
            }
            None => "{prefix} {spinner} {human_pos}  {per_sec}  {elapsed}",
        };
        let target = if self.shows_notes {
            ProgressDrawTarget::stderr_with_hz(8)
        } else {
            ProgressDrawTarget::hidden()
        };
        bar.set_draw_target(target);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━━╌"));
        }
        bar.set_prefix(stage);
        if self.shows_notes {
            bar.enable_steady_tick(Duration::from_millis(250));
        } else if !self.is_quiet && !self.prints_json {
            report_progress_lines(stage, &bar);
        }
        bar
    }

    /// Prints the command's result: one JSON object with `--json`, else the rendered text.
    pub fn print_result<T: Serialize>(
        &self,
        json: bool,
        result: &T,
        render: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        if json {
            self.print_json(
                &serde_json::to_string_pretty(result).context("cannot write the result as JSON")?,
            )
        } else {
            self.print(&render())
        }
    }

    /// Prints the result of a command whose standard output belongs to the programs that it runs. JSON is written to
    /// `output` if given, and otherwise to standard error; text is written to standard error, unless `--quiet` was
    /// given.
    pub fn print_result_beside_programs<T: Serialize>(
        &self,
        json: bool,
        output: Option<(&Path, bool)>,
        result: &T,
        render: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        let text = match json {
            true => EscapedText::for_json(
                &(serde_json::to_string_pretty(result)
                    .context("cannot write the result as JSON")?
                    + "\n"),
            ),
            false if self.is_quiet => return Ok(()),
            false => EscapedText::for_output(&render()),
        };
        match output.filter(|_| json) {
            Some((path, force)) => write_file(path, text.as_str().as_bytes(), force),
            None => io::stderr()
                .lock()
                .write_all(text.as_str().as_bytes())
                .context("cannot write to standard error"),
        }
    }

    /// Prints one JSON object and a line end.
    pub fn print_json(&self, object: &str) -> anyhow::Result<()> {
        self.write(&EscapedText::for_json(&format!("{object}\n")))
    }

    pub fn print(&self, text: &str) -> anyhow::Result<()> {
        self.write(&EscapedText::for_output(text))
    }

    /// Writes to standard output; no other function does.
    fn write(&self, text: &EscapedText) -> anyhow::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_str().as_bytes())
            .and_then(|()| out.flush())
            .context("cannot write to standard output")
    }
}

/// Prints the state of a hidden bar to standard error at every interval until it is finished or dropped.
fn report_progress_lines(stage: &'static str, bar: &ProgressBar) {
    let weak_bar = bar.downgrade();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(PROGRESS_LINE_INTERVAL);
            let Some(bar) = weak_bar.upgrade().filter(|bar| !bar.is_finished()) else {
                return;
            };
            let total = bar
                .length()
                .map_or(String::new(), |total| format!(" of {total}"));
            let line = format!(
                "{stage}: {}{total}, {} s {}",
                bar.position(),
                bar.elapsed().as_secs(),
                bar.message()
            );
            let _ = writeln!(
                io::stderr(),
                "cachemate: {}",
                EscapedText::for_line(line.trim_end())
            );
        }
    });
}
