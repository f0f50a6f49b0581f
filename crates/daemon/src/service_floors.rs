//! Floors of services: minimum work per second of all their threads together, judged by measurements.
//!
//! Problem: clients of a service depend on the work of all its threads, which come and go, rather than on the rate of
//! one of them. Method: the work of a window is the work that the service's tasks report, or their instructions, or the
//! growth of the service's progress file. The state follows from the mean rate of the last windows,
//! within two standard errors. Properties: without evidence the state is unknown, with the reason; a file that shrinks,
//! or contains no number, is no evidence for its window; windows with different measures are not averaged.

use std::collections::{BTreeMap, VecDeque};

use cachemate_core::{
    CounterEvent, Estimate, Observation, PromiseState, PromiseTerm, ServiceIdentity, TaskSample,
};
use cachemate_linux::act::rules::matches_service_name;
use cachemate_policy::verifier::student_bound;
use cachemate_spec::ServiceFloorConfig;

use crate::service_status::{FloorMeasure, FloorStatus, ServiceStatus};

/// Maximum number of windows in the mean.
const MAX_WINDOWS: usize = 20;
/// Minimum number of windows for a mean.
const MIN_WINDOWS: usize = 3;
/// A progress file contains one number.
const MAX_FILE_BYTES: u64 = 64;

/// The configured floors, with the rate histories of their services.
pub(crate) struct ServiceFloors(Vec<FloorHistory>);

struct FloorHistory {
    config: ServiceFloorConfig,
    histories: BTreeMap<ServiceIdentity, RateHistory>,
    /// The number in the progress file at the end of the previous window.
    last_total: Option<u64>,
}

#[derive(Default)]
struct RateHistory {
    measure: Option<FloorMeasure>,
    rates: VecDeque<f64>,
}

impl ServiceFloors {
    pub(crate) fn new(floors: Vec<ServiceFloorConfig>) -> Self {
        let floor_history = |config| FloorHistory {
            config,
            histories: BTreeMap::new(),
            last_total: None,
        };
        ServiceFloors(floors.into_iter().map(floor_history).collect())
    }

    /// Observes one window: every service gets the floor of the first entry that names it.
    pub(crate) fn observe(&mut self, observation: &Observation, services: &mut [ServiceStatus]) {
        let seconds = observation.span.elapsed_ns as f64 / 1e9;
        for floor_history in &mut self.0 {
            let file_work = floor_history
                .config
                .progress_file
                .is_some()
                .then(|| floor_history.read_file_work())
                .flatten();
            for service in services
                .iter_mut()
                .filter(|service| service.floor.is_none())
            {
                let identity = service.identity();
                if !matches_service_name(&floor_history.config.service, &identity) {
                    continue;
                }
                let work = match floor_history.config.progress_file {
                    Some(_) => file_work.map(|work| (FloorMeasure::File, work)),
                    None => sum_task_work(observation, &identity),
                };
                let history = floor_history.histories.entry(identity).or_default();
                history.observe(
                    work.filter(|_| seconds > 0.0)
                        .map(|(measure, work)| (measure, work / seconds)),
                );
                service.floor = Some(history.build_floor_status(&floor_history.config));
            }
            let is_live =
                |service: &ServiceIdentity| services.iter().any(|live| live.identity() == *service);
            floor_history
                .histories
                .retain(|service, _| is_live(service));
        }
    }
}

impl FloorHistory {
    /// Growth of the progress file since the previous window.
    fn read_file_work(&mut self) -> Option<f64> {
        let path = self.config.progress_file.as_ref()?;
        let text = cachemate_files::read_text_limited(path, MAX_FILE_BYTES).ok();
        let total = text.and_then(|text| text.trim().parse::<u64>().ok());
        let previous_total = std::mem::replace(&mut self.last_total, total);
        Some(total?.checked_sub(previous_total?)? as f64)
    }
}

impl RateHistory {
    fn observe(&mut self, rate: Option<(FloorMeasure, f64)>) {
        let Some((measure, rate)) = rate else { return };
        if self.measure.replace(measure) != Some(measure) {
            self.rates.clear();
        }
        self.rates.truncate(MAX_WINDOWS - 1);
        self.rates.push_front(rate);
    }

    fn build_floor_status(&self, config: &ServiceFloorConfig) -> FloorStatus {
        let count = self.rates.len();
        let mean_rate = (count >= MIN_WINDOWS).then(|| {
            let mean = self.rates.iter().sum::<f64>() / count as f64;
            let squared_deviations = self
                .rates
                .iter()
                .map(|rate| (rate - mean) * (rate - mean))
                .sum::<f64>();
            let quantile = student_bound(0.025, (count - 1) as f64);
            let half_width = quantile * (squared_deviations / ((count - 1) * count) as f64).sqrt();
            Estimate {
                value: mean,
                low: mean - half_width,
                high: mean + half_width,
            }
        });
        let reason = match (self.measure, mean_rate) {
            (_, Some(_)) => None,
            (Some(_), None) => Some(format!(
                "{count} windows were measured; {MIN_WINDOWS} are needed"
            )),
            (None, None) if config.progress_file.is_some() => {
                Some("its progress file has no growing number".to_string())
            }
            (None, None) => Some("no work of its threads is counted".to_string()),
        };
        let term = PromiseTerm::MinRate(config.min_rate);
        let state = mean_rate.map_or(PromiseState::Unknown, |measured| term.state_of(measured));
        FloorStatus {
            min_rate: config.min_rate,
            measure: self.measure,
            measured: mean_rate,
            state,
            reason,
        }
    }
}

/// Work of all tasks of a service: the reported work if any of them reports, otherwise their instructions.
fn sum_task_work(
    observation: &Observation,
    service: &ServiceIdentity,
) -> Option<(FloorMeasure, f64)> {
    let own_tasks: Vec<&TaskSample> = observation
        .tasks
        .iter()
        .filter(|task| *task.service_or_command() == *service)
        .collect();
    let sum_work = |select_work: fn(&TaskSample) -> Option<f64>| {
        own_tasks
            .iter()
            .filter_map(|task| select_work(task))
            .fold(None, |sum: Option<f64>, work| {
                Some(sum.unwrap_or(0.0) + work)
            })
    };
    let reported_work = sum_work(|task| task.progress).map(|work| (FloorMeasure::Reported, work));
    let total_instructions = || sum_work(|task| task.counts.get(CounterEvent::Instructions));
    reported_work.or_else(|| total_instructions().map(|work| (FloorMeasure::Instructions, work)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::{AppliedPlan, ProcessId, ServiceKind, TaskId, TimeSpan, WindowEnd};
    use cachemate_policy::service_losses::{ServiceReport, ServiceSlowdown};

    fn window_fixture(work: &[Option<f64>]) -> Observation {
        let sample_task = |(id, progress): (usize, &Option<f64>)| TaskSample {
            service: Some(ServiceIdentity::new(ServiceKind::Unit, "redis.service")),
            progress: *progress,
            ..TaskSample::new(TaskId(id as u32), ProcessId(id as u32))
        };
        Observation {
            window: 1,
            span: TimeSpan {
                start_ns: 0,
                elapsed_ns: 500_000_000,
                elapsed_cycles: None,
            },
            end_reason: WindowEnd::Elapsed,
            tasks: work.iter().enumerate().map(sample_task).collect(),
            shared_counts: Vec::new(),
            probe_results: Vec::new(),
            applied: AppliedPlan::default(),
        }
    }

    fn observe(floors: &mut ServiceFloors, observation: &Observation) -> Option<FloorStatus> {
        let report = ServiceReport {
            service: ServiceIdentity::new(ServiceKind::Unit, "redis.service"),
            tasks: [0, 1].map(TaskId).to_vec(),
            max_slowdown: None,
            cpu_share: 1.0,
            waiting_share: None,
            slowdown: ServiceSlowdown::default(),
            losses: Vec::new(),
            waiting_causes: Vec::new(),
            prevented_losses: Vec::new(),
            reason: None,
        };
        let mut services = [ServiceStatus::new(&report)];
        floors.observe(observation, &mut services);
        services[0].floor.clone()
    }

    fn sample_config(
        min_rate: f64,
        progress_file: Option<std::path::PathBuf>,
    ) -> ServiceFloorConfig {
        ServiceFloorConfig {
            service: "redis".into(),
            min_rate,
            progress_file,
        }
    }

    /// Is the work of all threads summed, and the state unknown before three windows, then judged by its interval?
    #[test]
    fn all_threads_of_a_service_count() {
        for (min_rate, state) in [(25.0, PromiseState::Kept), (35.0, PromiseState::Broken)] {
            let mut floors = ServiceFloors::new(vec![sample_config(min_rate, None)]);
            let mut last = None;
            for work in [[10.0, 5.0], [9.0, 6.2], [10.0, 4.9], [11.0, 4.0]] {
                last = observe(&mut floors, &window_fixture(&work.map(Some)));
            }
            let floor = last.unwrap();
            assert_eq!(
                (floor.measure, floor.state, floor.reason),
                (Some(FloorMeasure::Reported), state, None)
            );
            assert!((floor.measured.unwrap().value - 30.05).abs() < 1e-9);
        }
        let mut floors = ServiceFloors::new(vec![sample_config(25.0, None)]);
        let floor = observe(&mut floors, &window_fixture(&[Some(10.0)])).unwrap();
        assert_eq!((floor.state, floor.measured), (PromiseState::Unknown, None));
        let floor = observe(
            &mut ServiceFloors::new(vec![sample_config(25.0, None)]),
            &window_fixture(&[None]),
        )
        .unwrap();
        assert_eq!(
            floor.reason.as_deref(),
            Some("no work of its threads is counted")
        );
        let other = ServiceFloorConfig {
            service: "nginx".into(),
            ..sample_config(1.0, None)
        };
        assert_eq!(
            observe(
                &mut ServiceFloors::new(vec![other]),
                &window_fixture(&[Some(1.0)])
            ),
            None
        );
    }

    /// Does the growth of a service's own file count as its work, and is a file that shrinks or contains no number no
    /// evidence?
    #[test]
    fn growth_of_a_services_own_file_counts_as_work() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("operations");
        let mut floors = ServiceFloors::new(vec![sample_config(25.0, Some(file.clone()))]);
        let mut last = None;
        for text in ["100\n", "110", "oops", "7", "17", "27", "37"] {
            std::fs::write(&file, text).unwrap();
            last = observe(&mut floors, &window_fixture(&[Some(1e9)]));
        }
        let floor = last.unwrap();
        assert_eq!(
            (floor.measure, floor.state),
            (Some(FloorMeasure::File), PromiseState::Broken)
        );
        assert_eq!(floor.measured.unwrap().value, 20.0);
        std::fs::remove_file(&file).unwrap();
        let floor = observe(
            &mut ServiceFloors::new(vec![sample_config(25.0, Some(file))]),
            &window_fixture(&[Some(1e9)]),
        )
        .unwrap();
        assert_eq!(
            floor.reason.as_deref(),
            Some("its progress file has no growing number")
        );
    }
}
