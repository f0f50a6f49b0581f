//! Part (b): do gangs that the policy chooses from its own measurements speed up the victims, slow down the
//! aggressors only slightly, and do no harm if the CPUs share no cache?
//!
//! Two chases over an eighth of the cache (more than a private cache holds) and two streams over three times the
//! cache run all the time on two CPUs. Blocks under the policy alternate with blocks under the kernel's own
//! placement. Each sample is the work of one second between two ping-pongs; samples are sorted by whether the CPUs
//! shared a cache.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use cachemate_core::median;
use cachemate_daemon::host::{self, HostSurvey, LiveLoop, LiveRunOptions};
use cachemate_linux::act::rules::{ManageAction, ManageRule};
use cachemate_linux::sense::progress::ProgressReports;
use cachemate_spec::{ManageConfig, ManageMode, PolicyChoice};

use crate::bench_host::{BenchHost, BenchRow, BenchVerdict, sample_between_ping_pongs};
use crate::programs::Actor;

/// Minimum number of valid samples of an arm.
const MIN_SAMPLES: usize = 30;
/// Samples in a block; the first of each block is discarded.
const BLOCK_SAMPLES: usize = 6;
/// Maximum time in which the policy must probe every program.
const MAX_LEARNING_TIME: Duration = Duration::from_secs(90);

/// Samples of one arm: work per second, by program and sample.
#[derive(Default)]
struct GangArm {
    rates: Vec<[f64; 4]>,
}

impl GangArm {
    fn median_rate(&self, program: usize) -> Option<f64> {
        median(
            &self
                .rates
                .iter()
                .map(|rates| rates[program])
                .collect::<Vec<_>>(),
        )
    }
}

/// Managed and unmanaged samples, with a shared cache and without.
#[derive(Default)]
struct GangArms {
    managed_arms: [GangArm; 2],
    unmanaged_arms: [GangArm; 2],
    unclear_count: usize,
    /// Number of managed windows with gangs in force, and of all managed windows, by sharing.
    gang_windows: [(usize, usize); 2],
}

/// Measures part (b): gangs.
///
/// # Errors
/// A program cannot be started, or the host cannot be managed.
pub fn bench_rows(
    bench_host: &BenchHost,
    host_survey: &HostSurvey,
) -> anyhow::Result<Vec<BenchRow>> {
    let small_bytes = (bench_host.cache_bytes / 8)
        .max(2 * bench_host.private_bytes)
        .min(bench_host.cache_bytes / 2);
    let large_bytes = bench_host.cache_bytes * 3;
    let programs = [
        ("chase-1", "chase", small_bytes),
        ("stream-1", "stream", large_bytes),
        ("chase-2", "chase", small_bytes),
        ("stream-2", "stream", large_bytes),
    ];
    let actors = programs
        .iter()
        .map(|(name, kind, bytes)| Actor::start_own(bench_host, name, kind, *bytes))
        .collect::<Result<Vec<_>, _>>()?;
    for actor in &actors {
        actor.set_affinity(&[bench_host.cpus.0, bench_host.cpus.1])?;
    }
    wait_until_working(bench_host, &actors);
    let solo_rates = measure_solo_rates(bench_host, &actors);
    let mut live_loop = open_control_loop(bench_host, host_survey, &actors)?;
    let probing_time = wait_until_probed(bench_host, &mut live_loop)?;
    let mut arms = GangArms::default();
    let mut forecast_slowdowns = (None, None);
    let mut is_managed_block = true;
    while !bench_host.is_stopped() && !is_complete(&arms) {
        if is_managed_block {
            run_managed_block(
                bench_host,
                &mut live_loop,
                &actors,
                &mut arms,
                &mut forecast_slowdowns,
            )?;
        } else {
            live_loop.machine.restore_all()?;
            run_unmanaged_block(bench_host, &actors, &mut arms);
        }
        is_managed_block = !is_managed_block;
    }
    live_loop.machine.restore_all()?;
    Ok(gang_rows(
        &arms,
        &solo_rates,
        probing_time,
        forecast_slowdowns,
    ))
}

fn is_complete(arms: &GangArms) -> bool {
    let has_enough = |index: usize| {
        arms.managed_arms[index].rates.len() >= MIN_SAMPLES
            && arms.unmanaged_arms[index].rates.len() >= MIN_SAMPLES
    };
    has_enough(1)
        && (has_enough(0)
            || arms.managed_arms[0].rates.len() + arms.unmanaged_arms[0].rates.len() < 4)
}

/// Waits until all programs report work, because they first allocate their memory.
fn wait_until_working(bench_host: &BenchHost, actors: &[Actor]) {
    let start = Instant::now();
    while actors.iter().any(|actor| actor.read_work() == 0)
        && start.elapsed() < Duration::from_secs(60)
        && !bench_host.is_stopped()
    {
        bench_host.sleep_unless_stopped(Duration::from_millis(100));
    }
}

/// Work per second of each program when it has a CPU and the cache to itself.
fn measure_solo_rates(bench_host: &BenchHost, actors: &[Actor]) -> Vec<Option<f64>> {
    let mut solo_rates = Vec::new();
    for actor in actors {
        actors
            .iter()
            .for_each(|other| other.set_running(other.pid() == actor.pid()));
        bench_host.sleep_unless_stopped(Duration::from_millis(300));
        let mut rates = Vec::new();
        for _ in 0..8 {
            let (sharing_state, rate) = sample_between_ping_pongs(bench_host.cpus, || {
                measure_rates(
                    bench_host,
                    std::slice::from_ref(actor),
                    Duration::from_millis(400),
                )[0]
            });
            rates.extend(sharing_state.map(|_| rate));
        }
        solo_rates.push(median(&rates));
    }
    actors.iter().for_each(|actor| actor.set_running(true));
    solo_rates
}

fn measure_rates(bench_host: &BenchHost, actors: &[Actor], duration: Duration) -> Vec<f64> {
    let (work_before, start) = (
        actors.iter().map(Actor::read_work).collect::<Vec<_>>(),
        Instant::now(),
    );
    bench_host.sleep_unless_stopped(duration);
    let seconds = start.elapsed().as_secs_f64();
    actors
        .iter()
        .zip(work_before)
        .map(|(actor, count_before)| {
            actor.read_work().saturating_sub(count_before) as f64 / seconds
        })
        .collect()
}

fn open_control_loop(
    bench_host: &BenchHost,
    host_survey: &HostSurvey,
    actors: &[Actor],
) -> anyhow::Result<LiveLoop> {
    let config = ManageConfig {
        mode: ManageMode::Act,
        policy: Some(PolicyChoice {
            name: "intensity-gangs".to_string(),
            parameters: Default::default(),
        }),
        window_ms: Some(1000),
        ..ManageConfig::default()
    };
    let rule = |actor: &Actor| ManageRule {
        pid: Some(actor.pid()),
        action: ManageAction::Manage(None),
        ..ManageRule::default()
    };
    let options = LiveRunOptions {
        config,
        rules: actors.iter().map(rule).collect(),
        state_dir: bench_host.work_dir.join("state"),
        progress: ProgressReports::in_dir(bench_host.work_dir.join("progress")),
        learned_profiles: Default::default(),
        runtime: None,
        stop: bench_host.stop_flag.clone(),
        wake: Arc::new(AtomicBool::new(false)),
    };
    Ok(host::build_live_run(host_survey, &options)?.control_loop)
}

/// Runs until every program has been probed. Returns the time, or `None` if the deadline passed first.
fn wait_until_probed(
    bench_host: &BenchHost,
    live_loop: &mut LiveLoop,
) -> anyhow::Result<Option<Duration>> {
    let start = Instant::now();
    while start.elapsed() < MAX_LEARNING_TIME && !bench_host.is_stopped() {
        if live_loop.step()?.is_none() {
            return Ok(None);
        }
        let is_probed = |profile: &cachemate_core::Profile| {
            profile.contention.intensity.is_some() && profile.contention.sensitivity.is_some()
        };
        if live_loop.profiles().len() == 4 && live_loop.profiles().values().all(is_probed) {
            return Ok(Some(start.elapsed()));
        }
    }
    Ok(None)
}

fn work_counts(actors: &[Actor]) -> [f64; 4] {
    std::array::from_fn(|index| actors[index].read_work() as f64)
}

fn sample_programs<T>(
    bench_host: &BenchHost,
    actors: &[Actor],
    arms: &mut GangArms,
    step: impl FnOnce() -> T,
) -> (Option<bool>, [f64; 4], T) {
    let (sharing_state, (rates, step_result)) = sample_between_ping_pongs(bench_host.cpus, || {
        let (counts_before, start) = (work_counts(actors), Instant::now());
        let out = step();
        let (counts_after, seconds) = (work_counts(actors), start.elapsed().as_secs_f64());
        (
            std::array::from_fn(|index| (counts_after[index] - counts_before[index]) / seconds),
            out,
        )
    });
    arms.unclear_count += usize::from(sharing_state.is_none());
    (sharing_state, rates, step_result)
}

fn run_managed_block(
    bench_host: &BenchHost,
    live_loop: &mut LiveLoop,
    actors: &[Actor],
    arms: &mut GangArms,
    forecast_slowdowns: &mut (Option<f64>, Option<f64>),
) -> anyhow::Result<()> {
    for index in 0..BLOCK_SAMPLES {
        let (sharing_state, rates, record) =
            sample_programs(bench_host, actors, arms, || live_loop.step());
        let Some(record) = record? else { return Ok(()) };
        for (name, value) in record
            .decision
            .reasons
            .iter()
            .flat_map(|reason| &reason.numbers)
        {
            match name.as_str() {
                "ungrouped_mean_slowdown" => forecast_slowdowns.0 = Some(*value),
                "ganged_mean_slowdown" => forecast_slowdowns.1 = Some(*value),
                _ => {}
            }
        }
        if let Some(shared) = sharing_state.filter(|_| index > 0) {
            let sharing_index = usize::from(shared);
            arms.managed_arms[sharing_index].rates.push(rates);
            arms.gang_windows[sharing_index].0 += usize::from(!record.applied.gangs.is_empty());
            arms.gang_windows[sharing_index].1 += 1;
        }
    }
    Ok(())
}

fn run_unmanaged_block(bench_host: &BenchHost, actors: &[Actor], arms: &mut GangArms) {
    for index in 0..BLOCK_SAMPLES {
        let (sharing_state, rates, ()) = sample_programs(bench_host, actors, arms, || {
            bench_host.sleep_unless_stopped(Duration::from_secs(1))
        });
        if let Some(shared) = sharing_state.filter(|_| index > 0) {
            arms.unmanaged_arms[usize::from(shared)].rates.push(rates);
        }
    }
}

const VICTIMS: [usize; 2] = [0, 2];
const AGGRESSORS: [usize; 2] = [1, 3];

fn gang_rows(
    arms: &GangArms,
    solo_rates: &[Option<f64>],
    probing_time: Option<Duration>,
    forecast_slowdowns: (Option<f64>, Option<f64>),
) -> Vec<BenchRow> {
    let mut rows = Vec::new();
    let measured = probing_time.map_or("not all tasks were probed in time".to_string(), |time| {
        format!("{:.0} s", time.as_secs_f64())
    });
    rows.push(BenchRow::new(
        "b",
        "until all tasks were probed",
        "",
        measured,
        BenchVerdict::Reported,
    ));
    let sample_counts = |sharing_index: usize| {
        (
            arms.managed_arms[sharing_index].rates.len(),
            arms.unmanaged_arms[sharing_index].rates.len(),
        )
    };
    let gang_text = format!(
        "gangs in {} of {} windows while shared, {} of {} while split",
        arms.gang_windows[1].0,
        arms.gang_windows[1].1,
        arms.gang_windows[0].0,
        arms.gang_windows[0].1
    );
    rows.push(BenchRow::new(
        "b",
        "what the policy chose",
        "",
        gang_text,
        BenchVerdict::Reported,
    ));
    let (managed_count, unmanaged_count) = sample_counts(1);
    if managed_count < MIN_SAMPLES || unmanaged_count < MIN_SAMPLES {
        let reason = format!(
            "{managed_count} managed and {unmanaged_count} other samples while the CPUs shared, of {MIN_SAMPLES} each ({} unclear)",
            arms.unclear_count
        );
        rows.push(BenchRow::skipped("b", "gangs while shared", reason));
    } else if let Some(reason) = relative_speeds(arms, solo_rates, 1)
        .and_then(|relative_rates| no_gain_reason(&relative_rates.1))
    {
        rows.push(BenchRow::skipped("b", "gangs while shared", reason));
    } else if let Some(relative_rates) = relative_speeds(arms, solo_rates, 1) {
        let speed_sum = |arm: &[f64; 4], programs: [usize; 2]| arm[programs[0]] + arm[programs[1]];
        let victim_speedup =
            speed_sum(&relative_rates.0, VICTIMS) / speed_sum(&relative_rates.1, VICTIMS);
        rows.push(BenchRow::from_target(
            "b",
            "victims, against the default",
            "4x",
            format!("{victim_speedup:.2}x"),
            victim_speedup >= 4.0,
        ));
        let progress_ratio = (speed_sum(&relative_rates.0, VICTIMS)
            + speed_sum(&relative_rates.0, AGGRESSORS))
            / (speed_sum(&relative_rates.1, VICTIMS) + speed_sum(&relative_rates.1, AGGRESSORS));
        rows.push(BenchRow::from_target(
            "b",
            "sum of progress, against the default",
            "1.25x",
            format!("{progress_ratio:.2}x"),
            progress_ratio >= 1.25,
        ));
        // Both programs together have the time of one CPU, so 1.00 is the speed of one program alone on it.
        let aggressor_speed = speed_sum(&relative_rates.0, AGGRESSORS);
        rows.push(BenchRow::from_target(
            "b",
            "aggressors keep of one CPU alone",
            "60 %",
            format!("{:.0} %", 100.0 * aggressor_speed),
            aggressor_speed >= 0.6,
        ));
        rows.push(forecast_row(&relative_rates, forecast_slowdowns));
    }
    let (managed_count, unmanaged_count) = sample_counts(0);
    rows.push(match relative_speeds(arms, solo_rates, 0).filter(|_| managed_count >= 8 && unmanaged_count >= 8) {
        None => BenchRow::skipped(
            "b",
            "no harm while split",
            format!("{managed_count} managed and {unmanaged_count} other samples while split, of 8 each"),
        ),
        Some(relative_rates) => {
            let ratio = relative_rates.0.iter().sum::<f64>() / relative_rates.1.iter().sum::<f64>();
            BenchRow::from_target("b", "sum of progress while split", "0.97x", format!("{ratio:.2}x"), ratio >= 0.97)
        }
    });
    rows
}

/// The reason why no gain is possible: the streams do not slow down the chases under the default placement.
fn no_gain_reason(unmanaged_speeds: &[f64; 4]) -> Option<String> {
    // Two programs share a CPU, so each can reach at most half of its solo speed.
    let retained_share = VICTIMS
        .iter()
        .map(|&victim| unmanaged_speeds[victim] / 0.5)
        .sum::<f64>()
        / VICTIMS.len() as f64;
    (retained_share > 0.8).then(|| {
        format!(
            "left alone the victims keep {:.0} % of the speed of their turns: nothing is taken from them",
            100.0 * retained_share
        )
    })
}

/// Speed of each program as a share of its solo speed: managed and unmanaged.
fn relative_speeds(
    arms: &GangArms,
    solo_rates: &[Option<f64>],
    sharing_index: usize,
) -> Option<([f64; 4], [f64; 4])> {
    let mut relative_rates = ([0.0; 4], [0.0; 4]);
    for program in 0..4 {
        let solo_rate = solo_rates
            .get(program)
            .copied()
            .flatten()
            .filter(|rate| *rate > 0.0)?;
        relative_rates.0[program] =
            arms.managed_arms[sharing_index].median_rate(program)? / solo_rate;
        relative_rates.1[program] =
            arms.unmanaged_arms[sharing_index].median_rate(program)? / solo_rate;
    }
    Some(relative_rates)
}

/// Compares the forecast with the measurement. Each program runs half of the time, so 0.5 of its solo speed means no
/// slowdown.
fn forecast_row(
    relative_rates: &([f64; 4], [f64; 4]),
    forecast_slowdowns: (Option<f64>, Option<f64>),
) -> BenchRow {
    let mean_slowdown = |shares: &[f64; 4]| {
        shares
            .iter()
            .map(|share| 0.5 / share.max(1e-9) - 1.0)
            .sum::<f64>()
            / 4.0
    };
    let format_percent = |value: Option<f64>| {
        value.map_or("-".to_string(), |value| format!("{:.0} %", 100.0 * value))
    };
    let measured = format!(
        "left alone {} by forecast, {:.0} % measured; in gangs {}, {:.0} % measured",
        format_percent(forecast_slowdowns.0),
        100.0 * mean_slowdown(&relative_rates.1),
        format_percent(forecast_slowdowns.1),
        100.0 * mean_slowdown(&relative_rates.0)
    );
    BenchRow::new(
        "b",
        "mean slowdown, forecast and measured",
        "",
        measured,
        BenchVerdict::Reported,
    )
}
