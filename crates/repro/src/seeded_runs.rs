//! Runs of cases under every seed, and the values that findings and figures take from them.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{DataPoint, ExperimentContext, Result, greatest, least, mean};

/// Results by case and seed: seeds in the order of the context within each case.
pub(crate) struct SeededRuns<C, R> {
    runs: Vec<((C, u64), R)>,
    seeds: Vec<u64>,
}

impl ExperimentContext<'_> {
    /// Runs a function on the inputs of every case under every seed, and stores the results, as
    /// [`ExperimentContext::run_all_stored`] does.
    pub(crate) fn run_cases<C, I, R, F>(
        &self,
        cases: &[C],
        inputs: impl Fn(C, u64) -> I,
        run: F,
    ) -> Result<SeededRuns<C, R>>
    where
        C: Copy,
        I: Serialize + Sync,
        R: Send + Serialize + DeserializeOwned,
        F: Fn(&ExperimentContext<'_>, &I) -> Result<R> + Sync,
    {
        let items = self.with_each_seed(cases);
        let inputs: Vec<I> = items
            .iter()
            .map(|&(case, seed)| inputs(case, seed))
            .collect();
        let results = self.run_all_stored(&inputs, run)?;

        Ok(SeededRuns {
            runs: items.into_iter().zip(results).collect(),
            seeds: self.seeds.clone(),
        })
    }

    /// Runs every case under every seed. The results are not stored, but the runs that they come from are.
    pub(crate) fn run_unstored_cases<C: Copy + Sync, R: Send>(
        &self,
        cases: &[C],
        run: impl Fn(C, u64) -> Result<R> + Sync,
    ) -> Result<SeededRuns<C, R>> {
        let items = self.with_each_seed(cases);
        let results = self.run_all(&items, |&(case, seed)| run(case, seed))?;
        Ok(SeededRuns {
            runs: items.into_iter().zip(results).collect(),
            seeds: self.seeds.clone(),
        })
    }

    fn with_each_seed<C: Copy>(&self, cases: &[C]) -> Vec<(C, u64)> {
        cases
            .iter()
            .flat_map(|&case| self.seeds.iter().map(move |&seed| (case, seed)))
            .collect()
    }
}

impl<C: PartialEq, R> SeededRuns<C, R> {
    /// One result for each seed.
    pub fn of_case(&self, case: C) -> impl Iterator<Item = &R> {
        self.runs
            .iter()
            .filter(move |((own_case, _), _)| *own_case == case)
            .map(|(_, result)| result)
    }

    /// The result of one case under one seed.
    pub fn get(&self, case: C, seed: u64) -> Option<&R> {
        self.runs
            .iter()
            .find(|((own_case, own_seed), _)| *own_case == case && *own_seed == seed)
            .map(|(_, run)| run)
    }

    /// The result of one of the cases under one of the seeds that were run.
    pub fn result(&self, case: C, seed: u64) -> &R {
        self.get(case, seed)
            .expect("every case was run under every seed")
    }

    /// One result for each case.
    pub fn of_seed(&self, seed: u64) -> impl Iterator<Item = &R> {
        self.runs
            .iter()
            .filter(move |((_, own_seed), _)| *own_seed == seed)
            .map(|(_, result)| result)
    }

    /// All results with their case and seed.
    pub fn iter(&self) -> impl Iterator<Item = &((C, u64), R)> {
        self.runs.iter()
    }

    /// Results by case and seed.
    pub fn all(&self) -> impl Iterator<Item = &R> {
        self.runs.iter().map(|(_, result)| result)
    }

    /// All results, by seed and case.
    pub fn by_seed(&self) -> impl Iterator<Item = &R> {
        self.seeds.iter().flat_map(|&seed| self.of_seed(seed))
    }

    /// In the order of the seeds.
    pub fn values(&self, case: C, value: impl Fn(&R) -> f64) -> Vec<f64> {
        self.of_case(case).map(value).collect()
    }

    pub fn point(
        &self,
        case: C,
        series: impl Into<String>,
        at: impl Into<String>,
        value: impl Fn(&R) -> f64,
    ) -> DataPoint {
        DataPoint::from_values(series, at, self.values(case, value))
    }

    /// One value per seed, computed from the seed's results of all cases.
    pub fn per_seed(&self, value: impl Fn(&[&R]) -> f64) -> Vec<(u64, f64)> {
        self.seeds
            .iter()
            .map(|&seed| (seed, value(&self.of_seed(seed).collect::<Vec<&R>>())))
            .collect()
    }

    /// The least value over cases, per seed.
    pub fn least_per_seed(&self, value: impl Fn(&R) -> f64) -> Vec<(u64, f64)> {
        self.per_seed(|results| least(results.iter().map(|result| value(result))))
    }

    /// The greatest value over cases, per seed.
    pub fn greatest_per_seed(&self, value: impl Fn(&R) -> f64) -> Vec<(u64, f64)> {
        self.per_seed(|results| greatest(results.iter().map(|result| value(result))))
    }

    /// The mean over cases, per seed.
    pub fn mean_per_seed(&self, value: impl Fn(&R) -> f64) -> Vec<(u64, f64)> {
        self.per_seed(|results| mean(results.iter().map(|result| value(result))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::experiment::quick_context;

    static RUN_COUNT: AtomicUsize = AtomicUsize::new(0);

    /// A result that no other run has.
    fn number_of_run(_: &ExperimentContext<'_>, _: &(u32, u64, f64)) -> Result<usize> {
        Ok(RUN_COUNT.fetch_add(1, Ordering::Relaxed))
    }

    fn number_of_other_run(
        context: &ExperimentContext<'_>,
        inputs: &(u32, u64, f64),
    ) -> Result<usize> {
        number_of_run(context, inputs)
    }

    fn count_visible_seeds(context: &ExperimentContext<'_>, _: &(u32, u64)) -> Result<usize> {
        Ok(context.seeds.len())
    }

    /// Do two settings, cases, seeds, lengths or functions ever share a stored result, and do equal ones?
    #[test]
    fn only_equal_settings_cases_seeds_lengths_and_functions_share_a_stored_result() {
        let quick = ExperimentContext {
            seeds: vec![1, 2],
            ..quick_context()
        };
        let full = ExperimentContext {
            quick: false,
            seeds: vec![1, 2],
            ..quick_context()
        };

        let run_all = || -> Vec<usize> {
            let mut numbers = Vec::new();
            for context in [&quick, &full] {
                for setting in [0.1, 0.1 + f64::EPSILON] {
                    let inputs = |case, seed| (case, seed, setting);
                    let runs = context.run_cases(&[1, 2], inputs, number_of_run).unwrap();
                    numbers.extend(runs.all());
                    let runs = context.run_cases(&[1, 2], inputs, number_of_other_run);
                    numbers.extend(runs.unwrap().all());
                }
            }
            numbers
        };
        let numbers = run_all();
        let mut distinct_numbers = numbers.clone();
        distinct_numbers.sort_unstable();
        assert_eq!(distinct_numbers, (0..2 * 2 * 2 * 4).collect::<Vec<usize>>());
        assert_eq!(run_all(), numbers);
    }

    /// Is what the key does not contain out of a stored run's sight?
    #[test]
    fn a_stored_run_sees_no_seeds_but_its_own() {
        let seen_seeds =
            quick_context().run_cases(&[1], |case, seed| (case, seed), count_visible_seeds);
        assert_eq!(seen_seeds.unwrap().all().collect::<Vec<&usize>>(), [&0]);
    }

    /// Is a closure refused, because two closures of one function have the same name?
    #[test]
    #[should_panic(expected = "expected a function by name")]
    fn a_closure_is_no_stored_run() {
        let _ = quick_context().run_cases(&[1], |case: u32, seed| (case, seed), |_, _| Ok(0));
    }
}
