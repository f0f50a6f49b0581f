//! `cachemate sim` for scenarios with `simulator = "interval"`: runs programs in nominal time, from their profiles.

use anyhow::Context;
use cachemate_core::{MachineSpec, WindowLength};
use cachemate_interval::{IntervalMachine, IntervalResults};
use cachemate_report::Table;
use cachemate_report::text::{format_number, format_percent, value_or_dash};
use cachemate_scenario::interval::{self, ScenarioPrograms};
use cachemate_scenario::pipeline_config;
use cachemate_spec::{IntervalSpec, Scenario};

use super::sim::{Sim, SimJson, SimulatedMachine};
use crate::interval_programs::{ProgramRequest, load};
use crate::session::Session;

impl SimulatedMachine for IntervalMachine {
    type Results = IntervalResults;
    fn set_first_window(&mut self, window: WindowLength) {
        IntervalMachine::set_first_window(self, window);
    }
    fn position(&self) -> u64 {
        self.now_ns()
    }
    fn results(self) -> IntervalResults {
        IntervalMachine::results(&self)
    }
}

impl Sim {
    pub(super) fn run_interval(
        &self,
        session: &Session,
        scenario: &Scenario,
        spec: &MachineSpec,
    ) -> anyhow::Result<()> {
        let programs =
            load_programs(session, scenario, spec).with_context(|| self.scenario.clone())?;
        let machine = interval::build_machine(scenario, spec, &programs)
            .with_context(|| self.scenario.clone())?;
        let config = pipeline_config(scenario, spec, &machine);
        let nominal_ns = |length| interval::length_ns(length, spec).unwrap_or(0);
        let warm_up_ns = scenario.warm_up.map_or(0, nominal_ns);
        let total_ns = Some(warm_up_ns + nominal_ns(scenario.length));
        let mut is_measuring = warm_up_ns == 0;
        let result = self.run_to_end(session, scenario, config, machine, total_ns, |machine| {
            if !is_measuring && machine.now_ns() >= warm_up_ns {
                is_measuring = true;
                machine.begin_measuring();
            }
        })?;
        self.print_result(session, &result, |answer| render(answer, &spec.name))
    }
}

/// Loads or measures the scenario's programs; each distinct program only once.
fn load_programs(
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

fn render(result: &SimJson<IntervalResults>, machine: &str) -> String {
    let results = &result.results;
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
        "{}: {machine} under '{}', seed {}: {} nominal seconds, {} windows (interval machine)\n\n{}",
        result.scenario,
        result.policy,
        result.seed,
        format_number(results.seconds),
        result.windows,
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
    text += "\nslowdown: time over the time alone on a CPU and cache of its own; on CPU: the same for time on a processor only\n";
    text
}
