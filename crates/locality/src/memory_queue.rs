//! The time that lines wait for each other at a bus, a controller, or a bus's places for outstanding reads.
//!
//! Problem: a queue of independent arrivals grows without bound as its server saturates, and forecasts a wait of
//! thousands of cycles where no more than a few dozen lines can be on their way, because a program sends a line only
//! after an earlier one has returned. Method: programs form a closed network, in which each has at most the lines that
//! it overlaps in flight. Bard and Schweitzer's approximate mean value analysis solves it: a line waits for the lines
//! that it finds, which are the mean number of lines of the other programs, and of its own program's other lines
//! (Schweitzer 1979; Reiser and Lavenberg 1980). The line in service counts for the part that is left of it. One number
//! therefore decides all waits, [`QueueSolution::lines_ahead`]: it is the root of "lines that wait at these speeds =
//! lines ahead", which lies between 0 and the number of lines in flight, so that a bracketing search always finds it.
//!
//! For example, a line takes 20 cycles, a stream has 24 lines in flight, and a chase has one. Whatever the latency, a
//! miss of the chase never waits for more than 24 x 20 cycles. With many lines in flight and much time between them,
//! the wait is that of random arrivals, `S rho / 2(1 - rho)` (Pollaczek and Khinchine).
//!
//! Properties: a program alone waits as its profile says; a wait beyond that is at most the others' lines in flight
//! times the time of a line; throughput never exceeds one line per time of a line. Among several servers, those that
//! are busy are found by Sakasegawa's (1977) probability. A demand read that passes other lines waits for other demand
//! reads, for the line in service (Cobham 1954), and for what exceeds the queue that it may pass.

/// A server of lines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueStation {
    /// Time of a line, divided by the number of servers.
    pub cycles_per_line: f64,
    /// Lines that are served at once; 1 if one is transferred after another.
    pub servers: f64,
    /// Part of a line's time that is left when another line arrives: 1/2 if all lines take equally long, 1 if their
    /// times are exponential.
    pub residual_share: f64,
    /// Share of the lines that pass all others; 1 if the order is that of arrival.
    pub priority_share: f64,
    /// Whether prefetched reads pass other lines as demand reads do.
    pub do_prefetches_pass: bool,
    /// Wait from which on a prefetch is dropped; 0 if prefetches wait for no place.
    pub max_prefetch_wait_cycles: f64,
}

/// What one program asks of a station, per instruction (or any other unit of work).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LineSource {
    /// Cycles, including the waits for the program's own lines, if `has_own_waits`.
    pub cycles: f64,
    /// Whether `cycles` were measured while the program waited for its own lines.
    pub has_own_waits: bool,
    /// Cycles that waits at other stations add.
    pub added_elsewhere_cycles: f64,
    /// Lines that pass the station.
    pub lines: f64,
    /// Lines that the program has in flight until they return; at most `lines`.
    pub reads: f64,
    /// Those of the reads that demand asks for, rather than prefetchers.
    pub demand_reads: f64,
    /// Waits for demand reads, one after another.
    pub demand_waits: f64,
    /// Waits for prefetched lines that are late, one after another.
    pub late_waits: f64,
    /// Maximum number of the program's lines in flight.
    pub max_in_flight: f64,
    /// Minimum time of a line in flight, without waits at this station.
    pub round_trip_cycles: f64,
    /// Lines that arrive at once.
    pub together_lines: f64,
    /// Share of the lines that arrive at random times; the others follow one that has returned. Those form no queue
    /// before the station is full, because all lines take equally long.
    pub random_share: f64,
    /// Share of the time in which the program runs.
    pub time_share: f64,
}

/// The state of a station.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueSolution {
    /// Mean number of lines that a line from outside finds before itself.
    pub lines_ahead: f64,
    /// Share of the time in which the station transfers lines.
    pub load: f64,
    /// Number of lines that all programs together have in flight at most.
    pub in_flight: f64,
}

/// Cycles that a line waits at a station.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LineWaits {
    /// The wait of a demand read.
    pub demand: f64,
    /// The wait of a prefetched line that is not dropped.
    pub prefetched: f64,
    /// The mean over all lines.
    pub mean: f64,
}

const MAX_ITERATIONS: u32 = 40;
/// Number of waiting lines that a line with priority may pass: write queues have this length and are drained when full.
const MAX_PASSED_LINES: f64 = 32.0;
/// Number of rounds in which a program's speed and the share of its own lines in the queue agree.
const OWN_LINE_ROUNDS: u32 = 4;
/// Tolerance of the solution, as a share of the number of lines ahead and one more.
const TOLERANCE: f64 = 1e-5;
/// Highest load that one program's profile may claim for its own lines.
const MAX_OWN_LOAD: f64 = 0.999;

impl LineSource {
    /// Lines that the program has in flight: those whose waits overlap, up to the maximum, or those that its profile
    /// shows (Little's law) if they are more.
    pub fn in_flight(&self) -> f64 {
        let waits = self.demand_waits + self.late_waits;
        let most = self.max_in_flight.max(1.0);
        let overlapped = if waits * most <= self.reads {
            most
        } else {
            (self.reads / waits).max(1.0)
        };
        overlapped.max(self.reads * self.round_trip_cycles / self.cycles.max(f64::MIN_POSITIVE))
    }

    /// Cycles with these waits in place of the solo ones: those for one line after another, or the time that all lines
    /// need if they fill every place in flight.
    fn cycles_at(&self, waits: LineWaits, solo: LineWaits) -> f64 {
        let waiting = self.cycles
            + self.added_elsewhere_cycles
            + self.demand_waits * (waits.demand - solo.demand)
            + self.late_waits * (waits.prefetched - solo.prefetched);
        let prefetched_reads = (self.reads - self.demand_reads).max(0.0);
        let held = |waits: LineWaits| {
            self.reads * self.round_trip_cycles
                + self.demand_reads * waits.demand
                + prefetched_reads * waits.mean
        };
        let in_flight = self
            .in_flight()
            .max(held(solo) / self.cycles.max(f64::MIN_POSITIVE));
        waiting.max(held(waits) / in_flight).max(f64::MIN_POSITIVE)
    }
}

/// Mean of those values of an exponential distribution with mean `mean` that lie below `upper_limit`.
fn mean_below_limit(upper_limit: f64, mean: f64) -> f64 {
    // Far below its mean, the distribution is uniform.
    if upper_limit < 0.01 * mean {
        0.5 * upper_limit
    } else if upper_limit < 20.0 * mean {
        mean - upper_limit / libm::expm1(upper_limit / mean)
    } else {
        mean
    }
}

impl QueueStation {
    /// A station that transfers lines of equal length one at a time, in the order of arrival, and drops no prefetch.
    pub fn in_order(cycles_per_line: f64) -> Self {
        QueueStation {
            cycles_per_line,
            servers: 1.0,
            residual_share: 0.5,
            priority_share: 1.0,
            do_prefetches_pass: true,
            max_prefetch_wait_cycles: f64::INFINITY,
        }
    }

    /// Probability that all servers are busy at a load from 0 to 1. With several servers it is Sakasegawa's
    /// approximation, `load^(√(2(servers + 1)) − 1)`.
    pub fn busy_probability(&self, load: f64) -> f64 {
        let load = load.clamp(0.0, 1.0);
        if self.servers <= 1.0 {
            return load;
        }
        libm::pow(load, libm::sqrt(2.0 * (self.servers + 1.0)) - 1.0)
    }

    /// What is left of the lines in service when a line arrives, in lines.
    fn lines_in_service(&self, load: f64) -> f64 {
        let spread = 2.0 * self.servers / (self.servers + 1.0);
        self.busy_probability(load) * self.residual_share * spread
    }

    /// Waits behind this many lines. Demand reads pass lines without priority, such as writes, but no more than a full
    /// write queue allows.
    fn waits_behind(&self, lines: f64) -> LineWaits {
        let lines = lines.max(0.0);
        let mean = self.cycles_per_line * lines;
        let passing = mean / (1.0 + 2.0 * lines * (1.0 - self.priority_share));
        let demand = passing.max(self.cycles_per_line * (lines - self.most_passed_lines()));
        let prefetched = if self.do_prefetches_pass {
            demand
        } else {
            mean
        };
        LineWaits {
            demand,
            prefetched: mean_below_limit(self.max_prefetch_wait_cycles, prefetched),
            mean,
        }
    }

    /// 0 if every line has priority, because there is then none to pass.
    fn most_passed_lines(&self) -> f64 {
        if self.priority_share < 1.0 {
            MAX_PASSED_LINES
        } else {
            0.0
        }
    }

    /// Probability that a line finds a queue of this many lines or more, if it finds `lines_ahead` in the mean. A
    /// queue's length decays exponentially.
    pub fn tail_probability(&self, lines_ahead: f64, load: f64, lines: f64) -> f64 {
        if lines_ahead <= 0.0 {
            return 0.0;
        }
        load.min(1.0) * libm::exp(-lines / lines_ahead)
    }

    /// Share of the time for which the program alone would keep the station busy, capped below 1 because a profile can
    /// claim more than the bandwidth.
    pub fn own_load(&self, source: &LineSource) -> f64 {
        (source.lines * source.time_share * self.cycles_per_line / source.cycles).min(MAX_OWN_LOAD)
    }

    /// Waits of a program's lines for each other when it runs alone, in cycles; 0 if its profile does not contain them.
    pub fn solo_waits(&self, source: &LineSource) -> LineWaits {
        if !source.has_own_waits {
            return LineWaits::default();
        }
        let load = (source.lines * self.cycles_per_line / source.cycles).min(MAX_OWN_LOAD);
        let others = 1.0 - 1.0 / source.in_flight();
        let in_service =
            self.lines_in_service(load) * if self.has_one_server() { others } else { 1.0 };
        // lines = others x load x lines + in service, because the lines that wait are load x wait.
        let lines = in_service / (1.0 - others * source.random_share * load);
        self.waits_behind(lines.min(source.in_flight() - 1.0))
    }

    /// Mean number of lines that another program's line finds ahead if this program runs alone.
    pub fn solo_lines_ahead(&self, source: &LineSource) -> f64 {
        let load = self.own_load(source);
        let waiting = load * (self.solo_waits(source).mean + self.bunching_cycles(source))
            / self.cycles_per_line;
        (waiting + self.lines_in_service(load)).min(source.in_flight())
    }

    /// Mean wait for the lines that the program sends together with this one, in cycles.
    fn bunching_cycles(&self, source: &LineSource) -> f64 {
        0.5 * self.cycles_per_line * (source.together_lines - 1.0).max(0.0)
    }

    fn has_one_server(&self) -> bool {
        self.servers <= 1.0
    }

    /// Waits of a program's lines if lines from outside find `lines_ahead`, and its cycles. The program runs when its
    /// line arrives, and the line does not wait for itself.
    fn waits(&self, source: &LineSource, lines_ahead: f64, solo: LineWaits) -> (LineWaits, f64) {
        let residual = if self.has_one_server() {
            self.residual_share
        } else {
            0.0
        };
        let bunching = self.bunching_cycles(source) / self.cycles_per_line;
        // Share of the program's own lines that `lines_ahead` contains and its line does not find.
        let unseen_share = source.time_share - 1.0 + 1.0 / source.in_flight();
        let mut waits = self.waits_behind(lines_ahead);
        let mut cycles = source.cycles_at(waits, solo);
        for _ in 0..OWN_LINE_ROUNDS {
            let own_load = source.lines * self.cycles_per_line / cycles;
            let others_lines =
                lines_ahead - own_load * (unseen_share * residual + source.time_share * bunching);
            // Of its own lines, those that wait grow with the wait.
            let feedback = unseen_share * source.random_share * own_load;
            waits = self.waits_behind(others_lines / (1.0 + feedback).max(0.1));
            cycles = source.cycles_at(waits, solo);
        }
        (waits, cycles)
    }

    /// Cycles that a line of the program waits beyond its solo waits, never negative.
    pub fn added_waits(&self, source: &LineSource, solution: &QueueSolution) -> LineWaits {
        let solo = self.solo_waits(source);
        let (waits, _) = self.waits(source, solution.lines_ahead, solo);
        let most = self.most_added_wait(source, solution);
        LineWaits {
            demand: (waits.demand - solo.demand).clamp(0.0, most),
            prefetched: (waits.prefetched - solo.prefetched).clamp(0.0, most),
            mean: (waits.mean - solo.mean).clamp(0.0, most),
        }
    }

    /// Cycles that this station adds to those of the program's profile: at most the time in which the others' lines in
    /// flight pass, for each time that the program's own lines are replaced.
    pub fn added_cycles(&self, source: &LineSource, solution: &QueueSolution) -> f64 {
        let solo = self.solo_waits(source);
        let (_, cycles) = self.waits(source, solution.lines_ahead, solo);
        let waits = source.demand_waits + source.late_waits;
        let replacements = (source.lines / source.in_flight()).max(waits);
        let most = replacements * self.most_added_wait(source, solution);
        (cycles - source.cycles - source.added_elsewhere_cycles).clamp(0.0, most)
    }

    /// Time in which all lines pass that a program's line can find, other than those for which it waits alone.
    fn most_added_wait(&self, source: &LineSource, solution: &QueueSolution) -> f64 {
        // A profile that exceeds the bandwidth does not contain its own waits.
        let is_possible = source.lines * self.cycles_per_line <= source.cycles;
        let own_lines = if source.has_own_waits && is_possible {
            source.in_flight()
        } else {
            0.0
        };
        self.cycles_per_line * (solution.in_flight - own_lines).max(0.0)
    }

    /// Solves the closed network of these programs. The search starts at `start`, the lines ahead of an earlier
    /// solution.
    pub fn solve(&self, sources: &[LineSource], start: f64) -> QueueSolution {
        let in_flight: f64 = sources.iter().map(LineSource::in_flight).sum();
        // Returns the lines that wait or are in service, and the load.
        let queue_behind = |lines_ahead: f64| {
            let (mut waiting, mut load) = (0.0, 0.0);
            for source in sources {
                let solo = self.solo_waits(source);
                let (waits, cycles) = self.waits(source, lines_ahead, solo);
                let rate = source.lines * source.time_share / cycles;
                let queued =
                    rate * (source.random_share * waits.mean + self.bunching_cycles(source));
                let most = source.in_flight() * (source.lines / source.reads.max(1e-12)).max(1.0);
                waiting += queued.min(most);
                load += rate * self.cycles_per_line;
            }
            (waiting + self.lines_in_service(load), load)
        };

        // Writes wait without being in flight: those that follow the reads, and those that lines with priority pass.
        let with_writes = |source: &LineSource| {
            source.in_flight() * (source.lines / source.reads.max(1e-12)).clamp(1.0, 2.0)
        };
        let most_waiting: f64 = sources.iter().map(with_writes).sum();
        let (mut low, mut high) = (0.0, most_waiting + self.servers + self.most_passed_lines());
        let mut root = start.clamp(low, high);
        let (mut low_excess, mut high_excess) = (f64::NAN, f64::NAN);
        let mut load = 0.0;
        let mut last_side = 0i8;
        for _ in 0..MAX_ITERATIONS {
            let (queue, load_here) = queue_behind(root);
            // Lines wait at least until the station transfers no more than it can.
            let excess = (queue - root).max((load_here - 1.0) * in_flight);
            load = load_here.min(1.0);
            if excess.abs() <= TOLERANCE * (1.0 + root) || high - low <= TOLERANCE * (1.0 + root) {
                break;
            }
            if excess > 0.0 {
                (low, low_excess) = (root, excess);
                high_excess *= if last_side == 1 { 0.5 } else { 1.0 };
                last_side = 1;
            } else {
                (high, high_excess) = (root, excess);
                low_excess *= if last_side == -1 { 0.5 } else { 1.0 };
                last_side = -1;
            }
            // Regula falsi (Illinois) once both ends are known; before, steps grow in the direction of the root.
            let secant = (low * high_excess - high * low_excess) / (high_excess - low_excess);
            let next = if !secant.is_nan() {
                secant
            } else if excess > 0.0 {
                2.0 * root + 0.5
            } else {
                0.5 * root.min(2.0 * queue)
            };
            root = if next > low && next < high {
                next
            } else {
                0.5 * (low + high)
            };
        }
        QueueSolution {
            lines_ahead: root,
            load,
            in_flight,
        }
    }
}

#[cfg(test)]
mod tests;
