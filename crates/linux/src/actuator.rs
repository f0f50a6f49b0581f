//! From a plan to changes on the host: first one pure function, then the only place that makes them.
//!
//! [`changes`] compares the whole desired state with what is, and answers with a list; `--dry-run` prints exactly that.
//! [`Actuator::make`] writes the originals down (one synced batch), sees that the guardian stands, makes each change
//! and reads it back. A thread that is not in the plan gets its original back: absence in a plan is the default.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cachemate_core::{CpuSet, Item, Plan, Refused, RefusedBecause};

use crate::acting::Acting;
use crate::guardian::{Guard, Guardian};
use crate::journal::{Change, Held, Journal, JournalError, Object, State};
use crate::kernel::{Kernel, ThreadKey, is_gone};
use crate::restore::{
    Outcome, Restored, check_thread, heir, in_words, is_whole, read_state, restore, write_original, write_state,
};
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
    /// The right to act: the guardian keeps it until it has restored.
    acting: Option<Arc<Acting>>,
    /// Both stand from the first change on; starting changes nothing.
    armed: Option<(Journal, Guardian)>,
    /// As we last read it back.
    last: BTreeMap<Object, State>,
    /// See [`Actuator::is_unread`].
    unread: BTreeSet<ThreadKey>,
}

impl Actuator {
    pub fn new(state_dir: &Path, guardian_command: GuardianCommand) -> Self {
        let (state_dir, last) = (state_dir.to_path_buf(), BTreeMap::new());
        Actuator { state_dir, guardian_command, acting: None, armed: None, last, unread: BTreeSet::new() }
    }

    /// With this right to act, which a guardian keeps until it has restored.
    pub fn let_act(&mut self, acting: Arc<Acting>) {
        self.acting = Some(acting);
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
        let start = || {
            let hold = self.acting.as_ref().map(|acting| acting.as_fd());
            let guardian = Guardian::start(&self.guardian_command.program, &args, hold)?;
            kernel.set_fence(Some(guardian.fence().clone()));
            Ok(guardian)
        };
        match &mut self.armed {
            Some((_, guardian)) => match guardian.state() {
                Guard::Stands => {}
                Guard::Killed => *guardian = start().map_err(io)?,
                Guard::Ended => return Err(JournalError::Fenced),
            },
            None => {
                // Where the time is not to be had, everybody counts as born since.
                let since_ticks = kernel.ticks_since_boot().unwrap_or(0);
                let journal = Journal::create(&self.state_dir, &kernel.boot_id().map_err(io)?, since_ticks)?;
                match start() {
                    Ok(guardian) => self.armed = Some((journal, guardian)),
                    Err(source) => {
                        journal.remove()?;
                        return Err(io(source));
                    }
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
            match self.look_at(kernel, want) {
                Ok(change) => {
                    made.found.insert(want.object.clone(), change.now.clone());
                    if change.now == want.state {
                        made.held.insert(want.object.clone(), change.now);
                    } else {
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
            match self.make_one(kernel, &change) {
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

    /// Makes one change that is written down, and reads it back.
    fn make_one(&self, kernel: &dyn Kernel, change: &Change) -> io::Result<State> {
        // Since the original was read the thread's number may have become another's.
        check_thread(kernel, &change.object)?;
        let held = self.armed.as_ref().and_then(|(journal, _)| journal.held().get(&change.object));
        match held.filter(|held| held.original == change.wanted) {
            Some(held) => write_original(kernel, &change.object, held)?,
            None => write_state(kernel, &change.object, &change.wanted)?,
        }
        let now = read_state(kernel, &change.object)?;
        // One that follows its cpuset again is as it was, whatever that has become meanwhile.
        let follows = |held: &Held| held.follows && held.original == change.wanted;
        Ok(if held.is_some_and(follows) { change.wanted.clone() } else { now })
    }

    /// Writes the originals of what somebody else is going to change between known states (the gangs' runner, a probe),
    /// and sees that the guardian stands. Objects that are gone are left out.
    ///
    /// # Errors
    /// As for every change, or the original of an object that is there cannot be read: nothing may be changed then.
    pub fn promise(&mut self, kernel: &dyn Kernel, wanted: &[Wanted]) -> Result<(), JournalError> {
        let mut changes = Vec::new();
        for want in wanted {
            match self.look_at(kernel, want) {
                Ok(change) => changes.push(change),
                Err(error) if is_gone(&error) => {}
                Err(source) => return Err(JournalError::Original { object: format!("{:?}", want.object), source }),
            }
        }
        self.arm(kernel)?.before(&changes)
    }

    /// Sees that the guardian stands, where anything has been changed, and gives it a sign of life; others will come once in
    /// each window.
    ///
    /// # Errors
    /// It was gone and no other could be started.
    pub fn keep_guarded(&mut self, kernel: &dyn Kernel, window: Duration) -> Result<(), JournalError> {
        if self.armed.is_some() {
            self.arm(kernel)?;
        }
        self.beat(window);
        Ok(())
    }

    /// A sign of life to the guardian, where there is one.
    pub fn beat(&mut self, window: Duration) {
        if let Some((_, guardian)) = &mut self.armed {
            guardian.beat(window);
        }
    }

    /// Has the guardian put everything back, as this process was silent? Then nothing can be changed before
    /// [`Actuator::rejoin`].
    pub fn is_fenced(&mut self) -> bool {
        self.armed.as_mut().is_some_and(|(_, guardian)| guardian.state() == Guard::Ended)
    }

    /// After a silence: waits for the guardian's end, and puts back what this process was just about to change when it was
    /// stopped. Nothing is armed then.
    ///
    /// # Errors
    /// The guardian still restores, or something could not be put back: it stands in the journal.
    pub fn rejoin(&mut self, kernel: &dyn Kernel) -> Result<(), JournalError> {
        const PATIENCE: Duration = Duration::from_secs(10);
        let Some((mut journal, mut guardian)) = self.armed.take() else { return Ok(()) };
        if !guardian.ends_within(PATIENCE) {
            self.armed = Some((journal, guardian));
            return Err(JournalError::Fenced);
        }
        kernel.set_fence(None);
        self.last.clear();
        let account = restore(kernel, journal.held());
        let failed = |line: &Restored| matches!(line.outcome, Outcome::Failed(_));
        let left: Vec<&Object> = account.iter().filter(|line| failed(line)).map(|line| &line.object).collect();
        if left.is_empty() {
            return journal.remove();
        }
        // The guardian may have removed it.
        journal.renew(|object| left.contains(&object))?;
        Err(JournalError::Fenced)
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
        self.unread.retain(|thread| new.iter().all(|task| task.thread != *thread));
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
                let now = match read_state(kernel, &object) {
                    Ok(now) if inherited(&now) => now,
                    Err(error) if !is_gone(&error) => {
                        self.unread.insert(task.thread);
                        continue;
                    }
                    _ => continue,
                };
                let (original, follows) = (held.original.clone(), held.follows);
                let change = Change { object: object.clone(), now: original, wanted: now, follows };
                if journal.before(&[change]).is_err() {
                    // A full disk: what cannot be written down is not touched, and asked again with the next look.
                    self.unread.insert(task.thread);
                    continue;
                }
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

    /// New, and it could not be read what it inherited: to be tended by the next look, and not changed before.
    pub fn is_unread(&self, thread: ThreadKey) -> bool {
        self.unread.contains(&thread)
    }

    /// How the object of a wanted change is now.
    fn look_at(&self, kernel: &dyn Kernel, want: &Wanted) -> io::Result<Change> {
        if want.object.thread().is_some_and(|thread| self.is_unread(thread)) {
            return Err(io::Error::other("it cannot be read yet what it inherited"));
        }
        check_thread(kernel, &want.object)?;
        let now = read_state(kernel, &want.object)?;
        // Where the cpuset cannot be read the mask is put back by name.
        let follows = is_whole(kernel, &want.object, &now).unwrap_or(false);
        Ok(Change { object: want.object.clone(), now, wanted: want.state.clone(), follows })
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
        if self.is_fenced() {
            return self.rejoin(kernel).map(|()| Vec::new());
        }
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
        kernel.set_fence(None);
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
mod tests;
