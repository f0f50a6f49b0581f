//! Checks that links on the project's pages lead to existing files and headings.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::source_tree::{Complaint, SourceFile, SourceTree};

/// Complaints about relative links whose file or heading does not exist.
pub fn check(tree: &SourceTree) -> Vec<Complaint> {
    let pages: Vec<&SourceFile> = tree
        .files
        .iter()
        .filter(|file| file.has_ending("md"))
        .collect();
    let anchors: BTreeMap<&str, BTreeSet<String>> = pages
        .iter()
        .map(|page| (page.path.as_str(), heading_anchors(&page.text)))
        .collect();

    let mut complaints = Vec::new();
    for page in pages {
        for (line, target) in link_targets(&page.text) {
            let (file, anchor) = target.split_once('#').unwrap_or((target.as_str(), ""));
            let dir = Path::new(&page.path).parent().unwrap_or(Path::new(""));
            let path = if file.is_empty() {
                page.path.clone()
            } else {
                normalize(&dir.join(file))
            };
            let has_anchor = anchors
                .get(path.as_str())
                .is_none_or(|known| anchor.is_empty() || known.contains(anchor));

            let exists = tree.paths.contains(&path);
            if !exists || !has_anchor {
                let missing_kind = if exists { "heading" } else { "file" };
                complaints.push(Complaint::new(
                    &page.path,
                    line,
                    format!("link to '{target}': no such {missing_kind}"),
                ));
            }
        }
    }
    complaints
}

/// Lines without code blocks and inline code.
fn prose_lines(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut is_in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_in_code ^= is_fence;
        let pieces = line.split('`').enumerate();
        let plain_text: String = pieces
            .filter_map(|(index, piece)| (index % 2 == 0).then_some(piece))
            .collect();
        (!is_in_code && !is_fence).then_some((index + 1, plain_text))
    })
}

/// Targets of links within the project, each with its line: `[text](target)` and `[text]: target`.
fn link_targets(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    for (line, prose) in prose_lines(text) {
        let inline_targets = prose
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split([')', ' ']).next());
        let reference_target = prose
            .strip_prefix('[')
            .and_then(|rest| rest.split_once("]: "))
            .map(|(_, target)| target.trim());
        let is_local = |target: &&str| {
            !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:")
        };
        links.extend(
            inline_targets
                .chain(reference_target)
                .filter(is_local)
                .map(|target| (line, target.to_string())),
        );
    }
    links
}

/// Anchors of headings, and anchors set in HTML.
fn heading_anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut is_in_code = false;

    for line in text.lines() {
        is_in_code ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if !is_in_code && heading.len() < line.len() && heading.starts_with(' ') {
            let (name, mut count) = (heading_anchor(heading), 0);
            let mut candidate = name.clone();
            while !anchors.insert(candidate) {
                count += 1;
                candidate = format!("{name}-{count}");
            }
        }
        let html_anchors = ["id=\"", "name=\""]
            .into_iter()
            .flat_map(|attribute| line.split(attribute).skip(1));
        anchors.extend(
            html_anchors
                .filter_map(|rest| rest.split('"').next())
                .map(str::to_string),
        );
    }
    anchors
}

/// The anchor that GitHub makes: lower case, hyphens for spaces, no punctuation, and no targets of
/// links.
fn heading_anchor(heading: &str) -> String {
    let mut text = String::new();
    for (index, piece) in heading.trim().split("](").enumerate() {
        text.push_str(if index == 0 {
            piece
        } else {
            piece.split_once(')').map_or("", |(_, rest)| rest)
        });
    }
    let retained_chars = text
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    retained_chars
        .flat_map(char::to_lowercase)
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// Normalizes a path: `docs/../pack/README.md` becomes `pack/README.md`.
pub fn normalize(path: &Path) -> String {
    let mut parts: Vec<String> = Vec::new();
    for part in path.iter().map(|part| part.to_string_lossy().into_owned()) {
        match part.as_str() {
            ".." => _ = parts.pop(),
            "." => {}
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_tree::tests::{complaint_lines, tree_of};

    /// Are missing files and headings rejected with their line, and links to the web, to code and to headings accepted?
    #[test]
    fn links_to_missing_files_and_headings_are_rejected() {
        let page = "# A `b` page: one\n[x](#a-b-page-one) [y](https://example.org) `[z](none.md)`\n[q](b.md#two)\n[r](b.md#three)\n\
                    [s](../none.md)\n";
        let files = [("docs/a.md", page), ("docs/b.md", "## Two\n")];
        let expected = [
            "docs/a.md:4: link to 'b.md#three': no such heading",
            "docs/a.md:5: link to '../none.md': no such file",
        ];
        assert_eq!(complaint_lines(check(&tree_of(&files))), expected);
    }
}
