//! Pressure-stall information: the share of time in which work waited for CPU, memory or I/O.
//!
//! The weakest evidence of contention: it shows that tasks wait, but never that a cache is the reason. Read from
//! `/proc/pressure/*`, or `*.pressure` of a cgroup v2. Kernel documentation: Documentation/accounting/psi.rst.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::kernel::Kernel;

/// Pressure on one resource, in shares of the last ten seconds.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct PressureShares {
    /// Share in which some task waited.
    pub some_share: f64,
    /// Share in which all tasks waited; absent if the kernel does not report it (CPU on older kernels).
    pub full_share: Option<f64>,
    /// Time in which some task waited, since boot.
    pub some_total_ns: u64,
}

/// Pressure on all three resources; `None` if the kernel does not report it.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Pressure {
    /// Work that waited for a processor.
    pub cpu: Option<PressureShares>,
    /// Work that waited for memory to be freed or read back.
    pub memory: Option<PressureShares>,
    /// Work that waited for devices.
    pub io: Option<PressureShares>,
}

/// Pressure on the whole host.
pub fn read(kernel: &dyn Kernel) -> Pressure {
    let read_resource =
        |name: &str| parse_pressure(&kernel.read(&Path::new("/proc/pressure").join(name)).ok()?);
    Pressure {
        cpu: read_resource("cpu"),
        memory: read_resource("memory"),
        io: read_resource("io"),
    }
}

fn parse_pressure(text: &str) -> Option<PressureShares> {
    let find_line = |kind: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))
    };
    let parse_field = |line: &str, name: &str| {
        line.split_ascii_whitespace().find_map(|word| {
            word.strip_prefix(name)?
                .strip_prefix('=')?
                .parse::<f64>()
                .ok()
        })
    };
    let some_line = find_line("some")?;
    Some(PressureShares {
        some_share: parse_field(some_line, "avg10")? / 100.0,
        full_share: find_line("full")
            .and_then(|full| parse_field(full, "avg10"))
            .map(|percent| percent / 100.0),
        some_total_ns: (parse_field(some_line, "total")? * 1000.0) as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are both lines read, is a kernel without the second one understood, and nonsense absent?
    #[test]
    fn pressure_lines_are_read() {
        let both = "some avg10=12.50 avg60=1.00 avg300=0.10 total=2000\nfull avg10=2.00 avg60=0.00 avg300=0.00 total=1\n";
        let expected = PressureShares {
            some_share: 0.125,
            full_share: Some(0.02),
            some_total_ns: 2_000_000,
        };
        assert_eq!(parse_pressure(both), Some(expected));
        assert_eq!(
            parse_pressure("some avg10=0.00 avg60=0 avg300=0 total=5\n")
                .unwrap()
                .full_share,
            None
        );
        assert_eq!(parse_pressure("what"), None);
    }
}
