//! Treatment of a journal that was left behind: it is removed, reduced to the objects that are still to be restored, or
//! quarantined.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{
    Journal, JournalError, JournalFile, JournalObject, RecoveredJournal, open_trusted, remove,
    sync_dir,
};

/// Quarantines a journal with damaged lines beside its former path: everything readable has been restored, and the
/// rest is for the operator to judge.
///
/// # Errors
/// The file system fails; the journal keeps its path.
pub fn quarantine(state_dir: &Path) -> Result<PathBuf, JournalError> {
    let path = state_dir.join(Journal::FILE_NAME);
    let numbered_path =
        |index: u32| state_dir.join(format!("{}.{index}", Journal::QUARANTINE_PREFIX));
    let quarantine_path = (1..)
        .map(numbered_path)
        .find(|aside| !cachemate_files::path_exists(aside))
        .expect("numbers do not end");
    match fs::rename(&path, &quarantine_path).and_then(|()| sync_dir(state_dir)) {
        Ok(()) => Ok(quarantine_path),
        Err(source) => Err(JournalError::Io { path, source }),
    }
}

/// Quarantined journals; they stay until the operator removes them.
///
/// # Errors
/// The directory cannot be listed.
pub fn find_quarantined(state_dir: &Path) -> io::Result<Vec<PathBuf>> {
    let is_quarantined = |path: &PathBuf| {
        path.file_name().is_some_and(|name| {
            name.to_string_lossy()
                .starts_with(Journal::QUARANTINE_PREFIX)
        })
    };
    Ok(cachemate_files::list_dir(state_dir)?
        .into_iter()
        .filter(is_quarantined)
        .collect())
}

/// Removes a journal that was left behind and has been restored.
///
/// # Errors
/// The errors of the file system.
pub fn remove_left_behind(state_dir: &Path) -> Result<(), JournalError> {
    remove(&state_dir.join(Journal::FILE_NAME))
}

/// Reduces a journal that was left behind to the objects that `is_kept` names, in one step. The others are
/// restored, and a later change of them by another process must not be undone.
///
/// # Errors
/// The disk fails; the whole journal stays, and the next restore repeats its objects.
pub fn retain_left_behind(
    state_dir: &Path,
    recovered_journal: RecoveredJournal,
    is_kept: impl Fn(&JournalObject) -> bool,
) -> Result<(), JournalError> {
    let path = state_dir.join(Journal::FILE_NAME);
    let RecoveredJournal {
        boot_id: Some(boot_id),
        pid_namespace,
        entries,
        ..
    } = recovered_journal
    else {
        return Ok(());
    };
    let Some(file) = open_trusted(&path)? else {
        return Ok(());
    };
    let since_ticks = entries
        .values()
        .map(|entry| entry.since_ticks)
        .next()
        .unwrap_or_default();
    let (journal_file, valid_bytes, compacted_bytes) = (JournalFile::new(file), 0, 0);
    let is_torn = false;
    Journal {
        path,
        file: journal_file,
        valid_bytes,
        is_torn,
        compacted_bytes,
        boot_id,
        pid_namespace,
        since_ticks,
        entries,
        families: std::collections::BTreeMap::new(),
    }
    .rewrite(is_kept)
}
