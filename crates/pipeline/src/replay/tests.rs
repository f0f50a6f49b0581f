use cachemate_core::test_kit::*;
use cachemate_core::*;
use cachemate_trace::RunLogWriter;

use super::*;

/// Two tasks on two CPUs of one cache, whose speed follows the window.
fn host() -> Scripted {
    let machine = capabilities(&[Ability::Affinity, Ability::CountPerTask]);
    Scripted::new(last_level_caches(1, 2, Level::L3, 1 << 20), machine, (0..6).map(seen).collect())
}

fn seen(window: u64) -> Observation {
    let mut seen = observation(window, 2);
    for (task, cpu) in seen.tasks.iter_mut().zip(0..) {
        task.goal = Some(Goal { priority: 0.1 + 0.2, degradation_at_most: None });
        task.cpu = Some(CpuId(cpu));
        task.counts = Counts(vec![
            Reading { event: Event::Instructions, count: 1_000 + 37 * window, counted_share: 1.0 / 3.0 },
            Reading { event: Event::Cycles, count: 3_000, counted_share: 1.0 },
        ]);
        task.progress = Some(f64::MIN_POSITIVE);
    }
    seen
}

/// Puts everybody on one CPU, which one changes with the window.
struct Turns {
    stride: u64,
}

impl Policy for Turns {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(Window::Time { ns: 1_000 });
        let cpu = (view.seen.window / self.stride % 2) as u32;
        plan.affinity = view.seen.tasks.iter().map(|task| (task.task, [cpu].into_iter().collect())).collect();
        Decision { plan, why: Vec::new() }
    }
}

/// Says 0.25 for a task allowed on CPU 0, 0.75 else: a forecast that shows which plan it was made under.
struct ByCpu;

impl Predictor for ByCpu {
    fn forecast(&self, _: &View<'_>, under: &Plan) -> Forecast {
        let tasks = under.affinity.iter().map(|(&task, cpus)| {
            let value = if cpus.contains(0) { 0.25 } else { 0.75 };
            (task, TaskForecast { instr_per_cycle: Some(Estimate::exact(value)), ..Default::default() })
        });
        Forecast { tasks: tasks.collect(), ..Default::default() }
    }
}

fn config() -> PipelineConfig {
    PipelineConfig {
        policy: PolicyConfig { name: "turns".into(), parameters: "stride = 1".into(), seed: 9 },
        guard: None,
        profilers: Vec::new(),
        predictor: PredictorConfig { miss_penalty_cycles: 0.1 + 0.2, miss_penalty_from: "nowhere".into() },
        first_window: Window::Time { ns: 1_000 },
    }
}

/// Runs the host under the policy and writes the log; the records as they were.
fn recorded(path: &std::path::Path) -> Vec<WindowRecord> {
    let host = host();
    let (topology, capabilities) = (host.topology.clone(), host.capabilities.clone());
    let header = RunHeader { format: 0, topology, capabilities, pipeline: config() };
    let mut log = RunLogWriter::create(path, false, &header).unwrap();
    let mut turns = Loop::new(host, Vec::new(), Box::new(ByCpu), "turns", Turns { stride: 1 }, config().first_window);
    let mut records = Vec::new();
    while let Some(record) = turns.step().unwrap() {
        log.push(&record).unwrap();
        records.push(record);
    }
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
