//! One recorded access, the metadata of a file, and its totals.

use std::num::NonZeroU16;

use cachemate_core::{CoreSamples, SampledAccess};
use serde::{Deserialize, Serialize};

/// Counts of a file add up to no more, so that no sum of them wraps and a float holds each exactly.
pub(crate) const MAX_COUNT: u64 = 1 << 53;
/// Maximum number of threads of a trace.
pub(crate) const MAX_THREADS: usize = 1 << 20;

/// One data access of one thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AccessRecord {
    /// Byte address; if the header has a `process_shift`, the process index is above that bit.
    pub address: u64,
    /// Instructions that the thread executed since its previous record, including the one that makes this access (0 for
    /// the second access of one instruction). All gaps of a thread and its tail together are its instructions. Always 0
    /// if the header declares instructions as unknown.
    pub gap: u64,
    /// The thread; numbers are dense, in order of first appearance.
    pub thread: u32,
    /// Bytes accessed; 0 if unknown.
    pub size: u16,
    /// Whether the access writes. A read-modify-write is one access, and a store.
    pub store: bool,
    /// Number of the thread's records back to the youngest load on which the address depends: 0 if there is none, 255 if it
    /// is further back than 254. Always 0 if the header declares dependences as unknown.
    pub dependence: u8,
    /// A hash of the address of the instruction that makes the access; `None` if unknown.
    pub site: Option<NonZeroU16>,
}

impl AccessRecord {
    /// In lines of `1 << line_shift` bytes; its distance, and whether a branch waited for it, stay
    /// unknown.
    pub fn to_sampled(&self, line_shift: u32) -> SampledAccess {
        SampledAccess {
            line: self.address >> line_shift,
            distance: None,
            gap: self.gap,
            thread: self.thread,
            is_store: self.store,
            dependence: self.dependence,
            site: self.site,
            delays_branch: false,
        }
    }
}

/// The filter that the records passed: only its misses are in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct L1Filter {
    /// Size in bytes; a whole number of sets.
    pub size_bytes: u64,
    /// Lines per set.
    pub ways: u32,
    /// Line size in bytes; a power of two.
    pub line_bytes: u32,
}

impl Default for L1Filter {
    fn default() -> Self {
        L1Filter {
            size_bytes: 32 << 10,
            ways: 8,
            line_bytes: 64,
        }
    }
}

impl L1Filter {
    /// Parses `SIZE:WAYS[:LINE]`, sizes in bytes or with K or M (powers of 1024).
    ///
    /// # Errors
    /// The value found and the value expected.
    pub fn parse(text: &str) -> Result<L1Filter, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let parse_size = |digits: &str| {
            let (number, unit) = match digits.as_bytes().last() {
                Some(b'K' | b'k') => (&digits[..digits.len() - 1], 1 << 10),
                Some(b'M' | b'm') => (&digits[..digits.len() - 1], 1 << 20),
                _ => (digits, 1),
            };
            number
                .parse::<u64>()
                .ok()
                .and_then(|number| number.checked_mul(unit))
        };

        let (Some(size_bytes), Some(ways), Some(line_bytes), 2..=3) = (
            parse_size(parts[0]),
            parts.get(1).and_then(|text| text.parse().ok()),
            parts.get(2).map_or(Some(64), |text| text.parse().ok()),
            parts.len(),
        ) else {
            return Err(format!(
                "found '{text}', expected SIZE:WAYS[:LINE] such as 32K:8 or 32K:8:64"
            ));
        };
        let filter = L1Filter {
            size_bytes,
            ways,
            line_bytes,
        };
        filter.check()?;
        Ok(filter)
    }

    /// A power of two in a filter that was checked.
    pub fn sets(&self) -> u64 {
        self.size_bytes / (u64::from(self.ways) * u64::from(self.line_bytes)).max(1)
    }

    /// Checks that the recorder can build it: a line of a power of two from 16 to 4096 bytes, 1 to 64 ways, a
    /// power-of-two number of sets.
    ///
    /// # Errors
    /// A description of the invalid field.
    pub fn check(&self) -> Result<(), String> {
        if !self.line_bytes.is_power_of_two() || !(16..=4096).contains(&self.line_bytes) {
            return Err(format!(
                "found a line of {} bytes, expected a power of two of 16-4096",
                self.line_bytes
            ));
        }
        if !(1..=64).contains(&self.ways) {
            return Err(format!("found {} ways, expected 1-64", self.ways));
        }

        let way_bytes = u64::from(self.ways) * u64::from(self.line_bytes);
        if self.size_bytes > 64 << 20
            || !self.size_bytes.is_multiple_of(way_bytes)
            || !self.sets().is_power_of_two()
        {
            return Err(format!(
                "found a size of {} bytes, expected ways x line ({way_bytes}) times a power of two, at most 64M",
                self.size_bytes
            ));
        }

        Ok(())
    }
}

/// The metadata of a trace, known before the first record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TraceHeader {
    /// Name and version of the tool that wrote the file.
    pub tool: String,
    /// The source of the records: `valgrind`, `lackey`, `din`, `u64`, `champsim`, `oracle-general`, ...
    pub source: String,
    /// The recorded command, if there is one.
    #[serde(default)]
    pub command: Vec<String>,
    /// Line size of the recorder; meaningful if a filter worked on lines.
    pub line_bytes: u32,
    /// Page size of the recording host; a power of two from 512 bytes to 1 GiB.
    pub page_bytes: u32,
    /// The filter; `None` if every access is in the file.
    pub filter: Option<L1Filter>,
    /// Data accesses of the program that were skipped before the recorded window.
    #[serde(default)]
    pub skip_accesses: u64,
    /// Maximum number of accesses in the window after those; `None` for no limit.
    pub max_accesses: Option<u64>,
    /// The bit above which an address contains the index of its process; `None` if there is one address space.
    pub process_shift: Option<u32>,
    /// Whether gaps and instruction totals are known.
    pub instructions_known: bool,
    /// Whether records state the loads on which their addresses depend.
    #[serde(default)]
    pub has_dependences: bool,
}

impl TraceHeader {
    /// A header for imported records: unfiltered, in one address space.
    pub fn for_import(source: &str, instructions_known: bool) -> TraceHeader {
        TraceHeader {
            tool: concat!("cachemate ", env!("CARGO_PKG_VERSION")).to_string(),
            source: source.to_string(),
            command: Vec::new(),
            line_bytes: 64,
            page_bytes: 4096,
            filter: None,
            skip_accesses: 0,
            max_accesses: None,
            process_shift: None,
            instructions_known,
            has_dependences: false,
        }
    }

    /// Checks that a trace could have this header; the error gives the value found and the values expected.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        let check_power_of_two = |name: &str, found: u32, min: u32, max: u32| {
            let is_valid = found.is_power_of_two() && (min..=max).contains(&found);
            let expected = format!("a power of two from {min} to {max}");
            if is_valid {
                Ok(())
            } else {
                Err((format!("{name} = {found}"), expected))
            }
        };
        check_power_of_two("line_bytes", self.line_bytes, 1, 1 << 20)?;
        check_power_of_two("page_bytes", self.page_bytes, 512, 1 << 30)?;
        if let Some(Err(reason)) = self.filter.map(|filter| filter.check()) {
            return Err(("an impossible filter".to_string(), reason));
        }

        match self.process_shift {
            // Below the page bits, two processes would share pages; from 64 on, no address bits are left.
            Some(shift) if !(12..64).contains(&shift) => Err((
                format!("process_shift = {shift}"),
                "12 to 63, or none".to_string(),
            )),
            _ => Ok(()),
        }
    }

    /// Checks that the records tell lines of this size apart: of a line of the filter, only the first access is among them.
    ///
    /// # Errors
    /// The size found and the sizes expected.
    pub fn check_lines(&self, line_bytes: u32) -> Result<(), String> {
        match self.filter {
            Some(filter) if line_bytes < filter.line_bytes => Err(format!(
                "found lines of {line_bytes} bytes, expected at least the {} of the recorder's filter",
                filter.line_bytes
            )),
            _ => Ok(()),
        }
    }

    /// The process of a record: 0 in a file of one address space.
    pub fn process_of(&self, record: &AccessRecord) -> u32 {
        match self.process_shift {
            Some(shift @ 0..64) => (record.address >> shift) as u32,
            _ => 0,
        }
    }
}

/// The totals of one thread in the recorded window.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ThreadTotals {
    /// Number of the thread, in the order of first records.
    pub thread: u32,
    /// Index of its process, as in [`ProcessTotals::process`].
    pub process: u32,
    /// Index among the threads of its process, from 0 in the order of creation; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<u32>,
    /// The kernel's thread id during the recording; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os_thread: Option<u32>,
    /// Number of the thread's records in the file.
    pub records: u64,
    /// Data accesses before filtering.
    pub accesses: Option<u64>,
    /// Instructions in the recorded window; `None` if unknown.
    pub instructions: Option<u64>,
}

/// One recorded process.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ProcessTotals {
    /// Index of the process, from 0 in the order in which processes started.
    pub process: u32,
    /// The kernel's process id during the recording; `None` if unknown.
    pub pid: Option<u32>,
    /// Program and arguments, word by word; empty if unknown.
    pub command: Vec<String>,
}

/// The totals of a trace, known at its end (or immediately if the file is seekable).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TraceTotals {
    /// Records in the file, for all threads.
    pub records: u64,
    /// Data accesses of the program before filtering, for all threads; `None` if unknown.
    pub program_accesses: Option<u64>,
    /// Instructions in the recorded window, for all threads; `None` if unknown.
    pub instructions: Option<u64>,
    /// One entry per thread, by its number; empty if the format does not distinguish threads.
    pub threads: Vec<ThreadTotals>,
    /// One entry per process, by its index; empty if the format does not distinguish processes.
    #[serde(default)]
    pub processes: Vec<ProcessTotals>,
    /// Number of the first record of each burst, ascending; empty if the recording has no gaps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bursts: Vec<u64>,
    /// What instructions cost between misses, and what branches wait for.
    #[serde(default, skip_serializing_if = "CoreSamples::is_empty")]
    pub core: CoreSamples,
    /// The end of the recording: `exit 0`, `signal 15`, `interrupted`, ...
    pub ended: Option<String>,
}

impl TraceTotals {
    /// Do the totals agree with one another? The number of records is compared with the blocks by the reader.
    ///
    /// # Errors
    /// The sum that differs, and the total.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        let records: u64 = self
            .threads
            .iter()
            .fold(0, |sum, thread| sum.saturating_add(thread.records));
        if !self.threads.is_empty() && records != self.records {
            let found = format!("threads with {records} records");
            return Err((found, format!("{}, the file's total", self.records)));
        }

        let is_first_known = self.bursts.first().is_none_or(|first| *first == 0);
        if !is_first_known || !self.bursts.is_sorted() {
            let found = format!(
                "bursts at records {:?}",
                &self.bursts[..self.bursts.len().min(3)]
            );
            return Err((found, "ascending records, the first of them 0".to_string()));
        }

        if !self
            .core
            .stretches
            .is_sorted_by_key(|stretch| stretch.end_record)
        {
            let found = "stretches of core timing out of order".to_string();
            return Err((found, "ascending records".to_string()));
        }

        if !self.core.branch_loads.is_sorted_by(|a, b| a.site < b.site) {
            let found = "loads of branches out of order".to_string();
            return Err((found, "ascending sites".to_string()));
        }

        let check_sum =
            |name: &str, total: Option<u64>, count: fn(&ThreadTotals) -> Option<u64>| {
                let counts = self.threads.iter().filter_map(count);
                let sum = counts.fold(0, u64::saturating_add);
                let limit = total.unwrap_or(MAX_COUNT).min(MAX_COUNT);
                if sum <= limit {
                    return Ok(());
                }
                let found = format!("threads with {sum} {name}");
                Err((found, format!("at most {limit}, the file's total")))
            };
        check_sum("instructions", self.instructions, |thread| {
            thread.instructions
        })?;
        check_sum("accesses", self.program_accesses, |thread| thread.accesses)
    }
}
