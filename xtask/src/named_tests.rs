//! Does every test exist that the threat model names?
//!
//! The pages below promise a property in each row of a table whose last column is "test". The names in that column are
//! functions of this project.

use std::collections::BTreeSet;

use crate::source_tree::{Complaint, SourceTree};

const PAGES: &[&str] = &["docs/threat-model.md"];

/// Test names without a function, and rows without a test name.
pub fn check(tree: &SourceTree) -> Vec<Complaint> {
    let functions = declared_functions(tree);
    let mut complaints = Vec::new();

    for page in tree
        .files
        .iter()
        .filter(|file| PAGES.contains(&file.path.as_str()))
    {
        let mut in_table = false;
        for (line_number, line) in page.numbered_lines() {
            let last = line
                .trim()
                .strip_suffix('|')
                .and_then(|row| row.rsplit('|').next())
                .map(str::trim);
            let Some(last) = last else {
                in_table = false;
                continue;
            };
            if !in_table || last.starts_with("---") {
                in_table |= last == "test";
                continue;
            }

            let names: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
            let missing_names = names.iter().filter(|name| !functions.contains(**name));
            complaints.extend(missing_names.map(|name| {
                Complaint::new(
                    &page.path,
                    line_number,
                    format!("no test is called '{name}'"),
                )
            }));
            if names.is_empty() && !last.starts_with("none:") {
                let text = format!("found '{last}', expected a test's name or 'none: REASON'");
                complaints.push(Complaint::new(&page.path, line_number, text));
            }
        }
    }

    complaints
}

/// Functions of all Rust files.
fn declared_functions(tree: &SourceTree) -> BTreeSet<&str> {
    let rust = tree.files.iter().filter(|file| file.has_ending("rs"));
    let declared = rust.flat_map(|file| file.text.split("fn ").skip(1));
    declared.filter_map(|rest| rest.split('(').next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_tree::tests::{complaint_lines, tree_of};

    /// Are a name without a function and a row without a test rejected, and another table accepted?
    #[test]
    fn names_without_functions_and_rows_without_tests_are_rejected() {
        let page = "| a | test |\n|---|---|\n| x | `there` |\n| y | `there`, `not_there` |\n| z | |\n\
                    | w | none: needs a guest |\n\n| a | b |\n|---|---|\n| `c` | `d` |\n";
        let files = [("docs/threat-model.md", page), ("a.rs", "fn there() {}")];
        let expected = [
            "docs/threat-model.md:4: no test is called 'not_there'",
            "docs/threat-model.md:5: found '', expected a test's name or 'none: REASON'",
        ];
        assert_eq!(complaint_lines(check(&tree_of(&files))), expected);
    }
}
