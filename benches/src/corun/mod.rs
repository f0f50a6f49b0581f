//! `cachemate-bench corun`: what the forecasts of this host are worth, on real programs.
//!
//! Forecasts are right about machines that we simulate, and a user cares about the one here, whose
//! caches nobody has described. So programs with a fixed amount of work (own kernels at sizes
//! below, near and above the shared cache, and programs of the distribution) are recorded and
//! forecast first. Then each runs on one CPU, in turns beside another program and beside an
//! arithmetic loop that touches no memory, on a CPU of the same cache. User and system time counts,
//! so that waits for a CPU do not. A pair's slowdown is the median over rounds of its time over
//! that beside the loop in the same round, with a bootstrap interval over rounds.
//!
//! For example, on a guest whose processor belongs to others for 60 ms of each second, a run of
//! half a second scatters by 20 %, and a pair needs thirty rounds or more where a quiet host needs
//! five. The turns beside the loop gauge such neighbors: if they scatter, so do the pairs'
//! intervals, and such a pair gets more rounds until its interval is narrow or the time is over.
//! A hypervisor may also move the guest's CPUs to different caches. So each round looks before and after whether they
//! share one; rounds in which they did not, or were moved, are left out, and the forecast is that for CPUs that share.
//!
//! A program is forecast beside its companions right before it is measured, because what other guests do to the cache
//! changes by the minute, and a user runs what was forecast now. The forecast changes nothing in the measurement. Pairs
//! whose interval is wider than ten points are counted as not measurable here, not as right or wrong.

mod report;
mod turns;
mod workloads;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_core::{CpuId, MachineSpec, SplitMix64, median, quantile};
use cachemate_daemon::{end_with_parent, host};
use cachemate_linux::sense::probes::PinnedThread;
use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde::Serialize;

use self::report::CorunReport;
use self::turns::{MeasuredProgram, TurnTaker};
use self::workloads::{CorunProgram, CorunProgramSet};
use crate::bench_host::{run_command, sample_between_ping_pongs};
use crate::live::{find_command, find_two_cpus};

/// Forecast slowdowns of pairs of real programs on this host, then measure them
#[derive(Args)]
pub struct CorunBench {
    /// Maximum total time
    #[arg(long, value_name = "MINUTES", default_value_t = 15.0)]
    minutes: f64,
    /// Selects programs, sizes and pairs
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of programs
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=60))]
    programs: u32,
    /// Companions of each program
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=20))]
    companions: u32,
    /// Directory of the table, the JSON and the picture, which must exist
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The cachemate command whose forecasts are checked [default: the one beside this program]
    #[arg(long, value_name = "PATH")]
    cachemate: Option<PathBuf>,
    /// Print one JSON object on standard output and nothing else
    #[arg(long)]
    json: bool,
}

/// One program alone: what was forecast, and what was measured.
#[derive(Clone, Debug, Serialize)]
pub struct CorunSolo {
    pub program: String,
    /// Instructions of a run in user space.
    pub instructions: f64,
    /// Cycles per instruction.
    pub forecast: f64,
    /// User time beside the arithmetic loop in cycles of the calibrated clock, per instruction; the lower quartile over rounds,
    /// as calibrated figures are those of their samples. The kernel's time belongs to instructions that are not recorded:
    /// a server that answers over sockets spends most of its time there. `None` if the time ended before.
    pub measured: Option<f64>,
}

/// One pair: what was forecast, and what was measured.
#[derive(Clone, Debug, Serialize)]
pub struct CorunPair {
    pub program: String,
    pub beside: String,
    /// Slowdown in percent with its 90 % interval, on CPUs that share a cache.
    pub forecast: PercentInterval,
    /// Slowdown in percent with its 90 % bootstrap interval, over rounds in which the CPUs shared a cache; `None` if
    /// there were too few.
    pub measured: Option<PercentInterval>,
    /// Times beside the arithmetic loop and beside the companion, by round.
    pub rounds: Vec<[ProcessTime; 2]>,
    /// Whether a hypervisor ran the two CPUs on different caches in each round; `None` if that could not be told, or if it
    /// moved them meanwhile.
    pub are_apart: Vec<Option<bool>>,
    /// What slows the program down if its forecast is wrong: the resource that it needs most.
    pub cause: &'static str,
}

/// The time of a process on CPUs, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct ProcessTime {
    pub user_s: f64,
    pub system_s: f64,
}

impl ProcessTime {
    pub fn total_s(self) -> f64 {
        self.user_s + self.system_s
    }
}

/// A value in percent with its interval.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct PercentInterval {
    pub value: f64,
    pub low: f64,
    pub high: f64,
}

/// Widest interval of a measured pair, in points.
pub const MAX_MEASURED_WIDTH: f64 = 10.0;
/// Rounds of each program: at least so many, at most so many if the time allows, and none after every interval is narrow.
const MIN_ROUNDS: usize = 5;
const MAX_ROUNDS: usize = 120;
/// Share of the widest interval at which a companion needs no more rounds. Stopping at a narrow interval stops at some that
/// are narrow by chance, so it has to be narrower than what counts as measured.
const NARROW_SHARE: f64 = 0.7;
/// Runs of each program beside the arithmetic loop, for its cycles per instruction.
const SOLO_RUNS: usize = 5;
/// Time after which a run that should take half a second is given up.
const MAX_RUN_TIME: Duration = Duration::from_secs(60);
/// Share of the time after which measuring ends.
const MEASURING_SHARE: f64 = 0.95;
/// What else runs on the machine only adds to a time.
const SOLO_QUANTILE: f64 = 0.25;
/// Programs are recorded from start to end, because no part of a run is its mean: the first 24 million accesses of `zstd`
/// clear its tables, and look like a stream. A run of half a second has some 500 million, and is recorded in ten seconds.
const MAX_RECORDED_ACCESSES: &str = "2000000000";

impl CorunBench {
    /// Forecasts, measures and reports.
    ///
    /// # Errors
    /// The host has no two CPUs of one cache, or too few programs can be run.
    pub fn run(&self, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
        let start = Instant::now();
        let total = Duration::from_secs_f64(60.0 * self.minutes.clamp(1.0, 240.0));
        let command = find_command(self.cachemate.as_deref())?;
        let topology = host::survey_host(false)?.topology;
        let (cpus, _) = find_two_cpus(&topology).map_err(anyhow::Error::msg)?;
        let dir = tempfile::tempdir().context("cannot create a working directory")?;
        let machine = calibrate(&command)?;
        let bench = CorunHost {
            cpus,
            hertz: machine.hertz,
            dir: dir.path().to_path_buf(),
            command,
            stop: Arc::clone(stop),
        };
        let cache_bytes = machine
            .last_level_cache()
            .context("this host has no cache that CPUs share")?
            .size_bytes;
        let mut generator = SplitMix64::new(self.seed);
        let set = CorunProgramSet::prepare(&bench, cache_bytes)?;
        let programs = set.choose(self.programs as usize, &mut generator);
        if programs.len() < 2 {
            bail!(
                "programs: found {}, expected two or more that can be run here",
                programs.len()
            );
        }
        let profiles = bench.profile(&programs)?;
        let deadline = start + total.mul_f64(MEASURING_SHARE);
        if Instant::now() >= deadline {
            bail!(
                "the recordings took {:.0} s, so that no time is left to measure: expected --minutes of more, or fewer \
                 programs",
                start.elapsed().as_secs_f64()
            );
        }

        let (mut alone, mut pairs) = (Vec::new(), Vec::new());
        for (index, program) in programs.iter().enumerate() {
            if bench.is_stopped(deadline) {
                break;
            }
            eprintln!("{} ({} of {})", program.name, index + 1, programs.len());
            let companions = draw_companions(programs.len(), self.companions, &mut generator);
            let mut members = vec![index];
            members.extend(companions.iter().filter(|companion| **companion != index));
            let (mut solo, forecasts) = bench.forecast(&programs, &profiles, &members)?;
            // A program may be its own companion.
            let drawn = members.iter().zip(forecasts);
            let mut own: Vec<CorunPair> = drawn
                .filter(|(member, _)| companions.contains(member))
                .map(|(&member, forecast)| CorunPair {
                    program: program.name.clone(),
                    beside: programs[member].name.clone(),
                    forecast,
                    measured: None,
                    rounds: Vec::new(),
                    are_apart: Vec::new(),
                    cause: program.cause,
                })
                .collect();
            let left = deadline.saturating_duration_since(Instant::now());
            let own_deadline = Instant::now() + left / (programs.len() - index) as u32;
            // What was measured before stays.
            if let Err(error) =
                bench.measure_program(&set, &programs, index, &mut solo, &mut own, own_deadline)
            {
                eprintln!("{} is given up: {error:#}", program.name);
            }
            alone.push(solo);
            pairs.extend(own);
        }
        let report = CorunReport::new(machine, alone, pairs, start.elapsed(), self.seed);
        report.print(self.json, self.out.as_deref())
    }
}

fn calibrate(command: &Path) -> anyhow::Result<MachineSpec> {
    let text = run_command(command, &["topology", "--as-machine", "--measure"])?;
    Ok(cachemate_spec::parse_machine("host", &text)?)
}

/// Draws the companions of one program among all programs.
fn draw_companions(programs: usize, companions: u32, generator: &mut SplitMix64) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..programs).collect();
    generator.shuffle(&mut columns);
    columns.truncate(companions as usize);
    columns
}

/// The host on which programs run.
pub struct CorunHost {
    /// CPUs of the measured program and of its companion.
    pub cpus: (CpuId, CpuId),
    hertz: u64,
    pub dir: PathBuf,
    command: PathBuf,
    stop: Arc<AtomicBool>,
}

impl CorunHost {
    /// Records the programs and returns their profiles.
    fn profile(&self, programs: &[CorunProgram]) -> anyhow::Result<Vec<String>> {
        let mut profiles = Vec::new();
        for program in programs {
            eprintln!("recording {}", program.name);
            let path_of = |ending: &str| {
                let path = self.dir.join(format!("{}.{ending}", program.name));
                path.display().to_string()
            };
            let (recording, profile) = (path_of("cmt"), path_of("profile.json"));
            let mut args = vec!["--quiet", "record", "--max-accesses", MAX_RECORDED_ACCESSES];
            args.extend(["--kill-at-max", "-o", &recording, "--"]);
            args.extend(program.command.iter().map(String::as_str));
            {
                let _load = self.start_load(program)?;
                run_command(&self.command, &args)
                    .with_context(|| format!("{} cannot be recorded", program.name))?;
            }
            run_command(
                &self.command,
                &["--quiet", "profile", &recording, "-o", &profile],
            )?;
            std::fs::remove_file(&recording).with_context(|| recording.clone())?;
            profiles.push(profile);
        }
        Ok(profiles)
    }

    /// Describes the host as it is now, with its CPUs on one cache, in a file.
    fn describe_sharing_host(&self) -> anyhow::Result<String> {
        let text = run_command(&self.command, &["topology", "--as-machine"])?;
        let keys = text.lines().filter(|line| !line.starts_with("apart_share"));
        let text: String = keys.flat_map(|line| [line, "\n"]).collect();
        write_input(&self.dir, "host.toml", text.as_bytes())
    }

    /// Forecasts the first of some programs alone, and its slowdown beside each of them, itself included.
    fn forecast(
        &self,
        programs: &[CorunProgram],
        profiles: &[String],
        members: &[usize],
    ) -> anyhow::Result<(CorunSolo, Vec<PercentInterval>)> {
        let machine = self.describe_sharing_host()?;
        let mut args = vec!["--quiet", "predict", "--json", "-m", &machine];
        args.extend(members.iter().map(|member| profiles[*member].as_str()));
        let text = run_command(&self.command, &args)?;
        let value: serde_json::Value = serde_json::from_str(&text)?;
        let cell = |end: &str, column: usize| {
            value["matrix"][end][0][column]
                .as_f64()
                .with_context(|| format!("matrix.{end}[0][{column}]: found no number"))
        };
        let mut forecasts = Vec::new();
        for column in 0..members.len() {
            forecasts.push(PercentInterval {
                value: cell("values", column)?,
                low: cell("low", column)?,
                high: cell("high", column)?,
            });
        }
        let name = &programs[members[0]].name;
        let number = |value: &serde_json::Value, key: &str| {
            value
                .as_f64()
                .with_context(|| format!("{key} of {name}: found no number"))
        };
        let cycles = &value["group"]["members"][0]["solo_cycles_per_instr"];
        let own = &value["programs"][0];
        let solo = CorunSolo {
            program: name.clone(),
            instructions: number(&own["instructions"], "instructions")?,
            forecast: number(cycles, "solo_cycles_per_instr")?,
            measured: None,
        };
        Ok((solo, forecasts))
    }

    fn is_stopped(&self, deadline: Instant) -> bool {
        self.stop.load(Ordering::Relaxed) || Instant::now() >= deadline
    }

    /// Measures one program alone, and then its pairs until each interval is narrow, or the time is over.
    fn measure_program(
        &self,
        set: &CorunProgramSet,
        programs: &[CorunProgram],
        row: usize,
        solo: &mut CorunSolo,
        pairs: &mut [CorunPair],
        deadline: Instant,
    ) -> anyhow::Result<()> {
        let program = &programs[row];
        let spinner = TurnTaker::start(self, &set.spinner)?;
        solo.measured = Some(self.cycles_alone(program, &spinner)? / solo.instructions);

        let mut companions = Vec::new();
        for pair in pairs.iter() {
            let companion = programs.iter().find(|program| program.name == pair.beside);
            let companion = companion.with_context(|| pair.beside.clone())?;
            companions.push(TurnTaker::start(self, companion)?);
        }
        let measured = MeasuredProgram::start(self, program)?;
        for round in 0..MAX_ROUNDS {
            let is_over = self.is_stopped(deadline) && round >= MIN_ROUNDS;
            let is_interrupted = self.stop.load(Ordering::Relaxed);
            if is_over || is_interrupted || pairs.iter().all(CorunPair::is_narrow) {
                break;
            }
            for (pair, companion) in pairs.iter_mut().zip(&companions) {
                if pair.is_narrow() {
                    continue;
                }
                let mut turns = [&spinner, companion];
                if round % 2 == 1 {
                    turns.reverse();
                }
                let (do_share, times) = sample_between_ping_pongs(self.cpus, || {
                    let [first, second] = turns;
                    let first_time = measured.time_beside(self, first)?;
                    anyhow::Ok([first_time, measured.time_beside(self, second)?])
                });
                let mut times = times?;
                if round % 2 == 1 {
                    times.reverse();
                }
                pair.rounds.push(times);
                pair.are_apart.push(do_share.map(|share| !share));
                pair.measured = pair.slowdown();
            }
        }
        Ok(())
    }

    /// User time of a run beside the arithmetic loop in cycles of the calibrated clock.
    fn cycles_alone(&self, program: &CorunProgram, spinner: &TurnTaker) -> anyhow::Result<f64> {
        let mut times_s = Vec::new();
        for _ in 0..SOLO_RUNS {
            let _turn = spinner.begin_turn()?;
            times_s.push(self.time_program(program)?.user_s);
        }
        times_s.sort_by(f64::total_cmp);
        let time_s = quantile(&times_s, SOLO_QUANTILE).context("no runs")?;
        Ok(time_s * self.hertz as f64)
    }

    /// User and system time on the first CPU, without that of its load.
    pub fn time_program(&self, program: &CorunProgram) -> anyhow::Result<ProcessTime> {
        let _load = self.start_load(program)?;
        self.time_alone(&program.command)
    }

    fn start_load(&self, program: &CorunProgram) -> anyhow::Result<Option<BackgroundGroup>> {
        let Some(load) = program.load else {
            return Ok(None);
        };
        let command = ["sh", "-c", load].map(ToString::to_string);
        let child = self.spawn(&command, self.cpus.0)?;
        Ok(Some(BackgroundGroup(child)))
    }

    /// User and system time on the first CPU, until the command ends.
    pub fn time_alone(&self, command: &[String]) -> anyhow::Result<ProcessTime> {
        let child = self.spawn(command, self.cpus.0)?;
        wait_for_time(child, &command[0])
    }

    pub fn spawn(&self, command: &[String], cpu: CpuId) -> anyhow::Result<Child> {
        use std::os::unix::process::CommandExt;
        let (program, args) = command.split_first().context("an empty command")?;
        // A child inherits the CPU of the thread that starts it.
        let _pinned = PinnedThread::new(cpu).with_context(|| format!("CPU {}", cpu.0))?;
        let mut process = Command::new(program);
        process
            .args(args)
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        end_with_parent(&mut process, Signal::KILL);
        process
            .spawn()
            .with_context(|| format!("'{program}' cannot be started"))
    }
}

impl CorunPair {
    fn rounds_where(&self, are_apart: Option<bool>) -> Vec<[ProcessTime; 2]> {
        let rounds = self.rounds.iter().zip(&self.are_apart);
        rounds
            .filter(|(_, were_apart)| **were_apart == are_apart)
            .map(|(times, _)| *times)
            .collect()
    }

    /// The rounds that count: those in which the CPUs shared a cache, or all where that can never be told.
    fn counted_rounds(&self) -> Vec<[ProcessTime; 2]> {
        let can_be_told = self.are_apart.iter().any(Option::is_some);
        self.rounds_where(can_be_told.then_some(false))
    }

    fn slowdown(&self) -> Option<PercentInterval> {
        slowdown_of(&self.counted_rounds())
    }

    fn slowdown_apart(&self) -> Option<PercentInterval> {
        slowdown_of(&self.rounds_where(Some(true)))
    }

    fn is_narrow(&self) -> bool {
        self.measured.is_some_and(|slowdown| {
            slowdown.high - slowdown.low <= NARROW_SHARE * MAX_MEASURED_WIDTH
        })
    }
}

/// Waits for a child and returns its time, with that of its own children.
///
/// # Errors
/// It fails, or does not end within [`MAX_RUN_TIME`], after which its group is killed.
fn wait_for_time(child: Child, name: &str) -> anyhow::Result<ProcessTime> {
    let (mut status, pid) = (0i32, child.id() as i32);
    let has_ended = has_ended_within(pid, MAX_RUN_TIME);
    // Its leader is not reaped yet, so that the group cannot be another's.
    if let Some(group) = Pid::from_raw(pid) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    // SAFETY: an all-zero rusage is valid, and wait4 writes only to the two variables.
    let (waited, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::wait4(pid, &raw mut status, 0, &raw mut usage), usage)
    };
    if !has_ended? {
        bail!(
            "'{name}' has run for {} s, expected about one",
            MAX_RUN_TIME.as_secs()
        );
    }
    if waited != pid || status != 0 {
        bail!("'{name}' ended with status {status}, expected 0");
    }
    let seconds = |time: libc::timeval| time.tv_sec as f64 + 1e-6 * time.tv_usec as f64;
    Ok(ProcessTime {
        user_s: seconds(usage.ru_utime),
        system_s: seconds(usage.ru_stime),
    })
}

/// Waits without reaping; returns whether the process has ended in time.
fn has_ended_within(pid: i32, patience: Duration) -> anyhow::Result<bool> {
    let pid = Pid::from_raw(pid).context("no process")?;
    let descriptor = pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
    let mut wanted = [PollFd::new(&descriptor, PollFlags::IN)];
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).context("a time")?;
        match poll(&mut wanted, Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
    }
}

/// A group of processes that is killed when this is dropped.
struct BackgroundGroup(Child);

impl BackgroundGroup {
    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let group = Pid::from_raw(self.0.id() as i32).context("no process")?;
        kill_process_group(group, signal).context("a program in the background has ended")
    }
}

impl Drop for BackgroundGroup {
    fn drop(&mut self) {
        // A group that has ended needs no signal.
        let _ = self.signal(Signal::KILL);
        let _ = self.0.wait();
    }
}

/// Median slowdown over rounds, each with the times alone and beside the companion, with its 90 % interval.
fn slowdown_of(rounds: &[[ProcessTime; 2]]) -> Option<PercentInterval> {
    let ratio = |[alone, beside]: &[ProcessTime; 2]| beside.total_s() / alone.total_s();
    let ratios: Vec<f64> = rounds.iter().map(ratio).collect();
    slowdown_interval(&ratios, ratios.len() as u64)
}

/// Median slowdown in percent, with a 90 % bootstrap interval; `None` with too few rounds.
fn slowdown_interval(ratios: &[f64], seed: u64) -> Option<PercentInterval> {
    const RESAMPLES: usize = 1000;
    if ratios.len() < MIN_ROUNDS {
        return None;
    }
    let mut generator = SplitMix64::new(seed);
    let resampled_median = |_| {
        let drawn: Vec<f64> = (0..ratios.len())
            .map(|_| ratios[generator.draw_below(ratios.len() as u64) as usize])
            .collect();
        median(&drawn).unwrap_or(f64::NAN)
    };
    let mut medians: Vec<f64> = (0..RESAMPLES).map(resampled_median).collect();
    medians.sort_by(f64::total_cmp);
    let percent = |ratio: f64| 100.0 * (ratio - 1.0);
    Some(PercentInterval {
        value: percent(median(ratios)?),
        low: percent(medians[RESAMPLES / 20]),
        high: percent(medians[RESAMPLES - 1 - RESAMPLES / 20]),
    })
}

/// Writes a file below the working directory and returns its path.
pub fn write_input(dir: &Path, name: &str, bytes: &[u8]) -> anyhow::Result<String> {
    let path = dir.join(name);
    std::fs::write(&path, bytes)
        .with_context(|| format!("{}: cannot be written", path.display()))?;
    Ok(path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the interval of equal rounds a point, that of scattered rounds wide, and two rounds no measurement?
    #[test]
    fn scattered_rounds_have_a_wide_interval() {
        let calm = slowdown_interval(&[1.1; 5], 1).unwrap();
        assert!((calm.value - 10.0).abs() < 1e-9 && calm.high - calm.low < 1e-9);
        let scattered = slowdown_interval(&[1.0, 1.1, 1.2, 1.3, 1.4], 1).unwrap();
        assert!((scattered.value - 20.0).abs() < 1e-9);
        assert!(
            scattered.high - scattered.low > MAX_MEASURED_WIDTH,
            "{scattered:?}"
        );
        assert_eq!(slowdown_interval(&[1.0, 1.0], 1), None);
    }

    /// Is a program that does not end given up, and is one that ends waited for?
    #[test]
    fn a_program_that_does_not_end_is_given_up() {
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(!has_ended_within(pid, Duration::from_millis(20)).unwrap());
        child.kill().unwrap();
        assert!(has_ended_within(pid, Duration::from_secs(60)).unwrap());
        child.wait().unwrap();
    }

    fn pair(rounds: Vec<[f64; 2]>, are_apart: Vec<Option<bool>>) -> CorunPair {
        let time = |user_s| ProcessTime {
            user_s,
            system_s: 0.0,
        };
        let mut pair = CorunPair {
            program: "a".to_string(),
            beside: "b".to_string(),
            forecast: PercentInterval {
                value: 0.0,
                low: 0.0,
                high: 0.0,
            },
            measured: None,
            rounds: rounds.into_iter().map(|times| times.map(time)).collect(),
            are_apart,
            cause: "cache",
        };
        pair.measured = pair.slowdown();
        pair
    }

    /// Does a pair get more rounds until its interval is narrow, and none after?
    #[test]
    fn a_pair_is_measured_until_its_interval_is_narrow() {
        let mut generator = SplitMix64::new(5);
        let mut rounds = Vec::new();
        while !pair(rounds.clone(), vec![None; rounds.len()]).is_narrow() {
            let noise = generator.draw_below(1000) as f64 / 1000.0 - 0.5;
            rounds.push([1.0, 1.1 + 0.3 * noise]);
        }
        assert!(
            (MIN_ROUNDS + 5..MAX_ROUNDS).contains(&rounds.len()),
            "{}",
            rounds.len()
        );
        let slowdown = pair(rounds.clone(), vec![None; rounds.len()])
            .measured
            .unwrap();
        assert!((slowdown.value - 10.0).abs() < 6.0, "{slowdown:?}");
    }

    /// Are rounds left out in which the CPUs were on different caches, or were moved?
    #[test]
    fn rounds_on_different_caches_are_left_out() {
        let (mut rounds, mut are_apart) = (Vec::new(), Vec::new());
        for look in [Some(false), Some(true), None].into_iter().cycle().take(18) {
            rounds.push([1.0, if look == Some(false) { 1.5 } else { 1.0 }]);
            are_apart.push(look);
        }
        let measured = pair(rounds.clone(), are_apart).measured.unwrap();
        assert!((measured.value - 50.0).abs() < 1e-9, "{measured:?}");
        assert_eq!(pair(rounds, vec![Some(true); 18]).measured, None);
    }

    /// Does a companion run in its turns only, and a program that counts its work only beside it?
    #[test]
    fn a_program_is_measured_in_turns() {
        let dir = tempfile::tempdir().unwrap();
        let topology = host::survey_host(false).unwrap().topology;
        let cpu = topology.cpus[0].id;
        let host = CorunHost {
            cpus: (cpu, cpu),
            hertz: 1_000_000_000,
            dir: dir.path().to_path_buf(),
            command: PathBuf::new(),
            stop: Arc::default(),
        };
        let kernels = workloads::compile_kernels(&host).unwrap();
        let units = 1_000_000;
        let spinner = workloads::kernel(&kernels, "spin", "spin".to_string(), 0, units, "cache");
        let chase = workloads::kernel(&kernels, "chase", "chase".to_string(), 0, units, "cache");
        let companion = TurnTaker::start(&host, &spinner).unwrap();
        let measured = MeasuredProgram::start(&host, &chase).unwrap();
        let MeasuredProgram::Counted(counted) = &measured else {
            panic!("a kernel counts its work");
        };

        let before = counted.done_units().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(counted.done_units().unwrap(), before);
        let time = measured.time_beside(&host, &companion).unwrap();
        // A million steps within the first cache, at some nanoseconds each.
        assert!((1e-4..1.0).contains(&time.user_s), "{time:?}");
        let after = counted.done_units().unwrap();
        assert!(after > before);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(counted.done_units().unwrap(), after);
    }
}
