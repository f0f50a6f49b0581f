//! On a host that only observes: is a plan that is only shown ever judged or scored, and does it stay shown?

use cachemate_core::{
    AppliedPlan, Capabilities, GuardConfig, Machine, MachineError, Observation, Plan, PolicyConfig,
    ReasonKind, Topology, WindowLength, WindowRecord,
};
use cachemate_interval::{IntervalMachine, Options, closed_form};
use cachemate_pipeline::{Pipeline, StandardPipeline, miss_penalty_of_machine};

const WINDOWS: usize = 200;

/// A machine that runs probes and windows, and leaves everything else as it is.
struct ObservingMachine {
    machine: IntervalMachine,
    has_plan: bool,
}

impl Machine for ObservingMachine {
    fn topology(&self) -> &Topology {
        self.machine.topology()
    }
    fn capabilities(&self) -> &Capabilities {
        self.machine.capabilities()
    }
    fn observe(&mut self) -> Result<Option<Observation>, MachineError> {
        let mut observation = self.machine.observe()?;
        if let Some(observation) = &mut observation {
            observation.applied.is_only_proposed = self.has_plan;
        }
        Ok(observation)
    }
    fn apply(&mut self, plan: &Plan) -> Result<AppliedPlan, MachineError> {
        let probes_only = Plan {
            probes: plan.probes.clone(),
            ..Plan::idle(plan.window)
        };
        self.has_plan = true;
        Ok(AppliedPlan {
            is_only_proposed: true,
            ..self.machine.apply(&probes_only)?
        })
    }
}

/// A program that reuses this share of the cache beside a stream. They profit from partitions if the share is large.
fn machine_with_stream(share: f64) -> IntervalMachine {
    let spec = cachemate_spec::load_machine("lab-vm").expect("a shipped machine");
    let jobs = vec![
        closed_form::reusing_job("reuse", &spec, share, 0.03),
        closed_form::streaming_job(&spec, 0.02),
    ];
    let options = Options {
        seed: 5,
        ..Options::default()
    };
    IntervalMachine::new(&spec, options, jobs).expect("two jobs on two CPUs")
}

fn observing_machine(share: f64) -> ObservingMachine {
    ObservingMachine {
        machine: machine_with_stream(share),
        has_plan: false,
    }
}

fn run_windows<M: Machine>(policy: &str, machine: M) -> Vec<WindowRecord> {
    let spec = cachemate_spec::load_machine("lab-vm").expect("a shipped machine");
    let standard = StandardPipeline {
        policy: PolicyConfig {
            name: policy.to_string(),
            parameters: String::new(),
            seed: 1,
        },
        guard: Some(GuardConfig::default()),
        counted_instructions: 10_000.0,
        predictor: miss_penalty_of_machine(&spec),
        watches_code: false,
        first_window: WindowLength::Time { ns: 1_000_000_000 },
    };
    let config = standard.for_machine(machine.topology(), machine.capabilities());
    let mut control_loop = Pipeline::build(config).expect("a pipeline").start(machine);
    let next_record = || control_loop.step().expect("a valid plan");
    std::iter::from_fn(next_record).take(WINDOWS).collect()
}

fn is_verdict(kind: ReasonKind) -> bool {
    matches!(
        kind,
        ReasonKind::RolledBack | ReasonKind::TrialVerdict | ReasonKind::CoolingDown
    )
}

fn count_verdicts(records: &[WindowRecord]) -> usize {
    records
        .iter()
        .flat_map(|record| &record.decision.reasons)
        .filter(|reason| is_verdict(reason.kind))
        .count()
}

/// Are plans judged where they are in force, and nowhere else?
#[test]
fn a_plan_that_is_only_shown_is_never_judged() {
    let acting = run_windows("auto", machine_with_stream(0.7));
    assert!(count_verdicts(&acting) > 0);
    for policy in ["auto", "cache-sizing", "lfoc"] {
        let observing = run_windows(policy, observing_machine(0.7));
        assert_eq!(count_verdicts(&observing), 0, "{policy}");
    }
}

/// Does a proposal stay shown, and is its forecast compared with no window, while that of the present state is?
#[test]
fn a_proposal_stays_shown_and_its_forecast_is_not_scored() {
    let records = run_windows("auto", observing_machine(0.7));
    let is_shown = |record: &WindowRecord| !record.decision.plan.shares.is_empty();
    let first = records
        .iter()
        .position(is_shown)
        .expect("partitions are proposed");
    assert!(first < WINDOWS / 4, "proposed in window {first}");
    let hidden: Vec<usize> = (first..WINDOWS)
        .filter(|&window| !is_shown(&records[window]))
        .collect();
    assert!(hidden.is_empty(), "{hidden:?}");

    let count_scores = |records: &[WindowRecord]| {
        let scores = records
            .iter()
            .map(|record| record.forecast_errors_instr_per_cycle.len());
        scores.sum::<usize>()
    };
    assert_eq!(count_scores(&records[first + 1..]), 0);
    let unchanged = run_windows("auto", observing_machine(0.001));
    assert!(!unchanged.iter().any(is_shown));
    assert!(count_scores(&unchanged) > 0);
}
