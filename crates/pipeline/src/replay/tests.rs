use cachemate_core::test_kit::alternating::{self, ByCpu, Turns, config};
use cachemate_core::*;
use cachemate_trace::RunLogWriter;

use super::*;

/// Writes the log of a run; the records as they were.
fn recorded(path: &std::path::Path) -> Vec<WindowRecord> {
    let (header, records) = alternating::recorded();
    let mut log = RunLogWriter::create(path, false, &header).unwrap();
    records.iter().for_each(|record| log.push(record).unwrap());
    log.finish().unwrap();
    records
}

fn over(path: &std::path::Path, stride: u64, must_match: bool, each: impl FnMut(Replayed)) -> Result<u64, ReplayError> {
    let machine = Replay::new(RunLogReader::open(path).unwrap());
    let current = Rc::clone(&machine.current);
    let first = config().first_window;
    let turns = Loop::new(machine, Vec::new(), Box::new(ByCpu), "turns", Turns { stride }, first);
    decide_again(turns, &current, must_match, each)
}

/// Does the same policy decide the same over the recording, and is a changed one caught at its first window?
#[test]
fn the_same_policy_matches_and_a_changed_one_is_caught() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = recorded(&path);
    let run = |stride, must_match| {
        let mut told = Vec::new();
        let result = over(&path, stride, must_match, |replayed| told.push(replayed));
        (result, told)
    };
    let (windows, told) = run(1, true);
    assert_eq!(windows.unwrap(), 6);
    for (replayed, record) in told.iter().zip(&records) {
        assert_eq!((&replayed.decision, &replayed.differs), (&record.decision, &None));
        assert_eq!(replayed.forecast_missed_instr_per_cycle, record.last_forecast_missed_instr_per_cycle);
    }
    let (result, told) = run(2, true);
    assert_eq!(told.len(), 1);
    let text = result.unwrap_err().to_string();
    assert!(
        text.starts_with("window 1: the policy 'turns' decides otherwise than recorded: allowed: recorded"),
        "{text}"
    );
}

/// Is another policy scored by forecasts under the plan that was in force, never by its own plan?
#[test]
fn another_policys_forecasts_are_made_under_the_recorded_plan() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = recorded(&path);
    let mut told = Vec::new();
    over(&path, 2, false, |replayed| told.push(replayed)).unwrap();
    assert_eq!(told.iter().filter(|replayed| replayed.differs.is_some()).count(), 3);
    // The predictor and the plans in force are those of the recording, and so are the misses.
    for (replayed, record) in told.iter().zip(&records) {
        assert_eq!(replayed.forecast_missed_instr_per_cycle, record.last_forecast_missed_instr_per_cycle);
    }
}

/// Is a plan that was not recorded refused, with what was in force left standing?
#[test]
fn a_plan_that_was_not_recorded_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = recorded(&path);
    let mut machine = Replay::new(RunLogReader::open(&path).unwrap());
    machine.observe().unwrap();
    assert_eq!(machine.apply(&records[0].decision.plan).unwrap(), records[0].applied);
    let applied = machine.apply(&Plan::idle(Window::Time { ns: 1_000 })).unwrap();
    assert_eq!(applied.refused[0].because, RefusedBecause::NotRecorded);
    assert_eq!(applied.affinity, records[0].applied.affinity);
}
