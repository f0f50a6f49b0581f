//! Way masks and bandwidth limits as resctrl writes them.
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, "schemata files".

use std::collections::BTreeMap;
use std::fmt;

use cachemate_core::{CacheLevel, IndexSet};

/// Maximum number of bits in a mask, which is the width of the hardware's registers.
const MAX_MASK_BITS: u32 = 64;

/// A mask from the kernel's hexadecimal form.
pub fn parse_mask(text: &str) -> Option<IndexSet> {
    let word = u64::from_str_radix(text.trim(), 16).ok()?;
    Some(
        (0..MAX_MASK_BITS)
            .filter(|bit| word >> bit & 1 == 1)
            .collect(),
    )
}

/// A mask in the kernel's hexadecimal form, without leading zeros.
pub fn format_mask(mask: &IndexSet) -> String {
    let word = mask
        .iter()
        .filter(|&bit| bit < MAX_MASK_BITS)
        .fold(0u64, |word, bit| word | 1 << bit);
    format!("{word:x}")
}

/// The settings of one group, by resource and domain (the kernel's cache id). Lines of resources that are neither a
/// cache nor a bandwidth are left out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schemata {
    /// Ways that the group may fill, by resource: `L3`, or `L3CODE` and `L3DATA`.
    pub masks: BTreeMap<String, BTreeMap<u32, IndexSet>>,
    /// Limits of memory bandwidth, by resource: `MB`, or `SMBA` for slow memory (CXL), in the unit of the resource; or
    /// what is wrong with the line of a resource, which must not keep the ways from being used.
    pub levels: BTreeMap<String, Result<BTreeMap<u32, u32>, String>>,
}

/// The resource that limits the bandwidth of ordinary memory.
pub const MEMORY_BANDWIDTH: &str = "MB";
/// The resource that limits the bandwidth of slow memory (CXL), on AMD.
pub const SLOW_MEMORY_BANDWIDTH: &str = "SMBA";

impl Schemata {
    /// Parses the text of a schemata file.
    ///
    /// # Errors
    /// A line of a cache does not have the form `L3:0=ff;1=ff`; the error contains the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut schemata = Schemata::default();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let problem =
                |example| format!("schemata: found '{line}', expected a line such as {example}");
            let (resource, domains) = line
                .split_once(':')
                .ok_or_else(|| problem("L3:0=ff;1=ff"))?;
            if resource_level(resource).is_some() {
                let masks = parse_domain_list(domains, parse_mask)
                    .ok_or_else(|| problem("L3:0=ff;1=ff"))?;
                schemata.masks.insert(resource.to_string(), masks);
            } else if matches!(resource, MEMORY_BANDWIDTH | SLOW_MEMORY_BANDWIDTH) {
                let parse_level = |level: &str| level.trim().parse().ok();
                let levels =
                    parse_domain_list(domains, parse_level).ok_or_else(|| problem("MB:0=100;1=50"));
                schemata.levels.insert(resource.to_string(), levels);
            }
        }
        Ok(schemata)
    }

    /// The limit of memory bandwidth behind a cache, in the unit of this machine.
    pub fn bandwidth_level(&self, domain: u32) -> Option<u32> {
        let levels = self.levels.get(MEMORY_BANDWIDTH)?.as_ref().ok()?;
        levels.get(&domain).copied()
    }

    /// Sets the limit of memory bandwidth behind a cache. Returns false if no resource limits it.
    pub fn set_bandwidth_level(&mut self, domain: u32, level: u32) -> bool {
        if let Some(Ok(levels)) = self.levels.get_mut(MEMORY_BANDWIDTH)
            && let Some(entry) = levels.get_mut(&domain)
        {
            *entry = level;
            return true;
        }
        false
    }

    /// The mask of a cache; if it is divided separately for code and data, the ways that either may fill.
    pub fn mask_of(&self, level: CacheLevel, domain: u32) -> Option<IndexSet> {
        let level_domains = self
            .masks
            .iter()
            .filter(|(resource, _)| resource_level(resource) == Some(level));
        level_domains
            .filter_map(|(_, domains)| domains.get(&domain))
            .cloned()
            .reduce(|a, b| a.union(&b))
    }

    /// Sets a cache's mask in all resources that partition it. Returns false if no resource does.
    pub fn set(&mut self, level: CacheLevel, domain: u32, mask: &IndexSet) -> bool {
        let mut is_set = false;
        for (_, domains) in self
            .masks
            .iter_mut()
            .filter(|(resource, _)| resource_level(resource) == Some(level))
        {
            if let Some(entry) = domains.get_mut(&domain) {
                entry.clone_from(mask);
                is_set = true;
            }
        }
        is_set
    }
}

impl fmt::Display for Schemata {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let masks = self
            .masks
            .iter()
            .map(|(resource, domains)| format_line(resource, domains, format_mask));
        let levels = self
            .levels
            .iter()
            .filter_map(|(resource, levels)| Some((resource, levels.as_ref().ok()?)))
            .map(|(resource, levels)| format_line(resource, levels, u32::to_string));
        let lines: Vec<String> = masks.chain(levels).collect();
        out.write_str(&lines.join("\n"))
    }
}

/// Values by domain, such as `0=ff;1=f`.
pub fn parse_domain_list<T>(
    text: &str,
    parse_value: impl Fn(&str) -> Option<T>,
) -> Option<BTreeMap<u32, T>> {
    let parse_domain = |domain_text: &str| {
        let (id, value) = domain_text.split_once('=')?;
        Some((id.trim().parse().ok()?, parse_value(value)?))
    };
    text.trim().split(';').map(parse_domain).collect()
}

fn format_line<T>(
    resource: &str,
    domains: &BTreeMap<u32, T>,
    format_value: impl Fn(&T) -> String,
) -> String {
    let domains: Vec<String> = domains
        .iter()
        .map(|(id, value)| format!("{id}={}", format_value(value)))
        .collect();
    format!("{resource}:{}", domains.join(";"))
}

/// The level of the cache that this resource partitions, if it is a cache.
pub fn resource_level(resource: &str) -> Option<CacheLevel> {
    match resource {
        "L2" | "L2CODE" | "L2DATA" => Some(CacheLevel::L2),
        "L3" | "L3CODE" | "L3DATA" => Some(CacheLevel::L3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Is a schemata file read and written in the kernel's format: with padding, separate code and data, limits of
    /// bandwidth, and without the lines of unknown resources?
    #[test]
    fn schemata_are_read_as_the_kernel_writes_them() {
        let text = "  SMBA:0=2048\n    MB:0=  100;1=   50\nL3CODE:0=000ff;1=fffff\nL3DATA:0=00f00;1=fffff\n    L2:0=ff;3=0f\nNEW:x\n";
        let mut schemata = Schemata::parse(text).unwrap();
        let levels = "MB:0=100;1=50\nSMBA:0=2048";
        assert_eq!(
            schemata.to_string(),
            format!("L2:0=ff;3=f\nL3CODE:0=ff;1=fffff\nL3DATA:0=f00;1=fffff\n{levels}")
        );
        assert_eq!(
            schemata.mask_of(CacheLevel::L3, 0).unwrap().to_string(),
            "0-11"
        );
        assert_eq!(schemata.mask_of(CacheLevel::L2, 1), None);
        assert!(schemata.set(CacheLevel::L3, 1, &"0-1".parse().unwrap()));
        assert_eq!(
            (schemata.bandwidth_level(1), schemata.bandwidth_level(2)),
            (Some(50), None)
        );
        assert!(schemata.set_bandwidth_level(0, 20) && !schemata.set_bandwidth_level(2, 20));
        assert_eq!(
            schemata.to_string(),
            "L2:0=ff;3=f\nL3CODE:0=ff;1=3\nL3DATA:0=f00;1=3\nMB:0=20;1=50\nSMBA:0=2048"
        );
        assert!(!schemata.set(CacheLevel::L4, 0, &"0".parse().unwrap()));
        assert_eq!(
            Schemata::parse("L3:0=xyz").unwrap_err(),
            "schemata: found 'L3:0=xyz', expected a line such as L3:0=ff;1=ff"
        );
    }

    /// Does a bad line of bandwidth cost the limits of bandwidth only, and is it never written back?
    #[test]
    fn a_bad_line_of_bandwidth_leaves_the_ways() {
        for wrong in ["MB:0=max", "MB:0=-1", "MB:0=100;1="] {
            let mut schemata = Schemata::parse(&format!("L3:0=ff\n{wrong}")).unwrap();
            assert_eq!(schemata.to_string(), "L3:0=ff");
            assert_eq!(schemata.bandwidth_level(0), None);
            assert!(!schemata.set_bandwidth_level(0, 50));
            assert_eq!(
                schemata.levels[MEMORY_BANDWIDTH],
                Err(format!(
                    "schemata: found '{wrong}', expected a line such as MB:0=100;1=50"
                ))
            );
        }
    }

    proptest! {
        /// Is a mask parsed from its text unchanged?
        #[test]
        fn masks_are_parsed_from_their_text_unchanged(word: u64) {
            let mask: IndexSet = (0..64).filter(|bit| word >> bit & 1 == 1).collect();
            prop_assert_eq!(parse_mask(&format_mask(&mask)), Some(mask));
        }
    }
}
