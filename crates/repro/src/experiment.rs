//! Experiments, their contexts, and their findings.
//!
//! An experiment answers one or more sentences of a paper (`docs/results/index.md` lists their
//! ids), and a reader must be able to see whether the answer was chosen after the fact. So an
//! experiment returns measured values, one for each seed, and every point of its figure; its
//! targets are declared elsewhere (`results.toml`), and the verdict is always computed here from
//! both. A missed target remains visible, with its cause in the note.
//!
//! For example, three seeds give CASC-2 the gains 25, 32 and 37 %, and the target is at least 28.
//! The mean is 31.3 and its standard error 3.5; 31.3 - 3.5 is below the target, so the verdict is
//! `missed`. A single seed has no error, and 36 % would be `met`.

use std::any::type_name;
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use cachemate_report::figure::{BarChart, BarGroup, Chart, ChartBar, ChartPoint, HeatMap, Series};
use rayon::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};

use crate::confidence::FindingConfidence;
use crate::error::{ReproError, Result};
use crate::sources::{MACHINES_DIGEST, digest_of};
use crate::statistics::{greatest, least, mean, standard_deviation};
use crate::store::{self, RunName};

/// The target of a result, in the result's unit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ResultTarget {
    /// The value must be at least `target`; above `paper_best`, it exceeds the target.
    AtLeast {
        /// Smallest value that meets the target.
        target: f64,
        /// The paper's own value; `None` if the target cannot be exceeded.
        paper_best: Option<f64>,
    },
    /// The value must be at most `target`; below `paper_best`, it exceeds the target.
    AtMost {
        /// Largest value that meets the target.
        target: f64,
        /// The paper's own value; `None` if the target cannot be exceeded.
        paper_best: Option<f64>,
    },
    /// The value must be from `low` to `high`, inclusive; the target cannot be exceeded.
    Within {
        /// Smallest value that meets the target.
        low: f64,
        /// Largest value that meets the target.
        high: f64,
    },
    /// There is no target, because the paper's result is a picture or a statement without a number.
    Shown,
}

/// Result of comparing a measured value with its target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ResultVerdict {
    /// The target is reached.
    Met,
    /// The target is not reached, or nothing was measured.
    Missed,
    /// The target is reached, and the value is better than the paper's own.
    Exceeded,
}

impl ResultVerdict {
    /// The spelling of JSON.
    pub fn name(self) -> &'static str {
        match self {
            ResultVerdict::Met => "met",
            ResultVerdict::Missed => "missed",
            ResultVerdict::Exceeded => "exceeded",
        }
    }
}

impl ResultTarget {
    /// The verdict on one measured value. A missing value is [`ResultVerdict::Missed`]; without a
    /// target, there is no verdict.
    pub fn judge_value(&self, measured_value: Option<f64>) -> Option<ResultVerdict> {
        if *self == ResultTarget::Shown {
            return None;
        }
        let Some(value) = measured_value.filter(|value| value.is_finite()) else {
            return Some(ResultVerdict::Missed);
        };

        let (is_met, is_exceeded) = match *self {
            ResultTarget::AtLeast { target, paper_best } => {
                (value >= target, paper_best.is_some_and(|best| value > best))
            }
            ResultTarget::AtMost { target, paper_best } => {
                (value <= target, paper_best.is_some_and(|best| value < best))
            }
            ResultTarget::Within { low, high } => ((low..=high).contains(&value), false),
            ResultTarget::Shown => return None,
        };
        Some(match (is_met, is_exceeded) {
            (false, _) => ResultVerdict::Missed,
            (true, true) => ResultVerdict::Exceeded,
            (true, false) => ResultVerdict::Met,
        })
    }

    /// The verdict on a mean over seeds, which must reach the target by more than its standard
    /// error. The mean of a single seed has no error.
    fn judge_mean(&self, mean: Option<f64>, standard_error: Option<f64>) -> Option<ResultVerdict> {
        let error_or_zero = standard_error.unwrap_or(0.0);
        match *self {
            ResultTarget::Shown => None,
            ResultTarget::AtLeast { .. } => self.judge_value(mean.map(|mean| mean - error_or_zero)),
            ResultTarget::AtMost { .. } => self.judge_value(mean.map(|mean| mean + error_or_zero)),
            ResultTarget::Within { .. } => self.worst_verdict(
                [
                    mean.map(|mean| mean - error_or_zero),
                    mean.map(|mean| mean + error_or_zero),
                ]
                .into_iter(),
            ),
        }
    }

    /// The worst verdict on several values; a missed one is worse than a met one, and that is worse
    /// than an exceeded one.
    fn worst_verdict(&self, values: impl Iterator<Item = Option<f64>>) -> Option<ResultVerdict> {
        let verdict_rank = |verdict: &ResultVerdict| match verdict {
            ResultVerdict::Missed => 0,
            ResultVerdict::Met => 1,
            ResultVerdict::Exceeded => 2,
        };
        values
            .filter_map(|value| self.judge_value(value))
            .min_by_key(verdict_rank)
            .or_else(|| self.judge_value(None))
    }

    /// Values at which the verdict changes between met and missed.
    fn bounds(&self) -> Vec<f64> {
        match *self {
            ResultTarget::AtLeast { target, .. } | ResultTarget::AtMost { target, .. } => {
                vec![target]
            }
            ResultTarget::Within { low, high } => vec![low, high],
            ResultTarget::Shown => Vec::new(),
        }
    }

    /// As a table shows it: `at least 27`, or `-0.5 to 0.5`.
    pub fn describe(&self) -> String {
        match self {
            ResultTarget::AtLeast { target, .. } => format!("at least {target}"),
            ResultTarget::AtMost { target, .. } => format!("at most {target}"),
            ResultTarget::Within { low, high } => format!("{low} to {high}"),
            ResultTarget::Shown => "shown as measured".to_string(),
        }
    }
}

impl Serialize for ResultTarget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.describe())
    }
}

/// The rule by which the values of several seeds are combined for the verdict.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SeedRule {
    /// The mean over seeds must meet the target by more than its standard error.
    Mean,
    /// Every seed must meet the target, because the result is a worst case.
    EverySeed,
}

/// One point of a result's figure or table, with the spread over seeds.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DataPoint {
    /// Name of the series to which the point belongs.
    pub series: String,
    /// Position of the point: a number ("48" KB) or a name ("mcf+milc").
    pub at: String,
    /// Mean over seeds; `None` if nothing was measured.
    pub value: Option<f64>,
    /// Smallest value over seeds; `None` if nothing was measured.
    pub low: Option<f64>,
    /// Largest value over seeds; `None` if nothing was measured.
    pub high: Option<f64>,
}

impl DataPoint {
    /// Builds a point with mean, smallest and largest of `values`, one per seed. Without values, the point counts as
    /// not measured.
    pub fn from_values<V: Borrow<f64>>(
        series: impl Into<String>,
        at: impl Into<String>,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        let values: Vec<f64> = values.into_iter().map(|value| *value.borrow()).collect();
        let finite_or_none = |value: f64| value.is_finite().then_some(value);
        DataPoint {
            series: series.into(),
            at: at.into(),
            value: finite_or_none(mean(&values)),
            low: finite_or_none(least(&values)),
            high: finite_or_none(greatest(&values)),
        }
    }

    /// The point at `x` of a chart, with its range over seeds; `None` if nothing was measured.
    pub(crate) fn chart_point(&self, x: f64) -> Option<ChartPoint> {
        Some(ChartPoint {
            interval: self.low.zip(self.high),
            ..ChartPoint::new(x, self.value?)
        })
    }

    /// A bar with the point's range over seeds.
    pub(crate) fn bar(&self) -> ChartBar {
        ChartBar {
            value: self.value,
            interval: self.low.zip(self.high),
        }
    }
}

/// A group of bars for each position of the points, with a bar for each of these series, in their
/// order. A series without a point there leaves its place empty.
pub(crate) fn bar_groups(points: &[DataPoint], series: &[&str]) -> Vec<BarGroup> {
    let mut groups: Vec<BarGroup> = Vec::new();
    for point in points {
        let Some(place) = series.iter().position(|name| *name == point.series) else {
            continue;
        };
        let index = groups.iter().position(|group| group.name == point.at);
        let index = index.unwrap_or_else(|| {
            groups.push(BarGroup {
                name: point.at.clone(),
                bars: vec![ChartBar::default(); series.len()],
            });
            groups.len() - 1
        });
        groups[index].bars[place] = point.bar();
    }
    groups
}

/// A line through the points of one series, whose positions begin with a number.
pub(crate) fn line_through(points: &[DataPoint], series: &str) -> Series {
    let x_of = |at: &str| {
        let is_part = |c: char| c.is_ascii_digit() || c == '.';
        at[..at.find(|c| !is_part(c)).unwrap_or(at.len())].parse()
    };
    let own_points = points.iter().filter(|point| point.series == series);
    Series {
        name: series.to_string(),
        points: own_points
            .filter_map(|point| point.chart_point(x_of(&point.at).ok()?))
            .collect(),
        ..Series::default()
    }
}

/// A figure of a result.
#[derive(Clone, PartialEq, Debug)]
pub struct ResultFigure {
    /// File name without extension, such as `casc-1-miss-rate`.
    pub name: String,
    /// Heading of the drawing.
    pub title: String,
    /// The drawing as a standalone SVG.
    pub svg: String,
    /// The same drawing for a page that supplies the style.
    pub inline: cachemate_report::figure::Drawing,
}

macro_rules! pictures {
    ($($kind:ident: $drawing:ty),* $(,)?) => {
        impl ResultFigure {$(
            /// Creates a figure with this file name and the drawing's own title.
            pub fn $kind(name: impl Into<String>, drawing: &$drawing) -> Self {
                let title = drawing.title.clone();
                ResultFigure { name: name.into(), title, svg: drawing.svg(), inline: drawing.inline() }
            }
        )*}
    };
}
pictures! {
    bars: BarChart,
    chart: Chart,
    heat_map: HeatMap,
}

/// One measured result.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Id, such as `CASC-1`; several findings may share one.
    pub id: String,
    /// Description of the measured quantity, in one line.
    pub title: String,
    /// The paper's own value, as text.
    pub paper: String,
    /// Mean over seeds; `None` if nothing was measured.
    pub measured: Option<f64>,
    /// Standard deviation over seeds; `None` for one seed or a deterministic result.
    pub spread: Option<f64>,
    /// Standard error of the mean: the spread divided by the square root of the number of seeds.
    pub standard_error: Option<f64>,
    /// The interval of the mean over seeds, compared with the target; `None` for one seed.
    pub confidence: Option<FindingConfidence>,
    /// Rule by which the values of several seeds are compared with the target.
    pub rule: SeedRule,
    /// Unit of the measured value, the spread and the target; empty if they have none.
    pub unit: String,
    /// Target of the result.
    pub target: ResultTarget,
    /// Verdict from target, rule and values; `None` without a target.
    pub verdict: Option<ResultVerdict>,
    /// All points of the result's figure or table.
    pub points: Vec<DataPoint>,
    /// The seeds; each has one measured value.
    pub seeds: Vec<u64>,
    /// Time scale: the factor by which windows, slices, costs and phases are shorter than the paper's.
    pub time_scale: f64,
    /// Remarks: omissions, the reason for a missed target, and limits of the value.
    pub note: String,
    /// Figures in the order in which pages show them.
    #[serde(skip)]
    pub figures: Vec<ResultFigure>,
    /// Measured values, by seed.
    #[serde(skip)]
    values: Vec<f64>,
}

impl Finding {
    /// Builds a finding for an experiment that failed: it has no measurement, a missed target, and the reason.
    pub fn from_failure(id: &str, title: &str, seeds: &[u64], reason: &str) -> Self {
        Finding {
            seeds: seeds.to_vec(),
            verdict: Some(ResultVerdict::Missed),
            ..Finding::new(id, title, "", "", ResultTarget::Shown, &[])
                .with_note(format!("the experiment failed: {reason}"))
        }
    }

    /// Marks the finding as a worst case, whose target every seed must meet.
    #[must_use]
    pub fn require_every_seed(mut self) -> Self {
        self.rule = SeedRule::EverySeed;
        self.verdict = self
            .target
            .worst_verdict(self.values.iter().map(|&value| Some(value)));
        // A further seed could only make a worst case worse.
        if let Some(confidence) = &mut self.confidence {
            (confidence.is_decided, confidence.seeds_to_decide) = (true, None);
        }
        self
    }

    /// Whether more seeds could change the verdict: there is a target that the seeds so far do not
    /// decide.
    pub fn is_undecided(&self) -> bool {
        self.verdict.is_some()
            && self
                .confidence
                .as_ref()
                .is_some_and(|confidence| !confidence.is_decided)
    }

    /// Builds a finding with one value per seed; the verdict is that of their mean.
    pub fn new(
        id: &str,
        title: &str,
        paper: &str,
        unit: &str,
        target: ResultTarget,
        values_by_seed: &[(u64, f64)],
    ) -> Self {
        let values: Vec<f64> = values_by_seed.iter().map(|&(_, value)| value).collect();
        let measured = Some(mean(&values)).filter(|mean| mean.is_finite());
        let spread = measured
            .filter(|_| values.len() > 1)
            .map(|_| standard_deviation(&values));
        let standard_error = spread.map(|spread| spread / (values.len() as f64).sqrt());

        Finding {
            id: id.to_string(),
            title: title.to_string(),
            paper: paper.to_string(),
            measured,
            spread,
            standard_error,
            confidence: FindingConfidence::estimate(&values, &target.bounds()),
            rule: SeedRule::Mean,
            unit: unit.to_string(),
            target,
            verdict: target.judge_mean(measured, standard_error),
            points: Vec::new(),
            seeds: values_by_seed.iter().map(|&(seed, _)| seed).collect(),
            time_scale: 1.0,
            note: String::new(),
            figures: Vec::new(),
            values,
        }
    }
    /// In place of the present ones.
    #[must_use]
    pub fn with_points(mut self, points: Vec<DataPoint>) -> Self {
        self.points = points;
        self
    }
    /// The seeds of a single value that was computed from the runs of all of them.
    #[must_use]
    pub fn over_seeds(mut self, seeds: &[u64]) -> Self {
        self.seeds = seeds.to_vec();
        self
    }
    /// Sets the time scale; 1 means that times are as published.
    #[must_use]
    pub fn with_time_scale(mut self, scale: f64) -> Self {
        self.time_scale = scale;
        self
    }
    /// In place of the present one.
    #[must_use]
    pub fn with_note(mut self, note: impl Into<String>) -> Self {
        self.note = note.into();
        self
    }
    /// After the present ones.
    #[must_use]
    pub fn with_figure(mut self, figure: ResultFigure) -> Self {
        self.figures.push(figure);
        self
    }
}

/// The texts as a list for a note, or `none`.
pub(crate) fn list_or_none(texts: impl IntoIterator<Item = String>) -> String {
    let texts: Vec<String> = texts.into_iter().collect();
    if texts.is_empty() {
        "none".to_string()
    } else {
        texts.join(", ")
    }
}

/// Findings of runs at one time scale.
pub(crate) fn at_time_scale(
    scale: f64,
    findings: impl IntoIterator<Item = Finding>,
) -> Vec<Finding> {
    findings
        .into_iter()
        .map(|finding| finding.with_time_scale(scale))
        .collect()
}

/// Everything that an experiment needs to run.
pub struct ExperimentContext<'a> {
    /// Whether this is a quick run. All quick experiments together end within minutes.
    pub quick: bool,
    /// Whether this run only shows, in seconds, that each mechanism works. Its findings have no targets.
    pub sample: bool,
    /// Seeds, at least one; most experiments run once for each.
    pub seeds: Vec<u64>,
    /// Set to true when the user requests a stop.
    pub stop: &'a AtomicBool,
    /// Number of mixes per family, for an experiment that draws mixes; `None` for the experiment's own number.
    pub mixes: Option<u32>,
    /// Machine for an experiment that accepts any, by name or file; `None` for the experiment's own machines.
    pub machine: Option<&'a str>,
    /// Callback that receives the name of each run before the run starts.
    pub progress: &'a (dyn Fn(&str) + Sync),
}

impl<'a> ExperimentContext<'a> {
    /// A context for a full run with one seed in this process, without progress reports.
    pub fn for_seed(seed: u64, stop: &'a AtomicBool) -> Self {
        let seeds = vec![seed];
        ExperimentContext {
            quick: false,
            sample: false,
            seeds,
            stop,
            mixes: None,
            machine: None,
            progress: &|_| (),
        }
    }
}

impl ExperimentContext<'_> {
    /// Ends the experiment if the user has requested a stop. Experiments call this between runs.
    ///
    /// # Errors
    /// [`ReproError::Interrupted`] once the user has requested a stop.
    pub fn check_not_stopped(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            Err(ReproError::Interrupted)
        } else {
            Ok(())
        }
    }

    /// Reports the name of the run that is about to start.
    pub fn report_progress(&self, subject: &str) {
        (self.progress)(subject);
    }

    /// Computes one value per seed, in the form that findings take.
    pub fn values_by_seed(&self, value: impl Fn(u64) -> f64) -> Vec<(u64, f64)> {
        self.seeds.iter().map(|&seed| (seed, value(seed))).collect()
    }

    /// Joins the seeds with values in their order, in the form that findings take.
    pub(crate) fn with_seeds(&self, values: impl IntoIterator<Item = f64>) -> Vec<(u64, f64)> {
        self.seeds.iter().copied().zip(values).collect()
    }

    /// Selects the value for this run's length: sample, quick or full.
    pub fn pick_by_length<T>(&self, sample: T, quick: T, full: T) -> T {
        if self.sample {
            sample
        } else {
            self.pick(quick, full)
        }
    }

    /// Selects the value for this run's length: quick or full.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.quick { quick } else { full }
    }

    /// Runs independent simulations on all host cores; returns results in the order of `items`.
    ///
    /// # Errors
    /// The first error in the order of `items`, or an interruption.
    pub fn run_all<T: Sync, R: Send>(
        &self,
        items: &[T],
        run: impl Fn(&T) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let results: Vec<Result<R>> = items
            .par_iter()
            .map(|item| {
                self.check_not_stopped()?;
                run(item)
            })
            .collect();
        results.into_iter().collect()
    }

    /// Runs a function on each of these inputs as [`ExperimentContext::run_all`] does, but reuses stored results.
    ///
    /// A result is stored under everything that the function can see: its name and its inputs, the length of the run,
    /// the descriptions of machines, and the sources that its module reaches. To see nothing else, `run` is a function
    /// by name: a closure that captures anything does not compile, and others are refused because they have no name.
    /// Its context states the length of the run, and neither seeds nor what the user selected.
    pub(crate) fn run_all_stored<I, R, F>(&self, inputs: &[I], run: F) -> Result<Vec<R>>
    where
        I: Serialize + Sync,
        R: Send + Serialize + DeserializeOwned,
        F: Fn(&ExperimentContext<'_>, &I) -> Result<R> + Sync,
    {
        const { assert!(size_of::<F>() == 0, "a stored run is a function by name") };
        let function = type_name::<F>();
        assert!(
            !function.ends_with('}'),
            "found the closure {function}, expected a function by name"
        );
        let length = self.pick_by_length("sample", "quick", "full");
        let visible_context = ExperimentContext {
            seeds: Vec::new(),
            mixes: None,
            machine: None,
            ..*self
        };

        self.run_all(inputs, |input| {
            let name = RunName::new(
                "answer",
                format!("{function}, {length}"),
                digest_of(function).to_string(),
                &(function, length, &*MACHINES_DIGEST, input),
            )?;
            store::find_or_make(name, || run(&visible_context, input))
        })
    }
}

/// The context of a quick run with seed 1, for tests.
#[cfg(test)]
pub(crate) fn quick_context() -> ExperimentContext<'static> {
    static NO_STOP: AtomicBool = AtomicBool::new(false);
    ExperimentContext {
        quick: true,
        ..ExperimentContext::for_seed(1, &NO_STOP)
    }
}

/// One experiment, with its result ids and the function that runs it.
pub struct Experiment {
    /// Result ids that one run measures, such as `["CASC-1", "CASC-2"]`.
    pub ids: Vec<&'static str>,
    /// Description of the measured quantity, in one line.
    pub title: &'static str,
    /// Measured duration of a full run on two cores in minutes, shown before the run.
    pub full_minutes: f64,
    /// Runs the experiment, and returns findings for its ids.
    pub run: RunExperiment,
}

/// The function that runs an experiment.
pub type RunExperiment = fn(&ExperimentContext<'_>) -> Result<Vec<Finding>>;

/// The ids of an experiment, separated by spaces, and the function that runs it.
pub(crate) type ExperimentRun = (&'static str, RunExperiment);

impl Experiment {
    /// Whether the experiment comes from no paper. Such experiments run only if requested by id;
    /// they take longer than all of the papers' experiments together.
    pub fn is_from_no_paper(&self) -> bool {
        self.ids.iter().all(|id| {
            ["AUTO", "PROMISES", "INTERVAL-", "VALIDATION-"]
                .iter()
                .any(|prefix| id.starts_with(prefix))
        })
    }
}

/// All findings, in the form of `repro --json`.
#[derive(Debug, Serialize)]
pub struct Findings {
    /// Findings in the order of the experiments.
    pub results: Vec<Finding>,
}

impl Findings {
    /// Removes targets and verdicts, because the runs of a sample are too short to be judged.
    #[must_use]
    pub fn without_targets(mut self) -> Self {
        for finding in &mut self.results {
            (finding.target, finding.verdict) = (ResultTarget::Shown, None);
        }
        self
    }

    /// `met`, `exceeded` and `missed`, each with its number of findings.
    pub fn verdict_counts(&self) -> BTreeMap<&'static str, usize> {
        Findings::count_verdicts(&self.results)
    }

    /// As [`Findings::verdict_counts`], for any findings.
    pub fn count_verdicts<'a>(
        findings: impl IntoIterator<Item = &'a Finding>,
    ) -> BTreeMap<&'static str, usize> {
        let all_verdicts: Vec<Option<ResultVerdict>> = findings
            .into_iter()
            .map(|finding| finding.verdict)
            .collect();
        let verdicts = [
            ResultVerdict::Met,
            ResultVerdict::Exceeded,
            ResultVerdict::Missed,
        ];

        let count_of_verdict = |verdict| {
            all_verdicts
                .iter()
                .filter(|other| **other == Some(verdict))
                .count()
        };
        verdicts
            .into_iter()
            .map(|verdict| (verdict.name(), count_of_verdict(verdict)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::ResultVerdict::{Exceeded, Met, Missed};
    use super::*;

    fn at_least(target: f64) -> ResultTarget {
        ResultTarget::AtLeast {
            target,
            paper_best: None,
        }
    }

    /// Is the verdict right on either side of the target and at it, and absent without a target?
    #[test]
    fn verdicts_follow_from_targets() {
        let at_least = ResultTarget::AtLeast {
            target: 27.0,
            paper_best: Some(45.0),
        };
        let verdicts = [26.9, 27.0, 45.0, 45.1].map(|value| at_least.judge_value(Some(value)));
        assert_eq!(verdicts, [Missed, Met, Met, Exceeded].map(Some));
        let at_most = ResultTarget::AtMost {
            target: 1.0,
            paper_best: None,
        };
        let verdicts = [0.5, 1.0, 1.5].map(|value| at_most.judge_value(Some(value)));
        assert_eq!(verdicts, [Met, Met, Missed].map(Some));
        assert_eq!(
            at_most.judge_value(None),
            Some(Missed),
            "what was not measured is not met"
        );
        assert_eq!(at_most.judge_value(Some(f64::NAN)), Some(Missed));
        assert_eq!(
            ResultTarget::Within {
                low: 0.0,
                high: 1.0
            }
            .judge_value(Some(1.5)),
            Some(Missed)
        );
        assert_eq!(ResultTarget::Shown.judge_value(Some(1.5)), None);
    }

    /// Does a mean have to meet its target by more than its standard error, and a worst case for every seed?
    #[test]
    fn a_mean_meets_its_target_by_its_error_and_a_worst_case_always() {
        // Mean 10, spread 2, standard error 1.15.
        let values = [(1, 8.0), (2, 10.0), (3, 12.0)];
        let finding = |target| Finding::new("X-1", "x", "y", "%", target, &values);
        let verdict = |target| finding(target).verdict;
        let worst_verdict = |target| finding(target).require_every_seed().verdict;
        let at_most = |target| ResultTarget::AtMost {
            target,
            paper_best: Some(11.5),
        };
        assert_eq!(
            [8.8, 8.9].map(|target| verdict(at_least(target))),
            [Met, Missed].map(Some)
        );
        assert_eq!(
            [8.0, 8.1].map(|target| worst_verdict(at_least(target))),
            [Met, Missed].map(Some)
        );
        assert_eq!(
            [11.1, 11.2].map(|target| verdict(at_most(target))),
            [Missed, Exceeded].map(Some)
        );
        assert_eq!(
            [11.9, 12.0].map(|target| worst_verdict(at_most(target))),
            [Missed, Met].map(Some)
        );
        let alone = Finding::new("X-1", "x", "y", "%", at_least(8.0), &values[..1]);
        assert_eq!((alone.standard_error, alone.verdict), (None, Some(Met)));
    }

    /// Does a finding without any value report that instead of a zero?
    #[test]
    fn a_finding_without_values_is_null_and_not_zero() {
        let finding = Finding::new(
            "X-1",
            "x",
            "y",
            "%",
            ResultTarget::AtMost {
                target: 1.0,
                paper_best: None,
            },
            &[],
        );
        assert_eq!((finding.measured, finding.verdict), (None, Some(Missed)));
        let point = DataPoint::from_values("s", "1", [0.0; 0]);
        assert_eq!((point.value, point.low, point.high), (None, None, None));
    }

    /// Are results in the order of the items, and does a stop end the run?
    #[test]
    fn results_are_in_item_order_and_a_stop_ends_the_run() {
        let stop = AtomicBool::new(false);
        let context = ExperimentContext {
            quick: true,
            ..ExperimentContext::for_seed(1, &stop)
        };
        let items: Vec<u64> = (0..100).collect();
        assert_eq!(
            context.run_all(&items, |&item| Ok(item * 2)).unwrap()[99],
            198
        );
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(
            context.run_all(&items, |&item| Ok(item)),
            Err(ReproError::Interrupted)
        ));
    }
}
