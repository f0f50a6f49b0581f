//! Placement of containers before their first instruction.
//!
//! A container that starts again gets the placement of its predecessor. One that has never run gets a prior, if the
//! plan in force places programs and a rule will manage it: the last-level cache with the fewest running threads per
//! CPU. A cache with a promised program is its last choice, unless profiles of its image show that it hardly evicts
//! anything. The next plan replaces the prior.

use std::collections::BTreeMap;

use cachemate_core::{Cache, CpuSet, PlanItem, ServiceIdentity};

use super::LiveMachine;
use crate::act::actuator::ApplyReport;
use crate::act::desired_state::DesiredState;
use crate::act::rules::ManageAction;
use crate::kernel::{Kernel, ThreadKey, lock};
use crate::nri::StartRequest;
use crate::safety::journal::{JournalObject, ObjectState};
use crate::sense::process_properties::{KnownProperties, PropertyReader, read_own_service};

/// Maximum number of services whose placement is remembered.
const MAX_PLACEMENTS: usize = 1_000;
/// Maximum intensity of a program that may start beside a promised one: the limit of the class "not an aggressor".
const MAX_QUIET_INTENSITY: f64 = 0.15;

/// The key that a container shares with its successors: the namespace, the name within the pod, and the image.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ContainerSeries {
    namespace: String,
    name: String,
    image: Option<String>,
}

impl ContainerSeries {
    fn new(service: &ServiceIdentity, image: Option<&str>) -> Option<Self> {
        let namespace = service
            .pod
            .as_ref()
            .and_then(|pod| pod.split_once('/'))
            .map_or("", |(namespace, _)| namespace);
        let (namespace, name) = (namespace.to_string(), service.container.clone()?);
        Some(ContainerSeries {
            namespace,
            name,
            image: image.map(str::to_string),
        })
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
        for task in self
            .tasks
            .tasks()
            .into_iter()
            .filter(|task| !task.has_exited && !task.is_fixed)
        {
            let Some(service) = &task.service else {
                continue;
            };
            let Some(series) = ContainerSeries::new(service, task.image.as_deref()) else {
                continue;
            };
            let cpus = self.applied_plan.affinity.get(&task.task).cloned();
            let membership_object = self
                .way_controller
                .as_ref()
                .map(|ways| ways.membership_object(task.pid, task.thread));
            let group =
                membership_object.and_then(|object| report.read_back_states.get(&object).cloned());
            placements
                .entry(series)
                .and_modify(|placement| {
                    placement.cpus = placement
                        .cpus
                        .as_ref()
                        .zip(cpus.as_ref())
                        .map(|(all_cpus, own_cpus)| all_cpus.union(own_cpus));
                    placement.group = placement
                        .group
                        .take()
                        .filter(|joint_group| Some(joint_group) == group.as_ref());
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
        let is_placed = self.options.should_act && self.try_place(&start).is_some();
        start.answer(is_placed);
    }

    fn try_place(&mut self, start: &StartRequest) -> Option<()> {
        let record = self.options.directory.find_by_id(&start.id)?;
        let series = ContainerSeries::new(&record.identity(&start.id), record.image.as_deref())?;
        let kernel = self.kernel();
        let kernel = lock(&kernel);
        let placement = match self.placements.0.get(&series) {
            Some(placement) => placement.clone(),
            None => StartPlacement {
                cpus: self.prior_cpus(&*kernel, start.pid, series.image.as_deref()),
                group: None,
            },
        };
        if placement == StartPlacement::default() {
            return None;
        }
        let mut desired_states = Vec::new();
        for tid in kernel.threads(start.pid).ok()? {
            // The runtime's own threads end when the program begins.
            let Ok(thread) = kernel.stat(tid).map(|stat| stat.key) else {
                continue;
            };
            desired_states.extend(self.desired_states(&placement, start.pid, thread));
        }
        self.actuator
            .journal_originals(&*kernel, &desired_states)
            .ok()?;
        let set_state = |state: &DesiredState| {
            self.actuator
                .set(&*kernel, &PlanItem::Plan, &state.object, &state.state)
        };
        let is_program = |state: &&DesiredState| {
            state
                .object
                .thread()
                .is_some_and(|thread| thread.tid == start.pid)
        };
        desired_states
            .iter()
            .filter(|state| !is_program(state))
            .for_each(|state| _ = set_state(state));
        desired_states
            .iter()
            .filter(is_program)
            .try_for_each(|state| set_state(state).map(drop))
            .ok()
    }

    /// CPUs for a container that has never run; `None` if it is not to be managed, or the plan places no program.
    fn prior_cpus(&self, kernel: &K, pid: i32, image: Option<&str>) -> Option<CpuSet> {
        if self.applied_plan.affinity.is_empty() || !self.is_to_be_managed(kernel, pid) {
            return None;
        }
        let stored_profiles = self.options.learned_profiles.entries();
        let image_profiles = stored_profiles
            .filter(|stored| image.is_some() && stored.key.image.as_deref() == image);
        let intensity = image_profiles
            .filter_map(|stored| Some(stored.profile.contention.intensity?.value))
            .reduce(f64::max);
        let is_quiet = intensity.is_some_and(|intensity| intensity < MAX_QUIET_INTENSITY);
        let load = |cache: &Cache| {
            let tasks = self
                .tasks
                .tasks()
                .into_iter()
                .filter(|task| !task.has_exited);
            let cache_tasks =
                tasks.filter(|task| task.last_cpu.is_some_and(|cpu| cache.cpus.contains(cpu.0)));
            let (promised, running): (Vec<bool>, Vec<bool>) = cache_tasks
                .map(|task| {
                    (
                        task.goal.is_some_and(|goal| goal.is_promised()),
                        task.cpu.is_some(),
                    )
                })
                .unzip();
            let running_threads =
                running.into_iter().filter(|is_running| *is_running).count() as f64;
            (
                !is_quiet && promised.contains(&true),
                running_threads / f64::from(cache.cpus.count().max(1)),
            )
        };
        let caches: Vec<&Cache> = self
            .topology
            .last_level_caches()
            .filter(|cache| !cache.cpus.is_empty())
            .collect();
        let least_loaded = caches
            .iter()
            .map(|cache| (load(cache), *cache))
            .min_by(|(a, _), (b, _)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)))?;
        (caches.len() > 1).then(|| least_loaded.1.cpus.clone())
    }

    /// Whether rules will manage the container's program, whose name is not known yet.
    fn is_to_be_managed(&self, kernel: &K, pid: i32) -> bool {
        let own_service = read_own_service(kernel);
        let (rules, directory) = (self.options.rules.as_slice(), &self.options.directory);
        let reader = PropertyReader::new(kernel, rules, directory, own_service.as_ref());
        let properties = kernel.stat(pid).and_then(|stat| {
            reader.read(
                &stat,
                &reader.open_cgroup_file(&stat),
                &KnownProperties::default(),
            )
        });
        let action = properties.map(|properties| properties.of_unknown_program().decide(rules));
        matches!(action, Ok(ManageAction::Manage(_)))
    }

    fn desired_states(
        &self,
        placement: &StartPlacement,
        pid: i32,
        thread: ThreadKey,
    ) -> Vec<DesiredState> {
        let affinity_state = placement.cpus.clone().map(|cpus| {
            (
                JournalObject::Affinity { pid, thread },
                ObjectState::Cpus(cpus),
            )
        });
        let membership_object = self
            .way_controller
            .as_ref()
            .map(|ways| ways.membership_object(pid, thread));
        let states = affinity_state
            .into_iter()
            .chain(membership_object.zip(placement.group.clone()));
        states
            .map(|(object, state)| DesiredState::written(object, state))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::act::rules::ManageRule;
    use crate::fake_tests::FakeHost;
    use crate::faults_tests::sample_options;
    use crate::machine::LiveOptions;
    use crate::sense::service_directory::{ContainerRecord, ServiceDirectory};
    use cachemate_core::test_support::{capabilities_fixture, last_level_caches};
    use cachemate_core::{
        CacheLevel, Fact, FactSource, Goal, Machine, Plan, Profile, ProfileKey, ServiceProfiles,
        TaskId, WindowLength,
    };

    /// A container of a pod, with its name and image.
    type ContainerFixture = (&'static str, &'static str, &'static str);

    fn add_container(
        host: &FakeHost,
        directory: &ServiceDirectory,
        pid: i32,
        container: ContainerFixture,
    ) -> String {
        let (pod, name, image) = container;
        let id = format!("{pid:064x}");
        host.add_thread(pid, pid, 1, "0-3");
        host.set_file(
            &format!("/proc/{pid}/cgroup"),
            &format!("0::/docker/{id}\n"),
        );
        let record = ContainerRecord {
            name: name.into(),
            namespace: "shop".into(),
            pod: pod.into(),
            image: Some(image.into()),
            ..ContainerRecord::default()
        };
        directory.insert(&id, record);
        id
    }

    /// Starts a container beside `web`, which a plan has put on CPU 1, on a host with two caches of two CPUs. Returns
    /// the answer to the runtime, and the CPUs of the container then and after everything was restored.
    fn start_beside_web(
        options: LiveOptions,
        container: ContainerFixture,
    ) -> (bool, String, String) {
        let (host, directory) = (FakeHost::default(), options.directory.clone());
        add_container(&host, &directory, 5, ("cart-1", "web", "sha256:1"));
        let topology = last_level_caches(2, 2, CacheLevel::L3, 1 << 20);
        let starts = options.starts.clone();
        let mut machine = LiveMachine::new(
            host,
            topology,
            capabilities_fixture(&[]),
            Vec::new(),
            options,
        );
        machine.observe().unwrap();
        let mut plan = Plan::idle(WindowLength::Time { ns: 500_000_000 });
        plan.affinity.insert(TaskId(0), [1].into_iter().collect());
        machine.apply(&plan).unwrap();
        let id = machine.with_kernel(|host| add_container(host, &directory, 77, container));
        let is_placed = std::thread::scope(|scope| {
            let runtime =
                scope.spawn(|| starts.request_placement(&id, 77, Duration::from_secs(60)));
            machine.observe().unwrap();
            // On a crowded host the request may arrive after the window.
            while !runtime.is_finished() {
                machine.observe().unwrap();
            }
            runtime.join().unwrap()
        });
        let cpus = |machine: &LiveMachine<FakeHost>| machine.with_kernel(|host| host.mask_of(77));
        let cpus_at_start = cpus(&machine);
        machine.restore_all().unwrap();
        (is_placed, cpus_at_start, cpus(&machine))
    }

    /// If a container starts again in a new pod, is it on the CPUs of its predecessor before the runtime lets it run,
    /// with its original in the journal; and is an observer's container left as it is?
    #[test]
    fn a_restarted_container_is_placed_before_it_runs() {
        for act in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let options = LiveOptions {
                should_act: act,
                cpusets: Vec::new(),
                ..sample_options(dir.path())
            };
            let outcome = start_beside_web(options, ("cart-2", "web", "sha256:1"));
            assert_eq!(
                outcome,
                (
                    act,
                    if act { "1" } else { "0-3" }.to_string(),
                    "0-3".to_string()
                )
            );
        }
    }

    /// Does a container that has never run start on the cache without promised programs, unless profiles of its image
    /// show that it is quiet, and where it is put by the kernel if no rule manages it?
    #[test]
    fn a_first_start_avoids_promised_programs() {
        let rule = |service: &str, action| ManageRule {
            service: Some(service.into()),
            action,
            ..ManageRule::default()
        };
        let promised = Goal {
            max_slowdown: Some(0.05),
            ..Goal::default()
        };
        let rules = vec![
            rule("pod/shop/*/web", ManageAction::Manage(Some(promised))),
            rule("pod/shop/*/batch", ManageAction::Manage(None)),
        ];
        let mut learned_profiles = ServiceProfiles::default();
        for (image, intensity) in [("sha256:2", 0.4), ("sha256:3", 0.01)] {
            let key = ProfileKey::new(
                &ServiceIdentity::container("other"),
                "xz",
                Some(image),
                None,
            );
            let mut profile = Profile::default();
            profile.contention.intensity = Some(Fact::new(intensity, FactSource::PrimeProbe, 1));
            learned_profiles.learn(&key, &profile);
        }
        for (name, image, expected) in [
            ("batch", "sha256:2", (true, "2-3")),
            ("batch", "sha256:3", (true, "0-1")),
            ("batch", "sha256:4", (true, "2-3")),
            ("unmanaged", "sha256:2", (false, "0-3")),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let options = LiveOptions {
                rules: rules.clone(),
                learned_profiles: learned_profiles.clone(),
                cpusets: Vec::new(),
                ..sample_options(dir.path())
            };
            let (is_placed, cpus, restored_cpus) =
                start_beside_web(options, ("cart-2", name, image));
            assert_eq!(
                (is_placed, cpus.as_str(), restored_cpus.as_str()),
                (expected.0, expected.1, "0-3"),
                "{image}"
            );
        }
    }
}
