//! The whole fleet under every policy, and the hosts that each policy needs for the same promise.
//!
//! Method: the fleet is divided into cells, each with arrivals of its own. Pairs of policy and cell are independent, so
//! workers take them in any order, and results are added in the order of cells. The hosts that a policy needs are searched
//! by bisection in the first cell, whose arrivals stay while its hosts become fewer or more, and are scaled to the fleet.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use cachemate_core::MachineSpec;

use crate::arrivals::{ServiceLife, draw_lives};
use crate::cell::{self, CellSetup};
use crate::corun::{CoRunSolver, UnsuitableMachine};
use crate::host::HostModel;
use crate::outcome::{CellOutcome, FleetOutcome, FleetPolicyRow};
use crate::placement::{HostCapacity, PlacementPolicy};
use crate::scorer::NodePolicy;
use crate::spec::{FleetSpec, ServiceKind};

/// A change of the fleet, for a question.
#[derive(Clone, PartialEq, Debug)]
pub enum FleetChange {
    /// As described.
    None,
    /// One more host, with the same arrivals.
    OneMoreHost,
    /// Hosts of another kind: its place among the study's machines.
    OtherMachine(usize),
    /// Nodes do or do not partition caches.
    Partition(bool),
}

/// A policy with its node policy and change.
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
    kinds: &'a [ServiceKind],
    profiles: Vec<Option<u16>>,
    /// A cluster's pods by kind; `None` = arrivals are drawn.
    pods: Option<&'a [u16]>,
    variants: Vec<FleetVariant>,
}

/// Result of one variant.
#[derive(Clone, PartialEq, Debug)]
pub struct VariantOutcome {
    /// Its name.
    pub name: String,
    /// The variant.
    pub variant: FleetVariant,
    /// All cells together.
    pub total: CellOutcome,
    /// Hosts that keep the promise.
    pub hosts_needed: Option<u32>,
    /// Share of kept limits by number of hosts in the searched cell.
    pub searched: Vec<(u32, f64)>,
}

/// Result of a study.
#[derive(Clone, PartialEq, Debug)]
pub struct FleetResult {
    /// By variant.
    pub variants: Vec<VariantOutcome>,
    /// Share of kept limits that hosts are counted for.
    pub promise: Option<f64>,
    /// Hosts in the searched cell.
    pub searched_hosts: u32,
    /// Solutions in the store at the end.
    pub solutions: usize,
}

/// Progress and interruption of a run.
pub struct RunControl<'a> {
    /// Threads.
    pub workers: usize,
    /// Called with finished and all parts of the run.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
    /// True = give up.
    pub stop: &'a (dyn Fn() -> bool + Sync),
}

/// Hosts are searched up to this multiple of the cell.
const MAX_HOSTS_FACTOR: u32 = 4;
/// Evaluations of one search, for the estimate of progress.
const SEARCH_PARTS: usize = 8;

impl<'a> FleetStudy<'a> {
    /// A study of a checked description. `machines` starts with the fleet's own.
    ///
    /// # Errors
    /// A machine that cannot be solved.
    pub fn new(
        spec: &'a FleetSpec,
        machines: &[MachineSpec],
        kinds: &'a [ServiceKind],
        pods: Option<&'a [u16]>,
        changes: &[FleetChange],
    ) -> Result<Self, UnsuitableMachine> {
        let mut next = 0;
        let profiles = kinds.iter().map(|kind| {
            kind.profile.as_ref()?;
            next += 1;
            Some(next - 1)
        });
        let profiles = profiles.collect();
        let known: Vec<_> = kinds.iter().filter_map(|kind| kind.profile.clone()).collect();
        let solvers =
            machines.iter().map(|machine| CoRunSolver::new(machine, known.clone())).collect::<Result<_, _>>()?;
        let mut variants = Vec::new();
        for change in std::iter::once(&FleetChange::None).chain(changes) {
            for &node in &spec.nodes {
                let policies = spec.policies.iter();
                variants.extend(policies.map(|&policy| FleetVariant { policy, node, change: change.clone() }));
            }
        }
        Ok(FleetStudy { spec, solvers, kinds, profiles, pods, variants })
    }

    /// Cells of the fleet, by their hosts.
    fn cells(&self) -> Vec<u32> {
        let count = self.spec.hosts.div_ceil(self.spec.cell_hosts);
        (0..count).map(|cell| self.spec.hosts / count + u32::from(cell < self.spec.hosts % count)).collect()
    }

    fn lives(&self, cell: usize, cells: &[u32]) -> Vec<ServiceLife> {
        match self.pods {
            None => {
                let running = self.spec.services_per_host * f64::from(cells[cell]);
                draw_lives(self.kinds, running, self.spec.hours, self.spec.seed, cell as u32)
            }
            Some(pods) => {
                let own = pods.iter().skip(cell).step_by(cells.len());
                own.map(|&kind| ServiceLife { kind, arrives: 0.0, departs: f64::INFINITY }).collect()
            }
        }
    }

    fn setup(&self, variant: &FleetVariant, hosts: u32) -> CellSetup<'_> {
        let solver = match variant.change {
            FleetChange::OtherMachine(machine) => &self.solvers[machine],
            _ => &self.solvers[0],
        };
        let machine = solver.host();
        let partitions = match variant.change {
            FleetChange::Partition(partitions) => partitions,
            _ => self.spec.partition,
        };
        let model = HostModel { solver, kinds: self.kinds, profiles: &self.profiles, policy: variant.node, partitions };
        CellSetup {
            model,
            policy: variant.policy,
            capacity: HostCapacity {
                cpus: f64::from(machine.cpus()),
                memory_bytes: self.spec.host_memory_bytes.unwrap_or(machine.memory.size_bytes as f64),
            },
            hosts,
            hours: self.spec.hours,
            step_hours: self.spec.step_minutes / 60.0,
            moves: self.spec.moves,
            power: self.spec.power,
        }
    }

    /// Name of a variant: the policy, `+auto`, and the change.
    fn name(&self, variant: &FleetVariant) -> String {
        let node = if variant.node == NodePolicy::Auto { "+auto" } else { "" };
        let change = match variant.change {
            FleetChange::None => String::new(),
            FleetChange::OneMoreHost => ", one more host".to_string(),
            FleetChange::OtherMachine(machine) => format!(", {}", self.solvers[machine].host().name),
            FleetChange::Partition(true) => ", partitioned".to_string(),
            FleetChange::Partition(false) => ", unpartitioned".to_string(),
        };
        format!("{}{node}{change}", variant.policy.name())
    }

    /// Runs every variant. `None` = stopped.
    pub fn run(&self, control: &RunControl<'_>) -> Option<FleetResult> {
        let cells = self.cells();
        let lives: Vec<Vec<ServiceLife>> = (0..cells.len()).map(|cell| self.lives(cell, &cells)).collect();
        let parts = self.variants.len() * cells.len();
        let all = parts + self.variants.len() * SEARCH_PARTS;
        let done = AtomicUsize::new(0);
        let finish =
            |count: usize| (control.progress)((done.fetch_add(count, Ordering::Relaxed) + count).min(all), all);
        let outcomes = parallel(control.workers, parts, &|part| {
            let (variant, cell) = (&self.variants[part / cells.len()], part % cells.len());
            let more = u32::from(variant.change == FleetChange::OneMoreHost && cell + 1 == cells.len());
            let outcome = cell::run(&self.setup(variant, cells[cell] + more), &lives[cell], &|| (control.stop)())?;
            finish(1);
            Some(outcome)
        })?;
        let mut totals = Vec::new();
        for own in outcomes.chunks(cells.len()) {
            let mut total = CellOutcome::default();
            own.iter().for_each(|outcome| total.merge(outcome));
            totals.push(total);
        }
        let first = |variant: usize| &outcomes[variant * cells.len()];
        let reference =
            self.variants.iter().position(|variant| variant.policy == PlacementPolicy::Requests).unwrap_or(0);
        let promise =
            self.spec.promise_percent.map(|percent| percent / 100.0).or_else(|| first(reference).kept_share());
        let searches = parallel(control.workers, self.variants.len(), &|variant| {
            let known = first(variant).kept_share();
            let search = self.search(&self.variants[variant], &lives[0], cells[0], known, promise, control)?;
            finish(SEARCH_PARTS);
            Some(search)
        })?;
        let named = self.variants.iter().zip(totals).zip(searches);
        let variants = named.map(|((variant, total), (needed, searched))| {
            let scaled = |needed: u32| (u64::from(needed) * u64::from(self.spec.hosts)).div_ceil(u64::from(cells[0]));
            VariantOutcome {
                name: self.name(variant),
                variant: variant.clone(),
                total,
                hosts_needed: needed.map(|needed| scaled(needed) as u32),
                searched,
            }
        });
        let solutions = self.solvers.iter().map(CoRunSolver::stored).sum();
        Some(FleetResult { variants: variants.collect(), promise, searched_hosts: cells[0], solutions })
    }

    /// The fewest hosts of a cell that keep the promise, and the shares on the way there. `None` = stopped.
    fn search(
        &self,
        variant: &FleetVariant,
        lives: &[ServiceLife],
        hosts: u32,
        known: Option<f64>,
        promise: Option<f64>,
        control: &RunControl<'_>,
    ) -> Option<(Option<u32>, Vec<(u32, f64)>)> {
        let (Some(known), Some(promise)) = (known, promise) else { return Some((None, Vec::new())) };
        let mut searched = vec![(hosts, known)];
        let share = |count: u32, searched: &mut Vec<(u32, f64)>| {
            let outcome = cell::run(&self.setup(variant, count), lives, &|| (control.stop)())?;
            let share = outcome.kept_share().unwrap_or(1.0);
            searched.push((count, share));
            Some(share)
        };
        // `high` keeps the promise, `low` does not.
        let (mut low, mut high) = (0, hosts);
        if known < promise {
            loop {
                (low, high) = (high, high + high.div_ceil(2));
                if high > hosts * MAX_HOSTS_FACTOR {
                    searched.sort_by_key(|(count, _)| *count);
                    return Some((None, searched));
                }
                if share(high, &mut searched)? >= promise {
                    break;
                }
            }
        } else {
            // Most searches end near the cell's own hosts, so the interval grows from there.
            let mut step = hosts.div_ceil(8);
            while step < high {
                let next = high - step;
                if share(next, &mut searched)? < promise {
                    low = next;
                    break;
                }
                (high, step) = (next, step * 2);
            }
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if share(middle, &mut searched)? >= promise { high = middle } else { low = middle }
        }
        searched.sort_by_key(|(count, _)| *count);
        Some((Some(high), searched))
    }
}

impl FleetResult {
    /// The object that `--json` prints.
    pub fn outcome(&self, spec: &FleetSpec, cpu_seconds: f64) -> FleetOutcome {
        let row = |variant: &VariantOutcome| FleetPolicyRow {
            name: variant.name.clone(),
            limits_kept_share: variant.total.kept_share(),
            slowdown_p50_percent: variant.total.slowdowns.percentile(0.5),
            slowdown_p95_percent: variant.total.slowdowns.percentile(0.95),
            slowdown_p99_percent: variant.total.slowdowns.percentile(0.99),
            hosts_needed: variant.hosts_needed,
            moves: variant.total.moves,
        };
        FleetOutcome {
            hosts: spec.hosts,
            services: self.variants.first().map_or(0, |variant| variant.total.services),
            seed: spec.seed,
            cpu_seconds,
            policies: self.variants.iter().map(row).collect(),
        }
    }
}

/// Results of `count` independent parts, in their order. `None` = a part was stopped.
fn parallel<R: Send>(workers: usize, count: usize, part: &(dyn Fn(usize) -> Option<R> + Sync)) -> Option<Vec<R>> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, Option<R>)>> = Mutex::new(Vec::with_capacity(count));
    std::thread::scope(|scope| {
        for _ in 0..workers.clamp(1, count.max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count {
                        break;
                    }
                    let result = part(index);
                    results.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((index, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}
