//! The directory of stored values: one file per value, named by a hash, and shared by any number of processes.
//!
//! Properties: files appear whole or not at all, so that a writer may be killed at any moment; a truncated, damaged or
//! misplaced file is never used, and its run is made again; when the directory is full, the least recently used files are
//! removed first.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::entry::{EntryError, MAX_ENTRY_BYTES, StoredEntry, entry_name};

/// Default size of a directory beyond which files are removed.
pub const MAX_DIR_BYTES: u64 = 2 << 30;
const ENTRY_EXTENSION: &str = "run";
/// Minimum time between two marks that a value was used.
const MIN_MARK_INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// Files of writers that were killed are removed after this time.
const ABANDONED_FILE_AGE: Duration = Duration::from_secs(3600);

/// A directory of stored values.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    max_bytes: u64,
    /// Bytes written by this process since the directory was last pruned.
    written_bytes: AtomicU64,
}

/// A stored file as the file system describes it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct StoredFile {
    /// Time of its last use, to the day, or of its writing.
    pub last_used: SystemTime,
    /// Path of the file.
    pub path: PathBuf,
    /// Length of the file.
    pub bytes: u64,
}

/// The result of a lookup in the directory.
#[derive(Debug)]
pub enum StoredLookup {
    /// The value is stored.
    Hit(StoredEntry),
    /// No value is stored under this name.
    Miss,
    /// The file cannot be used, for this reason.
    Unusable(String),
}

impl RunDir {
    /// Creates a handle for a directory that need not exist yet.
    pub fn new(path: &Path, max_bytes: u64) -> Self {
        // Pruned at the first write.
        RunDir {
            path: path.to_path_buf(),
            max_bytes,
            written_bytes: AtomicU64::new(max_bytes),
        }
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn entry_path(&self, name: &str) -> PathBuf {
        let (dir, file) = name.split_at(2);
        self.path
            .join(dir)
            .join(file)
            .with_extension(ENTRY_EXTENSION)
    }

    /// Looks up the value that was made from exactly these inputs by these sources.
    pub fn find_entry(&self, kind: &str, sources: &str, inputs: &str) -> StoredLookup {
        let path = self.entry_path(&entry_name(kind, sources, inputs));
        let unusable_entry = |reason: &dyn std::fmt::Display| {
            StoredLookup::Unusable(format!("{}: {reason}", path.display()))
        };
        match read_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => StoredLookup::Miss,
            Err(error) => StoredLookup::Unusable(error.to_string()),
            Ok(Err(error)) => unusable_entry(&error),
            Ok(Ok(entry))
                if (&*entry.kind, &*entry.sources, &*entry.inputs) != (kind, sources, inputs) =>
            {
                unusable_entry(
                    &"found the value of other inputs, expected the one that the name says",
                )
            }
            Ok(Ok(entry)) => {
                mark_used(&path);
                StoredLookup::Hit(entry)
            }
        }
    }

    /// Stores a value, unless it exceeds the maximum size.
    pub fn store_entry(&self, entry: &StoredEntry) -> io::Result<()> {
        let bytes = entry.to_bytes().map_err(io::Error::other)?;
        let length = bytes.len() as u64;
        if length > MAX_ENTRY_BYTES {
            return Ok(());
        }
        let path = self.entry_path(&entry.name());
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        cachemate_files::replace(&path, &bytes)?;
        if self.written_bytes.fetch_add(length, Ordering::Relaxed) + length > self.max_bytes / 16 {
            self.written_bytes.store(0, Ordering::Relaxed);
            self.prune(self.max_bytes)?;
        }
        Ok(())
    }

    /// Returns every stored file, the least recently used first. A directory that does not exist has none.
    pub fn files(&self) -> io::Result<Vec<StoredFile>> {
        let mut files = self.all_files()?;
        files.retain(|file| {
            file.path
                .extension()
                .is_some_and(|extension| extension == ENTRY_EXTENSION)
        });
        files.sort();
        Ok(files)
    }

    /// Returns all files, including those that writers have not finished.
    fn all_files(&self) -> io::Result<Vec<StoredFile>> {
        let mut files = Vec::new();
        for dir in directory_entries(&self.path)? {
            let is_entry_directory = dir.file_name().is_some_and(|name| name.len() == 2);
            for path in if is_entry_directory {
                directory_entries(&dir)?
            } else {
                Vec::new()
            } {
                // Another process may have removed it.
                let Ok(metadata) = path.symlink_metadata() else {
                    continue;
                };
                if metadata.is_file() {
                    let last_used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    files.push(StoredFile {
                        last_used,
                        path,
                        bytes: metadata.len(),
                    });
                }
            }
        }
        Ok(files)
    }

    /// Removes the least recently used files until at most this many bytes are left, and the files of killed writers.
    /// Returns the number of removed files and their bytes.
    pub fn prune(&self, max_bytes: u64) -> io::Result<(u64, u64)> {
        let mut files = self.all_files()?;
        files.sort();
        let total_bytes: u64 = files.iter().map(|file| file.bytes).sum();
        // Leaves some room, so that the next write does not prune again.
        let mut excess_bytes = if total_bytes > max_bytes {
            total_bytes - max_bytes / 10 * 9
        } else {
            0
        };
        let (mut removed_files, mut removed_bytes) = (0, 0);
        for file in files {
            let is_entry = file
                .path
                .extension()
                .is_some_and(|extension| extension == ENTRY_EXTENSION);
            let is_abandoned = !is_entry
                && file
                    .last_used
                    .elapsed()
                    .is_ok_and(|age| age > ABANDONED_FILE_AGE);
            if is_abandoned || (is_entry && excess_bytes > 0) {
                remove(&file.path)?;
                (removed_files, removed_bytes) = (removed_files + 1, removed_bytes + file.bytes);
                excess_bytes = excess_bytes.saturating_sub(file.bytes);
            }
        }
        Ok((removed_files, removed_bytes))
    }
}

/// Reads the entry in a file; the inner error is that of a readable file that is not an entry.
pub fn read_file(path: &Path) -> io::Result<Result<StoredEntry, EntryError>> {
    Ok(StoredEntry::from_bytes(&cachemate_files::read_limited(
        path,
        MAX_ENTRY_BYTES,
    )?))
}

/// Removes a file, which another process may have removed already.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Names in a directory; none if it does not exist.
fn directory_entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    match cachemate_files::list_dir(dir) {
        Err(error)
            if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) =>
        {
            Ok(Vec::new())
        }
        entries => entries,
    }
}

/// Marks a file as used. A directory that is not writable keeps its order.
fn mark_used(path: &Path) {
    let try_mark_used = || -> io::Result<()> {
        if path
            .metadata()?
            .modified()?
            .elapsed()
            .is_ok_and(|age| age > MIN_MARK_INTERVAL)
        {
            cachemate_files::open_plain(path)?.set_modified(SystemTime::now())?;
        }
        Ok(())
    };
    let _ = try_mark_used();
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;

    fn sample_entry(number: u64, length: usize) -> StoredEntry {
        // Incompressible bytes.
        let mut generator = SplitMix64::new(number);
        let (inputs, answer) = (
            number.to_string(),
            (0..length).map(|_| generator.next_u64() as u8).collect(),
        );
        let (kind, label, sources) = ("test".to_string(), "a run".to_string(), "s".to_string());
        StoredEntry {
            kind,
            label,
            sources,
            inputs,
            cpu_seconds: 1.0,
            answer,
        }
    }

    fn read(dir: &RunDir, number: u64) -> StoredLookup {
        dir.find_entry("test", "s", &number.to_string())
    }

    /// Is a value found only under its own inputs, and is a truncated, damaged or misplaced file rejected by name and
    /// replaced?
    #[test]
    fn a_damaged_or_misplaced_file_is_rejected_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let dir = RunDir::new(&dir.path().join("runs"), MAX_DIR_BYTES);
        assert!(matches!(read(&dir, 1), StoredLookup::Miss));
        (1..=8).for_each(|number| dir.store_entry(&sample_entry(number, 2_000)).unwrap());
        assert!(matches!(
            dir.find_entry("test", "other", "1"),
            StoredLookup::Miss
        ));
        let files = dir.files().unwrap();
        assert_eq!(files.len(), 8);
        for (nth, file) in files.iter().enumerate() {
            let mut bytes = fs::read(&file.path).unwrap();
            match nth {
                0 => bytes.truncate(bytes.len() / 2),
                1 => bytes.clear(),
                2 => bytes = fs::read(&files[7].path).unwrap(),
                _ => bytes[nth * 200] ^= 1,
            }
            fs::write(&file.path, bytes).unwrap();
        }
        for number in 1..=8 {
            match read(&dir, number) {
                StoredLookup::Unusable(why) => {
                    assert!(why.contains("found") && why.contains("expected"), "{why}")
                }
                other => panic!("{number}: {other:?}"),
            }
            dir.store_entry(&sample_entry(number, 2_000)).unwrap();
            assert!(
                matches!(read(&dir, number), StoredLookup::Hit(found) if found == sample_entry(number, 2_000))
            );
        }
    }

    /// Does a directory stay within its bound by removing the least recently used files and those of killed writers?
    #[test]
    fn a_full_directory_removes_the_least_recently_used_files() {
        let dir = tempfile::tempdir().unwrap();
        let dir = RunDir::new(dir.path(), 40_000);
        let long_ago = SystemTime::now() - Duration::from_secs(100_000);
        let set_age = |path: &Path, hours: u64| {
            let file = fs::File::options().append(true).open(path).unwrap();
            file.set_modified(long_ago + Duration::from_secs(3600 * hours))
                .unwrap();
        };
        for number in 0..6 {
            dir.store_entry(&sample_entry(number, 5_000)).unwrap();
            set_age(&dir.entry_path(&sample_entry(number, 0).name()), number);
        }
        assert!(
            matches!(read(&dir, 0), StoredLookup::Hit(_)),
            "a use is marked"
        );
        let leftover = dir.path().join("ab");
        fs::create_dir_all(&leftover).unwrap();
        fs::write(leftover.join(".left.0123"), "half").unwrap();
        set_age(&leftover.join(".left.0123"), 0);
        assert_eq!(
            dir.prune(40_000).unwrap().0,
            1,
            "only what a killed writer left"
        );
        let (removed, bytes) = dir.prune(20_000).unwrap();
        assert!(
            removed == 3 && bytes > 15_000,
            "{removed} files of {bytes} bytes"
        );
        let is_stored = |number: u64| matches!(read(&dir, number), StoredLookup::Hit(_));
        assert_eq!(
            (0..6).map(is_stored).collect::<Vec<bool>>(),
            [true, false, false, false, true, true]
        );
        (10..40).for_each(|number| dir.store_entry(&sample_entry(number, 5_000)).unwrap());
        assert!(
            dir.files()
                .unwrap()
                .iter()
                .map(|file| file.bytes)
                .sum::<u64>()
                <= 46_000
        );
    }
}
