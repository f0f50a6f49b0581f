//! The directory of stored values: one file per value, named by a hash, and shared by any number of processes.
//!
//! Properties: files appear whole or not at all, so that a writer may be killed at any moment; a truncated, damaged or
//! misplaced file is never used, and its run is made again; when the directory is full, the least recently used files
//! are removed first. The directory has a marker, is made only where nothing was, and its files are reached through
//! descriptors and by exact names, so that nothing of another user is believed, and nothing but our files is removed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use cachemate_files::{DirAccess, TrustedDir};
use rustix::fs::OFlags;

use super::entry::{EntryError, MAX_ENTRY_BYTES, StoredEntry, entry_name};

/// Default size of a directory beyond which files are removed.
pub const MAX_DIR_BYTES: u64 = 2 << 30;
/// The file that shows that a directory is a store.
const MARKER: &str = "cachemate-run-store";
const ENTRY_EXTENSION: &str = ".run";
/// Numbers of hexadecimal digits in the name of a folder, of an entry, and of the random part of a temporary name.
const FOLDER_DIGITS: usize = 2;
const ENTRY_DIGITS: usize = 62;
const RANDOM_DIGITS: usize = 16;
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
    /// Its folder in the store, and its name in the folder.
    place: [String; 2],
    /// Length of the file.
    pub bytes: u64,
}

impl StoredFile {
    /// Folder and name within the store, for messages.
    pub fn subpath(&self) -> PathBuf {
        self.place.iter().collect()
    }

    fn is_entry(&self) -> bool {
        is_entry_name(&self.place[1])
    }
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
    ///
    /// # Errors
    /// There is a directory that is no store: it has other files, or other users can change it.
    pub fn new(path: &Path, max_bytes: u64) -> io::Result<Self> {
        // Pruned at the first write.
        let dir = RunDir {
            path: path.to_path_buf(),
            max_bytes,
            written_bytes: AtomicU64::new(max_bytes),
        };
        dir.open()?;
        Ok(dir)
    }

    /// As given, not resolved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn open(&self) -> io::Result<Option<TrustedDir>> {
        TrustedDir::open_marked(&self.path, MARKER, DirAccess::ReadWrite)
    }

    fn open_folder(&self, folder: &str) -> io::Result<Option<TrustedDir>> {
        let Some(dir) = self.open()? else {
            return Ok(None);
        };
        match dir.open_dir(Path::new(folder)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            folder => folder.map(Some),
        }
    }

    /// Looks up the value that was made from exactly these inputs by these sources.
    pub fn find_entry(&self, kind: &str, sources: &str, inputs: &str) -> StoredLookup {
        let place = entry_place(&entry_name(kind, sources, inputs));
        let path = self.path.join(place.iter().collect::<PathBuf>());
        let unusable_entry = |reason: &dyn std::fmt::Display| {
            StoredLookup::Unusable(format!("{}: {reason}", path.display()))
        };

        match self.read_place(&place) {
            Err(error) => StoredLookup::Unusable(error.to_string()),
            Ok(None) => StoredLookup::Miss,
            Ok(Some(Err(error))) => unusable_entry(&error),
            Ok(Some(Ok(entry)))
                if (&*entry.kind, &*entry.sources, &*entry.inputs) != (kind, sources, inputs) =>
            {
                unusable_entry(
                    &"found the value of other inputs, expected the one that the name says",
                )
            }
            Ok(Some(Ok(entry))) => {
                // A directory that is not writable keeps its order.
                let _ = self.mark_used(&place);
                StoredLookup::Hit(entry)
            }
        }
    }

    /// Stores a value, unless it exceeds the maximum size.
    pub fn store_entry(&self, entry: &StoredEntry) -> io::Result<()> {
        let Some(bytes) = entry.to_bytes().map_err(io::Error::other)? else {
            return Ok(());
        };
        let length = bytes.len() as u64;
        let [folder, name] = entry_place(&entry.name());
        TrustedDir::create_marked(&self.path, MARKER)?
            .create_dir(&folder)?
            .replace(&name, &bytes)?;
        if self.written_bytes.fetch_add(length, Ordering::Relaxed) + length > self.max_bytes / 16 {
            self.written_bytes.store(0, Ordering::Relaxed);
            self.prune(self.max_bytes)?;
        }
        Ok(())
    }

    /// Reads a stored file; `None` if it no longer exists. The inner error is that of a readable file that is not an
    /// entry.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::read`]: among others, the file belongs to another user.
    pub fn read(&self, file: &StoredFile) -> io::Result<Option<Result<StoredEntry, EntryError>>> {
        self.read_place(&file.place)
    }

    fn read_place(
        &self,
        [folder, name]: &[String; 2],
    ) -> io::Result<Option<Result<StoredEntry, EntryError>>> {
        let Some(folder) = self.open_folder(folder)? else {
            return Ok(None);
        };
        let bytes = folder.read(Path::new(name), MAX_ENTRY_BYTES)?;
        Ok(bytes.map(|bytes| StoredEntry::from_bytes(&bytes)))
    }

    fn mark_used(&self, [folder, name]: &[String; 2]) -> io::Result<()> {
        let Some(folder) = self.open_folder(folder)? else {
            return Ok(());
        };
        let file = folder.open_file(Path::new(name), OFlags::RDONLY)?;
        let age = file.metadata()?.modified()?.elapsed();
        if age.is_ok_and(|age| age > MIN_MARK_INTERVAL) {
            file.set_modified(SystemTime::now())?;
        }
        Ok(())
    }

    /// Every stored file, the least recently used first. A directory that does not exist has none.
    pub fn files(&self) -> io::Result<Vec<StoredFile>> {
        let mut files = self.all_files()?;
        files.retain(StoredFile::is_entry);
        files.sort();
        Ok(files)
    }

    /// All files that a store makes, including those that writers have not finished. Whatever has
    /// another name, or is a link or a folder, is not ours.
    fn all_files(&self) -> io::Result<Vec<StoredFile>> {
        let Some(dir) = self.open()? else {
            return Ok(Vec::new());
        };

        let mut files = Vec::new();
        for folder_name in dir.names()? {
            if !is_hex(&folder_name, FOLDER_DIGITS) {
                continue;
            }
            let Ok(folder) = dir.open_dir(Path::new(&folder_name)) else {
                continue;
            };

            for name in folder.names()? {
                if !is_entry_name(&name) && !is_temporary_name(&name) {
                    continue;
                }
                // Another process may have removed it, and one of another user is not ours.
                let Ok(file) = folder.open_file(Path::new(&name), OFlags::RDONLY) else {
                    continue;
                };
                let metadata = file.metadata()?;
                files.push(StoredFile {
                    last_used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                    place: [folder_name.clone(), name],
                    bytes: metadata.len(),
                });
            }
        }
        Ok(files)
    }

    /// Removes a stored file, which another process may have removed already.
    pub fn remove(&self, file: &StoredFile) -> io::Result<()> {
        let [folder, name] = &file.place;
        match self.open_folder(folder)? {
            Some(folder) => folder.remove(name),
            None => Ok(()),
        }
    }

    /// Removes the least recently used files until at most this many bytes are left, and the files of killed writers.
    /// The result is the number of removed files and their bytes.
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
            let is_entry = file.is_entry();
            let is_abandoned = !is_entry
                && file
                    .last_used
                    .elapsed()
                    .is_ok_and(|age| age > ABANDONED_FILE_AGE);
            if is_abandoned || (is_entry && excess_bytes > 0) {
                self.remove(&file)?;
                (removed_files, removed_bytes) = (removed_files + 1, removed_bytes + file.bytes);
                excess_bytes = excess_bytes.saturating_sub(file.bytes);
            }
        }

        Ok((removed_files, removed_bytes))
    }
}

/// The folder of an entry, and its name there.
fn entry_place(name: &str) -> [String; 2] {
    let (folder, digits) = name.split_at(FOLDER_DIGITS);
    [folder.to_string(), format!("{digits}{ENTRY_EXTENSION}")]
}

fn is_hex(text: &str, length: usize) -> bool {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == length && text.bytes().all(is_digit)
}

fn is_entry_name(name: &str) -> bool {
    name.strip_suffix(ENTRY_EXTENSION)
        .is_some_and(|digits| is_hex(digits, ENTRY_DIGITS))
}

/// Is this the name under which [`TrustedDir::replace`] writes an entry?
fn is_temporary_name(name: &str) -> bool {
    name.strip_prefix('.')
        .and_then(|rest| rest.rsplit_once('.'))
        .is_some_and(|(entry, random)| is_entry_name(entry) && is_hex(random, RANDOM_DIGITS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;
    use std::fs;

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
        let dir = RunDir::new(&dir.path().join("runs"), MAX_DIR_BYTES).unwrap();
        assert!(matches!(read(&dir, 1), StoredLookup::Miss));
        (1..=8).for_each(|number| dir.store_entry(&sample_entry(number, 2_000)).unwrap());
        assert!(matches!(
            dir.find_entry("test", "other", "1"),
            StoredLookup::Miss
        ));
        let files = dir.files().unwrap();
        assert_eq!(files.len(), 8);

        for (nth, file) in files.iter().enumerate() {
            let path = dir.path().join(file.subpath());
            let mut bytes = fs::read(&path).unwrap();
            match nth {
                0 => bytes.truncate(bytes.len() / 2),
                1 => bytes.clear(),
                2 => bytes = fs::read(dir.path().join(files[7].subpath())).unwrap(),
                _ => bytes[nth * 200] ^= 1,
            }
            fs::write(&path, bytes).unwrap();
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
        let dir = RunDir::new(dir.path(), 40_000).unwrap();
        let long_ago = SystemTime::now() - Duration::from_secs(100_000);
        let set_age = |path: &Path, hours: u64| {
            let file = fs::File::options().append(true).open(path).unwrap();
            file.set_modified(long_ago + Duration::from_secs(3600 * hours))
                .unwrap();
        };
        for number in 0..6 {
            dir.store_entry(&sample_entry(number, 5_000)).unwrap();
            let place = entry_place(&sample_entry(number, 0).name());
            set_age(&dir.path().join(place.iter().collect::<PathBuf>()), number);
        }
        assert!(
            matches!(read(&dir, 0), StoredLookup::Hit(_)),
            "a use is marked"
        );
        let leftover = dir.path().join("ab");
        fs::create_dir_all(&leftover).unwrap();
        let left = format!(".{}.run.0123456789abcdef", "a".repeat(62));
        let foreign = ["main.rs", ".left.0123", ".main.rs.0123456789abcdef"];
        for name in foreign.into_iter().chain([&*left]) {
            fs::write(leftover.join(name), "half").unwrap();
            set_age(&leftover.join(name), 0);
        }
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

    /// Is a directory with other files, or one that another user owns or may write, refused; are other names, links and
    /// the files of others in a store neither believed nor removed?
    #[test]
    fn nothing_but_our_own_files_is_believed_or_removed() {
        use std::os::unix::fs::{PermissionsExt, chown, symlink};
        let parent = tempfile::tempdir().unwrap();
        let home = parent.path().join("home");
        fs::create_dir_all(home.join("db")).unwrap();
        fs::write(home.join("db/table.sqlite"), "rows").unwrap();
        let error = RunDir::new(&home, 0).unwrap_err().to_string();
        assert!(error.contains("a directory with other files"), "{error}");

        let open_to_all = parent.path().join("shared");
        fs::create_dir(&open_to_all).unwrap();
        fs::set_permissions(&open_to_all, fs::Permissions::from_mode(0o1777)).unwrap();
        let error = RunDir::new(&open_to_all, 0).unwrap_err().to_string();
        assert!(error.contains("mode 1777"), "{error}");

        let dir = RunDir::new(&parent.path().join("runs"), MAX_DIR_BYTES).unwrap();
        dir.store_entry(&sample_entry(1, 2_000)).unwrap();
        symlink(home.join("db"), dir.path().join("ab")).unwrap();
        let (precious, name) = (home.join("db"), format!("{}.run", "b".repeat(62)));
        fs::write(precious.join(&name), "precious").unwrap();
        fs::create_dir(dir.path().join("cd")).unwrap();
        symlink(precious.join(&name), dir.path().join("cd").join(&name)).unwrap();
        fs::write(dir.path().join("notes"), "mine").unwrap();
        assert_eq!(dir.files().unwrap().len(), 1);
        assert_eq!(dir.prune(0).unwrap().0, 1);
        assert_eq!(fs::read(precious.join(&name)).unwrap(), b"precious");
        assert!(
            dir.path().join("cd").join(&name).is_symlink() && dir.path().join("notes").exists()
        );

        if rustix::process::geteuid().is_root() {
            dir.store_entry(&sample_entry(1, 2_000)).unwrap();
            let file = dir.path().join(dir.files().unwrap()[0].subpath());
            chown(&file, Some(65_534), None).unwrap();
            assert!(matches!(read(&dir, 1), StoredLookup::Unusable(_)));
            assert_eq!(
                (dir.files().unwrap().len(), dir.prune(0).unwrap().0),
                (0, 0)
            );
            assert!(file.exists());
        }
    }
}
