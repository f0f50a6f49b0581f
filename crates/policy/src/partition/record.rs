//! How fast processes run under the shares in force: the evidence by which a change of shares is judged.
//!
//! Only clean windows count: a trace slows its program to a quarter (thesis 5.6.2), and while pages move the shares are
//! not yet what was asked for. Rates are sums over windows, so short windows weigh less.

use cachemate_core::{Event, Level, Observation, ProbeWhat, ProcessId, StallCause};
use std::collections::BTreeMap;

use super::space::Speed;

/// Sums over clean windows; an event that one of them lacked is lost for all.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Sums {
    instructions: f64,
    cycles: f64,
    misses: Option<f64>,
    stall_cycles: Option<f64>,
}

/// Since the shares were last changed.
#[derive(Clone, Debug, Default)]
pub struct SpeedRecord {
    sums: BTreeMap<ProcessId, Sums>,
    pub windows: u32,
}

/// Waiting for what lies behind a cache of this level.
fn beyond(level: Level) -> impl Iterator<Item = StallCause> {
    let hits = [Level::L2, Level::L3, Level::L4].into_iter().filter(move |&other| other > level).map(StallCause::Hit);
    hits.chain([StallCause::LocalMemory, StallCause::RemoteMemory, StallCause::BusQueue])
}

impl SpeedRecord {
    /// Adds a window, if it is a clean one in which something ran; was it?
    pub fn add(&mut self, seen: &Observation, level: Level, probes: &[cachemate_core::Probe]) -> bool {
        let traced = probes.iter().any(|probe| matches!(probe.what, ProbeWhat::Trace { .. }));
        if traced || !seen.in_force.pending.is_empty() {
            return false;
        }
        let mut measured = false;
        for task in &seen.tasks {
            let counted = task.counts.get(Event::Instructions).zip(task.counts.get(Event::Cycles));
            let Some((instructions, cycles)) = counted.filter(|(_, cycles)| *cycles > 0.0) else { continue };
            let stalls = beyond(level).filter_map(|cause| task.counts.get(Event::StallCycles(cause)));
            let stalls = stalls.fold(None, |sum: Option<f64>, cycles| Some(sum.unwrap_or(0.0) + cycles));
            let nothing = Sums { instructions: 0.0, cycles: 0.0, misses: Some(0.0), stall_cycles: Some(0.0) };
            let sums = self.sums.entry(task.process).or_insert(nothing);
            measured = true;
            sums.instructions += instructions;
            sums.cycles += cycles;
            sums.misses = sums.misses.zip(task.counts.get(Event::Misses(level))).map(|(sum, more)| sum + more);
            sums.stall_cycles = sums.stall_cycles.zip(stalls).map(|(sum, more)| sum + more);
        }
        self.windows += u32::from(measured);
        measured
    }

    /// Starts anew: the shares were changed.
    pub fn forget(&mut self) {
        *self = SpeedRecord::default();
    }

    /// `None` until it ran in a clean window.
    pub fn speed(&self, process: ProcessId) -> Option<Speed> {
        let sums = self.sums.get(&process).filter(|sums| sums.instructions > 0.0)?;
        let per_miss = sums.stall_cycles.zip(sums.misses.filter(|&misses| misses > 0.0));
        Some(Speed {
            cycles_per_instr: sums.cycles / sums.instructions,
            misses_per_kilo_instr: sums.misses.map(|misses| 1000.0 * misses / sums.instructions),
            stall_cycles_per_miss: per_miss.map(|(stalls, misses)| stalls / misses),
        })
    }

    /// The sum of weighted speeds over that in another record, weights in cycles per instruction; `None` where one of the
    /// processes is in only one of the two.
    pub fn speed_over(&self, other: &SpeedRecord, weights: &[(ProcessId, f64)]) -> Option<f64> {
        let sum = |record: &SpeedRecord| -> Option<f64> {
            weights.iter().map(|(of, weight)| Some(weight / record.speed(*of)?.cycles_per_instr)).sum()
        };
        sum(self).zip(sum(other)).map(|(mine, theirs)| mine / theirs).filter(|ratio| ratio.is_finite())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use cachemate_core::{Applied, Counts, Item, Pending, Probe, ProbeId, Reading, Span, TaskId, TaskSeen, WindowEnd};

    pub fn seen(readings: &[(Event, u64)]) -> Observation {
        let reading = |&(event, count): &(Event, u64)| Reading { event, count, counted_share: 1.0 };
        let task = TaskSeen {
            name: "p".to_string(),
            counts: Counts(readings.iter().map(reading).collect()),
            ..TaskSeen::new(TaskId(0), ProcessId(0))
        };
        Observation {
            window: 0,
            span: Span { start_ns: 0, elapsed_ns: 1, elapsed_cycles: None },
            ended: WindowEnd::Elapsed,
            tasks: vec![task],
            places: Vec::new(),
            answers: Vec::new(),
            in_force: Applied::default(),
        }
    }

    /// One process with these counts.
    pub fn window_of(instructions: u64, cycles: u64, misses: u64) -> Observation {
        seen(&[(Event::Instructions, instructions), (Event::Cycles, cycles), (Event::Misses(Level::L2), misses)])
    }

    /// Are windows with a trace or with moving pages left out?
    #[test]
    fn only_clean_windows_count() {
        let mut record = SpeedRecord::default();
        let stall = Event::StallCycles(StallCause::LocalMemory);
        let mut window =
            seen(&[(Event::Instructions, 1000), (Event::Cycles, 3000), (Event::Misses(Level::L2), 10), (stall, 1500)]);
        let trace =
            Probe { id: ProbeId(1), what: ProbeWhat::Trace { task: TaskId(0), entries: 9, code: false }, budget_ns: 1 };
        record.add(&window, Level::L2, &[trace]);
        assert_eq!(record.speed(ProcessId(0)), None);
        record.add(&window, Level::L2, &[]);
        let speed = record.speed(ProcessId(0)).unwrap();
        assert_eq!((speed.cycles_per_instr, speed.misses_per_kilo_instr), (3.0, Some(10.0)));
        assert_eq!(speed.stall_cycles_per_miss, Some(150.0));
        window.in_force.pending.push(Pending { item: Item::Plan, done: 1, total: Some(2) });
        record.add(&window, Level::L2, &[]);
        assert_eq!(record.windows, 1);
    }

    /// Are two records compared by the sum of speeds, and not at all where one lacks a process?
    #[test]
    fn records_compare_by_sums_of_speeds() {
        let (mut slow, mut fast) = (SpeedRecord::default(), SpeedRecord::default());
        slow.add(&window_of(1000, 3000, 0), Level::L2, &[]);
        fast.add(&window_of(1000, 2000, 0), Level::L2, &[]);
        assert_eq!(fast.speed_over(&slow, &[(ProcessId(0), 2.0)]), Some(1.5));
        assert_eq!(fast.speed_over(&slow, &[(ProcessId(0), 1.0), (ProcessId(1), 1.0)]), None);
    }
}
