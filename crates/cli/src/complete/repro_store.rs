//! `cachemate repro store`: shows the content of the store of runs, verifies it, and shrinks it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use cachemate_report::Table;
use cachemate_report::text::format_count_of;
use cachemate_repro::ReproError;
use cachemate_repro::run_request::rerun_and_compare;
use cachemate_repro::store::{MAX_DIR_BYTES, RunDir, StoredEntry, StoredFile};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::run_store::default_dir;
use crate::args::{ByteSize, JsonArg};
use crate::exit::InterruptedError;
use crate::session::Session;

/// Show, check or shrink the store of simulated runs
#[derive(Args)]
pub struct ReproStore {
    #[command(subcommand)]
    action: StoreAction,
}

#[derive(Subcommand)]
enum StoreAction {
    /// Stored runs by kind, with their size and the CPU time that they cost
    Show(StoreDirArgs),
    /// Remove the runs used least recently
    Prune(StorePrune),
    /// Check every file and repeat a sample of the runs; damaged and wrong ones are removed
    Verify(StoreVerify),
}

#[derive(Args)]
struct StoreDirArgs {
    /// Directory of stored runs [default: in the user's cache]
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

#[derive(Args)]
struct StorePrune {
    /// Size to shrink to, such as 512M
    #[arg(long, value_name = "SIZE")]
    to: ByteSize,
    #[command(flatten)]
    dir: StoreDirArgs,
}

#[derive(Args)]
struct StoreVerify {
    /// Number of runs to repeat
    #[arg(long, value_name = "N", default_value_t = 10)]
    runs: usize,
    /// Seed of the sample
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    dir: StoreDirArgs,
}

/// `cachemate repro store show --json`.
#[derive(Serialize)]
struct StoreContent {
    #[serde(rename = "directory")]
    dir: PathBuf,
    files: usize,
    bytes: u64,
    damaged: usize,
    kinds: BTreeMap<String, KindContent>,
}

/// The runs of one kind.
#[derive(Default, Serialize)]
struct KindContent {
    runs: usize,
    bytes: u64,
    cpu_hours: f64,
}

/// `cachemate repro store verify --json`.
#[derive(Default, Serialize)]
struct StoreCheck {
    files: usize,
    damaged: Vec<String>,
    made_again: usize,
    wrong: Vec<String>,
}

impl ReproStore {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match &self.action {
            StoreAction::Show(args) => show_store(args, session),
            StoreAction::Prune(args) => args.run(session),
            StoreAction::Verify(args) => args.run(session),
        }
    }
}

impl StoreDirArgs {
    fn open(&self) -> anyhow::Result<RunDir> {
        let path = self.store.clone().unwrap_or_else(default_dir);
        RunDir::new(&path, MAX_DIR_BYTES).context("cannot use the store of runs")
    }
}

fn show_store(args: &StoreDirArgs, session: &Session) -> anyhow::Result<()> {
    let dir = args.open()?;
    let (mut damaged_count, mut kinds): (usize, BTreeMap<String, KindContent>) =
        (0, BTreeMap::new());
    let files = dir.files().context("cannot read the store")?;
    for file in &files {
        let Ok(Some(Ok(entry))) = dir.read(file) else {
            damaged_count += 1;
            continue;
        };
        let kind = kinds.entry(entry.kind).or_default();
        (kind.runs, kind.bytes) = (kind.runs + 1, kind.bytes + file.bytes);
        kind.cpu_hours += entry.cpu_seconds / 3600.0;
    }
    let bytes = files.iter().map(|file| file.bytes).sum();
    let content = StoreContent {
        dir: dir.path().to_path_buf(),
        files: files.len(),
        bytes,
        damaged: damaged_count,
        kinds,
    };
    session.print_result(args.json.json, &content, || content.describe())
}

impl StoreContent {
    fn describe(&self) -> String {
        let mut table = Table::with_columns("kind", "runs | KiB | processor hours");
        for (kind, content) in &self.kinds {
            let KindContent {
                runs,
                bytes,
                cpu_hours,
            } = content;
            table.add_row([
                kind.clone(),
                runs.to_string(),
                (bytes >> 10).to_string(),
                format!("{cpu_hours:.2}"),
            ]);
        }
        let (files, dir) = (
            format_count_of(self.files as u64, "file"),
            self.dir.display(),
        );
        let damaged_text = if self.damaged > 0 {
            format!(", {} damaged", self.damaged)
        } else {
            String::new()
        };
        format!(
            "{}\n{dir}: {files} of {} MiB{damaged_text}\n",
            table.text(),
            self.bytes >> 20
        )
    }
}

impl StorePrune {
    fn run(&self, session: &Session) -> anyhow::Result<()> {
        let (removed_files, bytes) = self
            .dir
            .open()?
            .prune(self.to.0)
            .context("cannot prune the store")?;
        let removal_text = || {
            format!(
                "removed {} of {} MiB\n",
                format_count_of(removed_files, "file"),
                bytes >> 20
            )
        };
        session.print_result(
            self.dir.json.json,
            &BTreeMap::from([("bytes", bytes), ("removed", removed_files)]),
            removal_text,
        )
    }
}

impl StoreVerify {
    fn run(&self, session: &Session) -> anyhow::Result<()> {
        let (mut check, mut entries) = (StoreCheck::default(), Vec::new());
        let dir = self.dir.open()?;
        let path_of = |file: &StoredFile| dir.path().join(file.subpath()).display().to_string();
        for file in dir.files().context("cannot read the store")? {
            check.files += 1;
            match dir.read(&file)? {
                None => {}
                Some(Ok(entry)) => entries.push((draw_order(&entry, self.seed), entry, file)),
                Some(Err(error)) => {
                    dir.remove(&file)?;
                    check.damaged.push(format!("{}: {error}", path_of(&file)));
                }
            }
        }
        // The order depends only on the content and the seed.
        entries.sort_by_key(|(order, ..)| *order);
        let (stop, bar) = (
            session.interrupt_flag(),
            session.progress_bar("verify", Some(self.runs as u64)),
        );
        for (_, entry, file) in &entries {
            if check.made_again == self.runs || stop.load(Ordering::Relaxed) {
                break;
            }
            bar.set_message(entry.label.clone());
            match rerun_and_compare(entry) {
                Ok(None) => continue,
                Ok(Some(true)) => {}
                Ok(Some(false)) => {
                    dir.remove(file)?;
                    check
                        .wrong
                        .push(format!("{}: {} {}", path_of(file), entry.kind, entry.label));
                }
                Err(ReproError::Interrupted) => break,
                Err(error) => check.wrong.push(format!("{}: {error}", path_of(file))),
            }
            check.made_again += 1;
            bar.inc(1);
        }
        bar.finish_and_clear();
        session.print_result(self.dir.json.json, &check, || check.describe())?;
        if stop.load(Ordering::Relaxed) {
            return Err(InterruptedError(format!("{} runs were checked", check.made_again)).into());
        }
        anyhow::ensure!(
            check.wrong.is_empty(),
            "{} stored runs were wrong",
            check.wrong.len()
        );
        Ok(())
    }
}

/// Position of an entry in a random order that the content and the seed determine.
fn draw_order(entry: &StoredEntry, seed: u64) -> u64 {
    let mix_byte = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    entry
        .inputs
        .as_bytes()
        .iter()
        .fold(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), mix_byte)
}

impl StoreCheck {
    fn describe(&self) -> String {
        let lines: String = self
            .damaged
            .iter()
            .chain(&self.wrong)
            .map(|line| format!("{line}\n"))
            .collect();
        let (files, remade_runs) = (
            format_count_of(self.files as u64, "file"),
            format_count_of(self.made_again as u64, "run"),
        );
        let (damaged, wrong) = (self.damaged.len(), self.wrong.len());
        format!(
            "{lines}{files} read, {damaged} damaged and removed; {remade_runs} made again, {wrong} wrong\n"
        )
    }
}
