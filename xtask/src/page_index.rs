//! Finds pages that no index lists, because a page without a link to it is read by nobody who did not write it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use crate::links;

/// Pages that list other pages.
const INDEXES: [&str; 2] = ["docs/index.md", "docs/results/index.md"];
/// Pages that no index needs to list.
const UNLISTED_PAGES: [&str; 3] = ["README.md", "CHANGELOG.md", "docs/index.md"];

/// Adds a complaint for each page that no index lists, if there is an index. `pages` are paths below the root.
///
/// # Errors
/// An index exists and cannot be read.
pub fn check(root: &Path, pages: &[String], complaints: &mut Vec<String>) -> io::Result<()> {
    if !root.join(INDEXES[0]).is_file() {
        return Ok(());
    }
    let mut listed_pages = BTreeSet::new();
    for index in INDEXES.iter().filter(|index| root.join(index).is_file()) {
        let text = fs::read_to_string(root.join(index))?;
        let dir = Path::new(index).parent().unwrap_or(Path::new(""));
        let targets = text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split([')', '#']).next());
        listed_pages.extend(targets.map(|target| links::normalize(&dir.join(target))));
    }
    let unlisted_pages = pages
        .iter()
        .filter(|page| !listed_pages.contains(*page) && !UNLISTED_PAGES.contains(&page.as_str()));
    complaints.extend(unlisted_pages.map(|page| format!("{page}: not in {}", INDEXES[0])));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a page that no index lists reported, whichever way the index writes its path?
    #[test]
    fn a_page_that_no_index_lists_is_reported() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("docs")).unwrap();
        fs::write(
            root.path().join("docs/index.md"),
            "[a](a.md#b) [p](../recordings/README.md)",
        )
        .unwrap();
        let pages = [
            "README.md",
            "docs/a.md",
            "docs/b.md",
            "recordings/README.md",
        ]
        .map(str::to_string);
        let mut complaints = Vec::new();
        check(root.path(), &pages, &mut complaints).unwrap();
        assert_eq!(complaints, ["docs/b.md: not in docs/index.md"]);
    }
}
