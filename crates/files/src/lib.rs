//! File access for paths that come from an argument, a configuration, a network share, or another
//! user. No other crate opens such a path, except that the command creates its output under a
//! temporary name.
//!
//! A path from outside may lead to a FIFO that never answers, to an endless device, through a link
//! to another user's file, or into a directory in which another user replaces files while they are
//! read. A daemon that runs as root would hang, fill its memory, or execute what a stranger wrote.
//! So every file is opened without blocking, must be a plain file, and is read up to a stated
//! number of bytes. A file whose content controls the program (a journal, a store, a library to
//! preload) must be in a [`TrustedDir`], which checks the owner and the mode and follows no link;
//! one whose files are listed to be removed has a marker as well. A file is written under an
//! unpredictable name and then renamed, so that readers never find it incomplete.
//!
//! For example, `cachemate plan /dev/zero` ends at once with the path, what was found (a device)
//! and what was expected (a plain file), and so does a FIFO with no writer. Checking the path
//! before opening it would not do, because another user can exchange the file in between; the check
//! is made on the open file.
//!
//! # Invariants
//! - A path of the file system never makes a call wait for another process, and none makes it read
//!   more than its limit, even if the file grows.
//! - What a [`TrustedDir`] yields belongs to this user or to root, and no other user can replace
//!   it.
//! - A reader sees the old content of a file or the new one, and nothing in between.
//! - A refusal is an [`std::io::Error`] whose text gives the path, the value found, and the value
//!   expected; an error of the system has no path, so the caller adds it.
#![warn(missing_docs)]

mod marked_dir;
mod plain;
mod standard_dirs;
mod trusted_dir;

pub use plain::{
    FreshFile, OUTPUT_MODE, create, link_target, list_dir, list_subdirs, metadata_if_exists,
    open_pipe, open_plain, open_sink, path_exists, read_limited, read_text_limited, replace,
};
pub use standard_dirs::{cache_dir, path_from_variable, path_variable};
pub use trusted_dir::{DirAccess, TrustedDir};

use std::io;
use std::path::Path;

/// The error for a rejected file, worded the same everywhere.
fn refusal_error(path: &Path, found: impl std::fmt::Display, expected: &str) -> io::Error {
    let message = format!("{}: found {found}, expected {expected}", path.display());
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}

/// A name derived from `name` that no other process can predict, because it contains 64 random bits from the kernel.
fn unpredictable_name(name: &str) -> io::Result<String> {
    let mut bits = [0u8; 8];
    let byte_count = rustix::rand::getrandom(&mut bits, rustix::rand::GetRandomFlags::empty())?;
    if byte_count < bits.len() {
        return Err(io::Error::other("the kernel gave too few random bytes"));
    }
    Ok(format!(".{name}.{:016x}", u64::from_ne_bytes(bits)))
}
