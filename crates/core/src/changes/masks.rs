//! The nearest way mask that the hardware accepts.
//!
//! Problem: a plan may request ways that another tool uses exclusively, fewer ways than the hardware's minimum, or a
//! non-contiguous mask on hardware that requires contiguous ones. Method: [`nearest_mask`] removes unavailable ways,
//! keeps the longest run if masks must be contiguous, and widens the mask to the minimum within the free ways.
//! Properties: a valid mask is not changed; every change is reported; no way of another tool is used.
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, `min_cbm_bits` and `sparse_masks`.

use crate::IndexSet;

/// The masks that the hardware accepts for one cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MaskConstraints {
    /// Number of ways of the cache.
    pub ways: u32,
    /// Minimum number of ways in a mask.
    pub min_ways: u32,
    /// Must masks be contiguous?
    pub must_be_contiguous: bool,
    /// Ways that other tools use exclusively (exclusive or pseudo-locked groups).
    pub reserved_ways: IndexSet,
}

/// The error if no mask of these ways is possible.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("ways {requested}: {supported}")]
pub struct UnsupportedMask {
    /// The requested ways.
    pub requested: IndexSet,
    /// A description of the masks that the hardware accepts.
    pub supported: String,
}

/// The nearest valid mask, and a description of what had to be changed.
///
/// # Errors
/// No valid mask exists.
pub fn nearest_mask(
    requested: &IndexSet,
    limits: &MaskConstraints,
) -> Result<(IndexSet, Option<String>), UnsupportedMask> {
    let is_free = |way: u32| way < limits.ways && !limits.reserved_ways.contains(way);
    let available_ways: IndexSet = requested.iter().filter(|&way| is_free(way)).collect();
    let mut mask = if limits.must_be_contiguous {
        longest_run(&available_ways)
    } else {
        available_ways.clone()
    };

    if !mask.is_empty() {
        while mask.count() < limits.min_ways {
            let is_adjacent =
                |way: u32| mask.contains(way + 1) || (way > 0 && mask.contains(way - 1));
            let candidates = (0..limits.ways).filter(|&way| is_free(way) && !mask.contains(way));
            let nearest_way = candidates
                .clone()
                .rev()
                .find(|&way| is_adjacent(way) && way > mask.first().unwrap_or(0));
            let nearest_way =
                nearest_way.or_else(|| candidates.clone().find(|&way| is_adjacent(way)));
            let nearest_way = nearest_way.or_else(|| {
                candidates
                    .clone()
                    .next()
                    .filter(|_| !limits.must_be_contiguous)
            });
            let Some(way) = nearest_way else { break };
            mask.insert(way);
        }
    }

    if mask.count() < limits.min_ways.max(1) {
        return Err(UnsupportedMask {
            requested: requested.clone(),
            supported: limits.describe(),
        });
    }
    let has_changed = mask != *requested;
    Ok((
        mask.clone(),
        has_changed.then(|| format!("ways {requested} became {mask}: {}", limits.describe())),
    ))
}

impl MaskConstraints {
    fn describe(&self) -> String {
        let contiguity_text = if self.must_be_contiguous {
            ", in one piece"
        } else {
            ""
        };
        let reserved_text = if self.reserved_ways.is_empty() {
            String::new()
        } else {
            format!(", {} held by others", self.reserved_ways)
        };
        format!(
            "the hardware takes {} or more of ways 0-{}{contiguity_text}{reserved_text}",
            self.min_ways,
            self.ways.saturating_sub(1)
        )
    }
}

/// The first of equally long ones.
fn longest_run(mask: &IndexSet) -> IndexSet {
    let mut longest: (u32, u32) = (0, 0);
    let mut run: (u32, u32) = (0, 0);
    for way in mask.iter() {
        run = if run.1 > 0 && run.0 + run.1 == way {
            (run.0, run.1 + 1)
        } else {
            (way, 1)
        };
        if run.1 > longest.1 {
            longest = run;
        }
    }
    (longest.0..longest.0 + longest.1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample_constraints(
        ways: u32,
        at_least: u32,
        contiguous: bool,
        reserved: &str,
    ) -> MaskConstraints {
        MaskConstraints {
            ways,
            min_ways: at_least,
            must_be_contiguous: contiguous,
            reserved_ways: reserved.parse().unwrap(),
        }
    }
    fn fit_mask(requested: &str, limits: &MaskConstraints) -> String {
        match nearest_mask(&requested.parse().unwrap(), limits) {
            Ok((given, None)) => given.to_string(),
            Ok((given, Some(message))) => format!("{given}! {message}"),
            Err(none) => format!("refused! {none}"),
        }
    }

    /// Are unavailable ways removed, a gap closed, a narrow mask widened, and each change reported?
    #[test]
    fn a_mask_becomes_the_nearest_available_one() {
        let intel = sample_constraints(11, 2, true, "");
        assert_eq!(fit_mask("3-5", &intel), "3-5");
        let says = "the hardware takes 2 or more of ways 0-10, in one piece";
        assert_eq!(
            fit_mask("3", &intel),
            format!("3-4! ways 3 became 3-4: {says}")
        );
        assert_eq!(
            fit_mask("10", &intel),
            format!("9-10! ways 10 became 9-10: {says}")
        );
        assert_eq!(
            fit_mask("0-1,4-6", &intel),
            format!("4-6! ways 0-1,4-6 became 4-6: {says}")
        );
        assert_eq!(
            fit_mask("11-12", &intel),
            format!("refused! ways 11-12: {says}")
        );
        let amd = sample_constraints(16, 1, false, "0-3");
        assert_eq!(fit_mask("4,9", &amd), "4,9");
        let says = "the hardware takes 1 or more of ways 0-15, 0-3 held by others";
        assert_eq!(
            fit_mask("3-5", &amd),
            format!("4-5! ways 3-5 became 4-5: {says}")
        );
        assert_eq!(fit_mask("0-3", &amd), format!("refused! ways 0-3: {says}"));
    }

    proptest! {
        /// Does every request give a valid mask of free ways only, and does a valid request stay unchanged?
        #[test]
        fn every_request_gives_a_valid_mask_of_free_ways(
            requested_bits: u32, reserved_bits: u32, ways in 1u32..21, at_least in 1u32..5, contiguous: bool,
        ) {
            let set = |word: u32| (0..32).filter(|bit| word >> bit & 1 == 1).collect::<IndexSet>();
            let reserved: IndexSet = set(reserved_bits).iter().filter(|&way| way < ways).collect();
            let limits = MaskConstraints { ways, min_ways: at_least, must_be_contiguous: contiguous, reserved_ways: reserved };
            let requested = set(requested_bits);
            let is_contiguous = |mask: &IndexSet| longest_run(mask) == *mask;
            let good = |mask: &IndexSet| {
                let is_available = mask.iter().all(|way| way < ways && !limits.reserved_ways.contains(way));
                is_available && mask.count() >= at_least && (!contiguous || is_contiguous(mask))
            };

            match nearest_mask(&requested, &limits) {
                Ok((given, said)) => {
                    prop_assert!(good(&given), "{} of {}", given, requested);
                    prop_assert_eq!(said.is_none(), given == requested);
                    if good(&requested) {
                        prop_assert_eq!(given, requested);
                    }
                }
                Err(_) => prop_assert!(!good(&requested)),
            }
        }
    }
}
