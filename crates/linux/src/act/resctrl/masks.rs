//! Way masks as resctrl writes them.
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

/// Masks of one group by resource (`L3`, or `L3CODE` and `L3DATA`) and domain (the kernel's cache id). Lines of other
/// resources (memory bandwidth) are left out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schemata(pub BTreeMap<String, BTreeMap<u32, IndexSet>>);

impl Schemata {
    /// Parses the text of a schemata file.
    ///
    /// # Errors
    /// A line of a cache resource does not have the form `L3:0=ff;1=ff`; the error contains the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut masks = BTreeMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let problem =
                || format!("schemata: found '{line}', expected a line such as L3:0=ff;1=ff");
            let (resource, domains) = line.split_once(':').ok_or_else(problem)?;
            if resource_level(resource).is_none() {
                continue;
            }
            let parse_domain = |domain_text: &str| {
                let (id, mask) = domain_text.split_once('=')?;
                Some((id.trim().parse().ok()?, parse_mask(mask)?))
            };
            let domains: Option<BTreeMap<u32, IndexSet>> =
                domains.split(';').map(parse_domain).collect();
            masks.insert(resource.to_string(), domains.ok_or_else(problem)?);
        }
        Ok(Schemata(masks))
    }

    /// The mask of a cache; if it is divided separately for code and data, the ways that either may fill.
    pub fn mask_of(&self, level: CacheLevel, domain: u32) -> Option<IndexSet> {
        let level_domains = self
            .0
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
            .0
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
        for (index, (resource, domains)) in self.0.iter().enumerate() {
            let domains: Vec<String> = domains
                .iter()
                .map(|(id, mask)| format!("{id}={}", format_mask(mask)))
                .collect();
            let newline = if index > 0 { "\n" } else { "" };
            write!(out, "{newline}{resource}:{}", domains.join(";"))?;
        }
        Ok(())
    }
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

    /// Is a schemata file read and written in the kernel's format: with padding, separate code and data, and without
    /// the lines of other resources?
    #[test]
    fn schemata_are_read_as_the_kernel_writes_them() {
        let text = "    MB:0=  100;1=  100\nL3CODE:0=000ff;1=fffff\nL3DATA:0=00f00;1=fffff\n    L2:0=ff;3=0f\n";
        let mut schemata = Schemata::parse(text).unwrap();
        assert_eq!(
            schemata.to_string(),
            "L2:0=ff;3=f\nL3CODE:0=ff;1=fffff\nL3DATA:0=f00;1=fffff"
        );
        assert_eq!(
            schemata.mask_of(CacheLevel::L3, 0).unwrap().to_string(),
            "0-11"
        );
        assert_eq!(schemata.mask_of(CacheLevel::L2, 1), None);
        assert!(schemata.set(CacheLevel::L3, 1, &"0-1".parse().unwrap()));
        assert_eq!(
            schemata.to_string(),
            "L2:0=ff;3=f\nL3CODE:0=ff;1=3\nL3DATA:0=f00;1=3"
        );
        assert!(!schemata.set(CacheLevel::L4, 0, &"0".parse().unwrap()));
        let wrong = Schemata::parse("L3:0=xyz").unwrap_err();
        assert_eq!(
            wrong,
            "schemata: found 'L3:0=xyz', expected a line such as L3:0=ff;1=ff"
        );
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
