//! Shares in colors that are in force.
//!
//! Each change of colors is one write to a program's `wanted` file, with the original in the restore journal: the
//! guardian restores colors by writing the file. The agent moves the pages asynchronously; the share is pending until
//! they have their colors.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cachemate_core::{
    ActiveShare, CacheShare, IndexSet, PendingItem, PlanItem, ShareMember, Units,
};

use super::agents::{AgentReport, agent_dir, color_mask};
use crate::kernel::Kernel;
use crate::sense::tasks::ManagedThread;

/// Share of the pages that may still have other colors when recoloring counts as done, because the kernel pins some
/// pages for a while.
const MAX_PENDING_SHARE: f64 = 0.01;

/// Counts of the agents' fallback frames at the beginning of each share.
#[derive(Debug, Default)]
pub struct ColorShares {
    initial_fallbacks: BTreeMap<PathBuf, (u64, u64)>,
}

/// Colors of a share.
fn requested_colors(share: &CacheShare) -> Option<&IndexSet> {
    match &share.units {
        Units::Colors { allowed, .. } => Some(allowed),
        Units::Ways { .. } => None,
    }
}

fn find_member_agents(
    kernel: &dyn Kernel,
    share: &CacheShare,
    tasks: &[&ManagedThread],
) -> Vec<PathBuf> {
    let pid_of = |member: &ShareMember| match member {
        ShareMember::Process(process) => tasks
            .iter()
            .find(|task| task.process == *process)
            .map(|task| task.pid),
        ShareMember::Task(_) => None, // refused by the check of every plan
    };
    share
        .members
        .iter()
        .filter_map(pid_of)
        .filter_map(|pid| agent_dir(kernel, pid))
        .collect()
}

impl ColorShares {
    /// The plan's shares in colors that are in force, and those that are still in progress.
    pub fn read_back(
        &mut self,
        kernel: &dyn Kernel,
        shares: &[CacheShare],
        tasks: &[&ManagedThread],
    ) -> (Vec<ActiveShare>, Vec<PendingItem>) {
        let (mut active_shares, mut pending_items) = (Vec::new(), Vec::new());
        for share in shares {
            let Some(mask) = requested_colors(share).and_then(color_mask) else {
                continue;
            };
            let (
                mut allowed_pages,
                mut counted_pages,
                mut new_fallbacks,
                mut done_pages,
                mut total_pages,
            ) = (0, 0, 0, 0, 0);
            let (mut agent_count, mut is_mask_applied) = (0, true);
            for dir in find_member_agents(kernel, share, tasks) {
                let Ok(report) = AgentReport::read(kernel, &dir) else {
                    continue;
                };
                let counter = |name: &str| report.counter(name).unwrap_or(0);
                agent_count += 1;
                is_mask_applied &= counter("mask") == mask;
                allowed_pages += counter("allowed_pages");
                counted_pages +=
                    counter("allowed_pages") + counter("other_pages") + counter("unknown_pages");
                done_pages += counter("recolor_done");
                total_pages += counter("recolor_total").max(counter("recolor_done"));
                let agent_fallbacks = counter("fallback_frames") + counter("kernel_frames");
                let baseline = self
                    .initial_fallbacks
                    .entry(dir)
                    .or_insert((mask, agent_fallbacks));
                if baseline.0 != mask {
                    *baseline = (mask, agent_fallbacks); // a new share begins, so its fallbacks are counted from zero
                }
                new_fallbacks += agent_fallbacks - baseline.1.min(agent_fallbacks);
            }
            if agent_count == 0 {
                continue;
            }
            let allowed_share =
                (counted_pages > 0).then(|| allowed_pages as f64 / counted_pages as f64);
            if !is_mask_applied
                || allowed_share.is_some_and(|share| share < 1.0 - MAX_PENDING_SHARE)
            {
                let item = PlanItem::Share(share.group, share.cache);
                let total = (is_mask_applied && total_pages > 0).then_some(total_pages);
                pending_items.push(PendingItem {
                    item,
                    done: if is_mask_applied { done_pages } else { 0 },
                    total,
                });
            }
            let (share, fallback_pages) = (share.clone(), Some(new_fallbacks));
            active_shares.push(ActiveShare {
                share,
                pages_in_share: allowed_share,
                fallback_pages,
                occupancy_bytes: None,
            });
        }
        (active_shares, pending_items)
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference_set::BASE;
    use super::*;
    use crate::act::actuator::Actuator;
    use crate::act::changes::fixture::{self, ApplyFixture};
    use crate::act::rules::{ManageAction, ManageRule};
    use crate::fake_tests::{FakeHost, waiting_guardian};
    use crate::kernel::LinuxHost;
    use crate::sense::tasks::TaskTable;
    use cachemate_core::{
        CacheId, Capabilities, GroupId, PageMigration, PartitionSupport, Plan, ProcessId,
        WindowLength,
    };

    /// A host, in its own root directory, with one managed process, 5, that has an agent.
    fn host_with_agent(status: &str) -> (tempfile::TempDir, LinuxHost, TaskTable) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(format!("{}/s1-0/5", &BASE[1..]));
        std::fs::create_dir_all(&dir).unwrap();
        // The same mode as the command sets, whatever the umask of this process is.
        for dir in dir.ancestors().take(5) {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).unwrap();
        }
        std::fs::write(dir.join("wanted"), "00000000000000ffa\n").unwrap();
        std::fs::write(dir.join("status"), status).unwrap();
        let fake = FakeHost::default();
        fake.add_thread(5, 5, 1, "0-3");
        let mut tasks = TaskTable::default();
        tasks
            .refresh(
                &fake,
                &[ManageRule {
                    action: ManageAction::Manage(None),
                    ..ManageRule::default()
                }],
                0,
            )
            .unwrap();
        let host = LinuxHost::new(root.path());
        (root, host, tasks)
    }

    fn color_plan(colors: &str, moving: PageMigration) -> Plan {
        let mut plan = Plan::idle(WindowLength::Time { ns: 1 });
        let units = Units::Colors {
            allowed: colors.parse().unwrap(),
            migration: moving,
        };
        let members = vec![ShareMember::Process(ProcessId(0))];
        plan.shares.push(CacheShare {
            group: GroupId(0),
            members,
            cache: CacheId(0),
            units,
        });
        plan
    }

    fn status_text(mask: u64, inside: u64, outside: u64, done: u64) -> String {
        format!(
            "turn 3\nmask {mask}\nallowed_pages {inside}\nother_pages {outside}\nunknown_pages 0\nrecolor_done {done}\nrecolor_total {}\nfallback_frames 2\nkernel_frames 0\nturn 3\n",
            done + outside
        )
    }

    /// Does a share become one write to the agent's file, and does a plan without the share restore the original?
    #[test]
    fn a_share_is_one_write_and_its_absence_restores_the_original() {
        let (root, host, tasks) = host_with_agent(&status_text(0xff, 10, 0, 0));
        let boot_id = root.path().join("proc/sys/kernel/random/boot_id");
        std::fs::create_dir_all(boot_id.parent().unwrap()).unwrap();
        std::fs::write(boot_id, "boot\n").unwrap();
        let state = tempfile::tempdir().unwrap();
        let mut actuator = Actuator::new(state.path(), waiting_guardian());
        let colors = PartitionSupport::Colors {
            colors: 16,
            page_bytes: 4096,
            page_migration_ns: 1.0,
        };
        let capabilities = Capabilities {
            partitions: vec![(CacheId(0), colors)],
            ..fixture::sample_capabilities()
        };
        let mut carry_out = |plan: &Plan| {
            let (actuator, groups) = (&mut actuator, [].as_slice());
            let bench = ApplyFixture {
                host: &host,
                actuator,
                ways: None,
                tasks: &tasks,
                capabilities: &capabilities,
                groups,
            };
            let (applied, derived) = bench.apply(plan);
            let wanted =
                std::fs::read_to_string(root.path().join(format!("{}/s1-0/5/wanted", &BASE[1..])))
                    .unwrap();
            let lines: Vec<String> = derived.changes.iter().map(ToString::to_string).collect();
            (applied.write_calls, lines.join("\n"), wanted)
        };
        let moves = "and moves all its pages";
        let line = format!("give process 0 colors 8-15 {moves} (was colors 0-7 {moves})");
        let request = (1, line, "000000000000ff00a\n".to_string());
        assert_eq!(carry_out(&color_plan("8-15", PageMigration::All)), request);
        assert_eq!(
            carry_out(&color_plan("8-15", PageMigration::HotFirst)).0,
            0,
            "hot pages cannot be told: it is the same"
        );
        let (calls, _, wanted) = carry_out(&Plan::idle(WindowLength::Time { ns: 1 }));
        assert_eq!((calls, wanted.as_str()), (1, "00000000000000ffa\n"));
    }

    /// Is a share pending from its request until its pages have its colors, and are fallback frames counted since then?
    #[test]
    fn a_share_is_pending_until_its_pages_are_inside() {
        let (root, host, tasks) = host_with_agent(&status_text(0xff, 100, 0, 0));
        let (all, plan) = (tasks.tasks(), color_plan("8-15", PageMigration::All));
        let mut colors = ColorShares::default();
        let mut look = |text: String| {
            std::fs::write(
                root.path().join(format!("{}/s1-0/5/status", &BASE[1..])),
                text,
            )
            .unwrap();
            colors.read_back(&host, &plan.shares, &all)
        };
        let (_, pending) = look(status_text(0xff, 100, 0, 0));
        assert_eq!(
            (pending[0].done, pending[0].total),
            (0, None),
            "not taken up yet"
        );
        let (held, pending) = look(status_text(0xff00, 40, 60, 40));
        assert_eq!((pending[0].done, pending[0].total), (40, Some(100)));
        assert_eq!(
            (held[0].pages_in_share, held[0].fallback_pages),
            (Some(0.4), Some(0))
        );
        let (held, pending) = look(
            status_text(0xff00, 100, 0, 100).replace("fallback_frames 2", "fallback_frames 5"),
        );
        assert!(pending.is_empty());
        assert_eq!(
            (held[0].pages_in_share, held[0].fallback_pages),
            (Some(1.0), Some(3))
        );
    }
}
