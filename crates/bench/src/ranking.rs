//! (a) Do probed intensities rank programs like the misses per second of their recorded profiles?

use std::time::{Duration, Instant};

use cachemate_linux::sense::probes::PinnedThread;
use cachemate_linux::sense::probes::intensity::{PrimeProber, buffer_bytes, wait_time};
use cachemate_trace::{ProfileFile, bundled_recordings};

use crate::bench_host::{BenchHost, BenchRow, BenchVerdict, median, run_and_read};
use crate::programs::Actor;

const SAMPLES: usize = 20;
/// Bounds of clearly different rates, in millions of misses per second.
const MANY: f64 = 30.0;
const FEW: f64 = 5.0;
/// Cycles of a miss, which bound the rate of a program with many misses (docs/live.md).
const MISS_NS: f64 = 90.0;
/// Instructions per nanosecond without misses.
const INSTR_PER_NS: f64 = 2.0;
/// The positive control, and the share of evicted lines that it must add; if the probe misses even this one, the ranking of
/// the other programs is meaningless.
const CONTROL: &str = "own-stream";
const MIN_CONTROL: f64 = 0.05;
/// Maximum time for one program.
const PATIENCE: Duration = Duration::from_secs(25);

/// Name of a bundled recording, and the line that runs it on inputs made here.
const PROGRAMS: &[(&str, &str)] = &[
    ("gzip", "gzip -9 -c text.txt"),
    ("bzip2", "bzip2 -9 -c text.txt"),
    ("xz", "xz -6 -c text.txt"),
    ("sort", "sort --parallel=1 -S 64M -k3 numbers.txt"),
    ("gawk", "awk '{for(i=1;i<=NF;i++)c[$i]++} END{for(w in c)print w,c[w]}' text.txt"),
    ("perl", "perl -ne 'push @{$p{$_}}, $. for split; END{print scalar keys %p}' text.txt"),
    (
        "python3",
        "python3 -S -c 'p={}\nfor n,l in enumerate(open(\"text.txt\")):\n for w in l.split(): p.setdefault(w,[]).append(n)\nprint(len(p))'",
    ),
    (
        "sqlite3",
        "sqlite3 -bail :memory: 'create table t(a,b); with recursive n(i) as (select 1 union all select i+1 from n where i<200000) insert into t select i*7919%200003, i%977 from n; create index x on t(a); select b,count(*),sum(a) from t group by b;'",
    ),
    ("openssl", "openssl enc -aes-256-cbc -pbkdf2 -k x -in text.txt"),
];

/// Measurements of one program.
struct RankedProgram {
    name: String,
    misses_per_second: f64,
    shared: Option<f64>,
    /// Share of the buffer that the rest of the host evicts while the program is paused.
    gone_without: Option<f64>,
    split: Option<f64>,
    samples: usize,
}

/// # Errors
/// The inputs cannot be written, or a program cannot be started.
pub fn bench_rows(place: &BenchHost) -> anyhow::Result<Vec<BenchRow>> {
    const TITLE: &str = "intensity against recorded misses";
    let pinned_thread = PinnedThread::new(place.cpus.0)?;
    let mut reloader = match PrimeProber::new(buffer_bytes(Some(place.cache_bytes)), 1) {
        Ok(reloader) => reloader,
        Err(error) => return Ok(vec![BenchRow::not_shown("a", TITLE, error.to_string())]),
    };
    drop(pinned_thread);
    inputs(place)?;
    let mut ranked = Vec::new();
    for (name, line) in PROGRAMS {
        let tool = line.split(' ').next().unwrap_or(name);
        if place.is_stopped() || !is_installed(tool) || !bundled_recordings().iter().any(|(known, _)| known == name) {
            continue;
        }
        let actor = Actor::shell(place, name, line)?;
        let misses_per_second = recorded_miss_rate(place, name)?;
        ranked.push(measure(place, &mut reloader, &actor, misses_per_second)?);
    }
    // A quarter of the cache, three times the cache, and nothing: their misses follow from their sizes.
    let own_loads = [
        ("own-chase", "chase", place.cache_bytes / 8, 0.0),
        (CONTROL, "stream", place.cache_bytes * 3, 100.0),
        ("own-quiet", "quiet", 0, 0.0),
    ];
    for (name, kind, bytes, millions) in own_loads {
        if !place.is_stopped() {
            let actor = Actor::start_own(place, name, kind, bytes)?;
            ranked.push(measure(place, &mut reloader, &actor, millions * 1e6)?);
        }
    }
    Ok(rows(&ranked))
}

pub fn is_installed(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(tool).is_file())
}

/// Texts of invented words and a table of numbers, from arithmetic alone.
pub fn inputs(place: &BenchHost) -> anyhow::Result<()> {
    let mut state = 1u64;
    let mut draw = |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    let mut text = String::new();
    while text.len() < 6 << 20 {
        let limit = 1 + draw(20_000);
        let word = draw(limit);
        text.push_str(&format!("w{word:x}{}", if draw(12) == 0 { "\n" } else { " " }));
    }
    std::fs::write(place.dir.join("text.txt"), text)?;
    let rows: String = (0..200_000).map(|row| format!("{}\t{}\trow {row}\n", draw(1 << 31), draw(977))).collect();
    std::fs::write(place.dir.join("numbers.txt"), rows)?;
    Ok(())
}

/// Misses per thousand instructions of a bundled recording, by cache size, from its profile.
///
/// # Errors
/// The shipped command does not make it.
pub fn recorded_curve(place: &BenchHost, name: &str) -> anyhow::Result<Vec<(u64, Option<f64>)>> {
    let path = place.dir.join(format!("{name}.profile.json"));
    run_and_read(&place.command, &["--quiet", "profile", name, "--force", "-o", &path.to_string_lossy()])?;
    let file = ProfileFile::read(&path)?;
    let all_threads = file.curves.iter().find(|curve| curve.thread.is_none() && curve.policy == "lru");
    let points = all_threads.map(|curve| curve.points.as_slice()).unwrap_or_default();
    Ok(points.iter().map(|point| (point.size_bytes, point.misses_per_kilo_instr.map(|mpki| mpki.value))).collect())
}

/// Misses per second on a quarter of this host's cache: recorded misses per instruction times the rate that they allow.
fn recorded_miss_rate(place: &BenchHost, name: &str) -> anyhow::Result<f64> {
    let quarter = place.cache_bytes / 4;
    let curve = recorded_curve(place, name)?;
    let nearest = curve.iter().min_by_key(|(bytes, _)| bytes.abs_diff(quarter));
    let per_instr = nearest.and_then(|(_, mpki)| *mpki).unwrap_or(0.0) / 1000.0;
    Ok(per_instr / (1.0 / INSTR_PER_NS + per_instr * MISS_NS) * 1e9)
}

fn measure(
    place: &BenchHost,
    reloader: &mut PrimeProber,
    actor: &Actor,
    misses_per_second: f64,
) -> anyhow::Result<RankedProgram> {
    actor.set_affinity(&[place.cpus.1])?;
    place.sleep(Duration::from_millis(700));
    let start = Instant::now();
    let mut sides: [[Vec<f64>; 2]; 2] = Default::default(); // [shared][beside]
    while sides[1][1].len() < SAMPLES && start.elapsed() < PATIENCE && !place.is_stopped() {
        let (gate, samples) = place.gate(|| {
            let Ok(_here) = PinnedThread::new(place.cpus.0) else { return Vec::new() };
            let mut samples = Vec::new();
            for (beside, counts) in
                [(false, true), (false, true), (true, false), (true, true), (true, true), (false, true)]
            {
                actor.set_running(beside);
                let sample = reloader.sample(wait_time(Some(place.cache_bytes)));
                if counts {
                    samples.push((beside, f64::from(sample.missed) / f64::from(sample.reloads)));
                }
            }
            actor.set_running(true);
            samples
        });
        if let Some(shared) = gate {
            for (is_beside, share) in samples {
                sides[usize::from(shared)][usize::from(is_beside)].push(share);
            }
        }
    }
    let difference = |side: &[Vec<f64>; 2]| Some(trimmed_mean(&side[1])? - trimmed_mean(&side[0])?);
    Ok(RankedProgram {
        name: actor.name.clone(),
        misses_per_second,
        shared: difference(&sides[1]).filter(|_| sides[1][1].len() >= SAMPLES / 2),
        gone_without: trimmed_mean(&sides[1][0]),
        split: difference(&sides[0]).filter(|_| sides[0][1].len() >= 4),
        samples: sides[1][1].len(),
    })
}

/// Mean without the lowest and highest fifth.
fn trimmed_mean(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let cut = sorted.len() / 5;
    let middle = &sorted[cut..sorted.len() - cut];
    (!middle.is_empty()).then(|| middle.iter().sum::<f64>() / middle.len() as f64)
}

fn rows(programs: &[RankedProgram]) -> Vec<BenchRow> {
    let mut rows = Vec::new();
    for program in programs {
        let number = |value: Option<f64>| value.map_or("-".to_string(), |value| format!("{value:.3}"));
        let measured = format!(
            "shared {} ({} samples, {} gone without it), split {}; recorded {:.1} M misses/s",
            number(program.shared),
            program.samples,
            number(program.gone_without),
            number(program.split),
            program.misses_per_second / 1e6
        );
        rows.push(BenchRow::new("a", &format!("intensity of {}", program.name), "", measured, BenchVerdict::Reported));
    }
    let control = programs.iter().find(|program| program.name == CONTROL);
    if let Some((seen, without)) = control.and_then(|stream| Some((stream.shared?, stream.gone_without?)))
        && seen < MIN_CONTROL
    {
        let reason = format!(
            "a stream over three times the cache adds {seen:.3} to what is gone without it ({without:.3}): other tenants of the \
             host empty the cache first, or the CPUs do not share what they seem to share"
        );
        rows.push(BenchRow::not_shown("a", "programs in order of their misses", reason));
        return rows;
    }
    let ranked: Vec<(f64, f64)> = programs.iter().filter_map(|p| Some((p.misses_per_second, p.shared?))).collect();
    rows.push(if ranked.len() < 10 {
        BenchRow::not_shown(
            "a",
            "rank correlation",
            format!("{} programs had enough samples while sharing, of 10", ranked.len()),
        )
    } else {
        let value = spearman(&ranked);
        BenchRow::row(
            "a",
            "rank correlation with misses per second",
            "0.8 hoped for",
            format!("{value:.2}"),
            value >= 0.8,
        )
    });
    let far_orders: Vec<bool> = ranked
        .iter()
        .flat_map(|many| ranked.iter().map(move |few| (many, few)))
        .filter(|(many, few)| many.0 > MANY * 1e6 && few.0 < FEW * 1e6)
        .map(|(many, few)| many.1 > few.1)
        .collect();
    rows.push(match far_orders.len() {
        0 => {
            BenchRow::not_shown("a", "pairs far apart", "no program misses that often on this host's cache".to_string())
        }
        pairs => {
            let share = far_orders.iter().filter(|right| **right).count() as f64 / pairs as f64;
            let measured = format!("{:.0} % of {pairs} pairs", 100.0 * share);
            BenchRow::row("a", "pairs far apart in order", "95 %", measured, share >= 0.95)
        }
    });
    let split_effects: Vec<f64> = programs.iter().filter_map(|program| Some(program.split?.abs())).collect();
    rows.push(match median(&split_effects) {
        None => BenchRow::not_shown("a", "near zero while split", "the CPUs were never seen apart".to_string()),
        Some(middle) => {
            BenchRow::row("a", "near zero while split (median)", "0.05", format!("{middle:.3}"), middle <= 0.05)
        }
    });
    rows
}

/// Correlation of ranks, ties at their mean rank.
pub fn spearman(pairs: &[(f64, f64)]) -> f64 {
    let ranks = |values: Vec<f64>| -> Vec<f64> {
        let rank = |value: &f64| {
            let lower_count = values.iter().filter(|other| *other < value).count() as f64;
            let equal = values.iter().filter(|other| *other == value).count() as f64;
            lower_count + (equal + 1.0) / 2.0
        };
        values.iter().map(rank).collect()
    };
    let (a, b) = (ranks(pairs.iter().map(|p| p.0).collect()), ranks(pairs.iter().map(|p| p.1).collect()));
    let mean = (pairs.len() as f64 + 1.0) / 2.0;
    let sum = |metric: &dyn Fn(usize) -> f64| (0..pairs.len()).map(metric).sum::<f64>();
    let covariance = sum(&|index| (a[index] - mean) * (b[index] - mean));
    let spread = (sum(&|index| (a[index] - mean).powi(2)) * sum(&|index| (b[index] - mean).powi(2))).sqrt();
    if spread > 0.0 { covariance / spread } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the correlation 1 in order and -1 in reverse, whatever the spacing, with ties in the middle?
    #[test]
    fn ranks_are_what_is_correlated() {
        assert!((spearman(&[(1.0, 5.0), (2.0, 6.0), (90.0, 7.0)]) - 1.0).abs() < 1e-12);
        assert!((spearman(&[(1.0, 9.0), (2.0, 6.0), (3.0, 1.0)]) + 1.0).abs() < 1e-12);
        assert!(spearman(&[(0.0, 1.0), (0.0, 2.0), (0.0, 3.0)]) == 0.0);
    }
}
