//! The directory of colors, opened so that no other user can influence its contents.
//!
//! Problem: every user can write to `/dev/shm`. Another user can be the first to create the directory, or a link of
//! its name, and root would then read, overwrite and preload files of that user. Method: the directory is accepted
//! only if it is a directory and no link, belongs to this process's user or to root, is writable by no other user,
//! and cannot be replaced by another user. Everything in it is opened from its descriptor without following links,
//! and must be a plain file of the same owners. Properties: a directory or file that fails yields an error that names
//! it, with the found and the expected state.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, Stat};

/// Write permission for anyone but the owner.
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// An open folder that only its owner, us or root, can change.
#[derive(Debug)]
pub struct TrustedDir {
    file: OwnedFd,
    path: PathBuf,
}

fn refuse(path: &Path, found: impl std::fmt::Display, expected: &str) -> io::Error {
    let message = format!("{}: found {found}, expected {expected}", path.display());
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}

fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

fn check(path: &Path, found: &Stat) -> io::Result<()> {
    if !is_trusted(found.st_uid) {
        return Err(refuse(
            path,
            format!("a folder of user {}", found.st_uid),
            "one of this user or of root (remove it)",
        ));
    }
    if found.st_mode & OTHERS_WRITE != 0 {
        let mode = format!("a folder with mode {:04o}", found.st_mode & 0o7777);
        return Err(refuse(path, mode, "one that only its owner may write (remove it)"));
    }
    Ok(())
}

/// Is it impossible for another user to replace a directory here?
fn check_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let metadata = parent.metadata()?;
    if is_trusted(metadata.uid()) && (metadata.mode() & OTHERS_WRITE == 0 || metadata.mode() & STICKY != 0) {
        return Ok(());
    }
    let mode = format!("user {} and mode {:04o}", metadata.uid(), metadata.mode() & 0o7777);
    Err(refuse(parent, mode, "root's, and sticky where others may write"))
}

impl TrustedDir {
    /// # Errors
    /// There is none (`NotFound`), or it is not to be trusted (`PermissionDenied`, with the reason).
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|error| match error {
            // The errors of openat(2) for a link or a file.
            rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR => refuse(path, "no folder of its own", "a folder"),
            other => other.into(),
        })?;
        check(path, &rustix::fs::fstat(&file)?)?;
        check_parent(path)?;
        Ok(TrustedDir { file, path: path.to_path_buf() })
    }

    /// Opens it, making it where there is none.
    ///
    /// # Errors
    /// As [`TrustedDir::open`], or it cannot be made.
    pub fn make(path: &Path) -> io::Result<Self> {
        match rustix::fs::mkdirat(CWD, path, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => Self::open(path),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes a folder in it that was not there.
    ///
    /// # Errors
    /// It is there already, or cannot be made.
    pub fn make_inside(&self, name: &str) -> io::Result<Self> {
        rustix::fs::mkdirat(&self.file, name, Mode::RWXU)?;
        self.inside(Path::new(name))
    }

    /// A folder in it, however deep; empty = itself.
    ///
    /// # Errors
    /// As [`TrustedDir::open`].
    pub fn inside(&self, rest: &Path) -> io::Result<Self> {
        let path = self.path.join(rest);
        let rest = if rest.as_os_str().is_empty() { Path::new(".") } else { rest };
        let file = self.reach(rest, OFlags::RDONLY | OFlags::DIRECTORY)?;
        check(&path, &rustix::fs::fstat(&file)?)?;
        Ok(TrustedDir { file, path })
    }

    fn reach(&self, rest: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let mode = if flags.contains(OFlags::CREATE) { Mode::RUSR | Mode::WUSR } else { Mode::empty() };
        let along = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        rustix::fs::openat2(&self.file, rest, flags, mode, along).map_err(|error| match error {
            rustix::io::Errno::LOOP => refuse(&self.path.join(rest), "a link", "a plain file or folder (remove it)"),
            other => other.into(),
        })
    }

    /// Opens a plain file in it, or in a folder below.
    ///
    /// # Errors
    /// As the file system says; a link, anything but a plain file, or another user's file is refused with the reason.
    pub fn file(&self, rest: &Path, flags: OFlags) -> io::Result<File> {
        let file = File::from(self.reach(rest, flags)?);
        let metadata = file.metadata()?;
        let path = || self.path.join(rest);
        if !metadata.is_file() {
            return Err(refuse(&path(), "no plain file", "one (remove it)"));
        }
        if !is_trusted(metadata.uid()) {
            return Err(refuse(&path(), format!("a file of user {}", metadata.uid()), "one of this user or of root"));
        }
        Ok(file)
    }

    /// Opens a file for reading and writing, making it where there is none; nothing of it is changed.
    ///
    /// # Errors
    /// As [`TrustedDir::file`].
    pub fn file_to_write(&self, name: &str) -> io::Result<File> {
        self.file(Path::new(name), OFlags::RDWR | OFlags::CREATE)
    }

    /// The whole of a small file.
    ///
    /// # Errors
    /// As [`TrustedDir::file`], or it is no text.
    pub fn text(&self, name: &str) -> io::Result<String> {
        io::read_to_string(self.file(Path::new(name), OFlags::RDONLY)?)
    }

    /// Names in it, in no order.
    ///
    /// # Errors
    /// As the file system says.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.file)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    /// Puts one file of the folder in the place of another.
    ///
    /// # Errors
    /// As the file system says.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.file, from, &self.file, to)?)
    }

    /// Gives a file of this folder a second name in another one.
    ///
    /// # Errors
    /// As the file system says.
    pub fn link_into(&self, name: &str, other: &TrustedDir) -> io::Result<()> {
        Ok(rustix::fs::linkat(&self.file, name, &other.file, name, rustix::fs::AtFlags::empty())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::act::colors::{agents, reference_set};
    use crate::kernel::{Kernel, LinuxHost};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    const NOBODY: u32 = 65_534;

    fn with_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    /// A root with the folder of colors in it, made as the discovery makes it.
    fn host() -> (tempfile::TempDir, LinuxHost, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().join(&reference_set::BASE[1..]);
        std::fs::create_dir_all(base.parent().unwrap()).unwrap();
        with_mode(base.parent().unwrap(), 0o1777);
        TrustedDir::make(&base).unwrap();
        let host = LinuxHost::new(root.path());
        (root, host, base)
    }

    fn inside(rest: &str) -> PathBuf {
        Path::new(reference_set::BASE).join(rest)
    }

    /// If another user made the directory, may write to it, or can replace it: is nothing read from it, written to
    /// it, or placed there for a program to preload?
    #[test]
    fn a_folder_that_others_have_a_hand_in_is_refused() {
        let cases: [(&str, &str, fn(&Path)); 4] = [
            ("another user's", "a folder of user 65534", |base| chown(base, Some(NOBODY), None).unwrap()),
            ("writable by all users", "a folder with mode 0777", |base| with_mode(base, 0o777)),
            ("a link", "no folder of its own", |base| {
                let real = base.with_file_name("real");
                std::fs::rename(base, &real).unwrap();
                symlink(&real, base).unwrap();
            }),
            ("in a place that all users can write to", "mode 0777", |base| with_mode(base.parent().unwrap(), 0o777)),
        ];
        for (name, expected, spoil) in cases {
            let (_root, host, base) = host();
            for file in ["kit", "ledger"] {
                std::fs::write(base.join(file), "x").unwrap();
            }
            std::fs::create_dir_all(base.join("s1-0/5")).unwrap();
            std::fs::write(base.join("s1-0/5/wanted"), "as it was").unwrap();
            if name.starts_with("another") && !rustix::process::geteuid().is_root() {
                crate::skip_test::not_shown(&format!("a folder of {name}"), "needs root");
                continue;
            }
            spoil(&base);
            let wanted = inside("s1-0/5/wanted");
            for said in [
                host.write(&wanted, "overwritten").unwrap_err().to_string(),
                host.read(&wanted).unwrap_err().to_string(),
                host.list(&inside("s1-0")).unwrap_err().to_string(),
                agents::make_session(&base, 1, 1, b"library").unwrap_err().to_string(),
                reference_set::write_whole(&base, "map.json", b"map").unwrap_err().to_string(),
                reference_set::id(&base).unwrap_err().to_string(),
            ] {
                assert!(said.contains(expected), "{name}: {said}");
            }
            assert_eq!(std::fs::read_to_string(base.join("s1-0/5/wanted")).unwrap(), "as it was", "{name}");
            assert!(!base.join("s1-1").exists() && !base.join("map.json").exists(), "{name}");
        }
    }

    /// Is a link in the folder neither read nor written through, wherever in a path it stands, and another user's file refused?
    #[test]
    fn links_and_others_files_in_the_folder_are_refused() {
        let (root, host, base) = host();
        let secret = root.path().join("secret");
        std::fs::write(&secret, "secret").unwrap();
        std::fs::create_dir_all(base.join("s1-0/5")).unwrap();
        symlink(&secret, base.join("s1-0/5/wanted")).unwrap();
        symlink(&secret, base.join("s1-0/5/status")).unwrap();
        symlink(root.path(), base.join("s2-0")).unwrap();
        symlink(&secret, base.join("map.json.new")).unwrap();
        symlink(&secret, base.join("ledger")).unwrap();
        for path in ["s1-0/5/wanted", "s1-0/5/status", "s2-0/secret", "../secret"] {
            assert!(host.read(&inside(path)).is_err(), "{path}");
            assert!(host.write(&inside(path), "overwritten").is_err(), "{path}");
        }
        assert!(
            reference_set::write_whole(&base, "map.json", b"map").unwrap_err().to_string().contains("found a link")
        );
        assert!(reference_set::FrameLedger::open(&base).unwrap_err().to_string().contains("found a link"));
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
        std::fs::remove_file(base.join("s1-0/5/wanted")).unwrap();
        rustix::fs::mknodat(CWD, base.join("s1-0/5/wanted"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(host.read(&inside("s1-0/5/wanted")).unwrap_err().to_string().contains("no plain file"));
        if !rustix::process::geteuid().is_root() {
            crate::skip_test::not_shown("another user's file", "needs root");
            return;
        }
        std::fs::write(base.join("s1-0/5/theirs"), "theirs").unwrap();
        chown(base.join("s1-0/5/theirs"), Some(NOBODY), None).unwrap();
        assert!(host.read(&inside("s1-0/5/theirs")).unwrap_err().to_string().contains("a file of user 65534"));
    }

    /// Elsewhere too: is a control file that turns out to be a link not written through?
    #[test]
    fn nothing_is_written_through_a_link() {
        let root = tempfile::tempdir().unwrap();
        let secret = root.path().join("secret");
        std::fs::write(&secret, "secret").unwrap();
        symlink(&secret, root.path().join("control")).unwrap();
        assert!(LinuxHost::new(root.path()).write(Path::new("/control"), "overwritten").is_err());
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
    }

    /// In a folder of our own: is a session made, with the library, and its files read and written?
    #[test]
    fn a_folder_of_our_own_serves() {
        let (_root, host, base) = host();
        for file in ["kit", "ledger"] {
            std::fs::write(base.join(file), file).unwrap();
        }
        for _ in 0..2 {
            let session = agents::make_session(&base, 7, 0, b"library").unwrap();
            assert_eq!(std::fs::read(session.join(agents::LIBRARY)).unwrap(), b"library");
            assert_eq!(std::fs::read(session.join("kit")).unwrap(), b"kit");
        }
        reference_set::write_whole(&base, "map.json", b"long text").unwrap();
        reference_set::write_whole(&base, "map.json", b"text").unwrap();
        assert_eq!(host.read(&inside("map.json")).unwrap(), "text");
        host.write(&inside("map.json"), "TE").unwrap();
        assert_eq!(host.read(&inside("map.json")).unwrap(), "TExt");
        let mut names = host.list(Path::new(reference_set::BASE)).unwrap();
        names.retain(|name| !name.starts_with('s'));
        assert_eq!(names, ["kit", "ledger", "map.json"]);
    }
}
