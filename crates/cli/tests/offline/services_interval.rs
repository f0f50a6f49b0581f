//! On the interval machine: is the service that slows down another one named, with the loss, and how soon?

use crate::common::{interval_program, run};
use cachemate_page::{Snapshot, read_recording};
use cachemate_trace::RunLogReader;

/// Nominal seconds until the batch service starts, and after which it must be named.
const START_S: f64 = 60.0;
const NAMED_AFTER_S: f64 = 20.0;

/// A store that is initially alone on its cache, a quiet service on the other cache, and from the 60th second on a
/// streaming batch job that runs as a loop of programs of about a second each.
const SCENARIO: &str = "name = \"services\"\ndescription = \"a store, a batch job and a quiet service\"\n\
    machine = \"xeon-x5365-4\"\nsimulator = \"interval\"\nseed = 5\nlength = { ns = 120_000_000_000 }\n\
    policy = { name = \"default\" }\n\
    [interval]\ncounters = { noise = 0.02 }\n\
    [[programs]]\nprogram = \"store.toml\"\ncpus = \"0\"\n\
    [[programs]]\nprogram = \"quiet.toml\"\ncpus = \"2\"\n\
    [[programs]]\nprogram = \"batch.toml\"\ncpus = \"1\"\ncount = 60\nstart_ns = 60_000_000_000\n\
    interarrival_ns = { fixed = 1e9 }\ninstructions = { fixed = 1e9 }\n";

fn store_service(snapshot: &Snapshot) -> &cachemate_page::ServiceSnapshot {
    snapshot
        .services
        .iter()
        .find(|service| service.name == "store")
        .unwrap()
}

/// Does the record of a run name the batch service as the cause of the store's loss within 20 seconds of its start,
/// with the share that the store's own speeds before and after show, and never the quiet service?
#[test]
fn the_batch_service_is_named_within_twenty_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    interval_program(at, "store", (256 << 10, 0.02), 0.001);
    interval_program(at, "quiet", (256 << 10, 0.0001), 0.0001);
    interval_program(at, "batch", (256 << 10, 0.02), 0.02);
    std::fs::write(at.join("s.toml"), SCENARIO).unwrap();
    run(at, &["sim", "s.toml", "-o", "run.jsonl"]).ok();
    let run = read_recording(RunLogReader::open(at.join("run.jsonl")).unwrap(), "run").unwrap();
    let first = run.snapshots.iter().find(|snapshot| {
        let measured = |cause: &cachemate_page::CacheLossSnapshot| {
            cause.source == "measured" && cause.service == "batch"
        };
        store_service(snapshot).cache_by.iter().any(measured)
    });
    let first = first.expect("the batch service is named");
    assert!(
        first.at_s > START_S && first.at_s <= START_S + NAMED_AFTER_S,
        "named after {} s",
        first.at_s
    );
    let mean_speed_between = |from: f64, to: f64| {
        let windows = run
            .snapshots
            .iter()
            .filter(|snapshot| snapshot.at_s > from && snapshot.at_s <= to);
        let speeds: Vec<f64> = windows
            .filter_map(|snapshot| {
                snapshot
                    .programs
                    .iter()
                    .find(|program| program.name == "store")?
                    .instr_per_cycle
            })
            .collect();
        speeds.iter().sum::<f64>() / speeds.len() as f64
    };
    let truth =
        mean_speed_between(20.0, START_S) / mean_speed_between(START_S + 5.0, START_S + 30.0) - 1.0;
    let named = run
        .snapshots
        .iter()
        .rfind(|snapshot| snapshot.at_s <= START_S + 30.0)
        .unwrap();
    let cause = &store_service(named).cache_by[0];
    assert!(truth > 0.1, "the batch service slows the store: {truth}");
    assert!(
        (cause.percent / 100.0 - truth).abs() < 0.15 * truth,
        "{cause:?}, by the speeds {truth}"
    );
    assert!(
        cause.range_percent.0 > 0.0 && cause.range_percent.0 <= cause.range_percent.1,
        "{cause:?}, by the speeds {truth}"
    );
    let others = run
        .snapshots
        .iter()
        .flat_map(|snapshot| &snapshot.services)
        .flat_map(|service| &service.cache_by);
    assert!(
        others.into_iter().all(|cause| cause.service != "quiet"),
        "the quiet service is on another cache"
    );
    let quiet = named
        .services
        .iter()
        .find(|service| service.name == "quiet")
        .unwrap();
    assert!(
        quiet
            .reason
            .as_ref()
            .is_some_and(|reason| reason.contains("no other managed service")),
        "{quiet:?}"
    );
}
