//! Distributed Intensity Online (CA 4.2): even out the miss rates that counters show over the caches.
//!
//! Problem: DI needs a profile of every program beforehand. Method: the miss rate as it is counted while the task runs
//! beside others, averaged over windows of 10^9 cycles; the order by it is nearly that of the rates alone (CA-5).
//! Instead of misses, what is read from memory can be counted, which sees what prefetchers bring in. Where
//! no task has one (no counters, as in most virtual machines), the intensity that a probe measured from outside; where
//! that is missing too and the machine says that it has no counters, the rates that were recorded earlier. Then as DI: sort
//! and deal out, or exchanges between pairs of caches ([`crate::intensity_balancing`], [`crate::load_balance`]).
//!
//! Properties: follows phases, as the profile drops evidence of old ones; rates of different kinds are never compared;
//! what has not been measured yet stays where it is.

use cachemate_core::{Ability, Decision, Fact, Policy, Profile, Support, TaskId, View};

use super::ParameterError;
use super::di::recorded_rates;
use crate::intensity_balancing::{BalancedRate, IntensityBalancer, Parameters};

/// One kind of rate of a task.
type RateGetter = fn(&Profile) -> Option<Fact<f64>>;

struct Dio(IntensityBalancer);

impl Policy for Dio {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let misses: RateGetter = |profile| profile.rates.observed_misses_per_kilo_instr;
        let reads: RateGetter = |profile| profile.rates.observed_read_bytes_per_kilo_instr;
        let evicted: RateGetter = |profile| profile.contention.intensity;
        let slowed: RateGetter = |profile| profile.contention.neighbor_slowdown;
        let kinds: &[RateGetter] = match self.0.parameters.counted {
            BalancedRate::Misses => &[misses, evicted, slowed],
            BalancedRate::MemoryReads => &[reads, misses, evicted, slowed],
        };
        let known = |of: &&RateGetter| view.profiles.values().any(|profile| of(profile).is_some());
        let of = kinds.iter().find(known);
        let no_counters = matches!(view.capabilities.abilities.get(&Ability::CountPerTask), Some(Support::No { .. }));
        if no_counters && of.is_none() {
            let rates = recorded_rates(view, self.0.parameters.recorded_on);
            return self.0.decide(view, |task| rates.get(&task).copied());
        }
        let of = of.unwrap_or(&evicted);
        self.0.decide(view, |task: TaskId| of(view.profiles.get(&task)?).map(|rate| rate.value))
    }
}

/// See the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(Dio(IntensityBalancer::new(Parameters::parse(parameters)?))))
}
