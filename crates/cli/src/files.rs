//! Output files. Existing files are overwritten only with --force, and a file gets its final name only when it is
//! complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Serialize;
use tempfile::NamedTempFile;

/// A temporary file in the directory of its final path; [`OutputFile::persist`] renames it.
pub struct OutputFile {
    path: PathBuf,
    force: bool,
    file: NamedTempFile,
}

impl OutputFile {
    pub fn create(path: &Path, force: bool) -> anyhow::Result<Self> {
        refuse_existing(path, force)?;
        let dir = parent_dir(path);
        let file = tempfile::Builder::new()
            .prefix(".cachemate-")
            .tempfile_in(dir)
            .with_context(|| format!("{}: cannot write here", path.display()))?;
        Ok(OutputFile {
            path: path.to_path_buf(),
            force,
            file,
        })
    }

    pub fn file(&mut self) -> &mut File {
        self.file.as_file_mut()
    }

    /// Renames the file to its final path.
    pub fn persist(mut self) -> anyhow::Result<()> {
        let name = self.path.display().to_string();
        self.file
            .flush()
            .with_context(|| format!("{name}: cannot write"))?;
        let persisted = if self.force {
            self.file.persist(&self.path)
        } else {
            self.file.persist_noclobber(&self.path)
        };
        persisted
            .map_err(|error| error.error)
            .with_context(|| format!("{name}: cannot be renamed into place"))?;
        // Temporary files are private, whereas the result gets ordinary permissions.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = 0o666 & !umask();
            let _ = fs::set_permissions(&self.path, fs::Permissions::from_mode(mode));
        }
        Ok(())
    }
}

/// Returns the umask of the process, which can be read only by setting it.
fn umask() -> u32 {
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    rustix::process::umask(mask);
    mask.as_raw_mode()
}

/// Rejects an output file that could not be written, before hours of work rather than after them.
pub fn refuse_existing(path: &Path, force: bool) -> anyhow::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(_) if !force => bail!("{}: the file exists; --force overwrites it", path.display()),
        Ok(metadata) if metadata.is_dir() => {
            bail!("{}: found a directory, expected a file", path.display())
        }
        _ if !parent_dir(path).is_dir() => {
            bail!(
                "{}: cannot be written, because the directory {} does not exist",
                path.display(),
                parent_dir(path).display()
            )
        }
        _ => Ok(()),
    }
}

fn parent_dir(path: &Path) -> &Path {
    path.parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Reads a text file of at most `max_bytes`; an error names the file.
pub fn read_text(path: &Path, max_bytes: u64) -> anyhow::Result<String> {
    cachemate_files::read_text_limited(path, max_bytes)
        .with_context(|| format!("{}: cannot be read", path.display()))
}

/// Writes `bytes` to a file.
pub fn write_file(path: &Path, bytes: &[u8], force: bool) -> anyhow::Result<()> {
    let mut output = OutputFile::create(path, force)?;
    output
        .file()
        .write_all(bytes)
        .map_err(|error: io::Error| anyhow::anyhow!("{}: {error}", path.display()))?;
    output.persist()
}

/// Writes a value to a file as JSON with a line end.
pub fn write_json<T: Serialize>(path: &Path, value: &T, force: bool) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)
        .with_context(|| format!("{}: cannot be written as JSON", path.display()))?;
    text.push(b'\n');
    write_file(path, &text, force)
}

/// Creates a directory; accepts one that exists and is not empty only with `force`.
pub fn prepare_output_dir(dir: &Path, force: bool) -> anyhow::Result<()> {
    let is_full = cachemate_files::list_dir(dir).is_ok_and(|entries| !entries.is_empty());
    if is_full && !force {
        bail!(
            "{}: the directory is not empty; --force writes to it nevertheless",
            dir.display()
        );
    }
    fs::create_dir_all(dir).with_context(|| format!("{}: cannot be created", dir.display()))
}
