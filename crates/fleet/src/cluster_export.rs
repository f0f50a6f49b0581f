//! A cluster's pods as services, from the JSON of `kubectl get pods -A -o json`.
//!
//! Only requests, labels and annotations are read. The annotation `cachemate.io/profile` of a pod names its profile,
//! which is the name of a `[[services]]` entry, and `cachemate.io/max-slowdown` gives its limit.

use std::collections::BTreeMap;

use cachemate_core::FieldError;
use serde::Deserialize;

use crate::spec::{FleetService, MAX_CPUS, MAX_KINDS};

/// Maximum number of pods in one export.
const MAX_PODS: usize = 1_000_000;
/// Busy share of the requested CPUs for a pod whose service states no load.
const DEFAULT_LOAD_SHARE: f64 = 0.5;

/// The list of pods in an export.
#[derive(Deserialize)]
pub struct PodList {
    items: Vec<ExportedPod>,
}

/// The parts of a pod that placement needs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ExportedPod {
    /// Name, labels and annotations.
    pub metadata: PodMetadata,
    /// Containers.
    pub spec: PodSpec,
}

/// Name, labels and annotations of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodMetadata {
    /// Name of the pod.
    pub name: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// UID of the pod, which is never reused.
    pub uid: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
}

/// Containers of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodSpec {
    /// Containers of the pod.
    #[serde(deserialize_with = "read_containers")]
    pub containers: Vec<PodContainer>,
}

/// Maximum number of containers of a pod; they are counted while they are parsed.
const MAX_CONTAINERS: usize = 256;

fn read_containers<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<PodContainer>, D::Error> {
    struct ContainerVisitor;
    impl<'de> serde::de::Visitor<'de> for ContainerVisitor {
        type Value = Vec<PodContainer>;

        fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(out, "at most {MAX_CONTAINERS} containers")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(Vec::new())
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(
            self,
            mut sequence: A,
        ) -> Result<Self::Value, A::Error> {
            let mut containers = Vec::new();
            while let Some(container) = sequence.next_element()? {
                if containers.len() == MAX_CONTAINERS {
                    return Err(serde::de::Error::invalid_length(MAX_CONTAINERS + 1, &self));
                }
                containers.push(container);
            }
            Ok(containers)
        }
    }
    deserializer.deserialize_any(ContainerVisitor)
}

/// One container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodContainer {
    /// Image of the container.
    pub image: String,
    /// Requests.
    pub resources: PodResources,
}

/// Resources of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodResources {
    /// Requests by name, as quantities.
    pub requests: BTreeMap<String, String>,
}

/// An annotation wins over a label of the same name.
pub fn annotation_or_label<'a>(metadata: &'a PodMetadata, name: &str) -> Option<&'a str> {
    metadata
        .annotations
        .get(name)
        .or_else(|| metadata.labels.get(name))
        .map(String::as_str)
}

/// Parses a Kubernetes quantity: `500m`, `2`, `1.5Gi`. `None` if it is not a quantity.
pub fn parse_quantity(text: &str) -> Option<f64> {
    let digits = text
        .find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))
        .unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let scale = match &text[digits..] {
        "" => 1.0,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => 1024.0,
        "Mi" => 1024.0 * 1024.0,
        "Gi" => 1024.0 * 1024.0 * 1024.0,
        "Ti" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    };
    Some(number * scale).filter(|value| value.is_finite())
}

/// The sum of the requests for one resource over the pod's containers.
///
/// # Errors
/// A request is not a valid quantity.
pub fn requested_amount(pod: &ExportedPod, resource: &str) -> Result<f64, FieldError> {
    let mut sum = 0.0;
    for (index, container) in pod.spec.containers.iter().enumerate() {
        if let Some(text) = container.resources.requests.get(resource) {
            let field_path = || format!("spec.containers[{index}].resources.requests.{resource}");
            sum += parse_quantity(text).ok_or_else(|| {
                FieldError::new(field_path(), text, "a quantity such as 500m or 2Gi")
            })?;
        }
    }
    Ok(sum)
}

/// Kinds of services in a cluster, and the kind of each pod.
#[derive(Clone, PartialEq, Debug)]
pub struct ClusterServices {
    /// The kinds; pods with the same requests, profile and limit are one kind.
    pub kinds: Vec<FleetService>,
    /// Index of each pod's kind, in the order of the export.
    pub pods: Vec<u16>,
    /// Number of pods without a profile.
    pub unprofiled_pods: usize,
}

/// Groups the pods of an export into kinds of services. `declared_services` provides profiles by name.
///
/// # Errors
/// A quantity, limit or profile name is invalid; the error names its pod.
pub fn cluster_services(
    list: &PodList,
    declared_services: &[FleetService],
) -> Result<ClusterServices, FieldError> {
    if list.items.is_empty() || list.items.len() > MAX_PODS {
        return Err(FieldError::new(
            "items",
            format!("{} pods", list.items.len()),
            "1 to 1 000 000 pods",
        ));
    }

    let mut cluster = ClusterServices {
        kinds: Vec::new(),
        pods: Vec::new(),
        unprofiled_pods: 0,
    };
    let mut kind_by_identity: BTreeMap<String, u16> = BTreeMap::new();
    for (index, pod) in list.items.iter().enumerate() {
        let kind = pod_kind(pod, declared_services)
            .map_err(|error| error.with_path_prefix(&format!("items[{index}]")))?;
        cluster.unprofiled_pods += usize::from(kind.profile.is_none());
        let identity = format!(
            "{} {} {} {:?}",
            kind.name, kind.cpus, kind.memory_bytes, kind.max_slowdown_percent
        );
        let next_kind = cluster.kinds.len();
        if next_kind >= MAX_KINDS {
            return Err(FieldError::new(
                format!("items[{index}]"),
                "more kinds",
                "at most 10 000 kinds of pods",
            ));
        }
        let number = *kind_by_identity.entry(identity).or_insert(next_kind as u16);
        if usize::from(number) == next_kind {
            cluster.kinds.push(kind);
        }
        cluster.pods.push(number);
    }
    Ok(cluster)
}

fn pod_kind(
    pod: &ExportedPod,
    declared_services: &[FleetService],
) -> Result<FleetService, FieldError> {
    let limit = match annotation_or_label(&pod.metadata, "cachemate.io/max-slowdown") {
        None => None,
        Some(text) => Some(limit_percent(text)?),
    };
    let service =
        match annotation_or_label(&pod.metadata, "cachemate.io/profile") {
            None => None,
            Some(name) => {
                let field = "metadata.annotations.cachemate.io/profile";
                let declared_kind = declared_services.iter().find(|kind| kind.name == name);
                Some(declared_kind.ok_or_else(|| {
                    FieldError::new(field, name, "the name of a [[services]] entry")
                })?)
            }
        };

    let cpus = requested_amount(pod, "cpu")?.clamp(0.01, MAX_CPUS);
    let memory_bytes = requested_amount(pod, "memory")?;
    let load = service.map_or(DEFAULT_LOAD_SHARE, |base| base.busy_cpus / base.cpus);
    let name = service.map_or_else(
        || format!("{}/{}", pod.metadata.namespace, app_name(pod)),
        |base| base.name.clone(),
    );
    Ok(FleetService {
        name,
        cpus,
        memory_bytes,
        threads: libm::ceil(cpus) as u16,
        busy_cpus: load * cpus,
        daily_swing: service.map_or(0.0, |base| base.daily_swing),
        peak_hour: service.map_or(0.0, |base| base.peak_hour),
        max_slowdown_percent: limit.or(service.and_then(|base| base.max_slowdown_percent)),
        lifetime_hours: None,
        weight: 1.0,
        profile: service.and_then(|base| base.profile.clone()),
    })
}

/// Parses a limit as operators write it: `10` or `10%`.
///
/// # Errors
/// The text is not a value from 0 to 10 000 percent.
pub fn limit_percent(text: &str) -> Result<f64, FieldError> {
    let number = text.trim().trim_end_matches('%').trim().parse::<f64>().ok();
    number
        .filter(|percent| (0.0..=10_000.0).contains(percent))
        .ok_or_else(|| {
            FieldError::new(
                "cachemate.io/max-slowdown",
                format!("'{text}'"),
                "a number of percent such as 10",
            )
        })
}

fn app_name(pod: &ExportedPod) -> &str {
    let app = ["app.kubernetes.io/name", "app"]
        .iter()
        .find_map(|label| pod.metadata.labels.get(*label));
    app.map_or(pod.metadata.name.as_str(), String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are quantities parsed as in Kubernetes, and others rejected?
    #[test]
    fn quantities_are_parsed_as_in_kubernetes() {
        for (text, value) in [
            ("500m", 0.5),
            ("2", 2.0),
            ("1.5", 1.5),
            ("1Gi", 1_073_741_824.0),
            ("3M", 3e6),
        ] {
            assert_eq!(parse_quantity(text), Some(value), "{text}");
        }
        for text in ["", "m", "-1", "1Q", "1e400", "Gi", "1 Gi"] {
            assert_eq!(parse_quantity(text), None, "{text}");
        }
        assert_eq!(limit_percent("10%").unwrap(), 10.0);
        assert!(
            limit_percent("ten").is_err()
                && limit_percent("-1").is_err()
                && limit_percent("NaN").is_err()
        );
    }
}
