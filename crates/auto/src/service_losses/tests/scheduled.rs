//! Waiting losses against closed forms, on a host of a few CPUs under a fair scheduler.

use super::*;

const TICK_NS: u64 = 500_000;
const WINDOW_TICKS: u64 = WINDOW_NS / TICK_NS;
/// Ticks after which the scheduler takes a CPU from a thread.
const SLICE: u64 = 6;
/// Ticks of a request in the server and in its client.
const REQUEST_TICKS: [u64; 2] = [3, 2];
const WINDOWS: u64 = 20;

/// What a thread does: it computes forever, or serves requests, which circulate between client and server.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    Computes,
    Serves(usize),
}

#[derive(Clone)]
struct Thread {
    service: ServiceIdentity,
    role: Role,
    cpu: Option<usize>,
    left_ticks: u64,
    virtual_time: u64,
    on_cpu_ns: Vec<(CpuId, u64)>,
    waited_ns: u64,
    served: u64,
}

/// CPUs with one queue, of which each takes the thread that has run least among those that may run there.
struct Host {
    running: Vec<Option<(usize, u64)>>,
    threads: Vec<Thread>,
    /// Requests in front of the server and of its client.
    queues: [u64; 2],
}

impl Host {
    fn new(cpus: usize, threads: Vec<Thread>, requests: u64) -> Self {
        let (running, queues) = (vec![None; cpus], [requests, 0]);
        Host {
            running,
            threads,
            queues,
        }
    }

    fn is_ready(&self, index: usize) -> bool {
        let thread = &self.threads[index];
        match thread.role {
            Role::Computes => true,
            Role::Serves(queue) => thread.left_ticks > 0 || self.queues[queue] > 0,
        }
    }

    fn next_on(&self, cpu: usize) -> Option<usize> {
        let is_running = |index| {
            self.running
                .iter()
                .flatten()
                .any(|(other, _)| *other == index)
        };
        let may_run = |index: &usize| {
            let thread = &self.threads[*index];
            self.is_ready(*index) && !is_running(*index) && thread.cpu.is_none_or(|own| own == cpu)
        };
        let candidates = (0..self.threads.len()).filter(may_run);
        candidates.min_by_key(|index| self.threads[*index].virtual_time)
    }

    fn tick(&mut self) {
        for cpu in 0..self.running.len() {
            let current = self.running[cpu].take();
            let stays = |(index, slice): &(usize, u64)| *slice < SLICE && self.is_ready(*index);
            let current = current.filter(stays);
            self.running[cpu] = current.or_else(|| Some((self.next_on(cpu)?, 0)));
        }

        let running: Vec<usize> = self
            .running
            .iter()
            .flatten()
            .map(|(index, _)| *index)
            .collect();
        let least = running
            .iter()
            .map(|index| self.threads[*index].virtual_time)
            .min();
        for index in (0..self.threads.len()).filter(|index| !running.contains(index)) {
            let is_ready = self.is_ready(index);
            let thread = &mut self.threads[index];
            thread.waited_ns += u64::from(is_ready) * TICK_NS;
            if !is_ready {
                // Sleep gives no claim to more than a slice.
                let floor = least.unwrap_or(0).saturating_sub(SLICE);
                thread.virtual_time = thread.virtual_time.max(floor);
            }
        }
        for cpu in 0..self.running.len() {
            let Some((index, slice)) = &mut self.running[cpu] else {
                continue;
            };
            *slice += 1;
            let thread = &mut self.threads[*index];
            thread.virtual_time += 1;
            match thread
                .on_cpu_ns
                .iter_mut()
                .find(|(on, _)| on.0 == cpu as u32)
            {
                Some((_, ns)) => *ns += TICK_NS,
                None => thread.on_cpu_ns.push((CpuId(cpu as u32), TICK_NS)),
            }
            if let Role::Serves(queue) = thread.role {
                if thread.left_ticks == 0 {
                    thread.left_ticks = REQUEST_TICKS[queue];
                    self.queues[queue] -= 1;
                }
                thread.left_ticks -= 1;
                if thread.left_ticks == 0 {
                    thread.served += 1;
                    self.queues[1 - queue] += 1;
                }
            }
        }
    }

    /// Runs a window; returns its samples, and the amount of work of a service in it: requests served or ticks run.
    fn window(&mut self, service: &ServiceIdentity) -> (Vec<TaskSample>, f64) {
        (0..WINDOW_TICKS).for_each(|_| self.tick());
        let (mut samples, mut work) = (Vec::new(), 0.0);
        for (id, thread) in self.threads.iter_mut().enumerate() {
            let sample = TaskSample {
                service: Some(thread.service.clone()),
                on_cpu_ns: std::mem::take(&mut thread.on_cpu_ns),
                run_queue_wait_ns: Some(std::mem::take(&mut thread.waited_ns)),
                counts: EventCounts::exact([(CounterEvent::SystemCalls, 2 * thread.served)]),
                ..TaskSample::new(TaskId(id as u32), ProcessId(id as u32))
            };
            if thread.service == *service {
                work += match thread.role {
                    Role::Computes => sample.ran_ns() as f64,
                    Role::Serves(_) => thread.served as f64,
                };
            }
            thread.served = 0;
            samples.push(sample);
        }
        (samples, work)
    }
}

fn thread_of(service: &ServiceIdentity, role: Role, cpu: Option<usize>) -> Thread {
    Thread {
        service: service.clone(),
        role,
        cpu,
        left_ticks: 0,
        virtual_time: 0,
        on_cpu_ns: Vec::new(),
        waited_ns: 0,
        served: 0,
    }
}

/// The true loss of a service beside others, and its reports: after windows alone, and without any.
fn losses_beside(
    cpus: usize,
    requests: u64,
    alone: &[Thread],
    beside: &[Thread],
    others: &[Thread],
) -> (f64, [ServiceReport; 2]) {
    let topology = last_level_caches(1, cpus as u32, CacheLevel::L3, 1 << 23);
    let store = alone[0].service.clone();
    let (mut losses, mut losses_unseen) = (ServiceLosses::default(), ServiceLosses::default());
    let observe = |number, samples: &[TaskSample], losses: &mut ServiceLosses| {
        let window = window_fixture(number, samples.to_vec());
        losses.observe(&window, &topology, &Profiles::new(), &no_forecast)
    };
    let mut work = [0.0, 0.0];
    let mut host = Host::new(cpus, alone.to_vec(), requests);
    for number in 0..WINDOWS {
        let (samples, done) = host.window(&store);
        observe(number, &samples, &mut losses);
        work[0] += done;
    }
    let mut host = Host::new(cpus, [beside, others].concat(), requests);
    let mut reports = [Vec::new(), Vec::new()];
    for number in WINDOWS..2 * WINDOWS {
        let (samples, done) = host.window(&store);
        reports[0] = observe(number, &samples, &mut losses);
        reports[1] = observe(number, &samples, &mut losses_unseen);
        work[1] += done;
    }
    let reports = reports.map(|reports| report_of(&reports, &store).clone());
    (work[0] / work[1] - 1.0, reports)
}

fn holds(loss: Estimate, truth: f64) -> bool {
    let rounding = 2.0 * SLICE as f64 / (WINDOWS * WINDOW_TICKS) as f64;
    loss.low - rounding <= truth && truth <= loss.high + rounding && loss.low <= loss.value
}

/// If k threads that compute share c CPUs with m others: is the loss min(k, c) (k + m) / (c k) - 1, within its
/// interval, and exact after windows alone?
#[test]
fn threads_that_compute_lose_as_the_closed_form_says() {
    let (store, spinner) = (unit_service("store"), unit_service("spinner"));
    for (k, c, m) in [
        (1, 1, 1),
        (1, 1, 3),
        (2, 2, 1),
        (3, 2, 1),
        (4, 2, 2),
        (1, 2, 2),
        (1, 2, 1),
        (5, 4, 3),
    ] {
        let own = vec![thread_of(&store, Role::Computes, None); k];
        let others = vec![thread_of(&spinner, Role::Computes, None); m];
        let (truth, reports) = losses_beside(c, 0, &own, &own, &others);
        let (k, c, m) = (k as f64, c as f64, m as f64);
        let expected = (k.min(c) * (k + m) / (c * k)).max(1.0) - 1.0;
        assert!(
            (truth - expected).abs() < 0.01,
            "{k} {c} {m}: {truth} {expected}"
        );
        for report in &reports {
            let waiting = report.slowdown.waiting.unwrap();
            assert!(
                holds(waiting, expected),
                "{k} {c} {m}: {waiting:?}, {expected}"
            );
        }
        let waiting = reports[0].slowdown.waiting.unwrap();
        assert!(
            (waiting.value - expected).abs() < 0.01,
            "{waiting:?}, {expected}"
        );
        if expected > 0.0 {
            assert_eq!(reports[0].waiting_causes[0].cause, Some(spinner.clone()));
        }
    }
}

/// If a server and its client share two CPUs with a spinner, so that one of them sleeps while the other waits: is the
/// loss that clients feel within the interval, wherever the scheduler puts the threads, and stated by the rate of work
/// too?
#[test]
fn a_request_loop_loses_what_its_clients_feel() {
    let (store, spinner) = (unit_service("store"), unit_service("spinner"));
    let loop_on = |cpus: [Option<usize>; 2]| {
        [0, 1].map(|queue| thread_of(&store, Role::Serves(queue), cpus[queue]))
    };
    for requests in [1, 4, 16] {
        for (alone, beside, spinner_cpu) in [
            ([None, None], [None, None], None),
            ([Some(0), Some(1)], [Some(0), Some(1)], Some(0)),
            ([Some(0), Some(1)], [Some(0), Some(1)], Some(1)),
            // The scheduler leaves a CPU to the spinner, so that the two wait for each other.
            ([None, None], [Some(0), Some(0)], Some(1)),
        ] {
            let others = [thread_of(&spinner, Role::Computes, spinner_cpu)];
            let (felt, reports) =
                losses_beside(2, requests, &loop_on(alone), &loop_on(beside), &others);
            let case =
                format!("{requests} requests, {beside:?} beside {spinner_cpu:?}, felt {felt}");
            for report in &reports {
                let waiting = report.slowdown.waiting.unwrap();
                assert!(holds(waiting, felt), "{case}: {waiting:?}");
            }
            if felt > 0.05 {
                let work = reports[0].slowdown.work.unwrap();
                assert!(
                    holds(work, felt) && work.high - work.low < 0.05,
                    "{case}: {work:?}"
                );
                assert_eq!(
                    reports[0].waiting_causes[0].cause,
                    Some(spinner.clone()),
                    "{case}"
                );
            }
        }
    }
}

/// Does a server that answers as many requests as alone, but each later, lose the wait for each; and is one with fewer
/// requests than alone not said to lose more than its waits allow?
#[test]
fn the_loss_follows_the_waits_if_requests_do_not_wait_for_answers() {
    let (store, batch) = (unit_service("store"), unit_service("batch"));
    let topology = last_level_caches(1, 4, CacheLevel::L3, 1 << 23);
    let slowdown_of = |alone: (f64, f64), beside: (f64, f64), sibling: (f64, f64)| {
        let mut losses = ServiceLosses::default();
        let mut reports = Vec::new();
        for number in 0..40 {
            let tasks = if number < 20 {
                vec![sharing_task(0, &store, 0, alone, None)]
            } else {
                vec![
                    sharing_task(0, &store, 0, beside, None),
                    sharing_task(1, &store, 0, sibling, None),
                    sharing_task(2, &batch, 0, (0.5, 0.0), None),
                ]
            };
            let window = window_fixture(number, tasks);
            reports = losses.observe(&window, &topology, &Profiles::new(), &no_forecast);
        }
        report_of(&reports, &store).slowdown
    };
    let is_near = |a: f64, b: f64| (a - b).abs() < 0.01;
    let open = slowdown_of((0.3, 0.0), (0.3, 0.15), (0.0, 0.0));
    let waiting = open.waiting.unwrap();
    assert!(
        is_near(waiting.value, 0.5) && is_near(waiting.low, 0.5) && is_near(waiting.high, 0.5),
        "{waiting:?}"
    );
    assert_eq!((open.work, open.run_time()), (None, open.waiting));

    // A fifth of the load, of which waits and sleeps behind waits explain the double at most.
    let less = slowdown_of((0.5, 0.0), (0.1, 0.05), (0.01, 0.05))
        .waiting
        .unwrap();
    assert!(is_near(less.high, 1.0) && less.low < 0.5, "{less:?}");
}
