//! `cachemate topology`: shows caches and the CPUs that share them.

use std::path::{Path, PathBuf};

use anyhow::Context;
use cachemate_core::Topology as MachineTopology;
use cachemate_report::text::{format_count_of, format_size, value_or_dash};
use cachemate_report::{Table, TopologyResult};
use clap::Args;

use crate::args::JsonArg;
use crate::host_machine;
use crate::session::Session;

pub mod as_machine;
mod probe;
mod slurm_features;

/// Show which CPUs share a cache, on this host or in a machine description
#[derive(Args)]
pub struct TopologyArgs {
    /// Bundled machine or TOML file [default: this host]
    #[arg(long, short, value_name = "MACHINE", conflicts_with = "root")]
    machine: Option<String>,
    /// Read the host's files below this directory instead of /
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Measure which CPUs share a cache by cache-line ping-pong, because virtual machines may report it wrongly
    #[arg(long, conflicts_with_all = ["machine", "root", "list"])]
    probe: bool,
    /// List the bundled machines
    #[arg(long, conflicts_with_all = ["machine", "root", "json"])]
    list: bool,
    /// Print this host as a machine description: measured values if it was calibrated, and estimates for the others
    #[arg(long, conflicts_with_all = ["machine", "probe", "list", "json"])]
    as_machine: bool,
    /// Measure this host's latencies, bandwidths, overlap, owned cache and insertion of streams, and store them
    #[arg(long, requires = "as_machine", conflicts_with = "root")]
    measure: bool,
    /// Print this host's features for its line in slurm.conf, by which jobs ask: sbatch --constraint='l3-32m&cache-ways'
    #[arg(long, conflicts_with_all = ["machine", "root", "probe", "list", "as_machine"])]
    slurm_features: bool,
    #[command(flatten)]
    json: JsonArg,
}

impl TopologyArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if self.list {
            return session.print(&machine_table()?);
        }
        if self.as_machine {
            let root = self.root.as_deref().unwrap_or(Path::new("/"));
            let (_, topology) = read_host(session, root)?;
            let name = cachemate_files::read_text_limited(&root.join("etc/hostname"), 1 << 12)
                .unwrap_or_default();
            let name = Some(name.trim())
                .filter(|name| !name.is_empty())
                .unwrap_or("host");
            let facts = as_machine::HostFacts::read(root);
            let calibration = if self.measure {
                let calibration = host_machine::measure_now(&topology)?;
                host_machine::wrong_lists(&calibration).for_each(|text| session.warn(&text));
                Some(calibration)
            } else {
                host_machine::find_stored().filter(|_| self.root.is_none())
            };
            let text = as_machine::machine_text(name, &topology, facts, calibration.as_ref())
                .context("this host has no machine description")?;
            return session.print(&text);
        }
        if self.slurm_features {
            return slurm_features::print(session, self.json.json);
        }
        if self.probe {
            let result = probe::measure(session)?;
            return session.print_result(self.json.json, &result, || probe::render(&result));
        }
        let (source, topology) = match &self.machine {
            Some(name) => (name.clone(), cachemate_spec::load_topology(name)?),
            None => read_host(session, self.root.as_deref().unwrap_or(Path::new("/")))?,
        };
        let result = TopologyResult::new(&source, &topology);
        session.print_result(self.json.json, &result, || {
            render_topology(&result, &topology)
        })
    }
}

fn read_host(session: &Session, root: &Path) -> anyhow::Result<(String, MachineTopology)> {
    let host = cachemate_linux::sense::topology::read_topology(root).with_context(|| {
        format!(
            "cannot read the caches of the host under {}",
            root.display()
        )
    })?;
    host.warnings
        .iter()
        .for_each(|warning| session.note(&format!("note: {warning}")));
    Ok((format!("host at {}", root.display()), host.topology))
}

fn machine_table() -> anyhow::Result<String> {
    let mut table = Table::with_columns("machine | description", "");
    for name in cachemate_spec::machine_names() {
        table.add_row([
            name,
            cachemate_spec::load_machine(name)?.description.as_str(),
        ]);
    }
    Ok(table.text())
}

fn render_topology(result: &TopologyResult, topology: &MachineTopology) -> String {
    let mut table = Table::from_header("cache | CPUs | > size | > ways | > line | ");
    let mut sorted_caches: Vec<_> = result.caches.iter().collect();
    sorted_caches.sort_by(|a, b| {
        (!a.last_level, &b.level, a.cache).cmp(&(!b.last_level, &a.level, b.cache))
    });
    for cache in sorted_caches {
        table.add_row([
            cache.level.clone(),
            cache.cpus.clone(),
            value_or_dash(cache.size_bytes.map(format_size)),
            value_or_dash(cache.ways.map(|ways| ways.to_string())),
            value_or_dash(cache.line_bytes.map(|bytes| bytes.to_string())),
            describe_level(cache.last_level, topology, cache.cache).to_string(),
        ]);
    }
    let online_count = topology.online().count() as usize;
    let count_distinct = |key_of: fn(&cachemate_core::Cpu) -> (u32, u32)| {
        let online_cpus = topology.cpus.iter().filter(|cpu| cpu.online);
        let mut values: Vec<_> = online_cpus.map(key_of).collect();
        values.sort_unstable();
        values.dedup();
        values.len() as u64
    };
    let offline_count = result.cpus.len() - online_count;
    let offline_text = if offline_count > 0 {
        format!(", {offline_count} offline")
    } else {
        String::new()
    };
    format!(
        "{}: {} online{offline_text}, {}, {}, {}\n{}",
        result.source,
        format_count_of(online_count as u64, "CPU"),
        format_count_of(count_distinct(|cpu| (cpu.package, cpu.core)), "core"),
        format_count_of(count_distinct(|cpu| (cpu.package, 0)), "package"),
        format_count_of(count_distinct(|cpu| (cpu.memory_node, 0)), "memory node"),
        table.text()
    )
}

/// A last level may belong to one CPU, as where the other CPUs of a cache are offline.
fn describe_level(is_last: bool, topology: &MachineTopology, number: u32) -> &'static str {
    let cache = topology.caches.iter().find(|cache| cache.id.0 == number);
    match cache {
        _ if !is_last => "",
        Some(cache) if cache.cpus.count() < 2 => "last level, of one CPU",
        _ => "shared last level",
    }
}
