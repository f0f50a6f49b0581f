//! Tests whether pages can be moved on this host, and at what cost, on pages of this process.

use std::io;
use std::time::Instant;

use cachemate_agent::layout::PAGE_BYTES;
use cachemate_agent::sys::{self, userfaultfd};

use super::pool::PagePool;
use crate::MissingFacility;

/// Pages that are moved for the measurement.
const MEASURED_PAGES: usize = 256;

fn new_pool(pages: usize) -> Result<PagePool, MissingFacility> {
    PagePool::new(pages)
        .map_err(|error| MissingFacility::unusable(format!("memory: {error}"), Some("more memory")))
}

fn refuse_migration<T>(reason: impl Into<String>, remedy: &str) -> Result<T, MissingFacility> {
    Err(MissingFacility::unusable(reason, Some(remedy)))
}

/// The same as [`measure_page_move_ns`], for callers that color programs themselves and therefore must read the frames
/// of pages too.
///
/// # Errors
/// The missing prerequisite, with its remedy.
pub fn measure_page_move_ns_with_frames() -> Result<f64, MissingFacility> {
    let pool = new_pool(1)?;
    if pool.read_frames()[0].is_none() {
        return refuse_migration(
            "frame numbers are hidden from this user",
            "root, or CAP_SYS_ADMIN",
        );
    }
    measure_page_move_ns()
}

/// Median time of giving one page another frame: out, copied, in. This exercises everything that a daemon needs to
/// request other colors from agents, except frame numbers, which only the agents read.
///
/// # Errors
/// The missing prerequisite, with its remedy.
pub fn measure_page_move_ns() -> Result<f64, MissingFacility> {
    if !cfg!(target_arch = "x86_64") {
        return refuse_migration("pages are colored on x86-64 only", "an x86-64 host");
    }
    let program_pool = new_pool(MEASURED_PAGES)?;
    let fresh_pool = new_pool(MEASURED_PAGES)?;
    let parking_pool = new_pool(1)?;
    let fault_fd = userfaultfd::open();
    if fault_fd < 0 {
        let reason = format!(
            "userfaultfd: {}",
            io::Error::from_raw_os_error(-fault_fd as i32)
        );
        return refuse_migration(
            reason,
            "root, CAP_SYS_PTRACE, or sysctl vm.unprivileged_userfaultfd=1",
        );
    }
    // SAFETY: a descriptor of our own, closed at the end of this function.
    let _fd_owner =
        unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fault_fd as i32) };
    if userfaultfd::enable_features(fault_fd, userfaultfd::FEATURE_MOVE) < 0 {
        return refuse_migration(
            "this kernel cannot move pages between frames (UFFDIO_MOVE)",
            "Linux 6.8 or newer",
        );
    }
    let bytes = (MEASURED_PAGES * PAGE_BYTES) as u64;
    let is_registered =
        userfaultfd::register_range(fault_fd, program_pool.page_address(0) as u64, bytes) >= 0
            && userfaultfd::register_range(
                fault_fd,
                parking_pool.page_address(0) as u64,
                PAGE_BYTES as u64,
            ) >= 0;
    // SAFETY: the pool's page; the destination of a move must be absent, and it has no reader.
    unsafe {
        libc::madvise(
            parking_pool.page_address(0).cast(),
            PAGE_BYTES,
            libc::MADV_DONTNEED,
        )
    };
    if !is_registered {
        return refuse_migration(
            "memory cannot be registered with userfaultfd",
            "a kernel with CONFIG_USERFAULTFD",
        );
    }
    let mut move_times_ns: Vec<u64> = Vec::with_capacity(MEASURED_PAGES);
    for index in 0..MEASURED_PAGES {
        let (page, fresh_page) = (
            program_pool.page_address(index),
            fresh_pool.page_address(index),
        );
        let start = Instant::now();
        if userfaultfd::move_page(fault_fd, page as u64, parking_pool.page_address(0) as u64) < 0 {
            continue;
        }
        // SAFETY: two pages that hold frames: the fresh one, and the one that was just taken out.
        unsafe { sys::copy_page(parking_pool.page_address(0), fresh_page) };
        let move_result = userfaultfd::move_page(fault_fd, fresh_page as u64, page as u64);
        move_times_ns.push(start.elapsed().as_nanos() as u64);
        if move_result < 0 {
            return refuse_migration(
                format!("a page could not be moved in: error {move_result}"),
                "another kernel",
            );
        }
        // SAFETY: as above. The frame that was taken out is returned to the kernel.
        unsafe {
            libc::madvise(
                parking_pool.page_address(0).cast(),
                PAGE_BYTES,
                libc::MADV_DONTNEED,
            )
        };
    }
    move_times_ns.sort_unstable();
    match move_times_ns.get(move_times_ns.len() / 2) {
        Some(&median_ns) if move_times_ns.len() > MEASURED_PAGES / 2 => Ok(median_ns as f64),
        _ => refuse_migration("pages could not be taken out", "another kernel"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are pages either movable at a known cost, or is the missing prerequisite named?
    #[test]
    fn pages_are_movable_or_the_missing_prerequisite_is_named() {
        match measure_page_move_ns() {
            Ok(cost_ns) => assert!(cost_ns > 0.0),
            Err(unusable) => {
                assert!(!unusable.reason.is_empty() && unusable.remedy.is_some());
                crate::skip_test::report_unchecked("moving pages", unusable.reason);
            }
        }
    }

    /// With only the rights that the shipped unit leaves a daemon: does moving work as for root, or is the reason
    /// named?
    #[test]
    fn the_units_rights_are_enough_to_move_pages() {
        let unit = include_str!("../../../../../packaging/cachemate.service");
        let line = unit
            .lines()
            .find_map(|line| line.strip_prefix("CapabilityBoundingSet="))
            .unwrap();
        let names = line
            .split_ascii_whitespace()
            .map(|name| format!(",+{}", name[4..].to_lowercase()));
        let bounds = format!("-all{}", names.collect::<String>());
        if !rustix::process::geteuid().is_root() || measure_page_move_ns().is_err() {
            crate::skip_test::report_unchecked(
                "moving pages by the unit's rights",
                "needs root and a kernel that moves pages",
            );
            return;
        }
        let mut command = std::process::Command::new("setpriv");
        command.args([
            "--inh-caps=-all",
            &format!("--bounding-set={bounds}"),
            "--no-new-privs",
        ]);
        command.arg(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "act::colors::migration::tests::pages_are_movable_or_the_missing_prerequisite_is_named",
            "--nocapture",
        ]);
        let out = command.output().unwrap();
        let message = String::from_utf8_lossy(&out.stdout);
        assert!(
            out.status.success() && message.contains("1 passed"),
            "{message}"
        );
        assert!(!message.contains("not shown here"), "{message}");
    }
}
