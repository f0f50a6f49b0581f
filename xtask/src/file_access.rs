//! Checks that all files are opened through `crates/files`.
//!
//! A path from an argument, a configuration or another user can refer to a FIFO, an endless device, or a link. The
//! crate `files` opens such paths safely, so other crates do not open paths themselves. Tests, benches and this crate
//! are exempt.

use crate::source_tree::{Complaint, SourceTree};

/// Calls that open, read or write a path, or test its existence.
const ACCESSES: &[&str] = &[
    "File::open",
    "File::create",
    "File::options",
    "OpenOptions::new",
    "fs::read(",
    "fs::read_to_string",
    "fs::read_dir",
    "fs::read_link",
    "fs::write(",
    ".exists()",
];
/// Calls that remove a path. A path that came from listing a directory must not be removed by them, unless the
/// directory has a marker of ours and the file is reached through its descriptor (`TrustedDir::remove`).
const REMOVALS: &[&str] = &["fs::remove_file", "fs::remove_dir(", "fs::remove_dir_all"];
/// Files that may remove paths themselves, each with the path that it removes. None of them lists a directory to find
/// it.
const REMOVING_FILES: &[(&str, &str)] = &[
    ("crates/linux/src/kernel.rs", "a control group of ours"),
    (
        "crates/agent/src/",
        "what it made, inside of another program",
    ),
    (
        "crates/linux/src/act/colors/agents.rs",
        "its own folder, named by a pid, in a directory of this user",
    ),
    (
        "crates/linux/src/safety/journal.rs",
        "the journal, by its name in the state directory",
    ),
    (
        "crates/linux/src/safety/actuation_lock.rs",
        "the lock's note, by its name",
    ),
    (
        "crates/daemon/src/colored_program.rs",
        "the folder that it made for a program",
    ),
    (
        "crates/daemon/src/programs.rs",
        "the pid file that it wrote",
    ),
    (
        "crates/daemon/src/socket.rs",
        "a socket at the path that it binds",
    ),
    (
        "crates/page/src/serve/page.rs",
        "a socket at the path that it binds",
    ),
    (
        "crates/daemon/src/metrics.rs",
        "the metrics file that it wrote",
    ),
    ("crates/cli/src/commands/run.rs", "the folder that it made"),
    (
        "crates/trace/src/record/",
        "a partial output and the library that it unpacked",
    ),
];
/// Crates that may open files: those that are not shipped, and `files` itself.
const UNCHECKED_CRATES: &[&str] = &["crates/files/"];
/// Files that may open paths themselves, at most [`MAX_ALLOWED`], each with its reason.
const ALLOWED_FILES: &[(&str, &str)] = &[
    (
        "crates/linux/src/kernel.rs",
        "the one place that reads /proc, sysfs and control groups",
    ),
    (
        "crates/agent/src/",
        "runs inside of other programs without the standard library's locks",
    ),
    (
        "crates/trace/src/record/fifo.rs",
        "the recorder's own FIFO, which it makes in a private directory",
    ),
    (
        "crates/linux/src/safety/journal.rs",
        "creates its own file exclusively and checks the owner of what it obeys",
    ),
    (
        "crates/linux/src/safety/actuation_lock.rs",
        "locks a file whose owner it checks, and publishes another exclusively",
    ),
    (
        "crates/fuzzing/src/targets.rs",
        "lists the corpus in the source tree",
    ),
    ("crates/cli/build.rs", "runs when the program is built"),
    ("crates/repro/build.rs", "runs when the program is built"),
];
const MAX_ALLOWED: usize = 10;

/// Complaints about accesses outside the allowed files.
pub fn check(tree: &SourceTree) -> Vec<Complaint> {
    assert!(
        ALLOWED_FILES.len() <= MAX_ALLOWED,
        "at most {MAX_ALLOWED} places open files themselves"
    );
    let mut complaints = Vec::new();
    for file in tree.files.iter().filter(|file| file.has_ending("rs")) {
        for (index, line) in file.rust_lines().iter().enumerate() {
            if line.code.trim() == "#[cfg(test)]" {
                break;
            }
            let is_called = |access: &str| {
                line.code
                    .match_indices(access)
                    .any(|(index, _)| !line.code[..index].ends_with(char::is_alphanumeric))
            };
            let access = ACCESSES.iter().find(|access| is_called(access));
            let access = access.filter(|_| is_checked(&file.path, ALLOWED_FILES));
            complaints.extend(access.map(|access| {
                let text = format!("found {access}, expected a call of crates/files");
                Complaint::new(&file.path, index + 1, text)
            }));

            let removal = REMOVALS.iter().find(|removal| is_called(removal));
            let removal = removal.filter(|_| is_checked(&file.path, REMOVING_FILES));
            complaints.extend(removal.map(|removal| {
                let text = format!("found {removal}, expected TrustedDir::remove");
                Complaint::new(&file.path, index + 1, text)
            }));
        }
    }
    complaints
}

fn is_checked(path: &str, allowed_files: &[(&str, &str)]) -> bool {
    let is_test =
        path.contains("/tests/") || path.ends_with("tests.rs") || path.ends_with("skip_test.rs");
    let is_test = is_test
        || path.contains("_tests/")
        || path.contains("/benches/")
        || path.contains("/examples/");
    let is_free = UNCHECKED_CRATES
        .iter()
        .chain(allowed_files.iter().map(|(place, _)| place))
        .any(|place| path.starts_with(place));
    path.starts_with("crates/") && !is_test && !is_free
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_tree::tests::{complaint_lines, tree_of};

    /// Is an access in a product's code rejected, and accepted in tests, text and the allowed places?
    #[test]
    fn only_one_crate_opens_files() {
        let text = "fn a() { std::fs::read(\"a\"); } // fs::write(x)\nconst A: &str = \"File::open\";\n\
                    #[cfg(test)]\nfn b() { File::open(\"a\"); }\n";
        let paths = [
            "crates/spec/src/a.rs",
            "crates/files/src/a.rs",
            "crates/spec/tests/a.rs",
            "xtask/src/a.rs",
        ];
        let files: Vec<(&str, &str)> = paths.iter().map(|path| (*path, text)).collect();
        let expected = ["crates/spec/src/a.rs:1: found fs::read(, expected a call of crates/files"];
        assert_eq!(complaint_lines(check(&tree_of(&files))), expected);
    }

    /// Is a removal by path rejected, wherever the file may open paths itself, and a removal through a descriptor not?
    #[test]
    fn removals_go_through_a_marked_directory() {
        let text = "fn a() { std::fs::remove_file(path); dir.remove(name); }\n";
        let paths = [
            "crates/repro/src/store/a.rs",
            "crates/cli/build.rs",
            "crates/linux/src/kernel.rs",
        ];
        let files: Vec<(&str, &str)> = paths.iter().map(|path| (*path, text)).collect();
        let expected = [
            "crates/repro/src/store/a.rs:1: found fs::remove_file, expected TrustedDir::remove",
            "crates/cli/build.rs:1: found fs::remove_file, expected TrustedDir::remove",
        ];
        assert_eq!(complaint_lines(check(&tree_of(&files))), expected);
    }
}
