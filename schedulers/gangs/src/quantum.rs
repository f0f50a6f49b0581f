//! Computes the length of a gang's turn. When a gang's turn begins, its footprint has been displaced: the first access
//! to each line costs a miss, and later accesses hit. Source: measurements on a modeled machine, which the formula
//! matches within 2.5 % at 1 to 100 ms (docs/sched-ext.md).

/// Measured properties of the gang that benefits from turns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GangFootprint {
    /// Number of lines of the last-level cache that one task reuses.
    pub lines: f64,
    /// Time of an access that hits the last-level cache, in ns.
    pub hit_ns: f64,
    /// Time of an access that misses the last-level cache, in ns.
    pub miss_ns: f64,
}

/// Mean time of an access in ns with turns of `turn_ns`, if the other gangs displace the whole footprint.
pub fn access_ns(footprint: &GangFootprint, turn_ns: f64) -> f64 {
    let fetch_ns = footprint.lines * footprint.miss_ns;
    if turn_ns > fetch_ns {
        turn_ns / (footprint.lines + (turn_ns - fetch_ns) / footprint.hit_ns)
    } else {
        footprint.miss_ns
    }
}

/// Length of a turn in ns with which an access takes `access_ns` on average: the inverse of [`access_ns`]. `None` if
/// no turn is long enough.
pub fn turn_for_access_ns(footprint: &GangFootprint, access_ns: f64) -> Option<f64> {
    let GangFootprint {
        lines,
        hit_ns,
        miss_ns,
    } = *footprint;
    (access_ns > hit_ns && access_ns < miss_ns)
        .then(|| access_ns * lines * (miss_ns - hit_ns) / (access_ns - hit_ns))
}

/// Requirements on the length of turns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TurnRequirements {
    /// Measured time of an access without gangs, in ns.
    pub without_ns: f64,
    /// Number of gangs that take turns on the cache.
    pub gangs: u32,
    /// Maximum allowed wait of a task, in ns.
    pub longest_wait_ns: f64,
}

/// Range of a turn's length in ns, unless another requirement overrides it.
pub const TURN_RANGE_NS: (f64, f64) = (20e6, 100e6);
/// Minimum fraction of an access's time that turns must save to pay off.
pub const MIN_GAIN: f64 = 0.1;
/// The preferred length of a turn brings the mean access time within this factor of a hit's time.
pub const TARGET_SLOWDOWN: f64 = 4.0 / 3.0;
/// Time in ns, in addition to two rotations, within which a task that has waited too long is served.
pub const WAIT_BEYOND_ROTATIONS_NS: f64 = cachemate_gangs::WAIT_BEYOND_ROTATIONS_MS as f64 * 1e6;

/// The reason why gangs are refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QuantumRefusal {
    /// An input is not a positive number, or a miss costs no more than a hit.
    NotMeasured,
    /// Accesses without gangs are already about as fast as gangs can make them.
    NothingToGain,
    /// The shortest turn that pays off (`pays_ns`) exceeds the longest turn with which tasks do not wait too long
    /// (`allowed_ns`).
    WaitTooLong { pays_ns: f64, allowed_ns: f64 },
}

/// The longest turn in ns with which no task waits longer than allowed, 0 if there is none; a wait lasts at most two
/// rotations and 100 ms.
pub fn longest_turn_ns(gangs: u32, longest_wait_ns: f64) -> f64 {
    (longest_wait_ns - WAIT_BEYOND_ROTATIONS_NS).max(0.0) / (2.0 * f64::from(gangs.max(1)))
}

/// The length of a turn in ns: the preferred one, limited to 20 to 100 ms, but never shorter than break-even nor
/// longer than allowed.
///
/// # Errors
/// Gangs are refused; the error is the reason.
pub fn turn_ns(
    footprint: &GangFootprint,
    requirements: &TurnRequirements,
) -> Result<f64, QuantumRefusal> {
    let figures = [
        footprint.lines,
        footprint.hit_ns,
        footprint.miss_ns,
        requirements.without_ns,
        requirements.longest_wait_ns,
    ];
    if figures
        .iter()
        .any(|figure| !figure.is_finite() || *figure <= 0.0)
        || footprint.miss_ns <= footprint.hit_ns
    {
        return Err(QuantumRefusal::NotMeasured);
    }
    let max_access_ns = requirements.without_ns.min(footprint.miss_ns) * (1.0 - MIN_GAIN);
    let pays_ns =
        turn_for_access_ns(footprint, max_access_ns).ok_or(QuantumRefusal::NothingToGain)?;
    let allowed_ns = longest_turn_ns(requirements.gangs, requirements.longest_wait_ns);
    if pays_ns > allowed_ns {
        return Err(QuantumRefusal::WaitTooLong {
            pays_ns,
            allowed_ns,
        });
    }
    let preferred_ns = turn_for_access_ns(footprint, footprint.hit_ns * TARGET_SLOWDOWN)
        .unwrap_or(TURN_RANGE_NS.1);
    Ok(preferred_ns
        .clamp(TURN_RANGE_NS.0, TURN_RANGE_NS.1)
        .max(pays_ns)
        .min(allowed_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chase(bytes: f64) -> GangFootprint {
        GangFootprint {
            lines: bytes / 64.0,
            hit_ns: 26.5,
            miss_ns: 127.0,
        }
    }
    const MIB: f64 = 1048576.0;

    /// Does the formula agree with the measurements on the modeled machine?
    #[test]
    fn the_formula_agrees_with_the_measurements() {
        let measured = [
            (3.0, 20.0, 35.3),
            (3.0, 50.0, 29.5),
            (3.0, 100.0, 28.0),
            (3.0, 5.0, 127.5),
            (1.0, 5.0, 40.0),
        ];
        let more_measured = [(1.0, 10.0, 32.0), (1.0, 20.0, 29.0), (1.0, 1.0, 129.0)];
        for (mib, turn_ms, found_ns) in measured.into_iter().chain(more_measured) {
            let modeled_ns = access_ns(&chase(mib * MIB), turn_ms * 1e6);
            assert!(
                (modeled_ns / found_ns - 1.0).abs() < 0.03,
                "{mib} MiB, {turn_ms} ms: {modeled_ns} against {found_ns}"
            );
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

    fn requirements_for(without_ns: f64, longest_wait_ms: f64) -> TurnRequirements {
        TurnRequirements {
            without_ns,
            gangs: 2,
            longest_wait_ns: longest_wait_ms * 1e6,
        }
    }

    /// Is a turn typical if possible, and never shorter than break-even?
    #[test]
    fn turns_are_typical_and_never_shorter_than_break_even() {
        let turn = turn_ns(&chase(3.0 * MIB), &requirements_for(127.0, 1000.0)).unwrap();
        assert!((20e6..=100e6).contains(&turn), "{turn}");
        assert_eq!(
            turn_ns(&chase(MIB / 16.0), &requirements_for(127.0, 1000.0)),
            Ok(20e6)
        );
        // 16 MiB: fetching alone takes 33 ms, and the preferred turn exceeds 100 ms.
        let long = turn_ns(&chase(16.0 * MIB), &requirements_for(35.0, 10_000.0)).unwrap();
        assert!(
            long > 100e6 && access_ns(&chase(16.0 * MIB), long) <= 31.5 + 1e-6,
            "{long}"
        );
    }

    /// Are gangs rejected if a turn that pays off makes tasks wait longer than allowed?
    #[test]
    fn gangs_are_rejected_if_turns_pay_off_too_late() {
        let refused = turn_ns(&chase(3.0 * MIB), &requirements_for(127.0, 120.0));
        let Err(QuantumRefusal::WaitTooLong {
            pays_ns,
            allowed_ns,
        }) = refused
        else {
            panic!("{refused:?}")
        };
        assert!(
            allowed_ns < pays_ns && pays_ns < 10e6,
            "{allowed_ns} {pays_ns}"
        );
        assert_eq!(allowed_ns, 5e6);
    }

    /// Are unmeasured figures and loads with nothing to gain distinguished?
    #[test]
    fn unmeasured_figures_and_no_gain_are_distinguished() {
        let broken = GangFootprint {
            miss_ns: f64::NAN,
            ..chase(MIB)
        };
        assert_eq!(
            turn_ns(&broken, &requirements_for(127.0, 1000.0)),
            Err(QuantumRefusal::NotMeasured)
        );
        let flat = GangFootprint {
            miss_ns: 26.5,
            ..chase(MIB)
        };
        assert_eq!(
            turn_ns(&flat, &requirements_for(127.0, 1000.0)),
            Err(QuantumRefusal::NotMeasured)
        );
        assert_eq!(
            turn_ns(&chase(MIB), &requirements_for(27.0, 1000.0)),
            Err(QuantumRefusal::NothingToGain)
        );
    }
}
