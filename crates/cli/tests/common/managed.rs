//! Programs with various settings, and a daemon that changes them.
#![allow(dead_code)] // each test file uses its part

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;
use cachemate_linux::kernel::scheduling::SchedParams;
use cachemate_linux::kernel::{Kernel, LinuxHost};

use super::common::{MANAGE, acting_config, command};

/// How long a test waits for what must come: far longer than on a busy host.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Everything that the daemon may change about one thread.
#[derive(Clone, PartialEq, Debug)]
pub struct ThreadState {
    pub cpus: CpuSet,
    pub nice: i32,
    /// The scheduling class with its parameters.
    pub scheduling: SchedParams,
    pub cpuset: String,
}

pub fn thread_state(pid: i32) -> Option<ThreadState> {
    let host = LinuxHost::new("/");
    let stat = host.stat(pid).ok().filter(|stat| stat.state != 'Z')?;
    let cpuset = std::fs::read_to_string(format!("/proc/{pid}/cpuset")).unwrap_or_default();
    Some(ThreadState {
        cpus: host.affinity(pid).ok()?,
        nice: stat.nice,
        scheduling: host.scheduling(pid).ok()?,
        cpuset,
    })
}

/// A shell that continually starts children, and programs with various settings; all below one parent.
pub struct TestPrograms {
    pub parent: Child,
}

impl TestPrograms {
    pub fn start() -> Self {
        let script = "sleep 1000 & sleep 1000 & nice -n 5 sleep 1000 & nice -n 3 sleep 1000 & \
                      chrt -f 1 sleep 1000 & chrt -r 2 sleep 1000 & \
                      chrt -d --sched-runtime 1000000 --sched-deadline 100000000 --sched-period 100000000 0 sleep 1000 & \
                      (while :; do sleep 0.02; done) & (while :; do sh -c 'sleep 0.01 & sleep 0.03'; done) & wait";
        let parent = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let programs = TestPrograms { parent };
        let start = Instant::now();
        // Seven if the classes above the fair one are available; the shell does not report those that are not.
        let is_enough =
            |count: usize| count == 7 || count >= 4 && start.elapsed() > Duration::from_secs(5);
        while !is_enough(programs.lasting().len()) && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let host = LinuxHost::new("/");
        let lasting = programs.lasting();
        assert!(
            lasting.len() >= 4,
            "the programs to be managed did not start"
        );
        let plain_pids: Vec<i32> = lasting
            .iter()
            .copied()
            .filter(|&pid| host.stat(pid).unwrap().policy == 0)
            .collect();
        host.set_affinity(
            plain_pids[0],
            &host
                .affinity(plain_pids[0])
                .unwrap()
                .first()
                .into_iter()
                .collect(),
        )
        .unwrap();
        host.set_policy(plain_pids[1], 3).unwrap();
        let classes: Vec<u32> = lasting
            .iter()
            .map(|&pid| host.stat(pid).unwrap().policy)
            .collect();
        for (policy, class) in [
            (1, "first in, first out"),
            (2, "round robin"),
            (6, "deadline"),
        ] {
            if !classes.contains(&policy) {
                println!(
                    "not shown here: programs of the class {class} (chrt is not there, or not allowed)"
                );
            }
        }
        programs
    }

    /// Starts the programs for a daemon that moves them all the time, with more configuration, and returns their
    /// states.
    pub fn start_configured(dir: &Path, more: &str) -> (Self, BTreeMap<i32, ThreadState>) {
        let programs = Self::start();
        let config = acting_config("shake", 10, &programs.parent.id().to_string()) + more;
        std::fs::write(dir.join("c.toml"), config).unwrap();
        let states = programs.states();
        (programs, states)
    }

    /// The names of all descendants, by pid.
    pub fn family(&self) -> BTreeMap<i32, String> {
        let host = LinuxHost::new("/");
        let stats: Vec<_> = host
            .processes()
            .unwrap()
            .into_iter()
            .filter_map(|pid| host.stat(pid).ok())
            .collect();
        let mut family = BTreeMap::from([(self.parent.id() as i32, "sh".to_string())]);
        loop {
            let previous_len = family.len();
            for stat in &stats {
                if family.contains_key(&stat.parent) {
                    family.insert(stat.key.tid, stat.name.clone());
                }
            }
            if family.len() == previous_len {
                return family;
            }
        }
    }

    /// The long-running programs: four, and one of each class that waits for no other task.
    pub fn lasting(&self) -> Vec<i32> {
        let is_lasting = |pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line == "sleep\x001000\x00")
        };
        self.family().into_keys().filter(is_lasting).collect()
    }

    pub fn states(&self) -> BTreeMap<i32, ThreadState> {
        let own_pid = [self.parent.id() as i32];
        own_pid
            .into_iter()
            .chain(self.lasting())
            .filter_map(|pid| Some((pid, thread_state(pid)?)))
            .collect()
    }
}

impl Drop for TestPrograms {
    fn drop(&mut self) {
        let family = self.family();
        // The parent is ended first, so that it starts no more processes.
        let _ = self.parent.kill();
        for pid in family.keys().copied().chain(self.family().into_keys()) {
            if pid != std::process::id() as i32 && pid != self.parent.id() as i32 {
                send_signal(pid, signals::KILL);
            }
        }
        let _ = self.parent.wait();
    }
}

pub mod signals {
    pub const CONT: &str = "-CONT";
    pub const KILL: &str = "-KILL";
    pub const STOP: &str = "-STOP";
    pub const TERM: &str = "-TERM";
}

pub fn send_signal(pid: i32, signal: &str) {
    let _ = Command::new("kill")
        .args([signal, &pid.to_string()])
        .stderr(Stdio::null())
        .status();
}

pub struct TestDaemon {
    pub child: Child,
    pub state: PathBuf,
}

impl TestDaemon {
    pub fn start(dir: &Path, observe: bool) -> Self {
        let mut args = MANAGE.to_vec();
        if observe {
            args.push("--observe-only");
        }
        let child = command(dir, &args).stdout(Stdio::null()).spawn().unwrap();
        TestDaemon {
            child,
            state: dir.join("state"),
        }
    }

    pub fn until(&mut self, subject: &str, mut is_reached: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !is_reached(self) {
            assert!(
                start.elapsed() < Duration::from_secs(180),
                "{subject}: not within a minute"
            );
            assert!(
                self.child.try_wait().unwrap().is_none(),
                "{subject}: the daemon ended"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn guardian(&self) -> Option<i32> {
        let (host, own_pid) = (LinuxHost::new("/"), self.child.id() as i32);
        let is_own_guardian = |pid: &i32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            host.stat(*pid).is_ok_and(|stat| stat.parent == own_pid) && line.contains("guardian")
        };
        host.processes().unwrap().into_iter().find(is_own_guardian)
    }

    /// Waits until the daemon acts, with a journal and a guardian.
    pub fn acts(&mut self) {
        let journal = self.state.join("restore.journal");
        self.until("acting", |daemon| {
            journal.exists() && daemon.guardian().is_some()
        });
    }

    pub fn end(&mut self) {
        send_signal(self.child.id() as i32, signals::TERM);
        let _ = self.child.wait();
    }
}

/// A failing test leaves neither a process nor a change behind.
impl Drop for TestDaemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            send_signal(self.child.id() as i32, signals::CONT);
            send_signal(self.child.id() as i32, signals::TERM);
            if !is_reached_within(PATIENCE, || !matches!(self.child.try_wait(), Ok(None))) {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
        }
    }
}

pub fn journal_gone(dir: &Path) -> bool {
    is_reached_within(PATIENCE, || !dir.join("state/restore.journal").exists())
}

pub fn is_reached_within(patience: Duration, mut is_reached: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !is_reached() {
        if start.elapsed() > patience {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}
