//! Profiles that belong to a service's program rather than to a task: measurements of short programs accumulate, and
//! the next start of a program begins with them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{FactSource, Facts, PhaseFacts, Profile, ServiceIdentity, ServiceKind, SharingFacts};

/// The owner of a stored profile: a program of a service and, if known, its image.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileKey {
    /// Kind of the service.
    pub kind: ServiceKind,
    /// The part of the service's name that stays the same at the next start.
    pub service: String,
    /// Command name of the process.
    pub program: String,
    /// Digest of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
}

impl ProfileKey {
    /// Builds the key of a program. Sessions, jobs and containers get a new number or id at each start, so their keys
    /// use the user instead; a container named by its runtime keeps that name.
    pub fn new(
        service: &ServiceIdentity,
        program: &str,
        image: Option<&str>,
        user: Option<u32>,
    ) -> Self {
        let user_key = || user.map_or_else(|| "user".to_string(), |user| format!("user {user}"));
        let is_id = |name: &str| name.len() >= 12 && name.chars().all(|c| c.is_ascii_hexdigit());
        let owner = match service.kind {
            ServiceKind::Session | ServiceKind::Job => user_key(),
            ServiceKind::Container if is_id(&service.name) => user_key(),
            ServiceKind::Pod => pod_owner(service).unwrap_or_else(user_key),
            ServiceKind::Container
            | ServiceKind::Unit
            | ServiceKind::UserUnit
            | ServiceKind::Guest
            | ServiceKind::Command => service.name.clone(),
        };

        ProfileKey {
            kind: service.kind,
            service: owner,
            program: program.to_string(),
            image: image.map(str::to_string),
        }
    }
}

/// `namespace/container` if the runtime reports names, because a pod's own name differs between
/// replicas.
fn pod_owner(service: &ServiceIdentity) -> Option<String> {
    let (namespace, _) = service.pod.as_deref()?.split_once('/')?;
    Some(format!("{namespace}/{}", service.container.as_deref()?))
}

/// Maximum number of stored keys; the least recently used ones are dropped first.
const MAX_PROFILES: usize = 1_000;

/// Profiles of the programs of services.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ServiceProfiles {
    profiles: BTreeMap<ProfileKey, StoredServiceProfile>,
    use_count: u64,
}

/// A program's profile, as stored in files.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredServiceProfile {
    /// The program.
    pub key: ProfileKey,
    /// Facts about the program.
    pub profile: Profile,
    /// Rank among all uses; the largest is the most recent.
    pub last_use: u64,
}

impl ServiceProfiles {
    /// Adds facts learned about a program: a measured fact replaces a stored or older one, and nothing else changes.
    /// The result is false if nothing is new.
    pub fn learn(&mut self, key: &ProfileKey, profile: &Profile) -> bool {
        let program_facts = Profile {
            process: None,
            phase_number: 0,
            // These facts name tasks and phases of this run, which have no meaning in another run.
            sharing: SharingFacts::default(),
            phase: PhaseFacts::default(),
            ..profile.clone()
        };
        if program_facts == Profile::default() {
            return false;
        }

        self.use_count += 1;
        let last_use = self.use_count;
        let entry = self
            .profiles
            .entry(key.clone())
            .or_insert_with(|| StoredServiceProfile {
                key: key.clone(),
                profile: Profile::default(),
                last_use,
            });
        entry.last_use = last_use;
        let previous_profile = entry.profile.clone();
        entry.profile.merge_newer(&program_facts);
        let has_changed = entry.profile != previous_profile;
        self.drop_oldest();
        has_changed
    }

    /// If the service has never run, this is the profile of the same program from the same image,
    /// whichever service used it last; `None` if there is none.
    pub fn get(&self, key: &ProfileKey) -> Option<&Profile> {
        let is_same_program = |stored: &&StoredServiceProfile| {
            stored.key.program == key.program && stored.key.image == key.image
        };
        let find_same_program = || {
            key.image.as_ref()?;
            self.profiles
                .values()
                .filter(is_same_program)
                .max_by_key(|stored| stored.last_use)
        };
        self.profiles
            .get(key)
            .or_else(find_same_program)
            .map(|stored| &stored.profile)
    }

    /// What is written to the file.
    pub fn entries(&self) -> impl Iterator<Item = &StoredServiceProfile> {
        self.profiles.values()
    }

    /// Restores profiles of an earlier run; every measured fact of this run replaces them.
    pub fn restore(&mut self, entries: impl IntoIterator<Item = StoredServiceProfile>) {
        for mut entry in entries {
            entry.profile.restamp(FactSource::StoredProfile, 0);
            self.use_count = self.use_count.max(entry.last_use);
            self.profiles.insert(entry.key.clone(), entry);
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        while self.profiles.len() > MAX_PROFILES {
            let oldest_key = self
                .profiles
                .values()
                .min_by_key(|stored| stored.last_use)
                .map(|stored| stored.key.clone());
            let Some(oldest) = oldest_key else { return };
            self.profiles.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fact;

    fn profile_with_intensity(value: f64, source: FactSource, window: u64) -> Profile {
        let mut profile = Profile::default();
        profile.contention.intensity = Some(Fact::new(value, source, window));
        profile
    }

    fn job_key(job: &str) -> ProfileKey {
        ProfileKey::new(
            &ServiceIdentity::new(ServiceKind::Job, job),
            "xz",
            None,
            Some(7),
        )
    }

    /// Do facts of a service's short programs accumulate, does the next job start with the facts of the first, and does
    /// only a measured fact replace a stored one?
    #[test]
    fn facts_of_short_programs_add_up() {
        let mut stored = ServiceProfiles::default();
        assert!(
            !stored.learn(&job_key("1"), &Profile::default())
                && stored.get(&job_key("1")).is_none()
        );
        assert!(stored.learn(
            &job_key("1"),
            &profile_with_intensity(0.4, FactSource::PrimeProbe, 3)
        ));
        let mut sensitivity_profile = Profile::default();
        sensitivity_profile.contention.sensitivity = Some(Fact::new(0.2, FactSource::Neighbor, 5));
        assert!(stored.learn(&job_key("1"), &sensitivity_profile));
        let contention = stored.get(&job_key("2")).unwrap().contention.clone();
        assert_eq!(
            (
                contention.intensity.unwrap().value,
                contention.sensitivity.unwrap().value
            ),
            (0.4, 0.2)
        );
        assert!(
            !stored.learn(
                &job_key("2"),
                &profile_with_intensity(0.9, FactSource::StoredProfile, 8)
            ),
            "an echo is no measurement"
        );
        assert!(
            !stored.learn(
                &job_key("2"),
                &profile_with_intensity(0.9, FactSource::PrimeProbe, 2)
            ),
            "older"
        );
        assert!(stored.learn(
            &job_key("2"),
            &profile_with_intensity(0.6, FactSource::PrimeProbe, 9)
        ));
        let mut next = ServiceProfiles::default();
        next.restore(stored.entries().cloned());
        assert!(
            next.learn(
                &job_key("3"),
                &profile_with_intensity(0.7, FactSource::PrimeProbe, 0)
            ),
            "a new run measures anew"
        );
        assert_eq!(
            next.get(&job_key("1"))
                .unwrap()
                .contention
                .sensitivity
                .unwrap()
                .source,
            FactSource::StoredProfile
        );
    }

    /// Does a key survive a restart of its service, and distinguish services, programs, images and users?
    #[test]
    fn a_key_survives_a_restart() {
        let pod = |pod: &str| {
            ProfileKey::new(
                &ServiceIdentity::from_pod(pod, Some("redis")),
                "redis",
                None,
                None,
            )
        };
        assert_eq!(pod("shop/cart-1"), pod("shop/cart-2"));
        assert_ne!(pod("shop/cart-1"), pod("test/cart-1"));
        let id = "0123456789abcdef".repeat(4);
        let container = |id: &str, image| {
            ProfileKey::new(&ServiceIdentity::container(id), "xz", image, Some(0))
        };
        assert_eq!(container(&id, None), container(&id.replace('0', "1"), None));
        assert_ne!(container(&id, Some("a")), container(&id, Some("b")));
        assert_ne!(container("web", None), container("db", None));

        let unit = |program: &str| {
            ProfileKey::new(
                &ServiceIdentity::new(ServiceKind::Unit, "a.service"),
                program,
                None,
                Some(0),
            )
        };
        assert_ne!(unit("x"), unit("y"));
    }

    /// Does a service that has never run begin with the profile of its image's program, and without an image with none?
    #[test]
    fn a_first_start_begins_with_the_profile_of_its_image() {
        let mut stored = ServiceProfiles::default();
        let key = |name: &str, program: &str, image| {
            ProfileKey::new(&ServiceIdentity::container(name), program, image, Some(0))
        };
        for (name, value) in [("web", 0.4), ("db", 0.6)] {
            stored.learn(
                &key(name, "xz", Some("sha256:1")),
                &profile_with_intensity(value, FactSource::PrimeProbe, 3),
            );
        }
        stored.learn(
            &key("cache", "xz", None),
            &profile_with_intensity(0.8, FactSource::PrimeProbe, 3),
        );
        let intensity = |key| {
            stored
                .get(&key)
                .map(|profile| profile.contention.intensity.unwrap().value)
        };
        assert_eq!(intensity(key("new", "xz", Some("sha256:1"))), Some(0.6));
        assert_eq!(intensity(key("web", "xz", Some("sha256:1"))), Some(0.4));
        for unknown in [
            key("new", "gzip", Some("sha256:1")),
            key("new", "xz", Some("sha256:2")),
            key("new", "xz", None),
        ] {
            assert_eq!(intensity(unknown), None);
        }
    }

    /// Is the number of profiles bounded, with the most recently used ones kept?
    #[test]
    fn the_least_recently_used_profiles_are_dropped() {
        let mut stored = ServiceProfiles::default();
        let key = |nth: usize| {
            ProfileKey::new(
                &ServiceIdentity::command(&format!("p{nth}")),
                "p",
                None,
                None,
            )
        };
        for nth in 0..MAX_PROFILES {
            stored.learn(
                &key(nth),
                &profile_with_intensity(0.1, FactSource::PrimeProbe, 1),
            );
        }
        stored.learn(
            &key(0),
            &profile_with_intensity(0.1, FactSource::PrimeProbe, 1),
        );
        stored.learn(
            &key(MAX_PROFILES),
            &profile_with_intensity(0.1, FactSource::PrimeProbe, 1),
        );
        assert_eq!(stored.entries().count(), MAX_PROFILES);
        assert!(stored.get(&key(0)).is_some() && stored.get(&key(1)).is_none());
    }
}
