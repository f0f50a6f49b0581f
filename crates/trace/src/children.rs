//! Programs that end when the process that started them ends.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::Signal;

/// Sends the child `signal` when the thread that starts it ends with its process, even by `kill -9`. Without this, a
/// stream or a recorded program that is left running would disturb all programs.
pub fn end_with_parent(command: &mut Command, signal: Signal) {
    // SAFETY: prctl(2) is async-signal-safe and touches no memory of this process.
    unsafe {
        command.pre_exec(move || {
            Ok(rustix::process::set_parent_process_death_signal(Some(
                signal,
            ))?)
        });
    }
}
