//! Who holds how much of one cache: a state that flows.
//!
//! Problem: occupancy decides rates, and rates decide occupancy, while tasks come, go, take turns and change phase.
//! Method, least recently used: a cache holds what was touched after some moment, the *cut-off*, the same for all its
//! users (Che et al., IEEE JSAC 2002; for programs: footprint theory). Of each user its own progress since the cut-off
//! is kept; its lines are its footprint over that progress. As users go on, lines come in; where the sum would exceed
//! the capacity, the cut-off moves until it does not. Progress between the cut-off and now counts as evenly spread.
//! Method, random replacement: every line has the same chance to go, so users lose in proportion to what they hold.
//! Properties: stable for steps of any length; with steady rates the state is the equal-window solution; a newcomer's
//! growth, and the loss of who left, follow without further parameters. Partitions are caches of their own, by domain.

use cachemate_core::Replacement;

use crate::curve::Curves;

/// An entry's task, where it is nobody's who runs here.
pub const NOBODY: u32 = u32::MAX;

/// A part of a cache with users of its own (one per partition).
#[derive(Clone, Debug, PartialEq)]
pub struct Domain {
    pub capacity_lines: f32,
    /// Lines last touched before this cycle are gone.
    cutoff: f64,
}

/// One cache and its users. Arrays run in parallel, an entry per user.
#[derive(Clone, Debug)]
pub struct Flow {
    random: bool,
    pub domains: Vec<Domain>,
    /// Who it is; stays when it leaves, until its lines are gone.
    pub task: Vec<u32>,
    /// False = its lines only; it runs elsewhere or not at all.
    pub here: Vec<bool>,
    pub curve: Vec<u32>,
    pub domain: Vec<u8>,
    /// Own instructions since the cut-off.
    window_instr: Vec<f64>,
    /// They lie between these cycles.
    from: Vec<f64>,
    until: Vec<f64>,
    pub lines: Vec<f32>,
    /// Instructions a cycle of elapsed time.
    pub rate: Vec<f64>,
    /// Lines that each further instruction brings.
    slope: Vec<f32>,
    near: Vec<u8>,
    /// Up to where windows are advanced.
    pub since: f64,
}

/// The sum of occupancies is the capacity within this share of it.
const CLOSE_ENOUGH: f32 = 1e-4;
const ITERATIONS_AT_MOST: u32 = 40;

impl Flow {
    /// Empty, one domain.
    pub fn new(capacity_lines: f32, replacement: Replacement) -> Self {
        Flow {
            random: replacement == Replacement::Random,
            domains: vec![Domain { capacity_lines, cutoff: 0.0 }],
            task: Vec::new(),
            here: Vec::new(),
            curve: Vec::new(),
            domain: Vec::new(),
            window_instr: Vec::new(),
            from: Vec::new(),
            until: Vec::new(),
            lines: Vec::new(),
            rate: Vec::new(),
            slope: Vec::new(),
            near: Vec::new(),
            since: 0.0,
        }
    }

    pub fn len(&self) -> usize {
        self.task.len()
    }
    pub fn is_empty(&self) -> bool {
        self.task.is_empty()
    }

    /// A task runs here from now on; its entry. Lines that it left here earlier are its own again.
    pub fn enter(&mut self, task: u32, curve: u32, now: f64) -> usize {
        if let Some(at) = self.task.iter().position(|&known| known == task && task != NOBODY) {
            self.here[at] = true;
            return at;
        }
        self.task.push(task);
        self.here.push(true);
        self.curve.push(curve);
        self.domain.push(0);
        self.window_instr.push(0.0);
        self.from.push(now);
        self.until.push(now);
        self.lines.push(0.0);
        self.rate.push(0.0);
        self.slope.push(0.0);
        self.near.push(0);
        self.task.len() - 1
    }

    /// The task runs here no more; its lines stay until others need the room.
    pub fn leave(&mut self, entry: usize) {
        self.here[entry] = false;
        self.rate[entry] = 0.0;
    }

    /// Forgets users that are gone with their lines. `moved` hears of every entry that has a new number.
    pub fn sweep(&mut self, mut moved: impl FnMut(u32, usize)) {
        let mut at = 0;
        while at < self.len() {
            if self.here[at] || self.lines[at] >= 1.0 {
                at += 1;
                continue;
            }
            self.remove(at);
            if at < self.len() && self.here[at] {
                moved(self.task[at], at);
            }
        }
    }

    fn remove(&mut self, at: usize) {
        self.task.swap_remove(at);
        self.here.swap_remove(at);
        self.curve.swap_remove(at);
        self.domain.swap_remove(at);
        self.window_instr.swap_remove(at);
        self.from.swap_remove(at);
        self.until.swap_remove(at);
        self.lines.swap_remove(at);
        self.rate.swap_remove(at);
        self.slope.swap_remove(at);
        self.near.swap_remove(at);
    }

    /// The task's next phase: its lines are of use to that one too, as far as it would have touched them at `rate`.
    pub fn change_curve(&mut self, entry: usize, curve: u32, rate: f64, curves: &Curves) {
        self.curve[entry] = curve;
        let span = (self.since - self.from[entry]).max(0.0);
        self.window_instr[entry] = curves.window_instr(curve, self.lines[entry]).min(rate * span);
    }

    /// Divides the cache anew: capacities by domain, and each entry's domain by its task. Lines outside are lost.
    pub fn divide(&mut self, capacities_lines: &[f32], mut domain_of: impl FnMut(u32) -> u8) {
        let cutoff = self.domains.iter().map(|domain| domain.cutoff).fold(f64::INFINITY, f64::min);
        let domain = |&capacity_lines: &f32| Domain { capacity_lines, cutoff };
        self.domains = capacities_lines.iter().map(domain).collect();
        for (task, domain) in self.task.iter().zip(&mut self.domain) {
            *domain = domain_of(*task).min(capacities_lines.len() as u8 - 1);
        }
    }

    /// Drops a share of a task's lines (pages that were moved to other frames).
    pub fn drop_share(&mut self, entry: usize, share: f64, curves: &Curves) {
        self.lines[entry] *= (1.0 - share) as f32;
        let window = curves.window_instr(self.curve[entry], self.lines[entry]);
        self.window_instr[entry] = self.window_instr[entry].min(window);
    }

    /// Goes on to `now` at the present rates, then makes occupancies fit. The largest change, of its domain's capacity.
    pub fn advance(&mut self, now: f64, curves: &Curves) -> f32 {
        let elapsed = now - self.since;
        self.since = now;
        if self.random {
            return self.advance_random(elapsed, curves);
        }
        for at in 0..self.len() {
            if self.rate[at] > 0.0 {
                if self.window_instr[at] <= 0.0 {
                    self.from[at] = now - elapsed;
                }
                self.window_instr[at] += self.rate[at] * elapsed;
                self.until[at] = now;
            }
        }
        let mut change = 0.0f32;
        for domain in 0..self.domains.len() {
            change = change.max(self.settle(domain, now, curves));
        }
        change
    }

    /// Moves the domain's cut-off until the sum of footprints fits.
    fn settle(&mut self, domain: usize, now: f64, curves: &Curves) -> f32 {
        let capacity = self.domains[domain].capacity_lines;
        let start = self.domains[domain].cutoff;
        let (mut low, mut high) = (start, now);
        let mut at = start;
        let mut tries = 0;
        loop {
            let (sum, loss_per_cycle) = self.sum_at(domain, at, curves);
            let over = sum - capacity;
            if over <= CLOSE_ENOUGH * capacity && (at == start || over >= -CLOSE_ENOUGH * capacity) {
                break;
            }
            tries += 1;
            if tries > ITERATIONS_AT_MOST {
                break;
            }
            if over > 0.0 {
                low = at
            } else {
                high = at
            }
            let newton = at + f64::from(over) / f64::from(loss_per_cycle);
            at = if loss_per_cycle > 0.0 && newton > low && newton < high { newton } else { 0.5 * (low + high) };
        }
        self.domains[domain].cutoff = at;
        self.cut(domain, at, curves) / capacity
    }

    /// Lines held in all with the cut-off there, and how many fewer a cycle later.
    fn sum_at(&mut self, domain: usize, cutoff: f64, curves: &Curves) -> (f32, f32) {
        let (mut sum, mut loss) = (0.0, 0.0);
        for at in 0..self.task.len() {
            if usize::from(self.domain[at]) != domain {
                continue;
            }
            let (from, until) = (self.from[at], self.until[at]);
            let mut window = self.window_instr[at];
            if cutoff >= until {
                continue;
            }
            let mut density = 0.0;
            if cutoff >= from {
                density = window / (until - from);
                window = density * (until - cutoff);
            }
            let (lines, slope) = curves.footprint(self.curve[at], window, &mut self.near[at]);
            sum += lines;
            loss += slope * density as f32;
        }
        (sum, loss)
    }

    /// Makes the cut-off hold; the largest change in lines.
    fn cut(&mut self, domain: usize, cutoff: f64, curves: &Curves) -> f32 {
        let mut change = 0.0f32;
        for at in 0..self.task.len() {
            if usize::from(self.domain[at]) != domain {
                continue;
            }
            let (from, until) = (self.from[at], self.until[at]);
            if cutoff >= until {
                (self.window_instr[at], self.from[at]) = (0.0, cutoff);
            } else if cutoff > from {
                self.window_instr[at] *= (until - cutoff) / (until - from);
                self.from[at] = cutoff;
            }
            let (lines, slope) = curves.footprint(self.curve[at], self.window_instr[at], &mut self.near[at]);
            let lines = lines.min(self.domains[domain].capacity_lines);
            change = change.max((lines - self.lines[at]).abs());
            (self.lines[at], self.slope[at]) = (lines, slope);
        }
        change
    }

    /// Backward Euler of `lines' = insertions - lines / capacity x all insertions`, once the domain is full.
    fn advance_random(&mut self, elapsed: f64, curves: &Curves) -> f32 {
        let mut change = 0.0f32;
        for domain in 0..self.domains.len() {
            let capacity = self.domains[domain].capacity_lines;
            let (mut inserted, mut held) = (0.0f32, 0.0f32);
            for at in (0..self.len()).filter(|&at| usize::from(self.domain[at]) == domain) {
                let rates = curves.rates(self.curve[at], self.lines[at], 0.0);
                self.slope[at] = rates.fills_per_instr;
                inserted += (self.rate[at] * elapsed) as f32 * rates.fills_per_instr;
                held += self.lines[at];
            }
            let (fits, all) = (held + inserted <= capacity, inserted);
            for at in (0..self.len()).filter(|&at| usize::from(self.domain[at]) == domain) {
                let own = (self.rate[at] * elapsed) as f32 * self.slope[at];
                let before = self.lines[at];
                // The part that fills the empty room evicts nobody.
                let evicting = if fits { 0.0 } else { (held + all - capacity).min(all) / capacity };
                self.lines[at] = ((before + own) / (1.0 + evicting)).min(capacity);
                change = change.max((self.lines[at] - before).abs() / capacity);
            }
        }
        change
    }

    /// Cycles in which the cache, or its fastest domain, is filled once at the present rates: the natural step.
    pub fn turnover_cycles(&self, curves: &Curves) -> f64 {
        let mut shortest = f64::INFINITY;
        for (number, domain) in self.domains.iter().enumerate() {
            let mut lines_per_cycle = 0.0;
            for at in (0..self.len()).filter(|&at| usize::from(self.domain[at]) == number) {
                let fills = curves.rates(self.curve[at], self.lines[at], 0.0).fills_per_instr;
                lines_per_cycle += self.rate[at] * f64::from(fills);
            }
            if lines_per_cycle > 0.0 {
                shortest = shortest.min(f64::from(domain.capacity_lines) / lines_per_cycle);
            }
        }
        shortest
    }

    /// Lines held in all.
    pub fn held_lines(&self) -> f32 {
        self.lines.iter().sum()
    }
}

#[cfg(test)]
#[path = "flow_tests.rs"]
mod tests;
