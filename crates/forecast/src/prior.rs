//! Timing of a program whose input has none: drawn from a prior.

use cachemate_core::{CoreModel, Estimate, MachineSpec};
use cachemate_interval::{Demand, PhasedProgram, ProgramPhase, SizePoint, UnprefetchedRates};
use cachemate_trace::ProfileFile;

use crate::{ForecastResult, failed};

/// A prior for the timing of a program whose input has none, from which a forecast draws. The ranges cover most
/// programs of published suites on out-of-order cores.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TimingPrior {
    /// Number of misses that overlap; one on an in-order core.
    pub overlapping_misses: f64,
    /// Cycles per instruction beyond those for issue slots, hits and misses.
    pub other_cycles_per_instr: f64,
    /// Share of the misses that prefetchers fetch in time unless memory is busy; none without prefetchers.
    pub prefetched_share: f64,
}

const OVERLAPPING_MISSES: (f64, f64) = (1.0, 4.0);
const OTHER_CYCLES_PER_INSTR: (f64, f64) = (0.1, 1.0);
/// Assumed share of evicted lines that are dirty, if no write-backs were recorded.
const DIRTY_EVICTION_SHARE: f64 = 0.3;

impl TimingPrior {
    /// The geometric middle of both ranges, without prefetching.
    pub fn midpoint() -> Self {
        TimingPrior::new(0.5, 0.5, 0.0)
    }

    /// Draw `draw_index` of `draw_count`, which cover the ranges evenly. A recording does not say which of its misses a
    /// prefetcher would fetch, so any share is as likely as any other.
    pub fn draw(draw_index: usize, draw_count: usize) -> Self {
        // The other coordinates of a lattice whose points never align: of the golden ratio and of the plastic number.
        let multiple_part = |ratio: f64| {
            let multiple = (draw_index as f64 + 0.5) * ratio;
            multiple - libm::floor(multiple)
        };
        TimingPrior::new(
            (draw_index as f64 + 0.5) / draw_count as f64,
            multiple_part(0.618_033_988_749_895),
            multiple_part(0.754_877_666_246_693),
        )
    }

    fn new(overlap_share: f64, other_share: f64, prefetched_share: f64) -> Self {
        let interpolate = |(low, high): (f64, f64), share: f64| low * libm::pow(high / low, share);
        TimingPrior {
            overlapping_misses: interpolate(OVERLAPPING_MISSES, overlap_share),
            other_cycles_per_instr: interpolate(OTHER_CYCLES_PER_INSTR, other_share),
            prefetched_share,
        }
    }
}

/// A profile file's program. Such a file has no timing: an instruction takes its share of an issue slot, a hit in the
/// shared cache takes its latency, and a miss that of memory, divided by the number of overlapping misses. A prefetched
/// line takes as long as a hit, but the program never outruns its lines on the bus. Other cycles come from a prior, unless
/// the file states the solo speed.
pub fn from_file(file: &ProfileFile, machine: &MachineSpec) -> ForecastResult<PhasedProgram> {
    from_file_with(file, machine, &TimingPrior::midpoint())
}

/// Misses per instruction by size in bytes, from the curve of a recording, or else from the facts about the deepest
/// cache that a running program used.
fn miss_points(file: &ProfileFile) -> ForecastResult<Vec<(f64, f64)>> {
    let recorded_curve = file
        .curves
        .iter()
        .find(|curve| curve.thread.is_none() && curve.policy == "lru");
    let measured_curve = file
        .profile
        .locality
        .misses_per_kilo_instr
        .values()
        .next_back();
    let points: Vec<(u64, Estimate)> = match (recorded_curve, measured_curve) {
        (Some(curve), _) => {
            let points = curve.points.iter();
            points
                .filter_map(|point| Some((point.size_bytes, point.misses_per_kilo_instr?)))
                .collect()
        }
        (None, Some(curve)) => curve.value.clone(),
        (None, None) => {
            return Err(failed(&file.program)(
                "no LRU curve of all threads in its profile",
            ));
        }
    };
    let per_instr =
        |(size_bytes, misses): (u64, Estimate)| (size_bytes as f64, misses.value / 1000.0);
    let points: Vec<(f64, f64)> = points
        .into_iter()
        .filter(|(bytes, _)| *bytes > 0)
        .map(per_instr)
        .collect();
    if points.is_empty() {
        return Err(failed(&file.program)(
            "no instruction counts in its profile (cachemate record has them)",
        ));
    }

    Ok(points)
}

/// As [`from_file`], with a given timing.
pub fn from_file_with(
    file: &ProfileFile,
    machine: &MachineSpec,
    prior: &TimingPrior,
) -> ForecastResult<PhasedProgram> {
    let profile_error = failed(&file.program);
    let cache = machine
        .last_level_cache()
        .ok_or_else(|| failed(&machine.name)("no data cache to share"))?;
    let known_points = miss_points(file)?;
    let profile_references = file
        .profile
        .rates
        .llc_refs_per_mega_instr
        .as_ref()
        .map(|refs| refs.value / 1e6);

    let file_references = file
        .records
        .zip(file.instructions)
        .map(|(records, instr)| records as f64 / instr.max(1) as f64);
    let references = profile_references
        .or(file_references)
        .ok_or_else(|| profile_error("no references in its profile"))?;
    let (issue_width, overlapping_misses) = match machine.pipeline {
        CoreModel::InOrder { issue_width, .. } => (issue_width, 1.0),
        CoreModel::OutOfOrder { issue_width, .. } => (issue_width, prior.overlapping_misses),
    };
    let (hit_cycles, miss_cycles) = (
        f64::from(cache.latency_cycles),
        f64::from(machine.memory.local_latency_cycles),
    );
    let prefetched_share = if machine.prefetchers.is_empty() {
        0.0
    } else {
        prior.prefetched_share
    };
    let memory = &machine.memory;
    let narrowest_bytes_per_cycle = memory
        .package_bus_bytes_per_cycle
        .unwrap_or(f64::INFINITY)
        .min(memory.bytes_per_cycle);
    let transfer_cycles =
        (1.0 + DIRTY_EVICTION_SHARE) * f64::from(cache.line_bytes) / narrowest_bytes_per_cycle;
    let stall_cycles = |waited_misses: f64| waited_misses * miss_cycles / overlapping_misses;
    let cycles_per_instr = |waited_misses: f64| {
        let hits = (references - waited_misses).max(0.0);
        let busy_cycles = 1.0 / f64::from(issue_width) + hits * hit_cycles / overlapping_misses;
        busy_cycles + stall_cycles(waited_misses)
    };
    let full_size_point = known_points
        .iter()
        .rfind(|(size, _)| *size <= cache.size_bytes as f64);
    // A curve of larger caches only has a lower bound of the misses at this size.
    let full_size_misses = full_size_point
        .or(known_points.first())
        .map_or(0.0, |(_, misses)| *misses);
    let modeled_cycles = cycles_per_instr((1.0 - prefetched_share) * full_size_misses);
    let solo_cycles = file
        .profile
        .rates
        .solo_instr_per_cycle
        .as_ref()
        .map(|speed| 1.0 / speed.value);
    let other_cycles = solo_cycles.map_or(prior.other_cycles_per_instr, |alone| {
        (alone - modeled_cycles).max(0.0)
    });
    let point = |&(size_bytes, misses): &(f64, f64)| {
        let waited_misses = (1.0 - prefetched_share) * misses;
        let timely_cycles = cycles_per_instr(waited_misses) + other_cycles;
        // Without prefetches, a core waits for its misses, so that memory's latency limits it.
        let late_cycles = if prefetched_share > 0.0 {
            (misses * transfer_cycles - timely_cycles).max(0.0)
        } else {
            0.0
        };
        let without_prefetch = UnprefetchedRates {
            cycles_per_instr: cycles_per_instr(misses) + other_cycles,
            demand_fills_per_instr: misses,
            writebacks_per_instr: DIRTY_EVICTION_SHARE * misses,
            memory_stall_cycles_per_instr: stall_cycles(misses),
        };
        SizePoint {
            size_bytes,
            cycles_per_instr: timely_cycles + late_cycles,
            demand_fills_per_instr: waited_misses,
            prefetch_fills_per_instr: misses - waited_misses,
            memory_stall_cycles_per_instr: stall_cycles(waited_misses) + late_cycles,
            writebacks_per_instr: without_prefetch.writebacks_per_instr,
            without_prefetch: (prefetched_share > 0.0).then_some(without_prefetch),
        }
    };
    let phase = ProgramPhase {
        instructions: None,
        references_per_instr: references,
        points: known_points.iter().map(point).collect(),
        footprint_bytes: None,
        private_levels: Vec::new(),
        sharing: Vec::new(),
        half_private_extra_cycles_per_instr: 0.0,
    };
    let program = PhasedProgram {
        demand: Demand::default(),
        ..PhasedProgram::endless_program(file.program.clone(), phase)
    };
    program.check().map_err(failed(&file.program))?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    use cachemate_core::{CacheLevel, Fact, FactSource};
    use cachemate_trace::ProfileSource;

    use super::*;

    /// Does a program whose curve begins beyond the cache's size still take the cycles of its solo speed, misses included?
    #[test]
    fn a_curve_of_larger_caches_still_explains_the_solo_speed() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let mut file = ProfileFile::new("a", ProfileSource::default());
        (file.records, file.instructions) = (Some(20), Some(1000));
        let curve = vec![(8 << 20, Estimate::exact(5.0))];
        let curve = Fact::new(curve, FactSource::Counters, 0);
        let curves = &mut file.profile.locality.misses_per_kilo_instr;
        curves.insert(CacheLevel::L2, curve);
        let speed = Fact::from_measurement(Estimate::exact(0.25), FactSource::Counters, 0);
        file.profile.rates.solo_instr_per_cycle = Some(speed);
        let program = from_file(&file, &machine).unwrap();
        let cycles_per_instr = program.phases[0].points[0].cycles_per_instr;
        assert!((cycles_per_instr - 4.0).abs() < 1e-9, "{cycles_per_instr}");
    }
}
