//! Programs and results of scenarios with `simulator = "interval"`, for `cachemate sim`.

use cachemate_core::MachineSpec;
use cachemate_interval::IntervalResults;
use cachemate_report::Table;
use cachemate_report::text::{format_number, format_percent, value_or_dash};
use cachemate_scenario::interval::ScenarioPrograms;
use cachemate_spec::{IntervalSpec, Scenario};

use crate::complete::interval_programs::{ProgramRequest, load};
use crate::session::Session;

/// Loads or measures the scenario's programs; each distinct program only once.
pub fn load_programs(
    session: &Session,
    scenario: &Scenario,
    spec: &MachineSpec,
) -> anyhow::Result<ScenarioPrograms> {
    let default_spec = IntervalSpec::default();
    let interval_spec = scenario.interval.as_ref().unwrap_or(&default_spec);
    let entry_requests = scenario.programs.iter().map(|entry| ProgramRequest {
        program: entry.program.clone(),
        parameters: entry.parameters.clone(),
    });
    let mix_parts = interval_spec.mixes.iter().flat_map(|mix| &mix.programs);
    let plain_request = |program: &String| ProgramRequest {
        program: program.clone(),
        parameters: toml::Table::new(),
    };
    let requests: Vec<ProgramRequest> = entry_requests
        .chain(mix_parts.map(|part| plain_request(&part.program)))
        .collect();
    let mut loaded_programs = load(
        session,
        &requests,
        spec,
        scenario.seed,
        interval_spec.phase_scale,
    )?
    .into_iter();
    let mut programs = ScenarioPrograms::default();
    for (entry, program) in scenario.programs.iter().zip(loaded_programs.by_ref()) {
        programs.entry_programs.push(match entry.cpu_share {
            None => program,
            Some(cpu_share) => {
                let mut limited_program = cachemate_interval::PhasedProgram::clone(&program);
                limited_program.demand.cpu_share = cpu_share;
                limited_program.into()
            }
        });
    }
    programs.mix_programs = interval_spec
        .mixes
        .iter()
        .map(|mix| loaded_programs.by_ref().take(mix.programs.len()).collect())
        .collect();
    Ok(programs)
}

/// The text of a run; `head` names scenario, machine, policy and seed.
pub fn render(head: &str, windows: u64, results: &IntervalResults) -> String {
    let mut table = Table::from_header(
        "> job | program | > tasks | > ended | > CPU, s | > IPC | > refs/1000 | > misses/1000 | > slowdown | \
         > on CPU",
    );
    for (index, job) in results.jobs.iter().enumerate() {
        table.add_row([
            index.to_string(),
            job.name.clone(),
            job.tasks.to_string(),
            job.completions.to_string(),
            format_number(job.cpu_seconds),
            value_or_dash(job.instr_per_cycle.map(format_number)),
            value_or_dash(job.references_per_kilo_instr.map(format_number)),
            value_or_dash(job.mpki.map(format_number)),
            value_or_dash(job.slowdown.map(format_number)),
            value_or_dash(job.slowdown_on_cpu.map(format_number)),
        ]);
    }
    let mut text = format!(
        "{head}: {} nominal seconds, {windows} windows (interval machine)\n\n{}",
        format_number(results.seconds),
        table.text()
    );
    for (node, (bytes, busy)) in results
        .memory_bytes_per_second
        .iter()
        .zip(&results.memory_busy_share)
        .enumerate()
    {
        text += &format!(
            "\nmemory node {node}: {} GB/s, busy {}\n",
            format_number(bytes / 1e9),
            format_percent(*busy, 1)
        );
    }
    text += "\nslowdown: time of the whole run over the time alone on a CPU and cache of its own; on CPU: the same for time on a processor only\n";
    text
}
