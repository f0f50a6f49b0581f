//! Formats the history of losses: an overview of the services, or one service over time.

use std::collections::BTreeMap;

use cachemate_daemon::loss_history::{HistoryMinute, ServiceMinute};
use cachemate_report::Table;
use cachemate_report::text::{escape_controls, format_count_of, format_fixed, value_or_dash};
use serde::Serialize;
use time::OffsetDateTime;

use crate::service_text::{
    MIN_NAMED_SHARE, MIN_NAMED_WAITING_PERCENT, shorten_name, signed_percent, waiting_cause_name,
};

/// Maximum number of rows of the overview and of the timeline.
const MAX_SERVICES: usize = 30;
const MAX_SPANS: u64 = 24;
const SECONDS_PER_MINUTE: u64 = 60;

/// `cachemate history --json`.
#[derive(Serialize)]
pub struct HistoryJson {
    /// The requested service.
    pub service: Option<String>,
    /// Start of the shown time, in seconds since 1970 (UTC).
    pub since_unix_s: u64,
    /// Lines of the files that could not be read.
    pub damaged_lines: u64,
    /// Minutes with their services: all, or those that the request names and those to which it caused a loss.
    pub minutes: Vec<HistoryMinute>,
}

/// Formats a time as `11-29 03:12`.
fn format_time(unix_s: u64) -> String {
    let time = i64::try_from(unix_s).ok();
    let time = time.and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    time.map_or_else(
        || "?".to_string(),
        |time| {
            let (month, day) = (u8::from(time.month()), time.day());
            format!(
                "{month:02}-{day:02} {:02}:{:02}",
                time.hour(),
                time.minute()
            )
        },
    )
}

fn causes_text(minute: &ServiceMinute) -> String {
    let cache_causes = minute
        .cache_by
        .iter()
        .filter(|(_, percent)| *percent > 0.0)
        .map(|(cause, percent)| {
            let name = shorten_name(&cause.name);
            format!("cache: {name} {}", signed_percent(*percent))
        });
    let waiting_causes = minute
        .waiting_by
        .iter()
        .filter(|(_, share)| *share >= MIN_NAMED_SHARE)
        .filter(|_| minute.waiting_percent >= Some(MIN_NAMED_WAITING_PERCENT))
        .map(|(cause, share)| {
            let name = waiting_cause_name(cause.as_ref().map(|cause| cause.name.as_str()));
            format!("waiting: {name} {} %", format_fixed(100.0 * share, 0))
        });
    let causes: Vec<String> = cache_causes.take(2).chain(waiting_causes.take(2)).collect();
    if causes.is_empty() {
        "-".to_string()
    } else {
        causes.join(", ")
    }
}

fn loss_cells(minute: &ServiceMinute) -> [String; 3] {
    [
        minute.run_time_percent,
        minute.cache_percent,
        minute.waiting_percent,
    ]
    .map(|percent| value_or_dash(percent.map(signed_percent)))
}

/// The minute in which a service lost most, with its time.
type WorstMinute<'h> = (u64, &'h ServiceMinute);

fn worst_of<'h>(minutes: impl Iterator<Item = WorstMinute<'h>>) -> Option<WorstMinute<'h>> {
    minutes.reduce(|worst, other| {
        if other.1.loss_percent() > worst.1.loss_percent() {
            other
        } else {
            worst
        }
    })
}

fn head_line(history: &HistoryJson) -> String {
    let first = history.minutes.first().map_or(0, |minute| minute.unix_s);
    let last = history.minutes.last().map_or(0, |minute| minute.unix_s);
    let damage = match history.damaged_lines {
        0 => String::new(),
        count => format!("; {} damaged and left out", format_count_of(count, "line")),
    };
    format!(
        "{} from {} to {} UTC; each shows its worst window{damage}\n",
        format_count_of(history.minutes.len() as u64, "minute"),
        format_time(first),
        format_time(last)
    )
}

fn entries(minutes: &[HistoryMinute]) -> impl Iterator<Item = WorstMinute<'_>> {
    minutes.iter().flat_map(|minute| {
        minute
            .services
            .iter()
            .map(|service| (minute.unix_s, service))
    })
}

/// Formats the worst minute of each service, those that lost most first.
pub fn overview_text(history: &HistoryJson) -> String {
    let mut by_service: BTreeMap<(&str, &str), Vec<WorstMinute<'_>>> = BTreeMap::new();
    for (unix_s, service) in entries(&history.minutes) {
        by_service
            .entry((service.kind.text(), &service.name))
            .or_default()
            .push((unix_s, service));
    }
    let mut rows: Vec<(usize, WorstMinute<'_>)> = by_service
        .into_values()
        .filter_map(|minutes| Some((minutes.len(), worst_of(minutes.into_iter())?)))
        .collect();
    rows.sort_by(|a, b| b.1.1.loss_percent().total_cmp(&a.1.1.loss_percent()));
    let mut table = Table::from_header(
        "service | kind | > minutes | worst | > run time | > cache | > waiting | causes then",
    );
    for (count, (unix_s, minute)) in rows.iter().take(MAX_SERVICES) {
        let [run_time, cache, waiting] = loss_cells(minute);
        table.add_row([
            shorten_name(&minute.name),
            minute.kind.to_string(),
            count.to_string(),
            format_time(*unix_s),
            run_time,
            cache,
            waiting,
            causes_text(minute),
        ]);
    }
    let hidden_count = rows.len().saturating_sub(MAX_SERVICES);
    let more_line = match hidden_count {
        0 => String::new(),
        count => format!("and {count} more\n"),
    };
    format!("{}{}{more_line}", head_line(history), table.text())
}

/// Formats one service over time, and the losses that it caused to others.
pub fn service_text(history: &HistoryJson, word: &str) -> String {
    let own: Vec<WorstMinute<'_>> = entries(&history.minutes)
        .filter(|(_, service)| service.is_named(word))
        .collect();
    let caused: Vec<WorstMinute<'_>> = entries(&history.minutes)
        .filter(|(_, service)| !service.is_named(word) && service.has_cause(word))
        .collect();
    let first = history.minutes.first().map_or(0, |minute| minute.unix_s);
    let last = history.minutes.last().map_or(0, |minute| minute.unix_s);
    let minutes = (last - first) / SECONDS_PER_MINUTE + 1;
    let span_s = minutes.div_ceil(MAX_SPANS) * SECONDS_PER_MINUTE;

    let mut text = head_line(history);
    if own.is_empty() {
        let name = escape_controls(word);
        text.push_str(&format!("{name}: no losses of its own are stored\n"));
    } else {
        let mut table = Table::from_header(
            "from (UTC) | > CPUs | > run time | > cache | > waiting | causes then",
        );
        for span in 0..MAX_SPANS {
            let start_s = first + span * span_s;
            let in_span = own
                .iter()
                .copied()
                .filter(|(unix_s, _)| (start_s..start_s + span_s).contains(unix_s));
            let Some((_, minute)) = worst_of(in_span) else {
                continue;
            };
            let [run_time, cache, waiting] = loss_cells(minute);
            let cpus = format_fixed(minute.cpu_share, 2);
            let causes = causes_text(minute);
            table.add_row([format_time(start_s), cpus, run_time, cache, waiting, causes]);
        }
        text.push_str(&table.text());
    }
    text + &caused_text(&caused, word)
}

/// Formats the worst minute of each service to which a service caused a loss.
fn caused_text(caused: &[WorstMinute<'_>], word: &str) -> String {
    let mut by_victim: BTreeMap<&str, Vec<WorstMinute<'_>>> = BTreeMap::new();
    for (unix_s, service) in caused {
        by_victim
            .entry(&service.name)
            .or_default()
            .push((*unix_s, service));
    }
    let line = |(victim, minutes): (&str, Vec<WorstMinute<'_>>)| {
        let count = format_count_of(minutes.len() as u64, "minute");
        let (unix_s, minute) = worst_of(minutes.into_iter())?;
        Some(format!(
            "  {} in {count}; worst {}: run time {}, {}\n",
            shorten_name(victim),
            format_time(unix_s),
            value_or_dash(minute.run_time_percent.map(signed_percent)),
            causes_text(minute)
        ))
    };
    let lines: String = by_victim.into_iter().filter_map(line).collect();
    if lines.is_empty() {
        return String::new();
    }
    format!(
        "{} is among the causes of losses of\n{lines}",
        escape_controls(word)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{ServiceIdentity, ServiceKind};

    fn minute_fixture(name: &str, waiting_percent: f64, cause: &str) -> ServiceMinute {
        ServiceMinute {
            kind: ServiceKind::Unit,
            name: name.into(),
            cpu_share: 0.5,
            run_time_percent: Some(waiting_percent),
            cache_percent: None,
            cache_source: None,
            cache_by: Vec::new(),
            waiting_percent: Some(waiting_percent),
            waiting_by: vec![(Some(ServiceIdentity::new(ServiceKind::Unit, cause)), 1.0)],
        }
    }

    /// Do the overview and the timeline name the worst moment and its culprit, and is a culprit that has no losses of
    /// its own found with its victims?
    #[test]
    fn the_worst_moment_and_its_culprit_are_named() {
        let minutes = (0..90)
            .map(|minute| HistoryMinute {
                unix_s: 1_795_921_920 + minute * SECONDS_PER_MINUTE,
                services: vec![minute_fixture(
                    "redis.service",
                    if minute == 47 { 84.0 } else { 3.0 },
                    "backup.service",
                )],
                left_out: 0,
            })
            .collect();
        let history = HistoryJson {
            service: None,
            since_unix_s: 0,
            damaged_lines: 1,
            minutes,
        };
        let overview = overview_text(&history);
        let row = overview.lines().find(|line| line.contains("redis.service"));
        let row = row.unwrap();
        for words in [
            "11-29 03:59",
            "+84 %",
            "waiting: backup.service 100 %",
            " 90 ",
        ] {
            assert!(row.contains(words), "{words} in {overview}");
        }
        assert!(overview.contains("1 line damaged"), "{overview}");
        let timeline = service_text(&history, "redis");
        // As run time and as waiting, in one row.
        assert_eq!(timeline.matches("+84 %").count(), 2, "{timeline}");
        assert!(
            timeline.lines().count() <= MAX_SPANS as usize + 3,
            "{timeline}"
        );
        let culprit = service_text(&history, "backup");
        assert!(
            culprit.contains("backup is among the causes of losses of\n  redis.service in 90 minutes; worst 11-29 03:59"),
            "{culprit}"
        );
    }
}
