//! Services of a snapshot: the loss of each service, and the services that cause it.

use cachemate_auto::service_losses::{ServiceLoss, ServiceReport, ServiceSlowdown, WaitingCause};
use cachemate_core::{Estimate, ServiceIdentity};

use crate::snapshot::{CacheLossSnapshot, ServiceSnapshot, WaitingCauseSnapshot};

impl ServiceSnapshot {
    /// A service from the evidence of one window.
    pub fn new(report: &ServiceReport) -> Self {
        let ServiceIdentity {
            kind,
            name,
            pod,
            container,
        } = report.service.clone();
        let ServiceSlowdown { cache, waiting, .. } = report.slowdown;
        let run_time = report.slowdown.run_time();

        ServiceSnapshot {
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
}

fn waiting_cause(cause: &WaitingCause) -> WaitingCauseSnapshot {
    let service = cause.cause.as_ref();
    WaitingCauseSnapshot {
        service: service.map(|service| service.name.clone()),
        kind: service.map(|service| service.kind),
        percent: rounded_percent(cause.loss),
        share: rounded_percent(cause.share) / 100.0,
    }
}

fn cache_cause(loss: &ServiceLoss) -> CacheLossSnapshot {
    CacheLossSnapshot {
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
    use cachemate_core::{ServiceKind, TaskId};

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
        let json = serde_json::to_value(ServiceSnapshot::new(&report)).unwrap();
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
        let json = serde_json::to_value(ServiceSnapshot::new(&report)).unwrap();
        assert_eq!(json["cache_percent"], 12.34);
        assert_eq!(json["cache_by"][0]["service"], "shop/cart/xz");
        assert_eq!(json["cache_by"][0]["source"], "measured");
        assert_eq!(json["waiting_percent"], 50.0);
        assert_eq!(json["run_time_percent"], 68.51, "1.1234 times 1.5");
        assert_eq!(json["waiting_by"][0]["share"], 1.0);
        assert!(json["waiting_by"][0]["service"].is_null());
    }
}
