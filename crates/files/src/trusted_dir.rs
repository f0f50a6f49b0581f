//! Directories that only their owner can change: the user of this process, or root.
//!
//! A journal, a store of results and a library to preload each control a program that may run as
//! root, so whoever can replace one of these files can make root do something. Checking the owner
//! of a *file* is not enough, because another user who may write to the directory can exchange it
//! between the check and the use. So the directory is opened first, its owner and mode are checked
//! on the open descriptor, and files are opened relative to that descriptor and follow no link.
//!
//! For example, `/dev/shm/cachemate-color` belongs to whoever makes it first. If that was another
//! user, it is refused with his number; if it is ours but has mode 0777, with the mode.
//! [`TrustedDir::open_anchored`] also refuses a directory whose parent lets other users rename it,
//! as `/tmp` without its sticky bit would.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::plain::{decode_text, file_kind, read_file_limited};
use crate::{refusal_error, unpredictable_name};

/// Mode bits that let users other than the owner write.
const OTHER_WRITE_BITS: u32 = 0o022;
const STICKY_BIT: u32 = 0o1000;

/// Access to a directory, chosen when the directory is opened. Commands that only report open it read-only, so that
/// they cannot change it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DirAccess {
    /// Files in the directory can only be read.
    ReadOnly,
    /// Files in the directory can be created, changed and removed.
    ReadWrite,
}

/// An open directory that only its owner (the user of this process, or root) can change. Files are opened relative to
/// its descriptor, without following links, and must be plain files or directories of the same owners.
#[derive(Debug)]
pub struct TrustedDir {
    fd: OwnedFd,
    path: PathBuf,
    access: DirAccess,
}

fn is_link(dir: &OwnedFd, name: &OsStr) -> bool {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
}

fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

fn check_dir(path: &Path, stat: &Stat) -> io::Result<()> {
    if !is_trusted(stat.st_uid) {
        let owner = format!("a directory of user {}", stat.st_uid);
        return Err(refusal_error(
            path,
            owner,
            "one of this user or of root (remove it)",
        ));
    }
    if stat.st_mode & OTHER_WRITE_BITS != 0 {
        let mode = format!("a directory with mode {:04o}", stat.st_mode & 0o7777);
        return Err(refusal_error(
            path,
            mode,
            "one that only its owner may write (remove it)",
        ));
    }
    Ok(())
}

/// Checks that no other user can replace this directory in its parent.
fn check_parent(path: &Path) -> io::Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let metadata = parent.metadata()?;
    if is_trusted(metadata.uid())
        && (metadata.mode() & OTHER_WRITE_BITS == 0 || metadata.mode() & STICKY_BIT != 0)
    {
        return Ok(());
    }
    let owner_and_mode = format!(
        "user {} and mode {:04o}",
        metadata.uid(),
        metadata.mode() & 0o7777
    );
    Err(refusal_error(
        parent,
        owner_and_mode,
        "one of this user or of root, and sticky where others may write",
    ))
}

impl TrustedDir {
    /// Opens a directory.
    ///
    /// # Errors
    /// The directory is missing (`NotFound`), or other users can change it (`PermissionDenied`, with the reason).
    pub fn open(path: &Path, access: DirAccess) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file =
            rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|error| match error {
                // The errors by which openat(2) reports a link and a file that is not a directory.
                Errno::LOOP | Errno::NOTDIR => {
                    refusal_error(path, "no directory of its own", "a directory")
                }
                other => other.into(),
            })?;
        check_dir(path, &rustix::fs::fstat(&file)?)?;
        Ok(TrustedDir {
            fd: file,
            path: path.to_path_buf(),
            access,
        })
    }

    /// Like [`TrustedDir::open`], for a directory that other programs will find by its path. In addition, no other
    /// user may be able to replace the directory.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::open`], or another user can replace the directory.
    pub fn open_anchored(path: &Path, access: DirAccess) -> io::Result<Self> {
        let dir = Self::open(path, access)?;
        check_parent(path)?;
        Ok(dir)
    }

    /// Opens a directory for reading and writing, and creates it if it is missing.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::open`], or the directory cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        match rustix::fs::mkdirat(CWD, path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => Self::open(path, DirAccess::ReadWrite),
            Err(error) => Err(error.into()),
        }
    }

    /// Like [`TrustedDir::create`], for a directory that other programs will find by its path.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::open_anchored`], or the directory cannot be created.
    pub fn create_anchored(path: &Path) -> io::Result<Self> {
        let dir = Self::create(path)?;
        check_parent(path)?;
        Ok(dir)
    }

    /// The access that was chosen when the directory was opened.
    pub fn access(&self) -> DirAccess {
        self.access
    }

    /// The path by which the directory was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check_writable(&self, subpath: &Path) -> io::Result<()> {
        match self.access {
            DirAccess::ReadWrite => Ok(()),
            DirAccess::ReadOnly => Err(refusal_error(
                &self.path.join(subpath),
                "a change",
                "none, because this is read-only",
            )),
        }
    }

    /// Creates a subdirectory, or opens it if it exists.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::open`], or the subdirectory cannot be created.
    pub fn create_dir(&self, name: &str) -> io::Result<Self> {
        self.check_writable(Path::new(name))?;
        match rustix::fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => self.open_dir(Path::new(name)),
            Err(error) => Err(error.into()),
        }
    }

    /// Creates a subdirectory that must not exist.
    ///
    /// # Errors
    /// The subdirectory exists, or cannot be created.
    pub fn create_new_dir(&self, name: &str) -> io::Result<Self> {
        self.check_writable(Path::new(name))?;
        rustix::fs::mkdirat(&self.fd, name, Mode::RWXU)?;
        self.open_dir(Path::new(name))
    }

    /// Opens the directory at the relative path `subpath`, at any depth. An empty path is this directory.
    pub fn open_dir(&self, subpath: &Path) -> io::Result<Self> {
        let path = self.path.join(subpath);
        let subpath = if subpath.as_os_str().is_empty() {
            Path::new(".")
        } else {
            subpath
        };
        let file = self.open_beneath(subpath, OFlags::RDONLY | OFlags::DIRECTORY)?;
        check_dir(&path, &rustix::fs::fstat(&file)?)?;
        Ok(TrustedDir {
            fd: file,
            path,
            access: self.access,
        })
    }

    /// Opens the file or directory at `subpath`, without following links and never outside this directory.
    fn open_beneath(&self, subpath: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let mode = if flags.contains(OFlags::CREATE) {
            Mode::RUSR | Mode::WUSR
        } else {
            Mode::empty()
        };

        let resolve_flags = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let outcome = match rustix::fs::openat2(&self.fd, subpath, flags, mode, resolve_flags) {
            // Kernels before 5.6 lack `openat2`, and some system call filters reject it.
            Err(Errno::NOSYS | Errno::PERM) => self.walk_beneath(subpath, flags, mode),
            other => other,
        };
        outcome.map_err(|error| match error {
            Errno::LOOP => refusal_error(
                &self.path.join(subpath),
                "a link",
                "a plain file or directory (remove it)",
            ),
            other => other.into(),
        })
    }

    /// Opens `subpath` as `openat2` would beneath this directory, but one component at a time.
    fn walk_beneath(&self, subpath: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let dir_flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut dir = rustix::fs::openat(&self.fd, ".", dir_flags, Mode::empty())?;
        let mut names = Vec::new();
        for component in subpath.components() {
            match component {
                Component::Normal(name) => names.push(name),
                Component::CurDir => {}
                _ => return Err(Errno::XDEV),
            }
        }

        let Some((last_name, dir_names)) = names.split_last() else {
            return rustix::fs::openat(&dir, ".", flags, mode);
        };
        for name in dir_names {
            dir = match rustix::fs::openat(&dir, *name, dir_flags, Mode::empty()) {
                // With these flags openat(2) reports a link as `NOTDIR`, whereas `openat2` reports `LOOP`.
                Err(Errno::NOTDIR) if is_link(&dir, name) => return Err(Errno::LOOP),
                other => other?,
            };
        }
        rustix::fs::openat(&dir, *last_name, flags, mode)
    }

    /// Opens a plain file in the directory. `flags` that write require a directory opened with
    /// [`DirAccess::ReadWrite`].
    ///
    /// # Errors
    /// The error of the file system. A link, another user's file, a file that every user may write, and anything other
    /// than a plain file are rejected with the reason.
    pub fn open_file(&self, subpath: &Path, flags: OFlags) -> io::Result<File> {
        if flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC) {
            self.check_writable(subpath)?;
        }

        let full_path = || self.path.join(subpath);
        // The file is truncated only after the check, so that a rejected file keeps its content.
        let file = File::from(self.open_beneath(subpath, flags.difference(OFlags::TRUNC))?);
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(refusal_error(
                &full_path(),
                file_kind(&metadata),
                "a plain file (remove it)",
            ));
        }

        if !is_trusted(metadata.uid()) {
            return Err(refusal_error(
                &full_path(),
                format!("a file of user {}", metadata.uid()),
                "one of this user or of root",
            ));
        }

        if metadata.mode() & 0o002 != 0 {
            let mode = format!("a file with mode {:04o}", metadata.mode() & 0o7777);
            return Err(refusal_error(
                &full_path(),
                mode,
                "one that not every user may write",
            ));
        }

        if flags.contains(OFlags::TRUNC) {
            file.set_len(0)?;
        }
        Ok(file)
    }

    /// `None` if the file does not exist.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::open_file`], or the file is longer than the limit.
    pub fn read(&self, subpath: &Path, limit_bytes: u64) -> io::Result<Option<Vec<u8>>> {
        match self.open_file(subpath, OFlags::RDONLY) {
            Ok(file) => read_file_limited(&file, &self.path.join(subpath), limit_bytes).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Like [`TrustedDir::read`], for UTF-8 text.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::read`], or the file is not UTF-8 text.
    pub fn read_text(&self, subpath: &Path, limit_bytes: u64) -> io::Result<Option<String>> {
        let content = self.read(subpath, limit_bytes)?;
        content
            .map(|content| decode_text(&self.path.join(subpath), content))
            .transpose()
    }

    /// Writes a file under an unpredictable name, and returns that name.
    ///
    /// # Errors
    /// The file cannot be written. An incomplete file is deleted.
    pub fn write_temporary(&self, name: &str, content: &[u8]) -> io::Result<String> {
        let temporary_name = unpredictable_name(name)?;
        let file = self.open_file(
            Path::new(&temporary_name),
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL,
        )?;
        (&file)
            .write_all(content)
            .inspect_err(|_| _ = self.remove(&temporary_name))?;
        Ok(temporary_name)
    }

    /// Replaces a file in the directory by one with this content. Readers find either the old file or the complete
    /// new one.
    ///
    /// # Errors
    /// The error of the file system. The old file is then unchanged.
    pub fn replace(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let temporary_name = self.write_temporary(name, content)?;
        self.rename(&temporary_name, name)
            .inspect_err(|_| _ = self.remove(&temporary_name))
    }

    /// Appends a line to a file in one write, and creates the file if it is missing.
    pub fn append_line(&self, subpath: &Path, line: &str) -> io::Result<()> {
        let file = self.open_file(subpath, OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE)?;
        (&file).write_all(format!("{line}\n").as_bytes())
    }

    /// Names are unsorted, without `.` and `..`.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    /// Renames a file within the directory. An existing file of the new name is replaced.
    pub fn rename(&self, old_name: &str, new_name: &str) -> io::Result<()> {
        self.check_writable(Path::new(old_name))?;
        Ok(rustix::fs::renameat(
            &self.fd, old_name, &self.fd, new_name,
        )?)
    }

    /// Creates a hard link to a file in another directory, unless the new name exists (`AlreadyExists`).
    pub fn link_into(
        &self,
        old_name: &str,
        target_dir: &TrustedDir,
        new_name: &str,
    ) -> io::Result<()> {
        target_dir.check_writable(Path::new(new_name))?;
        Ok(rustix::fs::linkat(
            &self.fd,
            old_name,
            &target_dir.fd,
            new_name,
            AtFlags::empty(),
        )?)
    }

    /// Removes a file, which may be missing.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        self.check_writable(Path::new(name))?;
        // One name only, because the call would follow links in the folders of a longer path.
        if name.contains('/') {
            let found = "a path of several names";
            return Err(refusal_error(&self.path.join(name), found, "a file here"));
        }
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    const STRANGER: u32 = 65_534;
    const LIMIT_BYTES: u64 = 1_000;

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn dir_fixture() -> (tempfile::TempDir, PathBuf) {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("store");
        TrustedDir::create(&path).unwrap();
        (parent, path)
    }

    /// Is a directory refused that another user made, may write, or can replace, and a link to one as well?
    #[test]
    fn a_directory_that_others_can_change_is_refused() {
        let cases: [(&str, fn(&Path)); 3] = [
            ("mode 0777", |path| set_mode(path, 0o777)),
            ("mode 0777", |path| set_mode(path.parent().unwrap(), 0o777)),
            ("no directory of its own", |path| {
                let real = path.with_file_name("real");
                std::fs::rename(path, &real).unwrap();
                symlink(&real, path).unwrap();
            }),
        ];
        for (expected, spoil) in cases {
            let (_parent, path) = dir_fixture();
            spoil(&path);
            let error = TrustedDir::open_anchored(&path, DirAccess::ReadWrite)
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}");
        }

        if rustix::process::geteuid().is_root() {
            let (_parent, path) = dir_fixture();
            chown(&path, Some(STRANGER), None).unwrap();
            let error = TrustedDir::open(&path, DirAccess::ReadWrite)
                .unwrap_err()
                .to_string();
            assert!(error.contains("a directory of user 65534"), "{error}");
        }
    }

    /// Is no link followed, wherever in a path it stands, nor a path that leads out, with and without `openat2`?
    #[test]
    fn no_path_leads_out_of_the_directory() {
        let (parent, path) = dir_fixture();
        let secret = parent.path().join("secret");
        std::fs::write(&secret, "secret").unwrap();
        let dir = TrustedDir::open(&path, DirAccess::ReadWrite).unwrap();
        dir.create_dir("inner")
            .unwrap()
            .replace("plain", b"plain")
            .unwrap();
        symlink(&secret, path.join("link")).unwrap();
        symlink(parent.path(), path.join("way")).unwrap();

        for rest in [
            "link",
            "way/secret",
            "../secret",
            "inner/../../secret",
            "/etc/hostname",
        ]
        .map(Path::new)
        {
            assert!(dir.read(rest, LIMIT_BYTES).is_err(), "{}", rest.display());
            assert!(
                dir.open_file(rest, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)
                    .is_err(),
                "{}",
                rest.display()
            );
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            assert!(
                dir.walk_beneath(rest, flags, Mode::empty()).is_err(),
                "{}",
                rest.display()
            );
        }
        for (rest, expected) in [
            ("way/secret", Errno::LOOP),
            ("inner/plain/x", Errno::NOTDIR),
        ] {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            assert_eq!(
                dir.walk_beneath(Path::new(rest), flags, Mode::empty())
                    .unwrap_err(),
                expected,
                "{rest}"
            );
            let by_openat2 = dir
                .read(Path::new(rest), LIMIT_BYTES)
                .unwrap_err()
                .to_string();
            assert_eq!(
                by_openat2.contains("found a link"),
                expected == Errno::LOOP,
                "{by_openat2}"
            );
        }
        assert_eq!(
            dir.read_text(Path::new("inner/plain"), LIMIT_BYTES)
                .unwrap()
                .unwrap(),
            "plain"
        );
        assert!(
            dir.walk_beneath(
                Path::new("inner/plain"),
                OFlags::RDONLY | OFlags::NOFOLLOW,
                Mode::empty()
            )
            .is_ok()
        );
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
    }

    /// Are a FIFO and a file that every user may write refused at once, and another user's file left as it was?
    #[test]
    fn anything_but_a_plain_file_of_the_owner_is_refused() {
        let (_parent, path) = dir_fixture();
        let dir = TrustedDir::open(&path, DirAccess::ReadWrite).unwrap();
        rustix::fs::mknodat(&dir.fd, "fifo", rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(
            dir.read(Path::new("fifo"), LIMIT_BYTES)
                .unwrap_err()
                .to_string()
                .contains("found a FIFO")
        );
        dir.replace("strange", b"content").unwrap();
        dir.replace("open", b"content").unwrap();
        std::fs::set_permissions(path.join("open"), std::fs::Permissions::from_mode(0o646))
            .unwrap();
        let error = dir
            .read(Path::new("open"), LIMIT_BYTES)
            .unwrap_err()
            .to_string();
        assert!(error.contains("found a file with mode 0646"), "{error}");
        if rustix::process::geteuid().is_root() {
            chown(path.join("strange"), Some(STRANGER), None).unwrap();
            let error = dir
                .open_file(Path::new("strange"), OFlags::WRONLY | OFlags::TRUNC)
                .unwrap_err()
                .to_string();
            assert!(error.contains("a file of user 65534"), "{error}");
            assert_eq!(std::fs::read(path.join("strange")).unwrap(), b"content");
        }
    }

    /// Can a directory that was opened for reading change nothing, by any of its functions?
    #[test]
    fn a_directory_opened_for_reading_changes_nothing() {
        let (_parent, path) = dir_fixture();
        TrustedDir::open(&path, DirAccess::ReadWrite)
            .unwrap()
            .replace("file", b"content")
            .unwrap();
        let dir = TrustedDir::open(&path, DirAccess::ReadOnly).unwrap();

        for outcome in [
            dir.replace("file", b"other"),
            dir.append_line(Path::new("file"), "line"),
            dir.rename("file", "moved"),
            dir.link_into("file", &dir, "second"),
            dir.remove("file"),
            dir.create_dir("inner").map(drop),
            dir.create_new_dir("inner").map(drop),
            dir.open_file(Path::new("new"), OFlags::WRONLY | OFlags::CREATE)
                .map(drop),
        ] {
            assert!(
                outcome
                    .unwrap_err()
                    .to_string()
                    .contains("this is read-only")
            );
        }
        assert_eq!(
            dir.read_text(Path::new("file"), LIMIT_BYTES)
                .unwrap()
                .unwrap(),
            "content"
        );
        assert_eq!(dir.names().unwrap(), ["file"]);
    }

    /// Are files written whole, linked once, appended to, moved and removed?
    #[test]
    fn files_are_written_linked_appended_moved_and_removed() {
        let (_parent, path) = dir_fixture();
        let dir = TrustedDir::open(&path, DirAccess::ReadWrite).unwrap();
        let other = dir.create_dir("other").unwrap();
        let fresh = dir.write_temporary("result", b"one").unwrap();
        dir.link_into(&fresh, &other, "result").unwrap();
        let again = dir.link_into(&fresh, &other, "result").unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists);
        dir.remove(&fresh).unwrap();
        dir.remove(&fresh).unwrap();
        dir.append_line(Path::new("log"), "first").unwrap();
        dir.append_line(Path::new("log"), "second").unwrap();
        assert_eq!(
            dir.read_text(Path::new("log"), LIMIT_BYTES)
                .unwrap()
                .unwrap(),
            "first\nsecond\n"
        );
        assert!(dir.read(Path::new("log"), 5).is_err());
        dir.rename("log", "moved").unwrap();
        assert!(dir.read(Path::new("log"), LIMIT_BYTES).unwrap().is_none());
        assert!(dir.read(Path::new("moved"), LIMIT_BYTES).unwrap().is_some());
    }
}
