//! Records a program's data accesses into a `.cmt` file.
//!
//! Programs have to be recorded as they are, with threads and children, for minutes, and whoever
//! waits for it presses Ctrl-C. So the program runs under Valgrind with cachemate's tool
//! (`recorders/valgrind`), which needs neither sources nor a counter unit; the tool filters the
//! accesses by a small L1, because most of them would hit it in any machine, and sends the rest
//! through a FIFO to this module, which compresses them.
//!
//! For example, `xz -3` on 8 MB takes 13 times as long as alone, and with bursts of 10 million
//! accesses three times. After Ctrl-C there is a recording up to that moment, and `ended` says
//! `interrupted`.
//!
//! Memory is constant. The file gets its name once it is complete, and has that name with `.part`
//! while it grows (readable to its last complete block). The program's exit status is part of the
//! result and never an error of the recorder.

mod child_watch;
mod chunks;
mod fifo;
mod valgrind;

use std::fs::File;
use std::io::{BufWriter, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::process::Signal;

use crate::children::end_with_parent;
use crate::formats::lackey_reader;
use crate::{
    AccessRecord, CmtWriter, L1Filter, TraceError, TraceHeader, TraceReader, TraceTotals,
    create_output,
};
use child_watch::describe_children;
use chunks::{ChunkDecoder, PROCESS_SHIFT};
use fifo::FifoReader;
pub use valgrind::{RecorderTool, find_recorder_tool};

/// The treatment of processes that the program starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ChildProcesses {
    /// Recorded into the same file; the address bits from 48 on contain the process.
    Follow,
    /// Children run unrecorded, and so does a program by which the recorded one replaces itself (exec).
    #[default]
    Ignore,
}

/// Bursts of accesses, between which the program runs without the recorder's code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BurstSampling {
    /// Minimum number of data accesses of a burst.
    pub accesses: u64,
    /// Share of the run in bursts, 1 to 99.
    pub percent: u8,
}

/// The options of a recording.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recorder {
    /// Program and arguments.
    pub command: Vec<String>,
    /// The `.cmt` file to write.
    pub output: PathBuf,
    /// Whether an existing output is replaced.
    pub force: bool,
    /// Data accesses of all threads to skip, counted before the filter; with `Follow`, of each process.
    pub skip_accesses: u64,
    /// Data accesses to record after those; the program then continues unrecorded, and faster.
    pub max_accesses: Option<u64>,
    /// Time for which the program first runs without the recorder's code; counts begin afterward. The recorder checks
    /// the time whenever a thread gets a turn.
    pub skip_time: Duration,
    /// Time to record after that.
    pub max_time: Option<Duration>,
    /// Bursts to record, with pauses between them; `None` to record everything.
    pub bursts: Option<BurstSampling>,
    /// Maximum size of the file in bytes, after which nothing more is written; the program continues to its end.
    pub max_bytes: u64,
    /// Whether the program is killed at `max_accesses`, `max_time` or `max_bytes`.
    pub kill_at_max: bool,
    /// The L1 cache whose misses are recorded; `None` to record every access.
    pub filter: Option<L1Filter>,
    /// Treatment of the processes that the program starts.
    pub children: ChildProcesses,
    /// The zstd level; 3 keeps up with recording.
    pub level: i32,
    /// Whether the program's standard output and its standard error are discarded.
    pub discards_output: (bool, bool),
}

/// The progress of a recording.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordingProgress {
    /// Data accesses of the program in the window, before the filter.
    pub program_accesses: u64,
    /// Records written: the accesses that passed the filter.
    pub records: u64,
    /// Bytes written.
    pub bytes: u64,
}

/// The way in which the program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordingEnd {
    /// The program exited with this status.
    Exit(i32),
    /// The signal with this number ended the program.
    Signal(i32),
    /// The recorder killed it, at `max_accesses`, `max_time` or `max_bytes`.
    AtMax,
    /// The recorder killed it, on request.
    Interrupted,
}

impl std::fmt::Display for RecordingEnd {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RecordingEnd::Exit(status) => write!(out, "exit {status}"),
            RecordingEnd::Signal(signal) => write!(out, "signal {signal}"),
            RecordingEnd::AtMax => write!(out, "stopped at the maximum"),
            RecordingEnd::Interrupted => write!(out, "interrupted"),
        }
    }
}

/// A finished recording.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordingSummary {
    /// The header, as stored in the file.
    pub header: TraceHeader,
    /// The totals, as stored in the file.
    pub totals: TraceTotals,
    /// The end of the program; its own failure is not an error of the recorder.
    pub recording_end: RecordingEnd,
    /// Size of the file.
    pub bytes: u64,
    /// A note for the user: the fallback in use and its limits.
    pub note: Option<String>,
}

impl Recorder {
    /// Builds a recorder with the default settings: every access, a 32 KiB 8-way filter, children not recorded.
    pub fn new(command: Vec<String>, output: impl Into<PathBuf>) -> Self {
        Recorder {
            command,
            output: output.into(),
            force: false,
            skip_accesses: 0,
            max_accesses: None,
            skip_time: Duration::ZERO,
            max_time: None,
            bursts: None,
            max_bytes: u64::MAX,
            kill_at_max: false,
            filter: Some(L1Filter::default()),
            children: ChildProcesses::Ignore,
            level: 3,
            discards_output: (false, false),
        }
    }

    /// Runs the program and records it. Once `interrupt` is true, the program is stopped (first a request, then a kill
    /// after three seconds), and the recorded part is kept. `progress` is called after every batch.
    ///
    /// # Errors
    /// [`TraceError::Recorder`] if Valgrind or the program cannot be run, [`TraceError::Exists`], [`TraceError::Io`].
    pub fn run(
        &self,
        interrupt: &AtomicBool,
        progress: impl FnMut(RecordingProgress),
    ) -> Result<RecordingSummary, TraceError> {
        self.run_with(&find_recorder_tool()?, interrupt, progress)
    }

    /// Does the same as [`Recorder::run`], with the result of [`find_recorder_tool`].
    pub fn run_with(
        &self,
        recorder_tool: &RecorderTool,
        interrupt: &AtomicBool,
        mut progress: impl FnMut(RecordingProgress),
    ) -> Result<RecordingSummary, TraceError> {
        if let Some(filter) = &self.filter {
            filter.check().map_err(|reason| TraceError::Recorder {
                why: format!("L1 filter: {reason}"),
                remedy: None,
            })?;
        }

        if let (
            RecorderTool::Lackey {
                reason: because, ..
            },
            true,
        ) = (recorder_tool, self.needs_own_tool())
        {
            let reason = format!(
                "parts of a run by time, bursts and children need cachemate's own tool; {because}"
            );
            return Err(TraceError::Recorder {
                why: reason,
                remedy: None,
            });
        }

        check_program(self.command.first().map(String::as_str).unwrap_or(""))?;
        let output = RecordingFile::create(&self.output, self.force)?;
        let work_dir = tempfile::Builder::new()
            .prefix("cachemate-record-")
            .tempdir();
        let work = work_dir.map_err(TraceError::io_error("the temporary directory", "write in"))?;
        let fifo_path = work.path().join("accesses");
        let log_path = work.path().join("valgrind.log");
        let input = FifoReader::create_and_open(&fifo_path)?;
        let child = self
            .command_line(recorder_tool, &fifo_path, &log_path)
            .spawn();
        let child = child.map_err(TraceError::io_error("valgrind", "start"))?;
        let mut fifo = FifoReader::new(
            input,
            child,
            interrupt,
            self.children == ChildProcesses::Follow,
        );
        let header = self.build_header(recorder_tool);
        let mut writer = CmtWriter::new(
            BufWriter::new(output.clone_file()?),
            self.output.display().to_string(),
            &header,
            self.level,
        )?;
        let capture_result = match recorder_tool {
            RecorderTool::Tool { .. } => self.capture_chunks(&mut fifo, &mut writer, &mut progress),
            RecorderTool::Lackey { .. } => {
                self.capture_lackey(&mut fifo, &mut writer, &mut progress)
            }
        };
        // Without a reader, the program would fill its pipe and wait for ever; dropping the FIFO ends it.
        let capture = capture_result?;
        let was_stopped = fifo.is_stopped();
        let status = fifo
            .wait()
            .map_err(TraceError::io_error("valgrind", "wait for"))?;
        let children_time = fifo.children_time();
        let children = fifo.take_children(&self.command[0]);
        let recording_end = match (was_stopped, fifo.is_stop_requested, status.code()) {
            (true, true, _) => RecordingEnd::AtMax,
            (true, false, _) => RecordingEnd::Interrupted,
            (false, _, Some(code)) => RecordingEnd::Exit(code),
            (false, _, None) => RecordingEnd::Signal(status.signal().unwrap_or(0)),
        };
        let CaptureSummary {
            mut totals,
            is_started,
            is_max_reached: max_reached,
            is_full,
            has_reached_end: end_seen,
        } = capture;
        if !is_started && !was_stopped {
            return Err(valgrind_error(&self.command[0], &log_path));
        }
        let recording_end = if self.kill_at_max && max_reached {
            RecordingEnd::AtMax
        } else {
            recording_end
        };
        totals.ended = Some(recording_end.to_string());
        let was_replaced = self.children == ChildProcesses::Ignore
            && !end_seen
            && !max_reached
            && matches!(recording_end, RecordingEnd::Exit(_));
        let ended_alone = matches!(
            recording_end,
            RecordingEnd::Exit(_) | RecordingEnd::Signal(_)
        );
        let is_known_signal = recording_end == RecordingEnd::Signal(ILLEGAL_INSTRUCTION);
        if let RecorderTool::Tool { .. } = recorder_tool
            && ended_alone
            && !is_known_signal
            && let Some(reason) = self.emptiness_reason(&totals)
        {
            return Err(TraceError::Recorder {
                why: format!("{}: nothing was recorded, {reason}", output.name()),
                remedy: None,
            });
        }
        let leaves_children = self.children == ChildProcesses::Ignore;
        let note = match recorder_tool {
            _ if recording_end == RecordingEnd::Signal(ILLEGAL_INSTRUCTION) => {
                Some(ILLEGAL_INSTRUCTION_NOTE.to_string())
            }
            RecorderTool::Lackey {
                reason: because, ..
            } => {
                let note = lackey_note(because, self.filter.is_some());
                let full_note = if is_full { FULL_NOTE } else { "" };
                Some([full_note, &note].join("\n").trim_start().to_string())
            }
            RecorderTool::Tool { .. } if was_replaced => Some(REPLACED_NOTE.to_string()),
            RecorderTool::Tool { .. } if is_full => Some(FULL_NOTE.to_string()),
            RecorderTool::Tool { .. }
                if leaves_children && children_time >= MIN_NOTED_CHILDREN_TIME =>
            {
                Some(children_note(children_time, &describe_children(&children)))
            }
            RecorderTool::Tool { .. } => None,
        };
        let (out, totals) = writer.finish(totals)?;
        out.into_inner()
            .map_err(|error| TraceError::io_error(&output.name(), "write")(error.into_error()))?;
        let bytes = output.finish()?;
        Ok(RecordingSummary {
            header,
            totals,
            recording_end,
            bytes,
            note,
        })
    }

    /// The reason why a recording has no record; `None` if it has some, or if an empty one is what was asked for.
    fn emptiness_reason(&self, totals: &TraceTotals) -> Option<&'static str> {
        let skips_start = !self.skip_time.is_zero() || self.skip_accesses > 0;
        let lacks_burst = self.bursts.is_some() && totals.bursts.is_empty();
        let ended_early = skips_start && totals.threads.is_empty();
        if lacks_burst {
            Some(NO_BURST_REASON)
        } else if ended_early {
            Some(EARLY_END_REASON)
        } else {
            None
        }
    }

    fn needs_own_tool(&self) -> bool {
        !self.skip_time.is_zero()
            || self.max_time.is_some()
            || self.bursts.is_some()
            || self.children == ChildProcesses::Follow
    }

    fn build_header(&self, recorder_tool: &RecorderTool) -> TraceHeader {
        let (source, is_own_tool) = match recorder_tool {
            RecorderTool::Tool { valgrind, .. } => (valgrind.clone(), true),
            RecorderTool::Lackey { valgrind, .. } => (format!("lackey of {valgrind}"), false),
        };
        TraceHeader {
            command: self.command.clone(),
            filter: self.filter.filter(|_| is_own_tool),
            line_bytes: self.filter.map_or(64, |filter| filter.line_bytes),
            page_bytes: rustix::param::page_size() as u32,
            skip_accesses: self.skip_accesses,
            max_accesses: self.max_accesses,
            process_shift: (self.children == ChildProcesses::Follow).then_some(PROCESS_SHIFT),
            has_dependences: is_own_tool,
            ..TraceHeader::for_import(&source, true)
        }
    }

    fn command_line(&self, recorder_tool: &RecorderTool, fifo: &Path, log: &Path) -> Command {
        let follow_value = if self.children == ChildProcesses::Follow {
            "yes"
        } else {
            "no"
        };
        let mut command = Command::new("valgrind");
        // A recorder that was killed reads nothing any more, and the program would run on in vain.
        end_with_parent(&mut command, Signal::KILL);
        command.args([
            "-q",
            "--vgdb=no",
            &format!("--trace-children={follow_value}"),
        ]);

        match recorder_tool {
            RecorderTool::Tool { library, .. } => {
                command.env("VALGRIND_LIB", library);
                command
                    .arg("--tool=cachemate")
                    .arg(format!("--log-file={}", log.display()));
                command
                    .arg(format!("--cm-fifo={}", fifo.display()))
                    .arg(format!("--cm-follow={follow_value}"));
                command.arg(format!(
                    "--cm-skip={}",
                    self.skip_accesses.min(i64::MAX as u64)
                ));
                if let Some(max) = self.max_accesses {
                    command.arg(format!("--cm-max={}", max.min(i64::MAX as u64)));
                }

                command.arg(format!("--cm-skip-ms={}", self.skip_time.as_millis()));
                if let Some(time) = self.max_time {
                    command.arg(format!("--cm-max-ms={}", time.as_millis().max(1)));
                }

                if let Some(BurstSampling { accesses, percent }) = self.bursts {
                    command.arg(format!("--cm-burst={}", accesses.min(i64::MAX as u64)));
                    command.arg(format!("--cm-burst-percent={percent}"));
                }

                if self.kill_at_max {
                    command.arg("--cm-stop-at-max=yes");
                }

                if let Some(filter) = self.filter {
                    command.arg(format!("--cm-l1-bytes={}", filter.size_bytes));
                    command.arg(format!("--cm-l1-ways={}", filter.ways));
                    command.arg(format!("--cm-l1-line={}", filter.line_bytes));
                }
            }
            RecorderTool::Lackey { .. } => {
                command.args([
                    "--tool=lackey",
                    "--trace-mem=yes",
                    "--child-silent-after-fork=yes",
                ]);
                command.arg(format!("--log-file={}", fifo.display()));
            }
        }

        command.arg("--").args(&self.command);
        if self.discards_output.0 {
            command.stdout(Stdio::null());
        }

        if self.discards_output.1 {
            command.stderr(Stdio::null());
        }
        command
    }

    fn capture_chunks(
        &self,
        fifo: &mut FifoReader<'_>,
        writer: &mut CmtWriter<BufWriter<File>>,
        progress: &mut impl FnMut(RecordingProgress),
    ) -> Result<CaptureSummary, TraceError> {
        let mut decoder = ChunkDecoder::new(self.children == ChildProcesses::Follow);
        let mut buffer = vec![0; 1 << 18];
        let mut records: Vec<AccessRecord> = Vec::new();
        let mut is_full = false;

        loop {
            let read_bytes = fifo
                .read(&mut buffer)
                .map_err(TraceError::io_error("the recorder's FIFO", "read"))?;
            if read_bytes == 0 {
                break;
            }
            // A pipe without a reader would end the program by a signal.
            if is_full {
                continue;
            }

            records.clear();
            decoder.decode(&buffer[..read_bytes], &mut records)?;
            writer.push_all(&records)?;
            fifo.writers = decoder
                .processes
                .iter()
                .skip(1)
                .filter_map(|process| process.pid)
                .collect();
            let program_accesses = decoder.accesses();
            progress(RecordingProgress {
                program_accesses,
                records: writer.records(),
                bytes: writer.bytes(),
            });

            if writer.bytes() >= self.max_bytes {
                is_full = true;
                fifo.is_stop_requested = self.kill_at_max;
            }
        }

        Ok(CaptureSummary {
            totals: decoder.totals(),
            is_started: !decoder.processes.is_empty(),
            is_max_reached: decoder.is_max_reached || is_full,
            is_full,
            has_reached_end: decoder.has_reported_end,
        })
    }

    /// Reads lackey's lines to the end, and applies the window; there is one thread and no filter.
    fn capture_lackey(
        &self,
        fifo: &mut FifoReader<'_>,
        writer: &mut CmtWriter<BufWriter<File>>,
        progress: &mut impl FnMut(RecordingProgress),
    ) -> Result<CaptureSummary, TraceError> {
        let mut reader = lackey_reader(fifo, "lackey's output".to_string());
        let (mut access_count, mut instructions) = (0u64, 0u64);
        let window_end = self
            .skip_accesses
            .saturating_add(self.max_accesses.unwrap_or(u64::MAX));
        let (mut batch, mut is_full) = (Vec::new(), false);
        while reader.read_batch(&mut batch)? {
            for record in &batch {
                if (self.skip_accesses..window_end).contains(&access_count) && !is_full {
                    instructions += record.gap;
                    writer.push(record)?;
                }
                access_count += 1;
            }
            let (program_accesses, records) = (writer.records(), writer.records());
            progress(RecordingProgress {
                program_accesses,
                records,
                bytes: writer.bytes(),
            });

            is_full |= writer.bytes() >= self.max_bytes;
            if self.kill_at_max && (is_full || access_count >= window_end) {
                reader.input_mut().is_stop_requested = true;
            }
        }

        // The instructions after the last access belong only to a window that was not truncated.
        let all_instructions = reader.totals().and_then(|totals| totals.instructions);
        let is_whole_run = access_count <= window_end && self.skip_accesses == 0 && !is_full;
        let instructions = if is_whole_run {
            all_instructions
        } else {
            Some(instructions)
        };

        let records = writer.records();
        let totals = TraceTotals {
            program_accesses: Some(records),
            instructions,
            ..TraceTotals::default()
        };
        Ok(CaptureSummary {
            totals,
            is_started: access_count > 0,
            is_max_reached: is_full || self.max_accesses.is_some() && access_count >= window_end,
            is_full,
            has_reached_end: true,
        })
    }
}

/// `SIGILL`.
const ILLEGAL_INSTRUCTION: i32 = 4;
const ILLEGAL_INSTRUCTION_NOTE: &str = "the program met an instruction that Valgrind does not know (signal 4): if it runs \
     without Valgrind, it probably uses AVX-512. Compile it with -mno-avx512f, or set \
     GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW if the library chose the instructions";
const REPLACED_NOTE: &str = "the program replaced itself by another (exec), which is left alone as children are: \
     name that program itself, or follow children";

const FULL_NOTE: &str = "the file reached its maximum size, so the rest of the run is not in it: --skip-seconds, \
     --max-accesses or a larger --l1 choose another part, --max-size another maximum";
const EARLY_END_REASON: &str = "because the program ended within the part to skip";

const NO_BURST_REASON: &str =
    "because the program ended before the first burst: record it without --burst-accesses";

/// CPU time of children that are not recorded from which the recording has a note.
const MIN_NOTED_CHILDREN_TIME: Duration = Duration::from_millis(100);

/// `names` is empty if no child lived long enough to be seen, or if the kernel does not list children.
fn children_note(time: Duration, names: &str) -> String {
    let names = match names {
        "" => String::new(),
        names => format!(" ({names})"),
    };
    format!(
        "processes that the program started used {:.1} s of CPU time and are not in the file{names}: follow children, or \
         record the program that does the work itself",
        time.as_secs_f64()
    )
}

/// The result of a recording.
struct CaptureSummary {
    totals: TraceTotals,
    /// Whether the program was started at all.
    is_started: bool,
    /// Whether the recording has reached `max_accesses`, `max_time` or `max_bytes`.
    is_max_reached: bool,
    /// Whether the file has reached its maximum size.
    is_full: bool,
    /// Whether the program reached its end without replacing itself.
    has_reached_end: bool,
}

fn lackey_note(reason: &str, is_filtered: bool) -> String {
    let filter = if is_filtered {
        "without the L1 filter, "
    } else {
        ""
    };
    format!(
        "recorded with Valgrind's lackey: {filter}without telling threads apart, and some 150 times slower than \
         cachemate's own tool (0.3 million accesses a second); {reason}"
    )
}

/// Rejects programs that Valgrind would reject only after the output has been started.
fn check_program(program: &str) -> Result<(), TraceError> {
    let refuse_program = |reason: String| {
        Err(TraceError::Recorder {
            why: reason,
            remedy: None,
        })
    };
    if program.is_empty() {
        return refuse_program("no program to record was named".into());
    }

    let program_path = if program.contains('/') {
        Some(PathBuf::from(program))
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path)
            .map(|dir| dir.join(program))
            .find(|file| is_executable(file))
    };
    let Some(file) = program_path else {
        return refuse_program(format!("{program}: no such program in PATH"));
    };

    if !is_executable(&file) {
        let reason = if cachemate_files::path_exists(&file) {
            "it cannot be executed"
        } else {
            "there is no such file"
        };
        return refuse_program(format!("{program}: {reason}"));
    }

    let mut start = Vec::new();
    let read_result =
        cachemate_files::open_plain(&file).and_then(|input| input.take(5).read_to_end(&mut start));
    if read_result.is_ok() && start == *b"\x7fELF\x01" {
        return refuse_program(format!(
            "{program}: it is a 32-bit program, and the recorder takes 64-bit ones"
        ));
    }
    Ok(())
}

fn is_executable(file: &Path) -> bool {
    file.metadata()
        .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// Maximum size of a Valgrind log whose first lines are quoted.
const MAX_LOG_BYTES: u64 = 16 << 20;

fn valgrind_error(program: &str, log: &Path) -> TraceError {
    let log_text = cachemate_files::read_text_limited(log, MAX_LOG_BYTES).unwrap_or_default();
    let lines: Vec<&str> = log_text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .take(6)
        .collect();
    let message = if lines.is_empty() {
        "it printed no message".to_string()
    } else {
        lines.join(" / ")
    };
    TraceError::Recorder {
        why: format!("valgrind could not run '{program}': {message}"),
        remedy: None,
    }
}

/// The file being written: `FILE.part` until it is complete, or the target itself if it is not a regular file
/// (`/dev/null`, a pipe).
struct RecordingFile {
    path: PathBuf,
    partial_path: Option<PathBuf>,
    file: File,
}

impl RecordingFile {
    fn create(path: &Path, force: bool) -> Result<RecordingFile, TraceError> {
        let path = path.to_path_buf();
        if cachemate_files::path_exists(&path) && !path.is_file() {
            return Ok(RecordingFile {
                file: cachemate_files::open_sink(&path)
                    .map_err(TraceError::io_error(&path.display().to_string(), "open"))?,
                path,
                partial_path: None,
            });
        }

        if cachemate_files::path_exists(&path) && !force {
            return Err(TraceError::Exists {
                file: path.display().to_string(),
            });
        }

        let mut name = path.as_os_str().to_owned();
        name.push(".part");
        let partial_path = PathBuf::from(name);
        Ok(RecordingFile {
            file: create_output(&partial_path, true)?,
            path,
            partial_path: Some(partial_path),
        })
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn clone_file(&self) -> Result<File, TraceError> {
        self.file
            .try_clone()
            .map_err(TraceError::io_error(&self.name(), "write"))
    }

    fn finish(mut self) -> Result<u64, TraceError> {
        let bytes = self
            .file
            .metadata()
            .map_err(TraceError::io_error(&self.name(), "read"))?
            .len();
        if let Some(partial_path) = self.partial_path.take() {
            std::fs::rename(&partial_path, &self.path)
                .map_err(TraceError::io_error(&self.name(), "create"))?;
        }
        Ok(bytes)
    }
}

impl Drop for RecordingFile {
    /// Removes an unfinished file without any complete block, because it is useless.
    fn drop(&mut self) {
        if let Some(partial_path) = &self.partial_path
            && self
                .file
                .metadata()
                .is_ok_and(|metadata| metadata.len() < 4096)
        {
            std::fs::remove_file(partial_path).ok();
        }
    }
}

#[cfg(test)]
mod tests;
