//! Names of the calls that the kernel refuses, and what helps.
//!
//! Problem: "No space left on device" beside a program's name neither tells that the processor's four debug registers
//! are taken nor what to do. Method: whoever makes a call knows which one it was, and one table has the remedy of each
//! call and error. For example, `perf_event_open: No space left on device (os error 28); its four debug registers are
//! taken: end the debugger or the other daemon that watches it`. An error without a number is a sentence of our own,
//! and gets no remedy.

use std::io;

/// The right to count and to sample events of other programs.
pub(crate) const PERF_RIGHTS: &str =
    "run as root, give CAP_PERFMON, or lower kernel.perf_event_paranoid";
const THREAD_RIGHTS: &str = "run as root or as the program's user, or give CAP_SYS_NICE";

/// A call that the kernel may refuse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum KernelCall {
    GetAffinity,
    SetAffinity,
    SetNice,
    GetScheduler,
    SetScheduler,
    ReadFile,
    WriteFile,
    WriteCpuset,
    /// Moves a thread to a group by writing its id.
    JoinGroup,
    WriteSchemata,
    /// Makes or removes a class of service.
    MakeClass,
    OpenCounter,
    OpenWatchpoint,
    /// Lets other threads wait while a probe measures.
    HoldThreads,
}

impl KernelCall {
    fn name(self) -> &'static str {
        match self {
            KernelCall::GetAffinity => "sched_getaffinity",
            KernelCall::SetAffinity => "sched_setaffinity",
            KernelCall::SetNice => "setpriority",
            KernelCall::GetScheduler => "sched_getattr",
            KernelCall::SetScheduler => "sched_setscheduler",
            KernelCall::ReadFile => "read",
            KernelCall::WriteFile
            | KernelCall::WriteCpuset
            | KernelCall::JoinGroup
            | KernelCall::WriteSchemata => "write",
            KernelCall::MakeClass => "mkdir or rmdir",
            KernelCall::OpenCounter | KernelCall::OpenWatchpoint => "perf_event_open",
            KernelCall::HoldThreads => "sched_setscheduler or sched_setaffinity",
        }
    }

    /// What helps when the kernel refuses the call with this error; `None` if nothing is known.
    pub(crate) fn remedy(self, error: &io::Error) -> Option<&'static str> {
        use KernelCall::*;
        Some(match (self, error.raw_os_error()?) {
            (_, libc::ESRCH) => "the thread has exited, so nothing is to be done",
            (ReadFile | WriteFile | WriteCpuset | WriteSchemata, libc::ENOENT) => {
                "it is gone, so nothing is to be done"
            }
            (GetAffinity | SetAffinity | HoldThreads, libc::EPERM) => THREAD_RIGHTS,
            (SetNice | GetScheduler | SetScheduler, libc::EPERM | libc::EACCES) => THREAD_RIGHTS,
            (SetAffinity, libc::EINVAL) => {
                "none of these CPUs is online and in the thread's cpuset"
            }
            (SetScheduler, libc::EBUSY) => {
                "there is no room for another deadline task: lower its runtime"
            }
            (WriteCpuset | JoinGroup, libc::EBUSY) => {
                "another group has these CPUs for itself (cpuset.cpus.exclusive, or a partition)"
            }
            (WriteCpuset, libc::ENOSPC) => "a cpuset with processes cannot be empty",
            (WriteCpuset, libc::EINVAL) => {
                "name CPUs that are online and that the parent group has"
            }
            (MakeClass, libc::ENOSPC) => {
                "all classes of service or monitoring ids are taken: `cachemate doctor` names who has them"
            }
            (MakeClass | WriteSchemata, libc::EBUSY) => {
                "ways of the group are pseudo-locked: its owner has to remove it"
            }
            (WriteSchemata, libc::EINVAL) => {
                "`cachemate doctor` shows which masks and limits exist"
            }
            (
                ReadFile | WriteFile | WriteCpuset | JoinGroup | WriteSchemata | MakeClass,
                libc::EPERM | libc::EACCES | libc::EROFS,
            ) => "run as root, where the file system is mounted writable",
            (OpenCounter | OpenWatchpoint, libc::EPERM | libc::EACCES) => PERF_RIGHTS,
            (OpenWatchpoint, libc::ENOSPC) => {
                "its four debug registers are taken: end the debugger or the other daemon that watches it"
            }
            (OpenCounter, libc::EBUSY | libc::ENOSPC) => {
                "another profiler has the counters: end it"
            }
            (OpenCounter | OpenWatchpoint, libc::EINVAL | libc::ENOENT | libc::EOPNOTSUPP) => {
                "bare metal: the hypervisor shows the facility and does not pass it on"
            }
            (OpenCounter | OpenWatchpoint, libc::EMFILE) => {
                "raise the limit of open files (LimitNOFILE=)"
            }
            _ => return None,
        })
    }

    /// The error as a sentence: the call, its subject (a path, or `of thread 7`), the kernel's message, and what helps.
    pub(crate) fn describe(self, subject: &str, error: &io::Error) -> String {
        let space = if subject.is_empty() { "" } else { " " };
        let remedy = self
            .remedy(error)
            .map_or(String::new(), |remedy| format!("; {remedy}"));
        format!("{}{space}{subject}: {error}{remedy}", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a refusal name the call, its subject, the kernel's message and the remedy, if one is known, once each?
    #[test]
    fn a_refusal_names_call_subject_and_remedy() {
        let describe = |call: KernelCall, subject: &str, errno: i32| {
            call.describe(subject, &io::Error::from_raw_os_error(errno))
        };
        assert_eq!(
            describe(KernelCall::SetAffinity, "of thread 7", libc::EPERM),
            format!(
                "sched_setaffinity of thread 7: Operation not permitted (os error 1); {THREAD_RIGHTS}"
            )
        );
        assert!(
            describe(KernelCall::OpenWatchpoint, "", libc::ENOSPC).starts_with(
                "perf_event_open: No space left on device (os error 28); its four debug registers"
            )
        );
        assert!(
            describe(KernelCall::MakeClass, "/r/cachemate-1", libc::ENOSPC)
                .ends_with("`cachemate doctor` names who has them")
        );
        assert_eq!(
            describe(KernelCall::WriteFile, "/f", libc::EIO),
            "write /f: Input/output error (os error 5)"
        );
        let own_sentence = io::Error::other("the guardian has restored the host meanwhile");
        assert_eq!(
            KernelCall::SetNice.describe("of thread 7", &own_sentence),
            "setpriority of thread 7: the guardian has restored the host meanwhile"
        );
    }
}
