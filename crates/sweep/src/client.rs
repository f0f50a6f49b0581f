//! Calls an engine's own client programs. Each call has a timeout and its own process group, and both outputs are read.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Output and exit status of a client program. If the output is specific, callers ignore the exit code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientOutput {
    /// Exit code; `None` if a signal ended the client.
    pub code: Option<i32>,
    /// Standard output, with invalid UTF-8 replaced.
    pub stdout: String,
    /// Standard error, with invalid UTF-8 replaced.
    pub stderr: String,
}

/// The reason why a call failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CallError {
    /// The program is not installed.
    #[error("{0}: no such program here")]
    Missing(String),
    /// The program did not end within this number of seconds.
    #[error("{0}: no answer in {1} s")]
    Deadline(String, u64),
    /// The program failed; with its name, and its own or the system's message.
    #[error("{0}: {1}")]
    Failed(String, String),
}

/// Maximum time for which outputs are read after the client's end; a process that it left behind may keep them open.
const OUTPUT_AFTER_END: Duration = Duration::from_millis(500);

/// Runs a client to its end, or kills its process group after `timeout`.
///
/// # Errors
/// The client is not installed, or did not end in time.
pub fn call(command: &mut Command, timeout: Duration) -> Result<ClientOutput, CallError> {
    let name = command.get_program().to_string_lossy().into_owned();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => CallError::Missing(name.clone()),
        _ => CallError::Failed(name.clone(), error.to_string()),
    })?;
    let (stdout_receiver, stderr_receiver) = (
        spawn_reader(child.stdout.take()),
        spawn_reader(child.stderr.take()),
    );
    let start = Instant::now();
    let mut pause = Duration::from_millis(1);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if start.elapsed() < timeout => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(50));
            }
            Ok(None) => {
                kill_group(&mut child);
                return Err(CallError::Deadline(name, timeout.as_secs()));
            }
            Err(error) => {
                kill_group(&mut child);
                return Err(CallError::Failed(name, error.to_string()));
            }
        }
    };
    let receive_text = |receiver: Receiver<Vec<u8>>| {
        let bytes = receiver.recv_timeout(OUTPUT_AFTER_END).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(ClientOutput {
        code: status.code(),
        stdout: receive_text(stdout_receiver),
        stderr: receive_text(stderr_receiver),
    })
}

/// Calls a client as [`call`] does, but treats a nonzero exit code as an error with the client's message.
///
/// # Errors
/// The errors of [`call`], and a nonzero exit code.
pub fn call_checked(command: &mut Command, timeout: Duration) -> Result<String, CallError> {
    let name = command.get_program().to_string_lossy().into_owned();
    let client_output = call(command, timeout)?;
    if client_output.code == Some(0) {
        return Ok(client_output.stdout);
    }
    let message = if client_output.stderr.trim().is_empty() {
        client_output.stdout
    } else {
        client_output.stderr
    };
    Err(CallError::Failed(
        name,
        message.lines().take(5).collect::<Vec<_>>().join("; "),
    ))
}

fn spawn_reader(stream: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        let _ = sender.send(bytes);
    });
    receiver
}

/// Kills a child that leads a process group, and all other processes of that group.
pub fn kill_group(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

/// Quotes any text for `sh`.
pub fn quote_argument(text: &OsStr) -> String {
    format!("'{}'", text.to_string_lossy().replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a client that hangs, with a child that holds its outputs open, end at the deadline?
    #[test]
    fn a_client_that_hangs_is_ended_at_its_deadline() {
        let start = Instant::now();
        let hang = call(
            Command::new("sh").args(["-c", "sleep 100 & sleep 100"]),
            Duration::from_millis(200),
        );
        assert!(matches!(hang, Err(CallError::Deadline(..))), "{hang:?}");
        let output = call(
            Command::new("sh").args(["-c", "echo said; sleep 100 & exit 3"]),
            Duration::from_secs(60),
        );
        assert_eq!(output.unwrap().code, Some(3));
        assert!(start.elapsed() < Duration::from_secs(50));
    }

    /// Are a client that fails and a client that is not installed distinguished?
    #[test]
    fn failing_and_uninstalled_clients_are_distinguished() {
        let failed = call_checked(
            Command::new("sh").args(["-c", "echo why >&2; exit 1"]),
            Duration::from_secs(60),
        );
        assert_eq!(failed.unwrap_err().to_string(), "sh: why");
        let missing = call_checked(
            &mut Command::new("cachemate-no-such-client"),
            Duration::from_secs(60),
        );
        assert!(matches!(missing, Err(CallError::Missing(_))), "{missing:?}");
        let long = call_checked(
            Command::new("sh").args(["-c", "yes | head -c 1000000"]),
            Duration::from_secs(60),
        );
        assert_eq!(long.unwrap().len(), 1_000_000, "more than a pipe holds");
        assert_eq!(quote_argument(OsStr::new("it's")), "'it'\\''s'");
    }
}
