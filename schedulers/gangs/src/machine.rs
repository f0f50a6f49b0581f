//! This host's caches, and the prerequisites for sched_ext.

use gangs::maps::{MAX_CACHES, MAX_CPUS};
use std::fs;
use std::path::Path;

/// The last-level caches of this host, numbered from 0.
pub struct HostCaches {
    pub cache_of_cpu: Vec<u32>,
    /// CPUs of each cache, in the kernel's list form: "0-3".
    pub cpus_of_cache: Vec<String>,
}

impl HostCaches {
    /// Reads the last-level cache of each CPU. A CPU without caches is assigned to the first cache if it is offline.
    ///
    /// # Errors
    /// The kernel reports no caches, or more than the scheduler supports.
    pub fn read() -> Result<Self, String> {
        let cpus =
            libbpf_rs::num_possible_cpus().map_err(|error| format!("possible CPUs: {error}"))?;
        if cpus > MAX_CPUS {
            return Err(format!("found {cpus} CPUs, expected at most {MAX_CPUS}"));
        }
        let mut host_caches = HostCaches {
            cache_of_cpu: Vec::new(),
            cpus_of_cache: Vec::new(),
        };
        for cpu in 0..cpus {
            let last_level_cpus = last_level(cpu);
            let list = match last_level_cpus {
                Some(list) => list,
                None if is_online(cpu) => {
                    return Err(format!(
                        "/sys/devices/system/cpu/cpu{cpu}/cache: the kernel reports no unified cache"
                    ));
                }
                None => {
                    host_caches.cache_of_cpu.push(0);
                    continue;
                }
            };
            let known_cache = host_caches
                .cpus_of_cache
                .iter()
                .position(|shared_list| *shared_list == list);
            let cache = known_cache.unwrap_or_else(|| {
                host_caches.cpus_of_cache.push(list);
                host_caches.cpus_of_cache.len() - 1
            });
            host_caches.cache_of_cpu.push(cache as u32);
        }
        if host_caches.cpus_of_cache.len() > MAX_CACHES {
            return Err(format!(
                "found {} last-level caches, expected at most {MAX_CACHES}",
                host_caches.cpus_of_cache.len()
            ));
        }
        Ok(host_caches)
    }
}

/// Content of `shared_cpu_list` for the CPU's cache at the highest level.
fn last_level(cpu: usize) -> Option<String> {
    let caches = fs::read_dir(format!("/sys/devices/system/cpu/cpu{cpu}/cache")).ok()?;
    let read_trimmed =
        |path: &Path, name: &str| Some(fs::read_to_string(path.join(name)).ok()?.trim().to_owned());
    caches
        .flatten()
        .filter_map(|entry| {
            let path = entry.path();
            let is_unified = read_trimmed(&path, "type")? == "Unified";
            let level: u32 = read_trimmed(&path, "level")?.parse().ok()?;
            is_unified.then_some(())?;
            Some((level, read_trimmed(&path, "shared_cpu_list")?))
        })
        .max()
        .map(|(_, list)| list)
}

fn is_online(cpu: usize) -> bool {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/online"))
        .map_or(true, |text| text.trim() == "1")
}

/// The oldest kernel whose interface of sched_ext the scheduler uses.
const MIN_KERNEL: (u32, u32) = (6, 18);

/// Major and minor number of a kernel release such as `6.18.15+deb13-amd64`.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release
        .split(|symbol: char| !symbol.is_ascii_digit())
        .map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Prerequisites that this host lacks: kernel version, kernel option, privilege. Empty if it lacks none.
pub fn missing_prerequisites() -> Vec<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let mut missing = Vec::new();
    if !Path::new("/sys/kernel/sched_ext").exists() {
        missing.push(format!(
            "kernel {release} has no sched_ext (6.18 or later, CONFIG_SCHED_CLASS_EXT)"
        ));
    } else if kernel_version(release).is_some_and(|version| version < MIN_KERNEL) {
        missing.push(format!("kernel {release} is too old (6.18 or later)"));
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        missing.push(format!(
            "kernel {release} has no type information (CONFIG_DEBUG_INFO_BTF)"
        ));
    }
    // SAFETY: geteuid takes no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        missing
            .push("the privileges CAP_BPF, CAP_PERFMON, CAP_SYS_NICE (run it as root)".to_owned());
    }
    let state = sched_ext_state();
    if !matches!(state.as_str(), "disabled" | "") {
        missing.push(format!(
            "another scheduler is attached (/sys/kernel/sched_ext/state: {state})"
        ));
    }
    missing
}

/// State of sched_ext in the kernel's words (`enabled`, `disabled`, ...); empty if the kernel has no sched_ext.
pub fn sched_ext_state() -> String {
    fs::read_to_string("/sys/kernel/sched_ext/state")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are releases compared by number, and is a release without numbers left undecided?
    #[test]
    fn kernel_releases_compare_by_number() {
        assert!(kernel_version("6.12.48").unwrap() < MIN_KERNEL);
        assert!(kernel_version("6.18.15+deb13-amd64").unwrap() >= MIN_KERNEL);
        assert!(kernel_version("7.3.4").unwrap() >= MIN_KERNEL);
        assert_eq!(kernel_version("unknown"), None);
    }
}
