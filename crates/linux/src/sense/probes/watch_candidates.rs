//! Words of a program that are worth watching: those in resident memory that it touches.
//!
//! Problem: most of a program's address space is empty. Allocators and language runtimes reserve gigabytes, and page
//! coloring's agent reserves address space for all frames; a word drawn from all of it is hardly ever touched. Method:
//! each mapping is drawn with a weight of its words times its resident share, and within it a resident page is drawn
//! (bit 63 of its entry in `/proc/PID/pagemap`). The weight of a mapping is lowered ([`IDLE_FACTOR`]) if several of its
//! words were watched and none was touched. Properties: all words of resident memory are equally likely once the shares
//! have settled; a draw reads a bounded number of entries; if they cannot be read, every word counts as resident.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use cachemate_core::SplitMix64;

use crate::kernel::Kernel;
use crate::kernel::refused_calls::KernelCall;

const WORD_BYTES: u64 = 8;
const PAGE_BYTES: u64 = 4096;
/// Number of non-resident pages after which a draw abandons a mapping.
const MAX_DRAWS_PER_MAPPING: u32 = 64;
/// Maximum number of pages examined for one word.
const MAX_DRAWS: u32 = 4_096;
/// A mapping is idle if this many of its words were watched and none was touched.
const MIN_IDLE_WATCHES: u32 = 8;
/// Factor by which the weight of an idle mapping is lowered.
const IDLE_FACTOR: f64 = 1.0 / 16.0;

/// Writable private mappings of a process, with the results for each.
#[derive(Debug, Default)]
pub struct WatchCandidates {
    /// First address and size in bytes, by address.
    mappings: Vec<(u64, u64)>,
    mapping_stats: BTreeMap<u64, MappingStats>,
}

/// Results for a mapping so far.
#[derive(Clone, Copy, Debug, Default)]
struct MappingStats {
    draws: u32,
    resident_draws: u32,
    watched_words: u32,
    touched_words: u32,
}

impl MappingStats {
    /// Share of a mapping's words that is worth drawing.
    fn weight(&self) -> f64 {
        let resident_share = f64::from(self.resident_draws + 1) / f64::from(self.draws + 2);
        let is_idle = self.touched_words == 0 && self.watched_words >= MIN_IDLE_WATCHES;
        resident_share * if is_idle { IDLE_FACTOR } else { 1.0 }
    }
}

/// The map of a process's resident pages.
pub struct PageMap(io::Result<File>);

impl PageMap {
    /// The page map of this process. If it may not be read, no page is known to be resident.
    pub fn open_pagemap(pid: i32) -> Self {
        PageMap(cachemate_files::open_plain(std::path::Path::new(&format!(
            "/proc/{pid}/pagemap"
        ))))
    }

    /// Is the page of this address in memory? `None` if the kernel does not report it.
    pub fn is_resident(&self, address: u64) -> Option<bool> {
        let mut entry = [0u8; 8];
        let file = self.0.as_ref().ok()?;
        file.read_exact_at(&mut entry, address / PAGE_BYTES * 8)
            .ok()?;
        Some(u64::from_le_bytes(entry) >> 63 == 1)
    }
}

impl WatchCandidates {
    /// Rereads the process's writable mappings; the results of those that still exist are kept.
    ///
    /// # Errors
    /// The process has exited, or has no writable memory of its own.
    pub fn refresh(&mut self, kernel: &dyn Kernel, pid: i32) -> io::Result<()> {
        let path = format!("/proc/{pid}/maps");
        let text = kernel.read(Path::new(&path)).map_err(|error| {
            io::Error::new(error.kind(), KernelCall::ReadFile.describe(&path, &error))
        })?;
        self.replace_mappings(writable_mappings(&text));
        if self.mappings.is_empty() {
            let message = format!("process {pid} has no writable memory of its own");
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        Ok(())
    }

    fn replace_mappings(&mut self, mappings: Vec<(u64, u64)>) {
        self.mapping_stats
            .retain(|first, _| mappings.iter().any(|(other, _)| other == first));
        self.mappings = mappings;
    }

    /// Draws the address of a resident word; `is_in_memory` returns whether the page of an address is in memory. `None`
    /// if no resident word was found.
    pub fn draw(
        &mut self,
        generator: &mut SplitMix64,
        is_in_memory: impl Fn(u64) -> Option<bool>,
    ) -> Option<u64> {
        let mut remaining_draws = MAX_DRAWS;
        while remaining_draws > 0 {
            let (start, bytes) = self.draw_mapping(generator)?;
            let stats = self.mapping_stats.entry(start).or_default();
            for _ in 0..MAX_DRAWS_PER_MAPPING {
                let address = start + WORD_BYTES * generator.draw_below(bytes / WORD_BYTES);
                let is_resident = is_in_memory(address);
                stats.draws += 1;
                stats.resident_draws += u32::from(is_resident != Some(false));
                remaining_draws = remaining_draws.saturating_sub(1);
                if is_resident != Some(false) {
                    return Some(address);
                }
            }
        }
        None
    }

    /// Draws one of the mappings, by their weights.
    fn draw_mapping(&self, generator: &mut SplitMix64) -> Option<(u64, u64)> {
        let mapping_weight = |&(first, bytes): &(u64, u64)| {
            bytes as f64
                * self
                    .mapping_stats
                    .get(&first)
                    .copied()
                    .unwrap_or_default()
                    .weight()
        };
        let mut remaining_weight =
            generator.draw_unit() * self.mappings.iter().map(mapping_weight).sum::<f64>();
        let drawn_mapping = self.mappings.iter().find(|mapping| {
            remaining_weight -= mapping_weight(mapping);
            remaining_weight < 0.0
        });
        drawn_mapping.or(self.mappings.last()).copied()
    }

    /// Records whether the thread touched a watched word.
    pub fn record_watch(&mut self, address: u64, was_touched: bool) {
        let mapping = self
            .mappings
            .iter()
            .find(|(first, bytes)| (*first..first + bytes).contains(&address));
        let Some((first, _)) = mapping else { return };
        let stats = self.mapping_stats.entry(*first).or_default();
        stats.watched_words += 1;
        stats.touched_words += u32::from(was_touched);
    }
}

/// Writable private mappings from `/proc/PID/maps`: (first address, bytes).
fn writable_mappings(text: &str) -> Vec<(u64, u64)> {
    let parse_mapping = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (first, last) = (
            u64::from_str_radix(start, 16).ok()?,
            u64::from_str_radix(end, 16).ok()?,
        );
        fields
            .next()
            .filter(|rights| rights.starts_with("rw") && rights.ends_with('p'))?;
        (last > first).then_some((first, last - first))
    };
    text.lines().filter_map(parse_mapping).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::LinuxHost;

    const MEGA: u64 = 1 << 20;

    /// Draws words and records for each whether it was touched.
    fn draw_words(
        words: &mut WatchCandidates,
        count: usize,
        has: impl Fn(u64) -> bool,
        touches: impl Fn(u64) -> bool,
    ) -> Vec<u64> {
        let mut generator = SplitMix64::new(7);
        let mut draw = || {
            let address = words.draw(&mut generator, |address| Some(has(address)))?;
            words.record_watch(address, touches(address));
            Some(address)
        };
        (0..count).filter_map(|_| draw()).collect()
    }

    fn candidates_for(mappings: &[(u64, u64)]) -> WatchCandidates {
        let mut words = WatchCandidates::default();
        words.replace_mappings(mappings.to_vec());
        words
    }

    /// Are words found in two megabytes beside four gigabytes of empty address space?
    #[test]
    fn words_are_found_beside_a_large_empty_address_space() {
        let mut words = candidates_for(&[(4096 * MEGA, 4096 * MEGA), (MEGA, 2 * MEGA)]);
        let addresses = draw_words(&mut words, 100, |address| address < 4096 * MEGA, |_| true);
        assert!(addresses.len() >= 99, "{}", addresses.len());
        assert!(
            addresses
                .iter()
                .all(|&address| (MEGA..3 * MEGA).contains(&address))
        );
    }

    /// Does sparse memory in a large mapping count as much as the same amount in a dense one?
    #[test]
    fn sparse_and_dense_resident_words_are_equally_likely() {
        // Every sixteenth page of 16 MiB is resident, and one MiB completely.
        let (thin, dense) = ((64 * MEGA, 16 * MEGA), (MEGA, MEGA));
        let mut words = candidates_for(&[thin, dense]);
        let has = |address: u64| address < 64 * MEGA || (address / PAGE_BYTES).is_multiple_of(16);
        let addresses = draw_words(&mut words, 4_000, has, |_| true);
        let in_thin = addresses
            .iter()
            .filter(|&&address| address >= 64 * MEGA)
            .count() as f64
            / addresses.len() as f64;
        assert!((in_thin - 0.5).abs() < 0.06, "{in_thin}");
    }

    /// Is memory that is never touched watched rarely, and memory that is touched now and then as before?
    #[test]
    fn untouched_mappings_are_watched_rarely() {
        let (idle, used) = ((64 * MEGA, 64 * MEGA), (MEGA, 4 * MEGA));
        let mut words = candidates_for(&[idle, used]);
        let addresses = draw_words(
            &mut words,
            400,
            |_| true,
            |address| address < 64 * MEGA && (address / PAGE_BYTES).is_multiple_of(4),
        );
        let in_used = addresses
            .iter()
            .filter(|&&address| address < 64 * MEGA)
            .count();
        assert!(in_used > 180, "{in_used} of {}", addresses.len());
        // Neither is idle: all words of both are touched and equally likely, 16 to 1.
        let mut words = candidates_for(&[idle, used]);
        let addresses = draw_words(&mut words, 400, |_| true, |_| true);
        assert!(
            addresses
                .iter()
                .filter(|&&address| address < 64 * MEGA)
                .count()
                < 60
        );
    }

    /// If the page map cannot be read, does every word count?
    #[test]
    fn every_word_counts_without_the_page_map() {
        let mut words = candidates_for(&[(MEGA, 4 * MEGA)]);
        let mut generator = SplitMix64::new(1);
        assert!(words.draw(&mut generator, |_| None).is_some());
        assert_eq!(
            PageMap(Err(io::ErrorKind::PermissionDenied.into())).is_resident(0),
            None
        );
        assert_eq!(
            words.draw(&mut generator, |_| Some(false)),
            None,
            "nothing is in memory"
        );
    }

    /// Is a touched page of this process distinguished from an untouched one?
    #[test]
    fn a_touched_page_is_distinguished_from_an_untouched_one() {
        let map = PageMap::open_pagemap(std::process::id() as i32);
        let here = 7u64;
        if map.is_resident(std::ptr::from_ref(&here) as u64) == Some(true) {
            let reserved: Vec<u8> = Vec::with_capacity(64 << 20);
            let middle = reserved.as_ptr() as u64 + (32 << 20);
            assert_eq!(map.is_resident(middle), Some(false));
        }
        let mut words = WatchCandidates::default();
        words
            .refresh(&LinuxHost::new("/"), std::process::id() as i32)
            .unwrap();
        let drawn_address = words
            .draw(&mut SplitMix64::new(3), |address| map.is_resident(address))
            .unwrap();
        assert_ne!(map.is_resident(drawn_address), Some(false));
        assert!(words.refresh(&LinuxHost::new("/"), i32::MAX).is_err());
    }
}
