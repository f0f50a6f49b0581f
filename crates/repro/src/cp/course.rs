//! What programs do over the same stretch of their own work.
//!
//! Problem: programs have phases, and a run that is slowed gets less far in them. Rates over the same *time* therefore
//! compare different work: mcf beside art seems to lose 41 % of its speed where over the same instructions it loses 26 %. The thesis
//! could leave that out of account, its runs being ten thousand times as long. Method: a stretch is what a program does
//! alone between the end of the warm-up and the end of the measured time; every run, however divided, goes on until all
//! of its programs are through theirs, and each is timed over its own. Places in a program are told in its instructions:
//! its stream does not depend on time.

use cachemate_core::{CacheShare, Level, Window};
use cachemate_sim::machine::{Length, SimOptions};
use cachemate_sim::results::{RunResults, StallCycles, TaskResults};
use cachemate_sim::run::{Deciding, LeaveAlone, run};

use super::Pace;
use crate::ReproError;
use crate::setup::{Workload, failed};

/// How often a run is looked at; between two looks a program is taken to go on evenly.
pub(super) const LOOK_CYCLES: u64 = 50_000;
/// A run is given up after so many times the time that its programs take alone.
const SLOWER_AT_MOST: u64 = 8;

/// Since the program began.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Sums {
    cycles: f64,
    instructions: f64,
    misses: f64,
    stall_cycles: f64,
}

/// Where in a program, in its instructions since it began.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Stretch {
    pub from: f64,
    pub to: f64,
}

/// What a program did over a stretch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Over {
    pub cycles_per_instr: f64,
    /// Of the L2.
    pub misses_per_kilo_instr: f64,
    /// Cycles stalled on data beyond the first level.
    pub stalls_per_kilo_instr: f64,
}

/// One run, look by look.
pub(crate) struct Course {
    by_task: Vec<Vec<Sums>>,
    /// In force at the end.
    pub shares: Vec<CacheShare>,
}

/// When a run ends.
#[derive(Clone, Copy)]
pub(crate) enum Until<'a> {
    Cycles(u64),
    /// Every program is through its own.
    Passed(&'a [Stretch]),
}

/// Nothing is decided.
pub(crate) fn left_alone(workload: &Workload) -> Deciding {
    let window = Window::Cycles { cycles: LOOK_CYCLES * workload.options.scale };
    Deciding {
        profilers: Vec::new(),
        yardstick: workload.yardstick(),
        name: "left alone".to_string(),
        policy: Box::new(LeaveAlone { window }),
        first_window: window,
    }
}

fn sums(task: &TaskResults, elapsed_cycles: u64) -> Sums {
    let misses = task.levels.iter().find(|by| by.level == Level::L2).map_or(0, |by| by.misses);
    Sums {
        cycles: elapsed_cycles as f64,
        instructions: task.instructions as f64,
        misses: misses as f64,
        stall_cycles: data_stalls(&task.stall_cycles),
    }
}

fn data_stalls(stalls: &StallCycles) -> f64 {
    let hits: f64 = stalls.hit.iter().filter(|(level, _)| *level >= Level::L2).map(|(_, cycles)| cycles).sum();
    hits + stalls.remote_cache + stalls.local_memory + stalls.remote_memory + stalls.queue
}

impl Course {
    /// Runs the workload from its start; its own lengths do not count.
    pub fn of(workload: &Workload, by: Deciding, until: Until<'_>, pace: Pace) -> Result<Self, ReproError> {
        let whole = pace.warm_up_cycles + pace.measured_cycles();
        let cycles = match until {
            Until::Cycles(cycles) => cycles,
            Until::Passed(_) => SLOWER_AT_MOST * whole,
        };
        let options = SimOptions { warm_up: None, ends: Some(Length::Cycles(cycles)), ..workload.options.clone() };
        let what = by.name.clone();
        let mut course = Course { by_task: vec![vec![Sums::default()]; workload.jobs.len()], shares: Vec::new() };
        let results = run(workload.simulated_with(options)?, by, |machine, record| {
            course.shares = record.decision.plan.shares;
            course.look(&machine.results());
            !course.is_over(until)
        });
        results.map_err(failed(&what))?;
        Ok(course)
    }

    fn look(&mut self, results: &RunResults) {
        for (sums_of, task) in self.by_task.iter_mut().zip(&results.tasks) {
            sums_of.push(sums(task, results.elapsed_cycles));
        }
    }

    fn is_over(&self, until: Until<'_>) -> bool {
        match until {
            Until::Cycles(_) => false,
            Until::Passed(stretches) => {
                let passed = |(sums, stretch): (&Vec<Sums>, &Stretch)| {
                    sums.last().is_some_and(|last| last.instructions >= stretch.to)
                };
                self.by_task.iter().zip(stretches).all(passed)
            }
        }
    }

    /// What a program got done between two points in time; `None` where the run ended before.
    pub fn stretch(&self, task: usize, from_cycles: f64, to_cycles: f64) -> Option<Stretch> {
        let at = |cycles| Some(between(&self.by_task[task], |sums| sums.cycles, cycles)?.instructions);
        Some(Stretch { from: at(from_cycles)?, to: at(to_cycles)? })
    }

    /// Over a stretch, or as much of it as the run got through; `None` where it did not get to its beginning.
    pub fn over(&self, task: usize, stretch: Stretch) -> Option<Over> {
        let done = self.by_task[task].last()?.instructions;
        let at = |instructions| between(&self.by_task[task], |sums| sums.instructions, instructions);
        let (from, to) = (at(stretch.from)?, at(stretch.to.min(done))?);
        let instructions = to.instructions - from.instructions;
        (instructions > 0.0).then(|| Over {
            cycles_per_instr: (to.cycles - from.cycles) / instructions,
            misses_per_kilo_instr: 1000.0 * (to.misses - from.misses) / instructions,
            stalls_per_kilo_instr: 1000.0 * (to.stall_cycles - from.stall_cycles) / instructions,
        })
    }

    /// Instructions per cycle of every program over its stretch; NaN where it did not get there.
    pub fn rates(&self, stretches: &[Stretch]) -> Vec<f64> {
        let rate = |(task, &stretch)| self.over(task, stretch).map_or(f64::NAN, |over| 1.0 / over.cycles_per_instr);
        stretches.iter().enumerate().map(rate).collect()
    }
}

/// On a straight line between two looks; `None` beyond the last.
fn between(looks: &[Sums], by: fn(&Sums) -> f64, value: f64) -> Option<Sums> {
    let next = looks.partition_point(|sums| by(sums) < value);
    let high = looks.get(next)?;
    let Some(low) = next.checked_sub(1).map(|at| looks[at]) else { return Some(*high) };
    let along = (value - by(&low)) / (by(high) - by(&low));
    let mix = |of: fn(&Sums) -> f64| of(&low) + along * (of(high) - of(&low));
    Some(Sums {
        cycles: mix(|sums| sums.cycles),
        instructions: mix(|sums| sums.instructions),
        misses: mix(|sums| sums.misses),
        stall_cycles: mix(|sums| sums.stall_cycles),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{job, on_chip};
    use super::*;

    fn course(looks: &[(f64, f64)]) -> Course {
        let sums = |&(cycles, instructions): &(f64, f64)| Sums {
            cycles,
            instructions,
            misses: instructions / 100.0,
            stall_cycles: cycles / 2.0,
        };
        Course { by_task: vec![looks.iter().map(sums).collect()], shares: Vec::new() }
    }

    /// Is a program timed over its own work, on straight lines, and as far as it got?
    #[test]
    fn a_stretch_is_timed_as_far_as_the_program_got() {
        let course = course(&[(0.0, 0.0), (100.0, 50.0), (200.0, 250.0)]);
        assert_eq!(course.stretch(0, 50.0, 150.0), Some(Stretch { from: 25.0, to: 150.0 }));
        assert_eq!(course.stretch(0, 50.0, 250.0), None);
        let over = course.over(0, Stretch { from: 50.0, to: 250.0 }).unwrap();
        assert_eq!((over.cycles_per_instr, over.misses_per_kilo_instr), (0.5, 10.0));
        assert_eq!(over.stalls_per_kilo_instr, 250.0);
        assert_eq!(course.over(0, Stretch { from: 50.0, to: 900.0 }), Some(over));
        assert_eq!(course.over(0, Stretch { from: 300.0, to: 900.0 }), None);
    }

    /// Does a program that changes its phases take the same time over the same work, whenever the run ends?
    #[test]
    fn the_same_work_takes_the_same_time_in_longer_runs() {
        let pace = Pace { scale: 60_000, warm_up_cycles: 300_000 };
        let workload = on_chip(vec![job("art", 1)], 2, true, pace, 1).unwrap();
        let of = |until: Until<'_>| Course::of(&workload, left_alone(&workload), until, pace).unwrap();
        let short = of(Until::Cycles(1_000_000));
        let stretch = short.stretch(0, 300_000.0, 900_000.0).unwrap();
        let again = of(Until::Passed(&[stretch]));
        assert_eq!(again.over(0, stretch), short.over(0, stretch));
        assert!(
            (600_000.0 / (stretch.to - stretch.from) - short.over(0, stretch).unwrap().cycles_per_instr).abs() < 1e-6
        );
    }
}
