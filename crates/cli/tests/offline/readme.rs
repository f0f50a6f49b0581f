//! Do the commands print the output that the README shows?

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

fn project_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// Creates the directory in which a reader of the README runs the commands, with the bundled recordings and the
/// scenarios.
fn prepare_workplace() -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("readme");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    for name in ["recordings", "scenarios"] {
        symlink(project_root().join(name), dir.join(name)).unwrap();
    }
    dir
}

/// Commands of the README with the lines shown below them, except blank ones.
fn shown_commands(page: &str) -> Vec<(String, Vec<String>)> {
    let mut commands_shown: Vec<(String, Vec<String>)> = Vec::new();
    let mut in_output = false;
    for line in page.lines().map(str::trim_end) {
        if line.starts_with("```") {
            in_output = false;
        } else if let Some(command) = line.strip_prefix("$ cachemate ") {
            commands_shown.push((command.to_string(), Vec::new()));
            in_output = true;
        } else if in_output && !line.is_empty() {
            commands_shown.last_mut().unwrap().1.push(line.to_string());
        }
    }
    commands_shown
}

/// The first shown line that is not the next one in the output; after `...` it may come later. Only after `...` may
/// lines follow the last one.
fn first_missing_line<'a>(shown: &'a [String], output: &str) -> Option<&'a str> {
    let mut printed = output
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty());
    let mut skipping = false;
    for line in shown {
        if line == "..." {
            skipping = true;
            continue;
        }
        let is_there = if skipping {
            printed.any(|next| next == line)
        } else {
            printed.next() == Some(line)
        };
        if !is_there {
            return Some(line);
        }
        skipping = false;
    }
    (!skipping && printed.next().is_some()).then_some("(the end)")
}

/// Does every command in the README print the output shown there?
///
/// Cost: 25 s of CPU, because `predict` runs four recordings; `plan` reuses these runs.
#[test]
fn every_readme_command_prints_the_output_shown() {
    let dir = prepare_workplace();
    let commands = shown_commands(&fs::read_to_string(project_root().join("README.md")).unwrap());
    assert!(commands.len() >= 4, "{commands:?}");
    for (command, lines) in commands {
        let mut cachemate = Command::new(env!("CARGO_BIN_EXE_cachemate"));
        cachemate
            .args(command.split_whitespace())
            .current_dir(&dir)
            .env("CACHEMATE_RECORDINGS", dir.join("recordings"))
            .env("CACHEMATE_CACHE_DIR", dir.join("cache"));
        let finished = cachemate.output().unwrap();
        assert!(
            finished.status.success(),
            "cachemate {command}: {}",
            String::from_utf8_lossy(&finished.stderr)
        );
        let output = String::from_utf8_lossy(&finished.stdout);
        let missing = first_missing_line(&lines, &output);
        assert_eq!(
            missing, None,
            "cachemate {command} does not print this line of the README there:\n{output}"
        );
    }
}

/// Does the picture on the first screen show slowdowns that the README's matrix has, the largest four in order, and the
/// plan's?
#[test]
fn the_picture_has_the_figures_of_the_readme() {
    let page = fs::read_to_string(project_root().join("README.md")).unwrap();
    let picture = fs::read_to_string(project_root().join("docs/pictures/plan.svg")).unwrap();
    let names = ["stencil", "python3", "xz", "bzip2"];
    let shown = shown_commands(&page);
    let lines = |command: &str| {
        &shown
            .iter()
            .find(|(line, _)| line.starts_with(command))
            .unwrap()
            .1
    };
    let matrix = lines("predict")
        .iter()
        .skip_while(|line| !line.starts_with("        stencil"))
        .skip(1);
    let mut slowdowns: Vec<(f64, &str, &str)> = Vec::new();
    for (program, line) in names.iter().zip(matrix) {
        let cells = line.split_whitespace().skip(1);
        let values = cells.map(|cell| {
            cell.trim_end_matches(|mark: char| !mark.is_ascii_digit())
                .parse()
                .unwrap()
        });
        let others = names
            .iter()
            .zip(values)
            .filter(|(co_runner, _)| *co_runner != program);
        slowdowns
            .extend(others.map(|(co_runner, percent): (_, f64)| (percent, *program, *co_runner)));
    }
    slowdowns.sort_by(|a, b| b.0.total_cmp(&a.0));

    // A row of the picture is two names in one line, and a figure at the same height.
    let text_at = |element: &str| {
        let (attributes, text) = element.split_once('>')?;
        let height = attributes.split_once(" y=\"")?.1.split_once('"')?.0;
        Some((height.to_string(), text.split_once('<')?.0.to_string()))
    };
    let texts = || picture.split("<text").skip(1).filter_map(text_at);
    let mut rows = Vec::new();
    for (height, figure) in texts().filter(|(_, text)| text.ends_with(" %")) {
        let at_height = texts().filter(|(other, _)| *other == height);
        let row: Vec<String> = at_height.map(|(_, text)| text).collect();
        let [program, co_runner, _] = row.as_slice() else {
            panic!("{row:?}");
        };
        let has_pair = |(_, of, beside): &&(f64, &str, &str)| {
            program.as_str() == *of && co_runner.as_str() == *beside
        };
        let (percent, ..) = slowdowns.iter().find(has_pair).unwrap();
        assert_eq!(
            figure,
            format!("{percent} %"),
            "{program} beside {co_runner}"
        );
        rows.push(*percent);
    }
    let largest: Vec<f64> = slowdowns.iter().map(|(percent, ..)| *percent).collect();
    assert!(rows.len() > 4 && rows[..4] == largest[..4], "{rows:?}");

    let boxes = lines("plan")
        .iter()
        .filter(|line| line.contains(" % slower ("))
        .flat_map(|line| line.split('│'));
    let slowdowns: Vec<f64> = boxes
        .filter_map(|cell| {
            cell.split_once(" % slower")?
                .0
                .split_whitespace()
                .last()?
                .parse()
                .ok()
        })
        .collect();
    assert_eq!(slowdowns.len(), names.len(), "{slowdowns:?}");
    for percent in slowdowns {
        assert!(
            picture.contains(&format!(">{percent:.1} % slower<")),
            "{percent}"
        );
    }
}

/// Are a missing line, another order, and output beyond the shown end detected?
#[test]
fn differences_from_the_shown_output_are_detected() {
    let shown = ["a", "...", "c"].map(str::to_string);
    assert_eq!(first_missing_line(&shown, "a\n\nb\nc\n"), None);
    assert_eq!(first_missing_line(&shown, "a\nb\n"), Some("c"));
    assert_eq!(first_missing_line(&shown, "b\na\nc\n"), Some("a"));
    assert_eq!(first_missing_line(&shown, "a\nc\nd\n"), Some("(the end)"));
}
