//! The rules for all text files of the project, with their names.

use std::io;
use std::path::Path;

use crate::source_tree::{self, Complaint, SourceTree};
use crate::{claims, file_access, links, named_tests};

/// A rule with its check.
struct Rule {
    name: &'static str,
    check: fn(&SourceTree) -> Vec<Complaint>,
}

const RULES: &[Rule] = &[
    Rule {
        name: "link",
        check: links::check,
    },
    Rule {
        name: "named-test",
        check: named_tests::check,
    },
    Rule {
        name: "claim",
        check: claims::check,
    },
    Rule {
        name: "file-access",
        check: file_access::check,
    },
];

/// Complaints have the form `file:line: text (rule)`.
///
/// # Errors
/// A file cannot be read.
pub fn check(root: &Path) -> io::Result<Vec<String>> {
    let tree = source_tree::read(root)?;
    let mut complaints = Vec::new();
    for rule in RULES {
        for Complaint { location, text } in (rule.check)(&tree) {
            complaints.push(format!("{location}: {text} ({})", rule.name));
        }
    }
    Ok(complaints)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does this checkout follow the rules?
    #[test]
    fn this_checkout_follows_the_rules() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let complaints = check(root).unwrap();
        assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
    }
}
