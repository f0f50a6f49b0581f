//! Walks a reorder window over a sampled stream, and returns the cycles, the overlap and the
//! prefetches of its misses.
//!
//! A miss costs its latency, less, or nothing, depending on the misses that the core overlaps with
//! it and on the lines that prefetchers bring in time, and to simulate the machine for each cache
//! size takes tens of seconds. But an access misses a cache of `s` lines if its stack distance is
//! at least `s`, so no cache needs to be simulated. What is left is the core, in the window-centric
//! form of interval simulation (Genbrugge, Eyerman and Eeckhout, HPCA 2010; Carlson et al., TACO
//! 2014): instructions enter the window at the issue width, an access issues once the load that its
//! address depends on has returned, and the window is full until its oldest load has.
//!
//! For example, with a latency of 200 cycles a chase over memory overlaps one miss and takes 200
//! cycles for each, whereas four such chases, interleaved, overlap four and take 50.
//!
//! A mispredicted branch that waits for a miss holds up what follows, but not the memory behind it: until the branch is
//! decided, the core executes the wrong path, which mostly joins the right one after a few instructions. So accesses
//! behind the branch that fit into the window, and whose addresses are known before it is decided, request their lines
//! on the wrong path already (Eyerman, Van den Steen, Heirman and Hur, ISPASS 2023, who found errors of a fifth without
//! it on graph programs). A probe of a hash table that ends in such a branch thus overlaps the next ones.
//!
//! Between two misses an instruction takes what the recording says of its chains of dependences and
//! mispredicted branches ([`cachemate_core::InstructionTiming`]), on a machine that states what
//! refilling the pipeline costs; on any other machine, and on an in-order core, it takes its share
//! of an issue slot. Each miss takes a register, and a line of the bus. Loads of a line that is on
//! its way wait for it. Prefetchers are those of the simulated machines ([`crate::prefetch`]), on
//! the lines of the sample.
//!
//! A walk depends on the sample, the machine and the size alone. What happens before a part of the
//! sample is known by its distances only, so its first accesses fill the window and train
//! prefetchers.

use std::collections::VecDeque;

use cachemate_core::{
    CacheLevel, CacheSpec, CoreModel, FAR_DEPENDENCE, Inclusion, InstructionTiming, MachineSpec,
    PrefetcherSpec, SampledAccess, StreamPhase, StreamSample, WARM_UP_ACCESSES,
};

use crate::prefetch::Prefetcher;

/// A cache level of a machine, as a walk sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WalkLevel {
    /// Lines that it holds.
    pub lines: u64,
    /// Cycles from the core's request to the data.
    pub latency_cycles: f64,
    /// Lines per cycle with which other systems fill it too.
    pub neighbor_lines_per_cycle: f64,
}

/// A machine, as a walk sees it: one core with the caches on its way to memory.
#[derive(Clone, PartialEq, Debug)]
pub struct WalkMachine {
    /// Instructions per cycle.
    pub issue_width: f64,
    /// Cycles of refilling the pipeline after a mispredicted branch; `None` if the issue width alone counts.
    pub mispredict_cycles: Option<f64>,
    /// Instructions in flight; infinite in order, where a missing load blocks.
    pub window_instr: f64,
    /// Misses in flight.
    pub miss_registers: usize,
    /// Whether a missing load blocks the core.
    pub is_in_order: bool,
    /// Whether instructions may pass an access that waits for its address.
    pub can_overtake_loads: bool,
    /// The caches from the core outward; the last one is the contended cache.
    pub levels: Vec<WalkLevel>,
    /// A victim cache behind the contended cache.
    pub victim: Option<WalkLevel>,
    /// Cycles from the core's request to the data in memory.
    pub memory_latency_cycles: f64,
    /// Cycles for which a line occupies the narrowest part of the way to memory.
    pub cycles_per_line: f64,
    /// Maximum number of lines that the bus reads at once.
    pub max_bus_reads: Option<usize>,
    /// Maximum number of lines that the core reads at once from the contended cache and from memory.
    pub max_core_reads: Option<usize>,
    /// Prefetchers, each with the index of its cache in `levels`.
    pub prefetchers: Vec<(usize, PrefetcherSpec)>,
    /// Lines of a page, as a power of two.
    pub page_shift: u32,
}

/// The loads that an access waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DependenceRule {
    /// Those that the sample states.
    Recorded,
    /// None: every miss may overlap.
    Independent,
    /// Every second load waits for the thread's previous load.
    HalfChained,
}

/// The variant of a walk.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WalkOptions {
    /// Lines of the contended cache that the program has.
    pub shared_lines: u64,
    /// Whether prefetchers are on.
    pub prefetch: bool,
    /// The loads that an access waits for.
    pub dependences: DependenceRule,
}

/// What a walk counts.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct WalkCounts {
    /// Instructions.
    pub instructions: f64,
    /// Cycles.
    pub cycles: f64,
    /// Lines that demand accesses fetch from beyond the contended cache.
    pub demand_misses: f64,
    /// Lines that prefetchers fetch from there before they are used.
    pub prefetched_misses: f64,
    /// Lines that prefetchers fetch from there and that are not used.
    pub useless_prefetches: f64,
    /// Lines of the first two kinds whose access is a store.
    pub store_misses: f64,
    /// Cycles from the issue of each miss to its data, over all misses.
    pub miss_cycles: f64,
    /// Cycles in which one miss or more is on its way.
    pub busy_cycles: f64,
    /// Accesses that the contended cache or memory serves.
    pub references: f64,
}

impl WalkCounts {
    /// Mean number of misses on their way while there is one; `None` without misses.
    pub fn overlapped_misses(&self) -> Option<f64> {
        (self.busy_cycles > 0.0).then(|| self.miss_cycles / self.busy_cycles)
    }

    /// Lines that are needed from beyond the contended cache, prefetched or not.
    pub fn needed_lines(&self) -> f64 {
        self.demand_misses + self.prefetched_misses
    }

    fn combine(self, other: WalkCounts, sign: f64) -> WalkCounts {
        WalkCounts {
            instructions: self.instructions + sign * other.instructions,
            cycles: self.cycles + sign * other.cycles,
            demand_misses: self.demand_misses + sign * other.demand_misses,
            prefetched_misses: self.prefetched_misses + sign * other.prefetched_misses,
            useless_prefetches: self.useless_prefetches + sign * other.useless_prefetches,
            store_misses: self.store_misses + sign * other.store_misses,
            miss_cycles: self.miss_cycles + sign * other.miss_cycles,
            busy_cycles: self.busy_cycles + sign * other.busy_cycles,
            references: self.references + sign * other.references,
        }
    }
}

impl WalkMachine {
    /// The first core of a machine; `None` if it has no data cache.
    pub fn from_machine(machine: &MachineSpec) -> Option<Self> {
        let contended = machine.last_level_cache()?;
        let line_bytes = u64::from(contended.line_bytes);
        let level_of = |cache: &CacheSpec| WalkLevel {
            lines: cache.attainable_bytes() / line_bytes,
            latency_cycles: f64::from(cache.latency_cycles),
            neighbor_lines_per_cycle: cache.neighbor_bytes_per_cycle.unwrap_or(0.0)
                / line_bytes as f64,
        };
        let on_path: Vec<&CacheSpec> = machine
            .caches
            .iter()
            .filter(|cache| {
                cache.level != CacheLevel::L1Instruction && cache.level <= contended.level
            })
            .collect();
        let prefetchers = machine.prefetchers.iter().filter_map(|spec| {
            let level = prefetcher_level(spec);
            Some((
                on_path.iter().position(|cache| cache.level == level)?,
                *spec,
            ))
        });
        let victim = machine
            .caches
            .iter()
            .find(|cache| cache.inclusion == Inclusion::Victim && cache.level > contended.level);
        let (issue_width, window, is_in_order, can_overtake_loads) = match machine.pipeline {
            CoreModel::InOrder { issue_width, .. } => (issue_width, f64::INFINITY, true, false),
            CoreModel::OutOfOrder {
                issue_width,
                window,
                loads_pass,
                ..
            } => (issue_width, f64::from(window), false, loads_pass),
        };
        let memory = &machine.memory;
        let narrowest_bytes_per_cycle = memory
            .package_bus_bytes_per_cycle
            .unwrap_or(f64::INFINITY)
            .min(memory.bytes_per_cycle);
        Some(WalkMachine {
            issue_width: f64::from(issue_width.max(1)),
            mispredict_cycles: machine.mispredict_cycles.map(f64::from),
            window_instr: window,
            miss_registers: machine.pipeline.max_misses_in_flight().max(1) as usize,
            is_in_order,
            can_overtake_loads,
            levels: on_path.iter().map(|cache| level_of(cache)).collect(),
            victim: victim.map(level_of),
            memory_latency_cycles: f64::from(memory.local_latency_cycles),
            cycles_per_line: line_bytes as f64 / narrowest_bytes_per_cycle,
            max_bus_reads: memory
                .scheduling
                .requests_in_flight
                .map(|count| count as usize),
            max_core_reads: memory
                .scheduling
                .core_requests_in_flight
                .map(|count| count as usize),
            prefetchers: prefetchers.collect(),
            page_shift: (machine.pages.page_bytes / line_bytes).max(1).ilog2(),
        })
    }

    /// Instructions per cycle between two misses: the issue width, unless the timing of the stretch is known.
    fn instr_per_cycle(&self, core: Option<&InstructionTiming>) -> f64 {
        let timed_cycles = self.refill_cycles().and_then(|refill_cycles| {
            // Code comes from the second level, as if a hit in the first took no longer than that of data.
            let fetch_cycles = match &self.levels[..] {
                [first, second, ..] => second.latency_cycles - first.latency_cycles,
                _ => self.memory_latency_cycles,
            };
            core?.cycles_per_instr(
                self.issue_width,
                self.window_instr,
                refill_cycles,
                fetch_cycles.max(0.0),
            )
        });
        timed_cycles.map_or(self.issue_width, |cycles| 1.0 / cycles)
    }

    /// Cycles of refilling the pipeline; `None` if branches do not count on this machine.
    fn refill_cycles(&self) -> Option<f64> {
        if self.is_in_order {
            None
        } else {
            self.mispredict_cycles
        }
    }

    /// Lines of the largest private cache; 0 if there is none.
    pub fn private_lines(&self) -> u64 {
        let private_levels = &self.levels[..self.levels.len().saturating_sub(1)];
        private_levels
            .iter()
            .map(|level| level.lines)
            .max()
            .unwrap_or(0)
    }
}

fn prefetcher_level(spec: &PrefetcherSpec) -> CacheLevel {
    match spec {
        PrefetcherSpec::Stride { level, .. }
        | PrefetcherSpec::NextLine { level, .. }
        | PrefetcherSpec::Streamer { level, .. }
        | PrefetcherSpec::AdjacentLine { level } => *level,
    }
}

/// Walks all parts of a stretch, and returns the counts of each.
pub fn walk_phase(
    sample: &StreamSample,
    phase: &StreamPhase,
    machine: &WalkMachine,
    options: &WalkOptions,
) -> Vec<WalkCounts> {
    let mut recent = RecentLines::new();
    let instr_per_cycle = machine.instr_per_cycle(phase.core.as_ref());
    let walk_part = |part: &Vec<SampledAccess>| {
        let mut threads: Vec<u32> = part.iter().map(|access| access.thread).collect();
        threads.sort_unstable();
        threads.dedup();
        let mut counts = WalkCounts::default();
        for thread in threads {
            recent.clear();
            let mut walk = Walk::new(
                machine,
                options,
                sample.footprint_lines,
                instr_per_cycle,
                &mut recent,
            );
            let mut warm_up_counts = WalkCounts::default();
            for (index, access) in part.iter().enumerate() {
                if index == WARM_UP_ACCESSES {
                    warm_up_counts = walk.counts();
                }
                if access.thread == thread {
                    walk.step(access);
                }
            }
            let measured = walk.counts().combine(warm_up_counts, -1.0);
            counts = counts.combine(walk.without_unknown_lines(measured), 1.0);
        }
        counts
    };
    phase.parts.iter().map(walk_part).collect()
}

/// Over all fields; no counts sum to zeros.
pub fn sum_counts(counts: &[WalkCounts]) -> WalkCounts {
    counts
        .iter()
        .fold(WalkCounts::default(), |sum, count| sum.combine(*count, 1.0))
}

/// One standard error of the cycles per instruction, relative to them, that sampling leaves; `None` for fewer than two
/// parts. The parts lie at equal distances and are taken for random ones (SMARTS, section 3).
pub fn sampling_error_share(parts: &[WalkCounts]) -> Option<f64> {
    let sum = sum_counts(parts);
    if parts.len() < 2 || sum.cycles <= 0.0 || sum.instructions <= 0.0 {
        return None;
    }
    let cycles_per_instr = sum.cycles / sum.instructions;
    let squares: f64 = parts
        .iter()
        .map(|part| {
            let difference = part.cycles - cycles_per_instr * part.instructions;
            difference * difference
        })
        .sum();
    let count = parts.len() as f64;
    Some(libm::sqrt(squares * count / (count - 1.0)) / sum.cycles)
}

/// What is known about a line that was touched or requested within the part.
#[derive(Clone, Copy, Default)]
struct LineEntry {
    /// The part in which the entry was made.
    epoch: u32,
    /// Index of the cache that prefetched the line, plus one; 0 if an access touched it.
    prefetched_by: u32,
    line: u64,
    /// Cycle at which it arrives, or at which it was requested if it was prefetched.
    cycle: f64,
    /// When a prefetched line arrives; `None` if the request took no place on its way.
    arrival: Option<PrefetchArrival>,
}

/// The arrival of a prefetched line from where it is expected to be.
#[derive(Clone, Copy)]
struct PrefetchArrival {
    cycle: f64,
    /// Whether it is expected beyond the contended cache.
    is_beyond: bool,
}

/// Places for lines; a part touches and requests less than half as many.
const TABLE_BITS: u32 = 12;
const MAX_TABLE_LINES: u32 = 3 << (TABLE_BITS - 2);

struct RecentLines {
    epoch: u32,
    line_count: u32,
    entries: Vec<LineEntry>,
}

impl RecentLines {
    fn new() -> Self {
        RecentLines {
            epoch: 0,
            line_count: 0,
            entries: vec![LineEntry::default(); 1 << TABLE_BITS],
        }
    }

    fn clear(&mut self) {
        self.epoch += 1;
        self.line_count = 0;
    }

    /// The place that has the line, or the free one where it belongs.
    fn place_of(&self, line: u64) -> usize {
        let mut place = (crate::hash::mix(line) >> (64 - TABLE_BITS)) as usize;
        loop {
            let entry = &self.entries[place];
            if entry.epoch != self.epoch || entry.line == line {
                return place;
            }
            place = (place + 1) & ((1 << TABLE_BITS) - 1);
        }
    }

    fn find(&self, line: u64) -> Option<LineEntry> {
        let entry = self.entries[self.place_of(line)];
        (entry.epoch == self.epoch).then_some(entry)
    }

    fn set(&mut self, line: u64, prefetched_by: u32, cycle: f64, arrival: Option<PrefetchArrival>) {
        let place = self.place_of(line);
        let is_new = self.entries[place].epoch != self.epoch;
        // Prefetchers with many requests an access may fill the table; the rest is forgotten.
        if is_new && self.line_count == MAX_TABLE_LINES {
            return;
        }
        self.line_count += u32::from(is_new);
        self.entries[place] = LineEntry {
            epoch: self.epoch,
            prefetched_by,
            line,
            cycle,
            arrival,
        };
    }
}

/// What a core executes until a mispredicted branch is decided; it is taken to join the right path at once.
struct WrongPath {
    /// Number of instructions when the branch entered the window.
    instructions: f64,
    /// Cycle at which it entered.
    entry_cycle: f64,
    /// Cycle at which the branch is decided.
    end_cycle: f64,
}

struct Walk<'a> {
    machine: &'a WalkMachine,
    options: &'a WalkOptions,
    footprint_lines: u64,
    /// Instructions per cycle between two misses.
    instr_per_cycle: f64,
    recent: &'a mut RecentLines,
    prefetchers: Vec<(usize, Prefetcher)>,
    counts: WalkCounts,
    /// Cycle at which the last instruction entered the window.
    entry_cycle: f64,
    instructions: f64,
    /// Loads in the window: instruction, and the cycle at which it and all older loads have returned.
    window: VecDeque<(f64, f64)>,
    last_return: f64,
    /// Cycle at which the value of each access is known.
    value_cycles: Vec<f64>,
    /// Cycle at which the value of each access was known first, if on a wrong path.
    first_value_cycles: Vec<f64>,
    /// Wrong paths that began in the window, oldest first.
    wrong_paths: VecDeque<WrongPath>,
    last_load: Option<usize>,
    loads: u64,
    registers: TakenPlaces,
    /// Places for reads on the bus, and of the core; `None` if there is no limit.
    bus_reads: Option<TakenPlaces>,
    core_reads: Option<TakenPlaces>,
    bus: BusyTimes,
    busy_until: f64,
    requests: Vec<u64>,
    requested_lines: f64,
    /// Prefetched lines that an access touched later.
    resolved_lines: f64,
}

/// Places of which each is taken for a time. Those times begin in any order, because an access whose address is known
/// late takes its place late, and holds up none of those behind it.
struct TakenPlaces {
    count: usize,
    /// Start and end of each time that may not be over.
    times: Vec<(f64, f64)>,
}

impl TakenPlaces {
    fn new(count: usize) -> Self {
        TakenPlaces {
            count: count.max(1),
            times: Vec::new(),
        }
    }

    /// First cycle from `cycle` on at which a place is free.
    fn first_free_cycle(&self, cycle: f64) -> f64 {
        let mut free_cycle = cycle;
        loop {
            let mut taken_count = 0;
            let mut first_end = f64::INFINITY;
            for &(start, end) in &self.times {
                if start <= free_cycle && free_cycle < end {
                    taken_count += 1;
                    first_end = first_end.min(end);
                }
            }
            if taken_count < self.count {
                return free_cycle;
            }
            free_cycle = first_end;
        }
    }

    /// Share of the places that are taken at a cycle.
    fn taken_share(&self, cycle: f64) -> f64 {
        let is_taken = |&&(start, end): &&(f64, f64)| start <= cycle && cycle < end;
        self.times.iter().filter(is_taken).count() as f64 / self.count as f64
    }

    /// Takes a place; times that are over at `past_cycle` are forgotten.
    fn take(&mut self, start: f64, end: f64, past_cycle: f64) {
        self.times.retain(|(_, end)| *end > past_cycle);
        self.times.push((start, end));
    }
}

/// The times at which the bus transfers lines, ascending. Requests are made in any order, as in [`TakenPlaces`].
#[derive(Default)]
struct BusyTimes {
    times: Vec<(f64, f64)>,
}

impl BusyTimes {
    /// First cycle from `cycle` on at which the bus is free for `length` cycles.
    fn first_gap(&self, cycle: f64, length: f64) -> f64 {
        let mut gap_start = cycle;
        for &(start, end) in &self.times {
            if gap_start + length <= start {
                break;
            }
            gap_start = gap_start.max(end);
        }
        gap_start
    }

    /// Takes a gap that [`Self::first_gap`] returned; times that are over at `past_cycle` are forgotten.
    fn take(&mut self, gap_start: f64, length: f64, past_cycle: f64) {
        self.times.retain(|(_, end)| *end > past_cycle);
        let index = self.times.partition_point(|(start, _)| *start < gap_start);
        let gap_end = gap_start + length;
        match index
            .checked_sub(1)
            .map(|previous| &mut self.times[previous])
        {
            Some((_, end)) if *end >= gap_start => *end = gap_end,
            _ => self.times.insert(index, (gap_start, gap_end)),
        }
    }
}

/// First cycle from `cycle` on at which there is a place, if places are limited.
fn first_free_cycle(places: &Option<TakenPlaces>, cycle: f64) -> f64 {
    places
        .as_ref()
        .map_or(cycle, |places| places.first_free_cycle(cycle))
}

impl<'a> Walk<'a> {
    fn new(
        machine: &'a WalkMachine,
        options: &'a WalkOptions,
        footprint_lines: u64,
        instr_per_cycle: f64,
        recent: &'a mut RecentLines,
    ) -> Self {
        let mut prefetchers = Vec::new();
        for level in 0..machine.levels.len() {
            let own_specs = machine.prefetchers.iter().filter(|(at, _)| *at == level);
            let specs = own_specs.map(|(_, spec)| *spec);
            if options.prefetch
                && let Some(prefetcher) = Prefetcher::new(specs, machine.page_shift)
            {
                prefetchers.push((level, prefetcher));
            }
        }
        Walk {
            machine,
            options,
            footprint_lines,
            instr_per_cycle,
            recent,
            prefetchers,
            counts: WalkCounts::default(),
            entry_cycle: 0.0,
            instructions: 0.0,
            window: VecDeque::new(),
            last_return: 0.0,
            value_cycles: Vec::new(),
            first_value_cycles: Vec::new(),
            wrong_paths: VecDeque::new(),
            last_load: None,
            loads: 0,
            registers: TakenPlaces::new(machine.miss_registers),
            bus_reads: machine.max_bus_reads.map(TakenPlaces::new),
            core_reads: machine.max_core_reads.map(TakenPlaces::new),
            bus: BusyTimes::default(),
            busy_until: 0.0,
            requests: Vec::new(),
            requested_lines: 0.0,
            resolved_lines: 0.0,
        }
    }

    fn counts(&self) -> WalkCounts {
        WalkCounts {
            instructions: self.instructions,
            cycles: self.entry_cycle,
            // Lines that were requested and not used, of which some would have been found in a cache.
            useless_prefetches: self.requested_lines - self.resolved_lines,
            ..self.counts
        }
    }

    /// Counts only those useless prefetches that come from beyond the contended cache, in proportion to demand.
    fn without_unknown_lines(&self, counts: WalkCounts) -> WalkCounts {
        let beyond_share = if counts.references > 0.0 {
            (counts.needed_lines() / counts.references).min(1.0)
        } else {
            0.0
        };
        WalkCounts {
            useless_prefetches: counts.useless_prefetches.max(0.0) * beyond_share,
            ..counts
        }
    }

    /// Index of the level that has a line of this distance; the number of levels stands for memory.
    fn level_at(&self, distance: Option<u64>) -> usize {
        let distance = distance.unwrap_or(self.footprint_lines.saturating_sub(1));
        let levels = &self.machine.levels;
        let private = &levels[..levels.len() - 1];
        match private.iter().position(|level| distance < level.lines) {
            Some(level) => level,
            None if distance < self.options.shared_lines => levels.len() - 1,
            None => levels.len(),
        }
    }

    fn latency_at(&self, level: usize, distance: Option<u64>) -> f64 {
        if let Some(level) = self.machine.levels.get(level) {
            return level.latency_cycles;
        }
        let distance = distance.unwrap_or(self.footprint_lines.saturating_sub(1));
        match &self.machine.victim {
            Some(victim) if distance < self.options.shared_lines + victim.lines => {
                victim.latency_cycles
            }
            _ => self.machine.memory_latency_cycles,
        }
    }

    /// Takes a place and a gap of the bus for a line that is requested from memory at `cycle`; the result is the cycle
    /// at which it arrives.
    fn read_memory(&mut self, cycle: f64, latency: f64) -> f64 {
        let core_cycle = first_free_cycle(&self.core_reads, cycle);
        let place_cycle = first_free_cycle(&self.bus_reads, core_cycle);
        let line_cycles = self.machine.cycles_per_line;
        let bus_cycle = self.bus.first_gap(place_cycle, line_cycles);
        self.take_bus(bus_cycle, latency);
        let arrival = bus_cycle + latency;
        let past_cycle = self.entry_cycle - latency;
        if let Some(reads) = &mut self.bus_reads {
            reads.take(place_cycle, arrival, past_cycle);
        }
        if let Some(reads) = &mut self.core_reads {
            reads.take(core_cycle, arrival, past_cycle);
        }
        arrival
    }

    /// Takes a place for a line that is requested from the contended cache at `cycle`; the result is the cycle at which it
    /// arrives.
    fn read_contended(&mut self, cycle: f64, latency: f64) -> f64 {
        let place_cycle = first_free_cycle(&self.core_reads, cycle);
        if let Some(reads) = &mut self.core_reads {
            reads.take(
                place_cycle,
                place_cycle + latency,
                self.entry_cycle - latency,
            );
        }
        place_cycle + latency
    }

    /// Transfers a line in a gap of the bus.
    fn take_bus(&mut self, gap_start: f64, latency: f64) {
        // Some lines are found to have been prefetched only when they are used, and are then requested in the past.
        let past_cycle = self.entry_cycle - latency;
        let line_cycles = self.machine.cycles_per_line;
        self.bus.take(gap_start, line_cycles, past_cycle);
    }

    /// Share of the way to memory that is free for prefetches: 0 if they would wait for longer than an access takes, or
    /// if the bus reads as many lines as it can.
    fn free_room(&self, cycle: f64) -> f64 {
        let latency = self.machine.memory_latency_cycles;
        let line_cycles = self.machine.cycles_per_line;
        let waiting_share = (self.bus.first_gap(cycle, line_cycles) - cycle) / latency;
        let taken_share = |reads: &Option<TakenPlaces>| {
            reads.as_ref().map_or(0.0, |reads| reads.taken_share(cycle))
        };
        let taken_share = taken_share(&self.bus_reads).max(taken_share(&self.core_reads));
        (1.0 - waiting_share.max(taken_share)).max(0.0)
    }

    /// Index of the access on whose value the address of the next one depends; `None` if it depends on none.
    fn address_source(&self, access: &SampledAccess) -> Option<usize> {
        let index = self.value_cycles.len();
        match self.options.dependences {
            DependenceRule::Recorded if access.dependence == FAR_DEPENDENCE => None,
            DependenceRule::Recorded => index
                .checked_sub(usize::from(access.dependence))
                .filter(|&source| source < index),
            DependenceRule::Independent => None,
            DependenceRule::HalfChained if access.is_store || !self.loads.is_multiple_of(2) => None,
            DependenceRule::HalfChained => self.last_load,
        }
    }

    /// The cycle at which an access was issued on a wrong path before it; `None` if it was on none, because they ended
    /// before it had entered or its address was known, or because it is a store.
    fn wrong_path_cycle(&mut self, access: &SampledAccess, source: Option<usize>) -> Option<f64> {
        let passed_instr = |path: &WrongPath| self.instructions - path.instructions;
        while self
            .wrong_paths
            .front()
            .is_some_and(|path| passed_instr(path) >= self.machine.window_instr)
        {
            self.wrong_paths.pop_front();
        }
        if access.is_store {
            return None;
        }

        let address_cycle = source.map_or(0.0, |source| self.first_value_cycles[source]);
        let cycle_on = |path: &WrongPath| {
            let entry_cycle = path.entry_cycle + passed_instr(path) / self.instr_per_cycle;
            let cycle = self
                .registers
                .first_free_cycle(entry_cycle.max(address_cycle));
            (cycle < path.end_cycle).then_some(cycle)
        };
        self.wrong_paths.iter().find_map(cycle_on)
    }

    /// Enters the instructions of an access into the window; returns the cycle at which the access has entered.
    fn enter_window(&mut self, gap: f64) -> f64 {
        self.instructions += gap;
        let mut cycle = self.entry_cycle + gap / self.instr_per_cycle;
        while let Some(&(instruction, return_cycle)) = self.window.front() {
            let passed_instr = self.instructions - instruction - self.machine.window_instr;
            if passed_instr < 0.0 {
                break;
            }
            cycle = cycle.max(return_cycle + passed_instr / self.instr_per_cycle);
            self.window.pop_front();
        }
        cycle
    }

    fn step(&mut self, access: &SampledAccess) {
        let mut entry_cycle = self.enter_window(access.gap as f64);
        let source = self.address_source(access);
        let address_cycle = source.map_or(0.0, |source| self.value_cycles[source]);
        let own_cycle = entry_cycle.max(address_cycle);
        if !self.machine.can_overtake_loads {
            entry_cycle = own_cycle;
        }
        let wrong_path_cycle = self.wrong_path_cycle(access, source);
        let mut issue_cycle = wrong_path_cycle.unwrap_or(own_cycle);
        let first_latency = self.latency_at(0, None);
        let mut level = self.level_at(access.distance);
        let entry = self.recent.find(access.line);
        let is_joined = entry.is_some_and(|entry| {
            entry.prefetched_by == 0 && entry.cycle > issue_cycle + first_latency
        });
        let prefetching_level = entry.and_then(|entry| {
            let level_index = (entry.prefetched_by as usize).checked_sub(1)?;
            Some((level_index, entry))
        });
        self.resolved_lines += f64::from(u8::from(prefetching_level.is_some()));

        // A miss waits for a register; the instructions behind it wait as well if its address was known at entry.
        if level > 0 && !is_joined && wrong_path_cycle.is_none() {
            let register_cycle = self.registers.first_free_cycle(issue_cycle);
            if issue_cycle == entry_cycle {
                entry_cycle = register_cycle;
            }
            issue_cycle = register_cycle;
        }

        let latency = self.latency_at(level, access.distance);
        let home_level = level;
        let is_beyond = home_level == self.machine.levels.len();
        let is_contended = home_level > 0 && home_level + 1 == self.machine.levels.len();
        let mut was_prefetched = false;
        let value_cycle = match (entry, prefetching_level) {
            (Some(entry), None) if is_joined => entry.cycle,
            (_, Some((prefetcher, request))) if level > prefetcher => {
                let arrival = match request.arrival {
                    Some(arrival) if arrival.is_beyond == is_beyond => arrival.cycle,
                    _ if is_beyond => self.read_memory(request.cycle, latency),
                    _ if is_contended => self.read_contended(request.cycle, latency),
                    _ => request.cycle + latency,
                };
                was_prefetched = true;
                level = prefetcher;
                arrival.max(issue_cycle + self.machine.levels[prefetcher].latency_cycles)
            }
            _ if is_beyond => self.read_memory(issue_cycle, latency),
            _ if is_contended => self.read_contended(issue_cycle, latency),
            _ => issue_cycle + latency,
        };
        // A line that was written passes the bus a second time.
        if is_beyond && access.is_store && !is_joined {
            let line_cycles = self.machine.cycles_per_line;
            let write_cycle = self.bus.first_gap(issue_cycle, line_cycles);
            self.take_bus(write_cycle, latency);
        }
        if !is_joined {
            self.count_miss(
                access,
                level,
                is_beyond,
                was_prefetched,
                issue_cycle,
                value_cycle,
            );
            if value_cycle > issue_cycle + first_latency {
                let oldest_path = self.wrong_paths.front();
                let past_cycle = oldest_path.map_or(entry_cycle, |path| path.entry_cycle);
                self.registers.take(issue_cycle, value_cycle, past_cycle);
            }
            self.recent.set(access.line, 0, value_cycle, None);
            self.observe(access.line, level, was_prefetched, home_level, issue_cycle);
        }

        self.first_value_cycles.push(value_cycle);
        let value_cycle = value_cycle.max(own_cycle + first_latency);
        self.value_cycles.push(value_cycle);
        // What a mispredicted branch costs with its load in the first cache is part of the rate between misses.
        if access.delays_branch && self.machine.refill_cycles().is_some() {
            let end_cycle = entry_cycle.max(value_cycle - first_latency);
            self.wrong_paths.push_back(WrongPath {
                instructions: self.instructions,
                entry_cycle,
                end_cycle,
            });
            entry_cycle = end_cycle;
        }
        if !access.is_store {
            self.last_load = Some(self.value_cycles.len() - 1);
            self.loads += 1;
            self.last_return = self.last_return.max(value_cycle);
            self.window.push_back((self.instructions, self.last_return));
            if self.machine.is_in_order && value_cycle > issue_cycle + first_latency {
                entry_cycle = entry_cycle.max(value_cycle);
            }
        }
        self.entry_cycle = entry_cycle;
    }

    fn count_miss(
        &mut self,
        access: &SampledAccess,
        level: usize,
        is_beyond: bool,
        was_prefetched: bool,
        issue_cycle: f64,
        value_cycle: f64,
    ) {
        let contended_level = self.machine.levels.len() - 1;
        if is_beyond || level >= contended_level {
            self.counts.references += 1.0;
        }
        if !is_beyond {
            return;
        }
        if was_prefetched {
            self.counts.prefetched_misses += 1.0;
        } else {
            self.counts.demand_misses += 1.0;
        }
        self.counts.store_misses += f64::from(u8::from(access.is_store));
        let is_late = !was_prefetched
            || value_cycle > issue_cycle + self.machine.levels[level].latency_cycles;
        if is_late {
            self.counts.miss_cycles += value_cycle - issue_cycle;
            let busy_from = issue_cycle.max(self.busy_until);
            self.counts.busy_cycles += (value_cycle - busy_from).max(0.0);
            self.busy_until = self.busy_until.max(value_cycle);
        }
    }

    /// Shows an access to the prefetchers of the caches that it misses, and of the one that had prefetched its line.
    /// What they request comes from where this line came from, `home_level`, as far as is known before it is used.
    fn observe(
        &mut self,
        line: u64,
        level: usize,
        was_prefetched: bool,
        home_level: usize,
        cycle: f64,
    ) {
        let latency = self.latency_at(home_level, None);
        let is_beyond = home_level == self.machine.levels.len();
        let is_contended = home_level + 1 == self.machine.levels.len();
        for at in 0..self.prefetchers.len() {
            let own_level = self.prefetchers[at].0;
            if own_level > level || own_level == level && !was_prefetched {
                continue;
            }
            let free_room = self.free_room(cycle);
            let free_room_permille = || (1000.0 * free_room) as u64;
            let mut requests = std::mem::take(&mut self.requests);
            requests.clear();
            let prefetcher = &mut self.prefetchers[at].1;
            prefetcher.observe_demand(line, free_room_permille, |line| requests.push(line));
            for &requested_line in &requests {
                if self.recent.find(requested_line).is_some() || self.free_room(cycle) <= 0.0 {
                    continue;
                }
                let arrival = match () {
                    () if is_beyond => Some(self.read_memory(cycle, latency)),
                    () if is_contended => Some(self.read_contended(cycle, latency)),
                    () => None,
                };
                let arrival = arrival.map(|cycle| PrefetchArrival { cycle, is_beyond });
                let prefetched_by = own_level as u32 + 1;
                self.recent
                    .set(requested_line, prefetched_by, cycle, arrival);
                self.requested_lines += 1.0;
            }
            self.requests = requests;
        }
    }
}

#[cfg(test)]
mod tests;
