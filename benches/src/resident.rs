//! Resident memory of this process, as the kernel counts it.

use std::path::Path;

/// The largest resident memory in bytes since the process began, or since [`reset_peak`]; `None` if it is unknown.
pub fn peak_bytes() -> Option<u64> {
    let status =
        cachemate_files::read_text_limited(Path::new("/proc/self/status"), 1 << 16).ok()?;
    let kilobytes = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"))?;
    Some(kilobytes.trim().parse::<u64>().ok()? << 10)
}

/// Makes the peak the present memory; returns whether it could.
pub fn reset_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}
