//! Facts about containers that their runtime reports: the pod's names and labels, the image, the control group.
//!
//! Filled by the plugin of the container runtime ([`crate::nri`]), read by the task table: a control group alone names
//! a container by its id only.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cachemate_core::ServiceIdentity;

use crate::kernel::lock;

/// Maximum number of recorded containers, so that a faulty runtime cannot cause unbounded memory use.
const MAX_CONTAINERS: usize = 20_000;

/// A container as its runtime describes it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ContainerRecord {
    /// Name within its pod.
    pub name: String,
    /// The pod's namespace; empty if the container is in no pod.
    pub namespace: String,
    /// The pod's name; empty if the container is in no pod.
    pub pod: String,
    /// Labels of the pod, and those of its annotations that cachemate reads.
    pub labels: BTreeMap<String, String>,
    /// The image's digest.
    pub image: Option<String>,
    /// The image's name with its tag.
    pub image_name: Option<String>,
    /// Path of its control group as the runtime names it: a path, or `slice:prefix:name`.
    pub cgroup: String,
    /// Is this the sandbox or another helper of the runtime?
    pub is_helper: bool,
}

/// The strictest limit that a pod's owner can ask for; a stricter one counts as this one, because a promise that cannot
/// be kept makes the policy act against all others for ever.
const LEAST_MAX_SLOWDOWN: f64 = 0.01;

impl ContainerRecord {
    /// Does this path of a control group lie in the container's? Without a group in the report, any path does.
    pub fn contains_group(&self, path: &str) -> bool {
        // `slice:prefix:name`, as systemd's cgroup driver writes it.
        if let [_, prefix, name] = self.cgroup.split(':').collect::<Vec<_>>()[..] {
            let scope = format!("{prefix}-{name}.scope");
            return path.split('/').any(|component| component == scope);
        }
        self.cgroup.is_empty() || is_at_or_below(path, &self.cgroup)
    }

    /// The slowdown that the pod's owner asks for, as a fraction, from `cachemate.io/max-slowdown` in percent; `None`
    /// for an invalid value.
    pub fn max_slowdown(&self) -> Option<f64> {
        let percent: f64 = self
            .labels
            .get("cachemate.io/max-slowdown")?
            .trim_end_matches('%')
            .trim()
            .parse()
            .ok()?;
        (percent > 0.0 && percent.is_finite()).then_some((percent / 100.0).max(LEAST_MAX_SLOWDOWN))
    }

    /// The service, with its display names.
    pub fn identity(&self, id: &str) -> ServiceIdentity {
        let name = if self.name.is_empty() { id } else { &self.name };
        match self.pod.is_empty() {
            true => ServiceIdentity::container(name),
            false => {
                ServiceIdentity::from_pod(&format!("{}/{}", self.namespace, self.pod), Some(name))
            }
        }
    }
}

/// The containers of this host, by their ids; clones share one directory.
#[derive(Clone, Debug, Default)]
pub struct ServiceDirectory {
    containers: Arc<Mutex<BTreeMap<String, Arc<ContainerRecord>>>>,
    /// Number of changes so far.
    change_count: Arc<AtomicU64>,
}

impl ServiceDirectory {
    /// The container with this id.
    pub fn find_by_id(&self, id: &str) -> Option<Arc<ContainerRecord>> {
        lock(&self.containers).get(id).cloned()
    }

    /// The innermost container whose control group is this path or contains it, with its id.
    pub fn find_by_cgroup(&self, path: &str) -> Option<(String, Arc<ContainerRecord>)> {
        let contains = |record: &ContainerRecord| is_at_or_below(path, &record.cgroup);
        let records = lock(&self.containers);
        let containing_records = records
            .iter()
            .filter(|(_, record)| contains(record.as_ref()));
        let innermost =
            containing_records.max_by_key(|(_, record)| record.cgroup.trim_end_matches('/').len());
        innermost.map(|(id, record)| (id.clone(), record.clone()))
    }

    /// The container that has this service's display names.
    pub fn find_by_identity(&self, service: &ServiceIdentity) -> Option<Arc<ContainerRecord>> {
        let records = lock(&self.containers);
        records
            .iter()
            .find(|(id, record)| !record.is_helper && record.identity(id) == *service)
            .map(|(_, record)| record.clone())
    }

    /// The id of the container that has exactly this control group.
    pub fn find_id_by_cgroup(&self, path: &str) -> Option<String> {
        let (id, record) = self.find_by_cgroup(path)?;
        (record.cgroup.trim_end_matches('/') == path.trim_end_matches('/')).then_some(id)
    }

    /// Number of changes of the directory so far.
    pub fn change_count(&self) -> u64 {
        self.change_count.load(Ordering::Acquire)
    }

    fn count_change(&self) {
        self.change_count.fetch_add(1, Ordering::Release);
    }

    /// Whether no runtime has reported a container.
    pub fn is_empty(&self) -> bool {
        lock(&self.containers).is_empty()
    }

    /// Records a container; beyond the limit nothing is recorded.
    pub fn insert(&self, id: &str, record: ContainerRecord) {
        let mut records = lock(&self.containers);
        if records.len() < MAX_CONTAINERS || records.contains_key(id) {
            records.insert(id.to_string(), Arc::new(record));
        }
        drop(records);
        self.count_change();
    }

    /// Forgets a container that was removed.
    pub fn remove(&self, id: &str) {
        lock(&self.containers).remove(id);
        self.count_change();
    }

    /// Replaces all containers: the runtime reports all of them after each registration.
    pub fn replace(&self, records: BTreeMap<String, ContainerRecord>) {
        let retained_records = records.into_iter().take(MAX_CONTAINERS);
        let retained_records = retained_records
            .map(|(id, record)| (id, Arc::new(record)))
            .collect();
        *lock(&self.containers) = retained_records;
        self.count_change();
    }
}

fn is_at_or_below(path: &str, group: &str) -> bool {
    let group = group.trim_end_matches('/');
    let subpath = path
        .strip_prefix(group)
        .filter(|_| group.starts_with('/') && group.len() > 1);
    subpath.is_some_and(|subpath| subpath.is_empty() || subpath.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a container found by its id and by any path below its control group, and no other by a path that begins
    /// alike?
    #[test]
    fn containers_are_found_by_id_and_path() {
        let directory = ServiceDirectory::default();
        let record = ContainerRecord {
            name: "redis".into(),
            namespace: "shop".into(),
            pod: "cart-1".into(),
            cgroup: "/fleet/redis".into(),
            ..ContainerRecord::default()
        };
        directory.insert("abc", record.clone());
        assert_eq!(directory.find_by_id("abc").as_deref(), Some(&record));
        let systemd = ContainerRecord {
            cgroup: "a.slice:cri:x".into(),
            ..ContainerRecord::default()
        };
        assert!(
            systemd.contains_group("/a.slice/cri-x.scope/y") && !systemd.contains_group("/cri-x")
        );
        assert!(record.contains_group("/fleet/redis/x") && !record.contains_group("/fleet/other"));
        let named = |path: &str| {
            directory
                .find_by_cgroup(path)
                .map(|(id, record)| record.identity(&id).to_string())
        };
        assert_eq!(
            named("/fleet/redis/x").as_deref(),
            Some("pod/shop/cart-1/redis")
        );
        assert_eq!(
            named("/fleet/redis").as_deref(),
            Some("pod/shop/cart-1/redis")
        );
        assert_eq!((named("/fleet/redis2"), named("/")), (None, None));
        let inner = ContainerRecord {
            cgroup: "/fleet/redis/inner".into(),
            ..ContainerRecord::default()
        };
        directory.insert("zzz", inner.clone());
        directory.insert(
            "aaa",
            ContainerRecord {
                cgroup: "/fleet".into(),
                ..inner
            },
        );
        assert_eq!(
            directory
                .find_id_by_cgroup("/fleet/redis/inner/")
                .as_deref(),
            Some("zzz"),
            "the innermost"
        );
        assert_eq!(
            directory.find_id_by_cgroup("/fleet/redis").as_deref(),
            Some("abc")
        );
        directory.remove("aaa");
        directory.remove("zzz");
        directory.remove("abc");
        assert!(directory.is_empty());
    }
}
