//! Does every policy, recorded on any machine, repeat its decisions when its run log is replayed?

mod modeled_host;

use std::path::Path;

use cachemate_core::*;
use cachemate_pipeline::POLICIES;
use cachemate_pipeline::{Pipeline, StandardPipeline, miss_penalty_of_machine, replay};
use cachemate_sim::kernels;
use cachemate_sim::machine::{RunLimit, SimMachine, SimOptions, SimProgram};
use cachemate_trace::{RunLogReader, RunLogWriter};

use modeled_host::ModeledHost;

/// Parameters with which the policy changes something for four tasks.
fn policy_parameters(policy: &str) -> &'static str {
    match policy {
        "best-by-matrix" | "worst-by-matrix" => {
            "slowdowns = [[0.1, 0.1, 0.9, 0.9], [0.1, 0.1, 0.9, 0.9], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]"
        }
        "service-level" => "rate_per_s = 1000.0",
        _ => "",
    }
}

fn standard_pipeline(
    policy: &str,
    predictor: PredictorConfig,
    simulated: bool,
) -> StandardPipeline {
    StandardPipeline {
        policy: PolicyConfig {
            name: policy.to_string(),
            parameters: policy_parameters(policy).to_string(),
            seed: 11,
        },
        guard: Some(GuardConfig {
            trial_windows: 3,
            ..GuardConfig::default()
        }),
        counted_instructions: if simulated { 10_000.0 } else { 1e8 },
        predictor,
        watches_code: simulated,
        first_window: WindowLength::Time { ns: 1_000_000 },
    }
}

/// Runs a pipeline to its end, writes its log to `path`, and returns its records.
fn record<M: Machine>(pipeline: Pipeline, machine: M, path: &Path) -> Vec<WindowRecord> {
    let mut log = RunLogWriter::create(path, true, &pipeline.build_run_header(&machine))
        .expect("the log can be made");
    let mut records = Vec::new();
    let on_window = |_: &mut M, record: WindowRecord| {
        log.push(&record).expect("every record can be written");
        records.push(record);
        true
    };
    pipeline.run(machine, on_window).expect("the run ends");
    log.finish().expect("the log can be closed");
    records
}

/// Replays the log and compares plans and reasons with the records; [`replay`] itself compares forecasts.
fn assert_replays(policy: &str, path: &Path, records: &[WindowRecord]) {
    let log = RunLogReader::open(path).expect("the log can be read");
    let mut index = 0;
    let on_window = |replayed: cachemate_pipeline::ReplayedWindow| {
        assert_eq!(
            replayed.decision, records[index].decision,
            "'{policy}', window {}",
            replayed.window
        );
        index += 1;
    };
    let extent = replay(log, None, on_window).unwrap_or_else(|error| panic!("'{policy}': {error}"));
    assert_eq!(extent.windows as usize, records.len(), "'{policy}'");
    assert!(extent.damage.is_none(), "'{policy}'");
}

/// Does every policy replay on a modeled host, with counters and without, including evicted lines and roll-backs?
#[test]
fn every_policy_recorded_on_a_host_replays() {
    let dir = tempfile::tempdir().unwrap();
    let (mut rolled_back, mut evicted) = (0, 0);
    for counters in [true, false] {
        for entry in POLICIES.entries() {
            let penalty = PredictorConfig {
                miss_penalty_cycles: 187.5,
                miss_penalty_source: "measured".to_string(),
            };
            let host = ModeledHost::new(counters, 70);
            let config = standard_pipeline(entry.name, penalty, false)
                .for_machine(host.topology(), host.capabilities());
            let path = dir
                .path()
                .join(format!("{}-{counters}.jsonl.zst", entry.name));
            let records = record(Pipeline::build(config).unwrap(), host, &path);
            let reasons = || records.iter().flat_map(|record| &record.decision.reasons);
            rolled_back += reasons()
                .filter(|reason| reason.kind == ReasonKind::RolledBack)
                .count();

            let probe_results = records
                .iter()
                .flat_map(|record| &record.observation.probe_results);
            evicted += probe_results
                .filter(|probe_result| {
                    matches!(probe_result.evidence, ProbeEvidence::PrimeProbe { .. })
                })
                .count();
            assert_replays(entry.name, &path, &records);
        }
    }

    assert!(
        rolled_back > 0,
        "no policy was rolled back: the guard was not replayed"
    );
    assert!(evicted > 0, "no evicted-line answer was replayed");
}

/// Does every policy replay on the simulated machine, whose probes trace, sample and measure rows?
#[test]
fn every_policy_recorded_on_the_simulator_replays() {
    let dir = tempfile::tempdir().unwrap();
    let spec = cachemate_spec::load_machine("xeon-x5365-4").unwrap();

    for entry in POLICIES.entries() {
        let program = |name: &'static str| {
            let maker = move |run: u32| {
                kernels::build_threads(name, u64::from(run) + 3, &kernels::Options::default())
                    .expect("a known kernel")
            };
            SimProgram::new(name.to_string(), Box::new(maker))
        };
        let ends = Some(RunLimit::Cycles(3_000_000));
        let options = SimOptions {
            seed: 5,
            scale: 1000,
            ends,
            ..SimOptions::default()
        };

        let programs = ["mcf", "art", "gamess", "libquantum"]
            .map(program)
            .into_iter()
            .collect();
        let mut machine = SimMachine::new(&spec, &options, programs).unwrap();
        let standard = standard_pipeline(entry.name, miss_penalty_of_machine(&spec), true);
        let config = standard.for_machine(machine.topology(), machine.capabilities());
        machine.set_first_window(config.first_window);
        let path = dir.path().join(format!("{}.jsonl", entry.name));
        let records = record(Pipeline::build(config).unwrap(), machine, &path);
        assert!(!records.is_empty(), "'{}'", entry.name);
        assert_replays(entry.name, &path, &records);
    }
}

/// Is a log that was changed afterwards detected at its window?
#[test]
fn a_forged_log_is_detected_at_its_window() {
    let dir = tempfile::tempdir().unwrap();
    let penalty = PredictorConfig {
        miss_penalty_cycles: 150.0,
        miss_penalty_source: "measured".to_string(),
    };
    let host = ModeledHost::new(true, 20);
    let config =
        standard_pipeline("dio", penalty, false).for_machine(host.topology(), host.capabilities());
    let path = dir.path().join("dio.jsonl");
    let records = record(Pipeline::build(config).unwrap(), host, &path);
    let changed_window = (0..records.len())
        .find(|&index| !records[index].decision.reasons.is_empty())
        .expect("dio says why");

    let mut forged = records.clone();
    forged[changed_window].decision.reasons.clear();
    let header = RunLogReader::open(&path).unwrap().header().clone();
    let mut log = RunLogWriter::create(&path, true, &header).unwrap();
    forged.iter().for_each(|record| log.push(record).unwrap());
    log.finish().unwrap();
    let error = replay(RunLogReader::open(&path).unwrap(), None, |_| ())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with(&format!(
            "window {changed_window}: the policy 'dio' decides differently"
        )),
        "{error}"
    );
    assert!(error.contains("reasons.0: recorded none"), "{error}");
}

/// Is a log that a crash cut replayed up to the cut, whose place is given?
#[test]
fn a_cut_log_is_replayed_up_to_the_cut() {
    let dir = tempfile::tempdir().unwrap();
    let penalty = PredictorConfig {
        miss_penalty_cycles: 150.0,
        miss_penalty_source: "measured".to_string(),
    };
    let host = ModeledHost::new(true, 8);
    let config =
        standard_pipeline("dio", penalty, false).for_machine(host.topology(), host.capabilities());
    let path = dir.path().join("dio.jsonl");
    record(Pipeline::build(config).unwrap(), host, &path);
    let text = std::fs::read_to_string(&path).unwrap();
    let fourth_end = text.match_indices('\n').nth(4).unwrap().0;
    std::fs::write(&path, &text[..fourth_end + 30]).unwrap();

    let extent = replay(RunLogReader::open(&path).unwrap(), None, |_| ()).unwrap();
    assert_eq!(extent.windows, 4);
    let damage = extent.damage.unwrap().to_string();
    assert!(
        damage.contains("line 6: found the end of the file"),
        "{damage}"
    );
}
