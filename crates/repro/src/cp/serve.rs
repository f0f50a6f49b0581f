//! CP-5: a level of service for each client while the number of clients rises from two to four (thesis 4.6.4, Figure
//! 4.11).
//!
//! The clients of one `warehouses` program have a warehouse each; the third and the fourth arrive halfway. The thesis's
//! level of 9400 operations per second belongs to its machine. There, one color is just adequate for two clients, so
//! the level here is 95 % of each client's rate with one color, which leaves room for the noise of a window. Static
//! small is that one color, static large the fewest with which four clients reach the level. Each client has its own
//! core, so that only the cache changes.

use cachemate_core::{AccessSource, BatchEnd, CpuId, PipelineConfig, WindowLength, WindowRecord};
use cachemate_report::figure::{Axis, Chart, ChartPoint, Mark, ReferenceLine, Series};
use cachemate_sim::kernels;
use cachemate_sim::machine::{SimMachine, SimOptions, SimProgram};
use serde::{Deserialize, Serialize};

use super::{COLORS, RunScale, WAREHOUSE_BYTES, chip_workload, nominal_ns, thesis_job};
use crate::setup::{Workload, build_pipeline, failed, run_to_end};
use crate::{DataPoint, ExperimentContext, Finding, Result, ResultFigure, mean};

/// Time scale relative to the thesis's four minutes.
const SCALE: u64 = 2_000;
const LEVEL_SHARE: f64 = 0.95;
const CLIENT_COUNT: usize = 4;
const FIRST_CLIENT_COUNT: usize = 2;

/// Lengths in windows.
#[derive(Clone, Copy, Serialize)]
struct ServiceLengths {
    window_cycles: u64,
    warm_up_windows: u64,
    /// Windows with two clients, and then with four.
    windows_per_phase: u64,
}

/// A client that arrives late.
struct DelayedClient {
    source: Box<dyn AccessSource>,
    initial_sleep_ns: Option<u64>,
}

impl AccessSource for DelayedClient {
    fn next_batch(&mut self, batch: &mut Vec<cachemate_core::Access>) -> BatchEnd {
        match self.initial_sleep_ns.take() {
            Some(ns) => BatchEnd::Sleep { ns },
            None => self.source.next_batch(batch),
        }
    }
    fn progress(&self) -> Option<f64> {
        self.source.progress()
    }
}

fn server_workload(seed: u64, lengths: ServiceLengths) -> Result<Workload> {
    let mut server_job = thesis_job("warehouses", seed);
    (server_job.options.threads, server_job.options.groups) = (Some(1), Some(CLIENT_COUNT as u32));
    server_job.options.footprint_bytes = Some(CLIENT_COUNT as u64 * WAREHOUSE_BYTES);
    let mut workload = chip_workload(
        vec![server_job],
        CLIENT_COUNT as u32,
        RunScale {
            scale: SCALE,
            warm_up_cycles: 0,
            with_l3: true,
        },
        seed,
    )?;
    workload.warm_up_cycles = lengths.warm_up_windows * lengths.window_cycles;
    workload.measured_cycles = 2 * lengths.windows_per_phase * lengths.window_cycles;
    Ok(workload)
}

/// The machine whose last clients arrive at a cycle: at once if it is 0, and never if it lies
/// beyond the end.
fn build_machine(workload: &Workload, late_arrival_cycle: u64) -> Result<SimMachine> {
    let job = workload.jobs[0].clone();
    let late_arrival_ns = late_arrival_cycle * 1_000 / (workload.machine.hertz / 1_000_000);
    let make_threads = move |_: u32| {
        let threads = kernels::build_threads(&job.kernel, job.seed, &job.options)
            .expect("a program of the table");
        let start_client =
            |(client_index, source): (usize, Box<dyn AccessSource>)| -> Box<dyn AccessSource> {
                let sleeps_ns = (client_index >= FIRST_CLIENT_COUNT && late_arrival_ns > 0)
                    .then_some(late_arrival_ns);
                Box::new(DelayedClient {
                    source,
                    initial_sleep_ns: sleeps_ns,
                })
            };
        threads.into_iter().enumerate().map(start_client).collect()
    };

    let cycle_limit = |cycles| Some(cachemate_sim::machine::RunLimit::Cycles(cycles));
    let options = SimOptions {
        warm_up: cycle_limit(workload.warm_up_cycles),
        ends: cycle_limit(workload.measured_cycles),
        ..workload.options.clone()
    };
    let programs = vec![SimProgram::new("warehouses", Box::new(make_threads))];
    SimMachine::new(&workload.machine, &options, programs).map_err(failed("machine"))
}

/// One window of the measured part: clients that ran, work per nominal second of each, their colors, pages in
/// migration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct ServiceWindow {
    pub clients: usize,
    pub rate_per_s: f64,
    pub colors: u32,
    pub moving: bool,
}

fn service_window(record: &WindowRecord) -> Option<ServiceWindow> {
    let has_used_cpu = |cpus: &[(CpuId, u64)]| cpus.iter().any(|(_, ns)| *ns > 0);
    let work_by_client: Vec<f64> = record
        .observation
        .tasks
        .iter()
        .filter(|task| has_used_cpu(&task.on_cpu_ns))
        .filter_map(|task| task.progress)
        .collect();

    let first_share = record.observation.applied.shares.first();
    let colors = first_share.map_or(COLORS, |active_share| {
        active_share.share.units.set().count()
    });
    (!work_by_client.is_empty()).then(|| ServiceWindow {
        clients: work_by_client.len(),
        rate_per_s: work_by_client.iter().sum::<f64>()
            / work_by_client.len() as f64
            / (record.observation.span.elapsed_ns as f64 / 1e9),
        colors,
        moving: !record.observation.applied.pending.is_empty(),
    })
}

fn collect_windows(
    machine: SimMachine,
    config: PipelineConfig,
    from_window: u64,
) -> Result<Vec<ServiceWindow>> {
    let records = run_to_end(machine, build_pipeline(config)?)?.records;
    // The first record belongs to the short window before the first plan.
    Ok(records
        .iter()
        .skip(1 + from_window as usize)
        .filter_map(service_window)
        .collect())
}

fn first_window() -> WindowLength {
    WindowLength::Cycles {
        cycles: 1_000 * SCALE,
    }
}

/// The work per second of each client with a static share, after the warm-up.
fn measure_static_rate(
    seed: u64,
    lengths: ServiceLengths,
    colors: u32,
    clients: usize,
) -> Result<f64> {
    let workload = server_workload(seed, lengths)?;
    let late_arrival_cycle = if clients == CLIENT_COUNT {
        0
    } else {
        u64::MAX >> 20
    };
    let parameters = format!(
        "window_ns = {}\nsteps = [{{ shares = ['0-{}'] }}]",
        nominal_ns(&workload, lengths.window_cycles),
        colors - 1
    );
    let config = workload.pipeline("static-partition", &parameters, Vec::new(), first_window());
    let service_windows = collect_windows(
        build_machine(&workload, late_arrival_cycle)?,
        config,
        lengths.warm_up_windows,
    )?;
    Ok(mean(service_windows.iter().map(|window| window.rate_per_s)))
}

/// The managed run and both static ones, window by window.
#[derive(Serialize, Deserialize)]
struct ServiceRun {
    pub level: f64,
    /// Whether four clients reach the level with some share.
    pub reachable: bool,
    pub small: u32,
    pub large: u32,
    pub managed: Vec<ServiceWindow>,
    pub static_small: Vec<ServiceWindow>,
    pub static_large: Vec<ServiceWindow>,
}

fn measure_service(
    context: &ExperimentContext<'_>,
    &(seed, lengths, sizes): &(u64, ServiceLengths, &[u32]),
) -> Result<ServiceRun> {
    context.report_progress(&format!("clients 2 to 4, seed {seed}"));

    let small_share_colors = sizes[0];
    let rate_level =
        LEVEL_SHARE * measure_static_rate(seed, lengths, small_share_colors, FIRST_CLIENT_COUNT)?;
    let mut reachable_colors = None;
    for &colors in sizes {
        if reachable_colors.is_none()
            && measure_static_rate(seed, lengths, colors, CLIENT_COUNT)? >= rate_level
        {
            reachable_colors = Some(colors);
        }
    }
    let is_level_reachable = reachable_colors.is_some();
    let large_share_colors = reachable_colors.unwrap_or(COLORS);
    let workload = server_workload(seed, lengths)?;
    let late_arrival_cycle =
        workload.warm_up_cycles + lengths.windows_per_phase * lengths.window_cycles;
    let window_ns = nominal_ns(&workload, lengths.window_cycles);
    let run_policy = |name: &str, parameters: &str| {
        let config = workload.pipeline(name, parameters, Vec::new(), first_window());
        collect_windows(
            build_machine(&workload, late_arrival_cycle)?,
            config,
            lengths.warm_up_windows,
        )
    };
    let run_fixed_colors = |colors: u32| {
        run_policy(
            "static-partition",
            &format!(
                "window_ns = {window_ns}\nsteps = [{{ shares = ['0-{}'] }}]",
                colors - 1
            ),
        )
    };
    let managed_parameters = format!(
        "window_ns = {window_ns}\nrate_per_s = {rate_level:?}\nunits = {small_share_colors}\nshrink_after = 4"
    );
    Ok(ServiceRun {
        level: rate_level,
        reachable: is_level_reachable,
        small: small_share_colors,
        large: large_share_colors,
        managed: run_policy("service-level", &managed_parameters)?,
        static_small: run_fixed_colors(small_share_colors)?,
        static_large: run_fixed_colors(large_share_colors)?,
    })
}

impl ServiceRun {
    pub fn miss_flags(&self, windows: &[ServiceWindow]) -> Vec<bool> {
        windows
            .iter()
            .map(|window| window.rate_per_s < self.level)
            .collect()
    }
    /// The windows that miss the level, except those that detected the miss (the share grew right
    /// after) and those in which pages were still being copied.
    pub fn unexcused_count(&self) -> usize {
        let miss_flags = self.miss_flags(&self.managed);
        let is_excused = |window_index: usize| {
            let detected_miss = self
                .managed
                .get(window_index + 1)
                .is_some_and(|next| next.colors > self.managed[window_index].colors);
            detected_miss || self.managed[window_index].moving
        };
        (0..miss_flags.len())
            .filter(|&index| miss_flags[index] && !is_excused(index))
            .count()
    }
    /// The mean rate with four clients relative to the level, minus one, in percent.
    pub fn level_deviation_percent(&self, windows: &[ServiceWindow]) -> f64 {
        let rates_with_all_clients = windows
            .iter()
            .filter(|window| window.clients == CLIENT_COUNT)
            .map(|window| window.rate_per_s);
        100.0 * (mean(rates_with_all_clients) / self.level - 1.0)
    }
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let lengths = context.pick(
        ServiceLengths {
            window_cycles: 400_000,
            warm_up_windows: 10,
            windows_per_phase: 8,
        },
        ServiceLengths {
            window_cycles: 1_000_000,
            warm_up_windows: 20,
            windows_per_phase: 20,
        },
    );
    let sizes: &[u32] = context.pick(&[1, 2, 4, 16], &[1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16]);
    let inputs: Vec<(u64, ServiceLengths, &[u32])> = context
        .seeds
        .iter()
        .map(|&seed| (seed, lengths, sizes))
        .collect();
    let service_runs = context.run_all_stored(&inputs, measure_service)?;
    let per_seed: Vec<(u64, f64)> = context
        .seeds
        .iter()
        .zip(&service_runs)
        .map(|(&seed, run)| (seed, run.unexcused_count() as f64))
        .collect();
    let values_over_runs =
        |value: fn(&ServiceRun) -> f64| service_runs.iter().map(value).collect::<Vec<f64>>();
    let unexcused_misses = |service_run: &ServiceRun| {
        service_run
            .miss_flags(&service_run.managed)
            .iter()
            .filter(|missed| **missed)
            .count() as f64
    };
    let first_run = &service_runs[0];
    let points = vec![
        DataPoint::from_values(
            "rate of four clients over the level, %",
            format!("static {}", first_run.small),
            values_over_runs(|run| run.level_deviation_percent(&run.static_small)),
        ),
        DataPoint::from_values(
            "rate of four clients over the level, %",
            "resized",
            values_over_runs(|run| run.level_deviation_percent(&run.managed)),
        ),
        DataPoint::from_values(
            "rate of four clients over the level, %",
            format!("static {}", first_run.large),
            values_over_runs(|run| run.level_deviation_percent(&run.static_large)),
        ),
        DataPoint::from_values(
            "colors",
            "static small",
            values_over_runs(|run| f64::from(run.small)),
        ),
        DataPoint::from_values(
            "colors",
            "static large",
            values_over_runs(|run| f64::from(run.large)),
        ),
        DataPoint::from_values(
            "colors, mean over the run",
            "resized",
            values_over_runs(|run| mean(run.managed.iter().map(|seen| f64::from(seen.colors)))),
        ),
    ];
    let note = format!(
        "Level {:.0} a nominal second for each client. Of {} windows {:.1} missed it in all; not counted are those after \
         which the share grew (one window of detection a step) and those in which pages were still being copied. A window \
         holds few operations, so its rate has noise of its own, and clients that come find nothing of theirs cached. With \
         {} colors and up four clients reach the level{}.",
        first_run.level,
        first_run.managed.len(),
        mean(values_over_runs(unexcused_misses)),
        first_run.large,
        if service_runs.iter().all(|run| run.reachable) {
            ""
        } else {
            " (not under every seed, whatever the share)"
        },
    );
    Ok(vec![
        Finding::declared("cp-5-windows-below", &per_seed)
            .with_points(points)
            .with_time_scale(SCALE as f64)
            .with_note(note)
            .with_figure(draw_service_figure(first_run, "cp-5-service")),
    ])
}

fn draw_service_figure(service_run: &ServiceRun, name: &str) -> ResultFigure {
    let window_series = |name: &str, windows: &[ServiceWindow]| {
        let point = |(window_index, window): (usize, &ServiceWindow)| ChartPoint {
            title: Some(format!(
                "{} colors, {} clients",
                window.colors, window.clients
            )),
            ..ChartPoint::new(window_index as f64, window.rate_per_s / service_run.level)
        };
        let points = windows.iter().enumerate().map(point).collect();
        Series {
            name: name.to_string(),
            points,
            mark: Mark::Steps,
            ..Series::default()
        }
    };

    let chart = Chart {
        title: "Work for each client over the level of service".to_string(),
        x: Axis::linear("window"),
        y: Axis::linear("over the level"),
        series: vec![
            window_series(
                &format!("static, {} colors", service_run.small),
                &service_run.static_small,
            ),
            window_series("resized", &service_run.managed),
            window_series(
                &format!("static, {} colors", service_run.large),
                &service_run.static_large,
            ),
        ],
        references: vec![ReferenceLine::Y {
            label: "level".to_string(),
            level: 1.0,
        }],
        ..Chart::default()
    };

    ResultFigure::chart(name, &chart)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are only those windows excused that detected the miss or were still copying?
    #[test]
    fn only_detection_and_copying_windows_are_excused() {
        let window_at = |rate_per_s: f64, colors: u32, moving: bool| ServiceWindow {
            clients: 4,
            rate_per_s,
            colors,
            moving,
        };
        let managed = vec![
            window_at(1.1, 1, false),
            window_at(0.9, 1, false),
            window_at(0.8, 2, true),
            window_at(0.9, 2, false),
            window_at(1.0, 2, false),
        ];

        let service_run = ServiceRun {
            level: 1.0,
            reachable: true,
            small: 1,
            large: 2,
            managed,
            static_small: Vec::new(),
            static_large: Vec::new(),
        };
        assert_eq!(service_run.unexcused_count(), 1);
    }

    /// Do the late clients arrive halfway, and not earlier?
    #[test]
    fn late_clients_arrive_halfway() {
        let lengths = ServiceLengths {
            window_cycles: 100_000,
            warm_up_windows: 1,
            windows_per_phase: 2,
        };
        let workload = server_workload(1, lengths).unwrap();
        let config = workload.pipeline(
            "static-partition",
            &format!(
                "window_ns = {}\nsteps = [{{ shares = ['0-7'] }}]",
                nominal_ns(&workload, lengths.window_cycles)
            ),
            Vec::new(),
            first_window(),
        );
        let service_windows = collect_windows(
            build_machine(&workload, 300_000).unwrap(),
            config,
            lengths.warm_up_windows,
        )
        .unwrap();
        let clients: Vec<usize> = service_windows
            .iter()
            .map(|window| window.clients)
            .collect();
        assert_eq!(
            (clients.first(), clients.last()),
            (Some(&2), Some(&4)),
            "{clients:?}"
        );
    }
}
