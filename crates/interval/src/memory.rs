//! Memory's bandwidth: how long fills wait for others' at the buses and controllers.
//!
//! Problem: a fill waits for those before it, and the wait slows the programs down, which shortens the queue. Method: a
//! server that passes a line in `S` cycles and is busy a share `rho` lets a line wait `K S rho / 2(1 - rho)` (regular
//! service, irregular arrivals; Pollaczek-Khinchine). A program's own lines are in its solo profile already, so it waits
//! for what `rho` is beyond its own share alone. Its cycles grow by that wait, once for every miss that it really waits for: its stall
//! alone over the latency. `rho` is the root of "traffic at these speeds = rho", found from where it was last.
//! Prefetches are dropped where the queue is longer than one access takes, and the program pays as with prefetchers off.
//! Properties: with nobody else, speeds are those of the profile; traffic never exceeds a server's bandwidth.

use cachemate_core::MachineSpec;

/// `K`: burstiness of arrivals. 1 = they come at random.
pub const BURSTINESS: f32 = 1.0;
/// Busier than this nothing is.
const BUSIEST: f32 = 0.9999;
/// The same for one task alone. Less, so that two such tasks still slow each other down.
const BUSIEST_ALONE: f32 = 0.99;
const ITERATIONS_AT_MOST: u32 = 24;
/// `rho` is known to this.
const CLOSE_ENOUGH: f32 = 2e-4;

/// What one running task asks of memory at its present occupancy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ask {
    /// Per instruction, without anybody's queues.
    pub cycles: f32,
    /// Misses per instruction that it waits for one after the other.
    pub waits: f32,
    /// Lines both ways, per instruction.
    pub lines: f32,
    /// Share of elapsed time on a processor.
    pub share: f32,
    /// Per instruction, in queues; the answer.
    pub queued: f32,
}

impl Ask {
    /// Instructions a cycle on a processor.
    #[inline]
    pub fn speed(&self) -> f32 {
        1.0 / (self.cycles + self.queued)
    }
}

/// A bus or a controller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Server {
    pub cycles_per_line: f32,
    /// Share of time that it passes lines.
    pub busy: f32,
}

impl Server {
    fn new(bytes_per_cycle: f64, line_bytes: f64) -> Self {
        Server { cycles_per_line: (line_bytes / bytes_per_cycle) as f32, busy: 0.0 }
    }

    /// Cycles that a line waits per share of the server's time that others have, while it is busy for `busy`.
    #[inline]
    pub fn wait(&self, busy: f32) -> f32 {
        BURSTINESS * self.cycles_per_line / (2.0 * (1.0 - busy.min(BUSIEST)))
    }

    /// How much of it the task would take if nobody made it wait: what its profile knows of.
    #[inline]
    fn alone(&self, ask: &Ask) -> f32 {
        (ask.lines * ask.share * self.cycles_per_line / ask.cycles).min(BUSIEST_ALONE)
    }
}

/// The buses and the controllers of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    /// By node.
    pub controllers: Vec<Server>,
    /// By package; none where packages have no bus.
    pub buses: Vec<Server>,
    packages_per_node: u32,
    pub latency_cycles: f32,
    pub remote_latency_cycles: f32,
}

impl Memory {
    /// The memory of a checked machine.
    pub fn new(spec: &MachineSpec, line_bytes: f64) -> Self {
        let memory = &spec.memory;
        let bus = memory.package_bus_bytes_per_cycle.map(|bytes| Server::new(bytes, line_bytes));
        Memory {
            controllers: vec![Server::new(memory.bytes_per_cycle, line_bytes); memory.nodes as usize],
            buses: bus.map_or(Vec::new(), |bus| vec![bus; spec.packages as usize]),
            packages_per_node: spec.packages / memory.nodes,
            latency_cycles: memory.local_latency_cycles as f32,
            remote_latency_cycles: memory.remote_latency_cycles as f32,
        }
    }

    pub fn node_of(&self, package: u32) -> usize {
        (package / self.packages_per_node) as usize
    }

    /// The share of its prefetches that a task loses because of others: the queue is longer than the latency, beyond
    /// what it is when the task is alone. The queue's length falls off exponentially (heavy traffic).
    pub fn dropped(&self, node: usize, package: u32, ask: &Ask) -> f32 {
        let mut dropped = 0.0f32;
        for server in self.path(node, package) {
            let own = server.alone(ask);
            let (now, alone) = (self.crowded(server, server.busy), self.crowded(server, own));
            if now > alone {
                dropped = dropped.max((now - alone) / (1.0 - alone));
            }
        }
        dropped
    }

    fn path(&self, node: usize, package: u32) -> impl Iterator<Item = &Server> {
        self.buses.get(package as usize).into_iter().chain(self.controllers.get(node))
    }

    /// Probability of a queue longer than the latency.
    fn crowded(&self, server: &Server, busy: f32) -> f32 {
        let busy = busy.clamp(1e-3, BUSIEST);
        let lines = self.latency_cycles / (server.cycles_per_line * BURSTINESS);
        let exponent = 2.0 * (1.0 - busy) / busy * lines;
        if exponent > 20.0 { 0.0 } else { busy * libm::expf(-exponent) }
    }

    /// Finds how busy a node's controller and its packages' buses are, and how long everybody waits there. `asks` hands
    /// every task's package and ask to the function it is given, as often as it is called.
    pub fn solve(&mut self, node: usize, asks: &mut dyn FnMut(&mut dyn FnMut(u32, &mut Ask))) {
        let packages = self.packages_per_node;
        let first = node as u32 * packages;
        // With a bus before the controller each sees the other's delay; twice is enough, as every step comes here again.
        let sweeps = if self.buses.is_empty() { 1 } else { 2 };
        for _ in 0..sweeps {
            for package in first..first + packages {
                if let Some(&bus) = self.buses.get(package as usize) {
                    let others = self.controllers[node];
                    let busy = root(&bus, &others, &mut |each| {
                        asks(&mut |at, ask| {
                            if at == package {
                                each(ask);
                            }
                        });
                    });
                    self.buses[package as usize].busy = busy;
                }
            }
            let controller = self.controllers[node];
            let buses = &self.buses;
            let busy = root_by(&controller, &mut |each| {
                asks(&mut |package, ask| each(buses.get(package as usize).unwrap_or(&NO_SERVER), ask));
            });
            self.controllers[node].busy = busy;
        }
        let (controller, buses) = (self.controllers[node], &self.buses);
        asks(&mut |package, ask| {
            let bus = buses.get(package as usize).unwrap_or(&NO_SERVER);
            ask.queued = queued(&controller, bus, ask);
        });
    }

    /// How long one task waits, while servers are as busy as they are.
    pub fn queue(&self, node: usize, package: u32, ask: &mut Ask) {
        let bus = self.buses.get(package as usize).unwrap_or(&NO_SERVER);
        ask.queued = queued(&self.controllers[node], bus, ask);
    }
}

const NO_SERVER: Server = Server { cycles_per_line: 0.0, busy: 0.0 };

fn queued(one: &Server, other: &Server, ask: &Ask) -> f32 {
    let at = |server: &Server| server.wait(server.busy) * (server.busy - server.alone(ask)).max(0.0);
    ask.waits * (at(one) + at(other))
}

fn root(server: &Server, other: &Server, asks: &mut dyn FnMut(&mut dyn FnMut(&mut Ask))) -> f32 {
    root_by(server, &mut |each| asks(&mut |ask| each(other, ask)))
}

/// The `busy` at which the tasks' traffic, slowed by it and by the other server on their way, is just that.
fn root_by(server: &Server, asks: &mut dyn FnMut(&mut dyn FnMut(&Server, &mut Ask))) -> f32 {
    let mut traffic = |busy: f32| {
        let mut sum = 0.0;
        asks(&mut |other, ask| {
            let queued = queued(&Server { busy, ..*server }, other, ask);
            sum += ask.lines * ask.share / (ask.cycles + queued);
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

    fn memory(bytes_per_cycle: f64, bus: Option<f64>) -> Memory {
        Memory {
            controllers: vec![Server::new(bytes_per_cycle, 64.0)],
            buses: bus.map_or(Vec::new(), |bus| vec![Server::new(bus, 64.0)]),
            packages_per_node: 1,
            latency_cycles: 200.0,
            remote_latency_cycles: 200.0,
        }
    }

    /// Solved as often as a settled machine would.
    fn solved(memory: &mut Memory, asks: &mut [Ask]) {
        for _ in 0..60 {
            memory.solve(0, &mut |each| asks.iter_mut().for_each(|ask| each(0, ask)));
        }
    }

    fn stream(cycles: f32, waits: f32, lines: f32) -> Ask {
        Ask { cycles, waits, lines, share: 1.0, queued: 0.0 }
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
            let speeds: Vec<f32> = asks.iter().map(Ask::speed).collect();
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
        assert_eq!(memory.dropped(0, 0, &ask), 0.0);
        memory.controllers[0].busy = 0.97;
        assert!(memory.dropped(0, 0, &ask) > 0.3);
    }
}
