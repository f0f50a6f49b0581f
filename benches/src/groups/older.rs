//! The simulated hardware against that of an older bench program, by the same rules: whole processes in turn.
//!
//! Both run the group `machine` once per round; this one uses the machine files of `--machines` (those of the older
//! program, if the model has changed since). Each program uses its own recordings, which are the same as long as the
//! simulated programs are.

use super::{BenchGroup, Options};
use crate::harness::{ResultRow, median};
use std::path::Path;
use std::process::Command;

pub const GROUP: BenchGroup =
    BenchGroup { name: "older", about: "the group machine against an older program's (--older)", run };

/// Rows of the group `machine` that are compared.
const CONTENDERS: [&str; 2] = ["machine", "flat cost: 64 CPUs"];

/// Targets of the machines relative to e882cff.
const SPEED_RATIO_TARGETS: [(&str, f64); 4] =
    [("niagara-2core", 1.75), ("power5-2x2x2", 1.6), ("opteron-2350", 1.2), ("xeon-x5365", 1.2)];

/// Input, contender, and M/s of a run of the group.
type Speeds = Vec<(String, String, f64)>;

fn measure_speeds(program: &Path, options: &Options, machines: Option<&Path>) -> Speeds {
    let accesses = options.accesses.to_string();
    let mut command = Command::new(program);
    command.args(["machine", "--json", "--rounds", "1", "--accesses", &accesses]);
    if let Some(machines) = machines {
        command.arg("--machines").arg(machines);
    }
    let output = command.output().expect("the program runs");
    assert!(output.status.success(), "{}: {}", program.display(), String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
    let rows = report["rows"].as_array().expect("rows").iter();
    let speed = |row: &serde_json::Value| {
        let text_field = |name: &str| row[name].as_str().map(str::to_string);
        Some((text_field("input")?, text_field("contender")?, row["millions_per_s"].as_f64()?))
    };
    rows.filter_map(speed).filter(|(_, contender, _)| CONTENDERS.contains(&contender.as_str())).collect()
}

fn run(options: &Options) -> Vec<ResultRow> {
    let Some(older) = &options.older else { return Vec::new() };
    let own_program = std::env::current_exe().expect("this program's file");
    let (mut older_rounds, mut newer_rounds) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        // The order alternates between rounds.
        for turn in 0..2 {
            match (turn + round) % 2 {
                0 => older_rounds.push(measure_speeds(older, options, None)),
                _ => newer_rounds.push(measure_speeds(&own_program, options, options.machines.as_deref())),
            }
        }
        eprintln!("older: round {} of {}", round + 1, options.rounds);
    }
    let compare_speed = |index: usize| {
        let times_of = |rounds: &[Speeds]| rounds.iter().map(|speeds| speeds[index].2).collect::<Vec<f64>>();
        let (older_times, newer_times) = (times_of(&older_rounds), times_of(&newer_rounds[..]));
        let mut ratios: Vec<f64> = newer_times.iter().zip(&older_times).map(|(now, before)| now / before).collect();
        ratios.sort_by(f64::total_cmp);
        (older_times, newer_times, ratios)
    };
    let first = newer_rounds[0].clone();
    first
        .into_iter()
        .enumerate()
        .flat_map(|(index, (input, contender, _))| comparison_rows(&input, &contender, compare_speed(index)))
        .collect()
}

/// The older program's row and this one's.
fn comparison_rows(
    input: &str,
    contender: &str,
    (before, now, ratios): (Vec<f64>, Vec<f64>, Vec<f64>),
) -> [ResultRow; 2] {
    let min_ratio = SPEED_RATIO_TARGETS.iter().find(|(name, _)| *name == input).map(|(_, bar)| *bar);
    let min_ratio = min_ratio.filter(|_| contender == CONTENDERS[0]);
    let speed_row = |name: String, mut speeds: Vec<f64>| {
        speeds.sort_by(f64::total_cmp);
        ResultRow {
            group: GROUP.name.into(),
            input: input.into(),
            contender: name,
            millions_per_s: median(&speeds),
            ..ResultRow::default()
        }
    };
    let older = format!("{contender}, older");
    let own_row = ResultRow {
        against: Some(older.clone()),
        speed_ratio: Some(median(&ratios)),
        speed_ratio_bar: min_ratio,
        speed_ratio_range: Some((ratios[0], ratios[ratios.len() - 1])),
        met: min_ratio.map(|bar| median(&ratios) >= bar),
        ..speed_row(contender.into(), now)
    };
    [speed_row(older, before), own_row]
}
