//! `cachemate lab config`: prints the lab machine's configuration for a machine description.

use std::fmt::Write;

use anyhow::bail;
use cachemate_core::{
    CacheLevel, CacheSpec, Inclusion, MachineSpec, PrefetcherSpec, ReplacementPolicy,
};
use clap::Args;

use crate::session::Session;

/// Maximum number of CPUs of the lab's machine (lab/machine/config.h).
const MAX_CPUS: u32 = 16;
const MAX_L3S: u32 = 8;
const MAX_WAYS: u32 = 32;
const MAX_CLASSES: u32 = 16;
const MAX_COUNTERS: u32 = 4;
const MAX_PREFETCHES: u32 = 32;
const LINE_BYTES: u32 = 64;

/// Print the configuration of the lab's machine for a machine description
///
/// Each line has a name and a value, as lab/machine reads them; comments name the parts that are not modeled.
#[derive(Args)]
pub struct LabConfigArgs {
    /// Bundled machine (lab-2x16M, lab-vm, ...) or TOML file
    #[arg(long, short, value_name = "MACHINE", default_value = "lab-2x16M")]
    machine: String,
    #[command(flatten)]
    processor: ProcessorOptions,
}

/// Parts of a machine's processor that can be left out or added.
#[derive(Args, Clone, Copy, Default)]
pub struct ProcessorOptions {
    /// Without performance counters, as on many virtual machines
    #[arg(long)]
    no_counters: bool,
    /// Without way masks, occupancy and traffic (RDT)
    #[arg(long)]
    no_rdt: bool,
    /// With modeled samples of accesses (PEBS); accesses then cost the emulator more time
    #[arg(long, conflicts_with = "no_counters")]
    samples: bool,
    /// Cycles that the processor spends on one sample [default: 500]
    #[arg(long, value_name = "CYCLES", requires = "samples", value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    sample_cycles: Option<u32>,
    /// Mean number of loads per load whose latency is measured [default: 1, each]
    #[arg(long, value_name = "LOADS", requires = "samples", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    load_tag_interval: Option<u32>,
    /// Cores of a second type, as on a hybrid processor: the last ones of the machine
    #[arg(long, value_name = "CORES", value_parser = clap::value_parser!(u32).range(1..))]
    small_cores: Option<u32>,
    /// Cycles that a small core takes for an instruction [default: 2]
    #[arg(long, value_name = "CYCLES", requires = "small_cores", value_parser = clap::value_parser!(u32).range(1..=16))]
    small_instruction_cycles: Option<u32>,
    /// Size of a small core's L2 [default: that of the other cores]
    #[arg(long, value_name = "BYTES", requires = "small_cores")]
    small_l2_bytes: Option<u64>,
}

/// Emulated processor model whose sample format equals the one that the lab's machine writes.
const SAMPLING_PROCESSOR: &str = "family=6,model=85,stepping=4";

impl LabConfigArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let machine = cachemate_spec::load_machine(&self.machine)?;
        session.print(&render_config(&machine, self.processor)?)
    }
}

/// Caches of a machine in the form that the lab can model: private levels and one shared last level.
struct Levels<'a> {
    l1: &'a CacheSpec,
    l2: Option<&'a CacheSpec>,
    shared: &'a CacheSpec,
}

fn find_levels(machine: &MachineSpec) -> anyhow::Result<Levels<'_>> {
    let data_caches: Vec<&CacheSpec> = machine
        .caches
        .iter()
        .filter(|cache| cache.level != CacheLevel::L1Instruction)
        .collect();
    let (l1, l2, shared) = match data_caches[..] {
        [l1, shared] => (l1, None, shared),
        [l1, l2, shared] => (l1, Some(l2), shared),
        _ => bail!(
            "{}, caches: found {} levels of data, expected 2 or 3",
            machine.name,
            data_caches.len()
        ),
    };
    let private_caches = [Some(l1), l2];
    if let Some(cache) = private_caches
        .into_iter()
        .flatten()
        .find(|cache| cache.shared_by_cores != 1)
    {
        let (name, level, cores) = (&machine.name, cache.level, cache.shared_by_cores);
        bail!(
            "{name}, {level:?}.shared_by_cores: found {cores}, expected 1, as only the last level may be shared"
        );
    }
    Ok(Levels { l1, l2, shared })
}

fn check_machine(machine: &MachineSpec, levels: &Levels<'_>) -> anyhow::Result<()> {
    let name = &machine.name;
    let l3_count = machine.instance_count(levels.shared);
    for (field, found, limit) in [
        ("contexts_per_core", machine.contexts_per_core, 1),
        ("cores", machine.cores(), MAX_CPUS),
        ("last-level caches", l3_count, MAX_L3S),
    ] {
        if found > limit {
            bail!(
                "{name}, {field}: found {found}, expected at most {limit}, the limit of the lab's machine"
            );
        }
    }
    if levels.shared.shared_by_cores != machine.cores_per_package {
        let (found, cores) = (levels.shared.shared_by_cores, machine.cores_per_package);
        bail!(
            "{name}, {:?}.shared_by_cores: found {found}, expected {cores}: one for each package",
            levels.shared.level
        );
    }
    for cache in [Some(levels.l1), levels.l2, Some(levels.shared)]
        .into_iter()
        .flatten()
    {
        let (level, ways, line) = (cache.level, cache.ways, cache.line_bytes);
        if line != LINE_BYTES || ways > MAX_WAYS {
            bail!(
                "{name}, {level:?}: found {ways} ways of {line} bytes, expected up to {MAX_WAYS} of {LINE_BYTES}"
            );
        }
        if cache.replacement != ReplacementPolicy::Lru || cache.inclusion != Inclusion::NonInclusive
        {
            let (replacement, inclusion) = (cache.replacement, cache.inclusion);
            bail!(
                "{name}, {level:?}: found {replacement:?} and {inclusion:?}, expected Lru and NonInclusive"
            );
        }
    }
    Ok(())
}

/// The lab's configuration of a machine, with comments that name the parts that are not modeled.
pub fn render_config(machine: &MachineSpec, options: ProcessorOptions) -> anyhow::Result<String> {
    let levels = find_levels(machine)?;
    check_machine(machine, &levels)?;
    let Levels { l1, l2, shared } = levels;
    let cycles_beyond_l1 = |cycles: u32| u64::from(cycles.saturating_sub(l1.latency_cycles));
    let l2_cycles = cycles_beyond_l1(l2.map_or(l1.latency_cycles, |cache| cache.latency_cycles));
    let memory_cycles = machine.memory.local_latency_cycles;
    let streamer_limits = machine
        .prefetchers
        .iter()
        .find_map(|prefetcher| match prefetcher {
            PrefetcherSpec::NextLine {
                level,
                streams,
                degree,
            } if Some(*level) == l2.map(|cache| cache.level) => Some((
                (*streams).min(MAX_PREFETCHES),
                (*degree).min(MAX_PREFETCHES),
            )),
            _ => None,
        });
    let (streams, degree) = streamer_limits.unwrap_or((0, 0));
    let class_count = shared
        .way_partitions
        .filter(|_| !options.no_rdt)
        .map_or(0, |parts| parts.groups.min(MAX_CLASSES));
    let counter_count = if options.no_counters {
        0
    } else {
        machine.counters.count.min(MAX_COUNTERS)
    };
    let same_package_cycles = machine
        .coherence
        .same_package_cycles
        .unwrap_or(memory_cycles);
    let other_package_cycles = machine
        .coherence
        .other_package_cycles
        .unwrap_or(memory_cycles);
    let cycles_per_line = (f64::from(LINE_BYTES) / machine.memory.bytes_per_cycle)
        .round()
        .max(1.0) as u64;
    let mut settings: Vec<(&str, u64)> = vec![
        ("hertz", machine.hertz),
        ("cpus", machine.cpus().into()),
        ("cpus_per_l3", shared.shared_by_cores.into()),
        ("l1_bytes", l1.size_bytes),
        ("l1_ways", l1.ways.into()),
        ("l2_bytes", l2.map_or(0, |cache| cache.size_bytes)),
        ("l2_ways", l2.map_or(1, |cache| cache.ways.into())),
        ("l3_bytes", shared.size_bytes),
        ("l3_ways", shared.ways.into()),
        ("l3_slices", shared.slices.into()),
        ("l2_cycles", l2_cycles),
        ("l3_cycles", cycles_beyond_l1(shared.latency_cycles)),
        ("memory_cycles", cycles_beyond_l1(memory_cycles)),
        ("prefetch_streams", streams.into()),
        ("prefetch_degree", degree.into()),
        ("same_l3_cycles", cycles_beyond_l1(same_package_cycles)),
        ("other_l3_cycles", cycles_beyond_l1(other_package_cycles)),
        ("memory_cycles_per_line", cycles_per_line),
        ("memory_per_l3", has_own_memories(machine).into()),
        ("classes", class_count.into()),
        ("monitors", 2 * u64::from(class_count)),
        ("counters", counter_count.into()),
        ("memory_bytes", machine.memory.size_bytes),
    ];
    if options.samples {
        settings.push(("sampling", 1));
        let sampling_settings = [
            ("sample_cycles", options.sample_cycles),
            ("load_tag_interval", options.load_tag_interval),
        ];
        settings.extend(
            sampling_settings
                .into_iter()
                .filter_map(|(name, value)| Some((name, value?.into()))),
        );
    }
    if options.small_cores.is_some() {
        settings.extend(small_core_settings(machine, l2, l2_cycles, options)?);
    }
    if has_own_memories(machine) {
        settings.push((
            "remote_memory_cycles",
            cycles_beyond_l1(machine.memory.remote_latency_cycles),
        ));
    }
    let mut text = format!(
        "# A modeled machine: {}\nname {}\n",
        machine.description, machine.name
    );
    for feature in list_unmodeled_features(machine, streamer_limits.is_some()) {
        let _ = writeln!(text, "# not modeled: {feature}");
    }
    if has_own_memories(machine) {
        let _ = writeln!(text, "# qemu {}", memory_node_options(machine));
    }
    if options.samples {
        let _ = writeln!(
            text,
            "# modeled: samples of accesses (PEBS)\n# cpu {SAMPLING_PROCESSOR}"
        );
    }
    for (name, value) in settings {
        let _ = writeln!(text, "{name} {value}");
    }
    Ok(text)
}

/// Settings of the second type of cores, as pairs of key and value.
fn small_core_settings(
    machine: &MachineSpec,
    l2: Option<&CacheSpec>,
    l2_cycles: u64,
    options: ProcessorOptions,
) -> anyhow::Result<[(&'static str, u64); 5]> {
    let (name, cores, small_cores) = (
        &machine.name,
        machine.cores(),
        options.small_cores.unwrap_or(0),
    );
    if small_cores >= cores {
        bail!("{name}, small cores: found {small_cores}, expected fewer than its {cores} cores");
    }
    let Some(l2) = l2 else {
        bail!("{name}, small cores: found no L2, expected one that they can have of their own")
    };
    let size_bytes = options.small_l2_bytes.unwrap_or(l2.size_bytes);
    let sets = size_bytes / u64::from(l2.ways) / u64::from(LINE_BYTES);
    if !sets.is_power_of_two() || sets * u64::from(l2.ways) * u64::from(LINE_BYTES) != size_bytes {
        let ways = l2.ways;
        bail!(
            "{name}, L2 of small cores: found {size_bytes} bytes, expected a power of two of sets of {ways} lines"
        );
    }
    Ok([
        ("small_cpus", small_cores.into()),
        (
            "small_instruction_cycles",
            options.small_instruction_cycles.unwrap_or(2).into(),
        ),
        ("small_l2_bytes", size_bytes),
        ("small_l2_ways", l2.ways.into()),
        ("small_l2_cycles", l2_cycles),
    ])
}

/// Each package is one L3 of the lab's machine, so memory is local to it only if every package has a node.
fn has_own_memories(machine: &MachineSpec) -> bool {
    machine.memory.nodes > 1 && machine.memory.nodes == machine.packages
}

/// The emulator's options. The nodes divide the memory into equal parts, as the model of the machine does.
fn memory_node_options(machine: &MachineSpec) -> String {
    let (node_count, cpus_per_node) = (machine.memory.nodes, machine.cpus() / machine.memory.nodes);
    let size_mib = machine.memory.size_bytes / u64::from(node_count) / (1 << 20);
    let node_arguments = |id: u32| {
        let (first_cpu, last_cpu) = (id * cpus_per_node, (id + 1) * cpus_per_node - 1);
        format!(
            "-object memory-backend-ram,id=m{id},size={size_mib}M -numa node,nodeid={id},cpus={first_cpu}-{last_cpu},memdev=m{id}"
        )
    };
    (0..node_count)
        .map(node_arguments)
        .collect::<Vec<String>>()
        .join(" ")
}

fn list_unmodeled_features(machine: &MachineSpec, has_streamer: bool) -> Vec<String> {
    let mut missing_features = vec!["instruction fetches and page walks".to_string()];
    if !matches!(
        machine.pipeline,
        cachemate_core::CoreModel::InOrder {
            issue_width: 1,
            store_buffer: 0
        }
    ) {
        missing_features
            .push("the pipeline: one instruction per cycle, and every miss stalls".to_string());
    }
    let unmodeled_prefetchers = machine.prefetchers.len() - usize::from(has_streamer);
    if unmodeled_prefetchers > 0 {
        missing_features.push(format!(
            "{unmodeled_prefetchers} of its prefetchers: only a next-line prefetcher at a private L2 is"
        ));
    }
    if machine.memory.nodes > 1 && !has_own_memories(machine) {
        missing_features.push(
            "memory nodes: all memory is local, and all L3s share the bandwidth of one node"
                .to_string(),
        );
    }
    missing_features
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config_of(name: &str) -> anyhow::Result<String> {
        render_config(
            &cachemate_spec::load_machine(name).unwrap(),
            ProcessorOptions::default(),
        )
    }

    fn parse_value(text: &str, name: &str) -> u64 {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}"))
            .parse()
            .unwrap()
    }

    /// Does every lab machine have a configuration with its own sizes, and latencies beyond the L1's?
    #[test]
    fn the_labs_machines_have_configurations() {
        for (name, cpus, per_l3, l3_bytes) in [
            ("lab-2x16M", 8, 4, 16 << 20),
            ("lab-vm", 2, 2, 8 << 20),
            ("lab-chiplets", 8, 2, 8 << 20),
        ] {
            let text = config_of(name).unwrap();
            assert_eq!(
                (
                    parse_value(&text, "cpus"),
                    parse_value(&text, "cpus_per_l3"),
                    parse_value(&text, "l3_bytes")
                ),
                (cpus, per_l3, l3_bytes)
            );
            assert_eq!(
                (
                    parse_value(&text, "l2_cycles"),
                    parse_value(&text, "memory_cycles")
                ),
                (14, 250)
            );
            assert!(!text.contains("not modeled: the pipeline"), "{text}");
        }
        assert_eq!(
            parse_value(&config_of("lab-2x16M-hashed").unwrap(), "l3_slices"),
            256
        );
        assert_eq!(
            parse_value(&config_of("lab-2x16M").unwrap(), "memory_per_l3"),
            0
        );
        let nodes =
            config_of("lab-vm?packages=2&memory.nodes=2&memory.remote_latency_cycles=401").unwrap();
        assert_eq!(
            (
                parse_value(&nodes, "memory_per_l3"),
                parse_value(&nodes, "remote_memory_cycles")
            ),
            (1, 400)
        );
        let second =
            "-object memory-backend-ram,id=m1,size=1024M -numa node,nodeid=1,cpus=2-3,memdev=m1";
        assert!(
            nodes
                .lines()
                .any(|line| line.starts_with("# qemu ") && line.ends_with(second)),
            "{nodes}"
        );
    }

    /// Do the options remove counters and RDT, and nothing else?
    #[test]
    fn counters_and_rdt_can_be_left_out() {
        let machine = cachemate_spec::load_machine("lab-vm").unwrap();
        let all = render_config(&machine, ProcessorOptions::default()).unwrap();
        let bare = render_config(
            &machine,
            ProcessorOptions {
                no_counters: true,
                no_rdt: true,
                ..ProcessorOptions::default()
            },
        )
        .unwrap();
        let differ: Vec<&str> = bare
            .lines()
            .filter(|line| !all.lines().any(|other| other == *line))
            .collect();
        assert_eq!(differ, ["classes 0", "monitors 0", "counters 0"]);
    }

    /// Are samples marked as modeled, with their cost and rate, and absent unless requested?
    #[test]
    fn samples_are_marked_as_modeled() {
        let machine = cachemate_spec::load_machine("lab-vm").unwrap();
        assert!(!config_of("lab-vm").unwrap().contains("sampl"));
        let options = ProcessorOptions {
            samples: true,
            ..ProcessorOptions::default()
        };
        assert!(
            !render_config(&machine, options)
                .unwrap()
                .contains("sample_cycles"),
            "the machine's own defaults"
        );
        let options = ProcessorOptions {
            sample_cycles: Some(600),
            load_tag_interval: Some(7),
            ..options
        };
        let text = render_config(&machine, options).unwrap();
        let settings =
            ["sampling", "sample_cycles", "load_tag_interval"].map(|name| parse_value(&text, name));
        assert_eq!(settings, [1, 600, 7]);
        assert!(
            text.contains("# modeled: samples of accesses (PEBS)\n# cpu family=6,"),
            "{text}"
        );
    }

    /// Do small cores have their own pace and L2, and is an impossible L2 refused?
    #[test]
    fn a_second_type_of_cores_is_configured() {
        let machine = cachemate_spec::load_machine("lab-2x16M").unwrap();
        let options = ProcessorOptions {
            small_cores: Some(4),
            small_l2_bytes: Some(1 << 19),
            ..ProcessorOptions::default()
        };
        let text = render_config(&machine, options).unwrap();
        let names = [
            "cpus",
            "small_cpus",
            "small_instruction_cycles",
            "l2_bytes",
            "small_l2_bytes",
            "small_l2_cycles",
        ];
        assert_eq!(
            names.map(|name| parse_value(&text, name)),
            [8, 4, 2, 1 << 18, 1 << 19, 14]
        );
        let error = |options| render_config(&machine, options).unwrap_err().to_string();
        let uneven = error(ProcessorOptions {
            small_l2_bytes: Some(300_000),
            ..options
        });
        assert!(uneven.contains("found 300000 bytes"), "{uneven}");
        let all = error(ProcessorOptions {
            small_cores: Some(8),
            ..options
        });
        assert!(all.contains("fewer than its 8 cores"), "{all}");
    }

    /// Is a machine that the lab cannot model rejected with its field, and are omitted parts of another one named?
    #[test]
    fn parts_that_cannot_be_modeled_are_named() {
        let error = config_of("epyc-7763").unwrap_err().to_string();
        assert!(
            error.contains("contexts_per_core") && error.contains("found 2"),
            "{error}"
        );
        let error = config_of("lab-vm?caches.l3.shared_by_cores=1")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("shared_by_cores") && error.contains("one for each package"),
            "{error}"
        );
        let error = config_of("lab-vm?cores_per_package=32&caches.l3.shared_by_cores=32")
            .unwrap_err()
            .to_string();
        assert!(error.contains("found 32, expected at most 16"), "{error}");
        let error = config_of("xeon-x5365").unwrap_err().to_string();
        assert!(
            error.contains("one for each package"),
            "two chips in a package: {error}"
        );
        let pairs = config_of("lab-vm?pipeline.issue_width=4").unwrap();
        assert!(pairs.contains("not modeled: the pipeline"), "{pairs}");
    }
}
