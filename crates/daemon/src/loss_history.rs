//! The losses of all services over the last week, in files of the state directory.
//!
//! Problem: who slowed the database at three in the morning, if the batch job has ended since? Method: each minute
//! appends one line with the worst window of every service in that minute: both losses, their product, and the causes.
//! There is one file for each day (UTC), and eight files are kept. Properties: bounded, because a line and a file have
//! maximum lengths, so that all files together have at most 50 MB; services with small losses are left out first, and
//! the line says how many; a line that was cut off by a crash or a full disk is skipped and counted by the reader. A
//! full disk stops the history, not the daemon. Files are removed by number and not by age, so a wrong clock costs one
//! of them and not all. Everything but the current minute survives `kill -9`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use cachemate_core::{ServiceIdentity, ServiceKind};
use cachemate_files::{DirAccess, TrustedDir};
use serde::{Deserialize, Serialize};

use cachemate_page::ServiceSnapshot;

const SECONDS_PER_MINUTE: u64 = 60;
const SECONDS_PER_DAY: u64 = 86_400;
/// Number of files that are kept, besides the current one.
const KEPT_DAYS: usize = 7;
/// Longest time before now about which the history is asked.
pub const MAX_AGE_S: u64 = (KEPT_DAYS as u64 + 1) * SECONDS_PER_DAY;
/// Maximum length of a line.
const MAX_LINE_BYTES: usize = 4_300;
/// Maximum length of a day's file: a line for each minute.
const MAX_FILE_BYTES: u64 = (MAX_LINE_BYTES as u64 + 1) * SECONDS_PER_DAY / SECONDS_PER_MINUTE;
/// Maximum number of causes of each loss.
const MAX_CAUSES: usize = 4;
/// Maximum number of services that are compared within a minute: a host may start any number of differently named
/// programs.
const MAX_OPEN_SERVICES: usize = 1_000;
/// A service with fewer CPUs and no loss is left out.
const MIN_CPU_SHARE: f64 = 0.01;
/// Smaller losses in percent are not worth a line.
const MIN_LOSS_PERCENT: f64 = 0.5;

/// Seconds since 1970 (UTC); 0 if the clock is set to an earlier time.
pub fn unix_time_s() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.map_or(0, |duration| duration.as_secs())
}

/// The worst window of a service in one minute.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServiceMinute {
    /// Kind of the service.
    pub kind: ServiceKind,
    /// Name of the service.
    pub name: String,
    /// CPU time over elapsed time, mean over the minute.
    pub cpu_share: f64,
    /// Run time that users feel to be added; `None` if neither loss was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_time_percent: Option<f64>,
    /// Cache loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_percent: Option<f64>,
    /// Source of the cache loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_source: Option<String>,
    /// Services that caused the cache loss, and how much of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cache_by: Vec<(ServiceIdentity, f64)>,
    /// Waiting loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_percent: Option<f64>,
    /// Services for which it waited, and their part of the wait; `None` for programs that are not
    /// observed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_by: Vec<(Option<ServiceIdentity>, f64)>,
}

impl ServiceMinute {
    fn new(status: &ServiceSnapshot) -> Self {
        let cache_causes = status.cache_by.iter().take(MAX_CAUSES);
        let waiting_causes = status.waiting_by.iter().take(MAX_CAUSES);
        ServiceMinute {
            kind: status.kind,
            name: status.name.clone(),
            cpu_share: status.cpu_share,
            run_time_percent: status.run_time_percent,
            cache_percent: status.cache_percent,
            cache_source: status.cache_source.clone(),
            cache_by: cache_causes
                .map(|cause| {
                    let identity = ServiceIdentity::new(cause.kind, cause.service.clone());
                    (identity, cause.percent)
                })
                .collect(),
            waiting_percent: status.waiting_percent,
            waiting_by: waiting_causes
                .map(|cause| {
                    let name = cause.service.clone();
                    let identity = cause.kind.zip(name);
                    let identity = identity.map(|(kind, name)| ServiceIdentity::new(kind, name));
                    (identity, cause.share)
                })
                .collect(),
        }
    }

    /// The loss by which minutes are compared: what users feel or, if nothing was measured, the forecast.
    pub fn loss_percent(&self) -> f64 {
        self.run_time_percent
            .or(self.cache_percent)
            .map_or(0.0, |percent| percent.max(0.0))
    }

    /// `word` is what a user wrote for a service.
    pub fn is_named(&self, word: &str) -> bool {
        ServiceIdentity::new(self.kind, self.name.clone()).is_named(word)
    }

    /// Whether a word that a user wrote names one of the causes.
    pub fn has_cause(&self, word: &str) -> bool {
        let cache_causes = self.cache_by.iter().map(|(cause, _)| cause);
        let waiting_causes = self
            .waiting_by
            .iter()
            .filter_map(|(cause, _)| cause.as_ref());
        let mut causes = cache_causes.chain(waiting_causes);
        causes.any(|cause| cause.is_named(word))
    }
}

/// One minute of the history.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct HistoryMinute {
    /// Start of the minute, in seconds since 1970 (UTC).
    pub unix_s: u64,
    /// Services, those with the largest loss first.
    pub services: Vec<ServiceMinute>,
    /// Services for which there was no space; one that comes and goes may count several times.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u32,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// The history as read from its files.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct LossHistory {
    /// Minutes, in order.
    pub minutes: Vec<HistoryMinute>,
    /// Lines that were damaged.
    pub damaged_lines: u64,
}

impl LossHistory {
    /// Reads the minutes since a time; `keep` decides which services of each are kept.
    ///
    /// # Errors
    /// The directory or a file cannot be read. A history that does not exist is empty.
    pub fn read(
        state_dir: &Path,
        since_unix_s: u64,
        keep: impl Fn(&ServiceMinute) -> bool,
    ) -> io::Result<Self> {
        let mut history = LossHistory::default();
        let dir = match TrustedDir::open(state_dir, DirAccess::ReadOnly) {
            Ok(dir) => dir,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(history),
            Err(error) => return Err(error),
        };
        for day in stored_days(&dir)? {
            if day.saturating_add(1).saturating_mul(SECONDS_PER_DAY) <= since_unix_s {
                continue;
            }
            let name = file_name(day);
            let content = dir.read(Path::new(&name), 2 * MAX_FILE_BYTES)?;
            let content = content.unwrap_or_default();
            for line in content
                .split(|&byte| byte == b'\n')
                .filter(|line| !line.is_empty())
            {
                match serde_json::from_slice::<HistoryMinute>(line) {
                    Ok(minute) if minute.unix_s < since_unix_s => {}
                    Ok(mut minute) => {
                        minute.services.retain(&keep);
                        history.minutes.push(minute);
                    }
                    Err(_) => history.damaged_lines += 1,
                }
            }
        }
        history.minutes.sort_by_key(|minute| minute.unix_s);
        Ok(history)
    }
}

/// Days that have a file, in order.
fn stored_days(dir: &TrustedDir) -> io::Result<Vec<u64>> {
    let names = dir.names()?;
    let mut days: Vec<u64> = names.iter().filter_map(|name| day_of(name)).collect();
    days.sort_unstable();
    Ok(days)
}

fn file_name(day: u64) -> String {
    format!("losses-{day}.jsonl")
}

/// Counted from 1970; `None` for other files.
fn day_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("losses-")?.strip_suffix(".jsonl")?;
    let day = digits.parse().ok()?;
    (file_name(day) == name).then_some(day)
}

/// The worst window of a service so far in the current minute.
struct OpenMinute {
    worst: ServiceMinute,
    cpu_share_sum: f64,
}

/// Writes the history.
pub(crate) struct HistoryRecorder {
    state_dir: PathBuf,
    minute: Option<u64>,
    windows: u32,
    services: BTreeMap<(ServiceKind, String), OpenMinute>,
    /// Windows of services for which `services` had no space.
    left_out: u32,
    /// Is the end of the file known to be the end of a line?
    is_at_line_start: bool,
    has_failed: bool,
}

impl HistoryRecorder {
    pub(crate) fn new(state_dir: &Path) -> Self {
        HistoryRecorder {
            state_dir: state_dir.to_path_buf(),
            minute: None,
            windows: 0,
            services: BTreeMap::new(),
            left_out: 0,
            is_at_line_start: false,
            has_failed: false,
        }
    }

    /// Observes the services of a window that ended at this time, and writes the minute that it completes.
    pub(crate) fn observe(
        &mut self,
        services: &[ServiceSnapshot],
        unix_s: u64,
        report: &dyn Fn(&str),
    ) {
        let minute = unix_s / SECONDS_PER_MINUTE;
        if self.minute != Some(minute) {
            self.write(report);
            self.minute = Some(minute);
        }
        self.windows += 1;
        for status in services {
            let key = (status.kind, status.name.clone());
            let current = ServiceMinute::new(status);
            match self.services.get_mut(&key) {
                None => {
                    let open_minute = OpenMinute {
                        cpu_share_sum: current.cpu_share,
                        worst: current,
                    };
                    self.services.insert(key, open_minute);
                }
                Some(open_minute) => {
                    open_minute.cpu_share_sum += current.cpu_share;
                    if current.loss_percent() > open_minute.worst.loss_percent() {
                        open_minute.worst = current;
                    }
                }
            }
        }
        self.drop_smallest_losses();
    }

    /// Drops the services with the smallest losses of the minute if there are too many.
    fn drop_smallest_losses(&mut self) {
        let excess = self.services.len().saturating_sub(MAX_OPEN_SERVICES);
        if excess == 0 {
            return;
        }
        let mut losses: Vec<(f64, f64, &(ServiceKind, String))> = self
            .services
            .iter()
            .map(|(key, open_minute)| {
                let loss_percent = open_minute.worst.loss_percent();
                (loss_percent, open_minute.cpu_share_sum, key)
            })
            .collect();
        losses.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let dropped_keys: Vec<(ServiceKind, String)> = losses
            .into_iter()
            .take(excess)
            .map(|(_, _, key)| key.clone())
            .collect();
        for key in &dropped_keys {
            self.services.remove(key);
        }
        self.left_out = self.left_out.saturating_add(excess as u32);
    }

    /// Writes the current minute. The first failure in a row is reported.
    pub(crate) fn write(&mut self, report: &dyn Fn(&str)) {
        let windows = std::mem::take(&mut self.windows);
        let services = std::mem::take(&mut self.services);
        let left_out = std::mem::take(&mut self.left_out);
        let Some(minute) = self.minute.filter(|_| windows > 0) else {
            return;
        };
        let minutes = services.into_values().map(|open_minute| ServiceMinute {
            cpu_share: (1e4 * open_minute.cpu_share_sum / f64::from(windows)).round() / 1e4,
            ..open_minute.worst
        });
        let line = render_line(minute * SECONDS_PER_MINUTE, minutes.collect(), left_out);
        match self.append(minute * SECONDS_PER_MINUTE / SECONDS_PER_DAY, &line) {
            Ok(()) => self.has_failed = false,
            Err(error) => {
                if !std::mem::replace(&mut self.has_failed, true) {
                    report(&format!("the history of losses is not written: {error}"));
                }
            }
        }
    }

    fn append(&mut self, day: u64, line: &str) -> io::Result<()> {
        let dir = TrustedDir::create(&self.state_dir)?;
        remove_oldest_days(&dir, day)?;
        let name = file_name(day);
        let path = Path::new(&name);
        let length = match dir.open_file(path, rustix::fs::OFlags::RDONLY) {
            Ok(file) => file.metadata()?.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(error),
        };
        if length + line.len() as u64 + 2 > MAX_FILE_BYTES {
            return Err(io::Error::other(format!(
                "{}: it has {length} bytes, at most {MAX_FILE_BYTES} are written in a day",
                self.state_dir.join(&name).display()
            )));
        }
        // An earlier daemon may have been killed within a line, and a full disk cuts one off.
        let is_at_line_start = length == 0 || std::mem::take(&mut self.is_at_line_start);
        let separator = if is_at_line_start { "" } else { "\n" };
        dir.append_line(path, &format!("{separator}{line}"))?;
        self.is_at_line_start = true;
        Ok(())
    }
}

/// Removes the oldest files beyond those that are kept besides that of `day`, but files of later days, which a wrong
/// clock has left, before all others.
fn remove_oldest_days(dir: &TrustedDir, day: u64) -> io::Result<()> {
    let mut other_days = stored_days(dir)?;
    other_days.retain(|other| *other != day);
    while other_days.len() > KEPT_DAYS {
        let later = other_days.iter().position(|other| *other > day);
        let removed_day = other_days.remove(later.unwrap_or(0));
        dir.remove(&file_name(removed_day))?;
    }
    Ok(())
}

/// Renders a minute in at most [`MAX_LINE_BYTES`], with the services that lose most, then those that use most CPU time.
fn render_line(unix_s: u64, mut services: Vec<ServiceMinute>, left_out: u32) -> String {
    let is_worth = |service: &ServiceMinute| {
        service.loss_percent() >= MIN_LOSS_PERCENT || service.cpu_share >= MIN_CPU_SHARE
    };
    services.retain(is_worth);
    services.sort_by(|a, b| {
        b.loss_percent()
            .total_cmp(&a.loss_percent())
            .then(b.cpu_share.total_cmp(&a.cpu_share))
    });
    let mut minute = HistoryMinute {
        unix_s,
        left_out,
        ..HistoryMinute::default()
    };
    // Braces, the time and the number of services that are left out.
    let mut length = 64;
    for service in services {
        let Ok(text) = serde_json::to_string(&service) else {
            continue;
        };
        length += text.len() + 1;
        if length > MAX_LINE_BYTES {
            minute.left_out += 1;
        } else {
            minute.services.push(service);
        }
    }
    serde_json::to_string(&minute).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_auto::service_losses::{ServiceReport, ServiceSlowdown, WaitingCause};
    use cachemate_core::Estimate;

    fn status_fixture(name: &str, waiting: f64, cause: Option<&str>) -> ServiceSnapshot {
        let unit = |name: &str| ServiceIdentity::new(ServiceKind::Unit, format!("{name}.service"));
        ServiceSnapshot::new(&ServiceReport {
            service: unit(name),
            tasks: Vec::new(),
            max_slowdown: None,
            cpu_share: 0.5,
            waiting_share: None,
            slowdown: ServiceSlowdown {
                waiting: Some(Estimate::exact(waiting)),
                ..ServiceSlowdown::default()
            },
            losses: Vec::new(),
            waiting_causes: vec![WaitingCause {
                cause: cause.map(unit),
                loss: waiting,
                share: 1.0,
            }],
            prevented_losses: Vec::new(),
            reason: None,
        })
    }

    fn panic_on(message: &str) {
        panic!("{message}");
    }

    /// Does the history have the worst window of each minute with its culprit, also after a restart behind a line that
    /// a crash cut off, and is the damage counted?
    #[test]
    fn the_worst_window_of_each_minute_is_kept_with_its_culprit() {
        let dir = tempfile::tempdir().unwrap();
        let start_s = 20_000 * SECONDS_PER_DAY;
        let mut recorder = HistoryRecorder::new(dir.path());
        for second in 0..150 {
            let waiting = if second == 70 { 0.8 } else { 0.1 };
            let status = status_fixture("redis", waiting, Some("spinner"));
            recorder.observe(&[status], start_s + second, &panic_on);
        }
        recorder.write(&panic_on);
        let path = dir.path().join(file_name(20_000));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{text}{}", &text[..40])).unwrap();
        let mut recorder = HistoryRecorder::new(dir.path());
        let status = status_fixture("redis", 0.2, None);
        recorder.observe(&[status], start_s + 600, &panic_on);
        recorder.write(&panic_on);

        let history = LossHistory::read(dir.path(), 0, |_| true).unwrap();
        assert_eq!(history.damaged_lines, 1);
        let losses: Vec<(u64, Option<f64>)> = history
            .minutes
            .iter()
            .map(|minute| (minute.unix_s - start_s, minute.services[0].run_time_percent))
            .collect();
        let percents = [10.0, 80.0, 10.0, 20.0].map(Some);
        let expected: Vec<_> = [0, 60, 120, 600].into_iter().zip(percents).collect();
        assert_eq!(losses, expected);
        let worst = &history.minutes[1].services[0];
        assert!(worst.is_named("redis") && worst.has_cause("spinner") && !worst.has_cause("redis"));
        assert!(worst.has_cause("unit/spinner") && !worst.has_cause("user-unit/spinner"));
        let later = LossHistory::read(dir.path(), start_s + 60, |service| {
            service.has_cause("spinner")
        });
        let later = later.unwrap().minutes;
        let kept: Vec<usize> = later.iter().map(|minute| minute.services.len()).collect();
        assert_eq!(kept, [1, 1, 0]);
    }

    /// Do nine days of a host with hundreds of services, each with a long name, stay within 50 MB, with the largest
    /// losses kept?
    #[test]
    fn a_week_of_a_crowded_host_stays_within_fifty_megabytes() {
        let dir = tempfile::tempdir().unwrap();
        let services: Vec<ServiceSnapshot> = (0..300)
            .map(|index| {
                let name = format!("{index:03}{}", "x".repeat(200));
                status_fixture(&name, f64::from(index) / 100.0, Some("spinner"))
            })
            .collect();
        let line = render_line(0, services.iter().map(ServiceMinute::new).collect(), 0);
        assert!(line.len() <= MAX_LINE_BYTES, "{}", line.len());
        let minute: HistoryMinute = serde_json::from_str(&line).unwrap();
        assert_eq!(minute.services.len() as u32 + minute.left_out, 300);
        assert!(minute.services[0].name.starts_with("299") && minute.services.len() > 5);

        let mut recorder = HistoryRecorder::new(dir.path());
        for day in 0..9 {
            let start_s = (20_000 + day) * SECONDS_PER_DAY;
            recorder.observe(&services, start_s, &panic_on);
            recorder.observe(&services, start_s + SECONDS_PER_MINUTE, &panic_on);
        }
        recorder.write(&panic_on);
        let names = TrustedDir::open(dir.path(), DirAccess::ReadOnly)
            .unwrap()
            .names()
            .unwrap();
        assert_eq!(names.len(), KEPT_DAYS + 1);
        const { assert!((KEPT_DAYS as u64 + 1) * MAX_FILE_BYTES <= 50_000_000) };

        // A full day takes no more lines.
        let path = dir.path().join(file_name(20_008));
        std::fs::write(&path, vec![b' '; MAX_FILE_BYTES as usize - 100]).unwrap();
        let failures = std::cell::Cell::new(0);
        let count_failure = |message: &str| {
            assert!(message.contains("not written"), "{message}");
            failures.set(failures.get() + 1);
        };
        for minute in 10..13 {
            let unix_s = 20_008 * SECONDS_PER_DAY + minute * SECONDS_PER_MINUTE;
            recorder.observe(&services, unix_s, &count_failure);
        }
        assert_eq!(failures.get(), 1, "reported once");
        assert_eq!(
            std::fs::metadata(&path).unwrap().len(),
            MAX_FILE_BYTES - 100
        );
    }

    /// Does a wrong clock cost one file of the history at most, before and after the present, and goes the file that it
    /// left first?
    #[test]
    fn a_wrong_clock_costs_one_day_of_the_history() {
        let dir = tempfile::tempdir().unwrap();
        let record_day = |day: u64| {
            let mut recorder = HistoryRecorder::new(dir.path());
            let status = status_fixture("redis", 0.2, None);
            recorder.observe(&[status], day * SECONDS_PER_DAY, &panic_on);
            recorder.write(&panic_on);
            stored_days(&TrustedDir::open(dir.path(), DirAccess::ReadOnly).unwrap()).unwrap()
        };
        for day in 20_000..20_007 {
            record_day(day);
        }
        assert_eq!(record_day(20_007).len(), KEPT_DAYS + 1);
        let last_days = [20_003, 20_004, 20_005, 20_006, 20_007];
        let booted_in_1970 = record_day(0);
        assert_eq!(booted_in_1970[..3], [0, 20_001, 20_002]);
        assert_eq!(booted_in_1970[3..], last_days);
        let far_ahead = record_day(30_000);
        assert_eq!(far_ahead[..2], [20_001, 20_002], "the oldest went");
        assert_eq!(far_ahead[2..], [&last_days[..], &[30_000]].concat());
        let right_again = record_day(20_008);
        assert_eq!(right_again[2..], [&last_days[..], &[20_008]].concat());
    }

    /// Do a thousand services at most take memory in a minute with any number of names, those that lose most?
    #[test]
    fn a_minute_of_any_number_of_names_keeps_the_largest_losses() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = HistoryRecorder::new(dir.path());
        for window in 0..30 {
            let names = (0..100).map(|index| format!("job{}", 100 * window + index));
            let services: Vec<ServiceSnapshot> = names
                .enumerate()
                .map(|(index, name)| status_fixture(&name, index as f64 / 100.0, None))
                .collect();
            recorder.observe(&services, 60, &panic_on);
        }
        assert_eq!(recorder.services.len(), MAX_OPEN_SERVICES);
        assert_eq!(recorder.left_out, 2_000);
        let losses = recorder.services.values();
        let least = losses.map(|open_minute| open_minute.worst.loss_percent());
        assert!(least.fold(f64::MAX, f64::min) > 60.0);
    }

    /// Is a line that a full disk cut off the only one that is lost?
    #[test]
    fn the_line_after_a_failed_one_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = HistoryRecorder::new(dir.path());
        let services = [status_fixture("redis", 0.2, None)];
        recorder.observe(&services, 0, &panic_on);
        recorder.write(&panic_on);
        let path = dir.path().join(file_name(0));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{text}{}", &text[..40])).unwrap();
        // As after an append that failed.
        recorder.is_at_line_start = false;
        for minute in 1..3 {
            recorder.observe(&services, minute * SECONDS_PER_MINUTE, &panic_on);
        }
        recorder.write(&panic_on);
        let history = LossHistory::read(dir.path(), 0, |_| true).unwrap();
        assert_eq!((history.minutes.len(), history.damaged_lines), (3, 1));
    }
}
