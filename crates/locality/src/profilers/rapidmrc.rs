//! Converts traced addresses to miss-rate curves: RapidMRC as a profiler (thesis ch. 5; [`crate::rapidmrc`] does the
//! computation).

use cachemate_core::{
    AddressKind, CacheLevel, CounterEvent, EventCounts, EvidenceKind, Fact, FactSource,
    Observation, ProbeEvidence, Profiler, Profiles, TracedCache,
};

use super::{
    active_tasks, find_sample, has_exclusive_units, probe_evidence, retain_live, share_bytes,
};
use crate::curve::MissRateCurve;
use crate::rapidmrc::{
    LogCounts, MissLog, SetGeometry, Warmup, survival_curve_with_reach, trace_curve,
};

/// Smallest page of hosts and machines; below it, physical addresses are virtual ones.
const PAGE_BYTES: u64 = 4096;

/// The conversion of a log to a curve.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum CurveForm {
    /// Uses [`survival_curve`](crate::rapidmrc::survival::survival_curve), which needs no warm-up and models the
    /// entries that the log loses.
    Survival,
    /// Uses [`trace_curve`] and the vertical shift, as in the thesis.
    Thesis {
        /// The part of the log that only fills the stack.
        warmup: Warmup,
        /// Whether runs of equal values are converted to ascending lines (thesis 5.3.1).
        corrects_repeats: bool,
    },
}

/// Fills `misses_per_kilo_instr`.
#[derive(Clone, Debug)]
pub struct RapidMrcProfiler {
    cache: TracedCache,
    form: CurveForm,
    /// Half-width of the interval of every point: the mean distance of this form's curves from the true ones.
    half_width: f64,
}

impl RapidMrcProfiler {
    /// Builds a profiler with the recommended form, whose curves are accurate to half a miss per thousand instructions
    /// (RM-1).
    pub fn new(cache: TracedCache) -> Self {
        RapidMrcProfiler {
            cache,
            form: CurveForm::Survival,
            half_width: 0.5,
        }
    }

    /// Builds a profiler with the thesis's settings: automatic warm-up, repeats corrected, curves accurate to 1.02
    /// misses per thousand instructions.
    pub fn with_thesis_defaults(cache: TracedCache) -> Self {
        let form = CurveForm::Thesis {
            warmup: Warmup::Automatic,
            corrects_repeats: true,
        };
        RapidMrcProfiler {
            cache,
            form,
            half_width: 1.02,
        }
    }

    /// Sets in which logged lines compete; `None` for a fully associative cache.
    ///
    /// Colors leave the place of a line in its page, so lines at different places never compete: a program whose misses
    /// are at two of 32 places uses a sixteenth of each color. Between its frames, a color has few conflicts (thesis
    /// Figure 5.10d). In a cache that is partitioned by ways, the frames are random, and known from virtual addresses
    /// only: the physical ones of simulators are not always those of a cache with sets.
    fn set_geometry(&self, line_bytes: u64, space: AddressKind) -> Option<SetGeometry> {
        let TracedCache {
            size_bytes,
            colors,
            ways,
            ..
        } = self.cache;
        let page_lines = PAGE_BYTES / line_bytes;
        let sets = size_bytes / line_bytes / u64::from(ways.max(1));
        if colors == 1 {
            return (sets > 0 && space == AddressKind::Virtual)
                .then_some(SetGeometry { sets, page_lines });
        }
        let sets_per_color = sets / u64::from(colors.max(1));
        // The bits of a set's index below those of the color; slices, of which there may be three, are chosen by a
        // hash.
        let places = (sets_per_color & sets_per_color.wrapping_neg()).min(page_lines);
        (places > 1).then_some(SetGeometry {
            sets: places,
            page_lines: places,
        })
    }

    /// The curve, and the largest size in bytes up to which the log determines it, with the rate there; `None` if the
    /// log determines nothing.
    fn estimate_curve(
        &self,
        trace: &MissLog<'_>,
        log_counts: &LogCounts,
        space: AddressKind,
    ) -> Option<(MissRateCurve, (u64, f64))> {
        let points = u64::from(self.cache.points.max(1));
        let sizes: Vec<u64> = (1..=points)
            .map(|step| self.cache.size_bytes * step / points)
            .collect();
        match self.form {
            CurveForm::Survival => {
                let geometry = self.set_geometry(trace.line_bytes.max(1), space);
                survival_curve_with_reach(trace, log_counts, &sizes, geometry)
            }
            CurveForm::Thesis {
                warmup,
                corrects_repeats: correct_repeats,
            } => {
                let lines = data_entries(trace);
                let curve = trace_curve(
                    &MissLog {
                        lines: &lines,
                        code_positions: &[],
                        ..*trace
                    },
                    &sizes,
                    warmup,
                    correct_repeats,
                )?;
                let shifted_curve = log_counts
                    .measured_point
                    .and_then(|(size, rate)| curve.shift_through(size, rate));
                // All sizes of the curve are determined.
                Some((
                    shifted_curve.map_or(curve, |(shifted, _)| shifted),
                    (self.cache.size_bytes, 0.0),
                ))
            }
        }
    }
}

/// The entries that the thesis's log, which records only data accesses, would contain.
fn data_entries(trace: &MissLog<'_>) -> Vec<u64> {
    let mut code_positions = trace.code_positions.iter().peekable();
    let is_data = |(index, _): &(usize, &u64)| {
        code_positions
            .next_if(|&&position| position as usize == *index)
            .is_none()
    };
    trace
        .lines
        .iter()
        .enumerate()
        .filter(is_data)
        .map(|(_, &line)| line)
        .collect()
}

/// Misses of those caches whose misses the log contains; `None` if one of them was not counted.
fn logged_misses(counts: &EventCounts, includes_code: bool) -> Option<f64> {
    let data = counts.get(CounterEvent::Misses(CacheLevel::L1Data))?;
    if includes_code {
        Some(data + counts.get(CounterEvent::Misses(CacheLevel::L1Instruction))?)
    } else {
        Some(data)
    }
}

impl Profiler for RapidMrcProfiler {
    fn evidence(&self) -> (&'static str, Option<EvidenceKind>) {
        ("RapidMRC", Some(EvidenceKind::MissTraces))
    }
    fn update(&mut self, observation: &Observation, profiles: &mut Profiles) {
        retain_live(observation, profiles);
        for evidence in probe_evidence(observation) {
            let ProbeEvidence::Trace {
                task,
                space,
                line_bytes,
                lines,
                code_positions: code,
                lost: lost_accesses,
                counts,
                ..
            } = evidence
            else {
                continue;
            };
            let (Some(profile), Some(instructions)) = (
                profiles.get_mut(task),
                counts.get(CounterEvent::Instructions),
            ) else {
                continue;
            };
            let trace = MissLog {
                lines,
                code_positions: code,
                line_bytes: u64::from(*line_bytes),
                instructions,
                lost_accesses: *lost_accesses,
            };
            // The operating point of the task, measured in the same window. While it is traced, the program runs at a
            // quarter of its speed but executes the same instructions, so its rate per instruction is valid. If other
            // tasks fill the same units, the occupancy of the program is unknown, so its rate is not a point of the
            // curve.
            let measured_mpki = counts
                .get(CounterEvent::Misses(self.cache.level))
                .map(|misses| 1000.0 * misses / instructions);
            let TracedCache {
                size_bytes, points, ..
            } = self.cache;
            let exclusive_task = find_sample(observation, *task)
                .filter(|task| has_exclusive_units(observation, &active_tasks(observation), task));
            let share_size_bytes =
                exclusive_task.map(|task| share_bytes(observation, task, &self.cache));
            let log_counts = LogCounts {
                logged_level_misses: logged_misses(counts, !code.is_empty()),
                // A share smaller than the curve's first point is not on the curve.
                measured_point: share_size_bytes
                    .filter(|&size| size >= size_bytes / u64::from(points.max(1)))
                    .zip(measured_mpki),
            };
            if let Some((curve, reach)) = self.estimate_curve(&trace, &log_counts, *space) {
                let points = curve.to_profile_points_up_to(self.half_width, reach);
                let fact = Fact::new(points, FactSource::MissTrace, observation.window);
                profile
                    .locality
                    .misses_per_kilo_instr
                    .insert(self.cache.level, fact);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::*;
    use super::*;
    use cachemate_core::{ProcessId, ShareMember, TaskId};

    const CACHE: TracedCache = TracedCache {
        level: CacheLevel::L2,
        size_bytes: 160 * 128,
        colors: 16,
        ways: 10,
        points: 16,
    };

    fn traced_window(lines: Vec<u64>, counts: EventCounts) -> Observation {
        let evidence = ProbeEvidence::Trace {
            task: TaskId(0),
            space: AddressKind::Virtual,
            line_bytes: 128,
            lines,
            code_positions: Vec::new(),
            lost: None,
            counts,
            elapsed_ns: 1,
        };
        answered_window(0, &[0], evidence)
    }
    /// A loop over 75 lines, which always misses with 7 of 16 colors (70 lines) and never with 8 (80 lines).
    fn looped_lines() -> Vec<u64> {
        (0..3000).map(|index| index * 7 % 75).collect()
    }
    fn curve_of(observation: &Observation) -> Option<Vec<f64>> {
        rates_by(RapidMrcProfiler::new(CACHE), observation)
    }
    fn rates_by(mut profiler: RapidMrcProfiler, observation: &Observation) -> Option<Vec<f64>> {
        let mut profiles = Profiles::new();
        profiler.update(observation, &mut profiles);
        let curve = profiles[&TaskId(0)].misses_per_kilo_instr().cloned()?;
        assert_eq!(
            curve.iter().map(|(size, _)| *size).collect::<Vec<_>>(),
            (1..=16).map(|n| n * 1280).collect::<Vec<_>>()
        );
        Some(curve.iter().map(|(_, rate)| rate.value).collect())
    }

    /// Allows for the 75 first touches among 3000 accesses, which raise the measured rates.
    fn assert_close(rates: &[f64], expected: &[f64]) {
        assert!(
            rates
                .iter()
                .zip(expected)
                .all(|(rate, expected)| (rate - expected).abs() < 0.05),
            "{rates:?}"
        );
    }

    /// Does the curve of a loop fall at the size at which the loop fits, and have the right rate per thousand
    /// instructions?
    #[test]
    fn a_loops_curve_falls_at_the_size_where_it_fits() {
        let rates = curve_of(&traced_window(
            looped_lines(),
            EventCounts::exact([(CounterEvent::Instructions, 60_000)]),
        ))
        .unwrap();
        assert_close(&rates, &[vec![50.0; 7], vec![0.0; 9]].concat());
    }

    /// Do lines at one place of their pages compete for that place only, in every number of colors?
    #[test]
    fn lines_at_one_place_of_their_pages_have_a_part_of_each_color() {
        // POWER5's L2: a color has 32 sets of 10 ways in each of three slices, one set of each per place.
        let cache = TracedCache {
            size_bytes: 16 * 960 * 128,
            ..CACHE
        };
        for (stride, fits) in [(32, 2), (1, 1)] {
            let lines = (0..40_000).map(|index| index % 40 * stride).collect();
            let observation = traced_window(
                lines,
                EventCounts::exact([(CounterEvent::Instructions, 800_000)]),
            );
            let mut profiles = Profiles::new();
            RapidMrcProfiler::new(cache).update(&observation, &mut profiles);
            let curve = profiles[&TaskId(0)]
                .misses_per_kilo_instr()
                .cloned()
                .unwrap();
            let rates: Vec<f64> = curve.iter().map(|(_, rate)| rate.value).collect();
            assert_close(
                &rates,
                &[vec![50.0; fits - 1], vec![0.0; 17 - fits]].concat(),
            );
        }
    }

    /// Is the curve shifted through the rate measured at the share in use?
    #[test]
    fn the_curve_passes_through_the_point_in_use() {
        let counts = EventCounts::exact([
            (CounterEvent::Instructions, 60_000),
            (CounterEvent::Misses(CacheLevel::L2), 180),
        ]);
        let observation = with_colors(traced_window(looped_lines(), counts), 10);
        assert_close(
            &curve_of(&observation).unwrap(),
            &[vec![53.0; 7], vec![3.0; 9]].concat(),
        );
    }

    /// Is the rate that a task has with others in the same share ignored, but the rate in its own share used?
    #[test]
    fn only_the_rate_in_a_tasks_own_share_is_used() {
        let counts = EventCounts::exact([
            (CounterEvent::Instructions, 60_000),
            (CounterEvent::Misses(CacheLevel::L2), 180),
        ]);
        let mut observation = traced_window(looped_lines(), counts);
        observation.tasks.push(synthetic_sample(1, &[]));
        assert_close(
            &curve_of(&observation).unwrap(),
            &[vec![50.0; 7], vec![0.0; 9]].concat(),
        );
        let mut observation = with_colors(observation, 10);
        let mut other_share = observation.applied.shares[0].clone();
        other_share.share.members = vec![ShareMember::Process(ProcessId(1))];
        observation.applied.shares.push(other_share);
        assert_close(
            &curve_of(&observation).unwrap(),
            &[vec![53.0; 7], vec![3.0; 9]].concat(),
        );
    }

    /// Does the thesis's form give the same step for this trace, with its own shift?
    #[test]
    fn the_thesiss_form_gives_the_same_step() {
        let counts = EventCounts::exact([
            (CounterEvent::Instructions, 60_000),
            (CounterEvent::Misses(CacheLevel::L2), 180),
        ]);
        let observation = with_colors(traced_window(looped_lines(), counts), 10);
        let rates = rates_by(RapidMrcProfiler::with_thesis_defaults(CACHE), &observation).unwrap();
        assert_eq!(rates, [vec![53.0; 7], vec![3.0; 9]].concat());
    }

    /// Does the curve of a program whose code fills the cache fall at the size of the code, unlike in the thesis's
    /// form?
    #[test]
    fn the_curve_falls_at_the_size_of_the_code() {
        // Two lines of data alternate with a loop of 75 lines of code.
        let line = |index: u64| {
            if index.is_multiple_of(2) {
                7 + index % 4
            } else {
                1_000 + index / 2 % 75
            }
        };
        let lines: Vec<u64> = (0..6000).map(line).collect();
        let misses = [
            CounterEvent::Misses(CacheLevel::L1Data),
            CounterEvent::Misses(CacheLevel::L1Instruction),
        ]
        .map(|event| (event, 3_000));
        let mut observation = traced_window(
            lines,
            EventCounts::exact([(CounterEvent::Instructions, 60_000), misses[0], misses[1]]),
        );
        let ProbeEvidence::Trace {
            code_positions: code,
            ..
        } = &mut observation.probe_results[0].evidence
        else {
            unreachable!()
        };
        *code = (0..3000).map(|index| 2 * index + 1).collect();
        assert_close(
            &curve_of(&observation).unwrap(),
            &[vec![50.0; 7], vec![0.0; 9]].concat(),
        );
        let thesis = rates_by(RapidMrcProfiler::with_thesis_defaults(CACHE), &observation).unwrap();
        assert!(thesis.iter().all(|rate| *rate < 0.1), "{thesis:?}");
    }

    /// Do virtual addresses give a curve with the conflicts of a cache that is partitioned by ways, and physical ones
    /// that of an LRU stack?
    #[test]
    fn virtual_addresses_show_set_conflicts_and_physical_do_not() {
        // 16 lines of 128 bytes in each of 16 pages; a way has a line of each offset for 8 pages.
        let cache = TracedCache {
            size_bytes: 16 * 256 * 128,
            colors: 1,
            ways: 16,
            ..CACHE
        };
        let lines: Vec<u64> = (0..40_000)
            .map(|index| index / 16 % 16 * 32 + index % 16)
            .collect();
        let mut observation = traced_window(
            lines,
            EventCounts::exact([(CounterEvent::Instructions, 800_000)]),
        );
        let mut rate_in_two_ways = |traced: AddressKind| {
            let ProbeEvidence::Trace { space, .. } = &mut observation.probe_results[0].evidence
            else {
                unreachable!()
            };
            *space = traced;
            let mut profiles = Profiles::new();
            RapidMrcProfiler::new(cache).update(&observation, &mut profiles);
            profiles[&TaskId(0)].misses_per_kilo_instr().unwrap()[1]
                .1
                .value
        };
        // All 256 lines fit into two ways of 256 lines; of 15 others with the same offset, two or more are in the set
        // of a line with a probability of 1 - (7/8)^15 - 15/8 (7/8)^14 = 0.576.
        assert!(rate_in_two_ways(AddressKind::Physical) < 0.4);
        assert!((rate_in_two_ways(AddressKind::Virtual) - 50.0 * 0.576).abs() < 0.5);
    }

    /// Is there no curve if instructions were not counted, because no rate per instruction can be computed?
    #[test]
    fn there_is_no_curve_without_instruction_counts() {
        assert_eq!(
            curve_of(&traced_window(looped_lines(), EventCounts::exact([]))),
            None
        );
    }
}
