//! Fences streams into a tenth of the cache: the rule of thumb that needs no model.
//!
//! Problem: a stream fills a cache with lines that it never reads again, at the cost of programs that would have.
//! Method: a program that reads at least ten lines from memory per thousand instructions counts as a stream. All
//! streams of a cache share a tenth of it, and the other programs share the rest. Properties: one counter suffices, and
//! a decision is made once, not searched for. The rule cannot tell a stream from a program whose working set is larger
//! than its part: such a program loses what it kept, and stays fenced until it reads less than half as much.
//!
//! Operators apply this rule by hand where a cache has ways; it is here as the least that a policy has to beat.

use std::collections::BTreeMap;

use cachemate_core::{
    Decision, GroupId, PageMigration, Plan, Policy, ProcessId, Profile, Reason, View, WindowLength,
};
use serde::Deserialize;

use super::{ParameterError, ParameterRange, parse_parameters};
use crate::partition::partitioned_cache::{
    CacheProcess, HomeCaches, PartitionedCache, SharingGroup,
};

/// Parameters of `fence`, which the policy's page explains.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Lines read from memory per thousand instructions from which a program is a stream.
    pub stream_from_lines: f64,
    /// Part of the cache that all streams share.
    pub fenced_share: f64,
    pub page_migration: PageMigration,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 100_000_000,
            stream_from_lines: 10.0,
            fenced_share: 0.1,
            page_migration: PageMigration::All,
        }
    }
}

/// A fenced program is released when it reads less than this part of what makes a stream, so that it does not
/// alternate.
const RELEASED_BELOW: f64 = 0.5;

const REST: GroupId = GroupId(0);
const STREAMS: GroupId = GroupId(1);

struct StreamFence {
    parameters: Parameters,
    home_caches: HomeCaches,
    /// Whether each process was a stream when it was last counted.
    streams: BTreeMap<ProcessId, bool>,
}

impl Policy for StreamFence {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time {
            ns: self.parameters.window_ns,
        });
        let mut reasons = Vec::new();
        self.streams
            .retain(|process, _| view.live_tasks().any(|task| task.process == *process));

        for domain in self.home_caches.collect(view) {
            let current_shares = domain.surviving_shares(&view.plan_to_keep().shares);
            let Some((streams, rest)) = self.classify(view, &domain, &mut reasons) else {
                plan.shares.extend(current_shares);
                continue;
            };

            let migration = self.parameters.page_migration;
            if streams.is_empty() || rest.is_empty() {
                if !current_shares.is_empty() {
                    plan.shares.extend(domain.undivided_shares(migration));
                }
                continue;
            }

            let units = domain.partition_units.units();
            let min_units = domain.partition_units.min_units();
            let fenced_units = libm::round(f64::from(units) * self.parameters.fenced_share) as u32;
            let fenced_units = fenced_units.max(min_units);
            if fenced_units + min_units > units || domain.partition_units.max_shares() < 2 {
                plan.shares.extend(current_shares);
                continue;
            }

            let groups = [
                SharingGroup {
                    id: REST,
                    members: rest,
                    units: units - fenced_units,
                },
                SharingGroup {
                    id: STREAMS,
                    members: streams,
                    units: fenced_units,
                },
            ];
            plan.shares
                .extend(domain.divide(&groups, &current_shares, migration));
        }

        Decision::new(plan, reasons)
    }
}

impl StreamFence {
    /// The streams and the other processes of a cache; `None` until all have been counted.
    fn classify(
        &mut self,
        view: &View<'_>,
        domain: &PartitionedCache<'_>,
        reasons: &mut Vec<Reason>,
    ) -> Option<(Vec<ProcessId>, Vec<ProcessId>)> {
        let line_bytes = f64::from(domain.cache.line_bytes.unwrap_or(64));
        for cache_process in &domain.processes {
            let Some(lines) = lines_per_kilo_instr(view, cache_process, line_bytes) else {
                continue;
            };
            let was_stream = self.streams.get(&cache_process.process).copied();
            let limit = if was_stream == Some(true) {
                self.parameters.stream_from_lines * RELEASED_BELOW
            } else {
                self.parameters.stream_from_lines
            };
            let is_stream = lines >= limit;
            self.streams.insert(cache_process.process, is_stream);
            if is_stream != was_stream.unwrap_or(false) {
                let text = if is_stream {
                    "{0} streams: fenced"
                } else {
                    "{0} no longer streams: released"
                };
                let numbers = vec![("lines_per_kilo_instr".to_string(), lines)];
                reasons.push(Reason::new(cache_process.task_ids(), text, numbers));
            }
        }

        let (mut streams, mut rest) = (Vec::new(), Vec::new());
        for cache_process in &domain.processes {
            if *self.streams.get(&cache_process.process)? {
                streams.push(cache_process.process);
            } else {
                rest.push(cache_process.process);
            }
        }
        Some((streams, rest))
    }
}

/// The lines that a process reads from memory per thousand instructions, as a mean over its threads; `None` if no
/// thread was counted. Misses stand in where reads from memory are not counted.
fn lines_per_kilo_instr(
    view: &View<'_>,
    cache_process: &CacheProcess<'_>,
    line_bytes: f64,
) -> Option<f64> {
    let lines_of = |profile: &Profile| {
        let rates = &profile.rates;
        rates
            .observed_read_bytes_per_kilo_instr
            .map(|bytes| bytes.value / line_bytes)
            .or(rates
                .observed_misses_per_kilo_instr
                .map(|misses| misses.value))
    };

    let counted: Vec<f64> = cache_process
        .tasks
        .iter()
        .filter_map(|task| lines_of(view.profiles.get(&task.task)?))
        .collect();
    (!counted.is_empty()).then(|| counted.iter().sum::<f64>() / counted.len() as f64)
}

pub(super) fn build(text: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters: Parameters = parse_parameters(text)?;
    ParameterRange::OneOrMore.check([("window_ns", parameters.window_ns as f64)])?;
    ParameterRange::Above(0.0).check([("stream_from_lines", parameters.stream_from_lines)])?;
    ParameterRange::PositiveShare.check([("fenced_share", parameters.fenced_share)])?;
    Ok(Box::new(StreamFence {
        parameters,
        home_caches: HomeCaches::default(),
        streams: BTreeMap::new(),
    }))
}

#[cfg(test)]
mod tests {
    use cachemate_core::test_support::{
        NullPredictor, ViewFixture, capabilities_fixture, last_level_caches, observation_of,
    };
    use cachemate_core::{
        CacheId, CacheLevel, CpuId, Fact, PartitionSupport, RateFacts, TaskId, TaskSample,
    };

    use super::*;

    fn profile(read_bytes: f64) -> Profile {
        Profile::default().with_rates(RateFacts {
            observed_read_bytes_per_kilo_instr: Some(Fact::oracle(read_bytes)),
            ..RateFacts::default()
        })
    }

    /// Does a stream get a tenth of the ways, is it released below half of the limit only, and does nothing change
    /// until every program is counted?
    #[test]
    fn a_stream_gets_a_tenth_of_the_cache() {
        let ways = PartitionSupport::Ways {
            ways: 16,
            min_ways: 1,
            contiguous: true,
            max_groups: 8,
            device_ways: 0,
        };
        let topology = last_level_caches(1, 2, CacheLevel::L3, 16 << 20);
        let capabilities = capabilities_fixture(&[]).with_partition(CacheId(0), ways);
        let mut fixture = ViewFixture::new(topology, capabilities, 0);
        let task = |index: u32| TaskSample {
            on_cpu_ns: vec![(CpuId(index), 9)],
            ..TaskSample::new(TaskId(index), ProcessId(index))
        };
        fixture.observation = observation_of(0, 1_000_000_000, (0..2).map(task));
        let mut policy = build("", 1).unwrap();
        let mut units_with = |fixture: &mut ViewFixture, read_bytes: f64| {
            fixture.profiles.insert(TaskId(0), profile(read_bytes));
            let plan = fixture.decide(policy.as_mut(), &NullPredictor).plan;
            let units = plan.shares.iter().map(|share| share.units.set().count());
            units.collect::<Vec<u32>>()
        };

        assert_eq!(units_with(&mut fixture, 1_900.0), [] as [u32; 0]);
        fixture.profiles.insert(TaskId(1), profile(10.0));
        assert_eq!(units_with(&mut fixture, 1_900.0), [14, 2]);
        assert_eq!(units_with(&mut fixture, 400.0), [14, 2]);
        assert_eq!(units_with(&mut fixture, 300.0), [] as [u32; 0]);
    }
}
