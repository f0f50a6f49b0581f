//! Meanings of counter events, by the processor's vendor, family and model.
//!
//! Problem: the kernel's generic names do not mean the same everywhere: on AMD Zen `cache-misses` counts the L2's
//! misses (its L3 counters belong to the cache, not to a task), and `stalled-cycles-backend` counts waits for anything.
//! Method: a table of raw events per family, from the vendors' own event lists as Linux carries them
//! (tools/perf/pmu-events/arch/x86); generic events are used only if they are known to mean the last level. Arm's
//! REMOTE_ACCESS counts another socket's memory along with its caches, and is not used. Properties: pure; an event
//! without an entry is absent, with the reason; a named event must still count in the must-miss loop
//! ([`crate::sense::counters::survey`]).

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;

use cachemate_core::{CacheLevel, CounterEvent, StallCause};
use perf_event_open_sys as perf;
use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_CACHE_MISSES, PERF_COUNT_HW_CACHE_REFERENCES, PERF_COUNT_HW_CPU_CYCLES,
    PERF_COUNT_HW_INSTRUCTIONS, PERF_TYPE_HARDWARE, PERF_TYPE_RAW,
};

use crate::kernel::text_files::field;

/// A processor as `/proc/cpuinfo` names it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Processor {
    /// `vendor_id`, such as `GenuineIntel`.
    pub vendor: String,
    /// `cpu family`.
    pub family: u32,
    /// `model`.
    pub model: u32,
}

impl Processor {
    /// The first processor in the text of `/proc/cpuinfo`; `None` if it has no such fields (other architectures).
    pub fn parse(cpuinfo: &str) -> Option<Self> {
        let parse_number = |name: &str| field(cpuinfo, name)?.parse().ok();
        Some(Processor {
            vendor: field(cpuinfo, "vendor_id")?.to_string(),
            family: parse_number("cpu family")?,
            model: parse_number("model")?,
        })
    }
}

/// Opens an event of a thread and a CPU in the group of a leader's descriptor; -1 stands for any CPU. This function
/// sets the size of the attributes.
///
/// # Errors
/// The kernel's error.
pub(crate) fn open_event(
    mut attr: perf::bindings::perf_event_attr,
    (tid, cpu): (i32, i32),
    leader: Option<i32>,
) -> io::Result<File> {
    attr.size = size_of::<perf::bindings::perf_event_attr>() as u32;
    let flags = u64::from(perf::bindings::PERF_FLAG_FD_CLOEXEC);
    // SAFETY: `attr` is a whole perf_event_attr of the stated size; the call returns a descriptor.
    let fd = unsafe { perf::perf_event_open(&raw mut attr, tid, cpu, leader.unwrap_or(-1), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and ours alone.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// The code of an event: type and configuration of perf_event_open(2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EventCode {
    /// `type` of the attributes.
    pub kind: u32,
    /// `config` of the attributes.
    pub config: u64,
}

/// Events of one kind of processor beyond the generic ones. Raw codes as `event | unit mask << 8 | counter mask <<
/// 24`.
struct EventTable {
    references: (&'static str, u64),
    misses: (&'static str, u64),
    /// Cycles in which nothing executes while a load that missed the last level is outstanding.
    memory_stalls: Result<(&'static str, u64), &'static str>,
    /// Lines from a cache beyond the last level: that of another socket, or of another cluster (AMD).
    remote_hits: Result<(&'static str, u64), &'static str>,
    /// Retired loads that missed the L2; the processor can record each of them with its address.
    traced_misses: Result<(&'static str, u64), &'static str>,
}

/// Architectural since 2006; missing requests include those of the L1 and L2 prefetchers.
const INTEL_REFERENCES: (&str, u64) = ("longest_lat_cache.reference", 0x4f2e);
const INTEL_MISSES: (&str, u64) = ("longest_lat_cache.miss", 0x412e);
const NO_INTEL_STALLS: &str = "no event is known of this model that counts waits for memory only";
const NO_REMOTE_HITS: &str =
    "no event is known of this model that counts lines out of another last-level cache";
const NO_INTEL_TRACES: &str =
    "no event is known of this model that records every load that missed the L2";
const INTEL: EventTable = EventTable {
    references: INTEL_REFERENCES,
    misses: INTEL_MISSES,
    memory_stalls: Err(NO_INTEL_STALLS),
    remote_hits: Err(NO_REMOTE_HITS),
    traced_misses: Err(NO_INTEL_TRACES),
};
/// Servers of Haswell and Broadwell: modified lines from another socket's caches, for retired loads.
const INTEL_EP: EventTable = EventTable {
    remote_hits: Ok(("mem_load_uops_l3_miss_retired.remote_hitm", 0x10d3)),
    traced_misses: Ok(("mem_load_uops_retired.l2_miss", 0x10d1)),
    ..INTEL
};
/// Skylake and later: stalls on L3 misses have an event of their own.
const INTEL_SINCE_SKYLAKE: EventTable = EventTable {
    references: INTEL_REFERENCES,
    misses: INTEL_MISSES,
    memory_stalls: Ok(("cycle_activity.stalls_l3_miss", 0x0600_06a3)),
    remote_hits: Err("this model has one last-level cache"),
    traced_misses: Ok(("mem_load_retired.l2_miss", 0x10d1)),
};
/// Servers from Skylake on, which have several sockets.
const INTEL_SERVERS_SINCE_SKYLAKE: EventTable = EventTable {
    remote_hits: Ok(("mem_load_l3_miss_retired.remote_hitm", 0x04d3)),
    ..INTEL_SINCE_SKYLAKE
};
const NO_AMD_TRACES: &str = "this family's IBS samples one operation in many, and never every miss";
const NO_AMD_STALLS: &str = "this family's events count waits for any load, not for memory only";
/// Zen and Zen 2 (and Hygon's Dhyana): demand fills of the L1. Sources outside the cluster are memory of either node,
/// and caches whose home is another die; caches of another cluster on the same die are counted together with hits and
/// left out.
const ZEN: EventTable = EventTable {
    references: ("ls_refills_from_sys: beyond the L2", 0x5a43),
    misses: ("ls_refills_from_sys: memory and other dies", 0x5843),
    memory_stalls: Err(NO_AMD_STALLS),
    remote_hits: Ok(("ls_refills_from_sys: caches of other dies", 0x1043)),
    traced_misses: Err(NO_AMD_TRACES),
};
/// Zen 3 and later: all fills of the L1, including prefetches; sources beyond the cluster are other clusters' caches
/// and memory.
const ZEN_3: EventTable = EventTable {
    references: ("ls_any_fills_from_sys: beyond the L2", 0x5e44),
    misses: ("ls_any_fills_from_sys: beyond the cluster", 0x5c44),
    memory_stalls: Err(NO_AMD_STALLS),
    remote_hits: Ok(("ls_any_fills_from_sys: other clusters' caches", 0x1444)),
    traced_misses: Err(NO_AMD_TRACES),
};

/// Models of family 6 with performance cores only, from Skylake to Granite Rapids. Hybrid ones count on two PMUs.
const SKYLAKE_AND_LATER_MODELS: [u32; 19] = [
    0x4e, 0x5e, 0x55, 0x66, 0x8e, 0x9e, 0xa5,
    0xa6, // Skylake, Cascade and Cooper Lake, Cannon, Kaby, Coffee, Comet Lake
    0x7d, 0x7e, 0x6a, 0x6c, 0x8c, 0x8d, 0xa7, // Ice, Tiger, Rocket Lake
    0x8f, 0xcf, 0xad, 0xae, // Sapphire, Emerald, Granite Rapids
];

/// The server models among them.
const SKYLAKE_AND_LATER_SERVER_MODELS: [u32; 7] = [0x55, 0x6a, 0x6c, 0x8f, 0xcf, 0xad, 0xae];
const INTEL_EP_MODELS: [u32; 2] = [0x3f, 0x4f];

fn find_event_table(processor: &Processor) -> Option<&'static EventTable> {
    match (processor.vendor.as_str(), processor.family) {
        ("GenuineIntel", 6) if SKYLAKE_AND_LATER_SERVER_MODELS.contains(&processor.model) => {
            Some(&INTEL_SERVERS_SINCE_SKYLAKE)
        }
        ("GenuineIntel", 6) if INTEL_EP_MODELS.contains(&processor.model) => Some(&INTEL_EP),
        ("GenuineIntel", 6) if SKYLAKE_AND_LATER_MODELS.contains(&processor.model) => {
            Some(&INTEL_SINCE_SKYLAKE)
        }
        ("GenuineIntel", 6) => Some(&INTEL),
        ("AuthenticAMD", 0x17) | ("HygonGenuine", 0x18) => Some(&ZEN),
        ("AuthenticAMD", 0x19 | 0x1a) => Some(&ZEN_3),
        _ => None,
    }
}

/// Whether an event counts on this host, or the reason why not.
#[derive(Clone, PartialEq, Debug)]
pub struct EventSurvey {
    /// Its meaning for policies.
    pub event: CounterEvent,
    /// The vendor's or the kernel's name of it.
    pub name: &'static str,
    /// Its code; `None` if no such event is known.
    pub code: Option<EventCode>,
    /// `None` if it counts.
    pub absence_reason: Option<EventUnavailable>,
}

/// The reason why an event does not count on this host.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EventUnavailable {
    /// The vendor's tables know no such event for this processor.
    #[error("{0}")]
    Unknown(String),
    /// The open call knows no such event.
    #[error("the processor or hypervisor does not offer it")]
    NotOffered,
    /// The open call is refused to this user.
    #[error("not permitted (kernel.perf_event_paranoid, or CAP_PERFMON)")]
    NotPermitted,
    /// The kernel refused the event for another reason.
    #[error("{0}")]
    Refused(String),
    /// It was open, but never on a counter while the loop ran.
    #[error("it was given no time to count: all counters are taken")]
    NeverScheduled,
    /// It counted zero, although it was on a counter all the time, or part of it.
    #[error("it read a hard zero in a loop that must count")]
    HardZero,
    /// The count does not match the number of lines that the loop fetched.
    #[error(
        "it read {scaled} while {fetched} lines were fetched from memory: it counts something else"
    )]
    WrongEvent {
        /// The count, divided by the share of the time in which it was counted.
        scaled: u64,
        /// Lines that the loop flushed and loaded again.
        fetched: u64,
    },
}

/// The events to try on a processor whose last level is `last_level`.
pub fn events_for(processor: Option<&Processor>, last_level: CacheLevel) -> Vec<EventSurvey> {
    let named_event = |event, name, kind, config| EventSurvey {
        event,
        name,
        code: Some(EventCode { kind, config }),
        absence_reason: None,
    };
    let generic_event =
        |event, name, config: u32| named_event(event, name, PERF_TYPE_HARDWARE, config.into());
    let raw_event = |event, (name, config)| named_event(event, name, PERF_TYPE_RAW, config);
    let (references, misses) = (
        CounterEvent::References(last_level),
        CounterEvent::Misses(last_level),
    );
    let stalls = CounterEvent::StallCycles(StallCause::LocalMemory);
    let absent_event = |event, name| {
        move |reason: &str| EventSurvey {
            event,
            name,
            code: None,
            absence_reason: Some(EventUnavailable::Unknown(reason.to_string())),
        }
    };
    let (absent_stalls, absent_remote_hits) = (
        absent_event(stalls, "memory stalls"),
        absent_event(CounterEvent::RemoteCacheHits, "remote cache hits"),
    );
    let mut events = vec![
        generic_event(
            CounterEvent::Instructions,
            "instructions",
            PERF_COUNT_HW_INSTRUCTIONS,
        ),
        generic_event(CounterEvent::Cycles, "cycles", PERF_COUNT_HW_CPU_CYCLES),
    ];
    match processor.and_then(find_event_table) {
        Some(table) => {
            events.extend([
                raw_event(references, table.references),
                raw_event(misses, table.misses),
            ]);
            events.push(
                table
                    .memory_stalls
                    .map_or_else(absent_stalls, |named| raw_event(stalls, named)),
            );
            events.push(table.remote_hits.map_or_else(absent_remote_hits, |named| {
                raw_event(CounterEvent::RemoteCacheHits, named)
            }));
        }
        None => {
            events.push(generic_event(
                references,
                "cache-references",
                PERF_COUNT_HW_CACHE_REFERENCES,
            ));
            events.push(generic_event(
                misses,
                "cache-misses",
                PERF_COUNT_HW_CACHE_MISSES,
            ));
            events.push(absent_stalls(
                "no event is known of this processor that counts waits for memory only",
            ));
            events.push(absent_remote_hits(
                "no event is known of this processor that counts lines out of remote caches",
            ));
        }
    }
    events
}

/// The event that records every load that missed the L2 with its address, with the vendor's name.
///
/// # Errors
/// The reason why the processor has no such event.
pub fn traced_misses(
    processor: Option<&Processor>,
) -> Result<(&'static str, EventCode), &'static str> {
    let table = processor
        .and_then(find_event_table)
        .ok_or("no event is known of this processor that records every missed load")?;
    table.traced_misses.map(|(name, config)| {
        (
            name,
            EventCode {
                kind: PERF_TYPE_RAW,
                config,
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpuinfo(vendor: &str, family: u32, model: u32) -> String {
        format!(
            "processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: X model 3\n\n\
             processor\t: 1\nvendor_id\t: other\n"
        )
    }

    fn codes(vendor: &str, family: u32, model: u32) -> Vec<Option<(u32, u64)>> {
        let processor = Processor::parse(&cpuinfo(vendor, family, model)).unwrap();
        let event_codes = events_for(Some(&processor), CacheLevel::L3);
        event_codes[2..]
            .iter()
            .map(|named| named.code.map(|code| (code.kind, code.config)))
            .collect()
    }

    /// Does each family use the codes of its own event list, and is no event invented if it has none?
    #[test]
    fn each_family_has_its_own_codes() {
        let raw = |code| Some((4, code));
        let server = [raw(0x4f2e), raw(0x412e), raw(0x0600_06a3), raw(0x04d3)];
        assert_eq!(codes("GenuineIntel", 6, 0x8f), server);
        assert_eq!(
            codes("GenuineIntel", 6, 0x9e),
            [server[0], server[1], server[2], None],
            "one socket"
        );
        let haswell = codes("GenuineIntel", 6, 0x3f);
        assert_eq!(
            haswell,
            [server[0], server[1], None, raw(0x10d3)],
            "counts waits for the L2's misses"
        );
        assert_eq!(
            codes("AuthenticAMD", 0x17, 0x31),
            [raw(0x5a43), raw(0x5843), None, raw(0x1043)]
        );
        assert_eq!(
            codes("AuthenticAMD", 0x19, 0x11),
            [raw(0x5e44), raw(0x5c44), None, raw(0x1444)]
        );
        assert_eq!(
            codes("HygonGenuine", 0x18, 1),
            codes("AuthenticAMD", 0x17, 1)
        );
        let others = codes("CentaurHauls", 7, 0x3b);
        assert_eq!(
            others,
            [Some((0, 2)), Some((0, 3)), None, None],
            "by the kernel's names"
        );
    }

    /// Does only a processor that records every missed load have the event of a trace, and do the others say why not?
    #[test]
    fn traces_need_an_event_that_records_every_miss() {
        let traced = |vendor: &str, family, model| {
            let processor = Processor::parse(&cpuinfo(vendor, family, model)).unwrap();
            traced_misses(Some(&processor)).map(|(_, code)| (code.kind, code.config))
        };
        for model in [0x55, 0x8f, 0x9e, 0x3f, 0x4f] {
            assert_eq!(
                traced("GenuineIntel", 6, model),
                Ok((4, 0x10d1)),
                "{model:#x}"
            );
        }
        assert_eq!(
            traced("GenuineIntel", 6, 0x2d),
            Err(NO_INTEL_TRACES),
            "Sandy Bridge records no addresses of them"
        );
        assert!(
            traced("AuthenticAMD", 0x19, 0x11)
                .unwrap_err()
                .contains("IBS")
        );
        assert!(traced_misses(None).is_err());
    }

    /// Is a processor that /proc/cpuinfo does not describe in this form (Arm) unknown?
    #[test]
    fn other_architectures_are_unknown() {
        assert_eq!(
            Processor::parse("processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n"),
            None
        );
        let event_codes = events_for(None, CacheLevel::L3);
        assert_eq!(
            event_codes
                .iter()
                .filter(|named| named.code.is_some())
                .count(),
            4
        );
    }
}
