//! `cachemate fleet`: simulates a fleet of hosts under several policies.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_cluster::knowledge_objects::ProfileSpec;
use cachemate_core::MachineSpec;
use cachemate_fleet::arrivals::draw_kinds;
use cachemate_fleet::cluster_export::{PodList, cluster_services};
use cachemate_fleet::outcome::FleetOutcome;
use cachemate_fleet::profile::WorkloadProfile;
use cachemate_fleet::spec::{FleetService, FleetSpec, MAX_HOSTS, MAX_HOURS};
use cachemate_fleet::study::{FleetChange, FleetPart, FleetResult, FleetStudy};
use cachemate_report::text::format_number;
use cachemate_repro::ReproError;
use cachemate_repro::store::{self, RunName};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::args::JsonArg;
use crate::complete::repro_run::cpu_seconds;
use crate::complete::run_store::{RunStoreArgs, source_version};
use crate::complete::shards::{ShardArg, compute_all, print_shard};
use crate::exit::{InterruptedError, UsageError};
use crate::files::{check_output_path, write_file};
use crate::session::Session;

/// Simulate a fleet: which services share hosts under several policies, their slowdowns, and the hosts needed
///
/// The file describes hosts, services and policies (docs/fleet.md; examples/fleet.toml is ready to run). Every policy
/// places the same arrivals. Speeds come from the interval machine, whose accuracy is stated in
/// docs/simulators/interval.md.
#[derive(Args)]
pub struct FleetArgs {
    /// Description of the fleet (TOML)
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Number of hosts, in place of the file's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_HOSTS)))]
    hosts: Option<u32>,
    /// Nominal hours, in place of the file's
    #[arg(long, value_name = "H")]
    hours: Option<f64>,
    /// Seed for services and arrivals, in place of the file's
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Questions that run every policy again with one change
    #[arg(long, value_enum, value_name = "CHANGE")]
    what_if: Vec<FleetQuestion>,
    /// Kind of host that --what-if other-machine asks about
    #[arg(long, value_name = "MACHINE")]
    other_machine: Option<String>,
    #[command(flatten)]
    shard: ShardArg,
    #[command(flatten)]
    runs: RunStoreArgs,
    /// Write a page with distributions
    #[arg(short, long, value_name = "HTML")]
    output: Option<PathBuf>,
    /// Write one row for each policy
    #[arg(long, value_name = "CSV")]
    csv: Option<PathBuf>,
    /// Overwrite existing files
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    json: JsonArg,
}

/// A fleet with the content of all its files, on which its results depend.
#[derive(Serialize)]
struct FleetRequest {
    spec: FleetSpec,
    machines: Vec<MachineSpec>,
    kinds: Vec<FleetService>,
    /// Index of each pod's kind; `None` without a cluster's export.
    pods: Option<Vec<u16>>,
    changes: Vec<FleetChange>,
}

/// A change of the fleet.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FleetQuestion {
    /// One more host, with the same arrivals
    OneMoreHost,
    /// Hosts of another kind (--other-machine)
    OtherMachine,
    /// Nodes partition caches, or stop doing so
    Partition,
}

/// Maximum size of profiles and of exports of clusters.
const MAX_FILE_BYTES: u64 = 256 << 20;

impl FleetArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        for path in [&self.output, &self.csv].into_iter().flatten() {
            check_output_path(path, self.force)?;
        }
        let spec = self.read_spec()?;
        let fleet = FleetInput::read(&self.file, &spec)?;
        if fleet.unprofiled_count > 0 {
            session.warn(&format!(
                "{} of {} pods have no profile; they occupy CPUs and memory, and their use of caches is unknown",
                fleet.unprofiled_count,
                fleet.pods.as_ref().map_or(0, Vec::len)
            ));
        }
        let (machines, changes) = self.read_questions(&spec)?;
        let FleetInput { kinds, pods, .. } = fleet;
        let request = FleetRequest {
            spec,
            machines,
            kinds,
            pods,
            changes,
        };
        let spec = &request.spec;
        let study = FleetStudy::new(
            spec,
            &request.machines,
            &request.kinds,
            request.pods.as_deref(),
            &request.changes,
        )?;
        let started = Instant::now();
        self.runs.start()?;
        let Some(result) = self.run_stored(session, &request, &study)? else {
            return Ok(());
        };
        let cpu_seconds = cpu_seconds();
        for (path, text) in [(&self.output, None), (&self.csv, Some(result.csv()))] {
            if let Some(path) = path {
                let text = text.unwrap_or_else(|| result.render_html(spec, cpu_seconds));
                write_file(path, text.as_bytes(), self.force)?;
            }
        }
        let outcome = result.outcome(spec, cpu_seconds);
        session.print_result(self.json.json, &outcome, || {
            render_outcome(spec, &outcome, &result, started.elapsed())
        })
    }

    /// Runs the parts of the fleet, or takes them from the store, and merges them. A shard runs its parts only, and has
    /// no result.
    fn run_stored(
        &self,
        session: &Session,
        request: &FleetRequest,
        study: &FleetStudy<'_>,
    ) -> anyhow::Result<Option<FleetResult>> {
        let stop = session.interrupt_flag();
        let should_stop = || stop.load(Ordering::Relaxed);
        let owned = self.shard.select(study.parts());
        let bar = session.progress_bar("fleet", Some(owned.len() as u64));

        // A search begins with the cells, if they are known, and ends with the same result without them.
        let is_cell = |part: &FleetPart| matches!(part, FleetPart::Cell { .. });
        let (cells, searches): (Vec<FleetPart>, Vec<FleetPart>) =
            owned.iter().copied().partition(is_cell);
        let mut outcomes = BTreeMap::new();
        for group in [cells, searches] {
            let found = compute_all(&group, &should_stop, |&part| {
                let label = request.spec.name.clone();
                let name = RunName::new("fleet", label, source_version(), &(request, part))?;
                let outcome = store::find_or_make(name, || {
                    let outcome = study.run_part(part, &outcomes, &should_stop);
                    outcome.ok_or(anyhow::Error::from(ReproError::Interrupted))
                })?;
                bar.inc(1);
                anyhow::Ok((part, outcome))
            });
            for outcome in found.into_iter().flatten() {
                match outcome {
                    Ok((part, outcome)) => _ = outcomes.insert(part, outcome),
                    Err(_) if should_stop() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        bar.finish_and_clear();
        if should_stop() {
            let note = format!("{} of {} parts are stored", outcomes.len(), owned.len());
            return Err(InterruptedError(format!("{note}; the same command continues")).into());
        }
        if let Some(shard) = self.shard.shard {
            print_shard(session, self.json.json, shard, owned.len(), Vec::new())?;
            return Ok(None);
        }
        self.runs.report_reuse(session);
        let result = study.merge(&outcomes);
        Ok(Some(result.context("a part of the fleet has no result")?))
    }

    fn read_spec(&self) -> anyhow::Result<FleetSpec> {
        let name = self.file.display().to_string();
        let text = crate::files::read_text(&self.file, MAX_FILE_BYTES)?;
        let located = cachemate_spec::Located::parse(&name, &text)?;
        let mut spec: FleetSpec = located.deserialize()?;
        if let Some(hours) = self.hours {
            if !(hours > 0.0 && hours <= MAX_HOURS) {
                let text =
                    format!("--hours: found {hours}, expected more than 0, at most {MAX_HOURS}");
                return Err(UsageError(text).into());
            }
            spec.hours = hours;
        }
        spec.hosts = self.hosts.unwrap_or(spec.hosts);
        spec.seed = self.seed.unwrap_or(spec.seed);
        spec.check()
            .map_err(|error| anyhow::anyhow!("{name}, {error}"))?;
        Ok(spec)
    }

    fn read_questions(
        &self,
        spec: &FleetSpec,
    ) -> anyhow::Result<(Vec<MachineSpec>, Vec<FleetChange>)> {
        let mut machines = vec![cachemate_spec::load_machine(&spec.machine)?];
        let mut changes = Vec::new();
        for question in &self.what_if {
            changes.push(match question {
                FleetQuestion::OneMoreHost => FleetChange::OneMoreHost,
                FleetQuestion::Partition => FleetChange::Partition(!spec.partition),
                FleetQuestion::OtherMachine => {
                    let Some(machine) = &self.other_machine else {
                        bail!(UsageError(
                            "--what-if other-machine: expected --other-machine MACHINE".to_string(),
                        ));
                    };
                    machines.push(cachemate_spec::load_machine(machine)?);
                    FleetChange::OtherMachine(machines.len() - 1)
                }
            });
        }
        Ok((machines, changes))
    }
}

/// Services of a fleet, read from the files that its description names.
struct FleetInput {
    kinds: Vec<FleetService>,
    /// Index of each pod's kind; `None` without a cluster's export.
    pods: Option<Vec<u16>>,
    unprofiled_count: usize,
}

/// Content of a profile's file: the whole resource, or only its `spec`.
#[derive(Deserialize)]
#[serde(untagged)]
enum ProfileDocument {
    Resource { spec: ProfileSpec },
    Profile(WorkloadProfile),
}

impl FleetInput {
    /// Reads the files that the description names; relative paths are relative to the description.
    fn read(file: &Path, spec: &FleetSpec) -> anyhow::Result<Self> {
        let dir = file.parent().unwrap_or(Path::new("."));
        let mut kinds: Vec<FleetService> = Vec::new();
        for service in &spec.services {
            let mut service = service.clone();
            if let Some(path) = &service.profile_file {
                service.profile = Some(read_profile(&dir.join(path))?);
            }
            kinds.push(service.kind());
        }
        if let Some(draw) = &spec.draw {
            kinds.extend(draw_kinds(draw, spec.seed));
        }
        let Some(cluster) = &spec.cluster else {
            return Ok(FleetInput {
                kinds,
                pods: None,
                unprofiled_count: 0,
            });
        };
        let path = dir.join(cluster);
        let name = path.display();
        let text = crate::files::read_text(&path, MAX_FILE_BYTES)?;
        let list: PodList = serde_json::from_str(&text).map_err(|error| {
            anyhow::anyhow!("{name}: {error}; expected the JSON of kubectl get pods -A -o json")
        })?;
        let services =
            cluster_services(&list, &kinds).map_err(|error| anyhow::anyhow!("{name}, {error}"))?;
        Ok(FleetInput {
            kinds: services.kinds,
            pods: Some(services.pods),
            unprofiled_count: services.unprofiled_pods,
        })
    }
}

/// Reads and checks the content of a `WorkloadProfile`.
pub fn read_profile(path: &Path) -> anyhow::Result<WorkloadProfile> {
    let name = path.display();
    let text = crate::files::read_text(path, MAX_FILE_BYTES)?;
    let document: ProfileDocument = serde_json::from_str(&text)
        .map_err(|error| anyhow::anyhow!("{name}: {error}; expected a WorkloadProfile in JSON"))?;
    let profile = match document {
        ProfileDocument::Resource { spec } => spec.profile,
        ProfileDocument::Profile(profile) => profile,
    };
    if let Err(error) = profile.check() {
        bail!("{name}, {error}");
    }
    Ok(profile)
}

fn render_outcome(
    spec: &FleetSpec,
    outcome: &FleetOutcome,
    result: &FleetResult,
    elapsed: Duration,
) -> String {
    let promise_text = result.promise.map_or("unknown".to_string(), |promise| {
        format!("{:.1} %", promise * 100.0)
    });
    format!(
        "{}: {} services on {} hosts ({}), {} h of nominal time, seed {}\n\n{}\npromise: {promise_text} of the limits; {} s of \
         processor time, {} s elapsed\n",
        spec.name,
        outcome.services,
        outcome.hosts,
        spec.machine,
        format_number(spec.hours),
        outcome.seed,
        result.table().text(),
        format_number(outcome.cpu_seconds),
        format_number(elapsed.as_secs_f64())
    )
}
