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
//! Causes: the wait of a service in a window is divided between its own other threads and the other services that ran
//! on its CPUs in the same window, in proportion to their CPU time. Its CPUs are all on which it was seen lately,
//! because a program on another CPU of the service keeps the scheduler from moving the service there. Which of the
//! others are to blame follows from all windows together, because CPU time alone blames a program of low priority that
//! only fills idle CPUs: the waits are regressed on the others' CPU times, with a prior by which a nanosecond of each
//! delays the service alike, so that programs that always run together get parts by CPU time ([`fit_delays`]). For
//! example, beside a spinner of nice value 19 that ran for 0.6 of the CPU and a burst that ran for 0.2, the service
//! waits while the burst runs; shares by CPU time name the spinner. In mixes of two and three programs on a modeled fair
//! scheduler, the fit named who ran during the waits in 1,159, 1,166 and 1,149 of 1,200 (three seeds), and shares in
//! 1,122, 1,127 and 1,114. Properties: pure; without counted waits the loss is unknown. Limits: a thread counts on the
//! CPUs where it ran, which a host may report only at the ends of windows, so a service that was moved is judged by its
//! former CPUs for a while; a part of the wait that exceeds the CPU time of all known programs has an unknown cause,
//! such as programs that are not managed, a CPU quota or a hypervisor; a service with fewer requests than in its windows
//! without others seems slowed by up to the upper bound; if it answers as many requests as before, each only later,
//! queues in front of it may grow more than its own time for a request, which is stated.

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

/// Weight of the prior that CPU time of each program delays alike, relative to the mean square of the CPU times: a
/// tenth of the weight of as many windows in which a single program ran.
const PRIOR_WEIGHT: f64 = 0.1;
/// Largest number of passes over the delays, and the relative change at which they end.
const MAX_PASSES: usize = 200;
const MIN_PASS_CHANGE: f64 = 1e-6;

/// A service that ran while another one waited for its CPUs.
#[derive(Clone, PartialEq, Debug)]
pub struct WaitingCause {
    /// The service; `None` for programs that are not observed, a CPU quota or a hypervisor.
    pub cause: Option<ServiceIdentity>,
    /// Run time that these waits add, relative to the run time without the other services.
    pub loss: f64,
    /// Part of the wait for all causes.
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
    /// CPU time of each cause on the service's CPUs.
    causes_ran_ns: Vec<(Option<ServiceIdentity>, f64)>,
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
        let mut ran_ns: BTreeMap<&Option<ServiceIdentity>, Vec<f64>> = BTreeMap::new();
        for (number, window) in self.windows.iter().enumerate() {
            for (cause, window_ns) in &window.causes_ran_ns {
                let by_window = ran_ns
                    .entry(cause)
                    .or_insert_with(|| vec![0.0; self.windows.len()]);
                by_window[number] += window_ns;
            }
        }
        let waits_ns: Vec<f64> = self
            .windows
            .iter()
            .map(|window| window.demand_ns - window.own_ns)
            .collect();
        let (causes, ran_ns): (Vec<_>, Vec<Vec<f64>>) = ran_ns.into_iter().unzip();
        let delays = fit_delays(&ran_ns, &waits_ns);
        let parts_ns: Vec<f64> = delays
            .iter()
            .zip(&ran_ns)
            .map(|(delay, ran_ns)| delay * ran_ns.iter().sum::<f64>())
            .collect();

        let total_ns: f64 = parts_ns.iter().sum();
        let mut causes: Vec<WaitingCause> = causes
            .into_iter()
            .zip(parts_ns)
            .filter(|(_, part_ns)| *part_ns > 0.0)
            .map(|(cause, part_ns)| WaitingCause {
                cause: cause.clone(),
                loss: loss.value * part_ns / total_ns,
                share: part_ns / total_ns,
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

/// The wait that a nanosecond of each program's CPU time causes, by least squares over the windows with delays of 0 or
/// more. `ran_ns` has a row for each program with its CPU time in each window. The prior draws all delays towards the
/// one with which all CPU time delays alike.
fn fit_delays(ran_ns: &[Vec<f64>], waits_ns: &[f64]) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let total_ns: f64 = ran_ns.iter().flatten().sum();
    if total_ns <= 0.0 {
        return vec![0.0; ran_ns.len()];
    }
    let common_delay = waits_ns.iter().sum::<f64>() / total_ns;
    let squares: f64 = ran_ns.iter().map(|row| dot(row, row)).sum();
    let prior = PRIOR_WEIGHT * squares / ran_ns.len() as f64;
    let products: Vec<Vec<f64>> = ran_ns
        .iter()
        .map(|row| ran_ns.iter().map(|other| dot(row, other)).collect())
        .collect();
    let targets: Vec<f64> = ran_ns.iter().map(|row| dot(row, waits_ns)).collect();

    let mut delays = vec![common_delay; ran_ns.len()];
    for _ in 0..MAX_PASSES {
        let mut largest_change: f64 = 0.0;
        for program in 0..delays.len() {
            let own_square = products[program][program];
            let explained = dot(&products[program], &delays) - own_square * delays[program];
            let fitted =
                (targets[program] - explained + prior * common_delay) / (own_square + prior);
            let new_delay = fitted.max(0.0);
            largest_change = largest_change.max((new_delay - delays[program]).abs());
            delays[program] = new_delay;
        }
        if largest_change <= MIN_PASS_CHANGE * common_delay {
            break;
        }
    }
    delays
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
    if total_ns <= 0.0 {
        let window = WaitingWindow {
            done,
            busiest,
            own_ns: ran_ns + waited_ns,
            demand_ns: ran_ns + waited_ns,
            causes_ran_ns: Vec::new(),
        };
        return Some((window, others_ns));
    }

    let part_of = |ns: f64| waited_ns * ns / total_ns;
    let (listed, small): (Vec<_>, Vec<_>) = competitors
        .into_iter()
        .partition(|(_, ns)| *ns >= MIN_LISTED_SHARE * total_ns);
    let small_ns: f64 = small.iter().map(|(_, ns)| ns).sum();
    let mut causes_ran_ns: Vec<(Option<ServiceIdentity>, f64)> = listed
        .into_iter()
        .map(|(other, ns)| (Some((**other).clone()), ns))
        .collect();
    causes_ran_ns.push((None, unknown_ns + small_ns));
    let window = WaitingWindow {
        done,
        busiest,
        own_ns: ran_ns + part_of(own_ns),
        demand_ns: ran_ns + waited_ns,
        causes_ran_ns,
    };
    Some((window, others_ns + unknown_ns))
}

/// The CPUs on which a service ran or waited.
fn cpus_of(activity: &ServiceActivity<'_>) -> impl Iterator<Item = CpuId> {
    let waiting_cpus = activity.tasks.iter().filter_map(|task| task.cpu);
    activity.on_cpu_ns.keys().copied().chain(waiting_cpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::SplitMix64;

    /// A program on one CPU under a fair scheduler.
    #[derive(Clone, Copy)]
    struct FairProgram {
        /// CPU time that it gets beside others, relative to that of a program of nice value 0.
        weight: f64,
        burst_ms: f64,
        pause_ms: f64,
        remaining_ms: f64,
        asleep_ms: f64,
        weighted_ms: f64,
    }

    const WINDOWS: usize = 20;
    const STEP_MS: f64 = 0.25;

    fn program(weight: f64, burst_ms: f64, pause_ms: f64) -> FairProgram {
        FairProgram {
            weight,
            burst_ms,
            pause_ms,
            remaining_ms: 0.0,
            asleep_ms: 0.0,
            weighted_ms: 0.0,
        }
    }

    fn draw_exponential(random: &mut SplitMix64) -> f64 {
        (-(1.0 - random.draw_unit()).ln()).clamp(0.2, 5.0)
    }

    /// Runs the first program beside the others for windows of a second. Each program runs for a burst, and then sleeps;
    /// the one that had least weighted time runs, for at least 3 ms unless another wakes. The result has the CPU times
    /// of the others by window, the waits of the first, and who ran in them.
    fn schedule(
        mut programs: Vec<FairProgram>,
        random: &mut SplitMix64,
    ) -> (Vec<Vec<f64>>, Vec<f64>, Vec<f64>) {
        let others = programs.len() - 1;
        let mut ran_ns = vec![vec![0.0; WINDOWS]; others];
        let (mut waits_ns, mut ran_in_waits) = (vec![0.0; WINDOWS], vec![0.0; others]);
        let (mut running, mut slice_ms): (Option<usize>, f64) = (None, 0.0);
        for step in 0..WINDOWS * (1000.0 / STEP_MS) as usize {
            let window = (step as f64 * STEP_MS / 1000.0) as usize;
            let is_ready = |program: &FairProgram| program.remaining_ms > 0.0;
            let ready = programs.iter().filter(|program| is_ready(program));
            let least_ms = ready.map(|program| program.weighted_ms).reduce(f64::min);
            let mut has_woken = false;
            for program in programs.iter_mut().filter(|program| !is_ready(program)) {
                if program.asleep_ms > 0.0 {
                    program.asleep_ms -= STEP_MS;
                    continue;
                }
                program.remaining_ms = program.burst_ms * draw_exponential(random);
                let credit_ms = least_ms.map_or(program.weighted_ms, |least| least - 1.5);
                program.weighted_ms = program.weighted_ms.max(credit_ms);
                has_woken = true;
            }

            running = running.filter(|&number| is_ready(&programs[number]));
            let weighted_ms = |number: usize| programs[number].weighted_ms;
            let next = (0..programs.len())
                .filter(|&number| is_ready(&programs[number]))
                .min_by(|&a, &b| weighted_ms(a).total_cmp(&weighted_ms(b)));
            let may_switch = has_woken || slice_ms >= 3.0 || running.is_none();
            if let Some(next) = next.filter(|next| may_switch && running != Some(*next)) {
                (running, slice_ms) = (Some(next), 0.0);
            }
            let Some(number) = running else { continue };
            slice_ms += STEP_MS;
            let is_first_waiting = number > 0 && is_ready(&programs[0]);
            let program = &mut programs[number];
            program.weighted_ms += STEP_MS / program.weight;
            program.remaining_ms -= STEP_MS;
            if !is_ready(program) {
                program.asleep_ms = program.pause_ms * draw_exponential(random);
            }
            if number > 0 {
                ran_ns[number - 1][window] += STEP_MS * 1e6;
            }
            if is_first_waiting {
                waits_ns[window] += STEP_MS * 1e6;
                ran_in_waits[number - 1] += STEP_MS * 1e6;
            }
        }
        (ran_ns, waits_ns, ran_in_waits)
    }

    /// Is the program that ran in most of the waits of another one blamed for them, more often than by CPU time, if a
    /// program of low priority fills the idle CPU?
    #[test]
    fn who_ran_in_the_waits_is_blamed_more_often_than_by_cpu_time() {
        let mut random = SplitMix64::new(5);
        let (mut named, mut named_by_time, mut draws) = (0, 0, 0);
        while draws < 60 {
            let mut draw = |low: f64, high: f64| low + (high - low) * random.draw_unit();
            let spinner = program(15.0 / 1024.0, 1e12, 0.0);
            let burst = program(1.0, draw(1.0, 30.0), draw(1.0, 60.0));
            let service = program(1.0, draw(1.0, 10.0), draw(1.0, 10.0));
            let (ran_ns, waits_ns, truth_ns) = schedule(vec![service, spinner, burst], &mut random);
            let delays = fit_delays(&ran_ns, &waits_ns);
            let totals: Vec<f64> = ran_ns.iter().map(|row| row.iter().sum()).collect();
            // A culprit is to be named only if there is one.
            let truth_share = truth_ns[1] / (truth_ns[0] + truth_ns[1]);
            if (truth_share - 0.5).abs() < 0.05 {
                continue;
            }
            draws += 1;
            let is_burst = truth_share > 0.5;
            named += u32::from((delays[1] * totals[1] > delays[0] * totals[0]) == is_burst);
            named_by_time += u32::from((totals[1] > totals[0]) == is_burst);
        }
        assert!(named > named_by_time, "{named} and {named_by_time}");
    }

    /// Do programs that always run together get parts by CPU time, and is a program that runs in windows without waits
    /// not blamed?
    #[test]
    fn inseparable_programs_are_blamed_by_cpu_time() {
        let together = [vec![2e8; 20], vec![6e8; 20]];
        let delays = fit_delays(&together, &[4e8; 20]);
        assert!(
            delays.iter().all(|delay| (delay - 0.5).abs() < 1e-3),
            "{delays:?}"
        );

        let on = |is_on: bool| if is_on { 5e8 } else { 0.0 };
        let culprit: Vec<f64> = (0..20).map(|window| on(window % 3 == 0)).collect();
        let harmless: Vec<f64> = (0..20).map(|window| on(window % 3 != 0)).collect();
        let waits_ns: Vec<f64> = culprit.iter().map(|ns| 0.8 * ns).collect();
        let delays = fit_delays(&[culprit, harmless], &waits_ns);
        assert!(delays[0] > 0.7 && delays[1] < 0.1, "{delays:?}");
        assert_eq!(fit_delays(&[vec![0.0]], &[1.0]), [0.0]);
    }
}
