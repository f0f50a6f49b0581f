use cachemate_core::test_support::alternating::{
    self, AlternatingPolicy, CpuPredictor, alternating_config,
};
use cachemate_core::*;
use cachemate_trace::RunLogWriter;

use super::*;

/// Writes the log of a run, and returns its records.
fn record_run(path: &std::path::Path) -> Vec<WindowRecord> {
    let (header, records) = alternating::recorded_run();
    let mut log = RunLogWriter::create(path, false, &header).unwrap();
    records.iter().for_each(|record| log.push(record).unwrap());
    log.finish().unwrap();
    records
}

fn replay_alternating(
    path: &std::path::Path,
    stride: u64,
    must_match: bool,
    visit_window: impl FnMut(ReplayedWindow),
) -> Result<u64, ReplayError> {
    let machine = ReplayMachine::new(RunLogReader::open(path).unwrap());
    let current = Rc::clone(&machine.current_record);
    let first = alternating_config().first_window;
    let control_loop = ControlLoop::new(
        machine,
        ProfilerChain::default(),
        Box::new(CpuPredictor),
        "turns",
        AlternatingPolicy { stride },
        first,
    );
    replay_windows(control_loop, &current, must_match, visit_window)
}

/// Does the same policy repeat its decisions on the recording, and is a changed policy detected at its first window?
#[test]
fn the_same_policy_repeats_and_a_changed_one_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = record_run(&path);
    let run = |stride, must_match| {
        let mut replayed_windows = Vec::new();
        let result = replay_alternating(&path, stride, must_match, |replayed| {
            replayed_windows.push(replayed)
        });
        (result, replayed_windows)
    };
    let (windows, replayed_windows) = run(1, true);
    assert_eq!(windows.unwrap(), 6);
    for (replayed, record) in replayed_windows.iter().zip(&records) {
        assert_eq!(
            (&replayed.decision, &replayed.plan_difference),
            (&record.decision, &None)
        );
        assert_eq!(
            replayed.forecast_errors_instr_per_cycle,
            record.forecast_errors_instr_per_cycle
        );
    }
    let (result, replayed_windows) = run(2, true);
    assert_eq!(replayed_windows.len(), 1);
    let text = result.unwrap_err().to_string();
    assert!(
        text.starts_with("window 1: the policy 'turns' decides differently than recorded: CPUs of task 0: recorded"),
        "{text}"
    );
}

/// Is another policy scored by forecasts under the plan that was in force, never by its own plan?
#[test]
fn another_policys_forecasts_are_made_under_the_recorded_plan() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = record_run(&path);
    let mut replayed_windows = Vec::new();
    replay_alternating(&path, 2, false, |replayed| replayed_windows.push(replayed)).unwrap();
    assert_eq!(
        replayed_windows
            .iter()
            .filter(|replayed| replayed.plan_difference.is_some())
            .count(),
        3
    );
    // The predictor and the plans in force are those of the recording, and so are the misses.
    for (replayed, record) in replayed_windows.iter().zip(&records) {
        assert_eq!(
            replayed.forecast_errors_instr_per_cycle,
            record.forecast_errors_instr_per_cycle
        );
    }
}

/// Is a plan that was not recorded refused, so that the plan in force stays?
#[test]
fn a_plan_that_was_not_recorded_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = record_run(&path);
    let mut machine = ReplayMachine::new(RunLogReader::open(&path).unwrap());
    machine.observe().unwrap();
    assert_eq!(
        machine.apply(&records[0].decision.plan).unwrap(),
        records[0].applied
    );
    let applied = machine
        .apply(&Plan::idle(WindowLength::Time { ns: 1_000 }))
        .unwrap();
    assert_eq!(applied.refused[0].reason, RefusalReason::NotRecorded);
    assert_eq!(applied.affinity, records[0].applied.affinity);
}

/// A host whose last CPU goes offline after two windows and online again after two more.
struct Hotplug(cachemate_core::test_support::ScriptedMachine, u64);

impl Machine for Hotplug {
    fn topology(&self) -> &Topology {
        self.0.topology()
    }
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }
    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        let observation = self.0.observe()?;
        let is_online = !(2..4).contains(&self.1);
        self.0.topology.cpus.last_mut().unwrap().online = is_online;
        self.1 += 1;
        Ok(observation)
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        self.0.apply(plan)
    }
}

/// Pins all tasks to the last online CPU.
struct LastCpuPolicy;

impl Policy for LastCpuPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1_000 });
        let last: CpuSet = view.topology.online().iter().last().into_iter().collect();
        plan.affinity = view
            .observation
            .tasks
            .iter()
            .map(|task| (task.task, last.clone()))
            .collect();
        Decision::new(plan, Vec::new())
    }
}

/// Can a run be replayed in which a CPU went offline and online again? Does a log of the older version, which lacks
/// such changes, differ from that window on? Is no forecast scored for the windows in which CPUs changed?
#[test]
fn a_run_with_cpus_taken_offline_and_online_replays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let first = alternating_config().first_window;
    let host = alternating::alternating_host();
    let header = cachemate_core::test_support::run_header(
        host.topology.clone(),
        host.capabilities.clone(),
        alternating_config(),
    );
    let mut run = ControlLoop::new(
        Hotplug(host, 0),
        ProfilerChain::default(),
        Box::new(CpuPredictor),
        "last",
        LastCpuPolicy,
        first,
    );
    let mut log = RunLogWriter::create(&path, false, &header).unwrap();
    let (mut online, mut scored) = (Vec::new(), Vec::new());
    while let Some(record) = run.step().unwrap() {
        online.push(record.online.as_ref().map(ToString::to_string));
        scored.push(!record.forecast_errors_instr_per_cycle.is_empty());
        log.push(&record).unwrap();
    }
    log.finish().unwrap();
    assert_eq!(
        online,
        [
            None,
            None,
            Some("0".to_string()),
            None,
            Some("0-1".to_string()),
            None
        ]
    );
    assert_eq!(scored, [false, true, false, true, false, true]);
    let replay_again = |path: &std::path::Path| {
        let machine = ReplayMachine::new(RunLogReader::open(path).unwrap());
        let current = Rc::clone(&machine.current_record);
        let control_loop = ControlLoop::new(
            machine,
            ProfilerChain::default(),
            Box::new(CpuPredictor),
            "last",
            LastCpuPolicy,
            first,
        );
        replay_windows(control_loop, &current, true, |_| {})
    };
    assert_eq!(replay_again(&path).unwrap(), 6);
    let text = std::fs::read_to_string(&path).unwrap();
    let old_format = text.replacen("\"format\":4", "\"format\":3", 1);
    let old_format = old_format
        .replace(",\"online\":\"0-1\"}", "}")
        .replace(",\"online\":\"0\"}", "}");
    assert!(
        old_format.len() < text.len() - 20,
        "two windows recorded it"
    );
    std::fs::write(&path, old_format).unwrap();
    let error = replay_again(&path).unwrap_err().to_string();
    assert!(
        error.starts_with("window 2: the policy 'last' decides differently"),
        "{error}"
    );
}
