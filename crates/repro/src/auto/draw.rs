//! Draws mixes by family from a seed. Programs are described by their solo behavior, relative to the machine.
//!
//! A draw depends on the machine's caches, CPUs and latencies, but on no policy. Sizes are shares of the contended
//! cache, so that a family has the same meaning on every machine.

use cachemate_core::{CacheLevel, Goal, MachineSpec, SplitMix64};
use cachemate_interval::{
    Demand, IntervalJob, PhasedProgram, PrivateLevel, ProgramPhase, RegionUse, SizePoint,
};
use serde::Serialize;

/// A family of mixes, defined by the property that it exercises.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MixFamily {
    /// Threads that share data, with enough room for all of it.
    Sharing,
    /// Programs that reuse data, together with streams.
    Contention,
    /// Twice as many programs as CPUs.
    Overcommitted,
    /// More programs that reuse data than can be separated: only cache partitioning helps.
    Space,
    /// One program has a promised maximum slowdown.
    Floors,
    /// Sharing clusters, streams and programs that reuse data, all at once.
    Crossed,
    /// Programs that change their behavior.
    Phased,
    /// Programs that arrive and exit.
    Arrivals,
    /// Programs that no policy can speed up.
    Null,
}

/// All families.
pub const FAMILIES: [MixFamily; 9] = [
    MixFamily::Sharing,
    MixFamily::Contention,
    MixFamily::Overcommitted,
    MixFamily::Space,
    MixFamily::Floors,
    MixFamily::Crossed,
    MixFamily::Phased,
    MixFamily::Arrivals,
    MixFamily::Null,
];

impl MixFamily {
    /// The name that users see and that files have.
    pub fn name(self) -> &'static str {
        match self {
            MixFamily::Sharing => "sharing",
            MixFamily::Contention => "contention",
            MixFamily::Overcommitted => "overcommitted",
            MixFamily::Space => "space",
            MixFamily::Floors => "floors",
            MixFamily::Crossed => "crossed",
            MixFamily::Phased => "phased",
            MixFamily::Arrivals => "arrivals",
            MixFamily::Null => "null",
        }
    }
}

/// Figures of the machine to which the sizes and rates of drawn programs are relative.
struct MachineFigures {
    cache_bytes: f64,
    latency_cycles: f64,
    cache_count: usize,
    cores_per_cache: usize,
    cpu_count: usize,
    hertz: f64,
}

impl MachineFigures {
    fn from_machine(machine: &MachineSpec) -> Option<Self> {
        let last_level = machine.last_level_cache()?;
        let cores_per_cache = last_level.shared_by_cores.max(1) as usize;
        Some(MachineFigures {
            cache_bytes: last_level.size_bytes as f64,
            latency_cycles: f64::from(machine.memory.local_latency_cycles),
            cache_count: (machine.cores() as usize / cores_per_cache).max(1),
            cores_per_cache,
            cpu_count: machine.cpus() as usize,
            hertz: machine.hertz as f64,
        })
    }

    fn cores(&self) -> usize {
        self.cache_count * self.cores_per_cache
    }
}

struct MixGenerator<'a> {
    machine: &'a MachineFigures,
    rng: SplitMix64,
}

const PROFILE_POINTS: u32 = 64;
/// Maximum number of tasks; larger machines remain partly idle.
const MAX_TASKS: usize = 16;

impl MixGenerator<'_> {
    fn draw_between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.rng.draw_unit()
    }

    /// A phase with these fills per instruction, as a function of resident bytes; `exposed_share`
    /// is the share of the memory latency for which a fill stalls.
    fn build_phase(
        &mut self,
        fills_at: impl Fn(f64) -> f64,
        exposed_share: f64,
        base_cycles: f64,
    ) -> ProgramPhase {
        let figures = self.machine;
        let point = |step: u32| {
            let size_bytes = figures.cache_bytes * f64::from(step) / f64::from(PROFILE_POINTS);
            let fills = fills_at(size_bytes);
            let stall = fills * figures.latency_cycles * exposed_share;
            SizePoint {
                size_bytes,
                cycles_per_instr: base_cycles + stall,
                demand_fills_per_instr: fills,
                prefetch_fills_per_instr: 0.0,
                writebacks_per_instr: 0.2 * fills,
                memory_stall_cycles_per_instr: stall,
                without_prefetch: None,
            }
        };

        let references_per_instr = fills_at(0.0).max(1e-4);
        let l1_level = PrivateLevel {
            level: CacheLevel::L1Data,
            references_per_instr: 0.3,
            misses_per_instr: references_per_instr,
        };
        ProgramPhase {
            instructions: None,
            references_per_instr,
            points: (1..=PROFILE_POINTS).map(point).collect(),
            footprint_bytes: None,
            private_levels: vec![l1_level],
            sharing: Vec::new(),
            half_private_extra_cycles_per_instr: 0.0,
        }
    }

    /// A program that reuses one or two working sets of this share of the cache, and slows down
    /// with less space.
    fn draw_reuser(&mut self, share: f64) -> ProgramPhase {
        let bytes = share * self.machine.cache_bytes;
        let (fills_per_instr, hot_share) =
            (self.draw_between(0.004, 0.02), self.draw_between(0.1, 0.5));
        let (hot_weight, base) = (self.draw_between(0.0, 0.6), self.draw_between(0.5, 1.2));
        let overlap = self.draw_between(0.4, 1.0);
        let missing_share = |occupancy: f64, needed: f64| (1.0 - occupancy / needed).max(0.0);
        let fills = move |occupancy: f64| {
            let missing_shares = hot_weight * missing_share(occupancy, hot_share * bytes)
                + (1.0 - hot_weight) * missing_share(occupancy, bytes);
            fills_per_instr * missing_shares + 1e-6
        };
        self.build_phase(fills, overlap, base)
    }

    /// A program that streams and reuses nothing.
    fn draw_stream(&mut self) -> ProgramPhase {
        let (rate, base, overlap) = (
            self.draw_between(0.004, 0.012),
            self.draw_between(0.4, 1.0),
            self.draw_between(0.15, 0.4),
        );
        self.build_phase(move |_| rate, overlap, base)
    }

    /// A program that hardly uses the cache.
    fn draw_quiet_phase(&mut self) -> ProgramPhase {
        let (rate, base) = (self.draw_between(1e-5, 2e-4), self.draw_between(0.4, 1.5));
        let bytes = 0.02 * self.machine.cache_bytes;
        self.build_phase(
            move |occupancy| rate * (1.0 - occupancy / bytes).max(0.0) + 1e-7,
            0.7,
            base,
        )
    }

    /// A process of `threads` threads that read and write one region.
    fn draw_sharing_process(&mut self, number: u32, threads: u32) -> IntervalJob {
        let share = self.draw_between(0.05, 0.2);
        let mut phase = self.draw_reuser(share);
        let (reads, writes) = (
            self.draw_between(0.002, 0.006),
            self.draw_between(0.0005, 0.002),
        );
        let bytes = self.draw_between(0.02, 0.1) * self.machine.cache_bytes;
        phase.sharing = vec![RegionUse {
            region: number,
            bytes,
            reads_per_instr: reads,
            writes_per_instr: writes,
        }];
        IntervalJob {
            threads,
            ..single_phase_job(&format!("sharers-{number}"), phase)
        }
    }

    fn shuffle_jobs(&mut self, mut jobs: Vec<IntervalJob>) -> Vec<IntervalJob> {
        self.rng.shuffle(&mut jobs);
        jobs
    }

    /// A mix of `keepers` programs that reuse data and `streams` streams.
    fn draw_keepers_and_streams(
        &mut self,
        keepers: usize,
        share_range: (f64, f64),
        streams: usize,
    ) -> Vec<IntervalJob> {
        let mut jobs = Vec::new();
        for index in 0..keepers {
            let share = self.draw_between(share_range.0, share_range.1);
            let phase = self.draw_reuser(share);
            jobs.push(single_phase_job(&format!("keeper-{index}"), phase));
        }
        for index in 0..streams {
            let phase = self.draw_stream();
            jobs.push(single_phase_job(&format!("stream-{index}"), phase));
        }
        self.shuffle_jobs(jobs)
    }

    fn draw_mix(&mut self, family: MixFamily, length_ns: u64) -> Vec<IntervalJob> {
        let figures = self.machine;
        let tasks = figures.cores().min(MAX_TASKS);
        let cores_per_cache = figures.cores_per_cache as f64;

        match family {
            MixFamily::Null => {
                let program_kind = self.rng.draw_below(3);
                let draw_job = |generator: &mut Self, at: usize| match program_kind {
                    0 => single_phase_job(&format!("quiet-{at}"), generator.draw_quiet_phase()),
                    1 => single_phase_job(&format!("stream-{at}"), generator.draw_stream()),
                    _ => {
                        let share = generator.draw_between(0.2, 0.6) / cores_per_cache;
                        single_phase_job(&format!("keeper-{at}"), generator.draw_reuser(share))
                    }
                };
                (0..tasks).map(|at| draw_job(self, at)).collect()
            }
            MixFamily::Contention => self.draw_keepers_and_streams(
                tasks - tasks / 2,
                (0.3 / cores_per_cache, 1.6 / cores_per_cache),
                tasks / 2,
            ),
            MixFamily::Space => {
                let streams = figures.cache_count.min(tasks / 2).max(1);
                self.draw_keepers_and_streams(
                    tasks - streams,
                    (0.4 / cores_per_cache, 1.2 / cores_per_cache),
                    streams,
                )
            }
            MixFamily::Overcommitted => {
                let task_count = figures.cpu_count.min(MAX_TASKS);
                self.draw_keepers_and_streams(
                    task_count,
                    (0.5 / cores_per_cache, 0.95 / cores_per_cache),
                    task_count,
                )
            }
            MixFamily::Floors => {
                let mut jobs = self.draw_keepers_and_streams(
                    tasks - tasks / 2,
                    (0.3 / cores_per_cache, 1.2 / cores_per_cache),
                    tasks / 2,
                );
                let goal = Goal {
                    max_slowdown: Some(0.15),
                    ..Goal::default()
                };
                if let Some(promised_job) =
                    jobs.iter_mut().find(|job| job.name.starts_with("keeper"))
                {
                    promised_job.goal = Some(goal);
                }
                jobs
            }
            MixFamily::Sharing => {
                // Quiet programs come first, because the threads of a process might otherwise happen to fill exactly
                // one cache.
                let threads = figures.cores_per_cache.min(4);
                let leading_quiet_count =
                    1 + self.rng.draw_below(figures.cores_per_cache as u64 - 1) as usize;
                let process_count = (tasks.saturating_sub(leading_quiet_count) / threads).max(1);
                let mut jobs: Vec<IntervalJob> = (0..leading_quiet_count)
                    .map(|at| single_phase_job(&format!("quiet-{at}"), self.draw_quiet_phase()))
                    .collect();
                for number in 0..process_count {
                    jobs.push(self.draw_sharing_process(number as u32, threads as u32));
                }
                for index in leading_quiet_count + process_count * threads..tasks {
                    jobs.push(single_phase_job(
                        &format!("quiet-{index}"),
                        self.draw_quiet_phase(),
                    ));
                }
                jobs
            }
            MixFamily::Crossed => {
                let threads = figures.cores_per_cache.clamp(2, 3) as u32;
                let clusters = (tasks / 2 / threads as usize).max(1) as u32;
                let remaining_tasks = tasks.saturating_sub((clusters * threads) as usize);
                let mut jobs: Vec<IntervalJob> = (0..clusters)
                    .map(|number| self.draw_sharing_process(number, threads))
                    .collect();
                jobs.extend(self.draw_keepers_and_streams(
                    remaining_tasks - remaining_tasks / 2,
                    (0.3 / cores_per_cache, 1.2 / cores_per_cache),
                    remaining_tasks / 2,
                ));
                self.shuffle_jobs(jobs)
            }
            MixFamily::Phased => {
                let mut jobs = self.draw_keepers_and_streams(
                    tasks - tasks / 2,
                    (0.3 / cores_per_cache, 1.6 / cores_per_cache),
                    tasks / 2,
                );
                for job in &mut jobs {
                    self.add_phases(job, length_ns);
                }
                jobs
            }
            MixFamily::Arrivals => {
                let mut jobs = self.draw_keepers_and_streams(
                    tasks - tasks / 2,
                    (0.3 / cores_per_cache, 1.6 / cores_per_cache),
                    tasks / 2,
                );
                for job in jobs.iter_mut().skip(tasks / 2) {
                    job.start_ns = self.rng.draw_below(length_ns / 2);
                }
                jobs
            }
        }
    }

    /// Makes the job alternate between two kinds of behavior.
    fn add_phases(&mut self, job: &mut IntervalJob, length_ns: u64) {
        let other_phase = if job.name.starts_with("stream") {
            self.draw_quiet_phase()
        } else {
            self.draw_stream()
        };

        let cycles_per_s = self.machine.hertz;
        let first_phase = job.program.phases[0].clone();
        let mut with_length = |phase: ProgramPhase| {
            let seconds = self.draw_between(0.1, 0.3) * length_ns as f64 / 1e9;
            let cycles = phase
                .points
                .last()
                .map_or(1.0, |point| point.cycles_per_instr);
            ProgramPhase {
                instructions: Some(seconds * cycles_per_s / cycles),
                ..phase
            }
        };
        let program = std::sync::Arc::make_mut(&mut job.program);
        program.phases = vec![with_length(first_phase), with_length(other_phase)];
        program.repeats_from = Some(0);
    }
}

fn single_phase_job(name: &str, phase: ProgramPhase) -> IntervalJob {
    let program = PhasedProgram {
        name: name.to_string(),
        phases: vec![phase],
        repeats_from: None,
        demand: Demand::default(),
        progress_per_instr: None,
        from_empty_cache: false,
    };
    IntervalJob {
        name: name.to_string(),
        ..IntervalJob::new(program)
    }
}

/// Draws the programs of one mix; `None` if the machine has no data cache, or the family does not apply to it.
pub fn draw_mix_jobs(
    machine: &MachineSpec,
    family: MixFamily,
    seed: u64,
    length_ns: u64,
) -> Option<Vec<IntervalJob>> {
    let figures = MachineFigures::from_machine(machine)?;
    let can_partition = machine.pages.colors.is_some()
        || machine
            .caches
            .iter()
            .any(|cache| cache.way_partitions.is_some());
    let is_inapplicable = match family {
        MixFamily::Space => !can_partition,
        MixFamily::Sharing | MixFamily::Crossed => {
            figures.cache_count < 2 || figures.cores_per_cache < 2
        }
        MixFamily::Contention | MixFamily::Phased | MixFamily::Arrivals => figures.cores() < 2,
        MixFamily::Overcommitted => figures.cores_per_cache < 2,
        MixFamily::Floors | MixFamily::Null => false,
    };

    let mut mix_generator = MixGenerator {
        machine: &figures,
        rng: SplitMix64::new(seed ^ (family as u64 + 1).wrapping_mul(0x9e37_79b9)),
    };
    (!is_inapplicable).then(|| mix_generator.draw_mix(family, length_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does every family's mix consist of valid programs, and is it the same for the same seed?
    #[test]
    fn mixes_consist_of_valid_programs_and_repeat_by_seed() {
        for machine in [
            "opteron-2350",
            "xeon-x5365",
            "epyc-7742?cores_per_package=8&contexts_per_core=1",
        ] {
            let machine = cachemate_spec::load_machine(machine).unwrap();
            for family in FAMILIES {
                let jobs = draw_mix_jobs(&machine, family, 7, 1_000_000_000_000);
                assert_eq!(jobs, draw_mix_jobs(&machine, family, 7, 1_000_000_000_000));
                for job in jobs.into_iter().flatten() {
                    job.program
                        .check()
                        .unwrap_or_else(|bad| panic!("{family:?}: {bad}"));
                }
            }
        }
    }
}
