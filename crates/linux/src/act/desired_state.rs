//! The desired state of an object, and the refusal if it cannot be reached.

use std::io;

use cachemate_core::{PlanItem, RefusalReason, RefusedItem};

use crate::kernel::Kernel;
use crate::safety::journal::{JournalObject, ObjectState};
use crate::safety::object_state::{ObjectAccess, describe_failure};

/// An object and the state that it is about to get.
#[derive(Clone, PartialEq, Debug)]
pub struct DesiredState {
    /// The object that changes.
    pub object: JournalObject,
    /// State of the object after the change.
    pub state: ObjectState,
    /// False if the object is only journaled, because the kernel, the gang runner or a probe changes it.
    pub must_write: bool,
}

impl DesiredState {
    pub(crate) fn written(object: JournalObject, state: ObjectState) -> Self {
        DesiredState {
            object,
            state,
            must_write: true,
        }
    }

    pub(crate) fn journaled(object: JournalObject, state: ObjectState) -> Self {
        DesiredState {
            object,
            state,
            must_write: false,
        }
    }
}

pub(crate) fn refusal(
    kernel: &dyn Kernel,
    item: &PlanItem,
    object: &JournalObject,
    access: ObjectAccess,
    error: &io::Error,
) -> RefusedItem {
    let reason = match error.raw_os_error() {
        Some(libc::ESRCH) | Some(libc::ENOENT) => RefusalReason::NotFound,
        Some(libc::EPERM) | Some(libc::EACCES) | Some(libc::EROFS) => RefusalReason::NoPermission,
        Some(libc::ENOSPC) => RefusalReason::NoCapacity,
        Some(libc::EBUSY) => RefusalReason::Busy,
        _ => RefusalReason::Failed,
    };
    RefusedItem {
        item: item.clone(),
        reason,
        message: describe_failure(kernel, object, access, error),
    }
}
