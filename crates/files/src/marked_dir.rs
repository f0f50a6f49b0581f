//! Directories that a marker file shows to be ours, so that their content may be listed and removed.
//!
//! Problem: a directory that the user names may hold anything, and no test of a name tells our files from those of
//! others. Method: we use a directory only if we made its content from the beginning: it was missing or empty, and got
//! a marker before anything else. Everything in it is then reached through descriptors, without following links.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::OFlags;

use crate::refusal_error;
use crate::trusted_dir::{DirAccess, TrustedDir};

/// What stands at the path of a marked directory.
enum MarkState {
    Marked(TrustedDir),
    Empty,
    Missing,
}

fn look_up(path: &Path, marker: &str, access: DirAccess) -> io::Result<MarkState> {
    let dir = match TrustedDir::open_anchored(path, access) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(MarkState::Missing),
        other => other?,
    };
    match dir.open_file(Path::new(marker), OFlags::RDONLY) {
        Ok(_) => return Ok(MarkState::Marked(dir)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if dir.names()?.is_empty() {
        return Ok(MarkState::Empty);
    }
    let expected = format!("an empty or missing one, or one with the file {marker}");
    Err(refusal_error(
        path,
        "a directory with other files",
        &expected,
    ))
}

impl TrustedDir {
    /// Opens a directory that has this marker; `None` if there is none yet: the path is missing, or an empty directory.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::open_anchored`]; or the directory has files, and no marker of this user or of root.
    pub fn open_marked(path: &Path, marker: &str, access: DirAccess) -> io::Result<Option<Self>> {
        match look_up(path, marker, access)? {
            MarkState::Marked(dir) => Ok(Some(dir)),
            MarkState::Empty | MarkState::Missing => Ok(None),
        }
    }

    /// Like [`TrustedDir::open_marked`], for reading and writing; makes the directory, with those above it, and its
    /// marker.
    ///
    /// # Errors
    /// The errors of [`TrustedDir::open_marked`], or of the file system.
    pub fn create_marked(path: &Path, marker: &str) -> io::Result<Self> {
        match look_up(path, marker, DirAccess::ReadWrite)? {
            MarkState::Marked(dir) => return Ok(dir),
            MarkState::Empty => {}
            MarkState::Missing => std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)?,
        }
        let dir = TrustedDir::open_anchored(path, DirAccess::ReadWrite)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        match dir.open_file(Path::new(marker), flags) {
            Ok(_) => {}
            // Another process has just made the same directory.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        Ok(dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    const MARKER: &str = "our-files";

    /// Is a directory with other files refused and left as it was, a link to one as well, and a forged marker not
    /// believed?
    #[test]
    fn only_a_directory_that_began_empty_is_marked() {
        let parent = tempfile::tempdir().unwrap();
        let (home, link) = (parent.path().join("home"), parent.path().join("link"));
        std::fs::create_dir(&home).unwrap();
        std::fs::write(home.join("letter"), "dear").unwrap();
        symlink(&home, &link).unwrap();
        for path in [&home, &link] {
            assert!(TrustedDir::create_marked(path, MARKER).is_err());
            assert!(TrustedDir::open_marked(path, MARKER, DirAccess::ReadWrite).is_err());
        }
        symlink(home.join("letter"), home.join(MARKER)).unwrap();
        assert!(TrustedDir::create_marked(&home, MARKER).is_err());
        assert_eq!(std::fs::read(home.join("letter")).unwrap(), b"dear");

        let fresh = parent.path().join("a/b");
        let open = || TrustedDir::open_marked(&fresh, MARKER, DirAccess::ReadOnly).unwrap();
        assert!(open().is_none());
        TrustedDir::create_marked(&fresh, MARKER).unwrap();
        TrustedDir::create_marked(&fresh, MARKER).unwrap();
        assert_eq!(open().unwrap().names().unwrap(), [MARKER]);
    }
}
