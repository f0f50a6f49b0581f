//! Tests the facilities for measuring and acting on this host, and names a remedy for each missing one: `cachemate
//! doctor`.
//!
//! Every facility is tested rather than assumed: counters against a loop that must miss, watchpoints by setting one,
//! the probe by its calibration. A missing facility is reported with its reason and its consequence.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use cachemate_core::{
    Ability, BandwidthSupport, Cache, CacheId, Capabilities, CpuSet, PartitionSupport, Support,
    Topology,
};
use serde::{Deserialize, Serialize};

use crate::MissingFacility;
use crate::act::resctrl::Resctrl;
use crate::act::{colors, gang_scheduler};
use crate::kernel::Kernel;
use crate::kernel::refused_calls::{KernelCall, PERF_RIGHTS};
use crate::kernel::text_files::field;
use crate::sense::counters::{EventSurvey, EventUnavailable};
use crate::sense::miss_trace::find_tracer;
use crate::sense::probes::{intensity, watchpoint};

mod resctrl_checks;

/// One way to measure or to act.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CapabilityCheck {
    /// Name of the measurement or change, for display.
    pub name: String,
    /// Whether it works on this host, could work, or does not exist.
    pub state: FacilityState,
    /// Its limits if it works, otherwise the reason.
    pub detail: String,
    /// The way to make it work, or to mend what limits it.
    pub remedy: Option<String>,
    /// Effect of its absence.
    pub consequence: String,
    /// Abilities of the machine that policies derive from it.
    #[serde(skip)]
    pub abilities: &'static [Ability],
}

impl CapabilityCheck {
    /// Was it tried on this host, and did it work?
    pub fn is_usable(&self) -> bool {
        self.state == FacilityState::Usable
    }
}

/// The state of a facility on this host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FacilityState {
    /// It was tried and works.
    Usable,
    /// It exists but cannot be used as the host is now: a right, an option or a free resource is missing.
    Unusable,
    /// The kernel or the processor does not have it.
    Absent,
}

impl FacilityState {
    /// The word that users read.
    pub fn describe(self) -> &'static str {
        match self {
            FacilityState::Usable => "usable",
            FacilityState::Unusable => "unusable",
            FacilityState::Absent => "absent",
        }
    }
}

/// Results for everything that was tried.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CapabilitySurvey {
    /// Ways to measure, best first.
    pub measures: Vec<CapabilityCheck>,
    /// Ways to act.
    pub enforces: Vec<CapabilityCheck>,
    /// Level of measurement: 1 = counters per task, 2 = probes from outside, 3 = topology and pressure only.
    pub level: u32,
}

fn build_check(
    name: &str,
    abilities: &'static [Ability],
    outcome: Result<String, MissingFacility>,
    consequence: &str,
) -> CapabilityCheck {
    let (state, detail, remedy) = match outcome {
        Ok(detail) => (FacilityState::Usable, detail, None),
        Err(missing) if missing.is_supported => {
            (FacilityState::Unusable, missing.reason, missing.remedy)
        }
        Err(missing) => (FacilityState::Absent, missing.reason, missing.remedy),
    };
    CapabilityCheck {
        name: name.to_string(),
        state,
        detail,
        remedy,
        consequence: consequence.to_string(),
        abilities,
    }
}

/// Tests every capability. With `must_calibrate`, the intensity probe is calibrated too, which takes a few hundred
/// milliseconds of one CPU.
pub fn survey_capabilities(
    kernel: &dyn Kernel,
    topology: &Topology,
    resctrl: &Result<Resctrl, MissingFacility>,
    events: &[EventSurvey],
    with_calibration: bool,
) -> CapabilitySurvey {
    let (counters, probe) = (
        check_counters(events),
        check_intensity_probe(topology, with_calibration),
    );
    let level = match (counters.is_usable(), probe.is_usable()) {
        (true, _) => 1,
        (false, true) => 2,
        (false, false) => 3,
    };
    let measures = vec![
        counters,
        check_sampling(kernel),
        resctrl_checks::check_monitoring(kernel, resctrl),
        resctrl_checks::check_package_events(resctrl),
        resctrl_checks::check_monitor_groups(kernel, resctrl),
        probe,
        check_watchpoints(),
        check_pressure(kernel),
        check_miss_traces(kernel, events),
    ];
    let enforces = vec![
        check_affinity(kernel),
        check_weights(kernel),
        check_cpusets(kernel),
        resctrl_checks::check_ways(resctrl),
        resctrl_checks::check_io_ways(kernel, resctrl),
        resctrl_checks::check_bandwidth(resctrl),
        resctrl_checks::check_slow_bandwidth(resctrl),
        check_page_colors(topology),
        check_gang_scheduler(kernel, Path::new(gang_scheduler::SOCKET)),
    ];
    CapabilitySurvey {
        measures,
        enforces,
        level,
    }
}

fn check_counters(events: &[EventSurvey]) -> CapabilityCheck {
    let (working_events, absent_events): (Vec<_>, Vec<_>) = events
        .iter()
        .partition(|event| event.absence_reason.is_none());
    let event_names = |events: &[&EventSurvey]| {
        events
            .iter()
            .map(|event| event.name)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let outcome = if working_events.is_empty() {
        let absence = absent_events
            .first()
            .and_then(|event| event.absence_reason.as_ref());
        let reason = absence.map(EventUnavailable::to_string).unwrap_or_default();
        Err(match absence {
            Some(EventUnavailable::NotPermitted) => {
                MissingFacility::unusable(reason, Some(PERF_RIGHTS))
            }
            _ => MissingFacility::absent(
                reason,
                Some("bare metal, or a hypervisor that exposes the PMU (vPMU)"),
            ),
        })
    } else if absent_events.is_empty() {
        Ok(format!(
            "all counted in a loop that must miss: {}",
            event_names(&working_events)
        ))
    } else {
        Ok(format!(
            "counted in a loop that must miss: {}; absent: {}",
            event_names(&working_events),
            event_names(&absent_events)
        ))
    };
    build_check(
        "counters per task",
        &[Ability::CountPerTask],
        outcome,
        "misses and speed of programs are not measured; intensity comes from probes",
    )
}

fn check_sampling(kernel: &dyn Kernel) -> CapabilityCheck {
    let outcome = crate::sense::sampling::find_facility(kernel)
        .map_err(|reason| {
            MissingFacility::absent(
                reason,
                Some("bare metal, or a hypervisor that passes PEBS or IBS on"),
            )
        })
        .and_then(|facility| match facility.check_usable() {
            Ok(()) => Ok(format!(
                "{}{}, opened on this thread or its CPU",
                facility.name,
                describe_processor(kernel)
            )),
            Err(error) => Err(MissingFacility::unusable(
                format!("{}: {error}", facility.name),
                Some(facility_remedy(&error)),
            )),
        });
    build_check(
        "data-address sampling",
        &[Ability::SampleAccesses],
        outcome,
        "data sharing between programs is not measured",
    )
}

/// The remedy for a sampling facility that exists but cannot be used.
fn facility_remedy(error: &io::Error) -> &'static str {
    let known_remedy = KernelCall::OpenCounter.remedy(error);
    known_remedy.unwrap_or("bare metal: the hypervisor shows the facility and does not pass it on")
}

fn check_miss_traces(kernel: &dyn Kernel, events: &[EventSurvey]) -> CapabilityCheck {
    let outcome = find_tracer(kernel, events)
        .map_err(|reason| {
            MissingFacility::absent(
                reason,
                Some("bare metal with an Intel server of Haswell or later"),
            )
        })
        .and_then(|tracer| match tracer.check_usable() {
            Ok((recorded, fetched)) => Ok(format!(
                "{}{}: {recorded} of {fetched} lines of a loop that must miss were recorded",
                tracer.name,
                describe_processor(kernel)
            )),
            Err(error) => Err(MissingFacility::unusable(
                format!("{}: {error}", tracer.name),
                Some(facility_remedy(&error)),
            )),
        });
    build_check(
        "traces of misses",
        &[Ability::TraceAddresses],
        outcome,
        "miss-rate curves come from watchpoints, from varied shares, or from recordings",
    )
}

/// The processor's name, which shows whether the processor is emulated.
fn describe_processor(kernel: &dyn Kernel) -> String {
    let text = kernel.read(Path::new("/proc/cpuinfo")).unwrap_or_default();
    field(&text, "model name")
        .map(|name| format!(" of '{name}'"))
        .unwrap_or_default()
}

/// Tests page colors with the rights that a daemon would have, which may be fewer than those of the user of `doctor`.
fn check_page_colors(topology: &Topology) -> CapabilityCheck {
    let divided_caches = colors::survey_partitions(topology);
    build_check(
        "page colors",
        &[],
        divided_caches.map(|caches| colors::describe_partitions(&caches)),
        "caches are divided by ways or not at all",
    )
}

/// Largest cache for which [`test_probe`] calibrates. Its buffer has half that size, and a sixteenth for the order of its
/// lines, so a daemon stays small although the hosts of virtual machines have caches of hundreds of megabytes.
const MAX_CALIBRATED_CACHE_BYTES: u64 = 32 << 20;

/// Tests whether the intensity probe can tell a hit from a miss on this host. Unlike the survey's calibration, this does not
/// find the size of the buffer that fits the cache.
///
/// # Errors
/// No CPUs share a cache, or hits and misses take times that cannot be told apart now.
pub fn test_probe(topology: &Topology) -> std::io::Result<()> {
    let bounded_size = |cache: &Cache| {
        cache
            .size_bytes
            .map(|bytes| bytes.min(MAX_CALIBRATED_CACHE_BYTES))
    };
    let cache = shared_cache(topology)
        .ok_or_else(|| std::io::Error::other("no last-level cache is shared by two CPUs"))?;
    calibrate_prober(bounded_size(cache)).map(|_| ())
}

fn shared_cache(topology: &Topology) -> Option<&Cache> {
    topology
        .caches
        .iter()
        .find(|cache| cache.last_level && cache.cpus.count() > 1)
}

fn check_intensity_probe(topology: &Topology, must_calibrate: bool) -> CapabilityCheck {
    let outcome = match shared_cache(topology) {
        None => Err(MissingFacility::absent(
            "the kernel names no last-level cache that two online CPUs share",
            Some("cachemate topology --probe measures it"),
        )),
        Some(_) if !must_calibrate => Ok("not calibrated (doctor without --quick does)".to_string()),
        Some(cache) => calibrate_prober(cache.size_bytes)
            .map(|probe| {
                let (cycles, mib) = (probe.min_miss_cycles(), probe.cache_bytes() >> 20);
                format!("calibrated: loads of at least {cycles} cycles are misses; the probe can fill about {mib} MiB of the cache")
            })
            .map_err(|error| {
                MissingFacility::unusable(error.to_string(), Some("try again while the host is quieter"))
            }),
    };
    build_check(
        "intensity from outside (prime, wait, reload)",
        &[Ability::ProbeFromOutside],
        outcome,
        "without it and without counters only topology is known",
    )
}

/// Tries up to three times, because busy neighbors blur a single calibration.
fn calibrate_prober(cache_bytes: Option<u64>) -> std::io::Result<intensity::PrimeProber> {
    let new_prober = |seed| intensity::PrimeProber::fit_to_cache(cache_bytes, seed);
    let is_worth_retrying = |error: &std::io::Error| error.kind() != std::io::ErrorKind::TimedOut;
    let mut prober = new_prober(1);
    for seed in [2, 3] {
        if prober.as_ref().is_err_and(is_worth_retrying) {
            prober = new_prober(seed);
        }
    }
    prober
}

fn check_watchpoints() -> CapabilityCheck {
    let outcome = watchpoint::test_watchpoint().map_err(|error| {
        let known_remedy = KernelCall::OpenWatchpoint.remedy(&error);
        let remedy =
            known_remedy.unwrap_or("CAP_PERFMON, and a hypervisor that passes debug registers on");
        MissingFacility::unusable(error.to_string(), Some(remedy))
    });
    build_check(
        "reuse times by hardware watchpoints",
        &[Ability::SampleReuses],
        outcome,
        "reuse times come from recordings only",
    )
}

fn check_pressure(kernel: &dyn Kernel) -> CapabilityCheck {
    let pressure = crate::sense::pressure::read(kernel);
    let outcome = if pressure.cpu.is_some() {
        Ok("cpu, memory, io".to_string())
    } else {
        Err(MissingFacility::absent(
            "no /proc/pressure",
            Some("a kernel with CONFIG_PSI, booted without psi=0"),
        ))
    };
    build_check(
        "pressure-stall information",
        &[],
        outcome,
        "waiting is seen per thread only",
    )
}

fn check_affinity(kernel: &dyn Kernel) -> CapabilityCheck {
    let own_pid = std::process::id() as i32;
    let outcome = kernel
        .affinity(own_pid)
        .and_then(|cpus: CpuSet| {
            kernel.set_affinity(own_pid, &cpus)?;
            Ok(kernel.affinity(own_pid)? == cpus)
        })
        .map_err(|error| MissingFacility::unusable(error.to_string(), None))
        .and_then(|is_kept| match is_kept {
            true => Ok("read and set on this process".to_string()),
            false => Err(MissingFacility::unusable(
                "the kernel accepted a mask and kept another",
                None,
            )),
        });
    build_check(
        "affinity per thread",
        &[Ability::Affinity],
        outcome,
        "nothing can be placed",
    )
}

fn check_weights(kernel: &dyn Kernel) -> CapabilityCheck {
    // SAFETY: no memory is passed.
    let is_root = unsafe { libc::geteuid() } == 0;
    let limits = kernel
        .read(Path::new("/proc/self/limits"))
        .unwrap_or_default();
    let nice_line = limits
        .lines()
        .find(|line| line.starts_with("Max nice priority"));
    // setpriority(2): a limit of 20 allows nice values down to 0, which an idle task needs to become a normal one
    // again.
    let nice_limit =
        nice_line.and_then(|line| line.split_ascii_whitespace().nth(3)?.parse::<u32>().ok());
    let may_raise_priority = is_root || nice_limit.is_some_and(|limit| limit >= 20);
    let outcome = if may_raise_priority {
        Ok("nice both ways; gangs by idle turns".to_string())
    } else {
        Err(MissingFacility::unusable(
            "nice values can only be lowered, never restored",
            Some("root or CAP_SYS_NICE: without it a lowered priority could not be raised again"),
        ))
    };
    build_check(
        "weights and gangs",
        &[Ability::Weights, Ability::Gangs],
        outcome,
        "no weights, no gangs, and no probe that keeps a program off its CPU",
    )
}

/// Tests the gang scheduler, and names the first missing prerequisite: the kernel, its options, the scheduler's loader,
/// a right.
fn check_gang_scheduler(kernel: &dyn Kernel, socket: &Path) -> CapabilityCheck {
    const FIRST_WITH_SCHED_EXT: (u32, u32) = (6, 12);
    /// The loader uses the interface of this release and later ones.
    const FIRST_SUPPORTED: (u32, u32) = (6, 18);
    let path_exists = |path: &str| kernel.list(Path::new(path)).is_ok();
    let release = kernel
        .read(Path::new("/proc/sys/kernel/osrelease"))
        .unwrap_or_default();
    let release = release.trim();
    let mut numbers = release
        .split(['.', '-', '+'])
        .map_while(|word| word.parse::<u32>().ok());
    let version = numbers.next().zip(numbers.next());
    let outcome = if !path_exists("/sys/kernel/sched_ext") {
        let missing_support = match version {
            Some(version) if version < FIRST_WITH_SCHED_EXT => {
                format!("Linux {release} has no sched_ext")
            }
            _ => format!("Linux {release} was built without CONFIG_SCHED_CLASS_EXT"),
        };
        Err(MissingFacility::absent(
            missing_support,
            Some("Linux 6.18 or later with CONFIG_SCHED_CLASS_EXT and CONFIG_DEBUG_INFO_BTF"),
        ))
    } else if version.is_some_and(|version| version < FIRST_SUPPORTED) {
        Err(MissingFacility::unusable(
            format!("Linux {release} has an older interface of sched_ext"),
            Some("Linux 6.18 or later"),
        ))
    } else if kernel
        .read(Path::new("/sys/kernel/btf/vmlinux"))
        .is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
    {
        let remedy = "Linux 6.18 or later with CONFIG_DEBUG_INFO_BTF";
        Err(MissingFacility::unusable(
            format!("Linux {release} has no type information (CONFIG_DEBUG_INFO_BTF)"),
            Some(remedy),
        ))
    } else {
        query_scheduler(socket)
    };
    let without_it = "gangs are idle turns, and advice on who should not run together is not kept";
    build_check(
        "gangs and clashes by a scheduler in the kernel (sched_ext)",
        &[Ability::Penalties],
        outcome,
        without_it,
    )
}

/// State of the scheduler's loader, by its own report.
fn query_scheduler(socket: &Path) -> Result<String, MissingFacility> {
    match gang_scheduler::SchedulerClient::new(socket).query_state() {
        Ok(state) if state.kernel == "enabled" => Ok(format!(
            "attached, {} last-level caches, {} threads",
            state.caches.len(),
            state.held
        )),
        Ok(state) => {
            let guard_reason = state
                .guarded
                .map(|reason| format!(": {reason}"))
                .unwrap_or_default();
            Err(MissingFacility::unusable(
                format!("the loader runs, the scheduler is detached{guard_reason}"),
                None,
            ))
        }
        Err(error) => {
            let remedy = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "run as root, because the loader's socket belongs to root"
                }
                _ => "start the loader as root: gangs run (docs/sched-ext.md)",
            };
            Err(MissingFacility::unusable(
                format!("the loader does not answer: {error}"),
                Some(remedy),
            ))
        }
    }
}

fn check_cpusets(kernel: &dyn Kernel) -> CapabilityCheck {
    let outcome = match crate::act::cpusets::find_hierarchy(kernel) {
        Some(hierarchy) => Ok(hierarchy.to_string()),
        None => Err(MissingFacility::unusable(
            "no cpuset controller, neither cgroup v1 nor v2",
            Some("mount cgroup v1 cpuset, or enable +cpuset in cgroup.subtree_control"),
        )),
    };
    build_check(
        "cpusets for groups",
        &[],
        outcome,
        "groups are placed thread by thread",
    )
}

/// Capabilities as policies see them. `partitions` lists how caches can be divided
/// ([`Resctrl::partitions`]), and `bandwidth` the limits of their traffic ([`Resctrl::bandwidth_limits`]).
pub fn policy_capabilities(
    survey: &CapabilitySurvey,
    partitions: Vec<(CacheId, PartitionSupport)>,
    bandwidth: Vec<(CacheId, BandwidthSupport)>,
    min_window_ns: u64,
) -> Capabilities {
    let support_of = |check: &CapabilityCheck| match check.is_usable() {
        true => Support::Yes {
            note: Some(check.detail.clone()),
        },
        false => Support::No {
            reason: check.detail.clone(),
            remedy: check.remedy.clone(),
        },
    };
    let unsupported = |reason: &str| Support::No {
        reason: reason.to_string(),
        remedy: None,
    };
    let mut abilities = BTreeMap::from([
        (
            Ability::CountPerCache,
            unsupported("misses of a whole cache are not counted on live hosts"),
        ),
        (
            Ability::CountSuperSets,
            unsupported("no counters per super set"),
        ),
        (
            Ability::Colors,
            unsupported("needs programs started by cachemate page-color run"),
        ),
    ]);
    for check in survey.measures.iter().chain(&survey.enforces) {
        abilities.extend(
            check
                .abilities
                .iter()
                .map(|ability| (*ability, support_of(check))),
        );
    }
    Capabilities {
        abilities,
        partitions,
        bandwidth,
        min_window_ns,
        min_slice_ns: Some(5_000_000),
    }
}

#[cfg(test)]
mod tests;
