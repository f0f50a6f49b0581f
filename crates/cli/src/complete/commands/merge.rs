//! `cachemate merge`: joins the stores that shards have filled.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::{Context, ensure};
use cachemate_report::text::format_count_of;
use cachemate_repro::store::{MAX_DIR_BYTES, RunDir, StoredLookup};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::exit::InterruptedError;
use crate::session::Session;

/// Join the stores of runs that shards have filled (docs/shards.md)
///
/// Runs of all FROM directories are copied to STORE. A run that is damaged is left out, and one that two shards made
/// differently is an error. The order of the directories does not matter.
#[derive(Args)]
pub struct MergeArgs {
    /// Directory of stored runs to copy to; created if it is missing
    #[arg(value_name = "STORE")]
    store: PathBuf,
    /// Directories of stored runs to copy from
    #[arg(value_name = "FROM", required = true)]
    sources: Vec<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate merge --json`.
#[derive(Default, Serialize)]
struct MergeJson {
    copied: usize,
    /// Runs that the store had already, with the same value.
    present: usize,
    damaged: Vec<String>,
    /// Runs of which the store has another value.
    differing: Vec<String>,
}

impl MergeArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        for source in &self.sources {
            ensure!(
                cachemate_files::path_exists(source),
                "{}: found nothing, expected a directory of stored runs",
                source.display()
            );
        }
        let target = open(&self.store)?;
        let stop = session.interrupt_flag();
        let mut merged = MergeJson::default();
        for path in &self.sources {
            let source = open(path)?;
            for file in source.files().with_context(|| path.display().to_string())? {
                if stop.load(Ordering::Relaxed) {
                    return Err(
                        InterruptedError(format!("{} runs were copied", merged.copied)).into(),
                    );
                }
                copy_run(&source, &file, &target, &mut merged)?;
            }
        }
        session.print_result(self.json.json, &merged, || {
            let count = |runs: usize| format_count_of(runs as u64, "run");
            format!(
                "{}: {} copied, {} present already, {} damaged\n",
                self.store.display(),
                count(merged.copied),
                merged.present,
                merged.damaged.len()
            )
        })?;
        ensure!(
            merged.differing.is_empty(),
            "shards disagree about {}: {}",
            format_count_of(merged.differing.len() as u64, "run"),
            merged.differing.join(", ")
        );
        Ok(())
    }
}

fn open(path: &std::path::Path) -> anyhow::Result<RunDir> {
    RunDir::new(path, MAX_DIR_BYTES).with_context(|| path.display().to_string())
}

fn copy_run(
    source: &RunDir,
    file: &cachemate_repro::store::StoredFile,
    target: &RunDir,
    merged: &mut MergeJson,
) -> anyhow::Result<()> {
    let name = format!("{}/{}", source.path().display(), file.subpath().display());
    let entry = match source.read(file).with_context(|| name.clone())? {
        None => return Ok(()),
        Some(Err(_)) => {
            merged.damaged.push(name);
            return Ok(());
        }
        Some(Ok(entry)) => entry,
    };
    match target.find_entry(&entry.kind, &entry.sources, &entry.inputs) {
        StoredLookup::Hit(present) if present.answer == entry.answer => merged.present += 1,
        StoredLookup::Hit(_) => merged.differing.push(format!("{name} ({})", entry.label)),
        StoredLookup::Miss | StoredLookup::Unusable(_) => {
            target.store_entry(&entry).with_context(|| name)?;
            merged.copied += 1;
        }
    }
    Ok(())
}
