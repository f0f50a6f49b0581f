//! Reports of tests that cannot check a property on this host. Test files of other crates include this one by its path.

use std::fs::OpenOptions;
use std::io::Write;

/// Prints the unchecked property and the reason, and appends them to the file that `CACHEMATE_NOT_SHOWN` names (`make
/// test` counts its lines, because cargo hides the output of passing tests).
pub fn report_unchecked(subject: &str, reason: impl std::fmt::Display) {
    let line = format!("{subject} ({reason})")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    println!("not shown here: {line}");
    let Some(path) = std::env::var_os("CACHEMATE_NOT_SHOWN") else {
        return;
    };
    let file = OpenOptions::new().create(true).append(true).open(path);
    let outcome = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    outcome.expect("the file of what is not shown can be written");
}
