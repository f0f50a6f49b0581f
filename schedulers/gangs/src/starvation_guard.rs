//! The starvation guard, which detaches the scheduler if unmanaged tasks need the CPUs. Managed tasks rank below the
//! fair class: if unmanaged tasks keep a CPU busy, managed tasks get no time until the kernel's watchdog ends the
//! scheduler after ten seconds. The guard acts well before that.

/// Share of a window above which a CPU counts as lost to higher classes.
pub const SHARE: f64 = 0.3;
/// Length of a window, in ns.
pub const WINDOW_NS: u64 = 200_000_000;

/// Time of higher classes on each CPU, compared from window to window.
#[derive(Default)]
pub struct StarvationGuard {
    before_ns: Vec<u64>,
    deferrals: u32,
}

/// Maximum number of consecutive restarts of a window, which delay the guard by one second, well within the
/// watchdog's limit.
const MAX_DEFERRALS: u32 = 5;

impl StarvationGuard {
    /// Restarts the window after threads were adopted, because the time that they ran in this window before adoption
    /// would count as time of unmanaged tasks. Returns true if the window restarts; continuous adoption cannot defer
    /// the guard forever.
    pub fn restart_window(&mut self, stolen_ns: &[u64]) -> bool {
        let may_restart = self.deferrals < MAX_DEFERRALS;
        if may_restart {
            self.deferrals += 1;
            self.before_ns = stolen_ns.to_vec();
        }
        may_restart
    }

    /// The CPU with the largest stolen share, and that share, if it exceeds [`SHARE`]. `stolen_ns`
    /// is the time of higher classes by CPU since attaching. The first call only records it.
    pub fn observe(&mut self, stolen_ns: &[u64], window_ns: u64) -> Option<(usize, f64)> {
        let has_previous = self.before_ns.len() == stolen_ns.len();
        let worst_share = stolen_ns
            .iter()
            .zip(&self.before_ns)
            .map(|(now, before)| now.saturating_sub(*before) as f64 / window_ns.max(1) as f64)
            .enumerate()
            .max_by(|a, b| a.1.total_cmp(&b.1));
        self.before_ns = stolen_ns.to_vec();
        self.deferrals = 0;
        worst_share.filter(|(_, share)| has_previous && *share > SHARE)
    }
}

/// Delay in seconds before the next attempt: 1, 2, 4, up to 64; it restarts at 1 after ten minutes without a problem.
#[derive(Default)]
pub struct BackOff {
    attempts: u32,
}

impl BackOff {
    /// Doubles with each attempt, up to 64 s; ten minutes without a problem begin anew.
    pub fn next_delay_s(&mut self, quiet_s: u64) -> u64 {
        if quiet_s >= 600 {
            self.attempts = 0;
        }
        let seconds = 1 << self.attempts.min(6);
        self.attempts += 1;
        seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the guard detect a stolen CPU, and no other?
    #[test]
    fn a_stolen_cpu_is_detected_in_the_second_window() {
        let mut guard = StarvationGuard::default();
        assert_eq!(guard.observe(&[500, 0], 100), None);
        assert_eq!(guard.observe(&[530, 10], 100), None);
        assert_eq!(guard.observe(&[540, 60], 100), Some((1, 0.5)));
        assert_eq!(guard.observe(&[540, 60], 100), None);
    }

    /// Does a window restart when threads were adopted, but not forever?
    #[test]
    fn a_window_restarts_at_most_five_times_in_a_row() {
        let mut guard = StarvationGuard::default();
        assert_eq!(guard.observe(&[0], 100), None);
        assert!(guard.restart_window(&[90]));
        assert_eq!(guard.observe(&[95], 100), None);
        assert_eq!((0..7).filter(|_| guard.restart_window(&[95])).count(), 5);
        assert_eq!(guard.observe(&[185], 100), Some((0, 0.9)));
    }

    /// Do attempts become rare, and does a long time without problems reset the delay?
    #[test]
    fn attempts_become_rare_and_quiet_time_resets_the_delay() {
        let mut back_off = BackOff::default();
        let waits: Vec<u64> = (0..9).map(|_| back_off.next_delay_s(0)).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        assert_eq!(back_off.next_delay_s(600), 1);
    }
}
