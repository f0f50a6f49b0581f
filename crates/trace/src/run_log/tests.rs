use cachemate_core::test_kit::*;
use cachemate_core::*;

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

fn read_all(mut log: RunLogReader) -> (Vec<WindowRecord>, Option<TraceError>) {
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
        assert_eq!((log.header().pipeline.clone(), log.header().format), (config(), RUN_LOG_VERSION));
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

/// Is a log of another format refused with the format that it has and the one expected?
#[test]
fn another_format_is_refused_with_both_numbers() {
    let old = r#"{"format":1,"topology":{"cpus":[],"caches":[]},"policy":"default","parameters":"","seed":1}"#;
    let input = Box::new(std::io::Cursor::new(format!("{old}\n").into_bytes()));
    let error = RunLogReader::new(input, "old.jsonl").err().unwrap().to_string();
    assert_eq!(error, "old.jsonl: line 1: found run log format 1, expected format 3");
}
