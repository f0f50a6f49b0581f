//! Checks that pages, help and messages use current words and spellings.
//!
//! Problem: a thing with two names is hard to search for. Method: retired words are searched as whole words or
//! phrases, so that a word with another meaning is rejected only in its retired sense. Retired spellings of commands,
//! options and keys come from the table with which the command rejects them. The check reads pages, doc comments
//! (from which help is made), strings outside of tests, scripts, configurations and the dashboard.

use crate::retired_names::is_checked;
use crate::rules::Complaint;
use crate::source_tree::{SourceFile, SourceTree, contains, has_word, word_position};

/// Source file of the command's own table of retired spellings.
const SPELLINGS_FILE: &str = "crates/core/src/retired_spellings.rs";

/// Each current word, with the words and phrases that it replaces, separated by commas.
const WORDS: &[(&str, &str)] = &[
    ("crate", "pure room, pure rooms, rooms of, other rooms, all rooms, every room, room may, a room uses"),
    (
        "target",
        "the bar is, the bar was, the bar of, the bar allows, misses the bar, missed the bar, meets the bar, meets \
         its bar, bar is missed, bars missed, a bar that, without a bar, with a bar, against a bar, against the \
         bar, no bar",
    ),
    ("reference set", "kit, kits, kit's"),
    ("proxy", "stand-in, stand-ins"),
    ("bundled recordings", "the pack, in a pack"),
    ("scenario (lab) or problem (auto)", "scene, scenes"),
    ("CPU", "seat, seats"),
    ("inherited", "heir, heirs, estate, estates, inheritor, inheritors"),
    (
        "roll back (a decision) or restore (the host)",
        "take back, takes back, taken back, took back, put back, puts back, give back, gives back, given back, \
         gave back, put it back, puts it back, put them back, puts everything back, put everything back, go back \
         to, goes back to, went back to",
    ),
    ("slowdown", "degradation, degradations, degradation_percent, mean_degradation_percent"),
    ("the noun (no task, another process, all users)", "nobody, somebody, anybody, everybody, nobody's, somebody's"),
];

/// Complaints about retired words in pages, help and messages.
pub fn check_words(tree: &SourceTree) -> Vec<Complaint> {
    let mut complaints = Vec::new();
    for file in &tree.files {
        // Most files contain none of the words, so their lines need not be split.
        let whole_text = file.text.to_lowercase();
        let occurs = |old_word: &&str| contains(&whole_text, old_word);
        let occurring =
            WORDS.iter().map(|(word, retired)| (word, retired.split(", ").filter(occurs).collect::<Vec<_>>()));
        let occurring: Vec<_> = occurring.filter(|(_, retired)| !retired.is_empty()).collect();
        if occurring.is_empty() {
            continue;
        }
        for (file, line, text) in readable_lines(file) {
            let lower_text = strip_code(&text).to_lowercase();
            for (word, retired) in &occurring {
                if let Some(old_word) = retired.iter().find(|old_word| has_word(&lower_text, old_word)) {
                    complaints.push(Complaint::new(file, line, format!("'{old_word}': write {word}")));
                }
            }
        }
    }
    complaints
}

/// Removes code and file names, which are checked where they are defined.
fn strip_code(text: &str) -> String {
    let prose: String = text.split('`').step_by(2).collect::<Vec<_>>().join(" x ");
    let is_file = |word: &&str| {
        let inner = word.trim_matches(|c: char| !c.is_alphanumeric());
        inner.contains('/') || inner.contains('.')
    };
    prose.split(' ').filter(|word| !is_file(word)).collect::<Vec<_>>().join(" ")
}

/// Complaints about retired commands, options and keys in pages, help and messages.
pub fn check_spellings(tree: &SourceTree) -> Vec<Complaint> {
    let table = tree.files.iter().find(|file| file.path == SPELLINGS_FILE).map(|file| file.text.as_str());
    let spellings = parse_spellings(table.unwrap_or_default());
    let mut complaints = Vec::new();
    for file in &tree.files {
        let occurring: Vec<&Spelling> = spellings.iter().filter(|spelling| spelling.occurs_in(&file.text)).collect();
        if occurring.is_empty() {
            continue;
        }
        for (file, line, text) in readable_lines(file) {
            if let Some(spelling) = occurring.iter().find(|spelling| spelling.is_in(file, &text)) {
                complaints.push(Complaint::new(
                    file,
                    line,
                    format!("'{}' is now '{}'", spelling.old_spelling, spelling.new_spelling),
                ));
            }
        }
    }
    complaints
}

/// One row of the command's table.
struct Spelling {
    scope: String,
    old_spelling: String,
    new_spelling: String,
    /// Last part of a key, if that part has no other meaning.
    bare_key: Option<String>,
}

impl Spelling {
    /// Returns whether a text contains the words of the spelling, wherever they stand.
    fn occurs_in(&self, text: &str) -> bool {
        self.bare_key.as_deref().unwrap_or(&self.old_spelling).split(' ').all(|word| contains(text, word))
    }

    fn is_in(&self, file: &str, text: &str) -> bool {
        match self.scope.as_str() {
            "Command" => {
                let is_subcommand = |suffix: &str| {
                    let suffix = suffix.strip_prefix(self.old_spelling.as_str());
                    suffix.is_some_and(|suffix| {
                        !suffix.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.'))
                    })
                };
                text.split("cachemate ").skip(1).any(is_subcommand)
            }
            "Option" => {
                let Some((command, option)) = self.old_spelling.rsplit_once(' ') else { return false };
                let calls = text.split("cachemate ").skip(1).filter(|call| call.starts_with(command));
                calls.flat_map(|call| call.split([' ', '`', '=', '[', ']', ','])).any(|word| word == option)
            }
            _ => {
                has_word(text, &self.old_key())
                    || self.bare_key.as_ref().is_some_and(|bare_key| self.has_bare(bare_key, file, text))
            }
        }
    }

    /// Returns whether a line contains the last part of the key. Parameters of policies share names with keys of other
    /// files, so they count only in assignments and on the policies' pages.
    fn has_bare(&self, bare_key: &str, file: &str, text: &str) -> bool {
        let is_set = || text.contains(&format!("{bare_key} =")) || file.starts_with("docs/policies/");
        has_word(text, bare_key) && (self.scope != "PolicyParameter" || is_set())
    }

    /// Returns the text for which a line is searched. A key of one part is searched as a table: `[guard]`.
    fn old_key(&self) -> String {
        let is_plain = self.scope != "Environment" && !self.old_spelling.contains('.') && self.bare_key.is_none();
        if is_plain { format!("[{}]", self.old_spelling) } else { self.old_spelling.clone() }
    }
}

/// Parses rows of the form `retired(SpellingScope::X, "old", "new")`.
fn parse_spellings(table: &str) -> Vec<Spelling> {
    let rows = table.split("retired(SpellingScope::").skip(1);
    let rows_with_texts = rows.filter_map(|row| {
        let scope = row.split(',').next()?.to_string();
        let mut texts = row.split('"').skip(1).step_by(2);
        Some((scope, texts.next()?.to_string(), texts.next()?.to_string()))
    });
    let parsed: Vec<(String, String, String)> = rows_with_texts.collect();
    let last_part = |key: &str| key.rsplit('.').next().unwrap_or_default().to_string();
    let is_used = |key: &String| parsed.iter().any(|(_, _, new)| last_part(new) == *key);
    let bare_key = |scope: &str, old: &str| {
        let is_key = !matches!(scope, "Command" | "Option" | "Environment");
        Some(last_part(old)).filter(|key| is_key && key.contains('_') && !is_used(key))
    };
    parsed
        .iter()
        .map(|(scope, old, new)| Spelling {
            scope: scope.clone(),
            old_spelling: old.clone(),
            new_spelling: new.clone(),
            bare_key: bare_key(scope, old),
        })
        .collect()
}

/// Returns the lines of a file that users may read.
fn readable_lines(file: &SourceFile) -> Vec<(&str, usize, String)> {
    // Fixtures of earlier formats keep their keys, and the table of retired spellings must contain them.
    let is_exempt = file.path.starts_with("xtask/") || file.path.contains("/earlier/") || file.path == SPELLINGS_FILE;
    let is_read = is_checked(&file.path) && !is_exempt;
    match file.path.rsplit('.').next() {
        Some("rs") if is_read => rust_lines(file),
        Some("md" | "toml" | "sh" | "html" | "js" | "py") if is_read => {
            file.numbered_lines().map(|(line, text)| (file.path.as_str(), line, text.to_string())).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the doc comments, and strings outside of tests.
fn rust_lines(file: &SourceFile) -> Vec<(&str, usize, String)> {
    let mut is_test = crate::tidy::is_test_file(std::path::Path::new(&file.path));
    let mut lines = Vec::new();
    for (index, line) in file.rust_lines().iter().enumerate() {
        is_test |= word_position(&line.code, "cfg(test)").is_some();
        let comment = line.comment.as_deref().and_then(|comment| comment.strip_prefix(['/', '!']));
        lines.extend(comment.map(|comment| (file.path.as_str(), index + 1, comment.to_string())));
        // Keys of earlier files remain readable as aliases.
        let is_read = !is_test && !line.code.contains("alias = ");
        let strings = line.strings.lines().filter(|text| is_read && !text.is_empty());
        lines.extend(strings.map(|text| (file.path.as_str(), index + 1, text.to_string())));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tests::{complaint_lines, tree_of};

    /// Are retired words rejected in pages, doc comments and messages, and accepted in other meanings, code and tests'
    /// strings?
    #[test]
    fn retired_words_are_rejected_in_their_sense_only() {
        let source = "/// Frames of the kit.\nfn kit() {\n    let seats = \"put back: {n}\"; // somebody\n}\n#[cfg(test)]\n\
                      mod tests {\n    const A: &str = \"nobody\";\n}\n";
        let page = "The headroom, a toolkit, an error bar, `kit` and scene.pov.\nIt misses the bar.\n";
        let expected = [
            "a.md:2: 'misses the bar': write target",
            "b.rs:1: 'kit': write reference set",
            "b.rs:3: 'put back': write roll back (a decision) or restore (the host)",
        ];
        assert_eq!(complaint_lines(check_words(&tree_of(&[("a.md", page), ("b.rs", source)]))), expected);
    }

    /// Are spellings rejected that the command rejects, and accepted if it accepts them?
    #[test]
    fn exactly_the_spellings_the_command_rejects_are_rejected() {
        let table = "retired(SpellingScope::Command, \"page\", \"dashboard\"),\n\
                     retired(SpellingScope::Option, \"manage --page\", \"--dashboard\"),\n\
                     retired(SpellingScope::Configuration, \"guard\", \"rollback\"),\n\
                     retired(SpellingScope::PolicyParameter, \"auto.least_gain\", \"min_gain\"),\n";
        let page = "cachemate page-color; guard of a page; `cachemate top --page`\n`cachemate page RUNLOG`\n\
                    cachemate manage --page :9000\n[guard]\nleast_gain = 0.1\n";
        let expected = [
            "a.md:2: 'page' is now 'dashboard'",
            "a.md:3: 'manage --page' is now '--dashboard'",
            "a.md:4: 'guard' is now 'rollback'",
            "a.md:5: 'auto.least_gain' is now 'min_gain'",
        ];
        assert_eq!(complaint_lines(check_spellings(&tree_of(&[("a.md", page), (SPELLINGS_FILE, table)]))), expected);
    }
}
