//! Busy CPUs of the whole host, whichever programs use them, from `/proc/stat` (Documentation/filesystems/proc.rst,
//! 1.7).

use std::collections::BTreeMap;
use std::path::Path;

use crate::kernel::Kernel;

/// Clock ticks of a CPU since the boot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CpuTicks {
    busy: u64,
    idle: u64,
}

/// The load of each CPU between two readings.
#[derive(Clone, Debug, Default)]
pub struct CpuLoadReader {
    last_ticks: BTreeMap<u32, CpuTicks>,
}

impl CpuLoadReader {
    /// Share of time in which each CPU was busy since the last call. A CPU without an earlier reading, or without a
    /// tick since then, is absent.
    pub fn read(&mut self, kernel: &dyn Kernel) -> BTreeMap<u32, f64> {
        let text = kernel.read(Path::new("/proc/stat")).unwrap_or_default();
        let ticks: BTreeMap<u32, CpuTicks> = text.lines().filter_map(parse_cpu_line).collect();
        let busy_share = |(cpu, now): (&u32, &CpuTicks)| {
            let before = self.last_ticks.get(cpu)?;
            let (busy, idle) = (
                now.busy.checked_sub(before.busy)?,
                now.idle.checked_sub(before.idle)?,
            );
            (busy + idle > 0).then(|| (*cpu, busy as f64 / (busy + idle) as f64))
        };
        let loads = ticks.iter().filter_map(busy_share).collect();
        self.last_ticks = ticks;
        loads
    }
}

/// Parses `cpu3 user nice system idle iowait irq softirq steal guest guest_nice`. Guests are part of `user` and `nice`.
fn parse_cpu_line(line: &str) -> Option<(u32, CpuTicks)> {
    let mut words = line.split_ascii_whitespace();
    let cpu = words.next()?.strip_prefix("cpu")?.parse().ok()?;
    let ticks: Vec<u64> = words.map_while(|word| word.parse().ok()).take(8).collect();
    let idle = ticks.get(3)? + ticks.get(4).copied().unwrap_or(0);
    Some((
        cpu,
        CpuTicks {
            busy: ticks.iter().sum::<u64>() - idle,
            idle,
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;

    /// Is the load of each CPU the share between two readings, and a CPU that was offline meanwhile absent?
    #[test]
    fn loads_are_shares_between_two_readings() {
        let host = FakeHost::default();
        let mut loads = CpuLoadReader::default();
        host.set_file(
            "/proc/stat",
            "cpu  9 9 9 9\ncpu0 100 0 50 800 50 0 0 0 30 0\ncpu1 0 0 0 10 0 0 0 0 0 0\nintr 1\n",
        );
        assert!(loads.read(&host).is_empty(), "one reading is no difference");
        host.set_file(
            "/proc/stat",
            "cpu0 130 10 60 840 60 0 0 0 30 0\ncpu1 0 0 0 10 0 0 0 0 0 0\ncpu2 1 1 1 1\n",
        );
        assert_eq!(loads.read(&host), BTreeMap::from([(0, 0.5)]));
        host.set_file("/proc/stat", "cpu0 0 0 0 0 0 0 0 0 0 0\n");
        assert!(loads.read(&host).is_empty(), "counts that went back");
    }
}
