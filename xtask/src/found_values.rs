//! Checks that a local named `found` occurs only together with an expected value.
//!
//! The name `found` does not describe a value, so it is reserved for errors that state what was found and what was
//! expected.

use crate::rules::Complaint;
use crate::source_tree::{RustLine, SourceTree, has_word};

/// Complaints about locals named `found` in functions that never mention `expected`.
pub fn check(tree: &SourceTree) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for file in tree.files.iter().filter(|file| file.has_ending("rs")) {
        let lines = file.rust_lines();
        for (index, _) in lines.iter().enumerate().filter(|(_, line)| binds_found(&line.code)) {
            let function = function_around(lines, index);
            if !function.iter().any(|line| line.code.contains("expected") || line.strings.contains("expected")) {
                let text = "`let found` without an `expected` in its function: name the value for its content";
                complaints.push(Complaint::new(&file.path, index + 1, text.to_string()));
            }
        }
    }
    complaints
}

fn binds_found(code: &str) -> bool {
    ["let found", "let mut found"].iter().any(|binding| has_word(code, binding))
}

/// Returns the lines of the innermost function around a line, up to the brace at the function's depth, as rustfmt
/// places it.
fn function_around(lines: &[RustLine], index: usize) -> &[RustLine] {
    let indent_of = |line: &RustLine| line.code.len() - line.code.trim_start().len();
    let begins_function = |line: &&RustLine, within: usize| has_word(&line.code, "fn") && indent_of(line) < within;
    let own_indent = indent_of(&lines[index]);
    let Some(start) = (0..=index).rev().find(|&above| {
        above == index && has_word(&lines[index].code, "fn") || begins_function(&&lines[above], own_indent)
    }) else {
        return &lines[index..=index];
    };
    let depth = indent_of(&lines[start]);
    let is_end = |line: &RustLine| indent_of(line) == depth && line.code.trim_start().starts_with('}');
    let end = (index..lines.len()).find(|&below| is_end(&lines[below])).unwrap_or(index);
    &lines[start..=end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tests::{complaint_lines, tree_of};

    /// Is `found` rejected without its pair, and accepted in an error's message?
    #[test]
    fn found_without_expected_is_rejected() {
        let text = "fn a() {\n    let mut found = f();\n    g(found)\n}\nfn b() {\n    let found = f();\n    \
                    format!(\"found {found}, expected 3\")\n}\nfn c() {\n    let found_path = 3;\n}\n";
        let expected = ["x.rs:2: `let found` without an `expected` in its function: name the value for its content"];
        assert_eq!(complaint_lines(check(&tree_of(&[("x.rs", text)]))), expected);
    }
}
