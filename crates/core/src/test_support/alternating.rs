//! A run whose plan changes from window to window, and whose numbers have no exact decimal form: for logs and replays.

use super::{
    ScriptedMachine, capabilities_fixture, last_level_caches, observation_fixture, pipeline_config,
    run_header,
};
use crate::{
    Ability, CacheLevel, ControlLoop, CounterEvent, CpuId, Decision, Estimate, EventCount,
    EventCounts, Forecast, Goal, Observation, PipelineConfig, Plan, Policy, PolicyConfig,
    Predictor, PredictorConfig, ProfilerChain, RunHeader, TaskForecast, View, WindowLength,
    WindowRecord,
};

/// Windows that the host runs.
pub const WINDOWS: u64 = 6;

/// Two tasks on two CPUs of one cache, whose speed varies with the window.
pub fn alternating_host() -> ScriptedMachine {
    let machine = capabilities_fixture(&[Ability::Affinity, Ability::CountPerTask]);
    ScriptedMachine::new(
        last_level_caches(1, 2, CacheLevel::L3, 1 << 20),
        machine,
        (0..WINDOWS).map(observation_at).collect(),
    )
}

fn observation_at(window: u64) -> Observation {
    let mut observation = observation_fixture(window, 2);
    for (task, cpu) in observation.tasks.iter_mut().zip(0..) {
        task.goal = Some(Goal {
            priority: 0.1 + 0.2,
            ..Goal::default()
        });
        task.cpu = Some(CpuId(cpu));
        task.counts = EventCounts(vec![
            EventCount {
                event: CounterEvent::Instructions,
                count: 1_000 + 37 * window,
                enabled_share: 1.0 / 3.0,
            },
            EventCount {
                event: CounterEvent::Cycles,
                count: 3_000,
                enabled_share: 1.0,
            },
        ]);
        task.progress = Some(f64::MIN_POSITIVE);
    }

    observation
}

/// A policy that puts all tasks on one CPU, and on the other one after every `stride` windows.
pub struct AlternatingPolicy {
    /// Windows on one CPU.
    pub stride: u64,
}

impl Policy for AlternatingPolicy {
    fn decide(&mut self, view: &View<'_>) -> Decision {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1_000 });
        let cpu = (view.observation.window / self.stride % 2) as u32;
        plan.affinity = view
            .observation
            .tasks
            .iter()
            .map(|task| (task.task, [cpu].into_iter().collect()))
            .collect();
        Decision::new(plan, Vec::new())
    }
}

/// Forecasts 0.25 for a task that is allowed on CPU 0, otherwise 0.75, so that a forecast shows its plan.
pub struct CpuPredictor;

impl Predictor for CpuPredictor {
    fn forecast(&self, _: &View<'_>, plan: &Plan) -> Forecast {
        let tasks = plan.affinity.iter().map(|(&task, cpus)| {
            let value = if cpus.contains(0) { 0.25 } else { 0.75 };
            (
                task,
                TaskForecast {
                    instr_per_cycle: Some(Estimate::exact(value)),
                    ..Default::default()
                },
            )
        });
        Forecast {
            tasks: tasks.collect(),
            ..Default::default()
        }
    }
}

/// The pipeline between the host and the plan.
pub fn alternating_config() -> PipelineConfig {
    PipelineConfig {
        policy: PolicyConfig {
            name: "turns".into(),
            parameters: "stride = 1".into(),
            seed: 9,
        },
        predictor: PredictorConfig {
            miss_penalty_cycles: 0.1 + 0.2,
            miss_penalty_source: "nowhere".into(),
        },
        first_window: WindowLength::Time { ns: 1_000 },
        ..pipeline_config("turns")
    }
}

/// The whole run under an [`AlternatingPolicy`] with a stride of one window, as a recording contains it.
pub fn recorded_run() -> (RunHeader, Vec<WindowRecord>) {
    let host = alternating_host();
    let header = run_header(
        host.topology.clone(),
        host.capabilities.clone(),
        alternating_config(),
    );
    let mut control_loop = ControlLoop::new(
        host,
        ProfilerChain::default(),
        Box::new(CpuPredictor),
        "turns",
        AlternatingPolicy { stride: 1 },
        alternating_config().first_window,
    );
    let mut records = Vec::new();
    while let Some(record) = control_loop.step().expect("the plan is valid") {
        records.push(record);
    }
    (header, records)
}
