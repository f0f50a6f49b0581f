//! How long may a task wait? A model of the queues of one cache, after bpf/gangs.bpf.c and bpf/turns.h, in steps of
//! 0.25 ms, with tasks that are always runnable: the worst case.
use gangs::maps::MapTurn;
use gangs::plan::longest_wait_ns;

const STEP_NS: u64 = 250_000;
const MS: u64 = 1_000_000;

#[derive(Clone)]
struct ModelTask {
    gang: usize,
    weight: u64,
    vtime: u64,
    waits_since_ns: u64,
}

struct QueueModel {
    turns: Vec<MapTurn>,
    tasks: Vec<ModelTask>,
    queues: Vec<Vec<usize>>,
    queue_vtime: Vec<u64>,
    rescue: Vec<usize>,
    /// Task and the rest of its slice, by CPU.
    running: Vec<Option<(usize, u64)>>,
    position: usize,
    slice_ns: u64,
    next_ns: u64,
    longest_ns: u64,
    longest_by_task_ns: Vec<u64>,
    rescues: bool,
}

impl QueueModel {
    fn new(turns: Vec<MapTurn>, tasks: Vec<ModelTask>, cpus: usize, rescues: bool) -> Self {
        let mut model = QueueModel {
            queues: vec![Vec::new(); turns.len()],
            queue_vtime: vec![0; turns.len()],
            rescue: Vec::new(),
            running: vec![None; cpus],
            position: turns.len() - 1,
            slice_ns: MS,
            next_ns: 0,
            longest_ns: 0,
            longest_by_task_ns: vec![0; tasks.len()],
            turns,
            tasks,
            rescues,
        };
        (0..model.tasks.len()).for_each(|task| model.enqueue(task, 0));
        model
    }

    fn enqueue(&mut self, index: usize, now_ns: u64) {
        let task = &mut self.tasks[index];
        task.waits_since_ns = now_ns;
        task.vtime = task
            .vtime
            .max(self.queue_vtime[task.gang].saturating_sub(self.slice_ns));
        let (gang, vtime) = (task.gang, task.vtime);
        let at = self.queues[gang].partition_point(|other| self.tasks[*other].vtime <= vtime);
        self.queues[gang].insert(at, index);
    }

    fn start_next_turn(&mut self, now_ns: u64) {
        let rotation_ns: u64 = self.turns.iter().map(|turn| turn.length_ns).sum();
        for gang in 0..self.queues.len() {
            let waiting = std::mem::take(&mut self.queues[gang]);
            let (late, rest): (Vec<usize>, Vec<usize>) = waiting.into_iter().partition(|task| {
                self.rescues && now_ns - self.tasks[*task].waits_since_ns >= rotation_ns
            });
            self.queues[gang] = rest;
            self.rescue.extend(late);
        }
        let turn_count = self.turns.len();
        let next = (1..=turn_count)
            .map(|step| (self.position + step) % turn_count)
            .find(|at| !self.queues[*at].is_empty());
        self.position = next.unwrap_or(self.position);
        let (length_ns, waiting) = (
            self.turns[self.position].length_ns,
            self.queues[self.position].len() as u64,
        );
        let cpus = self.running.len() as u64;
        let share_ns = if waiting > cpus {
            length_ns * cpus / waiting
        } else {
            length_ns
        };
        self.slice_ns = share_ns.clamp(MS / 2, 5 * MS);
        self.next_ns = now_ns + length_ns;
        for cpu in 0..self.running.len() {
            if self.running[cpu].is_some_and(|(task, _)| self.tasks[task].gang != self.position) {
                let (task, _) = self.running[cpu].take().unwrap();
                self.enqueue(task, now_ns);
            }
        }
    }

    fn dispatch(&mut self, cpu: usize, now_ns: u64) {
        let (task, slice_ns) = if !self.rescue.is_empty() {
            (self.rescue.remove(0), MS)
        } else if !self.queues[self.position].is_empty() {
            (self.queues[self.position].remove(0), self.slice_ns)
        } else {
            return;
        };
        let wait_ns = now_ns - self.tasks[task].waits_since_ns;
        self.longest_ns = self.longest_ns.max(wait_ns);
        self.longest_by_task_ns[task] = self.longest_by_task_ns[task].max(wait_ns);
        let ModelTask { gang, vtime, .. } = self.tasks[task];
        self.queue_vtime[gang] = self.queue_vtime[gang].max(vtime);
        self.running[cpu] = Some((task, slice_ns));
    }

    fn run(&mut self, until_ns: u64) {
        for now_ns in (0..until_ns).step_by(STEP_NS as usize) {
            if now_ns >= self.next_ns {
                self.start_next_turn(now_ns);
            }
            for cpu in 0..self.running.len() {
                if let Some((task, 0)) = self.running[cpu] {
                    self.running[cpu] = None;
                    self.enqueue(task, now_ns);
                }
                if self.running[cpu].is_none() {
                    self.dispatch(cpu, now_ns);
                }
                if let Some((task, rest_ns)) = &mut self.running[cpu] {
                    *rest_ns = rest_ns.saturating_sub(STEP_NS);
                    self.tasks[*task].vtime += STEP_NS * 100 / self.tasks[*task].weight;
                }
            }
        }
        // A task that still waits has waited at least this long.
        for (index, task) in self.tasks.iter().enumerate() {
            if !self
                .running
                .iter()
                .flatten()
                .any(|(running, _)| *running == index)
            {
                self.longest_ns = self.longest_ns.max(until_ns - task.waits_since_ns);
            }
        }
    }
}

fn draw_below(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % below
}

/// A load of at most 40 tasks per CPU, with weights from 1 to 10000.
fn load(seed: u64) -> (Vec<MapTurn>, Vec<ModelTask>, usize) {
    let state = &mut (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let gangs = 1 + draw_below(state, 5);
    let cpus = 1 + draw_below(state, 4);
    let turns = (0..gangs)
        .map(|gang| MapTurn {
            length_ns: (5 + draw_below(state, 46)) * MS,
            gang: gang as u32,
            may_fill: 0,
        })
        .collect();
    let tasks = (0..1 + draw_below(state, 40 * cpus))
        .map(|_| ModelTask {
            gang: draw_below(state, gangs) as usize,
            weight: [1, 10, 100, 1000, 10_000][draw_below(state, 5) as usize],
            vtime: 0,
            waits_since_ns: 0,
        })
        .collect();
    (turns, tasks, cpus as usize)
}

/// Does any task wait longer than two rotations and 100 ms, with up to 40 tasks per CPU and any weights?
#[test]
fn no_task_waits_longer_than_two_rotations_and_100_ms() {
    for seed in 0..300 {
        let (turns, tasks, cpus) = load(seed);
        let bound_ns = longest_wait_ns(&turns);
        let mut model = QueueModel::new(turns, tasks, cpus, true);
        model.run(3_000 * MS);
        assert!(
            model.longest_ns <= bound_ns,
            "seed {seed}: {} ms, bound {} ms",
            model.longest_ns / MS,
            bound_ns / MS
        );
    }
}

/// Does the rescue ensure the bound? Without it, a light task beside heavy ones waits longer.
#[test]
fn light_tasks_wait_too_long_without_rescue() {
    let turns: Vec<MapTurn> = (0..2)
        .map(|gang| MapTurn {
            length_ns: 20 * MS,
            gang,
            may_fill: 0,
        })
        .collect();
    let model_task = |gang, weight| ModelTask {
        gang,
        weight,
        vtime: 0,
        waits_since_ns: 0,
    };
    let tasks: Vec<ModelTask> = (0..12)
        .map(|at| model_task(at % 2, if at == 0 { 1 } else { 10_000 }))
        .collect();
    let bound_ns = longest_wait_ns(&turns);
    let longest_ns = |rescues| {
        let mut model = QueueModel::new(turns.clone(), tasks.clone(), 1, rescues);
        model.run(5_000 * MS);
        model.longest_ns
    };
    assert!(longest_ns(true) <= bound_ns, "{}", longest_ns(true));
    assert!(longest_ns(false) > bound_ns, "{}", longest_ns(false));
}
