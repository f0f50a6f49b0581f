//! Services as `status`, `top`, `explain`, the metrics and the page show them: the loss of each service, and the
//! services that cause it.

use cachemate_core::{Estimate, ServiceIdentity, ServiceKind};
use cachemate_linux::act::group_overrides::GroupOverride;

use cachemate_auto::service_losses::{ServiceLoss, ServiceReport, ServiceSlowdown, WaitingCause};
use cachemate_linux::sense::service_directory::ContainerRecord;
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
    /// Run time that users feel to be added: the product of both losses, or the measured one of them; `None` if neither
    /// was measured.
    pub run_time_percent: Option<f64>,
    /// Ends of its interval.
    pub run_time_range_percent: Option<(f64, f64)>,
    /// Cache loss: run time added by CPU second; `None` if unknown, for the reason in `reason`.
    pub cache_percent: Option<f64>,
    /// Ends of its interval.
    pub cache_range_percent: Option<(f64, f64)>,
    /// Source of the cache loss: `measured` or `forecast`.
    pub cache_source: Option<String>,
    /// The services that cause the cache loss, the largest loss first.
    pub cache_by: Vec<CacheCause>,
    /// Waiting loss: run time added by waiting for CPUs on which other services run; `None` if unknown.
    pub waiting_percent: Option<f64>,
    /// Ends of its interval.
    pub waiting_range_percent: Option<(f64, f64)>,
    /// The services that ran on its CPUs meanwhile, the largest part first.
    pub waiting_by: Vec<WaitingCauseStatus>,
    /// Cache losses that confined services would cause without their confinement, the largest first.
    #[serde(default)]
    pub prevented: Vec<CacheCause>,
    /// The reason why the cache loss is unknown, or why no cause of it is named.
    pub reason: Option<String>,
    /// The smallest limit that a rule sets for one of its threads, in percent.
    pub max_slowdown_percent: Option<f64>,
}

/// A service that ran while another one waited for its CPUs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WaitingCauseStatus {
    /// Name of the service; `None` for programs that are not observed, a CPU quota or a hypervisor.
    pub service: Option<String>,
    /// Kind of the service.
    pub kind: Option<ServiceKind>,
    /// Run time added by waiting for it.
    pub percent: f64,
    /// Part of the CPU time of all that ran meanwhile, without the waiting service itself.
    pub share: f64,
}

/// The part of a cache loss that one service causes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CacheCause {
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
        let ServiceSlowdown { cache, waiting, .. } = report.slowdown;
        let run_time = report.slowdown.run_time();
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
            waiting_share: report.waiting_share,
            run_time_percent: run_time.map(|loss| rounded_percent(loss.value)),
            run_time_range_percent: run_time.map(percent_range),
            cache_percent: cache.map(|(loss, _)| rounded_percent(loss.value)),
            cache_range_percent: cache.map(|(loss, _)| percent_range(loss)),
            cache_source: cache.map(|(_, source)| source.describe().to_string()),
            cache_by: report.losses.iter().map(cache_cause).collect(),
            waiting_percent: waiting.map(|loss| rounded_percent(loss.value)),
            waiting_range_percent: waiting.map(percent_range),
            waiting_by: report.waiting_causes.iter().map(waiting_cause).collect(),
            prevented: report.prevented_losses.iter().map(cache_cause).collect(),
            reason: report.reason.clone(),
            max_slowdown_percent: report.max_slowdown.map(rounded_percent),
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

fn waiting_cause(cause: &WaitingCause) -> WaitingCauseStatus {
    let service = cause.cause.as_ref();
    WaitingCauseStatus {
        service: service.map(|service| service.name.clone()),
        kind: service.map(|service| service.kind),
        percent: rounded_percent(cause.loss),
        share: rounded_percent(cause.share) / 100.0,
    }
}

fn cache_cause(loss: &ServiceLoss) -> CacheCause {
    CacheCause {
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
    use cachemate_auto::service_losses::LossSource;
    use cachemate_core::TaskId;

    /// Is an image known by its name and by its digest, with a registry's port taken for no tag?
    #[test]
    fn an_image_is_known_by_name_and_digest() {
        let report = ServiceReport {
            service: ServiceIdentity::from_pod("shop/cart", Some("redis")),
            tasks: Vec::new(),
            max_slowdown: None,
            cpu_share: 0.0,
            waiting_share: None,
            slowdown: ServiceSlowdown::default(),
            losses: Vec::new(),
            waiting_causes: Vec::new(),
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
            waiting_share: None,
            slowdown: ServiceSlowdown::default(),
            losses: Vec::new(),
            waiting_causes: Vec::new(),
            prevented_losses: Vec::new(),
            reason: Some("no work is counted".into()),
        };
        let json = serde_json::to_value(ServiceStatus::new(&report)).unwrap();
        assert_eq!(
            (json["kind"].as_str(), json["name"].as_str()),
            (Some("unit"), Some("redis.service"))
        );
        assert!(
            json["cache_percent"].is_null()
                && json["run_time_percent"].is_null()
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
        report.slowdown.cache = Some((estimate, LossSource::Measured));
        report.slowdown.waiting = Some(Estimate::exact(0.5));
        report.waiting_causes = vec![WaitingCause {
            cause: None,
            loss: 0.5,
            share: 1.0,
        }];
        report.losses = vec![ServiceLoss {
            cause: ServiceIdentity::from_pod("shop/cart", Some("xz")),
            loss: estimate,
            source: LossSource::Measured,
            forecast: None,
            windows: 4,
        }];
        let json = serde_json::to_value(ServiceStatus::new(&report)).unwrap();
        assert_eq!(json["cache_percent"], 12.34);
        assert_eq!(json["cache_by"][0]["service"], "shop/cart/xz");
        assert_eq!(json["cache_by"][0]["source"], "measured");
        assert_eq!(json["waiting_percent"], 50.0);
        assert_eq!(json["run_time_percent"], 68.51, "1.1234 times 1.5");
        assert_eq!(json["waiting_by"][0]["share"], 1.0);
        assert!(json["waiting_by"][0]["service"].is_null());
    }
}
