//! Composes timed programs on the interval machine, and gives each slowdown its interval.
//!
//! What a program needs alone ([`crate::walked`], [`crate::prior`]) is uncertain, and small errors
//! of it become large ones where a working set nearly fits. So a forecast is not one solution but
//! many: each draw of cycles and overlap is solved, once as it is and once with a little more and
//! less space, and the interval has the spread of these results beside the model's own error.
//!
//! For example, a chase over 3.9 of 4 MB beside a quiet program loses 1 % by the median. With a
//! little more need for space it no longer fits and loses 60 %, so the interval reaches up to
//! there, and a plan that depends on the 1 % can be seen to be a bet.

use cachemate_core::{CacheSpec, CpuId, Estimate, MachineSpec, MissRatio, median};
use cachemate_interval::engine::{
    DEMAND, FILLS, IntervalEngine, REFERENCES, SOLO_CYCLES, TaskTotals,
};
use cachemate_papers::forecast_placement::place_by_forecast;
use cachemate_papers::matrix::PairCosts;
use cachemate_papers::placement::Placement;
use serde::{Deserialize, Serialize};

use crate::set_means;
use crate::timed_program::{TimedProgram, TimingBasis};
use crate::{ForecastResult, failed};

/// Standard deviation of the model's error that does not depend on the slowdown: one point. The mean error over pairs
/// is 2.9 points at a mean slowdown of 9.3.
const FIXED_ERROR_DEVIATION: f64 = 0.01;
/// Standard deviation of the rest of the model's error, as a share of the slowdown.
const ERROR_DEVIATION_SHARE: f64 = 0.38;
/// Half width of a 90 % interval in standard deviations.
const NINETY_PERCENT_HALF_WIDTH: f64 = 1.645;
/// Lowest end of an interval: co-runners speed up no program by more.
const MIN_SLOWDOWN: f64 = -0.02;
/// Minimum cycles of the start, in which caches fill.
const MIN_START_CYCLES: f64 = 40e6;
/// Minimum length of the start in rounds of the longest program.
const MIN_START_ROUNDS: f64 = 1.0;
/// Minimum length of the start in times for which a line stays, where other systems fill the cache.
const MIN_START_LIFETIMES: f64 = 1.5;
/// Minimum cycles over which speeds are measured.
const MIN_MEASURED_CYCLES: f64 = 100e6;
/// Minimum rounds of the longest program over which speeds are measured, because a part of a round is no mean of it.
const MIN_MEASURED_ROUNDS: f64 = 4.0;

/// The rates of a program in one solution.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct RunRates {
    /// Run time divided by that with the whole cache, minus one.
    pub slowdown: f64,
    pub misses_per_instr: f64,
    pub references_per_instr: f64,
    pub instr_per_cycle: f64,
}

/// The forecast for one program of a group.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct MemberForecast {
    /// Run time divided by solo run time, minus one, with its 90 % interval.
    pub slowdown: Estimate,
    /// Demand misses of the shared cache per thousand instructions.
    pub mpki: f64,
    /// References of the shared cache per thousand instructions.
    pub references_per_kilo_instr: f64,
    /// Instructions per cycle in the group.
    pub instr_per_cycle: f64,
}

impl MemberForecast {
    /// Demand misses divided by references; `None` without references.
    pub fn miss_ratio(&self) -> Option<MissRatio> {
        MissRatio::from_counts(self.mpki, self.references_per_kilo_instr)
    }
}

/// The demand misses divided by references, over all programs of a group; `None` without references.
pub fn group_miss_ratio(members: &[MemberForecast]) -> Option<MissRatio> {
    let (mut misses, mut references) = (0.0, 0.0);
    for member in members {
        misses += member.mpki * member.instr_per_cycle;
        references += member.references_per_kilo_instr * member.instr_per_cycle;
    }
    MissRatio::from_counts(misses, references)
}

/// Forecasts programs that share one cache, each on its own core. If the cache has fewer cores than programs, cores
/// are added.
///
/// # Errors
/// The machine has no data cache.
pub fn forecast_together(
    machine: &MachineSpec,
    programs: &[&TimedProgram],
) -> ForecastResult<Vec<MemberForecast>> {
    let machine = machine_with_cores(machine, programs.len() as u32);
    let cpus: Vec<u32> = (0..programs.len() as u32)
        .map(|core| core * machine.contexts_per_core)
        .collect();
    forecast_placed(&machine, programs, &cpus)
}

/// The forecast for a program alone on the machine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SoloForecast {
    /// Demand misses of the shared cache per thousand instructions.
    pub mpki: f64,
    /// Cycles per instruction.
    pub cycles_per_instr: f64,
}

/// Forecasts a program alone on the machine.
///
/// # Errors
/// The machine has no data cache.
pub fn forecast_alone(
    machine: &MachineSpec,
    program: &TimedProgram,
) -> ForecastResult<SoloForecast> {
    let states = host_states(machine);
    let mut runs: Vec<RunRates> = Vec::new();
    let mut cycles_per_instr = Vec::new();
    for draw in 0..program.timed_draws.len() {
        let runs_of_states = solve_alone(&states, program, 0, draw)?;
        cycles_per_instr.push(mean_cycles_per_instr(&states, &runs_of_states));
        runs.push(runs_of_states[AS_DESCRIBED]);
    }
    let misses: Vec<f64> = runs
        .iter()
        .map(|run| 1000.0 * run.misses_per_instr)
        .collect();
    Ok(SoloForecast {
        mpki: median_of_draws(&misses),
        cycles_per_instr: median_of_draws(&cycles_per_instr),
    })
}

/// A program alone, by draw and by state of the host; without neighbors it has the speed of its profile.
type AloneRuns = Vec<Vec<RunRates>>;

/// Solves a program alone as it is drawn at `index` of a group.
fn alone_runs(
    states: &[HostState],
    program: &TimedProgram,
    cpu: u32,
    index: usize,
    draw_count: usize,
) -> ForecastResult<AloneRuns> {
    if !states.iter().any(|state| is_pooled(&state.machine)) {
        return Ok(Vec::new());
    }
    // Of a known timing, all draws are the same.
    if program.timed_draws.len() == 1 {
        return Ok(vec![solve_alone(states, program, cpu, 0)?; draw_count]);
    }
    let solve = |draw| solve_alone(states, program, cpu, draw_of_member(draw, index));
    (0..draw_count).map(solve).collect()
}

/// Forecasts programs on the whole machine, each on the CPU with its index in `cpus`. Programs on different caches slow
/// each other down if these caches share memory bandwidth.
///
/// # Errors
/// The machine has no data cache.
pub fn forecast_placed(
    machine: &MachineSpec,
    programs: &[&TimedProgram],
    cpus: &[u32],
) -> ForecastResult<Vec<MemberForecast>> {
    let states = host_states(machine);
    let draw_count = draw_count_of(programs);
    let alone: Vec<AloneRuns> = programs
        .iter()
        .zip(cpus)
        .enumerate()
        .map(|(index, (program, &cpu))| alone_runs(&states, program, cpu, index, draw_count))
        .collect::<ForecastResult<_>>()?;
    let alone: Vec<&AloneRuns> = alone.iter().collect();
    forecast_beside(&states, programs, cpus, &alone)
}

fn draw_count_of(programs: &[&TimedProgram]) -> usize {
    let counts = programs.iter().map(|program| program.timed_draws.len());
    counts.max().unwrap_or(1)
}

/// Forecasts programs that run as `alone` says on their own.
fn forecast_beside(
    states: &[HostState],
    programs: &[&TimedProgram],
    cpus: &[u32],
    alone: &[&AloneRuns],
) -> ForecastResult<Vec<MemberForecast>> {
    let draw_count = draw_count_of(programs);
    // By draw, state of the host, and program.
    let mut runs: Vec<Vec<Vec<RunRates>>> = Vec::new();
    for draw in 0..draw_count {
        let solve = |state: &HostState| solve_with_cache(&state.machine, programs, cpus, draw, 1.0);
        runs.push(states.iter().map(solve).collect::<ForecastResult<_>>()?);
    }

    let machine = &states[AS_DESCRIBED].machine;
    let space_deviation = machine
        .last_level_cache()
        .map_or(0.0, set_means::space_deviation);
    // Of the runs with other space, only the speeds count: their slowdowns are against a program alone that needs other
    // space as well.
    let run_in_space =
        |factor: f64| solve_with_cache(machine, programs, cpus, draw_count / 2, factor);
    let crowded_runs = run_in_space(1.0 + space_deviation)?;
    let spacious_runs = run_in_space(1.0 / (1.0 + space_deviation))?;

    let members = programs.iter().enumerate().map(|(index, program)| {
        let member = MemberRuns {
            states,
            together: runs
                .iter()
                .map(|states| states.iter().map(|run| run[index]).collect())
                .collect(),
            alone: alone[index],
        };
        let space_changes = [&spacious_runs, &crowded_runs]
            .map(|runs| member.slowdown_change(runs[index].instr_per_cycle));
        member.forecast(space_changes, program.sampling_error_share)
    });
    Ok(members.collect())
}

/// The solutions for one program of a group, each by draw and by state of the host.
struct MemberRuns<'a> {
    states: &'a [HostState],
    together: Vec<Vec<RunRates>>,
    /// Without neighbors there are none, and the program alone has the speed of its profile.
    alone: &'a AloneRuns,
}

impl MemberRuns<'_> {
    /// The forecast. `space_changes` are changes of the slowdown with more and with less space.
    fn forecast(&self, space_changes: [f64; 2], sampling_error_share: f64) -> MemberForecast {
        let mut slowdowns = Vec::new();
        let (mut means, mut cycles_per_instr) = (Vec::new(), Vec::new());
        for (draw, runs) in self.together.iter().enumerate() {
            let is_counted = |state: &usize| self.states[*state].time_share >= LEAST_TIME_SHARE;
            let counted_states = (0..runs.len()).filter(is_counted);
            slowdowns.extend(counted_states.map(|state| self.slowdown(draw, state)));
            means.push(self.mean_slowdown(draw));
            cycles_per_instr.push(mean_cycles_per_instr(self.states, runs));
        }
        slowdowns.sort_by(f64::total_cmp);

        let per_kilo_instr = |rate: fn(&RunRates) -> f64| 1000.0 * self.described_median(rate);
        MemberForecast {
            slowdown: with_model_error(
                median_of_draws(&means),
                &slowdowns,
                space_changes,
                sampling_error_share,
            ),
            mpki: per_kilo_instr(|run| run.misses_per_instr),
            references_per_kilo_instr: per_kilo_instr(|run| run.references_per_instr),
            instr_per_cycle: 1.0 / median_of_draws(&cycles_per_instr),
        }
    }

    fn middle_draw(&self) -> usize {
        self.together.len() / 2
    }

    fn described_median(&self, rate: impl Fn(&RunRates) -> f64) -> f64 {
        let rates = self.together.iter().map(|runs| rate(&runs[AS_DESCRIBED]));
        median_of_draws(&rates.collect::<Vec<_>>())
    }

    /// The slowdown in one state. Alone and together against the speed with the whole cache: the runs hold other shares
    /// of the phases, but no co-runner makes lines stay for longer.
    fn slowdown(&self, draw: usize, state: usize) -> f64 {
        let together = self.together[draw][state].slowdown;
        match self.alone.get(draw) {
            Some(alone) => ((1.0 + together) / (1.0 + alone[state].slowdown) - 1.0).max(0.0),
            None => together,
        }
    }

    /// The slowdown over all states: they change within a run, so that a run takes the mean of the times in them.
    fn mean_slowdown(&self, draw: usize) -> f64 {
        let added_time = |runs: &[RunRates]| mean_over(self.states, runs, |run| run.slowdown);
        let together = added_time(&self.together[draw]);
        match self.alone.get(draw) {
            Some(alone) => ((1.0 + together) / (1.0 + added_time(alone)) - 1.0).max(0.0),
            None => together,
        }
    }

    /// The change of the slowdown at another speed. Alone, the program has the speed of its profile, however much space
    /// it needs.
    fn slowdown_change(&self, instr_per_cycle: f64) -> f64 {
        let draw = self.middle_draw();
        let known_speed = self.together[draw][AS_DESCRIBED].instr_per_cycle;
        (1.0 + self.slowdown(draw, AS_DESCRIBED)) * (known_speed / instr_per_cycle - 1.0)
    }
}

/// Places programs by forecasts of all of them at once on the whole machine. The search starts from the best placement
/// by `costs`, which are those of [`forecast_pairs`].
///
/// # Errors
/// The machine has no data cache or no CPU, or the costs do not fit the names.
pub fn place_programs(
    machine: &MachineSpec,
    names: &[String],
    costs: &PairCosts,
    programs: &[&TimedProgram],
    seed: u64,
) -> ForecastResult<Placement> {
    let mut forecast = |cpus: &[CpuId]| -> ForecastResult<Vec<Estimate>> {
        let cpus: Vec<u32> = cpus.iter().map(|cpu| cpu.0).collect();
        Ok(forecast_placed(machine, programs, &cpus)?
            .iter()
            .map(|member| member.slowdown)
            .collect())
    };
    place_by_forecast(names, costs, &machine.topology(), seed, &mut forecast)
}

/// Forecasts each program beside each other program and, on the diagonal, beside a copy of itself.
///
/// # Errors
/// The machine has no data cache.
pub fn forecast_pairs(
    machine: &MachineSpec,
    programs: &[&TimedProgram],
) -> ForecastResult<Vec<Vec<Estimate>>> {
    let machine = machine_with_cores(machine, 2);
    let cpus = [0, machine.contexts_per_core];
    let states = host_states(&machine);
    let draw_count = draw_count_of(programs);

    // Alone, each is solved once, and not once for each pair.
    let alone: Vec<[AloneRuns; 2]> = programs
        .iter()
        .map(|program| {
            let runs_at =
                |index: usize| alone_runs(&states, program, cpus[index], index, draw_count);
            let first = runs_at(0)?;
            let has_one_draw = program.timed_draws.len() == 1;
            let second = if has_one_draw {
                first.clone()
            } else {
                runs_at(1)?
            };
            Ok([first, second])
        })
        .collect::<ForecastResult<_>>()?;

    let program_count = programs.len();
    let mut rows = vec![vec![Estimate::exact(0.0); program_count]; program_count];
    for i in 0..program_count {
        for j in i..program_count {
            let pair = [programs[i], programs[j]];
            let own = [&alone[i][0], &alone[j][1]];
            let pair_forecasts = forecast_beside(&states, &pair, &cpus, &own)?;
            rows[i][j] = pair_forecasts[0].slowdown;
            if i != j {
                rows[j][i] = pair_forecasts[1].slowdown;
            }
        }
    }

    Ok(rows)
}

/// Converts the values of forecasts to costs.
pub fn costs_of_pairs(pairs: &[Vec<Estimate>]) -> PairCosts {
    let cost = pairs
        .iter()
        .map(|row| row.iter().map(|estimate| estimate.value).collect())
        .collect();
    PairCosts::from_slowdowns(cost)
}

/// The median of a forecast's draws, of which there is at least one.
fn median_of_draws(draws: &[f64]) -> f64 {
    median(draws).unwrap_or(0.0)
}

/// Adds the model's own error to a slowdown from the interval machine.
pub fn slowdown_with_error(slowdown: f64) -> Estimate {
    with_model_error(slowdown, &[slowdown], [0.0; 2], 0.0)
}

/// The value with its 90 % interval. Its ends are the 5th and 95th percentile of `sorted`, or the smallest and largest
/// of fewer than 20 slowdowns. Added in squares are the model's own error, the sampling error of the program's cycles,
/// and the changes of the slowdown if the program needs one standard deviation more or less space.
fn with_model_error(
    value: f64,
    sorted: &[f64],
    space_changes: [f64; 2],
    sampling_error_share: f64,
) -> Estimate {
    let error_share = libm::hypot(ERROR_DEVIATION_SHARE, sampling_error_share);
    let error = NINETY_PERCENT_HALF_WIDTH
        * libm::hypot(FIXED_ERROR_DEVIATION, error_share * value.max(0.0));
    let tail_count = sorted.len() / 20;
    let (lower_draw, upper_draw) = (sorted[tail_count], sorted[sorted.len() - 1 - tail_count]);
    let (space_fall, space_rise) = space_changes
        .iter()
        .fold((0.0f64, 0.0f64), |(fall, rise), &change| {
            (fall.max(-change), rise.max(change))
        });

    // Independent errors add in squares.
    let total_half_width = |draws: f64, space: f64| {
        libm::hypot(
            libm::hypot(draws.max(0.0), NINETY_PERCENT_HALF_WIDTH * space),
            error,
        )
    };
    let low_end = value - total_half_width(value - lower_draw, space_fall);
    Estimate {
        value,
        low: low_end.max(MIN_SLOWDOWN).min(value),
        high: value + total_half_width(upper_draw - value, space_rise),
    }
}

/// The machine with at least `cores` cores on its first contended cache.
fn machine_with_cores(machine: &MachineSpec, cores: u32) -> MachineSpec {
    let mut machine = machine.clone();
    let cores_per_cache = machine
        .last_level_cache()
        .map_or(1, |cache| cache.shared_by_cores);
    if cores > cores_per_cache {
        let caches_per_package = (machine.cores_per_package / cores_per_cache.max(1)).max(1);
        machine.cores_per_package = caches_per_package * cores;
        share_last_level(&mut machine, cores);
    }
    machine
}

/// Makes each last-level cache, of unchanged size, that of so many cores.
fn share_last_level(machine: &mut MachineSpec, cores: u32) {
    for cache in last_level_caches_mut(machine) {
        cache.shared_by_cores = cores;
    }
}

fn last_level_caches_mut(machine: &mut MachineSpec) -> impl Iterator<Item = &mut CacheSpec> {
    let level = machine.last_level_cache().map(|cache| cache.level);
    let caches = machine.caches.iter_mut();
    caches.filter(move |cache| Some(cache.level) == level)
}

fn is_pooled(machine: &MachineSpec) -> bool {
    let cache = machine.last_level_cache();
    cache.is_some_and(|cache| cache.pool_bytes.is_some())
}

/// A state of the host in which programs run for a share of the time.
struct HostState {
    machine: MachineSpec,
    time_share: f64,
}

/// The index of the state in which the machine is as described.
const AS_DESCRIBED: usize = 0;
/// States with a smaller share of the time do not count in a 90 % interval.
const LEAST_TIME_SHARE: f64 = 0.05;

/// The machine as described; with quiet neighbors, and with busy ones, which leave a smaller pool, if the description states a
/// spread; and with each CPU on a cache of its own, if a hypervisor moves them so.
fn host_states(machine: &MachineSpec) -> Vec<HostState> {
    let Some(contended) = machine.last_level_cache() else {
        let machine = machine.clone();
        return vec![HostState {
            machine,
            time_share: 1.0,
        }];
    };
    let spreads = [contended.neighbor_spread, contended.pool_spread];
    let with_factors = |traffic_factor: f64, pool_factor: f64| {
        let mut state = machine.clone();
        for cache in last_level_caches_mut(&mut state) {
            let rate = cache.neighbor_bytes_per_cycle;
            cache.neighbor_bytes_per_cycle = rate.map(|rate| traffic_factor * rate);
            let pool = cache.pool_bytes;
            cache.pool_bytes = pool.map(|bytes| (pool_factor * bytes as f64) as u64);
        }
        state
    };
    let mut shared = vec![machine.clone()];
    if spreads.iter().any(Option::is_some) {
        let [traffic_spread, pool_spread] = spreads.map(|spread| spread.unwrap_or(1.0));
        shared.push(with_factors(1.0 / traffic_spread, pool_spread));
        shared.push(with_factors(traffic_spread, 1.0 / pool_spread));
    }

    let apart_share = contended.apart_share.unwrap_or(0.0);
    let time_share = (1.0 - apart_share) / shared.len() as f64;
    let mut states: Vec<HostState> = shared
        .into_iter()
        .map(|machine| HostState {
            machine,
            time_share,
        })
        .collect();
    if apart_share > 0.0 {
        let mut machine = machine.clone();
        share_last_level(&mut machine, 1);
        states.push(HostState {
            machine,
            time_share: apart_share,
        });
    }
    states
}

/// The mean of a figure of runs over the time.
fn mean_over(states: &[HostState], runs: &[RunRates], figure: impl Fn(&RunRates) -> f64) -> f64 {
    let parts = states
        .iter()
        .zip(runs)
        .map(|(state, run)| state.time_share * figure(run));
    parts.sum()
}

/// The rates of a program alone, by state of the host.
///
/// Where other systems fill the cache, a program alone does not find the whole of it either, so that its slowdown is
/// against a run of its own.
fn solve_alone(
    states: &[HostState],
    program: &TimedProgram,
    cpu: u32,
    draw: usize,
) -> ForecastResult<Vec<RunRates>> {
    let solve =
        |state: &HostState| Ok(solve_with_cache(&state.machine, &[program], &[cpu], draw, 1.0)?[0]);
    states.iter().map(solve).collect()
}

fn mean_cycles_per_instr(states: &[HostState], runs: &[RunRates]) -> f64 {
    mean_over(states, runs, |run| 1.0 / run.instr_per_cycle)
}

/// Program `index` takes every `index + 1`-th draw in turn, so that the combinations vary. In the last draw all
/// programs take the same one.
fn draw_of_member(draw_index: usize, index: usize) -> usize {
    draw_index + index * (draw_index + 1)
}

/// Runs programs together on the interval machine, each of which needs `space_factor` times the space for the same
/// misses.
fn solve_with_cache(
    machine: &MachineSpec,
    programs: &[&TimedProgram],
    cpus: &[u32],
    draw_index: usize,
    space_factor: f64,
) -> ForecastResult<Vec<RunRates>> {
    let no_cache_error = || failed(&machine.name)("no data cache to share");
    let mut engine = IntervalEngine::new(machine, false).ok_or_else(no_cache_error)?;
    let mut slots = Vec::new();
    for (index, program) in programs.iter().enumerate() {
        let mut drawn_program = program.sharing_program(draw_of_member(draw_index, index), machine);
        for phase in &mut drawn_program.phases {
            phase
                .points
                .iter_mut()
                .for_each(|point| point.size_bytes *= space_factor);
            phase.footprint_bytes = phase.footprint_bytes.map(|bytes| bytes * space_factor);
        }
        let program_number = engine.add_program(drawn_program);
        slots.push(engine.start_task(program_number, [cpus[index]].into_iter().collect()));
    }

    let rounds = programs
        .iter()
        .filter_map(|program| Some(program.solo_round()?.1));
    let longest_round_cycles = rounds.fold(0.0, f64::max);
    let start_cycles = MIN_START_CYCLES
        .max(MIN_START_ROUNDS * longest_round_cycles)
        .max(MIN_START_LIFETIMES * line_lifetime_cycles(machine));

    // While a loop hits, it comes round before neighbors evict its lines; while it misses, it may not, and so goes on
    // missing. Programs write their data before they walk over it, so they begin with what fits.
    let mut warm_up_cycles = 0.0;
    if let Some(neighbor_traffic) = neighbor_bytes_per_cycle(machine) {
        warm_up_cycles = start_cycles;
        engine.set_neighbor_traffic(0.0);
        engine.run(warm_up_cycles);
        engine.set_neighbor_traffic(neighbor_traffic);
    }

    // The prior's prefetches only stand for misses that cost less.
    let miss_counter = |program: &&TimedProgram| {
        if program.basis == TimingBasis::Prior {
            FILLS
        } else {
            DEMAND
        }
    };
    let miss_counters: Vec<usize> = programs.iter().map(miss_counter).collect();
    Ok(window_rates(
        &mut engine,
        &slots,
        &miss_counters,
        warm_up_cycles + start_cycles,
        MIN_MEASURED_CYCLES.max(MIN_MEASURED_ROUNDS * longest_round_cycles),
    ))
}

/// Bytes per cycle with which other systems fill the last-level cache; `None` if there are none.
fn neighbor_bytes_per_cycle(machine: &MachineSpec) -> Option<f64> {
    machine.last_level_cache()?.neighbor_bytes_per_cycle
}

/// Cycles for which a line stays in a cache that other systems fill; 0 if there are none.
fn line_lifetime_cycles(machine: &MachineSpec) -> f64 {
    let pool_bytes = machine
        .last_level_cache()
        .and_then(|cache| cache.pool_bytes);
    pool_bytes
        .zip(neighbor_bytes_per_cycle(machine))
        .map_or(0.0, |(pool_bytes, traffic)| pool_bytes as f64 / traffic)
}

/// Runs an engine until `start_cycles`, and then for `read_cycles`; the rates are each task's in the latter. Misses are
/// those of the task's counter.
pub(crate) fn window_rates(
    engine: &mut IntervalEngine,
    slots: &[u32],
    miss_counters: &[usize],
    start_cycles: f64,
    read_cycles: f64,
) -> Vec<RunRates> {
    engine.run(start_cycles);
    let earlier_totals: Vec<TaskTotals> = slots
        .iter()
        .map(|&slot| *engine.task_totals(slot))
        .collect();

    engine.run(start_cycles + read_cycles);
    let rates = |((&slot, &miss_counter), earlier): ((&u32, &usize), &TaskTotals)| {
        let current_totals = engine.task_totals(slot);
        let count_since = |counter: usize| current_totals.counts[counter] - earlier.counts[counter];
        let instructions = (current_totals.instructions - earlier.instructions).max(1.0);
        let cycles = (current_totals.cycles - earlier.cycles).max(1.0);
        let slowdown = cycles / count_since(SOLO_CYCLES).max(1.0) - 1.0;
        RunRates {
            slowdown,
            misses_per_instr: count_since(miss_counter) / instructions,
            references_per_instr: count_since(REFERENCES) / instructions,
            instr_per_cycle: instructions / cycles,
        }
    };
    slots
        .iter()
        .zip(miss_counters)
        .zip(&earlier_totals)
        .map(rates)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use cachemate_core::SplitMix64;
    use cachemate_interval::closed_form::{self, cache_lines, reusing_job, streaming_job};
    use cachemate_interval::{IntervalJob, PhasedProgram};
    use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
    use cachemate_trace::{
        CmtReader, ProfileFile, ProfileSource, StoredCurve, StoredCurvePoint, TraceReader,
    };

    fn steady_program(job: IntervalJob) -> TimedProgram {
        TimedProgram::from_phases((*job.program).clone())
    }

    /// Do programs that fit together not slow each other down, does a stream slow a program that reuses data, and does
    /// every interval contain its forecast?
    #[test]
    fn forecasts_follow_the_interval_machine() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let small = steady_program(reusing_job("small", &machine, 0.2, 0.02));
        let large = steady_program(reusing_job("large", &machine, 0.8, 0.02));
        let stream = steady_program(streaming_job(&machine, 0.02));
        let forecast_pair =
            |a: &TimedProgram, b: &TimedProgram| forecast_together(&machine, &[a, b]).unwrap();
        assert!(forecast_pair(&small, &small)[0].slowdown.value < 0.01);
        let slowed = forecast_pair(&large, &stream)[0].slowdown;
        assert!(
            slowed.value > 0.2 && slowed.low < slowed.value && slowed.high > slowed.value,
            "{slowed:?}"
        );
        let three = forecast_together(&machine, &[&large, &stream, &stream]).unwrap();
        assert!(
            three[0].slowdown.value > slowed.value,
            "a cache with fewer cores counts as if it had as many"
        );
    }

    /// Do neighbors that fill a pool fast leave a co-runner nothing to take, slow ones what the cache itself has, and
    /// does a program that neighbors have slowed down already lose nothing to a co-runner without traffic?
    #[test]
    fn neighbors_decide_how_long_lines_stay() {
        let mut machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let large = steady_program(reusing_job("large", &machine, 0.8, 0.02));
        let stream = steady_program(streaming_job(&machine, 0.02));
        machine.memory.bytes_per_cycle = 1e3;
        let shared_lines_loss = forecast_together(&machine, &[&large, &stream]).unwrap()[0]
            .slowdown
            .value;
        let size_bytes = machine.last_level_cache().unwrap().size_bytes;

        let mut loss_with = |pool_factor: u64, bytes_per_cycle: f64| {
            for cache in last_level_caches_mut(&mut machine) {
                cache.pool_bytes = Some(pool_factor * size_bytes);
                cache.neighbor_bytes_per_cycle = Some(bytes_per_cycle);
            }

            let alone = forecast_alone(&machine, &large).unwrap().cycles_per_instr;
            (
                forecast_together(&machine, &[&large, &stream]).unwrap()[0]
                    .slowdown
                    .value,
                alone,
            )
        };

        // Where lines are evicted by their age, no set overflows before another.
        let (idle_neighbors, fast_alone) = loss_with(1, 1e-6);
        assert!(
            (idle_neighbors / shared_lines_loss - 1.0).abs() < 0.05,
            "{idle_neighbors} {shared_lines_loss}"
        );
        assert!(shared_lines_loss > 0.2);
        let (busy_neighbors, slow_alone) = loss_with(1000, 1000.0);
        assert!(busy_neighbors < 0.1 * shared_lines_loss, "{busy_neighbors}");
        assert!(slow_alone > 1.1 * fast_alone, "{slow_alone} {fast_alone}");
    }

    /// Does a loop that comes round before neighbors evict its lines as long as it hits, and after that once it misses, keep
    /// the lines with which it began?
    #[test]
    fn a_loop_keeps_what_it_has_where_neighbors_leave_it_time() {
        const REFERENCES_PER_INSTR: f64 = 0.02;
        let mut machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        machine.memory.bytes_per_cycle = 1e3;
        let lines = 0.3 * cache_lines(&machine);
        let fills = |resident: f64| f64::from(u8::from(resident < lines)) * REFERENCES_PER_INSTR;
        let phase = closed_form::build_phase(64.0, cache_lines(&machine), 256, fills);
        let program = steady_program(IntervalJob::new(PhasedProgram::endless_program(
            "loop", phase,
        )));

        let pool_bytes = machine.last_level_cache().unwrap().size_bytes;
        let mut cycles_with = |lifetime_cycles: f64| {
            for cache in last_level_caches_mut(&mut machine) {
                cache.pool_bytes = Some(pool_bytes);
                cache.neighbor_bytes_per_cycle = Some(pool_bytes as f64 / lifetime_cycles);
            }
            forecast_alone(&machine, &program).unwrap().cycles_per_instr
        };
        let (hitting, missing) = (cycles_with(1e12), cycles_with(1e3));
        assert!(missing > 2.0 * hitting, "{missing} {hitting}");
        let middle_round = lines / REFERENCES_PER_INSTR * (hitting * missing).sqrt();
        let found = cycles_with(middle_round);
        assert!((found / hitting - 1.0).abs() < 0.1, "{found} {hitting}");
    }

    /// Do two working sets that are read in a cycle miss as often as in an exact simulation of the sets, with pages on
    /// random frames? The first two fit together, except where a set overflows. Of the others, one fits alone.
    #[test]
    fn working_sets_miss_where_sets_overflow() {
        const REFERENCES_PER_INSTR: f64 = 0.002;
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let cyclic_program = |pages: u64| {
            let fills = |lines: f64| {
                if lines < 64.0 * pages as f64 {
                    REFERENCES_PER_INSTR
                } else {
                    0.0
                }
            };
            let phase = closed_form::build_phase(64.0, cache_lines(&machine), 256, fills);
            steady_program(IntervalJob::new(PhasedProgram::endless_program(
                "cyclic", phase,
            )))
        };

        for pages in [[600, 300], [900, 100]] {
            let programs = pages.map(cyclic_program);
            let members = forecast_together(&machine, &[&programs[0], &programs[1]]).unwrap();
            let mut frames = SplitMix64::new(17);
            let mut lines_of = |program: u64| -> Vec<u64> {
                let page_lines = |page: u64| {
                    let first_line = ((program << 20 | page) * 64 + frames.draw_below(64)) * 64;
                    first_line..first_line + 64
                };
                (0..pages[program as usize]).flat_map(page_lines).collect()
            };
            let lines = [lines_of(0), lines_of(1)];
            let geometry = CacheGeometry {
                sets: 4096,
                ways: 16,
                slices: 1,
            };
            let mut cache = CacheSim::new(geometry, Replacement::Lru).unwrap();
            let (warm_accesses, accesses) = (2 * lines[0].len(), 6 * lines[0].len());
            let mut misses = [0.0; 2];
            for access in 0..accesses {
                for (count, lines) in misses.iter_mut().zip(&lines) {
                    let missed = cache.push(&[lines[access % lines.len()]]);
                    *count += if access < warm_accesses {
                        0.0
                    } else {
                        missed as f64
                    };
                }
            }
            for (member, misses) in members.iter().zip(misses) {
                let expected = misses / (accesses - warm_accesses) as f64;
                let ratio = member.mpki / 1000.0 / REFERENCES_PER_INSTR;
                assert!(
                    (ratio - expected).abs() < 0.1,
                    "{pages:?}: {ratio} for {expected}"
                );
            }
        }
    }

    /// Does a program wait for the memory traffic of a program on another cache of the same bus? Each uses about a
    /// twentieth of the bus, so that the wait is small, but far above the error of the solution.
    #[test]
    fn a_stream_on_another_cache_takes_bandwidth() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let stream = steady_program(streaming_job(&machine, 0.02));
        let slowdown_of_first = |programs: &[&TimedProgram], cpus: &[u32]| {
            forecast_placed(&machine, programs, cpus).unwrap()[0]
                .slowdown
                .value
        };
        let (alone, apart) = (
            slowdown_of_first(&[&stream], &[0]),
            slowdown_of_first(&[&stream; 2], &[0, 2]),
        );
        assert!(alone.abs() < 1e-4 && apart > 0.002, "{alone} {apart}");
    }

    /// Without timing, does the interval of a stream beside xz include a loss of bandwidth of more than 10 %, although
    /// most programs of the prior lose nothing? The stream is prefetched, and loses 13.2 % on the cycle-level machine.
    #[test]
    fn a_prior_carries_its_width_through_bandwidth() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let recorded_program =
            |name: &str, references_per_kilo_instr: u64, curve: &[(u64, f64)]| {
                let mut file = ProfileFile::new(name, ProfileSource::default());
                (file.records, file.instructions) = (Some(references_per_kilo_instr), Some(1000));
                let point = |&(kib, mpki): &(u64, f64)| StoredCurvePoint {
                    size_bytes: kib << 10,
                    miss_ratio: Estimate::exact(mpki / references_per_kilo_instr as f64),
                    misses_per_kilo_instr: Some(Estimate::exact(mpki)),
                };
                file.curves.push(StoredCurve {
                    policy: "lru".to_string(),
                    method: "exact".to_string(),
                    line_bytes: 64,
                    thread: None,
                    points: curve.iter().map(point).collect(),
                });
                TimedProgram::from_profile(&file, &machine).unwrap()
            };
        let stream = recorded_program("stream", 21, &[(256, 20.8), (4096, 20.8)]);

        let xz = recorded_program(
            "xz",
            6,
            &[(256, 3.67), (512, 1.86), (1024, 0.94), (4096, 0.93)],
        );
        let slowdown = forecast_together(&machine, &[&stream, &xz]).unwrap()[0].slowdown;
        assert!(slowdown.value < 0.02 && slowdown.high > 0.1, "{slowdown:?}");
    }

    /// Where neighbors' traffic varies, is a loss between those in its extremes, does the interval hold these, and does
    /// each member of a pair get the same in a matrix of pairs as in a group?
    #[test]
    fn a_forecast_is_a_mean_over_what_neighbors_do() {
        let mut machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        machine.memory.bytes_per_cycle = 1e3;
        let large = steady_program(reusing_job("large", &machine, 0.8, 0.02));
        let stream = steady_program(streaming_job(&machine, 0.02));
        let mut with_neighbors = |bytes_per_cycle: f64, spread: Option<f64>| {
            for cache in last_level_caches_mut(&mut machine) {
                cache.pool_bytes = Some(cache.size_bytes);
                cache.neighbor_bytes_per_cycle = Some(bytes_per_cycle);
                cache.neighbor_spread = spread;
            }
            machine.clone()
        };

        let loss_on = |machine: &MachineSpec| {
            forecast_together(machine, &[&large, &stream]).unwrap()[0].slowdown
        };
        let (few, middle, many) = (0.05, 0.2, 0.8);
        let extremes = [few, middle, many].map(|rate| loss_on(&with_neighbors(rate, None)).value);
        let varying = with_neighbors(middle, Some(4.0));
        let mean = loss_on(&varying);
        let (least, most) = extremes
            .iter()
            .fold((f64::INFINITY, 0.0f64), |(least, most), &loss| {
                (least.min(loss), most.max(loss))
            });
        assert!(most > least + 0.05, "{extremes:?}");
        assert!(
            least < mean.value && mean.value < most,
            "{mean:?} {extremes:?}"
        );
        assert!(
            mean.low <= least + 1e-9 && mean.high >= most,
            "{mean:?} {extremes:?}"
        );
        let pairs = forecast_pairs(&varying, &[&large, &stream]).unwrap();
        assert_eq!(pairs[0][1], mean);
        let alone =
            |machine: &MachineSpec| forecast_alone(machine, &large).unwrap().cycles_per_instr;
        let fast = alone(&with_neighbors(few, None));
        let slow = alone(&with_neighbors(many, None));
        let mixed = alone(&varying);
        assert!(fast < mixed && mixed < slow, "{fast} {mixed} {slow}");

        // A pool that shrinks while they are busy is in the range as well.
        let with_pool = |machine: &MachineSpec, factor: f64, spread: Option<f64>| {
            let mut machine = machine.clone();
            for cache in &mut machine.caches {
                let pool = cache.pool_bytes.map(|bytes| bytes as f64 * factor);
                (cache.pool_bytes, cache.pool_spread) = (pool.map(|bytes| bytes as u64), spread);
            }
            machine
        };
        let shrinking = loss_on(&with_pool(&varying, 1.0, Some(2.0)));
        for (rate, factor) in [(few, 2.0), (middle, 1.0), (many, 0.5)] {
            let loss = loss_on(&with_pool(&with_neighbors(rate, None), factor, None)).value;
            let is_held = shrinking.low <= loss + 1e-9 && loss <= shrinking.high;
            assert!(is_held, "{shrinking:?} {loss} {factor}");
        }
        assert!(shrinking != mean, "{mean:?}");
    }

    /// If a hypervisor runs CPUs on caches of their own for half of the time, is half of the loss forecast, does the interval
    /// hold the losses of both, and is nothing lost where they never share one?
    #[test]
    fn programs_that_share_a_cache_half_of_the_time_lose_half() {
        let mut machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        machine.memory.bytes_per_cycle = 1e3;
        let large = steady_program(reusing_job("large", &machine, 0.8, 0.02));
        let stream = steady_program(streaming_job(&machine, 0.02));
        let mut loss_with = |apart_share: Option<f64>| {
            last_level_caches_mut(&mut machine).for_each(|cache| cache.apart_share = apart_share);
            forecast_pairs(&machine, &[&large, &stream]).unwrap()[0][1]
        };
        let shared = loss_with(None);
        let [half, never] = [0.5, 1.0].map(|share| loss_with(Some(share)));
        assert!(
            shared.value > 0.1 && never.value < 0.001,
            "{shared:?} {never:?}"
        );
        assert!(
            (half.value - 0.5 * shared.value).abs() < 0.01,
            "{half:?} {shared:?}"
        );
        assert!(half.low <= 0.0 && half.high >= shared.value, "{half:?}");
    }

    /// Do the hits of a program without misses count in its group's miss ratio?
    #[test]
    fn the_hits_of_a_program_without_misses_count_in_its_group() {
        let member = |mpki: f64, references_per_kilo_instr: f64| MemberForecast {
            slowdown: Estimate::exact(0.0),
            mpki,
            references_per_kilo_instr,
            instr_per_cycle: 1.0,
        };
        let ratio = group_miss_ratio(&[member(10.0, 20.0), member(0.0, 100.0)]).unwrap();
        assert!((ratio.value() - 10.0 / 120.0).abs() < 1e-12, "{ratio:?}");
        assert_eq!(group_miss_ratio(&[member(0.0, 0.0)]), None);
    }

    /// Does the interval of a forecast span the draws of an uncertain timing?
    #[test]
    fn uncertain_timing_widens_the_interval() {
        let certain = slowdown_with_error(0.2);
        let draws: Vec<f64> = (0..15)
            .map(|index| 0.05 + 0.04 * f64::from(index))
            .collect();
        let uncertain = with_model_error(draws[7], &draws, [0.0; 2], 0.0);
        assert!(uncertain.low < 0.1 && uncertain.high > 0.6, "{uncertain:?}");
        assert!((certain.high - certain.low) < (uncertain.high - uncertain.low));
        let at_a_cliff = with_model_error(0.2, &[0.2], [0.0, 2.8], 0.0);
        assert!(
            at_a_cliff.high > 3.0 && at_a_cliff.low == certain.low,
            "{at_a_cliff:?}"
        );
    }

    fn bundled_recording(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recordings/{name}.cmt"))
    }

    /// Do the timed phases cover every instruction of a recording once?
    #[test]
    fn a_recording_is_timed_over_its_whole_length() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let path = bundled_recording("xz");
        let timed = TimedProgram::from_recording("xz", &path, &machine).unwrap();
        let reader = CmtReader::open(&path).unwrap();
        let recorded_instr = reader.totals().unwrap().instructions.unwrap() as f64;
        let (instructions, cycles) = timed.solo_round().unwrap();
        assert!(
            (instructions / recorded_instr - 1.0).abs() < 0.01,
            "{instructions} {recorded_instr}"
        );
        assert!(
            cycles > 0.3 * instructions,
            "{cycles}: the core issues two instructions per cycle"
        );
    }

    /// After a moment that crowds the memory controller, do programs that hardly use memory run on at their speed?
    #[test]
    fn light_programs_run_on_at_their_speed_after_a_crowded_moment() {
        let machine = cachemate_spec::load_machine("opteron-2350").unwrap();
        let timed_program = |name: &str| {
            TimedProgram::from_recording(name, &bundled_recording(name), &machine).unwrap()
        };
        let members =
            forecast_together(&machine, &[&timed_program("sort"), &timed_program("cc1")]).unwrap();
        let slowdowns: Vec<f64> = members.iter().map(|member| member.slowdown.value).collect();
        assert!(
            slowdowns.iter().all(|slowdown| *slowdown < 0.5),
            "{slowdowns:?}"
        );
    }
}
