//! Memory's bandwidth: how long fills wait for others' at the buses and controllers.
//!
//! Problem: a fill waits for those before it, and the wait slows the programs down, which shortens the queue. Method: a
//! server that passes a line in `S` cycles and is busy a share `rho` has work for `K S rho / 2(1 - rho)` cycles before
//! it (regular service, irregular arrivals of `K` lines at once; Pollaczek-Khinchine). `K` is the number of misses that
//! a program alone overlaps. With first come, first served, every line waits that long. If demand goes first, a demand
//! read passes all other lines and waits `K S rho / 2(1 - rho_demand)` (Cobham 1954), plus the backlog beyond
//! [`STANDING_BACK`] lines. A bus that has `c` reads on their way at once is a server of `c` places that holds each for
//! the latency and the waits behind it (regular service at half the wait of the irregular; Sakasegawa 1977). A
//! program's own lines are in its solo profile already, so it waits for what is beyond its own share alone. Its cycles
//! grow by that wait, once for every miss that it really waits for: its stall alone over the latency. `rho` is the root
//! of "traffic at these speeds = rho", found from where it was last. If the queue is longer than one access takes,
//! prefetches are dropped. A streamer runs less far ahead the fewer entries are free. The program's cost is
//! interpolated between those with and without prefetchers by the number of dropped ones. Properties: without
//! co-runners, speeds are those of the profile; traffic never exceeds a server's bandwidth.

use cachemate_core::{MachineSpec, PrefetcherSpec};

/// Lines that demand passes by; those beyond go first (write queues are that long, and drained when full).
const STANDING_BACK: f32 = 32.0;
/// Lines that a controller writes between two turns.
const WRITE_BATCH: f32 = 16.0;
/// Busier than this nothing is.
const BUSIEST: f32 = 0.9999;
/// The same for one task alone. Less, so that two such tasks still slow each other down.
const BUSIEST_ALONE: f32 = 0.99;
const ITERATIONS_AT_MOST: u32 = 24;
/// `rho` is known to this.
const CLOSE_ENOUGH: f32 = 2e-4;

/// The demand of one running task on memory at its present occupancy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryDemand {
    /// Cycles per instruction without queueing.
    pub cycles: f32,
    /// Demand misses per instruction that it waits for one after the other.
    pub waits: f32,
    /// The same of prefetched lines that come late.
    pub late: f32,
    /// Lines both ways, per instruction.
    pub lines: f32,
    /// Lines that go first: misses.
    pub first: f32,
    /// Lines that are written.
    pub written: f32,
    /// Lines that come at once, in the mean over lines: misses that overlap.
    pub burst: f32,
    /// Share of elapsed time on a processor.
    pub share: f32,
    /// Per instruction, in queues; the answer.
    pub queued: f32,
}

impl MemoryDemand {
    /// Instructions a cycle on a processor.
    #[inline]
    pub fn speed(&self) -> f32 {
        1.0 / (self.cycles + self.queued)
    }
}

/// The effect of prefetchers on a task at its present occupancy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prefetch {
    /// Cycles per instruction with prefetchers and without queueing.
    pub aided_cycles: f32,
    /// The same without them.
    pub unaided_cycles: f32,
    /// Share of the stall that is due to prefetched lines that come late.
    pub late_share: f32,
}

/// Cycles that a line waits per share of a server's time that others have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Waits {
    demand: f32,
    other: f32,
}

/// A bus or a controller, or the places of a bus for reads on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueueServer {
    pub cycles_per_line: f32,
    /// Share of time that it passes lines.
    pub busy: f32,
    /// Demand goes first.
    first: bool,
    /// Share of its time that goes to demand.
    demand_share: f32,
    /// Additional cost of a written line over a read one, in lines.
    turn_lines: f32,
    /// Reads that it holds at once; 0 = it passes one line after the other, in both directions.
    places: f32,
    /// Lines that come at once, in the mean over all lines.
    burst: f32,
    /// As busy as it is.
    now: Waits,
}

impl QueueServer {
    fn new(bytes_per_cycle: f64, line_bytes: f64, first: bool) -> Self {
        QueueServer {
            cycles_per_line: (line_bytes / bytes_per_cycle) as f32,
            first,
            burst: 1.0,
            ..QueueServer::default()
        }
    }

    /// While it is busy for `busy`.
    #[inline]
    fn waits(&self, busy: f32) -> Waits {
        let busy = busy.min(BUSIEST);
        let behind = self.cycles_per_line / (2.0 * (1.0 - busy));
        if !self.first {
            return Waits { demand: behind, other: behind };
        }
        let left_over = busy * self.tail_probability(busy, STANDING_BACK);
        let passed_by = self.cycles_per_line / (2.0 * (1.0 - busy * self.demand_share));
        Waits { demand: (passed_by + left_over * behind).min(behind), other: behind }
    }

    /// Lines of a task that pass here, per instruction.
    #[inline]
    pub fn lines(&self, ask: &MemoryDemand) -> f32 {
        if self.places > 0.0 { ask.lines - ask.written } else { ask.lines + self.turn_lines * ask.written }
    }

    /// The share that the task would use without queueing, as in its profile.
    #[inline]
    fn alone(&self, ask: &MemoryDemand) -> f32 {
        (self.lines(ask) * ask.share * self.cycles_per_line / ask.cycles).min(BUSIEST_ALONE)
    }

    /// Per instruction, while it is `busy` and a line waits so.
    #[inline]
    fn queued(&self, busy: f32, waits: Waits, ask: &MemoryDemand) -> f32 {
        let others = match self.places > 0.0 {
            true => self.saturation(busy) - self.saturation(self.alone(ask)),
            false => self.burst * busy - ask.burst * self.alone(ask),
        };
        (ask.waits * waits.demand + ask.late * waits.other) * others.max(0.0)
    }

    /// Probability that all places are taken.
    #[inline]
    fn saturation(&self, busy: f32) -> f32 {
        libm::powf(busy, libm::sqrtf(2.0 * (self.places + 1.0)) - 1.0)
    }

    /// Probability that more than so many lines wait, where anything does: it falls off exponentially (heavy traffic).
    #[inline]
    fn tail_probability(&self, busy: f32, lines: f32) -> f32 {
        let exponent = 2.0 * (1.0 - busy) / (busy.max(1e-3) * self.burst) * lines;
        if exponent > 20.0 { 0.0 } else { libm::expf(-exponent) }
    }

    fn settle(&mut self, busy: f32) {
        self.busy = busy;
        self.now = self.waits(busy);
    }
}

/// The buses and the controllers of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct MemorySystem {
    /// By node.
    pub controllers: Vec<QueueServer>,
    /// By package; none where packages have no bus.
    pub buses: Vec<QueueServer>,
    /// Places for reads on their way: by package, by node where packages have no bus; none = any number.
    windows: Vec<QueueServer>,
    packages_per_node: u32,
    pub latency_cycles: f32,
    /// How many more another node's memory takes.
    pub farther_cycles: f32,
    /// Lines that a prefetcher goes ahead, where it looks how much room there is.
    ahead_lines: Option<f32>,
}

impl MemorySystem {
    /// The memory of a checked machine.
    pub fn new(spec: &MachineSpec, line_bytes: f64) -> Self {
        let (memory, rules) = (&spec.memory, &spec.memory.scheduling);
        let bus =
            memory.package_bus_bytes_per_cycle.map(|bytes| QueueServer::new(bytes, line_bytes, rules.demand_priority));
        let mut controller = QueueServer::new(memory.bytes_per_cycle, line_bytes, rules.demand_priority);
        controller.turn_lines = rules.turnaround_cycles as f32 / (WRITE_BATCH * controller.cycles_per_line);
        let latency_cycles = memory.local_latency_cycles as f32;
        let places = rules.requests_in_flight.map(|places| QueueServer {
            places: places as f32,
            cycles_per_line: latency_cycles / places as f32,
            ..QueueServer::default()
        });
        let windows = if bus.is_some() { spec.packages } else { memory.nodes };
        let ahead = spec.prefetchers.iter().find_map(|prefetcher| match prefetcher {
            PrefetcherSpec::Streamer { ahead_lines, .. } => Some(*ahead_lines as f32),
            _ => None,
        });
        MemorySystem {
            controllers: vec![controller; memory.nodes as usize],
            buses: bus.map_or(Vec::new(), |bus| vec![bus; spec.packages as usize]),
            windows: places.map_or(Vec::new(), |window| vec![window; windows as usize]),
            packages_per_node: spec.packages / memory.nodes,
            latency_cycles,
            farther_cycles: memory.remote_latency_cycles as f32 - latency_cycles,
            ahead_lines: ahead.filter(|_| rules.demand_priority),
        }
    }

    pub fn node_of(&self, package: u32) -> usize {
        (package / self.packages_per_node) as usize
    }

    /// The share of its prefetches that a task loses because of others, beyond what it loses alone: those that find no
    /// room at all, or as much as it slows down because prefetches start later.
    pub fn dropped(&self, node: usize, package: u32, ask: &MemoryDemand, prefetch: &Prefetch) -> f32 {
        let mut dropped = 0.0f32;
        let mut lose = |now: f32, alone: f32| dropped = dropped.max((now - alone) / (1.0 - alone));
        for server in self.path(node, package) {
            let crowded =
                |busy: f32| busy * server.tail_probability(busy, self.latency_cycles / server.cycles_per_line);
            lose(crowded(server.busy.min(BUSIEST)), crowded(server.alone(ask)));
        }
        if let Some(window) = self.window(node, package) {
            lose(window.saturation(window.busy), window.saturation(window.alone(ask)));
        }
        match self.ahead_lines {
            Some(lines) if prefetch.late_share > 0.0 => {
                dropped.max(self.starts_later(node, package, ask, prefetch, lines))
            }
            _ => dropped,
        }
    }

    /// A stream passes as many lines as are ahead of it in the time that one takes. It is so many lines ahead as there is
    /// room for, or was a moment ago: the larger of two looks, between which others' requests on their way have changed
    /// (Poisson; the mean of the larger of two normal numbers). Of the way from aided to unaided speed, the part that is
    /// lost, for the share of the stall that is due to late lines.
    fn starts_later(&self, node: usize, package: u32, ask: &MemoryDemand, prefetch: &Prefetch, lines: f32) -> f32 {
        let window = self.window(node, package);
        let room = |busy: &dyn Fn(&QueueServer) -> f32| {
            let backlog = |server: &QueueServer| {
                server.waits(busy(server)).other * server.burst * busy(server) / self.latency_cycles
            };
            1.0 - self.path(node, package).map(backlog).fold(window.map_or(0.0, busy), f32::max)
        };
        let spread = window.map_or(0.0, |window| {
            libm::sqrtf((window.busy - window.alone(ask)).max(0.0) * window.places / core::f32::consts::PI)
                / window.places
        });
        // Whole lines, rounded up.
        let ahead = |room: f32| lines * room.clamp(0.0, 1.0) + 0.5;
        let (now, alone) = (ahead(room(&|server| server.busy) + spread), ahead(room(&|server| server.alone(ask))));
        let fills = (ask.lines - ask.written) * self.latency_cycles;
        let more = fills / now - prefetch.aided_cycles.max(fills / alone);
        let most = prefetch.unaided_cycles - prefetch.aided_cycles;
        if more > 0.0 && most > 0.0 { prefetch.late_share * (more / most).min(1.0) } else { 0.0 }
    }

    /// Lines that come at once, of a task whose misses overlap: those that are waited for once come together, all others
    /// one by one. Where places are few, lines come as places come free.
    pub fn burst(&self, ask: &MemoryDemand) -> f32 {
        if !self.windows.is_empty() || ask.waits <= 0.0 || ask.lines <= 0.0 {
            return 1.0;
        }
        1.0 + ((ask.first / ask.waits).max(1.0) - 1.0) * (ask.first / ask.lines).min(1.0)
    }

    /// Are there prefetchers that go less far ahead where there is less room?
    pub fn throttles_prefetch(&self) -> bool {
        self.ahead_lines.is_some()
    }

    fn path(&self, node: usize, package: u32) -> impl Iterator<Item = &QueueServer> {
        self.buses.get(package as usize).into_iter().chain(self.controllers.get(node))
    }

    fn window(&self, node: usize, package: u32) -> Option<&QueueServer> {
        self.windows.get(if self.buses.is_empty() { node } else { package as usize })
    }

    /// Computes the load of a node's controller and of its packages' buses, and the waiting times there. `asks` passes
    /// every task's package and demand to the function that it is given, each time it is called.
    pub fn solve(&mut self, node: usize, asks: &mut dyn FnMut(&mut dyn FnMut(u32, &mut MemoryDemand))) {
        let packages = self.packages_per_node;
        let first = node as u32 * packages;
        // With a bus before the controller each sees the other's delay; twice is enough, as every step comes here again.
        let sweeps = if self.buses.is_empty() && self.windows.is_empty() { 1 } else { 2 };
        for _ in 0..sweeps {
            for package in first..first + packages {
                self.solve_one(node, Some(package), ServerKind::Bus, asks);
            }
            self.solve_one(node, None, ServerKind::Controller, asks);
            if self.windows.is_empty() {
                continue;
            }
            let users = if self.buses.is_empty() { first..first + 1 } else { first..first + packages };
            for package in users {
                let behind = |server: &QueueServer| {
                    let share = server.demand_share;
                    server.burst * server.busy * (share * server.now.demand + (1.0 - share) * server.now.other)
                };
                let held = self.latency_cycles + self.path(node, package).map(behind).sum::<f32>();
                let of = if self.buses.is_empty() { node } else { package as usize };
                self.windows[of].cycles_per_line = held / self.windows[of].places;
                self.solve_one(node, (!self.buses.is_empty()).then_some(package), ServerKind::Window, asks);
            }
        }
        let memory = &*self;
        asks(&mut |package, ask| ask.queued = memory.queued(node, package, ask));
    }

    /// One server's `busy`, while the others on the way of its users are as they are.
    fn solve_one(
        &mut self,
        node: usize,
        only: Option<u32>,
        part: ServerKind,
        asks: &mut dyn FnMut(&mut dyn FnMut(u32, &mut MemoryDemand)),
    ) {
        let Some(server) = self.part(node, only, part).copied() else { return };
        let (mut demand, mut all, mut bursts) = (0.0, 0.0, 0.0);
        asks(&mut |package, ask| {
            if only.is_none_or(|only| only == package) && ask.cycles > 0.0 {
                let speed = ask.share * ask.speed();
                demand += ask.first * speed;
                all += server.lines(ask) * speed;
                bursts += server.lines(ask) * speed * ask.burst;
            }
        });
        let share = |part: f32| if all > 0.0 { part / all } else { 1.0 };
        let mut server = QueueServer { demand_share: share(demand).min(1.0), burst: share(bursts), ..server };
        // The answer so far is of all servers on the way.
        let (memory, before) = (&*self, server);
        let lonely = self.buses.is_empty() && self.windows.is_empty();
        let elsewhere = |package: u32, ask: &MemoryDemand| match lonely {
            true => 0.0,
            false => (memory.queued(node, package, ask) - before.queued(before.busy, before.now, ask)).max(0.0),
        };
        let busy = root_by(&server, &mut |each| {
            asks(&mut |package, ask| {
                if only.is_none_or(|only| only == package) {
                    each(elsewhere(package, ask), ask);
                }
            });
        });
        server.settle(busy);
        if let Some(place) = self.part(node, only, part) {
            *place = server;
        }
    }

    fn part(&mut self, node: usize, package: Option<u32>, part: ServerKind) -> Option<&mut QueueServer> {
        let of = package.map_or(node, |package| package as usize);
        match part {
            ServerKind::Bus => self.buses.get_mut(of),
            ServerKind::Controller => self.controllers.get_mut(node),
            ServerKind::Window => self.windows.get_mut(of),
        }
    }

    /// How long one task waits, while servers are as busy as they are.
    pub fn queue(&self, node: usize, package: u32, ask: &mut MemoryDemand) {
        ask.queued = self.queued(node, package, ask);
    }

    #[inline]
    fn queued(&self, node: usize, package: u32, ask: &MemoryDemand) -> f32 {
        let at = |server: &QueueServer| server.queued(server.busy, server.now, ask);
        self.path(node, package).chain(self.window(node, package)).map(at).sum()
    }
}

/// Kinds of servers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ServerKind {
    Bus,
    Controller,
    Window,
}

/// The `busy` at which the tasks' traffic, slowed by it and by all others on their way, is just that.
fn root_by(server: &QueueServer, asks: &mut dyn FnMut(&mut dyn FnMut(f32, &mut MemoryDemand))) -> f32 {
    let mut traffic = |busy: f32| {
        let (mut sum, waits) = (0.0, server.waits(busy));
        asks(&mut |elsewhere, ask| {
            let queued = server.queued(busy, waits, ask) + elsewhere;
            sum += server.lines(ask) * ask.share / (ask.cycles + queued);
        });
        sum * server.cycles_per_line
    };
    // Traffic falls as `busy` rises, so the difference has one root. Regula falsi (Illinois), from the last root.
    let (mut low, mut high) = (0.0f32, BUSIEST);
    let mut at = server.busy.min(BUSIEST);
    let mut over = traffic(at) - at;
    if over.abs() <= CLOSE_ENOUGH {
        return at;
    }
    let (mut over_low, mut over_high) = if over > 0.0 {
        low = at;
        (over, traffic(high) - high)
    } else {
        high = at;
        (traffic(low), over)
    };
    if over_high >= 0.0 {
        return BUSIEST;
    }
    let mut side = 0i8;
    for _ in 0..ITERATIONS_AT_MOST {
        at = (low * over_high - high * over_low) / (over_high - over_low);
        over = traffic(at) - at;
        if over.abs() <= CLOSE_ENOUGH || high - low <= CLOSE_ENOUGH {
            break;
        }
        if over > 0.0 {
            (low, over_low) = (at, over);
            if side == 1 {
                over_high *= 0.5;
            }
            side = 1;
        } else {
            (high, over_high) = (at, over);
            if side == -1 {
                over_low *= 0.5;
            }
            side = -1;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(bytes_per_cycle: f64, bus: Option<f64>) -> MemorySystem {
        MemorySystem {
            controllers: vec![QueueServer::new(bytes_per_cycle, 64.0, false)],
            buses: bus.map_or(Vec::new(), |bus| vec![QueueServer::new(bus, 64.0, false)]),
            windows: Vec::new(),
            packages_per_node: 1,
            latency_cycles: 200.0,
            farther_cycles: 0.0,
            ahead_lines: None,
        }
    }

    /// Solved as often as a settled machine would.
    fn solved(memory: &mut MemorySystem, asks: &mut [MemoryDemand]) {
        for _ in 0..60 {
            memory.solve(0, &mut |each| asks.iter_mut().for_each(|ask| each(0, ask)));
        }
    }

    fn stream(cycles: f32, waits: f32, lines: f32) -> MemoryDemand {
        MemoryDemand { cycles, waits, lines, burst: 1.0, share: 1.0, ..MemoryDemand::default() }
    }

    /// Is a task alone as fast as its profile says, however busy it keeps memory?
    #[test]
    fn a_task_alone_waits_for_nobody() {
        for lines in [0.001, 0.02, 0.031] {
            let mut memory = memory(2.0, Some(2.5));
            let mut asks = [stream(1.0, 0.01, lines)];
            solved(&mut memory, &mut asks);
            assert!(asks[0].queued < 3e-3, "{lines}: {asks:?}");
            assert!((memory.controllers[0].busy - lines * 32.0).abs() < 3e-3);
        }
    }

    /// Do streams that want more than there is get just what there is, in equal parts?
    #[test]
    fn streams_beyond_the_bandwidth_share_it() {
        for count in [2, 4, 8] {
            let mut memory = memory(2.0, None);
            let mut asks = vec![stream(1.0, 0.01, 0.025); count];
            solved(&mut memory, &mut asks);
            let lines: f32 = asks.iter().map(|ask| ask.lines * ask.speed()).sum();
            let whole = 2.0 / 64.0;
            assert!(lines <= whole * 1.001, "{count}: {lines} of {whole}");
            let wanted = 0.025 * count as f32;
            assert!(lines > 0.9 * whole.min(wanted), "{count}: {lines} of {whole}");
            let speeds: Vec<f32> = asks.iter().map(MemoryDemand::speed).collect();
            assert!(speeds.iter().all(|speed| (speed / speeds[0] - 1.0).abs() < 1e-3), "{speeds:?}");
        }
    }

    /// Far from the limit, is the wait the closed form of a queue with regular service?
    #[test]
    fn a_light_load_waits_as_the_formula_says() {
        let mut memory = memory(2.0, None);
        let mut asks = [stream(1.0, 0.001, 0.000_01), stream(1.0, 0.0, 0.015)];
        solved(&mut memory, &mut asks);
        let busy = 0.015 * 32.0 + 0.000_32;
        let expected = 0.001 * 32.0 * busy / (2.0 * (1.0 - busy));
        assert!((asks[0].queued / expected - 1.0).abs() < 0.02, "{} {expected}", asks[0].queued);
        assert!(asks[1].queued == 0.0);
    }

    /// Does the narrower of bus and controller limit?
    #[test]
    fn the_narrower_server_limits() {
        for (controller, bus) in [(4.0, 1.0), (1.0, 4.0)] {
            let mut memory = memory(controller, Some(bus));
            let mut asks = vec![stream(1.0, 0.02, 0.03); 3];
            solved(&mut memory, &mut asks);
            let lines: f32 = asks.iter().map(|ask| ask.lines * ask.speed()).sum();
            assert!((lines * 64.0 - 1.0).abs() < 0.05, "{controller} {bus}: {}", lines * 64.0);
        }
    }

    /// Are prefetches dropped only where others crowd memory?
    #[test]
    fn prefetches_are_dropped_in_a_crowd_only() {
        let mut memory = memory(2.0, None);
        let ask = stream(1.0, 0.001, 0.01);
        memory.controllers[0].busy = 0.32;
        assert_eq!(memory.dropped(0, 0, &ask, &Prefetch::default()), 0.0);
        memory.controllers[0].busy = 0.97;
        assert!(memory.dropped(0, 0, &ask, &Prefetch::default()) > 0.3);
    }

    /// With demand priority, does a miss wait as in Cobham's formula, and a late line as long as without priority?
    #[test]
    fn demand_waits_as_cobham_says() {
        let mut memory = memory(2.0, None);
        memory.controllers[0].first = true;
        let (demand, rest) = (MemoryDemand { first: 0.01, ..stream(1.0, 0.0, 0.01) }, stream(1.0, 0.0, 0.009));
        let light = MemoryDemand { late: 0.001, ..stream(1.0, 0.001, 1e-6) };
        let mut asks = [demand, rest, MemoryDemand { late: 0.0, ..light }, MemoryDemand { waits: 0.0, ..light }];
        solved(&mut memory, &mut asks);
        let (first, busy) = (0.01 * 32.0, 0.019 * 32.0);
        let cobham = 0.001 * 32.0 * busy / 2.0 / (1.0 - first);
        assert!((asks[2].queued / cobham - 1.0).abs() < 0.02, "{} {cobham}", asks[2].queued);
        let behind_all = 0.001 * 32.0 * busy / 2.0 / (1.0 - busy);
        assert!((asks[3].queued / behind_all - 1.0).abs() < 0.02, "{} {behind_all}", asks[3].queued);
    }

    /// Do lines that come eight at once make others wait eight times as long, as where work comes in batches?
    #[test]
    fn lines_that_come_at_once_make_others_wait() {
        let mut memory = memory(2.0, None);
        let mut asks = [stream(1.0, 0.001, 1e-6), MemoryDemand { burst: 8.0, ..stream(1.0, 0.0, 0.015) }];
        solved(&mut memory, &mut asks);
        let busy = 0.015 * 32.0;
        let expected = 0.001 * 8.0 * 32.0 * busy / (2.0 * (1.0 - busy));
        assert!((asks[0].queued / expected - 1.0).abs() < 0.02, "{} {expected}", asks[0].queued);
        let ask = MemoryDemand { first: 0.01, ..stream(1.0, 0.002, 0.02) };
        assert!((memory.burst(&ask) - (1.0 + 4.0 * 0.5)).abs() < 1e-5, "half of the lines come five at once");
        memory.windows = vec![QueueServer::default()];
        assert_eq!(memory.burst(&ask), 1.0);
    }

    /// Do no more reads pass than places hold in the time that one takes, and does one place wait as any queue?
    #[test]
    fn reads_on_their_way_are_limited() {
        for places in [1.0, 4.0, 12.0] {
            let mut memory = memory(64.0, None);
            memory.windows = vec![QueueServer { places, cycles_per_line: 200.0 / places, ..QueueServer::default() }];
            let mut asks = vec![stream(1.0, 0.02, 0.03); 3];
            solved(&mut memory, &mut asks);
            let lines: f32 = asks.iter().map(|ask| ask.lines * ask.speed()).sum();
            let most = places / 200.0;
            assert!(lines <= most * 1.001 && lines > 0.85 * most.min(0.09), "{places}: {lines} of {most}");
        }
        let mut memory = memory(64.0, None);
        memory.windows = vec![QueueServer { places: 1.0, cycles_per_line: 200.0, ..QueueServer::default() }];
        let mut asks = [stream(1.0, 0.001, 1e-6), stream(1.0, 0.0, 0.002)];
        solved(&mut memory, &mut asks);
        let expected = 0.001 * 200.0 * 0.4 / (2.0 * 0.6);
        assert!((asks[0].queued / expected - 1.0).abs() < 0.03, "{} {expected}", asks[0].queued);
    }

    /// Is a stream that starts later slower by the lines that are ahead of it, and one that has time not at all?
    #[test]
    fn a_stream_is_as_fast_as_it_is_ahead() {
        let mut memory = memory(64.0, None);
        memory.windows = vec![QueueServer { places: 12.0, cycles_per_line: 200.0 / 12.0, ..QueueServer::default() }];
        memory.ahead_lines = Some(8.0);
        // 8 x (1 - 5/12) + 0.5 lines ahead when alone: five on their way, one each 40 cycles.
        let ask = stream(40.0, 0.0, 1.0);
        let prefetch = Prefetch { aided_cycles: 40.0, unaided_cycles: 200.0, late_share: 1.0 };
        memory.windows[0].busy = memory.windows[0].alone(&ask);
        assert_eq!(memory.dropped(0, 0, &ask, &prefetch), 0.0, "alone");
        memory.windows[0].busy = 0.7;
        let others = (0.7 - 5.0 / 12.0) * 12.0 / std::f32::consts::PI;
        let ahead = 8.0 * (0.3 + others.sqrt() / 12.0) + 0.5;
        let expected = (200.0 / ahead - 40.0) / 160.0;
        let found = memory.starts_later(0, 0, &ask, &prefetch, 8.0);
        assert!((found / expected - 1.0).abs() < 0.02, "{found} {expected}");
        let slow = Prefetch { aided_cycles: 400.0, unaided_cycles: 500.0, ..prefetch };
        assert_eq!(memory.starts_later(0, 0, &stream(400.0, 0.0, 1.0), &slow, 8.0), 0.0);
        let without_room = memory.dropped(0, 0, &stream(400.0, 0.0, 1.0), &slow);
        assert!(without_room > 0.1, "{without_room}");
    }
}
