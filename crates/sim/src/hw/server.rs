//! Something that passes so many bytes a tick, first come, first served: a bus, a controller, a cache's port.

/// Fixed point: ticks in 1/65536.
const POINT: u32 = 16;

#[derive(Clone, Debug)]
pub(crate) struct Server {
    /// When it is free again, fixed point.
    free_at: u64,
    /// Fixed point.
    ticks_per_byte: u64,
}

impl Server {
    pub fn new(bytes_per_cycle: f64, ticks_per_cycle: u64) -> Self {
        let ticks_per_byte = ticks_per_cycle as f64 / bytes_per_cycle * f64::from(1u32 << POINT);
        Server { free_at: 0, ticks_per_byte: (ticks_per_byte + 0.5) as u64 }
    }

    /// Passes `bytes` that arrive at tick `at`; ticks they wait before their turn.
    #[inline]
    pub fn pass(&mut self, at: u64, bytes: u64) -> u64 {
        let arrives = at << POINT;
        let starts = self.free_at.max(arrives);
        self.free_at = starts + bytes * self.ticks_per_byte;
        (starts - arrives) >> POINT
    }

    /// Ticks that somebody arriving at `at` would wait.
    pub fn backlog(&self, at: u64) -> u64 {
        self.free_at.saturating_sub(at << POINT) >> POINT
    }

    /// Ticks that `bytes` keep it busy (rounded).
    pub fn busy_ticks(&self, bytes: u64) -> u64 {
        (bytes * self.ticks_per_byte + (1 << (POINT - 1))) >> POINT
    }
}
