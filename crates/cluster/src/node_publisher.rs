//! Publishes a node's cache state and the profiles of its services at the API server, from the daemon's status.
//!
//! One thread reads the status every few seconds and writes what is due ([`cachemate_fleet::publication`]). It shares
//! only the status with the daemon's loop, so a server that is gone, slow or hostile delays nothing but the next
//! object; failed attempts are repeated after 6 to 65 s. A status that no longer advances is not published: after a
//! minute, the extender then takes the node for silent. Objects of other publishers are never replaced, except for
//! profiles of other nodes that are less certain.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use cachemate_core::CpuSet;
use cachemate_daemon::status::DaemonStatus;
use cachemate_fleet::node_report::{
    CacheEvidence, ResidentEvidence, ThreadCounts, measured_profile,
};
use cachemate_fleet::profile::WorkloadProfile;
use cachemate_fleet::publication::is_write_due;
use cachemate_fleet::scorer::{NodeCacheState, NodePolicy};
use cachemate_page::{CacheSnapshot, TaskSnapshot};
use cachemate_spec::ManageMode;
use serde_json::{Value, json};

use crate::api_server::{ApiServer, RESOURCE_PATH};
use crate::extender_server::unix_seconds;
use crate::knowledge_objects::ProfileSpec;

/// Time between two reads of the status.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Weight of the newest state in the published one; with the interval, states of the last 20 s decide.
const NEWEST_WEIGHT: f64 = 0.25;
/// Deadline for each read of an answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// Time between two attempts after a failure: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Maximum number of profiles of one node; those of the busiest services come first.
const MAX_PROFILES: usize = 64;
/// Maximum size of an object that is read back.
const MAX_ANSWER_BYTES: u64 = 1 << 20;
/// Label of a profile with the name of the node that wrote it.
const PUBLISHER_LABEL: &str = "cachemate.io/publisher";
const MERGE_PATCH: &str = "application/merge-patch+json";

/// The publisher of one node.
pub struct NodePublisher {
    server: ApiServer,
    node: String,
    memory_bytes_per_second: Option<f64>,
    /// Time and content of the last write of the node's state.
    written_state: Option<(Instant, NodeCacheState)>,
    /// The same for each profile.
    written_profiles: BTreeMap<String, (Instant, ProfileSpec)>,
}

impl NodePublisher {
    /// A publisher that has written nothing yet.
    pub fn new(server: ApiServer, node: String, memory_bytes_per_second: Option<f64>) -> Self {
        let written_profiles = BTreeMap::new();
        NodePublisher {
            server,
            node,
            memory_bytes_per_second,
            written_state: None,
            written_profiles,
        }
    }

    /// Publishes in a thread that ends with the process.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        mut self,
        status: Arc<Mutex<DaemonStatus>>,
        log: impl Fn(&str) + Send + 'static,
    ) -> std::io::Result<()> {
        let publish = move || {
            let (mut smoothed_state, mut published_windows, mut failure) =
                (None::<NodeCacheState>, 0, String::new());
            let mut pause = FIRST_PAUSE;
            loop {
                std::thread::sleep(POLL_INTERVAL);
                let status = status
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone();
                if status.windows == published_windows {
                    continue;
                }
                published_windows = status.windows;
                let newest = node_state(&status, self.memory_bytes_per_second);
                smoothed_state = newest.map(|newest| match &smoothed_state {
                    Some(previous) => previous.smoothed(&newest, NEWEST_WEIGHT),
                    None => newest,
                });
                match self.publish(smoothed_state.as_ref(), &status) {
                    Ok(()) => {
                        if !failure.is_empty() {
                            log(&format!("{}: publishing again", self.node));
                        }
                        (failure, pause) = (String::new(), FIRST_PAUSE);
                    }
                    Err(error) => {
                        let reason = format!("{error:#}");
                        if reason != failure {
                            log(&format!(
                                "{}: not published: {reason}; trying again",
                                self.node
                            ));
                        }
                        failure = reason;
                        std::thread::sleep(pause);
                        pause = (2 * pause).min(MAX_PAUSE);
                    }
                }
            }
        };
        std::thread::Builder::new()
            .name("cachemate-publisher".into())
            .spawn(publish)
            .map(drop)
    }

    /// Writes every object that is due.
    fn publish(
        &mut self,
        state: Option<&NodeCacheState>,
        status: &DaemonStatus,
    ) -> anyhow::Result<()> {
        if let Some(state) = state {
            let last = self.written_state.as_ref();
            let elapsed_seconds = last.map(|(time, _)| time.elapsed().as_secs_f64());
            if is_write_due(
                elapsed_seconds,
                last.is_none_or(|(_, written)| state.has_changed_since(written)),
            ) {
                self.write_state(state)?;
                self.written_state = Some((Instant::now(), state.clone()));
            }
        }
        for (name, named) in service_profiles(status) {
            let last = self.written_profiles.get(&name);
            let has_changed = last.is_none_or(|(_, written)| {
                named.profile.has_changed_since(&written.profile) || named.images != written.images
            });
            // A profile does not age, so an unchanged one is not written again.
            if has_changed
                && is_write_due(last.map(|(time, _)| time.elapsed().as_secs_f64()), false)
            {
                self.write_profile(&name, &named)?;
                self.written_profiles.insert(name, (Instant::now(), named));
            }
        }
        Ok(())
    }

    /// Writes the node's state, and creates its object first if there is none.
    fn write_state(&self, state: &NodeCacheState) -> anyhow::Result<()> {
        let status = json!({ "status": { "observedUnixSeconds": unix_seconds(), "state": state } });
        let path = format!("{RESOURCE_PATH}/nodecachestates/{}/status", self.node);
        if self
            .send("PATCH", &path, Some((MERGE_PATCH, &status)), &[200, 404])?
            .0
            == 404
        {
            let object = self.object("NodeCacheState", &self.node, json!({}));
            // Another writer may have created it meanwhile.
            self.send(
                "POST",
                &format!("{RESOURCE_PATH}/nodecachestates"),
                Some(("application/json", &object)),
                &[201, 409],
            )?;
            self.send("PATCH", &path, Some((MERGE_PATCH, &status)), &[200])?;
        }
        Ok(())
    }

    /// Writes a profile, unless the object of that name is another publisher's and no less certain.
    fn write_profile(&self, name: &str, named: &ProfileSpec) -> anyhow::Result<()> {
        let path = format!("{RESOURCE_PATH}/workloadprofiles");
        let spec = json!(named);
        let labels = json!({ PUBLISHER_LABEL: self.node });
        let (status, present) = self.send("GET", &format!("{path}/{name}"), None, &[200, 404])?;
        if status == 404 {
            let mut object = self.object("WorkloadProfile", name, json!({ "labels": labels }));
            object["spec"] = spec;
            // If another node was first, its profile is compared the next time.
            self.send(
                "POST",
                &path,
                Some(("application/json", &object)),
                &[201, 409],
            )?;
            return Ok(());
        }
        let publisher = present["metadata"]["labels"][PUBLISHER_LABEL].as_str();
        let is_own = publisher == Some(self.node.as_str());
        let is_more_certain = || {
            let present: Option<WorkloadProfile> =
                serde_json::from_value(present["spec"]["profile"].clone()).ok();
            publisher.is_some()
                && present.is_none_or(|present| named.profile.is_more_certain_than(&present))
        };
        if is_own || is_more_certain() {
            let version = &present["metadata"]["resourceVersion"];
            // The server refuses the patch if the object has changed since it was read.
            let patch = json!({ "metadata": { "resourceVersion": version, "labels": labels }, "spec": spec });
            self.send(
                "PATCH",
                &format!("{path}/{name}"),
                Some((MERGE_PATCH, &patch)),
                &[200, 409],
            )?;
        }
        Ok(())
    }

    fn object(&self, kind: &str, name: &str, metadata: Value) -> Value {
        let mut object =
            json!({ "apiVersion": "cachemate.io/v1alpha1", "kind": kind, "metadata": metadata });
        object["metadata"]["name"] = name.into();
        object
    }

    /// Sends a request, and returns its status with the object of an answer to `GET`.
    fn send(
        &self,
        method: &str,
        path: &str,
        body: Option<(&str, &Value)>,
        expected: &[u16],
    ) -> anyhow::Result<(u16, Value)> {
        let text = body.map(|(content_type, value)| (content_type, value.to_string()));
        let body = text
            .as_ref()
            .map(|(content_type, text)| (*content_type, text.as_str()));
        let answer = self.server.send(method, path, body, ANSWER_DEADLINE)?;
        let status = answer.status;
        if !expected.contains(&status) {
            bail!("{method} {path}: found status {status}, expected {expected:?}");
        }
        if method != "GET" || status != 200 {
            return Ok((status, Value::Null));
        }
        let mut text = Vec::new();
        answer.take(MAX_ANSWER_BYTES).read_to_end(&mut text)?;
        let object: Value = serde_json::from_slice(&text)?;
        ensure!(
            object["metadata"]["resourceVersion"].is_string(),
            "{path}: expected an object with a version"
        );
        Ok((status, object))
    }
}

/// State of this node's caches; `None` before the clock rate and a cache's size and load are known.
fn node_state(
    status: &DaemonStatus,
    memory_bytes_per_second: Option<f64>,
) -> Option<NodeCacheState> {
    let traffic: Option<f64> = status
        .snapshot
        .caches
        .iter()
        .map(|cache| cache.memory_bytes_per_second)
        .sum();
    let bandwidth_left = memory_bytes_per_second
        .zip(traffic)
        .map(|(bandwidth, used)| (bandwidth - used).max(0.0));
    let cache_state = |cache: &CacheSnapshot| {
        let evidence = CacheEvidence {
            size_bytes: cache.size_bytes? as f64,
            cpus: f64::from(cache.cpus.parse::<CpuSet>().ok()?.count()),
            busy_cpus: cache.busy_cpus?,
            memory_bytes_per_second: cache.memory_bytes_per_second,
            occupancy_bytes: cache.occupancy_bytes.map(|bytes| bytes as f64),
            free_classes: cache.free_classes,
            residents: status
                .snapshot
                .tasks
                .iter()
                .filter(|task| task.cache == Some(cache.cache))
                .map(|task| resident(status, task))
                .collect(),
        };
        Some(evidence.state(bandwidth_left))
    };
    let places_by_forecast = status.mode == ManageMode::Act && status.policy == "auto";
    let state = NodeCacheState {
        hertz: status.hertz?,
        memory_bytes_per_second,
        policy: if places_by_forecast {
            NodePolicy::Auto
        } else {
            NodePolicy::Off
        },
        caches: status
            .snapshot
            .caches
            .iter()
            .map(cache_state)
            .collect::<Option<_>>()?,
    };
    state.check().is_ok().then_some(state)
}

fn resident(status: &DaemonStatus, task: &TaskSnapshot) -> ResidentEvidence {
    ResidentEvidence {
        busy_cpus: task.cpu_share.unwrap_or(0.0),
        fill_bytes_per_second: task.fill_bytes_per_second,
        profile: thread_profile(status, task, 1),
        sensitivity: task.sensitivity.map(|slowdown| slowdown.value.max(0.0)),
        max_slowdown_percent: task.max_slowdown.map(|slowdown| slowdown * 100.0),
    }
}

fn thread_profile(
    status: &DaemonStatus,
    task: &TaskSnapshot,
    threads: u32,
) -> Option<WorkloadProfile> {
    let counts = ThreadCounts {
        instr_per_cycle: task.instr_per_cycle?,
        misses_per_kilo_instr: task.mpki?,
        miss_penalty_cycles: status.miss_penalty_cycles?,
        curve: &task.curve,
    };
    measured_profile(&counts, threads)
}

/// Profiles of services whose image or profile's name is known, by the name of the object. The busiest thread with a
/// profile stands for a service.
fn service_profiles(status: &DaemonStatus) -> BTreeMap<String, ProfileSpec> {
    let mut services: Vec<_> = status.snapshot.services.iter().collect();
    services.sort_by(|a, b| b.cpu_share.total_cmp(&a.cpu_share));
    let mut profiles = BTreeMap::new();
    for service in services {
        let name = service
            .profile
            .clone()
            .or_else(|| service.images.first().map(|image| object_name(image)));
        let Some(name) = name.filter(|name| is_object_name(name) && profiles.len() < MAX_PROFILES)
        else {
            continue;
        };
        let threads: Vec<&TaskSnapshot> = status
            .snapshot
            .tasks
            .iter()
            .filter(|task| service.task_ids.contains(&task.task))
            .collect();
        let busy_share = |task: &TaskSnapshot| task.cpu_share.unwrap_or(0.0);
        let busiest = threads
            .iter()
            .map(|task| busy_share(task))
            .fold(0.0, f64::max);
        let busy_threads = threads
            .iter()
            .filter(|task| busy_share(task) >= 0.5 * busiest)
            .count() as u32;
        let measured = threads.iter().filter_map(|task| {
            Some((
                busy_share(task),
                thread_profile(status, task, busy_threads)?,
            ))
        });
        if let Some((_, profile)) = measured.max_by(|a, b| a.0.total_cmp(&b.0)) {
            profiles.entry(name).or_insert(ProfileSpec {
                images: service.images.clone(),
                profile,
            });
        }
    }
    profiles
}

/// Letters and digits of the image's reference, and dashes instead of the rest.
fn object_name(image: &str) -> String {
    let image = image.to_ascii_lowercase();
    let words = image
        .split(|letter: char| !letter.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-")
}

/// Whether the API server accepts a name: a DNS subdomain (RFC 1123).
pub fn is_object_name(name: &str) -> bool {
    let is_label = |label: &str| {
        let is_allowed =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !label.is_empty()
            && label.bytes().all(is_allowed)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::Estimate;
    use cachemate_fleet::extender::{ClusterKnowledge, Extender};
    use cachemate_page::{ServiceSnapshot, Snapshot};

    use crate::knowledge_objects::insert_object;

    const MIB: u64 = 1 << 20;

    fn counted_task(number: u32, misses_per_kilo_instr: f64, fills: f64) -> TaskSnapshot {
        let curve = [(1, 20.0), (16, 10.0), (32, 0.1)];
        TaskSnapshot {
            task: number,
            cache: Some(3),
            cpu_share: Some(1.0),
            mpki: Some(misses_per_kilo_instr),
            instr_per_cycle: Some(0.5),
            fill_bytes_per_second: Some(fills),
            curve: curve
                .map(|(mib, misses)| (mib * MIB, Estimate::exact(misses)))
                .to_vec(),
            ..TaskSnapshot::default()
        }
    }

    /// A host with one cache of 32 MiB for eight CPUs.
    fn host_status(tasks: Vec<TaskSnapshot>) -> DaemonStatus {
        let cache = CacheSnapshot {
            cache: 3,
            cpus: "0-7".into(),
            size_bytes: Some(32 * MIB),
            busy_cpus: Some(tasks.len() as f64),
            ..CacheSnapshot::default()
        };
        DaemonStatus {
            windows: 1,
            hertz: Some(2.5e9),
            miss_penalty_cycles: Some(90.0),
            snapshot: Snapshot {
                caches: vec![cache],
                tasks,
                ..Snapshot::default()
            },
            ..DaemonStatus::default()
        }
    }

    fn service(name: &str, fields: Value) -> ServiceSnapshot {
        let mut service = json!({ "kind": "pod", "name": name, "tasks": 1, "task_ids": [0], "cpu_share": 1.0,
            "run_time_percent": null, "run_time_range_percent": null, "cache_percent": null, "cache_range_percent": null,
            "cache_source": null, "cache_by": [], "waiting_percent": null, "waiting_range_percent": null, "waiting_by": [],
            "reason": null, "max_slowdown_percent": null });
        fields
            .as_object()
            .into_iter()
            .flatten()
            .for_each(|(key, value)| service[key] = value.clone());
        serde_json::from_value(service).unwrap()
    }

    /// Does the extender send a pod, known by its image, to an idle node rather than to one whose threads fill the
    /// cache, and does it rank neither by a state without evidence?
    #[test]
    fn the_extender_ranks_by_measured_states() {
        let mut busy = host_status(vec![counted_task(0, 20.0, 3e9), counted_task(1, 20.0, 3e9)]);
        busy.snapshot.services = vec![service(
            "shop/a/main",
            json!({ "images": ["docker.io/local/index:1"] }),
        )];
        let mut unmeasured = host_status(vec![
            TaskSnapshot {
                cache: Some(3),
                ..TaskSnapshot::default()
            };
            2
        ]);
        unmeasured.snapshot.caches[0].busy_cpus = Some(2.0);
        let mut knowledge = ClusterKnowledge::default();
        for (name, status) in [
            ("busy", &busy),
            ("idle", &host_status(Vec::new())),
            ("unmeasured", &unmeasured),
        ] {
            let state = node_state(status, Some(1e11)).unwrap();
            let object = json!({ "kind": "NodeCacheState", "metadata": { "name": name },
                "status": { "observedUnixSeconds": 1000.0, "state": state } });
            insert_object(object, &mut knowledge).unwrap();
        }
        for (name, named) in service_profiles(&busy) {
            assert_eq!(name, "docker-io-local-index-1");
            let object = json!({ "kind": "WorkloadProfile", "metadata": { "name": name },
                "spec": { "images": named.images, "profile": named.profile } });
            insert_object(object, &mut knowledge).unwrap();
        }
        let mut extender = Extender::default();
        extender.publish(knowledge);
        let request = json!({ "Pod": { "metadata": { "uid": "1" }, "spec": { "containers": [
            { "image": "local/index:1", "resources": { "requests": { "cpu": "1" } } }] } },
            "NodeNames": ["busy", "idle", "unmeasured"] });
        let request = serde_json::from_value(request).unwrap();
        let scores: Vec<u8> = extender
            .prioritize(&request, 1001.0)
            .unwrap()
            .iter()
            .map(|node| node.score)
            .collect();
        assert!(
            scores[0] < 5 && scores[1] == 10 && scores[2] == 5,
            "{scores:?}"
        );
    }

    /// Is nothing published before the clock and the load are known, and does a daemon that only observes leave the
    /// choice of the cache to the kernel?
    #[test]
    fn a_state_needs_the_clock_and_the_load() {
        let status = host_status(Vec::new());
        let state = node_state(&status, None).unwrap();
        assert_eq!(
            (state.policy, state.memory_bytes_per_second),
            (NodePolicy::Off, None)
        );
        let acting = DaemonStatus {
            mode: ManageMode::Act,
            policy: "auto".into(),
            ..status.clone()
        };
        assert_eq!(node_state(&acting, None).unwrap().policy, NodePolicy::Auto);
        assert_eq!(
            node_state(
                &DaemonStatus {
                    hertz: None,
                    ..status.clone()
                },
                None
            ),
            None
        );
        let mut starting = status;
        starting.snapshot.caches[0].busy_cpus = None;
        assert_eq!(node_state(&starting, None), None);
    }

    /// Is the pod's label preferred to the image, is a name that the API server would refuse left out, and a service
    /// that was not counted, too?
    #[test]
    fn profiles_are_named_by_label_or_image() {
        let names_of = |fields: Value, task: TaskSnapshot| -> Vec<String> {
            let mut status = host_status(vec![task]);
            status.snapshot.services = vec![service("a", fields)];
            service_profiles(&status).into_keys().collect()
        };
        let task = counted_task(0, 5.0, 1e8);
        assert_eq!(
            names_of(
                json!({ "profile": "index", "images": ["x/Y_z:1"] }),
                task.clone()
            ),
            ["index"]
        );
        assert_eq!(
            names_of(
                json!({ "images": ["host:5000/Y_z@sha256:1f"] }),
                task.clone()
            ),
            ["host-5000-y-z-sha256-1f"]
        );
        assert!(names_of(json!({ "profile": "../a" }), task.clone()).is_empty());
        assert!(names_of(json!({}), task.clone()).is_empty());
        assert!(
            names_of(
                json!({ "profile": "index" }),
                TaskSnapshot { mpki: None, ..task }
            )
            .is_empty()
        );
    }
}
