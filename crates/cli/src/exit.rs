//! How the command ends: 0 done, 1 the input or the host is at fault, 2 usage, 130 interrupted.

use std::io::{self, Write};
use std::process::ExitCode;

/// What was asked for cannot be asked for; like clap's own errors, exit code 2.
#[derive(Debug)]
pub struct UsageError(pub String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}
impl std::error::Error for UsageError {}

/// Stopped by Ctrl-C or a termination signal; says what was kept.
#[derive(Debug)]
pub struct InterruptedError(pub String);

impl std::fmt::Display for InterruptedError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "interrupted: {}", self.0)
    }
}
impl std::error::Error for InterruptedError {}

/// A program that was run ended so; it has said itself what there was to say.
#[derive(Debug)]
pub struct ProgramExitCode(pub i32);

impl std::fmt::Display for ProgramExitCode {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "the program ended with {}", self.0)
    }
}
impl std::error::Error for ProgramExitCode {}

/// The exit code of a command's result; says on standard error what went wrong.
pub fn code(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    if is_broken_pipe(&error) {
        // Whoever read our output has seen enough (`| head`): nothing is wrong.
        return ExitCode::SUCCESS;
    }
    if let Some(ProgramExitCode(code)) = error.downcast_ref() {
        return ExitCode::from(u8::try_from(*code).unwrap_or(1));
    }
    // Nowhere is left to complain to when standard error is gone too.
    let _ = writeln!(io::stderr(), "cachemate: {error:#}");
    match error {
        error if error.is::<UsageError>() => ExitCode::from(2),
        error if error.is::<InterruptedError>() => ExitCode::from(130),
        _ => ExitCode::FAILURE,
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref::<io::Error>().is_some_and(broken))
}

/// clap's answer to help, version and wrong usage, with broken pipes kept quiet.
pub fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}
