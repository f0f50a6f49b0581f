use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cachemate_core::{Gang, GangSchedule, TaskId};
use cachemate_gangs::{ScheduledTurn, SchedulerPlan, SchedulerReply, VERSION};

use super::advisory_gangs::build_advisory_gangs;
use super::compose::{GangMember, build_cache_schedule, plan_message};
use super::fake_tests::FakeScheduler;
use super::{NumberedCache, SchedulerClient};
use crate::act::changes::GangController;
use crate::act::gangs::GangRunners;
use crate::act::thread_rotation::ThreadRotation;
use crate::fake_tests::FakeHost;
use crate::kernel::ThreadKey;
use crate::kernel::scheduling::{EXT, SchedParams};

fn thread_key(tid: i32) -> ThreadKey {
    ThreadKey {
        tid,
        start_ticks: tid as u64 * 10,
    }
}

fn member(tid: i32) -> GangMember {
    (thread_key(tid), SchedParams::default())
}

/// A schedule of gangs of one thread each, in which the task ids equal the thread ids.
fn schedule(cpus: &str, threads: &[i32]) -> (GangSchedule, ThreadRotation) {
    let gang = |tid: &i32| Gang {
        members: vec![(TaskId(*tid as u32), None)],
        slices: 2,
    };
    let schedule = GangSchedule {
        cpus: cpus.parse().unwrap(),
        slice_ns: 10_000_000,
        gangs: threads.iter().map(gang).collect(),
    };
    let gangs = threads.iter().map(|tid| (vec![member(*tid)], 2)).collect();
    (
        schedule,
        ThreadRotation {
            slice: Duration::from_millis(10),
            gangs,
        },
    )
}

fn two_caches() -> Vec<NumberedCache> {
    let cache = |(number, cpus): (u32, &str)| NumberedCache {
        number,
        cpus: cpus.parse().unwrap(),
    };
    [(0, "0-1"), (1, "2-3")].map(cache).to_vec()
}

struct SchedulerFixture {
    host: Arc<Mutex<FakeHost>>,
    socket: PathBuf,
    gangs: GangRunners<FakeHost>,
    _dir: tempfile::TempDir,
}

impl SchedulerFixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("gangs.sock");
        let host = FakeHost::with_threads(5..9);
        let host = Arc::new(Mutex::new(host));
        let gangs = GangRunners::new(host.clone(), Some(&socket));
        SchedulerFixture {
            host,
            socket,
            gangs,
            _dir: dir,
        }
    }
    fn policies(&self) -> Vec<u32> {
        self.host
            .lock()
            .unwrap()
            .threads
            .borrow()
            .values()
            .map(|thread| thread.policy)
            .collect()
    }
    fn start_scheduler(&self) -> FakeScheduler {
        FakeScheduler::start(self.host.clone(), &self.socket)
    }
    fn start(&mut self, (schedule, rotation): &(GangSchedule, ThreadRotation)) {
        self.gangs.start(schedule, rotation.clone()).unwrap();
    }
}

/// Do all starts and stops of one list take effect through one plan, and does the last stop restore all threads?
#[test]
fn starts_and_stops_of_one_list_take_effect_in_one_plan() {
    let mut stage = SchedulerFixture::new();
    let scheduler = stage.start_scheduler();
    assert_eq!(stage.gangs.poll(), None);
    let (left, right) = (schedule("0-1", &[5, 6]), schedule("2-3", &[7, 8]));
    stage.start(&left);
    stage.start(&right);
    assert_eq!(stage.policies(), [0; 4]);
    stage.gangs.commit_gangs().unwrap();
    assert_eq!(stage.policies(), [EXT; 4]);
    assert_eq!(stage.gangs.schedules(), [left.0.clone(), right.0.clone()]);
    stage.gangs.commit_gangs().unwrap();
    stage.gangs.stop(&right.0);
    stage.gangs.commit_gangs().unwrap();
    assert_eq!(stage.policies(), [EXT, EXT, 0, 0]);
    assert_eq!(stage.gangs.poll(), None);
    stage.gangs.stop_all();
    assert_eq!(stage.policies(), [0; 4]);
    let state = scheduler.inside.lock().unwrap();
    assert_eq!(
        state
            .plans
            .iter()
            .map(|plan| plan.generation)
            .collect::<Vec<_>>(),
        [1, 2, 3]
    );
    let turn = |cache, gang| ScheduledTurn {
        cache,
        gang,
        turn_us: 20_000,
        may_fill: Vec::new(),
    };
    assert_eq!(
        state.plans[0].turns,
        [turn(0, 0), turn(0, 1), turn(1, 0), turn(1, 1)]
    );
    assert_eq!(state.plans[0].longest_wait_ms, 180);
    assert!(state.plans[2].turns.is_empty() && state.plans[2].tasks.is_empty());
}

/// Do gangs run as idle turns without the scheduler, move to it once it runs, and return to idle turns with their
/// original policies after it was killed?
#[test]
fn gangs_run_as_idle_turns_without_the_scheduler() {
    let mut stage = SchedulerFixture::new();
    let gangs = schedule("0-1", &[5, 6]);
    assert_eq!(stage.gangs.poll(), None);
    stage.start(&gangs);
    stage.gangs.commit_gangs().unwrap();
    assert_eq!(stage.gangs.schedules(), std::slice::from_ref(&gangs.0));
    let scheduler = stage.start_scheduler();
    // Idle turns end, so that the next list starts the schedule again.
    assert_eq!(
        (stage.gangs.poll(), stage.gangs.schedules()),
        (None, Vec::new())
    );
    assert_eq!(stage.policies(), [0; 4]);
    stage.start(&gangs);
    stage.gangs.commit_gangs().unwrap();
    assert_eq!(stage.policies(), [EXT, EXT, 0, 0]);
    drop(scheduler);
    assert_eq!(stage.policies(), [EXT, EXT, 0, 0]);
    let message = stage.gangs.poll().unwrap();
    assert!(message.contains("does not answer"), "{message}");
    assert_eq!(
        (stage.policies(), stage.gangs.schedules()),
        (vec![0; 4], Vec::new())
    );
    assert_eq!(stage.gangs.poll(), None);
    stage.start(&gangs);
    stage.gangs.commit_gangs().unwrap();
    assert_eq!(stage.gangs.schedules(), std::slice::from_ref(&gangs.0));
    assert!(!stage.policies().contains(&EXT));
    stage.gangs.stop_all();
    assert_eq!(stage.policies(), [0; 4]);
}

/// Is a difference between the plan in force and the one that was sent noticed: other turns, a detached scheduler,
/// another process's plan?
#[test]
fn a_plan_in_force_that_differs_from_the_sent_one_is_noticed() {
    for (fault, word) in [
        (0, "other turns"),
        (1, "detached (CPU 1"),
        (2, "another process"),
    ] {
        let mut stage = SchedulerFixture::new();
        let scheduler = stage.start_scheduler();
        assert_eq!(stage.gangs.poll(), None);
        let gangs = schedule("0-1", &[5, 6]);
        stage.start(&gangs);
        stage.gangs.commit_gangs().unwrap();
        {
            let mut state = scheduler.inside.lock().unwrap();
            match fault {
                0 => state.other_turns = Some(Vec::new()),
                1 => state.guarded = Some("CPU 1: unmanaged tasks had 41 % of 201 ms".to_string()),
                _ => {
                    let mut theirs = state.plans[0].clone();
                    theirs.generation = 9;
                    state.plans.push(theirs);
                }
            }
        }
        let message = stage.gangs.poll().unwrap();
        assert!(message.contains(word), "{message}");
        assert_eq!(
            (stage.policies(), stage.gangs.schedules()),
            (vec![0; 4], Vec::new()),
            "{word}"
        );
        // The daemon has sent the scheduler an empty plan, so that it schedules no thread when it attaches again. The
        // plan of the other process stays.
        let last = scheduler
            .inside
            .lock()
            .unwrap()
            .plans
            .last()
            .unwrap()
            .clone();
        assert_eq!(
            (last.generation, last.tasks.is_empty()),
            if fault == 2 { (9, false) } else { (2, true) },
            "{word}"
        );
    }
}

/// Is a scheduler that another process uses left alone?
#[test]
fn a_scheduler_in_use_is_not_taken() {
    let mut stage = SchedulerFixture::new();
    let _scheduler = stage.start_scheduler();
    let mut theirs = GangRunners::new(stage.host.clone(), Some(&stage.socket));
    assert_eq!(theirs.poll(), None);
    let (gangs, rotation) = schedule("2-3", &[7, 8]);
    theirs.start(&gangs, rotation).unwrap();
    theirs.commit_gangs().unwrap();
    assert_eq!(
        (stage.gangs.poll(), stage.gangs.is_scheduler_running()),
        (None, false)
    );
    stage.gangs.stop_all();
    assert_eq!(stage.policies(), [0, 0, EXT, EXT]);
    assert_eq!(theirs.poll(), None);
}

/// Is a plan that the scheduler refuses reported, and does every thread stay as before?
#[test]
fn a_refused_plan_is_reported_and_leaves_every_thread_as_is() {
    let mut stage = SchedulerFixture::new();
    let scheduler = stage.start_scheduler();
    assert_eq!(stage.gangs.poll(), None);
    let (left, right) = (schedule("0-1", &[5, 6]), schedule("2-3", &[7, 8]));
    stage.start(&left);
    stage.gangs.commit_gangs().unwrap();
    scheduler.inside.lock().unwrap().refuses =
        Some("plan.turns[0].gang: found 40, expected below 30".to_string());
    stage.start(&right);
    let error = stage.gangs.commit_gangs().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the gang scheduler refuses: plan.turns[0].gang: found 40, expected below 30"
    );
    assert_eq!(
        (stage.policies(), stage.gangs.schedules()),
        (vec![0; 4], Vec::new())
    );
}

/// Is each schedule that the scheduler cannot keep named, so that it becomes idle turns?
#[test]
fn every_schedule_the_scheduler_cannot_keep_is_named() {
    let (caches, fits) = (two_caches(), schedule("0-1", &[5, 6]));
    let why = |cpus: &str,
               change: &dyn Fn(&mut GangSchedule, &mut ThreadRotation),
               used_caches: &[u32]| {
        let (mut schedule, mut rotation) = schedule(cpus, &[5, 6]);
        change(&mut schedule, &mut rotation);
        build_cache_schedule(&schedule, &rotation, &caches, used_caches).unwrap_err()
    };
    assert_eq!(
        build_cache_schedule(&fits.0, &fits.1, &caches, &[1])
            .unwrap()
            .cache,
        0
    );
    assert_eq!(
        why("0-3", &|_, _| {}, &[]),
        "CPUs 0-3 are not within one last-level cache"
    );
    assert_eq!(
        why("2", &|_, _| {}, &[1]),
        "cache 1 has turns of another schedule already"
    );
    assert_eq!(
        why("0", &|_, rotation| rotation.gangs[1].0.push(member(5)), &[]),
        "thread 5 is in several gangs"
    );
    let long = "found a turn of 2000000 us, expected 1000 to 1000000";
    assert_eq!(
        why("0", &|schedule, _| schedule.slice_ns = 1_000_000_000, &[]),
        long
    );
    let many = |_: &mut GangSchedule, rotation: &mut ThreadRotation| {
        rotation.gangs = vec![(Vec::new(), 1); 31]
    };
    assert_eq!(why("0", &many, &[]), "found 31 gangs, expected at most 30");
    let flagged =
        |_: &mut GangSchedule, rotation: &mut ThreadRotation| rotation.gangs[0].0[0].1.flags = 1;
    assert_eq!(
        why("0", &flagged, &[]),
        "thread 5 resets its policy on fork, which the scheduler would not restore"
    );
}

/// Do weights reach the message, and may a turn be filled by exactly the tasks that clash with none of its members?
#[test]
fn weights_and_clashes_reach_the_message() {
    let (schedule, rotation) = schedule("0-1", &[5, 6, 7]);
    let part = build_cache_schedule(&schedule, &rotation, &two_caches(), &[]).unwrap();
    let weights = BTreeMap::from([
        (thread_key(5), 2.5),
        (thread_key(6), 1e-9),
        (thread_key(7), 1e9),
    ]);
    let message = plan_message(
        4,
        &[&part],
        None,
        &weights,
        &[(thread_key(5), thread_key(6))],
    );
    assert_eq!(
        message
            .tasks
            .iter()
            .map(|task| task.weight)
            .collect::<Vec<_>>(),
        [250, 1, 10_000]
    );
    let fill: Vec<Vec<u32>> = message
        .turns
        .iter()
        .map(|turn| turn.may_fill.clone())
        .collect();
    assert_eq!(fill, [vec![2], vec![2], vec![0, 1]]);
    let strict = plan_message(4, &[&part], None, &weights, &[]);
    assert!(strict.turns.iter().all(|turn| turn.may_fill.is_empty()));
}

/// Are tasks that clash put into different gangs if there are enough, heaviest first, and does no task wait if all
/// fit?
#[test]
fn clashing_tasks_are_put_into_different_gangs() {
    let members: Vec<GangMember> = (0..8).map(member).collect();
    let pair = |a, b| ((thread_key(a), thread_key(b)), 1.0);
    // Two times four streams that disturb four chases, in any order.
    let penalties: BTreeMap<_, _> = (0..4)
        .flat_map(|a| (4..8).map(move |b| pair(a, b)))
        .collect();
    let advice = build_advisory_gangs(&members, &penalties, &two_caches()).unwrap();
    let gang_of = |tid| {
        advice
            .gangs
            .iter()
            .position(|gang| gang.iter().any(|(gang_member, _)| gang_member.tid == tid))
            .unwrap()
    };
    assert_eq!(
        advice.gangs.iter().map(Vec::len).collect::<Vec<_>>(),
        [4, 4]
    );
    assert!(
        penalties
            .keys()
            .all(|(a, b)| gang_of(a.tid) != gang_of(b.tid)),
        "{advice:?}"
    );
    assert_eq!(
        build_advisory_gangs(&members[..4], &penalties, &two_caches()),
        None
    );
    assert_eq!(
        build_advisory_gangs(&members, &BTreeMap::new(), &two_caches()),
        None
    );
    // More clashes than gangs: the heavy one is kept apart.
    let mut all: BTreeMap<_, _> = (0..8)
        .flat_map(|a| (a + 1..8).map(move |b| pair(a, b)))
        .collect();
    all.insert((thread_key(2), thread_key(3)), 100.0);
    let advice = build_advisory_gangs(&members, &all, &two_caches()).unwrap();
    assert!(
        advice
            .gangs
            .iter()
            .all(|gang| !gang.contains(&member(2)) || !gang.contains(&member(3)))
    );
}

/// Are the documented answers distinguished?
#[test]
fn the_documented_answers_are_distinguished() {
    let answer = |text: &str| serde_json::from_str::<SchedulerReply>(text).unwrap();
    assert_eq!(
        answer(r#"{"error":"no"}"#),
        SchedulerReply::Error {
            error: "no".to_string()
        }
    );
    let reply = answer(r#"{"generation":7,"attached":true,"complaints":[]}"#);
    assert_eq!(
        reply,
        SchedulerReply::Taken {
            generation: 7,
            attached: true,
            complaints: Vec::new()
        }
    );
    let counts = r#"{"gang":0,"turns":9,"kicks":1,"rescued":0,"fills":0,"latest_ns":3,"longest_wait_ns":5,"turn_ns":1,
        "mixed_ns":0,"off_turn_ns":0,"partly_idle_ns":0,"idle_ns":0}"#;
    let turn = r#"{"cache":0,"gang":0,"turn_us":20000,"may_fill":[]}"#;
    let state = format!(
        r#"{{"generation":7,"kernel":"enabled","guarded":null,"places":4,"held":4,"caches":[{{"cpus":"0-1","turns":[{turn}],"counts":{counts}}}]}}"#
    );
    let SchedulerReply::State(state) = answer(&state) else {
        panic!("{state}")
    };
    assert_eq!((state.held, state.turns().len()), (4, 1));
}

/// Is an answer that is cut, repeated from an earlier plan, out of order, forged or endless an error in bounded time,
/// and one that comes in pieces or twice understood?
#[test]
fn broken_answers_end_in_bounded_time() {
    use std::io::{BufRead, BufReader, Write};
    let reply = |generation: u64| {
        format!("{{\"generation\":{generation},\"attached\":true,\"complaints\":[]}}\n")
    };
    let state = "{\"generation\":1,\"kernel\":\"enabled\",\"guarded\":null,\"places\":0,\"held\":0,\"caches\":[]}\n";
    let pieces = |text: &str| {
        text.as_bytes()
            .chunks(7)
            .map(<[u8]>::to_vec)
            .collect::<Vec<_>>()
    };
    let drip: Vec<Vec<u8>> = vec![b"{".to_vec(); 100];
    for (answer, expected) in [
        (pieces(&reply(7)), None),
        (pieces(&reply(7).repeat(2)), None),
        (
            pieces(reply(7).trim_end().split_at(20).0),
            Some("expected an answer"),
        ),
        (
            pieces(&reply(6)),
            Some("found an answer to plan 6, expected to 7"),
        ),
        (pieces(state), Some("expected an answer to a plan")),
        (
            vec![vec![0xff; 64], b"\n".to_vec()],
            Some("expected an answer"),
        ),
        (Vec::new(), Some("expected an answer")),
        (drip, Some("timed out")),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("gangs.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let is_dripping = answer.len() == 100;
        let scheduler = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            BufReader::new(&stream)
                .read_line(&mut String::new())
                .unwrap();
            for part in answer {
                // The client may have lost its patience.
                if stream.write_all(&part).is_err() {
                    break;
                }
                let pause = if is_dripping { 50 } else { 0 };
                std::thread::sleep(std::time::Duration::from_millis(pause));
            }
        });
        let plan = SchedulerPlan {
            version: VERSION,
            generation: 7,
            longest_wait_ms: 100,
            turns: Vec::new(),
            tasks: Vec::new(),
        };
        let outcome = SchedulerClient::new(&socket).send_plan(plan);
        match expected {
            None => assert_eq!(outcome.unwrap(), Vec::<String>::new()),
            Some(expected) => {
                assert!(
                    outcome
                        .as_ref()
                        .is_err_and(|error| error.to_string().contains(expected)),
                    "{outcome:?}"
                )
            }
        }
        scheduler.join().unwrap();
    }
}
