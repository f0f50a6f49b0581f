//! A server that passes a fixed number of bytes per tick: a bus, a controller, a cache's port.
//!
//! Requests are served first come, first served ([`BandwidthServer::transfer`]), or in two classes, demand before
//! background ([`BandwidthServer::transfer_priority`], [`BandwidthServer::transfer_background`]). The second class
//! fills the gaps of the first: its backlog shrinks while the first is idle, and no work is lost or done twice. A line
//! in service is not interrupted.

/// Number of fraction bits of fixed-point ticks: the unit is 1/65536 tick.
const FRACTION_BITS: u32 = 16;

/// Number of requests of the second class that the first class may overtake. The first class waits for all further
/// ones, because write queues of this length are drained when they are full.
const MAX_DELAYED_REQUESTS: u64 = 32;

#[derive(Clone, Debug)]
pub(crate) struct BandwidthServer {
    /// Tick from which the server is free except for the second class, in fixed point.
    free_at: u64,
    /// Remaining work of the second class as of `settled_until`; both in fixed point.
    backlog: u64,
    settled_until: u64,
    /// Ticks per byte, as a fixed-point number.
    ticks_per_byte: u64,
}

impl BandwidthServer {
    pub fn new(bytes_per_cycle: f64, ticks_per_cycle: u64) -> Self {
        let ticks_per_byte =
            ticks_per_cycle as f64 / bytes_per_cycle * f64::from(1u32 << FRACTION_BITS);
        BandwidthServer {
            free_at: 0,
            backlog: 0,
            settled_until: 0,
            ticks_per_byte: (ticks_per_byte + 0.5) as u64,
        }
    }

    /// Passes `bytes` that arrive at `tick`. Returns the ticks that they wait for service.
    #[inline]
    pub fn transfer(&mut self, tick: u64, bytes: u64) -> u64 {
        let arrival = tick << FRACTION_BITS;
        let service_start = self.free_at.max(arrival);
        self.free_at = service_start + bytes * self.ticks_per_byte;
        (service_start - arrival) >> FRACTION_BITS
    }

    /// Reduces the backlog of the second class by the time that the first class has left idle until a tick.
    fn advance_to(&mut self, until: u64) {
        let idle_time = until.saturating_sub(self.free_at.max(self.settled_until));
        self.backlog -= self.backlog.min(idle_time);
        self.settled_until = self.settled_until.max(until);
    }

    /// Does the same as [`BandwidthServer::transfer`], before all work of the second class that is not in service or
    /// can no longer be delayed.
    pub fn transfer_priority(&mut self, tick: u64, bytes: u64) -> u64 {
        let (arrival, work) = (tick << FRACTION_BITS, bytes * self.ticks_per_byte);
        self.advance_to(arrival);
        let is_idle = self.free_at <= arrival;
        // The request in service, and the ones that can no longer be delayed.
        let in_service_work = if is_idle && work > 0 {
            self.backlog % work
        } else {
            0
        };
        let preceding_work =
            in_service_work.max(self.backlog.saturating_sub(MAX_DELAYED_REQUESTS * work));
        self.backlog -= preceding_work;
        let service_start = self.free_at.max(arrival) + preceding_work;
        self.free_at = service_start + work;
        (service_start - arrival) >> FRACTION_BITS
    }

    /// Does the same as [`BandwidthServer::transfer`], after all other requests. Later arrivals of the first class
    /// still overtake it; the returned ticks do not include them.
    pub fn transfer_background(&mut self, tick: u64, bytes: u64) -> u64 {
        let arrival = tick << FRACTION_BITS;
        self.advance_to(arrival);
        let service_start = self.free_at.max(arrival) + self.backlog;
        self.backlog += bytes * self.ticks_per_byte;
        (service_start - arrival) >> FRACTION_BITS
    }

    /// Keeps the server busy for `ticks` without passing anything: with work of the second class, or else of the first.
    pub fn pause(&mut self, ticks: u64, is_second_class: bool) {
        *(if is_second_class {
            &mut self.backlog
        } else {
            &mut self.free_at
        }) += ticks << FRACTION_BITS;
    }

    /// Ticks that a request at `tick` would wait after all others.
    pub fn backlog_ticks(&self, tick: u64) -> u64 {
        let arrival = tick << FRACTION_BITS;
        let idle_time = arrival.saturating_sub(self.free_at.max(self.settled_until));
        (self.free_at.saturating_sub(arrival) + self.backlog.saturating_sub(idle_time))
            >> FRACTION_BITS
    }

    /// Rounded to the nearest tick.
    pub fn busy_ticks(&self, bytes: u64) -> u64 {
        (bytes * self.ticks_per_byte + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the second class fill exactly the gaps of the first, and is no work lost?
    #[test]
    fn the_second_class_fills_the_gaps_of_the_first() {
        // One byte per tick, requests of ten bytes.
        let mut server = BandwidthServer::new(1.0, 1);
        assert_eq!(
            (
                server.transfer_background(0, 10),
                server.transfer_background(0, 10)
            ),
            (0, 10)
        );
        // The request waits for the one in service, and overtakes the other.
        assert_eq!(server.transfer_priority(4, 10), 6);
        assert_eq!(server.backlog_ticks(4), 26);
        assert_eq!(
            server.transfer_priority(5, 10),
            15,
            "behind the first class only"
        );
        assert_eq!(
            server.backlog_ticks(30),
            10,
            "all that is left when the first class is done"
        );
        assert_eq!(server.transfer_background(35, 10), 5);
        assert_eq!(server.backlog_ticks(60), 0);
    }

    /// Is the second class served in the end, however busy the first is?
    #[test]
    fn the_second_class_is_served_in_the_end() {
        let mut server = BandwidthServer::new(1.0, 1);
        for _ in 0..MAX_DELAYED_REQUESTS + 5 {
            server.transfer_background(0, 10);
        }
        assert_eq!(
            server.transfer_priority(0, 10),
            50,
            "five too many go first"
        );
        assert_eq!(server.transfer_priority(1, 10), 59);
    }

    /// Do random arrivals wait as long as theory predicts (M/D/1, non-preemptive priorities)?
    #[test]
    fn two_classes_wait_as_cobhams_formula_predicts() {
        // Cobham 1954: W1 = R / (1 - r1), W2 = R / ((1 - r1) (1 - r1 - r2)), R = (r1 + r2) s / 2.
        let (service, loads) = (1000_u64, [0.4, 0.3]);
        let mut server = BandwidthServer::new(1.0, 1);
        let mut dice = crate::hw::tests::TestRng::new(11);
        let (mut next, mut waits, mut counts) = ([0.0; 2], [0.0; 2], [0.0; 2]);
        for _ in 0..400_000 {
            let class = usize::from(next[1] < next[0]);
            let at = next[class] as u64;
            let waited = if class == 0 {
                server.transfer_priority(at, service)
            } else {
                server.transfer_background(at, service)
            };
            (waits[class], counts[class]) = (waits[class] + waited as f64, counts[class] + 1.0);
            next[class] -= libm::log(dice.unit()) * service as f64 / loads[class];
        }

        let remaining_work = (loads[0] + loads[1]) * service as f64 / 2.0;
        let first = remaining_work / (1.0 - loads[0]);
        assert!(
            (waits[0] / counts[0] / first - 1.0).abs() < 0.05,
            "{} for {first}",
            waits[0] / counts[0]
        );
        // The second class's own figure excludes requests that overtake later, so it lies between the figure without
        // overtaking and Cobham's.
        let second = waits[1] / counts[1];
        let (least, most) = (
            remaining_work / (1.0 - loads[0] - loads[1]),
            first / (1.0 - loads[0] - loads[1]),
        );
        assert!(
            second > 0.8 * least && second < most,
            "{second}, {least} to {most}"
        );
    }
}
