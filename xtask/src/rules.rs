//! The rules for all text files of the project, with their names.
//!
//! A rule that the project does not follow yet has `is_enforced: false`: `tidy --all` checks it, but the tests do
//! not.

use std::io;
use std::path::Path;

use crate::source_tree::{self, SourceTree};
use crate::{
    comment_heads, file_access, found_values, links, named_tests, raw_markup, retired_words, type_names, width,
};

/// A place that violates a rule.
pub struct Complaint {
    location: String,
    text: String,
}

impl Complaint {
    /// Builds a complaint about one line, numbered from one.
    pub fn new(file: &str, line: usize, text: String) -> Self {
        Complaint { location: format!("{file}:{line}"), text }
    }
}

/// A rule, with its check and whether it is enforced.
struct Rule {
    name: &'static str,
    is_enforced: bool,
    check: fn(&SourceTree) -> Vec<Complaint>,
}

const RULES: &[Rule] = &[
    Rule { name: "type-once", is_enforced: true, check: type_names::check_duplicates },
    Rule { name: "type-noun", is_enforced: true, check: type_names::check_nouns },
    Rule { name: "found-expected", is_enforced: true, check: found_values::check },
    Rule { name: "comment-noun", is_enforced: true, check: comment_heads::check },
    Rule { name: "retired-word", is_enforced: true, check: retired_words::check_words },
    Rule { name: "width", is_enforced: true, check: width::check },
    Rule { name: "link", is_enforced: true, check: links::check },
    Rule { name: "named-test", is_enforced: true, check: named_tests::check },
    Rule { name: "file-access", is_enforced: true, check: file_access::check },
    Rule { name: "raw-markup", is_enforced: true, check: raw_markup::check },
];

/// Returns complaints in the form `file:line: text (rule)`, about the enforced rules or, with `includes_pending`,
/// about all.
///
/// # Errors
/// A file cannot be read.
pub fn check(root: &Path, includes_pending: bool) -> io::Result<Vec<String>> {
    let tree = source_tree::read(root)?;
    let mut complaints = Vec::new();
    for rule in RULES.iter().filter(|rule| rule.is_enforced || includes_pending) {
        let violations = (rule.check)(&tree);
        complaints.extend(
            violations.iter().map(|complaint| format!("{}: {} ({})", complaint.location, complaint.text, rule.name)),
        );
    }
    Ok(complaints)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::source_tree::SourceFile;

    /// Returns the files for a test of a rule, by path.
    pub fn tree_of(files: &[(&str, &str)]) -> SourceTree {
        let paths = files.iter().map(|(path, _)| path.to_string()).collect();
        let file = |(path, text): &(&str, &str)| SourceFile::new(path.to_string(), text.to_string());
        SourceTree { files: files.iter().map(file).collect(), paths }
    }

    /// Complaints in the form `file:line: text`.
    pub fn complaint_lines(complaints: Vec<Complaint>) -> Vec<String> {
        complaints.iter().map(|complaint| format!("{}: {}", complaint.location, complaint.text)).collect()
    }

    /// Does this checkout follow the enforced rules?
    #[test]
    fn this_checkout_follows_the_enforced_rules() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let complaints = check(root, false).unwrap();
        assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
    }
}
