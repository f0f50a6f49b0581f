//! Generates the pages of results in `docs/results/` from measured figures and written findings.
//!
//! A figure that is copied into a page by hand is right until the next run, and nobody sees which
//! run it was from. So figures are data, one per line in `docs/results/data/*.jsonl`, as `cachemate
//! repro` measured them, with seeds, date, version and command; `findings.toml` contains the papers
//! and at most ten sentences on each; and the pages are generated only from both. A test compares
//! them.
//!
//! For example, `cargo run -p xtask -- results import out/results.json night` adds the lines of a
//! run. The newest figure of each result is shown, and an older one with more seeds beside it,
//! marked as older.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

const RESULTS_DIR: &str = "docs/results";
/// Below [`RESULTS_DIR`]: a picture for each page, and [`FIGURE_RUNS`].
const FIGURES_DIR: &str = "figures";
const FIGURE_RUNS: &str = "runs.json";
/// Columns of a generated line of prose.
const MAX_COLUMNS: usize = 126;
const MAX_SENTENCES: usize = 10;

/// One measured figure, from one line of the data.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultRecord {
    id: String,
    title: String,
    /// The target as text, such as `at least 27`.
    target: String,
    /// `met`, `exceeded` (better than the paper's figure) or `missed`; `None` without a target.
    verdict: Option<String>,
    /// Mean over seeds; `None` if nothing was measured.
    measured: Option<f64>,
    /// Standard deviation over seeds.
    spread: Option<f64>,
    unit: String,
    seeds: Vec<u64>,
    /// Whether this is a quick run, with fewer sizes, programs, mixes or workloads than the target requires.
    quick: bool,
    /// Date in UTC, such as `2026-11-21T05:52:57Z`, so that dates sort by time.
    date: String,
    version: String,
    command: String,
}

/// Content of `cachemate repro --json` and of its `results.json`.
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
    title: String,
    target: String,
    verdict: Option<String>,
    measured: Option<f64>,
    spread: Option<f64>,
    unit: String,
    seeds: Vec<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultText {
    /// Paragraphs above the table of papers.
    introduction: Vec<String>,
    paper: Vec<Paper>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Paper {
    /// File name without its extension.
    page: String,
    title: String,
    source: String,
    /// Ids of the paper's results: prefixes such as `AV-`, or whole ids.
    ids: Vec<String>,
    figure: PaperFigure,
    findings: Vec<String>,
}

/// The picture of a page: one that `cachemate repro` draws.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PaperFigure {
    /// The result whose quick run draws it.
    id: String,
    /// File name that `repro` gives it, without its extension.
    file: String,
    /// What it shows, for readers who do not see it.
    shows: String,
}

/// Origin of a picture, which has no place for it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FigureRun {
    date: String,
    version: String,
}

impl Paper {
    fn has_id(&self, id: &str) -> bool {
        self.ids.iter().any(|known_id| {
            if known_id.ends_with('-') {
                id.starts_with(known_id.as_str())
            } else {
                id == known_id
            }
        })
    }
}

/// Writes all pages, and removes pages that have no paper.
///
/// # Errors
/// Data or findings cannot be read (the error names the place), or a page cannot be written.
pub fn write(root: &Path) -> Result<(), String> {
    let pages = render_pages(root)?;
    for path in list_pages(root)? {
        if !pages.iter().any(|(page, _)| *page == path) {
            fs::remove_file(&path).map_err(error_in_file(&path))?;
        }
    }
    pages
        .iter()
        .try_for_each(|(path, text)| fs::write(path, text).map_err(error_in_file(path)))
}

/// Pages that differ from those generated from the data.
pub fn check(root: &Path) -> Result<Vec<String>, String> {
    let pages = render_pages(root)?;
    let path_from_root = |path: &Path| {
        path.strip_prefix(root)
            .unwrap_or(path)
            .display()
            .to_string()
    };
    let is_outdated =
        |(path, text): &&(PathBuf, String)| fs::read_to_string(path).ok().as_ref() != Some(text);
    let mut wrong_pages: Vec<String> = pages
        .iter()
        .filter(is_outdated)
        .map(|(path, _)| path_from_root(path))
        .collect();

    let stray_pages = list_pages(root)?
        .into_iter()
        .filter(|path| !pages.iter().any(|(page, _)| page == path));
    wrong_pages.extend(stray_pages.map(|path| path_from_root(&path)));
    Ok(wrong_pages
        .into_iter()
        .map(|page| format!("{page}: differs from its data; run cargo run -p xtask -- results"))
        .collect())
}

/// Imports figures from the results.json of `cachemate repro -o DIR` into the data file `name`, which is replaced.
///
/// # Errors
/// A file cannot be read or written, or `repro` did not write it.
pub fn import(root: &Path, json: &Path, name: &str) -> Result<(), String> {
    let text = fs::read_to_string(json).map_err(error_in_file(json))?;
    let MeasuredResults {
        command,
        version,
        date,
        quick,
        results,
    } = serde_json::from_str(&text).map_err(error_in_file(json))?;
    let mut lines = String::new();

    // A result without a value is skipped: its recording is missing on this host, or its form lacks the workload.
    for result in results
        .into_iter()
        .filter(|result| result.measured.is_some())
    {
        let MeasuredResult {
            id,
            title,
            target,
            verdict,
            measured,
            spread,
            unit,
            seeds,
        } = result;

        let (command, version, date) = (command.clone(), version.clone(), date.clone());
        let figure = ResultRecord {
            id,
            title,
            target,
            verdict,
            measured,
            spread,
            unit,
            seeds,
            quick,
            date,
            version,
            command,
        };
        lines.push_str(&serde_json::to_string(&figure).map_err(error_in_file(json))?);
        lines.push('\n');
    }

    let path = root
        .join(RESULTS_DIR)
        .join("data")
        .join(format!("{name}.jsonl"));
    fs::write(&path, lines).map_err(error_in_file(&path))
}

/// Draws the pictures of these pages, or of all if none is named, each by a quick run of `binary`, and stores them as
/// `figures/PAGE.svg`. Every picture is stored once it is drawn, so that an interruption loses one at most.
///
/// # Errors
/// A page is unknown, a run failed or drew none of the expected name, or a file cannot be read or written.
pub fn draw_figures(root: &Path, binary: &Path, pages: &[&str]) -> Result<(), String> {
    let papers = read_papers(root)?.paper;
    if let Some(unknown) = pages
        .iter()
        .find(|page| !papers.iter().any(|paper| paper.page == **page))
    {
        let names: Vec<&str> = papers.iter().map(|paper| paper.page.as_str()).collect();
        return Err(format!(
            "found page '{unknown}', expected one of {}",
            names.join(", ")
        ));
    }

    let dir = root.join(RESULTS_DIR).join(FIGURES_DIR);
    fs::create_dir_all(&dir).map_err(error_in_file(&dir))?;
    for paper in papers {
        if !pages.is_empty() && !pages.contains(&paper.page.as_str()) {
            continue;
        }
        let drawn_dir = root.join("target/figures").join(&paper.page);
        let mut command = Command::new(binary);
        command
            .args(["repro", &paper.figure.id, "--quick", "--force", "-o"])
            .arg(&drawn_dir);
        let status = command.status().map_err(error_in_file(binary))?;
        if !status.success() {
            return Err(format!("{command:?}: {status}"));
        }

        let json = drawn_dir.join("results.json");
        let text = fs::read_to_string(&json).map_err(error_in_file(&json))?;
        let MeasuredResults { version, date, .. } =
            serde_json::from_str(&text).map_err(error_in_file(&json))?;
        let drawn = drawn_dir.join(format!("{}.svg", paper.figure.file));
        let stored = dir.join(format!("{}.svg", paper.page));
        fs::copy(&drawn, stored).map_err(error_in_file(&drawn))?;

        let mut runs = read_figure_runs(root)?;
        runs.insert(paper.page, FigureRun { date, version });
        let path = dir.join(FIGURE_RUNS);
        let text = serde_json::to_string_pretty(&runs).map_err(error_in_file(&path))?;
        fs::write(&path, text + "\n").map_err(error_in_file(&path))?;
    }
    Ok(())
}

/// Origins of the pictures by page; none before the first is drawn.
fn read_figure_runs(root: &Path) -> Result<BTreeMap<String, FigureRun>, String> {
    let path = root.join(RESULTS_DIR).join(FIGURES_DIR).join(FIGURE_RUNS);
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let text = fs::read_to_string(&path).map_err(error_in_file(&path))?;
    serde_json::from_str(&text).map_err(error_in_file(&path))
}

fn error_in_file<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

fn list_files(dir: &Path, ending: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(dir).map_err(error_in_file(dir))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == ending));
    paths.sort();
    Ok(paths)
}

fn list_pages(root: &Path) -> Result<Vec<PathBuf>, String> {
    list_files(&root.join(RESULTS_DIR), "md")
}

/// Figures in the order of the files and of their lines.
fn read_figures(root: &Path) -> Result<Vec<ResultRecord>, String> {
    let mut records = Vec::new();
    for path in list_files(&root.join(RESULTS_DIR).join("data"), "jsonl")? {
        let text = fs::read_to_string(&path).map_err(error_in_file(&path))?;
        for (index, line) in text.lines().enumerate() {
            let parse_result = serde_json::from_str(line);
            records.push(
                parse_result
                    .map_err(|error| format!("{}:{}: {error}", path.display(), index + 1))?,
            );
        }
    }
    Ok(records)
}

fn read_papers(root: &Path) -> Result<ResultText, String> {
    let path = root.join(RESULTS_DIR).join("findings.toml");
    let text = fs::read_to_string(&path).map_err(error_in_file(&path))?;
    toml::from_str(&text).map_err(error_in_file(&path))
}

/// The path and the text of each page.
fn render_pages(root: &Path) -> Result<Vec<(PathBuf, String)>, String> {
    let path = root.join(RESULTS_DIR).join("findings.toml");
    let result_text = read_papers(root)?;
    let figure_runs = read_figure_runs(root)?;
    let figures = read_figures(root)?;
    if let Some(stray) = figures.iter().find(|figure| {
        !result_text
            .paper
            .iter()
            .any(|paper| paper.has_id(&figure.id))
    }) {
        return Err(format!(
            "{}: no paper has the id '{}'",
            path.display(),
            stray.id
        ));
    }

    for paper in &result_text.paper {
        let count = paper.findings.len();
        if count > MAX_SENTENCES {
            let (page, file) = (&paper.page, path.display());
            return Err(format!(
                "{file}: '{page}': found {count} sentences, expected {MAX_SENTENCES} at most"
            ));
        }
    }

    let newest_version = figures
        .iter()
        .max_by(|a, b| a.date.cmp(&b.date))
        .map(|figure| figure.version.clone());
    let newest_version = newest_version.unwrap_or_default();
    let mut papers = Vec::new();
    for paper in &result_text.paper {
        papers.push((
            paper,
            current_figures(figures.iter().filter(|figure| paper.has_id(&figure.id))),
        ));
    }

    let dir = root.join(RESULTS_DIR);
    let mut pages = vec![(
        dir.join("index.md"),
        render_index(&result_text.introduction, &papers, &newest_version),
    )];
    for (paper, figures) in &papers {
        pages.push((
            dir.join(format!("{}.md", paper.page)),
            render_page(
                paper,
                figures,
                &newest_version,
                figure_runs.get(&paper.page),
            ),
        ));
    }
    Ok(pages)
}

/// The newest figure of each result in each form, and older figures with more seeds; ordered by id.
fn current_figures<'a>(figures: impl Iterator<Item = &'a ResultRecord>) -> Vec<&'a ResultRecord> {
    let mut records: Vec<&ResultRecord> = figures.collect();
    let is_same = |a: &ResultRecord, b: &ResultRecord| {
        (&a.id, &a.title, a.quick) == (&b.id, &b.title, b.quick)
    };
    let is_superseded = |record: &ResultRecord| {
        records.iter().any(|other| {
            is_same(record, other)
                && other.date > record.date
                && other.seeds.len() >= record.seeds.len()
        })
    };
    let superseded: Vec<bool> = records.iter().map(|record| is_superseded(record)).collect();
    let mut superseded = superseded.into_iter();
    records.retain(|_| !superseded.next().unwrap_or_default());

    let figure_number = |figure: &ResultRecord| {
        let (name, number) = figure.id.rsplit_once('-').unwrap_or((&figure.id, ""));
        (
            name.to_string(),
            number.parse::<u32>().unwrap_or(u32::MAX),
            figure.id.clone(),
        )
    };
    // Full runs come first, because they are more informative.
    records.sort_by_key(|figure| (figure_number(figure), figure.quick));
    records
}

fn render_index(
    introduction: &[String],
    papers: &[(&Paper, Vec<&ResultRecord>)],
    newest: &str,
) -> String {
    let mut text = String::from("# The papers' results\n\n");
    text.push_str(&generator_note());
    introduction
        .iter()
        .for_each(|paragraph| text.push_str(&format!("{}\n\n", wrap(paragraph, ""))));
    text.push_str(
        "| page | quick runs met | full runs met | of the newest version |\n|---|---|---|---|\n",
    );
    for (paper, figures) in papers {
        let (title, page, counts) = (&paper.title, &paper.page, count_cells(figures, newest));
        text.push_str(&format!("| [{title}]({page}.md) | {counts} |\n"));
    }
    let all_figures: Vec<&ResultRecord> = papers
        .iter()
        .flat_map(|(_, figures)| figures.iter().copied())
        .collect();
    text.push_str(&format!(
        "| all pages | {} |\n",
        count_cells(&all_figures, newest)
    ));
    text
}

/// Formats how many results with a target are met in quick runs and in full runs, each by its newest figure, and how
/// many figures are of the newest version.
fn count_cells(figures: &[&ResultRecord], newest: &str) -> String {
    let is_newer = |a: &ResultRecord, b: &ResultRecord| {
        (&a.id, &a.title, a.quick) == (&b.id, &b.title, b.quick) && a.date > b.date
    };
    let judged_figures: Vec<&ResultRecord> = figures
        .iter()
        .copied()
        .filter(|figure| has_target(figure) && !figures.iter().any(|other| is_newer(other, figure)))
        .collect();
    let count_met = |quick: bool| {
        let is_met: Vec<bool> = judged_figures
            .iter()
            .filter(|figure| figure.quick == quick)
            .map(|figure| !is_missed(figure))
            .collect();
        format!(
            "{} of {}",
            is_met.iter().filter(|met| **met).count(),
            is_met.len()
        )
    };
    let newest_count = judged_figures
        .iter()
        .filter(|figure| figure.version == newest)
        .count();

    format!(
        "{} | {} | {newest_count}",
        count_met(true),
        count_met(false)
    )
}

fn generator_note() -> String {
    "Generated by `xtask results` from `data/` and `findings.toml`.\n\n".to_string()
}

/// The pages omit results without a target, because they have no verdict.
fn has_target(figure: &ResultRecord) -> bool {
    figure.target != "shown as measured"
}

fn is_missed(figure: &ResultRecord) -> bool {
    figure.verdict.as_deref() == Some("missed")
}

fn render_page(
    paper: &Paper,
    figures: &[&ResultRecord],
    newest: &str,
    figure_run: Option<&FigureRun>,
) -> String {
    let source = wrap(&format!("{}. {}", paper.source, generator_note()), "");
    let mut text = format!("# {}\n\n{source}\n\n", paper.title);
    text.push_str("## Findings\n\n");
    paper
        .findings
        .iter()
        .for_each(|sentence| text.push_str(&format!("{}\n", wrap(&format!("- {sentence}"), "  "))));

    if let Some(FigureRun { date, version }) = figure_run {
        let PaperFigure { id, shows, .. } = &paper.figure;
        let (page, day) = (&paper.page, date.split('T').next().unwrap_or_default());
        text.push_str(&format!(
            "\n![{shows}]({FIGURES_DIR}/{page}.svg)\n\n`cachemate repro {id} --quick`, {day}, {version}\n"
        ));
    }

    let figures: Vec<&ResultRecord> = figures
        .iter()
        .copied()
        .filter(|figure| has_target(figure))
        .collect();
    let origins = figure_origins(&figures);
    let (comparisons, other_figures) = group_comparisons(&figures);
    text.push_str("\n## Figures\n\n");
    text.push_str(&result_table(&other_figures, &origins));
    comparisons
        .iter()
        .for_each(|comparison| text.push_str(&comparison_table(comparison, &origins)));

    text.push_str(
        "\n## Runs\n\n| run | seeds | date | version | `cachemate repro` |\n|---|---|---|---|---|\n",
    );
    for (
        index,
        FigureOrigin {
            seeds: used,
            quick,
            date,
            version,
            command,
        },
    ) in origins.iter().enumerate()
    {
        let form_text = if *quick { ", quick" } else { "" };
        let age_mark = if *version == newest { "" } else { " †" };
        let day = date.split('T').next().unwrap_or_default();
        let seeds_text = format_seeds(used);
        let arguments = command.strip_prefix("cachemate repro ").unwrap_or(command);
        text.push_str(&format!(
            "| {} | {seeds_text}{form_text} | {day} | {version}{age_mark} | `{arguments}` |\n",
            index + 1
        ));
    }
    if origins.iter().any(|origin| origin.version != newest) {
        text.push_str(&format!(
            "\n† a version older than {newest}, the newest measured one.\n"
        ));
    }
    text
}

/// The run of the command that measured one or more figures.
#[derive(PartialEq)]
struct FigureOrigin<'a> {
    seeds: &'a [u64],
    quick: bool,
    date: &'a str,
    version: &'a str,
    command: &'a str,
}

impl<'a> FigureOrigin<'a> {
    fn from_record(figure: &'a ResultRecord) -> Self {
        let ResultRecord {
            seeds,
            quick,
            date,
            version,
            command,
            ..
        } = figure;
        FigureOrigin {
            seeds,
            quick: *quick,
            date,
            version,
            command,
        }
    }
}

/// Each once, in the order of the figures.
fn figure_origins<'a>(figures: &[&'a ResultRecord]) -> Vec<FigureOrigin<'a>> {
    let mut origins = Vec::new();
    for origin in figures
        .iter()
        .map(|figure| FigureOrigin::from_record(figure))
    {
        if !origins.contains(&origin) {
            origins.push(origin);
        }
    }
    origins
}

/// Formats a figure with its verdict, and with the number of its run if the page has several.
fn format_cell(figure: &ResultRecord, origins: &[FigureOrigin<'_>]) -> String {
    let verdict = if is_missed(figure) {
        "**missed**"
    } else {
        figure.verdict.as_deref().unwrap_or("–")
    };
    let run_index = origins
        .iter()
        .position(|origin| *origin == FigureOrigin::from_record(figure))
        .filter(|_| origins.len() > 1);
    let run_text = run_index.map_or(String::new(), |index| format!(" ({})", index + 1));
    format!("{}, {verdict}{run_text}", format_value(figure))
}

/// Formats one row per result, with its figures from full and quick runs.
fn result_table(figures: &[&ResultRecord], origins: &[FigureOrigin<'_>]) -> String {
    let mut rows: Vec<(&ResultRecord, Vec<&ResultRecord>)> = Vec::new();
    for figure in figures {
        let is_same = |record: &ResultRecord| {
            (&record.id, &record.title, &record.target)
                == (&figure.id, &figure.title, &figure.target)
        };
        match rows.iter_mut().find(|(first, _)| is_same(first)) {
            Some((_, all)) => all.push(figure),
            None => rows.push((figure, vec![figure])),
        }
    }

    let forms = [("full run", false), ("quick run", true)];
    let forms = forms
        .into_iter()
        .filter(|(_, quick)| figures.iter().any(|figure| figure.quick == *quick));
    let forms: Vec<(&str, bool)> = forms.collect();
    let mut text = String::from("| id | result | target |");
    forms
        .iter()
        .for_each(|(name, _)| text.push_str(&format!(" {name} |")));

    text.push_str(&format!("\n|---|---|---|{}\n", "---|".repeat(forms.len())));
    for (first, row_figures) in rows {
        let title = first.title.replace('|', "\\|");
        text.push_str(&format!(
            "| {} | {title} | {} |",
            first.id,
            target_text(&first.target)
        ));
        for (_, quick) in &forms {
            let cells = row_figures
                .iter()
                .filter(|figure| figure.quick == *quick)
                .map(|figure| format_cell(figure, origins));
            text.push_str(&format!(" {} |", cells.collect::<Vec<_>>().join("; ")));
        }
        text.push('\n');
    }
    text
}

/// A table for results that differ in one word, such as a family of mixes or a policy: a row per word, a column per
/// measure.
struct FigureComparison<'a> {
    variants: Vec<&'a str>,
    /// Measures of the table: id, title without the variant, and a figure for each variant.
    measures: Vec<(&'a str, String, Vec<&'a ResultRecord>)>,
}

/// Minimum number of variants for a table; fewer variants stay separate rows.
const MIN_VARIANTS: usize = 3;

/// Splits a title into its variant and its measure. The variant is in quotes (`'dio'`), or one word before a colon.
fn split_title(title: &str) -> Option<(&str, String)> {
    if let Some((before, rest)) = title.split_once('\'')
        && let Some((variant, after)) = rest.split_once('\'')
        && before.ends_with(' ')
    {
        return Some((variant, format!("{before}…{after}")));
    }
    let (variant, measure) = title.split_once(": ")?;
    (!variant.contains(' ')).then(|| (variant, measure.to_string()))
}

/// Groups figures into comparisons, and returns them with the remaining figures.
fn group_comparisons<'a>(
    figures: &[&'a ResultRecord],
) -> (Vec<FigureComparison<'a>>, Vec<&'a ResultRecord>) {
    let mut groups: Vec<(&'a str, String, Vec<(&'a str, &'a ResultRecord)>)> = Vec::new();
    for &figure in figures {
        let Some((variant, measure)) = split_title(&figure.title) else {
            continue;
        };
        let is_same = |group: &&mut (&str, String, Vec<(&str, &ResultRecord)>)| {
            let origin = FigureOrigin::from_record(group.2[0].1);
            group.0 == figure.id
                && group.1 == measure
                && origin == FigureOrigin::from_record(figure)
        };
        match groups.iter_mut().find(is_same) {
            Some((.., all)) => all.push((variant, figure)),
            None => groups.push((&figure.id, measure, vec![(variant, figure)])),
        }
    }

    groups.retain(|(.., members)| members.len() >= MIN_VARIANTS);
    let is_compared = |figure: &&ResultRecord| {
        groups.iter().any(|(.., members)| {
            members
                .iter()
                .any(|(_, compared)| std::ptr::eq(*compared, *figure))
        })
    };
    let other_figures = figures
        .iter()
        .copied()
        .filter(|figure| !is_compared(figure))
        .collect();

    let mut tables: Vec<FigureComparison<'a>> = Vec::new();
    for (id, measure, members) in groups {
        let (variants, figures): (Vec<&str>, Vec<&ResultRecord>) = members.into_iter().unzip();
        match tables.iter_mut().find(|table| table.variants == variants) {
            Some(table) => table.measures.push((id, measure, figures)),
            None => tables.push(FigureComparison {
                variants,
                measures: vec![(id, measure, figures)],
            }),
        }
    }

    (tables, other_figures)
}

/// Formats a comparison. The target of most figures is in the header of their column; a different target is beside
/// its figure.
fn comparison_table(comparison: &FigureComparison<'_>, origins: &[FigureOrigin<'_>]) -> String {
    let common_target_of = |figures: &[&ResultRecord]| {
        let count_with_target = |target: &str| {
            figures
                .iter()
                .filter(|figure| figure.target == target)
                .count()
        };
        let common_target = figures
            .iter()
            .map(|figure| figure.target.clone())
            .max_by_key(|target| count_with_target(target));
        common_target.unwrap_or_default()
    };
    let targets: Vec<String> = comparison
        .measures
        .iter()
        .map(|(.., figures)| common_target_of(figures))
        .collect();

    let mut text = String::from("\n| |");
    for ((id, measure, _), target) in comparison.measures.iter().zip(&targets) {
        let target = target_text(target);
        text.push_str(&format!(
            " {id}: {} ({target}) |",
            measure.replace('|', "\\|")
        ));
    }
    text.push_str(&format!("\n|---|{}\n", "---|".repeat(targets.len())));
    for (index, variant) in comparison.variants.iter().enumerate() {
        text.push_str(&format!("| {variant} |"));
        for ((.., figures), target) in comparison.measures.iter().zip(&targets) {
            let figure = figures[index];
            let target_note = if figure.target == *target {
                ""
            } else {
                &format!(" ({})", target_text(&figure.target))
            };
            text.push_str(&format!(" {}{target_note} |", format_cell(figure, origins)));
        }
        text.push('\n');
    }
    text
}

/// Formats a target with no more digits than figures have.
fn target_text(target: &str) -> String {
    let shorten = |word: &str| match word.parse::<f64>() {
        Ok(value) if word.len() > 6 => format_number(value),
        _ => word.to_string(),
    };
    target.split(' ').map(shorten).collect::<Vec<_>>().join(" ")
}

fn format_value(figure: &ResultRecord) -> String {
    let spread = figure.spread.map_or(String::new(), |spread| {
        format!(" ± {}", format_number(spread))
    });
    let measured_text = figure
        .measured
        .map_or("not measured".to_string(), format_number);
    format!("{measured_text}{spread} {}", figure.unit)
        .trim_end()
        .to_string()
}

/// Formats a number with three significant digits.
fn format_number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_string(),
        size if size < 0.001 => format!("{value:.1e}"),
        size if size >= 100.0 => format!("{value:.0}"),
        size => {
            let magnitude = size.log10().floor() as i32;
            format!("{value:.*}", (2 - magnitude).clamp(0, 6) as usize)
        }
    }
}

/// Formats seeds as `1`, `1 to 3` or `1, 4`; as `none` for a result that needs no seed.
fn format_seeds(seeds: &[u64]) -> String {
    let seed_set: BTreeSet<u64> = seeds.iter().copied().collect();
    match (seed_set.first(), seed_set.last()) {
        (Some(first), Some(last)) if first == last => first.to_string(),
        (Some(first), Some(last)) if last - first + 1 == seed_set.len() as u64 => {
            format!("{first} to {last}")
        }
        (Some(_), _) => seed_set
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join(", "),
        _ => "none".to_string(),
    }
}

/// Wraps a paragraph to the maximum width; indents all lines except the first.
fn wrap(text: &str, indent: &str) -> String {
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

    fn project_root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    /// Do the pages of this checkout agree with its data?
    #[test]
    fn the_pages_agree_with_their_data() {
        let wrong = check(project_root()).unwrap();
        assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    }

    const REPRO: &str = r#"{"command": "cachemate repro X-1 --seed 1", "version": "2", "date": "2026-11-22T00:00:00Z",
        "quick": false, "results": [
        {"id": "X-1", "title": "gain", "paper": "p", "target": "at least 1", "verdict": "met", "measured": 1.25,
         "spread": null, "unit": "%", "seeds": [1], "points": []},
        {"id": "X-2", "title": "none", "paper": "p", "target": "at least 1", "verdict": "missed", "measured": null,
         "spread": null, "unit": "%", "seeds": [1], "points": []}]}"#;
    const OLD: &str = r#"{"id":"X-1","title":"gain","target":"at least 1","verdict":"missed","measured":0.5,"spread":0.25,"unit":"%","seeds":[1,2,3],"quick":false,"date":"2026-11-01T00:00:00Z","version":"1","command":"old"}"#;

    fn sample_project(found: usize) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(RESULTS_DIR);
        fs::create_dir_all(dir.join("data")).unwrap();
        let sentences = vec!["\"It gains.\""; found].join(", ");
        let toml_text = format!(
            "introduction = [\"Read.\"]\n[[paper]]\npage = \"x\"\ntitle = \"X\"\nsource = \"A\"\nids = [\"X-\"]\n\
             figure = {{ id = \"X-1\", file = \"x-1-gain\", shows = \"Gain\" }}\n\
             findings = [{sentences}]\n"
        );
        fs::write(dir.join("findings.toml"), toml_text).unwrap();
        fs::write(dir.join("data/old.jsonl"), format!("{OLD}\n")).unwrap();
        fs::write(root.path().join("repro.json"), REPRO).unwrap();
        root
    }

    /// Does a page show the measured figures, mark an older one of more seeds, and omit results without a value?
    #[test]
    fn a_page_shows_measured_figures_and_marks_older_ones() {
        let root = sample_project(1);
        import(root.path(), &root.path().join("repro.json"), "new").unwrap();
        assert_eq!(
            check(root.path()).unwrap().len(),
            2,
            "index and page are not there yet"
        );
        write(root.path()).unwrap();
        assert!(check(root.path()).unwrap().is_empty());
        let page = fs::read_to_string(root.path().join(RESULTS_DIR).join("x.md")).unwrap();
        let row = "| X-1 | gain | at least 1 | 1.25 %, met (1); 0.500 ± 0.250 %, **missed** (2) |";
        assert!(page.contains(row), "{page}");
        assert!(
            page.contains("| 1 | 1 | 2026-11-22 | 2 | `X-1 --seed 1` |"),
            "{page}"
        );
        assert!(
            page.contains("| 2 | 1 to 3 | 2026-11-01 | 1 † | `old` |"),
            "{page}"
        );
        assert!(
            page.contains("- It gains.") && !page.contains("X-2"),
            "{page}"
        );
        let index = fs::read_to_string(root.path().join(RESULTS_DIR).join("index.md")).unwrap();
        assert!(
            index.contains("| [X](x.md) | 0 of 0 | 1 of 1 | 1 |"),
            "{index}"
        );
        fs::write(
            root.path().join(RESULTS_DIR).join("x.md"),
            page.replace("1.25", "9.25"),
        )
        .unwrap();
        fs::write(root.path().join(RESULTS_DIR).join("y.md"), "stray").unwrap();
        assert_eq!(
            check(root.path()).unwrap().len(),
            2,
            "an edited figure and a stray page"
        );
    }

    /// Does each page show the picture that the command draws, with its command, day and version, and is a picture that
    /// was not drawn an error that names it?
    #[test]
    fn a_page_shows_the_picture_that_the_command_drew() {
        let root = sample_project(1);
        let binary = root.path().join("repro.sh");
        let script = format!(
            "#!/bin/sh\n[ \"$1 $2 $3\" = 'repro X-1 --quick' ] || exit 2\nmkdir -p \"$6\"\n\
             echo '{REPRO}' >\"$6/results.json\"\necho drawn >\"$6/x-1-gain.svg\"\n"
        );
        fs::write(&binary, script).unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&binary, executable).unwrap();
        draw_figures(root.path(), &binary, &["x"]).unwrap();
        write(root.path()).unwrap();

        let dir = root.path().join(RESULTS_DIR);
        assert_eq!(
            fs::read_to_string(dir.join("figures/x.svg")).unwrap(),
            "drawn\n"
        );
        let page = fs::read_to_string(dir.join("x.md")).unwrap();
        let picture = "![Gain](figures/x.svg)\n\n`cachemate repro X-1 --quick`, 2026-11-22, 2\n";
        assert!(page.contains(picture), "{page}");

        let findings = fs::read_to_string(dir.join("findings.toml")).unwrap();
        fs::write(
            dir.join("findings.toml"),
            findings.replace("x-1-gain", "x-1-loss"),
        )
        .unwrap();
        let error = draw_figures(root.path(), &binary, &[]).unwrap_err();
        assert!(error.contains("x-1-loss.svg: No such file"), "{error}");
        let error = draw_figures(root.path(), &binary, &["y"]).unwrap_err();
        assert_eq!(error, "found page 'y', expected one of x");
    }

    /// Are ids without a paper, more than ten sentences and damaged lines reported with their place?
    #[test]
    fn errors_in_data_and_findings_are_reported_with_their_place() {
        assert!(
            check(sample_project(11).path())
                .unwrap_err()
                .contains("'x': found 11 sentences, expected 10 at most")
        );
        let root = sample_project(10);
        let data = root.path().join(RESULTS_DIR).join("data/old.jsonl");
        fs::write(&data, OLD.replace("X-1", "Y-1")).unwrap();
        assert!(
            check(root.path())
                .unwrap_err()
                .contains("no paper has the id 'Y-1'")
        );
        fs::write(&data, format!("{OLD}\n{{\"id\": 3}}\n")).unwrap();
        assert!(check(root.path()).unwrap_err().contains("old.jsonl:2: "));
        fs::write(root.path().join("repro.json"), "{}").unwrap();
        assert!(
            import(root.path(), &root.path().join("repro.json"), "new")
                .unwrap_err()
                .contains("missing field")
        );
    }

    /// Do results that differ in one word share a table, with a differing target beside its figure, and do two stay
    /// rows?
    #[test]
    fn results_that_differ_in_one_word_share_a_table() {
        let sample_figure = |title: &str, target: &str, measured: f64| ResultRecord {
            id: "X-1".into(),
            title: title.into(),
            target: target.into(),
            verdict: Some("met".into()),
            measured: Some(measured),
            spread: None,
            unit: "%".into(),
            seeds: vec![1],
            quick: true,
            date: "2026-11-22T00:00:00Z".into(),
            version: "1".into(),
            command: "c".into(),
        };

        let all_figures = [
            sample_figure("a: gain", "at least 1", 1.0),
            sample_figure("b: gain", "at least 1", 2.0),
            sample_figure("c: gain", "at least 3", 3.0),
            sample_figure("a: loss", "at most 1", 0.5),
            sample_figure("b: loss", "at most 1", 0.5),
            sample_figure("gain over 'dio', all", "at least 1", 4.0),
        ];
        let figures: Vec<&ResultRecord> = all_figures.iter().collect();
        let (tables, rest) = group_comparisons(&figures);
        let titles: Vec<&str> = rest.iter().map(|figure| figure.title.as_str()).collect();
        assert_eq!(titles, ["a: loss", "b: loss", "gain over 'dio', all"]);
        let table = "\n| | X-1: gain (at least 1) |\n|---|---|\n| a | 1.00 %, met |\n| b | 2.00 %, met |\n\
                     | c | 3.00 %, met (at least 3) |\n";
        assert_eq!(
            tables
                .iter()
                .map(|comparison| comparison_table(comparison, &figure_origins(&figures)))
                .collect::<Vec<_>>(),
            [table]
        );
        assert_eq!(
            split_title("gain over 'dio', all"),
            Some(("dio", "gain over …, all".to_string()))
        );
        assert_eq!(split_title("Pain's schedule above the optimal one's"), None);
    }

    /// Are numbers written with three significant digits and seeds as ranges?
    #[test]
    fn numbers_have_three_digits_and_seeds_are_ranges() {
        let numbers = [0.0, 148.3, -17.46, 1.2345, 0.0318, 3.55e-15].map(format_number);
        assert_eq!(numbers, ["0", "148", "-17.5", "1.23", "0.0318", "3.6e-15"]);
        assert_eq!(
            ["at least 0.5154201066721874", "-0.5 to 0.5"].map(target_text),
            ["at least 0.515", "-0.5 to 0.5"]
        );
        assert_eq!(
            [&[1u64][..], &[1, 2, 3], &[1, 4], &[]].map(format_seeds),
            ["1", "1 to 3", "1, 4", "none"]
        );
    }
}
