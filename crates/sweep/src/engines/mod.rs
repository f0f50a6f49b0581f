//! The engines, one per file. A new engine needs a file here, and a line where the command selects engines.

pub mod dask;
pub mod hq;
pub mod local;
pub mod slurm;

use std::path::{Path, PathBuf};

use crate::manifest::SweepTask;

/// Writes the ids of a round's tasks, one per line. Workers are given only a number, and find their ids in this file.
fn write_ids(dir: &Path, name: &str, tasks: &[SweepTask]) -> std::io::Result<PathBuf> {
    std::fs::create_dir_all(dir)?;
    let path = dir.join(format!("{name}.ids"));
    let text: String = tasks.iter().map(|task| format!("{}\n", task.id)).collect();
    cachemate_files::replace(&path, text.as_bytes())?;
    Ok(path)
}

/// `sh` code for "the ids on the lines of `file` that belong to job number `$1`", with `batch_size` ids per job.
fn job_ids_command(file: &Path, batch_size: usize) -> String {
    let file = crate::client::quote_argument(file.as_os_str());
    format!("$(sed -n \"$(($1 * {batch_size} + 1)),$((($1 + 1) * {batch_size}))p\" {file})")
}
