//! Builds observations with known ground truth, for the profilers' tests.

use cachemate_core::*;

/// These tasks are live, but nothing was measured.
pub(crate) fn idle_window(number: u64, tasks: &[u32]) -> Observation {
    let tasks = tasks.iter().map(|&task| synthetic_sample(task, &[]));
    Observation {
        span: time_span(1_000_000_000),
        ..test_support::observation_of(number, 1_000_000_000, tasks)
    }
}

/// Task 0 has these counts.
pub(crate) fn counted_window(number: u64, readings: &[(CounterEvent, u64)]) -> Observation {
    Observation {
        tasks: vec![synthetic_sample(0, readings)],
        ..idle_window(number, &[])
    }
}

/// These tasks are live, and a probe is answered completely.
pub(crate) fn answered_window(number: u64, tasks: &[u32], evidence: ProbeEvidence) -> Observation {
    Observation {
        probe_results: vec![complete_answer(0, evidence)],
        ..idle_window(number, tasks)
    }
}

pub(crate) fn time_span(elapsed_ns: u64) -> TimeSpan {
    TimeSpan {
        start_ns: 0,
        elapsed_ns,
        elapsed_cycles: None,
    }
}

/// The task was on CPU 0 for the whole second. Its process has the same number.
pub(crate) fn synthetic_sample(task: u32, readings: &[(CounterEvent, u64)]) -> TaskSample {
    TaskSample {
        name: format!("task{task}"),
        cpu: Some(CpuId(0)),
        on_cpu_ns: vec![(CpuId(0), 1_000_000_000)],
        counts: EventCounts::exact(readings.iter().copied()),
        ..TaskSample::new(TaskId(task), ProcessId(task))
    }
}

pub(crate) fn complete_answer(probe: u32, evidence: ProbeEvidence) -> ProbeResult {
    ProbeResult {
        probe: ProbeId(probe),
        evidence,
        complete: true,
        cost_ns: Vec::new(),
    }
}

/// Adds a share of `colors` colors for task 0.
pub(crate) fn with_colors(mut observation: Observation, colors: u32) -> Observation {
    let share = CacheShare {
        group: GroupId(0),
        members: vec![ShareMember::Process(ProcessId(0))],
        cache: CacheId(0),
        units: Units::Colors {
            allowed: (0..colors).collect(),
            migration: PageMigration::All,
        },
    };
    observation.applied.shares = vec![ActiveShare {
        share,
        pages_in_share: None,
        fallback_pages: None,
        occupancy_bytes: None,
    }];
    observation
}
