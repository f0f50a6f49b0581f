//! Formats services as text: first which service slows which other, through the cache or by taking its CPUs, then a
//! table.

use std::collections::{BTreeMap, BTreeSet};

use cachemate_core::{ServiceIdentity, ServiceKind, nearest_name, suggestion};
use cachemate_page::{CacheLossSnapshot, ServiceSnapshot};
use cachemate_report::Table;
use cachemate_report::text::{escape_controls, format_fixed, format_names, value_or_dash};

/// Maximum number of losses listed above the table.
const MAX_LOSSES: usize = 8;
/// Minimum waiting loss in percent that a sentence names.
pub const MIN_NAMED_WAITING_PERCENT: f64 = 1.0;
/// Maximum number of services, and minimum share of each, that a sentence names as causes of a wait.
const MAX_NAMED_CAUSES: usize = 3;
pub const MIN_NAMED_SHARE: f64 = 0.02;

/// Formats a number of percent with its sign.
pub fn signed_percent(percent: f64) -> String {
    format!(
        "{}{} %",
        if percent < 0.0 { "" } else { "+" },
        format_fixed(percent, 0)
    )
}

fn format_range((low, high): (f64, f64)) -> String {
    format!("{} to {}", signed_percent(low), signed_percent(high))
}

fn describe_evidence(cause: &CacheLossSnapshot) -> String {
    let forecast = cause
        .forecast_percent
        .filter(|_| cause.source != "forecast");
    let forecast_text = forecast.map_or(String::new(), |percent| {
        format!(", forecast {}", signed_percent(percent))
    });
    let windows_text = match cause.source.as_str() {
        "measured" => format!(" in {} windows", cause.windows),
        _ => String::new(),
    };
    format!("{}{windows_text}{forecast_text}", cause.source)
}

/// A line about a loss, with the percents by which lines are ordered.
struct LossLine {
    percent: f64,
    text: String,
}

fn cache_line(verb: &str, service: &ServiceSnapshot, cause: &CacheLossSnapshot) -> LossLine {
    let (percent, range) = (
        signed_percent(cause.percent),
        format_range(cause.range_percent),
    );
    let (cause_name, name) = (
        escape_controls(&cause.service),
        escape_controls(&service.name),
    );
    let evidence = describe_evidence(cause);
    LossLine {
        percent: cause.percent,
        text: format!("  cache: {cause_name}{verb} {name} by {percent} ({range}; {evidence})\n"),
    }
}

/// `None` if the loss is too small to name a cause.
fn waiting_line(service: &ServiceSnapshot) -> Option<LossLine> {
    let percent = service
        .waiting_percent
        .filter(|percent| *percent >= MIN_NAMED_WAITING_PERCENT)?;
    let range = service
        .waiting_range_percent
        .map_or_else(String::new, |range| format!(" ({})", format_range(range)));
    let causes: Vec<String> = waiting_causes(service)
        .map(|(name, share)| format!("{name} {share}"))
        .collect();
    let meanwhile = match causes.is_empty() {
        true => String::new(),
        false => format!("; behind {}", causes.join(", ")),
    };
    let name = escape_controls(&service.name);
    let text = format!(
        "  waiting: {name} takes {} % longer because it waits for CPUs{range}{meanwhile}\n",
        format_fixed(percent, 0)
    );
    Some(LossLine { percent, text })
}

/// Names and shares of the main services that ran while a service waited.
fn waiting_causes(service: &ServiceSnapshot) -> impl Iterator<Item = (String, String)> + '_ {
    let named_causes = service
        .waiting_by
        .iter()
        .filter(|cause| cause.share >= MIN_NAMED_SHARE);
    named_causes.take(MAX_NAMED_CAUSES).map(|cause| {
        let name = waiting_cause_name(cause.service.as_deref());
        (name, format!("{} %", format_fixed(100.0 * cause.share, 0)))
    })
}

/// Programs that are not observed have no name.
pub fn waiting_cause_name(service: Option<&str>) -> String {
    service.map_or_else(|| "unmanaged programs".to_string(), shorten_name)
}

/// One line for each loss, the largest first; if there are none, a line with the reason.
pub fn loss_lines(services: &[ServiceSnapshot]) -> String {
    let cache_lines_of = |verb, causes_of: fn(&ServiceSnapshot) -> &[CacheLossSnapshot]| {
        let pairs = services
            .iter()
            .flat_map(move |service| causes_of(service).iter().map(move |cause| (service, cause)));
        let lines = pairs
            .filter(|(_, cause)| cause.percent > 0.0)
            .map(|(service, cause)| cache_line(verb, service, cause));
        lines.collect::<Vec<LossLine>>()
    };
    let mut lines = cache_lines_of(" slows", |service| &service.cache_by);
    lines.extend(services.iter().filter_map(waiting_line));
    lines.sort_by(|a, b| b.percent.total_cmp(&a.percent));
    let mut prevented_lines = cache_lines_of(" is confined, and before slowed", |service| {
        &service.prevented
    });
    prevented_lines.sort_by(|a, b| b.percent.total_cmp(&a.percent));
    let reasons = reason_lines(services);
    if lines.is_empty() && prevented_lines.is_empty() {
        return match services {
            [] => "which service slows which: no service is managed; [[rules]] of the configuration select programs, \
                        and a rule with kind = \"unit\" selects every unit (man cachemate.toml)\n"
                .to_string(),
            _ if reasons.is_empty() => "which service slows which: no loss was measured or forecast\n".to_string(),
            _ => format!("which service slows which: none is known\n{reasons}"),
        };
    }

    let hidden_count = lines.len().saturating_sub(MAX_LOSSES);
    let shown_lines = lines.iter().take(MAX_LOSSES);
    let text: String = shown_lines
        .chain(prevented_lines.iter().take(MAX_LOSSES))
        .map(|line| line.text.as_str())
        .collect();
    let more_line = if hidden_count > 0 {
        format!("  and {hidden_count} smaller losses\n")
    } else {
        String::new()
    };
    format!("which service slows which\n{text}{more_line}{reasons}")
}

/// Each reason why a cache loss is unknown, once, with its services.
fn reason_lines(services: &[ServiceSnapshot]) -> String {
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
        format!("  cache, {}: {reason}\n", format_names(&names, MAX_LOSSES))
    };
    names_by_reason
        .into_iter()
        .take(MAX_LOSSES)
        .map(reason_line)
        .collect()
}

/// Maximum number of letters of a name in a table, because one long name widens every row.
const MAX_NAME_LETTERS: usize = 64;

/// A name with visible escapes, cut in the middle if it is long: its beginning and its end both tell names apart.
pub fn shorten_name(name: &str) -> String {
    let letters: Vec<char> = escape_controls(name).chars().collect();
    if letters.len() <= MAX_NAME_LETTERS {
        return letters.into_iter().collect();
    }
    let (head, tail) = (MAX_NAME_LETTERS / 2 - 1, MAX_NAME_LETTERS / 2);
    let head: String = letters[..head].iter().collect();
    let tail: String = letters[letters.len() - tail..].iter().collect();
    format!("{head}…{tail}")
}

/// The part of a message that suggests the nearest of these names, for a unit also without its suffix.
pub fn nearest_name_hint<'n>(word: &str, names: impl Iterator<Item = &'n str>) -> String {
    let names_and_stems = names.flat_map(|name| {
        let stem = name.rsplit_once('.').map(|(stem, _)| stem);
        let unit = ServiceIdentity::new(ServiceKind::Unit, name);
        [Some(name), stem.filter(|stem| unit.is_named(stem))]
    });
    let candidates: BTreeSet<&str> = names_and_stems.flatten().collect();
    suggestion(
        nearest_name(word, candidates)
            .map(escape_controls)
            .as_deref(),
    )
}

/// At most `max_rows` rows; empty without services.
pub fn service_table(services: &[ServiceSnapshot], max_rows: usize) -> String {
    if services.is_empty() {
        return String::new();
    }
    let mut table = Table::from_header(
        "service | kind | > threads | > CPUs | > run time | > cache | > waiting | > limit | causes",
    );
    for service in services.iter().take(max_rows) {
        let cache_causes = service
            .cache_by
            .iter()
            .take(MAX_NAMED_CAUSES)
            .map(|cause| (cause, cause.source.as_str()));
        let prevented_causes = service
            .prevented
            .iter()
            .take(MAX_NAMED_CAUSES)
            .map(|cause| (cause, "before its confinement"));
        let mut causes: Vec<String> = cache_causes
            .chain(prevented_causes)
            .map(|(cause, source)| {
                let name = shorten_name(&cause.service);
                format!("cache: {name} {} {source}", signed_percent(cause.percent))
            })
            .collect();
        if service.waiting_percent >= Some(MIN_NAMED_WAITING_PERCENT) {
            let waits = waiting_causes(service);
            causes.extend(waits.map(|(name, share)| format!("waiting: {name} {share}")));
        }
        table.add_row([
            shorten_name(&service.name),
            service.kind.to_string(),
            service.tasks.to_string(),
            format_fixed(service.cpu_share, 2),
            value_or_dash(service.run_time_percent.map(signed_percent)),
            value_or_dash(service.cache_percent.map(signed_percent)),
            value_or_dash(service.waiting_percent.map(signed_percent)),
            value_or_dash(service.max_slowdown_percent.map(signed_percent)),
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

/// Losses and table of the services.
pub fn render_services(services: &[ServiceSnapshot], max_rows: usize) -> String {
    format!(
        "\n{}\n{}",
        loss_lines(services),
        service_table(services, max_rows)
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
    use cachemate_page::WaitingCauseSnapshot;

    fn sample_service(
        name: &str,
        cache_by: Vec<CacheLossSnapshot>,
        reason: Option<&str>,
    ) -> ServiceSnapshot {
        ServiceSnapshot {
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
            run_time_percent: None,
            run_time_range_percent: None,
            cache_percent: cache_by.first().map(|cause| cause.percent),
            cache_range_percent: None,
            cache_source: cache_by.first().map(|cause| cause.source.clone()),
            cache_by,
            waiting_percent: None,
            waiting_range_percent: None,
            waiting_by: Vec::new(),
            prevented: Vec::new(),
            reason: reason.map(str::to_string),
            max_slowdown_percent: None,
        }
    }

    /// Is the largest loss named first with its evidence, and does an empty answer give its reason?
    #[test]
    fn the_largest_loss_comes_first() {
        let sample_cause = |name: &str, percent: f64, source: &str| CacheLossSnapshot {
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
            "  cache: batch slows store by +42 % (+40 % to +44 %; measured in 6 windows, forecast +30 %)"
        );
        assert_eq!(
            lines.next().unwrap(),
            "  cache: scan slows web by +5 % (+3 % to +7 %; forecast)"
        );
        let confined = ServiceSnapshot {
            prevented: vec![sample_cause("batch", 9.0, "measured")],
            ..sample_service("store", Vec::new(), None)
        };
        let text = render_services(&[confined], 10);
        assert!(
            text.contains(
                "  cache: batch is confined, and before slowed store by +9 % (+7 % to +11 %; measured in 6"
            ),
            "{text}"
        );
        assert!(
            text.contains("cache: batch +9 % before its confinement"),
            "{text}"
        );
        let reason = Some("no work is counted");
        let waiting = ServiceSnapshot {
            waiting_percent: Some(84.0),
            waiting_range_percent: Some((70.0, 98.0)),
            waiting_by: [(Some("spinner"), 0.97), (None, 0.03), (Some("small"), 0.0)]
                .map(|(service, share)| WaitingCauseSnapshot {
                    service: service.map(str::to_string),
                    kind: None,
                    percent: 84.0 * share,
                    share,
                })
                .to_vec(),
            ..sample_service("mail", Vec::new(), None)
        };
        let quiet = [
            sample_service("web", Vec::new(), reason),
            sample_service("db", Vec::new(), reason),
            waiting,
        ];
        let text = render_services(&quiet, 10);
        assert_eq!(
            text.matches("  cache, web, db: no work is counted\n")
                .count(),
            1,
            "{text}"
        );
        assert_eq!(text.matches("no work is counted").count(), 1, "{text}");
        assert!(
            text.contains(
                "  waiting: mail takes 84 % longer because it waits for CPUs (+70 % to +98 %); behind spinner 97 %, unmanaged programs 3 %\n"
            ),
            "{text}"
        );
        assert!(loss_lines(&[]).contains("no service is managed"));
    }
}
