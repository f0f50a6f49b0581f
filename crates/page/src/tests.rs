use std::collections::BTreeSet;

use cachemate_core::test_support::{
    capabilities_fixture, last_level_caches, observation_fixture, pipeline_config, record_fixture,
    run_header,
};
use cachemate_core::{
    ActiveShare, BandwidthLimit, BandwidthSupport, BandwidthUnit, CacheId, CacheLevel, CacheShare,
    ContentionFacts, CounterEvent, CounterScope, CpuId, EventCounts, Fact, FactSource, GroupId,
    ProcessId, Profile, Profiles, RateFacts, Reason, ReasonKind, RunHeader, ShareMember,
    StallCause, TaskId, Units, WindowRecord,
};
use cachemate_trace::{RunLogReader, RunLogWriter};

use crate::file::MODULES;
use crate::{
    PageCharts, RecordedRun, Snapshot, SnapshotBuilder, content_policy, page_header, page_html,
    read_recording,
};

fn header() -> RunHeader {
    run_header(
        last_level_caches(2, 2, CacheLevel::L3, 1 << 20),
        capabilities_fixture(&[]),
        pipeline_config("default"),
    )
}

/// Task `t` ran on CPU `cpus[t]` at one instruction per cycle.
fn record(window: u64, cpus: &[u32]) -> WindowRecord {
    let mut observation = observation_fixture(window, cpus.len() as u32);
    for (task, &cpu) in observation.tasks.iter_mut().zip(cpus) {
        task.name = format!("p{}", task.task.0);
        task.on_cpu_ns = vec![(CpuId(cpu), 500_000_000)];
        task.counts = EventCounts::exact([
            (CounterEvent::Instructions, 1_000_000),
            (CounterEvent::Cycles, 1_000_000),
        ]);
    }
    record_fixture(observation)
}

fn solo(instr_per_cycle: f64) -> Profile {
    let fact = Fact::new(instr_per_cycle, FactSource::Counters, 0);
    Profile::default().with_rates(RateFacts {
        solo_instr_per_cycle: Some(fact),
        ..RateFacts::default()
    })
}

/// The snapshot of a record for the page.
fn page_snapshot(
    builder: &mut SnapshotBuilder,
    charts: &mut PageCharts,
    record: &WindowRecord,
    profiles: &Profiles,
) -> Snapshot {
    let mut snapshot = builder.build_snapshot(record, profiles, None);
    charts.complete(&mut snapshot, profiles);
    snapshot
}

/// Is a program shown where it ran, with its slowdown if its solo speed is known, and without one otherwise?
#[test]
fn a_program_is_shown_where_it_ran_with_its_slowdown() {
    let profiles: Profiles = [(TaskId(0), solo(2.0)), (TaskId(1), Profile::default())].into();
    let snapshot =
        SnapshotBuilder::new(&header()).build_snapshot(&record(0, &[1, 2]), &profiles, None);
    assert_eq!(snapshot.programs[0].places, [(0, 1)]);
    assert_eq!(snapshot.programs[1].places, [(1, 1)]);
    assert_eq!(
        snapshot.programs[0].slowdown,
        Some(1.0),
        "half as fast as alone"
    );
    assert_eq!(snapshot.programs[1].slowdown, None);
    assert_eq!(snapshot.programs[0].speed_per_s, Some(1e6));
    assert_eq!(snapshot.programs[0].intensity, None);
}

/// Are the threads of a process one program, with their times added?
#[test]
fn threads_of_a_process_are_one_program_with_added_times() {
    let mut record = record(0, &[0, 1, 2]);
    record
        .observation
        .tasks
        .iter_mut()
        .for_each(|task| task.process = ProcessId(7));
    let snapshot = SnapshotBuilder::new(&header()).build_snapshot(&record, &Profiles::new(), None);
    assert_eq!(snapshot.programs.len(), 1);
    assert_eq!(
        (snapshot.programs[0].threads, snapshot.programs[0].cpu_share),
        (3, Some(1.5))
    );
    assert_eq!(snapshot.programs[0].places, [(0, 2), (1, 1)]);
}

/// Do only windows in which both ran on one cache count for the measured matrix?
#[test]
fn the_measured_matrix_counts_only_windows_on_one_cache() {
    let profiles: Profiles = (0..3).map(|task| (TaskId(task), solo(2.0))).collect();
    let mut builder = SnapshotBuilder::new(&header());
    let mut charts = PageCharts::new(&header());
    let snapshots: Vec<Snapshot> = [[0, 1, 2], [0, 1, 2], [0, 2, 1]]
        .iter()
        .enumerate()
        .map(|(window, cpus)| {
            let record = record(window as u64, cpus);
            page_snapshot(&mut builder, &mut charts, &record, &profiles)
        })
        .collect();
    let matrix = snapshots[2].matrix.as_ref().unwrap();
    assert_eq!(matrix.programs, [0, 1, 2]);
    assert_eq!(matrix.windows, [[0, 2, 1], [2, 0, 0], [1, 0, 0]]);
    assert_eq!(matrix.measured[0], [None, Some(1.0), Some(1.0)]);
    assert_eq!(
        matrix.forecast[0], [None; 3],
        "without curves nothing is forecast"
    );
}

/// Does the forecast matrix predict a larger slowdown for two programs that do not fit together than for two that do?
#[test]
fn the_forecast_matrix_slows_down_programs_that_do_not_fit() {
    let curve = |half: f64| {
        vec![
            (1 << 19, cachemate_core::Estimate::exact(half)),
            (1 << 20, cachemate_core::Estimate::exact(1.0)),
        ]
    };
    let profile_with =
        |half| solo(1.0).with_misses(CacheLevel::L3, curve(half), FactSource::ExactTrace);
    let profiles: Profiles = [
        (TaskId(0), profile_with(20.0)),
        (TaskId(1), profile_with(20.0)),
        (TaskId(2), profile_with(1.0)),
    ]
    .into();

    let mut builder = SnapshotBuilder::new(&header());
    let mut charts = PageCharts::new(&header());
    let record = record(0, &[0, 1, 2]);
    let snapshot = page_snapshot(&mut builder, &mut charts, &record, &profiles);
    let forecast = snapshot.matrix.unwrap().forecast;
    assert!(
        forecast[0][1] > forecast[0][2] && forecast[2][0] == Some(0.0),
        "{forecast:?}"
    );
    assert_eq!(snapshot.curves.len(), 3, "all are new");
}

/// Does a share have the traffic, power and stalls of its own group only, and a limit its unit and members?
#[test]
fn a_share_has_its_groups_events_and_a_limit_its_unit() {
    let mut header = header();
    let percent = BandwidthSupport {
        unit: BandwidthUnit::Percent,
        min_level: 10,
        step: 10,
        max_level: 100,
        max_groups: 8,
    };
    header.capabilities.bandwidth = vec![(CacheId(0), percent)];
    let mut record = record(0, &[0, 1]);
    let share_of = |group: u32| ActiveShare {
        share: CacheShare {
            group: GroupId(group),
            members: vec![ShareMember::Task(TaskId(group))],
            cache: CacheId(0),
            units: Units::Ways {
                mask: "0-1".parse().unwrap(),
            },
        },
        pages_in_share: None,
        fallback_pages: None,
        occupancy_bytes: None,
    };
    record.applied.shares = vec![share_of(0), share_of(1)];
    record.applied.bandwidth = vec![BandwidthLimit {
        group: GroupId(0),
        members: vec![ShareMember::Task(TaskId(1))],
        cache: CacheId(0),
        level: 30,
    }];
    let elapsed_s = record.observation.span.elapsed_ns as f64 / 1e9;
    record.observation.shared_counts = vec![(
        CounterScope::Group(GroupId(1), CacheId(0)),
        EventCounts::exact([
            (CounterEvent::MemoryBytes, 4_000_000),
            (CounterEvent::CoreEnergyMicrojoules, 2_500_000),
            (CounterEvent::StallCycles(StallCause::LocalMemory), 700),
        ]),
    )];

    let snapshot = SnapshotBuilder::new(&header).build_snapshot(&record, &Profiles::new(), None);
    let events: Vec<_> = snapshot
        .shares
        .iter()
        .map(|share| {
            (
                share.memory_bytes_per_second,
                share.core_watts,
                share.memory_stall_cycles_per_second,
            )
        })
        .collect();
    let counted = (
        Some(4e6 / elapsed_s),
        Some(2.5 / elapsed_s),
        Some(700.0 / elapsed_s),
    );
    assert_eq!(events, [(None, None, None), counted]);
    let limit = &snapshot.bandwidth_limits[0];
    assert_eq!((limit.limit.as_str(), &limit.tasks[..]), ("30 %", &[1][..]));
}

/// Is a decision reported once, until another one was given?
#[test]
fn a_decision_is_reported_once_until_another() {
    let mut builder = SnapshotBuilder::new(&header());
    let mut snapshot_with = |window, text: &str| {
        let mut record = record(window, &[0]);
        let reason = Reason {
            kind: ReasonKind::RolledBack,
            text: text.into(),
            tasks: vec![TaskId(0)],
            ..Reason::default()
        };
        record.decision.reasons = vec![reason];
        builder
            .build_snapshot(&record, &Profiles::new(), None)
            .new_decisions
    };

    let first = snapshot_with(0, "{0} goes back");
    assert_eq!(
        (
            first[0].reason.as_str(),
            first[0].kind,
            first[0].programs.as_slice()
        ),
        ("p0 #0 goes back", ReasonKind::RolledBack, &[0][..])
    );
    assert!(snapshot_with(1, "{0} goes back").is_empty());
    assert_eq!(snapshot_with(2, "{0} stays").len(), 1);
}

/// Can the content of a recording not end the element that contains it, or begin another?
#[test]
fn a_recording_cannot_leave_its_element() {
    let mut record = record(0, &[0]);
    record.observation.tasks[0].name = "</script><script>alert(1)</script><!--".into();
    let mut builder = SnapshotBuilder::new(&header());
    let snapshots = vec![builder.build_snapshot(&record, &Profiles::new(), None)];
    let page = page_html(Some(&RecordedRun {
        head: page_header(&header(), "<b>x"),
        snapshots,
    }))
    .unwrap();
    assert!(!page.contains("alert(1)") && !page.contains("<b>x") && page.contains(r"\u003cb>x"));
    let name = "</script><!--\u{202e}\u{1b}\u{85}";
    let json = crate::file::embed_json(&name).unwrap();
    assert!(
        !json
            .as_str()
            .contains(['<', '\u{202e}', '\u{1b}', '\u{85}']),
        "{json}"
    );
    let shown: String = serde_json::from_str(json.as_str()).unwrap();
    assert_eq!(shown, "</script><!--\\u{202e}\u{1b}\\u{85}");
}

/// Is the page smaller than 200 KB, does it load nothing, and do its scripts match its policy?
#[test]
fn the_page_is_small_and_loads_nothing() {
    let page = page_html(None).unwrap();
    assert!(page.len() < 200_000, "{} bytes", page.len());
    let own_code: String = MODULES.iter().map(|(_, text)| *text).collect();
    for word in [
        "innerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "http:",
        "https:",
    ] {
        assert!(
            !own_code
                .replace("http://www.w3.org/2000/svg", "")
                .contains(word),
            "{word}"
        );
    }
    assert!(!page.contains("src=") && !page.contains("@import") && !page.contains("url("));
    let policy = content_policy();
    assert!(
        policy.contains("default-src 'none'") && !policy.contains("unsafe"),
        "{policy}"
    );
    assert_eq!(policy.matches("'sha256-").count(), 3);
}

/// Do the modules define no name twice, and import only names that another one exports?
#[test]
fn modules_define_names_once_and_import_exported_ones() {
    let (mut defined, mut exported) = (BTreeSet::new(), BTreeSet::new());

    for (name, text) in MODULES {
        for line in text.lines() {
            let code = line.strip_prefix("export ").unwrap_or(line);
            let code = code.strip_prefix("async ").unwrap_or(code);
            let word = ["function ", "class ", "const ", "let "]
                .iter()
                .find_map(|kind| code.strip_prefix(kind));
            if let Some(word) =
                word.and_then(|declaration| declaration.split([' ', '(', ';', '=']).next())
            {
                assert!(defined.insert(word), "{name}: {word} a second time");
                if line.starts_with("export ") {
                    exported.insert(word);
                }
            }
            if let Some(list) = line
                .strip_prefix("import {")
                .and_then(|names| names.split('}').next())
            {
                for word in list.split(',').map(str::trim) {
                    assert!(
                        exported.contains(word),
                        "{name}: {word} is not exported before"
                    );
                }
            }
            assert!(
                !line.starts_with("import ") || line.starts_with("import {"),
                "{name}: {line}"
            );
        }
    }
}

/// Are unmeasured values omitted or null in the JSON, and never zero?
#[test]
fn unmeasured_values_are_omitted_or_null_in_the_json() {
    let mut record = record(0, &[0]);
    record.observation.tasks[0].counts = EventCounts::default();
    let profile = Profile {
        contention: ContentionFacts::default(),
        ..Profile::default()
    };
    let snapshot = SnapshotBuilder::new(&header()).build_snapshot(
        &record,
        &[(TaskId(0), profile)].into(),
        None,
    );
    let json = serde_json::to_value(&snapshot).unwrap();
    for name in [
        "slowdown",
        "instr_per_cycle",
        "mpki",
        "speed_per_s",
        "intensity",
        "sensitivity",
    ] {
        assert!(json["programs"][0][name].is_null(), "{name} in {json}");
    }
    for name in ["run_time_percent", "cache_percent", "waiting_percent"] {
        assert!(json["services"][0][name].is_null(), "{name} in {json}");
    }
    assert!(json["caches"][0]["miss_ratio"].is_null() && json["journal"].is_null());
    assert!(
        page_header(&header(), "x")
            .caches
            .iter()
            .all(|cache| CacheId(cache.cache).0 < 2)
    );
}

/// Is a recording read window by window to its end, and a truncated one up to the damage, with the place?
#[test]
fn a_truncated_recording_is_read_up_to_the_damage() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let mut log = RunLogWriter::create(&path, false, &header()).unwrap();
    (0..3).for_each(|window| log.push(&record(window, &[0, 2])).unwrap());
    log.finish().unwrap();
    let complete_recording =
        read_recording(RunLogReader::open(&path).unwrap(), "run.jsonl").unwrap();
    assert_eq!(
        (
            complete_recording.snapshots.len(),
            &complete_recording.head.cut_off
        ),
        (3, &None)
    );
    assert_eq!(complete_recording.snapshots[2].programs[1].places, [(1, 1)]);
    assert_eq!(
        (
            complete_recording.head.source.as_str(),
            complete_recording.head.caches.len()
        ),
        ("run.jsonl", 2)
    );
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, &text[..text.len() - 40]).unwrap();
    let truncated_recording =
        read_recording(RunLogReader::open(&path).unwrap(), "run.jsonl").unwrap();
    assert_eq!(truncated_recording.snapshots.len(), 2);
    assert!(truncated_recording.head.cut_off.unwrap().contains("line 4"));
}
