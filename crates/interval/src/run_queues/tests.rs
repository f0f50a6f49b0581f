use super::*;

fn all_cpus(cpus: u32) -> CpuSet {
    (0..cpus).collect()
}

fn sample_run_queues(cpus: u32, explicit: bool) -> RunQueues {
    let cache_of = |cpu: u32| cpu / 2;
    RunQueues::new(
        1000.0,
        0.0,
        explicit,
        (0..cpus).map(cache_of).collect(),
        (0..cpus).collect(),
    )
}

/// Are arrivals spread evenly, and does each task of a queue get the same time?
#[test]
fn arrivals_fill_the_least_loaded_queue() {
    let mut turns = sample_run_queues(4, false);
    (0..10).for_each(|slot| turns.add(slot, all_cpus(4), 1.0, 1e6));
    turns.update(0.0);
    let mut lengths: Vec<usize> = (0..4).map(|cpu| turns.queued_tasks(cpu).len()).collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [2, 2, 3, 3]);
    let total: f32 = turns.tasks.iter().map(|task| task.share).sum();
    assert!((total - 4.0).abs() < 1e-5, "{total}");
}

/// Do weights divide the time of a queue, and do the other tasks get the time that sleeping tasks leave?
#[test]
fn weights_divide_a_queues_time_up_to_the_demand() {
    let mut turns = sample_run_queues(1, false);
    turns.add(0, all_cpus(1), 1.0, 1e6);
    turns.add(1, all_cpus(1), 1.0, 1e6);
    turns.add(2, all_cpus(1), 0.1, 1e6);
    turns.set_weight(1, 2.0);
    turns.update(0.0);
    let shares: Vec<f32> = turns.tasks.iter().map(|task| task.share).collect();
    assert!(
        (shares[2] - 0.1).abs() < 1e-6 && (shares[0] - 0.3).abs() < 1e-6,
        "{shares:?}"
    );
    assert!((shares[1] - 0.6).abs() < 1e-6, "{shares:?}");
}

/// Over many explicit turns, does each task get the time that averaging gives it?
#[test]
fn explicit_turns_add_up_to_the_averages() {
    let run = |explicit: bool| {
        let mut turns = sample_run_queues(2, explicit);
        (0..5).for_each(|slot| {
            turns.add(
                slot,
                all_cpus(2),
                if slot == 3 { 0.25 } else { 1.0 },
                7_000.0,
            )
        });

        turns.set_weight(1, 3.0);
        let (mut now, mut shares) = (0.0, [0.0f64; 5]);
        while now < 2e6 {
            turns.update(now);
            let next = turns.next_event().min(2e6);
            for (share, task) in shares.iter_mut().zip(&turns.tasks) {
                *share += f64::from(task.share) * (next - now) / 2e6;
            }
            now = next;
        }

        shares
    };

    let (explicit, averaged) = (run(true), run(false));
    for (a, b) in explicit.iter().zip(&averaged) {
        assert!((a - b).abs() < 0.06, "{explicit:?} {averaged:?}");
    }
}

/// Do gangs have exclusive turns on their CPUs, in proportion to their slices?
#[test]
fn gangs_have_exclusive_turns_in_proportion_to_their_slices() {
    let mut turns = sample_run_queues(2, false);
    (0..4).for_each(|slot| turns.add(slot, all_cpus(2), 1.0, 1e6));
    let gangs = vec![
        (vec![(0, Some(0)), (1, Some(1))], 1),
        (vec![(2, None), (3, None)], 3),
    ];
    turns.set_rotations(vec![QueueRotation::new(all_cpus(2), 1000.0, gangs)]);
    let (mut now, mut shares) = (0.0, [0.0f64; 4]);
    while now < 4e5 {
        turns.update(now);
        let is_running: Vec<bool> = turns.tasks.iter().map(|task| task.share > 0.0).collect();
        assert!(
            is_running == [true, true, false, false] || is_running == [false, false, true, true],
            "{is_running:?}"
        );
        let next = turns.next_event();
        shares
            .iter_mut()
            .zip(&turns.tasks)
            .for_each(|(share, task)| *share += f64::from(task.share) * (next - now) / 4e5);
        now = next;
    }
    assert!(
        (shares[0] - 0.25).abs() < 0.02 && (shares[3] - 0.75).abs() < 0.02,
        "{shares:?}"
    );
}

/// Does a task without a gang run beside gangs if some CPU has a turn for it, whether it arrived before the gangs,
/// after them, or was a member?
#[test]
fn a_task_without_a_gang_runs_where_a_cpu_has_a_turn() {
    let mut turns = sample_run_queues(3, false);
    let (gang_cpus, open_cpus): (CpuSet, CpuSet) =
        ([0, 1].into_iter().collect(), [2].into_iter().collect());
    (0..4).for_each(|slot| turns.add(slot, gang_cpus.clone(), 1.0, 1e6));
    (4..8).for_each(|slot| turns.add(slot, open_cpus.clone(), 1.0, 1e6));
    turns.add(8, all_cpus(3), 1.0, 1e6);
    turns.add(9, gang_cpus.clone(), 1.0, 1e6);
    assert!(
        turns.tasks[8].cpu.is_some_and(|cpu| cpu < 2),
        "the shorter queues are there"
    );
    let gangs = vec![
        (vec![(0, None), (1, None)], 1),
        (vec![(2, None), (3, None)], 1),
    ];
    turns.set_rotations(vec![QueueRotation::new(gang_cpus, 1000.0, gangs)]);
    turns.balance();
    turns.add(10, all_cpus(3), 1.0, 1e6);
    turns.set_allowed_cpus(9, all_cpus(3));
    turns.update(0.0);
    for slot in 8..11 {
        assert_eq!(turns.tasks[slot].cpu, Some(2), "task {slot}");
        assert!(turns.tasks[slot].share > 0.1, "task {slot}");
    }
}

/// Do the tasks of a CPU that goes offline move to others, and does a task without an allowed CPU wait?
#[test]
fn tasks_of_an_offline_cpu_move_to_others() {
    let mut turns = sample_run_queues(2, false);
    turns.add(0, all_cpus(2), 1.0, 1e6);
    turns.add(1, all_cpus(2), 1.0, 1e6);
    turns.add(2, [1].into_iter().collect(), 1.0, 1e6);
    turns.set_online(1, false);
    turns.update(0.0);
    assert_eq!(
        (turns.queued_tasks(0).len(), turns.queued_tasks(1).len()),
        (2, 0)
    );
    assert_eq!((turns.tasks[2].cpu, turns.tasks[2].share), (None, 0.0));
    turns.set_online(1, true);
    turns.set_allowed_cpus(2, all_cpus(2));
    turns.update(1.0);
    assert!(turns.tasks[2].share > 0.0);
}
