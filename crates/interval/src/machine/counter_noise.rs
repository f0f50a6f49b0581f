//! Counter readings as a unit with few counters returns them.
//!
//! Instructions and cycles are always counted, and events that the kernel counts itself use no counter. The other
//! events share the remaining counters: groups of events take turns of 4 ms, and a reading states the share of the
//! time in which its group was counted. The count has an error that falls with the number of the group's turns. A
//! reading's noise has a stated size and autocorrelation between windows. Skew books a share of a task's events to the
//! next task on the CPU.

use cachemate_core::{CounterEvent, CounterNoise, EventCount, EventCounts, SplitMix64};

/// Length of a turn of a group of events.
const TURN_NS: f64 = 4_000_000.0;

/// State of a task's noise: the random generator, and the autocorrelated component.
#[derive(Clone, Debug, PartialEq)]
pub struct NoiseState {
    pub generator: SplitMix64,
    slow_component: f64,
}

impl NoiseState {
    pub fn new(seed: u64, task: u32) -> Self {
        let mut generator =
            SplitMix64::new(seed ^ (u64::from(task) + 1).wrapping_mul(0xd1b5_4a32_d192_ed03));
        let slow_component = generator.draw_normal();
        NoiseState {
            generator,
            slow_component,
        }
    }

    /// By one window; the slow component has a variance of 1.
    fn advance(&mut self, autocorrelation: f64) -> f64 {
        let innovation = self.generator.draw_normal();
        self.slow_component = autocorrelation * self.slow_component
            + libm::sqrt(1.0 - autocorrelation * autocorrelation) * innovation;
        self.slow_component
    }
}

fn has_fixed_counter(event: CounterEvent) -> bool {
    matches!(
        event,
        CounterEvent::Instructions | CounterEvent::Cycles | CounterEvent::ContextSwitches
    )
}

/// Sorted by event. If more events are counted than there are counters, each is counted in a part
/// of the window only.
pub fn draw_readings(
    true_counts: &[(CounterEvent, f64)],
    counter_count: u32,
    window_ns: f64,
    errors: CounterNoise,
    noise: &mut NoiseState,
) -> EventCounts {
    let multiplexed_events = true_counts
        .iter()
        .filter(|(event, _)| !has_fixed_counter(*event))
        .count();
    let group_count = multiplexed_events
        .div_ceil((counter_count.max(3) - 2) as usize)
        .max(1) as f64;
    let turns_per_group = (window_ns / TURN_NS / group_count).max(1.0);
    let slow_error = noise.advance(errors.autocorrelation) * errors.noise;

    let mut readings = Vec::with_capacity(true_counts.len());
    for &(event, count) in true_counts {
        let is_always_counted = has_fixed_counter(event) || group_count == 1.0;
        let noisy_count = if has_fixed_counter(event) {
            count
        } else {
            let turn_error = if is_always_counted {
                0.0
            } else {
                errors.multiplexing_noise / libm::sqrt(turns_per_group)
                    * noise.generator.draw_normal()
            };
            let share = if is_always_counted {
                1.0
            } else {
                1.0 / group_count
            };
            count * share * (1.0 + slow_error + turn_error).max(0.0)
        };

        let counted_share = if is_always_counted {
            1.0
        } else {
            1.0 / group_count
        };
        readings.push(EventCount {
            event,
            count: noisy_count.round() as u64,
            enabled_share: counted_share,
        });
    }

    readings.sort_by_key(|reading| reading.event);
    EventCounts(readings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::CacheLevel;

    fn true_counts() -> Vec<(CounterEvent, f64)> {
        vec![
            (CounterEvent::Instructions, 1e9),
            (CounterEvent::Cycles, 2e9),
            (CounterEvent::References(CacheLevel::L2), 4e7),
            (CounterEvent::Misses(CacheLevel::L2), 1e7),
            (CounterEvent::MemoryReadBytes, 6.4e8),
            (CounterEvent::MemoryWriteBytes, 1e8),
        ]
    }

    fn draw_miss_readings(defects: CounterNoise, at_once: u32) -> Vec<f64> {
        let mut noise = NoiseState::new(7, 3);
        let draw_reading = |_| {
            draw_readings(&true_counts(), at_once, 1e9, defects, &mut noise)
                .get(CounterEvent::Misses(CacheLevel::L2))
                .unwrap()
                / 1e7
        };
        (0..4000).map(draw_reading).collect()
    }

    /// Are scaled readings unbiased, and is their noise of the stated size and correlation?
    #[test]
    fn noise_has_its_stated_size_and_autocorrelation() {
        let defects = CounterNoise {
            noise: 0.05,
            autocorrelation: 0.7,
            multiplexing_noise: 0.0,
            skew: 0.0,
        };

        for at_once in [4, 64] {
            let values = draw_miss_readings(defects, at_once);
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let variance = values
                .iter()
                .map(|value| (value - mean).powi(2))
                .sum::<f64>()
                / values.len() as f64;
            let lagged = values
                .windows(2)
                .map(|pair| (pair[0] - mean) * (pair[1] - mean))
                .sum::<f64>();
            let correlation = lagged / values.len() as f64 / variance;
            assert!((mean - 1.0).abs() < 0.01, "{mean}");
            assert!(
                (variance.sqrt() / 0.05 - 1.0).abs() < 0.1,
                "{}",
                variance.sqrt()
            );
            assert!((correlation - 0.7).abs() < 0.05, "{correlation}");
        }
    }

    /// Do events that take turns report their share of the time, and is the share 1 if there are enough counters?
    #[test]
    fn events_that_take_turns_report_their_share_of_the_time() {
        let mut noise = NoiseState::new(1, 1);
        let counts = draw_readings(&true_counts(), 4, 1e9, CounterNoise::default(), &mut noise);
        assert!(counts.0.iter().any(|reading| reading.enabled_share == 0.5));
        let counts = draw_readings(&true_counts(), 6, 1e9, CounterNoise::default(), &mut noise);
        assert!(counts.0.iter().all(|reading| reading.enabled_share == 1.0));
        assert_eq!(counts.get(CounterEvent::Instructions), Some(1e9));
    }
}
