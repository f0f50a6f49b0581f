//! Forecasts by the reference predictor for tasks that have profiles but have not run yet.

use std::collections::BTreeMap;

use cachemate_core::{
    AppliedPlan, Capabilities, Estimate, Forecast, Observation, Plan, Predictor, PredictorConfig,
    Profile, Profiles, TaskId, TimeSpan, Topology, View, WindowEnd, WindowLength,
};
use cachemate_papers::reference_predictor::ReferencePredictor;

/// Forecasts the slowdown of each of two programs that run alone on two CPUs of one cache. `None` if no cache has two
/// CPUs, or if the profiles do not suffice.
pub fn pair_forecast(
    topology: &Topology,
    config: &PredictorConfig,
    profile: &Profile,
    co_runner: &Profile,
) -> [Option<Estimate>; 2] {
    let Some(cpus) = topology
        .last_level_domains()
        .into_iter()
        .find(|cpus| cpus.count() >= 2)
    else {
        return [None, None];
    };

    let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
    let cpu_sets = cpus
        .iter()
        .take(2)
        .map(|cpu| std::iter::once(cpu).collect());
    plan.affinity = [TaskId(0), TaskId(1)].into_iter().zip(cpu_sets).collect();
    let profiles = Profiles::from([(TaskId(0), profile.clone()), (TaskId(1), co_runner.clone())]);
    let forecast = forecast_plan(topology, &profiles, config, &plan);
    [TaskId(0), TaskId(1)].map(|task| forecast.tasks.get(&task)?.degradation)
}

/// Forecasts the effect of a plan on the tasks of these profiles, on a machine that partitions no cache.
pub fn forecast_plan(
    topology: &Topology,
    profiles: &Profiles,
    config: &PredictorConfig,
    plan: &Plan,
) -> Forecast {
    let predictor = ReferencePredictor {
        miss_penalty_cycles: config.miss_penalty_cycles,
    };
    let capabilities = Capabilities {
        abilities: BTreeMap::new(),
        partitions: Vec::new(),
        bandwidth: Vec::new(),
        min_window_ns: 1,
        min_slice_ns: None,
    };

    let observation = Observation {
        window: 0,
        span: TimeSpan {
            start_ns: 0,
            elapsed_ns: 1,
            elapsed_cycles: None,
        },
        end_reason: WindowEnd::Elapsed,
        tasks: Vec::new(),
        shared_counts: Vec::new(),
        probe_results: Vec::new(),
        applied: AppliedPlan::default(),
    };

    let previous_plan = Plan::idle(WindowLength::Time { ns: 1 });
    let view = View {
        topology,
        capabilities: &capabilities,
        observation: &observation,
        profiles,
        previous_plan: &previous_plan,
        predictor: &predictor,
        verdicts: &(),
    };
    predictor.forecast(&view, plan)
}
