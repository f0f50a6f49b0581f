//! From a plan to changes on the host: first one pure function, then the only place that makes them.
//!
//! [`changes`] compares the whole desired state with what is, and answers with a list; `--dry-run` prints exactly that.
//! [`Actuator::make`] writes the originals down (one synced batch), sees that the guardian stands, makes each change
//! and reads it back. A thread that is not in the plan gets its original back: absence in a plan is the default.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use cachemate_core::{CpuSet, Item, Plan, Refused, RefusedBecause};

use crate::guardian::Guardian;
use crate::journal::{Change, Held, Journal, JournalError, Object, State};
use crate::kernel::{Kernel, ThreadKey, is_gone};
use crate::restore::{Outcome, Restored, heir, in_words, read_state, restore, write_state};
use crate::tasks::Managed;

/// One change, with the line of the plan that asks for it.
#[derive(Clone, PartialEq, Debug)]
pub struct Wanted {
    pub item: Item,
    pub object: Object,
    pub state: State,
}

/// Everything that the host has to be brought to for affinities and weights of `plan` to hold. `originals` are the
/// journalled ones: a thread without an entry that the plan does not mention is not touched at all.
pub fn changes(plan: &Plan, tasks: &[&Managed], online: &CpuSet, originals: &BTreeMap<Object, State>) -> Vec<Wanted> {
    let mut wanted = Vec::new();
    for task in tasks.iter().filter(|task| !task.exited && !task.fixed) {
        let affinity = Object::Affinity { pid: task.pid, thread: task.thread };
        let state = match plan.allowed.get(&task.task) {
            Some(cpus) => Some(State::Cpus(cpus.intersection(online))),
            None => originals.get(&affinity).cloned(),
        };
        wanted.extend(state.map(|state| Wanted { item: Item::Allowed(task.task), object: affinity, state }));
        let nice = Object::Nice { pid: task.pid, thread: task.thread };
        let original = match originals.get(&nice) {
            Some(State::Nice(original)) => Some(*original),
            _ => None,
        };
        let state = match plan.weights.get(&task.task) {
            Some(&weight) => Some(State::Nice(nice_for(weight, original.unwrap_or(task.nice)))),
            None => original.map(State::Nice),
        };
        wanted.extend(state.map(|state| Wanted { item: Item::Weight(task.task), object: nice, state }));
    }
    wanted
}

/// The nice value that gives `weight` times the CPU share of `original`: one step is a factor of 1.25 in Linux's
/// table of weights (`sched_prio_to_weight`).
pub fn nice_for(weight: f64, original: i32) -> i32 {
    let steps = (weight.ln() / 1.25f64.ln()).round() as i32;
    original.saturating_sub(steps).clamp(-20, 19)
}

/// What came of making changes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Made {
    pub refused: Vec<Refused>,
    /// As they were found.
    pub found: BTreeMap<Object, State>,
    /// Objects that now read as wanted.
    pub held: BTreeMap<Object, State>,
    /// Somebody else changed these since we last set them.
    pub overridden: Vec<Item>,
    pub calls: u64,
}

impl Made {
    /// Notes what is no longer as it was when `last` was read.
    pub fn note_overridden(&mut self, wanted: &[Wanted], last: &BTreeMap<Object, State>) {
        let theirs = |want: &&Wanted| match (last.get(&want.object), self.found.get(&want.object)) {
            (Some(last), Some(found)) => last != found,
            _ => false,
        };
        let items: Vec<Item> = wanted.iter().filter(theirs).map(|want| want.item.clone()).collect();
        self.overridden.extend(items);
    }
}

/// How a guardian is started: program and arguments.
#[derive(Clone, Debug)]
pub struct GuardianCommand {
    pub program: PathBuf,
    pub args: Vec<String>,
}

/// The only one who changes the host.
#[derive(Debug)]
pub struct Actuator {
    state_dir: PathBuf,
    guardian_command: GuardianCommand,
    /// Both stand from the first change on; starting changes nothing.
    armed: Option<(Journal, Guardian)>,
    /// As we last read it back.
    last: BTreeMap<Object, State>,
}

impl Actuator {
    pub fn new(state_dir: &Path, guardian_command: GuardianCommand) -> Self {
        Actuator { state_dir: state_dir.to_path_buf(), guardian_command, armed: None, last: BTreeMap::new() }
    }

    /// Originals by object, as far as anything was changed.
    pub fn originals(&self) -> BTreeMap<Object, State> {
        let held = self.armed.iter().flat_map(|(journal, _)| journal.held());
        held.map(|(object, held)| (object.clone(), held.original.clone())).collect()
    }

    /// Process id of the guardian, once there is one.
    pub fn guardian_pid(&self) -> Option<u32> {
        self.armed.as_ref().map(|(_, guardian)| guardian.pid())
    }

    fn arm(&mut self, kernel: &dyn Kernel) -> Result<&mut Journal, JournalError> {
        let io = |source| JournalError::Io { path: self.state_dir.clone(), source };
        let args: Vec<&str> = self.guardian_command.args.iter().map(String::as_str).collect();
        if let Some((_, guardian)) = &mut self.armed
            && !guardian.is_alive()
        {
            *guardian = Guardian::start(&self.guardian_command.program, &args).map_err(io)?;
        }
        if self.armed.is_none() {
            // Where the time is not to be had, everybody counts as born since.
            let since_ticks = kernel.ticks_since_boot().unwrap_or(0);
            let journal = Journal::create(&self.state_dir, &kernel.boot_id().map_err(io)?, since_ticks)?;
            match Guardian::start(&self.guardian_command.program, &args) {
                Ok(guardian) => self.armed = Some((journal, guardian)),
                Err(source) => {
                    journal.remove()?;
                    return Err(io(source));
                }
            }
        }
        let (journal, _) = self.armed.as_mut().expect("armed just now");
        Ok(journal)
    }

    /// Makes what is not so already, writing originals down first. Refusals are told one by one; the rest goes on. What
    /// somebody else has changed since the last call is told, and set anew.
    pub fn make(&mut self, kernel: &dyn Kernel, wanted: &[Wanted]) -> Made {
        let mut made = self.change(kernel, wanted);
        made.note_overridden(wanted, &self.last);
        self.last.clone_from(&made.held);
        made
    }

    /// As [`Actuator::make`], for those who look themselves after what others change.
    pub fn change(&mut self, kernel: &dyn Kernel, wanted: &[Wanted]) -> Made {
        let mut made = Made::default();
        let mut due: Vec<(Change, Item)> = Vec::new();
        for want in wanted {
            if self.still_holds(kernel, want) {
                made.held.insert(want.object.clone(), want.state.clone());
                continue;
            }
            match read_state(kernel, &want.object) {
                Ok(now) => {
                    made.found.insert(want.object.clone(), now.clone());
                    if now == want.state {
                        made.held.insert(want.object.clone(), now);
                    } else {
                        let change = Change { object: want.object.clone(), now, wanted: want.state.clone() };
                        due.push((change, want.item.clone()));
                    }
                }
                Err(error) => made.refused.push(refused(kernel, &want.item, &want.object, &error)),
            }
        }
        if !due.is_empty() {
            self.make_due(kernel, due, &mut made);
        }
        made
    }

    /// What was read back the last time is wanted again, and is so by the short way to ask.
    fn still_holds(&self, kernel: &dyn Kernel, want: &Wanted) -> bool {
        let (Object::Affinity { thread, .. }, State::Cpus(cpus)) = (&want.object, &want.state) else { return false };
        self.last.get(&want.object) == Some(&want.state) && kernel.affinity_is(thread.tid, cpus).unwrap_or(false)
    }

    fn make_due(&mut self, kernel: &dyn Kernel, due: Vec<(Change, Item)>, made: &mut Made) {
        let changes: Vec<Change> = due.iter().map(|(change, _)| change.clone()).collect();
        let written = self.arm(kernel).and_then(|journal| journal.before(&changes));
        if let Err(error) = written {
            let refuse = |(_, item)| Refused { item, because: RefusedBecause::NoRoom, said: error.to_string() };
            made.refused.extend(due.into_iter().map(refuse));
            return;
        }
        for (change, item) in due {
            made.calls += 1;
            let done =
                write_state(kernel, &change.object, &change.wanted).and_then(|()| read_state(kernel, &change.object));
            match done {
                Ok(now) => {
                    if now != change.wanted {
                        let said =
                            format!("{:?}: asked for {:?}, the kernel made it {now:?}", change.object, change.wanted);
                        made.refused.push(Refused { item, because: RefusedBecause::OwnedByAnother, said });
                    }
                    made.held.insert(change.object, now);
                }
                Err(error) => made.refused.push(refused(kernel, &item, &change.object, &error)),
            }
        }
    }

    /// Writes the originals of what somebody else is going to change between known states (the gangs' runner, a probe),
    /// and sees that the guardian stands. Objects that are gone are left out.
    ///
    /// # Errors
    /// As for every change, or the original of an object that is there cannot be read: nothing may be changed then.
    pub fn promise(&mut self, kernel: &dyn Kernel, wanted: &[Wanted]) -> Result<(), JournalError> {
        let mut changes = Vec::new();
        for Wanted { object, state, .. } in wanted {
            match read_state(kernel, object) {
                Ok(now) => changes.push(Change { object: object.clone(), now, wanted: state.clone() }),
                Err(error) if is_gone(&error) => {}
                Err(source) => return Err(JournalError::Original { object: format!("{object:?}"), source }),
            }
        }
        self.arm(kernel)?.before(&changes)
    }

    /// Sees that the guardian stands, where anything has been changed.
    ///
    /// # Errors
    /// It was gone and no other could be started.
    pub fn keep_guarded(&mut self, kernel: &dyn Kernel) -> Result<(), JournalError> {
        if self.armed.is_some() { self.arm(kernel).map(|_| ()) } else { Ok(()) }
    }

    /// Puts back what concerns these threads, which are managed no longer.
    ///
    /// # Errors
    /// The journal could not be written anew; nothing is lost.
    pub fn release(&mut self, kernel: &dyn Kernel, threads: &[ThreadKey]) -> Result<Vec<Restored>, JournalError> {
        let Some((journal, _)) = &mut self.armed else { return Ok(Vec::new()) };
        let theirs = |object: &Object| object.thread().is_some_and(|thread| threads.contains(&thread));
        let held: BTreeMap<_, _> =
            journal.held().iter().filter(|(object, _)| theirs(object)).map(|(o, h)| (o.clone(), h.clone())).collect();
        let account = restore(kernel, &held);
        let failed: Vec<&Object> =
            account.iter().filter(|line| matches!(line.outcome, Outcome::Failed(_))).map(|line| &line.object).collect();
        self.last.retain(|object, _| !theirs(object));
        journal.retain(|object| !theirs(object) || failed.contains(&object))?;
        Ok(account)
    }

    /// Threads that were born under a mask, nice value or policy of ours inherited it. Those that are managed keep the
    /// mask until the next plan, with their ancestor's original in the journal; a waiting gang member's idle policy, and
    /// everything that a program inherited which is not managed, is put right at once.
    ///
    /// # Errors
    /// The journal cannot be written; the threads keep what they inherited, and the next look tries again.
    pub fn tend_heirs(
        &mut self,
        kernel: &dyn Kernel,
        new: &[&Managed],
        strangers: &[(i32, i32)],
    ) -> Result<(), JournalError> {
        let Some((journal, _)) = &mut self.armed else { return Ok(()) };
        if new.is_empty() && strangers.is_empty() {
            return Ok(());
        }
        let mut estates: BTreeMap<i32, Vec<(Object, Held)>> = BTreeMap::new();
        for (ancestor, held) in journal.held() {
            if let Some(pid) = ancestor.inherited() {
                estates.entry(pid).or_default().push((ancestor.clone(), held.clone()));
            }
        }
        let estate = |pids: [i32; 2]| {
            pids.into_iter().flat_map(|pid| estates.get(&pid).into_iter().flatten()).collect::<Vec<_>>()
        };
        for task in new {
            for (of, held) in estate([task.pid, task.parent]) {
                let object = of.same_of(task.pid, task.thread);
                if journal.held().contains_key(&object) || !held.may_have_passed_to(task.thread) {
                    continue;
                }
                let inherited = |now: &State| held.ours.contains(now) && held.original != *now;
                let Some(now) = read_state(kernel, &object).ok().filter(inherited) else { continue };
                journal.before(&[Change { object: object.clone(), now: held.original.clone(), wanted: now }])?;
                if matches!(object, Object::Policy { .. }) {
                    // A thread that is gone meanwhile needs nothing.
                    let _ = write_state(kernel, &object, &held.original);
                }
            }
        }
        for &(pid, parent) in strangers {
            for tid in kernel.threads(pid).unwrap_or_default() {
                let Ok(stat) = kernel.stat(tid) else { continue };
                for (of, held) in estate([parent, pid]) {
                    heir(kernel, of.same_of(pid, stat.key), held);
                }
            }
        }
        Ok(())
    }

    /// Drops what the journal holds about objects that are as they were: groups of ours that were removed.
    pub fn forget(&mut self, gone: &[Object]) {
        if let Some((journal, _)) = &mut self.armed {
            // Where the file cannot be written anew the old one stands: a restore then finds them gone, which is no fault.
            let _ = journal.retain(|object| !gone.contains(object));
        }
    }

    /// Drops what the journal holds about threads that are gone. `seen` = just seen alive, and need not be asked again.
    ///
    /// # Errors
    /// The journal could not be written anew; nothing is lost.
    pub fn forget_gone(&mut self, kernel: &dyn Kernel, seen: &dyn Fn(ThreadKey) -> bool) -> Result<(), JournalError> {
        let Some((journal, _)) = &mut self.armed else { return Ok(()) };
        // Of whom nobody can tell whether he lives, the original is kept.
        let there = |thread| seen(thread) || kernel.alive(thread).unwrap_or(true);
        journal.retain(|object| object.thread().is_none_or(there))
    }

    /// Puts everything back and lets the guardian go. If something could not be put back the journal stays, and so do the
    /// account of it and the guardian: it tries again once this process is gone.
    ///
    /// # Errors
    /// The journal could not be removed.
    pub fn put_back(&mut self, kernel: &dyn Kernel) -> Result<Vec<Restored>, JournalError> {
        let Some((journal, guardian)) = self.armed.take() else { return Ok(Vec::new()) };
        let account = restore(kernel, journal.held());
        self.last.clear();
        if account.iter().any(|restored| matches!(restored.outcome, Outcome::Failed(_))) {
            self.armed = Some((journal, guardian));
            return Ok(account);
        }
        journal.remove()?;
        // A guardian that is gone already cannot be told, and has nothing left to do.
        let _ = guardian.dismiss();
        Ok(account)
    }
}

fn refused(kernel: &dyn Kernel, item: &Item, object: &Object, error: &io::Error) -> Refused {
    let because = match error.raw_os_error() {
        Some(libc::ESRCH) | Some(libc::ENOENT) => RefusedBecause::Gone,
        Some(libc::EPERM) | Some(libc::EACCES) | Some(libc::EROFS) => RefusedBecause::NoPermission,
        Some(libc::ENOSPC) => RefusedBecause::NoRoom,
        Some(libc::EBUSY) => RefusedBecause::Busy,
        _ => RefusedBecause::Failed,
    };
    Refused { item: item.clone(), because, said: format!("{object:?}: {}", in_words(kernel, object, error)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;
    use crate::rules::{Action, Rule};
    use crate::tasks::Tasks;
    use cachemate_core::{TaskId, Window};

    /// A guardian that only waits, so that the daemon's side can be tested alone.
    fn waiting_guardian() -> GuardianCommand {
        let args = ["-c", "echo ready; cat >/dev/null"].map(str::to_string).to_vec();
        GuardianCommand { program: "/bin/sh".into(), args }
    }

    fn host_with(tids: &[i32]) -> (FakeHost, Tasks) {
        let host = FakeHost::default();
        for &tid in tids {
            host.thread(tid, tid, 1, "0-3");
        }
        let mut tasks = Tasks::default();
        tasks.look(&host, &[Rule { action: Action::Manage(None), ..Rule::default() }], 0).unwrap();
        (host, tasks)
    }

    fn plan_to(cpus: &[(u32, &str)]) -> Plan {
        let mut plan = Plan::idle(Window::Time { ns: 1 });
        plan.allowed.extend(cpus.iter().map(|(task, list)| (TaskId(*task), list.parse::<CpuSet>().unwrap())));
        plan
    }

    fn step(actuator: &mut Actuator, host: &FakeHost, tasks: &Tasks, plan: &Plan) -> Made {
        let online = (0..4).collect();
        let wanted = changes(plan, &tasks.all(), &online, &actuator.originals());
        actuator.make(host, &wanted)
    }

    fn masks(host: &FakeHost) -> Vec<String> {
        host.threads.borrow().values().map(|thread| thread.cpus.to_string()).collect()
    }

    /// Is a plan the whole state: what the next one does not mention goes back to how it was, and again is no change?
    #[test]
    fn a_plan_is_the_whole_state() {
        let dir = tempfile::tempdir().unwrap();
        let (host, tasks) = host_with(&[5, 6]);
        let mut actuator = Actuator::new(dir.path(), waiting_guardian());
        assert_eq!(step(&mut actuator, &host, &tasks, &plan_to(&[])).calls, 0);
        assert!(!dir.path().join(Journal::FILE_NAME).exists(), "starting changes nothing, not even a file");
        assert_eq!(step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")])).calls, 2);
        assert_eq!(step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")])).calls, 0);
        assert_eq!(masks(&host), ["1", "2"]);
        step(&mut actuator, &host, &tasks, &plan_to(&[(1, "3")]));
        assert_eq!(masks(&host), ["0-3", "3"]);
        actuator.put_back(&host).unwrap();
        assert_eq!(masks(&host), ["0-3", "0-3"]);
        assert!(!dir.path().join(Journal::FILE_NAME).exists());
    }

    /// Whatever change fails, with whatever error: is it reported, the rest done, and everything restorable?
    #[test]
    fn a_failing_change_is_reported_and_the_rest_is_done() {
        for errno in [libc::EPERM, libc::ESRCH, libc::EBUSY, libc::ENOSPC, libc::EINVAL] {
            for nth in 0..2 {
                let dir = tempfile::tempdir().unwrap();
                let (host, tasks) = host_with(&[5, 6]);
                let mut actuator = Actuator::new(dir.path(), waiting_guardian());
                host.fault.set(Some((nth, errno)));
                let made = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")]));
                assert_eq!((made.refused.len(), made.held.len()), (1, 1), "{made:?}");
                actuator.put_back(&host).unwrap();
                assert_eq!(masks(&host), ["0-3", "0-3"]);
            }
        }
    }

    /// Without a guardian or a place for the journal: is nothing changed?
    #[test]
    fn no_guardian_or_no_journal_no_change() {
        let (host, tasks) = host_with(&[5]);
        let dir = tempfile::tempdir().unwrap();
        let missing = GuardianCommand { program: "/no/such/program".into(), args: Vec::new() };
        let mut actuator = Actuator::new(dir.path(), missing);
        let made = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
        assert_eq!((made.refused.len(), host.changes.get()), (1, 0));
        assert!(!dir.path().join(Journal::FILE_NAME).exists());
        let mut actuator = Actuator::new(Path::new("/no/such/folder"), waiting_guardian());
        let made = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
        assert_eq!((made.refused.len(), host.changes.get()), (1, 0));
    }

    /// When somebody else changes a mask of ours: is it noticed?
    #[test]
    fn others_changes_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (host, tasks) = host_with(&[5]);
        let mut actuator = Actuator::new(dir.path(), waiting_guardian());
        step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
        host.threads.borrow_mut().get_mut(&5).unwrap().cpus = "3".parse().unwrap();
        let made = step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
        assert_eq!(made.overridden, [Item::Allowed(TaskId(0))]);
        actuator.put_back(&host).unwrap();
    }

    /// Is a thread that was born under our mask given its parent's original when the plan no longer speaks of it?
    #[test]
    fn heirs_get_their_ancestors_original() {
        let dir = tempfile::tempdir().unwrap();
        let (host, mut tasks) = host_with(&[5]);
        let mut actuator = Actuator::new(dir.path(), waiting_guardian());
        step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
        host.thread(8, 8, 5, "1");
        tasks.look(&host, &[Rule { action: Action::Manage(None), ..Rule::default() }], 1).unwrap();
        actuator.tend_heirs(&host, &tasks.all(), &[]).unwrap();
        step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
        assert_eq!(masks(&host), ["1", "0-3"]);
        actuator.put_back(&host).unwrap();
        assert_eq!(masks(&host), ["0-3", "0-3"]);
    }

    /// Is a child that is not managed freed of what it inherited, and a waiting member's child of its idleness?
    #[test]
    fn children_do_not_keep_what_is_not_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let (host, mut tasks) = host_with(&[5]);
        let mut actuator = Actuator::new(dir.path(), waiting_guardian());
        step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1")]));
        let key = tasks.all()[0].thread;
        let idle =
            Wanted { item: Item::Gangs(0), object: Object::Policy { pid: 5, thread: key }, state: State::Policy(5) };
        actuator.promise(&host, &[idle]).unwrap();
        assert_eq!(host.threads.borrow()[&5].policy, 0, "a promise changes nothing");
        for tid in [8, 9] {
            host.thread(tid, tid, 5, "1");
            host.threads.borrow_mut().get_mut(&tid).unwrap().policy = 5;
        }
        tasks.look(&host, &[Rule { pid: Some(8), action: Action::Manage(None), ..Rule::default() }], 1).unwrap();
        let new: Vec<&Managed> = tasks.all().into_iter().filter(|task| task.pid == 8).collect();
        assert_eq!((new.len(), tasks.strangers()), (1, &[(9, 5)][..]));
        actuator.tend_heirs(&host, &new, tasks.strangers()).unwrap();
        let seen: Vec<(u32, String)> = [8, 9]
            .iter()
            .map(|tid| (host.threads.borrow()[tid].policy, host.threads.borrow()[tid].cpus.to_string()))
            .collect();
        assert_eq!(seen, [(0, "1".to_string()), (0, "0-3".to_string())]);
        actuator.put_back(&host).unwrap();
        assert_eq!(masks(&host), ["0-3", "0-3", "0-3"]);
    }

    /// Is a thread that is managed no longer put back alone, and nobody else?
    #[test]
    fn released_threads_are_put_back_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (host, mut tasks) = host_with(&[5, 6]);
        let mut actuator = Actuator::new(dir.path(), waiting_guardian());
        step(&mut actuator, &host, &tasks, &plan_to(&[(0, "1"), (1, "2")]));
        let only_six = [Rule { pid: Some(6), action: Action::Manage(None), ..Rule::default() }];
        let gone: Vec<ThreadKey> = tasks.reexamine(&host, &only_six).iter().map(|task| task.thread).collect();
        actuator.release(&host, &gone).unwrap();
        assert_eq!(masks(&host), ["0-3", "2"]);
        assert_eq!(tasks.all().len(), 1);
        actuator.put_back(&host).unwrap();
        assert_eq!(masks(&host), ["0-3", "0-3"]);
    }

    /// Does a weight of two mean about three nice steps, either way, from whatever the host had?
    #[test]
    fn weights_become_nice_steps() {
        assert_eq!([1.0, 2.0, 0.5, 1e9].map(|weight| nice_for(weight, 0)), [0, -3, 3, -20]);
        assert_eq!(nice_for(2.0, 5), 2);
    }
}
