//! Output files. Existing files are overwritten only with --force, and a file gets its final name only when it is
//! complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
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
    /// Begins a file of this path; an existing one stays as it is until the new one is complete.
    pub fn create(path: &Path, force: bool) -> anyhow::Result<Self> {
        check_output_path(path, force)?;
        // Without a mode, a temporary file would stay private after its renaming.
        let file = tempfile::Builder::new()
            .prefix(".cachemate-")
            .permissions(fs::Permissions::from_mode(cachemate_files::OUTPUT_MODE))
            .tempfile_in(parent_dir(path))
            .with_context(|| format!("{}: cannot write here", path.display()))?;
        Ok(OutputFile {
            path: path.to_path_buf(),
            force,
            file,
        })
    }

    /// The file under its temporary name, to be written.
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
        Ok(())
    }
}

/// Checks that an output file can be created, so that hours of work are not lost: it must not exist (unless `force`),
/// not be a directory, and its directory must exist. Another process can still change that.
pub fn check_output_path(path: &Path, force: bool) -> anyhow::Result<()> {
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
    let has_entries = cachemate_files::list_dir(dir).is_ok_and(|entries| !entries.is_empty());
    if has_entries && !force {
        bail!(
            "{}: the directory is not empty; --force writes to it nevertheless",
            dir.display()
        );
    }
    fs::create_dir_all(dir).with_context(|| format!("{}: cannot be created", dir.display()))
}
