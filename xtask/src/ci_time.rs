//! Measures the cost of CI: CPU and wall seconds of each stage and of the slowest tests, compared with an earlier
//! record.
//!
//! Stages append their cost to `target/ci-time.jsonl`. `ci-time report` prints the costs beside `.ci/times.json`, the
//! record of an earlier run. It names each stage that has grown by half beyond the growth of the median stage, because
//! a slower or busier host slows all stages alike. It never fails, because a cost is no property of the sources alone: in
//! one run on a crowded host, the emulated guest, which runs in real time, cost 4.4 times the record, and the other
//! stages between 0.6 and 2.9 times.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde::{Deserialize, Serialize};

const CURRENT_FILE: &str = "target/ci-time.jsonl";
const RECORD_FILE: &str = ".ci/times.json";
/// Minimum growth of a stage's cost over its record that is named, on a host as fast as the record's.
const MIN_NAMED_GROWTH: f64 = 1.5;
/// Minimum number of stages from which the host's slowdown, the growth of the median stage, is computed.
const MIN_COMPARED_STAGES: usize = 3;
/// Minimum CPU seconds of a stage that is judged; the costs of shorter stages vary too much.
const MIN_JUDGED_CPU_S: f64 = 20.0;
/// Number of slowest tests that a report names.
const SLOWEST_TESTS: usize = 20;
/// Unit of the times in `/proc/PID/stat`, which the kernel's interface fixes.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU and wall seconds of one stage or test.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StageCost {
    pub name: String,
    pub cpu_s: f64,
    pub wall_s: f64,
    /// The slowest tests, if the stage runs tests; otherwise empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tests: Vec<StageCost>,
}

/// CPU time of the process and of its ended children; `None` once the process has exited.
pub fn process_cpu_s(pid: &str) -> Option<f64> {
    let (own_ticks, child_ticks) =
        cpu_ticks(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    Some((own_ticks + child_ticks) as f64 / TICKS_PER_SECOND)
}

/// Ticks of a process, and of its ended children. The program's name, in parentheses, may contain
/// blanks.
fn cpu_ticks(stat: &str) -> Option<(u64, u64)> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks_at = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some((ticks_at(11)? + ticks_at(12)?, ticks_at(13)? + ticks_at(14)?))
}

/// Runs a command as the stage `name`, and appends its cost whether it succeeds or not.
pub fn run_stage(root: &Path, name: &str, command: &[&str]) -> Result<(), String> {
    let [program, arguments @ ..] = command else {
        return Err("ci-time stage NAME COMMAND...".to_string());
    };

    let (start, cpu_s) = (Instant::now(), process_cpu_s("self").unwrap_or_default());
    let status = Command::new(program)
        .args(arguments)
        .status()
        .map_err(|error| format!("{program}: {error}"))?;
    let cpu_s = process_cpu_s("self").unwrap_or_default() - cpu_s;
    append(
        root,
        &StageCost {
            name: name.to_string(),
            cpu_s,
            wall_s: start.elapsed().as_secs_f64(),
            tests: Vec::new(),
        },
    )?;

    if status.success() {
        Ok(())
    } else {
        Err(format!("{name}: {program} ended with {status}"))
    }
}

/// Appends a cost to the file of this run.
pub fn append(root: &Path, cost: &StageCost) -> Result<(), String> {
    let path = root.join(CURRENT_FILE);
    let line = serde_json::to_string(cost).map_err(|error| error.to_string())?;
    let file_result = fs::create_dir_all(root.join("target"))
        .and_then(|()| fs::OpenOptions::new().create(true).append(true).open(&path));
    file_result
        .and_then(|mut file| writeln!(file, "{line}"))
        .map_err(|error| format!("{}: {error}", path.display()))
}

/// Removes the stages of an earlier run.
pub fn remove_stages(root: &Path) -> Result<(), String> {
    match fs::remove_file(root.join(CURRENT_FILE)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{CURRENT_FILE}: {error}"))
        }
        _ => Ok(()),
    }
}

/// Prints this run's stages beside the record, and names stages that have grown more than the host has slowed down.
pub fn report(root: &Path) -> Result<(), String> {
    let current = read_current(root)?;
    let record = read_record(root)?;
    print!("{}", render(&current, &record));
    let slowdown = host_slowdown(&current, &record);
    println!("this host, by its median stage: {slowdown:.2} times the CPU seconds on record");
    for growth in current
        .iter()
        .filter_map(|cost| describe_growth(cost, &record, slowdown))
    {
        println!("ci-time: {growth}");
    }
    Ok(())
}

/// Stores the costs of this run as the record.
pub fn store_record(root: &Path) -> Result<(), String> {
    let mut current = read_current(root)?;
    current
        .iter_mut()
        .for_each(|cost| cost.tests.truncate(SLOWEST_TESTS));
    let text = serde_json::to_string_pretty(&current).map_err(|error| error.to_string())?;
    fs::write(root.join(RECORD_FILE), text + "\n")
        .map_err(|error| format!("{RECORD_FILE}: {error}"))
}

fn read_current(root: &Path) -> Result<Vec<StageCost>, String> {
    let text = fs::read_to_string(root.join(CURRENT_FILE))
        .map_err(|error| format!("{CURRENT_FILE}: {error}"))?;
    let parse =
        |line: &str| serde_json::from_str(line).map_err(|error| format!("{CURRENT_FILE}: {error}"));
    text.lines().map(parse).collect()
}

fn read_record(root: &Path) -> Result<Vec<StageCost>, String> {
    match fs::read_to_string(root.join(RECORD_FILE)) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| format!("{RECORD_FILE}: {error}")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(format!("{RECORD_FILE}: {error}")),
    }
}

fn find_recorded<'a>(name: &str, record: &'a [StageCost]) -> Option<&'a StageCost> {
    record.iter().find(|cost| cost.name == name)
}

/// `None` if the stage is too short to be judged.
fn comparable_record<'a>(name: &str, record: &'a [StageCost]) -> Option<&'a StageCost> {
    find_recorded(name, record).filter(|recorded| recorded.cpu_s >= MIN_JUDGED_CPU_S)
}

/// Growth of the median stage, at least 1; 1 if too few stages can be compared.
fn host_slowdown(current: &[StageCost], record: &[StageCost]) -> f64 {
    let ratio = |cost: &StageCost| {
        comparable_record(&cost.name, record).map(|recorded| cost.cpu_s / recorded.cpu_s)
    };
    let mut ratios: Vec<f64> = current.iter().filter_map(ratio).collect();
    ratios.sort_by(f64::total_cmp);
    if ratios.len() < MIN_COMPARED_STAGES {
        1.0
    } else {
        ratios[ratios.len() / 2].max(1.0)
    }
}

/// Names a stage that takes more than [`MIN_NAMED_GROWTH`] times its record, on a host that needs `slowdown` times the
/// record's CPU seconds.
fn describe_growth(cost: &StageCost, record: &[StageCost], slowdown: f64) -> Option<String> {
    let recorded = comparable_record(&cost.name, record)?;
    let has_grown = cost.cpu_s > MIN_NAMED_GROWTH * slowdown * recorded.cpu_s;
    has_grown.then(|| {
        format!(
            "'{}' takes {:.0} CPU s, {:.0} on record",
            cost.name, cost.cpu_s, recorded.cpu_s
        )
    })
}

fn render(current: &[StageCost], record: &[StageCost]) -> String {
    let format_row = |cost: &StageCost, record: &[StageCost]| {
        let recorded_text = find_recorded(&cost.name, record)
            .map_or("-".to_string(), |recorded| format!("{:.1}", recorded.cpu_s));
        format!(
            "{:>8.1} {:>8.1} {recorded_text:>10}  {}\n",
            cost.cpu_s, cost.wall_s, cost.name
        )
    };
    let mut text = format!("{:>8} {:>8} {:>10}  stage\n", "CPU s", "wall s", "recorded");
    current
        .iter()
        .for_each(|cost| text += &format_row(cost, record));
    let sum_over_stages = |value: fn(&StageCost) -> f64| current.iter().map(value).sum::<f64>();
    text += &format!(
        "{:>8.1} {:>8.1} {:>10}  in all\n",
        sum_over_stages(|cost| cost.cpu_s),
        sum_over_stages(|cost| cost.wall_s),
        ""
    );
    for stage in current.iter().filter(|cost| !cost.tests.is_empty()) {
        let recorded_tests =
            find_recorded(&stage.name, record).map_or(&[][..], |recorded| &recorded.tests);
        text += &format!("slowest of '{}'\n", stage.name);
        stage
            .tests
            .iter()
            .take(SLOWEST_TESTS)
            .for_each(|test| text += &format_row(test, recorded_tests));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage_cost(name: &str, cpu_s: f64) -> StageCost {
        StageCost {
            name: name.to_string(),
            cpu_s,
            wall_s: cpu_s / 2.0,
            tests: Vec::new(),
        }
    }

    /// Is growth beyond the host's slowdown named, of stages that are long enough and on record?
    #[test]
    fn growth_beyond_the_hosts_is_named() {
        let record = [stage_cost("build", 100.0), stage_cost("short", 2.0)];
        let growth =
            |name, cpu_s, slowdown| describe_growth(&stage_cost(name, cpu_s), &record, slowdown);
        assert_eq!(growth("build", 149.0, 1.0), None);
        let message = growth("build", 151.0, 1.0);
        assert!(message.is_some_and(|text| text.contains("151 CPU s, 100 on record")));
        assert_eq!(growth("build", 190.0, 1.3), None);
        assert_eq!(growth("short", 9.0, 1.0), None);
        assert_eq!(growth("new", 900.0, 1.0), None);
    }

    /// Is the host's slowdown that of the median stage, so that a single stage that has grown is still named?
    #[test]
    fn a_slow_host_slows_the_median_stage_and_hides_no_growth() {
        let record = [
            stage_cost("lint", 100.0),
            stage_cost("tests", 100.0),
            stage_cost("build", 100.0),
            stage_cost("short", 2.0),
        ];
        let slow = [
            stage_cost("lint", 130.0),
            stage_cost("tests", 120.0),
            stage_cost("build", 250.0),
            stage_cost("short", 20.0),
        ];
        let slowdown = host_slowdown(&slow, &record);
        assert_eq!(slowdown, 1.3);
        let has_grown = |cost: &StageCost| describe_growth(cost, &record, slowdown).is_some();
        assert_eq!(slow.each_ref().map(has_grown), [false, false, true, false]);
        assert_eq!(host_slowdown(&slow[..2], &record), 1.0);
    }

    /// Does a stage that runs a command record its cost and pass its failure on?
    #[test]
    fn a_stage_is_recorded_whether_it_succeeds_or_not() {
        let root = tempfile::tempdir().unwrap();
        run_stage(root.path(), "fine", &["true"]).unwrap();
        assert!(run_stage(root.path(), "broken", &["false"]).is_err());
        let names: Vec<String> = read_current(root.path())
            .unwrap()
            .into_iter()
            .map(|cost| cost.name)
            .collect();
        assert_eq!(names, ["fine", "broken"]);
        store_record(root.path()).unwrap_err();
        fs::create_dir(root.path().join(".ci")).unwrap();
        store_record(root.path()).unwrap();
        assert_eq!(read_record(root.path()).unwrap().len(), 2);
        remove_stages(root.path()).unwrap();
        assert!(read_current(root.path()).is_err());
    }

    /// Are the four times found after a name with blanks and parentheses?
    #[test]
    fn times_are_found_after_any_name() {
        let stat = "7 (a) b) R 1 7 7 0 -1 4194304 9 8 0 0 31 4 15 6 20 0 1 0 99 0 0";
        assert_eq!(cpu_ticks(stat), Some((35, 21)));
        assert_eq!(cpu_ticks("7 (cut"), None);
    }

    /// Does the report show each stage beside its record, and the tests of a stage below it?
    #[test]
    fn a_report_shows_each_stage_beside_its_record() {
        let tests = vec![stage_cost("x::slow", 9.0)];
        let current = [StageCost {
            tests,
            ..stage_cost("tests", 50.0)
        }];
        let text = render(&current, &[stage_cost("tests", 40.0)]);
        assert!(
            text.contains("    50.0     25.0       40.0  tests\n"),
            "{text}"
        );
        assert!(
            text.contains("slowest of 'tests'\n     9.0      4.5          -  x::slow\n"),
            "{text}"
        );
    }
}
