//! The loss of a service that waits for CPUs, divided among the services that ran on them meanwhile.
//!
//! Problem: a service that shares its CPUs takes longer although it loses no speed while it runs, so no measurement per
//! CPU second shows the loss. Nor does its wait alone: if a server waits for a CPU, its client sleeps, and if the
//! scheduler puts both on one CPU because another program has the second, they wait for each other. Method: the
//! utilization law of operational analysis (Denning and Buzen 1978), by which a service that needs D CPU seconds for a
//! request and uses U CPUs serves U / D requests per second. So
//! - if a service uses fewer CPUs than in windows without others, its clients wait for it, and its work takes as many
//!   times longer as its use has fallen; the interval is that from which a twentieth of the windows without others lies
//!   on each side, because such windows are correlated and an error of their mean would be too small. A counted rate of
//!   work says the same without the assumption that D stays, so it is what users feel; if it is counted by a proxy, the
//!   interval holds both.
//! - Otherwise, and without such windows, the busiest thread bounds the loss. It waited for others at least as long as
//!   its siblings did not run. Without others it would have run in its waits, and in its sleep at most as long as
//!   siblings waited. Between the bounds lies the service's wait without the part for its own threads, as divided
//!   below.
//!
//! Causes: the wait of a service in a window is divided among all that ran on its CPUs in the same window, in
//! proportion to their CPU time: the other services, and its own other threads. Its CPUs are all on which it was seen
//! lately, because a program on another CPU of the service keeps the scheduler from moving the service there.
//! Properties: pure; without counted waits the loss is unknown. Limits: a thread counts on the CPUs where it ran, which
//! a host may report only at the ends of windows, so a service that was moved is judged by its former CPUs for a while;
//! CPU time is a proxy of the blame, so a program of higher priority causes more than its share; a part of the wait
//! that exceeds the CPU time of all known programs has an unknown cause, such as programs that are not managed, a CPU
//! quota or a hypervisor; a service with fewer requests than in its windows without others seems slowed by up to the
//! upper bound; if it answers as many requests as before, each only later, queues in front of it may grow more than its
//! own time for a request, which is stated.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use cachemate_core::{CpuId, Estimate, ServiceIdentity, quantile};
use cachemate_papers::work_metric::WorkMetric;

use super::{MIN_PRESENCE, MIN_WINDOWS, PRESENT_WINDOWS, ServiceActivities, ServiceActivity};

/// Minimum part of a window's wait with which a cause is listed by name.
const MIN_LISTED_SHARE: f64 = 0.01;
/// Windows for which a CPU counts as one of a service after the service was seen on it.
const CPU_WINDOWS: u64 = 120;
/// Share of the windows without others on each side of the interval.
const TAIL: f64 = 0.05;
/// Part by which the use of CPUs may have fallen more than the waits of one thread explain: the service has others too,
/// and their waits are counted at other times.
const BOUND_TOLERANCE: f64 = 0.05;
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

/// What a service did in a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowWork {
    pub(super) elapsed_ns: f64,
    pub(super) ran_ns: f64,
    /// Counted work; `None` if it was not counted for all that ran.
    pub(super) work: Option<(WorkMetric, f64)>,
}

/// The thread that ran most in a window, or sums of such threads over windows.
#[derive(Clone, Copy, Default, Debug)]
struct BusiestThread {
    ran_ns: f64,
    waited_ns: f64,
    /// Part of its wait in which none of its siblings can have run.
    waited_for_others_ns: f64,
    /// Part of its sleep in which some of its siblings can have waited.
    slept_behind_waits_ns: f64,
}

/// The wait of one window and its division.
#[derive(Clone, Debug)]
struct WaitingWindow {
    done: WindowWork,
    busiest: BusiestThread,
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
    /// The last windows without other services on its CPUs and caches.
    windows_alone: VecDeque<WindowWork>,
    /// CPUs of the service, each with the window in which the service was last seen on it.
    cpus: BTreeMap<CpuId, u64>,
}

impl WaitingHistory {
    /// Observes a window; one without counted waits is left out. `others_on_caches` is the number of CPUs that other
    /// services used on its caches; `None` if a probe kept tasks off their CPUs.
    pub(super) fn observe(
        &mut self,
        service: &ServiceIdentity,
        activities: &ServiceActivities<'_>,
        window: u64,
        done: WindowWork,
        others_on_caches: Option<f64>,
    ) {
        let seen_cpus = cpus_of(&activities[service]);
        self.cpus.extend(seen_cpus.map(|cpu| (cpu, window)));
        self.cpus
            .retain(|_, seen| window.saturating_sub(*seen) < CPU_WINDOWS);
        let cpus: BTreeSet<CpuId> = self.cpus.keys().copied().collect();
        let Some((window, others_ns)) = divide_wait(service, activities, &cpus, done) else {
            return;
        };
        let others = others_on_caches.map(|others| others.max(others_ns / done.elapsed_ns));
        if others.is_some_and(|others| others <= MIN_PRESENCE * cpus.len() as f64) {
            push_last(&mut self.windows_alone, done);
        }
        push_last(&mut self.windows, window);
    }

    fn sum(&self, amount_of: impl Fn(&WaitingWindow) -> f64) -> f64 {
        self.windows.iter().map(amount_of).sum()
    }

    /// Whether there are enough windows, and enough demand for CPUs in them.
    fn has_evidence(&self) -> bool {
        let demand_ns = self.sum(|window| window.demand_ns);
        self.windows.len() >= MIN_WINDOWS as usize
            && demand_ns > 0.0
            && demand_ns >= MIN_PRESENCE * self.sum(|window| window.done.elapsed_ns)
    }

    /// How many times as much of an amount the service did in windows without others; `None` if too few windows have
    /// the amount.
    fn ratio_alone(&self, amount_of: impl Fn(&WindowWork) -> Option<f64>) -> Option<Estimate> {
        let rate_of = |done: &WindowWork| Some(amount_of(done)? / done.elapsed_ns);
        let rates_alone: Vec<f64> = self.windows_alone.iter().filter_map(rate_of).collect();
        let present = self.windows.iter().map(|window| &window.done);
        let present: Vec<(f64, f64)> = present
            .filter_map(|done| Some((amount_of(done)?, done.elapsed_ns)))
            .collect();
        let amount: f64 = present.iter().map(|(amount, _)| amount).sum();
        let elapsed_ns: f64 = present.iter().map(|(_, elapsed_ns)| elapsed_ns).sum();
        let is_enough = rates_alone.len().min(present.len()) >= MIN_WINDOWS as usize;
        let ratio_at = |share: f64| Some(quantile(&rates_alone, share)? * elapsed_ns / amount);
        (is_enough && amount > 0.0).then_some(Estimate {
            value: ratio_at(0.5)?,
            low: ratio_at(TAIL)?,
            high: ratio_at(1.0 - TAIL)?,
        })
    }

    /// The least and the largest ratio of run times that the waits of the busiest thread allow.
    fn bounds(&self) -> Option<(f64, f64)> {
        let sum = |amount_of: fn(&BusiestThread) -> f64| self.sum(|w| amount_of(&w.busiest));
        let ran_ns = sum(|thread| thread.ran_ns);
        let demand_ns = ran_ns + sum(|thread| thread.waited_ns);
        let low = demand_ns / (demand_ns - sum(|thread| thread.waited_for_others_ns));
        let high = (demand_ns + sum(|thread| thread.slept_behind_waits_ns)) / ran_ns;
        (ran_ns > 0.0).then_some((low, high))
    }

    /// The ratio of CPUs in use without others, if it says that clients wait for this service.
    fn closed_loop_ratio(&self) -> Option<Estimate> {
        let (_, high) = self.bounds()?;
        let ratio = self.ratio_alone(|done| Some(done.ran_ns))?;
        let is_explained = ratio.low <= high * (1.0 + BOUND_TOLERANCE);
        (ratio.low > 1.0 && is_explained).then_some(Estimate {
            value: ratio.value.min(high),
            low: ratio.low.min(high),
            high: ratio.high.min(high),
        })
    }

    /// The run time that waiting for other services adds.
    pub(super) fn loss(&self) -> Option<Estimate> {
        let (low, mut high) = self.bounds().filter(|_| self.has_evidence())?;
        let divided = self.sum(|window| window.demand_ns) / self.sum(|window| window.own_ns);
        let divided = divided.max(low).min(high);
        // A service that does as much as alone lost no more than windows alone vary, or its work waited for it.
        if let Some(ratio) = self.ratio_alone(|done| Some(done.ran_ns))
            && ratio.low <= 1.0
            && ratio.high >= 1.0
        {
            high = high.min(ratio.high.max(divided));
        }
        let ratio = self.closed_loop_ratio().unwrap_or(Estimate {
            value: divided,
            low,
            high,
        });
        Some(Estimate {
            value: ratio.value - 1.0,
            low: (ratio.low - 1.0 - MIN_ERROR).max(0.0),
            high: ratio.high - 1.0 + MIN_ERROR,
        })
    }

    /// The run time that other services add to a service whose clients wait for it, by its rate of work.
    pub(super) fn work_loss(&self) -> Option<Estimate> {
        let by_cpus = self.closed_loop_ratio().filter(|_| self.has_evidence())?;
        // A short program may leave a window without a count.
        let (metric, _) = self
            .windows
            .iter()
            .rev()
            .find_map(|window| window.done.work)?;
        let work_in = |done: &WindowWork| done.work.filter(|(other, _)| *other == metric);
        let by_work = self.ratio_alone(|done| work_in(done).map(|(_, work)| work))?;
        let is_proxy = matches!(metric, WorkMetric::Proxy(_));
        let (low, high) = if is_proxy {
            (by_work.low.min(by_cpus.low), by_work.high.max(by_cpus.high))
        } else {
            (by_work.low, by_work.high)
        };
        Some(Estimate {
            value: by_work.value - 1.0,
            low: low - 1.0,
            high: high - 1.0,
        })
    }

    /// The services that ran while this one waited, those with the largest part first.
    pub(super) fn causes(&self) -> Vec<WaitingCause> {
        let Some(loss) = self.loss() else {
            return Vec::new();
        };
        let mut waits_ns: BTreeMap<&Option<ServiceIdentity>, f64> = BTreeMap::new();
        for (cause, wait_ns) in self.windows.iter().flat_map(|window| &window.waits_ns) {
            *waits_ns.entry(cause).or_default() += wait_ns;
        }

        let total_ns: f64 = waits_ns.values().sum();
        let mut causes: Vec<WaitingCause> = waits_ns
            .into_iter()
            .filter(|(_, wait_ns)| *wait_ns > 0.0)
            .map(|(cause, wait_ns)| WaitingCause {
                cause: cause.clone(),
                loss: loss.value * wait_ns / total_ns,
                share: wait_ns / total_ns,
            })
            .collect();
        causes.sort_by(|a, b| b.share.total_cmp(&a.share).then(a.cause.cmp(&b.cause)));
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

fn push_last<T>(windows: &mut VecDeque<T>, window: T) {
    if windows.len() == PRESENT_WINDOWS {
        windows.pop_front();
    }
    windows.push_back(window);
}

/// The wait of a service in one window, and the time in which others ran on its CPUs; `None` if the machine counts no
/// waits.
fn divide_wait(
    service: &ServiceIdentity,
    activities: &ServiceActivities<'_>,
    cpus: &BTreeSet<CpuId>,
    done: WindowWork,
) -> Option<(WaitingWindow, f64)> {
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
    let busiest = waiting_tasks.iter().max_by_key(|(_, ran_ns)| *ran_ns)?;
    let busiest = {
        let (waited_alone_ns, own_ns) = (busiest.0 as f64, busiest.1 as f64);
        let slept_ns = (done.elapsed_ns - own_ns - waited_alone_ns).max(0.0);
        BusiestThread {
            ran_ns: own_ns,
            waited_ns: waited_alone_ns,
            waited_for_others_ns: (waited_alone_ns - (ran_ns - own_ns).max(0.0)).max(0.0),
            slept_behind_waits_ns: slept_ns.min(waited_ns - waited_alone_ns),
        }
    };

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
    let others_ns: f64 = competitors.iter().map(|(_, ns)| ns).sum();
    let known_ns = own_ns + others_ns;
    let longest_wait_ns = waiting_tasks.iter().map(|(wait_ns, _)| *wait_ns).max();
    let unknown_ns = ((longest_wait_ns? as f64).min(done.elapsed_ns) - known_ns).max(0.0);
    let total_ns = known_ns + unknown_ns;
    if waited_ns <= 0.0 || total_ns <= 0.0 {
        let window = WaitingWindow {
            done,
            busiest,
            own_ns: ran_ns + waited_ns,
            demand_ns: ran_ns + waited_ns,
            waits_ns: Vec::new(),
        };
        return Some((window, others_ns));
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
    let window = WaitingWindow {
        done,
        busiest,
        own_ns: ran_ns + part_of(own_ns),
        demand_ns: ran_ns + waited_ns,
        waits_ns,
    };
    Some((window, others_ns + unknown_ns))
}

/// The CPUs on which a service ran or waited.
fn cpus_of(activity: &ServiceActivity<'_>) -> impl Iterator<Item = CpuId> {
    let waiting_cpus = activity.tasks.iter().filter_map(|task| task.cpu);
    activity.on_cpu_ns.keys().copied().chain(waiting_cpus)
}
