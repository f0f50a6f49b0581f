//! Measures prose: words per sentence, unexplained abbreviations, and pages that no index lists.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use crate::links;

/// Maximum mean number of words in a page's sentences, and in the claims of a file's doc comments.
const MAX_MEAN_WORDS: f64 = 20.0;
/// Minimum number of sentences for which a mean is meaningful.
const MIN_SENTENCES: usize = 5;
/// Maximum number of words in one claim on a page: a sentence, or the part of it between semicolons.
const MAX_PAGE_WORDS: usize = 30;
/// Maximum number of words in one claim of a doc comment, which may cite a source.
const MAX_COMMENT_WORDS: usize = 40;

/// Pages that list other pages.
const INDEXES: [&str; 2] = ["docs/index.md", "docs/results/index.md"];
const GLOSSARY_FILE: &str = "docs/glossary.md";
/// Pages that no index needs to list.
const UNLISTED_PAGES: [&str; 3] = ["README.md", "CHANGELOG.md", "docs/index.md"];
/// Abbreviations that need no explanation: units, formats, licenses, conferences, products, signals, and the
/// project's own page names.
const COMMON_ABBREVIATIONS: &[&str] = &[
    "AES", "ASPLOS", "BSD", "CPU", "CSV", "DNS", "EPYC", "GB", "GNU", "GPL", "GPU", "HPCA", "HTML", "ISCA", "JSON",
    "KB", "MB", "README", "RFC", "SIGHUP", "STYLE", "SVG", "TOML", "UTC",
];
/// Maximum length of an abbreviation; longer words in capitals are not abbreviations.
const MAX_ABBREVIATION_LETTERS: usize = 6;

/// One paragraph, list item or table cell, with the number of its first line.
struct Paragraph {
    line: usize,
    text: String,
    is_cell: bool,
}

/// Checks the mean length of a page's sentences, and each sentence.
pub fn check_page(shown_path: &str, text: &str, complaints: &mut Vec<String>) {
    let page_paragraphs = paragraphs(text.lines().enumerate());
    // Tables of results are exempt, because their text comes from data.
    let is_measured = |paragraph: &&Paragraph| !(paragraph.is_cell && shown_path.starts_with("docs/results/"));
    check_claims(shown_path, page_paragraphs.iter().filter(is_measured), MAX_PAGE_WORDS, complaints);
    check_mean(shown_path, &page_paragraphs, &SENTENCE_ENDS, complaints);
}

/// Checks the doc comments of a file. The questions above tests are exempt from the mean, because their length is
/// that of the question.
pub fn check_comments(shown_path: &str, source: &str, is_test: bool, complaints: &mut Vec<String>) {
    let mut comment_paragraphs = Vec::new();
    let mut block: Vec<(usize, &str)> = Vec::new();
    for (index, line) in source.lines().chain([""]).enumerate() {
        let code = line.trim_start();
        match code.strip_prefix("///").or_else(|| code.strip_prefix("//!")) {
            Some(comment) => block.push((index, comment.strip_prefix(' ').unwrap_or(comment))),
            None if block.is_empty() => {}
            None => comment_paragraphs.extend(paragraphs(block.drain(..))),
        }
    }
    check_claims(shown_path, comment_paragraphs.iter(), MAX_COMMENT_WORDS, complaints);
    if !is_test {
        check_mean(shown_path, &comment_paragraphs, &CLAIM_ENDS, complaints);
    }
}

const SENTENCE_ENDS: [char; 3] = ['.', '!', '?'];
const CLAIM_ENDS: [char; 4] = ['.', '!', '?', ';'];

fn check_claims<'a>(
    shown_path: &str,
    paragraphs: impl Iterator<Item = &'a Paragraph>,
    max_words: usize,
    complaints: &mut Vec<String>,
) {
    for Paragraph { line, text, .. } in paragraphs {
        for claim in split_after(text, &CLAIM_ENDS) {
            let count = count_words(&claim);
            if count > max_words {
                let claim_start: String = claim.chars().take(40).collect();
                let line = line + 1;
                complaints
                    .push(format!("{shown_path}:{line}: {count} words in a row, at most {max_words}: '{claim_start}'"));
            }
        }
    }
}

fn check_mean(shown_path: &str, paragraphs: &[Paragraph], ends: &[char], complaints: &mut Vec<String>) {
    let prose = paragraphs.iter().filter(|paragraph| !paragraph.is_cell);
    let counts = prose.flat_map(|paragraph| split_after(&paragraph.text, ends)).map(|part| count_words(&part));
    let counts: Vec<usize> = counts.filter(|&count| count > 0).collect();
    let (words, sentences) = (counts.iter().sum::<usize>(), counts.len());
    let mean = words as f64 / sentences.max(1) as f64;
    if sentences >= MIN_SENTENCES && mean > MAX_MEAN_WORDS {
        complaints.push(format!("{shown_path}: {mean:.1} words a sentence in the mean, at most {MAX_MEAN_WORDS}"));
    }
}

/// Extracts the prose of Markdown, without code, headings, pictures and HTML. Inline code counts as one word, and a
/// link as its text.
fn paragraphs<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Paragraph> {
    let mut text_paragraphs: Vec<Paragraph> = Vec::new();
    let (mut is_open, mut is_in_code) = (false, false);
    for (line, raw_line) in lines {
        let text = raw_line.trim();
        if text.starts_with("```") {
            (is_in_code, is_open) = (!is_in_code, false);
            continue;
        }
        let is_code = is_in_code || (!is_open && raw_line.starts_with("    "));
        if is_code || text.is_empty() || text.starts_with(['#', '<']) || text.starts_with("![") {
            is_open = false;
            continue;
        }
        if text.starts_with('|') {
            let cells = text.split('|').map(|cell| plain_text(cell.trim())).filter(|cell| !cell.is_empty());
            text_paragraphs.extend(cells.map(|text| Paragraph { line, text, is_cell: true }));
            is_open = false;
            continue;
        }
        let item_text = strip_bullet(text);
        match text_paragraphs.last_mut().filter(|_| is_open && item_text.is_none()) {
            Some(paragraph) => paragraph.text = format!("{} {text}", paragraph.text),
            None => {
                text_paragraphs.push(Paragraph { line, text: item_text.unwrap_or(text).to_string(), is_cell: false })
            }
        }
        is_open = true;
    }
    // Links and code may span lines, so they are replaced only after lines are joined.
    text_paragraphs.iter_mut().for_each(|paragraph| paragraph.text = plain_text(&paragraph.text));
    text_paragraphs
}

/// Returns the text of a list item after its bullet or number.
fn strip_bullet(text: &str) -> Option<&str> {
    let numbered_item = text.trim_start_matches(|c: char| c.is_ascii_digit()).strip_prefix(". ");
    let numbered = numbered_item.filter(|_| text.starts_with(|c: char| c.is_ascii_digit()));
    text.strip_prefix("- ").or_else(|| text.strip_prefix("* ")).or(numbered)
}

/// Returns the text without the targets of links, and with one letter for each piece of code.
fn plain_text(text: &str) -> String {
    let mut spans = text.split('`');
    let mut plain_text = spans.next().unwrap_or_default().to_string();
    while let (Some(_), Some(rest)) = (spans.next(), spans.next()) {
        plain_text.push('x');
        plain_text.push_str(rest);
    }
    let mut pieces = plain_text.split("](");
    let mut prose_text = pieces.next().unwrap_or_default().to_string();
    for piece in pieces {
        prose_text.push(']');
        prose_text.push_str(piece.split_once(')').map_or("", |(_, rest)| rest));
    }
    prose_text
}

/// Splits a text after each of these characters that a space follows.
fn split_after(text: &str, ends: &[char]) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for word in text.split_whitespace() {
        let last_piece = pieces.last_mut().expect("never empty");
        last_piece.push_str(word);
        last_piece.push(' ');
        if word.trim_end_matches(['"', '\'', ')', '*', '_', ']']).ends_with(ends) {
            pieces.push(String::new());
        }
    }
    pieces
}

fn count_words(text: &str) -> usize {
    text.split_whitespace().filter(|word| word.chars().any(char::is_alphanumeric)).count()
}

/// Adds a complaint for each abbreviation on a page that the glossary does not contain.
pub fn check_abbreviations(root: &Path, shown_path: &str, text: &str, complaints: &mut Vec<String>) -> io::Result<()> {
    let Ok(glossary) = fs::read_to_string(root.join(GLOSSARY_FILE)) else { return Ok(()) };
    let known_words: BTreeSet<&str> = split_words(&glossary).chain(COMMON_ABBREVIATIONS.iter().copied()).collect();
    let mut reported_words = BTreeSet::new();
    for Paragraph { line, text, .. } in paragraphs(text.lines().enumerate()) {
        for word in split_words(&text).map(|word| word.strip_suffix('s').unwrap_or(word)) {
            let letters = 2..=MAX_ABBREVIATION_LETTERS;
            let is_short = letters.contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_uppercase());
            if is_short && !known_words.contains(word) && reported_words.insert(word.to_string()) {
                complaints.push(format!("{shown_path}:{}: '{word}' is not in {GLOSSARY_FILE}", line + 1));
            }
        }
    }
    Ok(())
}

/// Returns the words of a text; hyphenated words stay whole, because a result id such as `RM-1` is not an abbreviation.
fn split_words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').filter(|word| !word.is_empty())
}

/// Adds a complaint for each page that no index lists, if there is an index. `pages` are paths below the root.
///
/// # Errors
/// An index exists and cannot be read.
pub fn check_index(root: &Path, pages: &[String], complaints: &mut Vec<String>) -> io::Result<()> {
    if !root.join(INDEXES[0]).is_file() {
        return Ok(());
    }
    let mut listed_pages = BTreeSet::new();
    for index in INDEXES.iter().filter(|index| root.join(index).is_file()) {
        let text = fs::read_to_string(root.join(index))?;
        let dir = Path::new(index).parent().unwrap_or(Path::new(""));
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        listed_pages.extend(targets.map(|target| links::normalize(&dir.join(target))));
    }
    let unlisted_pages =
        pages.iter().filter(|page| !listed_pages.contains(*page) && !UNLISTED_PAGES.contains(&page.as_str()));
    complaints.extend(unlisted_pages.map(|page| format!("{page}: not in {}", INDEXES[0])));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_page(text: &str) -> Vec<String> {
        let mut complaints = Vec::new();
        check_page("x.md", text, &mut complaints);
        complaints
    }

    fn sentence_of(words: usize) -> String {
        format!("{}.", vec!["word"; words].join(" "))
    }

    /// Is a sentence with too many words reported with its line, and one in two parts accepted?
    #[test]
    fn a_long_sentence_is_reported_with_its_line() {
        assert_eq!(of_page(&sentence_of(30)), [] as [&str; 0]);
        let long = of_page(&format!("# Title\n\n- {}\n", sentence_of(31)));
        assert!(long[0].starts_with("x.md:3: 31 words in a row, at most 30: 'word"), "{long:?}");
        let two = sentence_of(31).replacen("word word", "word; word", 1);
        assert_eq!(of_page(&two), [] as [&str; 0]);
    }

    /// Does the mean count complete sentences, if there are at least five, but no code, link targets or tables?
    #[test]
    fn the_mean_counts_sentences_of_prose_only() {
        assert_eq!(of_page(&[sentence_of(21), sentence_of(21)].join(" ")), [] as [&str; 0]);
        let page = vec![sentence_of(21); 5].join(" ");
        assert_eq!(of_page(&page), ["x.md: 21.0 words a sentence in the mean, at most 20"]);
        let code = format!("```\n{}\n```\n\n    {}\n\n", sentence_of(99), sentence_of(99));
        let table = format!("| {} | `{}` |\n", sentence_of(29), sentence_of(99));
        let link = format!("See [this]({}).\n", sentence_of(99));
        assert_eq!(of_page(&format!("{code}{table}{link}")), [] as [&str; 0]);
    }

    /// Are doc comments measured like pages, and code ignored?
    #[test]
    fn doc_comments_are_measured() {
        let complaints_in = |source: &str| {
            let mut complaints = Vec::new();
            check_comments("x.rs", source, false, &mut complaints);
            complaints
        };
        assert_eq!(complaints_in(&format!("// {}\nfn f() {{}}\n", sentence_of(99))), [] as [&str; 0]);
        let long = complaints_in(&format!("\n/// Short.\n/// {}\nfn f() {{}}\n", sentence_of(41)));
        assert!(long[0].starts_with("x.rs:2: 41 words"), "{long:?}");
    }

    /// Is an abbreviation that the glossary lacks reported once, and code and common ones never?
    #[test]
    fn abbreviations_missing_in_the_glossary_are_reported_once() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("docs")).unwrap();
        fs::write(root.path().join(GLOSSARY_FILE), "| LLC | the last level |\n").unwrap();
        let mut complaints = Vec::new();
        let text = "A CPU and its LLCs.\n\nPEBS, `XYZ`, XY-1 and again PEBS.";
        check_abbreviations(root.path(), "x.md", text, &mut complaints).unwrap();
        assert_eq!(complaints, ["x.md:3: 'PEBS' is not in docs/glossary.md"]);
    }

    /// Is a page that no index lists reported, whichever way the index writes its path?
    #[test]
    fn a_page_that_no_index_lists_is_reported() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("docs")).unwrap();
        fs::write(root.path().join("docs/index.md"), "[a](a.md#b) [p](../recordings/README.md)").unwrap();
        let pages = ["README.md", "docs/a.md", "docs/b.md", "recordings/README.md"].map(str::to_string);
        let mut complaints = Vec::new();
        check_index(root.path(), &pages, &mut complaints).unwrap();
        assert_eq!(complaints, ["docs/b.md: not in docs/index.md"]);
    }
}
