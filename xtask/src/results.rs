//! `docs/results/`: the papers' figures as pages, made from data and from what was found in words.
//!
//! `docs/results/data/*.jsonl` holds figures, one a line, as `cachemate repro` measured them; `found.toml` holds the
//! papers and at most ten sentences on each. The pages are made from both and from nothing else, and a test holds them
//! to it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

const FOLDER: &str = "docs/results";
const SENTENCES_AT_MOST: usize = 10;

/// One measured figure: a line of the data.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultRecord {
    id: String,
    what: String,
    /// In words, such as `at least 27`.
    bar: String,
    /// `met`, `beyond` (the paper's own figure) or `short`.
    verdict: String,
    /// Mean over seeds; `None` where it was not measured.
    measured: Option<f64>,
    /// Standard deviation over seeds.
    spread: Option<f64>,
    unit: String,
    seeds: Vec<u64>,
    /// A quick run has fewer sizes, programs, mixes or workloads than the bar asks for.
    quick: bool,
    /// UTC, such as `2026-11-21T05:52:57Z`: newer dates sort after older ones.
    date: String,
    version: String,
    command: String,
}

/// What `cachemate repro --json` and its `results.json` hold.
#[derive(Deserialize)]
struct MeasuredResults {
    command: String,
    version: String,
    date: String,
    quick: bool,
    results: Vec<MeasuredResult>,
}

#[derive(Deserialize)]
struct MeasuredResult {
    id: String,
    what: String,
    bar: String,
    verdict: String,
    measured: Option<f64>,
    spread: Option<f64>,
    unit: String,
    seeds: Vec<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultText {
    /// Before the table of papers.
    introduction: Vec<String>,
    paper: Vec<Paper>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Paper {
    /// File name without its ending.
    page: String,
    title: String,
    source: String,
    /// Ids begin with one of these; `AV-` or a whole id.
    ids: Vec<String>,
    found: Vec<String>,
}

impl Paper {
    fn has(&self, id: &str) -> bool {
        self.ids.iter().any(|own| if own.ends_with('-') { id.starts_with(own.as_str()) } else { id == own })
    }
}

/// Makes all pages anew, and removes those of papers that are gone.
///
/// # Errors
/// Data or words that cannot be read, with the place; a page that cannot be written.
pub fn write(root: &Path) -> Result<(), String> {
    let pages = pages(root)?;
    for path in pages_there(root)? {
        if !pages.iter().any(|(page, _)| *page == path) {
            fs::remove_file(&path).map_err(in_file(&path))?;
        }
    }
    pages.iter().try_for_each(|(path, text)| fs::write(path, text).map_err(in_file(path)))
}

/// Pages that are not what the data gives.
///
/// # Errors
/// As [`write`].
pub fn check(root: &Path) -> Result<Vec<String>, String> {
    let pages = pages(root)?;
    let shown = |path: &Path| path.strip_prefix(root).unwrap_or(path).display().to_string();
    let differs = |(path, text): &&(PathBuf, String)| fs::read_to_string(path).ok().as_ref() != Some(text);
    let mut wrong: Vec<String> = pages.iter().filter(differs).map(|(path, _)| shown(path)).collect();
    let strays = pages_there(root)?.into_iter().filter(|path| !pages.iter().any(|(page, _)| page == path));
    wrong.extend(strays.map(|path| shown(&path)));
    Ok(wrong
        .into_iter()
        .map(|page| format!("{page}: is not what the data gives: cargo run -p xtask -- results"))
        .collect())
}

/// Takes the figures of `cachemate repro -o DIR`'s results.json over into the data, in the place of what was there by
/// this name.
///
/// # Errors
/// A file that cannot be read or written, or is none of repro's.
pub fn take(root: &Path, json: &Path, name: &str) -> Result<(), String> {
    let text = fs::read_to_string(json).map_err(in_file(json))?;
    let MeasuredResults { command, version, date, quick, results } =
        serde_json::from_str(&text).map_err(in_file(json))?;
    let mut lines = String::new();
    // What nobody measured is no figure: a recording that is missing here, a workload that the form does not have.
    for result in results.into_iter().filter(|result| result.measured.is_some()) {
        let MeasuredResult { id, what, bar, verdict, measured, spread, unit, seeds } = result;
        let (command, version, date) = (command.clone(), version.clone(), date.clone());
        let figure =
            ResultRecord { id, what, bar, verdict, measured, spread, unit, seeds, quick, date, version, command };
        lines.push_str(&serde_json::to_string(&figure).map_err(in_file(json))?);
        lines.push('\n');
    }
    let path = root.join(FOLDER).join("data").join(format!("{name}.jsonl"));
    fs::write(&path, lines).map_err(in_file(&path))
}

fn in_file<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

fn listed(folder: &Path, ending: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(in_file(folder))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == ending));
    paths.sort();
    Ok(paths)
}

fn pages_there(root: &Path) -> Result<Vec<PathBuf>, String> {
    listed(&root.join(FOLDER), "md")
}

/// All figures, those of a file in its order.
fn figures(root: &Path) -> Result<Vec<ResultRecord>, String> {
    let mut all = Vec::new();
    for path in listed(&root.join(FOLDER).join("data"), "jsonl")? {
        let text = fs::read_to_string(&path).map_err(in_file(&path))?;
        for (at, line) in text.lines().enumerate() {
            let figure = serde_json::from_str(line);
            all.push(figure.map_err(|error| format!("{}:{}: {error}", path.display(), at + 1))?);
        }
    }
    Ok(all)
}

/// Every page with its text.
fn pages(root: &Path) -> Result<Vec<(PathBuf, String)>, String> {
    let path = root.join(FOLDER).join("found.toml");
    let text = fs::read_to_string(&path).map_err(in_file(&path))?;
    let text: ResultText = toml::from_str(&text).map_err(in_file(&path))?;
    let figures = figures(root)?;
    if let Some(stray) = figures.iter().find(|figure| !text.paper.iter().any(|paper| paper.has(&figure.id))) {
        return Err(format!("{}: no paper has the id '{}'", path.display(), stray.id));
    }
    for paper in &text.paper {
        let count = paper.found.len();
        if count > SENTENCES_AT_MOST {
            let (page, file) = (&paper.page, path.display());
            return Err(format!("{file}: '{page}': found {count} sentences, expected {SENTENCES_AT_MOST} at most"));
        }
    }
    let newest = figures.iter().max_by(|a, b| a.date.cmp(&b.date)).map(|figure| figure.version.clone());
    let newest = newest.unwrap_or_default();
    let mut papers = Vec::new();
    for paper in &text.paper {
        papers.push((paper, kept(figures.iter().filter(|figure| paper.has(&figure.id)))));
    }
    let folder = root.join(FOLDER);
    let mut pages = vec![(folder.join("index.md"), index(&text.introduction, &papers, &newest))];
    for (paper, figures) in &papers {
        pages.push((folder.join(format!("{}.md", paper.page)), page(paper, figures, &newest)));
    }
    Ok(pages)
}

/// Figures that no other says better: of the same result in the same form, the newest and any older one of more seeds.
/// In the order of ids, results as the newest data has them.
fn kept<'a>(figures: impl Iterator<Item = &'a ResultRecord>) -> Vec<&'a ResultRecord> {
    let mut all: Vec<&ResultRecord> = figures.collect();
    let same = |a: &ResultRecord, b: &ResultRecord| (&a.id, &a.what, a.quick) == (&b.id, &b.what, b.quick);
    let beaten = |one: &ResultRecord| {
        all.iter().any(|other| same(one, other) && other.date > one.date && other.seeds.len() >= one.seeds.len())
    };
    let beaten: Vec<bool> = all.iter().map(|one| beaten(one)).collect();
    let mut beaten = beaten.into_iter();
    all.retain(|_| !beaten.next().unwrap_or_default());
    let number = |figure: &ResultRecord| {
        let (name, number) = figure.id.rsplit_once('-').unwrap_or((&figure.id, ""));
        (name.to_string(), number.parse::<u32>().unwrap_or(u32::MAX), figure.id.clone())
    };
    // Full runs first: they say more.
    all.sort_by_key(|figure| (number(figure), figure.quick));
    all
}

fn index(introduction: &[String], papers: &[(&Paper, Vec<&ResultRecord>)], newest: &str) -> String {
    let mut text = String::from("# The papers' results\n\n");
    text.push_str(&made());
    introduction.iter().for_each(|paragraph| text.push_str(&format!("{paragraph}\n\n")));
    text.push_str("| page | paper | results with a bar | met or beyond | short | of the newest version |\n");
    text.push_str("|---|---|---|---|---|---|\n");
    for (paper, figures) in papers {
        let judged: Vec<&&ResultRecord> = figures.iter().filter(|figure| has_bar(figure)).collect();
        let short = judged.iter().filter(|figure| figure.verdict == "short").count();
        let new = judged.iter().filter(|figure| figure.version == newest).count();
        let (title, page, all) = (&paper.title, &paper.page, judged.len());
        let row = format!("| [{title}]({page}.md) | {} | {all} | {} | {short} | {new} |\n", paper.source, all - short);
        text.push_str(&row);
    }
    text
}

fn made() -> String {
    "Made by `cargo run -p xtask -- results` from `data/` and `found.toml`; edit those.\n\n".to_string()
}

/// Results without a bar are shown by the command, and not here.
fn has_bar(figure: &ResultRecord) -> bool {
    figure.bar != "shown as measured"
}

fn page(paper: &Paper, figures: &[&ResultRecord], newest: &str) -> String {
    let mut text = format!("# {}\n\n{}. {}", paper.title, paper.source, made());
    let figures: Vec<&&ResultRecord> = figures.iter().filter(|figure| has_bar(figure)).collect();
    text.push_str(
        "| id | result | bar | figure | | seeds | date | version | command |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for figure in &figures {
        let mark = if figure.version == newest { "" } else { " †" };
        let form = if figure.quick { ", quick" } else { "" };
        let verdict = if figure.verdict == "short" { "**short**" } else { &figure.verdict };
        let day = figure.date.split('T').next().unwrap_or_default();
        text.push_str(&format!(
            "| {} | {} | {} | {}{mark} | {verdict} | {}{form} | {day} | {} | `{}` |\n",
            figure.id,
            figure.what.replace('|', "\\|"),
            bar(&figure.bar),
            value(figure),
            seeds(&figure.seeds),
            figure.version,
            figure.command
        ));
    }
    if figures.iter().any(|figure| figure.version != newest) {
        text.push_str(&format!("\n† measured by an older version than {newest}, the newest that was measured.\n"));
    }
    text.push_str("\n## What was found\n\n");
    paper.found.iter().for_each(|sentence| text.push_str(&format!("- {sentence}\n")));
    text
}

/// With no more digits than figures have.
fn bar(words: &str) -> String {
    let short = |word: &str| match word.parse::<f64>() {
        Ok(value) if word.len() > 6 => number(value),
        _ => word.to_string(),
    };
    words.split(' ').map(short).collect::<Vec<_>>().join(" ")
}

fn value(figure: &ResultRecord) -> String {
    let spread = figure.spread.map_or(String::new(), |spread| format!(" ± {}", number(spread)));
    let measured = figure.measured.map_or("not measured".to_string(), number);
    format!("{measured}{spread} {}", figure.unit).trim_end().to_string()
}

/// Three digits that count.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_string(),
        size if size < 0.001 => format!("{value:.1e}"),
        size if size >= 100.0 => format!("{value:.0}"),
        size => {
            let before = size.log10().floor() as i32;
            format!("{value:.*}", (2 - before).clamp(0, 6) as usize)
        }
    }
}

/// `1`, `1 to 3`, `1, 4`; a result that needs no seed has none.
fn seeds(seeds: &[u64]) -> String {
    let all: BTreeSet<u64> = seeds.iter().copied().collect();
    match (all.first(), all.last()) {
        (Some(first), Some(last)) if first == last => first.to_string(),
        (Some(first), Some(last)) if last - first + 1 == all.len() as u64 => format!("{first} to {last}"),
        (Some(_), _) => all.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
        _ => "none".to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    /// Are the pages of this checkout what its data gives?
    #[test]
    fn the_pages_are_what_the_data_gives() {
        let wrong = check(root()).unwrap();
        assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    }

    const REPRO: &str = r#"{"command": "cachemate repro X-1 --seed 1", "version": "2", "date": "2026-11-22T00:00:00Z",
        "quick": false, "results": [
        {"id": "X-1", "what": "gain", "paper": "p", "bar": "at least 1", "verdict": "met", "measured": 1.25,
         "spread": null, "unit": "%", "seeds": [1], "points": []},
        {"id": "X-2", "what": "none", "paper": "p", "bar": "at least 1", "verdict": "short", "measured": null,
         "spread": null, "unit": "%", "seeds": [1], "points": []}]}"#;
    const OLD: &str = r#"{"id":"X-1","what":"gain","bar":"at least 1","verdict":"short","measured":0.5,"spread":0.25,"unit":"%","seeds":[1,2,3],"quick":false,"date":"2026-11-01T00:00:00Z","version":"1","command":"old"}"#;

    fn project(found: usize) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDER);
        fs::create_dir_all(folder.join("data")).unwrap();
        let sentences = vec!["\"It gains.\""; found].join(", ");
        let words = format!(
            "introduction = [\"Read.\"]\n[[paper]]\npage = \"x\"\ntitle = \"X\"\nsource = \"A\"\nids = [\"X-\"]\n\
             found = [{sentences}]\n"
        );
        fs::write(folder.join("found.toml"), words).unwrap();
        fs::write(folder.join("data/old.jsonl"), format!("{OLD}\n")).unwrap();
        fs::write(root.path().join("repro.json"), REPRO).unwrap();
        root
    }

    /// Does a page show repro's figures, an older one of more seeds with its mark, and nothing that was not measured?
    #[test]
    fn a_page_shows_what_was_measured_and_marks_what_is_older() {
        let root = project(1);
        take(root.path(), &root.path().join("repro.json"), "new").unwrap();
        assert_eq!(check(root.path()).unwrap().len(), 2, "index and page are not there yet");
        write(root.path()).unwrap();
        assert!(check(root.path()).unwrap().is_empty());
        let page = fs::read_to_string(root.path().join(FOLDER).join("x.md")).unwrap();
        let row = "| X-1 | gain | at least 1 | 1.25 % | met | 1 | 2026-11-22 | 2 | `cachemate repro X-1 --seed 1` |";
        assert!(page.contains(row), "{page}");
        assert!(page.contains("| 0.500 ± 0.250 % † | **short** | 1 to 3 |"), "{page}");
        assert!(page.contains("- It gains.") && !page.contains("X-2"), "{page}");
        fs::write(root.path().join(FOLDER).join("x.md"), page.replace("1.25", "9.25")).unwrap();
        fs::write(root.path().join(FOLDER).join("y.md"), "stray").unwrap();
        assert_eq!(check(root.path()).unwrap().len(), 2, "an edited figure and a stray page");
    }

    /// Are ids without a paper, more than ten sentences and damaged lines told with their place?
    #[test]
    fn what_cannot_be_a_page_is_told() {
        assert!(check(project(11).path()).unwrap_err().contains("'x': found 11 sentences, expected 10 at most"));
        let root = project(10);
        let data = root.path().join(FOLDER).join("data/old.jsonl");
        fs::write(&data, OLD.replace("X-1", "Y-1")).unwrap();
        assert!(check(root.path()).unwrap_err().contains("no paper has the id 'Y-1'"));
        fs::write(&data, format!("{OLD}\n{{\"id\": 3}}\n")).unwrap();
        assert!(check(root.path()).unwrap_err().contains("old.jsonl:2: "));
        fs::write(root.path().join("repro.json"), "{}").unwrap();
        assert!(take(root.path(), &root.path().join("repro.json"), "new").unwrap_err().contains("missing field"));
    }

    /// Are numbers written with three digits and seeds as ranges?
    #[test]
    fn numbers_and_seeds_in_words() {
        let numbers = [0.0, 148.3, -17.46, 1.2345, 0.0318, 3.55e-15].map(number);
        assert_eq!(numbers, ["0", "148", "-17.5", "1.23", "0.0318", "3.6e-15"]);
        assert_eq!(["at least 0.5154201066721874", "-0.5 to 0.5"].map(bar), ["at least 0.515", "-0.5 to 0.5"]);
        assert_eq!([&[1u64][..], &[1, 2, 3], &[1, 4], &[]].map(seeds), ["1", "1 to 3", "1, 4", "none"]);
    }
}
