//! Describes this host as a machine: values from the kernel, and marked estimates for the rest.
//!
//! Predictors and the simulator need a machine file, and none exists for the user's own host. CPUs,
//! caches, clock, memory and classes of service are read from the kernel. Clock, latencies,
//! bandwidth, overlap, owned sizes, the traffic with which neighbors fill the caches and the
//! insertion of streams come from a calibration ([`HostCalibration`]), if there is one. The rest is
//! assumed to be that of a current server. Because a forecast is worth no more than the least of
//! these, `sources` says which keys are which.
//!
//! For example, the kernel of a guest reports an L3 of 300 MiB and the calibration sees misses from
//! 9 MiB on: the file has 9 MiB, marked `measured:`. Without a calibration it has 300, marked
//! `host:`.
//!
//! A host whose cores or caches differ from each other is rejected, because a description has only
//! one of each; the text reads back as a machine; CPUs are numbered as in descriptions, not as in
//! the kernel.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, bail};
use cachemate_core::{
    Cache, CacheLevel, CacheSpec, CoherenceSpec, CoreModel, Cpu, Estimate, Inclusion, MachineSpec,
    MemorySchedulingSpec, MemorySpec, OsSpec, PageSpec, PmuSpec, PrefetcherSpec, ReplacementPolicy,
    SamplerModel, SetIndexing, Topology, WayPartitions, WritePolicy,
};
use cachemate_linux::sense::calibration::{HostCalibration, SharingCheck, is_filled_by_others};
use cachemate_locality::memory_queue::{LineSource, QueueStation};

/// Largest factor by which the traffic of neighbors varies; the ends of what was measured are single samples.
const MAX_NEIGHBOR_SPREAD: f64 = 10.0;
/// Assumed clock frequency if the kernel does not report one.
const ASSUMED_HERTZ: u64 = 2_500_000_000;
const ASSUMED_MEMORY_BYTES: u64 = 64 << 30;
/// Assumed latency from the core to data in memory.
const ASSUMED_MEMORY_NS: f64 = 110.0;
const ASSUMED_REMOTE_NS: f64 = 190.0;
const MEMORY_BYTES_PER_S_PER_CORE: f64 = 4e9;
/// Instructions per cycle and in the window of a core of today, if not measured.
const ASSUMED_WIDTH: u32 = 6;
const ASSUMED_WINDOW: u32 = 320;
/// Misses that a core overlaps, if not measured.
const ASSUMED_OVERLAP: u32 = 24;
/// Of Zen 4 (13) to Golden Cove (17) by their optimization guides, and what decoding adds.
const ASSUMED_MISPREDICT_CYCLES: u32 = 17;
/// Lines that a prefetcher runs ahead at most: half a page.
const MAX_PREFETCH_DEGREE: f64 = 32.0;
/// Share of the latency that prefetchers must hide for a stride to count as detected.
const DETECTED_SHARE: f64 = 0.5;

/// Facts about the host besides its topology; `None` if it does not report them.
#[derive(Clone, Copy, Default)]
pub struct HostFacts {
    pub hertz: Option<u64>,
    pub memory_bytes: Option<u64>,
    /// Way partitions (classes of service) of the last level.
    pub classes: Option<WayPartitions>,
}

/// Maximum size of a kernel file: `/proc/cpuinfo` has about 1.5 KiB per CPU.
const MAX_KERNEL_FILE_BYTES: u64 = 16 << 20;

impl HostFacts {
    /// Reads the kernel's files below `root`.
    pub fn read(root: &Path) -> Self {
        let read_file = |file: &str| {
            cachemate_files::read_text_limited(&root.join(file), MAX_KERNEL_FILE_BYTES).ok()
        };
        let read_number = |file: &str| read_file(file)?.trim().parse::<u32>().ok();
        let parse_line_value = |text: &str, name: &str| {
            let value = text
                .lines()
                .find(|line| line.starts_with(name))?
                .split(':')
                .nth(1)?;
            value.split_ascii_whitespace().next()?.parse::<f64>().ok()
        };
        let info_dir = "sys/fs/resctrl/info/L3";
        let classes = read_number(&format!("{info_dir}/num_closids")).map(|groups| WayPartitions {
            groups,
            min_ways: read_number(&format!("{info_dir}/min_cbm_bits")).unwrap_or(1),
            contiguous: read_number(&format!("{info_dir}/sparse_masks")) != Some(1),
        });
        let megahertz =
            read_file("proc/cpuinfo").and_then(|text| parse_line_value(&text, "cpu MHz"));
        let kibibytes =
            read_file("proc/meminfo").and_then(|text| parse_line_value(&text, "MemTotal"));
        HostFacts {
            hertz: megahertz
                .filter(|mhz| *mhz >= 1.0)
                .map(|mhz| (mhz * 1e6).round() as u64),
            memory_bytes: kibibytes.map(|kib| kib as u64 * 1024),
            classes,
        }
    }
}

/// The host's description as TOML, which was parsed once and is valid.
///
/// # Errors
/// The host has several kinds of cores or caches, or does not report its caches.
pub fn machine_text(
    name: &str,
    topology: &Topology,
    facts: HostFacts,
    calibration: Option<&HostCalibration>,
) -> anyhow::Result<String> {
    let machine = build_machine(name, topology, facts, calibration)?;
    let text = toml::to_string(&machine).context("the machine cannot be written as TOML")?;
    // The text is parsed again, so that an error appears here rather than at the next command.
    let machine = cachemate_spec::parse_machine(name, &text)?;
    check_for_simulators(&machine)?;
    Ok(format!(
        "# Printed by 'cachemate topology --as-machine'. 'sources' says which keys are measured and which are assumed.\n{text}"
    ))
}

/// Checks what the simulators require of a machine beyond what its file does.
#[cfg(feature = "complete")]
fn check_for_simulators(machine: &MachineSpec) -> anyhow::Result<()> {
    Ok(cachemate_sim::check_machine(machine)?)
}

/// This command has no simulator that could refuse the machine.
#[cfg(not(feature = "complete"))]
fn check_for_simulators(_: &MachineSpec) -> anyhow::Result<()> {
    Ok(())
}

/// The host's description as a machine: measured where `calibration` has a value, and assumed elsewhere.
pub fn build_machine(
    name: &str,
    topology: &Topology,
    facts: HostFacts,
    calibration: Option<&HostCalibration>,
) -> anyhow::Result<MachineSpec> {
    let cpus: Vec<&Cpu> = topology.cpus.iter().filter(|cpu| cpu.online).collect();
    let contexts_per_core =
        uniform_group_size(&cpus, "CPUs of a core", |cpu| (cpu.package, cpu.core)).map_err(
            |error| match topology.cpus.len() - cpus.len() {
                0 => error,
                offline => error.context(format!(
                    "{offline} CPUs are offline: set their siblings offline too, or all online"
                )),
            },
        )?;
    let cores: BTreeSet<(u32, u32)> = cpus.iter().map(|cpu| (cpu.package, cpu.core)).collect();
    let packages: BTreeSet<u32> = cpus.iter().map(|cpu| cpu.package).collect();
    let cores_per_package = cores.len() / packages.len().max(1);
    if cores_per_package * packages.len() != cores.len() {
        bail!(
            "packages: found {} cores on {} packages, expected equally many on each",
            cores.len(),
            packages.len()
        );
    }
    if topology.caches.is_empty() {
        bail!(
            "caches: found none, expected at least one: the hypervisor hides them from this guest. Pass the host's caches \
             through (QEMU: -cpu host,host-cache-info=on), or copy a machine from 'cachemate topology --list' and edit its \
             caches"
        );
    }
    let reported_hertz = cpus.iter().find_map(|cpu| cpu.hertz).or(facts.hertz);
    let measured_hertz = calibration.and_then(|host| Some(host.clock_hertz?.value as u64));
    let clock_hertz = measured_hertz.or(reported_hertz).unwrap_or(ASSUMED_HERTZ);
    let cycles_of = |ns: f64| (ns * clock_hertz as f64 / 1e9).round().clamp(1.0, 1e6) as u32;
    let levels: BTreeSet<CacheLevel> = topology.caches.iter().map(|cache| cache.level).collect();
    let mut caches = Vec::new();
    for level in levels {
        caches.push(cache_spec(
            topology,
            level,
            contexts_per_core,
            cores_per_package as u32,
        )?);
    }
    let l3_cache = caches
        .last_mut()
        .filter(|cache: &&mut CacheSpec| cache.level == CacheLevel::L3);
    let l3_assignment = l3_cache.map(|cache| cache.way_partitions = facts.classes);
    let node_count = cpus
        .iter()
        .map(|cpu| cpu.memory_node)
        .collect::<BTreeSet<u32>>()
        .len()
        .max(1);
    // A machine's node covers whole packages, so the nodes of one package are described as one.
    let usable_node_count = if packages.len().is_multiple_of(node_count) {
        node_count
    } else if node_count.is_multiple_of(packages.len()) {
        packages.len()
    } else {
        1
    };
    let node_text = if usable_node_count == node_count {
        "memory.nodes".to_string()
    } else {
        format!(
            "memory.nodes ({node_count}, described as {usable_node_count}, one for each package)"
        )
    };
    let page_bytes = PageSpec::default().page_bytes;
    let memory_bytes = facts.memory_bytes.unwrap_or(ASSUMED_MEMORY_BYTES) / page_bytes * page_bytes;
    let mut sources = KeySources::default();
    sources.add(KeySource::Kernel, &format!("packages, cores_per_package, contexts_per_core, {node_text}, caches.ways, caches.line_bytes, caches.shared_by_cores"));
    sources.add(
        if measured_hertz.is_some() {
            KeySource::Measured
        } else {
            KeySource::known(reported_hertz)
        },
        "hertz",
    );
    sources.add(KeySource::known(facts.memory_bytes), "memory.size_bytes");
    let has_classes = facts.classes.is_some() && l3_assignment.is_some();
    sources.add(
        KeySource::known(has_classes.then_some(())),
        "caches.way_partitions",
    );
    sources.add(KeySource::Assumed, "pipeline.loads_pass, caches.replacement, caches.write, caches.inclusion, coherence, memory.remote_latency_cycles, memory.scheduling.demand_priority, pages, os, counters");
    let measured_levels = apply_calibration(&mut caches, calibration, clock_hertz, cycles_of);
    sources.add_caches(&caches, &measured_levels);
    let memory_ns = calibration.map_or(ASSUMED_MEMORY_NS, |host| host.memory_ns.value);
    let local_latency_cycles = cycles_of(memory_ns);
    let mshrs = calibration.map_or(ASSUMED_OVERLAP, |host| {
        host.overlapped_misses.value.round().clamp(1.0, 4096.0) as u32
    });
    let measured_width = calibration.and_then(|host| host.instr_per_cycle);
    let measured_window = calibration.and_then(|host| host.window_instr);
    let in_instr = |instr: Estimate, most: f64| instr.value.round().clamp(1.0, most) as u32;
    for (key, measured) in [
        ("pipeline.issue_width", measured_width),
        ("pipeline.window", measured_window),
    ] {
        sources.add(KeySource::measured(measured), key);
    }
    let assumed_bandwidth = (cores.len() / usable_node_count) as f64 * MEMORY_BYTES_PER_S_PER_CORE;
    let streaming_cores = caches.last().map_or(1, |cache| cache.shared_by_cores);
    let bytes_per_s = calibration.map_or(assumed_bandwidth, |host| {
        memory_bandwidth(host, streaming_cores, cores_per_package as u32)
    });
    let prefetchers = calibration.map_or_else(
        || {
            vec![PrefetcherSpec::Stride {
                level: CacheLevel::L2,
                streams: 32,
                degree: 2,
            }]
        },
        |host| {
            measured_prefetchers(
                host,
                caches.last().map_or(CacheLevel::L3, |cache| cache.level),
            )
        },
    );
    sources.add(
        KeySource::measured(calibration),
        "memory.local_latency_cycles, memory.scheduling.core_requests_in_flight, pipeline.mshrs, mispredict_cycles, prefetchers",
    );
    let has_seen_streams_together = calibration.filter(|host| {
        streaming_cores == 1
            || streams_together(host, streaming_cores, cores_per_package as u32).is_some()
    });
    sources.add(
        KeySource::measured(has_seen_streams_together),
        "memory.bytes_per_cycle",
    );
    Ok(MachineSpec {
        name: name.to_string(),
        description: format!("{name}: {} CPUs, as its kernel reports them", cpus.len()),
        sources: sources.describe(calibration),
        hertz: clock_hertz,
        packages: packages.len() as u32,
        cores_per_package: cores_per_package as u32,
        contexts_per_core,
        mispredict_cycles: Some(calibration.map_or(ASSUMED_MISPREDICT_CYCLES, |host| {
            cycles_of(host.mispredict_ns.value).clamp(1, 1000)
        })),
        pipeline: CoreModel::OutOfOrder {
            issue_width: measured_width.map_or(ASSUMED_WIDTH, |instr| in_instr(instr, 16.0)),
            window: measured_window.map_or(ASSUMED_WINDOW, |instr| in_instr(instr, 4096.0)),
            mshrs,
            loads_pass: true,
        },
        caches,
        coherence: CoherenceSpec {
            same_package_cycles: Some(cycles_of(0.75 * memory_ns)),
            other_package_cycles: (packages.len() > 1).then(|| cycles_of(0.75 * ASSUMED_REMOTE_NS)),
        },
        prefetchers,
        memory: MemorySpec {
            size_bytes: memory_bytes,
            nodes: usable_node_count as u32,
            local_latency_cycles,
            remote_latency_cycles: if usable_node_count > 1 {
                cycles_of(ASSUMED_REMOTE_NS / ASSUMED_MEMORY_NS * memory_ns)
            } else {
                local_latency_cycles
            },
            bytes_per_cycle: bytes_per_s / clock_hertz as f64,
            package_bus_bytes_per_cycle: None,
            bandwidth_limits: None,
            scheduling: MemorySchedulingSpec {
                demand_priority: true,
                core_requests_in_flight: calibration
                    .map(|host| core_reads_in_flight(host).round().clamp(1.0, 4096.0) as u32),
                ..MemorySchedulingSpec::default()
            },
        },
        pages: PageSpec::default(),
        os: OsSpec::default(),
        counters: PmuSpec {
            sampler: SamplerModel::Tagged,
            ..PmuSpec::default()
        },
    })
}

/// Where a key of the description comes from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum KeySource {
    Measured,
    Kernel,
    Assumed,
}

impl KeySource {
    fn known<T>(reported: Option<T>) -> Self {
        if reported.is_some() {
            KeySource::Kernel
        } else {
            KeySource::Assumed
        }
    }

    fn measured<T>(figure: Option<T>) -> Self {
        if figure.is_some() {
            KeySource::Measured
        } else {
            KeySource::Assumed
        }
    }
}

/// The keys of the description by source.
#[derive(Default)]
struct KeySources(std::collections::BTreeMap<KeySource, Vec<String>>);

impl KeySources {
    fn add(&mut self, source: KeySource, keys: &str) {
        self.0.entry(source).or_default().push(keys.to_string());
    }

    fn add_caches(&mut self, caches: &[CacheSpec], measured: &MeasuredCacheKeys) {
        for cache in caches {
            let name = cachemate_report::level_name(cache.level);
            let is_last = Some(cache.level) == caches.last().map(|last| last.level);
            let source_of = |is_measured: bool, otherwise: KeySource| {
                if is_measured {
                    KeySource::Measured
                } else {
                    otherwise
                }
            };
            self.add(
                source_of(
                    measured.latencies.contains(&cache.level),
                    KeySource::Assumed,
                ),
                &format!("latency_cycles of {name}"),
            );
            self.add(
                source_of(measured.sizes.contains(&cache.level), KeySource::Kernel),
                &format!("size_bytes of {name}"),
            );
            if cache.pool_bytes.is_some() {
                self.add(
                    KeySource::Measured,
                    &format!("neighbor_bytes_per_cycle, neighbor_spread of {name}"),
                );
                self.add(
                    source_of(measured.pools.contains(&cache.level), KeySource::Kernel),
                    &format!("pool_bytes of {name}"),
                );
            }
            if cache.apart_share.is_some() {
                self.add(KeySource::Measured, &format!("apart_share of {name}"));
            }
            if cache.probation_share.is_some() {
                self.add(KeySource::Measured, &format!("probation_share of {name}"));
            }
            if is_last {
                self.add(
                    source_of(cache.stream_insertion.is_some(), KeySource::Assumed),
                    &format!("stream_insertion of {name}"),
                );
            }
        }
    }

    fn describe(&self, calibration: Option<&HostCalibration>) -> Vec<String> {
        let describe_source = |(source, keys): (&KeySource, &Vec<String>)| {
            let prefix = match source {
                KeySource::Measured => "measured",
                KeySource::Kernel => "host",
                KeySource::Assumed => "estimate",
            };
            format!("{prefix}: {}", keys.join(", "))
        };
        let mut lines: Vec<String> = self.0.iter().map(describe_source).collect();
        if let Some(host) = calibration {
            let state = if host.calmness.is_busy {
                "while other work ran, so that figures may be off"
            } else {
                "on a calm host"
            };
            lines.push(format!(
                "calibration of {} (Linux {}, {}), {} s after 1970, {state}",
                host.host, host.kernel, host.processor, host.measured_at_s
            ));
            lines.extend(host.sharing.iter().map(SharingCheck::describe));
        }
        lines
    }
}

/// The keys of caches that a calibration sets.
struct MeasuredCacheKeys {
    latencies: BTreeSet<CacheLevel>,
    sizes: BTreeSet<CacheLevel>,
    pools: BTreeSet<CacheLevel>,
}

/// Sets the measured latencies of caches, the sizes of the last two, and the insertion of streams of the last one.
fn apply_calibration(
    caches: &mut [CacheSpec],
    calibration: Option<&HostCalibration>,
    clock_hertz: u64,
    cycles_of: impl Fn(f64) -> u32,
) -> MeasuredCacheKeys {
    let mut keys = MeasuredCacheKeys {
        latencies: BTreeSet::new(),
        sizes: BTreeSet::new(),
        pools: BTreeSet::new(),
    };
    let Some(host) = calibration else {
        return keys;
    };
    let shared_latency = host.shared_ns.map(|ns| (host.shared_level, ns));
    let private_latencies = host
        .private_latencies
        .iter()
        .map(|latency| (latency.level, latency.ns));
    for (level, ns) in private_latencies.chain(shared_latency) {
        for cache in caches.iter_mut().filter(|cache| cache.level == level) {
            cache.latency_cycles = cycles_of(ns.value);
            keys.latencies.insert(level);
        }
    }
    let largest_private = host.private_latencies.last().map(|latency| latency.level);
    for cache in caches
        .iter_mut()
        .filter(|cache| Some(cache.level) == largest_private)
    {
        let pool_bytes = cache.size_bytes;
        if let Some(bytes) = host.private_bytes {
            set_owned_size(cache, bytes.value);
            keys.sizes.insert(cache.level);
        }
        if let Some(lifetime_ns) = host.private_lifetime_ns {
            let_neighbors_fill(cache, pool_bytes, lifetime_ns, clock_hertz);
        }
    }
    if let Some(shared) = caches
        .iter_mut()
        .find(|cache| cache.level == host.shared_level)
    {
        if let Some(bytes) = host.shared_bytes {
            let shown_bytes = shared.size_bytes;
            set_owned_size(shared, bytes.value);
            keys.sizes.insert(shared.level);
            let is_pooled = is_filled_by_others(shared.size_bytes as f64, shown_bytes);
            if is_pooled && let Some(range) = host.neighbors.range(shown_bytes) {
                if host.neighbors.has_measured_pool() {
                    keys.pools.insert(shared.level);
                }
                let pool_bytes = range.pool_bytes.value as u64;
                shared.pool_bytes = Some(pool_bytes.clamp(shared.size_bytes, shown_bytes));
                shared.pool_spread = Some(spread_of(range.pool_bytes));
                shared.neighbor_bytes_per_cycle =
                    Some(range.bytes_per_ns.value * 1e9 / clock_hertz as f64);
                shared.neighbor_spread = Some(spread_of(range.bytes_per_ns));
                shared.probation_share = range.probation_share;
            }
        }
        shared.stream_insertion = host.stream_insertion.map(|share| share.value);
        shared.apart_share = host.neighbors.apart_share();
    }
    keys
}

/// Lets other systems fill a cache of `pool_bytes` once in this time.
fn let_neighbors_fill(
    cache: &mut CacheSpec,
    pool_bytes: u64,
    lifetime_ns: Estimate,
    clock_hertz: u64,
) {
    let lifetime_cycles = lifetime_ns.value * clock_hertz as f64 / 1e9;
    cache.pool_bytes = Some(pool_bytes);
    cache.neighbor_bytes_per_cycle = Some(pool_bytes as f64 / lifetime_cycles);
    cache.neighbor_spread = Some(spread_of(lifetime_ns));
}

/// The factor from the middle of a range to its ends.
fn spread_of(range: Estimate) -> f64 {
    (range.high / range.low)
        .sqrt()
        .clamp(1.0, MAX_NEIGHBOR_SPREAD)
}

/// Sets the size of a cache to whole sets, no more than it has.
fn set_owned_size(cache: &mut CacheSpec, owned_bytes: f64) {
    let row_bytes = u64::from(cache.ways) * u64::from(cache.line_bytes);
    let rows = ((owned_bytes / row_bytes as f64).round() as u64).max(1);
    cache.size_bytes = (rows * row_bytes).min(cache.size_bytes);
}

/// Bandwidth of streams on several cores at once, and their number; `None` if it was not measured.
fn streams_together(
    host: &HostCalibration,
    streaming_cores: u32,
    package_cores: u32,
) -> Option<(f64, u32)> {
    let of_package = host
        .bandwidth
        .package_read
        .map(|read| (read.value, package_cores));
    of_package.or_else(|| Some((host.bandwidth.cache_read?.value, streaming_cores)))
}

/// Bandwidth of a package's memory in bytes per second. Streams on all cores of a cache need not saturate it: it is the
/// bandwidth at which streams with the measured overlap slow each other down as much as measured.
fn memory_bandwidth(host: &HostCalibration, streaming_cores: u32, package_cores: u32) -> f64 {
    let alone = host.bandwidth.core_read.value;
    let Some((together, cores)) = streams_together(host, streaming_cores, package_cores) else {
        // How much streams slow each other down was not measured.
        return f64::from(streaming_cores) * alone;
    };
    let reads = saturating_bandwidth(host, alone, together, cores, 1.0);
    // A written line passes the bus twice, so that streams that write are nearer to saturation.
    let writes = host.bandwidth.cache_write.map(|together| {
        let alone = host.bandwidth.core_write.value;
        saturating_bandwidth(host, alone, together.value, streaming_cores, 2.0)
    });
    writes.map_or(reads, |writes| reads.max(writes))
}

/// Lines that a core has on their way while it reads as fast as it can (Little's law).
fn core_reads_in_flight(host: &HostCalibration) -> f64 {
    host.bandwidth.core_read.value * host.memory_ns.value / 64e9
}

/// The bandwidth at which this number of streams, each of which reads or writes `alone` bytes per second by itself, take
/// `together`, while each of their lines passes the bus so many times.
fn saturating_bandwidth(
    host: &HostCalibration,
    alone: f64,
    together: f64,
    cores: u32,
    passes: f64,
) -> f64 {
    let source = LineSource {
        cycles: 64e9 / alone,
        has_own_waits: true,
        lines: passes,
        reads: 1.0,
        max_in_flight: core_reads_in_flight(host),
        round_trip_cycles: host.memory_ns.value,
        together_lines: 1.0,
        random_share: 1.0,
        time_share: 1.0,
        ..LineSource::default()
    };
    let sources = vec![source; cores as usize];
    let throughput_at = |bytes_per_s: f64| {
        let station = QueueStation::in_order(64e9 / bytes_per_s);
        let solution = station.solve(&sources, 0.0);
        let cycles = source.cycles + station.added_cycles(&source, &solution);
        f64::from(cores) * 64e9 / cycles
    };
    // Streams that hardly slow each other down show a lower bound only.
    let (mut low, mut high) = (
        passes * together,
        passes * (2.0 * together).max(f64::from(cores) * alone),
    );
    for _ in 0..40 {
        let middle = 0.5 * (low + high);
        if throughput_at(middle) < together {
            low = middle
        } else {
            high = middle
        }
    }
    high
}

/// A prefetcher that detects the strides that the host's prefetchers hide. It runs ahead by the lines that are on their
/// way while a dependent stream takes the time that was measured (Little's law).
fn measured_prefetchers(host: &HostCalibration, last_level: CacheLevel) -> Vec<PrefetcherSpec> {
    let stream_ns = host
        .strides
        .iter()
        .find(|stride| stride.lines == 1)
        .map_or(host.memory_ns.value, |stride| stride.ns.value);
    let degree = (host.memory_ns.value / stream_ns)
        .round()
        .clamp(1.0, MAX_PREFETCH_DEGREE) as u32;
    let hides = |lines: u32| {
        host.strides
            .iter()
            .any(|stride| stride.lines == lines && stride.hidden_share >= DETECTED_SHARE)
    };
    let level = if last_level > CacheLevel::L2 {
        CacheLevel::L2
    } else {
        last_level
    };
    match (hides(1), hides(4)) {
        (_, true) => vec![PrefetcherSpec::Stride {
            level,
            streams: 32,
            degree,
        }],
        (true, false) => vec![PrefetcherSpec::NextLine {
            level,
            streams: 32,
            degree,
        }],
        (false, false) => Vec::new(),
    }
}

/// CPUs per group; an error that lists the sizes unless all groups have one.
fn uniform_group_size<K: Ord + std::fmt::Debug>(
    cpus: &[&Cpu],
    subject: &str,
    key: impl Fn(&Cpu) -> K,
) -> anyhow::Result<u32> {
    let mut group_sizes = std::collections::BTreeMap::<K, u32>::new();
    cpus.iter()
        .for_each(|cpu| *group_sizes.entry(key(cpu)).or_default() += 1);
    let distinct_sizes: BTreeSet<u32> = group_sizes.into_values().collect();
    match distinct_sizes.iter().copied().collect::<Vec<u32>>()[..] {
        [count] => Ok(count),
        _ => bail!(
            "{subject}: found {distinct_sizes:?} on one host, expected the same everywhere: a description has one kind of core"
        ),
    }
}

/// Describes the caches of one level as a single entry.
fn cache_spec(
    topology: &Topology,
    level: CacheLevel,
    contexts: u32,
    cores_per_package: u32,
) -> anyhow::Result<CacheSpec> {
    let online = topology.online();
    let name = cachemate_report::level_name(level);
    let level_caches: Vec<&Cache> = topology
        .caches
        .iter()
        .filter(|cache| cache.level == level)
        .collect();
    let common_size = |subject: &str, size_of: &dyn Fn(&Cache) -> Option<u64>| {
        let found: BTreeSet<Option<u64>> =
            level_caches.iter().map(|cache| size_of(cache)).collect();
        match found.iter().copied().collect::<Vec<_>>()[..] {
            [Some(value)] => Ok(value),
            [None] => bail!("{name}.{subject}: the kernel does not tell, expected a number"),
            _ => {
                bail!("{name}.{subject}: found {found:?} on one host, expected the same everywhere")
            }
        }
    };
    let cpus = common_size("cpus", &|cache| {
        Some(u64::from(cache.cpus.intersection(&online).count()))
    })? as u32;
    let cores = cpus / contexts;
    if cores == 0 || cores * contexts != cpus || !cores_per_package.is_multiple_of(cores) {
        bail!(
            "{name}.cpus: found {cpus}, expected whole cores, and equally many caches on each package of {cores_per_package} cores"
        );
    }
    // Modules of two cores share an L1 for instructions; a description gives each core its part.
    let is_split = level == CacheLevel::L1Instruction && cores > 1;
    let (divisor, shared_by_cores) = if is_split { (cores, 1) } else { (1, cores) };
    let size_bytes = common_size("size", &|cache| cache.size_bytes)? / u64::from(divisor);
    let latency_cycles = match level {
        CacheLevel::L1Instruction => 1,
        CacheLevel::L1Data => 4,
        CacheLevel::L2 => 14,
        CacheLevel::L3 => 60,
        CacheLevel::L4 => 120,
    };
    Ok(CacheSpec {
        level,
        size_bytes,
        ways: common_size("ways", &|cache| cache.ways.map(u64::from))? as u32,
        line_bytes: common_size("line", &|cache| cache.line_bytes.map(u64::from))? as u32,
        latency_cycles,
        replacement: ReplacementPolicy::Lru,
        stream_insertion: None,
        pool_bytes: None,
        neighbor_bytes_per_cycle: None,
        neighbor_spread: None,
        pool_spread: None,
        apart_share: None,
        probation_share: None,
        write: WritePolicy::Back,
        inclusion: Inclusion::NonInclusive,
        index: SetIndexing::Physical,
        shared_by_cores,
        slices: 1,
        bandwidth_bytes_per_cycle: None,
        way_partitions: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the description of a machine's topology have the same topology?
    #[test]
    fn a_topologys_description_has_the_same_topology() {
        for name in [
            "epyc-7763",
            "epyc-9755",
            "xeon-8490h",
            "altra-max",
            "xeon-x5365",
            "opteron-2350",
            "niagara-2core",
        ] {
            let topology = cachemate_spec::load_topology(name).unwrap();
            let text = machine_text(name, &topology, HostFacts::default(), None).unwrap();
            let again = cachemate_spec::parse_machine(name, &text).unwrap();
            assert_eq!(again.topology().caches, topology.caches, "{name}");
            let cpu_positions = |topology: &Topology| {
                topology
                    .cpus
                    .iter()
                    .map(|cpu| (cpu.id, cpu.core, cpu.package))
                    .collect::<Vec<_>>()
            };
            assert_eq!(
                cpu_positions(&again.topology()),
                cpu_positions(&topology),
                "{name}"
            );
            assert!(
                again.sources[1].starts_with("estimate")
                    && again.sources[1].contains("memory.size_bytes"),
                "{name}"
            );
        }
    }

    /// Is a host rejected with the place if its cores or caches differ, or if a value is unknown?
    #[test]
    fn an_irregular_host_is_rejected_with_the_place() {
        let whole = cachemate_spec::load_topology("epyc-7763").unwrap();
        let refusal_after = |change: &dyn Fn(&mut Topology)| {
            let mut topology = whole.clone();
            change(&mut topology);
            machine_text("x", &topology, HostFacts::default(), None)
                .unwrap_err()
                .to_string()
        };
        let l3 = whole
            .caches
            .iter()
            .position(|cache| cache.level == CacheLevel::L3)
            .unwrap();
        assert!(
            refusal_after(&|t| t.caches[l3].size_bytes = Some(16 << 20))
                .starts_with("L3.size: found {"),
            "sizes differ"
        );
        assert!(
            refusal_after(&|t| t.caches.iter_mut().for_each(|cache| cache.ways = None))
                .contains("ways: the kernel does not tell")
        );
        assert!(
            refusal_after(&|t| t.cpus[1].online = false)
                .starts_with("1 CPUs are offline: set their siblings offline too")
        );
        assert!(
            refusal_after(&|t| t.caches.clear()).starts_with("caches: found none"),
            "a guest whose hypervisor hides the caches"
        );
    }

    /// Are the memory nodes of a package described as one, with their number in the sources?
    #[test]
    fn memory_nodes_of_a_package_are_described_as_one() {
        let mut topology = cachemate_spec::load_topology("epyc-7763").unwrap();
        let cpu_count = topology.cpus.len();
        for (index, cpu) in topology.cpus.iter_mut().enumerate() {
            cpu.memory_node = (index * 4 / cpu_count) as u32;
        }
        let machine = build_machine("x", &topology, HostFacts::default(), None).unwrap();
        assert_eq!(machine.memory.nodes, machine.packages);
        assert!(machine.sources[0].contains("memory.nodes (4, described as 1"));
    }

    /// Is a module's shared L1 for instructions described so that every command accepts the machine?
    #[test]
    fn a_shared_instruction_cache_is_split_among_its_cores() {
        let mut topology = cachemate_spec::load_topology("xeon-x5365").unwrap();
        let is_instruction = |cache: &Cache| cache.level == CacheLevel::L1Instruction;
        let caches = std::mem::take(&mut topology.caches);
        let (l1_instruction, others): (Vec<Cache>, Vec<Cache>) =
            caches.into_iter().partition(is_instruction);
        let pairs = l1_instruction.chunks(2).map(|pair| Cache {
            cpus: pair[0].cpus.union(&pair[1].cpus),
            ..pair[0].clone()
        });
        topology.caches = pairs.chain(others).collect();
        let text = machine_text("x", &topology, HostFacts::default(), None).unwrap();
        let machine = cachemate_spec::parse_machine("x", &text).unwrap();
        assert_eq!(machine.caches[0].shared_by_cores, 1);
    }

    /// Are clock, memory and classes of service taken from the host's files, and missing values left as estimates?
    #[test]
    fn clock_memory_and_classes_are_taken_from_the_hosts_files() {
        let root = tempfile::tempdir().unwrap();
        let write_file = |file: &str, text: &str| {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write_file("proc/cpuinfo", "processor\t: 0\ncpu MHz\t\t: 2600.031\n");
        write_file(
            "proc/meminfo",
            "MemTotal:       16384000 kB\nMemFree: 1 kB\n",
        );
        write_file("sys/fs/resctrl/info/L3/num_closids", "16\n");
        write_file("sys/fs/resctrl/info/L3/min_cbm_bits", "1\n");
        write_file("sys/fs/resctrl/info/L3/sparse_masks", "1\n");
        let mut topology = cachemate_spec::load_topology("epyc-7763").unwrap();
        topology.cpus.iter_mut().for_each(|cpu| cpu.hertz = None);
        let machine = build_machine("x", &topology, HostFacts::read(root.path()), None).unwrap();
        assert_eq!(
            (machine.hertz, machine.memory.size_bytes),
            (2_600_031_000, 16_384_000 * 1024)
        );
        let classes = WayPartitions {
            groups: 16,
            min_ways: 1,
            contiguous: false,
        };
        assert_eq!(machine.caches.last().unwrap().way_partitions, Some(classes));
        assert!(
            !machine.sources[1].contains("hertz") && !machine.sources[1].contains("way_partitions"),
            "{:?}",
            machine.sources
        );
    }

    fn sample_calibration() -> HostCalibration {
        let text = include_str!("sample_calibration.json");
        serde_json::from_str(text).unwrap()
    }

    /// Are measured values in the description, is each named as measured, and is the shared cache the part that the
    /// guest owns?
    #[test]
    fn measured_values_are_in_the_description_and_named() {
        let mut topology = cachemate_spec::load_topology("epyc-7763").unwrap();
        topology.cpus.iter_mut().for_each(|cpu| cpu.hertz = None);
        let mut calibration = sample_calibration();
        calibration.host = "guest".to_string();
        let text =
            machine_text("guest", &topology, HostFacts::default(), Some(&calibration)).unwrap();
        let machine = cachemate_spec::parse_machine("guest", &text).unwrap();
        let shared = machine.caches.last().unwrap();
        assert_eq!(machine.hertz, 3_000_000_000);
        assert_eq!(shared.size_bytes, 9 << 20);
        assert_eq!(machine.caches[2].size_bytes, 384 << 10);
        assert_eq!(
            (
                shared.latency_cycles,
                shared.stream_insertion,
                shared.pool_bytes,
            ),
            (75, Some(0.2), Some(24 << 20))
        );
        // The pool, of which 24 of 32 MiB were found, is filled once in 12 ms at 3 GHz; one sample does not tell how
        // that varies.
        let neighbors = shared.neighbor_bytes_per_cycle.unwrap();
        assert!(
            (neighbors / (f64::from(24 << 20) / 36e6) - 1.0).abs() < 1e-9,
            "{neighbors}"
        );
        assert_eq!(shared.neighbor_spread, Some(2.0));
        assert_eq!(shared.probation_share, Some(0.25));
        assert_eq!(shared.pool_spread, Some(1.0));
        // Another thread on the core fills the 512 KiB of the private cache once in 6 ms.
        let private_neighbors = machine.caches[2].neighbor_bytes_per_cycle.unwrap();
        assert!(
            (private_neighbors / (f64::from(512 << 10) / 18e6) - 1.0).abs() < 1e-9,
            "{private_neighbors}"
        );
        assert_eq!(machine.memory.local_latency_cycles, 420);
        assert_eq!(machine.mispredict_cycles, Some(18));
        assert!(matches!(
            machine.pipeline,
            CoreModel::OutOfOrder {
                mshrs: 14,
                issue_width: 4,
                window: 248,
                ..
            }
        ));
        let measured = &machine.sources[0];
        for key in [
            "hertz",
            "mispredict_cycles",
            "neighbor_bytes_per_cycle, neighbor_spread of L3",
            "pool_bytes of L3",
            "stream_insertion of L3",
            "pipeline.issue_width",
            "pipeline.window",
            "size_bytes of L3",
            "size_bytes of L2",
            "latency_cycles of L2",
        ] {
            assert!(
                measured.starts_with("measured") && measured.contains(key),
                "{measured}"
            );
        }
        let bytes_per_s = machine.memory.bytes_per_cycle * 3e9;
        assert!(bytes_per_s > 36e9 && bytes_per_s < 120e9, "{bytes_per_s}");
    }

    /// Is the bandwidth the measured one if streams saturate it, and at least that if they do not slow each other down?
    #[test]
    fn bandwidth_follows_from_how_much_streams_slow_each_other_down() {
        let bandwidth_of = |alone: f64, together: f64| {
            let mut calibration = sample_calibration();
            calibration.bandwidth.core_read = cachemate_core::Estimate::exact(alone);
            calibration.bandwidth.cache_read = Some(cachemate_core::Estimate::exact(together));
            memory_bandwidth(&calibration, 8, 8)
        };
        let saturated = bandwidth_of(20e9, 40e9);
        assert!((saturated / 40e9 - 1.0).abs() < 0.1, "{saturated}");
        let lower_bound = bandwidth_of(10e9, 79e9);
        assert!((79e9..=158e9).contains(&lower_bound), "{lower_bound}");
    }
}
