//! Programs, a machine and a scheme, put together for `predict`, `plan` and `report`.

use anyhow::Context;
use cachemate_core::MachineSpec;
use cachemate_policy::matrix::{CostKind, PairCosts};
use cachemate_policy::placement::{Outcome, Placement};
use cachemate_policy::schemes::{self, MissingEvidence, Scheme, SharedCache};
use cachemate_policy::solvers::Method;
use cachemate_report::{
    Alternatives, CacheAssigned, CacheSummary, Group, GroupMember, Matrix, Placed, PlanResult, level_text,
};
use clap::Args;

use crate::profiling::Target;
use crate::programs::{Program, load_all};
use crate::session::Session;

/// The scheme whose numbers are run time, for any number of programs on a cache, from one recording each.
pub const USUAL_SCHEME: &str = "statcc";

/// For which machine.
#[derive(Args, Clone)]
pub struct MachineArg {
    /// A machine that comes with cachemate (cachemate topology --list), or a TOML file
    #[arg(long, short, value_name = "MACHINE")]
    pub machine: String,
}

/// Everything that predictions rest on.
pub struct Prediction {
    pub machine: MachineSpec,
    pub cache: SharedCache,
    pub programs: Vec<Program>,
    pub scheme: Box<dyn Scheme>,
    pub costs: PairCosts,
}

impl Prediction {
    /// # Errors
    /// An unknown machine, scheme or program; a profile without the evidence that the scheme needs.
    pub fn new(session: &Session, programs: &[String], machine: &str, scheme: &str) -> anyhow::Result<Self> {
        let machine = cachemate_spec::load_machine(machine)?;
        let scheme = schemes::by_name(scheme)?;
        let target = Target::of(&machine)?;
        let cache = SharedCache::of_machine(&machine).context("the machine has no cache to share")?;
        let programs = load_all(session, programs, target)?;
        let profiles: Vec<_> = programs.iter().map(|program| &program.profile).collect();
        let costs = scheme.pair_costs(&profiles, &cache).map_err(|missing| without(&missing, &programs))?;
        Ok(Prediction { machine, cache, programs, scheme, costs })
    }

    pub fn names(&self) -> Vec<String> {
        self.programs.iter().map(|program| program.name.clone()).collect()
    }

    pub fn cache_summary(&self) -> CacheSummary {
        cache_summary(&self.machine)
    }

    /// All programs together on one cache, by the scheme where it speaks of groups, else by [`USUAL_SCHEME`].
    ///
    /// # Errors
    /// The usual scheme cannot be had (a bug), never missing evidence: that makes `None`.
    pub fn group(&self) -> anyhow::Result<Option<Group>> {
        self.group_of(&(0..self.programs.len()).collect::<Vec<_>>())
    }

    /// Some of the programs together on one cache, by their places in the list.
    ///
    /// # Errors
    /// As [`Self::group`].
    pub fn group_of(&self, members: &[usize]) -> anyhow::Result<Option<Group>> {
        if members.len() < 2 {
            return Ok(None);
        }
        let programs: Vec<&Program> = members.iter().map(|&at| &self.programs[at]).collect();
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
        let member = |(at, program): (usize, &Program)| {
            let miss_ratio = costs.miss_ratios.as_ref().and_then(|ratios| ratios.get(at)).copied();
            let refs = program.profile.rates.llc_refs_per_mega_instr.map(|refs| refs.value);
            let suffers = costs.suffers.get(at).copied();
            GroupMember {
                name: program.name.clone(),
                solo_mpki: program.summary().solo_mpki,
                miss_ratio,
                mpki: miss_ratio.zip(refs).map(|(ratio, refs)| ratio * refs / 1000.0),
                suffers_percent: suffers.filter(|_| costs.kind == CostKind::Degradation).map(|cost| cost * 100.0),
            }
        };
        let members = programs.into_iter().enumerate().map(member).collect();
        Ok(Some(Group { method: method.to_string(), miss_ratio: costs.group_miss_ratio, members }))
    }
}

/// What a machine's contended cache is.
pub fn cache_summary(machine: &MachineSpec) -> CacheSummary {
    let Some(cache) = machine.last_level() else { return CacheSummary::default() };
    CacheSummary {
        level: level_text(cache.level).to_string(),
        size_bytes: cache.size_bytes,
        ways: cache.ways,
        line_bytes: cache.line_bytes,
        instances: machine.instances(cache),
        cpus_each: cache.shared_by_cores * machine.contexts_per_core,
    }
}

fn without(missing: &MissingEvidence, programs: &[Program]) -> anyhow::Error {
    let name = programs.get(missing.program).map_or("?", |program| program.name.as_str());
    let hint = "recordings with instruction counts (cachemate record) have it";
    anyhow::anyhow!(
        "scheme '{}' needs {}, which the profile of '{name}' does not have; {hint}",
        missing.scheme,
        missing.what
    )
}

/// The unit's name in results.
pub fn unit_of(kind: CostKind) -> &'static str {
    match kind {
        CostKind::Degradation => "percent",
        CostKind::Weight => "weight",
    }
}

/// Costs for people and scripts: per cent, or weights as they are.
pub fn matrix_of(names: &[String], scheme: &str, costs: &PairCosts) -> Matrix {
    let scale = if costs.kind == CostKind::Degradation { 100.0 } else { 1.0 };
    let values = costs.cost.iter().map(|row| row.iter().map(|cost| Some(cost * scale)).collect()).collect();
    Matrix { scheme: scheme.to_string(), unit: unit_of(costs.kind).to_string(), names: names.to_vec(), values }
}

fn mean(outcome: &Outcome) -> Option<f64> {
    outcome.mean_degradation_percent.or(outcome.mean_weight)
}

/// A placement as pictures and pages show it.
pub fn plan_picture(placement: &Placement, machine: &str, scheme: &str, kind: CostKind) -> PlanResult {
    let mut seen = Vec::new();
    let mut caches = Vec::new();
    for cache in &placement.caches {
        let level = cache.level.map_or("no shared cache", level_text).to_string();
        let nth = seen.iter().filter(|other| **other == level).count();
        let cpus: cachemate_core::CpuSet = cache.cpus.iter().map(|(cpu, _)| cpu.0).collect();
        let on_it = placement.programs.iter().filter(|program| cpus.contains(program.cpu.0));
        let placed = on_it.map(|program| Placed {
            name: program.name.clone(),
            cpu: Some(program.cpu.0),
            suffers: program.degradation_percent.or(program.weight),
            why: program.why.clone(),
        });
        caches.push(CacheAssigned {
            cache: format!("{level} #{nth}"),
            cpus: cpus.to_string(),
            programs: placed.collect(),
        });
        seen.push(level);
    }
    let gap = mean(&placement.gap);
    PlanResult {
        machine: machine.to_string(),
        scheme: scheme.to_string(),
        unit: unit_of(kind).to_string(),
        solver: match placement.method {
            Method::Matching => "minimum-weight matching".to_string(),
            Method::DynamicProgramming => "dynamic programming".to_string(),
            Method::LocalSearch => "local search".to_string(),
        },
        optimal: placement.method != Method::LocalSearch || gap.is_some_and(|gap| gap <= 0.0),
        gap,
        caches,
        expected: Alternatives {
            plan: mean(&placement.plan),
            best: mean(&placement.best),
            worst: mean(&placement.worst),
            random: mean(&placement.random),
        },
    }
}
