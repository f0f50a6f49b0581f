//! TC-2 under other conditions: another sampler, another time scale, and one program divided into two processes.
//!
//! The processes map the shared regions at the same place and to the same frames, as with shared memory; all other
//! memory is private to each. Threads of a group are then in both processes, so that neither the process nor the order
//! of arrival reveals which threads share. Only samples with physical lines (PEBS, IBS) can show it, through one filter
//! for the whole machine.

use cachemate_core::AccessSource;
use cachemate_sim::kernels::{self, RegionUsers};
use cachemate_sim::machine::{SharedMemory, SimProgram};

use super::setup::{
    ClusterCase, ClusterSetting, LOW_ACTIVATION, SMALL_MACHINE, TIME_SCALE, ThreadPlacement,
    WINDOW_CYCLES, paper_programs, placement_rounds, run_clustering,
};
use crate::setup::{failed, load_machine};
use crate::{ExperimentContext, Finding, Result, least};

const TAGGED_SAMPLER_MACHINE: &str = "power5-2x2x2?counters.sampler=tagged";
const PROCESS_COUNT: usize = 2;

/// Other conditions: name, machine and time scale.
type Variant = (&'static str, &'static str, u64);

const VARIANTS: [Variant; 3] = [
    ("POWER5 register pair", SMALL_MACHINE, TIME_SCALE),
    (
        "tagged samples (PEBS, IBS)",
        TAGGED_SAMPLER_MACHINE,
        TIME_SCALE,
    ),
    ("half the time scale", SMALL_MACHINE, TIME_SCALE / 2),
];

/// The agreement under a condition by its position; the one after all of [`VARIANTS`] is two
/// processes.
fn measure_variant(
    context: &ExperimentContext<'_>,
    &(case, variant, seed): &(&ClusterCase, usize, u64),
) -> Result<f64> {
    context.report_progress(&format!("TC-2 variants, {} seed {seed}", case.name));

    match VARIANTS.get(variant) {
        Some(variant) => measure_agreement(context, variant, case, seed),
        None => measure_agreement_across_processes(context, case, seed),
    }
}

/// The agreement of the last round that placed threads; 0 if none did.
fn measure_agreement(
    context: &ExperimentContext<'_>,
    &(_, machine, scale): &Variant,
    case: &ClusterCase,
    seed: u64,
) -> Result<f64> {
    let setting = ClusterSetting {
        scale,
        measured_windows: 1,
        ..ClusterSetting::new(context, machine, case, seed)
    };
    let true_groups = case.true_groups(seed)?;
    let run = setting.run(&ThreadPlacement::Automatic(LOW_ACTIVATION.to_string()))?;
    Ok(placement_rounds(&run.records, true_groups.len())
        .last()
        .map_or(0.0, |round| round.agreement(&true_groups)))
}

/// Threads `process`, `process + 2`, ... of the case's program, in a separate process.
fn program_of_process(case: &ClusterCase, seed: u64, process: usize) -> Result<SimProgram> {
    let built_kernel =
        kernels::build_program(case.kernel, seed, &case.options).map_err(failed(case.name))?;
    let shared_regions = built_kernel
        .regions
        .iter()
        .filter(|region| !matches!(region.users, RegionUsers::Thread(_)))
        .enumerate();
    let shared_memory = shared_regions.map(|(number, region)| SharedMemory {
        segment: number as u32,
        first_byte: region.base,
        bytes: region.bytes,
    });
    let shared_memory = shared_memory.collect();

    let (kernel, options) = (case.kernel, case.options.clone());
    let make_threads = move |_| {
        let threads = kernels::build_threads(kernel, seed, &options)
            .expect("built with these options before");
        let own_threads = threads.into_iter().skip(process).step_by(PROCESS_COUNT);
        own_threads.collect::<Vec<Box<dyn AccessSource>>>()
    };
    Ok(SimProgram {
        shared_memory,
        ..SimProgram::new(format!("{}-{process}", case.kernel), Box::new(make_threads))
    })
}

fn measure_agreement_across_processes(
    context: &ExperimentContext<'_>,
    case: &ClusterCase,
    seed: u64,
) -> Result<f64> {
    let setting = ClusterSetting {
        measured_windows: 1,
        ..ClusterSetting::new(context, TAGGED_SAMPLER_MACHINE, case, seed)
    };
    let groups_in_order = case.true_groups(seed)?;
    let groups_by_arrival: Vec<Option<u32>> = (0..PROCESS_COUNT)
        .flat_map(|process| groups_in_order.iter().skip(process).step_by(PROCESS_COUNT))
        .copied()
        .collect();

    let spec = load_machine(TAGGED_SAMPLER_MACHINE)?;
    let programs = (0..PROCESS_COUNT)
        .map(|process| program_of_process(case, seed, process))
        .collect::<Result<Vec<_>, _>>()?;
    let nominal_cycles = (setting.warm_up_windows + setting.measured_windows) * WINDOW_CYCLES;
    let parameters = setting.policy_parameters(LOW_ACTIVATION)?;
    let records = run_clustering(&spec, programs, nominal_cycles, parameters, true, seed)?;
    Ok(placement_rounds(&records, groups_by_arrival.len())
        .last()
        .map_or(0.0, |round| round.agreement(&groups_by_arrival)))
}

pub(super) fn run(context: &ExperimentContext<'_>) -> Result<Vec<Finding>> {
    let mut cases = paper_programs();
    // TC-2 itself has the register pair at this scale; quick runs omit both it and the longer scale.
    let is_in_quick_run = |variant: usize| variant == 1 || variant == VARIANTS.len();
    if context.quick {
        cases.truncate(1);
    }

    let variant_count = VARIANTS.len();
    // Readers and writers of a chat room wait for each other on channels, which belong to one process in the simulator.
    let is_requested = |case: usize, variant: usize| {
        (!context.quick || is_in_quick_run(variant))
            && (variant < variant_count || cases[case].kernel != "chatrooms")
    };

    // The last "variant" of each case is the two processes.
    let run_inputs: Vec<(usize, usize)> = (0..cases.len())
        .flat_map(|case| (0..=variant_count).map(move |variant| (case, variant)))
        .filter(|&(case, variant)| is_requested(case, variant))
        .collect();
    let runs = context.run_cases(
        &run_inputs,
        |(case, variant), seed| (&cases[case], variant, seed),
        measure_variant,
    )?;

    let variants_finding = |name: &str, variants: std::ops::RangeInclusive<usize>| {
        let selected_inputs = || {
            run_inputs
                .iter()
                .copied()
                .filter(|(_, variant)| variants.contains(variant))
        };

        let point = |input: (usize, usize)| {
            let variant_name = VARIANTS
                .get(input.1)
                .map_or("two processes", |(name, ..)| *name);
            runs.point(input, variant_name, cases[input.0].name, |&agreement| {
                agreement
            })
        };
        let per_seed = context.values_by_seed(|seed| {
            least(selected_inputs().filter_map(|input| runs.get(input, seed)))
        });
        Finding::declared(name, &per_seed)
            .with_points(selected_inputs().map(point).collect())
            .with_time_scale(TIME_SCALE as f64)
    };

    Ok(vec![
        variants_finding("tc-2-variants", 0..=variant_count - 1),
        variants_finding("tc-2-two-processes", variant_count..=variant_count),
    ])
}
