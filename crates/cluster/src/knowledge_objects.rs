//! Profiles and node states: objects of the two custom resources, as nodes publish and extenders watch them.

use anyhow::Context;
use cachemate_fleet::extender::{ClusterKnowledge, full_image_name};
use cachemate_fleet::profile::WorkloadProfile;
use cachemate_fleet::scorer::NodeCacheState;
use serde::{Deserialize, Serialize};

/// Maximum size of one object. A curve has at most 4 KB, and a node with 256 caches at most 256 KB.
pub const MAX_OBJECT_BYTES: u64 = 1 << 20;

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
