//! Checks that all files are opened through `crates/files`.
//!
//! A path from an argument, a configuration or another user can refer to a FIFO, an endless device, or a link. The
//! crate `files` opens such paths safely, so other crates do not open paths themselves. Tests, benches and this crate
//! are exempt.

use crate::rules::Complaint;
use crate::source_tree::SourceTree;

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
/// Crates that may open files: those that are not shipped, and `files` itself.
const UNCHECKED_CRATES: &[&str] = &["crates/files/", "crates/bench/"];
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
    for file in tree
        .files
        .iter()
        .filter(|file| file.has_ending("rs") && is_checked(&file.path))
    {
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
            complaints.extend(access.map(|access| {
                let text = format!("found {access}, expected a call of crates/files");
                Complaint::new(&file.path, index + 1, text)
            }));
        }
    }
    complaints
}

fn is_checked(path: &str) -> bool {
    let is_test =
        path.contains("/tests/") || path.ends_with("tests.rs") || path.ends_with("skip_test.rs");
    let is_test = is_test
        || path.contains("_tests/")
        || path.contains("/benches/")
        || path.contains("/examples/");
    let is_free = UNCHECKED_CRATES
        .iter()
        .chain(ALLOWED_FILES.iter().map(|(place, _)| place))
        .any(|place| path.starts_with(place));
    path.starts_with("crates/") && !is_test && !is_free
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tests::{complaint_lines, tree_of};

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
}
