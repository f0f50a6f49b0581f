//! Formats the daemon's status as text and tables.

use std::collections::BTreeMap;

use cachemate_core::{Estimate, FactOrigin};
use cachemate_linux::machine::OBSERVE_ONLY_REASON;
use cachemate_report::text::{
    escape_controls, format_count_of, format_fixed, format_names, format_number, format_size,
    value_or_dash,
};
use cachemate_report::{Align, Table};
use cachemate_spec::ManageMode;
use serde::Serialize;

use cachemate_daemon::status::{DaemonStatus, describe_evidence_level};
use cachemate_page::{
    BandwidthSnapshot, CacheSnapshot, ContentionClass, DecisionSnapshot, GangSnapshot,
    PromiseSnapshot, ServiceSnapshot, ShareSnapshot, TaskSnapshot, describe_thread,
};

use crate::service_text::render_services;

fn signed_percent_text(value: Option<f64>) -> String {
    value_or_dash(value.map(|value| {
        format!(
            "{}{} %",
            if value < 0.0 { "" } else { "+" },
            format_fixed(100.0 * value, 0)
        )
    }))
}

fn format_estimate(value: Option<Estimate>) -> String {
    value_or_dash(value.map(|value| format_fixed(value.value, 2)))
}

pub fn status_head(status: &DaemonStatus) -> String {
    let mode = if status.mode == ManageMode::Act {
        "acting"
    } else {
        "observing only"
    };
    let cpu_percent = if status.running_ns > 0 {
        100.0 * status.cpu_ns as f64 / status.running_ns as f64
    } else {
        0.0
    };
    let mut text = format!(
        "cachemate {} (pid {}{}): {mode}, policy {}, window {} of {:.1} s, {cpu_percent:.2} % of a CPU used\n{}\n",
        status.version,
        status.pid,
        status
            .guardian_pid
            .map_or(String::new(), |pid| format!(", guardian {pid}")),
        status.policy,
        status.windows,
        status.snapshot.duration_s,
        describe_evidence_level(
            status.level,
            status.calibrated,
            status.level_problem.as_deref()
        ),
    );
    if let Some(ns) = status.counters.max_runqueue_wait_ns {
        text.push_str(&format!(
            "longest wait of a managed thread for a processor: {:.1} ms\n",
            ns as f64 / 1e6
        ));
    }
    if status.guardian_isolated == Some(false) {
        text.push_str("the guardian is in the daemon's control group: if the group is killed, both end, and cachemate restore is needed\n");
    }
    if let Some(error) = &status.config_error {
        text.push_str(&format!("configuration not reloaded: {error}\n"));
    }
    status
        .unavailable
        .iter()
        .for_each(|reason| text.push_str(&format!("{reason}\n")));
    if let Some(nri) = &status.nri {
        let state_text = match (&nri.runtime, &nri.error) {
            (Some(runtime), _) => format!("registered at {}", escape_controls(runtime)),
            (None, Some(error)) => format!("not registered: {}", escape_controls(error)),
            (None, None) => "not registered yet".to_string(),
        };
        text.push_str(&format!("container runtime: {state_text}\n"));
    }
    if let Some(means) = &status.means {
        text.push_str(&format!("this host: {means}\n"));
    }
    if let Some(colors) = &status.colors {
        text.push_str(&format!("page colors: {colors}\n"));
    }
    if status.kernel_cache_scheduling.enabled.is_some() {
        let detail = &status.kernel_cache_scheduling.detail;
        text.push_str(&format!("the kernel's cache-aware scheduling: {detail}\n"));
    }
    if let Some(cpu) = status.pressure.cpu {
        let memory_share = status
            .pressure
            .memory
            .map_or(0.0, |memory| memory.some_share);
        text.push_str(&format!(
            "waiting in the last 10 s: {:.0} % for CPUs, {:.0} % for memory\n",
            100.0 * cpu.some_share,
            100.0 * memory_share
        ));
    }
    text
}

fn cache_line(cache: &CacheSnapshot) -> String {
    let forecast_text = cache
        .forecast_miss_ratio
        .map_or(String::new(), |r| format!(", forecast miss ratio {r:.2}"));
    let bytes_text = cache
        .size_bytes
        .map_or(String::new(), |bytes| format!(", {}", format_size(bytes)));
    let threads = format_count_of(cache.tasks.len() as u64, "thread");
    format!(
        "{} of CPUs {}{bytes_text}: {threads}{forecast_text}\n",
        cache.level, cache.cpus
    )
}

pub const COLUMNS: &[(&str, Align)] = &[
    ("PID", Align::Right),
    ("TID", Align::Right),
    ("program", Align::Left),
    ("CPU", Align::Right),
    ("allowed", Align::Left),
    ("busy", Align::Right),
    ("intensity", Align::Right),
    ("sensitivity", Align::Right),
    ("class", Align::Left),
    ("forecast", Align::Right),
    ("measured", Align::Right),
    ("work/s", Align::Right),
];

pub fn task_row(task: &TaskSnapshot) -> Vec<String> {
    vec![
        task.pid.to_string(),
        task.tid.to_string(),
        format!(
            "{}{}",
            escape_controls(&task.name),
            if task.observed_only {
                " (observed)"
            } else {
                ""
            }
        ),
        value_or_dash(task.cpu.map(|cpu| cpu.to_string())),
        task.allowed.clone().unwrap_or_else(|| "any".into()),
        value_or_dash(
            task.cpu_share
                .map(|share| format!("{:.0} %", 100.0 * share)),
        ),
        format_estimate(task.intensity),
        format_estimate(task.sensitivity),
        task.class.map_or("-", ContentionClass::text).to_string(),
        signed_percent_text(task.forecast_slowdown),
        signed_percent_text(task.measured_slowdown),
        value_or_dash(
            task.progress_per_second
                .map(|rate| match task.progress_unit.as_deref() {
                    Some("work reported") | None => format_number(rate),
                    Some(unit) => format!("{} {unit}", format_number(rate)),
                }),
        ),
    ]
}

/// Tasks of each last-level cache, the busiest first; tasks whose cache is unknown follow at the end.
pub fn tasks_by_cache(status: &DaemonStatus) -> Vec<(String, Vec<&TaskSnapshot>)> {
    let tasks_of = |cache: Option<u32>| {
        let mut tasks: Vec<&TaskSnapshot> = status
            .snapshot
            .tasks
            .iter()
            .filter(|task| task.cache == cache)
            .collect();
        tasks.sort_by(|a, b| {
            b.cpu_share
                .unwrap_or(0.0)
                .total_cmp(&a.cpu_share.unwrap_or(0.0))
        });
        tasks
    };
    let mut groups: Vec<_> = status
        .snapshot
        .caches
        .iter()
        .map(|cache| (cache_line(cache), tasks_of(Some(cache.cache))))
        .collect();
    let tasks_without_cache = tasks_of(None);
    if !tasks_without_cache.is_empty() {
        groups.push((
            "on CPUs whose caches are unknown\n".to_string(),
            tasks_without_cache,
        ));
    }
    groups
}

fn cache_tables(status: &DaemonStatus, max_rows: usize) -> String {
    let mut text = String::new();
    for (title, tasks) in tasks_by_cache(status) {
        let mut table = Table::new(COLUMNS);
        for task in tasks.iter().take(max_rows) {
            table.add_row(task_row(task));
        }
        text.push_str(&format!(
            "\n{title}{}",
            if tasks.is_empty() {
                String::new()
            } else {
                table.text()
            }
        ));
        if tasks.len() > max_rows {
            text.push_str(&format!("and {} more\n", tasks.len() - max_rows));
        }
    }
    text + &dash_lines(&status.snapshot.tasks)
}

/// For each measurement that a thread lacks, the step that would give it.
fn dash_lines(tasks: &[TaskSnapshot]) -> String {
    let measurements: [(&str, &str, fn(&TaskSnapshot) -> bool); 4] = [
        (
            "intensity, sensitivity",
            "policy intensity-gangs probes each thread for them",
            |task| task.intensity.is_none() || task.sensitivity.is_none(),
        ),
        (
            "forecast",
            "the plan's forecast needs a curve of the program: a recorded profile has one",
            |task| task.forecast_slowdown.is_none(),
        ),
        (
            "measured",
            "the speed alone is unknown: a recorded profile has it",
            |task| task.measured_slowdown.is_none(),
        ),
        (
            "work/s",
            "no counter, no busy system calls: reports of its work (cachemate-progress.h) would tell",
            |task| task.progress_per_second.is_none() && task.cpu_share.is_some_and(|s| s > 0.0),
        ),
    ];
    measurements
        .into_iter()
        .filter(|(_, _, is_missing)| tasks.iter().any(is_missing))
        .map(|(columns, step, _)| format!("'-' under {columns}: {step}\n"))
        .collect()
}

/// One line per cache, without threads.
fn cache_summary(status: &DaemonStatus) -> String {
    let caches: String = status.snapshot.caches.iter().map(cache_line).collect();
    format!("\n{caches}threads: --threads\n")
}

fn task_name(status: &DaemonStatus, id: u32) -> String {
    let task = status.snapshot.tasks.iter().find(|task| task.task == id);
    task.map_or_else(
        || format!("task {id}"),
        |task| describe_thread(&task.name, task.tid),
    )
}

pub fn gang_lines(status: &DaemonStatus) -> String {
    let gang_text = |gang: &Vec<u32>| {
        gang.iter()
            .map(|id| task_name(status, *id))
            .collect::<Vec<_>>()
            .join(" + ")
    };
    let turns_line = |schedule: &GangSnapshot| {
        let turns: Vec<String> = schedule.gangs.iter().map(gang_text).collect();
        format!(
            "turns of {} ms on CPUs {}: {}\n",
            schedule.slice_ns / 1_000_000,
            schedule.cpus,
            turns.join(", then ")
        )
    };
    let group_text = |group: &cachemate_core::CpusetGroup| {
        format!("cpuset {} confined to CPUs {}\n", group.cgroup, group.cpus)
    };
    status
        .snapshot
        .gangs
        .iter()
        .map(turns_line)
        .chain(status.snapshot.cpusets.iter().map(group_text))
        .collect()
}

pub fn shares_text(status: &DaemonStatus) -> String {
    let share_line = |share: &ShareSnapshot| {
        let occupancy_text = share.occupancy_bytes.map_or(String::new(), |bytes| {
            format!(", {} occupied", format_size(bytes))
        });
        let events_text: String = [
            share
                .memory_bytes_per_second
                .map(|bytes| format!("{} GB/s of memory traffic", format_number(bytes / 1e9))),
            share
                .core_watts
                .map(|watts| format!("{} W", format_number(watts))),
            share
                .memory_stall_cycles_per_second
                .map(|cycles| format!("{} stalled cycles a second", format_number(cycles))),
        ]
        .into_iter()
        .flatten()
        .map(|text| format!(", {text}"))
        .collect();
        let units_text = match (&share.ways, &share.colors) {
            (Some(ways), _) => format!("ways {ways}"),
            (None, colors) => format!("colors {}", colors.as_deref().unwrap_or("-")),
        };
        let allowed_text = share
            .allowed_page_share
            .map_or(String::new(), |share_in_colors| {
                format!(
                    ", {:.1} % of the pages in allowed colors",
                    100.0 * share_in_colors
                )
            });
        let pending_move = status
            .snapshot
            .pending
            .iter()
            .find(|p| (p.group, p.cache) == (Some(share.group), Some(share.cache)));
        let progress_text = pending_move.map_or(String::new(), |progress| match progress.total {
            Some(total) => format!(", moving: {} of {total} pages done", progress.done),
            None => ", not started yet".to_string(),
        });
        let notes: String = share
            .notes
            .iter()
            .map(|note| format!("  {note}\n"))
            .collect();
        format!(
            "{units_text} of cache {}{occupancy_text}{events_text}{allowed_text}{progress_text}: {}\n{notes}",
            share.cache,
            members_text(status, &share.tasks)
        )
    };
    let limit_line = |limit: &BandwidthSnapshot| {
        let members = members_text(status, &limit.tasks);
        format!(
            "at most {} of the memory bandwidth of cache {}: {members}\n",
            limit.limit, limit.cache
        )
    };
    let shares = status.snapshot.shares.iter().map(share_line);
    let limits = status.snapshot.bandwidth_limits.iter().map(limit_line);
    shares.chain(limits).collect()
}

fn members_text(status: &DaemonStatus, tasks: &[u32]) -> String {
    let names: Vec<String> = tasks.iter().map(|id| task_name(status, *id)).collect();
    names.join(" + ")
}

pub fn decisions_text(decisions: &[DecisionSnapshot], max_lines: usize) -> String {
    let decision_line = |decision: &DecisionSnapshot| {
        format!("  window {}: {}\n", decision.window, decision.reason)
    };
    decisions
        .iter()
        .take(max_lines)
        .map(decision_line)
        .collect()
}

pub fn problems_text(status: &DaemonStatus) -> String {
    let unmatched_lines = status
        .unmatched_rules
        .iter()
        .take(5)
        .map(|rule| format!("{rule}\n"));
    let refused_plan = status
        .refused_plan
        .iter()
        .map(|plan| format!("refused, the previous plan stays in force: {plan}\n"));
    let (mut planned, mut refused) = (Vec::new(), Vec::new());
    for line in &status.snapshot.refused {
        match line.strip_suffix(OBSERVE_ONLY_REASON) {
            Some(item) => planned.push(item.trim_end_matches(": ").to_string()),
            None => refused.push(format!("refused: {line}\n")),
        }
    }
    let planned_line = (!planned.is_empty()).then(|| {
        format!(
            "planned, but not made in mode observe: {}\n",
            format_names(&planned, 5)
        )
    });
    let refusals = refused_plan
        .chain(refused.into_iter().take(5))
        .chain(planned_line);
    unmatched_lines
        .chain(refusals)
        .chain(
            status
                .snapshot
                .overridden
                .iter()
                .take(5)
                .map(|item| format!("changed by another program: {item}\n")),
        )
        .collect()
}

fn promises_text(promises: &[PromiseSnapshot]) -> String {
    promises
        .iter()
        .map(|promise| format!("promise: {}\n", escape_controls(&promise.text)))
        .collect()
}

fn describe_plan(status: &DaemonStatus) -> String {
    format!(
        "{}{}{}{}",
        promises_text(&status.snapshot.promises),
        gang_lines(status),
        shares_text(status),
        problems_text(status)
    )
}

/// Formats the whole status: services and, if `with_threads`, the threads of each cache.
pub fn status_text(status: &DaemonStatus, with_threads: bool) -> String {
    render_status(status, with_threads, 10, (usize::MAX, usize::MAX))
}

/// The heading of the decisions, which a daemon that only observes does not carry out.
pub fn decisions_heading(mode: ManageMode) -> &'static str {
    match mode {
        ManageMode::Act => "last decisions",
        ManageMode::Observe => "last decisions, only shown: mode = \"act\" would carry them out",
    }
}

fn render_status(
    status: &DaemonStatus,
    with_threads: bool,
    decisions: usize,
    rows: (usize, usize),
) -> String {
    let decisions = decisions_text(&status.decisions, decisions);
    let decisions_section = if decisions.is_empty() {
        String::new()
    } else {
        format!("\n{}\n{decisions}", decisions_heading(status.mode))
    };
    let services = render_services(&status.snapshot.services, rows.0);
    let threads = if with_threads {
        cache_tables(status, rows.1)
    } else {
        cache_summary(status)
    };
    format!(
        "{}{services}{threads}\n{}{decisions_section}",
        status_head(status),
        describe_plan(status)
    )
}

/// Formats the part of the status that fits a screen; truncates lines at `columns`, if given.
pub fn top_text(status: &DaemonStatus, with_threads: bool, columns: Option<usize>) -> String {
    let text = render_status(status, with_threads, 6, (20, 15));
    let columns = columns.unwrap_or(usize::MAX);
    text.lines()
        .map(|line| line.chars().take(columns).collect::<String>() + "\n")
        .collect()
}

/// `cachemate explain --json`.
#[derive(Default, Serialize)]
pub struct ExplainJson {
    /// The requested process id, or that of the only process with the requested name.
    pub pid: Option<i32>,
    pub policy: String,
    pub mode: ManageMode,
    /// Services that the request names, or to which the named threads belong.
    pub services: Vec<ServiceSnapshot>,
    pub tasks: Vec<TaskSnapshot>,
    /// Promises to the program, with their states.
    pub promises: Vec<PromiseSnapshot>,
    /// Managed threads of other processes on the program's cache.
    pub co_runners: Vec<String>,
    /// Decisions that name the program, newest first.
    pub decisions: Vec<DecisionSnapshot>,
    pub refused: Vec<String>,
    /// Conflicts of the program's affinities with the kernel's own cache-aware scheduling.
    pub conflicts: Vec<String>,
}

/// Maximum number of co-runners in an explanation; `--json` has all.
const MAX_CO_RUNNERS: usize = 12;

/// Maximum number of programs of which an explanation lists what is known; `--json` has all threads.
const MAX_KNOWN_PROGRAMS: usize = 8;

/// Lists what is known of each program, by its thread with the most facts.
fn known_facts_text(tasks: &[TaskSnapshot]) -> String {
    let mut best_known: BTreeMap<&str, &TaskSnapshot> = BTreeMap::new();
    for task in tasks {
        let known_best = best_known.entry(&task.name).or_insert(task);
        if task.known.len() > known_best.known.len() {
            *known_best = task;
        }
    }
    let describe_origin = |origin: &FactOrigin| {
        let age = origin
            .age_windows
            .map_or_else(String::new, |windows| match windows {
                0 => ", in the last window".to_string(),
                windows => format!(", {} before the last", format_count_of(windows, "window")),
            });
        format!("{} ({}{age})", origin.fact, origin.source.describe())
    };
    let program_line = |(name, task): (&str, &TaskSnapshot)| {
        let origins: Vec<String> = task.known.iter().map(describe_origin).collect();
        let facts = if origins.is_empty() {
            "nothing yet".to_string()
        } else {
            origins.join("; ")
        };
        format!("known of {}: {facts}\n", escape_controls(name))
    };
    best_known
        .into_iter()
        .take(MAX_KNOWN_PROGRAMS)
        .map(program_line)
        .collect()
}

/// Formats the explanation of one program or service.
pub fn explain_text(explanation: &ExplainJson) -> String {
    let ExplainJson {
        services,
        tasks,
        promises: promised,
        co_runners,
        decisions,
        refused,
        conflicts,
        mode,
        ..
    } = explanation;
    let mut table = Table::new(COLUMNS);
    for task in tasks {
        table.add_row(task_row(task));
    }
    let mut text = format!(
        "{}\n{}",
        render_services(services, usize::MAX).trim_start(),
        table.text()
    );
    text.push_str(&promises_text(promised));
    if *mode == ManageMode::Observe {
        text.push_str("observing only: nothing is changed, and the reasons describe the plan that would be applied\n");
    }
    if !co_runners.is_empty() {
        text.push_str(&format!(
            "on the same cache: {}\n",
            format_names(co_runners, MAX_CO_RUNNERS)
        ));
    }
    text.push_str(&known_facts_text(tasks));
    let mut reasons: Vec<&String> = tasks.iter().flat_map(|task| &task.reasons).collect();
    reasons.dedup();
    match reasons.is_empty() {
        true => text.push_str("no reason names it: the kernel placed it\n"),
        false => reasons
            .iter()
            .for_each(|reason| text.push_str(&format!("reason: {reason}\n"))),
    }
    for decision in decisions.iter().take(5) {
        text.push_str(&format!(
            "  window {}: {}\n",
            decision.window, decision.reason
        ));
        for (name, value) in &decision.numbers {
            text.push_str(&format!(
                "  window {}: {name} = {}\n",
                decision.window,
                format_fixed(*value, 4)
            ));
        }
    }
    refused
        .iter()
        .for_each(|line| text.push_str(&format!("refused: {line}\n")));
    conflicts
        .iter()
        .for_each(|line| text.push_str(&format!("conflict with the kernel: {line}\n")));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{Fact, FactSource, Profile, RateFacts, ReasonKind};
    use cachemate_page::Snapshot;

    /// Are lines truncated at a terminal's width, and left whole in a pipe?
    #[test]
    fn lines_are_truncated_on_a_terminal_and_whole_in_a_pipe() {
        let policy = "a".repeat(300);
        let status = DaemonStatus {
            policy: policy.clone(),
            ..DaemonStatus::default()
        };
        assert!(top_text(&status, true, None).contains(&policy));
        assert!(
            top_text(&status, true, Some(80))
                .lines()
                .all(|line| line.chars().count() <= 80)
        );
    }

    /// Does each column with a dash name its step, and a column without one none?
    #[test]
    fn a_dash_of_a_thread_names_the_step_that_would_tell() {
        let known = TaskSnapshot {
            intensity: Some(Estimate::exact(0.1)),
            sensitivity: Some(Estimate::exact(0.1)),
            forecast_slowdown: Some(0.0),
            measured_slowdown: Some(0.0),
            progress_per_second: Some(1.0),
            cpu_share: Some(1.0),
            ..TaskSnapshot::default()
        };
        assert_eq!(dash_lines(std::slice::from_ref(&known)), "");
        let sleeping = TaskSnapshot {
            progress_per_second: None,
            cpu_share: Some(0.0),
            ..known.clone()
        };
        assert_eq!(dash_lines(&[sleeping]), "", "a sleeping thread has no rate");
        let unknown = TaskSnapshot {
            measured_slowdown: None,
            ..known.clone()
        };
        assert_eq!(
            dash_lines(&[known, unknown]),
            "'-' under measured: the speed alone is unknown: a recorded profile has it\n"
        );
    }

    /// Are changes that the mode does not allow listed once, and apart from those that the host refused?
    #[test]
    fn observing_refuses_nothing() {
        let refused = vec![
            format!("CPUs of a(1): {OBSERVE_ONLY_REASON}"),
            "watched words of redis(7): perf_event_open: No space left on device".to_string(),
        ];
        let mut status = DaemonStatus::default();
        status.snapshot.refused = refused;
        let text = problems_text(&status);
        assert_eq!(
            text,
            "refused: watched words of redis(7): perf_event_open: No space left on device\nplanned, but not made in mode observe: CPUs of a(1)\n"
        );
    }

    /// Does the explanation name what is known of each program, how it was measured and how long ago, by the thread of
    /// which most is known?
    #[test]
    fn an_explanation_names_what_is_known_and_how_old_it_is() {
        let rate = |value| Some(Fact::new(value, FactSource::Counters, 7));
        let mut profile = Profile::default().with_rates(RateFacts {
            observed_instr_per_cycle: rate(1.0),
            observed_misses_per_kilo_instr: rate(3.0),
            ..RateFacts::default()
        });
        profile.contention.intensity = Some(Fact::new(0.4, FactSource::StoredProfile, 7));
        let thread = |tid: i32, known: Vec<FactOrigin>| TaskSnapshot {
            tid,
            name: "redis".into(),
            known,
            ..TaskSnapshot::default()
        };
        let tasks = vec![
            thread(1, Vec::new()),
            thread(2, profile.origins(7)),
            thread(3, Vec::new()),
        ];
        let line = "known of redis: observed misses per kilo instr (counters, in the last window); observed instr per cycle \
                    (counters, in the last window); intensity (an earlier run)\n";
        assert_eq!(known_facts_text(&tasks), line);
        let later = vec![
            thread(1, profile.origins(10)[..1].to_vec()),
            TaskSnapshot {
                name: "new".into(),
                ..TaskSnapshot::default()
            },
        ];
        let lines = "known of new: nothing yet\nknown of redis: observed misses per kilo instr (counters, 3 windows before \
                     the last)\n";
        assert_eq!(known_facts_text(&later), lines);
    }

    /// Do the status, top and the explanation word the state of a promise identically?
    #[test]
    fn all_views_word_a_promise_identically() {
        let promise = PromiseSnapshot {
            program: 0,
            pid: Some(7),
            name: "redis(7)".to_string(),
            state: cachemate_core::PromiseState::Broken,
            max_slowdown: Some(0.05),
            min_rate: None,
            measured: Some(Estimate::exact(0.17)),
            text: "redis(7) is broken: 17.0 % slower than alone".to_string(),
        };
        let line = "promise: redis(7) is broken: 17.0 % slower than alone\n";
        let mut status = DaemonStatus::default();
        status.snapshot.promises = vec![promise.clone()];
        assert!(
            status_text(&status, true).contains(line)
                && top_text(&status, true, None).contains(line)
        );
        assert!(
            explain_text(&ExplainJson {
                promises: vec![promise],
                ..ExplainJson::default()
            })
            .contains(line)
        );
    }

    /// Does a program whose name imitates a terminal command or the start of another row stay one word in one row,
    /// wherever it is named?
    #[test]
    fn a_hostile_name_stays_one_word_in_one_row() {
        let name = "\u{1b}[2J\n  1  1 init";
        let tasks = vec![TaskSnapshot {
            task: 7,
            pid: 107,
            tid: 107,
            name: name.to_string(),
            measured_slowdown: Some(1e300),
            ..TaskSnapshot::default()
        }];
        let gangs = vec![GangSnapshot {
            cpus: "0".into(),
            slice_ns: 1,
            gangs: vec![vec![7]],
            programs: vec![vec![0]],
        }];
        let share = ShareSnapshot {
            ways: Some("0-1".into()),
            tasks: vec![7],
            ..ShareSnapshot::default()
        };
        let limit = BandwidthSnapshot {
            limit: "50 %".into(),
            tasks: vec![7],
            ..BandwidthSnapshot::default()
        };
        let decision = DecisionSnapshot {
            window: 1,
            kind: ReasonKind::Explanation,
            tasks: vec![7],
            programs: vec![0],
            reason: format!("{} is alone", describe_thread(name, 107)),
            numbers: vec![("n".into(), 1e308)],
        };
        let snapshot = Snapshot {
            tasks: tasks.clone(),
            gangs,
            shares: vec![share],
            bandwidth_limits: vec![limit],
            ..Snapshot::default()
        };
        let status = DaemonStatus {
            snapshot,
            decisions: vec![decision.clone()],
            ..DaemonStatus::default()
        };
        let co_runners = vec![describe_thread(name, 107)];
        for text in [
            status_text(&status, true),
            top_text(&status, true, None),
            explain_text(&ExplainJson {
                tasks: tasks.clone(),
                co_runners,
                decisions: vec![decision],
                ..ExplainJson::default()
            }),
        ] {
            assert!(
                !text.contains(['\u{1b}', '\r']) && text.contains(r"\u{1b}[2J\n  1  1 init"),
                "{text}"
            );
            assert!(
                !text
                    .lines()
                    .any(|line| line.trim_start().starts_with("1  1 init")),
                "{text}"
            );
            assert!(
                text.lines().all(|line| line.chars().count() < 300),
                "{text}"
            );
        }
    }
}
