//! Do the shipped alerts and the shipped dashboard fit the metrics as the daemon exports them?

#[path = "../../../linux/src/skip_test.rs"]
mod not_shown;

use std::collections::BTreeSet;
use std::process::Command;

use cachemate_auto::service_losses::{
    LossSource, ServiceLoss, ServiceReport, ServiceSlowdown, WaitingCause,
};
use cachemate_core::{Estimate, PromiseState, ServiceIdentity, ServiceKind, TaskId};
use cachemate_page::{CacheSnapshot, PromiseSnapshot, ServiceSnapshot, Snapshot, TaskSnapshot};

use super::metrics_page;
use crate::status::DaemonStatus;

const ALERTS: &str = include_str!("../../../../packaging/alerts.yaml");
const DASHBOARD: &str = include_str!("../../../../packaging/grafana.json");

/// Alerts about a single host that reports and is well.
const ABSENCE_ALERTS: [&str; 2] = ["CachemateDown", "CachemateNoMetrics"];

/// The promised maximum of Redis's slowdown.
const MAX_SLOWDOWN: f64 = 0.5;

/// A status with every metric: a Redis that waits for a spinner and loses cache to a backup, or hardly so.
fn status_fixture(waiting: f64, cache: f64, promise: PromiseState, events: u64) -> DaemonStatus {
    let unit = |name: &str| ServiceIdentity::new(ServiceKind::Unit, format!("{name}.service"));
    let around = |value: f64| Estimate {
        value,
        low: 0.9 * value,
        high: 1.1 * value,
    };
    let report = ServiceReport {
        service: unit("redis"),
        tasks: vec![TaskId(0)],
        max_slowdown: Some(MAX_SLOWDOWN),
        cpu_share: 0.5,
        waiting_share: Some(0.4),
        slowdown: ServiceSlowdown {
            cache: Some((around(cache), LossSource::Measured)),
            is_cache_complete: true,
            waiting: Some(around(waiting)),
            work: None,
        },
        losses: vec![ServiceLoss {
            cause: unit("backup"),
            loss: around(cache),
            source: LossSource::Measured,
            forecast: None,
            windows: 9,
        }],
        waiting_causes: vec![WaitingCause {
            cause: Some(unit("spinner")),
            loss: waiting,
            share: 1.0,
        }],
        prevented_losses: Vec::new(),
        reason: None,
    };
    let snapshot = Snapshot {
        services: vec![ServiceSnapshot::new(&report)],
        promises: vec![PromiseSnapshot {
            program: 0,
            pid: Some(7),
            name: "redis".into(),
            state: promise,
            max_slowdown: Some(MAX_SLOWDOWN),
            min_rate: None,
            measured: Some(around(waiting)),
            text: String::new(),
        }],
        caches: vec![CacheSnapshot {
            cpus: "0-1".into(),
            busy_cpus: Some(1.5),
            memory_bytes_per_second: Some(1e9),
            occupancy_bytes: Some(1 << 20),
            ..CacheSnapshot::default()
        }],
        tasks: vec![TaskSnapshot {
            name: "redis".into(),
            cache: Some(0),
            intensity: Some(around(0.2)),
            ..TaskSnapshot::default()
        }],
        ..Snapshot::default()
    };
    let mut status = DaemonStatus {
        snapshot,
        // A tenth of a second in each minute.
        cpu_ns: 100_000_000 * events,
        ..DaemonStatus::default()
    };
    status.counters.max_runqueue_wait_ns = Some(1);
    status.counters.probe_withheld_ns = 1_000_000_000 * events;
    status.counters.rollbacks = events;
    status.counters.refused_plans = events;
    status
}

/// The names and labels of all series of a status in a fixed order, with their values.
fn series_of(status: &DaemonStatus) -> Vec<(String, f64)> {
    let page = metrics_page(status);
    let sample_lines = page.lines().filter(|line| !line.starts_with('#'));
    let mut series: Vec<(String, f64)> = sample_lines
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').expect("a series and its value");
            (series.to_string(), value.parse().expect("a number"))
        })
        .collect();
    series.sort_by(|a, b| a.0.cmp(&b.0));
    series
}

/// The metrics that a text names.
fn metrics_named_in(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words
        .filter(|word| word.starts_with("cachemate_"))
        .collect()
}

/// Is every metric of the alerts and of the dashboard exported under this name?
#[test]
fn every_metric_of_alerts_and_dashboard_is_exported() {
    let series = series_of(&status_fixture(0.8, 0.2, PromiseState::Kept, 3));
    let exported: BTreeSet<&str> = series
        .iter()
        .map(|(series, _)| series.split('{').next().expect("a name"))
        .collect();
    for (file, text) in [("alerts.yaml", ALERTS), ("grafana.json", DASHBOARD)] {
        let named = metrics_named_in(text);
        assert!(named.len() > 5, "{file}: {named:?}");
        let missing: Vec<&&str> = named.difference(&exported).collect();
        assert!(missing.is_empty(), "{file}: {missing:?} of {exported:?}");
    }
}

/// The alerts that fire in the twentieth minute of a host with these two statuses a minute apart, by `promtool`.
fn check_firing(
    dir: &std::path::Path,
    first: &DaemonStatus,
    next: &DaemonStatus,
    expected: &[&str],
) {
    let mut text =
        "rule_files: [alerts.yaml]\ntests:\n  - interval: 1m\n    input_series:\n".to_string();
    for ((series, from), (_, to)) in series_of(first).into_iter().zip(series_of(next)) {
        let series = series.replace('\'', "''");
        text.push_str(&format!(
            "      - series: '{series}'\n        values: '{from}{:+}x60'\n",
            to - from
        ));
    }
    text.push_str("      - series: 'up{job=\"cachemate\"}'\n        values: '1x60'\n");
    text.push_str(
        "    promql_expr_test:\n      - expr: count by (alertname) (ALERTS{alertstate=\"firing\"})\n        \
         eval_time: 45m\n        exp_samples:\n",
    );
    for alert in expected {
        text.push_str(&format!(
            "          - labels: '{{alertname=\"{alert}\"}}'\n            value: 1\n"
        ));
    }
    std::fs::write(dir.join("alerts.yaml"), ALERTS).unwrap();
    std::fs::write(dir.join("test.yaml"), text).unwrap();
    let output = Command::new("promtool")
        .args(["test", "rules", "test.yaml"])
        .current_dir(dir)
        .output()
        .unwrap();
    let (out, error) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}{error}");
}

/// By Prometheus's own tool: does each alert fire on the metrics of a host for which it is meant, and none on those of
/// a quiet one?
#[test]
fn each_alert_fires_on_its_host_and_none_on_a_quiet_one() {
    if Command::new("promtool").arg("--version").output().is_err() {
        not_shown::report_unchecked("alerts that fire", "no promtool");
        return;
    }
    let losses = [
        "CachemateServiceLosesCache",
        "CachemateServiceSlowed",
        "CachemateServiceWaitsForCpus",
    ];
    let events = ["CachemateRefusesPlans", "CachemateRollsBackOften"];
    let dir = tempfile::tempdir().unwrap();
    let quiet = status_fixture(0.02, 0.01, PromiseState::Kept, 0);
    check_firing(dir.path(), &quiet, &quiet, &[]);
    // Nine tenths of the limit, of which the daemon cannot say more than that it is kept.
    let near_limit = [&["CachematePromiseNearLimit"], &losses[..]].concat();
    let near = status_fixture(0.9 * MAX_SLOWDOWN, 0.2, PromiseState::Likely, 0);
    check_firing(dir.path(), &near, &near, &near_limit);

    let busy = |promise, events| status_fixture(0.74, 0.2, promise, events);
    let at_risk = [&["CachematePromiseAtRisk"], &losses[..]].concat();
    let broken = [&["CachematePromiseBroken"], &losses[..]].concat();
    for (state, expected) in [
        (PromiseState::AtRisk, &at_risk),
        (PromiseState::Broken, &broken),
    ] {
        check_firing(dir.path(), &busy(state, 0), &busy(state, 0), expected);
    }
    let first = busy(PromiseState::Infeasible, 0);
    let mut next = busy(PromiseState::Infeasible, 1);
    next.cpu_ns = 6_000_000_000;
    let infeasible = [
        &[
            "CachemateCost",
            "CachemateProbesWithhold",
            "CachematePromiseInfeasible",
        ],
        &events[..],
        &losses[..],
    ];
    check_firing(dir.path(), &first, &next, &infeasible.concat());

    let tested = [near_limit, at_risk, broken, infeasible.concat()].concat();
    let tested: BTreeSet<&str> = tested.iter().chain(&ABSENCE_ALERTS).copied().collect();
    let shipped = ALERTS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "));
    assert_eq!(shipped.collect::<BTreeSet<_>>(), tested);
}
