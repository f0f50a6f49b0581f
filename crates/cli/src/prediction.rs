//! Programs, a machine and a model, combined for `predict`, `plan` and `report`.

use anyhow::Context;
use cachemate_core::MachineSpec;
use cachemate_policy::matrix::{CostKind, PairCosts};
use cachemate_policy::schemes::{self, Scheme, SharedCache};
use cachemate_report::{CacheSummary, GroupForecast, GroupMember};
use cachemate_study::{ProfileTarget, USUAL_SCHEME, cache_summary, pair_costs};
use clap::Args;

use crate::programs::{ProfiledInput, load_all};
use crate::session::Session;

/// The option that selects the machine.
#[derive(Args, Clone)]
pub struct MachineArg {
    /// Bundled machine (cachemate topology --list) or TOML file
    #[arg(long, short, value_name = "MACHINE")]
    pub machine: String,
}

/// A prediction with its inputs.
pub struct Prediction {
    pub machine: MachineSpec,
    pub cache: SharedCache,
    pub programs: Vec<ProfiledInput>,
    pub scheme: Box<dyn Scheme>,
    pub costs: PairCosts,
}

impl Prediction {
    /// # Errors
    /// An unknown machine, model or program; a profile without the evidence that the model needs.
    pub fn new(session: &Session, programs: &[String], machine: &str, scheme: &str) -> anyhow::Result<Self> {
        let machine = cachemate_spec::load_machine(machine)?;
        let scheme = schemes::by_name(scheme)?;
        let target = ProfileTarget::of(&machine)?;
        let cache = SharedCache::of_machine(&machine).context("the machine has no cache to share")?;
        let programs = load_all(session, programs, target)?;
        let profiles: Vec<_> = programs.iter().map(|program| &program.profile).collect();
        let names: Vec<String> = programs.iter().map(|program| program.name.clone()).collect();
        let costs = pair_costs(scheme.as_ref(), &names, &profiles, &cache)?;
        Ok(Prediction { machine, cache, programs, scheme, costs })
    }

    pub fn names(&self) -> Vec<String> {
        self.programs.iter().map(|program| program.name.clone()).collect()
    }

    pub fn cache_summary(&self) -> CacheSummary {
        cache_summary(&self.machine)
    }

    /// All programs together on one cache, by the model if it predicts groups, else by [`USUAL_SCHEME`].
    ///
    /// # Errors
    /// The usual model does not exist (a bug); missing evidence gives `None`.
    pub fn group(&self) -> anyhow::Result<Option<GroupForecast>> {
        self.group_of(&(0..self.programs.len()).collect::<Vec<_>>())
    }

    /// Some of the programs together on one cache, by their indices in the list.
    ///
    /// # Errors
    /// As [`Self::group`].
    pub fn group_of(&self, members: &[usize]) -> anyhow::Result<Option<GroupForecast>> {
        if members.len() < 2 {
            return Ok(None);
        }
        let programs: Vec<&ProfiledInput> = members.iter().map(|&at| &self.programs[at]).collect();
        let profiles: Vec<_> = programs.iter().map(|program| &program.profile).collect();
        let own = self.scheme.group_costs(&profiles, &self.cache).ok().filter(|costs| costs.group_miss_ratio.is_some());
        let (method, costs) = match own {
            Some(costs) => (self.scheme.name(), costs),
            None => {
                let usual = schemes::by_name(USUAL_SCHEME)?;
                let Ok(costs) = usual.group_costs(&profiles, &self.cache) else { return Ok(None) };
                (USUAL_SCHEME, costs)
            }
        };
        let member = |(at, program): (usize, &ProfiledInput)| {
            let miss_ratio = costs.miss_ratios.as_ref().and_then(|ratios| ratios.get(at)).copied();
            let refs = program.profile.rates.llc_refs_per_mega_instr.map(|refs| refs.value);
            let cost = costs.costs.get(at).copied();
            GroupMember {
                name: program.name.clone(),
                solo_mpki: program.summary().solo_mpki,
                miss_ratio,
                mpki: miss_ratio.zip(refs).map(|(ratio, refs)| ratio * refs / 1000.0),
                slowdown_percent: cost.filter(|_| costs.kind == CostKind::Degradation).map(|cost| cost * 100.0),
            }
        };
        let members = programs.into_iter().enumerate().map(member).collect();
        Ok(Some(GroupForecast { method: method.to_string(), miss_ratio: costs.group_miss_ratio, members }))
    }
}
