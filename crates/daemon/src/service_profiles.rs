//! Storage of the profiles of services' programs in a file of the state directory, so that the profiles outlive the
//! daemon, and other hosts can use them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cachemate_core::{ServiceProfiles, StoredServiceProfile};
use serde::{Deserialize, Serialize};

/// Name of the file in the state directory.
pub const FILE_NAME: &str = "service-profiles.json";
/// Version of the file.
const FORMAT: u32 = 1;
/// Larger files are rejected, so that a malformed file cannot request unbounded memory.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Time between two writes.
const WRITE_INTERVAL: Duration = Duration::from_secs(60);

/// The content of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfilesFile {
    format: u32,
    profiles: Vec<StoredServiceProfile>,
}

/// The file, with the time of the last attempt to write it and whether there is something to write.
pub(crate) struct ProfileStore {
    path: PathBuf,
    last_write: Instant,
    has_changes: bool,
}

impl ProfileStore {
    /// The store in a state directory.
    pub(crate) fn new(state_dir: &Path) -> Self {
        ProfileStore {
            path: state_dir.join(FILE_NAME),
            last_write: Instant::now(),
            has_changes: false,
        }
    }

    /// Profiles of earlier runs. An unusable file is reported and replaced, because everything in it can be measured
    /// again.
    pub(crate) fn read(&self, report: &dyn Fn(&str)) -> ServiceProfiles {
        let mut service_profiles = ServiceProfiles::default();
        match read_stored_profiles(&self.path) {
            Ok(profiles) => service_profiles.restore(profiles),
            Err(error) => report(&format!(
                "{}: {error}; learning profiles from scratch",
                self.path.display()
            )),
        }
        service_profiles
    }

    /// Records whether there is something new, and writes it at most once a minute.
    pub(crate) fn observe(
        &mut self,
        has_new_profile: bool,
        profiles: &ServiceProfiles,
        report: &dyn Fn(&str),
    ) {
        self.has_changes |= has_new_profile;
        if self.last_write.elapsed() >= WRITE_INTERVAL {
            self.write(profiles, report);
        }
    }

    /// Writes everything that is new.
    pub(crate) fn write(&mut self, profiles: &ServiceProfiles, report: &dyn Fn(&str)) {
        self.last_write = Instant::now();
        if !self.has_changes {
            return;
        }

        let file = ProfilesFile {
            format: FORMAT,
            profiles: profiles.entries().cloned().collect(),
        };
        let encoded = serde_json::to_vec(&file).map_err(std::io::Error::other);
        match encoded.and_then(|bytes| cachemate_files::replace(&self.path, &bytes)) {
            Ok(()) => self.has_changes = false,
            // The next write tries again.
            Err(error) => report(&format!(
                "{}: {error}; learned profiles are not stored",
                self.path.display()
            )),
        }
    }
}

/// The profiles that a daemon stored in a file; none if the file does not exist.
///
/// # Errors
/// The file cannot be read, is too large, or is not such a file.
pub fn read_stored_profiles(path: &Path) -> Result<Vec<StoredServiceProfile>, String> {
    if cachemate_files::metadata_if_exists(path)
        .map_err(|error| error.to_string())?
        .is_none()
    {
        return Ok(Vec::new());
    }
    let text = cachemate_files::read_text_limited(path, MAX_FILE_BYTES)
        .map_err(|error| error.to_string())?;
    let file: ProfilesFile = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    match file.format {
        FORMAT => Ok(file.profiles),
        found => Err(format!("found format {found}, expected {FORMAT}")),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use cachemate_core::{Fact, FactSource, Profile, ProfileKey, ServiceIdentity};

    /// Do profiles survive a restart, and is a damaged file reported and replaced?
    #[test]
    fn profiles_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let messages = RefCell::new(Vec::new());
        let record_message = |text: &str| messages.borrow_mut().push(text.to_string());
        let key = ProfileKey::new(&ServiceIdentity::command("xz"), "xz", None, Some(0));
        let mut profile = Profile::default();
        profile.contention.intensity = Some(Fact::new(0.4, FactSource::PrimeProbe, 3));
        let mut store = ProfileStore::new(dir.path());
        let mut profiles = store.read(&record_message);
        store.observe(profiles.learn(&key, &profile), &profiles, &record_message);
        store.write(&profiles, &record_message);
        let restored_profiles = ProfileStore::new(dir.path()).read(&record_message);
        let intensity = restored_profiles
            .get(&key)
            .unwrap()
            .contention
            .intensity
            .unwrap();
        assert_eq!(
            (intensity.value, intensity.source),
            (0.4, FactSource::StoredProfile)
        );
        assert!(messages.borrow().is_empty());
        for broken in ["{", r#"{"format":9,"profiles":[]}"#] {
            std::fs::write(dir.path().join(FILE_NAME), broken).unwrap();
            assert_eq!(store.read(&record_message), ServiceProfiles::default());
        }
        assert!(
            messages.borrow().len() == 2
                && messages.borrow()[1].contains("found format 9, expected 1"),
            "{messages:?}"
        );
    }

    /// Are profiles whose write failed written as soon as the directory can be written again?
    #[test]
    fn profiles_are_kept_until_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let messages = RefCell::new(Vec::new());
        let record_message = |text: &str| messages.borrow_mut().push(text.to_string());
        let key = ProfileKey::new(&ServiceIdentity::command("xz"), "xz", None, Some(0));
        let mut profile = Profile::default();
        profile.contention.intensity = Some(Fact::new(0.4, FactSource::PrimeProbe, 3));
        let mut store = ProfileStore::new(dir.path());
        let mut profiles = store.read(&record_message);
        store.observe(profiles.learn(&key, &profile), &profiles, &record_message);

        // No file takes the place of a directory.
        std::fs::create_dir(&path).unwrap();
        store.write(&profiles, &record_message);
        assert!(
            messages.borrow().len() == 1 && messages.borrow()[0].contains("are not stored"),
            "{messages:?}"
        );
        std::fs::remove_dir(&path).unwrap();
        store.write(&profiles, &record_message);
        assert_eq!(read_stored_profiles(&path).unwrap().len(), 1);

        // What is written once is not written again.
        std::fs::remove_file(&path).unwrap();
        store.write(&profiles, &record_message);
        assert!(!path.exists() && messages.borrow().len() == 1);
    }
}
