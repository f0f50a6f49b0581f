//! Life cycle of a machine that acts: the right to act, heartbeats to the guardian, and the restoration of the host.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use cachemate_core::{AppliedPlan, MachineError};

use super::LiveMachine;
use crate::act::changes::pid_of_color_file;
use crate::act::cpusets::CpusetGroup;
use crate::act::resctrl::WayController;
use crate::act::rules::{ManageRule, bind_to_processes};
use crate::kernel::{Kernel, ThreadKey, lock};
use crate::safety::actuation_lock::ActuationLock;
use crate::safety::journal::JournalError;
use crate::safety::restore::RestoredObject;
use crate::sense::tasks::ManagedThread;

fn machine_error(error: JournalError) -> MachineError {
    MachineError(error.to_string())
}

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// Does the machine have the right to act, whether or not the configuration requests it?
    pub fn may_act(&self) -> bool {
        self.options.actuation_lock.is_some()
    }

    /// Grants the machine the right to act, from the next change on.
    pub fn set_actuation_lock(&mut self, actuation_lock: Arc<ActuationLock>) {
        self.actuator.set_actuation_lock(actuation_lock.clone());
        self.options.actuation_lock = Some(actuation_lock);
    }

    /// Restores the host at the end. Files and counters are closed first, so that a lack of descriptors cannot
    /// prevent it.
    ///
    /// # Errors
    /// The journal could not be removed. An object that could not be restored is no error; its outcome says so.
    pub fn restore_all(&mut self) -> Result<Vec<RestoredObject>, MachineError> {
        self.counters.clear();
        self.stop_and_restore()
    }

    /// Stops the gangs and restores everything.
    fn stop_and_restore(&mut self) -> Result<Vec<RestoredObject>, MachineError> {
        self.gang_runners.stop_all();
        let kernel = self.kernel();
        let restore_result = self.actuator.restore_all(&*lock(&kernel));
        if let Some(ways) = &mut self.way_controller {
            ways.forget();
        }
        let restored = restore_result.map_err(machine_error)?;
        self.applied_plan = AppliedPlan {
            is_only_proposed: true,
            ..AppliedPlan::default()
        };
        Ok(restored)
    }

    /// Applies new rules (SIGHUP): programs are matched again, and programs that are no longer managed are restored
    /// at once. If acting was switched off, all programs are restored. Returns the outcome for each object.
    ///
    /// # Errors
    /// The journal could not be written. The previous rules stay in force with the tasks that they selected; the next
    /// plan sets again what was restored.
    pub fn set_rules(
        &mut self,
        mut rules: Vec<ManageRule>,
        cpusets: Vec<CpusetGroup>,
        should_act: bool,
    ) -> Result<Vec<RestoredObject>, MachineError> {
        bind_to_processes(&mut rules, &*lock(&self.kernel()));
        let mut restored_objects = if should_act {
            Vec::new()
        } else {
            self.stop_and_restore()?
        };
        let kernel = self.kernel();
        let previous_selection = self.tasks.selection();
        let released_threads = self.tasks.reexamine(&*lock(&kernel), &rules);
        match self.release(&released_threads) {
            Ok(released_objects) => restored_objects.extend(released_objects),
            Err(error) => {
                self.tasks.restore_selection(previous_selection);
                return Err(error);
            }
        }
        self.options.rules = rules;
        self.options.cpusets = cpusets;
        self.options.should_act = should_act;
        self.overrides.clear();
        Ok(restored_objects)
    }

    /// Restores threads that the rules no longer allow cachemate to move.
    pub(super) fn release(
        &mut self,
        released_threads: &[ManagedThread],
    ) -> Result<Vec<RestoredObject>, MachineError> {
        if released_threads.is_empty() {
            return Ok(Vec::new());
        }
        let kernel = self.kernel();
        // The released threads may include gang members; the next plan restarts the gangs. The kernel's lock is not
        // held here, because the runner needs it in order to end.
        self.gang_runners.stop_all();
        let kernel = lock(&kernel);
        let threads: BTreeSet<ThreadKey> =
            released_threads.iter().map(|task| task.thread).collect();
        let live_tasks = self
            .tasks
            .tasks()
            .into_iter()
            .filter(|task| !task.has_exited);
        let managed_pids: BTreeSet<i32> = live_tasks.map(|task| task.pid).collect();
        let pids: BTreeSet<i32> = released_threads
            .iter()
            .map(|task| task.pid)
            .filter(|pid| !managed_pids.contains(pid))
            .collect();
        let is_released_color_file =
            |path: &Path| pid_of_color_file(path).is_some_and(|pid| pids.contains(&pid));
        self.actuator
            .release(&*kernel, &threads, &is_released_color_file)
            .map_err(machine_error)
    }

    /// Does root act, so that this daemon may not? Always false for root's own daemon.
    pub(super) fn is_overruled(&self) -> bool {
        let kernel = self.kernel();
        self.options.should_act
            && self
                .options
                .actuation_lock
                .as_ref()
                .is_some_and(|acting| acting.is_overruled(&*lock(&kernel)))
    }

    /// Removes and returns the objects that were restored when root began to act.
    pub fn take_overruled(&mut self) -> Vec<RestoredObject> {
        std::mem::take(&mut self.overruled_objects)
    }

    /// Sends a heartbeat to the guardian, once in each window and before anything else. If the guardian has restored
    /// the host or root has begun to act, no plan of this daemon remains in force.
    pub(super) fn maintain_guardian(&mut self) -> Result<(), MachineError> {
        let kernel = self.kernel();
        if self.actuator.is_fenced() {
            self.gang_runners.stop_all();
            self.actuator
                .rejoin(&*lock(&kernel))
                .map_err(machine_error)?;
            self.way_controller
                .iter_mut()
                .for_each(WayController::forget);
            self.applied_plan = AppliedPlan::default();
        }
        if self.is_overruled() {
            self.options.should_act = false;
            self.overruled_objects = self.stop_and_restore()?;
        }
        self.actuator
            .heartbeat(&*lock(&kernel), self.window)
            .map_err(machine_error)
    }
}
