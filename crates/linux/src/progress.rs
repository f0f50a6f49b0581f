//! Work done, as programs report it themselves: the only measure of speed without a PMU that does not guess.
//!
//! A program finds the name of a file in its environment ([`VARIABLE`]), maps its first eight bytes and counts up there
//! (native byte order), in its own unit: requests, rows, frames. Reading costs one small read per window and process.
//! Where no file is named, `DIR/PID` is looked for in the daemon's progress folder.

use std::path::{Path, PathBuf};

use crate::kernel::Kernel;

/// Names the file in a program's environment.
pub const VARIABLE: &str = "CACHEMATE_PROGRESS";

/// Where processes report.
#[derive(Clone, Debug, Default)]
pub struct ProgressFiles {
    dir: Option<PathBuf>,
}

impl ProgressFiles {
    /// `dir` holds one file per process, named by its id; `None` = nobody reports.
    pub fn new(dir: Option<PathBuf>) -> Self {
        ProgressFiles { dir }
    }

    pub fn path(&self, pid: i32) -> Option<PathBuf> {
        Some(self.dir.as_ref()?.join(pid.to_string()))
    }

    /// What the process, or the nearest process that it descends from, has counted so far; `None` where it does not
    /// report, or its file is no file of eight bytes or more that belongs to the process's own user.
    pub fn total(&self, kernel: &dyn Kernel, pid: i32) -> Option<u64> {
        let path = self.path(pid)?;
        owner_matches(kernel, &path, pid).then_some(())?;
        read_counter(&path)
    }
}

fn read_counter(path: &Path) -> Option<u64> {
    use std::io::Read;
    let mut bytes = [0u8; 8];
    std::fs::File::open(path).ok()?.read_exact(&mut bytes).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

/// A file that somebody else has put there says nothing about this process. Links are not followed.
fn owner_matches(kernel: &dyn Kernel, path: &Path, pid: i32) -> bool {
    use std::os::unix::fs::MetadataExt;
    let Ok(found) = std::fs::symlink_metadata(path) else { return false };
    let status = kernel.read(Path::new(&format!("/proc/{pid}/status"))).unwrap_or_default();
    let user = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_ascii_whitespace().next()?.parse().ok());
    found.is_file() && (Some(found.uid()) == user || found.uid() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Host;

    /// Is a counter read, and a missing, short or linked file no report at all?
    #[test]
    fn a_report_is_eight_bytes_in_a_file_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let files = ProgressFiles::new(Some(dir.path().to_path_buf()));
        let (host, pid) = (Host::new("/"), std::process::id() as i32);
        assert_eq!(files.total(&host, pid), None);
        let path = files.path(pid).unwrap();
        std::fs::write(&path, 77u64.to_ne_bytes()).unwrap();
        assert_eq!(files.total(&host, pid), Some(77));
        std::fs::write(&path, [1, 2, 3]).unwrap();
        assert_eq!(files.total(&host, pid), None);
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/proc/self/stat", &path).unwrap();
        assert_eq!(files.total(&host, pid), None);
        assert_eq!(ProgressFiles::default().total(&host, pid), None);
    }
}
