//! A fleet's description: hosts, services and their arrivals, policies, and the prices of energy and of moving.

use cachemate_core::FieldError;
use serde::{Deserialize, Serialize};

use crate::placement_policy::PlacementPolicy;
use crate::profile::{ReferenceMix, WorkloadProfile, check_range};
use crate::scorer::NodePolicy;

/// Maximum number of services per host; more are probably a typing error.
const MAX_SERVICES_PER_HOST: f64 = 1000.0;
/// Maximum number of hosts; larger fleets are sweeps of cells.
pub const MAX_HOSTS: u32 = 100_000;
/// Maximum length of a run: a week.
pub const MAX_HOURS: f64 = 168.0;
/// Maximum number of kinds of services.
pub const MAX_KINDS: usize = 10_000;
/// Maximum number of CPUs of one service.
pub const MAX_CPUS: f64 = 1024.0;

/// A fleet, as written in a file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetSpec {
    /// Name for titles.
    pub name: String,
    /// Kind of the hosts: a bundled machine or a file.
    pub machine: String,
    /// Number of hosts.
    pub hosts: u32,
    /// Nominal length of the run.
    #[serde(default = "default_hours")]
    pub hours: f64,
    /// Seed of all random draws.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Mean number of services that run at the same time, per host.
    #[serde(default = "default_services_per_host")]
    pub services_per_host: f64,
    /// Time between two samples of all speeds.
    #[serde(default = "default_step_minutes")]
    pub step_minutes: f64,
    /// Hosts of one scheduler; larger fleets have several cells.
    #[serde(default = "default_cell_hosts")]
    pub cell_hosts: u32,
    /// Memory of one host; `None` for the machine's.
    pub host_memory_bytes: Option<f64>,
    /// Policies to compare.
    #[serde(default = "PlacementPolicy::all")]
    pub policies: Vec<PlacementPolicy>,
    /// Policies of the nodes; each is combined with each policy.
    #[serde(default = "default_nodes")]
    pub nodes: Vec<NodePolicy>,
    /// Whether nodes partition caches, if the machine can.
    #[serde(default = "default_partition")]
    pub partition: bool,
    /// Share of kept limits for which hosts are counted; `None` for the share under `requests`, or under the first
    /// policy.
    pub promise_percent: Option<f64>,
    /// Kinds of services, listed explicitly.
    #[serde(default)]
    pub services: Vec<ServiceSpec>,
    /// Kinds of services, drawn by the seed.
    pub draw: Option<DrawSpec>,
    /// A cluster's pods: the JSON of `kubectl get pods -A -o json`.
    pub cluster: Option<String>,
    /// The rescheduler.
    #[serde(default)]
    pub moves: MoveSpec,
    /// Power of one host.
    #[serde(default)]
    pub power: PowerSpec,
}

fn default_hours() -> f64 {
    24.0
}
fn default_seed() -> u64 {
    1
}
fn default_services_per_host() -> f64 {
    40.0
}
fn default_step_minutes() -> f64 {
    30.0
}
fn default_cell_hosts() -> u32 {
    100
}
fn default_partition() -> bool {
    true
}
fn default_nodes() -> Vec<NodePolicy> {
    vec![NodePolicy::Off, NodePolicy::Auto]
}

/// One kind of service.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceSpec {
    /// Name for results.
    pub name: String,
    /// Requested CPUs.
    pub cpus: f64,
    /// Requested memory.
    #[serde(default)]
    pub memory_bytes: f64,
    /// Threads that share its load; `None` for one per requested CPU.
    pub threads: Option<u16>,
    /// Busy CPUs divided by requested CPUs, averaged over a day.
    pub load: f64,
    /// Amplitude of the load over the day, as a share of its mean.
    #[serde(default)]
    pub daily_swing: f64,
    /// Hour of the highest load.
    #[serde(default)]
    pub peak_hour: f64,
    /// Maximum slowdown that is promised to the service's users; `None` for no promise.
    pub max_slowdown_percent: Option<f64>,
    /// Mean lifetime; `None` if the service never leaves.
    pub lifetime_hours: Option<f64>,
    /// Weight among the running services.
    #[serde(default = "default_weight")]
    pub weight: f64,
    /// A measured profile, given inline.
    pub profile: Option<WorkloadProfile>,
    /// A file with the content of a `WorkloadProfile`.
    pub profile_file: Option<String>,
    /// The service's use of memory in closed form, given instead of a profile.
    pub references: Option<ReferenceMix>,
}

fn default_weight() -> f64 {
    1.0
}

/// Ranges from which kinds of services are drawn. Each draw is uniform; for sizes and rates, its logarithm is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DrawSpec {
    /// Number of kinds.
    pub kinds: u16,
    /// Requested CPUs, a whole number.
    pub cpus: (f64, f64),
    /// Requested memory per CPU.
    pub memory_bytes_per_cpu: (f64, f64),
    /// Busy CPUs divided by requested CPUs.
    pub load: (f64, f64),
    /// Amplitude of the load over the day, as a share of its mean.
    pub daily_swing: (f64, f64),
    /// Mean lifetime.
    pub lifetime_hours: (f64, f64),
    /// Cycles per instruction without misses.
    pub base_cycles_per_instr: (f64, f64),
    /// Cycles that a miss adds.
    pub stall_cycles_per_miss: (f64, f64),
    /// References to the contended cache.
    pub references_per_kilo_instr: (f64, f64),
    /// Size of the large working set.
    pub working_set_bytes: (f64, f64),
    /// Share of the references to the large working set; the others access a working set of 256 KiB.
    pub working_set_share: (f64, f64),
    /// Share of the kinds that stream.
    pub streaming_kinds: f64,
    /// Share of a streaming kind's references that belong to the stream.
    pub stream_share: (f64, f64),
    /// Share of the kinds with a limit.
    pub limited_kinds: f64,
    /// Limits of the limited kinds, in percent.
    pub max_slowdown_percent: (f64, f64),
}

impl Default for DrawSpec {
    fn default() -> Self {
        DrawSpec {
            kinds: 40,
            cpus: (1.0, 4.0),
            memory_bytes_per_cpu: (1e9, 2e9),
            load: (0.3, 0.8),
            daily_swing: (0.0, 0.6),
            lifetime_hours: (2.0, 48.0),
            base_cycles_per_instr: (0.4, 1.2),
            stall_cycles_per_miss: (40.0, 160.0),
            references_per_kilo_instr: (0.5, 20.0),
            working_set_bytes: (1e6, 64e6),
            working_set_share: (0.2, 0.8),
            streaming_kinds: 0.25,
            stream_share: (0.5, 0.95),
            limited_kinds: 0.5,
            max_slowdown_percent: (5.0, 25.0),
        }
    }
}

/// Moves of services between hosts, made by policies that measure slowdowns.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MoveSpec {
    /// Maximum number of moves in one step, per hundred hosts.
    pub max_per_step: u32,
    /// Service time that a move takes.
    pub seconds: f64,
}

impl Default for MoveSpec {
    fn default() -> Self {
        MoveSpec {
            max_per_step: 10,
            seconds: 30.0,
        }
    }
}

/// Power of one host: linear in busy CPUs and in memory traffic.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PowerSpec {
    /// Power of a host without services.
    pub sleep_watts: f64,
    /// Power of a host with services whose CPUs are all idle.
    pub idle_watts: f64,
    /// Power of a host whose CPUs are all busy.
    pub busy_watts: f64,
    /// Additional power per unit of memory traffic.
    pub watts_per_gb_per_second: f64,
}

impl Default for PowerSpec {
    fn default() -> Self {
        PowerSpec {
            sleep_watts: 15.0,
            idle_watts: 110.0,
            busy_watts: 380.0,
            watts_per_gb_per_second: 0.4,
        }
    }
}

/// One kind of service, ready to run.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct FleetService {
    /// Name for results.
    pub name: String,
    /// Requested CPUs.
    pub cpus: f64,
    /// Requested memory.
    pub memory_bytes: f64,
    /// Threads that share its load.
    pub threads: u16,
    /// Busy CPUs, averaged over a day.
    pub busy_cpus: f64,
    /// Amplitude of the load over the day, as a share of its mean.
    pub daily_swing: f64,
    /// Hour of the highest load.
    pub peak_hour: f64,
    /// Maximum slowdown that is promised to the service's users; `None` for no promise.
    pub max_slowdown_percent: Option<f64>,
    /// Mean lifetime; `None` if the service never leaves.
    pub lifetime_hours: Option<f64>,
    /// Weight among the running services.
    pub weight: f64,
    /// Profile of the service; `None` if it was never measured. Such a service uses CPUs and memory, but its use of
    /// caches is unknown.
    pub profile: Option<WorkloadProfile>,
}

impl FleetSpec {
    /// Checks that this fleet can be run.
    ///
    /// # Errors
    /// The first field with an impossible value.
    pub fn check(&self) -> Result<(), FieldError> {
        check_range("hosts", f64::from(self.hosts), 1.0, f64::from(MAX_HOSTS))?;
        check_range("hours", self.hours, 0.01, MAX_HOURS)?;
        check_range(
            "services_per_host",
            self.services_per_host,
            0.01,
            MAX_SERVICES_PER_HOST,
        )?;
        check_range("step_minutes", self.step_minutes, 1.0, 240.0)?;
        check_range("cell_hosts", f64::from(self.cell_hosts), 1.0, 1000.0)?;
        if let Some(bytes) = self.host_memory_bytes {
            check_range("host_memory_bytes", bytes, 1.0, 1e16)?;
        }

        if let Some(percent) = self.promise_percent {
            check_range("promise_percent", percent, 0.0, 100.0)?;
        }

        if self.policies.is_empty() || self.nodes.is_empty() {
            let field = if self.policies.is_empty() {
                "policies"
            } else {
                "nodes"
            };
            return Err(FieldError::new(field, "an empty list", "one or more"));
        }

        if self.services.len() > MAX_KINDS {
            return Err(FieldError::new(
                "services",
                self.services.len(),
                "at most 10 000 kinds",
            ));
        }

        if self.services.is_empty() && self.draw.is_none() && self.cluster.is_none() {
            return Err(FieldError::new(
                "services",
                "none",
                "[[services]], [draw] or cluster",
            ));
        }

        for (index, service) in self.services.iter().enumerate() {
            service
                .check()
                .map_err(|error| error.with_path_prefix(&format!("services[{index}]")))?;
        }

        if let Some(draw) = &self.draw {
            draw.check()
                .map_err(|error| error.with_path_prefix("draw"))?;
        }

        check_range("moves.seconds", self.moves.seconds, 0.0, 86_400.0)?;
        let power = &self.power;
        for (field, watts) in [
            ("power.sleep_watts", power.sleep_watts),
            ("power.idle_watts", power.idle_watts),
            ("power.busy_watts", power.busy_watts),
            (
                "power.watts_per_gb_per_second",
                power.watts_per_gb_per_second,
            ),
        ] {
            check_range(field, watts, 0.0, 100_000.0)?;
        }

        Ok(())
    }
}

impl ServiceSpec {
    /// Checks that this service could run.
    ///
    /// # Errors
    /// The first field with an impossible value.
    pub fn check(&self) -> Result<(), FieldError> {
        check_range("cpus", self.cpus, 0.01, MAX_CPUS)?;
        check_range("memory_bytes", self.memory_bytes, 0.0, 1e15)?;
        if let Some(threads) = self.threads {
            check_range("threads", f64::from(threads), 1.0, MAX_CPUS)?;
        }
        check_range("load", self.load, 0.001, 1.0)?;
        check_range("daily_swing", self.daily_swing, 0.0, 1.0)?;
        check_range("peak_hour", self.peak_hour, 0.0, 24.0)?;
        if let Some(limit) = self.max_slowdown_percent {
            check_range("max_slowdown_percent", limit, 0.0, 10_000.0)?;
        }

        if let Some(hours) = self.lifetime_hours {
            check_range("lifetime_hours", hours, 0.01, 1e6)?;
        }

        check_range("weight", self.weight, 1e-6, 1e6)?;
        let sources = [
            self.profile.is_some(),
            self.profile_file.is_some(),
            self.references.is_some(),
        ];
        if sources.iter().filter(|is_given| **is_given).count() > 1 {
            return Err(FieldError::new(
                "profile",
                "several sources",
                "one of profile, profile_file and references",
            ));
        }

        if let Some(profile) = &self.profile {
            profile
                .check()
                .map_err(|error| error.with_path_prefix("profile"))?;
        }

        if let Some(references) = &self.references {
            references
                .check()
                .map_err(|error| error.with_path_prefix("references"))?;
        }
        Ok(())
    }

    /// The kind of service that this entry describes. A profile file must have been read into `profile` before.
    pub fn kind(&self) -> FleetService {
        let profile = self
            .profile
            .clone()
            .or_else(|| self.references.as_ref().map(ReferenceMix::profile));

        FleetService {
            name: self.name.clone(),
            cpus: self.cpus,
            memory_bytes: self.memory_bytes,
            threads: self
                .threads
                .unwrap_or_else(|| libm::ceil(self.cpus) as u16)
                .max(1),
            busy_cpus: self.cpus * self.load,
            daily_swing: self.daily_swing,
            peak_hour: self.peak_hour,
            max_slowdown_percent: self.max_slowdown_percent,
            lifetime_hours: self.lifetime_hours,
            weight: self.weight,
            profile,
        }
    }
}

impl DrawSpec {
    fn check(&self) -> Result<(), FieldError> {
        check_range("kinds", f64::from(self.kinds), 1.0, MAX_KINDS as f64)?;

        for (field, (low, high), min, max) in [
            ("cpus", self.cpus, 1.0, MAX_CPUS),
            ("memory_bytes_per_cpu", self.memory_bytes_per_cpu, 1.0, 1e13),
            ("load", self.load, 0.001, 1.0),
            ("daily_swing", self.daily_swing, 0.0, 1.0),
            ("lifetime_hours", self.lifetime_hours, 0.01, 1e6),
            (
                "base_cycles_per_instr",
                self.base_cycles_per_instr,
                0.05,
                100.0,
            ),
            (
                "stall_cycles_per_miss",
                self.stall_cycles_per_miss,
                1e-3,
                100_000.0,
            ),
            (
                "references_per_kilo_instr",
                self.references_per_kilo_instr,
                1e-6,
                1000.0,
            ),
            ("working_set_bytes", self.working_set_bytes, 64.0, 1e13),
            ("working_set_share", self.working_set_share, 0.0, 1.0),
            ("stream_share", self.stream_share, 0.0, 1.0),
            (
                "max_slowdown_percent",
                self.max_slowdown_percent,
                0.0,
                10_000.0,
            ),
        ] {
            check_range(&format!("{field}[0]"), low, min, max)?;
            check_range(&format!("{field}[1]"), high, low, max)?;
        }

        check_range("streaming_kinds", self.streaming_kinds, 0.0, 1.0)?;
        check_range("limited_kinds", self.limited_kinds, 0.0, 1.0)
    }
}
