//! Checks that types are noun phrases, and that each is declared once in the workspace.
//!
//! Problem: a reader who sees `Outcome` or `Found` in a signature cannot tell which of several types it is, nor which
//! value it represents. Method: declarations in all Rust files, also of the other workspaces, are read as text.

use std::collections::BTreeMap;

use crate::source_tree::{Complaint, RustLine, SourceTree};

/// Names that every crate may declare, because they mean the same everywhere.
const REPEATABLE_NAMES: &[&str] = &["Error", "Options", "Config", "Parameters", "Iter", "Args"];
/// Other names that may be declared twice, each with the reason; at most ten.
const ALLOWED_TWICE: &[(&str, &str)] = &[
    (
        "Plan",
        "a class of the Python package is named for the type that it wraps",
    ),
    (
        "Profile",
        "a class of the Python package is named for the type that it wraps",
    ),
];
/// Last words of type names that are not nouns: participles, pronouns, adverbs, prepositions, adjectives and verbs.
const NON_NOUNS: &str = "\
    Absent Acting Advised After Against Aliased Alike Alone Always Apart Applied Around Ask Asked Assigned Astray \
    Attached Attempted Back Before Behaved Beside Best By Called Careless Chosen Colored Compared Compiled Composed \
    Confined Converted Counted Derived Did Divided Done Ended Evicted Expanded Expected Failed Faulty Finished Found \
    Framed Ganged Gathered Given Grouped Happened Heard Held Here Injected Inside Joined Judged Kept Killed Known \
    Laid Last Late Latest Least Left Live Lost Made Managed Mapped Measured Merged Missing Mounted Named Nobody Now \
    Numbered Other Others Outside Outstanding Own Parked Pending Pinned Placed Planned Predicted Profiled Published \
    Ran Reached Read Recolored Recorded Recovered Refused Removed Replayed Restored Running Said Sampled Scripted \
    Seated Seen Served Shared Short Shown Silent Since Sized Solved Somebody Spent Stalled Surveyed Taken Then There \
    Timed Together Told Took Tried Unchanged Unsteady Unusable Usual Wanted Watched Weighted What Where Who Whose \
    Why Worse Wrong";

/// One declaration of a type.
struct TypeDeclaration<'a> {
    name: String,
    file: &'a str,
    line: usize,
}

/// Complains about names that are declared more than once.
pub fn check_duplicates(tree: &SourceTree) -> Vec<Complaint> {
    let mut by_name: BTreeMap<String, Vec<TypeDeclaration<'_>>> = BTreeMap::new();
    for declaration in type_declarations(tree) {
        by_name
            .entry(declaration.name.clone())
            .or_default()
            .push(declaration);
    }

    let may_repeat = |name: &str| {
        REPEATABLE_NAMES.contains(&name)
            || ALLOWED_TWICE.iter().any(|(allowed, _)| *allowed == name)
    };
    let duplicates = by_name
        .iter()
        .filter(|(name, declarations)| declarations.len() > 1 && !may_repeat(name));
    let complaints = duplicates.flat_map(|(name, declarations)| {
        declarations.iter().skip(1).map(move |item| {
            let first = &declarations[0];
            Complaint::new(
                item.file,
                item.line,
                format!(
                    "type '{name}' is also declared at {}:{}",
                    first.file, first.line
                ),
            )
        })
    });
    complaints.collect()
}

/// Complains about names that end in a word of [`NON_NOUNS`].
pub fn check_nouns(tree: &SourceTree) -> Vec<Complaint> {
    let lacks_noun = |declaration: &TypeDeclaration<'_>| {
        NON_NOUNS
            .split(' ')
            .any(|word| word == last_word(&declaration.name))
    };
    type_declarations(tree)
        .into_iter()
        .filter(lacks_noun)
        .map(|type_name| {
            Complaint::new(
                type_name.file,
                type_name.line,
                format!("type '{}' lacks its noun", type_name.name),
            )
        })
        .collect()
}

/// `Assigned` of `CacheAssigned`.
fn last_word(name: &str) -> &str {
    name.rfind(char::is_uppercase)
        .map_or(name, |index| &name[index..])
}

fn type_declarations(tree: &SourceTree) -> Vec<TypeDeclaration<'_>> {
    let mut declarations = Vec::new();
    for file in tree.files.iter().filter(|file| file.has_ending("rs")) {
        // Types in an `impl` or a trait belong to the trait, so they are skipped.
        let mut block_indent: Option<usize> = None;
        for (index, line) in file.rust_lines().iter().enumerate() {
            let indent = line.code.len() - line.code.trim_start().len();
            if block_indent
                .is_some_and(|open| indent == open && line.code.trim_start().starts_with('}'))
            {
                block_indent = None;
            }
            if let Some((keyword, name)) = declared_type(line)
                && !(keyword == "type" && block_indent.is_some())
            {
                declarations.push(TypeDeclaration {
                    name,
                    file: &file.path,
                    line: index + 1,
                });
            }

            let opens_block = words_after_visibility(&line.code)
                .next()
                .is_some_and(|word| matches!(word, "impl" | "trait"))
                || line.code.trim_start().starts_with("impl<");
            if block_indent.is_none() && opens_block && !line.code.trim_end().ends_with('}') {
                block_indent = Some(indent);
            }
        }
    }

    declarations
}

/// The keyword and name, if the line declares a type.
fn declared_type(line: &RustLine) -> Option<(&str, String)> {
    let mut words = words_after_visibility(&line.code);
    let keyword = words
        .next()
        .filter(|word| matches!(*word, "struct" | "enum" | "trait" | "union" | "type"))?;
    let name: String = words
        .next()?
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect();
    name.starts_with(char::is_uppercase)
        .then_some((keyword, name))
}

fn words_after_visibility(code: &str) -> impl Iterator<Item = &str> {
    code.split_whitespace()
        .skip_while(|word| word.starts_with("pub") || matches!(*word, "unsafe" | "in" | "crate)"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_tree::tests::{complaint_lines, tree_of};

    /// Is a second declaration rejected at its line, whatever its kind, visibility and workspace?
    #[test]
    fn a_second_declaration_of_a_type_is_rejected() {
        let files = [
            ("crates/a/src/lib.rs", "pub struct Score(u32);\n"),
            (
                "fuzz/src/lib.rs",
                "mod x {\n    pub(crate) type Score = u32;\n}\n",
            ),
        ];
        let expected =
            ["fuzz/src/lib.rs:2: type 'Score' is also declared at crates/a/src/lib.rs:1"];
        assert_eq!(
            complaint_lines(check_duplicates(&tree_of(&files))),
            expected
        );
    }

    /// Are conventional names, types of traits and names in strings accepted?
    #[test]
    fn conventional_names_and_names_in_strings_are_accepted() {
        let text = "struct Options;\nimpl Iterator for A {\n    type Item = B;\n}\nimpl Iterator for C {\n    type Item = D;\n}\n\
                    const S: &str = \"\nstruct Options2;\n\";\nstruct Options2;\n";
        let files = [
            ("a.rs", text),
            ("b.rs", "struct Options;\nstruct Plan;\n"),
            ("p.rs", "struct Plan;\n"),
        ];
        assert_eq!(
            complaint_lines(check_duplicates(&tree_of(&files))),
            [] as [&str; 0]
        );
        assert!(ALLOWED_TWICE.len() <= 10);
    }

    /// Is a name that ends in a participle rejected, and one that ends in a noun accepted?
    #[test]
    fn a_type_name_that_ends_in_a_participle_is_rejected() {
        let files = [(
            "a.rs",
            "enum Told {}\nstruct CacheAssigned;\nstruct EvictedLine;\nstruct Threshold;\n",
        )];
        assert_eq!(
            complaint_lines(check_nouns(&tree_of(&files))),
            [
                "a.rs:1: type 'Told' lacks its noun",
                "a.rs:2: type 'CacheAssigned' lacks its noun"
            ]
        );
    }
}
