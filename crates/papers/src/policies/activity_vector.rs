//! Activity vectors (AV 2.2 to 2.4, 4.2, 4.3): tasks that use different parts of the cache run together.
//!
//! Problem: whether two programs with the same miss rate slow each other down depends on the sets that they use.
//! Method: for every task and level, the accesses and misses of groups of sets (super sets) are counted over a sample.
//! A bit marks a busy super set, and the number of bits that two tasks share is their penalty. The next sample is
//! expected to equal the last one. [`crate::coschedule`] defines the scores and forms.
//!
//! The paper leaves open the number of super sets, the thresholds and the weights. Here, there are 32 super sets. A
//! super set is busy if its count exceeds the mean over all tasks and super sets; a mean over the task's own super sets
//! would set as many bits in a quiet program as in a busy one. Only the misses of the last level have a weight, because
//! their overlap costs most (Table 1). Each sample that a task has run weighs as much as 4 bits.
//!
//! Properties: the counts of a task that ran for part of a window are scaled to a whole window. Recorded profiles are
//! used if the machine cannot count. A task that has not run yet shares no bits.

use std::collections::BTreeMap;

use cachemate_core::{
    Ability, CacheLevel, Decision, IndexSet, Policy, ProbeEvidence, ProbeId, ProbeKind,
    ProbeRequest, SuperSetCount, TaskId, View,
};
use serde::Deserialize;

use super::{ParameterError, ParameterRange};
use crate::cache_reload_cost::ReloadCosts;
use crate::coschedule::{CoRunCost, CoScheduleForm, CoScheduler, MAX_LAG_SAMPLES};

/// Parameters of `activity-vector`, read from TOML.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub form: CoScheduleForm,
    /// Length of a sample, in nanoseconds.
    pub window_ns: u64,
    pub super_sets: u32,
    /// A super set is busy if its count exceeds this multiple of the mean over all tasks.
    pub busy_above: f64,
    /// A task gets no `advice` if it has run at least this many samples fewer than the mean task below its cache.
    pub max_lag_samples: f64,
    pub weights: FactorWeights,
}

/// Weights of the factors of a score: bits shared with co-runners, by level and kind of count, and the costs of the
/// task itself.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FactorWeights {
    pub data_use: f64,
    pub data_miss: f64,
    pub code_use: f64,
    pub code_miss: f64,
    pub last_level_use: f64,
    pub last_level_miss: f64,
    /// Weight of each sample that the task has run.
    pub sample: f64,
    /// Weight of each counted miss per thousand instructions.
    pub miss_per_kilo_instr: f64,
    /// Weight of each counted instruction per cycle.
    pub instr_per_cycle: f64,
    /// Weight of the reload cost of a task that did not run before, in units of the misses that make a super set of the
    /// last level busy. Only the form `set` uses it.
    pub newcomer: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        let (form, window_ns) = (CoScheduleForm::Replacement, 100_000_000);
        Parameters {
            form,
            window_ns,
            super_sets: 32,
            busy_above: 1.0,
            max_lag_samples: MAX_LAG_SAMPLES,
            weights: FactorWeights::default(),
        }
    }
}

impl Default for FactorWeights {
    fn default() -> Self {
        FactorWeights {
            data_use: 0.0,
            data_miss: 0.0,
            code_use: 0.0,
            code_miss: 0.0,
            last_level_use: 0.0,
            last_level_miss: 1.0,
            sample: 4.0,
            miss_per_kilo_instr: 0.0,
            instr_per_cycle: 0.0,
            newcomer: 1.0,
        }
    }
}

impl Parameters {
    /// Parses parameters from TOML.
    ///
    /// # Errors
    /// A parameter is unknown, has the wrong type or is out of range.
    pub fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = super::parse_parameters(text)?;
        let weights = &parameters.weights;
        let all_weights = [
            weights.bit_weights().as_slice(),
            &[weights.miss_per_kilo_instr, weights.instr_per_cycle],
        ]
        .concat();
        ParameterRange::OneOrMore.check([("window_ns", parameters.window_ns as f64)])?;
        if !(1..=4096).contains(&parameters.super_sets) {
            return Err(ParameterError::invalid_value(
                "super_sets",
                parameters.super_sets,
                "1 to 4096",
            ));
        }

        ParameterRange::FromZero.check([
            ("busy_above", parameters.busy_above),
            ("weights.newcomer", weights.newcomer),
        ])?;
        ParameterRange::FromZeroUnlimited
            .check([("max_lag_samples", parameters.max_lag_samples)])?;
        if let Some(invalid_weight) = all_weights.iter().find(|weight| !weight.is_finite()) {
            return Err(ParameterError::invalid_value(
                "weights",
                invalid_weight,
                "finite numbers",
            ));
        }

        // With a weight of 0, a task could wait forever.
        ParameterRange::Above(0.0).check([("weights.sample", weights.sample)])?;
        Ok(parameters)
    }

    /// Whether running a task that did not run before has a cost.
    fn charges_newcomers(&self) -> bool {
        self.form == CoScheduleForm::Set && self.weights.newcomer > 0.0
    }
}

impl FactorWeights {
    /// The weights of shared bits by level (data, code, last) and kind (use, miss).
    fn bit_weights(&self) -> [f64; 6] {
        [
            self.data_use,
            self.data_miss,
            self.code_use,
            self.code_miss,
            self.last_level_use,
            self.last_level_miss,
        ]
    }
}

/// Accesses and misses per super set of each of the three levels, for one task and scaled to a whole window.
type SuperSetRates = [Vec<(f64, f64)>; 3];

/// Unscaled counts of one task, by level.
type RawCounts = Vec<(CacheLevel, Vec<SuperSetCount>)>;

/// Index of the last level's misses in [`FactorWeights::bit_weights`].
const LAST_LEVEL_MISS: usize = 5;

struct ActivityVectors {
    parameters: Parameters,
    scheduler: CoScheduler,
    /// Scaled rates of each task's last sample, with the raw counts from which they were computed.
    rates: BTreeMap<TaskId, (RawCounts, SuperSetRates)>,
    reload_costs: ReloadCosts,
}

impl Policy for ActivityVectors {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let levels = weighted_levels(view);
        self.update_rates(view, &levels);
        self.observe_refills(view, levels[2]);
        let vectors = self.build_vectors(view);
        let mut decision = self.scheduler.decide(view, &vectors);
        decision.plan.probes = self.super_set_probes(view, &levels);
        decision
    }
}

/// The first data level, the first code level, and the contended level.
fn weighted_levels(view: &View<'_>) -> [Option<CacheLevel>; 3] {
    let level_if_present = |level: CacheLevel| {
        view.topology
            .caches
            .iter()
            .any(|cache| cache.level == level)
            .then_some(level)
    };
    [
        level_if_present(CacheLevel::L1Data),
        level_if_present(CacheLevel::L1Instruction),
        view.topology.last_level(),
    ]
}

impl ActivityVectors {
    fn update_rates(&mut self, view: &View<'_>, levels: &[Option<CacheLevel>; 3]) {
        self.rates
            .retain(|task, _| view.profiles.contains_key(task));

        for task in view.observation.tasks.iter().filter(|task| !task.exited) {
            let Some(profile) = view
                .profiles
                .get(&task.task)
                .filter(|profile| !profile.locality.activity.is_empty())
            else {
                self.rates.remove(&task.task);
                continue;
            };
            let facts = profile.locality.activity.iter();
            let raw_counts: RawCounts = facts
                .map(|(level, fact)| (*level, fact.value.clone()))
                .collect();
            if self
                .rates
                .get(&task.task)
                .is_some_and(|(previous_counts, _)| *previous_counts == raw_counts)
            {
                continue;
            }

            let is_of_task = |evidence: &ProbeEvidence| matches!(evidence, ProbeEvidence::Activity { task: counted_task, .. } if *counted_task == task.task);
            let is_measured = view
                .observation
                .probe_results
                .iter()
                .any(|probe_result| is_of_task(&probe_result.evidence));

            let ran_ns = task.ran_ns();
            // A recorded profile covers a whole sample, and so does the profile of a task that ran all the time.
            let window_scale = if is_measured && ran_ns > 0 {
                view.observation.span.elapsed_ns as f64 / ran_ns as f64
            } else {
                1.0
            };
            let scale_level = |level: Option<CacheLevel>| -> Vec<(f64, f64)> {
                let counts = raw_counts
                    .iter()
                    .find(|(counted_level, _)| Some(*counted_level) == level);
                let counts = counts.map_or(&[][..], |(_, counts)| counts);
                counts
                    .iter()
                    .map(|count| {
                        (
                            count.accesses as f64 * window_scale,
                            count.misses as f64 * window_scale,
                        )
                    })
                    .collect()
            };
            self.rates
                .insert(task.task, (raw_counts.clone(), levels.map(scale_level)));
        }
    }

    /// Passes this window's misses at the last level to the estimator of reload costs.
    fn observe_refills(&mut self, view: &View<'_>, last_level: Option<CacheLevel>) {
        if !self.parameters.charges_newcomers() {
            return;
        }

        let mut miss_counts: BTreeMap<TaskId, f64> = BTreeMap::new();
        for probe_result in &view.observation.probe_results {
            if let ProbeEvidence::Activity {
                task,
                level,
                super_sets,
                ..
            } = &probe_result.evidence
                && Some(*level) == last_level
            {
                let misses: u64 = super_sets.iter().map(|count| count.misses).sum();
                *miss_counts.entry(*task).or_default() += misses as f64;
            }
        }

        self.reload_costs.observe(
            &view.observation.tasks,
            view.observation.span.elapsed_ns,
            &miss_counts,
        );
    }

    fn build_vectors(&self, view: &View<'_>) -> ExpectedVectors {
        let rate_of_kind = |cell: usize, count: &(f64, f64)| {
            if cell.is_multiple_of(2) {
                count.0
            } else {
                count.1
            }
        };

        // The order of arrival is used because floating-point sums depend on the order, which must not depend on task
        // ids.
        let live_rates = || {
            view.observation
                .tasks
                .iter()
                .filter_map(|task| Some((task.task, &self.rates.get(&task.task)?.1)))
        };
        let busy_threshold = |cell: usize| {
            let (mut sum, mut super_sets) = (0.0, 0);
            for (_, rates) in live_rates() {
                sum += rates[cell / 2]
                    .iter()
                    .map(|count| rate_of_kind(cell, count))
                    .sum::<f64>();
                super_sets += rates[cell / 2].len();
            }
            self.parameters.busy_above * sum / super_sets.max(1) as f64
        };

        let weights = self.parameters.weights.bit_weights();
        let thresholds: [f64; 6] = std::array::from_fn(|cell| {
            if weights[cell] == 0.0 {
                f64::INFINITY
            } else {
                busy_threshold(cell)
            }
        });
        let (newcomer_weight, busy_misses) = (
            self.parameters.weights.newcomer,
            busy_threshold(LAST_LEVEL_MISS),
        );
        let reload_cost = |task: TaskId| match self.reload_costs.reload_misses(task) {
            Some(misses) if busy_misses > 0.0 => newcomer_weight * misses / busy_misses,
            _ => 0.0,
        };
        let needs_second_sample = |task: TaskId| self.reload_costs.needs_second_sample(task);
        let busy_sets = |rates: &SuperSetRates| -> [IndexSet; 6] {
            std::array::from_fn(|cell| {
                let super_set_counts = rates[cell / 2].iter().enumerate();
                let busy_super_sets = super_set_counts
                    .filter(|(_, count)| rate_of_kind(cell, count) > thresholds[cell]);
                busy_super_sets
                    .map(|(super_set, _)| super_set as u32)
                    .collect()
            })
        };
        let weights = self.parameters.weights;
        let rate_cost_of = |task: TaskId| {
            let profile = view.profiles.get(&task);
            let misses = profile.and_then(|profile| profile.rates.observed_misses_per_kilo_instr);
            let speed = profile.and_then(|profile| profile.rates.observed_instr_per_cycle);
            misses.map_or(0.0, |misses| weights.miss_per_kilo_instr * misses.value)
                + speed.map_or(0.0, |speed| weights.instr_per_cycle * speed.value)
        };
        let expected_use = |(task, rates)| {
            let (busy_super_sets, rate_cost, reload_cost, must_stay) = (
                busy_sets(rates),
                rate_cost_of(task),
                reload_cost(task),
                needs_second_sample(task),
            );
            (
                task,
                ExpectedUse {
                    busy_super_sets,
                    rate_cost,
                    reload_cost,
                    must_stay,
                },
            )
        };
        let tasks = live_rates().map(expected_use).collect();
        let (bit_weights, weighs_counters) = (
            weights.bit_weights(),
            weights.miss_per_kilo_instr != 0.0 || weights.instr_per_cycle != 0.0,
        );
        let needs_evidence = weighs_counters || bit_weights.iter().any(|weight| *weight != 0.0);
        ExpectedVectors {
            bit_weights,
            tasks,
            needs_evidence,
        }
    }

    /// A permanent probe of every task for every level that has a weight and that the machine can count.
    fn super_set_probes(
        &self,
        view: &View<'_>,
        levels: &[Option<CacheLevel>; 3],
    ) -> Vec<ProbeRequest> {
        let tasks: Vec<TaskId> = view
            .observation
            .tasks
            .iter()
            .filter(|task| !task.exited)
            .map(|task| task.task)
            .collect();
        if tasks.is_empty() || !view.capabilities.has_ability(Ability::CountSuperSets) {
            return Vec::new();
        }

        let weights = self.parameters.weights.bit_weights();
        let charges_newcomers = self.parameters.charges_newcomers();
        let mut counted_levels: Vec<CacheLevel> = Vec::new();
        for (index, level) in levels.iter().enumerate() {
            if weights[2 * index] != 0.0
                || weights[2 * index + 1] != 0.0
                || (charges_newcomers && 2 * index + 1 == LAST_LEVEL_MISS)
            {
                counted_levels.extend(level.filter(|level| !counted_levels.contains(level)));
            }
        }

        let probe_kind = |level| ProbeKind::SuperSets {
            tasks: tasks.clone(),
            level,
            super_sets: self.parameters.super_sets,
        };
        // Counting costs the tasks no time, so the budget is effectively unlimited.
        let build_probe = |(id, level): (u32, CacheLevel)| ProbeRequest {
            id: ProbeId(id),
            kind: probe_kind(level),
            budget_ns: u64::MAX / 4,
        };
        (0u32..).zip(counted_levels).map(build_probe).collect()
    }
}

/// The predicted busy super sets and costs of one task for the next sample.
struct ExpectedUse {
    busy_super_sets: [IndexSet; 6],
    rate_cost: f64,
    reload_cost: f64,
    must_stay: bool,
}

/// Predictions for all tasks for the next sample.
struct ExpectedVectors {
    bit_weights: [f64; 6],
    tasks: BTreeMap<TaskId, ExpectedUse>,
    /// Whether any weight besides that of samples is set. Without one, the policy is a round robin and needs no
    /// evidence.
    needs_evidence: bool,
}

impl CoRunCost for ExpectedVectors {
    fn has_evidence(&self, task: TaskId) -> bool {
        !self.needs_evidence || self.tasks.contains_key(&task)
    }
    fn penalty(&self, task: TaskId, co_runner: TaskId) -> f64 {
        let (Some(task_use), Some(co_runner_use)) =
            (self.tasks.get(&task), self.tasks.get(&co_runner))
        else {
            return 0.0;
        };

        let cells = self
            .bit_weights
            .iter()
            .enumerate()
            .filter(|(_, weight)| **weight != 0.0);
        cells
            .map(|(cell, weight)| {
                weight
                    * f64::from(
                        task_use.busy_super_sets[cell]
                            .common_count(&co_runner_use.busy_super_sets[cell]),
                    )
            })
            .sum()
    }
    fn solo_cost(&self, task: TaskId) -> f64 {
        self.tasks
            .get(&task)
            .map_or(0.0, |expected_use| expected_use.rate_cost)
    }
    fn reload_cost(&self, task: TaskId) -> f64 {
        self.tasks
            .get(&task)
            .map_or(0.0, |expected_use| expected_use.reload_cost)
    }
    fn must_stay(&self, task: TaskId) -> bool {
        self.tasks
            .get(&task)
            .is_some_and(|expected_use| expected_use.must_stay)
    }
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    let parameters = Parameters::parse(parameters)?;
    let Parameters {
        form,
        window_ns,
        max_lag_samples,
        weights,
        ..
    } = parameters;
    let scheduler = CoScheduler::new(form, window_ns, weights.sample, max_lag_samples);
    Ok(Box::new(ActivityVectors {
        parameters,
        scheduler,
        rates: BTreeMap::new(),
        reload_costs: ReloadCosts::default(),
    }))
}
