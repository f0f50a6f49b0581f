//! Occupancy of one cache by its users, as a state that evolves in time.
//!
//! Occupancy determines rates, and rates determine occupancy, while tasks arrive, exit, take turns
//! and change phase. Under LRU replacement one number closes the circle: a cache holds the lines
//! that were touched after a certain moment, the *cut-off*, which is the same for all its users
//! (Che et al., IEEE JSAC 2002; for programs: footprint theory). The state holds each user's
//! progress since the cut-off; the user's resident lines are its footprint over that progress. As
//! users advance, lines arrive; if the sum would exceed the capacity, the cut-off moves until the
//! sum fits. Progress between the cut-off and the present counts as evenly spread.
//!
//! For example, a loop goes around 1,000 lines once in 100,000 cycles, and a stream touches 0.02
//! lines a cycle. In a cache of 3,000 lines the cut-off lies 100,000 cycles back, since 1,000 +
//! 2,000 lines were touched since then: the loop just fits and always hits. In one of 2,500 lines
//! it lies only 83,000 cycles back, less than a round, so that each line of the loop is gone when
//! its turn comes, and the loop always misses. (It is slower then, so the stream gets even more.)
//!
//! Phases: the lines touched since a given moment grow with each access whose LRU distance exceeds
//! their number. This holds across phases, because a profile's rates are measured with the lines
//! that earlier phases left. The footprint of a new phase therefore grows from the occupancy at
//! which the phase begins. That initial occupancy shrinks as the cut-off passes the moments at
//! which its lines were touched.
//!
//! On a guest whose neighbors fill the same cache, their lines since the cut-off count too: the time
//! for which a line stays is then nearly theirs to decide. For example, neighbors that fill a pool of
//! 300 MB with 20 GB/s leave each line 15 ms, and a co-runner with 2 GB/s shortens that to 13.6 ms.
//!
//! Under random replacement, every line is equally likely to be evicted, so users lose lines in
//! proportion to their occupancy.
//!
//! The state is stable for steps of any length, and with steady rates it is the equal-window
//! solution. The growth of a newcomer, and the decay of the lines of a user that left, follow
//! without further parameters. Disjoint partitions act as separate caches. Partitions that overlap
//! have one cut-off, except for users that would exceed their part.

use cachemate_core::ReplacementPolicy;

use crate::curve::PhaseCurves;

/// Task number of an entry whose lines belong to no live task.
pub const NO_TASK: u32 = u32::MAX;

/// A part of a cache that a set of users may fill (one domain per way mask or set of colors).
#[derive(Clone, Debug, PartialEq)]
pub struct CacheDomain {
    pub capacity_lines: f32,
    /// Group of the part; parts that overlap are in one group.
    pub group: u8,
    /// Cycle of the cut-off: lines last touched earlier have been evicted.
    cutoff: f64,
}

/// Lines that a user touched before its present phase and that may still be resident.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct PastPhase {
    curve: u32,
    /// First cycle of the interval over which these lines were touched, evenly spread. None is left once the cut-off
    /// has passed the interval's end.
    start_cycle: f64,
    end_cycle: f64,
    /// The task's instructions in the last phase between these cycles.
    window_instr: f64,
    /// Lines of earlier phases, beyond the footprint of the last one.
    older_lines: f32,
    hint: u8,
}

impl PastPhase {
    /// Lines that were touched after `cutoff` but before the present phase, and how fast this
    /// number falls per cycle of the cut-off.
    #[inline]
    fn remaining_lines_and_loss(&mut self, cutoff: f64, curves: &PhaseCurves) -> (f32, f32) {
        if cutoff >= self.end_cycle {
            return (0.0, 0.0);
        }
        let duration_cycles = self.end_cycle - self.start_cycle;
        let remaining_share = ((self.end_cycle - cutoff) / duration_cycles).min(1.0);
        let (lines, slope) = curves.window_footprint(
            self.curve,
            self.window_instr * remaining_share,
            &mut self.hint,
        );
        let per_cycle = if cutoff < self.start_cycle {
            0.0
        } else {
            1.0 / duration_cycles
        };
        let loss = (f64::from(slope) * self.window_instr + f64::from(self.older_lines)) * per_cycle;
        (
            lines + self.older_lines * remaining_share as f32,
            loss as f32,
        )
    }

    /// Drops the lines that were touched before the cut-off.
    #[inline]
    fn apply_cutoff(&mut self, cutoff: f64) {
        if cutoff >= self.end_cycle {
            *self = PastPhase::default();
        } else if cutoff > self.start_cycle {
            let remaining_share = (self.end_cycle - cutoff) / (self.end_cycle - self.start_cycle);
            self.window_instr *= remaining_share;
            self.older_lines *= remaining_share as f32;
            self.start_cycle = cutoff;
        }
    }
}

/// Maximum number of domains of a cache.
pub const MAX_DOMAINS: usize = 64;

/// One cache and its users, as parallel arrays with an entry per user.
#[derive(Clone, Debug)]
pub struct OccupancyModel {
    is_random: bool,
    pub domains: Vec<CacheDomain>,
    /// Capacity of each group of domains, which is the joint capacity of its parts.
    groups: Vec<f32>,
    /// Lines with which other systems fill the cache too, unless it is divided. Those since the cut-off count beside
    /// the users' lines.
    neighbor_lines_per_cycle: f64,
    /// The task of each entry; it stays until the lines of a task that left are evicted.
    pub task: Vec<u32>,
    /// Whether the task runs on this cache; if not, only its lines are here.
    pub is_running: Vec<bool>,
    pub curve: Vec<u32>,
    pub domain: Vec<u8>,
    /// The task's instructions in the present phase since the cut-off.
    window_instr: Vec<f64>,
    past_phases: Vec<PastPhase>,
    /// Cycle at which the user arrived without lines.
    arrival_cycle: Vec<f64>,
    /// First cycle of the interval over which `window_instr` is spread; `end_cycle` is its end.
    start_cycle: Vec<f64>,
    end_cycle: Vec<f64>,
    pub lines: Vec<f32>,
    /// Occupancy at the previous step.
    pub previous_lines: Vec<f32>,
    /// Instructions per cycle of elapsed time.
    pub rate: Vec<f64>,
    /// Lines added by each further instruction.
    slope: Vec<f32>,
    hint: Vec<u8>,
    /// Cycle up to which the windows have been advanced.
    pub advanced_to: f64,
}

/// Tolerance between the sum of occupancies and the capacity, as a share of it.
const CAPACITY_TOLERANCE: f32 = 1e-4;
const MAX_ITERATIONS: u32 = 40;
/// Share of the capacity below which a cache evicts no line.
const FULL_SHARE: f32 = 0.99;

impl OccupancyModel {
    /// Creates an empty cache with one domain.
    pub fn new(capacity_lines: f32, replacement: ReplacementPolicy) -> Self {
        OccupancyModel {
            is_random: replacement == ReplacementPolicy::Random,
            domains: vec![CacheDomain {
                capacity_lines,
                group: 0,
                cutoff: 0.0,
            }],
            groups: vec![capacity_lines],
            neighbor_lines_per_cycle: 0.0,
            task: Vec::new(),
            is_running: Vec::new(),
            curve: Vec::new(),
            domain: Vec::new(),
            window_instr: Vec::new(),
            past_phases: Vec::new(),
            arrival_cycle: Vec::new(),
            start_cycle: Vec::new(),
            end_cycle: Vec::new(),
            lines: Vec::new(),
            previous_lines: Vec::new(),
            rate: Vec::new(),
            slope: Vec::new(),
            hint: Vec::new(),
            advanced_to: 0.0,
        }
    }

    /// Lets other systems fill the cache too.
    pub fn set_neighbors(&mut self, neighbor_lines_per_cycle: f64) {
        self.neighbor_lines_per_cycle = neighbor_lines_per_cycle;
    }

    /// Lines of other systems per cycle that decide with the users' own how long lines stay.
    fn competing_lines_per_cycle(&self) -> f64 {
        if self.domains.len() == 1 {
            self.neighbor_lines_per_cycle
        } else {
            0.0
        }
    }

    pub fn len(&self) -> usize {
        self.task.len()
    }

    /// Adds a task that runs here from now on, and returns its entry. It regains the lines that it left here earlier.
    pub fn add_task(&mut self, task: u32, curve: u32, now: f64) -> usize {
        if let Some(entry) = self
            .task
            .iter()
            .position(|&owner| owner == task && task != NO_TASK)
        {
            self.is_running[entry] = true;
            return entry;
        }

        self.task.push(task);
        self.is_running.push(true);
        self.curve.push(curve);
        self.domain.push(0);
        self.window_instr.push(0.0);
        self.past_phases.push(PastPhase::default());
        self.arrival_cycle.push(now);
        self.start_cycle.push(now);
        self.end_cycle.push(now);
        self.lines.push(0.0);
        self.previous_lines.push(0.0);
        self.rate.push(0.0);
        self.slope.push(0.0);
        self.hint.push(0);
        self.task.len() - 1
    }

    /// Stops a task here; its lines stay until others need the space.
    pub fn stop_task(&mut self, entry: usize) {
        self.is_running[entry] = false;
        self.rate[entry] = 0.0;
    }

    /// Removes a task that has ended; its lines then belong to no live task.
    pub fn remove_task(&mut self, task: u32) {
        for index in 0..self.len() {
            if self.task[index] == task {
                (self.task[index], self.is_running[index], self.rate[index]) =
                    (NO_TASK, false, 0.0);
            }
        }
    }

    /// Removes users that have left and have no lines. `on_move` is called for every entry that gets a new number.
    pub fn remove_empty_entries(&mut self, mut on_move: impl FnMut(u32, usize)) {
        let mut index = 0;
        while index < self.len() {
            if self.is_running[index] || self.lines[index] >= 1.0 {
                index += 1;
                continue;
            }
            self.remove(index);
            if index < self.len() && self.is_running[index] {
                on_move(self.task[index], index);
            }
        }
    }

    fn remove(&mut self, index: usize) {
        self.task.swap_remove(index);
        self.is_running.swap_remove(index);
        self.curve.swap_remove(index);
        self.domain.swap_remove(index);
        self.window_instr.swap_remove(index);
        self.past_phases.swap_remove(index);
        self.arrival_cycle.swap_remove(index);
        self.start_cycle.swap_remove(index);
        self.end_cycle.swap_remove(index);
        self.lines.swap_remove(index);
        self.previous_lines.swap_remove(index);
        self.rate.swap_remove(index);
        self.slope.swap_remove(index);
        self.hint.swap_remove(index);
    }

    /// Whether all lines that the user has touched since its arrival are still resident.
    pub fn has_all_lines(&self, entry: usize) -> bool {
        let domain = &self.domains[usize::from(self.domain[entry])];
        if self.is_random {
            self.occupied_lines() < FULL_SHARE * domain.capacity_lines
        } else {
            domain.cutoff <= self.arrival_cycle[entry]
        }
    }

    /// Lines that the user can have at most.
    pub fn max_lines(&self, entry: usize) -> f32 {
        self.domains[usize::from(self.domain[entry])].capacity_lines
    }

    /// Starts the task's next phase. Of its occupancy, the part that `rate` allows counts as touched in the last
    /// phase; the rest belongs to earlier phases.
    pub fn start_phase(&mut self, entry: usize, curve: u32, rate: f64, curves: &PhaseCurves) {
        let (now, old_curve) = (
            self.advanced_to,
            std::mem::replace(&mut self.curve[entry], curve),
        );
        let start_cycle = if self.past_phases[entry].end_cycle > 0.0 {
            self.past_phases[entry].start_cycle
        } else {
            self.start_cycle[entry]
        };
        let (lines, elapsed_cycles) = (self.lines[entry], (now - start_cycle).max(0.0));
        let window_instr = curves
            .window_instr(old_curve, lines)
            .min(rate * elapsed_cycles);
        let mut past_phase = PastPhase {
            curve: old_curve,
            start_cycle,
            end_cycle: now,
            window_instr,
            ..PastPhase::default()
        };
        past_phase.older_lines = (lines
            - curves
                .window_footprint(old_curve, window_instr, &mut past_phase.hint)
                .0)
            .max(0.0);
        self.past_phases[entry] = if elapsed_cycles > 0.0 {
            past_phase
        } else {
            PastPhase::default()
        };
        (
            self.window_instr[entry],
            self.start_cycle[entry],
            self.end_cycle[entry],
        ) = (0.0, now, now);
    }

    /// Divides the cache again: by the capacity and group of each domain (at most 64), the capacity of each group,
    /// and the domain of each task. Lines outside their task's domain are lost.
    pub fn divide(
        &mut self,
        domains: &[(f32, u8)],
        groups: &[f32],
        mut domain_of: impl FnMut(u32) -> u8,
    ) {
        let cutoff = self
            .domains
            .iter()
            .map(|domain| domain.cutoff)
            .fold(f64::INFINITY, f64::min);
        let build_domain = |&(capacity_lines, group): &(f32, u8)| CacheDomain {
            capacity_lines,
            group,
            cutoff,
        };
        self.domains = domains.iter().map(build_domain).collect();
        self.groups = groups.to_vec();

        for (task, domain) in self.task.iter().zip(&mut self.domain) {
            *domain = domain_of(*task).min(domains.len() as u8 - 1);
        }
    }

    /// Divides an empty cache in the same way as another cache.
    pub fn copy_division(&mut self, model: &OccupancyModel) {
        self.domains.clone_from(&model.domains);
        self.groups.clone_from(&model.groups);
    }

    /// Sets the domain of a user that arrived after the division.
    pub fn set_domain(&mut self, entry: usize, domain: u8) {
        self.domain[entry] = domain.min(self.domains.len() as u8 - 1);
    }

    /// Drops a share of a task's lines, because its pages have migrated to other frames.
    pub fn drop_share(&mut self, entry: usize, share: f64, curves: &PhaseCurves) {
        self.lines[entry] *= (1.0 - share) as f32;
        let window = curves.window_instr(self.curve[entry], self.lines[entry]);
        self.window_instr[entry] = self.window_instr[entry].min(window);
        let past_phase = &mut self.past_phases[entry];
        let remaining_lines = curves
            .window_footprint(
                past_phase.curve,
                past_phase.window_instr,
                &mut past_phase.hint,
            )
            .0
            * (1.0 - share) as f32;
        past_phase.window_instr = past_phase
            .window_instr
            .min(curves.window_instr(past_phase.curve, remaining_lines));
        past_phase.older_lines *= (1.0 - share) as f32;
    }

    /// Advances to `now` at the present rates, then reduces occupancies to the capacity. Returns the largest change
    /// as a share of its domain's capacity.
    pub fn advance(&mut self, now: f64, curves: &PhaseCurves) -> f32 {
        let elapsed = now - self.advanced_to;
        self.advanced_to = now;
        if self.is_random {
            return self.advance_random(elapsed, curves);
        }

        for index in 0..self.len() {
            if self.rate[index] > 0.0 {
                if self.window_instr[index] <= 0.0 {
                    self.start_cycle[index] = now - elapsed;
                }
                self.window_instr[index] += self.rate[index] * elapsed;
                self.end_cycle[index] = now;
            }
        }

        let mut change = 0.0f32;
        for group in 0..self.groups.len() {
            change = change.max(self.advance_group(group as u8, now, curves));
        }
        change
    }

    fn advance_group(&mut self, group: u8, now: f64, curves: &PhaseCurves) -> f32 {
        let members = self
            .domains
            .iter()
            .enumerate()
            .filter(|(_, domain)| domain.group == group);
        let mut unconfined_domains: u64 = members.fold(0, |bits, (index, _)| bits | 1 << index);
        let mut remaining_lines = self.groups[usize::from(group)];
        let mut change = 0.0f32;
        // A user that would exceed its part is confined to it; the others share the rest.
        loop {
            let cutoff = self.find_cutoff(unconfined_domains, remaining_lines, now, curves);
            if unconfined_domains.count_ones() < 2 {
                return change.max(
                    self.apply_cutoff(unconfined_domains, cutoff, curves)
                        / self.groups[usize::from(group)],
                );
            }
            let mut smallest_overfull: Option<usize> = None;
            for index in
                (0..self.domains.len()).filter(|index| unconfined_domains >> index & 1 == 1)
            {
                let domain_lines = self.domains[index].capacity_lines;
                let is_smallest = smallest_overfull.is_none_or(|confined_index| {
                    domain_lines < self.domains[confined_index].capacity_lines
                });
                if is_smallest
                    && self.lines_and_loss_at(1 << index, cutoff, curves).0
                        > domain_lines * (1.0 + 1e-3)
                {
                    smallest_overfull = Some(index);
                }
            }
            let Some(confined_domain) = smallest_overfull else {
                return change.max(
                    self.apply_cutoff(unconfined_domains, cutoff, curves)
                        / self.groups[usize::from(group)],
                );
            };
            let domain_lines = self.domains[confined_domain]
                .capacity_lines
                .min(remaining_lines);
            let own_cutoff = self.find_cutoff(1 << confined_domain, domain_lines, now, curves);
            change = change
                .max(self.apply_cutoff(1 << confined_domain, own_cutoff, curves) / domain_lines);
            remaining_lines -= domain_lines;
            unconfined_domains &= !(1 << confined_domain);
        }
    }

    /// Finds the cut-off of a set of domains at which the sum of their footprints fits.
    fn find_cutoff(&mut self, domains: u64, capacity: f32, now: f64, curves: &PhaseCurves) -> f64 {
        let selected_domains = self
            .domains
            .iter()
            .enumerate()
            .filter(|(index, _)| domains >> index & 1 == 1);
        let start = selected_domains
            .map(|(_, domain)| domain.cutoff)
            .fold(f64::INFINITY, f64::min)
            .min(now);
        let (mut low, mut high) = (start, now);
        let mut cutoff = start;
        let neighbor_lines_per_cycle = self.competing_lines_per_cycle();

        for _ in 0..MAX_ITERATIONS {
            let (own_sum, own_loss) = self.lines_and_loss_at(domains, cutoff, curves);
            let sum = own_sum + (neighbor_lines_per_cycle * (now - cutoff)) as f32;
            let loss_per_cycle = own_loss + neighbor_lines_per_cycle as f32;
            let excess = sum - capacity;
            if excess <= CAPACITY_TOLERANCE * capacity
                && (cutoff == start || excess >= -CAPACITY_TOLERANCE * capacity)
            {
                break;
            }

            if excess > 0.0 {
                low = cutoff
            } else {
                high = cutoff
            }
            let newton_cutoff = cutoff + f64::from(excess) / f64::from(loss_per_cycle);
            cutoff = if loss_per_cycle > 0.0 && newton_cutoff > low && newton_cutoff < high {
                newton_cutoff
            } else {
                0.5 * (low + high)
            };
        }

        cutoff
    }

    /// Lines in total if the cut-off were at `cutoff`, and how fast the total falls per cycle of
    /// the cut-off.
    fn lines_and_loss_at(&mut self, domains: u64, cutoff: f64, curves: &PhaseCurves) -> (f32, f32) {
        let (mut sum, mut loss_per_cycle) = (0.0, 0.0);
        for index in 0..self.task.len() {
            if domains >> self.domain[index] & 1 == 0 {
                continue;
            }
            let (start_cycle, end_cycle) = (self.start_cycle[index], self.end_cycle[index]);
            let mut window = self.window_instr[index];
            if cutoff >= end_cycle {
                continue;
            }

            if cutoff < self.past_phases[index].end_cycle {
                let (start, start_loss) =
                    self.past_phases[index].remaining_lines_and_loss(cutoff, curves);
                sum +=
                    curves.footprint_after(self.curve[index], start, window, &mut self.hint[index]);
                loss_per_cycle += start_loss;
                continue;
            }

            let mut instr_per_cycle = 0.0;
            if cutoff >= start_cycle && end_cycle > start_cycle {
                instr_per_cycle = window / (end_cycle - start_cycle);
                window = instr_per_cycle * (end_cycle - cutoff);
            }
            let (lines, slope) =
                curves.window_footprint(self.curve[index], window, &mut self.hint[index]);
            sum += lines;
            loss_per_cycle += slope * instr_per_cycle as f32;
        }

        (sum, loss_per_cycle)
    }

    /// Applies the cut-off and returns the largest change in lines.
    fn apply_cutoff(&mut self, domains: u64, cutoff: f64, curves: &PhaseCurves) -> f32 {
        let mut change = 0.0f32;
        for (index, domain) in self.domains.iter_mut().enumerate() {
            if domains >> index & 1 == 1 {
                domain.cutoff = domain.cutoff.max(cutoff);
            }
        }

        for index in 0..self.task.len() {
            if domains >> self.domain[index] & 1 == 0 {
                continue;
            }
            let (start_cycle, end_cycle) = (self.start_cycle[index], self.end_cycle[index]);
            if cutoff >= end_cycle {
                (self.window_instr[index], self.start_cycle[index]) = (0.0, cutoff);
            } else if cutoff > start_cycle {
                self.window_instr[index] *= (end_cycle - cutoff) / (end_cycle - start_cycle);
                self.start_cycle[index] = cutoff;
            }
            self.past_phases[index].apply_cutoff(cutoff);
            let (mut lines, slope) = curves.window_footprint(
                self.curve[index],
                self.window_instr[index],
                &mut self.hint[index],
            );
            if self.past_phases[index].end_cycle > 0.0 {
                let (start, _) = self.past_phases[index].remaining_lines_and_loss(cutoff, curves);
                lines = curves.footprint_after(
                    self.curve[index],
                    start,
                    self.window_instr[index],
                    &mut self.hint[index],
                );
            }
            let lines = lines.min(self.domains[usize::from(self.domain[index])].capacity_lines);
            change = change.max((lines - self.lines[index]).abs());
            (self.lines[index], self.slope[index]) = (lines, slope);
        }
        change
    }

    /// Advances every domain by backward Euler: `lines' = insertions - lines / capacity x all insertions`, once the
    /// domain is full.
    fn advance_random(&mut self, elapsed: f64, curves: &PhaseCurves) -> f32 {
        let mut change = 0.0f32;
        for domain in 0..self.domains.len() {
            let capacity = self.domains[domain].capacity_lines;
            let (mut inserted_lines, mut occupancy) = (0.0f32, 0.0f32);
            for index in (0..self.len()).filter(|&index| usize::from(self.domain[index]) == domain)
            {
                let rates = curves.rates_at(self.curve[index], self.lines[index], 0.0);
                self.slope[index] = rates.fills_per_instr;
                inserted_lines += (self.rate[index] * elapsed) as f32 * rates.fills_per_instr;
                occupancy += self.lines[index];
            }
            // Neighbors leave no room, and evict as the users do.
            let neighbor_lines = (self.competing_lines_per_cycle() * elapsed) as f32;
            let (has_room, total_inserted) = (
                neighbor_lines == 0.0 && occupancy + inserted_lines <= capacity,
                inserted_lines + neighbor_lines,
            );
            if neighbor_lines > 0.0 {
                occupancy = capacity;
            }
            for index in (0..self.len()).filter(|&index| usize::from(self.domain[index]) == domain)
            {
                let fills = (self.rate[index] * elapsed) as f32 * self.slope[index];
                let lines_before = self.lines[index];
                // Fills into free space evict no line.
                let eviction_share = if has_room {
                    0.0
                } else {
                    (occupancy + total_inserted - capacity).min(total_inserted) / capacity
                };
                self.lines[index] = ((lines_before + fills) / (1.0 + eviction_share)).min(capacity);
                change = change.max((self.lines[index] - lines_before).abs() / capacity);
            }
        }
        change
    }

    /// Cycles in which the present rates fill the fastest domain once, which is the natural length
    /// of a step.
    pub fn turnover_cycles(&self, curves: &PhaseCurves) -> f64 {
        let mut min_cycles = f64::INFINITY;
        for (number, domain) in self.domains.iter().enumerate() {
            let mut lines_per_cycle = 0.0;
            for index in (0..self.len()).filter(|&index| usize::from(self.domain[index]) == number)
            {
                let fills = curves
                    .rates_at(self.curve[index], self.lines[index], 0.0)
                    .fills_per_instr;
                lines_per_cycle += self.rate[index] * f64::from(fills);
            }
            lines_per_cycle += self.competing_lines_per_cycle();
            if lines_per_cycle > 0.0 {
                min_cycles = min_cycles.min(f64::from(domain.capacity_lines) / lines_per_cycle);
            }
        }
        min_cycles
    }

    /// Lines of all users together.
    pub fn occupied_lines(&self) -> f32 {
        self.lines.iter().sum()
    }
}

#[cfg(test)]
mod tests;
