//! Applies configured partitions at configured times (papers CP: the tool of the experiments). Problem: the effect of a
//! given partition on each program is to be measured. Method: processes are numbered in order of arrival. The
//! parameters list the colors or ways of each number, in timed steps that may repeat. Properties: no evidence is
//! needed; processes without an entry are unrestricted; the same arrivals and times give the same plan.

use cachemate_core::{
    CacheId, CacheShare, Decision, GroupId, IndexSet, PageMigration, PartitionSupport, Policy,
    ProcessId, Reason, ShareMember, TaskId, View,
};
use serde::Deserialize;

use super::default::Parameters as DefaultParameters;
use super::{ParameterError, ParameterRange};
use crate::partition::units::partitionable_caches;

/// Units of the first process, the second, and so on, from a given time on; an empty set means unrestricted.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionStep {
    #[serde(default)]
    pub from_ns: u64,
    pub shares: Vec<IndexSet>,
}

/// Parameters of `static-partition`, which the policy's page explains.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    pub window_ns: u64,
    /// Steps in ascending order of time.
    pub steps: Vec<PartitionStep>,
    /// Period after which the steps repeat, in nanoseconds; 0 means that the last step stays.
    pub period_ns: u64,
    pub page_migration: PageMigration,
}

impl Default for Parameters {
    fn default() -> Self {
        let window_ns = DefaultParameters::default().window_ns;
        Parameters {
            window_ns,
            steps: Vec::new(),
            period_ns: 0,
            page_migration: PageMigration::All,
        }
    }
}

impl Parameters {
    fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = super::parse_parameters(text)?;
        ParameterRange::OneOrMore.check([("window_ns", parameters.window_ns as f64)])?;
        if let Some(index) = parameters
            .steps
            .windows(2)
            .position(|pair| pair[0].from_ns >= pair[1].from_ns)
        {
            let (previous_ns, next_ns) = (
                parameters.steps[index].from_ns,
                parameters.steps[index + 1].from_ns,
            );
            let name = format!("steps[{}].from_ns", index + 1);
            return Err(ParameterError::invalid_value(
                name,
                next_ns,
                format!("more than {previous_ns}"),
            ));
        }
        Ok(parameters)
    }

    /// The step in force at a time; `None` before the first.
    fn step_at(&self, now_ns: u64) -> Option<&PartitionStep> {
        let offset_ns = if self.period_ns > 0 {
            now_ns % self.period_ns
        } else {
            now_ns
        };
        self.steps
            .iter()
            .rev()
            .find(|step| step.from_ns <= offset_ns)
    }
}

struct StaticPartition {
    parameters: Parameters,
    /// Processes in order of arrival; exited ones keep their number.
    processes: Vec<ProcessId>,
}

impl Policy for StaticPartition {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = DefaultParameters {
            window_ns: self.parameters.window_ns,
        }
        .idle();
        for task in &view.observation.tasks {
            if !self.processes.contains(&task.process) {
                self.processes.push(task.process);
            }
        }

        let now_ns = view.observation.span.end_ns();
        let mut reasons = Vec::new();
        let Some(step) = self.parameters.step_at(now_ns) else {
            return Decision::new(plan, reasons);
        };

        for (cache, partition_units) in partitionable_last_levels(view) {
            for (number, units) in step.shares.iter().enumerate() {
                let Some(&process) = self.processes.get(number) else {
                    break;
                };
                let members: Vec<TaskId> = view
                    .movable_tasks()
                    .filter(|task| task.process == process)
                    .map(|task| task.task)
                    .collect();

                // Units that this machine lacks are left out; if none remain, the process gets no share.
                let units: IndexSet = units
                    .iter()
                    .filter(|&unit| unit < partition_units.units())
                    .collect();
                if members.is_empty() || units.count() < partition_units.min_units() {
                    continue;
                }

                let text = format!("units {units} of cache {} as stated", cache.0);
                reasons.push(Reason::new(members, text, Vec::new()));
                plan.shares.push(CacheShare {
                    group: GroupId(number as u32),
                    members: vec![ShareMember::Process(process)],
                    cache,
                    units: partition_units.to_units(units, self.parameters.page_migration),
                });
            }
        }

        Decision::new(plan, reasons)
    }
}

/// The last-level caches that can be partitioned.
///
/// If there are none, returns the first private cache that colors partition, because configured partitions need no
/// forecast. Colors apply to every cache of a level, so the first cache represents all.
fn partitionable_last_levels(view: &View<'_>) -> Vec<(CacheId, PartitionSupport)> {
    let last_level_caches = partitionable_caches(view);
    if !last_level_caches.is_empty() {
        return last_level_caches;
    }
    view.capabilities
        .partitions
        .iter()
        .find(|(_, partition)| partition.colors().is_some())
        .copied()
        .into_iter()
        .collect()
}

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(StaticPartition {
        parameters: Parameters::parse(parameters)?,
        processes: Vec::new(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::check_policy;

    const STEPS: &str =
        "steps = [{ shares = ['0-7', ''] }, { from_ns = 3000000, shares = ['', '0-3', '4-63'] }]";

    /// Is each step in force from its time on, and do the steps repeat?
    #[test]
    fn steps_hold_from_their_time_and_repeat() {
        let parameters = Parameters::parse(&format!("period_ns = 5000000\n{STEPS}")).unwrap();
        let first = |now_ns: u64| {
            parameters
                .step_at(now_ns)
                .map(|step| step.shares[0].to_string())
        };
        assert_eq!(first(0), Some("0-7".to_string()));
        assert_eq!(first(2_999_999), Some("0-7".to_string()));
        assert_eq!(first(3_000_000), Some(String::new()));
        assert_eq!(first(5_000_000), Some("0-7".to_string()));
        assert_eq!(Parameters::default().step_at(7), None);
    }

    /// Does the policy conform if shares change, are empty, or name units that the machine lacks?
    #[test]
    fn the_policy_conforms_with_any_partition() {
        check_policy(&|seed| build(STEPS, seed).unwrap(), 24).unwrap();
    }

    /// Are steps out of order rejected with the name of the parameter?
    #[test]
    fn steps_out_of_order_are_rejected_with_the_parameter() {
        let wrong = "steps = [{ from_ns = 5, shares = [] }, { from_ns = 5, shares = [] }]";
        assert_eq!(
            Parameters::parse(wrong).unwrap_err().to_string(),
            "steps[1].from_ns: found 5, expected more than 5"
        );
        assert!(
            Parameters::parse("steps = [{ shares = ['7-3'] }]")
                .unwrap_err()
                .to_string()
                .contains("7-3")
        );
    }
}
