//! INTERVAL-2 and INTERVAL-4: online policies at nominal time, with windows of their intended length.
//!
//! On the cycle-level machine, windows are divided by up to 5000 but caches are not, so a trial waits for a turnover of
//! the cache longer than a run lasts. Here nothing is divided. There are two figures for each policy: its result once
//! it has settled (the last quarter of an hour's run), and the cost of its search (the difference from the whole run).
//! Programs are profiles measured alone on the cycle-level machine; their phases last [`PHASE_STRETCH`] times longer.

pub(super) mod many;
pub(super) mod sizing;

use std::sync::Arc;

use cachemate_core::MachineSpec;
use cachemate_interval::{IntervalJob, PhasedProgram};

use super::nominal::{HOUR_PROFILE_CYCLES, measure};
use super::whatif::{QueryOutcome, WhatIfQuery, run_query};
use crate::cp::{COLORS, RunScale, chip_workload};
use crate::setup::failed;
use crate::{ExperimentContext, Finding, Result, mean};

const PHASE_STRETCH: f64 = 1000.0;

/// Policies that partition the cache while the programs run: the specialized one, and the one that chooses among all
/// mechanisms.
const ONLINE_POLICIES: [&str; 2] = ["cache-sizing", "auto"];

/// How the titles of findings begin for each of [`ONLINE_POLICIES`].
const TITLE_STARTS: [&str; 2] = ["", "auto: "];

/// The thesis's chip with `cores` cores on its one L2, without its L3, so that the divided cache is
/// the last before memory.
fn chip_with_cores(cores: u32) -> Result<MachineSpec> {
    let without_l3 = RunScale {
        scale: 1,
        warm_up_cycles: 0,
        with_l3: false,
    };
    Ok(chip_workload(Vec::new(), cores, without_l3, 1)?.machine)
}

/// The policy that confines each program, in order of arrival, to the colors of its list.
fn confining_policy(lists: &[String]) -> String {
    let quoted_lists: Vec<String> = lists.iter().map(|list| format!("'{list}'")).collect();
    format!(
        "static-partition:window_ns = 1_000_000_000\nsteps = [{{ shares = [{}] }}]",
        quoted_lists.join(", ")
    )
}

/// Sum of the programs' speeds relative to running alone, once settled and over the whole run.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Speedup {
    settled: f64,
    whole: f64,
}

/// The mean speed relative to running alone, from the slowdowns in stretches of equal length; NaN
/// if the job ran in none.
fn mean_speed(slowdowns: &[Option<f64>]) -> f64 {
    mean(slowdowns.iter().flatten().map(|slowdown| 1.0 / slowdown))
}

/// The last quarter of a job's slowdowns over time, in which a policy has settled.
fn settled_part(slowdowns: &[Option<f64>]) -> &[Option<f64>] {
    &slowdowns[slowdowns.len() * 3 / 4..]
}

fn speedup_of_outcome(outcome: &QueryOutcome) -> Speedup {
    // A job that never ran has no speed, and adds none.
    let speed_or_zero = |slowdowns: &[Option<f64>]| {
        let speed = mean_speed(slowdowns);
        if speed.is_nan() { 0.0 } else { speed }
    };
    let rows = || outcome.slowdowns_over_time.iter();
    Speedup {
        settled: rows().map(|row| speed_or_zero(settled_part(row))).sum(),
        whole: rows().map(|row| speed_or_zero(row)).sum(),
    }
}

/// Weighted speed-ups of programs that share one cache.
struct OnlineMix {
    name: String,
    shared: f64,
    /// Speedup with the best known division of the cache.
    divided: f64,
    /// Speedup under each of [`ONLINE_POLICIES`], with the seconds that its probes and page moves took.
    online: Vec<(Speedup, f64)>,
}

impl OnlineMix {
    /// The better of sharing and the best division.
    fn best_speedup(&self) -> f64 {
        self.divided.max(self.shared)
    }
    fn gain_percent(&self, value: f64) -> f64 {
        100.0 * (value / self.shared - 1.0)
    }
    fn settled_gain_percent(&self, policy_index: usize) -> f64 {
        self.gain_percent(self.online[policy_index].0.settled)
    }
    fn whole_gain_percent(&self, policy_index: usize) -> f64 {
        self.gain_percent(self.online[policy_index].0.whole)
    }
}

/// Runs the query under each of [`ONLINE_POLICIES`].
fn run_online(context: &ExperimentContext<'_>, query: &WhatIfQuery) -> Result<Vec<(Speedup, f64)>> {
    let run_under = |policy: &&str| {
        let outcome = run_query(context, &guarded_query(query), policy)?;
        Ok((speedup_of_outcome(&outcome), outcome.overhead_seconds))
    };
    ONLINE_POLICIES.iter().map(run_under).collect()
}

/// The finding about the gain that a policy loses while it searches.
fn search_price_finding(
    name: &str,
    mixes: &[OnlineMix],
    policy_index: usize,
    seed: u64,
) -> Finding {
    let price = |mix: &OnlineMix| {
        mix.settled_gain_percent(policy_index) - mix.whole_gain_percent(policy_index)
    };
    Finding::declared_for(
        name,
        &[TITLE_STARTS[policy_index]],
        &[(seed, mean(mixes.iter().map(price)))],
    )
}

/// A query without the guard, for references that are to stay in force.
fn build_query(
    context: &ExperimentContext<'_>,
    machine: &MachineSpec,
    jobs: Vec<IntervalJob>,
    seed: u64,
) -> WhatIfQuery {
    let length_ns = context.pick(900_000_000_000, 3_600_000_000_000);
    WhatIfQuery {
        machine: machine.clone(),
        jobs,
        length_ns,
        seed,
        has_guard: false,
    }
}

/// The same query with the guard around the policy, as shipped.
fn guarded_query(query: &WhatIfQuery) -> WhatIfQuery {
    WhatIfQuery {
        has_guard: true,
        ..query.clone()
    }
}

/// Programs by name, each measured alone once.
fn measure_programs(
    context: &ExperimentContext<'_>,
    names: &[&'static str],
    machine: &MachineSpec,
    seed: u64,
) -> Result<Vec<(&'static str, Arc<PhasedProgram>)>> {
    let mut names = names.to_vec();
    names.sort_unstable();
    names.dedup();
    context.report_progress(&format!(
        "{}: {} programs alone, seed {seed}",
        machine.name,
        names.len()
    ));

    context.run_all(&names, |&name| {
        Ok((
            name,
            Arc::new(measure(
                &crate::setup::WorkloadJob::new(name, seed),
                machine,
                HOUR_PROFILE_CYCLES,
                PHASE_STRETCH,
            )?),
        ))
    })
}

/// A job on one CPU, or wherever a policy places it. Policies do not move a pinned job or give it a
/// share.
fn build_job(
    programs: &[(&'static str, Arc<PhasedProgram>)],
    name: &str,
    cpu: Option<u32>,
) -> Result<IntervalJob> {
    let program_entry = programs
        .iter()
        .find(|(program_name, _)| *program_name == name)
        .ok_or_else(|| failed(name)("was not measured"))?;
    Ok(IntervalJob {
        pinned: cpu.map(|cpu| [cpu].into_iter().collect()),
        ..IntervalJob::new(Arc::clone(&program_entry.1))
    })
}
