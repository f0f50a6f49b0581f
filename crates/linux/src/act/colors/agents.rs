//! Programs that run colored: their directories, their agents' reports, and the kernel's view of their frames.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use cachemate_agent::layout::{MAX_COLORS, PAGE_BYTES, format_target};
use cachemate_agent::maps::MappingFilter;
use cachemate_core::IndexSet;
use cachemate_files::{DirAccess, TrustedDir};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::ColorError;
use super::pool::read_present_pages;
use super::reference_set::{BASE, FrameLedger};
use crate::kernel::Kernel;

/// The directory of a session: the reference set and ledger that it began with, and a directory for each process.
fn session_dir(base: &Path, launcher: u32, session: u32) -> PathBuf {
    base.join(format!("s{launcher}-{session}"))
}

/// Creates a session's directory. The reference set and the ledger are linked into it, so that a later discovery does
/// not change the labels that a running program uses.
///
/// # Errors
/// The errors of the file system.
pub fn create_session(
    base: &Path,
    launcher: u32,
    session: u32,
    library: &[u8],
) -> Result<PathBuf, ColorError> {
    let dir = session_dir(base, launcher, session);
    let create_files = || {
        // The library is preloaded by its path, so no other user may be able to change any part of the path.
        let base_dir = TrustedDir::open_anchored(base, DirAccess::ReadWrite)?;
        if dir.symlink_metadata().is_ok() {
            fs::remove_dir_all(&dir)?; // left by an earlier process with this number
        }
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let session = base_dir.create_new_dir(&name)?;
        for name in ["reference-set", "ledger"] {
            base_dir.link_into(name, &session, name)?;
        }
        session
            .open_file(Path::new(LIBRARY), OFlags::RDWR | OFlags::CREATE)?
            .write_all(library)
    };
    create_files().map_err(|source| ColorError::io_error(&dir, source))?;
    Ok(dir)
}

/// Name of the preloaded library.
pub const LIBRARY: &str = "libcachemate_color.so";

/// Removes the directories of sessions without a live process.
pub fn remove_dead_sessions(kernel: &dyn Kernel, base: &Path) {
    for name in kernel.list(base).unwrap_or_default() {
        let launcher = name
            .strip_prefix('s')
            .and_then(|rest| rest.split('-').next()?.parse::<i32>().ok());
        let Some(launcher) = launcher else { continue };
        let dir = base.join(&name);
        let is_alive = |pid: i32| kernel.stat(pid).is_ok();
        if !is_alive(launcher) && !list_processes(kernel, &dir).into_iter().any(is_alive) {
            // A directory that cannot be removed does no harm.
            let _ = fs::remove_dir_all(&dir);
        }
    }
}

/// All processes that have had an agent in this session.
pub fn list_processes(kernel: &dyn Kernel, session: &Path) -> Vec<i32> {
    let mut pids: Vec<i32> = kernel
        .list(session)
        .unwrap_or_default()
        .iter()
        .filter_map(|name| name.parse().ok())
        .collect();
    pids.sort_unstable();
    pids
}

/// The directory of a process that runs colored now.
pub fn agent_dir(kernel: &dyn Kernel, pid: i32) -> Option<PathBuf> {
    let base = Path::new(BASE);
    let sessions = kernel
        .list(base)
        .unwrap_or_default()
        .into_iter()
        .filter(|name| name.starts_with('s'));
    let pid_name = pid.to_string();
    let mut dirs = sessions
        .map(|session| base.join(session))
        .filter(|session| {
            kernel
                .list(session)
                .is_ok_and(|names| names.contains(&pid_name))
        });
    let dir = dirs.next()?.join(&pid_name);
    // The process id may have been reused.
    AgentReport::read(kernel, &dir)
        .ok()?
        .account
        .is_ok()
        .then_some(dir)
}

/// The mask of a set of colors; `None` if the set is empty, or a color does not fit into a mask.
pub fn color_mask(colors: &IndexSet) -> Option<u64> {
    let fits = colors.iter().all(|color| color < MAX_COLORS);
    let mask = colors
        .iter()
        .fold(0u64, |mask, color| mask | 1 << (color % MAX_COLORS));
    (fits && mask != 0).then_some(mask)
}

/// The content of a `wanted` file, without its newline.
pub fn target_text(mask: u64, must_move_all: bool) -> String {
    String::from_utf8_lossy(&format_target(mask, must_move_all))
        .trim_end()
        .to_string()
}

/// An agent's report on its own work.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AgentReport {
    /// Figures of the agent by name (docs/colors.md), or the reason why it could not start.
    pub account: Result<BTreeMap<String, u64>, String>,
}

impl AgentReport {
    /// Reads a process's status.
    ///
    /// # Errors
    /// There is no status, or every read of it was torn.
    pub fn read(kernel: &dyn Kernel, dir: &Path) -> io::Result<Self> {
        let path = dir.join("status");
        for _ in 0..20 {
            if let Some(report) = Self::parse(&kernel.read(&path)?) {
                return Ok(report);
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{}: no whole status", path.display()),
        ))
    }

    /// Parses a report. `None` if it is torn or forged, that is, if the turns in its first and last line differ, or a
    /// figure occurs twice.
    fn parse(text: &str) -> Option<Self> {
        if let Some(reason) = text.strip_prefix("refused ") {
            return Some(AgentReport {
                account: Err(reason.trim_end().to_string()),
            });
        }
        // A last line without its end may be the beginning of a longer number.
        let mut lines: Vec<(&str, u64)> = Vec::new();
        for line in text.strip_suffix('\n')?.split('\n') {
            let (name, number) = line.split_once(' ')?;
            lines.push((name, number.parse().ok()?));
        }
        let (last_line, figures) = lines
            .split_last()
            .filter(|(_, figures)| !figures.is_empty())?;
        let counters: BTreeMap<String, u64> = figures
            .iter()
            .map(|(name, number)| (name.to_string(), *number))
            .collect();
        let is_whole =
            last_line.0 == "turn" && figures[0] == *last_line && counters.len() == figures.len();
        is_whole.then_some(AgentReport {
            account: Ok(counters),
        })
    }

    /// Addresses of the agent's own memory, in whole pages. The program can write any number into the report.
    fn own_addresses(&self) -> Range<usize> {
        let counter_as_usize = |name: &str| {
            self.counter(name)
                .and_then(|figure| usize::try_from(figure).ok())
                .unwrap_or(0)
        };
        let start = counter_as_usize("own_start") / PAGE_BYTES * PAGE_BYTES;
        let bytes = counter_as_usize("own_bytes").checked_next_multiple_of(PAGE_BYTES);
        start
            ..bytes
                .and_then(|bytes| start.checked_add(bytes))
                .unwrap_or(start)
    }

    /// A figure; 0 only if the agent counted zero.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.account.as_ref().ok()?.get(name).copied()
    }

    /// Share of the resident pages under the agent's control that have allowed colors.
    pub fn allowed_share(&self) -> Option<f64> {
        let pages = |name: &str| self.counter(name).map(|pages| pages as f64);
        let allowed_pages = pages("allowed_pages")?;
        let total_pages = allowed_pages + pages("other_pages")? + pages("unknown_pages")?;
        (total_pages > 0.0).then(|| allowed_pages / total_pages)
    }
}

/// Resident frames of a process, counted from outside by the kernel's page map and the ledger. The agent reports only
/// the address of its own memory and the number of frames that it holds there.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ResidentPages {
    /// Heap, anonymous mappings and stacks in frames of allowed colors.
    pub allowed_pages: u64,
    /// The same, in frames of colors that are not allowed.
    pub other_pages: u64,
    /// Pages of no known color.
    pub unknown_pages: u64,
    /// Anonymous memory that is not colored: zeroed data of libraries and allocations of the dynamic linker.
    pub excluded_pages: u64,
    /// The process's own copies of files' pages: data that was relocated or written. The kernel moves frames between
    /// anonymous mappings only.
    pub copied_pages: u64,
    /// Frames that the agent holds.
    pub held_pages: u64,
    /// Pages of files: they belong to the page cache and are not colored.
    pub file_pages: u64,
}

impl ResidentPages {
    /// Number of pages of anonymous mappings, including those that are not colored.
    pub fn anonymous_pages(&self) -> u64 {
        self.allowed_pages + self.other_pages + self.unknown_pages + self.excluded_pages
    }

    /// Share of the anonymous mappings' pages in allowed colors.
    pub fn allowed_anonymous_share(&self) -> Option<f64> {
        let total_pages = self.anonymous_pages();
        (total_pages > 0).then(|| self.allowed_pages as f64 / total_pages as f64)
    }

    /// Share of all the process's own pages in allowed colors, its copies of files' pages included.
    pub fn allowed_own_share(&self) -> Option<f64> {
        let total_pages = self.anonymous_pages() + self.copied_pages;
        (total_pages > 0).then(|| self.allowed_pages as f64 / total_pages as f64)
    }

    /// The sum over several processes.
    #[must_use]
    pub fn sum(&self, other: &ResidentPages) -> ResidentPages {
        ResidentPages {
            allowed_pages: self.allowed_pages + other.allowed_pages,
            other_pages: self.other_pages + other.other_pages,
            unknown_pages: self.unknown_pages + other.unknown_pages,
            excluded_pages: self.excluded_pages + other.excluded_pages,
            copied_pages: self.copied_pages + other.copied_pages,
            held_pages: self.held_pages + other.held_pages,
            file_pages: self.file_pages + other.file_pages,
        }
    }
}

/// Maximum size of `/proc/PID/maps`; by default, the kernel allows 65,530 mappings of about 100 bytes each.
const MAX_MAPS_BYTES: u64 = 256 << 20;

/// Counts a process's resident pages. `agent` is the report of the process's agent; without an agent no pages are held.
///
/// # Errors
/// The process has exited, or its page map may not be read.
pub fn resident_pages(
    pid: i32,
    ledger: &FrameLedger,
    mask: u64,
    agent: Option<&AgentReport>,
) -> io::Result<ResidentPages> {
    let maps = cachemate_files::read_text_limited(
        Path::new(&format!("/proc/{pid}/maps")),
        MAX_MAPS_BYTES,
    )?;
    let program = cachemate_files::link_target(Path::new(&format!("/proc/{pid}/exe")))?;
    let pagemap = Ok(cachemate_files::open_plain(Path::new(&format!(
        "/proc/{pid}/pagemap"
    )))?);
    let own_addresses = agent.map_or(0..0, AgentReport::own_addresses);
    let (mut resident_pages, mut mapping_filter) =
        (ResidentPages::default(), MappingFilter::default());
    resident_pages.held_pages = agent
        .and_then(|agent| agent.counter("held_frames"))
        .unwrap_or(0);
    for line in maps.lines() {
        let is_colored = mapping_filter
            .pick_range(line.as_bytes(), program.as_os_str().as_encoded_bytes())
            .is_some();
        let mut words = line.split_ascii_whitespace();
        let Some((start, end)) = words.next().and_then(|range| range.split_once('-')) else {
            continue;
        };
        let (Ok(start), Ok(end)) = (
            usize::from_str_radix(start, 16),
            usize::from_str_radix(end, 16),
        ) else {
            continue;
        };
        let is_anonymous = words.nth(3).is_some_and(|inode| inode == "0");
        let is_kernel_mapping = words.next().is_some_and(|name| name.starts_with("[v"));
        let mut address = start;
        while address < end && !is_kernel_mapping {
            if own_addresses.contains(&address) {
                address = own_addresses.end; // the agent's address space spans gigabytes, which are slow to scan
                continue;
            }
            let range_end = if address < own_addresses.start {
                end.min(own_addresses.start)
            } else {
                end
            };
            let pages = ((range_end - address) / PAGE_BYTES).min(1 << 16);
            for page in read_present_pages(&pagemap, address, pages)
                .into_iter()
                .flatten()
            {
                let count = match ledger.color(page.frame) {
                    _ if page.is_file_page => &mut resident_pages.file_pages,
                    _ if !is_anonymous => &mut resident_pages.copied_pages,
                    _ if !is_colored => &mut resident_pages.excluded_pages,
                    Some(color) if mask >> color & 1 == 1 => &mut resident_pages.allowed_pages,
                    Some(_) => &mut resident_pages.other_pages,
                    None => &mut resident_pages.unknown_pages,
                };
                *count += 1;
            }
            address += pages * PAGE_BYTES;
        }
    }
    Ok(resident_pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a torn status rejected, a refusal read with its reason, and a whole status with its figures?
    #[test]
    fn a_torn_status_is_rejected() {
        let report =
            "turn 00000000000000000007\nallowed_pages 30\nother_pages 9\nunknown_pages 1\nturn 7\n";
        let agent = AgentReport::parse(report).unwrap();
        assert_eq!(
            (agent.counter("other_pages"), agent.counter("faults")),
            (Some(9), None)
        );
        assert_eq!(agent.allowed_share(), Some(0.75));
        assert_eq!(
            AgentReport::parse(&report.replace("turn 7", "turn 8")),
            None
        );
        assert_eq!(AgentReport::parse(&report[..40]), None);
        assert_eq!(
            AgentReport::parse("refused no reference set\n")
                .unwrap()
                .account,
            Err("no reference set".to_string())
        );
    }

    /// Is a report that is cut at any byte, repeated, or put into another order rejected? The program that an agent
    /// reports on can write any of them.
    #[test]
    fn a_cut_repeated_or_reordered_report_is_rejected() {
        let report = "turn 17\nallowed_pages 30\nother_pages 9\nunknown_pages 1\nturn 17\n";
        assert!(AgentReport::parse(report).is_some());
        for end in 0..report.len() {
            assert_eq!(AgentReport::parse(&report[..end]), None, "{end}");
        }
        assert_eq!(AgentReport::parse(&report.repeat(2)), None);
        let lines: Vec<&str> = report.lines().collect();
        for swapped in [[0, 1], [1, 4], [3, 4]] {
            let mut lines = lines.clone();
            lines.swap(swapped[0], swapped[1]);
            assert_eq!(
                AgentReport::parse(&format!("{}\n", lines.join("\n"))),
                None,
                "{swapped:?}"
            );
        }
        let twice = report.replace("other_pages 9\n", "other_pages 9\nother_pages 0\n");
        assert_eq!(AgentReport::parse(&twice), None);
        for forged in [
            "allowed_pages -1",
            "allowed_pages 99999999999999999999",
            "allowed_pages NaN",
            "allowed_pages",
        ] {
            assert_eq!(
                AgentReport::parse(&report.replace("allowed_pages 30", forged)),
                None,
                "{forged}"
            );
        }
    }

    /// With forged figures of any size: is the share still one, do the agent's addresses stay whole pages without an
    /// overflow, and does counting the pages of this process end?
    #[test]
    fn forged_figures_neither_overflow_nor_block_the_count() {
        let largest = u64::MAX;
        let text = format!(
            "turn 1\nallowed_pages {largest}\nother_pages {largest}\nunknown_pages {largest}\nturn 1\n"
        );
        assert_eq!(
            AgentReport::parse(&text).unwrap().allowed_share(),
            Some(1.0 / 3.0)
        );
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("colors");
        TrustedDir::create_anchored(&base).unwrap();
        let ledger = FrameLedger::open(&base).unwrap();
        let here = &text as *const String as u64;
        for (start, bytes) in [
            (here + 1, 5),
            (here, 0),
            (largest, largest),
            (largest - 4095, 4096),
            (1, largest),
        ] {
            let text = format!("turn 1\nown_start {start}\nown_bytes {bytes}\nturn 1\n");
            let agent = AgentReport::parse(&text).unwrap();
            let own_ranges = agent.own_addresses();
            assert!(
                own_ranges.start.is_multiple_of(PAGE_BYTES)
                    && own_ranges.end.is_multiple_of(PAGE_BYTES)
                    && own_ranges.start <= own_ranges.end,
                "{own_ranges:?}"
            );
            let pid = std::process::id() as i32;
            let Ok(pages) = resident_pages(pid, &ledger, 1, Some(&agent)) else {
                crate::skip_test::report_unchecked(
                    "pages of a process",
                    "its page map cannot be read",
                );
                return;
            };
            assert!(pages.anonymous_pages() > 0);
        }
    }

    /// Do sets and masks agree, and is a set that does not fit refused?
    #[test]
    fn sets_and_masks_agree_and_oversized_sets_are_refused() {
        assert_eq!(color_mask(&"0-3,8".parse().unwrap()), Some(0x10f));
        assert_eq!(color_mask(&"63".parse().unwrap()), Some(1 << 63));
        assert_eq!(color_mask(&"64".parse().unwrap()), None);
        assert_eq!(color_mask(&IndexSet::default()), None);
        assert_eq!(target_text(0x10f, false), "000000000000010fn");
    }
}
