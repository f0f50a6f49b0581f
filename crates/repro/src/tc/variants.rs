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
    COUNTER_TURN_CYCLES, ClusterCase, ClusterSetting, PlacementRound, SMALL_MACHINE, TIME_SCALE, ThreadPlacement,
    WINDOW_CYCLES, paper_programs, placement_rounds,
};
use crate::setup::{build_pipeline, failed, run_under};
use crate::{DataPoint, ExperimentContext, Finding, ReproError};

const LOW_ACTIVATION: &str = "activation_share = 0.02";
const TAGGED_SAMPLER_MACHINE: &str = "power5-2x2x2?counters.sampler=tagged";
const PROCESS_COUNT: usize = 2;
const POLICY_NAME: &str = "thread-clustering";

struct Variant {
    name: &'static str,
    machine: &'static str,
    scale: u64,
}

const VARIANTS: [Variant; 3] = [
    Variant { name: "POWER5 register pair", machine: SMALL_MACHINE, scale: TIME_SCALE },
    Variant { name: "tagged samples (PEBS, IBS)", machine: TAGGED_SAMPLER_MACHINE, scale: TIME_SCALE },
    Variant { name: "half the time scale", machine: SMALL_MACHINE, scale: TIME_SCALE / 2 },
];

/// Agreement of the last round that placed threads; 0 if none did.
fn measure_agreement(
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
    let true_groups = case.true_groups(seed)?;
    let run = setting.run(&ThreadPlacement::Automatic(LOW_ACTIVATION.to_string()))?;
    Ok(placement_rounds(&run.records, true_groups.len(), setting.entries)
        .last()
        .map_or(0.0, |round| round.agreement(&true_groups)))
}

/// Threads `process`, `process + 2`, ... of the case's program, in a separate process.
fn program_of_process(case: &ClusterCase, seed: u64, process: usize) -> Result<SimProgram, ReproError> {
    let built_kernel = kernels::build_program(case.kernel, seed, &case.options).map_err(failed(case.name))?;
    let shared_regions =
        built_kernel.regions.iter().filter(|region| !matches!(region.users, RegionUsers::Thread(_))).enumerate();
    let shared_memory = shared_regions.map(|(number, region)| SharedMemory {
        number: number as u32,
        first_byte: region.base,
        bytes: region.bytes,
    });
    let shared_memory = shared_memory.collect();
    let (kernel, options) = (case.kernel, case.options.clone());
    let make_threads = move |_| {
        let threads = kernels::build_threads(kernel, seed, &options).expect("built with these options before");
        let own_threads = threads.into_iter().skip(process).step_by(PROCESS_COUNT);
        own_threads.collect::<Vec<Box<dyn AccessSource>>>()
    };
    Ok(SimProgram { shared_memory, ..SimProgram::new(format!("{}-{process}", case.kernel), Box::new(make_threads)) })
}

/// All records of one run with two processes, and the group of each thread in the order of arrival.
fn run_two_processes(
    context: &ExperimentContext<'_>,
    case: &ClusterCase,
    seed: u64,
) -> Result<(Vec<WindowRecord>, Vec<Option<u32>>), ReproError> {
    let setting =
        ClusterSetting { measured_windows: 1, ..ClusterSetting::new(context, TAGGED_SAMPLER_MACHINE, case, seed) };
    let groups_in_order = case.true_groups(seed)?;
    let groups_by_arrival = (0..PROCESS_COUNT)
        .flat_map(|process| groups_in_order.iter().skip(process).step_by(PROCESS_COUNT))
        .copied()
        .collect();
    let spec = cachemate_spec::load_machine(TAGGED_SAMPLER_MACHINE).map_err(failed(TAGGED_SAMPLER_MACHINE))?;
    let window_count = setting.warm_up_windows + setting.measured_windows;
    let run_limit = Some(RunLimit::Cycles(window_count * WINDOW_CYCLES / TIME_SCALE));
    let options = SimOptions {
        seed,
        scale: TIME_SCALE,
        ends: run_limit,
        counter_turn_cycles: COUNTER_TURN_CYCLES,
        ..SimOptions::default()
    };
    let programs =
        (0..PROCESS_COUNT).map(|process| program_of_process(case, seed, process)).collect::<Result<Vec<_>, _>>()?;
    let machine = SimMachine::new(&spec, &options, programs).map_err(failed(case.name))?;
    let profilers = vec![ProfilerConfig::Sharing { parameters: ShMapParameters::default(), machine_wide: true }];
    let config = PipelineConfig {
        policy: PolicyConfig {
            name: POLICY_NAME.to_string(),
            parameters: setting.policy_parameters(LOW_ACTIVATION)?,
            seed,
        },
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
    run_under(machine, build_pipeline(config)?, on_window).map_err(failed(POLICY_NAME))?;
    Ok((records, groups_by_arrival))
}

fn measure_agreement_across_processes(
    context: &ExperimentContext<'_>,
    case: &ClusterCase,
    seed: u64,
) -> Result<f64, ReproError> {
    let (records, true_groups) = run_two_processes(context, case, seed)?;
    let placement_rounds: Vec<PlacementRound> =
        placement_rounds(&records, true_groups.len(), ShMapParameters::default().entries);
    Ok(placement_rounds.last().map_or(0.0, |round| round.agreement(&true_groups)))
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>, ReproError> {
    let mut cases = paper_programs();
    // TC-2 itself has the register pair at this scale; quick runs omit both it and the longer scale.
    let is_in_quick_run = |variant: usize| variant == 1 || variant == VARIANTS.len();
    if context.quick {
        cases.truncate(1);
    }
    let variant_count = VARIANTS.len();
    // Readers and writers of a chat room wait for each other on channels, which belong to one process in the simulator.
    let is_requested = |case: usize, variant: usize| {
        (!context.quick || is_in_quick_run(variant)) && (variant < variant_count || cases[case].kernel != "chatrooms")
    };
    // The last "variant" of each case is the two processes.
    let run_inputs: Vec<(usize, usize, u64)> = (0..cases.len())
        .flat_map(|case| {
            (0..=variant_count).flat_map(move |variant| context.seeds.iter().map(move |&s| (case, variant, s)))
        })
        .filter(|&(case, variant, _)| is_requested(case, variant))
        .collect();
    let runs = context.run_all_stored(
        module_path!(),
        &run_inputs,
        |&(case, variant, seed)| format!("{:?} {variant} {seed}", cases[case]),
        |&(case, variant, seed)| {
            context.report_progress(&format!("TC-2 variants, {} seed {seed}", cases[case].name));
            match VARIANTS.get(variant) {
                Some(variant) => measure_agreement(context, variant, &cases[case], seed),
                None => measure_agreement_across_processes(context, &cases[case], seed),
            }
        },
    )?;
    let variant_values = |case: usize, variant: usize| -> Vec<f64> {
        let matching_runs = run_inputs.iter().zip(&runs).filter(|((c, v, _), _)| (*c, *v) == (case, variant));
        matching_runs.map(|(_, &value)| value).collect()
    };
    let variant_points = |variants: std::ops::RangeInclusive<usize>| -> Vec<DataPoint> {
        let variant_name = |variant: usize| VARIANTS.get(variant).map_or("two processes", |variant| variant.name);
        let points_of_case = |case: usize| {
            let point_of_variant = |variant| {
                DataPoint::from_values(variant_name(variant), cases[case].name, &variant_values(case, variant))
            };
            variants.clone().filter(|&variant| is_requested(case, variant)).map(point_of_variant).collect::<Vec<_>>()
        };
        (0..cases.len()).flat_map(points_of_case).collect()
    };
    let min_of_seed = |seed: u64, is_selected: &dyn Fn(usize) -> bool| {
        let matching_runs =
            run_inputs.iter().zip(&runs).filter(|((_, variant, at), _)| *at == seed && is_selected(*variant));
        matching_runs.map(|(_, &value)| value).fold(f64::INFINITY, f64::min)
    };
    let per_seed = |is_selected: &dyn Fn(usize) -> bool| -> Vec<(u64, f64)> {
        context.values_by_seed(|seed| min_of_seed(seed, is_selected))
    };
    Ok(vec![
        Finding::declared("tc-2-variants", &per_seed(&|variant| variant < variant_count))
            .with_points(variant_points(0..=variant_count - 1))
            .with_time_scale(TIME_SCALE as f64),
        Finding::declared("tc-2-two-processes", &per_seed(&|variant| variant == variant_count))
            .with_points(variant_points(variant_count..=variant_count))
            .with_time_scale(TIME_SCALE as f64),
    ])
}
