//! Plans applied to fake hosts, in the same way as on the live machine.

use std::io;

use cachemate_core::test_support::topology_fixture;
use cachemate_core::{Capabilities, ChangeList, CpusetGroup, GangSchedule, Plan, derive_changes};

use super::snapshot::{AppliedHistory, HostSnapshot};
use super::{ApplyContext, Execution, GangController, KernelLender};
use crate::act::actuator::{Actuator, ApplyReport};
use crate::act::cpusets;
use crate::act::gangs::ThreadRotation;
use crate::act::resctrl::WayController;
use crate::kernel::Kernel;
use crate::sense::tasks::TaskTable;

/// A fake host has one user only, so it is lent as it is.
impl<K: Kernel> KernelLender for K {
    fn with_kernel<T>(&self, action: impl FnOnce(&dyn Kernel) -> T) -> T {
        action(self)
    }
}

/// Schedules that are recorded and never run.
#[derive(Default)]
pub(crate) struct RecordedGangs(pub Vec<GangSchedule>);

impl GangController for RecordedGangs {
    fn start(&mut self, schedule: &GangSchedule, _: ThreadRotation) -> io::Result<()> {
        self.0.push(schedule.clone());
        Ok(())
    }
    fn stop(&mut self, schedule: &GangSchedule) {
        self.0
            .retain(|running_schedule| running_schedule != schedule);
    }
}

/// Everything that applying a plan needs.
pub(crate) struct ApplyFixture<'a, L> {
    pub host: &'a L,
    pub actuator: &'a mut Actuator,
    pub ways: Option<&'a mut WayController>,
    pub tasks: &'a TaskTable,
    pub capabilities: &'a Capabilities,
    pub groups: &'a [CpusetGroup],
}

impl<L: KernelLender> ApplyFixture<'_, L> {
    pub fn apply(self, plan: &Plan) -> (ApplyReport, ChangeList) {
        let ApplyFixture {
            host,
            actuator,
            mut ways,
            tasks,
            capabilities,
            groups,
        } = self;
        let (mut plan, threads) = (plan.clone(), tasks.tasks());
        let (reading, _lock) = host.with_kernel(|kernel| {
            let groups = cpusets::read_groups(kernel, groups, &actuator.originals());
            let history = AppliedHistory {
                actuator,
                weights: &Default::default(),
                gangs: Vec::new(),
                has_gang_scheduler: false,
            };
            let mut reading = HostSnapshot::read(kernel, &plan, &threads, groups, &history);
            let lock = ways
                .as_mut()
                .and_then(|ways| ways.read(kernel, &mut plan, &threads, &mut reading, true));
            (reading, lock)
        });
        let derived = derive_changes(
            &plan,
            &reading.confined_groups,
            &reading.state,
            &topology_fixture(4),
            capabilities,
        );
        let (mut gangs, mut refused) = (RecordedGangs::default(), derived.refused_items.clone());
        let host = ApplyContext {
            kernel: host,
            actuator,
            ways: ways.as_deref_mut(),
            gangs: &mut gangs,
        };
        let mut report = Execution::run(host, &reading, &derived.changes);
        if let Some(ways) = ways {
            ways.assign_classes(&derived.classes);
        }
        refused.append(&mut report.refused_items);
        report.refused_items = refused;
        (report, derived)
    }
}

/// Capabilities of a host without any ability.
pub(crate) fn sample_capabilities() -> Capabilities {
    Capabilities {
        abilities: Default::default(),
        partitions: Vec::new(),
        bandwidth: Vec::new(),
        min_window_ns: 1,
        min_slice_ns: None,
    }
}
