//! Formats services as text: first which service slows which other, then a table.

use std::collections::BTreeMap;

use cachemate_daemon::service_status::{ServiceStatus, SlowdownCause};
use cachemate_report::Table;
use cachemate_report::text::{escape_controls, format_fixed, format_names, value_or_dash};

/// Maximum number of losses listed above the table.
const MAX_LOSSES: usize = 8;

fn signed_percent(percent: f64) -> String {
    format!(
        "{}{} %",
        if percent < 0.0 { "" } else { "+" },
        format_fixed(percent, 0)
    )
}

fn format_range((low, high): (f64, f64)) -> String {
    format!("{} to {}", signed_percent(low), signed_percent(high))
}

fn describe_evidence(cause: &SlowdownCause) -> String {
    let forecast = cause
        .forecast_percent
        .filter(|_| cause.source != "forecast");
    let forecast_text = forecast.map_or(String::new(), |percent| {
        format!(", forecast {}", signed_percent(percent))
    });
    let windows_text = match cause.source.as_str() {
        "measured" => format!(" in {} windows together", cause.windows),
        _ => String::new(),
    };
    format!("{}{windows_text}{forecast_text}", cause.source)
}

/// Returns one line for each loss, the largest first; if there are none, a line with the reason.
pub fn loss_lines(services: &[ServiceStatus]) -> String {
    let pairs_of = |causes_of: fn(&ServiceStatus) -> &[SlowdownCause]| {
        let pairs = services
            .iter()
            .flat_map(|service| causes_of(service).iter().map(move |cause| (service, cause)));
        let mut pairs: Vec<(&ServiceStatus, &SlowdownCause)> =
            pairs.filter(|(_, cause)| cause.percent > 0.0).collect();
        pairs.sort_by(|a, b| b.1.percent.total_cmp(&a.1.percent));
        pairs
    };
    let pairs = pairs_of(|service| &service.slowdown_by);
    let prevented_pairs = pairs_of(|service| &service.prevented);
    let reasons = reason_lines(services);
    if pairs.is_empty() && prevented_pairs.is_empty() {
        return match services {
            [] => "which service slows which: no service is managed; [[rules]] of the configuration select programs, \
                        and a rule with kind = \"unit\" selects every unit (man cachemate.toml)\n"
                .to_string(),
            _ if reasons.is_empty() => "which service slows which: no loss was measured or forecast\n".to_string(),
            _ => format!("which service slows which: none is known\n{reasons}"),
        };
    }
    let loss_line = |verb: &str, (service, cause): &(&ServiceStatus, &SlowdownCause)| {
        let (percent, range) = (
            signed_percent(cause.percent),
            format_range(cause.range_percent),
        );
        let (cause_name, name) = (
            escape_controls(&cause.service),
            escape_controls(&service.name),
        );
        format!(
            "  {cause_name}{verb} {name} by {percent} ({range}; {})\n",
            describe_evidence(cause)
        )
    };
    let prevented_lines = prevented_pairs
        .iter()
        .map(|pair| loss_line(" is confined, and before slowed", pair));
    let lines = pairs
        .iter()
        .take(MAX_LOSSES)
        .map(|pair| loss_line(" slows", pair));
    let lines: String = lines.chain(prevented_lines.take(MAX_LOSSES)).collect();
    let hidden_count = pairs.len().saturating_sub(MAX_LOSSES);
    let more_line = if hidden_count > 0 {
        format!("  and {hidden_count} smaller losses\n")
    } else {
        String::new()
    };
    format!("which service slows which\n{lines}{more_line}{reasons}")
}

/// Returns each reason why a loss is unknown, once, with its services, and the services that wait for CPUs longer than
/// they run.
fn reason_lines(services: &[ServiceStatus]) -> String {
    let mut names_by_reason: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for service in services {
        if let Some(reason) = &service.reason {
            names_by_reason
                .entry(reason)
                .or_default()
                .push(escape_controls(&service.name));
        }
    }
    let reason_line = |(reason, names): (&str, Vec<String>)| {
        format!("  {}: {reason}\n", format_names(&names, MAX_LOSSES))
    };
    let waiting_line = |service: &ServiceStatus| {
        let share = service
            .waiting_share
            .filter(|share| *share > service.cpu_share)?;
        let (waiting, running) = (format_fixed(share, 2), format_fixed(service.cpu_share, 2));
        let name = escape_controls(&service.name);
        Some(format!(
            "  {name} waits for CPUs longer than it runs ({waiting} waiting, {running} running)\n"
        ))
    };
    let waiting_lines = services.iter().filter_map(waiting_line).take(MAX_LOSSES);
    names_by_reason
        .into_iter()
        .take(MAX_LOSSES)
        .map(reason_line)
        .chain(waiting_lines)
        .collect()
}

/// Maximum number of letters of a name in a table, because one long name widens every row.
const MAX_NAME_LETTERS: usize = 64;

/// A name with visible escapes, cut in the middle if it is long: its beginning and its end both tell names apart.
fn shorten_name(name: &str) -> String {
    let letters: Vec<char> = escape_controls(name).chars().collect();
    if letters.len() <= MAX_NAME_LETTERS {
        return letters.into_iter().collect();
    }
    let (head, tail) = (MAX_NAME_LETTERS / 2 - 1, MAX_NAME_LETTERS / 2);
    let head: String = letters[..head].iter().collect();
    let tail: String = letters[letters.len() - tail..].iter().collect();
    format!("{head}…{tail}")
}

/// Returns the table of the services, with at most `max_rows` rows.
pub fn service_table(services: &[ServiceStatus], max_rows: usize) -> String {
    if services.is_empty() {
        return String::new();
    }
    let mut table = Table::from_header(
        "service | kind | > threads | > CPUs | > waiting | > slowdown | > limit | evidence | slowed by",
    );
    for service in services.iter().take(max_rows) {
        let causes: Vec<String> = service
            .slowdown_by
            .iter()
            .take(3)
            .map(|cause| (cause, cause.source.as_str()))
            .chain(
                service
                    .prevented
                    .iter()
                    .take(3)
                    .map(|cause| (cause, "before its confinement")),
            )
            .map(|(cause, source)| {
                format!(
                    "{} {} {source}",
                    shorten_name(&cause.service),
                    signed_percent(cause.percent)
                )
            })
            .collect();
        table.add_row([
            shorten_name(&service.name),
            service.kind.to_string(),
            service.tasks.to_string(),
            format_fixed(service.cpu_share, 2),
            value_or_dash(service.waiting_share.map(|share| format_fixed(share, 2))),
            value_or_dash(service.slowdown_percent.map(signed_percent)),
            value_or_dash(service.max_slowdown_percent.map(signed_percent)),
            service
                .slowdown_source
                .clone()
                .unwrap_or_else(|| "-".into()),
            if causes.is_empty() {
                "-".to_string()
            } else {
                causes.join(", ")
            },
        ]);
    }
    let hidden_count = services.len().saturating_sub(max_rows);
    let more_line = if hidden_count > 0 {
        format!("and {hidden_count} more\n")
    } else {
        String::new()
    };
    format!("{}{more_line}", table.text())
}

/// Returns one line for each service that has a promised floor.
fn floor_lines(services: &[ServiceStatus]) -> String {
    let floor_line = |service: &ServiceStatus| {
        let floor = service.floor.as_ref()?;
        let detail = match (&floor.measured, &floor.reason) {
            (Some(rate), _) => {
                format!(
                    "{} a second ({} to {})",
                    format_fixed(rate.value, 1),
                    format_fixed(rate.low, 1),
                    format_fixed(rate.high, 1)
                )
            }
            (None, reason) => reason.clone().unwrap_or_default(),
        };
        let (name, min_rate) = (
            escape_controls(&service.name),
            format_fixed(floor.min_rate, 1),
        );
        Some(format!(
            "floor of {name}: {min_rate} a second, {}: {}\n",
            floor.state.describe(),
            escape_controls(&detail)
        ))
    };
    services.iter().filter_map(floor_line).collect()
}

/// Losses, table and floors of the services.
pub fn render_services(services: &[ServiceStatus], max_rows: usize) -> String {
    format!(
        "\n{}\n{}{}",
        loss_lines(services),
        service_table(services, max_rows),
        floor_lines(services)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a long name cut in its middle, and one of the usual length not?
    #[test]
    fn a_long_name_does_not_widen_the_table() {
        assert_eq!(shorten_name("redis.service"), "redis.service");
        let short = shorten_name(&format!("a{}z", "x".repeat(246)));
        assert_eq!(short.chars().count(), MAX_NAME_LETTERS);
        assert!(short.starts_with("ax") && short.ends_with("xz") && short.contains('…'));
    }
    use cachemate_core::ServiceKind;

    fn sample_service(
        name: &str,
        slowdown_by: Vec<SlowdownCause>,
        reason: Option<&str>,
    ) -> ServiceStatus {
        ServiceStatus {
            kind: ServiceKind::Unit,
            name: name.into(),
            pod: None,
            container: None,
            images: Vec::new(),
            profile: None,
            tasks: 2,
            task_ids: vec![1, 2],
            unread_programs: None,
            cpu_share: 1.0,
            waiting_share: None,
            slowdown_percent: slowdown_by.first().map(|cause| cause.percent),
            slowdown_range_percent: None,
            slowdown_source: slowdown_by.first().map(|cause| cause.source.clone()),
            slowdown_by,
            prevented: Vec::new(),
            reason: reason.map(str::to_string),
            max_slowdown_percent: None,
            floor: None,
        }
    }

    /// Is the largest loss named first with its evidence, and does an empty answer give its reason?
    #[test]
    fn the_largest_loss_comes_first() {
        let sample_cause = |name: &str, percent: f64, source: &str| SlowdownCause {
            service: name.into(),
            kind: ServiceKind::Unit,
            percent,
            range_percent: (percent - 2.0, percent + 2.0),
            source: source.into(),
            forecast_percent: Some(30.0),
            windows: 6,
        };
        let web = sample_service("web", vec![sample_cause("scan", 5.0, "forecast")], None);
        let store = sample_service("store", vec![sample_cause("batch", 42.0, "measured")], None);
        let text = render_services(&[web, store], 10);
        let mut lines = text.lines().skip(2);
        let first = lines.next().unwrap();
        assert_eq!(
            first,
            "  batch slows store by +42 % (+40 % to +44 %; measured in 6 windows together, forecast +30 %)"
        );
        assert_eq!(
            lines.next().unwrap(),
            "  scan slows web by +5 % (+3 % to +7 %; forecast)"
        );
        let confined = ServiceStatus {
            prevented: vec![sample_cause("batch", 9.0, "measured")],
            ..sample_service("store", Vec::new(), None)
        };
        let text = render_services(&[confined], 10);
        assert!(
            text.contains(
                "  batch is confined, and before slowed store by +9 % (+7 % to +11 %; measured in 6"
            ),
            "{text}"
        );
        assert!(
            text.contains(" batch +9 % before its confinement"),
            "{text}"
        );
        let reason = Some("no work is counted");
        let waiting = ServiceStatus {
            waiting_share: Some(1.5),
            ..sample_service("mail", Vec::new(), None)
        };
        let quiet = [
            sample_service("web", Vec::new(), reason),
            sample_service("db", Vec::new(), reason),
            waiting,
        ];
        let text = render_services(&quiet, 10);
        assert_eq!(
            text.matches("  web, db: no work is counted\n").count(),
            1,
            "{text}"
        );
        assert_eq!(text.matches("no work is counted").count(), 1, "{text}");
        assert!(
            text.contains(
                "  mail waits for CPUs longer than it runs (1.50 waiting, 1.00 running)\n"
            ),
            "{text}"
        );
        assert!(loss_lines(&[]).contains("no service is managed"));
    }
}
