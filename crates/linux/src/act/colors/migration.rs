//! Tests whether pages can be moved on this host, and at what cost, on pages of this process.

use std::io;
use std::time::Instant;

use cachemate_agent::layout::PAGE_BYTES;
use cachemate_agent::sys::{self, fault};

use super::pool::{Pool, page_frames};

/// Pages that are moved for the measurement.
const PAGES: usize = 256;

/// The reason why pages cannot be moved on this host, and the remedy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MigrationUnavailable {
    /// The reason, as a sentence.
    pub reason: String,
    /// The remedy, as a sentence.
    pub remedy: String,
}

fn refuse_migration<T>(reason: impl Into<String>, remedy: &str) -> Result<T, MigrationUnavailable> {
    Err(MigrationUnavailable { reason: reason.into(), remedy: remedy.to_string() })
}

/// The same as [`page_ns`], for callers that color programs themselves and therefore must read the frames of pages too.
///
/// # Errors
/// The missing prerequisite, with its remedy.
pub fn page_ns_with_frames() -> Result<f64, MigrationUnavailable> {
    let memory =
        |error: io::Error| MigrationUnavailable { reason: format!("memory: {error}"), remedy: "more memory".into() };
    let page = Pool::new(1).map_err(memory)?;
    if page_frames(&cachemate_files::open_plain(std::path::Path::new("/proc/self/pagemap")), page.page(0) as usize, 1)
        [0]
    .is_none()
    {
        return refuse_migration("frame numbers are hidden from this user", "root, or CAP_SYS_ADMIN");
    }
    page_ns()
}

/// Median time of giving one page another frame: out, copied, in. This exercises everything that a daemon needs to
/// request other colors from programs' agents, except frame numbers, which only the agents see.
///
/// # Errors
/// The missing prerequisite, with its remedy.
pub fn page_ns() -> Result<f64, MigrationUnavailable> {
    if !cfg!(target_arch = "x86_64") {
        return refuse_migration("pages are colored on x86-64 only", "an x86-64 host");
    }
    let memory =
        |error: io::Error| MigrationUnavailable { reason: format!("memory: {error}"), remedy: "more memory".into() };
    let program = Pool::new(PAGES).map_err(memory)?;
    let fresh_pool = Pool::new(PAGES).map_err(memory)?;
    let aside = Pool::new(1).map_err(memory)?;
    // SAFETY: no memory is passed. Close-on-exec, non-blocking; faults in kernel mode are handled as well, because a
    // program's read(2) into fresh memory would fail otherwise.
    let file = unsafe { sys::call(sys::USERFAULTFD, [0o2_004_000, 0, 0, 0, 0, 0]) };
    if file < 0 {
        let reason = format!("userfaultfd: {}", io::Error::from_raw_os_error(-file as i32));
        return refuse_migration(reason, "root, CAP_SYS_PTRACE, or sysctl vm.unprivileged_userfaultfd=1");
    }
    // SAFETY: a descriptor of our own, closed at the end of this function.
    let _closer = unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(file as i32) };
    if fault::enable_features(file, fault::MOVE_PAGES) < 0 {
        return refuse_migration("this kernel cannot move pages between frames (UFFDIO_MOVE)", "Linux 6.8 or newer");
    }
    let bytes = (PAGES * PAGE_BYTES) as u64;
    let is_registered = fault::register_range(file, program.page(0) as u64, bytes) >= 0
        && fault::register_range(file, aside.page(0) as u64, PAGE_BYTES as u64) >= 0;
    // SAFETY: the pool's page; the destination of a move must be absent, and it has no reader.
    unsafe { libc::madvise(aside.page(0).cast(), PAGE_BYTES, libc::MADV_DONTNEED) };
    if !is_registered {
        return refuse_migration("memory cannot be registered with userfaultfd", "a kernel with CONFIG_USERFAULTFD");
    }
    let mut frames: Vec<u64> = Vec::with_capacity(PAGES);
    for index in 0..PAGES {
        let (page, fresh_page) = (program.page(index), fresh_pool.page(index));
        let start = Instant::now();
        if fault::move_page(file, page as u64, aside.page(0) as u64) < 0 {
            continue;
        }
        // SAFETY: two pages that hold frames: the fresh one, and the one that was just taken out.
        unsafe { sys::copy_page(aside.page(0), fresh_page) };
        let move_result = fault::move_page(file, fresh_page as u64, page as u64);
        frames.push(start.elapsed().as_nanos() as u64);
        if move_result < 0 {
            return refuse_migration(format!("a page could not be moved in: error {move_result}"), "another kernel");
        }
        // SAFETY: as above. The frame that was taken out is returned to the kernel.
        unsafe { libc::madvise(aside.page(0).cast(), PAGE_BYTES, libc::MADV_DONTNEED) };
    }
    frames.sort_unstable();
    match frames.get(frames.len() / 2) {
        Some(&middle) if frames.len() > PAGES / 2 => Ok(middle as f64),
        _ => refuse_migration("pages could not be taken out", "another kernel"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are pages either movable at a known cost, or is the missing prerequisite named?
    #[test]
    fn moving_works_or_says_why_not() {
        match page_ns() {
            Ok(cost_ns) => assert!(cost_ns > 0.0),
            Err(unusable) => {
                assert!(!unusable.reason.is_empty() && !unusable.remedy.is_empty());
                crate::skip_test::report_unchecked("moving pages", unusable.reason);
            }
        }
    }

    /// With only the rights that the shipped unit leaves a daemon: does moving work as for root, or is the reason
    /// named?
    #[test]
    fn the_units_rights_are_enough_to_move_pages() {
        let unit = include_str!("../../../../../packaging/cachemate.service");
        let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
        let names = line.split_ascii_whitespace().map(|name| format!(",+{}", name[4..].to_lowercase()));
        let bounds = format!("-all{}", names.collect::<String>());
        if !rustix::process::geteuid().is_root() || page_ns().is_err() {
            crate::skip_test::report_unchecked(
                "moving pages by the unit's rights",
                "needs root and a kernel that moves pages",
            );
            return;
        }
        let mut command = std::process::Command::new("setpriv");
        command.args(["--inh-caps=-all", &format!("--bounding-set={bounds}"), "--no-new-privs"]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", "act::colors::migration::tests::moving_works_or_says_why_not", "--nocapture"]);
        let out = command.output().unwrap();
        let message = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && message.contains("1 passed"), "{message}");
        assert!(!message.contains("not shown here"), "{message}");
    }
}
