//! The CPUs to which a thread's owner confines the thread. Plans are clipped to these CPUs.
//!
//! Problem: a batch system, a virtual machine manager or a service manager gives threads masks, and an owner's cpuset
//! may change at any time. If a plan reaches beyond these CPUs, the kernel refuses it, or it overwrites the owner's
//! mask. Method: before a plan changes a thread's CPUs, they are clipped to its cpuset and, for services whose kind
//! has an owner, to the mask that the thread had before. If no CPU is left, the thread is not changed, and the
//! refusal names the owner. Cost: a few small reads per thread that is about to be changed.

use std::io;

use cachemate_core::{CpuSet, Plan, PlanItem, RefusalReason, RefusedItem};

use crate::act::actuator::Actuator;
use crate::act::cpusets::effective_cpus;
use crate::act::group_overrides::service_kind_owner;
use crate::kernel::refused_calls::KernelCall;
use crate::kernel::{Kernel, is_gone};
use crate::safety::journal::JournalObject;
use crate::sense::tasks::ManagedThread;

/// Clips the affinities of the plan to the CPUs that the owners of the threads allow. Returns a refusal for each
/// affinity that has no allowed CPU left.
pub(crate) fn clip_plan_to_boundaries(
    kernel: &dyn Kernel,
    plan: &mut Plan,
    tasks: &[&ManagedThread],
    actuator: &Actuator,
) -> Vec<RefusedItem> {
    let mut refused_items = Vec::new();
    for task in tasks
        .iter()
        .filter(|task| !task.has_exited && !task.is_fixed)
    {
        let Some(planned_cpus) = plan.affinity.get(&task.task) else {
            continue;
        };
        let bounded_cpus = match clip_to_boundaries(kernel, task, planned_cpus, actuator) {
            Ok(None) => continue,
            Ok(Some(cut)) => cut,
            // If the thread has exited, the change itself will report this.
            Err(error) if is_gone(&error) => continue,
            Err(error) => {
                refused_items.push(refusal(
                    task,
                    RefusalReason::Failed,
                    format!(
                        "its CPU boundary is unknown: {}",
                        KernelCall::ReadFile.describe("", &error)
                    ),
                ));
                continue;
            }
        };
        if bounded_cpus.cpus.is_empty() {
            let message = format!(
                "CPUs {planned_cpus} are outside those that {} allows: {}",
                bounded_cpus.owner, bounded_cpus.boundary
            );
            refused_items.push(refusal(task, RefusalReason::OwnedByOther, message));
            plan.affinity.remove(&task.task);
        } else {
            plan.affinity.insert(task.task, bounded_cpus.cpus);
        }
    }
    refused_items
}

fn refusal(task: &ManagedThread, reason: RefusalReason, message: String) -> RefusedItem {
    RefusedItem {
        item: PlanItem::Affinity(task.task),
        reason,
        message,
    }
}

/// The CPUs that remain of a plan within a thread's boundary, with the boundary and its owner.
struct BoundedCpus {
    cpus: CpuSet,
    boundary: CpuSet,
    owner: &'static str,
}

/// Clips a thread's CPUs; `None` if the plan is within the thread's boundaries, or changes nothing.
fn clip_to_boundaries(
    kernel: &dyn Kernel,
    task: &ManagedThread,
    planned_cpus: &CpuSet,
    actuator: &Actuator,
) -> io::Result<Option<BoundedCpus>> {
    if kernel.has_affinity(task.thread.tid, planned_cpus)? {
        return Ok(None);
    }
    let mut boundaries = Vec::new();
    if let Some(owner) = task
        .service
        .as_ref()
        .and_then(|service| service_kind_owner(service.kind))
    {
        let object = JournalObject::Affinity {
            pid: task.pid,
            thread: task.thread,
        };
        let mask = match actuator.journal_entry(&object) {
            // The mask follows the cpuset, so the cpuset is its only boundary.
            Some(entry) if entry.follows_cpuset => None,
            Some(entry) => entry.original.cpus().cloned(),
            None => Some(kernel.affinity(task.thread.tid)?),
        };
        boundaries.extend(mask.map(|mask| (mask, owner)));
    }
    boundaries.extend(effective_cpus(kernel, task.thread.tid)?.map(|cpus| (cpus, "its cpuset")));
    let mut bounded_cpus: Option<BoundedCpus> = None;
    for (boundary, owner) in boundaries {
        let cpus_before = bounded_cpus
            .as_ref()
            .map_or(planned_cpus, |bounded| &bounded.cpus);
        let cpus = cpus_before.intersection(&boundary);
        if cpus != *cpus_before {
            bounded_cpus = Some(BoundedCpus {
                cpus,
                boundary,
                owner,
            });
        }
    }
    Ok(bounded_cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::act::rules::{ManageAction, ManageRule};
    use crate::fake_tests::FakeHost;
    use crate::sense::tasks::TaskTable;
    use cachemate_core::{TaskId, WindowLength};

    /// The CPUs that are left of a plan for one thread, and the refusal.
    fn cut_plan(host: &FakeHost, cgroup: &str, wanted: &str) -> (Option<String>, Option<String>) {
        host.set_file("/proc/5/cgroup", &format!("0::{cgroup}\n"));
        let rules = [ManageRule {
            action: ManageAction::Manage(None),
            ..ManageRule::default()
        }];
        let mut tasks = TaskTable::default();
        tasks.refresh(host, &rules, 0).unwrap();
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        plan.affinity.insert(TaskId(0), wanted.parse().unwrap());
        let actuator = Actuator::default();
        let refused = clip_plan_to_boundaries(host, &mut plan, &tasks.tasks(), &actuator);
        let cpus = plan.affinity.get(&TaskId(0)).map(ToString::to_string);
        (cpus, refused.first().map(|refused| refused.message.clone()))
    }

    /// Does a plan stay inside the mask of a Slurm job and of a guest, is one that would leave it altogether refused by
    /// the owner's name, and is the mask of a program without an owner no boundary?
    #[test]
    fn a_plan_stays_inside_the_mask_of_the_owner() {
        let host = FakeHost::default();
        host.add_thread(5, 5, 1, "1-2");
        let job = "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0";
        let cut = |group: &str, wanted: &str| cut_plan(&host, group, wanted);
        assert_eq!(cut(job, "0-1"), (Some("1".into()), None));
        assert_eq!(cut(job, "1-2"), (Some("1-2".into()), None));
        let refusal = "CPUs 0,3 are outside those that Slurm allows: 1-2".to_string();
        assert_eq!(cut(job, "0,3"), (None, Some(refusal)));
        assert_eq!(cut("/user.slice", "0-1"), (Some("0-1".into()), None));
    }

    /// Is the cpuset that an owner narrows meanwhile a boundary of every thread in it?
    #[test]
    fn a_plan_stays_inside_the_cpuset() {
        let host = FakeHost::default();
        host.add_thread(5, 5, 1, "0-3");
        host.set_cpuset("2-3");
        let cut = |wanted: &str| cut_plan(&host, "/user.slice", wanted);
        assert_eq!(cut("0-2"), (Some("2".into()), None));
        let refusal = "CPUs 0 are outside those that its cpuset allows: 2-3".to_string();
        assert_eq!(cut("0"), (None, Some(refusal)));
    }
}
