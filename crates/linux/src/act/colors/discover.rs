//! Discovery of this host's colors by timing, and their verification.
//!
//! Problem: a virtual machine's frame numbers say nothing about the sets that a frame falls on, and on a shared host
//! every timing may be disturbed. Method: calibrate a hit (a line that was pushed out of the first level only) against
//! a miss; group pages by eviction ([`super::grouping`]); accept exactly as many classes as the cache's geometry
//! allows; keep frames of each class ([`super::reference_set`]); classify more pages against them; accept the classes
//! only if a chase over one color's frames becomes slow beyond one color's share of the cache. Whether frame numbers
//! predict the colors is also tested and reported. Properties: bounded in time, retried, and a refusal names the reason
//! of every try.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cachemate_agent::layout::{MAX_COLORS, PAGE_BYTES};
use cachemate_agent::timing::{Calibration, IS_SUPPORTED, reload_cycles};
use cachemate_core::{Cache, CacheLevel, CpuId, SplitMix64, Topology};

use super::ColorError;
use super::chase::{ChaseComparison, is_share_confined, knee_bytes, load_ns};
use super::grouping::{EvictionOracle, GroupingParameters, group_items};
use super::map::{ColorCoverage, ColorMap, PFN_BITS_ARE_REAL, PFN_BITS_ARE_VIRTUAL, PFN_UNKNOWN};
use super::pool::{PagePool, TimingOracle};
use super::reference_set::{self, ColorClasses, FrameLedger, LoadedReferenceSet, frames_per_color};
use super::refusal;
use crate::sense::probes::PinnedThread;

/// How long a discovery tries unless told otherwise; on a quiet host it takes a few seconds.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Number of pages per color of the pool in which the classes are searched.
const SEED_PAGES_PER_COLOR: usize = 128;
/// Number of pages that evict a line from the first level but never from the second.
const HIT_PAGES: usize = 24;
const CALIBRATIONS: usize = 101;
/// Largest share of pages that fit no color in an accepted discovery.
const MAX_UNCOLORED_SHARE: f64 = 0.10;

/// Frames that are classified between two reads of the clock.
const BATCH_FRAMES: usize = 1024;

/// Pause between tries: a disturbance of one try may be over by the next.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Options of a discovery.
pub struct DiscoveryOptions<'a> {
    /// The directory of colors: [`reference_set::BASE`] on a live host.
    pub base: &'a Path,
    /// Memory whose frames are classified.
    pub pool_bytes: u64,
    /// Time for all tries together.
    pub max_time: Duration,
    /// Seed of the random order in which pages are tested.
    pub seed: u64,
    /// Receives the current step, the number of finished items, and their total.
    pub progress: &'a mut dyn FnMut(&'static str, u64, u64),
    /// True once the discovery must end before its time limit.
    pub should_stop: &'a dyn Fn() -> bool,
}

/// The cache whose sets define the colors, as the kernel describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TargetCache {
    /// Level of the cache: L2, because the first level is too small to distinguish pages.
    pub level: CacheLevel,
    /// Size of the whole cache.
    pub size_bytes: u64,
    /// More than one.
    pub ways: u32,
    /// Size over ways and page size: 2 to [`MAX_COLORS`].
    pub colors: u32,
    /// Size of the last level behind it; `None` if there is none, or if the kernel does not report it.
    pub last_level_bytes: Option<u64>,
}

/// The private cache behind the first level of `cpu`, if pages have colors in it.
///
/// # Errors
/// There is no such cache, or it has only one color, or more than a mask can hold.
pub fn find_target_cache(topology: &Topology, cpu: CpuId) -> Result<TargetCache, ColorError> {
    let serves_cpu = |cache: &&Cache| cache.cpus.contains(cpu.0);
    let second_level = topology
        .caches
        .iter()
        .filter(serves_cpu)
        .find(|cache| cache.level == CacheLevel::L2);
    let no_colors = |reason: &str| ColorError::NoColors(reason.to_string());
    let cache =
        second_level.ok_or_else(|| no_colors("the kernel describes no second-level cache"))?;
    let (Some(size_bytes), Some(ways)) = (cache.size_bytes, cache.ways.filter(|ways| *ways > 1))
    else {
        return Err(no_colors(
            "the kernel does not say how large the second-level cache is, or how many ways it has",
        ));
    };
    let colors =
        u32::try_from(size_bytes / u64::from(ways) / PAGE_BYTES as u64).unwrap_or(u32::MAX);
    if !(2..=MAX_COLORS).contains(&colors) {
        return Err(no_colors(&format!(
            "a second-level cache of {size_bytes} bytes and {ways} ways has {colors} colors of {PAGE_BYTES} bytes; 2 to {MAX_COLORS} are supported"
        )));
    }
    let last_level = topology
        .caches
        .iter()
        .filter(serves_cpu)
        .find(|cache| cache.last_level && cache.level != CacheLevel::L2);
    Ok(TargetCache {
        level: cache.level,
        size_bytes,
        ways,
        colors,
        last_level_bytes: last_level.and_then(|cache| cache.size_bytes),
    })
}

/// Finds the colors, keeps the reference set, and returns the map of the caches that they cover.
///
/// # Errors
/// The host's cache has no colors, timing is unusable, or every try was too noisy; the reasons are included.
pub fn discover(
    topology: &Topology,
    cpu: CpuId,
    options: &mut DiscoveryOptions<'_>,
) -> Result<ColorMap, ColorError> {
    if !IS_SUPPORTED {
        return Err(ColorError::NoColors(
            "loads can be timed on x86-64 only".to_string(),
        ));
    }
    let target = find_target_cache(topology, cpu)?;
    let start = Instant::now();
    let _pinned = PinnedThread::new(cpu)
        .map_err(|source| ColorError::io_error(&PathBuf::from(format!("CPU {}", cpu.0)), source))?;
    let mut reasons: Vec<String> = Vec::new();
    let mut rng = SplitMix64::new(options.seed);
    while start.elapsed() < options.max_time && !(options.should_stop)() {
        match discover_once(&target, options, &mut rng, start) {
            Ok(mut map) => {
                map.seconds = start.elapsed().as_secs_f64();
                map.failed_attempts = reasons;
                reference_set::accept_new(options.base)?;
                refusal::forget(options.base);
                reference_set::replace_file(
                    options.base,
                    ColorMap::FILE_NAME,
                    map.to_text().as_bytes(),
                )?;
                return Ok(map);
            }
            Err(ColorError::Noisy(reason)) => {
                reasons.push(reason);
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(other) => return Err(other),
        }
    }
    let reason = describe_refusal(&reasons, start.elapsed());
    if !(options.should_stop)() {
        // The refusal is the answer, whether or not it can be kept.
        let _ = refusal::remember(options.base, &reason);
    }
    Err(ColorError::Noisy(reason))
}

/// All tries in one sentence: their number, and the last reasons, each once.
fn describe_refusal(reasons: &[String], spent: Duration) -> String {
    const MAX_REASONS: usize = 3;
    let mut last_reasons: Vec<&str> = Vec::new();
    for reason in reasons.iter().rev() {
        if !last_reasons.contains(&reason.as_str()) {
            last_reasons.insert(0, reason);
        }
    }
    let is_cut = last_reasons.len() > MAX_REASONS;
    let skipped = last_reasons.len().saturating_sub(MAX_REASONS);
    let last_reasons = last_reasons[skipped..].join("; ");
    let prefix = if is_cut { "the last of them: " } else { "" };
    let tries = match reasons.len() {
        1 => "one try".to_string(),
        count => format!("{count} tries"),
    };
    format!(
        "{tries} in {:.0} s, refused: {prefix}{last_reasons}",
        spent.as_secs_f64()
    )
}

fn discover_once(
    target: &TargetCache,
    options: &mut DiscoveryOptions<'_>,
    rng: &mut SplitMix64,
    start: Instant,
) -> Result<ColorMap, ColorError> {
    let (colors, ways) = (target.colors as usize, target.ways as usize);
    let pool_error = |source| ColorError::io_error(Path::new("memory for frames"), source);
    (options.progress)("calibrating", 0, 1);
    let seed_pool = PagePool::new(colors * SEED_PAGES_PER_COLOR).map_err(pool_error)?;
    let calibration = calibrate(&seed_pool, rng);
    let Some(threshold_cycles) = calibration.threshold_cycles() else {
        return Err(ColorError::Noisy(format!(
            "a hit takes {} cycles and a miss {}: too close",
            calibration.hit_cycles, calibration.miss_cycles
        )));
    };
    (options.progress)("grouping", 0, 1);
    let mut items: Vec<usize> = (0..seed_pool.page_count()).collect();
    rng.shuffle(&mut items);
    let page_at = |index: usize| seed_pool.page_address(index).cast_const();
    let deadline = start + options.max_time;
    let mut oracle = TimingOracle {
        page_address: &page_at,
        threshold_cycles,
        line_index: 0,
        deadline,
    };
    let per_class = frames_per_color(ways);
    let groups = group_items(
        &mut oracle,
        &items,
        &GroupingParameters {
            ways,
            max_classes: 2 * colors,
            representatives_per_class: per_class,
        },
    );
    if oracle.is_exhausted() {
        let (found_classes, classes) = (groups.classes.len(), colors);
        return Err(ColorError::Noisy(format!(
            "the time limit was reached after {found_classes} of {classes} classes"
        )));
    }
    if groups.classes.len() != colors {
        return Err(ColorError::Noisy(format!(
            "{} classes instead of {colors}, {} of {} pages in none, {} in the largest",
            groups.classes.len(),
            groups.unclassified_items.len(),
            seed_pool.page_count(),
            groups.classes.iter().map(Vec::len).max().unwrap_or(0)
        )));
    }
    (options.progress)("keeping frames of each color", 0, 1);
    let set_id = rng.next_u64();
    let mut classes = ColorClasses {
        page: &page_at,
        threshold_cycles,
        classes: &groups.classes,
        per_class,
        deadline,
    };
    reference_set::create(options.base, ways, set_id, &mut classes)?;
    drop(seed_pool);
    let reference_set = reference_set::open_new(options.base)?;
    classify_pages(target, options, rng, reference_set, start)
}

/// Measures loads after an eviction from the first level (by a few pages) and from the second (by all pages).
fn calibrate(pool: &PagePool, rng: &mut SplitMix64) -> Calibration {
    let median_cycles = |evicting_pages: usize, rng: &mut SplitMix64| {
        let mut reload_times: Vec<u64> = (0..CALIBRATIONS)
            .map(|line| {
                let mut draw_page = || rng.draw_below(pool.page_count() as u64) as usize;
                let target_page = draw_page();
                let other_pages: Vec<*const u8> = (0..evicting_pages)
                    .map(|_| draw_page())
                    .filter(|at| *at != target_page)
                    .map(|index| pool.page_address(index).cast_const())
                    .collect();
                // SAFETY: pages of the pool.
                unsafe {
                    reload_cycles(
                        pool.page_address(target_page),
                        other_pages.iter().copied(),
                        line,
                    )
                }
            })
            .collect();
        reload_times.sort_unstable();
        reload_times[reload_times.len() / 2]
    };
    Calibration {
        hit_cycles: median_cycles(HIT_PAGES, rng),
        miss_cycles: median_cycles(pool.page_count(), rng),
    }
}

/// Classifies the pages of a pool against the reference set, and returns the map of the caches that the colors cover.
fn classify_pages(
    target: &TargetCache,
    options: &mut DiscoveryOptions<'_>,
    rng: &mut SplitMix64,
    mut reference_set: LoadedReferenceSet,
    start: Instant,
) -> Result<ColorMap, ColorError> {
    let pool_error = |source| ColorError::io_error(Path::new("memory for frames"), source);
    let pool =
        PagePool::new((options.pool_bytes / PAGE_BYTES as u64) as usize).map_err(pool_error)?;
    let ledger = FrameLedger::open(options.base)?;
    let frames = pool.read_frames();
    let mut by_color: Vec<Vec<usize>> = vec![Vec::new(); target.colors as usize];
    let mut page_colors = Vec::with_capacity(pool.page_count());
    let classify_start = Instant::now();
    for (chunk_index, frames) in frames.chunks(BATCH_FRAMES).enumerate() {
        let first_page = chunk_index * BATCH_FRAMES;
        (options.progress)(
            "classifying frames",
            first_page as u64,
            pool.page_count() as u64,
        );
        if start.elapsed() > options.max_time || (options.should_stop)() {
            break;
        }
        let pages: Vec<*const u8> = (first_page..first_page + frames.len())
            .map(|index| pool.page_address(index).cast_const())
            .collect();
        let mut colors = vec![None; pages.len()];
        // SAFETY: pages of the pool.
        unsafe { reference_set.frames.classify_all(&pages, &mut colors) };
        for ((index, frame), color) in (first_page..).zip(frames).zip(&colors) {
            if let Some(frame) = frame {
                ledger.record(*frame, *color);
            }
            if let Some(color) = color {
                by_color[*color as usize].push(index);
            }
        }
        page_colors.append(&mut colors);
    }
    let uncolored_pages = page_colors.iter().filter(|color| color.is_none()).count();
    let classify_ns = classify_start.elapsed().as_nanos() as f64 / page_colors.len().max(1) as f64;
    if page_colors.is_empty()
        || uncolored_pages as f64 > MAX_UNCOLORED_SHARE * page_colors.len() as f64
    {
        return Err(ColorError::Noisy(format!(
            "{uncolored_pages} of {} pages fit no color",
            page_colors.len()
        )));
    }
    (options.progress)("chasing over one color's frames", 0, 1);
    let share_bytes = target.size_bytes / u64::from(target.colors);
    let private_curve = compare_chases(
        &pool,
        &by_color,
        rng,
        &[
            share_bytes / 2,
            share_bytes,
            2 * share_bytes,
            4 * share_bytes,
            8 * share_bytes,
        ],
        None,
    );
    if !is_share_confined(&private_curve, share_bytes) {
        return Err(ColorError::Noisy(format!(
            "the classes do not confine a chase: its knee over frames of one class is at {:?} bytes (expected {share_bytes} to {})",
            knee_bytes(&private_curve),
            2 * share_bytes
        )));
    }
    let last_level = target
        .last_level_bytes
        .map(|bytes| measure_last_level(target, bytes, &pool, &by_color, rng, &private_curve));
    Ok(ColorMap {
        format: ColorMap::FORMAT,
        boot_id: super::boot_id(),
        colors: target.colors,
        page_bytes: PAGE_BYTES as u32,
        level: target.level,
        cache_bytes: target.size_bytes,
        ways: target.ways,
        hit_cycles: reference_set.calibration.hit_cycles,
        miss_cycles: reference_set.calibration.miss_cycles,
        classify_ns,
        pages: page_colors.len() as u64,
        pages_unclassified: uncolored_pages as u64,
        private: ColorCoverage::from_share(share_bytes, &private_curve),
        last_level,
        frame_numbers: judge_frame_numbers(&frames, &page_colors, target.colors).to_string(),
        seconds: 0.0,
        failed_attempts: Vec::new(),
    })
}

/// Chases over frames of the color with the most frames, and over as many frames of all colors. `subtracted_hits` is
/// the cache size and load time to subtract from the ordinary chase, to compare the level behind a cache.
fn compare_chases(
    pool: &PagePool,
    by_color: &[Vec<usize>],
    rng: &mut SplitMix64,
    sizes: &[u64],
    subtracted_hits: Option<(u64, f64)>,
) -> Vec<ChaseComparison> {
    let largest_class = by_color.iter().max_by_key(|class| class.len());
    let mut points = Vec::new();
    for &size_bytes in sizes {
        let count = (size_bytes / PAGE_BYTES as u64) as usize;
        let Some(class) = largest_class.filter(|class| class.len() >= count && count > 0) else {
            break;
        };
        let colored_pages: Vec<*mut u8> = class[..count]
            .iter()
            .map(|&index| pool.page_address(index))
            .collect();
        // Equally many frames of each color: a random choice would fill some colors twice as much as others.
        let mut ordinary_pages = Vec::with_capacity(count);
        for round in 0.. {
            let round_pages = by_color.iter().filter_map(|class| class.get(round));
            let previous_len = ordinary_pages.len();
            ordinary_pages.extend(
                round_pages
                    .take(count - previous_len)
                    .map(|&index| pool.page_address(index)),
            );
            if ordinary_pages.len() == count || ordinary_pages.len() == previous_len {
                break;
            }
        }
        // SAFETY: pages of the pool, which the two chases use one after the other.
        let (colored_ns, mut ordinary_ns) =
            unsafe { (load_ns(&colored_pages, rng), load_ns(&ordinary_pages, rng)) };
        if let Some((cache_bytes, hit_ns)) = subtracted_hits {
            let hit_share = (cache_bytes as f64 / size_bytes as f64).min(0.9);
            ordinary_ns = (ordinary_ns - hit_share * hit_ns) / (1.0 - hit_share);
        }
        points.push(ChaseComparison {
            size_bytes,
            colored_ns,
            ordinary_ns,
        });
    }
    points
}

/// Does one color also confine a program in the last level? Only sizes that fit into the last level beside its other
/// users can show this: a chase that is confined to one color's share is then slow, and an unconfined one is fast.
fn measure_last_level(
    target: &TargetCache,
    last_level_bytes: u64,
    pool: &PagePool,
    by_color: &[Vec<usize>],
    rng: &mut SplitMix64,
    private_curve: &[ChaseComparison],
) -> ColorCoverage {
    let share_bytes = last_level_bytes / u64::from(target.colors);
    let sizes: Vec<u64> = (1..=5).map(|power| target.size_bytes << power).collect();
    let hit_ns = private_curve.first().map_or(0.0, |point| point.ordinary_ns);
    let curve = compare_chases(
        pool,
        by_color,
        rng,
        &sizes,
        Some((target.size_bytes, hit_ns)),
    );
    // Load time from the last level, by the chase that was too large for its color of the private cache.
    let last_level_ns = private_curve
        .iter()
        .map(|point| point.colored_ns)
        .fold(0.0, f64::max);
    let (is_partitioned, knee_bytes) = last_level_verdict(&curve, last_level_ns);
    ColorCoverage {
        share_bytes,
        is_partitioned,
        knee_bytes,
        curve,
    }
}

/// Whether colors partition the last level as well, and the smallest size that shows it; `None` if the last level held
/// the frames of no size.
fn last_level_verdict(
    curve: &[ChaseComparison],
    last_level_ns: f64,
) -> (Option<bool>, Option<u64>) {
    const MAX_LAST_LEVEL_RATIO: f64 = 2.0;
    let fast_points = curve
        .iter()
        .filter(|point| point.ordinary_ns <= MAX_LAST_LEVEL_RATIO * last_level_ns);
    let fast_points: Vec<ChaseComparison> = fast_points.copied().collect();
    let knee = knee_bytes(&fast_points);
    ((!fast_points.is_empty()).then_some(knee.is_some()), knee)
}

/// Do the low bits of the frame number give the color? On bare metal and on huge host pages they do.
fn judge_frame_numbers(
    frames: &[Option<u64>],
    page_colors: &[Option<u32>],
    colors: u32,
) -> &'static str {
    let mut joint_counts = vec![vec![0u32; colors as usize]; colors as usize];
    let mut known_frames = 0;
    for (frame, color) in frames.iter().zip(page_colors) {
        if let (Some(frame), Some(color)) = (frame, color) {
            joint_counts[(frame % u64::from(colors)) as usize][*color as usize] += 1;
            known_frames += 1;
        }
    }
    // If colors were random, the fullest cell of a row would hold little more than one color's share of the row.
    let explained_frames: u32 = joint_counts.iter().filter_map(|row| row.iter().max()).sum();
    match known_frames {
        0 => PFN_UNKNOWN,
        _ if explained_frames * 10 >= known_frames * 9 => PFN_BITS_ARE_REAL,
        _ => PFN_BITS_ARE_VIRTUAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a last level judged only by sizes that it holds, and not at all if it holds none?
    #[test]
    fn a_last_level_is_judged_only_by_sizes_that_it_holds() {
        let curve = |ordinary: [f64; 3], colored: [f64; 3]| {
            let point = |index: usize| ChaseComparison {
                size_bytes: 4 << (20 + index),
                colored_ns: colored[index],
                ordinary_ns: ordinary[index],
            };
            (0..3).map(point).collect::<Vec<_>>()
        };
        assert_eq!(
            last_level_verdict(&curve([30.0; 3], [90.0; 3]), 32.0),
            (Some(true), Some(4 << 20))
        );
        assert_eq!(
            last_level_verdict(&curve([30.0; 3], [31.0; 3]), 32.0),
            (Some(false), None)
        );
        assert_eq!(
            last_level_verdict(&curve([400.0; 3], [420.0; 3]), 32.0),
            (None, None)
        );
    }

    /// Does a refusal report the number and duration of all tries, and only the last reasons?
    #[test]
    fn a_refusal_reports_all_tries_and_the_last_reasons() {
        let reasons: Vec<String> = (0..9).map(|index| format!("reason {index}")).collect();
        let message = describe_refusal(&reasons, Duration::from_secs(60));
        assert_eq!(
            message,
            "9 tries in 60 s, refused: the last of them: reason 6; reason 7; reason 8"
        );
        assert_eq!(
            describe_refusal(&reasons[..1], Duration::from_secs(5)),
            "one try in 5 s, refused: reason 0"
        );
        let same = vec!["too close".to_string(); 9];
        assert_eq!(
            describe_refusal(&same, Duration::from_secs(60)),
            "9 tries in 60 s, refused: too close"
        );
    }

    /// Are frame numbers used only if they predict the color of nine pages of ten?
    #[test]
    fn frame_numbers_are_used_only_if_they_predict_colors() {
        let frames: Vec<Option<u64>> = (0..320).map(Some).collect();
        let real: Vec<Option<u32>> = (0..320).map(|frame| Some((frame * 5 + 3) % 32)).collect();
        assert_eq!(judge_frame_numbers(&frames, &real, 32), PFN_BITS_ARE_REAL);
        let mut draw = SplitMix64::new(1);
        let unrelated_colors: Vec<Option<u32>> =
            (0..320).map(|_| Some(draw.draw_below(32) as u32)).collect();
        assert_eq!(
            judge_frame_numbers(&frames, &unrelated_colors, 32),
            PFN_BITS_ARE_VIRTUAL
        );
        assert_eq!(
            judge_frame_numbers(&vec![None; 320], &unrelated_colors, 32),
            PFN_UNKNOWN
        );
    }
}
