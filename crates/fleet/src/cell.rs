//! Simulates one cell: the hosts of one scheduler, and the services that arrive and leave.

use std::collections::{BTreeMap, BinaryHeap};

use crate::arrivals::ServiceInstance;
use crate::host::{FleetHost, HostModel, PartSlowdown};
use crate::outcome::CellOutcome;
use crate::placement::{HostCapacity, PlacementPolicy, choose_host};
use crate::scorer::ServiceDemand;
use crate::spec::{MoveSpec, PowerSpec};

/// All parameters of a cell except its services.
pub struct CellSetup<'a> {
    /// Constants of the cell's hosts.
    pub model: HostModel<'a>,
    /// Policy of the scheduler.
    pub policy: PlacementPolicy,
    /// Capacity of one host.
    pub capacity: HostCapacity,
    /// Number of hosts.
    pub hosts: u32,
    /// Nominal length of the run.
    pub hours: f64,
    /// Time between samples.
    pub step_hours: f64,
    /// Limits and costs of moves between hosts.
    pub moves: MoveSpec,
    /// Power of one host.
    pub power: PowerSpec,
}

/// A service of the cell.
#[derive(Clone, Copy, Debug)]
struct PlacedService {
    kind: u16,
    /// Host of the service; `None` if the service waits for room, or has left.
    host: Option<u32>,
    is_live: bool,
    /// Seconds of service time lost to moves since the last sample.
    lost_seconds: f64,
}

/// A departure, ordered by time and then by number of the service.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Departure {
    hour: f64,
    service: u32,
}

impl Eq for Departure {}

impl Ord for Departure {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other
            .hour
            .total_cmp(&self.hour)
            .then(other.service.cmp(&self.service))
    }
}

impl PartialOrd for Departure {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

struct FleetCell<'a> {
    setup: &'a CellSetup<'a>,
    hosts: Vec<FleetHost>,
    /// Number of services of each kind, by host.
    service_counts: Vec<BTreeMap<u16, u32>>,
    services: Vec<PlacedService>,
    waiting_services: Vec<u32>,
    outcome: CellOutcome,
}

/// Runs a cell; returns `None` if `should_stop` returned true.
pub fn run_cell(
    setup: &CellSetup<'_>,
    instances: &[ServiceInstance],
    should_stop: &dyn Fn() -> bool,
) -> Option<CellOutcome> {
    let mut cell = FleetCell::new(setup);
    let mut departures = BinaryHeap::new();
    let mut next_instance = 0;
    let step_count = libm::ceil(setup.hours / setup.step_hours - 1e-9) as u32;

    for step in 0..step_count {
        if should_stop() {
            return None;
        }

        // Speeds are sampled for the middle of the step, but with the services that are present at its start.
        let start_hour = f64::from(step) * setup.step_hours;
        let hour = start_hour + 0.5 * setup.step_hours;
        while next_instance < instances.len() && instances[next_instance].arrival_hour <= start_hour
        {
            let instance = &instances[next_instance];
            cell.remove_departed(&mut departures, instance.arrival_hour);
            let service = cell.add_service(instance.kind, hour);
            departures.push(Departure {
                hour: instance.departure_hour,
                service,
            });
            next_instance += 1;
        }
        cell.remove_departed(&mut departures, start_hour);
        cell.place_waiting(hour);
        cell.sample_step(hour);
    }

    Some(cell.outcome)
}

impl<'a> FleetCell<'a> {
    fn new(setup: &'a CellSetup<'a>) -> Self {
        FleetCell {
            setup,
            hosts: vec![FleetHost::new(&setup.model); setup.hosts as usize],
            service_counts: vec![BTreeMap::new(); setup.hosts as usize],
            services: Vec::new(),
            waiting_services: Vec::new(),
            outcome: CellOutcome::default(),
        }
    }

    /// Adds a service and places it, or lets it wait for room. Returns its number.
    fn add_service(&mut self, kind: u16, hour: f64) -> u32 {
        let number = self.services.len() as u32;
        self.services.push(PlacedService {
            kind,
            host: None,
            is_live: true,
            lost_seconds: 0.0,
        });
        self.outcome.services += 1;
        if !self.place_service(number, hour) {
            self.waiting_services.push(number);
        }
        number
    }

    fn remove_departed(&mut self, departures: &mut BinaryHeap<Departure>, hour: f64) {
        while departures
            .peek()
            .is_some_and(|departure| departure.hour <= hour)
        {
            let Some(departure) = departures.pop() else {
                break;
            };
            let service = &mut self.services[departure.service as usize];
            service.is_live = false;
            self.remove_service(departure.service);
        }
    }

    fn remove_service(&mut self, number: u32) {
        let service = &mut self.services[number as usize];
        let Some(host) = service.host.take() else {
            return;
        };
        let kind = service.kind;
        self.hosts[host as usize].remove(&self.setup.model, number, kind);
        if let Some(count) = self.service_counts[host as usize].get_mut(&kind) {
            *count = count.saturating_sub(1);
        }
    }

    fn service_demand(&self, kind: u16, load: u8) -> ServiceDemand<'_> {
        let service_kind = &self.setup.model.kinds[usize::from(kind)];
        let busy_cpus = f64::from(service_kind.threads) * f64::from(load)
            / f64::from(crate::corun::LOAD_LEVELS);
        ServiceDemand {
            profile: service_kind.profile.as_ref(),
            busy_cpus,
            max_slowdown_percent: service_kind.max_slowdown_percent,
        }
    }

    fn choose_host_for(&self, kind: u16, load: u8, excluded_host: Option<usize>) -> Option<usize> {
        let service_kind = &self.setup.model.kinds[usize::from(kind)];
        let service = self.service_demand(kind, load);
        let count_same_kind =
            |host: usize| self.service_counts[host].get(&kind).copied().unwrap_or(0);
        choose_host(
            self.setup.policy,
            &self.hosts,
            &self.setup.capacity,
            service_kind,
            &service,
            &count_same_kind,
            excluded_host,
        )
    }

    fn place_service(&mut self, number: u32, hour: f64) -> bool {
        let kind = self.services[number as usize].kind;
        let load = self.setup.model.kinds[usize::from(kind)].load_level(hour);
        let Some(host) = self.choose_host_for(kind, load, None) else {
            return false;
        };
        self.place_on(host, number, load);
        true
    }

    fn place_on(&mut self, host: usize, number: u32, load: u8) {
        let kind = self.services[number as usize].kind;
        self.hosts[host].place_service(&self.setup.model, number, kind, load);
        *self.service_counts[host].entry(kind).or_insert(0) += 1;
        self.services[number as usize].host = Some(host as u32);
    }

    fn place_waiting(&mut self, hour: f64) {
        let waiting_services = std::mem::take(&mut self.waiting_services);
        for service in waiting_services {
            if self.services[service as usize].is_live && !self.place_service(service, hour) {
                self.waiting_services.push(service);
            }
        }
    }

    /// Measures all speeds of a step, and moves the services that exceed their limits most.
    fn sample_step(&mut self, hour: f64) {
        let setup = self.setup;
        let model = &setup.model;
        let step_seconds = setup.step_hours * 3600.0;

        let mut exceeding_services: Vec<(f64, u32)> = Vec::new();
        let mut slowdown_sums: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for host in 0..self.hosts.len() {
            self.hosts[host].set_hour(model, hour);
            let slowdowns = self.hosts[host].evaluate_caches(model);
            let slowdowns =
                self.hosts[host].tune_caches(model, slowdowns, &mut self.outcome.node_moves);
            slowdown_sums.clear();
            for PartSlowdown {
                service,
                threads,
                ratio,
            } in slowdowns.into_iter().flatten()
            {
                let sum = slowdown_sums.entry(service).or_default();
                sum.0 += ratio * f64::from(threads);
                sum.1 += f64::from(threads);
            }

            for (&number, &(ratios, threads)) in &slowdown_sums {
                let service = &mut self.services[number as usize];
                let lost_percent = std::mem::take(&mut service.lost_seconds) / step_seconds * 100.0;
                let percent = (ratios / threads - 1.0) * 100.0 + lost_percent;
                let service_kind = &model.kinds[usize::from(service.kind)];
                self.outcome.slowdowns.add(percent);
                if let Some(limit) = service_kind.max_slowdown_percent {
                    self.outcome.limited_samples += 1;
                    self.outcome.kept_samples += u64::from(percent <= limit + 1e-9);
                    if percent > limit {
                        exceeding_services.push((percent - limit, number));
                    }
                }
            }
            self.add_energy(host);
        }

        // A service that waits for space counts as exceeding its limit.
        let has_limit = |service: &&u32| {
            model.kinds[usize::from(self.services[**service as usize].kind)]
                .max_slowdown_percent
                .is_some()
        };
        self.outcome.limited_samples +=
            self.waiting_services.iter().filter(has_limit).count() as u64;
        self.outcome.waiting_samples += self.waiting_services.len() as u64;

        if setup.policy.moves_services() {
            self.reschedule_worst(exceeding_services, hour);
        }
    }

    fn add_energy(&mut self, host: usize) {
        let (power, host) = (&self.setup.power, &self.hosts[host]);
        let watts = match host.services {
            0 => power.sleep_watts,
            _ => {
                let busy_share = (host.busy_cpus() / self.setup.capacity.cpus).min(1.0);
                let traffic = host.memory_bytes_per_second / 1e9;
                self.outcome.host_hours += self.setup.step_hours;
                power.idle_watts
                    + busy_share * (power.busy_watts - power.idle_watts)
                    + traffic * power.watts_per_gb_per_second
            }
        };
        self.outcome.energy_kwh += watts * self.setup.step_hours / 1000.0;
    }

    fn reschedule_worst(&mut self, mut exceeding_services: Vec<(f64, u32)>, hour: f64) {
        exceeding_services.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let max_moves = u64::from(self.setup.moves.max_per_step) * u64::from(self.setup.hosts);

        let mut remaining_moves = max_moves.div_ceil(100);
        for (_, number) in exceeding_services {
            if remaining_moves == 0 {
                break;
            }

            let PlacedService {
                kind,
                host: Some(current_host),
                ..
            } = self.services[number as usize]
            else {
                continue;
            };
            let load = self.setup.model.kinds[usize::from(kind)].load_level(hour);
            let host = self.choose_host_for(kind, load, Some(current_host as usize));
            let Some(host) = host.filter(|&host| self.is_move_worthwhile(kind, load, host)) else {
                continue;
            };

            self.remove_service(number);
            self.place_on(host, number, load);
            self.outcome.moves += 1;
            self.services[number as usize].lost_seconds += self.setup.moves.seconds;
            remaining_moves -= 1;
        }
    }

    /// Whether a service may move to this host. Under the `forecast` policy, the move must break no limit there.
    fn is_move_worthwhile(&self, kind: u16, load: u8, host: usize) -> bool {
        if self.setup.policy != PlacementPolicy::Forecast {
            return true;
        }
        let demand = self.service_demand(kind, load);
        let forecast =
            crate::scorer::ServiceForecaster::new(&demand).forecast_node(&self.hosts[host].state);
        forecast.is_some_and(|(_, forecast)| forecast.broken_limits <= 0.0)
    }
}
