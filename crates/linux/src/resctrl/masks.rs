//! Way masks as resctrl writes them, and the nearest mask that the hardware takes.
//!
//! Problem: a plan may ask for ways that somebody else holds for himself, for fewer than the hardware grants, or in
//! several pieces where it takes one. Method: [`fit`] leaves out what cannot be had, keeps the longest run where masks
//! must be in one piece, and widens to the least width, always within the ways that are free. Properties: a mask that
//! the hardware takes is not changed; what is changed is told; nothing is given that is taken.
//!
//! Kernel documentation: Documentation/filesystems/resctrl.rst, "schemata files" and `min_cbm_bits`, `sparse_masks`.

use std::collections::BTreeMap;
use std::fmt;

use cachemate_core::{IndexSet, Level};

/// Bits of a mask at most: the hardware's registers are this wide.
const BITS: u32 = 64;

/// A mask from the kernel's hexadecimal form.
pub fn parse_mask(text: &str) -> Option<IndexSet> {
    let word = u64::from_str_radix(text.trim(), 16).ok()?;
    Some((0..BITS).filter(|bit| word >> bit & 1 == 1).collect())
}

/// The kernel's form, without leading zeros.
pub fn mask_text(mask: &IndexSet) -> String {
    let word = mask.iter().filter(|&bit| bit < BITS).fold(0u64, |word, bit| word | 1 << bit);
    format!("{word:x}")
}

/// Masks of one group by resource (`L3`, or `L3CODE` and `L3DATA`) and domain (the kernel's cache id). Lines of other
/// resources (memory bandwidth) are not ours and left out.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schemata(pub BTreeMap<String, BTreeMap<u32, IndexSet>>);

impl Schemata {
    /// # Errors
    /// A line of a cache resource that is not `L3:0=ff;1=ff`, with the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let bad = || format!("schemata: found '{line}', expected a line such as L3:0=ff;1=ff");
            let (resource, domains) = line.split_once(':').ok_or_else(bad)?;
            if level_of(resource).is_none() {
                continue;
            }
            let domain = |part: &str| {
                let (id, mask) = part.split_once('=')?;
                Some((id.trim().parse().ok()?, parse_mask(mask)?))
            };
            let domains: Option<BTreeMap<u32, IndexSet>> = domains.split(';').map(domain).collect();
            all.insert(resource.to_string(), domains.ok_or_else(bad)?);
        }
        Ok(Schemata(all))
    }

    /// The mask of a cache; of one that is divided for code and data apart, the ways that either may fill.
    pub fn mask(&self, level: Level, domain: u32) -> Option<IndexSet> {
        let of_level = self.0.iter().filter(|(resource, _)| level_of(resource) == Some(level));
        of_level.filter_map(|(_, domains)| domains.get(&domain)).cloned().reduce(|a, b| a.union(&b))
    }

    /// Gives a cache's mask to all resources that divide it. False = nothing divides it.
    pub fn set(&mut self, level: Level, domain: u32, mask: &IndexSet) -> bool {
        let mut found = false;
        for (_, domains) in self.0.iter_mut().filter(|(resource, _)| level_of(resource) == Some(level)) {
            if let Some(entry) = domains.get_mut(&domain) {
                entry.clone_from(mask);
                found = true;
            }
        }
        found
    }
}

impl fmt::Display for Schemata {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (resource, domains)) in self.0.iter().enumerate() {
            let domains: Vec<String> = domains.iter().map(|(id, mask)| format!("{id}={}", mask_text(mask))).collect();
            let newline = if at > 0 { "\n" } else { "" };
            write!(out, "{newline}{resource}:{}", domains.join(";"))?;
        }
        Ok(())
    }
}

/// The level that a resource's name stands for, if it is a cache.
pub fn level_of(resource: &str) -> Option<Level> {
    match resource {
        "L2" | "L2CODE" | "L2DATA" => Some(Level::L2),
        "L3" | "L3CODE" | "L3DATA" => Some(Level::L3),
        _ => None,
    }
}

/// What the hardware takes as a mask of one cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    pub ways: u32,
    pub at_least: u32,
    /// Masks must be in one piece.
    pub contiguous: bool,
    /// Held by others for themselves alone (exclusive or pseudo-locked groups).
    pub taken: IndexSet,
}

/// The nearest mask that can be had, and what had to be changed, in words.
///
/// # Errors
/// No mask at all can be had; in words.
pub fn fit(asked: &IndexSet, limits: &Limits) -> Result<(IndexSet, Option<String>), String> {
    let free = |way: u32| way < limits.ways && !limits.taken.contains(way);
    let had: IndexSet = asked.iter().filter(|&way| free(way)).collect();
    let mut given = if limits.contiguous { longest_run(&had) } else { had.clone() };
    if !given.is_empty() {
        while given.count() < limits.at_least {
            let beside = |way: u32| given.contains(way + 1) || (way > 0 && given.contains(way - 1));
            let near = (0..limits.ways).filter(|&way| free(way) && !given.contains(way));
            let next = near.clone().rev().find(|&way| beside(way) && way > given.first().unwrap_or(0));
            let next = next.or_else(|| near.clone().find(|&way| beside(way)));
            let next = next.or_else(|| near.clone().next().filter(|_| !limits.contiguous));
            let Some(way) = next else { break };
            given.insert(way);
        }
    }
    if given.count() < limits.at_least.max(1) {
        return Err(format!("ways {asked}: {}", limits.in_words()));
    }
    let changed = given != *asked;
    Ok((given.clone(), changed.then(|| format!("ways {asked} became {given}: {}", limits.in_words()))))
}

impl Limits {
    fn in_words(&self) -> String {
        let piece = if self.contiguous { ", in one piece" } else { "" };
        let taken = if self.taken.is_empty() { String::new() } else { format!(", {} held by others", self.taken) };
        format!("the hardware takes {} or more of ways 0-{}{piece}{taken}", self.at_least, self.ways.saturating_sub(1))
    }
}

/// The first of the longest runs without a gap.
fn longest_run(mask: &IndexSet) -> IndexSet {
    let mut best: (u32, u32) = (0, 0);
    let mut run: (u32, u32) = (0, 0);
    for way in mask.iter() {
        run = if run.1 > 0 && run.0 + run.1 == way { (run.0, run.1 + 1) } else { (way, 1) };
        if run.1 > best.1 {
            best = run;
        }
    }
    (best.0..best.0 + best.1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits(ways: u32, at_least: u32, contiguous: bool, taken: &str) -> Limits {
        Limits { ways, at_least, contiguous, taken: taken.parse().unwrap() }
    }
    fn fitted(asked: &str, limits: &Limits) -> String {
        match fit(&asked.parse().unwrap(), limits) {
            Ok((given, None)) => given.to_string(),
            Ok((given, Some(said))) => format!("{given}! {said}"),
            Err(said) => format!("refused! {said}"),
        }
    }

    /// Is what cannot be had left out, a gap closed, a narrow mask widened, and each told?
    #[test]
    fn a_mask_becomes_the_nearest_that_can_be_had() {
        let intel = limits(11, 2, true, "");
        assert_eq!(fitted("3-5", &intel), "3-5");
        let says = "the hardware takes 2 or more of ways 0-10, in one piece";
        assert_eq!(fitted("3", &intel), format!("3-4! ways 3 became 3-4: {says}"));
        assert_eq!(fitted("10", &intel), format!("9-10! ways 10 became 9-10: {says}"));
        assert_eq!(fitted("0-1,4-6", &intel), format!("4-6! ways 0-1,4-6 became 4-6: {says}"));
        assert_eq!(fitted("11-12", &intel), format!("refused! ways 11-12: {says}"));
        let amd = limits(16, 1, false, "0-3");
        assert_eq!(fitted("4,9", &amd), "4,9");
        let says = "the hardware takes 1 or more of ways 0-15, 0-3 held by others";
        assert_eq!(fitted("3-5", &amd), format!("4-5! ways 3-5 became 4-5: {says}"));
        assert_eq!(fitted("0-3", &amd), format!("refused! ways 0-3: {says}"));
    }

    /// Is a schemata file read and written as the kernel has it: padding, code and data apart, others' lines left out?
    #[test]
    fn schemata_are_read_as_the_kernel_writes_them() {
        let text = "    MB:0=  100;1=  100\nL3CODE:0=000ff;1=fffff\nL3DATA:0=00f00;1=fffff\n    L2:0=ff;3=0f\n";
        let mut schemata = Schemata::parse(text).unwrap();
        assert_eq!(schemata.to_string(), "L2:0=ff;3=f\nL3CODE:0=ff;1=fffff\nL3DATA:0=f00;1=fffff");
        assert_eq!(schemata.mask(Level::L3, 0).unwrap().to_string(), "0-11");
        assert_eq!(schemata.mask(Level::L2, 1), None);
        assert!(schemata.set(Level::L3, 1, &"0-1".parse().unwrap()));
        assert_eq!(schemata.to_string(), "L2:0=ff;3=f\nL3CODE:0=ff;1=3\nL3DATA:0=f00;1=3");
        assert!(!schemata.set(Level::L4, 0, &"0".parse().unwrap()));
        let wrong = Schemata::parse("L3:0=xyz").unwrap_err();
        assert_eq!(wrong, "schemata: found 'L3:0=xyz', expected a line such as L3:0=ff;1=ff");
    }

    proptest! {
        /// Whatever is asked: is the answer one that the hardware takes, of free ways only, and a good one unchanged?
        #[test]
        fn what_is_given_can_be_had(
            asked: u32, taken: u32, ways in 1u32..21, at_least in 1u32..5, contiguous: bool,
        ) {
            let set = |word: u32| (0..32).filter(|bit| word >> bit & 1 == 1).collect::<IndexSet>();
            let taken: IndexSet = set(taken).iter().filter(|&way| way < ways).collect();
            let limits = Limits { ways, at_least, contiguous, taken };
            let asked = set(asked);
            let whole = |mask: &IndexSet| longest_run(mask) == *mask;
            let good = |mask: &IndexSet| {
                let free = mask.iter().all(|way| way < ways && !limits.taken.contains(way));
                free && mask.count() >= at_least && (!contiguous || whole(mask))
            };
            match fit(&asked, &limits) {
                Ok((given, said)) => {
                    prop_assert!(good(&given), "{} of {}", given, asked);
                    prop_assert_eq!(said.is_none(), given == asked);
                    if good(&asked) {
                        prop_assert_eq!(given, asked);
                    }
                }
                Err(_) => prop_assert!(!good(&asked)),
            }
        }

        /// Does a mask come back from its text?
        #[test]
        fn masks_survive_their_text(word: u64) {
            let mask: IndexSet = (0..64).filter(|bit| word >> bit & 1 == 1).collect();
            prop_assert_eq!(parse_mask(&mask_text(&mask)), Some(mask));
        }
    }
}
