//! A live machine that manages children of this test.

#![allow(dead_code, reason = "each test program uses its part")]

#[path = "../../src/skip_test.rs"]
pub mod not_shown;

use std::collections::BTreeMap;
use std::process::{Child, Command};

use std::time::Duration;

use cachemate_core::{
    Ability, Cache, CacheId, CacheLevel, Capabilities, Cpu, CpuId, CpuSet, Plan, Support, Topology,
    WindowLength,
};
use cachemate_linux::act::actuator::GuardianCommand;
use cachemate_linux::act::rules::{ManageAction, ManageRule};
use cachemate_linux::kernel::{Kernel, LinuxHost};
use cachemate_linux::machine::{LiveMachine, LiveOptions};

/// The heartbeats that the guardian received, in the state directory.
pub const HEARTBEATS: &str = "heartbeats";

/// A program that is killed when the test ends, whatever happens.
pub struct Program(pub Child);

impl Program {
    pub fn start() -> Self {
        Program(Command::new("sleep").arg("100").spawn().unwrap())
    }
    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn own_cpus() -> CpuSet {
    LinuxHost::new("/")
        .affinity(std::process::id() as i32)
        .unwrap()
}

pub fn machine(
    programs: &[Program],
    act: bool,
    state_dir: &std::path::Path,
) -> LiveMachine<LinuxHost> {
    machine_that_can(programs, act, state_dir, BTreeMap::new())
}

pub fn machine_that_can(
    programs: &[Program],
    act: bool,
    state_dir: &std::path::Path,
    abilities: BTreeMap<Ability, Support>,
) -> LiveMachine<LinuxHost> {
    let cpu = |id| Cpu {
        id: CpuId(id),
        core: id,
        package: 0,
        memory_node: 0,
        online: true,
        hertz: None,
    };
    let shared = Cache {
        id: CacheId(0),
        level: CacheLevel::L3,
        cpus: own_cpus(),
        last_level: true,
        size_bytes: Some(16 << 20),
        ways: None,
        line_bytes: Some(64),
    };
    let topology = Topology {
        cpus: own_cpus().iter().map(cpu).collect(),
        caches: vec![shared],
        ..Topology::default()
    };
    let rule = |program: &Program| ManageRule {
        pid: Some(program.pid()),
        action: ManageAction::Manage(None),
        ..ManageRule::default()
    };
    let beats = state_dir.join(HEARTBEATS).display().to_string();
    let options = LiveOptions {
        rules: programs.iter().map(rule).collect(),
        should_act: act,
        state_dir: state_dir.to_path_buf(),
        guardian: GuardianCommand {
            program: "/bin/sh".into(),
            args: ["-c", "echo ready; exec cat >>\"$0\"", &beats]
                .map(str::to_string)
                .to_vec(),
        },
        first_window: Duration::from_millis(1),
        probe_share: 0.5,
        ..LiveOptions::default()
    };
    let capabilities = Capabilities {
        abilities,
        partitions: Vec::new(),
        bandwidth: Vec::new(),
        min_window_ns: 1,
        min_slice_ns: None,
    };
    LiveMachine::new(
        LinuxHost::new("/"),
        topology,
        capabilities,
        Vec::new(),
        options,
    )
}

pub fn idle() -> Plan {
    Plan::idle(WindowLength::Time { ns: 1_000_000 })
}
