//! `cachemate plan`: assigns programs to caches, with reasons.

use std::path::PathBuf;

use cachemate_core::{CacheId, CpuId};
use cachemate_papers::matrix::PairCosts;
use cachemate_papers::placement::{Placement, place};
use cachemate_report::GroupForecast;
use cachemate_report::terminal::plan_boxes;
use cachemate_spec::load_measured_matrix;
use cachemate_study::plan_result;
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::complete::goal_plan::{GoalPlan, RequestedGoal, StaticPlanSearch, parse_goal};
use crate::complete::pinning::describe_pinning;
use crate::complete::prediction::{INTERVAL_MODEL, MachineArg, Prediction, SlowdownModel};
use crate::complete::programs::name_without_number;
use crate::exit::UsageError;
use crate::host_machine;
use crate::session::Session;

/// Plan which programs share a cache on a machine, with reasons
///
/// A program is a profile file, a recording, or the name of a bundled recording. With --slowdowns, the slowdowns are
/// read instead of predicted, and programs are names in that file (all of them if none is given). With --model as well,
/// the model decides and the plan is evaluated with the measured slowdowns. What a policy would do with running
/// programs is a question for `cachemate sim`.
#[derive(Args)]
pub struct PlanArgs {
    /// Profile files, recordings, or names of bundled recordings
    #[arg(value_name = "PROGRAM", required_unless_present = "slowdowns")]
    programs: Vec<String>,
    #[command(flatten)]
    machine: MachineArg,
    /// Model that predicts slowdowns: interval, statcc, sdc, pain, animal, miss-rate, access-rate, ...
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// CSV of measured slowdowns in percent: of the row's program by the column's
    #[arg(long, value_name = "FILE")]
    slowdowns: Option<PathBuf>,
    /// Promise that a program is at most this much slower than alone, and answer whether a plan can keep all promises:
    /// redis=5% or redis=0.05
    #[arg(long = "goal", value_name = "PROGRAM=MAX", value_parser = parse_goal, conflicts_with = "slowdowns")]
    goals: Vec<RequestedGoal>,
    /// Seed for the sample of random assignments
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate plan --json`.
#[derive(Serialize)]
struct PlanJson<'a> {
    machine: &'a str,
    /// Name of the model that decided, or `measured`.
    model: &'a str,
    /// Name of the model that evaluated the plan, or `measured`.
    evaluated_with: &'a str,
    #[serde(flatten)]
    placement: &'a Placement,
    groups: Vec<CacheGroup>,
    /// Answer to --goal; absent without this option.
    #[serde(skip_serializing_if = "Option::is_none")]
    goals: Option<GoalPlan>,
}

/// Programs on one cache of the plan, forecast as a group.
#[derive(Serialize)]
struct CacheGroup {
    cache: Option<CacheId>,
    #[serde(flatten)]
    group: GroupForecast,
}

/// Forecasts the groups of the plan's caches, all at once if the model knows the machine's memory bandwidth. Otherwise,
/// each cache with at least two programs is forecast alone. Caches on which programs share a CPU are left out, because
/// such programs do not run all the time.
fn forecast_groups(
    prediction: &Prediction,
    placement: &Placement,
) -> anyhow::Result<Vec<CacheGroup>> {
    let mut caches: Vec<Option<CacheId>> = placement
        .programs
        .iter()
        .map(|program| program.cache)
        .collect();
    caches.sort_unstable();
    caches.dedup();
    caches.retain(Option::is_some);
    let members_of = |cache: &Option<CacheId>| -> Vec<usize> {
        (0..placement.programs.len())
            .filter(|&index| placement.programs[index].cache == *cache)
            .collect()
    };
    let has_own_cpu = |index: usize| placement.programs[index].shares_cpu_with.is_empty();
    if (0..placement.programs.len()).all(has_own_cpu) {
        let cpus: Vec<CpuId> = placement
            .programs
            .iter()
            .map(|program| program.cpu)
            .collect();
        let members_by_cache: Vec<Vec<usize>> = caches.iter().map(members_of).collect();
        if let Some(groups) = prediction.forecast_placement(&cpus, &members_by_cache)? {
            return Ok(caches
                .into_iter()
                .zip(groups)
                .map(|(cache, group)| CacheGroup { cache, group })
                .collect());
        }
    }
    let mut groups = Vec::new();
    for cache in caches {
        let members = members_of(&cache);
        if members.iter().all(|&index| has_own_cpu(index)) {
            groups.extend(
                prediction
                    .forecast_group(&members)?
                    .map(|group| CacheGroup { cache, group }),
            );
        }
    }
    Ok(groups)
}

/// The slowdowns on which a plan is based.
enum PlanBasis {
    Measured {
        names: Vec<String>,
        costs: PairCosts,
    },
    /// A model decides; `evaluation_costs` are measured slowdowns that evaluate its plan, if they are given.
    Predicted {
        prediction: Box<Prediction>,
        evaluation_costs: Option<PairCosts>,
    },
}

impl PlanArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let basis = self.basis(session)?;
        let machine = match &basis {
            PlanBasis::Measured { .. } => {
                host_machine::load_machine(session, &self.machine.machine)?
            }
            PlanBasis::Predicted { prediction, .. } => prediction.machine.clone(),
        };
        let (model, kind, placement, groups) = match &basis {
            PlanBasis::Measured { names, costs } => (
                "measured",
                costs.kind,
                place(names, costs, costs, &machine.topology(), self.seed)?,
                Vec::new(),
            ),
            PlanBasis::Predicted {
                prediction,
                evaluation_costs: judge,
            } => {
                let placement = prediction.place(judge.as_ref(), self.seed)?;
                let groups = forecast_groups(prediction, &placement)?;
                (
                    prediction.model.name(),
                    judge.as_ref().unwrap_or(&prediction.costs).kind,
                    placement,
                    groups,
                )
            }
        };
        let mut placement = placement;
        let mut commands = String::new();
        let mut numbers: Vec<u32> = Vec::new();
        if self.machine.machine == host_machine::HOST_NAME {
            let kernel_cpus = host_machine::kernel_cpus(session)?;
            numbers = kernel_cpus.iter().map(|cpu| cpu.cpu).collect();
            placement.renumber_cpus(&numbers);
            commands = describe_pinning(&placement, &machine.topology(), &kernel_cpus);
        } else if machine.contexts_per_core > 1 {
            // Linux usually numbers the second contexts of all cores after the first ones.
            commands = format!(
                "CPUs of {} are numbered core by core, and a kernel may number them otherwise: \
                 '-m host' prints what to paste\n",
                machine.name
            );
        }
        let search = match &basis {
            PlanBasis::Measured { .. } => None,
            PlanBasis::Predicted { prediction, .. } => self.build_plan_search(prediction)?,
        };
        let mut goals = search
            .as_ref()
            .map(StaticPlanSearch::best_for_goals)
            .transpose()?;
        if let Some(goals) = &mut goals {
            goals.renumber_cpus(&numbers);
        }
        let result = PlanJson {
            machine: &machine.name,
            model,
            evaluated_with: if self.slowdowns.is_some() {
                "measured"
            } else {
                model
            },
            placement: &placement,
            groups,
            goals,
        };
        let describe = || {
            let picture = plan_result(&placement, &machine.name, model, kind);
            let goals_text = result
                .goals
                .as_ref()
                .map_or(String::new(), GoalPlan::describe);
            plan_boxes(&picture, session.terminal_style()) + &goals_text + &commands
        };
        session.print_result(self.json.json, &result, describe)
    }

    /// Prepares the search over plans with partitions; `None` if no option asks for it.
    fn build_plan_search(
        &self,
        prediction: &Prediction,
    ) -> anyhow::Result<Option<StaticPlanSearch>> {
        if self.goals.is_empty() {
            return Ok(None);
        }
        let SlowdownModel::Interval {
            timed: timed_programs,
            ..
        } = &prediction.model
        else {
            let model = prediction.model.name();
            return Err(
                UsageError(format!("--goal: found --model {model}, expected interval")).into(),
            );
        };
        let timed_programs: Vec<_> = timed_programs.iter().map(AsRef::as_ref).collect();
        StaticPlanSearch::new(
            &prediction.machine,
            prediction.program_names(),
            &timed_programs,
            &self.goals,
            self.seed,
        )
        .map(Some)
    }

    fn basis(&self, session: &Session) -> anyhow::Result<PlanBasis> {
        let measured_slowdowns = self
            .slowdowns
            .as_ref()
            .map(|path| load_measured_matrix(&path.display().to_string()))
            .transpose()?;
        if let (Some(measured), None) = (&measured_slowdowns, &self.model) {
            let names = if self.programs.is_empty() {
                measured.names.clone()
            } else {
                self.programs.clone()
            };
            let load_costs = PairCosts::from_slowdowns(measured.slowdowns_of(&names)?);
            return Ok(PlanBasis::Measured {
                names,
                costs: load_costs,
            });
        }
        if self.programs.is_empty() {
            return Err(
                UsageError("--model: found no program, expected at least one".to_string()).into(),
            );
        }
        let model = self.model.as_deref().unwrap_or(INTERVAL_MODEL);
        let prediction = Prediction::new(session, &self.programs, &self.machine.machine, model)?;
        let names = prediction.program_names();
        let names: Vec<String> = names
            .iter()
            .map(|name| name_without_number(name).to_string())
            .collect();
        let measured_slowdowns = measured_slowdowns
            .map(|measured| measured.slowdowns_of(&names))
            .transpose()?;
        let evaluation_costs = measured_slowdowns.map(PairCosts::from_slowdowns);
        Ok(PlanBasis::Predicted {
            prediction: Box::new(prediction),
            evaluation_costs,
        })
    }
}
