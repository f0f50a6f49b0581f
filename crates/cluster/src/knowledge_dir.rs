//! Reads profiles and node states from a directory of JSON files, each an object of one of the two custom resources.
//!
//! Another process writes the directory (a mounted volume, or a mirror of the API server). A file that is unreadable,
//! too large or forged is skipped and reported once; the other files are used.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use cachemate_fleet::extender::{ClusterKnowledge, full_image_name};
use cachemate_fleet::profile::WorkloadProfile;
use cachemate_fleet::scorer::NodeCacheState;
use serde::{Deserialize, Serialize};

/// Maximum size of one object. A curve has at most 4 KB, and a node with 256 caches at most 256 KB.
pub const MAX_OBJECT_BYTES: u64 = 1 << 20;
/// Maximum number of files in a directory.
const MAX_FILES: usize = 200_000;

/// An object of one of the two resources. Fields that placement does not need are skipped.
#[derive(Deserialize)]
#[serde(tag = "kind")]
enum KnowledgeObject {
    WorkloadProfile {
        metadata: ObjectName,
        spec: ProfileSpec,
    },
    NodeCacheState {
        metadata: ObjectName,
        status: PublishedState,
    },
}

#[derive(Deserialize)]
struct ObjectName {
    name: String,
}

/// The `spec` of a `WorkloadProfile`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ProfileSpec {
    /// Images to which the profile applies.
    #[serde(default)]
    pub images: Vec<String>,
    /// The profile.
    pub profile: WorkloadProfile,
}

/// The `status` of a `NodeCacheState`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PublishedState {
    /// Time of publication, in seconds since the epoch.
    observed_unix_seconds: f64,
    state: NodeCacheState,
}

/// The objects of a directory and its subdirectories, and the reason for each rejected file.
///
/// # Errors
/// The directory cannot be read.
pub fn read_dir(dir: &Path) -> anyhow::Result<(ClusterKnowledge, BTreeMap<String, String>)> {
    let mut knowledge = ClusterKnowledge::default();
    let mut refusals = BTreeMap::new();
    let mut pending_dirs = vec![(dir.to_path_buf(), 0)];
    let mut file_count = 0;
    while let Some((dir, depth)) = pending_dirs.pop() {
        let paths = cachemate_files::list_dir(&dir)
            .with_context(|| format!("{}: cannot be read", dir.display()))?;
        for path in paths {
            // Hidden names are skipped, because a mounted volume contains every file a second time in hidden
            // directories.
            let is_hidden = path
                .file_name()
                .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if is_hidden {
                continue;
            }
            if path.is_dir() && depth < 2 {
                pending_dirs.push((path, depth + 1));
            } else if path
                .extension()
                .is_some_and(|extension| extension == "json")
            {
                file_count += 1;
                if file_count > MAX_FILES {
                    anyhow::bail!(
                        "{}: found more than {MAX_FILES} files, expected fewer",
                        dir.display()
                    );
                }
                if let Err(error) = read_object(&path, &mut knowledge) {
                    refusals.insert(path.display().to_string(), format!("{error:#}"));
                }
            }
        }
    }
    Ok((knowledge, refusals))
}

fn read_object(path: &Path, knowledge: &mut ClusterKnowledge) -> anyhow::Result<()> {
    let text = cachemate_files::read_text_limited(path, MAX_OBJECT_BYTES)?;
    let object: serde_json::Value =
        serde_json::from_str(&text).context("expected a WorkloadProfile or NodeCacheState")?;
    insert_object(object, knowledge)
}

/// Adds an object of one of the two resources.
///
/// # Errors
/// The object is of another kind, or has a field with an impossible value.
pub fn insert_object(
    object: serde_json::Value,
    knowledge: &mut ClusterKnowledge,
) -> anyhow::Result<()> {
    let object: KnowledgeObject =
        serde_json::from_value(object).context("expected a WorkloadProfile or NodeCacheState")?;
    match object {
        KnowledgeObject::WorkloadProfile { metadata, spec } => {
            spec.profile.check()?;
            knowledge.images.extend(
                spec.images
                    .iter()
                    .map(|image| (full_image_name(image), metadata.name.clone())),
            );
            knowledge.profiles.insert(metadata.name, spec.profile);
        }
        KnowledgeObject::NodeCacheState { metadata, status } => {
            status.state.check()?;
            let publication_time = status.observed_unix_seconds;
            anyhow::ensure!(
                publication_time.is_finite(),
                "status.observedUnixSeconds: found {publication_time}, expected a time"
            );
            knowledge
                .nodes
                .insert(metadata.name, (publication_time, status.state));
        }
    }
    Ok(())
}
