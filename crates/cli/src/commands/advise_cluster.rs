//! `cachemate advise kubernetes` and `cachemate advise slurm`: which services of a cluster should not share a cache.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use cachemate_fleet::advice::{AdvisedService, FleetAdvice, MAX_SERVICES, advise};
use cachemate_fleet::cluster_export::{
    PodContainer, PodMetadata, PodSpec, annotation_or_label, limit_percent, parse_quantity,
};
use cachemate_fleet::corun::CoRunSolver;
use cachemate_fleet::extender::ClusterKnowledge;
use cachemate_fleet::spec::{FleetService, MAX_CPUS};
use cachemate_report::Table;
use cachemate_report::text::format_count_of;
use clap::{Args, Subcommand};
use serde::Deserialize;

use super::slurm_node::AdviseSlurmNode;
use crate::args::JsonArg;
use crate::exit::UsageError;
use crate::knowledge_dir::read_dir;
use crate::session::Session;

#[derive(Subcommand)]
pub enum AdviseCommand {
    Kubernetes(AdviseKubernetes),
    Slurm(AdviseSlurm),
    SlurmNode(AdviseSlurmNode),
}

impl AdviseCommand {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        match self {
            AdviseCommand::Kubernetes(command) => command.run(session),
            AdviseCommand::Slurm(command) => command.run(session),
            AdviseCommand::SlurmNode(command) => command.run(session),
        }
    }
}

/// Advise which pods of a deployment should not share a last-level cache, and the settings that keep them apart
///
/// A workload names its profile by the annotation cachemate.io/profile of its pod template, and its limit by
/// cachemate.io/max-slowdown. Slowdowns of pairs are forecast on the interval machine. Nothing is changed.
#[derive(Args)]
pub struct AdviseKubernetes {
    /// Manifests (YAML or JSON)
    #[arg(value_name = "MANIFEST", required = true)]
    manifests: Vec<PathBuf>,
    #[command(flatten)]
    cluster: ClusterOptions,
}

/// Advise which jobs should have a last-level cache for themselves
///
/// Reads the output of sacct -P with the columns JobID, JobName, AllocCPUS and Comment. A job names its profile and limit
/// in its comment: cachemate:profile=NAME,max-slowdown=10. Nothing is changed.
#[derive(Args)]
pub struct AdviseSlurm {
    /// Output of sacct -P -X -o JobID,JobName,AllocCPUS,Comment
    #[arg(value_name = "SACCT")]
    sacct: PathBuf,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Args)]
struct ClusterOptions {
    /// Directory of WorkloadProfile objects (JSON)
    #[arg(long, value_name = "DIR")]
    profiles: PathBuf,
    /// Bundled machine (cachemate topology --list) or TOML file
    #[arg(long, short, value_name = "MACHINE")]
    machine: String,
    #[command(flatten)]
    json: JsonArg,
}

/// Maximum size of manifests and accounting files.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// The part of a manifest that advice needs.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ClusterManifest {
    kind: String,
    metadata: PodMetadata,
    spec: ManifestSpec,
    items: Vec<ClusterManifest>,
}

/// The `spec` of a pod, or of a workload that contains a template of pods.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ManifestSpec {
    containers: Vec<ManifestContainer>,
    template: Option<Box<PodTemplate>>,
    #[serde(rename = "jobTemplate")]
    job: Option<Box<JobTemplate>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PodTemplate {
    metadata: PodMetadata,
    spec: ManifestSpec,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct JobTemplate {
    spec: ManifestSpec,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct ManifestContainer {
    image: String,
    resources: ManifestResources,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct ManifestResources {
    requests: BTreeMap<String, ManifestQuantity>,
    limits: BTreeMap<String, ManifestQuantity>,
}

/// A quantity: YAML writes `cpu: 2` as a number, but `cpu: 500m` as text.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum ManifestQuantity {
    Number(f64),
    Text(String),
}

impl ManifestQuantity {
    fn value(&self) -> Option<f64> {
        match self {
            ManifestQuantity::Number(number) => Some(*number),
            ManifestQuantity::Text(text) => parse_quantity(text),
        }
    }
}

impl AdviseKubernetes {
    fn run(&self, session: &Session) -> anyhow::Result<()> {
        let knowledge = self.cluster.load_knowledge(session)?;
        let mut services = Vec::new();
        for path in &self.manifests {
            for manifest in read_manifests(path)? {
                collect_services(&manifest, &knowledge, &mut services)
                    .with_context(|| path.display().to_string())?;
            }
        }
        self.cluster.print_advice(
            session,
            services,
            "a Deployment, StatefulSet, DaemonSet, Job, CronJob or Pod",
        )
    }
}

fn read_manifests(path: &Path) -> anyhow::Result<Vec<ClusterManifest>> {
    let name = path.display();
    let text = crate::files::read_text(path, MAX_FILE_BYTES)?;
    let mut manifests = Vec::new();
    // The YAML parser also reads JSON. An empty document between two separators is not an object and is skipped.
    for document in serde_yaml_ng::Deserializer::from_str(&text) {
        let manifest = Option::<ClusterManifest>::deserialize(document)
            .map_err(|error| anyhow::anyhow!("{name}: {error}; expected Kubernetes objects"))?;
        manifests.extend(manifest);
    }
    Ok(manifests)
}

fn collect_services(
    manifest: &ClusterManifest,
    knowledge: &ClusterKnowledge,
    services: &mut Vec<AdvisedService>,
) -> anyhow::Result<()> {
    for item in &manifest.items {
        collect_services(item, knowledge, services)?;
    }
    let job_spec = manifest.spec.job.as_ref().map(|job| &job.spec);
    let template = job_spec.unwrap_or(&manifest.spec).template.as_deref();
    let (metadata, spec) = match template {
        Some(template) => (&template.metadata, &template.spec),
        None if manifest.kind == "Pod" => (&manifest.metadata, &manifest.spec),
        None => return Ok(()),
    };
    // Annotations of the workload apply to its pods unless the template sets the same annotations.
    let mut merged_metadata = metadata.clone();
    for (key, value) in &manifest.metadata.annotations {
        merged_metadata
            .annotations
            .entry(key.clone())
            .or_insert_with(|| value.clone());
    }
    merged_metadata.name.clone_from(&manifest.metadata.name);
    services.push(build_pod_service(
        &merged_metadata,
        &spec.containers,
        knowledge,
    )?);
    Ok(())
}

fn build_pod_service(
    metadata: &PodMetadata,
    containers: &[ManifestContainer],
    knowledge: &ClusterKnowledge,
) -> anyhow::Result<AdvisedService> {
    let name = &metadata.name;
    let mut cpus = 0.0;
    let mut has_whole_cpus = !containers.is_empty();
    for (index, container) in containers.iter().enumerate() {
        let (request, limit) = (
            container.resources.requests.get("cpu"),
            container.resources.limits.get("cpu"),
        );
        let Some(request) = request.or(limit) else {
            has_whole_cpus = false;
            continue;
        };
        let cpu_request = request
            .value()
            .filter(|value| (0.0..=MAX_CPUS).contains(value));
        let cpu_request = cpu_request.with_context(|| {
            format!("'{name}', containers[{index}].resources.requests.cpu: expected a quantity such as 500m or 2")
        })?;
        let equals_limit = limit.and_then(ManifestQuantity::value) == Some(cpu_request);
        has_whole_cpus &= equals_limit && cpu_request >= 1.0 && cpu_request.fract() == 0.0;
        cpus += cpu_request;
    }
    let max_slowdown_percent = match annotation_or_label(metadata, "cachemate.io/max-slowdown") {
        None => None,
        Some(text) => Some(limit_percent(text).with_context(|| format!("'{name}'"))?),
    };
    let image_containers = containers.iter().map(|container| PodContainer {
        image: container.image.clone(),
        ..Default::default()
    });
    let pod = cachemate_fleet::cluster_export::ExportedPod {
        metadata: metadata.clone(),
        spec: PodSpec {
            containers: image_containers.collect(),
        },
    };
    if let Some(profile) = annotation_or_label(metadata, "cachemate.io/profile")
        .filter(|name| !knowledge.profiles.contains_key(*name))
    {
        bail!(
            "'{name}', annotation cachemate.io/profile: found '{profile}', expected one of {}",
            describe_profile_names(knowledge)
        );
    }
    let kind = build_service_kind(
        name.clone(),
        cpus,
        max_slowdown_percent,
        knowledge
            .profile_of(&pod)
            .map(|(_, profile)| profile.clone()),
    );
    Ok(AdvisedService {
        kind,
        has_whole_cpus,
    })
}

fn describe_profile_names(knowledge: &ClusterKnowledge) -> String {
    let names: Vec<&str> = knowledge
        .profiles
        .keys()
        .take(20)
        .map(String::as_str)
        .collect();
    if names.is_empty() {
        "a profile, but the directory has none".to_string()
    } else {
        names.join(", ")
    }
}

fn build_service_kind(
    name: String,
    cpus: f64,
    max_slowdown_percent: Option<f64>,
    profile: Option<cachemate_fleet::profile::WorkloadProfile>,
) -> FleetService {
    let cpus = cpus.max(0.1);
    FleetService {
        name,
        cpus,
        threads: cpus.ceil() as u16,
        busy_cpus: cpus,
        max_slowdown_percent,
        weight: 1.0,
        profile,
        ..FleetService::default()
    }
}

impl AdviseSlurm {
    fn run(&self, session: &Session) -> anyhow::Result<()> {
        let knowledge = self.cluster.load_knowledge(session)?;
        let name = self.sacct.display();
        let text = crate::files::read_text(&self.sacct, MAX_FILE_BYTES)?;
        let services = parse_jobs(&text, &knowledge).with_context(|| name.to_string())?;
        self.cluster
            .print_advice(session, services, "jobs with comments")
    }
}

/// Groups jobs by profile, limit and CPUs; each group is one service, named after its first job.
fn parse_jobs(text: &str, knowledge: &ClusterKnowledge) -> anyhow::Result<Vec<AdvisedService>> {
    let mut lines = text.lines().enumerate();
    let header: Vec<&str> = lines
        .next()
        .map(|(_, line)| line.split('|').collect())
        .unwrap_or_default();
    let find_column = |name: &str| {
        let position = header.iter().position(|column| *column == name);
        position.with_context(|| {
            format!(
                "line 1: found '{}', expected a column {name}",
                header.join("|")
            )
        })
    };
    let (id_column, job_column, cpus_column, comment_column) = (
        find_column("JobID")?,
        find_column("JobName")?,
        find_column("AllocCPUS")?,
        find_column("Comment")?,
    );
    let mut services: Vec<AdvisedService> = Vec::new();
    for (index, line) in lines.filter(|(_, line)| !line.is_empty()) {
        let cells: Vec<&str> = line.split('|').collect();
        let cell_at = |place: usize| cells.get(place).copied().unwrap_or("");
        let line_label = || format!("line {}", index + 1);
        let cpu_count: u16 = cell_at(cpus_column)
            .parse()
            .ok()
            .filter(|count| f64::from(*count) <= MAX_CPUS)
            .with_context(|| {
                format!(
                    "{}, AllocCPUS: found '{}', expected a number up to {MAX_CPUS}",
                    line_label(),
                    cell_at(cpus_column)
                )
            })?;
        let (mut profile, mut limit) = (None, None);
        let entries = cell_at(comment_column)
            .strip_prefix("cachemate:")
            .unwrap_or("");
        for entry in entries.split(',').filter(|mark| !mark.is_empty()) {
            match entry.split_once('=') {
                Some(("profile", name)) => {
                    let profile_problem = || {
                        format!(
                            "{}, Comment: found profile '{name}', expected one of {}",
                            line_label(),
                            describe_profile_names(knowledge)
                        )
                    };
                    profile = Some(
                        knowledge
                            .profiles
                            .get(name)
                            .with_context(profile_problem)?
                            .clone(),
                    );
                }
                Some(("max-slowdown", text)) => {
                    limit = Some(limit_percent(text).with_context(line_label)?)
                }
                Some(("class", _)) => {}
                _ => bail!(
                    "{}, Comment: found '{entry}', expected profile=, max-slowdown= or class=",
                    line_label()
                ),
            }
        }
        let kind = build_service_kind(
            format!("{} ({})", cell_at(job_column), cell_at(id_column)),
            f64::from(cpu_count.max(1)),
            limit,
            profile,
        );
        let has_same_kind = |earlier: &AdvisedService| {
            (
                earlier.kind.cpus,
                earlier.kind.max_slowdown_percent,
                &earlier.kind.profile,
            ) == (kind.cpus, kind.max_slowdown_percent, &kind.profile)
        };
        if !services.iter().any(has_same_kind) {
            services.push(AdvisedService {
                kind,
                has_whole_cpus: true,
            });
        }
    }
    Ok(services)
}

impl ClusterOptions {
    fn load_knowledge(&self, session: &Session) -> anyhow::Result<ClusterKnowledge> {
        let (knowledge, refusals) = read_dir(&self.profiles)?;
        for (path, reason) in refusals {
            session.warn(&format!("{path}: skipped: {reason}"));
        }
        Ok(knowledge)
    }

    fn print_advice(
        &self,
        session: &Session,
        services: Vec<AdvisedService>,
        expected: &str,
    ) -> anyhow::Result<()> {
        if services.is_empty() || services.len() > MAX_SERVICES {
            bail!(
                "found {}, expected 1 to {MAX_SERVICES}: {expected}",
                format_count_of(services.len() as u64, "service")
            );
        }
        let machine = cachemate_spec::load_machine(&self.machine)?;
        let cache_cpus = machine
            .last_level_cache()
            .map_or(0, |cache| cache.shared_by_cores * machine.contexts_per_core);
        if cache_cpus < 2 {
            return Err(
                UsageError(format!("--machine: '{}' has no shared cache", self.machine)).into(),
            );
        }
        let profiles = services
            .iter()
            .filter_map(|service| service.kind.profile.clone())
            .collect();
        let advice = advise(&CoRunSolver::new(&machine, profiles)?, &services);
        session.print_result(self.json.json, &advice, || render_advice(&advice))
    }
}

/// Maximum number of pairs that are listed.
const MAX_LISTED_PAIRS: usize = 20;

fn render_advice(advice: &FleetAdvice) -> String {
    let mut pair_table =
        Table::from_header("victim | beside | > slowdown | > limit | > the other's | ");
    for pair in advice.pairs.iter().take(MAX_LISTED_PAIRS) {
        pair_table.add_row([
            pair.victim.clone(),
            pair.aggressor.clone(),
            format!("{:.1} %", pair.victim_slowdown_percent),
            format!("{:.1} %", pair.limit_percent),
            format!("{:.1} %", pair.aggressor_slowdown_percent),
            if pair.is_bad {
                "keep apart".to_string()
            } else {
                String::new()
            },
        ]);
    }
    let mut text = format!(
        "pairs on one cache of {}:\n{}",
        advice.machine,
        pair_table.text()
    );
    for service in &advice.services {
        text.push_str(&format!(
            "\n{}: {}\n",
            service.name,
            service.role.unwrap_or("unknown, without a profile")
        ));
        if !service.keep_apart.is_empty() {
            text.push_str(&format!(
                "  not on a cache with {}\n",
                service.keep_apart.join(", ")
            ));
        }
        service
            .settings
            .iter()
            .for_each(|setting| text.push_str(&format!("  {setting}\n")));
    }
    text
}
