//! Changes the scheduling policy of threads when they are adopted, and restores it. Every change is journaled first.

use gangs::journal::{Entry, POLICY_EXT, journal_line, parse, remaining_entries, stat_fields};
use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Policies of threads that may be adopted; real-time and deadline tasks would lose their guarantees.
const TAKEN_POLICIES: [i32; 3] = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE];

/// Maximum number of ancestors that are searched for a planned process.
const ANCESTORS: usize = 64;

/// The journal, together with its file.
pub struct PolicyJournal {
    path: PathBuf,
    entries: Vec<Entry>,
    adopted_count: usize,
}

impl PolicyJournal {
    /// Opens the journal, and first restores the threads of an earlier run. Returns their number.
    ///
    /// # Errors
    /// The journal cannot be read, or has a malformed line.
    pub fn open(path: &Path) -> Result<(Self, usize), String> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let entries = parse(&text).map_err(|error| format!("{}, {error}", path.display()))?;
        let mut tasks = PolicyJournal {
            path: path.to_owned(),
            entries,
            adopted_count: 0,
        };
        let restored = tasks.restore_all()?;
        Ok((tasks, restored))
    }

    /// Adopts the threads of a process. Returns the threads that could not be changed, with the reasons.
    pub fn adopt_process(&mut self, process: u32) -> Vec<String> {
        let threads = list_threads(process);
        if threads.is_empty() {
            return vec![format!("process {process}: it has exited")];
        }
        threads
            .into_iter()
            .filter_map(|thread| self.adopt_thread(thread).err())
            .collect()
    }

    /// Adopts the threads of all processes that descend from one that `adopts_children` selects. This is necessary
    /// because only new threads inherit the policy. A thread that cannot be adopted stays unchanged, and so do its
    /// children.
    pub fn adopt_children(&mut self, adopts_children: impl Fn(u32) -> bool) {
        let listing = Listing::read();
        let is_descendant = |process: u32| listing.ancestors(process).skip(1).any(&adopts_children);
        let descendants = listing
            .threads
            .iter()
            .filter(|(_, info)| info.policy != POLICY_EXT && is_descendant(info.process));
        for thread in descendants.map(|(thread, _)| *thread).collect::<Vec<_>>() {
            let _ = self.adopt_thread(thread);
        }
    }

    /// Number of threads adopted since the last call.
    pub fn take_adopted_count(&mut self) -> usize {
        std::mem::take(&mut self.adopted_count)
    }

    /// Adopts one thread.
    ///
    /// # Errors
    /// The thread has exited, it is a real-time task, or the kernel refuses the change.
    pub fn adopt_thread(&mut self, thread: u32) -> Result<(), String> {
        let Some((policy, start_ticks, _)) = read_stat(thread) else {
            return Err(format!("thread {thread}: it has exited"));
        };
        if policy == POLICY_EXT {
            return Ok(());
        }
        if !TAKEN_POLICIES.contains(&policy) {
            return Err(format!(
                "thread {thread}: found policy {policy}, expected one of the fair class"
            ));
        }
        self.write(&Entry {
            thread,
            start_ticks,
            policy,
        })
        .map_err(|error| format!("{}: {error}", self.path.display()))?;
        set_policy(thread, POLICY_EXT).map_err(|error| format!("thread {thread}: {error}"))?;
        self.adopted_count += 1;
        Ok(())
    }

    fn write(&mut self, entry: &Entry) -> io::Result<()> {
        let mut file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.path)?;
        file.write_all(journal_line(entry).as_bytes())?;
        file.sync_data()?;
        self.entries.push(*entry);
        Ok(())
    }

    /// Restores all threads, except those that `is_kept` selects by thread and process, and those whose process
    /// descends from one that `adopts_children` selects. Returns the number of restored threads.
    ///
    /// # Errors
    /// The journal cannot be written, or the kernel refused a thread, whose entry then stays. All other threads are
    /// restored.
    pub fn restore(
        &mut self,
        stays: impl Fn(u32, u32) -> bool,
        adopts_children: impl Fn(u32) -> bool,
    ) -> Result<usize, String> {
        let listing = Listing::read();
        let must_stay_adopted = |thread: u32, info: &ThreadInfo| {
            stays(thread, info.process) || listing.ancestors(info.process).any(&adopts_children)
        };
        let (mut restored_count, mut refused_entries, mut errors) = (0, Vec::new(), Vec::new());
        for (thread, seen) in &listing.threads {
            if seen.policy != POLICY_EXT || must_stay_adopted(*thread, seen) {
                continue;
            }
            // A thread that started while its process was adopted has inherited the policy, and so has a child
            // process.
            if let Some(policy) = self.original_policy(*thread, seen, &listing) {
                match set_policy(*thread, policy) {
                    Ok(()) => restored_count += 1,
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    Err(error) => {
                        refused_entries.push(Entry {
                            thread: *thread,
                            start_ticks: seen.start_ticks,
                            policy,
                        });
                        errors.push(format!("thread {thread}: {error}"));
                    }
                }
            }
        }
        let stays = |entry: &Entry| {
            listing
                .threads
                .get(&entry.thread)
                .is_some_and(|seen| must_stay_adopted(entry.thread, seen))
        };
        self.entries = remaining_entries(&self.entries, stays, &refused_entries);
        self.rewrite()
            .map_err(|error| format!("{}: {error}", self.path.display()))?;
        if errors.is_empty() {
            return Ok(restored_count);
        }
        Err(format!(
            "{}: the policy of these threads was not restored and stays here: {}",
            self.path.display(),
            errors.join("; ")
        ))
    }

    /// Restores all threads and returns their number.
    ///
    /// # Errors
    /// The errors of [`PolicyJournal::restore`].
    pub fn restore_all(&mut self) -> Result<usize, String> {
        self.restore(|_, _| false, |_| false)
    }

    /// Journaled policy of the thread, of its process, or of an ancestor; `None` if none of them was adopted.
    fn original_policy(&self, thread: u32, info: &ThreadInfo, listing: &Listing) -> Option<i32> {
        let find_entry = |id: u32, start: u64| {
            self.entries
                .iter()
                .find(|entry| entry.thread == id && entry.start_ticks == start)
        };
        if let Some(entry) = find_entry(thread, info.start_ticks) {
            return Some(entry.policy);
        }
        listing.ancestors(info.process).find_map(|process| {
            let leader = listing.threads.get(&process)?;
            let member_entry = self.entries.iter().find(|entry| {
                listing.threads.get(&entry.thread).is_some_and(|parent| {
                    parent.process == process && parent.start_ticks == entry.start_ticks
                })
            });
            find_entry(process, leader.start_ticks)
                .or(member_entry)
                .map(|entry| entry.policy)
        })
    }

    /// Rewrites the whole journal atomically; removes it if there is nothing to restore.
    fn rewrite(&self) -> io::Result<()> {
        if self.entries.is_empty() {
            return match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        }
        let text: String = self.entries.iter().map(journal_line).collect();
        let new_path = self.path.with_extension("new");
        let mut file = fs::File::create(&new_path)?;
        file.write_all(text.as_bytes())?;
        file.sync_data()?;
        fs::rename(&new_path, &self.path)
    }

    /// Number of threads that are adopted according to the journal and the kernel.
    pub fn held_count(&self) -> usize {
        let is_held = |entry: &&Entry| {
            read_stat(entry.thread).is_some_and(|(policy, start, _)| {
                policy == POLICY_EXT && start == entry.start_ticks
            })
        };
        self.entries.iter().filter(is_held).count()
    }
}

struct ThreadInfo {
    process: u32,
    parent: u32,
    policy: i32,
    start_ticks: u64,
}

struct Listing {
    threads: HashMap<u32, ThreadInfo>,
}

impl Listing {
    fn read() -> Self {
        let mut threads = HashMap::new();
        for process in list_numbers("/proc") {
            for thread in list_threads(process) {
                if let Some((policy, start_ticks, parent)) = read_stat(thread) {
                    threads.insert(
                        thread,
                        ThreadInfo {
                            process,
                            parent,
                            policy,
                            start_ticks,
                        },
                    );
                }
            }
        }
        Listing { threads }
    }

    /// A process and its ancestors, nearest first.
    fn ancestors(&self, process: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(Some(process), |process| {
            self.threads.get(process).map(|info| info.parent)
        })
        .take(ANCESTORS)
    }
}

fn list_numbers(dir: &str) -> Vec<u32> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

fn list_threads(process: u32) -> Vec<u32> {
    list_numbers(&format!("/proc/{process}/task"))
}

fn read_stat(thread: u32) -> Option<(i32, u64, u32)> {
    stat_fields(&fs::read_to_string(format!("/proc/{thread}/stat")).ok()?)
}

fn set_policy(thread: u32, policy: i32) -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: `parameter` outlives the call, which only reads it. The nice value stays unchanged.
    let status = unsafe { libc::sched_setscheduler(thread as libc::pid_t, policy, &parameter) };
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
