//! The combination of programs, a machine and a model that `predict`, `plan` and `report` share.

use std::sync::Arc;

use anyhow::Context;
use cachemate_core::{CpuId, Estimate, MachineSpec, MissRatio};
use cachemate_forecast::{
    MemberForecast, SoloForecast, TimedProgram, TimingBasis, costs_of_pairs, forecast_alone,
    forecast_pairs, forecast_placed, forecast_together, group_miss_ratio, place_programs,
};
use cachemate_papers::matrix::{CostKind, PairCosts};
use cachemate_papers::placement::{Placement, place};
use cachemate_papers::schemes::{self, Scheme, SharedCache, UnknownScheme};
use cachemate_report::{CacheSummary, CostTable, GroupForecast, GroupMember};
use cachemate_repro::ExperimentContext;
use cachemate_study::{DEFAULT_SCHEME, ProfileTarget, cache_summary, cost_table, pair_costs};
use clap::Args;

use super::programs::{ProfiledInput, check_names, load_all};
use crate::exit::UsageError;
use crate::host_machine::{HOST_NAME, load_machine};
use crate::session::Session;

/// The option that selects the machine.
#[derive(Args, Clone)]
pub struct MachineArg {
    /// Bundled machine (cachemate topology --list), TOML file, or 'host' for this one
    #[arg(long, short, value_name = "MACHINE", default_value = HOST_NAME)]
    pub machine: String,
}

/// The default model: the interval machine's solution, as in `sim` of an interval scenario.
pub const INTERVAL_MODEL: &str = "interval";

/// The programs, the machine and the model of a prediction.
#[derive(Args)]
pub struct PredictionArgs {
    /// Profile files, recordings, or names of bundled recordings
    #[arg(value_name = "PROGRAM", required = true)]
    programs: Vec<String>,
    #[command(flatten)]
    machine: MachineArg,
    /// Model that predicts slowdowns: interval, statcc, sdc, pain, animal, miss-rate, access-rate, ...
    #[arg(long, value_name = "MODEL", default_value = INTERVAL_MODEL)]
    model: String,
}

impl PredictionArgs {
    /// Loads the programs and computes the prediction.
    ///
    /// # Errors
    /// The errors of [`Prediction::new`].
    pub fn predict(&self, session: &Session) -> anyhow::Result<Prediction> {
        Prediction::new(session, &self.programs, &self.machine.machine, &self.model)
    }
}

/// The model that computes a prediction.
pub enum SlowdownModel {
    /// The interval machine's solution for programs with timing.
    Interval {
        timed: Vec<Arc<TimedProgram>>,
        /// Misses per thousand instructions of each program alone. They are the model's too: the recording's curve
        /// counts first touches, and lines that prefetchers fetch.
        alone: Vec<SoloForecast>,
    },
    /// A paper's scheme.
    Scheme(Box<dyn Scheme>),
}

impl SlowdownModel {
    /// As `--model` accepts it.
    pub fn name(&self) -> &'static str {
        match self {
            SlowdownModel::Interval { .. } => INTERVAL_MODEL,
            SlowdownModel::Scheme(scheme) => scheme.name(),
        }
    }
}

/// A prediction, together with its inputs.
pub struct Prediction {
    pub machine: MachineSpec,
    pub cache: SharedCache,
    pub programs: Vec<ProfiledInput>,
    pub model: SlowdownModel,
    pub costs: PairCosts,
    /// Slowdown of each program beside each other program, with its 90 % interval; `None` for schemes, which have no
    /// intervals.
    intervals: Option<Vec<Vec<Estimate>>>,
}

impl Prediction {
    /// Predicts the pairwise slowdowns of programs on one cache of a machine.
    ///
    /// # Errors
    /// A machine, model or program is unknown, or a profile lacks data that the model needs.
    pub fn new(
        session: &Session,
        programs: &[String],
        machine: &str,
        model: &str,
    ) -> anyhow::Result<Self> {
        check_names(programs)?;
        let machine = load_machine(session, machine)?;
        let unknown_model = |error: UnknownScheme| {
            UsageError(format!(
                "--model: expected {INTERVAL_MODEL} or a scheme: {error}"
            ))
        };
        let scheme = match model {
            INTERVAL_MODEL => None,
            _ => Some(schemes::find_scheme(model).map_err(unknown_model)?),
        };
        let target = ProfileTarget::from_machine(&machine)?;
        let cache =
            SharedCache::from_machine(&machine).context("the machine has no cache to share")?;
        let inputs = load_all(session, programs, target)?;
        let names: Vec<String> = inputs.iter().map(|program| program.name.clone()).collect();
        let Some(scheme) = scheme else {
            let timed_programs = time_programs(session, programs, &inputs, &machine)?;
            let intervals = forecast_pairs(
                &machine,
                &timed_programs.iter().map(Arc::as_ref).collect::<Vec<_>>(),
            )?;
            let costs = costs_of_pairs(&intervals);
            let alone = timed_programs
                .iter()
                .map(|program| forecast_alone(&machine, program))
                .collect::<Result<_, _>>()?;
            let model = SlowdownModel::Interval {
                timed: timed_programs,
                alone,
            };
            return Ok(Prediction {
                machine,
                cache,
                programs: inputs,
                model,
                costs,
                intervals: Some(intervals),
            });
        };
        let profiles: Vec<_> = inputs.iter().map(|program| &program.profile).collect();
        let costs = pair_costs(scheme.as_ref(), &names, &profiles, &cache)?;
        let model = SlowdownModel::Scheme(scheme);
        Ok(Prediction {
            machine,
            cache,
            programs: inputs,
            model,
            costs,
            intervals: None,
        })
    }

    /// Costs with intervals, if the model has them.
    pub fn matrix(&self) -> CostTable {
        cost_table(
            &self.program_names(),
            self.model.name(),
            &self.costs,
            self.intervals.as_deref(),
        )
    }

    /// Where each program's timing comes from; `None` for schemes.
    pub fn timing_bases(&self) -> Option<Vec<TimingBasis>> {
        match &self.model {
            SlowdownModel::Interval { timed, .. } => {
                Some(timed.iter().map(|program| program.basis).collect())
            }
            SlowdownModel::Scheme(_) => None,
        }
    }

    pub fn program_names(&self) -> Vec<String> {
        self.programs
            .iter()
            .map(|program| program.name.clone())
            .collect()
    }

    pub fn cache_summary(&self) -> CacheSummary {
        cache_summary(&self.machine)
    }

    /// Forecasts all programs together on one cache, by the model if it predicts groups, and otherwise by
    /// [`DEFAULT_SCHEME`].
    ///
    /// # Errors
    /// The default scheme does not exist, which is a bug. If data are missing, the result is `None`.
    pub fn forecast_all(&self) -> anyhow::Result<Option<GroupForecast>> {
        self.forecast_group(&(0..self.programs.len()).collect::<Vec<_>>())
    }

    /// Forecasts some of the programs, given by their indices, together on one cache.
    ///
    /// # Errors
    /// The error of [`Self::forecast_all`].
    pub fn forecast_group(&self, members: &[usize]) -> anyhow::Result<Option<GroupForecast>> {
        if members.len() < 2 {
            return Ok(None);
        }
        if let SlowdownModel::Interval {
            timed: timed_programs,
            alone,
        } = &self.model
        {
            let member_programs: Vec<&TimedProgram> = members
                .iter()
                .map(|&index| timed_programs[index].as_ref())
                .collect();
            let forecasts = forecast_together(&self.machine, &member_programs)?;
            return Ok(Some(self.build_group(members, alone, &forecasts)));
        }
        let programs: Vec<&ProfiledInput> =
            members.iter().map(|&index| &self.programs[index]).collect();
        let profiles: Vec<_> = programs.iter().map(|program| &program.profile).collect();
        let scheme_costs = match &self.model {
            SlowdownModel::Scheme(scheme) => scheme.group_costs(&profiles, &self.cache).ok(),
            SlowdownModel::Interval { .. } => None,
        };
        let (method, costs) = match scheme_costs.filter(|costs| costs.group_miss_ratio.is_some()) {
            Some(costs) => (self.model.name(), costs),
            None => {
                let default_scheme = schemes::find_scheme(DEFAULT_SCHEME)?;
                let Ok(costs) = default_scheme.group_costs(&profiles, &self.cache) else {
                    return Ok(None);
                };
                (DEFAULT_SCHEME, costs)
            }
        };
        let group_member = |(index, program): (usize, &ProfiledInput)| {
            let miss_ratio = costs
                .miss_ratios
                .as_ref()
                .and_then(|ratios| ratios.get(index))
                .copied();
            let references = program
                .profile
                .rates
                .llc_refs_per_mega_instr
                .map(|refs| refs.value);
            let cost = costs.costs.get(index).copied();
            GroupMember {
                name: program.name.clone(),
                solo_mpki: program.summary().solo_mpki,
                solo_cycles_per_instr: None,
                miss_ratio,
                mpki: miss_ratio
                    .zip(references)
                    .map(|(ratio, refs)| ratio * refs / 1000.0),
                slowdown_percent: cost
                    .filter(|_| costs.kind == CostKind::Degradation)
                    .map(|cost| cost * 100.0),
                slowdown_interval: None,
            }
        };
        let members = programs.into_iter().enumerate().map(group_member).collect();
        Ok(Some(GroupForecast {
            method: method.to_string(),
            miss_ratio: costs.group_miss_ratio,
            members,
        }))
    }

    /// Places all programs: by forecasts of the whole machine if the interval model predicts, otherwise by pairs. If
    /// `evaluation_costs` are given, pairs decide, and these costs evaluate the placement.
    ///
    /// # Errors
    /// The machine has no CPU.
    pub fn place(
        &self,
        evaluation_costs: Option<&PairCosts>,
        seed: u64,
    ) -> anyhow::Result<Placement> {
        let names = self.program_names();
        Ok(match (&self.model, evaluation_costs) {
            (SlowdownModel::Interval { timed, .. }, None) => {
                let timed: Vec<&TimedProgram> = timed.iter().map(AsRef::as_ref).collect();
                place_programs(&self.machine, &names, &self.costs, &timed, seed)?
            }
            _ => place(
                &names,
                &self.costs,
                evaluation_costs.unwrap_or(&self.costs),
                &self.machine.topology(),
                seed,
            )?,
        })
    }

    /// Forecasts all programs at once on the whole machine, each on its CPU, and returns the members of each group;
    /// `None` unless the interval model predicts.
    ///
    /// # Errors
    /// The error of [`Self::forecast_all`].
    pub fn forecast_placement(
        &self,
        cpus: &[CpuId],
        groups: &[Vec<usize>],
    ) -> anyhow::Result<Option<Vec<GroupForecast>>> {
        let SlowdownModel::Interval { timed, alone } = &self.model else {
            return Ok(None);
        };
        let member_programs: Vec<&TimedProgram> = timed.iter().map(AsRef::as_ref).collect();
        let cpus: Vec<u32> = cpus.iter().map(|cpu| cpu.0).collect();
        let forecasts = forecast_placed(&self.machine, &member_programs, &cpus)?;
        let group_forecast = |members: &Vec<usize>| {
            let forecasts: Vec<MemberForecast> =
                members.iter().map(|&index| forecasts[index]).collect();
            self.build_group(members, alone, &forecasts)
        };
        Ok(Some(groups.iter().map(group_forecast).collect()))
    }

    fn build_group(
        &self,
        members: &[usize],
        alone: &[SoloForecast],
        forecasts: &[MemberForecast],
    ) -> GroupForecast {
        let group_member = |(&index, forecast): (&usize, &MemberForecast)| GroupMember {
            name: self.programs[index].name.clone(),
            solo_mpki: Some(alone[index].mpki),
            solo_cycles_per_instr: Some(alone[index].cycles_per_instr),
            miss_ratio: forecast.miss_ratio().map(MissRatio::value),
            mpki: Some(forecast.mpki),
            slowdown_percent: Some(100.0 * forecast.slowdown.value),
            slowdown_interval: Some(forecast.slowdown.into()),
        };
        let members = members.iter().zip(forecasts).map(group_member).collect();
        GroupForecast {
            method: INTERVAL_MODEL.to_string(),
            miss_ratio: group_miss_ratio(forecasts).map(MissRatio::value),
            members,
        }
    }
}

/// In the order of `names`; equal inputs are timed once.
fn time_programs(
    session: &Session,
    names: &[String],
    inputs: &[ProfiledInput],
    machine: &MachineSpec,
) -> anyhow::Result<Vec<Arc<TimedProgram>>> {
    let first_index_of = |index: usize| {
        names
            .iter()
            .position(|other| *other == names[index])
            .unwrap_or(index)
    };
    let stop = session.interrupt_flag();
    let context = ExperimentContext::for_seed(1, &stop);
    let bar = session.progress_bar("timing programs", Some(names.len() as u64));
    let distinct_indices: Vec<usize> = (0..names.len())
        .filter(|&index| first_index_of(index) == index)
        .collect();
    let programs = context.run_all(&distinct_indices, |&index| {
        let timed_program = TimedProgram::from_profile(&inputs[index].file, machine);
        bar.inc(1);
        Ok(Arc::new(timed_program?))
    })?;
    bar.finish_and_clear();
    let distinct_position = |index: usize| {
        distinct_indices
            .iter()
            .position(|&known| known == first_index_of(index))
            .unwrap_or(0)
    };
    Ok((0..names.len())
        .map(|index| Arc::clone(&programs[distinct_position(index)]))
        .collect())
}
