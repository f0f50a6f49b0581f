//! `cachemate topology --probe`: measures which CPUs share a cache.

use cachemate_core::{CpuId, CpuSet};
use cachemate_linux::sense::probes::ping_pong::{RoundTripBounds, SharingVerdict, round_trip};
use cachemate_report::Table;
use serde::Serialize;

use crate::session::Session;
use cachemate_daemon::host;

/// Maximum number of measurements of a pair, because CPUs may be busy or the result unclear.
const MAX_TRIES: u32 = 5;
/// Number of CPUs up to which every pair is measured; beyond it, each CPU is measured against one CPU of every group
/// found so far.
const MAX_ALL_PAIRS: usize = 24;

/// `cachemate topology --probe --json`.
#[derive(Serialize)]
pub struct ProbedTopology {
    pub shared_below_ns: f64,
    pub split_from_ns: f64,
    pub pairs: Vec<CpuPair>,
    /// Groups of CPUs that share a cache according to the measurement.
    pub groups: Vec<String>,
    /// Groups of CPUs that share the last level according to the kernel.
    pub declared: Vec<String>,
    pub agrees: bool,
}

#[derive(Serialize)]
pub struct CpuPair {
    pub cpus: (u32, u32),
    /// Shortest round trip of all attempts; missing if the CPUs were never free at the same time.
    pub round_trip_ns: Option<f64>,
    pub says: &'static str,
}

pub fn measure(session: &Session) -> anyhow::Result<ProbedTopology> {
    let topology = host::survey_host(false)?.topology;
    let bounds = RoundTripBounds::default();
    let online: Vec<u32> = topology.online().iter().collect();
    let mut groups: Vec<CpuSet> = Vec::new();
    let mut pairs = Vec::new();
    let bar = session.progress_bar("ping-pong", Some(online.len() as u64));
    for (index, &cpu) in online.iter().enumerate() {
        let mut group_index: Option<usize> = None;
        let earlier_cpus: Vec<u32> = match online.len() <= MAX_ALL_PAIRS {
            true => online[..index].to_vec(),
            false => groups.iter().filter_map(CpuSet::first).collect(),
        };
        for other_cpu in earlier_cpus {
            let pair = measure_pair(other_cpu, cpu, &bounds);
            if pair.says == "shared" && group_index.is_none() {
                group_index = groups.iter().position(|group| group.contains(other_cpu));
            }
            pairs.push(pair);
        }
        match group_index {
            Some(group) => groups[group].insert(cpu),
            None => groups.push([cpu].into_iter().collect()),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let declared: Vec<CpuSet> = topology
        .last_level_caches()
        .map(|cache| cache.cpus.clone())
        .collect();
    let mut sorted_groups = (groups.clone(), declared.clone());
    sorted_groups.0.sort();
    sorted_groups.1.sort();
    Ok(ProbedTopology {
        shared_below_ns: bounds.shared_below_ns,
        split_from_ns: bounds.split_from_ns,
        pairs,
        agrees: sorted_groups.0 == sorted_groups.1,
        groups: groups.iter().map(CpuSet::to_string).collect(),
        declared: declared.iter().map(CpuSet::to_string).collect(),
    })
}

fn measure_pair(a: u32, b: u32, bounds: &RoundTripBounds) -> CpuPair {
    let mut best_ns: Option<f64> = None;
    for _ in 0..MAX_TRIES {
        if let Ok(round_trip) = round_trip((CpuId(a), CpuId(b))) {
            best_ns = Some(best_ns.map_or(round_trip.round_trip_ns, |best_ns: f64| {
                best_ns.min(round_trip.round_trip_ns)
            }));
            if bounds.classify(round_trip.round_trip_ns) != SharingVerdict::Unclear {
                break;
            }
        }
    }
    let verdict = match best_ns.map(|ns| bounds.classify(ns)) {
        Some(SharingVerdict::Shared) => "shared",
        Some(SharingVerdict::Split) => "split",
        Some(SharingVerdict::Unclear) => "unclear",
        None => "busy",
    };
    CpuPair {
        cpus: (a, b),
        round_trip_ns: best_ns,
        says: verdict,
    }
}

pub fn render(topology: &ProbedTopology) -> String {
    let mut table = Table::from_header("CPUs | > round trip ns | ");
    for pair in &topology.pairs {
        let time_text = pair
            .round_trip_ns
            .map_or("-".to_string(), |ns| format!("{ns:.0}"));
        table.add_row([
            format!("{}-{}", pair.cpus.0, pair.cpus.1),
            time_text,
            pair.says.to_string(),
        ]);
    }
    format!(
        "{}shared according to the measurement: {}\nshared according to the kernel: {}{}\n",
        table.text(),
        topology.groups.join(" | "),
        topology.declared.join(" | "),
        if topology.agrees {
            ""
        } else {
            "\nthey differ: virtual CPUs move, and the measurement counts"
        }
    )
}
