//! `cachemate lab config`: the configuration of the lab's machine, from a machine description.

use std::fmt::Write;

use anyhow::bail;
use cachemate_core::{CacheLevel, CacheSpec, Inclusion, MachineSpec, PrefetcherSpec, ReplacementPolicy};
use clap::Args;

use crate::session::Session;

/// Limits of the lab's machine (lab/machine/config.h).
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
    /// Without performance counters, as on many virtual machines
    #[arg(long)]
    no_counters: bool,
    /// Without way masks, occupancy and traffic (RDT)
    #[arg(long)]
    no_rdt: bool,
}

impl LabConfigArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let machine = cachemate_spec::load_machine(&self.machine)?;
        session.print(&text(&machine, self.no_counters, self.no_rdt)?)
    }
}

/// The caches of a machine that the lab can model: private ones, and one shared level behind them.
struct Levels<'a> {
    l1: &'a CacheSpec,
    l2: Option<&'a CacheSpec>,
    shared: &'a CacheSpec,
}

fn levels(machine: &MachineSpec) -> anyhow::Result<Levels<'_>> {
    let data: Vec<&CacheSpec> =
        machine.caches.iter().filter(|cache| cache.level != CacheLevel::L1Instruction).collect();
    let (l1, l2, shared) = match data[..] {
        [l1, shared] => (l1, None, shared),
        [l1, l2, shared] => (l1, Some(l2), shared),
        _ => bail!("{}, caches: found {} levels of data, expected 2 or 3", machine.name, data.len()),
    };
    let private = [Some(l1), l2];
    if let Some(cache) = private.into_iter().flatten().find(|cache| cache.shared_by_cores != 1) {
        let (name, level, cores) = (&machine.name, cache.level, cache.shared_by_cores);
        bail!("{name}, {level:?}.shared_by_cores: found {cores}, expected 1, as only the last level may be shared");
    }
    Ok(Levels { l1, l2, shared })
}

fn check(machine: &MachineSpec, levels: &Levels<'_>) -> anyhow::Result<()> {
    let name = &machine.name;
    let l3s = machine.instances(levels.shared);
    for (field, found, most) in [
        ("contexts_per_core", machine.contexts_per_core, 1),
        ("cores", machine.cores(), MAX_CPUS),
        ("last-level caches", l3s, MAX_L3S),
    ] {
        if found > most {
            bail!("{name}, {field}: found {found}, expected at most {most}, the limit of the lab's machine");
        }
    }
    if levels.shared.shared_by_cores != machine.cores_per_package {
        let (found, cores) = (levels.shared.shared_by_cores, machine.cores_per_package);
        bail!(
            "{name}, {:?}.shared_by_cores: found {found}, expected {cores}: one for each package",
            levels.shared.level
        );
    }
    for cache in [Some(levels.l1), levels.l2, Some(levels.shared)].into_iter().flatten() {
        let (level, ways, line) = (cache.level, cache.ways, cache.line_bytes);
        if line != LINE_BYTES || ways > MAX_WAYS {
            bail!("{name}, {level:?}: found {ways} ways of {line} bytes, expected up to {MAX_WAYS} of {LINE_BYTES}");
        }
        if cache.replacement != ReplacementPolicy::Lru || cache.inclusion != Inclusion::NonInclusive {
            let (replaced, inclusion) = (cache.replacement, cache.inclusion);
            bail!("{name}, {level:?}: found {replaced:?} and {inclusion:?}, expected Lru and Neither");
        }
    }
    Ok(())
}

/// The configuration of a machine, with comments that name the parts that are not modeled.
///
/// # Errors
/// The first property that the lab's machine cannot have, with the value found and the values expected.
pub fn text(machine: &MachineSpec, no_counters: bool, no_rdt: bool) -> anyhow::Result<String> {
    let levels = levels(machine)?;
    check(machine, &levels)?;
    let Levels { l1, l2, shared } = levels;
    let beyond_l1 = |cycles: u32| u64::from(cycles.saturating_sub(l1.latency_cycles));
    let memory = machine.memory.local_latency_cycles;
    let streamer = machine.prefetchers.iter().find_map(|prefetcher| match prefetcher {
        PrefetcherSpec::Stride { level, streams, degree } if Some(*level) == l2.map(|cache| cache.level) => {
            Some(((*streams).min(MAX_PREFETCHES), (*degree).min(MAX_PREFETCHES)))
        }
        _ => None,
    });
    let (streams, degree) = streamer.unwrap_or((0, 0));
    let classes = shared.way_partitions.filter(|_| !no_rdt).map_or(0, |parts| parts.groups.min(MAX_CLASSES));
    let counters = if no_counters { 0 } else { machine.counters.count.min(MAX_COUNTERS) };
    let same = machine.coherence.same_package_cycles.unwrap_or(memory);
    let other = machine.coherence.other_package_cycles.unwrap_or(memory);
    let per_line = (f64::from(LINE_BYTES) / machine.memory.bytes_per_cycle).round().max(1.0) as u64;
    let settings: Vec<(&str, u64)> = vec![
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
        ("l2_cycles", beyond_l1(l2.map_or(l1.latency_cycles, |cache| cache.latency_cycles))),
        ("l3_cycles", beyond_l1(shared.latency_cycles)),
        ("memory_cycles", beyond_l1(memory)),
        ("prefetch_streams", streams.into()),
        ("prefetch_degree", degree.into()),
        ("same_l3_cycles", beyond_l1(same)),
        ("other_l3_cycles", beyond_l1(other)),
        ("memory_cycles_per_line", per_line),
        ("memory_per_l3", own_memories(machine).into()),
        ("classes", classes.into()),
        ("monitors", 2 * u64::from(classes)),
        ("counters", counters.into()),
        ("memory_bytes", machine.memory.size_bytes),
    ];
    let mut text = format!("# A modeled machine: {}\nname {}\n", machine.description, machine.name);
    for missing in not_modeled(machine, streamer.is_some()) {
        let _ = writeln!(text, "# not modeled: {missing}");
    }
    for (name, value) in settings {
        let _ = writeln!(text, "{name} {value}");
    }
    Ok(text)
}

/// A node for each package, and so for each L3 of the lab's machine.
fn own_memories(machine: &MachineSpec) -> bool {
    machine.memory.nodes > 1 && machine.memory.nodes == machine.packages
}

fn not_modeled(machine: &MachineSpec, streamer: bool) -> Vec<String> {
    let mut missing = vec!["instruction fetches and page walks".to_string()];
    if !matches!(machine.pipeline, cachemate_core::CoreModel::InOrder { issue_width: 1 }) {
        missing.push("the pipeline: one instruction per cycle, and every miss stalls".to_string());
    }
    let prefetchers = machine.prefetchers.len() - usize::from(streamer);
    if prefetchers > 0 {
        missing.push(format!("{prefetchers} of its prefetchers: only a stride prefetcher at a private L2 is"));
    }
    if machine.memory.nodes > 1 {
        let bandwidth = if own_memories(machine) { "each L3 has" } else { "all L3s share" };
        missing.push(format!("memory nodes: all memory is local, and {bandwidth} the bandwidth of one node"));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str) -> anyhow::Result<String> {
        text(&cachemate_spec::load_machine(name).unwrap(), false, false)
    }

    fn value(text: &str, name: &str) -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    /// Does every machine of the lab have a configuration with its own sizes, latencies beyond the L1's?
    #[test]
    fn the_labs_machines_have_configurations() {
        for (name, cpus, per_l3, l3_bytes) in
            [("lab-2x16M", 8, 4, 16 << 20), ("lab-vm", 2, 2, 8 << 20), ("lab-chiplets", 8, 2, 8 << 20)]
        {
            let text = of(name).unwrap();
            assert_eq!(
                (value(&text, "cpus"), value(&text, "cpus_per_l3"), value(&text, "l3_bytes")),
                (cpus, per_l3, l3_bytes)
            );
            assert_eq!((value(&text, "l2_cycles"), value(&text, "memory_cycles")), (14, 250));
            assert!(!text.contains("not modeled: the pipeline"), "{text}");
        }
        assert_eq!(value(&of("lab-2x16M-hashed").unwrap(), "l3_slices"), 256);
        assert_eq!(value(&of("lab-2x16M").unwrap(), "memory_per_l3"), 0);
        assert_eq!(value(&of("lab-2x16M?memory.nodes=2").unwrap(), "memory_per_l3"), 1);
    }

    /// Do the switches take away counters and RDT, and nothing else?
    #[test]
    fn counters_and_rdt_can_be_left_out() {
        let machine = cachemate_spec::load_machine("lab-vm").unwrap();
        let all = text(&machine, false, false).unwrap();
        let bare = text(&machine, true, true).unwrap();
        let differ: Vec<&str> = bare.lines().filter(|line| !all.lines().any(|other| other == *line)).collect();
        assert_eq!(differ, ["classes 0", "monitors 0", "counters 0"]);
    }

    /// Is a machine that the lab cannot model refused with its field, and are the omitted parts of another one named?
    #[test]
    fn parts_that_cannot_be_modeled_are_named() {
        let error = of("epyc-7763").unwrap_err().to_string();
        assert!(error.contains("contexts_per_core") && error.contains("found 2"), "{error}");
        let error = of("lab-vm?caches.l3.shared_by_cores=1").unwrap_err().to_string();
        assert!(error.contains("shared_by_cores") && error.contains("one for each package"), "{error}");
        let error = of("lab-vm?cores_per_package=32&caches.l3.shared_by_cores=32").unwrap_err().to_string();
        assert!(error.contains("found 32, expected at most 16"), "{error}");
        let error = of("xeon-x5365").unwrap_err().to_string();
        assert!(error.contains("one for each package"), "two chips in a package: {error}");
        let pairs = of("lab-vm?pipeline.issue_width=4").unwrap();
        assert!(pairs.contains("not modeled: the pipeline"), "{pairs}");
    }
}
