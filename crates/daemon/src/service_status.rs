//! Services as `status`, `top`, `explain`, the metrics and the page show them: the loss of each service, and the
//! services that cause it.

use std::collections::BTreeMap;

use cachemate_core::{Estimate, Observation, PromiseState, ServiceIdentity, ServiceKind};
use cachemate_linux::act::group_overrides::GroupOverride;

use cachemate_linux::sense::service_directory::ContainerRecord;
use cachemate_policy::service_losses::{ServiceLoss, ServiceReport};
use cachemate_report::text::escape_controls;
use serde::{Deserialize, Serialize};

/// A service with its loss and the causes of it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// Kind of the service.
    pub kind: ServiceKind,
    /// Name of the service: kind and name together identify it on this host.
    pub name: String,
    /// The pod: its UID, or `namespace/name` if the container runtime reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The container's id, or its name if the container runtime reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// References of its image, by name and by digest, if the container runtime reports them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<String>,
    /// The profile that its pod's label `cachemate.io/profile` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Managed and observed threads.
    pub tasks: u32,
    /// Ids of these threads.
    pub task_ids: Vec<u32>,
    /// Programs that ended before a window could read them, since the daemon's start; `None` if the kernel sends no
    /// process events.
    pub unread_programs: Option<u64>,
    /// CPU time over elapsed time.
    pub cpu_share: f64,
    /// Time in which its threads waited for a CPU, over elapsed time; `None` if the kernel does not report it.
    pub waiting_share: Option<f64>,
    /// Run time over solo run time, minus one; `None` if unknown, for the reason in `reason`.
    pub slowdown_percent: Option<f64>,
    /// Ends of its interval.
    pub slowdown_range_percent: Option<(f64, f64)>,
    /// Source of the slowdown: `measured` or `forecast`.
    pub slowdown_source: Option<String>,
    /// The services that cause it, the largest loss first.
    pub slowdown_by: Vec<SlowdownCause>,
    /// Losses that confined services would cause without their confinement, the largest first.
    #[serde(default)]
    pub prevented: Vec<SlowdownCause>,
    /// The reason why the slowdown is unknown, or why no cause is named.
    pub reason: Option<String>,
    /// The smallest limit that a rule sets for one of its threads, in percent.
    pub max_slowdown_percent: Option<f64>,
    /// Floor of the service, if the configuration has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<FloorStatus>,
}

/// The floor of a service and its state.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct FloorStatus {
    /// Minimum work per second of all its threads together.
    pub min_rate: f64,
    /// `reported`, `instructions` or `file`; `None` if no work is counted.
    pub measure: Option<FloorMeasure>,
    /// Mean rate of the last windows, with its 95 % interval.
    pub measured: Option<Estimate>,
    /// The state that follows from the interval.
    pub state: PromiseState,
    /// The reason why the state is unknown.
    pub reason: Option<String>,
}

/// The measure of a service's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FloorMeasure {
    /// Work that its programs report.
    Reported,
    /// Instructions.
    Instructions,
    /// A progress file of its own.
    File,
}

/// The share of a loss that one service causes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SlowdownCause {
    /// Name of the cause.
    pub service: String,
    /// Kind of the cause.
    pub kind: ServiceKind,
    /// Run time added by this service.
    pub percent: f64,
    /// Ends of the interval.
    pub range_percent: (f64, f64),
    /// `measured`: from windows with and without it; `attributed`: its part of a measured slowdown; `forecast`: from
    /// profiles.
    pub source: String,
    /// Run time that profiles alone attribute to this service; `None` if they are insufficient.
    pub forecast_percent: Option<f64>,
    /// Windows in which both services ran on one cache.
    pub windows: u32,
}

impl ServiceStatus {
    /// A service's status from the evidence of one window.
    pub fn new(report: &ServiceReport) -> Self {
        let ServiceIdentity {
            kind,
            name,
            pod,
            container,
        } = report.service.clone();
        ServiceStatus {
            kind,
            name,
            pod,
            container,
            images: Vec::new(),
            profile: None,
            tasks: report.tasks.len() as u32,
            task_ids: report.tasks.iter().map(|task| task.0).collect(),
            unread_programs: None,
            cpu_share: report.cpu_share,
            waiting_share: None,
            slowdown_percent: report
                .slowdown
                .map(|(slowdown, _)| rounded_percent(slowdown.value)),
            slowdown_range_percent: report.slowdown.map(|(slowdown, _)| percent_range(slowdown)),
            slowdown_source: report
                .slowdown
                .map(|(_, source)| source.describe().to_string()),
            slowdown_by: report.losses.iter().map(slowdown_cause).collect(),
            prevented: report.prevented_losses.iter().map(slowdown_cause).collect(),
            reason: report.reason.clone(),
            max_slowdown_percent: report.max_slowdown.map(rounded_percent),
            floor: None,
        }
    }

    /// Adds what the container runtime reports about its image.
    pub(crate) fn add_container(&mut self, record: &ContainerRecord) {
        self.profile = record.labels.get("cachemate.io/profile").cloned();
        let repository = record.image_name.as_deref().map(|name| {
            let last_segment = name.rfind('/').map_or(0, |slash| slash + 1);
            let tag = name[last_segment..]
                .find([':', '@'])
                .map(|colon| last_segment + colon);
            &name[..tag.unwrap_or(name.len())]
        });
        let by_digest = repository
            .zip(record.image.as_deref())
            .map(|(name, digest)| format!("{name}@{digest}"));
        self.images = record
            .image_name
            .clone()
            .into_iter()
            .chain(by_digest)
            .collect();
    }

    /// Identity of the service.
    pub fn identity(&self) -> ServiceIdentity {
        ServiceIdentity {
            kind: self.kind,
            name: self.name.clone(),
            pod: self.pod.clone(),
            container: self.container.clone(),
        }
    }
}

/// Adds the waits of their threads in this window to the services.
pub(crate) fn observe_waits(services: &mut [ServiceStatus], observation: &Observation) {
    let known_waits = observation
        .tasks
        .iter()
        .filter_map(|task| Some((task.task.0, task.run_queue_wait_ns?)));
    let waits_ns: BTreeMap<u32, u64> = known_waits.collect();
    let elapsed_ns = observation.span.elapsed_ns as f64;
    for service in services {
        let waits = service
            .task_ids
            .iter()
            .filter_map(|task| waits_ns.get(task));
        let total_ns = waits
            .copied()
            .reduce(|total, wait| total + wait)
            .filter(|_| elapsed_ns > 0.0);
        service.waiting_share = total_ns.map(|ns| ns as f64 / elapsed_ns);
    }
}

/// Describes a control group that its owner or a user has changed.
pub(crate) fn describe_override(group: &GroupOverride) -> String {
    let owner_text = group
        .owner
        .map_or("another program or a person".to_string(), |owner| {
            format!("{owner} or a person")
        });
    let GroupOverride {
        cgroup,
        configured_cpus,
        current_cpus: current,
        ..
    } = group;
    format!(
        "cpuset {}: CPUs {configured_cpus} overridden by {owner_text}, now {current}",
        escape_controls(cgroup)
    )
}

fn slowdown_cause(loss: &ServiceLoss) -> SlowdownCause {
    SlowdownCause {
        service: loss.cause.name.clone(),
        kind: loss.cause.kind,
        percent: rounded_percent(loss.loss.value),
        range_percent: percent_range(loss.loss),
        source: loss.source.describe().to_string(),
        forecast_percent: loss.forecast.map(rounded_percent),
        windows: loss.windows,
    }
}

fn rounded_percent(share: f64) -> f64 {
    // A hundredth of a percent is far below every error, and keeps the output short.
    (1e4 * share).round() / 100.0
}

fn percent_range(estimate: Estimate) -> (f64, f64) {
    (
        rounded_percent(estimate.low),
        rounded_percent(estimate.high),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::TaskId;
    use cachemate_policy::service_losses::LossSource;

    /// Is an image known by its name and by its digest, with a registry's port taken for no tag?
    #[test]
    fn an_image_is_known_by_name_and_digest() {
        let report = ServiceReport {
            service: ServiceIdentity::from_pod("shop/cart", Some("redis")),
            tasks: Vec::new(),
            max_slowdown: None,
            cpu_share: 0.0,
            slowdown: None,
            losses: Vec::new(),
            prevented_losses: Vec::new(),
            reason: None,
        };
        let images_of = |name: &str| {
            let mut status = ServiceStatus::new(&report);
            let labels = [("cachemate.io/profile".to_string(), "index".to_string())].into();
            let (image_name, image) = (Some(name.to_string()), Some("sha256:1".to_string()));
            status.add_container(&ContainerRecord {
                labels,
                image_name,
                image,
                ..ContainerRecord::default()
            });
            assert_eq!(status.profile.as_deref(), Some("index"));
            status.images
        };
        assert_eq!(
            images_of("docker.io/library/redis:7"),
            [
                "docker.io/library/redis:7",
                "docker.io/library/redis@sha256:1"
            ]
        );
        assert_eq!(
            images_of("host:5000/redis"),
            ["host:5000/redis", "host:5000/redis@sha256:1"]
        );
    }

    /// Does the JSON have the documented fields, null with a reason if a value is unknown, and pod and container only
    /// for containers?
    #[test]
    fn unknown_is_null_with_a_reason() {
        let unit = ServiceIdentity::new(ServiceKind::Unit, "redis.service");
        let mut report = ServiceReport {
            service: unit.clone(),
            tasks: [3, 7].map(TaskId).to_vec(),
            max_slowdown: Some(0.1),
            cpu_share: 0.5,
            slowdown: None,
            losses: Vec::new(),
            prevented_losses: Vec::new(),
            reason: Some("no work is counted".into()),
        };
        let json = serde_json::to_value(ServiceStatus::new(&report)).unwrap();
        assert_eq!(
            (json["kind"].as_str(), json["name"].as_str()),
            (Some("unit"), Some("redis.service"))
        );
        assert!(
            json["slowdown_percent"].is_null()
                && json["reason"].is_string()
                && json.get("pod").is_none()
        );
        assert_eq!(
            (&json["tasks"], &json["task_ids"]),
            (&2.into(), &vec![3, 7].into())
        );
        assert_eq!(json["max_slowdown_percent"], 10.0);
        let estimate = Estimate {
            value: 0.1234,
            low: 0.1,
            high: 0.2,
        };
        report.slowdown = Some((estimate, LossSource::Measured));
        report.losses = vec![ServiceLoss {
            cause: ServiceIdentity::from_pod("shop/cart", Some("xz")),
            loss: estimate,
            source: LossSource::Measured,
            forecast: None,
            windows: 4,
        }];
        let json = serde_json::to_value(ServiceStatus::new(&report)).unwrap();
        assert_eq!(json["slowdown_percent"], 12.34);
        assert_eq!(json["slowdown_by"][0]["service"], "shop/cart/xz");
        assert_eq!(json["slowdown_by"][0]["source"], "measured");
    }
}
