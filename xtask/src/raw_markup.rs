//! Checks that text reaches a page only in escaped form.
//!
//! `maud` escapes every text; only `PreEscaped` passes markup through. The crate `report` uses `PreEscaped` in two
//! files, for its own styles and drawings. All other pages can insert a `Drawing`, but cannot mistake foreign text
//! for markup.

use crate::source_tree::{Complaint, SourceTree};

const ALLOWED_FILES: [&str; 2] = [
    "crates/report/src/html_page.rs",
    "crates/report/src/figure/svg.rs",
];

/// Two files may contain raw markup, because they escape it.
pub fn check(tree: &SourceTree) -> Vec<Complaint> {
    let is_checked = |path: &str| !path.starts_with("xtask/") && !ALLOWED_FILES.contains(&path);
    let mut complaints = Vec::new();
    for file in tree
        .files
        .iter()
        .filter(|file| file.has_ending("rs") && is_checked(&file.path))
    {
        for (index, _) in file
            .rust_lines()
            .iter()
            .enumerate()
            .filter(|(_, line)| line.code.contains("PreEscaped"))
        {
            let text = "found PreEscaped, expected text or a figure's Drawing".to_string();
            complaints.push(Complaint::new(&file.path, index + 1, text));
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_tree::tests::{complaint_lines, tree_of};

    /// Is raw markup refused in a page, and accepted in text and in the two places?
    #[test]
    fn raw_markup_is_refused_outside_of_its_two_places() {
        let text = "fn a() { html! { (PreEscaped(name)) } }\n// PreEscaped\n";
        let files = [("crates/fleet/src/a.rs", text), (ALLOWED_FILES[0], text)];
        let expected =
            ["crates/fleet/src/a.rs:1: found PreEscaped, expected text or a figure's Drawing"];
        assert_eq!(complaint_lines(check(&tree_of(&files))), expected);
    }
}
