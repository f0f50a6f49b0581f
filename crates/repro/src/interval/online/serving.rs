//! INTERVAL-7: a level of service for each client while the number of clients rises from two to four (CP-5 at nominal
//! time).

use super::*;
use crate::cp::serve::{
    CLIENT_COUNT, FIRST_CLIENT_COUNT, LEVEL_SHARE, ServiceRun, ServiceWindow, draw_service_figure,
    service_window,
};
use crate::{DataPoint, Finding, ReproError};

/// Work that counts as one operation of a client.
const INSTRUCTIONS_OF_AN_OPERATION: f64 = 100_000.0;
/// Windows at the start, in which the cache fills, that do not count.
const UNCOUNTED_START_WINDOWS: usize = 20;

/// The server's process, with `clients` clients from the start on and others that arrive later.
fn server_job(
    client: &Arc<PhasedProgram>,
    clients: usize,
    late_clients: Option<(usize, u64)>,
) -> IntervalJob {
    let late_threads = late_clients.map(|(count, arrival_ns)| (count as u32, arrival_ns));
    IntervalJob {
        threads: clients as u32,
        late_threads,
        ..IntervalJob::new(Arc::clone(client))
    }
}

/// The rates of every window, and the time that page migrations took.
fn collect_windows(
    context: &ExperimentContext<'_>,
    query: &WhatIfQuery,
    policy: &str,
) -> Result<(Vec<ServiceWindow>, f64)> {
    let (machine, pipeline) = crate::interval::whatif::start_query(query, policy)?;
    let (mut service_windows, mut migration_ns) = (Vec::new(), 0);
    pipeline
        .run(machine, |_, record| {
            service_windows.extend(service_window(&record));
            migration_ns = record.applied.cost_ns;
            !context.stop.load(std::sync::atomic::Ordering::Relaxed)
        })
        .map_err(failed(policy))?;
    context.check_not_stopped()?;
    Ok((
        service_windows.split_off(UNCOUNTED_START_WINDOWS.min(service_windows.len())),
        migration_ns as f64 / 1e9,
    ))
}

fn fixed_policy(colors: u32) -> String {
    format!(
        "static-partition:window_ns = 100_000_000\nsteps = [{{ shares = ['0-{}'] }}]",
        colors - 1
    )
}

/// The findings of CP-5 at nominal time.
pub(crate) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let seed = context.seeds[0];
    let machine = chip_with_cores(CLIENT_COUNT as u32)?;
    context.report_progress("INTERVAL-7: a client alone");
    let measured_program = measure(
        &crate::cp::thesis_job("warehouses", seed),
        &machine,
        HOUR_PROFILE_CYCLES,
        PHASE_STRETCH,
    )?;
    let client = Arc::new(PhasedProgram {
        progress_per_instr: Some(1.0 / INSTRUCTIONS_OF_AN_OPERATION),
        ..measured_program
    });

    let phase_ns = context.pick(30_000_000_000, 120_000_000_000);
    let query_of_job = |job: IntervalJob, length_ns: u64| WhatIfQuery {
        length_ns,
        ..build_query(context, &machine, vec![job], seed)
    };
    let measure_rate = |colors: u32, clients: usize| {
        let (service_windows, _) = collect_windows(
            context,
            &query_of_job(server_job(&client, clients, None), phase_ns),
            &fixed_policy(colors),
        )?;
        Ok::<_, ReproError>(mean(service_windows.iter().map(|window| window.rate_per_s)))
    };

    let small_share_colors = 1;
    let rate_level = LEVEL_SHARE * measure_rate(small_share_colors, FIRST_CLIENT_COUNT)?;
    let mut reachable_colors = None;
    for colors in small_share_colors..=COLORS {
        if reachable_colors.is_none() && measure_rate(colors, CLIENT_COUNT)? >= rate_level {
            reachable_colors = Some(colors);
        }
    }

    let changing_load_query = query_of_job(
        server_job(
            &client,
            CLIENT_COUNT,
            Some((CLIENT_COUNT - FIRST_CLIENT_COUNT, phase_ns)),
        ),
        2 * phase_ns,
    );
    let policy = format!(
        "service-level:rate_per_s = {rate_level:?}\nunits = {small_share_colors}\nshrink_after = 4"
    );
    let (managed_windows, migration_seconds) =
        collect_windows(context, &guarded_query(&changing_load_query), &policy)?;
    let service_run = ServiceRun {
        level: rate_level,
        reachable: reachable_colors.is_some(),
        small: small_share_colors,
        large: reachable_colors.unwrap_or(COLORS),
        managed: managed_windows,
        static_small: collect_windows(
            context,
            &changing_load_query,
            &fixed_policy(small_share_colors),
        )?
        .0,
        static_large: collect_windows(
            context,
            &changing_load_query,
            &fixed_policy(reachable_colors.unwrap_or(COLORS)),
        )?
        .0,
    };
    Ok(vec![service_finding(&service_run, migration_seconds, seed)])
}

fn service_finding(service_run: &ServiceRun, migration_seconds: f64, seed: u64) -> Finding {
    let mean_colors = mean(
        service_run
            .managed
            .iter()
            .map(|window| f64::from(window.colors)),
    );
    let missed_count = service_run
        .miss_flags(&service_run.managed)
        .iter()
        .filter(|missed| **missed)
        .count();
    let rate_series = "rate of four clients over the level, %";
    let single_point =
        |series: &str, at: String, value: f64| DataPoint::from_values(series, at, [value]);
    let points = vec![
        single_point(
            rate_series,
            format!("static {}", service_run.small),
            service_run.level_deviation_percent(&service_run.static_small),
        ),
        single_point(
            rate_series,
            "resized".to_string(),
            service_run.level_deviation_percent(&service_run.managed),
        ),
        single_point(
            rate_series,
            format!("static {}", service_run.large),
            service_run.level_deviation_percent(&service_run.static_large),
        ),
        single_point(
            "colors, mean over the run",
            "resized".to_string(),
            mean_colors,
        ),
        single_point(
            "windows below the level, in all",
            "resized".to_string(),
            missed_count as f64,
        ),
        single_point("page moves, s", "resized".to_string(), migration_seconds),
    ];
    Finding::declared("interval-7-windows-below", &[(seed, service_run.unexcused_count() as f64)])
    .with_points(points)
    .with_note(format!(
        "L3 off, the interval machine, windows of 100 ms, {} of them. With {} colors four clients reach the level{}.",
        service_run.managed.len(),
        service_run.large,
        if service_run.reachable { "" } else { "; they do not with any" },
    ))
    .with_figure(draw_service_figure(service_run, "interval-7-service"))
}
