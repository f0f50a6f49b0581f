//! The one place that opens files named by an argument, a configuration, a network share, or another user.
//!
//! A path from outside may lead to a FIFO that never answers, to a device that never ends, through a link into another
//! user's file, or into a directory in which another user replaces files while they are read. So every file is opened
//! without blocking. It must be a plain file, and is read up to a stated number of bytes. If the content is obeyed (a
//! journal, a store, a library to preload), the file lies in a [`TrustedDir`], which checks the owner and the mode and
//! follows no link. Written files appear whole, because they are renamed from an unpredictable name.
//!
//! Errors are [`std::io::Error`]s whose text names the path, what was found, and what was expected.
#![warn(missing_docs)]

mod plain;
mod trusted_dir;

pub use plain::{
    FreshFile, create, entries, exists, link_target, metadata, open_plain, read_limited, read_text_limited, replace,
};
pub use trusted_dir::{DirAccess, TrustedDir};

use std::io;
use std::path::Path;

/// An error in the words that every refused file gets.
fn refuse(path: &Path, found: impl std::fmt::Display, expected: &str) -> io::Error {
    let message = format!("{}: found {found}, expected {expected}", path.display());
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}

/// A name beside `name` that no other process can have chosen: 64 random bits from the kernel.
fn unpredictable_name(name: &str) -> io::Result<String> {
    let mut bits = [0u8; 8];
    let filled = rustix::rand::getrandom(&mut bits, rustix::rand::GetRandomFlags::empty())?;
    if filled < bits.len() {
        return Err(io::Error::other("the kernel gave too few random bytes"));
    }
    Ok(format!(".{name}.{:016x}", u64::from_ne_bytes(bits)))
}
