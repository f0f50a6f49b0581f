//! Metrics for Prometheus, on a loopback address or behind a token. Names begin with `cachemate_`,
//! have base units, and end with `_total` for counters.
//!
//! A label with a new value is a new time series, which Prometheus keeps for as long as it keeps
//! data, and tasks are many and short-lived. So only the ten tasks with the highest intensity are
//! listed by name, and services by the loss that they have, with their five largest causes.
//!
//! For example, a host that starts 80 programs a second would make seven million series a day if
//! each had one.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cachemate_core::PromiseState;
use cachemate_linux::kernel::lock;
use cachemate_page::{
    CacheSnapshot, ContentionClass, PromiseSnapshot, ServiceSnapshot, ShareSnapshot,
};
use cachemate_report::text::escape_controls;
use cachemate_spec::{ManageConfig, ManageMode};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::AtomicU64;

use crate::socket::SharedStatus;
use crate::status::DaemonStatus;
use crate::{http, unit_sandbox};

/// Maximum number of series with a program's name.
const MAX_NAMED_SERIES: usize = 10;
/// Maximum number of services with their own series; those with the largest loss come first.
const MAX_SERVICES: usize = 100;
/// Maximum number of causes of each service's loss.
const MAX_CAUSES: usize = 5;

type MetricLabels = Vec<(&'static str, LabelValue)>;
type Gauges = Family<MetricLabels, Gauge<f64, AtomicU64>>;

/// A label value: printable, and escaped as OpenMetrics requires, because the encoder leaves escaping to its caller.
/// Every series uses only this type.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct LabelValue(String);

impl LabelValue {
    fn new(text: &str) -> Self {
        LabelValue(
            escape_controls(text)
                .replace('\\', "\\\\")
                .replace('"', "\\\""),
        )
    }
}

impl EncodeLabelValue for LabelValue {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        std::fmt::Write::write_str(encoder, &self.0)
    }
}

fn metric_label(name: &'static str, value: &str) -> (&'static str, LabelValue) {
    (name, LabelValue::new(value))
}

/// Serves `/metrics` in a separate thread that ends with the process. Returns the address at which it listens.
///
/// # Errors
/// The address is taken, or is not of this host.
pub fn serve(
    metrics_address: &MetricsAddress,
    shared_status: SharedStatus,
) -> anyhow::Result<SocketAddr> {
    let page = Arc::new(MetricsPage {
        shared_status,
        last_page: Mutex::default(),
    });
    http::serve(
        &metrics_address.address,
        metrics_address.token.clone(),
        move |path| match path {
            "/metrics" => Some((OPEN_METRICS, page.render())),
            _ => None,
        },
    )
}

/// The address at which metrics are served, and the token that a request must contain.
#[derive(Clone, PartialEq, Eq)]
pub struct MetricsAddress {
    pub(crate) address: String,
    pub(crate) token: Option<String>,
}

/// Allowed token lengths in characters: a shorter token can be guessed, and a longer text is probably not a token.
const TOKEN_CHARACTERS: std::ops::RangeInclusive<usize> = 16..=512;

impl MetricsAddress {
    /// The configured address; `None` if no metrics are served.
    ///
    /// # Errors
    /// The token's file cannot be read, is readable by every user, or does not contain a valid token.
    pub fn from_config(config: &ManageConfig) -> anyhow::Result<Option<Self>> {
        let Some(address) = config.metrics_address.clone() else {
            return Ok(None);
        };
        let token = config
            .metrics_token_file
            .as_deref()
            .map(read_token)
            .transpose()?;
        Ok(Some(MetricsAddress { address, token }))
    }
}

fn read_token(path: &Path) -> anyhow::Result<String> {
    let file = path.display();
    let not_found = || anyhow::anyhow!("{file}: no such file, expected the token of the metrics");
    let metadata = cachemate_files::metadata_if_exists(path)
        .with_context(|| format!("{file}: cannot be read"))?
        .ok_or_else(not_found)?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o007 != 0 {
        bail!(
            "{file}: found mode {mode:03o}, expected one that keeps the token from other users (chmod 640)"
        );
    }
    let text = cachemate_files::read_text_limited(path, 4096)
        .with_context(|| format!("{file}: cannot be read"))?;
    let token = text.trim_end_matches(['\r', '\n']);
    if !TOKEN_CHARACTERS.contains(&token.len())
        || !token.bytes().all(|byte| byte.is_ascii_graphic())
    {
        bail!(
            "{file}: expected one line of 16 to 512 visible ASCII characters (openssl rand -hex 32)"
        );
    }
    Ok(token.to_string())
}

/// Time between two writes of the textfile: the default interval of a scrape.
const TEXTFILE_PERIOD: Duration = Duration::from_secs(15);

/// A file with the metrics. It is removed when this is dropped, so that no collector reads figures of a daemon that has
/// ended.
pub struct MetricsTextfile {
    path: PathBuf,
    has_ended: Arc<Mutex<bool>>,
}

impl MetricsTextfile {
    /// Writes the metrics to a file immediately, and again every [`TEXTFILE_PERIOD`], in a separate thread. The file is
    /// replaced as a whole.
    ///
    /// # Errors
    /// The file cannot be written now; later failures are retried.
    pub fn create(path: &Path, shared_status: SharedStatus) -> anyhow::Result<Self> {
        let write_page = |path: &Path, shared_status: &SharedStatus| {
            let mut file = cachemate_files::FreshFile::create(path)?;
            // The collector is another user, and the unit's umask is for the daemon's other files.
            file.allow_all_readers()?;
            file.write_all(metrics_page(&shared_status.status()).as_bytes())?;
            file.commit()
        };
        write_page(path, &shared_status)
            .map_err(|error| unit_sandbox::with_unit_remedy(error, path))
            .with_context(|| format!("{}: the metrics cannot be written", path.display()))?;
        let textfile = MetricsTextfile {
            path: path.to_path_buf(),
            has_ended: Arc::default(),
        };
        let (path, has_ended) = (textfile.path.clone(), Arc::clone(&textfile.has_ended));
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(TEXTFILE_PERIOD);
                let has_ended = lock(&has_ended);
                if *has_ended {
                    return;
                }
                // A full disk is temporary; the collector reports the age of the file.
                let _ = write_page(&path, &shared_status);
            }
        });
        Ok(textfile)
    }
}

impl Drop for MetricsTextfile {
    fn drop(&mut self) {
        *lock(&self.has_ended) = true;
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Content type of a page of metrics.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Time for which a generated page is reused for all requests.
const MAX_PAGE_AGE: Duration = Duration::from_millis(250);

struct MetricsPage {
    shared_status: SharedStatus,
    last_page: Mutex<Option<(Instant, String)>>,
}

impl MetricsPage {
    fn render(&self) -> String {
        let mut last_page = lock(&self.last_page);
        match &*last_page {
            Some((built_at, text)) if built_at.elapsed() < MAX_PAGE_AGE => text.clone(),
            _ => last_page
                .insert((Instant::now(), metrics_page(&self.shared_status.status())))
                .1
                .clone(),
        }
    }
}

/// The metrics page for a status.
pub fn metrics_page(status: &DaemonStatus) -> String {
    let mut registry = Registry::with_prefix("cachemate");
    let counters: [(&str, &str, u64); 6] = [
        ("windows", "Windows observed", status.windows),
        (
            "tasks_seen",
            "Managed threads so far",
            status.counters.tasks_seen,
        ),
        (
            "decisions",
            "Decisions with a new reason",
            status.counters.decisions,
        ),
        (
            "rollbacks",
            "Decisions that were rolled back because they lowered speeds",
            status.counters.rollbacks,
        ),
        (
            "refused_changes",
            "Changes that the host refused",
            status.counters.refused_changes,
        ),
        (
            "refused_plans",
            "Invalid plans, which were refused and not carried out",
            status.counters.refused_plans,
        ),
    ];
    for (name, help, value) in counters {
        let counter = Counter::<u64>::default();
        counter.inc_by(value);
        registry.register(name, help, counter);
    }
    for (name, help, ns) in [
        (
            "process_cpu",
            "Processor time of the daemon, its probes and its guardian",
            status.cpu_ns,
        ),
        (
            "probe_withheld",
            "Time for which probes kept programs from running",
            status.counters.probe_withheld_ns,
        ),
    ] {
        let counter = Counter::<f64, AtomicU64>::default();
        counter.inc_by(ns as f64 / 1e9);
        registry.register_with_unit(name, help, Unit::Seconds, counter);
    }
    if let Some(ns) = status.counters.max_runqueue_wait_ns {
        let max_wait = Gauge::<f64, AtomicU64>::default();
        max_wait.set(ns as f64 / 1e9);
        let help = "Longest uninterrupted wait of a managed thread for a processor";
        registry.register_with_unit("max_runqueue_wait", help, Unit::Seconds, max_wait);
    }
    let acting_gauge = Gauge::<f64, AtomicU64>::default();
    acting_gauge.set(if status.mode == ManageMode::Act {
        1.0
    } else {
        0.0
    });
    registry.register(
        "acting",
        "1 = changes the host, 0 = observes only",
        acting_gauge,
    );
    // The label contains the CPUs, because a cache's id alone does not say where the cache is.
    let cache_labels = |id: u32| {
        let cpus = status
            .snapshot
            .caches
            .iter()
            .find(|cache| cache.cache == id)
            .map_or("", |cache| &cache.cpus);
        [
            metric_label("cache_id", &id.to_string()),
            metric_label("cpus", cpus),
        ]
    };
    let cache_readings: [(&str, &str, fn(&CacheSnapshot) -> Option<f64>); 4] = [
        (
            "cache_tasks",
            "Managed threads last seen on the cache",
            |cache| Some(cache.tasks.len() as f64),
        ),
        (
            "cache_busy_cpus",
            "Busy CPUs of the cache, whichever programs use them",
            |cache| cache.busy_cpus,
        ),
        (
            "cache_memory_bytes_per_second",
            "Memory traffic of the cache",
            |cache| cache.memory_bytes_per_second,
        ),
        (
            "cache_occupancy_bytes",
            "Bytes of the cache in use",
            |cache| cache.occupancy_bytes.map(|bytes| bytes as f64),
        ),
    ];
    for (name, help, reading) in cache_readings {
        let known = status
            .snapshot
            .caches
            .iter()
            .filter_map(|c| Some((cache_labels(c.cache).to_vec(), reading(c)?)));
        register_gauge(&mut registry, name, help, known.collect());
    }
    let share_readings: [(&str, &str, fn(&ShareSnapshot) -> Option<f64>); 3] = [
        (
            "share_memory_bytes_per_second",
            "Memory traffic of a share's programs",
            |share| share.memory_bytes_per_second,
        ),
        (
            "share_core_watts",
            "Power of the cores while they ran a share's programs",
            |share| share.core_watts,
        ),
        (
            "share_memory_stall_cycles_per_second",
            "Cycles of a share's programs without an instruction while a miss was outstanding",
            |share| share.memory_stall_cycles_per_second,
        ),
    ];
    for (name, help, reading) in share_readings {
        let rows = status.snapshot.shares.iter().filter_map(|share| {
            let group_label = metric_label("group", &share.group.to_string());
            let labels = cache_labels(share.cache).into_iter().chain([group_label]);
            Some((labels.collect(), reading(share)?))
        });
        register_gauge(&mut registry, name, help, rows.collect());
    }
    let mut tasks_by_class: BTreeMap<&str, f64> = BTreeMap::new();
    for task in &status.snapshot.tasks {
        *tasks_by_class
            .entry(task.class.map_or("unknown", ContentionClass::text))
            .or_default() += 1.0;
    }
    let classes = tasks_by_class
        .into_iter()
        .map(|(class, tasks)| (vec![metric_label("class", &class.replace(' ', "_"))], tasks));
    register_gauge(
        &mut registry,
        "class_tasks",
        "Managed threads by measured class",
        classes.collect(),
    );
    let mut intensity_by_name: BTreeMap<(String, u32), f64> = BTreeMap::new();
    for task in &status.snapshot.tasks {
        if let (Some(intensity), Some(cache)) = (task.intensity, task.cache) {
            let max_ratio = intensity_by_name
                .entry((task.name.clone(), cache))
                .or_insert(f64::MIN);
            *max_ratio = max_ratio.max(intensity.value);
        }
    }
    let mut rows: Vec<((String, u32), f64)> = intensity_by_name.into_iter().collect();
    rows.sort_by(|a, b| b.1.total_cmp(&a.1));
    rows.truncate(MAX_NAMED_SERIES);
    let labeled_rows = rows
        .into_iter()
        .map(|((name, id), value)| {
            (
                [&[metric_label("name", &name)], &cache_labels(id)[..]].concat(),
                value,
            )
        })
        .collect();
    register_gauge(
        &mut registry,
        "intensity_ratio",
        "Share of a probe's lines that the program evicts (top ten)",
        labeled_rows,
    );
    register_promises(&mut registry, status);
    register_services(&mut registry, &status.snapshot.services);
    let mut text = String::new();
    // Writing into a string cannot fail.
    let _ = encode(&mut text, &registry);
    text
}

fn register_gauge(registry: &mut Registry, name: &str, help: &str, rows: Vec<(MetricLabels, f64)>) {
    let family = Gauges::default();
    for (labels, value) in rows {
        family.get_or_create(&labels).set(value);
    }
    registry.register(name.to_string(), help.to_string(), family);
}

/// States and slowdowns of promises, by process.
fn register_promises(registry: &mut Registry, status: &DaemonStatus) {
    let promise_labels = |promise: &PromiseSnapshot, term: &str| {
        vec![
            metric_label("name", &promise.name),
            metric_label(
                "pid",
                &promise.pid.map_or_else(String::new, |pid| pid.to_string()),
            ),
            metric_label("term", term),
        ]
    };
    let states = status.snapshot.promises.iter().flat_map(|promise| {
        let term = match promise.max_slowdown {
            Some(_) => "max_slowdown",
            None => "min_rate",
        };
        PromiseState::ALL.into_iter().map(move |state| {
            let mut labels = promise_labels(promise, term);
            labels.push(metric_label("state", &state.describe().replace(' ', "_")));
            (labels, f64::from(u8::from(promise.state == state)))
        })
    });
    register_gauge(
        registry,
        "promise_state",
        "1 = the promise is in this state, by measurements",
        states.collect(),
    );
    let promised_limits = || {
        let promises = status.snapshot.promises.iter();
        promises.filter_map(|promise| {
            let limit = promise.max_slowdown?;
            Some((promise, promise_labels(promise, "max_slowdown"), limit))
        })
    };
    let slowdowns = promised_limits().filter_map(|(promise, labels, _)| {
        let slower = promise.measured?;
        let slowdown = MeasuredRatio {
            value: slower.value,
            range: Some((slower.low, slower.high)),
        };
        Some((labels, slowdown))
    });
    register_measured(
        registry,
        "promise_slowdown_ratio",
        "Measured run time of a program with a promise over its run time alone, minus one",
        slowdowns.collect(),
    );
    register_gauge(
        registry,
        "promise_max_slowdown_ratio",
        "Promised maximum of the slowdown",
        promised_limits()
            .map(|(_, labels, limit)| (labels, limit))
            .collect(),
    );
}

/// The losses of each service, and their main causes.
fn register_services(registry: &mut Registry, services: &[ServiceSnapshot]) {
    let shown_services = &services[..services.len().min(MAX_SERVICES)];
    let service_labels = |service: &ServiceSnapshot| {
        let mut labels = vec![
            metric_label("service", &service.name),
            metric_label("kind", service.kind.text()),
        ];
        if let Some((namespace, pod)) = service.pod.as_ref().and_then(|pod| pod.split_once('/')) {
            labels.extend([
                metric_label("namespace", namespace),
                metric_label("pod", pod),
            ]);
        }
        labels.extend(
            service
                .container
                .as_ref()
                .map(|container| metric_label("container", container)),
        );
        labels
    };
    let build_rows = |select_figure: fn(&ServiceSnapshot) -> f64| {
        shown_services
            .iter()
            .map(|status| (service_labels(status), select_figure(status)))
            .collect()
    };
    register_gauge(
        registry,
        "service_tasks",
        "Managed threads of the service",
        build_rows(|status| f64::from(status.tasks)),
    );
    register_gauge(
        registry,
        "service_cpus",
        "Processor time per time",
        build_rows(|status| status.cpu_share),
    );
    let waiting_threads = shown_services
        .iter()
        .filter_map(|status| Some((service_labels(status), status.waiting_share?)));
    register_gauge(
        registry,
        "service_waiting_threads",
        "Threads that were ready and had no CPU, on average over the last window",
        waiting_threads.collect(),
    );
    let loss_rows = |select_loss: fn(&ServiceSnapshot) -> (Option<f64>, Option<(f64, f64)>)| {
        let rows = shown_services.iter().filter_map(|status| {
            let (percent, range_percent) = select_loss(status);
            let loss = MeasuredRatio::from_percent(percent?, range_percent);
            Some((service_labels(status), loss))
        });
        rows.collect::<Vec<_>>()
    };
    let cache_rows = shown_services.iter().filter_map(|status| {
        let source = metric_label("source", status.cache_source.as_deref()?);
        let labels = [service_labels(status), vec![source]].concat();
        let loss = MeasuredRatio::from_percent(status.cache_percent?, status.cache_range_percent);
        Some((labels, loss))
    });
    register_measured(
        registry,
        "service_run_time_loss_ratio",
        "Run time that users feel to be added, as a share of the run time without the other services: by the rate of work, else \
         cache loss and waiting loss together, or the measured one of them",
        loss_rows(|status| (status.run_time_percent, status.run_time_range_percent)),
    );
    register_measured(
        registry,
        "service_cache_loss_ratio",
        "Run time added by CPU second, as a share, because other services use its caches",
        cache_rows.collect(),
    );
    register_measured(
        registry,
        "service_waiting_loss_ratio",
        "Run time added by waiting for CPUs on which other services run, as a share",
        loss_rows(|status| (status.waiting_percent, status.waiting_range_percent)),
    );
    let cache_causes = shown_services.iter().flat_map(|service| {
        service.cache_by.iter().take(MAX_CAUSES).map(|cause| {
            let cause_labels = vec![
                metric_label("by", &cause.service),
                metric_label("by_kind", cause.kind.text()),
                metric_label("source", &cause.source),
            ];
            let loss = MeasuredRatio::from_percent(cause.percent, Some(cause.range_percent));
            ([service_labels(service), cause_labels].concat(), loss)
        })
    });
    register_measured(
        registry,
        "service_cache_loss_by_ratio",
        "The part of the cache loss that another service causes",
        cache_causes.collect(),
    );
    let waiting_causes = shown_services.iter().flat_map(|service| {
        service.waiting_by.iter().take(MAX_CAUSES).map(|cause| {
            let by_kind = cause.kind.map_or("unknown", |kind| kind.text());
            let cause_labels = vec![
                metric_label("by", cause.service.as_deref().unwrap_or("unknown")),
                metric_label("by_kind", by_kind),
            ];
            let loss = MeasuredRatio::from_percent(cause.percent, None);
            ([service_labels(service), cause_labels].concat(), loss)
        })
    });
    register_measured(
        registry,
        "service_waiting_loss_by_ratio",
        "The part of the waiting loss in which another service ran on its CPUs",
        waiting_causes.collect(),
    );
}

/// A ratio, with the ends of its interval if it has one.
#[derive(Clone, Copy)]
struct MeasuredRatio {
    value: f64,
    range: Option<(f64, f64)>,
}

impl MeasuredRatio {
    fn from_percent(percent: f64, range_percent: Option<(f64, f64)>) -> Self {
        MeasuredRatio {
            value: percent / 100.0,
            range: range_percent.map(|(low, high)| (low / 100.0, high / 100.0)),
        }
    }
}

/// Registers `NAME` as a ratio, and the ends of its interval as `NAME_low` and `NAME_high`.
fn register_measured(
    registry: &mut Registry,
    name: &str,
    help: &str,
    rows: Vec<(MetricLabels, MeasuredRatio)>,
) {
    let value_rows = rows
        .iter()
        .map(|(labels, ratio)| (labels.clone(), ratio.value))
        .collect();
    register_gauge(registry, name, help, value_rows);
    let ends: [(&str, &str, fn((f64, f64)) -> f64); 2] = [
        ("low", "Lower", |range| range.0),
        ("high", "Upper", |range| range.1),
    ];
    for (suffix, which, select_end) in ends {
        let end_rows: Vec<_> = rows
            .iter()
            .filter_map(|(labels, ratio)| Some((labels.clone(), select_end(ratio.range?))))
            .collect();
        if !end_rows.is_empty() {
            let help = format!("{which} end of the 95 % interval of {name}");
            register_gauge(registry, &format!("{name}_{suffix}"), &help, end_rows);
        }
    }
}

#[cfg(test)]
mod alert_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_page::TaskSnapshot;

    /// Do the names follow the conventions: own prefix, base units, `_total` on counters?
    #[test]
    fn metric_names_follow_the_conventions() {
        let mut status = DaemonStatus {
            windows: 3,
            cpu_ns: 1_500_000_000,
            mode: ManageMode::Act,
            ..DaemonStatus::default()
        };
        status.snapshot.caches.push(CacheSnapshot {
            cache: 2,
            level: "L3".into(),
            cpus: "0-3".into(),
            size_bytes: None,
            tasks: vec![0, 1],
            ..CacheSnapshot::default()
        });
        status.snapshot.shares.push(ShareSnapshot {
            group: 1,
            cache: 2,
            core_watts: Some(3.5),
            ..ShareSnapshot::default()
        });
        let task_of_class = |class| TaskSnapshot {
            class,
            ..TaskSnapshot::default()
        };
        status.snapshot.tasks = vec![
            task_of_class(Some(ContentionClass::NotVictim)),
            task_of_class(None),
        ];
        let page = metrics_page(&status);
        for line in [
            "cachemate_windows_total 3",
            "cachemate_process_cpu_seconds_total 1.5",
            "cachemate_acting 1.0",
            "cachemate_cache_tasks{cache_id=\"2\",cpus=\"0-3\"} 2.0",
            "cachemate_share_core_watts{cache_id=\"2\",cpus=\"0-3\",group=\"1\"} 3.5",
            "cachemate_class_tasks{class=\"not_a_victim\"} 1.0",
            "cachemate_class_tasks{class=\"unknown\"} 1.0",
            "# EOF",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
        }
    }

    /// Is the cost a single figure, the same in status and metrics, without the time for which probes keep programs
    /// from running?
    #[test]
    fn the_cost_is_the_same_figure_in_status_and_metrics() {
        let mut status = DaemonStatus {
            cpu_ns: 540_000_000,
            running_ns: 1,
            ..DaemonStatus::default()
        };
        status.counters.probe_withheld_ns = 3_090_000_000;
        let page = metrics_page(&status);
        assert!(
            page.contains("cachemate_process_cpu_seconds_total 0.54\n"),
            "{page}"
        );
        assert!(
            page.contains("cachemate_probe_withheld_seconds_total 3.09\n"),
            "{page}"
        );
        assert!(!page.contains("probe_cpu"), "{page}");
    }

    /// Is a token read from its file, and rejected if every user may read the file or if it is too short?
    #[test]
    fn a_token_file_that_is_public_or_too_short_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let config = ManageConfig {
            metrics_address: Some("0.0.0.0:9753".to_string()),
            metrics_token_file: Some(path.clone()),
            ..ManageConfig::default()
        };
        let read_address = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            MetricsAddress::from_config(&config)
                .map(|at| at.unwrap().token.unwrap())
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            read_address("0123456789abcdef\n", 0o640),
            Ok("0123456789abcdef".to_string())
        );
        for (text, mode, why) in [
            ("0123456789abcdef", 0o644, "mode 644"),
            ("short", 0o600, "16 to 512"),
            ("", 0o600, "16"),
        ] {
            let refusal = read_address(text, mode).unwrap_err();
            assert!(refusal.contains(why), "{refusal}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(MetricsAddress::from_config(&config).is_err());
        assert!(
            MetricsAddress::from_config(&ManageConfig::default())
                .unwrap()
                .is_none()
        );
    }

    /// Does a promise have one series per state, exactly one of which is 1, and its measured and promised slowdowns?
    #[test]
    fn a_promise_has_a_series_per_state() {
        let promise = PromiseSnapshot {
            program: 0,
            pid: Some(7),
            name: "redis".to_string(),
            state: PromiseState::AtRisk,
            max_slowdown: Some(0.05),
            min_rate: None,
            measured: Some(cachemate_core::Estimate {
                value: 0.06,
                low: 0.04,
                high: 0.08,
            }),
            text: String::new(),
        };
        let mut status = DaemonStatus::default();
        status.snapshot.promises = vec![promise];
        let page = metrics_page(&status);
        let labels = "name=\"redis\",pid=\"7\",term=\"max_slowdown\"";
        for line in [
            format!("cachemate_promise_state{{{labels},state=\"at_risk\"}} 1.0"),
            format!("cachemate_promise_state{{{labels},state=\"kept\"}} 0.0"),
            format!("cachemate_promise_slowdown_ratio{{{labels}}} 0.06"),
            format!("cachemate_promise_max_slowdown_ratio{{{labels}}} 0.05"),
        ] {
            assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
        }
    }

    /// Does a program whose name imitates the end of a label, the end of a line or a terminal command stay one label on
    /// one line?
    #[test]
    fn a_hostile_name_stays_one_label_on_one_line() {
        let names = ["evil\"} 1\n# EOF\n", "\u{1b}[2J\\", "plain"];
        let sample_task = |name: &&str| TaskSnapshot {
            name: name.to_string(),
            cache: Some(0),
            intensity: Some(cachemate_core::Estimate::exact(0.5)),
            ..TaskSnapshot::default()
        };
        let mut status = DaemonStatus::default();
        status.snapshot.tasks = names.iter().map(sample_task).collect();
        let page = metrics_page(&status);
        for label in [r#"evil\"} 1\\n# EOF\\n"#, r"\\u{1b}[2J\\\\", "plain"] {
            let line = format!(
                "cachemate_intensity_ratio{{name=\"{label}\",cache_id=\"0\",cpus=\"\"}} 0.5"
            );
            assert!(page.lines().any(|found| found == line), "{line} in\n{page}");
        }
        assert_eq!(
            page.lines()
                .filter(|line| line.starts_with("# EOF"))
                .count(),
            1
        );
    }
}
