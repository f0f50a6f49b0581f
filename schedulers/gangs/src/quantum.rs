//! The required length of a turn. A gang's turn begins with its footprint displaced: each line is fetched once at the
//! cost of a miss, then hits. Source: measured on a modeled machine within 2.5 % at 1 to 100 ms (docs/sched-ext.md).

/// Measured properties of the gang that profits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GangFootprint {
    /// Lines of the last-level cache that one task reuses.
    pub lines: f64,
    /// Time of an access that hits the last-level cache, ns.
    pub hit_ns: f64,
    /// Time of an access that misses it, ns.
    pub miss_ns: f64,
}

/// Mean time of an access in ns if turns last `turn_ns` and the other turns displace the whole footprint.
pub fn access_ns(footprint: &GangFootprint, turn_ns: f64) -> f64 {
    let fetch_ns = footprint.lines * footprint.miss_ns;
    if turn_ns > fetch_ns {
        turn_ns / (footprint.lines + (turn_ns - fetch_ns) / footprint.hit_ns)
    } else {
        footprint.miss_ns
    }
}

/// The turn in ns at which an access takes `access_ns`: the inverse of [`access_ns`]. `None` if no turn achieves this.
pub fn turn_for_access_ns(footprint: &GangFootprint, access_ns: f64) -> Option<f64> {
    let GangFootprint { lines, hit_ns, miss_ns } = *footprint;
    (access_ns > hit_ns && access_ns < miss_ns).then(|| access_ns * lines * (miss_ns - hit_ns) / (access_ns - hit_ns))
}

/// Requirements of a turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TurnRequirements {
    /// Measured time of an access without gangs, ns.
    pub without_ns: f64,
    /// Number of gangs that take turns on the cache.
    pub gangs: u32,
    /// Maximum allowed wait of a task, ns.
    pub longest_wait_ns: f64,
}

/// Range of a turn in ns, unless another requirement needs more or less.
pub const TYPICAL_NS: (f64, f64) = (20e6, 100e6);
/// Smallest fraction of an access's time that a turn must save to pay off.
pub const LEAST_GAIN: f64 = 0.1;
/// The preferred turn brings accesses within this factor of a hit.
pub const WANTED_FACTOR: f64 = 4.0 / 3.0;
/// Maximum wait of a task beyond two rotations, ns (for the service of tasks that waited too long).
pub const WAIT_BEYOND_ROTATIONS_NS: f64 = 100e6;

/// The reason for which there are no gangs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QuantumRefusal {
    /// A figure is not a positive number, or a miss costs no more than a hit.
    NotMeasured,
    /// Without gangs, accesses are about as fast as gangs can make them.
    NothingToGain,
    /// Turns long enough to pay off make tasks wait too long: that turn and the longest one allowed, ns.
    WaitTooLong { pays_ns: f64, allowed_ns: f64 },
}

/// The longest turn with which no task waits longer than allowed: two rotations and 100 ms.
pub fn longest_turn_ns(gangs: u32, longest_wait_ns: f64) -> f64 {
    (longest_wait_ns - WAIT_BEYOND_ROTATIONS_NS) / (2.0 * f64::from(gangs.max(1)))
}

/// The length of a turn in ns: the preferred one, between 20 and 100 ms, no shorter than break-even, no longer than
/// allowed.
///
/// # Errors
/// The reason for which gangs are rejected.
pub fn turn_ns(footprint: &GangFootprint, requirements: &TurnRequirements) -> Result<f64, QuantumRefusal> {
    let figures =
        [footprint.lines, footprint.hit_ns, footprint.miss_ns, requirements.without_ns, requirements.longest_wait_ns];
    if figures.iter().any(|figure| !figure.is_finite() || *figure <= 0.0) || footprint.miss_ns <= footprint.hit_ns {
        return Err(QuantumRefusal::NotMeasured);
    }
    let paying_ns = (requirements.without_ns * (1.0 - LEAST_GAIN)).min(footprint.miss_ns * (1.0 - LEAST_GAIN));
    let pays_ns = turn_for_access_ns(footprint, paying_ns).ok_or(QuantumRefusal::NothingToGain)?;
    let allowed_ns = longest_turn_ns(requirements.gangs, requirements.longest_wait_ns);
    if pays_ns > allowed_ns {
        return Err(QuantumRefusal::WaitTooLong { pays_ns, allowed_ns });
    }
    let wanted_ns = turn_for_access_ns(footprint, footprint.hit_ns * WANTED_FACTOR).unwrap_or(TYPICAL_NS.1);
    Ok(wanted_ns.clamp(TYPICAL_NS.0, TYPICAL_NS.1).max(pays_ns).min(allowed_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chase(bytes: f64) -> GangFootprint {
        GangFootprint { lines: bytes / 64.0, hit_ns: 26.5, miss_ns: 127.0 }
    }
    const MIB: f64 = 1048576.0;

    /// Does the formula agree with the measurements on the modeled machine?
    #[test]
    fn the_law_fits_the_measured_points() {
        let measured = [(3.0, 20.0, 35.3), (3.0, 50.0, 29.5), (3.0, 100.0, 28.0), (3.0, 5.0, 127.5), (1.0, 5.0, 40.0)];
        let more = [(1.0, 10.0, 32.0), (1.0, 20.0, 29.0), (1.0, 1.0, 129.0)];
        for (mib, turn_ms, found_ns) in measured.into_iter().chain(more) {
            let law_ns = access_ns(&chase(mib * MIB), turn_ms * 1e6);
            assert!((law_ns / found_ns - 1.0).abs() < 0.03, "{mib} MiB, {turn_ms} ms: {law_ns} against {found_ns}");
        }
    }

    /// Is the inverse correct, for all lengths beyond the fetch?
    #[test]
    fn the_turn_for_an_access_time_gives_that_time() {
        for mib in [0.25, 1.0, 3.0, 12.0] {
            for wanted_ns in [27.0, 30.0, 40.0, 66.0, 120.0] {
                let turn_ns = turn_for_access_ns(&chase(mib * MIB), wanted_ns).unwrap();
                assert!((access_ns(&chase(mib * MIB), turn_ns) / wanted_ns - 1.0).abs() < 1e-9);
            }
        }
        assert_eq!(turn_for_access_ns(&chase(MIB), 26.5), None);
        assert_eq!(turn_for_access_ns(&chase(MIB), 127.0), None);
    }

    fn wish(without_ns: f64, longest_wait_ms: f64) -> TurnRequirements {
        TurnRequirements { without_ns, gangs: 2, longest_wait_ns: longest_wait_ms * 1e6 }
    }

    /// Is a turn typical if possible, and never shorter than break-even?
    #[test]
    fn turns_are_typical_and_always_pay() {
        let turn = turn_ns(&chase(3.0 * MIB), &wish(127.0, 1000.0)).unwrap();
        assert!((20e6..=100e6).contains(&turn), "{turn}");
        assert_eq!(turn_ns(&chase(MIB / 16.0), &wish(127.0, 1000.0)), Ok(20e6));
        // 16 MiB: fetching alone takes 33 ms, and the preferred turn exceeds 100 ms.
        let long = turn_ns(&chase(16.0 * MIB), &wish(35.0, 10_000.0)).unwrap();
        assert!(long > 100e6 && access_ns(&chase(16.0 * MIB), long) <= 31.5 + 1e-6, "{long}");
    }

    /// Are gangs rejected if a turn that pays off makes tasks wait longer than allowed?
    #[test]
    fn a_turn_that_pays_too_late_is_refused() {
        let refused = turn_ns(&chase(3.0 * MIB), &wish(127.0, 120.0));
        let Err(QuantumRefusal::WaitTooLong { pays_ns, allowed_ns }) = refused else { panic!("{refused:?}") };
        assert!(allowed_ns < pays_ns && pays_ns < 10e6, "{allowed_ns} {pays_ns}");
        assert_eq!(allowed_ns, 5e6);
    }

    /// Are unmeasured figures and loads with nothing to gain distinguished?
    #[test]
    fn absent_figures_and_absent_gain_are_refused() {
        let broken = GangFootprint { miss_ns: f64::NAN, ..chase(MIB) };
        assert_eq!(turn_ns(&broken, &wish(127.0, 1000.0)), Err(QuantumRefusal::NotMeasured));
        let flat = GangFootprint { miss_ns: 26.5, ..chase(MIB) };
        assert_eq!(turn_ns(&flat, &wish(127.0, 1000.0)), Err(QuantumRefusal::NotMeasured));
        assert_eq!(turn_ns(&chase(MIB), &wish(27.0, 1000.0)), Err(QuantumRefusal::NothingToGain));
    }
}
