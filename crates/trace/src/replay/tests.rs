use std::collections::BTreeMap;

use cachemate_core::*;

use super::*;
use crate::RunLogWriter;

/// A scripted host with two tasks whose speed follows the window and the plan.
struct Host {
    topology: Topology,
    capabilities: Capabilities,
    window: u64,
    in_force: Applied,
}

impl Machine for Host {
    fn topology(&self) -> &Topology {
        &self.topology
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        if self.window == 6 {
            return Ok(None);
        }
        let task = |id: u32| TaskSeen {
            name: format!("p{id}"),
            goal: Some(Goal { priority: 0.1 + 0.2, degradation_at_most: None }),
            cpu: Some(CpuId(id)),
            on_cpu_ns: vec![(CpuId(id), 1_000)],
            counts: Counts(vec![
                Reading { event: Event::Instructions, count: 1_000 + 37 * self.window, counted_share: 1.0 / 3.0 },
                Reading { event: Event::Cycles, count: 3_000, counted_share: 1.0 },
            ]),
            progress: Some(f64::MIN_POSITIVE),
            ..TaskSeen::new(TaskId(id), ProcessId(id))
        };
        let seen = Observation {
            window: self.window,
            span: Span { start_ns: self.window * 1_000, elapsed_ns: 1_000, elapsed_cycles: Some(3_000) },
            ended: WindowEnd::Elapsed,
            tasks: vec![task(0), task(1)],
            places: vec![(Place::Cache(CacheId(0)), Counts::default())],
            answers: Vec::new(),
            in_force: self.in_force.clone(),
        };
        self.window += 1;
        Ok(Some(seen))
    }
    fn apply(&mut self, plan: &Plan) -> Result<Applied, MachineError> {
        self.in_force = Applied { allowed: plan.allowed.clone(), cost_ns: 7, ..Applied::default() };
        Ok(self.in_force.clone())
    }
}

/// Puts everybody on one CPU, which one changes with the window.
struct Turns {
    stride: u64,
}

impl Policy for Turns {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(Window::Time { ns: 1_000 });
        let cpu = (view.seen.window / self.stride % 2) as u32;
        plan.allowed = view.seen.tasks.iter().map(|task| (task.task, [cpu].into_iter().collect())).collect();
        Decision { plan, why: Vec::new() }
    }
}

/// Says 0.25 for a task allowed on CPU 0, 0.75 else: a forecast that shows which plan it was made under.
struct ByCpu;

impl Predictor for ByCpu {
    fn forecast(&self, _: &Topology, _: &Profiles, under: &Plan) -> Forecast {
        let tasks = under.allowed.iter().map(|(&task, cpus)| {
            let value = if cpus.contains(0) { 0.25 } else { 0.75 };
            (task, TaskForecast { instr_per_cycle: Some(Estimate::exact(value)), ..Default::default() })
        });
        Forecast { tasks: tasks.collect(), ..Default::default() }
    }
}

fn host() -> Host {
    let cpu = |id| Cpu { id: CpuId(id), core: id, package: 0, memory_node: 0, online: true, hertz: None };
    let yes = Support::Yes { note: None };
    Host {
        topology: Topology {
            cpus: vec![cpu(0), cpu(1)],
            caches: vec![Cache {
                id: CacheId(0),
                level: Level::L3,
                cpus: (0..2).collect(),
                last_level: true,
                size_bytes: Some(1 << 20),
                ways: Some(16),
                line_bytes: Some(64),
            }],
        },
        capabilities: Capabilities {
            abilities: BTreeMap::from([(Ability::Affinity, yes.clone()), (Ability::CountPerTask, yes)]),
            partitions: Vec::new(),
            shortest_window_ns: 1,
            shortest_slice_ns: None,
        },
        window: 0,
        in_force: Applied::default(),
    }
}

/// Runs the host under the policy and writes the log; the records as they were.
fn recorded(path: &std::path::Path) -> Vec<Record> {
    let host = host();
    let header = RunHeader {
        format: 0,
        topology: host.topology.clone(),
        capabilities: host.capabilities.clone(),
        policy: "turns".into(),
        parameters: "stride = 1".into(),
        seed: 9,
    };
    let mut log = RunLogWriter::create(path, false, &header).unwrap();
    let window = Window::Time { ns: 1_000 };
    let mut turns = Loop::new(host, Vec::new(), Box::new(ByCpu), "turns", Turns { stride: 1 }, window);
    let mut records = Vec::new();
    while let Some(record) = turns.step().unwrap() {
        log.push(&record).unwrap();
        records.push(record);
    }
    log.finish().unwrap();
    records
}

fn read_all(mut log: RunLogReader) -> (Vec<Record>, Option<TraceError>) {
    let mut records = Vec::new();
    loop {
        match log.next_record() {
            Ok(Some(record)) => records.push(record),
            Ok(None) => return (records, None),
            Err(error) => return (records, Some(error)),
        }
    }
}

/// Does a log, packed or not, read back bit for bit?
#[test]
fn a_written_log_reads_back_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["run.jsonl", "run.jsonl.zst"] {
        let path = dir.path().join(name);
        let records = recorded(&path);
        let log = RunLogReader::open(&path).unwrap();
        assert_eq!((log.header().seed, log.header().format), (9, crate::RUN_LOG_VERSION));
        let (back, error) = read_all(log);
        assert!(error.is_none());
        assert_eq!(back, records);
        assert_eq!(serde_json::to_string(&back).unwrap(), serde_json::to_string(&records).unwrap());
    }
}

/// Does a log cut off anywhere give every whole record and then the line that is broken?
#[test]
fn a_truncated_log_gives_what_was_before_and_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = recorded(&path);
    let bytes = std::fs::read(&path).unwrap();
    let ends: Vec<usize> = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1).collect();
    for (cut, whole) in [(ends[2], 2), (ends[2] + 5, 2), (ends[3] - 1, 2), (ends[6], 6)] {
        let log = RunLogReader::new(Box::new(std::io::Cursor::new(bytes[..cut].to_vec())), "run.jsonl").unwrap();
        let (back, error) = read_all(log);
        assert_eq!(back, records[..whole]);
        let text = error.unwrap().to_string();
        assert!(text.starts_with(&format!("run.jsonl: line {}: found the end of the file", whole + 2)), "{text}");
    }
    let mut damaged = bytes.clone();
    damaged[ends[1] + 1] = b'!';
    let log = RunLogReader::new(Box::new(std::io::Cursor::new(damaged)), "run.jsonl").unwrap();
    let (back, error) = read_all(log);
    assert_eq!(back, records[..1]);
    assert!(matches!(error, Some(TraceError::Bad { place: crate::Place::Line(3), .. })));
    let packed = dir.path().join("run.jsonl.zst");
    recorded(&packed);
    let bytes = std::fs::read(&packed).unwrap();
    let cut = bytes[..bytes.len() - 40].to_vec();
    let (back, error) = read_all(RunLogReader::new(Box::new(std::io::Cursor::new(cut)), "run.jsonl.zst").unwrap());
    assert!(records.starts_with(&back) && !back.is_empty());
    assert!(error.unwrap().to_string().starts_with(&format!("run.jsonl.zst: line {}:", back.len() + 2)));
}

/// Is a number that JSON cannot hold refused when written, not when read?
#[test]
fn an_infinite_number_is_refused_when_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut record = recorded(&dir.path().join("a")).remove(0);
    record.forecast.cache_miss_ratio.insert(CacheId(0), Estimate::exact(f64::NAN));
    let mut optional = record.clone();
    optional.forecast = Forecast::default();
    optional.seen.tasks[0].progress = Some(f64::INFINITY);
    let header = RunLogReader::open(dir.path().join("a")).unwrap().header().clone();
    let mut log = RunLogWriter::create(dir.path().join("b"), false, &header).unwrap();
    for record in [record, optional] {
        let error = log.push(&record).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("JSON cannot hold"), "{error}");
    }
}

/// Does the same policy decide the same over the recording, and is a changed one caught at its first window?
#[test]
fn the_same_policy_matches_and_a_changed_one_is_caught() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = recorded(&path);
    let run = |stride, must_match| {
        let mut told = Vec::new();
        let log = RunLogReader::open(&path).unwrap();
        let each = |replayed| told.push(replayed);
        let result = replay(log, Vec::new(), Box::new(ByCpu), "turns", Turns { stride }, must_match, each);
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
    let log = RunLogReader::open(&path).unwrap();
    replay(log, Vec::new(), Box::new(ByCpu), "other", Turns { stride: 2 }, false, |replayed| told.push(replayed))
        .unwrap();
    assert_eq!(told.iter().filter(|replayed| replayed.differs.is_some()).count(), 3);
    // The yardstick and the plans in force are those of the recording, and so are the misses.
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
    assert_eq!(applied.allowed, records[0].applied.allowed);
}
