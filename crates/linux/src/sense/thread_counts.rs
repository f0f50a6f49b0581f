//! Counts that the kernel keeps of each thread in `/proc`.

use std::path::{Path, PathBuf};

use crate::kernel::text_files::field;
use crate::kernel::{Kernel, ThreadStat};

/// Time on a processor so far.
pub(crate) fn run_time_ns(kernel: &dyn Kernel, pid: i32, stat: &ThreadStat) -> Option<u64> {
    read_schedstat(kernel, pid, stat.key.tid).0
}

pub(crate) fn read_schedstat(kernel: &dyn Kernel, pid: i32, tid: i32) -> SchedstatTimes {
    parse_times(&kernel.read(&schedstat_path(pid, tid)).unwrap_or_default())
}

/// Time on a processor and time waiting for one, in nanoseconds, and the number of times that it was given one.
pub(crate) type SchedstatTimes = (Option<u64>, Option<u64>, Option<u64>);

pub(crate) fn schedstat_path(pid: i32, tid: i32) -> PathBuf {
    // The file of a process is that of its first thread, and costs less to open.
    PathBuf::from(if tid == pid {
        format!("/proc/{pid}/schedstat")
    } else {
        format!("/proc/{pid}/task/{tid}/schedstat")
    })
}

pub(crate) fn parse_times(text: &str) -> SchedstatTimes {
    let mut fields = text
        .split_ascii_whitespace()
        .map(|field| field.parse::<u64>().ok());
    let mut next_field = || fields.next().flatten();
    (next_field(), next_field(), next_field())
}

/// Read and write calls of a thread so far.
pub(crate) fn read_calls(kernel: &dyn Kernel, pid: i32, tid: i32) -> Option<u64> {
    let text = kernel
        .read(Path::new(&format!("/proc/{pid}/task/{tid}/io")))
        .ok()?;
    let count = |name| field(&text, name)?.parse::<u64>().ok();
    Some(count("syscr")?.saturating_add(count("syscw")?))
}

/// Voluntary context switches of a thread so far.
pub(crate) fn read_waits(kernel: &dyn Kernel, pid: i32, tid: i32) -> Option<u64> {
    let text = kernel
        .read(Path::new(&format!("/proc/{pid}/task/{tid}/status")))
        .ok()?;
    field(&text, "voluntary_ctxt_switches")?.parse().ok()
}
