//! On the interval machine: is the service that slows another one down named in time, although all of them always run?

use std::collections::BTreeSet;

use cachemate_auto::service_losses::{LossSource, ServiceLoss, ServiceLosses};
use cachemate_core::{
    CounterEvent, Goal, GuardConfig, Machine, PolicyConfig, ProbeId, ProbeKind, Profiles,
    WindowLength, WindowRecord,
};
use cachemate_interval::{
    IntervalJob, IntervalMachine, Options, PhasedProgram, ProgramPhase, closed_form,
};
use cachemate_pipeline::{Pipeline, StandardPipeline, miss_penalty_of_machine};

const SECOND_NS: u64 = 1_000_000_000;
/// Lines of the last level.
const CAPACITY_LINES: f64 = 131_072.0;
const MAX_SLOWDOWN: f64 = 0.05;
const SEED: u64 = 20_261;
/// Parameters of `auto` that leave the cache undivided, so that the loss stays.
const WITHOUT_SHARES: &str = "disable = [\"space\"]";

/// Builds a machine of four CPUs and one cache with a store that has a limit, a quiet service, and a batch service: a
/// loop of programs of half a second that stream.
fn machine(store_phase: &ProgramPhase, has_batch: bool) -> IntervalMachine {
    let mut spec = cachemate_spec::load_machine("lab-vm").expect("a shipped machine");
    spec.cores_per_package = 4;
    spec.caches
        .iter_mut()
        .filter(|cache| cache.shared_by_cores == 2)
        .for_each(|cache| cache.shared_by_cores = 4);

    let job = |name: &str, phase| IntervalJob::new(PhasedProgram::endless_program(name, phase));
    let goal = Some(Goal {
        max_slowdown: Some(MAX_SLOWDOWN),
        ..Goal::default()
    });
    let mut jobs = vec![
        IntervalJob {
            goal,
            ..job("store", store_phase.clone())
        },
        job(
            "quiet",
            closed_form::uniform_phase(64.0, CAPACITY_LINES, 1_000.0, 0.02),
        ),
    ];
    let batch = job(
        "batch",
        closed_form::stream_phase(64.0, CAPACITY_LINES, 0.02),
    );
    let short_program = IntervalJob {
        instructions: Some(1.5e8),
        restarts: true,
        ..batch
    };
    jobs.extend(has_batch.then_some(short_program));
    IntervalMachine::new(
        &spec,
        Options {
            seed: SEED,
            ..Options::default()
        },
        jobs,
    )
    .expect("three jobs on four CPUs")
}

/// Runs a policy for this many seconds; `on_window` receives the records.
fn run(
    name: &str,
    parameters: &str,
    machine: IntervalMachine,
    seconds: u64,
    mut on_window: impl FnMut(&WindowRecord),
) {
    let spec = cachemate_spec::load_machine("lab-vm").expect("a shipped machine");
    let standard = StandardPipeline {
        policy: PolicyConfig {
            name: name.to_string(),
            parameters: parameters.to_string(),
            seed: 1,
        },
        guard: Some(GuardConfig::default()),
        counted_instructions: 10_000.0,
        predictor: miss_penalty_of_machine(&spec),
        watches_code: false,
        first_window: WindowLength::Time { ns: SECOND_NS },
    };
    let pipeline =
        Pipeline::build(standard.for_machine(machine.topology(), machine.capabilities()))
            .expect("a pipeline");

    let until_end = |_: &mut IntervalMachine, record: WindowRecord| {
        on_window(&record);
        record.observation.span.start_ns < seconds * SECOND_NS
    };
    pipeline.run(machine, until_end).expect("the run ends");
}

/// Mean instructions per cycle of the store in the windows that begin within these seconds.
fn store_speed(
    policy: &str,
    parameters: &str,
    machine: IntervalMachine,
    seconds: std::ops::Range<u64>,
) -> f64 {
    let mut sums = (0.0, 0.0);
    run(policy, parameters, machine, seconds.end, |record| {
        let (span, counts) = (
            &record.observation.span,
            &record.observation.tasks[0].counts,
        );
        if span.start_ns >= seconds.start * SECOND_NS {
            sums.0 += counts.get(CounterEvent::Instructions).unwrap();
            sums.1 += counts.get(CounterEvent::Cycles).unwrap();
        }
    });
    sums.0 / sums.1
}

/// The store's loss by the batch service in truth, and as measured.
struct Losses {
    truth: f64,
    /// Measured losses by cause under `auto`, with the end of each window.
    measured: Vec<(u64, Vec<ServiceLoss>)>,
    /// Probes that paused the batch service.
    pauses: BTreeSet<ProbeId>,
}

/// Measures losses under `auto` with these parameters.
fn measure_losses(store_phase: &ProgramPhase, parameters: &str) -> Losses {
    let speed = |has_batch| store_speed("default", "", machine(store_phase, has_batch), 2..20);
    let mut result = Losses {
        truth: speed(false) / speed(true) - 1.0,
        measured: Vec::new(),
        pauses: BTreeSet::new(),
    };
    let mut service_losses = ServiceLosses::default();
    let running = machine(store_phase, true);
    let topology = running.topology().clone();

    run("auto", parameters, running, 20, |record| {
        let observation = &record.observation;
        let batch = observation
            .tasks
            .iter()
            .find(|task| task.name == "batch" && !task.exited)
            .map(|task| task.task);
        let pauses_batch = |kind: &ProbeKind| match kind {
            ProbeKind::CoRunRows { rows, .. } => {
                rows[0].len() > 1 && !batch.is_some_and(|batch| rows[0].contains(&batch))
            }
            _ => false,
        };
        let pauses = record
            .decision
            .plan
            .probes
            .iter()
            .filter(|probe| pauses_batch(&probe.kind));
        result.pauses.extend(pauses.map(|probe| probe.id));

        let reports =
            service_losses.observe(observation, &topology, &Profiles::new(), &|_, _| None);
        let store = reports
            .iter()
            .find(|report| report.service.name == "store")
            .expect("it always runs");
        let measured = store
            .losses
            .iter()
            .filter(|loss| loss.source == LossSource::Measured)
            .cloned()
            .collect();
        result.measured.push((
            observation.span.start_ns + observation.span.elapsed_ns,
            measured,
        ));
    });

    result
}

/// If a batch service of short programs slows a store with a promise: is it named, and never the quiet service, and is
/// its share measured within 20 s, within two points or its own error?
#[test]
fn the_batch_service_is_named_with_its_measured_share() {
    let losses = measure_losses(
        &closed_form::uniform_phase(64.0, CAPACITY_LINES, 90_000.0, 0.02),
        WITHOUT_SHARES,
    );
    let truth = losses.truth;
    assert!(truth > 0.1, "the batch service hardly harms: {truth}");
    for (end_ns, causes) in &losses.measured {
        let others: Vec<_> = causes
            .iter()
            .filter(|loss| loss.cause.name != "batch" && loss.loss.low > 0.01)
            .collect();
        assert!(others.is_empty(), "{others:?} after {end_ns} ns");
    }
    let (first_ns, _) = losses
        .measured
        .iter()
        .find(|(_, causes)| !causes.is_empty())
        .expect("a cause is measured");
    assert!(*first_ns <= 5 * SECOND_NS, "named after {first_ns} ns");
    let (_, causes) = losses
        .measured
        .iter()
        .rfind(|(end_ns, _)| *end_ns <= 20 * SECOND_NS)
        .expect("20 s");
    let loss = causes[0].loss;
    let margin = (loss.high - loss.value).max(0.02);
    assert!(
        (loss.value - truth).abs() <= margin,
        "measured {causes:?}, truth {truth}"
    );
    assert_eq!(losses.pauses.len(), 1, "one pause in 20 s");
}

/// If the store streams as well, so that the batch service takes nothing from it: is no service named, although the
/// batch service is paused?
#[test]
fn an_innocent_stream_is_not_named() {
    let losses = measure_losses(
        &closed_form::stream_phase(64.0, CAPACITY_LINES, 0.002),
        WITHOUT_SHARES,
    );
    assert!(
        losses.truth.abs() < 0.01 && !losses.pauses.is_empty(),
        "{}, {:?}",
        losses.truth,
        losses.pauses
    );
    let accusations = losses
        .measured
        .iter()
        .flat_map(|(_, causes)| causes)
        .filter(|loss| loss.loss.value > 0.02);
    assert_eq!(accusations.collect::<Vec<_>>(), Vec::<&ServiceLoss>::new());
}

/// If no program of the batch service lives long enough for a log of its misses: is the store's loss below its limit
/// within ten seconds, does it stay there, and is the batch service no longer named?
#[test]
fn a_loop_of_short_programs_is_confined() {
    let store_phase = closed_form::uniform_phase(64.0, CAPACITY_LINES, 90_000.0, 0.02);
    let solo_speed = store_speed("default", "", machine(&store_phase, false), 2..20);
    let loss = solo_speed / store_speed("auto", "", machine(&store_phase, true), 10..60) - 1.0;
    assert!(loss < MAX_SLOWDOWN, "{loss}");
    let (_, causes) = measure_losses(&store_phase, "")
        .measured
        .pop()
        .expect("windows");
    assert!(
        causes.iter().all(|loss| loss.loss.value < MAX_SLOWDOWN),
        "{causes:?}"
    );
}

/// If the store streams as well, so that ways cannot help it: is no service confined?
#[test]
fn a_service_that_costs_nothing_is_not_confined() {
    let store_phase = closed_form::stream_phase(64.0, CAPACITY_LINES, 0.002);
    let mut shares = 0;
    run("auto", "", machine(&store_phase, true), 20, |record| {
        shares += record.decision.plan.shares.len()
    });
    assert_eq!(shares, 0);
}
