//! Reads the text files of the project, and splits lines of Rust into code, strings and comments.
//!
//! Rules for the whole project get their files from here, so that each file is read once. The scanner of Rust
//! recognizes only strings, raw strings, characters and comments.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

const TEXT_EXTENSIONS: &[&str] = &[
    "rs", "md", "toml", "sh", "py", "c", "h", "js", "html", "json",
];
/// Directories that are not read: build products and version control.
const SKIPPED_DIRS: &[&str] = &["target", ".git", "build"];

/// One text file of the project.
pub struct SourceFile {
    /// Path relative to the root, as complaints show it.
    pub path: String,
    /// Content of the file.
    pub text: String,
    rust_lines: OnceCell<Vec<RustLine>>,
}

impl SourceFile {
    /// Builds a file with this content.
    pub fn new(path: String, text: String) -> Self {
        SourceFile {
            path,
            text,
            rust_lines: OnceCell::new(),
        }
    }

    /// Scanned once for all rules; empty unless the file is Rust.
    pub fn rust_lines(&self) -> &[RustLine] {
        self.rust_lines.get_or_init(|| scan(&self.text))
    }

    /// `ending` has no dot: `rs`.
    pub fn has_ending(&self, ending: &str) -> bool {
        Path::new(&self.path)
            .extension()
            .is_some_and(|extension| extension == ending)
    }

    /// Lines are numbered from one.
    pub fn numbered_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .enumerate()
            .map(|(index, line)| (index + 1, line))
    }
}

/// The project: its text files, and the paths of all files and directories.
#[derive(Default)]
pub struct SourceTree {
    /// Text files, sorted by path.
    pub files: Vec<SourceFile>,
    /// Paths relative to the root, which is the empty path.
    pub paths: BTreeSet<String>,
}

/// A place that violates a rule.
pub struct Complaint {
    pub location: String,
    pub text: String,
}

impl Complaint {
    /// Builds a complaint about one line, numbered from one.
    pub fn new(file: &str, line: usize, text: String) -> Self {
        Complaint {
            location: format!("{file}:{line}"),
            text,
        }
    }
}

/// Reads everything below the root, except for build products.
///
/// # Errors
/// A file or directory cannot be read.
pub fn read(root: &Path) -> io::Result<SourceTree> {
    let (mut tree, mut pending_dirs) = (SourceTree::default(), vec![root.to_path_buf()]);
    tree.paths.insert(String::new());

    while let Some(directory) = pending_dirs.pop() {
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();

            let shown_path = path
                .strip_prefix(root)
                .unwrap_or(&path)
                .display()
                .to_string();
            if path.is_dir() && !path.is_symlink() && !SKIPPED_DIRS.contains(&name.as_str()) {
                pending_dirs.push(path);
            } else if path.is_file()
                && path
                    .extension()
                    .is_some_and(|e| TEXT_EXTENSIONS.iter().any(|known| e == *known))
            {
                // Files that are not UTF-8 are skipped, because they have no words.
                let text = fs::read_to_string(&path).ok();
                tree.files
                    .extend(text.map(|text| SourceFile::new(shown_path.clone(), text)));
            }
            tree.paths.insert(shown_path);
        }
    }

    tree.files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(tree)
}

/// The parts of one line of Rust.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct RustLine {
    /// Code without the contents of strings.
    pub code: String,
    /// The contents of its strings, each followed by a line break.
    pub strings: String,
    /// The text after `//`, including a third slash or exclamation mark.
    pub comment: Option<String>,
}

#[derive(Clone, Copy, PartialEq)]
enum ScanState {
    Code,
    /// Inside a string; for a raw string, with its number of hashes.
    Text(Option<usize>),
    BlockComment,
}

/// Splits Rust into the parts of its lines; strings may span several lines.
fn scan(text: &str) -> Vec<RustLine> {
    let mut state = ScanState::Code;
    text.lines()
        .map(|line| scan_line(line, &mut state))
        .collect()
}

fn scan_line(line: &str, state: &mut ScanState) -> RustLine {
    let mut parts = RustLine::default();
    let mut remaining = line;

    while let Some(c) = remaining.chars().next() {
        let length = c.len_utf8();

        match *state {
            ScanState::BlockComment => match remaining.strip_prefix("*/") {
                Some(after) => (remaining, *state) = (after, ScanState::Code),
                None => remaining = &remaining[length..],
            },
            ScanState::Text(hashes) => {
                let end = format!("\"{}", "#".repeat(hashes.unwrap_or(0)));
                if let Some(after) = remaining.strip_prefix(end.as_str()) {
                    parts.strings.push('\n');
                    parts.code.push('"');
                    (remaining, *state) = (after, ScanState::Code);
                } else if hashes.is_none() && c == '\\' {
                    let escaped_length = remaining[1..].chars().next().map_or(0, char::len_utf8);
                    parts.strings.push_str(if remaining[1..].starts_with('n') {
                        "\n"
                    } else {
                        &remaining[..1 + escaped_length]
                    });
                    remaining = &remaining[1 + escaped_length..];
                } else {
                    parts.strings.push(c);
                    remaining = &remaining[length..];
                }
            }
            ScanState::Code => {
                if let Some(comment) = remaining.strip_prefix("//") {
                    parts.comment = Some(comment.to_string());
                    return parts;
                }

                if let Some(after) = remaining.strip_prefix("/*") {
                    (remaining, *state) = (after, ScanState::BlockComment);
                } else if let Some((hashes, after)) = raw_string_start(remaining, &parts.code) {
                    parts.code.push('"');
                    (remaining, *state) = (after, ScanState::Text(Some(hashes)));
                } else if c == '"' {
                    parts.code.push('"');
                    (remaining, *state) = (&remaining[1..], ScanState::Text(None));
                } else {
                    let literal_length = character_length(remaining).unwrap_or(length);
                    parts.code.push_str(if literal_length == length {
                        &remaining[..length]
                    } else {
                        "' '"
                    });
                    remaining = &remaining[literal_length..];
                }
            }
        }
    }

    if *state != ScanState::Code && !parts.strings.is_empty() && !parts.strings.ends_with('\\') {
        parts.strings.push('\n');
    }
    parts
}

/// Number of hashes of a raw string, and the text after `r"`, `r#"` or `br"`.
fn raw_string_start<'a>(remaining: &'a str, preceding_code: &str) -> Option<(usize, &'a str)> {
    if preceding_code.ends_with(|c: char| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let remaining = remaining
        .strip_prefix("br")
        .or_else(|| remaining.strip_prefix('r'))?;
    let hashes = remaining.len() - remaining.trim_start_matches('#').len();
    Some((hashes, remaining[hashes..].strip_prefix('"')?))
}

/// `None` for lifetimes and other code.
fn character_length(remaining: &str) -> Option<usize> {
    let inner = remaining.strip_prefix('\'')?;
    let end = if inner.starts_with('\\') {
        2 + inner[2..].find('\'')?
    } else {
        inner.chars().next()?.len_utf8()
    };
    inner[end..].starts_with('\'').then_some(end + 2)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Files for a test of a rule.
    pub fn tree_of(files: &[(&str, &str)]) -> SourceTree {
        let paths = files.iter().map(|(path, _)| path.to_string()).collect();
        let file =
            |(path, text): &(&str, &str)| SourceFile::new(path.to_string(), text.to_string());
        SourceTree {
            files: files.iter().map(file).collect(),
            paths,
        }
    }

    /// Complaints in the form `file:line: text`.
    pub fn complaint_lines(complaints: Vec<Complaint>) -> Vec<String> {
        complaints
            .iter()
            .map(|complaint| format!("{}: {}", complaint.location, complaint.text))
            .collect()
    }

    /// Are strings, raw strings, characters, lifetimes and comments distinguished, also over several lines?
    #[test]
    fn strings_characters_lifetimes_and_comments_are_distinguished() {
        let text = "let a: &'static str = \"x // \\\" y\"; // note\nf('\"', r#\"raw \" \"#);\nlet b = \"one \\\n  two\"; g()";
        let lines = scan(text);
        assert_eq!(lines[0].code, "let a: &'static str = \"\"; ");
        assert_eq!(
            (lines[0].strings.as_str(), lines[0].comment.as_deref()),
            ("x // \\\" y\n", Some(" note"))
        );
        assert_eq!(
            (lines[1].code.as_str(), lines[1].strings.as_str()),
            ("f(' ', \"\");", "raw \" \n")
        );
        assert_eq!(
            (lines[2].code.as_str(), lines[2].strings.as_str()),
            ("let b = \"", "one \\")
        );
        assert_eq!(
            (lines[3].code.as_str(), lines[3].strings.as_str()),
            ("\"; g()", "  two\n")
        );
    }
}
