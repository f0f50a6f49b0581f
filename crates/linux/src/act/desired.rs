//! What an object is to become, and what is said where it cannot.

use std::io;

use cachemate_core::{Item, Refused, RefusedBecause};

use crate::kernel::Kernel;
use crate::safety::journal::{Object, State};
use crate::safety::object_state::in_words;

/// An object and what it may become, with the line of the plan that it concerns.
#[derive(Clone, PartialEq, Debug)]
pub struct DesiredState {
    /// The line.
    pub item: Item,
    /// What is changed.
    pub object: Object,
    /// What it may become.
    pub state: State,
}

pub(crate) fn refused(kernel: &dyn Kernel, item: &Item, object: &Object, error: &io::Error) -> Refused {
    let because = match error.raw_os_error() {
        Some(libc::ESRCH) | Some(libc::ENOENT) => RefusedBecause::Gone,
        Some(libc::EPERM) | Some(libc::EACCES) | Some(libc::EROFS) => RefusedBecause::NoPermission,
        Some(libc::ENOSPC) => RefusedBecause::NoRoom,
        Some(libc::EBUSY) => RefusedBecause::Busy,
        _ => RefusedBecause::Failed,
    };
    Refused { item: item.clone(), because, said: format!("{object:?}: {}", in_words(kernel, object, error)) }
}
