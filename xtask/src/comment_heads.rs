//! Checks that doc comments begin with a noun.
//!
//! An item whose comment must begin with "What" or "Who" has a name without a noun. The questions above tests are
//! exempt.

use crate::rules::Complaint;
use crate::source_tree::{RustLine, SourceTree};

const HEADS: &[&str] = &["What", "Who", "Whoever", "Whatever", "Of"];

/// Complaints about doc comments that begin with one of [`HEADS`] and are not questions.
pub fn check(tree: &SourceTree) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    let end = RustLine::default();
    for file in tree.files.iter().filter(|file| file.has_ending("rs")) {
        let mut comment: Option<(usize, String)> = None;
        for (index, line) in file.rust_lines().iter().chain([&end]).enumerate() {
            let text = line.comment.as_deref().filter(|_| line.code.trim().is_empty());
            let text = text.and_then(|text| text.strip_prefix(['/', '!'])).map(|text| format!("{} ", text.trim()));
            match (&mut comment, text) {
                (Some((_, joined_text)), Some(text)) => joined_text.push_str(&text),
                (None, Some(text)) => comment = Some((index + 1, text)),
                (_, None) => {
                    let head = comment.take().and_then(|(line, comment_text)| Some((line, bare_head(&comment_text)?)));
                    complaints.extend(head.map(|(line, head)| {
                        Complaint::new(
                            &file.path,
                            line,
                            format!("a doc comment that begins with '{head}' lacks its noun"),
                        )
                    }));
                }
            }
        }
    }
    complaints
}

fn bare_head(comment: &str) -> Option<&'static str> {
    let first_word = comment.split([' ', '\'']).next()?;
    let sentence_end = comment.find(['.', '?', ':']).map(|index| &comment[index..=index]);
    HEADS.iter().find(|head| **head == first_word && sentence_end != Some("?")).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tests::{complaint_lines, tree_of};

    /// Is a comment without a noun rejected at its first line, and a test's question accepted?
    #[test]
    fn a_comment_without_a_noun_is_rejected() {
        let text = "/// What a look found. Is it?\nstruct A;\n/// What happens to an empty file,\n/// and why?\nfn t() {}\n\
                    /// Often. What then.\nstruct B {\n    /// Of the task.\n    a: u32, // What is it\n}\n";
        let expected = [
            "x.rs:1: a doc comment that begins with 'What' lacks its noun",
            "x.rs:8: a doc comment that begins with 'Of' lacks its noun",
        ];
        assert_eq!(complaint_lines(check(&tree_of(&[("x.rs", text)]))), expected);
    }
}
