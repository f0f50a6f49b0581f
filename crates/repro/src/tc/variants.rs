//! TC-2 under other conditions: another sampler, another time scale, and one program divided into two processes.
//!
//! The processes map the shared regions at the same place and to the same frames, as with shared memory; all other
//! memory is private to each. Threads of a group are then in both processes, so that neither the process nor the order
//! of arrival reveals which threads share. Only samples with physical lines (PEBS, IBS) can show it, through one filter
//! for the whole machine.

use cachemate_core::{
    AccessSource, PipelineConfig, PolicyConfig, ProfilerConfig, ShMapParameters, WindowLength, WindowRecord,
};
use cachemate_pipeline::miss_penalty_of_machine;
use cachemate_sim::kernels::{self, RegionUsers};
use cachemate_sim::machine::{RunLimit, SharedMemory, SimMachine, SimOptions, SimProgram};

use super::setup::{
    ClusterCase, ClusterSetting, PlacementRound, SCALE, SMALL, TURN_CYCLES, ThreadPlacement, WINDOW_CYCLES,
    paper_programs, placement_rounds,
};
use crate::setup::{build_pipeline, failed, run_under};
use crate::{DataPoint, ExperimentContext, Finding, ReproError};

const LOW: &str = "activation_share = 0.02";
const TAGGED: &str = "power5-2x2x2?counters.sampler=tagged";
const PROCESSES: usize = 2;
const POLICY: &str = "thread-clustering";

struct Variant {
    name: &'static str,
    machine: &'static str,
    scale: u64,
}

const VARIANTS: [Variant; 3] = [
    Variant { name: "POWER5 register pair", machine: SMALL, scale: SCALE },
    Variant { name: "tagged samples (PEBS, IBS)", machine: TAGGED, scale: SCALE },
    Variant { name: "half the time scale", machine: SMALL, scale: SCALE / 2 },
];

/// Agreement of the last round that placed threads; 0 if none did.
fn agreement_finding(
    context: &ExperimentContext<'_>,
    variant: &Variant,
    case: &ClusterCase,
    seed: u64,
) -> Result<f64, ReproError> {
    let setting = ClusterSetting {
        scale: variant.scale,
        measured_windows: 1,
        ..ClusterSetting::new(context, variant.machine, case, seed)
    };
    let truth = case.true_groups(seed)?;
    let run = setting.run(&ThreadPlacement::Automatic(LOW.to_string()))?;
    Ok(placement_rounds(&run.records, truth.len(), setting.entries).last().map_or(0.0, |round| round.agreement(&truth)))
}

/// Threads `process`, `process + 2`, ... of the case's program, in a separate process.
fn process_part(case: &ClusterCase, seed: u64, process: usize) -> Result<SimProgram, ReproError> {
    let built = kernels::build(case.kernel, seed, &case.options).map_err(failed(case.name))?;
    let shared = built.regions.iter().filter(|region| !matches!(region.users, RegionUsers::Thread(_))).enumerate();
    let shared = shared.map(|(number, region)| SharedMemory {
        number: number as u32,
        first_byte: region.base,
        bytes: region.bytes,
    });
    let shared = shared.collect();
    let (kernel, options) = (case.kernel, case.options.clone());
    let make_threads = move |_| {
        let threads = kernels::build_threads(kernel, seed, &options).expect("built with these options before");
        let own_threads = threads.into_iter().skip(process).step_by(PROCESSES);
        own_threads.collect::<Vec<Box<dyn AccessSource>>>()
    };
    Ok(SimProgram { shared, ..SimProgram::new(format!("{}-{process}", case.kernel), Box::new(make_threads)) })
}

/// All records of one run with two processes, and the group of each thread in the order of arrival.
fn agreement_across(
    context: &ExperimentContext<'_>,
    case: &ClusterCase,
    seed: u64,
) -> Result<(Vec<WindowRecord>, Vec<Option<u32>>), ReproError> {
    let setting = ClusterSetting { measured_windows: 1, ..ClusterSetting::new(context, TAGGED, case, seed) };
    let groups = case.true_groups(seed)?;
    let truth = (0..PROCESSES).flat_map(|process| groups.iter().skip(process).step_by(PROCESSES)).copied().collect();
    let spec = cachemate_spec::load_machine(TAGGED).map_err(failed(TAGGED))?;
    let windows = setting.warm_up_windows + setting.measured_windows;
    let ends = Some(RunLimit::Cycles(windows * WINDOW_CYCLES / SCALE));
    let options = SimOptions { seed, scale: SCALE, ends, counter_turn_cycles: TURN_CYCLES, ..SimOptions::default() };
    let programs = (0..PROCESSES).map(|process| process_part(case, seed, process)).collect::<Result<Vec<_>, _>>()?;
    let machine = SimMachine::new(&spec, &options, programs).map_err(failed(case.name))?;
    let profilers = vec![ProfilerConfig::Sharing { parameters: ShMapParameters::default(), machine_wide: true }];
    let config = PipelineConfig {
        policy: PolicyConfig { name: POLICY.to_string(), parameters: setting.policy_parameters(LOW)?, seed },
        guard: None,
        profilers,
        predictor: miss_penalty_of_machine(&spec),
        first_window: WindowLength::Cycles { cycles: WINDOW_CYCLES },
    };
    let mut records = Vec::new();
    let on_window = |_: &mut SimMachine, record| {
        records.push(record);
        true
    };
    run_under(machine, build_pipeline(config)?, on_window).map_err(failed(POLICY))?;
    Ok((records, truth))
}

fn agreement_across_processes(
    context: &ExperimentContext<'_>,
    case: &ClusterCase,
    seed: u64,
) -> Result<f64, ReproError> {
    let (records, truth) = agreement_across(context, case, seed)?;
    let placement_rounds: Vec<PlacementRound> =
        placement_rounds(&records, truth.len(), ShMapParameters::default().entries);
    Ok(placement_rounds.last().map_or(0.0, |round| round.agreement(&truth)))
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let mut cases = paper_programs();
    // TC-2 itself has the register pair at this scale; quick runs omit both it and the longer scale.
    let runs_in_quick = |variant: usize| variant == 1 || variant == VARIANTS.len();
    if context.quick {
        cases.truncate(1);
    }
    let variants = VARIANTS.len();
    // Readers and writers of a chat room wait for each other on channels, which belong to one process in the simulator.
    let is_requested = |case: usize, variant: usize| {
        (!context.quick || runs_in_quick(variant)) && (variant < variants || cases[case].kernel != "chatrooms")
    };
    // The last "variant" of each case is the two processes.
    let items: Vec<(usize, usize, u64)> = (0..cases.len())
        .flat_map(|case| (0..=variants).flat_map(move |variant| context.seeds.iter().map(move |&s| (case, variant, s))))
        .filter(|&(case, variant, _)| is_requested(case, variant))
        .collect();
    let runs = context.run_all_stored(
        module_path!(),
        &items,
        |&(case, variant, seed)| format!("{:?} {variant} {seed}", cases[case]),
        |&(case, variant, seed)| {
            context.report_progress(&format!("TC-2 variants, {} seed {seed}", cases[case].name));
            match VARIANTS.get(variant) {
                Some(variant) => agreement_finding(context, variant, &cases[case], seed),
                None => agreement_across_processes(context, &cases[case], seed),
            }
        },
    )?;
    let variant_values = |case: usize, variant: usize| -> Vec<f64> {
        let own_values = items.iter().zip(&runs).filter(|((c, v, _), _)| (*c, *v) == (case, variant));
        own_values.map(|(_, &value)| value).collect()
    };
    let variant_points = |variants: std::ops::RangeInclusive<usize>| -> Vec<DataPoint> {
        let variant_name = |variant: usize| VARIANTS.get(variant).map_or("two processes", |variant| variant.name);
        let points_of = |case: usize| {
            let of_variant = |variant| {
                DataPoint::over_values(variant_name(variant), cases[case].name, &variant_values(case, variant))
            };
            variants.clone().filter(|&variant| is_requested(case, variant)).map(of_variant).collect::<Vec<_>>()
        };
        (0..cases.len()).flat_map(points_of).collect()
    };
    let worst_of_seed = |seed: u64, is_selected: &dyn Fn(usize) -> bool| {
        let own_values = items.iter().zip(&runs).filter(|((_, variant, at), _)| *at == seed && is_selected(*variant));
        own_values.map(|(_, &value)| value).fold(f64::INFINITY, f64::min)
    };
    let per_seed = |is_selected: &dyn Fn(usize) -> bool| -> Vec<(u64, f64)> {
        context.per_seed(|seed| worst_of_seed(seed, is_selected))
    };
    Ok(vec![
        Finding::declared("tc-2-variants", &per_seed(&|variant| variant < variants))
            .with_points(variant_points(0..=variants - 1))
            .time_scale(SCALE as f64),
        Finding::declared("tc-2-two-processes", &per_seed(&|variant| variant == variants))
            .with_points(variant_points(variants..=variants))
            .time_scale(SCALE as f64),
    ])
}
