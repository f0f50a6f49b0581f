//! Parts (d) to (g): page colors applied to unmodified programs.
//!
//! Colors are worth their price if a program on half of them runs beside a stream as it does alone,
//! if no page is lost while it changes them, and if real programs do not notice. (d) compares a
//! chase beside a stream on ordinary frames with the same pair on separate halves of the colors;
//! every sample lies between two ping-pongs. (e) checks two counting threads while their pages
//! change color. (f) compares the output of confined real programs with their ordinary output. (g)
//! measures the run time of a real program on ever fewer colors, beside its recorded misses.
//!
//! For example, on a guest at load 8 to 12 a victim of 4 MiB beside a stream ran at 38 % of its
//! solo speed on ordinary frames and at 96 % on half of the colors; on a quiet one at 101 and 100
//! %, because the other guests evict as many lines as a stream of one's own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use cachemate_core::{CpuId, median};
use cachemate_daemon::colored_program::{ColoredCommand, ColoredProgram, available_bytes};
use cachemate_linux::act::colors::ColorError;
use cachemate_linux::act::colors::agents::AgentReport;
use cachemate_linux::act::colors::map::ColorMap;
use cachemate_linux::act::colors::migration;
use cachemate_linux::act::colors::reference_set::{self, BASE};
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::sense::progress::PROGRESS_VARIABLE;
use rustix::process::Signal;

use crate::bench_host::{
    BenchHost, BenchRow, BenchVerdict, run_command, sample_between_ping_pongs,
};
use crate::programs::Actor;
use crate::ranking::{is_installed, recorded_curve, write_inputs};

const SAMPLES_PER_ARM: usize = 30;
const SAMPLE_TIME: Duration = Duration::from_millis(150);
/// Time in which caches settle after a program starts or stops.
const SETTLING_TIME: Duration = Duration::from_millis(60);
const STREAM_BYTES: u64 = 96 << 20;
const NO_TIME_REASON: &str = "no time was left";
/// Maximum time in which a program must start.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Measures parts (d) to (g): page colors.
///
/// # Errors
/// A program cannot be started, or inputs cannot be written.
pub fn bench_rows(bench_host: &BenchHost) -> anyhow::Result<Vec<BenchRow>> {
    let skipped_rows = |reason: String| Ok(vec![BenchRow::skipped("d-g", "page colors", reason)]);
    if let Err(missing) = migration::measure_page_move_ns_with_frames() {
        return skipped_rows(missing.to_string());
    }
    let color_count = match ensure_color_count(bench_host) {
        Ok(colors) => colors,
        Err(error) => return skipped_rows(format!("{error:#}")),
    };
    write_inputs(bench_host)?;
    let half_mask = (1u64 << (color_count / 2)) - 1;
    let other_mask = half_mask << (color_count / 2);
    let mut rows = vec![coverage_row()];
    rows.extend(BenchRow::rows_or_skipped(
        "d",
        "a partition beside a stream",
        measure_partition(bench_host, half_mask, other_mask),
    ));
    rows.push(verification_row());
    rows.extend(BenchRow::rows_or_skipped(
        "e",
        "re-coloring while it runs",
        measure_recoloring(bench_host, half_mask, other_mask),
    ));
    rows.extend(BenchRow::rows_or_skipped(
        "f",
        "real programs, colored",
        measure_real_programs(bench_host, half_mask),
    ));
    rows.extend(BenchRow::rows_or_skipped(
        "g",
        "time against colors",
        measure_curve(bench_host, color_count),
    ));
    Ok(rows)
}

/// Number of colors of the reference set. If the set is not usable, the shipped command discovers the colors first.
fn ensure_color_count(bench_host: &BenchHost) -> anyhow::Result<u32> {
    if let Err(ColorError::NoReferenceSet(_) | ColorError::BadReferenceSet(..)) =
        reference_set::open(Path::new(BASE))
    {
        run_command(
            &bench_host.command,
            &["--quiet", "page-color", "discover", "--memory", "64M"],
        )?;
    }
    Ok(reference_set::open(Path::new(BASE))?.frames.colors())
}

/// The effect that page colors can have on this host.
fn coverage_row() -> BenchRow {
    const TITLE: &str = "what colors confine on this host";
    let coverage_text = ColorMap::open_for_host(Path::new(BASE)).map(|map| {
        let describe = |is_partitioned: Option<bool>| match is_partitioned {
            Some(true) => "yes",
            Some(false) => "no",
            None => "unknown",
        };
        let last_level_text = map
            .last_level
            .map_or("none", |last| describe(last.is_partitioned));
        format!(
            "private cache: {}, last level: {last_level_text}",
            describe(map.private.is_partitioned)
        )
    });
    BenchRow::new(
        "d",
        TITLE,
        "",
        coverage_text.unwrap_or_else(|error| error.to_string()),
        BenchVerdict::Reported,
    )
}

/// Verifies that the reference frames still have one color each after their use.
fn verification_row() -> BenchRow {
    let opened_set = reference_set::open(Path::new(BASE));
    let measured = opened_set
        .as_ref()
        .map_or_else(ToString::to_string, |reference_set| {
            format!(
                "hit {} cycles, miss {}",
                reference_set.calibration.hit_cycles, reference_set.calibration.miss_cycles
            )
        });
    BenchRow::from_target(
        "d",
        "colors verified again after use",
        "every color",
        measured,
        opened_set.is_ok(),
    )
}

/// Starts a program on frames of these colors. The program is killed when the bench ends.
fn start_colored(
    command: &[String],
    mask: u64,
    output: &Path,
    variables: &[(&str, &Path)],
) -> anyhow::Result<ColoredProgram> {
    let max_held_bytes = available_bytes().unwrap_or(1 << 30) / 4;
    ColoredProgram::start(&ColoredCommand {
        command,
        mask,
        hold_bytes: max_held_bytes,
        variables,
        output: Some(output),
        ends_with_parent: true,
    })
}

/// A confined load program that counts its work.
struct ColoredRun {
    program: ColoredProgram,
    report_path: PathBuf,
}

impl ColoredRun {
    fn start(bench_host: &BenchHost, name: &str, args: &[&str], mask: u64) -> anyhow::Result<Self> {
        let report_path = bench_host.work_dir.join(format!("colored-{name}"));
        std::fs::write(&report_path, 0u64.to_ne_bytes())?;
        let own_path = std::env::current_exe().context("this program's own file is not found")?;
        let mut command = vec![own_path.display().to_string(), "load".to_string()];
        command.extend(args.iter().map(ToString::to_string));
        let output = bench_host.work_dir.join(format!("colored-{name}.out"));
        let mut program = start_colored(
            &command,
            mask,
            &output,
            &[(PROGRESS_VARIABLE, report_path.as_path())],
        )?;
        program.wait_until_ready(START_TIMEOUT)?;
        Ok(ColoredRun {
            program,
            report_path,
        })
    }

    fn read_work(&self) -> u64 {
        let bytes = std::fs::read(&self.report_path).unwrap_or_default();
        bytes
            .get(..8)
            .and_then(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?)))
            .unwrap_or(0)
    }

    fn set_running(&self, is_running: bool) {
        self.program.signal(if is_running {
            Signal::CONT
        } else {
            Signal::STOP
        });
    }

    fn bind_to(&self, cpu: CpuId) -> std::io::Result<()> {
        LinuxHost::new("/").set_affinity(self.program.pid(), &[cpu.0].into_iter().collect())
    }
}

fn measure_partition(
    bench_host: &BenchHost,
    half_mask: u64,
    other_mask: u64,
) -> anyhow::Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    let stream = Actor::start_own(bench_host, "stream", "stream", STREAM_BYTES)?;
    let mut colored_stream = ColoredRun::start(
        bench_host,
        "stream",
        &["stream", &STREAM_BYTES.to_string()],
        other_mask,
    )?;
    stream.set_affinity(&[bench_host.cpus.1])?;
    colored_stream.bind_to(bench_host.cpus.1)?;
    for (bytes, min_colored_share, max_plain_share) in
        [(4u64 << 20, 0.85, 0.30), (6 << 20, 0.80, 1.0)]
    {
        let bytes_text = bytes.to_string();
        let victim = Actor::start_own(bench_host, "victim", "chase", bytes)?;
        let mut colored_victim =
            ColoredRun::start(bench_host, "victim", &["chase", &bytes_text], half_mask)?;
        victim.set_affinity(&[bench_host.cpus.0])?;
        colored_victim.bind_to(bench_host.cpus.0)?;
        wait_until_warm(
            bench_host,
            &[
                &|| victim.read_work(),
                &|| stream.read_work(),
                &|| colored_victim.read_work(),
                &|| colored_stream.read_work(),
            ],
        );
        let samples = sample_arms(
            bench_host,
            (&victim, &colored_victim),
            (&stream, &colored_stream),
        );
        rows.extend(partition_rows(
            bytes,
            min_colored_share,
            max_plain_share,
            &samples,
        ));
        for (name, actor) in [
            ("victim", &mut colored_victim),
            ("stream", &mut colored_stream),
        ] {
            let title = format!(
                "resident frames of the {name} in allowed classes, {} MiB victim",
                bytes >> 20
            );
            rows.push(match actor.program.poll_resident_pages().and_then(|pages| Some((pages, pages.allowed_anonymous_share()?))) {
                None => BenchRow::skipped("d", &title, "its page map cannot be read".to_string()),
                Some((resident_pages, share)) => {
                    let measured = format!(
                        "{:.2} % of the {} pages of its anonymous mappings ({} of them cannot be colored); {:.2} % of all that are its own, with {} copied from files, which cannot be moved; beside them {} held, {} of files",
                        100.0 * share,
                        resident_pages.anonymous_pages(),
                        resident_pages.excluded_pages,
                        100.0 * resident_pages.allowed_own_share().unwrap_or(0.0),
                        resident_pages.copied_pages,
                        resident_pages.held_pages,
                        resident_pages.file_pages
                    );
                    BenchRow::from_target("d", &title, "99 %", measured, share >= 0.99)
                }
            });
        }
    }
    Ok(rows)
}

/// Waits until every program has allocated its memory and reports work.
fn wait_until_warm(bench_host: &BenchHost, work_readers: &[&dyn Fn() -> u64]) {
    let start = Instant::now();
    while work_readers.iter().any(|read_work| read_work() == 0)
        && start.elapsed() < START_TIMEOUT
        && !bench_host.is_stopped()
    {
        bench_host.sleep_unless_stopped(Duration::from_millis(50));
    }
}

/// The measured samples of the victim, of which only those count during which the CPUs shared a last-level cache.
#[derive(Default)]
struct ArmSamples {
    /// Rates alone on ordinary frames, alone on colors, beside the stream on ordinary frames, and beside it on colors.
    rates_by_arm: [Vec<f64>; 4],
    /// Samples that were left out.
    dropped_count: usize,
}

fn sample_arms(
    bench_host: &BenchHost,
    victims: (&Actor, &ColoredRun),
    streams: (&Actor, &ColoredRun),
) -> ArmSamples {
    let mut samples = ArmSamples::default();
    let run_all = |is_running: bool| {
        [victims.0, streams.0]
            .into_iter()
            .for_each(|ordinary| ordinary.set_running(is_running));
        [victims.1, streams.1]
            .into_iter()
            .for_each(|colored| colored.set_running(is_running));
    };
    for round in 0..4 * SAMPLES_PER_ARM + SAMPLES_PER_ARM {
        let mut arms = samples.rates_by_arm.iter();
        if bench_host.is_stopped() || arms.all(|rates| rates.len() >= SAMPLES_PER_ARM) {
            break;
        }
        for arm in [round % 4, (round + 2) % 4] {
            let (is_colored, has_stream) = (arm % 2 == 1, arm >= 2);
            run_all(false);
            let (do_share, rate) = sample_between_ping_pongs(bench_host.cpus, || {
                victims.0.set_running(!is_colored);
                victims.1.set_running(is_colored);
                streams.0.set_running(has_stream && !is_colored);
                streams.1.set_running(has_stream && is_colored);
                bench_host.sleep_unless_stopped(SETTLING_TIME);
                let victim_work = || {
                    if is_colored {
                        victims.1.read_work()
                    } else {
                        victims.0.read_work()
                    }
                };
                let (start_work, start) = (victim_work(), Instant::now());
                bench_host.sleep_unless_stopped(SAMPLE_TIME);
                let rate = (victim_work() - start_work) as f64 / start.elapsed().as_secs_f64();
                run_all(false);
                rate
            });
            match do_share {
                Some(true) => samples.rates_by_arm[arm].push(rate),
                _ => samples.dropped_count += 1,
            }
        }
    }
    run_all(true);
    samples
}

fn partition_rows(
    bytes: u64,
    min_colored_share: f64,
    max_plain_share: f64,
    samples: &ArmSamples,
) -> Vec<BenchRow> {
    let ArmSamples {
        rates_by_arm,
        dropped_count,
    } = samples;
    let title = format!(
        "{} MiB victim beside a {} MiB stream",
        bytes >> 20,
        STREAM_BYTES >> 20
    );
    let min_sample_count = rates_by_arm.iter().map(Vec::len).min().unwrap_or(0);
    let medians: Vec<f64> = rates_by_arm
        .iter()
        .filter_map(|rates| median(rates))
        .filter(|rate| *rate > 0.0)
        .collect();
    let [ordinary_alone, colored_alone, ordinary, colored] = medians[..] else {
        return vec![BenchRow::skipped(
            "d",
            &title,
            format!("no samples while the CPUs shared; {dropped_count} dropped"),
        )];
    };
    if min_sample_count < SAMPLES_PER_ARM {
        let reason = format!(
            "{min_sample_count} samples of {SAMPLES_PER_ARM} while the CPUs shared; {dropped_count} dropped"
        );
        return vec![BenchRow::skipped("d", &title, reason)];
    }
    let ordinary_share = ordinary / ordinary_alone;
    // The first target is relative to the best speed on this host, the second to the victim on its half of the cache.
    let reference_rate = if bytes == 4 << 20 {
        ordinary_alone
    } else {
        colored_alone
    };
    let kept_share = colored / reference_rate;
    let measured = format!(
        "{:.0} % ({:.0} % of its colored solo speed; colored alone {:.0} % of ordinary alone)",
        100.0 * kept_share,
        100.0 * colored / colored_alone,
        100.0 * colored_alone / ordinary_alone
    );
    let mut rows = Vec::new();
    let target = format!("{:.0} %", 100.0 * min_colored_share);
    rows.push(BenchRow::from_target(
        "d",
        &format!("{title}: colored halves"),
        &target,
        measured,
        kept_share >= min_colored_share,
    ));
    let measured = format!(
        "{:.0} % of solo, {} samples an arm, {dropped_count} dropped",
        100.0 * ordinary_share,
        min_sample_count
    );
    if ordinary_share <= max_plain_share {
        rows.push(BenchRow::new(
            "d",
            &format!("{title}: ordinary frames"),
            "",
            measured,
            BenchVerdict::Reported,
        ));
    } else {
        // The stream does no harm here, so colors have nothing to improve, and the target is not meaningful.
        let reason =
            format!("{measured}: this host's stream does not take the victim's cache away");
        rows.push(BenchRow::new(
            "d",
            &format!("{title}: ordinary frames"),
            "30 % or less",
            reason,
            BenchVerdict::Skipped,
        ));
    }
    rows
}

fn measure_recoloring(
    bench_host: &BenchHost,
    half_mask: u64,
    other_mask: u64,
) -> anyhow::Result<Vec<BenchRow>> {
    const ADDITIONS: &str = "100000000";
    let mut counter = ColoredRun::start(bench_host, "count", &["count", ADDITIONS], half_mask)?;
    let (mut recolor_count, mut last_report): (u32, Option<AgentReport>) = (0, None);
    let mut current_mask = half_mask;
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    while LinuxHost::new("/")
        .stat(counter.program.pid())
        .is_ok_and(|stat| stat.state != 'Z')
    {
        if start.elapsed() > 2 * START_TIMEOUT || bench_host.is_stopped() {
            break;
        }
        current_mask = if current_mask == half_mask {
            other_mask
        } else {
            half_mask
        };
        // A program that has just ended has lost its file, so recoloring it fails.
        if counter.program.recolor(current_mask).is_err() {
            break;
        }
        recolor_count += 1;
        bench_host.sleep_unless_stopped(Duration::from_millis(150));
        last_report = counter.program.agent_report().or(last_report);
    }
    if bench_host.is_stopped() || start.elapsed() > 2 * START_TIMEOUT {
        return Ok(vec![BenchRow::skipped(
            "e",
            "re-coloring a running program",
            "it did not end in time".to_string(),
        )]);
    }
    let exit_code = counter.program.wait(&stop, START_TIMEOUT)?;
    let counter_or_zero = |name: &str| {
        last_report
            .as_ref()
            .and_then(|agent| agent.counter(name))
            .unwrap_or(0)
    };
    let moved_pages = counter_or_zero("moved_pages");
    let measured = format!(
        "{} additions by two threads, {moved_pages} pages moved in {recolor_count} turns, {} lost pages",
        "200 000 000",
        counter_or_zero("lost_pages")
    );
    let cost_text = format!(
        "{:.1} us",
        counter_or_zero("moved_ns") as f64 / 1e3 / moved_pages.max(1) as f64
    );
    Ok(vec![
        BenchRow::from_target(
            "e",
            "updates lost while re-coloring",
            "none in 10^7",
            measured,
            exit_code == 0 && moved_pages > 0,
        ),
        BenchRow::new(
            "e",
            "a page out, copied and in",
            "",
            cost_text,
            BenchVerdict::Reported,
        ),
    ])
}

/// Name and command line; words are split at blanks, and `@` stands for the directory of generated inputs.
const REAL_PROGRAMS: &[(&str, &[&str])] = &[
    (
        "python3",
        &[
            "python3",
            "-S",
            "-c",
            "p={}\nfor n,l in enumerate(open('@/text.txt')):\n for w in l.split(): p.setdefault(w,[]).append(n)\nprint(len(p),sum(map(len,p.values())))",
        ],
    ),
    (
        "sort (2 threads)",
        &["sort", "--parallel=2", "-S", "64M", "-k3", "@/numbers.txt"],
    ),
    (
        "sqlite3",
        &[
            "sqlite3",
            "-bail",
            ":memory:",
            "create table t(a,b); with recursive n(i) as (select 1 union all select i+1 from n where i<200000) insert into t select i*7919%200003, i%977 from n; create index x on t(a); select b,count(*),sum(a) from t group by b;",
        ],
    ),
    ("gcc", &["gcc", "-O2", "-S", "-o", "-", "@/program.c"]),
    (
        "node",
        &[
            "node",
            "-e",
            "let m=new Map();for(let i=0;i<600000;i++)m.set(i*31%100007,(m.get(i*31%100007)||0)+1);let s=0;for(const v of m.values())s+=v;console.log(m.size,s)",
        ],
    ),
    (
        "xz (2 threads)",
        &["xz", "-T2", "-1", "-k", "-c", "@/text.txt"],
    ),
];

fn measure_real_programs(bench_host: &BenchHost, mask: u64) -> anyhow::Result<Vec<BenchRow>> {
    const RUNS: usize = 3;
    let functions: String = (0..300)
        .map(|index| {
            format!("int f{index}(int *p, int n){{int s={index};for(int i=0;i<n;i++)s+=p[i]*(i^{index});return s;}}\n")
        })
        .collect();
    std::fs::write(bench_host.work_dir.join("program.c"), functions)?;
    let mut rows = Vec::new();
    for (name, words) in REAL_PROGRAMS {
        let title = format!("{name}: the same output, colored");
        if !is_installed(words[0]) {
            rows.push(BenchRow::skipped(
                "f",
                &title,
                format!("{} is not installed", words[0]),
            ));
            continue;
        }
        if bench_host.is_stopped() {
            rows.push(BenchRow::skipped("f", &title, NO_TIME_REASON.to_string()));
            continue;
        }
        let dir = bench_host.work_dir.display().to_string();
        let command: Vec<String> = words
            .iter()
            .map(|word| word.replace("@/", &format!("{dir}/")))
            .collect();
        let (mut ordinary_seconds, mut colored_seconds) = (Vec::new(), Vec::new());
        let (mut is_same, mut allowed_share, mut max_held_pages) = (true, None, 0);
        for _ in 0..RUNS {
            let plain_output = bench_host.work_dir.join("plain.out");
            let start = Instant::now();
            let output = std::fs::File::create(&plain_output)?;
            let status = Command::new(&command[0])
                .args(&command[1..])
                .stdin(Stdio::null())
                .stdout(output)
                .status()?;
            ordinary_seconds.push(start.elapsed().as_secs_f64());
            let colored_output = bench_host.work_dir.join("colored.out");
            let start = Instant::now();
            let mut program = start_colored(&command, mask, &colored_output, &[])?;
            let code = program.wait(&bench_host.stop_flag, Duration::from_millis(250))?;
            colored_seconds.push(start.elapsed().as_secs_f64());
            is_same &= status.code() == Some(code)
                && std::fs::read(&plain_output)? == std::fs::read(&colored_output)?;
            let agents = program.agent_reports();
            is_same &= agents.iter().any(|(_, agent)| agent.account.is_ok());
            // The kernel's page map is used if the program ran long enough, otherwise the agents' last counts.
            let measured_share = program
                .last_resident_pages()
                .and_then(|pages| pages.allowed_anonymous_share());
            allowed_share = measured_share
                .or_else(|| allowed_page_share(&agents))
                .or(allowed_share);
            max_held_pages = max_held_pages.max(
                agents
                    .iter()
                    .filter_map(|(_, agent)| agent.counter("max_held"))
                    .max()
                    .unwrap_or(0),
            );
        }
        let ratio =
            median(&colored_seconds).unwrap_or(0.0) / median(&ordinary_seconds).unwrap_or(f64::MAX);
        let measured = format!(
            "{:.2}x the time ({:.2} s), {} of its pages in allowed colors, {} MiB of frames held at most",
            ratio,
            median(&ordinary_seconds).unwrap_or(0.0),
            allowed_share.map_or("-".to_string(), |inside| format!("{:.1} %", 100.0 * inside)),
            max_held_pages >> 8
        );
        rows.push(BenchRow::from_target(
            "f", &title, "same", measured, is_same,
        ));
    }
    Ok(rows)
}

/// Share of pages in allowed colors, among the pages that the agents of a program and its children manage.
fn allowed_page_share(agents: &[(i32, AgentReport)]) -> Option<f64> {
    let counter_sum = |name: &str| {
        agents
            .iter()
            .filter_map(|(_, agent)| agent.counter(name))
            .sum::<u64>()
    };
    let allowed_pages = counter_sum("allowed_pages");
    let total_pages = allowed_pages + counter_sum("other_pages") + counter_sum("unknown_pages");
    (total_pages > 0).then(|| allowed_pages as f64 / total_pages as f64)
}

/// Run time of a real program on ever fewer colors, and the recorded misses of a private cache of the same size.
fn measure_curve(bench_host: &BenchHost, colors: u32) -> anyhow::Result<Vec<BenchRow>> {
    const TITLE: &str =
        "gzip: time against colors, and recorded misses of the private cache's share";
    if !is_installed("gzip") {
        return Ok(vec![BenchRow::skipped(
            "g",
            TITLE,
            "gzip is not installed".to_string(),
        )]);
    }
    let private_share_bytes =
        ColorMap::open_for_host(Path::new(BASE)).map_or(0, |map| map.private.share_bytes);
    let curve = recorded_curve(bench_host, "gzip")?;
    let command: Vec<String> = ["gzip", "-9", "-c"]
        .map(String::from)
        .into_iter()
        .chain([bench_host.work_dir.join("text.txt").display().to_string()])
        .collect();
    let (mut results, mut base_seconds) = (Vec::new(), None);
    for allowed_count in [colors, colors / 2, colors / 4, colors / 8, colors / 16, 1]
        .into_iter()
        .filter(|allowed_count| *allowed_count > 0)
    {
        if bench_host.is_stopped() {
            results.push(format!("{allowed_count}: {NO_TIME_REASON}"));
            continue;
        }
        let mask = if allowed_count == 64 {
            u64::MAX
        } else {
            (1 << allowed_count) - 1
        };
        let mut durations = Vec::new();
        for _ in 0..3 {
            let output_path = bench_host.work_dir.join("curve.out");
            let mut program = start_colored(&command, mask, &output_path, &[])?;
            program.wait_until_ready(START_TIMEOUT)?;
            let start = Instant::now();
            program.wait(&bench_host.stop_flag, Duration::from_secs(60))?;
            durations.push(start.elapsed().as_secs_f64());
        }
        let Some(median_seconds) = median(&durations) else {
            continue;
        };
        let reference_seconds = *base_seconds.get_or_insert(median_seconds);
        let bytes = u64::from(allowed_count) * private_share_bytes;
        let nearest_point = curve.iter().min_by_key(|(size, _)| size.abs_diff(bytes));
        let mpki_text = nearest_point
            .and_then(|(_, mpki)| *mpki)
            .map_or("-".to_string(), |mpki| format!("{mpki:.2}"));
        results.push(format!(
            "{allowed_count}: {:.2}x, MPKI {mpki_text}",
            median_seconds / reference_seconds
        ));
    }
    Ok(vec![BenchRow::new(
        "g",
        TITLE,
        "",
        results.join("; "),
        BenchVerdict::Reported,
    )])
}
