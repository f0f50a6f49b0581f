//! Checks the rules of STYLE.md and ARCHITECTURE.md that can be checked automatically.
//!
//! A rule that is only written is broken by whoever has not read it, which nobody notices in
//! review, because one exception looks harmless. So each of these rules is checked in every run of
//! the tests, and a complaint names the file, the line and the rule.
//!
//! For example, a pure crate that calls `std::time::Instant::now` is complained about, and so is a
//! page that no index lists, or an edge between two crates that ARCHITECTURE.md does not have.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{crate_map, dependency_cycles, page_index};

/// The crates that each crate may use, as in ARCHITECTURE.md's code map. A crate that is not listed here is rejected.
const ALLOWED_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("agent", &[]),
    ("files", &[]),
    ("spec", &["core", "files"]),
    ("locality", &["core"]),
    ("papers", &["core", "locality"]),
    // `auto` combines the mechanisms of the papers, with their solvers; nothing runs back.
    ("auto", &["core", "locality", "papers"]),
    ("sim", &["core", "locality"]),
    ("interval", &["core", "locality"]),
    ("gangs", &[]),
    ("linux", &["core", "files", "agent", "gangs"]),
    ("trace", &["core", "files"]),
    ("report", &["core"]),
    ("pipeline", &["core", "locality", "papers", "auto", "trace"]),
    (
        "forecast",
        &["core", "locality", "papers", "interval", "trace"],
    ),
    (
        "repro",
        &[
            "core", "files", "locality", "papers", "pipeline", "sim", "interval", "forecast",
            "trace", "report", "spec",
        ],
    ),
    ("fleet", &["core", "interval", "report"]),
    (
        "cluster",
        &["core", "files", "fleet", "daemon", "page", "spec"],
    ),
    (
        "scenario",
        &["core", "pipeline", "sim", "interval", "spec", "trace"],
    ),
    ("study", &["core", "locality", "papers", "report", "trace"]),
    ("fuzzing", &["core", "files", "spec", "linux", "trace"]),
    (
        "page",
        &["core", "papers", "auto", "pipeline", "trace", "report"],
    ),
    (
        "daemon",
        &[
            "core", "files", "auto", "pipeline", "linux", "agent", "trace", "report", "page",
            "spec",
        ],
    ),
    (
        "python",
        &[
            "core", "files", "spec", "locality", "papers", "pipeline", "sim", "trace", "report",
            "scenario", "study", "page", "forecast",
        ],
    ),
    (
        "cli",
        &[
            "core", "files", "spec", "locality", "papers", "pipeline", "sim", "interval", "linux",
            "trace", "report", "forecast", "repro", "scenario", "study", "page", "daemon", "fleet",
            "cluster",
        ],
    ),
];

/// Crates that must not use I/O, clocks or hash order.
const PURE_CRATES: &[&str] = &[
    "core", "locality", "papers", "auto", "sim", "interval", "report", "fleet",
];

const IMPURE_CALLS: &[&str] = &[
    "std::fs",
    "std::net",
    "Instant::now",
    "SystemTime",
    "std::env::",
];
/// Types whose iteration order differs between runs. The locality engines look up lines in hash maps, but never iterate
/// over them.
const HASH_TYPES: &[&str] = &["HashMap", "HashSet"];
const HOST_MATH_CALLS: &[&str] = &[
    ".ln()", ".log2()", ".log10()", ".exp()", ".exp2()", ".powf(", ".sin()", ".cos()", ".tan()",
];
const UNFINISHED_MARKS: &[&str] = &["todo!(", "unimplemented!(", "TODO", "FIXME", "XXX"];
/// Types that only the pipeline may build, because decisions made elsewhere could differ from those of a replay.
const PIPELINE_PARTS: &[&str] = &[
    "Profiler::new(",
    "Profiler::default()",
    "Verifier::new(",
    "ReferencePredictor {",
];
/// Crates that define these types, and the crate that builds them.
const PIPELINE_CRATES: &[&str] = &["pipeline", "locality", "papers", "auto"];
/// Markup that `maud` does not escape, and the files that write it: for styles and drawings of their own.
const RAW_MARKUP: &str = "PreEscaped";
const RAW_MARKUP_FILES: [&str; 2] = [
    "crates/report/src/figure/svg.rs",
    "crates/report/src/html_page.rs",
];
const POLICY_HEADINGS: &[&str] = &[
    "## Problem",
    "## Method",
    "## Properties",
    "## Typical use",
    "## Ready for production?",
    "## Cost",
    "## Source",
];

/// Complaints have the form `file:line: description`.
///
/// # Errors
/// The tree cannot be read.
pub fn check(root: &Path) -> io::Result<Vec<String>> {
    let mut complaints = Vec::new();
    for (crate_name, path) in crate_source_dirs(root)? {
        check_dependencies(&crate_name, &path, &mut complaints)?;
        let files = rust_files(&path)?;
        for file in &files {
            check_source(&crate_name, root, file, &mut complaints)?;
        }
        let code: Vec<PathBuf> = files
            .into_iter()
            .filter(|file| !is_test_file(file))
            .collect();
        dependency_cycles::check(&crate_name, &path.join("src"), &code, &mut complaints)?;
    }

    for dir in ["xtask", "benches"] {
        for file in rust_files(&root.join(dir))? {
            check_source(dir, root, &file, &mut complaints)?;
        }
    }
    check_policy_pages(root, &mut complaints)?;
    check_pages(root, &mut complaints)?;
    Ok(complaints)
}

/// Checks that the indexes list every page.
fn check_pages(root: &Path, complaints: &mut Vec<String>) -> io::Result<()> {
    let mut pages = Vec::new();
    for entry in fs::read_dir(root)? {
        let path = entry?.path();
        let is_hidden = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with('.'));
        if is_hidden {
            continue;
        }
        for file in files_below(&path)? {
            if file.extension().is_some_and(|extension| extension == "md") {
                let shown_path = file.strip_prefix(root).unwrap_or(&file);
                pages.push(shown_path.display().to_string());
            }
        }
    }
    pages.sort();
    page_index::check(root, &pages, complaints)
}

/// Directories by name; the Python package is one of them.
fn crate_source_dirs(root: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let python = root.join("python");
    let mut crates = Vec::from_iter(python.exists().then(|| ("python".to_string(), python)));
    for entry in fs::read_dir(root.join("crates"))? {
        let entry = entry?;
        if entry.path().join("Cargo.toml").exists() {
            crates.push((
                entry.file_name().to_string_lossy().into_owned(),
                entry.path(),
            ));
        }
    }
    crates.sort();
    Ok(crates)
}

fn check_dependencies(
    crate_name: &str,
    path: &Path,
    complaints: &mut Vec<String>,
) -> io::Result<()> {
    let text = fs::read_to_string(path.join("Cargo.toml"))?;
    let manifest_path = if crate_name == "python" {
        "python/Cargo.toml".to_string()
    } else {
        format!("crates/{crate_name}/Cargo.toml")
    };
    let manifest: toml::Table = match text.parse() {
        Ok(manifest) => manifest,
        Err(error) => {
            complaints.push(format!("{manifest_path}: {error}"));
            return Ok(());
        }
    };

    let Some((_, allowed_crates)) = ALLOWED_DEPENDENCIES
        .iter()
        .find(|(name, _)| *name == crate_name)
    else {
        complaints.push(format!(
            "crates/{crate_name}: not in tidy's table of crates; ARCHITECTURE.md's code map comes first"
        ));
        return Ok(());
    };
    let default_features = manifest
        .get("features")
        .and_then(|features| features.get("default"));

    // Whoever builds the command gets all of it; the package of the daemon asks for less.
    let complete_command = toml::Value::from(vec!["complete"]);
    let is_complete_command = crate_name == "cli" && default_features == Some(&complete_command);
    if default_features.is_some() && !is_complete_command {
        complaints.push(format!(
            "{manifest_path}: features are for what only tests want; none is on by itself, except the command's 'complete'"
        ));
    }
    for used in crate_map::used_crates(&manifest) {
        if !allowed_crates.contains(&used) {
            complaints.push(format!(
                "{manifest_path}: {crate_name} may not use {used} (ARCHITECTURE.md, code map)"
            ));
        }
    }

    Ok(())
}

fn rust_files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = files_below(dir)?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    Ok(paths)
}

/// A path of a file gives that file; build products are skipped.
fn files_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut paths, mut pending) = (Vec::new(), vec![dir.to_path_buf()]);
    while let Some(path) = pending.pop() {
        if path.is_file() {
            paths.push(path);
        } else if path.is_dir() && path.file_name().is_none_or(|name| name != "target") {
            for entry in fs::read_dir(&path)? {
                pending.push(entry?.path());
            }
        }
    }
    paths.sort();
    Ok(paths)
}

/// Tests, examples and build scripts are only checked for unfinished work.
pub fn is_test_file(path: &Path) -> bool {
    let is_test_dir = |part: &std::ffi::OsStr| part.to_string_lossy().ends_with("_tests");
    let is_in_test_dir = path.iter().any(|part| {
        part == "tests" || part == "examples" || part == "benches" || is_test_dir(part)
    });
    let name = path
        .file_stem()
        .map(|stem| stem.to_string_lossy().into_owned())
        .unwrap_or_default();
    is_in_test_dir
        || name == "tests"
        || name.ends_with("_tests")
        || name == "build"
        || name == "conformance"
}

fn check_source(
    crate_name: &str,
    root: &Path,
    path: &Path,
    complaints: &mut Vec<String>,
) -> io::Result<()> {
    let text = fs::read_to_string(path)?;
    let shown_path = path
        .strip_prefix(root)
        .unwrap_or(path)
        .display()
        .to_string();
    let mut is_in_tests = is_test_file(path.strip_prefix(root).unwrap_or(path));
    let is_pure = PURE_CRATES.contains(&crate_name);

    for (index, line) in text.lines().enumerate() {
        let mut complain =
            |complaint: String| complaints.push(format!("{shown_path}:{}: {complaint}", index + 1));
        let code = line.split("//").next().unwrap_or_default();
        is_in_tests |= code.trim_start().starts_with("#[cfg(test)]")
            || code.trim_start().starts_with("#![cfg(test)]");
        if crate_name == "xtask" {
            continue; // names the words it looks for
        }

        if let Some(word) = UNFINISHED_MARKS.iter().find(|word| line.contains(**word)) {
            complain(format!("'{word}': finish it or write it down in an issue"));
        }
        if line.contains(RAW_MARKUP) && !RAW_MARKUP_FILES.contains(&shown_path.as_str()) {
            complain(format!(
                "'{RAW_MARKUP}': only crates/report writes raw markup, in two files"
            ));
        }
        if is_in_tests {
            continue;
        }

        if code.contains(".unwrap()") {
            complain("`.unwrap()`: return an error, or `.expect(\"the invariant\")`".to_string());
        }
        let hash_types = HASH_TYPES.iter().filter(|_| crate_name != "locality");
        if let Some(word) = IMPURE_CALLS
            .iter()
            .chain(hash_types)
            .find(|word| is_pure && code.contains(**word))
        {
            complain(format!("'{word}' in the pure crate '{crate_name}'"));
        }

        let is_misplaced =
            |word: &&&str| !PIPELINE_CRATES.contains(&crate_name) && code.contains(**word);
        if let Some(word) = PIPELINE_PARTS.iter().find(is_misplaced) {
            complain(format!(
                "'{word}' is built in crates/pipeline and nowhere else"
            ));
        }

        if let Some(word) = HOST_MATH_CALLS
            .iter()
            .find(|word| is_pure && code.contains(**word))
        {
            complain(format!("'{word}' differs between hosts: take it from libm"));
        }
    }

    Ok(())
}

/// Checks that every policy has its own page, or a heading with its name on a shared page.
fn check_policy_pages(root: &Path, complaints: &mut Vec<String>) -> io::Result<()> {
    let mut pages = Vec::new();
    for path in files_below(&root.join("docs/policies"))? {
        let stem = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
            .unwrap_or_default();
        pages.push((stem, fs::read_to_string(&path)?));
    }
    for (stem, text) in &pages {
        let absent_headings = POLICY_HEADINGS
            .iter()
            .filter(|heading| !text.lines().any(|line| line == **heading));
        complaints.extend(
            absent_headings
                .map(|heading| format!("docs/policies/{stem}.md: no section '{heading}'")),
        );
    }
    for file in rust_files(&root.join("crates/papers/src/policies"))? {
        let name = file
            .file_stem()
            .map(|stem| stem.to_string_lossy().replace('_', "-"))
            .unwrap_or_default();
        let has_own_directory = file.parent().is_some_and(|dir| !dir.ends_with("policies"));
        if name == "mod" || name.ends_with("-tests") || name == "tests" || has_own_directory {
            continue;
        }
        let has_heading = |text: &str| {
            text.lines().any(|line| {
                line.strip_prefix("##")
                    .is_some_and(|rest| rest.trim_start_matches('#').trim() == name)
            })
        };
        if !pages
            .iter()
            .any(|(stem, text)| *stem == name || has_heading(text))
        {
            complaints.push(format!(
                "docs/policies/{name}.md: missing; every policy has a page"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does this checkout follow its own rules?
    #[test]
    fn this_checkout_passes_tidy() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let complaints = check(root).unwrap();
        assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
    }

    fn complaints_of(files: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("crates")).unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        check(root.path()).unwrap()
    }

    /// Is a forbidden edge between crates reported?
    #[test]
    fn a_forbidden_edge_between_crates_is_reported() {
        let manifest = "[dependencies]\ncachemate-cli.workspace = true\n";
        let complaints = complaints_of(&[("crates/core/Cargo.toml", manifest)]);
        assert_eq!(
            complaints,
            ["crates/core/Cargo.toml: core may not use cli (ARCHITECTURE.md, code map)"]
        );
    }

    /// Is a feature that is enabled by default reported, and an optional one accepted?
    #[test]
    fn a_feature_enabled_by_default_is_reported() {
        let complaint_count =
            |manifest: &str| complaints_of(&[("crates/core/Cargo.toml", manifest)]).len();
        assert_eq!(
            (
                complaint_count("[features]\nchaos = []\n"),
                complaint_count("[features]\ndefault = [\"chaos\"]\nchaos = []\n")
            ),
            (0, 1)
        );
    }

    /// Are impure words, unwraps and unfinished work reported in code, and accepted in tests?
    #[test]
    fn impure_words_count_in_code_but_not_in_tests() {
        let source = "use std::fs;\nfn f() { x.unwrap(); y.ln(); }\n#[cfg(test)]\nmod tests { fn g() { x.unwrap(); } }\n";
        let complaints = complaints_of(&[
            ("crates/core/Cargo.toml", ""),
            ("crates/core/src/lib.rs", source),
        ]);
        assert_eq!(complaints.len(), 3, "{complaints:?}");
        let complaints = complaints_of(&[
            ("crates/linux/Cargo.toml", ""),
            ("crates/linux/src/lib.rs", "use std::fs;\n"),
        ]);
        assert!(complaints.is_empty(), "{complaints:?}");
    }

    /// Is a second place that builds a profiler or wraps a policy reported, and the pipeline itself accepted?
    #[test]
    fn only_the_pipeline_builds_its_parts() {
        let source =
            "fn f() { let p = CountersProfiler::new(level, 1.0); Verifier::new(policy, None); }\n";
        let in_crate = |crate_name: &str, text: &str| {
            complaints_of(&[
                (&format!("crates/{crate_name}/Cargo.toml"), ""),
                (&format!("crates/{crate_name}/src/lib.rs"), text),
            ])
        };
        assert_eq!(in_crate("repro", source).len(), 1);
        assert!(in_crate("pipeline", source).is_empty());
    }

    /// Is markup that is not escaped reported everywhere, tests included, but in two files?
    #[test]
    fn raw_markup_stands_in_two_files_only() {
        let source = format!("#[cfg(test)]\nfn f() {{ {RAW_MARKUP}(\"\") }}\n");
        let in_file =
            |file: &str| complaints_of(&[("crates/report/Cargo.toml", ""), (file, &source)]);
        assert_eq!(in_file("crates/report/src/html.rs").len(), 1);
        for file in RAW_MARKUP_FILES {
            assert!(in_file(file).is_empty(), "{file}");
        }
    }

    /// Does a policy without its page, or with half a page, fail?
    #[test]
    fn a_policy_without_a_complete_page_fails() {
        let policy = ("crates/papers/src/policies/best_fit.rs", "");
        let manifest = ("crates/papers/Cargo.toml", "");
        assert_eq!(complaints_of(&[manifest, policy]).len(), 1);

        let whole_text = POLICY_HEADINGS.join("\n");
        let path = "docs/policies/best-fit.md";
        assert!(complaints_of(&[manifest, policy, (path, &whole_text)]).is_empty());
        for heading in POLICY_HEADINGS {
            let half = whole_text.replace(heading, "");
            assert_eq!(complaints_of(&[manifest, policy, (path, &half)]).len(), 1);
        }

        let shared_text = whole_text.replace("## Method", "## Method\n### best-fit");
        let shared = ("docs/policies/baselines.md", shared_text.as_str());
        assert!(complaints_of(&[manifest, policy, shared]).is_empty());
    }
}
