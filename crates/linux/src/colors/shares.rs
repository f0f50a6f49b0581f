//! A plan's shares in colours, brought to the agents of the programs.
//!
//! Every change is one write to a program's `wanted` file, through the actuator and so through the restore journal: whoever
//! dies, the guardian puts the colours back by writing the file. The agent moves the pages in its own time; until they are
//! where they belong the share is pending.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cachemate_core::{
    CacheShare, IndexSet, Item, Member, PageMoving, Pending, Plan, Refused, RefusedBecause, ShareHeld, Units,
};

use super::agents::{Agent, folder_of, mask_of, wanted};
use super::kit::BASE;
use crate::actuator::Wanted;
use crate::journal::{Object, State};
use crate::kernel::Kernel;
use crate::tasks::Managed;

/// Of the pages, that may be elsewhere when re-colouring counts as done: some belong to the kernel for a while.
const DONE_BUT: f64 = 0.01;

/// What agents had fallen back on when their share began.
#[derive(Debug, Default)]
pub struct Colours {
    fallen_before: BTreeMap<PathBuf, (u64, u64)>,
}

/// Colours of a share, and whether pages that are there move too.
fn asked(share: &CacheShare) -> Option<(&IndexSet, PageMoving)> {
    match &share.units {
        Units::Colours { allowed, moving } => Some((allowed, *moving)),
        Units::Ways { .. } => None,
    }
}

fn members(kernel: &dyn Kernel, share: &CacheShare, tasks: &[&Managed]) -> Vec<(i32, Option<PathBuf>)> {
    let pid_of = |member: &Member| match member {
        Member::Process(process) => tasks.iter().find(|task| task.process == *process).map(|task| task.pid),
        Member::Task(_) => None, // refused by the check of every plan
    };
    share.members.iter().filter_map(pid_of).map(|pid| (pid, folder_of(kernel, pid))).collect()
}

/// The changes that bring agents to the plan; who is in no share gets back what he had. And what cannot be done.
pub fn changes(
    kernel: &dyn Kernel,
    plan: &Plan,
    tasks: &[&Managed],
    originals: &BTreeMap<Object, State>,
) -> (Vec<Wanted>, Vec<Refused>) {
    let (mut changes, mut refused): (Vec<Wanted>, Vec<Refused>) = (Vec::new(), Vec::new());
    for share in &plan.shares {
        let Some((allowed, moving)) = asked(share) else { continue };
        let item = Item::Share(share.group, share.cache);
        let mut refuse = |said: String| {
            refused.push(Refused { item: item.clone(), because: RefusedBecause::NotSupported, said });
        };
        let Some(mask) = mask_of(allowed) else {
            refuse(format!("colours {allowed}: none, or more than a mask holds"));
            continue;
        };
        if moving == PageMoving::Lazy {
            refuse("pages cannot be moved when they are touched next; all of them can be".to_string());
            continue;
        }
        for (pid, folder) in members(kernel, share, tasks) {
            let Some(folder) = folder else {
                refuse(format!("process {pid} was not started by cachemate color run"));
                continue;
            };
            let object = Object::File { path: folder.join("wanted") };
            let state = State::Text(wanted(mask, moving != PageMoving::Never));
            match changes.iter().find(|change| change.object == object) {
                None => changes.push(Wanted { item: item.clone(), object, state }),
                Some(other) if other.state == state => {} // the same colours in another cache of the level
                Some(_) => refuse(format!("process {pid} is in two shares of different colours")),
            }
        }
    }
    for (object, state) in originals {
        let Object::File { path } = object else { continue };
        let ours = path.starts_with(BASE) && !changes.iter().any(|change| change.object == *object);
        if ours && kernel.read(path).is_ok() {
            changes.push(Wanted { item: Item::Plan, object: object.clone(), state: state.clone() });
        }
    }
    (changes, refused)
}

impl Colours {
    /// What holds of the plan's shares in colours, and what is still under way.
    pub fn read_back(
        &mut self,
        kernel: &dyn Kernel,
        shares: &[CacheShare],
        tasks: &[&Managed],
    ) -> (Vec<ShareHeld>, Vec<Pending>) {
        let (mut held, mut pending) = (Vec::new(), Vec::new());
        for share in shares {
            let Some(mask) = asked(share).and_then(|(allowed, _)| mask_of(allowed)) else { continue };
            let (mut inside, mut all, mut fallen, mut done, mut total) = (0, 0, 0, 0, 0);
            let (mut agents, mut taken_up) = (0, true);
            for folder in members(kernel, share, tasks).into_iter().filter_map(|(_, folder)| folder) {
                let Ok(agent) = Agent::read(kernel, &folder) else { continue };
                let figure = |name: &str| agent.figure(name).unwrap_or(0);
                agents += 1;
                taken_up &= figure("mask") == mask;
                inside += figure("inside_pages");
                all += figure("inside_pages") + figure("outside_pages") + figure("unknown_pages");
                done += figure("recolor_done");
                total += figure("recolor_total").max(figure("recolor_done"));
                let fallback = figure("fallback_frames") + figure("kernel_frames");
                let before = self.fallen_before.entry(folder).or_insert((mask, fallback));
                if before.0 != mask {
                    *before = (mask, fallback); // another share: counted anew
                }
                fallen += fallback - before.1.min(fallback);
            }
            if agents == 0 {
                continue;
            }
            let pages_inside = (all > 0).then(|| inside as f64 / all as f64);
            if !taken_up || pages_inside.is_some_and(|share| share < 1.0 - DONE_BUT) {
                let item = Item::Share(share.group, share.cache);
                let total = (taken_up && total > 0).then_some(total);
                pending.push(Pending { item, done: if taken_up { done } else { 0 }, total });
            }
            let (share, fallback_pages) = (share.clone(), Some(fallen));
            held.push(ShareHeld { share, pages_inside, fallback_pages, occupancy_bytes: None });
        }
        (held, pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;
    use crate::kernel::Host;
    use crate::rules::{Action, Rule};
    use crate::tasks::Tasks;
    use cachemate_core::{CacheId, GroupId, ProcessId, Window};

    /// One managed process, 5, with an agent below a root of its own.
    fn setting(status: &str) -> (tempfile::TempDir, Host, Tasks) {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(format!("{}/s1-0/5", &BASE[1..]));
        std::fs::create_dir_all(&folder).unwrap();
        // As the command makes it, whatever the umask here.
        for folder in folder.ancestors().take(5) {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700)).unwrap();
        }
        std::fs::write(folder.join("wanted"), "00000000000000ffa\n").unwrap();
        std::fs::write(folder.join("status"), status).unwrap();
        let fake = FakeHost::default();
        fake.thread(5, 5, 1, "0-3");
        let mut tasks = Tasks::default();
        tasks.look(&fake, &[Rule { action: Action::Manage(None), ..Rule::default() }], 0).unwrap();
        let host = Host::new(root.path());
        (root, host, tasks)
    }

    fn plan(colours: &str, moving: PageMoving) -> Plan {
        let mut plan = Plan::idle(Window::Time { ns: 1 });
        let units = Units::Colours { allowed: colours.parse().unwrap(), moving };
        let members = vec![Member::Process(ProcessId(0))];
        plan.shares.push(CacheShare { group: GroupId(0), members, cache: CacheId(0), units });
        plan
    }

    fn status(mask: u64, inside: u64, outside: u64, done: u64) -> String {
        format!(
            "turn 3\nmask {mask}\ninside_pages {inside}\noutside_pages {outside}\nunknown_pages 0\nrecolor_done {done}\nrecolor_total {}\nfallback_frames 2\nkernel_frames 0\nturn 3\n",
            done + outside
        )
    }

    /// Does a share become one write to the agent's file, and a plan without it the original?
    #[test]
    fn a_share_is_one_write_and_its_absence_the_original() {
        let (_root, host, tasks) = setting(&status(0xff, 10, 0, 0));
        let all = tasks.all();
        let (changes_, refused) = changes(&host, &plan("8-15", PageMoving::All), &all, &BTreeMap::new());
        assert!(refused.is_empty(), "{refused:?}");
        let object = Object::File { path: format!("{BASE}/s1-0/5/wanted").into() };
        assert_eq!(changes_[0].object, object);
        assert_eq!(changes_[0].state, State::Text("000000000000ff00a".to_string()));
        let originals = BTreeMap::from([(object, State::Text("00000000000000ffa".to_string()))]);
        let idle = Plan::idle(Window::Time { ns: 1 });
        let (back, _) = changes(&host, &idle, &all, &originals);
        assert_eq!(back[0].state, State::Text("00000000000000ffa".to_string()));
    }

    /// Are a program without an agent, and moving that cannot be had, refused in words?
    #[test]
    fn what_cannot_be_done_is_refused() {
        let (root, host, tasks) = setting(&status(0xff, 10, 0, 0));
        let said = |moving| changes(&host, &plan("8-15", moving), &tasks.all(), &BTreeMap::new()).1;
        assert_eq!(said(PageMoving::Lazy).len(), 1);
        std::fs::remove_dir_all(root.path().join("dev")).unwrap();
        assert!(said(PageMoving::All)[0].said.contains("not started by cachemate color run"));
    }

    /// Is a share pending from the moment it is asked for until its pages are inside, and what fell back counted since then?
    #[test]
    fn a_share_is_pending_until_its_pages_are_inside() {
        let (root, host, tasks) = setting(&status(0xff, 100, 0, 0));
        let (all, plan) = (tasks.all(), plan("8-15", PageMoving::All));
        let mut colours = Colours::default();
        let mut look = |text: String| {
            std::fs::write(root.path().join(format!("{}/s1-0/5/status", &BASE[1..])), text).unwrap();
            colours.read_back(&host, &plan.shares, &all)
        };
        let (_, pending) = look(status(0xff, 100, 0, 0));
        assert_eq!((pending[0].done, pending[0].total), (0, None), "not taken up yet");
        let (held, pending) = look(status(0xff00, 40, 60, 40));
        assert_eq!((pending[0].done, pending[0].total), (40, Some(100)));
        assert_eq!((held[0].pages_inside, held[0].fallback_pages), (Some(0.4), Some(0)));
        let (held, pending) = look(status(0xff00, 100, 0, 100).replace("fallback_frames 2", "fallback_frames 5"));
        assert!(pending.is_empty());
        assert_eq!((held[0].pages_inside, held[0].fallback_pages), (Some(1.0), Some(3)));
    }
}
