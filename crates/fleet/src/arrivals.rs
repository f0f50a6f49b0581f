//! Services that arrive and leave. They are drawn from a seed, so every policy sees the same services.

use cachemate_core::SplitMix64;

use crate::profile::{ReferenceMix, WorkingSet};
use crate::spec::{DrawSpec, FleetService};

/// One service with its lifetime.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ServiceInstance {
    /// Index of the service's kind.
    pub kind: u16,
    /// Hours since the start of the run.
    pub arrival_hour: f64,
    /// Hour at which it leaves; infinite for a service that stays.
    pub departure_hour: f64,
}

/// Bytes of the small working set that every drawn kind has.
const SMALL_SET_BYTES: f64 = 262_144.0;

/// The same seed gives the same kinds, whatever the fleet's size.
pub fn draw_kinds(draw: &DrawSpec, seed: u64) -> Vec<FleetService> {
    let mut generator = SplitMix64::new(SplitMix64::scatter(seed ^ 0x6b69_6e64));
    (0..draw.kinds)
        .map(|number| draw_kind(draw, number, &mut generator))
        .collect()
}

fn draw_kind(draw: &DrawSpec, number: u16, generator: &mut SplitMix64) -> FleetService {
    let mut draw_uniform = |(low, high): (f64, f64)| low + (high - low) * generator.draw_unit();
    let cpus = libm::floor(draw_uniform((draw.cpus.0, draw.cpus.1 + 1.0 - 1e-9)));
    let memory_bytes = cpus * draw_uniform(draw.memory_bytes_per_cpu);
    let busy_cpus = cpus * draw_uniform(draw.load);
    let (daily_swing, peak_hour) = (draw_uniform(draw.daily_swing), draw_uniform((0.0, 24.0)));
    let mut draw_log_uniform =
        |(low, high): (f64, f64)| libm::exp(draw_uniform((libm::log(low), libm::log(high))));
    let lifetime = draw_log_uniform(draw.lifetime_hours);
    let references_per_kilo_instr = draw_log_uniform(draw.references_per_kilo_instr);
    let working_set_bytes = draw_log_uniform(draw.working_set_bytes);
    let working_set_share = draw_uniform(draw.working_set_share);
    let stream_share = draw_uniform(draw.stream_share)
        * f64::from(u8::from(draw_uniform((0.0, 1.0)) < draw.streaming_kinds));
    let limit = draw_uniform(draw.max_slowdown_percent);
    let is_limited = draw_uniform((0.0, 1.0)) < draw.limited_kinds;

    let references = ReferenceMix {
        base_cycles_per_instr: draw_uniform(draw.base_cycles_per_instr),
        stall_cycles_per_miss: draw_uniform(draw.stall_cycles_per_miss),
        references_per_kilo_instr,
        working_sets: vec![
            WorkingSet {
                bytes: SMALL_SET_BYTES,
                share: (1.0 - stream_share) * (1.0 - working_set_share),
            },
            WorkingSet {
                bytes: working_set_bytes,
                share: (1.0 - stream_share) * working_set_share,
            },
        ],
        write_share: 0.3,
    };

    FleetService {
        name: format!("service-{number:02}"),
        cpus,
        memory_bytes,
        threads: cpus as u16,
        busy_cpus,
        daily_swing,
        peak_hour,
        max_slowdown_percent: is_limited.then_some(limit),
        lifetime_hours: Some(lifetime),
        weight: 1.0,
        profile: Some(references.profile()),
    }
}

/// Draws the services of one cell, by arrival. Some run from the start; others arrive at random times (Poisson), at a
/// rate that replaces those that leave.
pub fn draw_instances(
    kinds: &[FleetService],
    running_count: f64,
    hours: f64,
    seed: u64,
    cell: u32,
) -> Vec<ServiceInstance> {
    let mut generator =
        SplitMix64::new(SplitMix64::scatter(seed) ^ SplitMix64::scatter(u64::from(cell) + 1));
    let weights: Vec<f64> = kinds.iter().map(|kind| kind.weight).collect();
    let total_weight: f64 = weights.iter().sum();
    let draw_departure = |start: f64, kind: u16, random: &mut SplitMix64| match kinds
        [usize::from(kind)]
    .lifetime_hours
    {
        None => f64::INFINITY,
        Some(mean) => start + random.draw_exponential(mean),
    };

    let mut instances = Vec::new();
    for _ in 0..libm::round(running_count) as u64 {
        let kind = draw_weighted_index(&weights, &mut generator);
        // Exponential lifetimes are memoryless, so the remaining lifetime of a running service has the same
        // distribution as a new one's.
        instances.push(ServiceInstance {
            kind,
            arrival_hour: 0.0,
            departure_hour: draw_departure(0.0, kind, &mut generator),
        });
    }

    let rate_by_kind: Vec<f64> = kinds
        .iter()
        .map(|kind| {
            kind.lifetime_hours.map_or(0.0, |mean| {
                running_count * kind.weight / total_weight / mean
            })
        })
        .collect();
    let arrival_rate: f64 = rate_by_kind.iter().sum();

    // Without departures there are no arrivals.
    let mut arrival_hour = if arrival_rate > 0.0 {
        generator.draw_exponential(1.0 / arrival_rate)
    } else {
        hours
    };
    while arrival_hour < hours {
        let kind = draw_weighted_index(&rate_by_kind, &mut generator);
        instances.push(ServiceInstance {
            kind,
            arrival_hour,
            departure_hour: draw_departure(arrival_hour, kind, &mut generator),
        });
        arrival_hour += generator.draw_exponential(1.0 / arrival_rate);
    }
    instances
}

fn draw_weighted_index(weights: &[f64], random: &mut SplitMix64) -> u16 {
    let mut remaining_weight = random.draw_unit() * weights.iter().sum::<f64>();
    for (index, weight) in weights.iter().enumerate() {
        remaining_weight -= weight;
        if remaining_weight < 0.0 {
            return index as u16;
        }
    }
    weights
        .iter()
        .rposition(|weight| *weight > 0.0)
        .unwrap_or(0) as u16
}

impl FleetService {
    /// The load of each thread at this hour, in eighths of a CPU; at least 1.
    pub fn load_level(&self, hour: f64) -> u8 {
        let phase = core::f64::consts::TAU * (hour - self.peak_hour) / 24.0;
        let busy_share =
            self.busy_cpus * (1.0 + self.daily_swing * libm::cos(phase)) / f64::from(self.threads);
        libm::round(busy_share * f64::from(crate::corun::LOAD_LEVELS))
            .clamp(1.0, f64::from(crate::corun::LOAD_LEVELS)) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a seed determine kinds and lifetimes, and does another seed give others?
    #[test]
    fn a_seed_determines_kinds_and_lives() {
        let draw = DrawSpec::default();
        let kinds = draw_kinds(&draw, 7);
        assert_eq!(kinds, draw_kinds(&draw, 7));
        assert_ne!(kinds, draw_kinds(&draw, 8));
        let instances = draw_instances(&kinds, 400.0, 24.0, 7, 0);
        assert_eq!(instances, draw_instances(&kinds, 400.0, 24.0, 7, 0));
        assert_ne!(
            instances,
            draw_instances(&kinds, 400.0, 24.0, 7, 1),
            "cells differ"
        );
        assert!(
            kinds
                .iter()
                .all(|kind| kind.profile.as_ref().unwrap().check().is_ok())
        );
    }

    /// Do as many services run at the end as at the start, on average?
    #[test]
    fn arrivals_replace_departures() {
        let kinds = draw_kinds(&DrawSpec::default(), 3);
        let instances = draw_instances(&kinds, 4000.0, 24.0, 3, 0);
        let running_count = instances
            .iter()
            .filter(|instance| instance.departure_hour > 24.0)
            .count() as f64;
        assert!(
            (running_count / 4000.0 - 1.0).abs() < 0.05,
            "{running_count}"
        );
        assert!(instances.is_sorted_by(|a, b| a.arrival_hour <= b.arrival_hour));
    }
}
