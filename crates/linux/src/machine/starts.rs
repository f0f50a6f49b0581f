//! Placement of restarted containers: a container gets the placement of its predecessor before its first instruction.

use std::collections::BTreeMap;

use cachemate_core::{CpuSet, PlanItem, ServiceIdentity};

use super::{LiveMachine, lock};
use crate::act::actuator::ApplyReport;
use crate::act::desired_state::DesiredState;
use crate::kernel::{Kernel, ThreadKey};
use crate::nri::StartRequest;
use crate::safety::journal::{JournalObject, ObjectState};

/// Maximum number of services whose placement is remembered.
const MAX_PLACEMENTS: usize = 1_000;

/// The key that a container shares with its successors: the namespace, the name within the pod, and the image.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ContainerSeries {
    namespace: String,
    name: String,
    image: Option<String>,
}

impl ContainerSeries {
    fn new(service: &ServiceIdentity, image: Option<&str>) -> Option<Self> {
        let namespace = service.pod.as_ref().and_then(|pod| pod.split_once('/')).map_or("", |(namespace, _)| namespace);
        let (namespace, name) = (namespace.to_string(), service.container.clone()?);
        Some(ContainerSeries { namespace, name, image: image.map(str::to_string) })
    }
}

/// Placement of all threads of a container.
#[derive(Clone, PartialEq, Debug, Default)]
struct StartPlacement {
    /// CPUs of all its threads; `None` if the plan leaves at least one of them unplaced.
    cpus: Option<CpuSet>,
    /// The resctrl group that contains all of them; `None` if they are in several groups, or in none of cachemate's.
    group: Option<ObjectState>,
}

/// The placements of the containers that ran last.
#[derive(Debug, Default)]
pub(super) struct StartPlacements(BTreeMap<ContainerSeries, StartPlacement>);

impl<K: Kernel + Send + 'static> LiveMachine<K> {
    /// Records the current placement of the containers, for their next start.
    pub(super) fn record_placements(&mut self, report: &ApplyReport) {
        let mut placements: BTreeMap<ContainerSeries, StartPlacement> = BTreeMap::new();
        for task in self.tasks.all().into_iter().filter(|task| !task.has_exited && !task.is_fixed) {
            let Some(service) = &task.service else { continue };
            let Some(series) = ContainerSeries::new(service, task.image.as_deref()) else { continue };
            let cpus = self.in_force.affinity.get(&task.task).cloned();
            let membership = self.ways.as_ref().map(|ways| ways.membership(task.pid, task.thread));
            let group = membership.and_then(|object| report.in_force.get(&object).cloned());
            placements
                .entry(series)
                .and_modify(|placement| {
                    placement.cpus =
                        placement.cpus.as_ref().zip(cpus.as_ref()).map(|(all_cpus, own_cpus)| all_cpus.union(own_cpus));
                    placement.group = placement.group.take().filter(|joint_group| Some(joint_group) == group.as_ref());
                })
                .or_insert(StartPlacement { cpus, group });
        }
        if self.placements.0.len() + placements.len() > MAX_PLACEMENTS {
            self.placements.0.clear();
        }
        self.placements.0.extend(placements);
    }

    /// Places the process of a container that is about to start, if its service has a placement, and answers the
    /// runtime.
    pub(super) fn place_start(&mut self, start: StartRequest) {
        let is_placed = self.options.act && self.try_place(&start).is_some();
        start.answer(is_placed);
    }

    fn try_place(&mut self, start: &StartRequest) -> Option<()> {
        let record = self.options.directory.find_by_id(&start.id)?;
        let series = ContainerSeries::new(&record.identity(&start.id), record.image.as_deref())?;
        let placement = self.placements.0.get(&series).filter(|placement| **placement != StartPlacement::default())?;
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        let mut desired = Vec::new();
        for tid in kernel.threads(start.pid).ok()? {
            // The runtime's own threads end when the program begins.
            let Ok(thread) = kernel.stat(tid).map(|stat| stat.key) else { continue };
            desired.extend(self.desired_states(placement, start.pid, thread));
        }
        self.actuator.journal_originals(&*kernel, &desired).ok()?;
        let set = |state: &DesiredState| self.actuator.set(&*kernel, &PlanItem::Plan, &state.object, &state.state);
        let is_program = |state: &&DesiredState| state.object.thread().is_some_and(|thread| thread.tid == start.pid);
        desired.iter().filter(|state| !is_program(state)).for_each(|state| _ = set(state));
        desired.iter().filter(is_program).try_for_each(|state| set(state).map(drop)).ok()
    }

    fn desired_states(&self, placement: &StartPlacement, pid: i32, thread: ThreadKey) -> Vec<DesiredState> {
        let cpus =
            placement.cpus.clone().map(|cpus| (JournalObject::Affinity { pid, thread }, ObjectState::Cpus(cpus)));
        let membership = self.ways.as_ref().map(|ways| ways.membership(pid, thread));
        let states = cpus.into_iter().chain(membership.zip(placement.group.clone()));
        states.map(|(object, state)| DesiredState { item: PlanItem::Plan, object, state }).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fake_tests::FakeHost;
    use crate::faults_tests::sample_options;
    use crate::machine::LiveOptions;
    use crate::sense::service_directory::{ContainerRecord, ServiceDirectory};
    use cachemate_core::test_support::capabilities_fixture;
    use cachemate_core::{Cpu, CpuId, Machine, Plan, TaskId, Topology, WindowLength};

    fn start_container(host: &FakeHost, directory: &ServiceDirectory, pid: i32, pod: &str) -> String {
        let id = format!("{pid:064x}");
        host.add_thread(pid, pid, 1, "0-3");
        host.set_file(&format!("/proc/{pid}/cgroup"), &format!("0::/docker/{id}\n"));
        let record = ContainerRecord {
            name: "web".into(),
            namespace: "shop".into(),
            pod: pod.into(),
            image: Some("sha256:1".into()),
            ..ContainerRecord::default()
        };
        directory.insert(&id, record);
        id
    }

    /// If a container starts again in a new pod, is it on the CPUs of its predecessor before the runtime lets it run, with
    /// its original in the journal; and is an observer's container left as it is?
    #[test]
    fn a_container_that_starts_again_is_placed_first() {
        for act in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let (host, directory) = (FakeHost::default(), ServiceDirectory::default());
            start_container(&host, &directory, 5, "cart-1");
            let cpu = |id| Cpu { id: CpuId(id), core: id, package: 0, memory_node: 0, online: true, hertz: None };
            let topology = Topology { cpus: (0..4).map(cpu).collect(), ..Topology::default() };
            let options =
                LiveOptions { directory: directory.clone(), act, cpusets: Vec::new(), ..sample_options(dir.path()) };
            let starts = options.starts.clone();
            let mut machine = LiveMachine::new(host, topology, capabilities_fixture(&[]), Vec::new(), options);
            machine.observe().unwrap();
            let mut plan = Plan::idle(WindowLength::Time { ns: 500_000_000 });
            plan.affinity.insert(TaskId(0), [1].into_iter().collect());
            machine.apply(&plan).unwrap();
            let id = machine.with_kernel(|host| {
                host.threads.borrow_mut().remove(&5);
                start_container(host, &directory, 77, "cart-2")
            });
            let is_placed = std::thread::scope(|scope| {
                let runtime = scope.spawn(|| starts.request(&id, 77, Duration::from_secs(60)));
                machine.observe().unwrap();
                // On a crowded host the request may arrive after the window.
                while !runtime.is_finished() {
                    machine.observe().unwrap();
                }
                runtime.join().unwrap()
            });
            let cpus = |machine: &LiveMachine<FakeHost>| {
                machine.with_kernel(|host| host.threads.borrow()[&77].cpus.to_string())
            };
            assert_eq!((is_placed, cpus(&machine).as_str()), (act, if act { "1" } else { "0-3" }));
            machine.restore_all().unwrap();
            assert_eq!(cpus(&machine), "0-3");
        }
    }
}
