//! The machine that commands mean if none is named: this host, with measured figures.
//!
//! A calibration is stored with the host's name, kernel and processor in the directory of data that can be measured again, and
//! is used until one of them changes, or `topology --as-machine --measure` replaces it. Without one, it is measured at the first
//! need, and a line says so. If the host is too busy, its figures are assumed, and a line says so too. What other guests do to
//! the shared cache changes by the minute, so a command that needs the machine looks at it again if that was
//! [`NEIGHBOR_SAMPLE_AGE_S`] ago, for two seconds.

use std::path::{Path, PathBuf};

use anyhow::Context;
use cachemate_core::{Cpu, MachineSpec, Topology};
use cachemate_daemon::colored_program::available_bytes;
use cachemate_daemon::loss_history::unix_time_s;
use cachemate_daemon::paths;
use cachemate_linux::sense::calibration::{
    HostCalibration, NeighborHistory, NeighborSample, measure_host, sample_neighbors,
};

use crate::commands::topology::as_machine::{HostFacts, build_machine};
use crate::session::Session;

/// The name by which options select this host.
pub const HOST_NAME: &str = "host";
const MAX_CALIBRATION_BYTES: u64 = 1 << 20;
/// Age of the newest sample of the neighbors from which on another is taken, in seconds.
const NEIGHBOR_SAMPLE_AGE_S: u64 = 300;

/// A CPU of this host's description, as the kernel numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelCpu {
    pub cpu: u32,
    pub memory_node: u32,
}

/// Loads a bundled machine, a TOML file, or this host.
///
/// # Errors
/// There is no such machine, the file is invalid, or this host cannot be described.
pub fn load_machine(session: &Session, name: &str) -> anyhow::Result<MachineSpec> {
    if name != HOST_NAME {
        return Ok(cachemate_spec::load_machine(name)?);
    }
    let topology = read_topology(session)?;
    let calibration = find_or_measure(session, &topology);
    build_machine(
        HOST_NAME,
        &topology,
        HostFacts::read(Path::new("/")),
        calibration.as_ref(),
    )
    .context("this host has no machine description; name a machine (-m)")
}

fn read_topology(session: &Session) -> anyhow::Result<Topology> {
    let host = cachemate_linux::sense::topology::read_topology(Path::new("/"))
        .context("cannot read the caches of this host; name a machine (-m)")?;
    for warning in &host.warnings {
        session.note(&format!("note: {warning}"));
    }
    Ok(host.topology)
}

/// Measured only if none is stored; `None` if it cannot be measured.
fn find_or_measure(session: &Session, topology: &Topology) -> Option<HostCalibration> {
    let calibration = stored_or_measured(session, topology)?;
    wrong_lists(&calibration).for_each(|text| session.warn(&text));
    Some(calibration)
}

/// What the kernel says of shared caches and a calibration contradicts.
pub fn wrong_lists(calibration: &HostCalibration) -> impl Iterator<Item = String> {
    let (apart_count, look_count) = calibration.neighbors.apart_samples();
    calibration
        .sharing
        .iter()
        .filter_map(move |check| check.contradiction(apart_count, look_count))
}

fn stored_or_measured(session: &Session, topology: &Topology) -> Option<HostCalibration> {
    let identity = HostIdentity::read();
    match identity.read_stored() {
        Ok(Some(calibration)) => {
            return Some(with_recent_sample(
                session,
                &identity,
                topology,
                calibration,
            ));
        }
        Ok(None) => {}
        Err(error) => session.warn(&format!("{error:#}; measuring again")),
    }
    session.log("measuring this host's caches and memory, once: up to 20 s");
    match measure(&identity, topology) {
        Ok(calibration) => {
            if calibration.calmness.is_busy {
                session.warn(
                    "other work ran, so that figures may be off; 'cachemate topology --as-machine --measure' repeats",
                );
            }
            Some(calibration)
        }
        Err(error) => {
            session.warn(&format!(
                "{error:#}; assuming the figures of a server of today for this command"
            ));
            None
        }
    }
}

/// Adds a sample of the neighbors, if there are any, or the CPUs were moved, and the newest sample is old. A sample that cannot be taken or stored now is
/// not missed.
fn with_recent_sample(
    session: &Session,
    identity: &HostIdentity,
    topology: &Topology,
    mut calibration: HostCalibration,
) -> HostCalibration {
    let now_s = unix_time_s();
    let neighbors = &calibration.neighbors;
    let newest_s = neighbors.newest().map_or(0, |sample| sample.measured_at_s);
    let does_change = neighbors.has_neighbors() || neighbors.apart_share().is_some();
    if !does_change || now_s.saturating_sub(newest_s) < NEIGHBOR_SAMPLE_AGE_S {
        return calibration;
    }
    session.log("looking at what other guests do to the shared cache: 2 s");
    match sample_neighbors(topology, identity.available_bytes, &calibration) {
        Ok(sample) => {
            calibration.neighbors.add(NeighborSample {
                measured_at_s: now_s,
                ..sample
            });
            if let Err(error) = identity.store(&calibration) {
                session.warn(&format!(
                    "{error:#}; the sample counts for this command only"
                ));
            }
        }
        Err(error) => session.note(&format!(
            "note: {error}; earlier samples of the neighbors count"
        )),
    }
    calibration
}

/// A stored calibration that cannot be read counts as none.
pub fn find_stored() -> Option<HostCalibration> {
    HostIdentity::read().read_stored().ok().flatten()
}

/// Each CPU of this host's description as the kernel numbers it, in the description's order.
///
/// # Errors
/// The caches of this host cannot be read.
pub fn kernel_cpus(session: &Session) -> anyhow::Result<Vec<KernelCpu>> {
    let topology = read_topology(session)?;
    let mut cpus: Vec<_> = topology.cpus.iter().filter(|cpu| cpu.online).collect();
    cpus.sort_by_key(|cpu| (cpu.package, cpu.core, cpu.id));
    let kernel_cpu = |cpu: &&Cpu| KernelCpu {
        cpu: cpu.id.0,
        memory_node: cpu.memory_node,
    };
    Ok(cpus.iter().map(kernel_cpu).collect())
}

/// Measures this host and stores the result.
///
/// # Errors
/// The host is too busy or has no shared cache, or the file cannot be written.
pub fn measure_now(topology: &Topology) -> anyhow::Result<HostCalibration> {
    measure(&HostIdentity::read(), topology)
}

fn measure(identity: &HostIdentity, topology: &Topology) -> anyhow::Result<HostCalibration> {
    let (now_s, measured) = (
        unix_time_s(),
        measure_host(topology, identity.available_bytes)?,
    );
    // What neighbors did before is known from earlier calibrations of the host.
    let mut neighbors = match identity.read_stored() {
        Ok(Some(earlier)) => earlier.neighbors,
        _ => NeighborHistory::default(),
    };
    if let Some(sample) = measured.neighbors.newest() {
        neighbors.add(NeighborSample {
            measured_at_s: now_s,
            ..*sample
        });
    }
    let calibration = HostCalibration {
        host: identity.host.clone(),
        kernel: identity.kernel.clone(),
        processor: identity.processor.clone(),
        measured_at_s: now_s,
        neighbors,
        ..measured
    };
    identity.store(&calibration)?;
    Ok(calibration)
}

/// What a calibration is valid for.
struct HostIdentity {
    host: String,
    kernel: String,
    processor: String,
    /// Memory that programs can have now.
    available_bytes: u64,
}

fn read_file(path: &str) -> String {
    cachemate_files::read_text_limited(Path::new(path), 16 << 20).unwrap_or_default()
}

fn value_of(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

impl HostIdentity {
    fn read() -> Self {
        HostIdentity {
            host: read_file("/proc/sys/kernel/hostname").trim().to_string(),
            kernel: read_file("/proc/sys/kernel/osrelease").trim().to_string(),
            processor: value_of(&read_file("/proc/cpuinfo"), "model name").unwrap_or_default(),
            available_bytes: available_bytes().unwrap_or(1 << 30),
        }
    }

    fn path(&self) -> PathBuf {
        let is_plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let name: String = self.host.chars().filter(is_plain).collect();
        // Without optimization, the loops measure themselves, and nobody else may use what they find.
        let build = if cfg!(debug_assertions) {
            "-unoptimized"
        } else {
            ""
        };
        paths::cache_dir().join(format!("calibration-{name}{build}.json"))
    }

    /// `None` unless the stored calibration is of this host, kernel and processor.
    fn read_stored(&self) -> anyhow::Result<Option<HostCalibration>> {
        let path = self.path();
        if cachemate_files::metadata_if_exists(&path)?.is_none() {
            return Ok(None);
        }
        let text = cachemate_files::read_text_limited(&path, MAX_CALIBRATION_BYTES)?;
        let calibration: HostCalibration = serde_json::from_str(&text)
            .with_context(|| format!("{}: no calibration of this version", path.display()))?;
        let is_same = (
            &calibration.host,
            &calibration.kernel,
            &calibration.processor,
        ) == (&self.host, &self.kernel, &self.processor);
        Ok(is_same.then_some(calibration))
    }

    fn store(&self, calibration: &HostCalibration) -> anyhow::Result<()> {
        let path = self.path();
        paths::create_private_dir(&paths::cache_dir())?;
        crate::files::write_json(&path, calibration, true)
    }
}
