//! Files that the command writes: never over an existing one unless forced, never half a file under the final name.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use tempfile::NamedTempFile;

/// A file under way beside its final name; appears there with [`OutputFile::keep`].
pub struct OutputFile {
    path: PathBuf,
    force: bool,
    file: NamedTempFile,
}

impl OutputFile {
    /// # Errors
    /// The file exists and `force` is not set, or its folder cannot be written to.
    pub fn create(path: &Path, force: bool) -> anyhow::Result<Self> {
        refuse_existing(path, force)?;
        let folder = folder_of(path);
        let file = tempfile::Builder::new()
            .prefix(".cachemate-")
            .tempfile_in(folder)
            .with_context(|| format!("{}: cannot write here", path.display()))?;
        Ok(OutputFile { path: path.to_path_buf(), force, file })
    }

    pub fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// Writing failed, or somebody created the file in the meantime.
    pub fn keep(mut self) -> anyhow::Result<()> {
        let name = self.path.display().to_string();
        self.file.flush().with_context(|| format!("{name}: cannot write"))?;
        let persisted =
            if self.force { self.file.persist(&self.path) } else { self.file.persist_noclobber(&self.path) };
        persisted.map_err(|error| error.error).with_context(|| format!("{name}: cannot be put in place"))?;
        // Temporary files are private; the result is an ordinary file.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = 0o666 & !umask();
            let _ = fs::set_permissions(&self.path, fs::Permissions::from_mode(mode));
        }
        Ok(())
    }
}

/// The process's mask, read by setting it and putting it back.
fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    rustix::process::umask(mask);
    mask.as_raw_mode()
}

/// Before hours of work: can the file be written when they are over?
///
/// # Errors
/// The file exists and `force` is not set, or its folder is not there.
pub fn refuse_existing(path: &Path, force: bool) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(_) if !force => bail!("{} exists already; --force overwrites it", path.display()),
        Ok(found) if found.is_dir() => bail!("{} is a folder, expected a file name", path.display()),
        _ if !folder_of(path).is_dir() => {
            bail!("{}: cannot write here, as there is no folder {}", path.display(), folder_of(path).display())
        }
        _ => Ok(()),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes all of `bytes` as the file.
///
/// # Errors
/// As [`OutputFile::create`] and [`OutputFile::keep`].
pub fn write_file(path: &Path, bytes: &[u8], force: bool) -> anyhow::Result<()> {
    let mut output = OutputFile::create(path, force)?;
    output.file().write_all(bytes).map_err(|error: io::Error| anyhow::anyhow!("{}: {error}", path.display()))?;
    output.keep()
}

/// Makes a folder; one that holds something is only written to with `force`.
///
/// # Errors
/// It holds something, or cannot be made.
pub fn refuse_full(folder: &Path, force: bool) -> anyhow::Result<()> {
    let holds_something = fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
    if holds_something && !force {
        bail!("{} is not empty; --force writes there all the same", folder.display());
    }
    fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))
}
