//! Merges all results into one file in the order of the manifest. The bytes do not depend on the engines and workers.

use std::io::{BufWriter, Write};
use std::path::Path;

use cachemate_files::FreshFile;
use serde::Serialize;

use crate::SweepError;
use crate::manifest::{Manifest, SweepTask};
use crate::store::{Store, StoredResult};

/// Summary of a merge; `cachemate sweep merge --json` prints it.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct MergeSummary {
    /// Number of lines of the manifest.
    pub total: usize,
    /// Number of lines of the merged file.
    pub merged: usize,
    /// Ids of lines without a result.
    pub missing: Vec<String>,
    /// Number of results that several directories contain with equal bits.
    pub duplicates: usize,
    /// Results on which two directories or two workers disagree.
    pub conflicting: Vec<String>,
    /// Incomplete results, one sentence each.
    pub damaged: Vec<String>,
}

impl MergeSummary {
    /// Does the merged file have a result for every task, without any conflict?
    pub fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.conflicting.is_empty() && self.damaged.is_empty()
    }
}

/// Merges the results of directories that have the same tasks (shards of one sweep on machines that share no disk) into
/// `out`, with a line `{"id", "point", "result"}` for each line of the manifest that has a result.
///
/// # Errors
/// There are no directories, they belong to different sweeps, one cannot be read, or a file cannot be written.
pub fn merge(stores: &[Store], out: &Path) -> Result<MergeSummary, SweepError> {
    let Some((first_store, other_stores)) = stores.split_first() else {
        return Err(SweepError::Refused("no directory to merge".to_string()));
    };
    let manifest = first_store.manifest()?;
    for other in other_stores {
        check_same_sweep(&manifest, other)?;
    }
    let io_error = SweepError::io_error(out);
    let mut file = BufWriter::new(FreshFile::create(out).map_err(&io_error)?);
    let mut summary = MergeSummary {
        total: manifest.tasks.len(),
        ..MergeSummary::default()
    };
    for store in stores {
        summary.conflicting.extend(store.differing_files()?);
    }
    for task in &manifest.tasks {
        let Some(stored_result) = summary.merge_task(stores, task) else {
            summary.missing.push(task.id.to_string());
            continue;
        };
        summary.merged += 1;
        let (id, point, result) = (task.id, &task.point, stored_result.result.get());
        writeln!(
            file,
            "{{\"id\":\"{id}\",\"point\":{point},\"result\":{result}}}"
        )
        .map_err(&io_error)?;
    }
    file.into_inner()
        .map_err(|error| io_error(error.into_error()))?
        .commit()
        .map_err(&io_error)?;
    Ok(summary)
}

impl MergeSummary {
    /// Returns the task's result, and records a conflict if directories disagree.
    fn merge_task(&mut self, stores: &[Store], task: &SweepTask) -> Option<StoredResult> {
        let mut result: Option<StoredResult> = None;
        for store in stores {
            match store.read(task.id) {
                Err(problem) => self.damaged.push(problem),
                Ok(None) => {}
                Ok(Some(stored)) => match &result {
                    None => result = Some(stored),
                    Some(earlier) if earlier.result.get() == stored.result.get() => {
                        self.duplicates += 1
                    }
                    Some(_) => self.conflicting.push(format!(
                        "task {} in {}",
                        task.id,
                        store.path().display()
                    )),
                },
            }
        }
        result
    }
}

fn check_same_sweep(manifest: &Manifest, store: &Store) -> Result<(), SweepError> {
    let other_manifest = store.manifest()?;
    let (dir, own_header) = (store.path().display(), &manifest.header);
    if other_manifest.header.version != own_header.version {
        let (found, expected) = (other_manifest.header.version, &own_header.version);
        return Err(SweepError::Refused(format!(
            "{dir}: made by version {found}, expected {expected}"
        )));
    }
    if other_manifest.tasks != manifest.tasks {
        return Err(SweepError::Refused(format!(
            "{dir}: its tasks differ from those of the first directory"
        )));
    }
    Ok(())
}
