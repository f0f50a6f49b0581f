//! Distributed Intensity Online (CA 4.2), which balances counted miss rates over the caches.
//!
//! Problem: DI needs a profile of every program beforehand. Method: the miss rate is counted while the task runs with
//! its co-runners, and averaged over windows of 10^9 cycles; these rates order tasks nearly like the solo rates (CA-5).
//! Reads from memory, which include prefetched lines, can be counted instead of misses. If no task has counts (as in
//! most virtual machines), the intensity from probes is used, then the slowdown that a probe's neighbor causes;
//! recorded rates only where the machine cannot count at all. The method then continues as in DI: tasks are sorted and
//! distributed, or exchanged between pairs of caches ([`crate::intensity_balancing`], [`crate::load_balance`]).
//!
//! Properties: the policy follows phases, because profiles drop evidence of earlier ones. Rates of different kinds are
//! never compared. Tasks that have not been measured yet stay in place.

use cachemate_core::{Ability, Decision, Fact, Policy, Profile, Support, TaskId, View};

use super::ParameterError;
use super::di::recorded_rates;
use crate::intensity_balancing::{BalancedRate, IntensityBalancer, Parameters};

/// A function that reads one kind of rate from a profile.
type RateGetter = fn(&Profile) -> Option<Fact<f64>>;

struct Dio(IntensityBalancer);

impl Policy for Dio {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let misses_of: RateGetter = |profile| profile.rates.observed_misses_per_kilo_instr;
        let read_bytes_of: RateGetter = |profile| profile.rates.observed_read_bytes_per_kilo_instr;
        let intensity_of: RateGetter = |profile| profile.contention.intensity;
        let neighbor_slowdown_of: RateGetter = |profile| profile.contention.neighbor_slowdown;
        let rate_getters: &[RateGetter] = match self.0.parameters.counted {
            BalancedRate::Misses => &[misses_of, intensity_of, neighbor_slowdown_of],
            BalancedRate::MemoryReads => {
                &[read_bytes_of, misses_of, intensity_of, neighbor_slowdown_of]
            }
        };

        let is_measured = |getter: &&RateGetter| {
            view.profiles
                .values()
                .any(|profile| getter(profile).is_some())
        };
        let getter = rate_getters.iter().find(is_measured);
        let lacks_counters = matches!(
            view.capabilities.abilities.get(&Ability::CountPerTask),
            Some(Support::No { .. })
        );
        if lacks_counters && getter.is_none() {
            let rates = recorded_rates(view, self.0.parameters.recorded_on);
            return self.0.decide(view, |task| rates.get(&task).copied());
        }
        let getter = getter.unwrap_or(&intensity_of);
        self.0.decide(view, |task: TaskId| {
            getter(view.profiles.get(&task)?).map(|rate| rate.value)
        })
    }
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(Dio(IntensityBalancer::new(Parameters::parse(
        parameters,
    )?))))
}
