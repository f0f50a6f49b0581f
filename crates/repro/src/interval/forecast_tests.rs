//! Do walks and forecasts agree with the cycle-level machine, whose programs and co-runs they never saw?

use std::collections::VecDeque;

use cachemate_core::{
    BatchEnd, CoreSamples, CpuId, FAR_DEPENDENCE, MachineSpec, ReplacementPolicy, SampledAccess,
    StreamSample,
};
use cachemate_forecast::walked::walk_sample;
use cachemate_forecast::{TimedProgram, forecast_together};
use cachemate_interval::SizePoint;
use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
use cachemate_locality::stream_sampler::StreamSampler;
use cachemate_locality::window_walk::DependenceRule;
use cachemate_sim::machine::SimOptions;

use super::nominal;
use crate::corun::CoRunBench;
use crate::mean;
use crate::run_request::solo_run;
use crate::workload::{Workload, WorkloadJob};

/// A first-level cache whose misses a recording contains, and for each of the latest accesses before it the recorded
/// access that its value depends on.
struct RecordingFilter {
    cache: CacheSim,
    sources: VecDeque<Option<u64>>,
    kept_count: u64,
}

impl RecordingFilter {
    fn new() -> Self {
        let geometry = CacheGeometry {
            sets: 64,
            ways: 8,
            slices: 1,
        };
        RecordingFilter {
            cache: CacheSim::new(geometry, Replacement::Lru).unwrap(),
            sources: VecDeque::new(),
            kept_count: 0,
        }
    }

    /// The access with the dependence that its record states; `None` if it hits the filter.
    fn pass(&mut self, access: SampledAccess) -> Option<SampledAccess> {
        let back = usize::from(access.dependence);
        let source = self.sources.len().checked_sub(back).filter(|_| back > 0);
        let source = source.and_then(|index| self.sources.get(index).copied().flatten());
        let is_kept = self.cache.push(&[access.line]) > 0;
        let value_source = if is_kept {
            Some(self.kept_count)
        } else {
            source
        };
        self.sources.push_back(value_source);
        if self.sources.len() > usize::from(u8::MAX) {
            self.sources.pop_front();
        }
        if !is_kept {
            return None;
        }

        let dependence = source.map_or(0, |source| {
            (self.kept_count - source).min(u64::from(FAR_DEPENDENCE)) as u8
        });
        self.kept_count += 1;
        Some(SampledAccess {
            dependence,
            ..access
        })
    }
}

/// Samples the first instructions of a simulated program as a recording of it would be sampled; its dependences are
/// those of its algorithm. First touches count as misses at every size, because the run that is compared begins with
/// empty caches.
fn sample_program(job: &WorkloadJob, until_instr: f64) -> StreamSample {
    let mut sampler = StreamSampler::new();
    let mut filter = RecordingFilter::new();
    let mut source = job.start_threads(0).unwrap().remove(0);
    let (mut batch, mut instructions, mut gap) = (Vec::new(), 0u64, 0u64);
    let mut since_load = 0u8;

    while (instructions as f64) < until_instr {
        batch.clear();
        let batch_end = source.next_batch(&mut batch);
        let mut accesses = Vec::new();
        for access in &batch {
            instructions += access.instructions();
            gap += access.instructions();
            if !access.is_data() {
                continue;
            }
            let dependence = if access.is_dependent() { since_load } else { 0 };
            since_load = if access.is_store() {
                since_load.saturating_add(u8::from(since_load > 0))
            } else {
                1
            };

            let sampled = SampledAccess {
                line: access.address() / 64,
                gap,
                is_store: access.is_store(),
                dependence,
                ..SampledAccess::default()
            };
            if let Some(recorded) = filter.pass(sampled) {
                accesses.push(recorded);
                gap = 0;
            }
        }
        sampler.push(accesses).unwrap();
        assert!(matches!(batch_end, BatchEnd::More), "{} sleeps", job.name);
    }

    let (sample, _) = sampler
        .finish(64, 4096, true, &CoreSamples::default())
        .unwrap();
    StreamSample {
        footprint_lines: 1 << 40,
        ..sample
    }
}

/// Are cycles per instruction those of the cycle-level machine within 12 % in the mean, for programs of every kind on
/// two machines, none of which the walk was fitted to? The largest errors are those of streams that are prefetched.
#[test]
fn walks_come_near_the_cycles_of_the_cycle_level_machine() {
    let (mut errors, mut report) = (Vec::new(), String::new());

    for machine_name in ["opteron-2350", "xeon-x5365-4"] {
        for program in [
            "art", "swim", "mcf-2006", "twolf", "vpr", "soplex", "equake", "bzip2",
        ] {
            let job = WorkloadJob::new(program, 7).with_cpus([0].into_iter().collect());
            let workload = Workload {
                options: SimOptions {
                    seed: 7,
                    is_resident: true,
                    ..SimOptions::default()
                },
                ..Workload::from_machine_name(machine_name, vec![job.clone()], 7).unwrap()
            }
            .with_length(0, 6_000_000);
            let (range, rates) = solo_run(&workload).unwrap();
            let sample = sample_program(&job, range.to_instr);
            let walked = walk_sample(
                program,
                &sample,
                &workload.machine,
                DependenceRule::Recorded,
            )
            .unwrap();
            let instructions: f64 = walked
                .program
                .phases
                .iter()
                .filter_map(|phase| phase.instructions)
                .sum();
            let total = |rate: fn(&SizePoint) -> f64| {
                let phases = walked.program.phases.iter();
                let products = phases
                    .filter_map(|phase| Some(rate(phase.points.last()?) * phase.instructions?));
                products.sum::<f64>() / instructions
            };
            let found = total(|point| point.cycles_per_instr);
            let expected = 1.0 / rates.instr_per_cycle;
            let error = found / expected - 1.0;
            report += &format!(
                "{machine_name} {program}: {found:.3} for {expected:.3}, {:.1} %; sampling {:.1} %; MPKI {:.2} + {:.2} for {:.2}\n",
                100.0 * error,
                100.0 * walked.sampling_error_share,
                1000.0 * total(|point| point.demand_fills_per_instr),
                1000.0 * total(|point| point.prefetch_fills_per_instr),
                rates.misses_per_kilo_instr,
            );
            errors.push(error.abs());
        }
    }
    let mean_error = mean(&errors);
    assert!(mean_error < 0.12, "{mean_error}\n{report}");
}

/// A program's forecast slowdown beside copies of itself, or beside another program, and its
/// slowdown on the cycle-level machine.
fn forecast_and_true_slowdown(machine: &MachineSpec, kernels: &[&str]) -> (f64, f64) {
    let mut bench = CoRunBench::load("opteron-2350", 1, 2_000_000, 3_000_000).unwrap();
    bench.machine = machine.clone();
    let job_of = |(index, kernel): (usize, &&str)| WorkloadJob::new(kernel, 1 + index as u64);
    let jobs: Vec<WorkloadJob> = kernels.iter().enumerate().map(job_of).collect();
    let timed: Vec<TimedProgram> = jobs
        .iter()
        .map(|job| {
            let program = nominal::measure_instructions(job, machine, 2_000_000, 4_000_000);
            TimedProgram::from_phases(program.unwrap())
        })
        .collect();
    let forecast = forecast_together(machine, &timed.iter().collect::<Vec<_>>()).unwrap();
    let placed: Vec<_> = jobs.iter().cloned().zip((0..).map(CpuId)).collect();
    let together = bench.run(&placed).unwrap()[0].instr_per_cycle;
    let alone = bench.solo_rates(&jobs[0]).unwrap().instr_per_cycle;
    (forecast[0].slowdown.value, alone / together - 1.0)
}

/// Do streams on 2 and 4 cores slow each other down as on the cycle-level machine, from a memory that they saturate
/// four times over to one that they hardly use? Prefetchers are off, because the machine drops prefetches of a busy
/// memory, which is another effect.
#[test]
fn streams_slow_each_other_down_as_on_the_cycle_level_machine() {
    let mut rows = Vec::new();
    for gigabytes_per_s in [2.0, 6.0, 50.0] {
        let mut machine = cachemate_spec::load_machine("opteron-2350").unwrap();
        machine.prefetchers.clear();
        machine.memory.bytes_per_cycle = gigabytes_per_s * 1e9 / machine.hertz as f64;
        for cores in [1, 2, 4] {
            let kernels = vec!["libquantum"; cores];
            let (forecast, truth) = forecast_and_true_slowdown(&machine, &kernels);
            rows.push((gigabytes_per_s, cores, forecast, truth));
        }
    }
    let is_near = |&(_, _, forecast, truth): &(f64, usize, f64, f64)| {
        ((1.0 + forecast) / (1.0 + truth) - 1.0).abs() < 0.15
    };
    assert!(rows.iter().all(is_near), "{rows:.3?}");
}

/// Does a program that reuses its lines lose to a stream what the cycle-level machine says, under LRU, under SRRIP and
/// under DRRIP, whose insertion of streams the machine's description implies?
#[test]
fn a_stream_takes_what_the_replacement_policy_leaves_it() {
    let mut rows = Vec::new();
    for replacement in [
        ReplacementPolicy::Lru,
        ReplacementPolicy::Srrip,
        ReplacementPolicy::Drrip,
    ] {
        for victim in ["art", "omnetpp"] {
            let mut machine = cachemate_spec::load_machine("opteron-2350").unwrap();
            machine.prefetchers.clear();
            let level = machine.last_level_cache().map(|cache| cache.level);
            for cache in machine.caches.iter_mut() {
                if Some(cache.level) == level {
                    cache.replacement = replacement;
                }
            }
            let (forecast, truth) = forecast_and_true_slowdown(&machine, &[victim, "libquantum"]);
            rows.push((replacement, victim, forecast, truth));
        }
    }

    let is_near = |&(_, _, forecast, truth): &(ReplacementPolicy, &str, f64, f64)| {
        (forecast - truth).abs() < 0.05
    };
    assert!(rows.iter().all(is_near), "{rows:.3?}");
}

/// If a bus has slots for few reads, and two programs each fill them alone: do both take about twice as long together,
/// however many slots there are, as work conservation demands and the cycle-level machine shows?
#[test]
fn two_programs_that_fill_the_slots_of_a_bus_halve_each_other() {
    let mut rows = Vec::new();
    for slots in [4, 8, 12, 24] {
        let mut machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        machine.memory.scheduling.requests_in_flight = Some(slots);
        let (forecast, truth) = forecast_and_true_slowdown(&machine, &["libquantum", "libquantum"]);
        rows.push((slots, forecast, truth));
    }

    let is_near = |&(_, forecast, truth): &(u32, f64, f64)| {
        forecast < 1.25 && ((1.0 + forecast) / (1.0 + truth) - 1.0).abs() < 0.15
    };
    assert!(rows.iter().all(is_near), "{rows:.3?}");
}
