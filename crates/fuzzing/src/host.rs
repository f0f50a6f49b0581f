//! A host whose `/proc` and sysfs come from an input: the files follow each other, each after a line `==> path <==`,
//! in the format of head(1).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use cachemate_core::CpuSet;
use cachemate_linux::kernel::scheduling::SchedParams;
use cachemate_linux::kernel::{DirLock, Kernel};

const MAX_FILES: usize = 512;

/// A host that consists of the files in an input, and nothing else.
pub struct InputHost {
    files: RefCell<BTreeMap<PathBuf, String>>,
}

impl InputHost {
    /// Parses a text in which lines `==> PATH <==` begin files, as `head` prints several files.
    pub fn new(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut files: BTreeMap<PathBuf, String> = BTreeMap::new();
        let mut path = None;
        for line in text.split_inclusive('\n') {
            let header_path = line
                .trim_end()
                .strip_prefix("==> ")
                .and_then(|line| line.strip_suffix(" <=="));
            match header_path {
                Some(name) if files.len() < MAX_FILES => path = plain_path(name),
                Some(_) => path = None,
                None => {
                    if let Some(path) = &path {
                        files.entry(path.clone()).or_default().push_str(line);
                    }
                }
            }
        }
        InputHost {
            files: RefCell::new(files),
        }
    }

    /// Writes the files below a directory; files whose names the file system rejects are left out.
    pub fn write_below(&self, dir: &Path) {
        for (path, text) in self.files.borrow().iter() {
            let file = dir.join(path.strip_prefix("/").unwrap_or(path));
            let is_created = file
                .parent()
                .is_some_and(|parent| std::fs::create_dir_all(parent).is_ok());
            // A file that the file system rejects is left out.
            let _ = is_created && cachemate_files::replace(&file, text.as_bytes()).is_ok();
        }
    }
}

/// `None` unless the name is absolute and has no `.` or `..` parts.
fn plain_path(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(name);
    let has_plain_names = path
        .components()
        .skip(1)
        .all(|part| matches!(part, Component::Normal(_)));
    (path.is_absolute() && has_plain_names && !name.contains('\0')).then_some(path)
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Kernel for InputHost {
    /// No process of an input is taken for ourselves, so that an input means the same in every run.
    fn own_pid(&self) -> i32 {
        i32::MAX
    }
    fn read(&self, path: &Path) -> io::Result<String> {
        self.files.borrow().get(path).cloned().ok_or_else(not_found)
    }
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        *self
            .files
            .borrow_mut()
            .get_mut(path)
            .ok_or_else(not_found)? = text.to_string();
        Ok(())
    }
    fn make_dir(&self, _: &Path) -> io::Result<()> {
        Ok(())
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.files
            .borrow_mut()
            .retain(|file, _| !file.starts_with(path));
        Ok(())
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let files = self.files.borrow();
        let child = |file: &PathBuf| {
            let first_component = file.strip_prefix(path).ok()?.components().next()?;
            Some(first_component.as_os_str().to_string_lossy().into_owned())
        };
        let names: BTreeSet<String> = files.keys().filter_map(child).collect();
        if names.is_empty() {
            Err(not_found())
        } else {
            Ok(names.into_iter().collect())
        }
    }
    fn lock_dir(&self, _: &Path, _: Duration) -> io::Result<DirLock> {
        Ok(DirLock::default())
    }
    fn set_affinity(&self, _: i32, _: &CpuSet) -> io::Result<()> {
        Ok(())
    }
    fn set_nice(&self, _: i32, _: i32) -> io::Result<()> {
        Ok(())
    }
    fn set_scheduling(&self, _: i32, _: &SchedParams) -> io::Result<()> {
        Ok(())
    }
}
