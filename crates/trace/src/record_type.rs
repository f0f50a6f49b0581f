//! One recorded access, what a file says of itself, and its totals.

use serde::{Deserialize, Serialize};

/// One data access of one thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AccessRecord {
    /// Byte address; where the header has a `process_shift`, the process index stands above that bit.
    pub address: u64,
    /// Instructions the thread executed since its previous record, the one that makes this access included (0 for
    /// the second access of one instruction). All gaps of a thread and its tail are its instructions. 0 throughout
    /// where the header says that instructions are not known.
    pub gap: u64,
    /// Dense, in order of first appearance.
    pub thread: u32,
    /// Bytes touched; 0 = not known.
    pub size: u16,
    /// Writes (a read-modify-write is one access and a store).
    pub store: bool,
}

/// The filter the records passed: only its misses are in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct L1Filter {
    /// A whole number of sets.
    pub size_bytes: u64,
    /// Lines of one set.
    pub ways: u32,
    /// Bytes of a line; a power of two.
    pub line_bytes: u32,
}

impl Default for L1Filter {
    fn default() -> Self {
        L1Filter { size_bytes: 32 << 10, ways: 8, line_bytes: 64 }
    }
}

impl L1Filter {
    /// Reads `SIZE:WAYS[:LINE]`, sizes in bytes or with K or M (powers of 1024).
    ///
    /// # Errors
    /// The value found and the value expected.
    pub fn parse(text: &str) -> Result<L1Filter, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let size = |digits: &str| {
            let (number, unit) = match digits.as_bytes().last() {
                Some(b'K' | b'k') => (&digits[..digits.len() - 1], 1 << 10),
                Some(b'M' | b'm') => (&digits[..digits.len() - 1], 1 << 20),
                _ => (digits, 1),
            };
            number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit))
        };
        let (Some(size_bytes), Some(ways), Some(line_bytes), 2..=3) = (
            size(parts[0]),
            parts.get(1).and_then(|text| text.parse().ok()),
            parts.get(2).map_or(Some(64), |text| text.parse().ok()),
            parts.len(),
        ) else {
            return Err(format!("found '{text}', expected SIZE:WAYS[:LINE] such as 32K:8 or 32K:8:64"));
        };
        let filter = L1Filter { size_bytes, ways, line_bytes };
        filter.check()?;
        Ok(filter)
    }

    /// Sets of the filter.
    pub fn sets(&self) -> u64 {
        self.size_bytes / (u64::from(self.ways) * u64::from(self.line_bytes)).max(1)
    }

    /// Can the recorder build it: line a power of two of 16-4096 bytes, 1-64 ways, a power-of-two number of sets.
    ///
    /// # Errors
    /// The field at fault, in words.
    pub fn check(&self) -> Result<(), String> {
        if !self.line_bytes.is_power_of_two() || !(16..=4096).contains(&self.line_bytes) {
            return Err(format!("found a line of {} bytes, expected a power of two of 16-4096", self.line_bytes));
        }
        if !(1..=64).contains(&self.ways) {
            return Err(format!("found {} ways, expected 1-64", self.ways));
        }
        let way_bytes = u64::from(self.ways) * u64::from(self.line_bytes);
        if self.size_bytes > 64 << 20 || !self.size_bytes.is_multiple_of(way_bytes) || !self.sets().is_power_of_two() {
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
    /// Name and version of what wrote the file.
    pub tool: String,
    /// The source of the records: `valgrind`, `lackey`, `din`, `u64`, `champsim`, `oracle-general`, ...
    pub source: String,
    /// The recorded command, where there is one.
    #[serde(default)]
    pub command: Vec<String>,
    /// Cache line of the recorder; of use where a filter worked on lines.
    pub line_bytes: u32,
    /// Page size of the host that recorded; a power of two from 512 bytes to 1 GiB.
    pub page_bytes: u32,
    /// `None` = every access is in the file.
    #[serde(default)]
    pub filter: Option<L1Filter>,
    /// Program data accesses passed over before the first record, and the most that were then looked at.
    #[serde(default)]
    pub skip_accesses: u64,
    /// The most that were looked at after those; `None` = to the end.
    #[serde(default)]
    pub max_accesses: Option<u64>,
    /// The bit above which an address carries the index of its process; `None` = one address space.
    #[serde(default)]
    pub process_shift: Option<u32>,
    /// Whether gaps and instruction totals mean anything.
    pub instructions_known: bool,
}

impl TraceHeader {
    /// A header for records from elsewhere, unfiltered, of one address space.
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
        }
    }

    /// The field that no trace can have, what was found in it and what was expected.
    pub(crate) fn check(&self) -> Result<(), (String, String)> {
        let power = |name: &str, found: u32, least: u32, most: u32| {
            let good = found.is_power_of_two() && (least..=most).contains(&found);
            let expected = format!("a power of two from {least} to {most}");
            if good { Ok(()) } else { Err((format!("{name} = {found}"), expected)) }
        };
        power("line_bytes", self.line_bytes, 1, 1 << 20)?;
        power("page_bytes", self.page_bytes, 512, 1 << 30)?;
        match self.process_shift {
            // Below a page's bits two processes would share pages; from 64 on there is no address left to shift.
            Some(shift) if !(12..64).contains(&shift) => {
                Err((format!("process_shift = {shift}"), "12 to 63, or none".to_string()))
            }
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
    /// Numbered in the order of the first records.
    pub thread: u32,
    /// Index of its process, as in [`ProcessTotals::process`].
    pub process: u32,
    /// Among its process's threads, from 0 in the order of their creation; `None` = not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<u32>,
    /// The kernel's id of it while it was recorded; `None` = not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os_thread: Option<u32>,
    /// Its records in the file.
    pub records: u64,
    /// Data accesses before the filter.
    pub accesses: Option<u64>,
    /// Executed in the recorded window; `None` = not known.
    pub instructions: Option<u64>,
}

/// One recorded process.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ProcessTotals {
    /// Its index: from 0, in the order in which processes started.
    pub process: u32,
    /// The kernel's id of it while it was recorded; `None` = not known.
    pub pid: Option<u32>,
    /// Program and arguments, word by word; empty = not known.
    pub command: Vec<String>,
}

/// The sums of a trace, known at its end (or at once where the file can be sought in).
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TraceTotals {
    /// Records in the file, of all threads.
    pub records: u64,
    /// Data accesses of the program before the filter, all threads; `None` = not known.
    pub program_accesses: Option<u64>,
    /// Executed in the recorded window, all threads; `None` = not known.
    pub instructions: Option<u64>,
    /// One entry a thread, by its number; empty where the format tells no threads.
    pub threads: Vec<ThreadTotals>,
    /// One entry a process, by its index; empty where the format tells no processes.
    #[serde(default)]
    pub processes: Vec<ProcessTotals>,
    /// How the recording ended: `exit 0`, `signal 15`, `interrupted`, ...
    #[serde(default)]
    pub ended: Option<String>,
}
