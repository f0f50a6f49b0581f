//! Simulates the whole fleet under every policy, and finds the number of hosts that each policy needs for the same
//! promise.
//!
//! Method: the fleet is divided into cells, each with its own arrivals. Pairs of policy and cell are independent
//! parts, so workers run them in any order, and results are added in the order of cells. A search for the number of
//! hosts that a policy needs is one part as well. It uses the first cell: arrivals stay the same while the number of
//! hosts varies, and the result is scaled to the fleet.

use std::collections::BTreeMap;

use cachemate_core::{FieldError, MachineSpec};
use serde::{Deserialize, Serialize};

use crate::arrivals::{ServiceInstance, draw_instances};
use crate::cell::{self, CellSetup};
use crate::corun::CoRunSolver;
use crate::host::HostModel;
use crate::outcome::{CellOutcome, FleetOutcome, FleetPolicyRow};
use crate::placement::{HostCapacity, PlacementPolicy};
use crate::scorer::NodePolicy;
use crate::spec::{FleetService, FleetSpec};

/// A change of the fleet whose effect a what-if question explores.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FleetChange {
    /// No change.
    None,
    /// One more host, with unchanged arrivals.
    OneMoreHost,
    /// Hosts of another kind, given by its index among the study's machines.
    OtherMachine(usize),
    /// Nodes partition caches, or do not.
    Partition(bool),
}

/// A combination of scheduler policy, node policy and change of the fleet.
#[derive(Clone, PartialEq, Debug)]
pub struct FleetVariant {
    /// Policy of the scheduler.
    pub policy: PlacementPolicy,
    /// Policy of the nodes.
    pub node: NodePolicy,
    /// Change of the fleet.
    pub change: FleetChange,
}

/// A fleet that is ready to run.
pub struct FleetStudy<'a> {
    spec: &'a FleetSpec,
    solvers: Vec<CoRunSolver>,
    kinds: &'a [FleetService],
    profiles: Vec<Option<u16>>,
    /// A cluster's pods by kind; `None` if arrivals are drawn.
    pods: Option<&'a [u16]>,
    variants: Vec<FleetVariant>,
}

/// Result of one variant.
#[derive(Clone, PartialEq, Debug)]
pub struct VariantOutcome {
    /// Name of the variant.
    pub name: String,
    /// The variant.
    pub variant: FleetVariant,
    /// All cells together.
    pub total: CellOutcome,
    /// Number of hosts that keep the promise; `None` if no tested number does, or if no service has a limit.
    pub hosts_needed: Option<u32>,
    /// Number of hosts in the searched cell, and the share of limits that it keeps.
    pub searched: Vec<(u32, f64)>,
}

/// Result of a study.
#[derive(Clone, PartialEq, Debug)]
pub struct FleetResult {
    /// Outcomes, in the order of variants.
    pub variants: Vec<VariantOutcome>,
    /// Promised share of kept limits, for which hosts are counted.
    pub promise: Option<f64>,
    /// Number of hosts in the searched cell.
    pub searched_hosts: u32,
}

/// One independent part of a study.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub enum FleetPart {
    /// One cell under one variant.
    Cell {
        /// Index of the variant.
        variant: usize,
        /// Index of the cell.
        cell: usize,
    },
    /// The search for the number of hosts that one variant needs.
    Search {
        /// Index of the variant.
        variant: usize,
    },
}

/// Result of a part.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FleetPartOutcome {
    /// The outcome of a cell.
    Cell(CellOutcome),
    /// The outcome of a search.
    Search(HostSearch),
}

/// Result of a search for the smallest number of hosts of a cell.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct HostSearch {
    /// Number of hosts with which the cell keeps the promise; `None` if no tested number does (at most
    /// [`MAX_HOSTS_FACTOR`] times its own), or if no service has a limit.
    needed: Option<u32>,
    /// Number of hosts, and the share of limits that it keeps.
    searched: Vec<(u32, f64)>,
}

/// Largest number of hosts that a search tries, as a multiple of the cell's own number.
const MAX_HOSTS_FACTOR: u32 = 4;

impl<'a> FleetStudy<'a> {
    /// Builds a study of a checked description. The first of `machines` is the fleet's own machine.
    ///
    /// # Errors
    /// A machine has no data cache, or its caches do not divide its memory nodes evenly.
    pub fn new(
        spec: &'a FleetSpec,
        machines: &[MachineSpec],
        kinds: &'a [FleetService],
        pods: Option<&'a [u16]>,
        changes: &[FleetChange],
    ) -> Result<Self, FieldError> {
        let mut next_profile = 0;
        let profiles = kinds.iter().map(|kind| {
            kind.profile.as_ref()?;
            next_profile += 1;
            Some(next_profile - 1)
        });
        let profiles = profiles.collect();
        let known_profiles: Vec<_> = kinds
            .iter()
            .filter_map(|kind| kind.profile.clone())
            .collect();
        let solvers = machines
            .iter()
            .map(|machine| CoRunSolver::new(machine, known_profiles.clone()))
            .collect::<Result<_, _>>()?;

        let mut variants = Vec::new();
        for change in std::iter::once(&FleetChange::None).chain(changes) {
            for &node in &spec.nodes {
                let policies = spec.policies.iter();
                variants.extend(policies.map(|&policy| FleetVariant {
                    policy,
                    node,
                    change: change.clone(),
                }));
            }
        }

        Ok(FleetStudy {
            spec,
            solvers,
            kinds,
            profiles,
            pods,
            variants,
        })
    }

    /// Cells differ by at most one host.
    fn hosts_by_cell(&self) -> Vec<u32> {
        let cell_count = self.spec.hosts.div_ceil(self.spec.cell_hosts);
        (0..cell_count)
            .map(|cell| {
                self.spec.hosts / cell_count + u32::from(cell < self.spec.hosts % cell_count)
            })
            .collect()
    }

    fn cell_instances(&self, cell: usize, hosts_by_cell: &[u32]) -> Vec<ServiceInstance> {
        match self.pods {
            None => {
                let running_count = self.spec.services_per_host * f64::from(hosts_by_cell[cell]);
                draw_instances(
                    self.kinds,
                    running_count,
                    self.spec.hours,
                    self.spec.seed,
                    cell as u32,
                )
            }
            Some(pods) => {
                let cell_pods = pods.iter().skip(cell).step_by(hosts_by_cell.len());
                cell_pods
                    .map(|&kind| ServiceInstance {
                        kind,
                        arrival_hour: 0.0,
                        departure_hour: f64::INFINITY,
                    })
                    .collect()
            }
        }
    }

    fn cell_setup(&self, variant: &FleetVariant, hosts: u32) -> CellSetup<'_> {
        let solver = match variant.change {
            FleetChange::OtherMachine(machine) => &self.solvers[machine],
            _ => &self.solvers[0],
        };
        let machine = solver.host();
        let can_partition = match variant.change {
            FleetChange::Partition(partitions) => partitions,
            _ => self.spec.partition,
        };
        let model = HostModel {
            solver,
            kinds: self.kinds,
            profiles: &self.profiles,
            policy: variant.node,
            can_partition,
        };

        CellSetup {
            model,
            policy: variant.policy,
            capacity: HostCapacity {
                cpus: f64::from(machine.cpus()),
                memory_bytes: self
                    .spec
                    .host_memory_bytes
                    .unwrap_or(machine.memory.size_bytes as f64),
            },
            hosts,
            hours: self.spec.hours,
            step_hours: self.spec.step_minutes / 60.0,
            moves: self.spec.moves,
            power: self.spec.power,
        }
    }

    /// The name of a variant: the policy, `+auto` if nodes place services, and the change.
    fn variant_name(&self, variant: &FleetVariant) -> String {
        let node_suffix = if variant.node == NodePolicy::Auto {
            "+auto"
        } else {
            ""
        };
        let change_suffix = match variant.change {
            FleetChange::None => String::new(),
            FleetChange::OneMoreHost => ", one more host".to_string(),
            FleetChange::OtherMachine(machine) => {
                format!(", {}", self.solvers[machine].host().name)
            }
            FleetChange::Partition(true) => ", partitioned".to_string(),
            FleetChange::Partition(false) => ", unpartitioned".to_string(),
        };
        format!("{}{node_suffix}{change_suffix}", variant.policy.name())
    }

    /// Every part: the cells by variant, then the searches.
    pub fn parts(&self) -> Vec<FleetPart> {
        let (cell_count, variant_count) = (self.hosts_by_cell().len(), self.variants.len());
        let cell_parts = (0..variant_count)
            .flat_map(|variant| (0..cell_count).map(move |cell| FleetPart::Cell { variant, cell }));
        cell_parts
            .chain((0..variant_count).map(|variant| FleetPart::Search { variant }))
            .collect()
    }

    /// Runs one part; returns `None` if stopped. `known_outcomes` contains outcomes of other parts, which a search need
    /// not compute again.
    pub fn run_part(
        &self,
        part: FleetPart,
        known_outcomes: &BTreeMap<FleetPart, FleetPartOutcome>,
        should_stop: &dyn Fn() -> bool,
    ) -> Option<FleetPartOutcome> {
        let hosts_by_cell = self.hosts_by_cell();
        match part {
            FleetPart::Cell { variant, cell } => {
                let variant = &self.variants[variant];
                let extra_hosts = u32::from(
                    variant.change == FleetChange::OneMoreHost && cell + 1 == hosts_by_cell.len(),
                );
                let instances = self.cell_instances(cell, &hosts_by_cell);
                cell::run_cell(
                    &self.cell_setup(variant, hosts_by_cell[cell] + extra_hosts),
                    &instances,
                    should_stop,
                )
                .map(FleetPartOutcome::Cell)
            }
            FleetPart::Search { variant } => {
                let first_cell_outcome = |variant: usize| match known_outcomes
                    .get(&FleetPart::Cell { variant, cell: 0 })
                {
                    Some(FleetPartOutcome::Cell(outcome)) => Some(outcome.clone()),
                    _ => match self.run_part(
                        FleetPart::Cell { variant, cell: 0 },
                        known_outcomes,
                        should_stop,
                    )? {
                        FleetPartOutcome::Cell(outcome) => Some(outcome),
                        FleetPartOutcome::Search(_) => None,
                    },
                };
                let promise = match self.spec.promise_percent {
                    Some(percent) => Some(percent / 100.0),
                    None => first_cell_outcome(self.reference_variant())?.limit_kept_share(),
                };
                let current_outcome = first_cell_outcome(variant)?;
                let search = self.search_hosts(
                    &self.variants[variant],
                    &self.cell_instances(0, &hosts_by_cell),
                    current_outcome,
                    promise,
                    should_stop,
                )?;
                Some(FleetPartOutcome::Search(search))
            }
        }
    }

    /// The index of the variant whose share of kept limits is promised.
    fn reference_variant(&self) -> usize {
        self.variants
            .iter()
            .position(|variant| variant.policy == PlacementPolicy::Requests)
            .unwrap_or(0)
    }

    /// Combines the outcomes of all parts; returns `None` if one is missing.
    pub fn merge(&self, outcomes: &BTreeMap<FleetPart, FleetPartOutcome>) -> Option<FleetResult> {
        let hosts_by_cell = self.hosts_by_cell();
        let cell_outcome =
            |variant: usize, cell: usize| match outcomes.get(&FleetPart::Cell { variant, cell })? {
                FleetPartOutcome::Cell(outcome) => Some(outcome),
                FleetPartOutcome::Search(_) => None,
            };
        let scale_to_fleet = |needed: u32| {
            (u64::from(needed) * u64::from(self.spec.hosts)).div_ceil(u64::from(hosts_by_cell[0]))
                as u32
        };

        let merge_variant = |(index, variant): (usize, &FleetVariant)| {
            let mut total = CellOutcome::default();
            for cell in 0..hosts_by_cell.len() {
                total.merge(cell_outcome(index, cell)?);
            }
            let FleetPartOutcome::Search(search) =
                outcomes.get(&FleetPart::Search { variant: index })?
            else {
                return None;
            };

            Some(VariantOutcome {
                name: self.variant_name(variant),
                variant: variant.clone(),
                total,
                hosts_needed: search.needed.map(scale_to_fleet),
                searched: search.searched.clone(),
            })
        };

        let variants = self
            .variants
            .iter()
            .enumerate()
            .map(merge_variant)
            .collect::<Option<_>>()?;
        let promise = match self.spec.promise_percent {
            Some(percent) => Some(percent / 100.0),
            None => cell_outcome(self.reference_variant(), 0)?.limit_kept_share(),
        };
        Some(FleetResult {
            variants,
            promise,
            searched_hosts: hosts_by_cell[0],
        })
    }

    /// Finds the smallest number of hosts of a cell that keeps the promise; returns `None` if stopped.
    ///
    /// Doubling steps find an interval, because most searches end near the cell's own number of hosts. The share of
    /// kept limits is nearly a concave function of the number of hosts, so the answer lies between the interval's
    /// chord and the ray from zero through its lower end. The next count is chosen between the two, and every third
    /// step halves the interval.
    fn search_hosts(
        &self,
        variant: &FleetVariant,
        instances: &[ServiceInstance],
        current_outcome: CellOutcome,
        promise: Option<f64>,
        should_stop: &dyn Fn() -> bool,
    ) -> Option<HostSearch> {
        let hosts = self.hosts_by_cell()[0];
        let (Some(kept_share), Some(promise)) = (current_outcome.limit_kept_share(), promise)
        else {
            return Some(HostSearch::default());
        };
        let mut share_by_hosts = BTreeMap::from([(0, 0.0), (hosts, kept_share)]);
        let run_with_hosts =
            |count: u32| cell::run_cell(&self.cell_setup(variant, count), instances, should_stop);

        // `high_hosts` keeps the promise, and `low_hosts` does not.
        let (mut low_hosts, mut high_hosts) = (0, hosts);
        let mut keeps_promise = kept_share >= promise;
        if keeps_promise {
            let mut step = hosts.div_ceil(8);
            while step < high_hosts && low_hosts == 0 {
                let next_count = high_hosts - step;
                let share = run_with_hosts(next_count)?
                    .limit_kept_share()
                    .unwrap_or(1.0);
                share_by_hosts.insert(next_count, share);
                if share >= promise {
                    (high_hosts, step) = (next_count, step * 2)
                } else {
                    low_hosts = next_count
                }
            }
        }

        let mut previous_outcome = current_outcome;
        while !keeps_promise {
            (low_hosts, high_hosts) = (high_hosts, high_hosts + high_hosts.div_ceil(2));
            if high_hosts > hosts * MAX_HOSTS_FACTOR {
                break;
            }

            let outcome = run_with_hosts(high_hosts)?;
            let share = outcome.limit_kept_share().unwrap_or(1.0);
            share_by_hosts.insert(high_hosts, share);
            keeps_promise = share >= promise;
            // If additional hosts did not change the outcome, further hosts will not change it either.
            if !keeps_promise
                && outcome.slowdowns == previous_outcome.slowdowns
                && outcome.kept_samples == previous_outcome.kept_samples
            {
                break;
            }
            previous_outcome = outcome;
        }

        let mut step_count = 0;
        while keeps_promise && high_hosts - low_hosts > 1 {
            step_count += 1;
            let (low_share, high_share) = (share_by_hosts[&low_hosts], share_by_hosts[&high_hosts]);
            let chord_hosts = f64::from(low_hosts)
                + (promise - low_share) / (high_share - low_share).max(1e-9)
                    * f64::from(high_hosts - low_hosts);
            let ray_hosts = if low_share > 0.0 {
                f64::from(low_hosts) * promise / low_share
            } else {
                chord_hosts
            };
            let estimate = if step_count % 3 == 0 {
                0.5 * f64::from(low_hosts + high_hosts)
            } else {
                0.5 * (chord_hosts + ray_hosts)
            };
            let next_count = (libm::round(estimate) as u32).clamp(low_hosts + 1, high_hosts - 1);
            let share = run_with_hosts(next_count)?
                .limit_kept_share()
                .unwrap_or(1.0);
            share_by_hosts.insert(next_count, share);

            if share >= promise {
                high_hosts = next_count
            } else {
                low_hosts = next_count
            }
        }
        share_by_hosts.remove(&0);
        Some(HostSearch {
            needed: keeps_promise.then_some(high_hosts),
            searched: share_by_hosts.into_iter().collect(),
        })
    }
}

impl FleetResult {
    /// Builds the object that `--json` prints.
    pub fn outcome(&self, spec: &FleetSpec, cpu_seconds: f64) -> FleetOutcome {
        let to_row = |variant: &VariantOutcome| FleetPolicyRow {
            name: variant.name.clone(),
            limits_kept_share: variant.total.limit_kept_share(),
            slowdown_p50_percent: variant.total.slowdowns.percentile(0.5),
            slowdown_p95_percent: variant.total.slowdowns.percentile(0.95),
            slowdown_p99_percent: variant.total.slowdowns.percentile(0.99),
            hosts_needed: variant.hosts_needed,
            moves: variant.total.moves,
        };

        FleetOutcome {
            hosts: spec.hosts,
            services: self
                .variants
                .first()
                .map_or(0, |variant| variant.total.services),
            seed: spec.seed,
            cpu_seconds,
            policies: self.variants.iter().map(to_row).collect(),
        }
    }
}
