//! Checks that prose is no wider than STYLE.md allows. Tables, code blocks and lines of one word are exempt.

use crate::rules::Complaint;
use crate::source_tree::SourceTree;

/// Maximum number of columns of a line of prose, in pages and in comments.
const MAX_COLUMNS: usize = 126;

/// Returns complaints about lines of pages, and about whole-line comments, that are too wide.
pub fn check(tree: &SourceTree) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for file in &tree.files {
        let markers: &[&str] = match file.path.rsplit('.').next() {
            Some("rs" | "c" | "h" | "js") => &["///", "//!", "//", "*"],
            Some("sh" | "py" | "toml") => &["#"],
            Some("md") => &[""],
            _ => continue,
        };
        let mut is_in_code = false;
        for (line_number, line) in file.numbered_lines() {
            let prose = markers.iter().find_map(|marker| line.trim_start().strip_prefix(marker));
            let Some(prose) = prose.map(str::trim) else {
                is_in_code &= markers == [""];
                continue;
            };
            is_in_code ^= prose.starts_with("```");
            let is_code = is_in_code || (markers == [""] && line.starts_with("    ")) || prose.starts_with("[!");
            let columns = line.chars().count();
            // A list item of one word also has its bullet.
            let can_break = prose.split_whitespace().count() > 2;
            if columns > MAX_COLUMNS && can_break && !is_code && !prose.starts_with('|') {
                let text = format!("{columns} columns of prose, at most {MAX_COLUMNS}");
                complaints.push(Complaint::new(&file.path, line_number, text));
            }
        }
    }
    complaints
}

/// Wraps a paragraph to the maximum width; indents all lines except the first.
pub fn wrap(text: &str, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("never empty");
        if line.chars().count() + 1 + word.chars().count() > MAX_COLUMNS {
            lines.push(format!("{indent}{word}"));
        } else {
            let separator = if line.is_empty() { "" } else { " " };
            line.push_str(&format!("{separator}{word}"));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tests::{complaint_lines, tree_of};

    /// Are wide lines of pages and comments rejected, and tables, code and single words accepted?
    #[test]
    fn wide_lines_of_pages_and_comments_are_rejected() {
        let wide = "word ".repeat(26);
        let fits = &wide[..MAX_COLUMNS];
        let page = format!("{fits}\n{wide}\n| {wide} |\n```\n{wide}\n```\n- {}\n", "w".repeat(200));
        assert_eq!(complaint_lines(check(&tree_of(&[("a.md", &page)]))), ["a.md:2: 130 columns of prose, at most 126"]);
        let source = format!("/// {wide}\n// {wide}\n/// | {wide} |\nlet a = \"{wide}\";\n");
        assert_eq!(check(&tree_of(&[("a.rs", &source)])).len(), 2);
    }

    /// Are wrapped paragraphs accepted, and is no word lost?
    #[test]
    fn wrapped_paragraphs_are_accepted_and_lose_no_word() {
        let text = format!("- {}", "word ".repeat(60));
        let wrapped = wrap(&text, "  ");
        assert_eq!(check(&tree_of(&[("a.md", &wrapped)])).len(), 0);
        assert_eq!((wrapped.lines().count(), wrapped.split_whitespace().count()), (3, 61));
    }
}
