//! Are promises judged by their evidence?

use super::*;
use crate::{CpuId, EventCounts, Goal, WindowLength};

const SECOND: u64 = 1_000_000_000;

fn idle_plan() -> Plan {
    Plan::idle(WindowLength::Time { ns: SECOND })
}

fn sample_topology() -> Topology {
    crate::test_support::topology_fixture(2)
}

/// One program that runs for a second at these cycles per instruction.
fn window_fixture(number: u64, cycles_per_instr: f64, has_counts: bool) -> Observation {
    let cycles = (1e9 * cycles_per_instr) as u64;
    let counts = EventCounts::exact([
        (CounterEvent::Instructions, 1_000_000_000),
        (CounterEvent::Cycles, cycles),
    ]);

    let goal = Some(Goal {
        max_slowdown: Some(0.05),
        ..Goal::default()
    });
    let task = TaskSample {
        goal,
        on_cpu_ns: vec![(CpuId(0), SECOND)],
        counts: if has_counts {
            counts
        } else {
            EventCounts::default()
        },
        ..TaskSample::new(TaskId(0), ProcessId(0))
    };
    Observation {
        tasks: vec![task],
        ..crate::test_support::observation_fixture(number, 1)
    }
}

fn profiles_fixture(solo: Option<Estimate>) -> Profiles {
    let mut profile = Profile::default();
    profile.rates.solo_instr_per_cycle =
        solo.map(|solo| Fact::from_measurement(solo, FactSource::CoRunRows, 0));
    Profiles::from([(TaskId(0), profile)])
}

fn state_after(
    windows: &[f64],
    solo: Option<Estimate>,
    has_counts: bool,
    reasons: Vec<Reason>,
) -> PromiseReport {
    let mut tracker = PromiseTracker::default();
    let decision = Decision::new(idle_plan(), reasons);
    let mut last_report = None;
    for (number, cycles) in windows.iter().enumerate() {
        let observation = window_fixture(number as u64, *cycles, has_counts);
        last_report = tracker
            .observe(
                &observation,
                &profiles_fixture(solo),
                &sample_topology(),
                &idle_plan(),
                &decision,
            )
            .pop();
    }

    last_report.expect("the program has a promise")
}

fn solo_estimate(error: f64) -> Option<Estimate> {
    Some(Estimate {
        value: 1.0,
        low: 1.0 - error,
        high: 1.0 + error,
    })
}

/// Does the state follow from the interval of the slowdown?
#[test]
fn the_state_follows_from_the_interval() {
    let state = |cycles: f64, error: f64| {
        state_after(&[cycles; 5], solo_estimate(error), true, Vec::new()).state
    };
    assert_eq!(state(1.02, 0.01), PromiseState::Kept);
    assert_eq!(state(1.04, 0.03), PromiseState::Likely);
    assert_eq!(state(1.06, 0.03), PromiseState::AtRisk);
    assert_eq!(state(1.17, 0.03), PromiseState::Broken);
}

/// Is a promise without evidence unknown, never kept, and is the missing evidence named?
#[test]
fn a_promise_without_evidence_is_unknown() {
    let missing_evidence = |windows: &[f64], solo, has_counts| {
        let report = state_after(windows, solo, has_counts, Vec::new());
        assert_eq!(report.state, PromiseState::Unknown);
        report.missing
    };
    assert_eq!(
        missing_evidence(&[1.0; 5], None, true),
        Some(MissingPromiseEvidence::SoloSpeed)
    );
    assert_eq!(
        missing_evidence(&[1.0; 5], solo_estimate(0.01), false),
        Some(MissingPromiseEvidence::Counters)
    );
    assert_eq!(
        missing_evidence(&[1.0; 2], solo_estimate(0.01), true),
        Some(MissingPromiseEvidence::Windows)
    );
    assert_eq!(
        missing_evidence(&[0.9; 5], solo_estimate(0.01), true),
        Some(MissingPromiseEvidence::SoloSpeed),
        "that of other work"
    );
}

/// Is a promise infeasible only as long as no measurement shows it kept, and does the report name the programs that
/// would have to leave?
#[test]
fn a_promise_is_infeasible_only_until_it_is_measured_as_kept() {
    let reason = Reason {
        kind: ReasonKind::InfeasibleGoal,
        tasks: vec![TaskId(0), TaskId(7), TaskId(8)],
        text: String::new(),
        numbers: vec![
            ("must_leave".to_string(), 1.0),
            ("forecast_slowdown".to_string(), 0.12),
        ],
    };
    let report = state_after(&[1.17; 5], solo_estimate(0.01), true, vec![reason.clone()]);
    assert_eq!(
        (report.state, report.must_leave.clone()),
        (PromiseState::Infeasible, vec![TaskId(7)])
    );
    let text = report.describe(|task| format!("p{}", task.0));
    assert!(
        text.starts_with("infeasible: 17.0 % slower than alone")
            && text.contains("needs p7 to leave"),
        "{text}"
    );
    assert_eq!(
        state_after(&[1.01; 5], solo_estimate(0.01), true, vec![reason]).state,
        PromiseState::Kept
    );
}

/// Does the time in which a program waits for a CPU count, and does a plan change restart the measurement?
#[test]
fn waiting_counts_and_a_plan_change_restarts_the_measurement() {
    let mut tracker = PromiseTracker::default();
    let mut changed_plan = idle_plan();
    changed_plan
        .affinity
        .insert(TaskId(0), [0].into_iter().collect());

    let mut observe = |wait_ns: u64, new_plan: &Plan| {
        let mut observation = window_fixture(0, 1.0, true);
        observation.tasks[0].run_queue_wait_ns = Some(wait_ns);
        let decision = Decision::new(new_plan.clone(), Vec::new());
        tracker
            .observe(
                &observation,
                &profiles_fixture(solo_estimate(0.01)),
                &sample_topology(),
                &idle_plan(),
                &decision,
            )
            .remove(0)
    };
    let mut report = observe(SECOND / 10, &idle_plan());
    for _ in 0..3 {
        report = observe(SECOND / 10, &idle_plan());
    }
    assert!(
        (report.measured.unwrap().value - 0.1).abs() < 1e-9 && report.state == PromiseState::Broken
    );
    observe(0, &changed_plan);
    assert_eq!(observe(0, &idle_plan()).state, PromiseState::Unknown);
}

/// Does a window in which a program is kept off its CPU count by the time that it waited, rather than as one of many
/// windows or not at all?
#[test]
fn time_off_the_cpu_counts_by_its_length() {
    let mut tracker = PromiseTracker::default();
    let mut observe = |observation: Observation| {
        let decision = Decision::new(idle_plan(), Vec::new());
        tracker
            .observe(
                &observation,
                &profiles_fixture(solo_estimate(0.0)),
                &sample_topology(),
                &idle_plan(),
                &decision,
            )
            .remove(0)
    };
    for number in 0..4 {
        observe(window_fixture(number, 1.0, true));
    }

    let mut waiting_window = window_fixture(4, 1.0, false);
    waiting_window.span.elapsed_ns = SECOND / 2;
    waiting_window.tasks[0].on_cpu_ns.clear();
    waiting_window.tasks[0].run_queue_wait_ns = Some(SECOND / 2);
    let report = observe(waiting_window);
    assert!(
        (report.measured.unwrap().value - 0.125).abs() < 1e-9,
        "{report:?}"
    );
    assert!(
        report.state != PromiseState::Kept && report.windows == 5,
        "{report:?}"
    );
}

/// Does the model remove memory waits that more cache would remove, and does its interval include the program's own
/// part of the queueing?
#[test]
fn the_model_removes_memory_waits_that_more_cache_would_remove() {
    let level = CacheLevel::L3;
    let counts = EventCounts::exact([
        (CounterEvent::Instructions, 1_000_000),
        (CounterEvent::Cycles, 2_000_000),
        (CounterEvent::Misses(level), 10_000),
        (CounterEvent::StallCycles(StallCause::LocalMemory), 800_000),
        (CounterEvent::StallCycles(StallCause::BusQueue), 200_000),
    ]);
    let task = TaskSample {
        counts,
        ..TaskSample::new(TaskId(0), ProcessId(0))
    };

    let curve = vec![
        (1 << 19, Estimate::exact(10.0)),
        (1 << 20, Estimate::exact(5.0)),
    ];
    let profile = Profile::default().with_misses(level, curve, FactSource::MissTrace);
    let solo = solo_cycles(&task, &profile, Some((level, 1 << 20))).unwrap();
    assert_eq!(solo.basis, SoloBasis::Model);
    let Estimate { value, low, high } = solo.cycles_per_instr;
    assert!((value - (2.0 - 0.4 - 0.1)).abs() < 1e-9, "{value}");
    assert!(
        (low - (2.0 - 0.6 - 0.2)).abs() < 1e-9 && (high - (2.0 - 0.24 - 0.1)).abs() < 1e-9,
        "{low} {high}"
    );
}

/// The report on a promised rate after windows of a second in which the program reports this much work, and executes a
/// billion instructions.
fn rate_after(progress: &[Option<f64>], is_rate_reported: bool) -> PromiseReport {
    let mut tracker = PromiseTracker::default();
    let decision = Decision::new(idle_plan(), Vec::new());
    let mut last_report = None;
    for (number, progress) in progress.iter().enumerate() {
        let mut observation = window_fixture(number as u64, 1.0, true);
        observation.tasks[0].progress = *progress;
        observation.tasks[0].goal = Some(Goal {
            min_rate: Some(25.0),
            is_rate_reported,
            ..Goal::default()
        });
        let (profiles, topology) = (profiles_fixture(None), sample_topology());
        last_report = tracker
            .observe(&observation, &profiles, &topology, &idle_plan(), &decision)
            .pop();
    }
    last_report.expect("the program has a promise")
}

/// Is a rate that only a file counts unknown without a growing number, whatever the instructions are?
#[test]
fn instructions_do_not_replace_the_work_that_a_file_counts() {
    let report = rate_after(&[None; 5], true);
    assert_eq!(
        (report.state, report.missing),
        (PromiseState::Unknown, Some(MissingPromiseEvidence::Report))
    );
    assert_eq!(rate_after(&[None; 5], false).state, PromiseState::Kept);
}

/// Is a rate that begins to be reported judged by the reports alone, although instructions were counted before?
#[test]
fn reported_work_is_not_added_to_instructions() {
    for (work, state) in [(30.0, PromiseState::Kept), (20.0, PromiseState::Broken)] {
        let report = rate_after(&[None, Some(work), Some(work), Some(work)], false);
        let measured = report.measured.map(|rate| rate.value);
        assert_eq!((report.state, measured), (state, Some(work)));
    }
}
