//! Life cycle of a machine that acts: the right to act, heartbeats to the guardian, and the restoration of the host.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use cachemate_core::{AppliedPlan, MachineError};

use super::{LiveMachine, lock};
use crate::act::changes::pid_of_color_file;
use crate::act::cpusets::CpusetGroup;
use crate::act::resctrl::WayController;
use crate::act::rules::ManageRule;
use crate::kernel::{Kernel, ThreadKey};
use crate::safety::actuation_lock::ActuationLock;
use crate::safety::journal::JournalError;
use crate::safety::restore::RestoredObject;
use crate::sense::tasks::ManagedThread;

fn journal_failure(error: JournalError) -> MachineError {
    MachineError(error.to_string())
}

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// Does the machine change the host? It does if the configuration requests it and root does not overrule it.
    pub fn is_acting(&self) -> bool {
        self.options.act
    }

    /// Does the machine have the right to act, whether or not the configuration requests it?
    pub fn may_act(&self) -> bool {
        self.options.acting.is_some()
    }

    /// Grants the machine the right to act, from the next change on.
    pub fn acquire(&mut self, acting: Arc<ActuationLock>) {
        self.actuator.acquire(acting.clone());
        self.options.acting = Some(acting);
    }

    /// Restores the host at the end. Files and counters are closed first, so that a lack of descriptors cannot
    /// prevent it.
    ///
    /// # Errors
    /// The journal could not be removed. The account names the objects that could not be restored.
    pub fn restore_all(&mut self) -> Result<Vec<RestoredObject>, MachineError> {
        self.counters.clear();
        self.undo()
    }

    /// Stops the gangs and restores everything.
    fn undo(&mut self) -> Result<Vec<RestoredObject>, MachineError> {
        self.gangs.stop_all();
        let kernel = self.kernel();
        let account = self.actuator.restore_all(&*lock(&kernel));
        if let Some(ways) = &mut self.ways {
            ways.forget();
        }
        account.map_err(journal_failure)
    }

    /// Applies new rules (SIGHUP): programs are matched again, and programs that are no longer managed are restored
    /// at once. If acting was switched off, all programs are restored. Returns the outcome for each object.
    ///
    /// # Errors
    /// The journal could not be written; it still holds the objects that could not be restored.
    pub fn set_rules(
        &mut self,
        rules: Vec<ManageRule>,
        cpusets: Vec<CpusetGroup>,
        act: bool,
    ) -> Result<Vec<RestoredObject>, MachineError> {
        self.options.rules = rules;
        self.options.cpusets = cpusets;
        self.options.act = act;
        self.overrides.clear();
        let mut account = if act { Vec::new() } else { self.undo()? };
        let kernel = self.kernel();
        let released = self.tasks.reexamine(&*lock(&kernel), &self.options.rules);
        account.extend(self.release(&released)?);
        Ok(account)
    }

    /// Restores threads that the rules no longer allow cachemate to move.
    pub(super) fn release(&mut self, released: &[ManagedThread]) -> Result<Vec<RestoredObject>, MachineError> {
        if released.is_empty() {
            return Ok(Vec::new());
        }
        let kernel = self.kernel();
        // The released threads may include gang members; the next plan restarts the gangs. The kernel's lock is not
        // held here, because the runner needs it in order to end.
        self.gangs.stop_all();
        let kernel = lock(&kernel);
        let threads: Vec<ThreadKey> = released.iter().map(|task| task.thread).collect();
        let is_running = |pid: &i32| self.tasks.all().iter().any(|task| task.pid == *pid && !task.has_exited);
        let pids: BTreeSet<i32> = released.iter().map(|task| task.pid).filter(|pid| !is_running(pid)).collect();
        let colors = |path: &Path| pid_of_color_file(path).is_some_and(|pid| pids.contains(&pid));
        self.actuator.release(&*kernel, &threads, &colors).map_err(journal_failure)
    }

    /// Does root act, so that this daemon may not? Always false for root's own daemon.
    pub(super) fn is_overruled(&self) -> bool {
        let kernel = self.kernel();
        self.options.act && self.options.acting.as_ref().is_some_and(|acting| acting.is_overruled(&*lock(&kernel)))
    }

    /// Removes and returns the objects that were restored when root began to act.
    pub fn restore_overruled(&mut self) -> Vec<RestoredObject> {
        std::mem::take(&mut self.overruled)
    }

    /// Sends a heartbeat to the guardian, once in each window and before anything else. If the guardian has restored
    /// the host or root has begun to act, no plan of this daemon remains in force.
    pub(super) fn keep_guarded(&mut self) -> Result<(), MachineError> {
        let kernel = self.kernel();
        if self.actuator.is_fenced() {
            self.gangs.stop_all();
            self.actuator.rejoin(&*lock(&kernel)).map_err(journal_failure)?;
            self.ways.iter_mut().for_each(WayController::forget);
            self.in_force = AppliedPlan::default();
        }
        if self.is_overruled() {
            self.options.act = false;
            self.overruled = self.undo()?;
        }
        self.actuator.heartbeat(&*lock(&kernel), self.window).map_err(journal_failure)
    }
}
