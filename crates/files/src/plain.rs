//! Access to single files by paths that the user gave.

use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};

use crate::{refusal_error, unpredictable_name};

/// Opens a plain file for reading. Links are followed, because the user named the path. FIFOs, devices and
/// directories are rejected without waiting for them.
///
/// # Errors
/// The error of the file system, or the file is not a plain file.
pub fn open_plain(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(CWD, path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if metadata.is_file() {
        return Ok(file);
    }
    let expected = match file_kind(&metadata) {
        FIFO => {
            "a plain file (a pipe can be read only once: write it to a file, or pass '-' to a command that reads \
             standard input)"
        }
        _ => "a plain file",
    };
    Err(refusal_error(path, file_kind(&metadata), expected))
}

/// Opens a pipe that this process has inherited, as `/dev/stdin` or by a shell's `<(COMMAND)` as `/dev/fd/N`; `None`
/// for every other path. A FIFO of the file system is refused by [`open_plain`], because it may never have a writer.
///
/// # Errors
/// The error of the file system.
pub fn open_pipe(path: &Path) -> io::Result<Option<File>> {
    use std::os::unix::fs::FileTypeExt;
    let is_inherited = path == Path::new("/dev/stdin")
        || path.parent() == Some(Path::new("/dev/fd"))
        || path.parent() == Some(Path::new("/proc/self/fd"));
    if !is_inherited || !std::fs::metadata(path)?.file_type().is_fifo() {
        return Ok(None);
    }
    File::open(path).map(Some)
}

const FIFO: &str = "a FIFO";

/// The kind of a file, for messages.
pub(crate) fn file_kind(metadata: &Metadata) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    let file_type = metadata.file_type();
    match () {
        () if file_type.is_dir() => "a directory",
        () if file_type.is_fifo() => FIFO,
        () if file_type.is_socket() => "a socket",
        () if file_type.is_char_device() || file_type.is_block_device() => "a device",
        () => "no plain file",
    }
}

/// Does the path exist? A path that cannot be looked up counts as missing, because a file there could not be used.
pub fn path_exists(path: &Path) -> bool {
    matches!(metadata_if_exists(path), Ok(Some(_)))
}

/// Mode of output files, which the umask narrows: whatever it is, no other user writes to them.
pub const OUTPUT_MODE: u32 = 0o644;

/// Creates an output file that the user named, which grows under this name. An existing file or link of that name is
/// replaced if `may_overwrite` is true, and rejected otherwise; it is never followed or truncated.
///
/// # Errors
/// The error of the file system; [`io::ErrorKind::AlreadyExists`] for an existing file without `may_overwrite`.
pub fn create(path: &Path, may_overwrite: bool) -> io::Result<File> {
    if may_overwrite {
        FreshFile::create(path)?.publish()
    } else {
        create_new(path)
    }
}

fn create_new(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options()
        .write(true)
        .create_new(true)
        .mode(OUTPUT_MODE)
        .open(path)
}

/// Opens a device, pipe or socket that the user named as an output, such as `/dev/null`. It is neither created nor
/// truncated.
///
/// # Errors
/// The error of the file system, or the path leads to a plain file or a directory.
pub fn open_sink(path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(CWD, path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if metadata.is_file() {
        return Err(refusal_error(path, "a plain file", "a device or a pipe"));
    }
    Ok(file)
}

/// Maximum number of entries that are listed for one directory.
const MAX_ENTRIES: usize = 1 << 20;

/// Paths sorted by name.
///
/// # Errors
/// The error of the file system, or the directory has more than 1,048,576 entries.
pub fn list_dir(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        if paths.len() == MAX_ENTRIES {
            let message = format!(
                "{}: found more than {MAX_ENTRIES} entries, expected at most that",
                dir.display()
            );
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
        }
        paths.push(entry?.path());
    }
    paths.sort_unstable();
    Ok(paths)
}

/// Directories are unsorted, and links to directories are left out.
pub fn list_subdirs(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut dirs = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            dirs.push(entry.path());
        }
    }
    Ok(dirs)
}

/// The target need not exist.
///
/// # Errors
/// The error of the file system, or the path is not a link.
pub fn link_target(path: &Path) -> io::Result<PathBuf> {
    std::fs::read_link(path)
}

/// Follows links; `None` if there is no such file.
///
/// # Errors
/// The error of the file system, except that the file does not exist.
pub fn metadata_if_exists(path: &Path) -> io::Result<Option<Metadata>> {
    match path.metadata() {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a plain file of at most `limit_bytes`. The limit also applies to a file that grows while
/// it is read.
///
/// # Errors
/// The errors of [`open_plain`], or the file is longer than the limit.
pub fn read_limited(path: &Path, limit_bytes: u64) -> io::Result<Vec<u8>> {
    read_file_limited(&open_plain(path)?, path, limit_bytes)
}

/// Like [`read_limited`], for UTF-8 text.
///
/// # Errors
/// The errors of [`read_limited`], or the file is not UTF-8 text.
pub fn read_text_limited(path: &Path, limit_bytes: u64) -> io::Result<String> {
    decode_text(path, read_limited(path, limit_bytes)?)
}

pub(crate) fn read_file_limited(file: &File, path: &Path, limit_bytes: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    file.take(limit_bytes.saturating_add(1))
        .read_to_end(&mut content)?;
    if content.len() as u64 > limit_bytes {
        let message = format!(
            "{}: found more than {limit_bytes} bytes, expected at most that",
            path.display()
        );
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(content)
}

pub(crate) fn decode_text(path: &Path, content: Vec<u8>) -> io::Result<String> {
    String::from_utf8(content).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        let message = format!(
            "{}: found a byte at {offset} that is no UTF-8, expected text",
            path.display()
        );
        io::Error::new(io::ErrorKind::InvalidData, message)
    })
}

/// A file that gets its name only when it is complete. If it is dropped before [`FreshFile::commit`], the file is
/// deleted.
#[derive(Debug)]
pub struct FreshFile {
    file: File,
    temporary_path: PathBuf,
    path: PathBuf,
    is_committed: bool,
}

impl FreshFile {
    /// Creates an empty file beside `path`, under a name that no other process can predict.
    ///
    /// # Errors
    /// The error of the file system; or `path` is a directory, a device, a FIFO or a socket, which a rename would
    /// replace.
    pub fn create(path: &Path) -> io::Result<Self> {
        let name = path
            .file_name()
            .ok_or_else(|| refusal_error(path, "no file name", "the path of a file"))?;

        if let Ok(metadata) = path.symlink_metadata()
            && !metadata.is_file()
            && !metadata.is_symlink()
        {
            return Err(refusal_error(
                path,
                file_kind(&metadata),
                "a plain file or none",
            ));
        }

        let fresh_path = path.with_file_name(unpredictable_name(&name.to_string_lossy())?);
        let file = create_new(&fresh_path)?;
        Ok(FreshFile {
            file,
            temporary_path: fresh_path,
            path: path.to_path_buf(),
            is_committed: false,
        })
    }

    /// Lets all users of this host read the file, whatever the umask is.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn allow_all_readers(&self) -> io::Result<()> {
        Ok(rustix::fs::fchmod(
            &self.file,
            Mode::from_raw_mode(OUTPUT_MODE),
        )?)
    }

    /// Renames the empty file to its final name at once, so that readers can follow it while it grows.
    ///
    /// # Errors
    /// The error of the file system. The old file is then unchanged.
    fn publish(mut self) -> io::Result<File> {
        std::fs::rename(&self.temporary_path, &self.path)?;
        self.is_committed = true;
        self.file.try_clone()
    }

    /// Syncs the content to disk and renames the file to its final name. An existing file or link of that name is
    /// replaced; the link is not followed.
    ///
    /// # Errors
    /// The error of the file system. The old file is then unchanged.
    pub fn commit(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.temporary_path, &self.path)?;
        self.is_committed = true;
        Ok(())
    }
}

impl Write for FreshFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for FreshFile {
    fn drop(&mut self) {
        if !self.is_committed {
            let _ = std::fs::remove_file(&self.temporary_path);
        }
    }
}

/// Replaces the file at `path` by one with this content. Readers find either the old file or the complete new one. A
/// link of that name is replaced, not followed.
///
/// # Errors
/// The error of the file system. The old file is then unchanged.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = FreshFile::create(path)?;
    file.write_all(content)?;
    file.commit()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Are FIFOs, devices and directories refused at once, and named for what they are?
    #[test]
    fn only_plain_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        rustix::fs::mknodat(CWD, &fifo, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        for (path, kind) in [
            (fifo.as_path(), "a FIFO"),
            (Path::new("/dev/zero"), "a device"),
            (dir.path(), "a directory"),
        ] {
            let error = read_limited(path, 10).unwrap_err().to_string();
            let refusal = format!("{}: found {kind}, expected a plain file", path.display());
            assert!(error.starts_with(&refusal), "{error}");
        }
        assert_eq!(
            read_limited(&dir.path().join("none"), 10)
                .unwrap_err()
                .kind(),
            io::ErrorKind::NotFound
        );
    }

    /// Is the limit exact, for bytes and for text?
    #[test]
    fn a_file_longer_than_the_limit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ten");
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(read_text_limited(&path, 10).unwrap(), "0123456789");
        let error = read_limited(&path, 9).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("found more than 9 bytes, expected at most that"),
            "{error}"
        );
        std::fs::write(&path, b"ok\xff").unwrap();
        assert!(
            read_text_limited(&path, 10)
                .unwrap_err()
                .to_string()
                .contains("at 2 that is no UTF-8")
        );
    }

    /// Is a file replaced whole, a link of its name not followed, and nothing left behind after an error?
    #[test]
    fn a_file_is_replaced_whole_and_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, secret) = (dir.path().join("file"), dir.path().join("secret"));
        std::fs::write(&secret, "secret").unwrap();
        symlink(&secret, &path).unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
        symlink(&secret, dir.path().join("growing")).unwrap();
        let mut growing = create(&dir.path().join("growing"), true).unwrap();
        growing.write_all(b"log").unwrap();

        assert_eq!(std::fs::read(dir.path().join("growing")).unwrap(), b"log");
        assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
        symlink(&secret, dir.path().join("new")).unwrap();
        assert!(create(&dir.path().join("new"), false).is_err() && open_sink(&secret).is_err());
        assert!(open_sink(Path::new("/dev/null")).is_ok());
        std::fs::create_dir(dir.path().join("occupied")).unwrap();
        assert!(replace(&dir.path().join("occupied"), b"new").is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 5);
        assert!(
            metadata_if_exists(&dir.path().join("none"))
                .unwrap()
                .is_none()
        );
    }
}
