//! The loss of a service that waits for CPUs, divided among the services that ran on them meanwhile.
//!
//! Problem: a service that shares its CPUs takes longer although it loses no speed while it runs, so no measurement per
//! CPU second shows the loss. Method: the kernel counts for each thread how long it was ready without a CPU. The wait of a
//! service in a window is divided among all that ran on its CPUs in the same window, in proportion to their CPU time: the
//! other services, and its own other threads. Its CPUs are all on which it was seen lately, because a program on another CPU
//! of the service keeps the scheduler from moving the service there. Waiting for its own threads is no loss, because it
//! would do so alone as well. The loss is the remaining wait, divided by run time plus own waits, over the last windows; the
//! interval is two standard errors of that ratio. Properties: pure; without counted waits the loss is unknown. Limits: a
//! thread counts on the CPUs where it ran, which a host may report only at the ends of windows, so a service that was moved
//! is judged by its former CPUs for a while; CPU time is a proxy of the blame, so a program of higher priority causes more
//! than its share; a part of the wait that exceeds the CPU time of all known programs has an unknown cause, such as programs
//! that are not managed, a CPU quota or a hypervisor.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cachemate_core::{CpuId, Estimate, RatioOfSums, ServiceIdentity};

use super::{MIN_PRESENCE, MIN_WINDOWS, PRESENT_WINDOWS, ServiceActivities, ServiceActivity};

/// Minimum part of a window's wait with which a cause is listed by name.
const MIN_LISTED_SHARE: f64 = 0.01;
/// Windows for which a CPU counts as one of a service after the service was seen on it.
const CPU_WINDOWS: u64 = 120;
/// Smallest error of a waiting loss: the kernel's account of a wait ends with the wait, not with the window.
const MIN_ERROR: f64 = 0.002;

/// A service that ran while another one waited for its CPUs.
#[derive(Clone, PartialEq, Debug)]
pub struct WaitingCause {
    /// The service; `None` for programs that are not observed, a CPU quota or a hypervisor.
    pub cause: Option<ServiceIdentity>,
    /// Run time that these waits add, relative to the run time without the other services.
    pub loss: f64,
    /// Part of the CPU time of all causes.
    pub share: f64,
}

/// The wait of one window and its division.
#[derive(Clone, Debug)]
struct WaitingWindow {
    elapsed_ns: f64,
    /// Run time plus the wait for own threads.
    own_ns: f64,
    /// Run time plus all waits.
    demand_ns: f64,
    waits_ns: Vec<(Option<ServiceIdentity>, f64)>,
}

/// The last windows in which the waits of a service were counted.
#[derive(Clone, Debug, Default)]
pub(super) struct WaitingHistory {
    windows: VecDeque<WaitingWindow>,
    /// CPUs of the service, each with the window in which the service was last seen on it.
    cpus: BTreeMap<CpuId, u64>,
}

impl WaitingHistory {
    /// Observes a window; one without counted waits is left out.
    pub(super) fn observe(
        &mut self,
        service: &ServiceIdentity,
        activities: &ServiceActivities<'_>,
        (window, elapsed_ns): (u64, u64),
    ) {
        let seen_cpus = cpus_of(&activities[service]);
        self.cpus.extend(seen_cpus.map(|cpu| (cpu, window)));
        self.cpus
            .retain(|_, seen| window.saturating_sub(*seen) < CPU_WINDOWS);
        let cpus: BTreeSet<CpuId> = self.cpus.keys().copied().collect();
        let Some(window) = divide_wait(service, activities, &cpus, elapsed_ns) else {
            return;
        };
        if self.windows.len() == PRESENT_WINDOWS {
            self.windows.pop_front();
        }
        self.windows.push_back(window);
    }

    fn sum(&self, amount_of: impl Fn(&WaitingWindow) -> f64) -> f64 {
        self.windows.iter().map(amount_of).sum()
    }

    /// Whether there are enough windows, and enough demand for CPUs in them.
    fn has_evidence(&self) -> bool {
        let demand_ns = self.sum(|window| window.demand_ns);
        self.windows.len() >= MIN_WINDOWS as usize
            && demand_ns > 0.0
            && demand_ns >= MIN_PRESENCE * self.sum(|window| window.elapsed_ns)
    }

    /// The run time that waiting for other services adds.
    pub(super) fn loss(&self) -> Option<Estimate> {
        if !self.has_evidence() {
            return None;
        }
        let pairs: Vec<(f64, f64)> = self
            .windows
            .iter()
            .map(|window| (window.demand_ns, window.own_ns))
            .collect();
        let RatioOfSums { ratio, half_width } = RatioOfSums::new(&pairs)?;
        let half_width = half_width.max(MIN_ERROR);
        Some(Estimate {
            value: ratio - 1.0,
            low: (ratio - 1.0 - half_width).max(0.0),
            high: ratio - 1.0 + half_width,
        })
    }

    /// The services that ran while this one waited, those with the largest part first.
    pub(super) fn causes(&self) -> Vec<WaitingCause> {
        if !self.has_evidence() {
            return Vec::new();
        }
        let mut waits_ns: BTreeMap<&Option<ServiceIdentity>, f64> = BTreeMap::new();
        for (cause, wait_ns) in self.windows.iter().flat_map(|window| &window.waits_ns) {
            *waits_ns.entry(cause).or_default() += wait_ns;
        }

        let total_ns: f64 = waits_ns.values().sum();
        let own_ns = self.sum(|window| window.own_ns);
        let mut causes: Vec<WaitingCause> = waits_ns
            .into_iter()
            .filter(|(_, wait_ns)| *wait_ns > 0.0)
            .map(|(cause, wait_ns)| WaitingCause {
                cause: cause.clone(),
                loss: wait_ns / own_ns,
                share: wait_ns / total_ns,
            })
            .collect();
        causes.sort_by(|a, b| b.loss.total_cmp(&a.loss).then(a.cause.cmp(&b.cause)));
        causes
    }

    /// The part of the demand for CPUs that waits take, over the last windows.
    pub(super) fn usual_share(&self) -> f64 {
        let demand_ns = self.sum(|window| window.demand_ns);
        let waited_ns = demand_ns - self.sum(|window| window.own_ns);
        if demand_ns > 0.0 {
            waited_ns / demand_ns
        } else {
            0.0
        }
    }

    /// The same for the newest window.
    pub(super) fn last_share(&self) -> f64 {
        self.windows
            .back()
            .filter(|window| window.demand_ns > 0.0)
            .map_or(0.0, |window| 1.0 - window.own_ns / window.demand_ns)
    }
}

/// The wait of a service in one window; `None` if the machine counts no waits.
fn divide_wait(
    service: &ServiceIdentity,
    activities: &ServiceActivities<'_>,
    cpus: &BTreeSet<CpuId>,
    elapsed_ns: u64,
) -> Option<WaitingWindow> {
    let activity = &activities[service];
    let waiting_tasks: Vec<(u64, u64)> = activity
        .tasks
        .iter()
        .filter_map(|task| Some((task.run_queue_wait_ns?, task.ran_ns())))
        .collect();
    if waiting_tasks.is_empty() {
        return None;
    }
    let waited_ns: f64 = waiting_tasks
        .iter()
        .map(|(wait_ns, _)| *wait_ns as f64)
        .sum();
    let ran_ns = activity.ran_ns as f64;

    // While a thread waits, its siblings are competitors like any other.
    let sibling_ns = |(wait_ns, own_ns): &(u64, u64)| {
        *wait_ns as f64 * activity.ran_ns.saturating_sub(*own_ns) as f64
    };
    let own_ns = if waited_ns > 0.0 {
        waiting_tasks.iter().map(sibling_ns).sum::<f64>() / waited_ns
    } else {
        0.0
    };
    let competitors: Vec<(&Cow<'_, ServiceIdentity>, f64)> = activities
        .iter()
        .filter(|(other, _)| ***other != *service)
        .map(|(other, other_activity)| (other, other_activity.ran_on_ns(cpus) as f64))
        .filter(|(_, ns)| *ns > 0.0)
        .collect();

    // Something ran during the whole of each wait.
    let known_ns = own_ns + competitors.iter().map(|(_, ns)| ns).sum::<f64>();
    let longest_wait_ns = waiting_tasks.iter().map(|(wait_ns, _)| *wait_ns).max();
    let unknown_ns = (longest_wait_ns?.min(elapsed_ns) as f64 - known_ns).max(0.0);
    let total_ns = known_ns + unknown_ns;
    if waited_ns <= 0.0 || total_ns <= 0.0 {
        return Some(WaitingWindow {
            elapsed_ns: elapsed_ns as f64,
            own_ns: ran_ns + waited_ns,
            demand_ns: ran_ns + waited_ns,
            waits_ns: Vec::new(),
        });
    }

    let part_of = |ns: f64| waited_ns * ns / total_ns;
    let (listed, small): (Vec<_>, Vec<_>) = competitors
        .into_iter()
        .partition(|(_, ns)| *ns >= MIN_LISTED_SHARE * total_ns);
    let small_ns: f64 = small.iter().map(|(_, ns)| ns).sum();
    let mut waits_ns: Vec<(Option<ServiceIdentity>, f64)> = listed
        .into_iter()
        .map(|(other, ns)| (Some((**other).clone()), part_of(ns)))
        .collect();
    waits_ns.push((None, part_of(unknown_ns + small_ns)));
    Some(WaitingWindow {
        elapsed_ns: elapsed_ns as f64,
        own_ns: ran_ns + part_of(own_ns),
        demand_ns: ran_ns + waited_ns,
        waits_ns,
    })
}

/// The CPUs on which a service ran or waited.
fn cpus_of(activity: &ServiceActivity<'_>) -> impl Iterator<Item = CpuId> {
    let waiting_cpus = activity.tasks.iter().filter_map(|task| task.cpu);
    activity.on_cpu_ns.keys().copied().chain(waiting_cpus)
}
