//! A run on a simulated machine: its machine, programs, policy, length and seed.

use std::collections::BTreeSet;

use cachemate_core::{CpuSet, Goal, MachineSpec, RunLimit};
use serde::{Deserialize, Serialize};

use crate::interval::{Distribution, IntervalSpec, SimModel, check_distribution};
use crate::located_toml::Located;
use crate::overrides::set_field;
use crate::{SpecError, load_machine, read_text};

/// One scenario, the content of `scenarios/*.toml`. docs/scenarios.md explains every field.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Short name, not empty; results contain it.
    pub name: String,
    /// A one-line description.
    #[serde(default)]
    pub description: String,
    /// Name or path of a machine, optionally with overrides; see [`load_machine`].
    pub machine: String,
    /// The simulated machine that runs it.
    #[serde(default, skip_serializing_if = "SimModel::is_cycle")]
    pub simulator: SimModel,
    /// Seed of all random draws in the run.
    pub seed: u64,
    /// The factor by which windows, slices, costs and phase lengths are divided (papers: "one time scale"); 1 for the
    /// published values.
    #[serde(default = "one")]
    pub scale: u64,
    /// Measured part of the run.
    pub length: RunLimit,
    /// Part of the run before the measurement.
    pub warm_up: Option<RunLimit>,
    /// The simulated operating system's own scheduler, and its parameters.
    #[serde(default = "default_choice")]
    pub scheduler: PolicyChoice,
    /// The policy that decides above the scheduler.
    #[serde(default = "auto_choice")]
    pub policy: PolicyChoice,
    /// Are decisions that slow programs down rolled back, as on a live host?
    #[serde(default = "on")]
    pub guard: bool,
    /// Options for the interval machine only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<IntervalSpec>,
    /// Programs in order of arrival.
    #[serde(default)]
    pub programs: Vec<ScenarioProgram>,
}

/// A name and its own parameters.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table such as { name = 'auto' }")]
pub struct PolicyChoice {
    /// The name of the policy or scheduler.
    pub name: String,
    /// Parameters of the policy; missing ones have the policy's defaults.
    #[serde(default)]
    pub parameters: toml::Table,
}

/// One program, in `count` copies; each copy has its own seed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioProgram {
    /// A workload kernel's name, the name of a bundled recording, or the path of a `.cmt`.
    pub program: String,
    /// Number of copies; 1 to 4096.
    #[serde(default = "one_copy")]
    pub count: u32,
    /// Threads of one copy; `None` for the program's own number.
    pub threads: Option<u32>,
    /// Parameters of the kernel.
    #[serde(default)]
    pub parameters: toml::Table,
    /// Time of its arrival.
    #[serde(default)]
    pub start_ns: u64,
    /// Does it restart when it ends?
    #[serde(default)]
    pub restart: bool,
    /// CPUs to which its owner has pinned it, so that no policy may move it.
    pub cpus: Option<CpuSet>,
    /// The goal of each copy; `None` if there is none.
    #[serde(default, deserialize_with = "crate::goals::goal")]
    pub goal: Option<Goal>,
    /// On the interval machine: time between arrivals of copies; `None` if all arrive together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interarrival_ns: Option<Distribution>,
    /// On the interval machine: instructions until a copy ends; `None` for the program's own number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instructions: Option<Distribution>,
    /// On the interval machine: share of a CPU that a copy would use alone; `None` for the program's own share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_share: Option<f64>,
}

fn on() -> bool {
    true
}
fn one() -> u64 {
    1
}
fn one_copy() -> u32 {
    1
}
fn default_choice() -> PolicyChoice {
    PolicyChoice {
        name: "default".to_string(),
        parameters: toml::Table::new(),
    }
}
fn auto_choice() -> PolicyChoice {
    PolicyChoice {
        name: "auto".to_string(),
        parameters: toml::Table::new(),
    }
}

fn amount(limit: RunLimit) -> u64 {
    match limit {
        RunLimit::Cycles(n) | RunLimit::Ns(n) | RunLimit::Instructions(n) => n,
        RunLimit::Completions(n) => u64::from(n),
    }
}

/// Threads and copies of a scenario are bounded, so that a typing error is reported rather than run.
const MAX_COPIES: u32 = 4096;

/// Reads and checks a scenario and its machine.
///
/// # Errors
/// The errors of [`parse_scenario`], and an unreadable file.
pub fn load_scenario(path: &str) -> Result<(Scenario, MachineSpec), SpecError> {
    parse_scenario(path, &read_text(path)?)
}

/// Does the same as [`load_scenario`], with other values for some fields, each given by its path.
///
/// # Errors
/// The errors of [`vary_scenario`], and an unreadable file.
pub fn load_varied_scenario(
    path: &str,
    changes: &[(String, toml::Value)],
) -> Result<(Scenario, MachineSpec), SpecError> {
    vary_scenario(path, &read_text(path)?, changes)
}

/// Parses a scenario from a text; `file` is its name in errors.
///
/// # Errors
/// Invalid TOML, unknown or ill-typed fields, no programs, a length, scale or count of 0, CPUs that the machine does
/// not have, a goal that is not a number, an unknown or impossible machine.
pub fn parse_scenario(file: &str, text: &str) -> Result<(Scenario, MachineSpec), SpecError> {
    vary_scenario(file, text, &[])
}

/// Parses a scenario with other values for some fields, each given by its path (`policy`, `scale`, `programs.0.count`).
///
/// # Errors
/// The errors of [`parse_scenario`], and a path without a field.
fn vary_scenario(
    file: &str,
    text: &str,
    changes: &[(String, toml::Value)],
) -> Result<(Scenario, MachineSpec), SpecError> {
    let located = Located::parse(file, text)?;
    let set_all = |table: &mut toml::Table| {
        changes
            .iter()
            .try_for_each(|(field, value)| set_field(table, field, value))
    };

    let scenario: Scenario = located.deserialize_changed(set_all)?;
    let machine = load_machine(&scenario.machine).map_err(|inner| SpecError {
        nearest: inner.nearest.clone(),
        ..located.error_at(
            "machine",
            SpecError {
                nearest: None,
                ..inner
            }
            .to_string(),
            "a usable machine",
        )
    })?;
    scenario.check(&located, &machine)?;
    Ok((scenario, machine))
}

impl Scenario {
    fn check(&self, located: &Located<'_>, machine: &MachineSpec) -> Result<(), SpecError> {
        if self.name.is_empty() {
            return Err(located.error_at("name", "an empty name", "a short name"));
        }
        if self.scale == 0 {
            return Err(located.error_at("scale", "0", "1 or more"));
        }

        for (field, length) in [("length", Some(self.length)), ("warm_up", self.warm_up)] {
            if length.is_some_and(|length| amount(length) == 0) {
                return Err(located.error_at(field, "0", "1 or more"));
            }
        }

        let mixes = self
            .interval
            .as_ref()
            .map_or(0, |interval| interval.mixes.len());
        if self.programs.is_empty() && mixes == 0 {
            return Err(located.error_at("programs", "none", "one program or more"));
        }

        self.check_model(located, machine)?;
        self.programs
            .iter()
            .enumerate()
            .try_for_each(|(index, program)| program.check(index, located, machine))
    }
}

impl Scenario {
    /// Checks the fields that only one of the simulators has.
    fn check_model(&self, located: &Located<'_>, machine: &MachineSpec) -> Result<(), SpecError> {
        let is_interval = self.simulator == SimModel::Interval;
        if let Some(table) = &self.interval {
            if !is_interval {
                return Err(located.error_at(
                    "interval",
                    "a table",
                    "none, as simulator is \"cycle\"",
                ));
            }
            table.check(located, machine)?;
        }

        for (index, program) in self.programs.iter().enumerate() {
            let interval_fields = [
                ("interarrival_ns", program.interarrival_ns.is_some()),
                ("instructions", program.instructions.is_some()),
                ("cpu_share", program.cpu_share.is_some()),
            ];
            if let Some((field, _)) = interval_fields
                .iter()
                .find(|(_, is_given)| *is_given && !is_interval)
            {
                let field = format!("programs[{index}].{field}");
                return Err(located.error_at(&field, "a value", "none, as simulator is \"cycle\""));
            }
        }

        if is_interval && self.scale != 1 {
            return Err(located.error_at(
                "scale",
                self.scale.to_string(),
                "1: the interval machine runs nominal time",
            ));
        }

        for (field, length) in [("length", Some(self.length)), ("warm_up", self.warm_up)] {
            let is_timed = matches!(length, None | Some(RunLimit::Ns(_) | RunLimit::Cycles(_)));
            if is_interval && !is_timed {
                return Err(located.error_at(
                    field,
                    "no time",
                    "ns or cycles, as simulator is \"interval\"",
                ));
            }
        }

        Ok(())
    }
}

impl ScenarioProgram {
    fn check(
        &self,
        index: usize,
        located: &Located<'_>,
        machine: &MachineSpec,
    ) -> Result<(), SpecError> {
        let program_error = |field: &str, found: String, expected: String| {
            Err(located.error_at(&format!("programs[{index}].{field}"), found, expected))
        };
        for (field, count) in [
            ("count", self.count),
            ("threads", self.threads.unwrap_or(1)),
        ] {
            if !(1..=MAX_COPIES).contains(&count) {
                return program_error(field, count.to_string(), format!("1 to {MAX_COPIES}"));
            }
        }

        if let Some(cpus) = &self.cpus {
            let machine_cpus: BTreeSet<u32> = (0..machine.cpus()).collect();
            if cpus.is_empty() || cpus.iter().any(|cpu| !machine_cpus.contains(&cpu)) {
                let expected = format!(
                    "some of the CPUs 0-{} of {}",
                    machine.cpus() - 1,
                    machine.name
                );
                return program_error("cpus", format!("'{cpus}'"), expected);
            }
        }
        if let Some(goal) = self.goal {
            if !(goal.priority.is_finite() && goal.priority > 0.0) {
                return program_error(
                    "goal.priority",
                    goal.priority.to_string(),
                    "a positive number".to_string(),
                );
            }
            if let Some(min_rate) = goal
                .min_rate
                .filter(|min_rate| !(min_rate.is_finite() && *min_rate > 0.0))
            {
                let expected = "a positive number, in work a second".to_string();
                return program_error("goal.min_rate", min_rate.to_string(), expected);
            }
        }
        if let Some(share) = self
            .cpu_share
            .filter(|share| !(*share > 0.0 && *share <= 1.0))
        {
            return program_error(
                "cpu_share",
                share.to_string(),
                "more than 0, at most 1".to_string(),
            );
        }
        check_distribution(
            self.interarrival_ns,
            &format!("programs[{index}].interarrival_ns"),
            0.0,
            located,
        )?;
        check_distribution(
            self.instructions,
            &format!("programs[{index}].instructions"),
            1.0,
            located,
        )?;
        Ok(())
    }
}
