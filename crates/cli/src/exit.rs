//! Exit codes: 0 success, 1 invalid input or host, 2 usage, 130 interrupted; and that of a program that was run.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use cachemate_core::{nearest_name, suggestion};
use cachemate_report::text::EscapedText;
use cachemate_trace::TraceError;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The error for an invalid command line; exit code 2, as for clap's own errors.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Exit code of a command that Ctrl-C or a termination signal stopped.
pub const INTERRUPTED_CODE: i32 = 130;

/// The error for a command that Ctrl-C or a termination signal stopped; the text names the results that were kept.
#[derive(Debug, thiserror::Error)]
#[error("interrupted: {0}")]
pub struct InterruptedError(pub String);

/// Exit code of a program that cachemate ran and that has already printed its own errors.
#[derive(Debug, thiserror::Error)]
#[error("the program ended with {0}")]
pub struct ProgramExitCode(pub i32);

/// Converts a command's result to an exit code, and prints its error to standard error.
pub fn exit_code_of(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    if is_broken_pipe(&error) {
        // A closed pipe is not an error: the reader of the output (`| head`) needs no more.
        return ExitCode::SUCCESS;
    }
    if let Some(ProgramExitCode(code)) = error.downcast_ref() {
        return ExitCode::from(u8::try_from(*code).unwrap_or(1));
    }
    let is_existing_output = matches!(
        error.downcast_ref::<TraceError>(),
        Some(TraceError::Exists { .. })
    );
    let remedy = if is_existing_output { " (--force)" } else { "" };
    // If standard error is closed as well, the error cannot be reported.
    let _ = writeln!(
        io::stderr(),
        "cachemate: {}{remedy}",
        EscapedText::for_output(&describe(&error))
    );
    match error {
        error if error.is::<UsageError>() => ExitCode::from(2),
        error if error.is::<InterruptedError>() => ExitCode::from(INTERRUPTED_CODE as u8),
        _ => ExitCode::FAILURE,
    }
}

/// Describes an error and its causes. A cause that ends the error above it is quoted there, and left out. The location,
/// which comes first, is named once.
fn describe(error: &anyhow::Error) -> String {
    let mut message = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if message.is_empty() {
            message = cause;
        } else if !message.ends_with(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    let repetition = locations(&message).find_map(|location| {
        let repetition = format!(": {location}: ");
        message.contains(&repetition).then_some(repetition)
    });
    if let Some(repetition) = repetition {
        message = message.replace(&repetition, ": ");
    }
    let hint = nearest_file_hint(&message).unwrap_or_default();
    in_plain_words(&message) + &hint
}

/// What may be the path at the beginning of a message, the longest first, because a path may contain a colon.
fn locations(text: &str) -> impl Iterator<Item = &str> {
    text.rmatch_indices(": ").map(|(end, _)| &text[..end])
}

/// The system's errors in a text: the place of each, its text as the standard library writes it, and its number. A text
/// in which the number does not belong to the words before it is none.
fn os_errors(text: &str) -> impl Iterator<Item = (usize, String, i32)> {
    const MARK: &str = " (os error ";
    text.match_indices(MARK).filter_map(move |(place, _)| {
        let (digits, _) = text[place + MARK.len()..].split_once(')')?;
        let code: i32 = digits.parse().ok()?;
        let message = io::Error::from_raw_os_error(code).to_string();
        let end = place + MARK.len() + digits.len() + 1;
        let start = end.checked_sub(message.len())?;
        (text.get(start..end)? == message).then_some((start, message, code))
    })
}

/// Names the file that was probably meant, if the message is about a missing one and its directory has one of a similar
/// name.
fn nearest_file_hint(text: &str) -> Option<String> {
    if !os_errors(text).any(|(_, _, code)| is_missing(code)) {
        return None;
    }
    locations(text).map(Path::new).find_map(|path| {
        let name = path.file_name()?.to_str()?;
        if !matches!(cachemate_files::metadata_if_exists(path), Ok(None)) {
            return None;
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        let files = cachemate_files::list_dir(dir.unwrap_or(Path::new("."))).ok()?;
        let names = files.iter().filter_map(|file| file.file_name()?.to_str());
        let nearest = path.with_file_name(nearest_name(name, names)?);
        Some(suggestion(Some(&nearest.display().to_string())))
    })
}

/// Writes the system's errors in a text without their numbers, and a missing file in the words of all other messages.
fn in_plain_words(text: &str) -> String {
    let mut plain_text = String::new();
    let mut next = 0;
    for (start, message, code) in os_errors(text) {
        plain_text.push_str(&text[next..start]);
        next = start + message.len();
        if is_missing(code) {
            let is_value = plain_text.ends_with("found ");
            plain_text.push_str(if is_value {
                "no such file"
            } else {
                "found no such file"
            });
        } else {
            plain_text.push_str(message.split(" (os error").next().unwrap_or_default());
        }
    }
    plain_text + &text[next..]
}

fn is_missing(code: i32) -> bool {
    io::Error::from_raw_os_error(code).kind() == io::ErrorKind::NotFound
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_broken = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    error
        .chain()
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(is_broken))
}

/// Prints clap's help, version or usage error, and ignores a broken pipe.
pub fn print_usage(mut error: clap::Error) -> ExitCode {
    correct_tips(&mut error);
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Replaces clap's tips about `--`. A program to run belongs behind it, which clap does not say; a mistyped option
/// never does, although clap suggests it.
fn correct_tips(error: &mut clap::Error) {
    let text_of = |value: Option<&ContextValue>| value.map_or(String::new(), ToString::to_string);
    let argument = text_of(error.get(ContextKind::InvalidArg));
    let usage = text_of(error.get(ContextKind::Usage));
    if error.kind() == ErrorKind::UnknownArgument && !argument.starts_with('-') {
        if usage.contains("-- <") {
            let tip = format!("put '--' before the program: -- {argument} ...");
            error.insert(
                ContextKind::Suggested,
                ContextValue::StyledStrs(vec![tip.into()]),
            );
        }
    } else if text_of(error.get(ContextKind::Suggested)).contains("as a value") {
        error.remove(ContextKind::Suggested);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context as _;

    /// Does a message name its place and its cause once?
    #[test]
    fn a_message_names_its_place_and_its_cause_once() {
        let cause = || anyhow::Error::msg("/tmp: found a directory, expected a plain file");
        let wrapped = Err::<(), _>(cause()).context("/tmp").unwrap_err();
        assert_eq!(
            describe(&wrapped),
            "/tmp: found a directory, expected a plain file"
        );
        let missing = anyhow::Error::new(io::Error::from_raw_os_error(2)).context("x.toml");
        assert_eq!(describe(&missing), "x.toml: found no such file");
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("small.cmt"), "").unwrap();
        let (mistyped, meant) = (dir.path().join("smal.cmt"), dir.path().join("small.cmt"));
        let missing = anyhow::Error::new(io::Error::from_raw_os_error(2))
            .context(mistyped.display().to_string());
        assert_eq!(
            describe(&missing),
            format!(
                "{}: found no such file (did you mean '{}'?)",
                mistyped.display(),
                meant.display()
            )
        );
        let quoted = Err::<(), _>(cause())
            .context(format!("/tmp: cannot open: {}", cause()))
            .unwrap_err();
        assert_eq!(
            describe(&quoted),
            "/tmp: cannot open: found a directory, expected a plain file"
        );
    }

    /// Does a message name a path with a colon as a whole, and keep words that only look like a number of the system?
    #[test]
    fn colons_in_paths_and_numbers_in_texts_stay() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("run: 2.cmt"), "").unwrap();
        let path = dir.path().join("run: 3.cmt").display().to_string();
        let missing = std::fs::File::open(&path).unwrap_err();
        let error = anyhow::Error::msg(format!("{path}: {missing}")).context(path.clone());
        let meant = dir.path().join("run: 2.cmt");
        assert_eq!(
            describe(&error),
            format!(
                "{path}: found no such file (did you mean '{}'?)",
                meant.display()
            )
        );
        let quoted = anyhow::Error::msg("note.txt: found 'see (os error 7)', expected a number");
        assert_eq!(
            describe(&quoted),
            "note.txt: found 'see (os error 7)', expected a number"
        );
        let denied = io::Error::from_raw_os_error(13);
        let found = anyhow::Error::msg(format!("a.toml: found {denied}, expected a file"));
        assert_eq!(
            describe(&found),
            "a.toml: found Permission denied, expected a file"
        );
    }
}
