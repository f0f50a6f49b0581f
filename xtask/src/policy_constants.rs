//! Prints the constants of the policy `auto` and of the verifier as a table: name, value, and meaning with its
//! source.
//!
//! Problem: a constant that no page lists can be tuned unnoticed. Method: every constant outside of tests is read from
//! the sources, with the comment above it, which constants that follow at once share. Properties: the table is derived
//! from the code, so it cannot disagree with the code; a constant without a comment is an error.

use std::path::Path;

use crate::source_tree::{self, SourceFile};

/// Directories with the sources of the policy's decisions.
const POLICY_PATHS: [&str; 2] = ["crates/auto/src/auto/", "crates/auto/src/verifier/"];

/// One constant.
#[derive(Clone, PartialEq, Eq, Debug)]
struct PolicyConstant {
    name: String,
    value: String,
    meaning: String,
}

/// Prints the table.
///
/// # Errors
/// A source file cannot be read, or a constant has no comment.
pub fn print(root: &Path) -> Result<(), String> {
    let tree = source_tree::read(root).map_err(|error| format!("constants: {error}"))?;
    println!("| constant | value | meaning | file |\n|---|---|---|---|");
    let is_source = |file: &&SourceFile| {
        let is_test = file.path.contains("/tests/") || file.path.ends_with("tests.rs");
        POLICY_PATHS.iter().any(|dir| file.path.starts_with(dir))
            && file.has_ending("rs")
            && !is_test
    };

    for file in tree.files.iter().filter(is_source) {
        for PolicyConstant {
            name,
            value,
            meaning,
        } in read_constants(&file.text)
        {
            if meaning.is_empty() {
                return Err(format!(
                    "{}: {name}: found no comment, expected its meaning",
                    file.path
                ));
            }
            println!("| `{name}` | {value} | {meaning} | {} |", file.path);
        }
    }

    Ok(())
}

/// Constants outside of tests, in order.
fn read_constants(text: &str) -> Vec<PolicyConstant> {
    let mut constants: Vec<PolicyConstant> = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    let mut meaning = String::new();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_test_module = |pair: &[&str]| {
        pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{')
    };
    let end = lines
        .windows(2)
        .position(is_test_module)
        .unwrap_or(lines.len());

    for line in &lines[..end] {
        if let Some(doc_text) = line.strip_prefix("///") {
            comment.push(doc_text.trim());
            continue;
        }
        if !comment.is_empty() {
            meaning = std::mem::take(&mut comment).join(" ");
        }
        match numeric_constant(line, &meaning) {
            Some(constant) => constants.push(constant),
            None => meaning.clear(),
        }
    }

    constants
}

fn numeric_constant(line: &str, meaning: &str) -> Option<PolicyConstant> {
    let (_, constant) = line
        .split_once("const ")
        .filter(|(prefix, _)| prefix.is_empty() || prefix.starts_with("pub"))?;
    let (name, type_and_value) = constant.split_once(": ")?;
    let (type_name, value) = type_and_value.strip_suffix(';')?.split_once(" = ")?;
    let is_number = ["f64", "i32", "u32", "u64", "usize"].contains(&type_name);
    is_number.then(|| PolicyConstant {
        name: name.to_string(),
        value: value.replace('|', "\\|"),
        meaning: meaning.replace('|', "\\|"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are constants read with the comment above them, shared only by those that follow at once, and tests left out?
    #[test]
    fn constants_are_read_with_the_comment_above_them() {
        let text = "/// Longest wait\n/// in windows.\npub const WAIT: u64 = 2 * 3;\nconst PAUSE: f64 = 0.5;\n\
                    /// A name.\nconst NAME: &str = \"x\";\nfn find() {}\n#[cfg(test)]\nmod tests;\n\
                    const STEP: u32 = 4;\n#[cfg(test)]\nmod more_tests {\nconst HIDDEN: u32 = 1;\n";
        let policy_constant = |name: &str, value: &str, meaning: &str| PolicyConstant {
            name: name.to_string(),
            value: value.to_string(),
            meaning: meaning.to_string(),
        };
        let wait = "Longest wait in windows.";
        let expected = [
            ("WAIT", "2 * 3", wait),
            ("PAUSE", "0.5", wait),
            ("STEP", "4", ""),
        ];
        assert_eq!(
            read_constants(text),
            expected.map(|(name, value, meaning)| policy_constant(name, value, meaning))
        );
    }
}
