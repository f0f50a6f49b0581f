//! Plans carried out on made-up hosts, as the live machine does it.

use std::io;

use cachemate_core::{Capabilities, Confined, Cpu, CpuId, Derived, GangSchedule, Plan, Topology, changes};

use super::reading::{Before, Reading};
use super::{Execution, Gangs, Host, Lend};
use crate::act::actuator::{Actuator, ApplyReport};
use crate::act::cpusets;
use crate::act::gangs::Rotation;
use crate::act::resctrl::Ways;
use crate::kernel::Kernel;
use crate::sense::tasks::Tasks;

/// A made-up host is nobody else's: it is lent as it is.
impl Lend for crate::fake_tests::FakeHost {
    fn lend<T>(&self, with: impl FnOnce(&dyn Kernel) -> T) -> T {
        with(self)
    }
}
impl Lend for crate::act::resctrl::fake_tests::FakeCat {
    fn lend<T>(&self, with: impl FnOnce(&dyn Kernel) -> T) -> T {
        with(self)
    }
}
impl Lend for crate::kernel::Host {
    fn lend<T>(&self, with: impl FnOnce(&dyn Kernel) -> T) -> T {
        with(self)
    }
}

/// Schedules that nobody runs.
#[derive(Default)]
pub(crate) struct Told(pub Vec<GangSchedule>);

impl Gangs for Told {
    fn start(&mut self, schedule: &GangSchedule, _: Rotation) -> io::Result<()> {
        self.0.push(schedule.clone());
        Ok(())
    }
    fn stop(&mut self, schedule: &GangSchedule) {
        self.0.retain(|running| running != schedule);
    }
}

/// Four CPUs.
pub(crate) fn topology() -> Topology {
    let cpu = |id| Cpu { id: CpuId(id), core: id, package: 0, memory_node: 0, online: true, hertz: None };
    Topology { cpus: (0..4).map(cpu).collect(), ..Topology::default() }
}

/// What a plan is carried out with.
pub(crate) struct Bench<'a, L> {
    pub host: &'a L,
    pub actuator: &'a mut Actuator,
    pub ways: Option<&'a mut Ways>,
    pub tasks: &'a Tasks,
    pub capabilities: &'a Capabilities,
    pub groups: &'a [Confined],
}

impl<L: Lend> Bench<'_, L> {
    pub fn carry_out(self, plan: &Plan) -> (ApplyReport, Derived) {
        let Bench { host, actuator, mut ways, tasks, capabilities, groups } = self;
        let (mut plan, all) = (plan.clone(), tasks.all());
        let (reading, _lock) = host.lend(|kernel| {
            let groups = cpusets::look(kernel, groups, &actuator.originals());
            let before = Before { actuator, weights: &Default::default(), gangs: Vec::new(), by_scheduler: false };
            let mut reading = Reading::read(kernel, &plan, &all, groups, &before);
            let lock = ways.as_mut().and_then(|ways| ways.read(kernel, &mut plan, &all, &mut reading, true));
            (reading, lock)
        });
        let derived = changes(&plan, &reading.confined, &reading.state, &topology(), capabilities);
        let (mut gangs, mut refused) = (Told::default(), derived.refused.clone());
        let host = Host { kernel: host, actuator, ways: ways.as_deref_mut(), gangs: &mut gangs };
        let mut made = Execution::run(host, &reading, &derived.changes);
        if let Some(ways) = ways {
            ways.assign(&derived.classes);
        }
        refused.append(&mut made.refused);
        made.refused = refused;
        (made, derived)
    }
}

/// A host of which nothing is said.
pub(crate) fn capabilities() -> Capabilities {
    Capabilities {
        abilities: Default::default(),
        partitions: Vec::new(),
        shortest_window_ns: 1,
        shortest_slice_ns: None,
    }
}
