//! Checks that pages, help and messages use current words.
//!
//! Problem: a thing with two names is hard to search for. Method: retired words are searched as whole words or
//! phrases, so that a word with another meaning is rejected only in its retired sense. The check reads pages, doc
//! comments (from which help is made), strings outside of tests, scripts, configurations and the dashboard.

use crate::rules::Complaint;
use crate::source_tree::{SourceFile, SourceTree, contains, has_word, word_position};

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
    ("the American spelling", "colour, colours, coloured, neighbour, neighbours, modelled, modelling"),
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

/// Returns the lines of a file that users may read.
fn readable_lines(file: &SourceFile) -> Vec<(&str, usize, String)> {
    // Fixtures of earlier formats keep their keys.
    let is_read = file.path != "CHANGELOG.md" && !file.path.starts_with("xtask/") && !file.path.contains("/earlier/");
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
}
