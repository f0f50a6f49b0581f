//! Splits an experiment into independent runs that any process can make, one at a time.
//!
//! Problem: an experiment takes hours, almost all of them in independent runs, which other machines could make. A run
//! is defined by the experiment's code, not by data that could be sent. Method: every call of
//! [`crate::ExperimentContext::run_all`] is numbered, and so are its items; `2.17` names a run. A worker executes the
//! experiment up to that call with the results of earlier calls from the store, makes the one run, and stops. A caller
//! that lists the missing runs proceeds until results are missing, and lists those. Properties: the experiment is the
//! same code in all three cases. Results are stored as MessagePack, which keeps every bit of a number (JSON has no
//! NaN), so that they are the same wherever they were made. Nested runs belong to the outer run.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ReproError, Result};

/// Looks up a stored result by the run's name.
pub type ResultLookup<'a> = &'a (dyn Fn(&str) -> Option<Vec<u8>> + Sync);

/// State of one pass through an experiment.
pub struct RunDivision<'a> {
    find_result: ResultLookup<'a>,
    /// The run to make; `None` to list missing runs.
    requested: Option<(u32, usize)>,
    call_count: AtomicU32,
    computed_result: Mutex<Option<Vec<u8>>>,
    missing_runs: Mutex<Vec<String>>,
}

thread_local! {
    /// Whether this thread is within a run.
    static IS_WITHIN_RUN: Cell<bool> = const { Cell::new(false) };
}

impl<'a> RunDivision<'a> {
    /// Returns a pass that makes no run: it proceeds while all results are stored, and lists the first ones that are
    /// missing.
    pub fn list(find_result: ResultLookup<'a>) -> Self {
        let (computed_result, missing_runs) = (Mutex::new(None), Mutex::new(Vec::new()));
        RunDivision {
            find_result,
            requested: None,
            call_count: AtomicU32::new(0),
            computed_result,
            missing_runs,
        }
    }

    /// Returns a pass that makes only this run.
    ///
    /// # Errors
    /// `run` is not the name of a run.
    pub fn pass_for_run(run: &str, find_result: ResultLookup<'a>) -> Result<Self> {
        let name_error = || {
            ReproError::Failed(
                run.to_string(),
                "expected a run's name such as 2.17".to_string(),
            )
        };
        let (call, item) = run.split_once('.').ok_or_else(name_error)?;
        let requested = Some((
            call.parse().map_err(|_| name_error())?,
            item.parse().map_err(|_| name_error())?,
        ));
        Ok(RunDivision {
            requested,
            ..RunDivision::list(find_result)
        })
    }

    /// Returns the result of the requested run, once it has been made.
    pub fn take_result(&self) -> Option<Vec<u8>> {
        self.computed_result
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Returns the names of the runs whose results are missing.
    pub fn missing_runs(&self) -> Vec<String> {
        std::mem::take(
            &mut *self
                .missing_runs
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        )
    }

    /// Returns the results of one call, or [`ReproError::Elsewhere`] as soon as the pass has reached its goal.
    pub(crate) fn run_all<T, R: Serialize + DeserializeOwned>(
        &self,
        items: &[T],
        run: impl Fn(&T) -> Result<R>,
    ) -> Result<Vec<R>> {
        let call = self.call_count.fetch_add(1, Ordering::Relaxed);
        if let Some((_, item)) = self
            .requested
            .filter(|(requested_call, _)| *requested_call == call)
        {
            let name = format!("{call}.{item}");
            let requested_item = items
                .get(item)
                .ok_or_else(|| ReproError::Failed(name.clone(), "no such run".to_string()))?;
            let bytes = encode_result(&name, &run_nested(|| run(requested_item))?)?;
            *self
                .computed_result
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Some(bytes);
            return Err(ReproError::Elsewhere);
        }
        let mut results = Vec::new();
        for item in 0..items.len() {
            let name = format!("{call}.{item}");
            match (self.find_result)(&name) {
                Some(bytes) => results.push(decode_result(&name, &bytes)?),
                None => self
                    .missing_runs
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(name),
            }
        }
        if results.len() == items.len() {
            Ok(results)
        } else {
            Err(ReproError::Elsewhere)
        }
    }
}

/// Returns whether this thread is already making a run.
pub(crate) fn is_within() -> bool {
    IS_WITHIN_RUN.get()
}

/// Makes a run; nested runs that it requests are part of it.
fn run_nested<R>(run: impl FnOnce() -> R) -> R {
    let was_within_run = IS_WITHIN_RUN.replace(true);
    let result = run();
    IS_WITHIN_RUN.set(was_within_run);
    result
}

/// Serializes a result; an error if it does not read back as the same value.
pub(crate) fn encode_result<R: Serialize + DeserializeOwned>(
    name: &str,
    result: &R,
) -> Result<Vec<u8>> {
    let encoding_error =
        |problem: String| ReproError::Failed(name.to_string(), format!("its answer: {problem}"));
    let bytes =
        rmp_serde::to_vec_named(result).map_err(|error| encoding_error(error.to_string()))?;
    let reencoded = rmp_serde::to_vec_named(&decode_result::<R>(name, &bytes)?)
        .map_err(|error| encoding_error(error.to_string()))?;
    if reencoded == bytes {
        Ok(bytes)
    } else {
        Err(encoding_error(
            "it does not read back as it was".to_string(),
        ))
    }
}

/// Deserializes a result.
pub(crate) fn decode_result<R: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<R> {
    let decoding_error = |error: rmp_serde::decode::Error| {
        ReproError::Failed(name.to_string(), format!("an answer: {error}"))
    };
    rmp_serde::from_slice(bytes).map_err(decoding_error)
}

/// Miss-rate curves, by their points.
pub(crate) mod curve {
    use cachemate_locality::curve::MissRateCurve;
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub fn serialize<S: Serializer>(
        curve: &MissRateCurve,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        curve.points().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<MissRateCurve, D::Error> {
        MissRateCurve::new(Vec::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::ExperimentContext;

    /// Squares, and then sums that need them: two calls, of which the second has nested runs.
    fn run_nested_study(context: &ExperimentContext<'_>) -> Result<Vec<f64>> {
        let squares = context.run_all(&[1.0, 2.0, 3.0], |value: &f64| Ok(value * value / 7.0))?;
        context.run_all(&[0, 1], |&start: &usize| {
            let parts = context.run_all(&squares[start..], |square| Ok(square * 3.0))?;
            Ok(parts.iter().sum())
        })
    }

    fn quick_context<'a>(
        split: Option<&'a RunDivision<'a>>,
        stop: &'a AtomicBool,
    ) -> ExperimentContext<'a> {
        ExperimentContext {
            quick: true,
            run_division: split,
            ..ExperimentContext::for_seed(1, stop)
        }
    }

    /// Do runs made one at a time, in any order, give the same bits as the whole study?
    #[test]
    fn a_study_made_run_by_run_gives_the_same_bits() {
        let stop = AtomicBool::new(false);
        let undivided = run_nested_study(&quick_context(None, &stop)).unwrap();
        let mut stored: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut waves = Vec::new();
        let value = loop {
            let find = |run: &str| stored.get(run).cloned();
            let listing = RunDivision::list(&find);
            match run_nested_study(&quick_context(Some(&listing), &stop)) {
                Ok(value) => break value,
                Err(ReproError::Elsewhere) => {}
                Err(error) => panic!("{error}"),
            }
            let missing_runs = listing.missing_runs();
            let mut fresh = Vec::new();
            for run in missing_runs.iter().rev() {
                let split = RunDivision::pass_for_run(run, &find).unwrap();
                assert!(matches!(
                    run_nested_study(&quick_context(Some(&split), &stop)),
                    Err(ReproError::Elsewhere)
                ));
                fresh.push((run.clone(), split.take_result().unwrap()));
            }
            stored.extend(fresh);
            waves.push(missing_runs);
        };
        assert_eq!(value, undivided);
        assert_eq!(waves, [vec!["0.0", "0.1", "0.2"], vec!["1.0", "1.1"]]);
    }

    /// Are invalid run names, and results that cannot be stored, errors?
    #[test]
    fn invalid_run_names_and_unstorable_results_are_errors() {
        let stop = AtomicBool::new(false);
        assert!(RunDivision::pass_for_run("x", &|_| None).is_err());
        let missing_run = RunDivision::pass_for_run("0.9", &|_| None).unwrap();
        assert!(
            run_nested_study(&quick_context(Some(&missing_run), &stop))
                .unwrap_err()
                .to_string()
                .contains("no such run")
        );
    }

    /// Do stored results keep values that JSON cannot represent?
    #[test]
    fn stored_results_keep_every_bit() {
        let answer = (
            f64::NAN.to_bits(),
            f64::NAN,
            -0.0,
            f64::INFINITY,
            None::<f64>,
        );
        let bytes = encode_result("0.0", &answer).unwrap();
        let decoded: (u64, f64, f64, f64, Option<f64>) = decode_result("0.0", &bytes).unwrap();
        assert!(
            decoded.1.to_bits() == answer.0
                && decoded.2.is_sign_negative()
                && decoded.3 == f64::INFINITY
        );
        assert_eq!(decoded.4, None);
        assert!(
            decode_result::<Vec<f64>>("0.0", &bytes)
                .unwrap_err()
                .to_string()
                .contains("0.0: an answer: ")
        );
    }
}
