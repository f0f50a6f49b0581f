//! `kill -9` at random moments of a managed run: is every program as it was before?
//!
//! `CACHEMATE_KILLS` says how many moments (`make kill`: 200); the usual test run takes a few.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cachemate_core::CpuSet;
use cachemate_linux::kernel::{Host, Kernel};
use common::{MANAGE, acting, command, run};

/// Everything that the daemon may change of one thread.
#[derive(Clone, PartialEq, Debug)]
struct State {
    cpus: CpuSet,
    nice: i32,
    policy: u32,
    cpuset: String,
}

fn state(pid: i32) -> Option<State> {
    let host = Host::new("/");
    let stat = host.stat(pid).ok().filter(|stat| stat.state != 'Z')?;
    let cpuset = std::fs::read_to_string(format!("/proc/{pid}/cpuset")).unwrap_or_default();
    Some(State { cpus: host.affinity(pid).ok()?, nice: stat.nice, policy: stat.policy, cpuset })
}

/// A shell that starts children all the time, and programs with states of their own; all below one parent.
struct Programs {
    parent: Child,
}

impl Programs {
    fn start() -> Self {
        let script = "sleep 1000 & sleep 1000 & nice -n 5 sleep 1000 & nice -n 3 sleep 1000 & \
                      (while :; do sleep 0.02; done) & (while :; do sh -c 'sleep 0.01 & sleep 0.03'; done) & wait";
        let parent = Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap();
        let programs = Programs { parent };
        let start = Instant::now();
        while programs.lasting().len() < 4 && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let lasting = programs.lasting();
        assert!(lasting.len() >= 4, "the programs to be managed did not start");
        let host = Host::new("/");
        host.set_affinity(lasting[0], &host.affinity(lasting[0]).unwrap().first().into_iter().collect()).unwrap();
        host.set_policy(lasting[1], 3).unwrap();
        programs
    }

    /// All descendants, by pid, with the name.
    fn family(&self) -> BTreeMap<i32, String> {
        let host = Host::new("/");
        let stats: Vec<_> = host.processes().unwrap().into_iter().filter_map(|pid| host.stat(pid).ok()).collect();
        let mut family = BTreeMap::from([(self.parent.id() as i32, "sh".to_string())]);
        loop {
            let before = family.len();
            for stat in &stats {
                if family.contains_key(&stat.parent) {
                    family.insert(stat.key.tid, stat.name.clone());
                }
            }
            if family.len() == before {
                return family;
            }
        }
    }

    /// The four that stay.
    fn lasting(&self) -> Vec<i32> {
        let long = |pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == "sleep\x001000\x00")
        };
        self.family().into_keys().filter(long).collect()
    }

    fn states(&self) -> BTreeMap<i32, State> {
        let own = [self.parent.id() as i32];
        own.into_iter().chain(self.lasting()).filter_map(|pid| Some((pid, state(pid)?))).collect()
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let family = self.family();
        // The parent first, so that it starts nothing more.
        let _ = self.parent.kill();
        for pid in family.keys().copied().chain(self.family().into_keys()) {
            if pid != std::process::id() as i32 && pid != self.parent.id() as i32 {
                kill(pid, libc_kill::KILL);
            }
        }
        let _ = self.parent.wait();
    }
}

mod libc_kill {
    pub const CONT: &str = "-CONT";
    pub const KILL: &str = "-KILL";
    pub const STOP: &str = "-STOP";
    pub const TERM: &str = "-TERM";
}

fn kill(pid: i32, signal: &str) {
    let _ = Command::new("kill").args([signal, &pid.to_string()]).stderr(Stdio::null()).status();
}

struct Daemon {
    child: Child,
    state: PathBuf,
}

impl Daemon {
    fn start(folder: &Path, observe: bool) -> Self {
        let mut args = MANAGE.to_vec();
        if observe {
            args.push("--observe");
        }
        let child = command(folder, &args).stdout(Stdio::null()).spawn().unwrap();
        Daemon { child, state: folder.join("state") }
    }

    fn until(&mut self, what: &str, mut reached: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !reached(self) {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}: not within a minute");
            assert!(self.child.try_wait().unwrap().is_none(), "{what}: the daemon ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn guardian(&self) -> Option<i32> {
        let (host, own) = (Host::new("/"), self.child.id() as i32);
        let guards = |pid: &i32| {
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            host.stat(*pid).is_ok_and(|stat| stat.parent == own) && line.contains("guardian")
        };
        host.processes().unwrap().into_iter().find(guards)
    }

    /// Acting: the journal stands, and so does the guardian.
    fn acts(&mut self) {
        let journal = self.state.join("restore.journal");
        self.until("acting", |daemon| journal.exists() && daemon.guardian().is_some());
    }

    fn end(&mut self) {
        kill(self.child.id() as i32, libc_kill::TERM);
        let _ = self.child.wait();
    }
}

fn journal_gone(folder: &Path) -> bool {
    within(Duration::from_secs(20), || !folder.join("state/restore.journal").exists())
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Killed {
    Daemon,
    Guardian,
    Both,
}
#[derive(Clone, Copy, PartialEq, Debug)]
enum Then {
    /// Nothing but the guardian.
    Guardian,
    Reset,
    Restart,
}

const CASES: [(Killed, Then); 7] = [
    (Killed::Daemon, Then::Guardian),
    (Killed::Both, Then::Reset),
    (Killed::Guardian, Then::Reset),
    (Killed::Both, Then::Restart),
    (Killed::Daemon, Then::Reset),
    (Killed::Guardian, Then::Restart),
    (Killed::Daemon, Then::Restart),
];

fn one(folder: &Path, programs: &Programs, killed: Killed, then: Then, wait: Duration) {
    let mut daemon = Daemon::start(folder, false);
    daemon.acts();
    std::thread::sleep(wait);
    let (own, guardian) = (daemon.child.id() as i32, daemon.guardian());
    if killed != Killed::Daemon {
        guardian.into_iter().for_each(|pid| kill(pid, libc_kill::KILL));
    }
    if killed == Killed::Guardian {
        std::thread::sleep(Duration::from_millis(60));
        daemon.end();
    } else {
        kill(own, libc_kill::KILL);
        let _ = daemon.child.wait();
    }
    match then {
        Then::Guardian => assert!(journal_gone(folder), "the guardian did not finish"),
        Then::Reset => {
            run(folder, &["reset", "--state-dir", "state"]).ok();
        }
        Then::Restart => {
            let mut next = Daemon::start(folder, true);
            let socket = folder.join("s.sock");
            next.until("restarted", |_| std::os::unix::net::UnixStream::connect(&socket).is_ok());
            next.end();
        }
    }
    assert!(journal_gone(folder), "a journal is left");
    let _ = programs;
}

/// Whatever is killed, whenever, and whoever puts things back: are affinities, nice values, policies and cpusets as before?
#[test]
fn everything_is_as_before_whatever_is_killed() {
    let kills: usize = std::env::var("CACHEMATE_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(CASES.len());
    let folder = tempfile::tempdir().unwrap();
    let programs = Programs::start();
    let pid = programs.parent.id().to_string();
    std::fs::write(folder.path().join("c.toml"), acting("shake", 10, &pid)).unwrap();
    let before = programs.states();
    let mut generator = cachemate_core::SplitMix64::new(1);
    let start = Instant::now();
    for round in 0..kills {
        let (killed, then) = CASES[round % CASES.len()];
        let wait = Duration::from_micros(generator.next_u64() % 300_000);
        one(folder.path(), &programs, killed, then, wait);
        let after = programs.states();
        assert_eq!(after, before, "round {round}: {killed:?} killed after {wait:?}, then {then:?}");
        // Children that were born under our masks and turns too: they carry what their parent has.
        let want = &before[&(programs.parent.id() as i32)];
        for (pid, name) in programs.family() {
            if before.contains_key(&pid) {
                continue;
            }
            let Some(now) = state(pid) else { continue };
            assert_eq!(
                (&now.cpus, now.policy),
                (&want.cpus, want.policy),
                "round {round}: {name} ({pid}), {killed:?}, {then:?}"
            );
        }
    }
    println!("{kills} kills, all as before, in {:.0} s", start.elapsed().as_secs_f64());
}

/// A daemon that is stopped: is everything put back after a while; and once it goes on, does it change nothing before another
/// journal and another guardian stand?
#[test]
fn a_stopped_daemon_is_fenced_off() {
    let folder = tempfile::tempdir().unwrap();
    let programs = Programs::start();
    let pid = programs.parent.id().to_string();
    std::fs::write(folder.path().join("c.toml"), acting("shake", 10, &pid)).unwrap();
    let before = programs.states();
    let mut daemon = Daemon::start(folder.path(), false);
    daemon.acts();
    std::thread::sleep(Duration::from_millis(200));
    let (own, first) = (daemon.child.id() as i32, daemon.guardian());
    kill(own, libc_kill::STOP);
    assert!(within(Duration::from_secs(60), || !folder.path().join("state/restore.journal").exists()), "not put back");
    assert_eq!(programs.states(), before);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(programs.states(), before);
    kill(own, libc_kill::CONT);
    let journal = folder.path().join("state/restore.journal");
    let changed = within(Duration::from_secs(60), || {
        let changed = programs.states() != before;
        assert!(!changed || journal.exists(), "changed without a journal");
        changed
    });
    assert!(changed, "it does not act again");
    let second = daemon.guardian();
    assert!(second.is_some() && second != first, "{first:?}, then {second:?}");
    daemon.end();
    assert!(journal_gone(folder.path()));
    assert_eq!(programs.states(), before);
}

/// Two daemons of one user over the same programs, whatever their state folders: does only one act, and is all as before?
#[test]
fn two_daemons_do_not_act_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let programs = Programs::start();
    let pid = programs.parent.id().to_string();
    std::fs::write(folder.path().join("c.toml"), acting("shake", 10, &pid)).unwrap();
    let before = programs.states();
    let mut first = Daemon::start(folder.path(), false);
    first.acts();
    let second = run(
        folder.path(),
        &["--quiet", "manage", "--config", "c.toml", "--state-dir", "other", "--socket", "other.sock"],
    );
    assert_eq!(second.code, Some(1));
    assert!(second.err.contains("another cachemate acts"), "{}", second.err);
    first.end();
    assert!(journal_gone(folder.path()));
    assert_eq!(programs.states(), before);
}

fn within(patience: Duration, mut reached: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !reached() {
        if start.elapsed() > patience {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}
