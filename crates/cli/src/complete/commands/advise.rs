//! `cachemate advise`: advises, with reasons, where to run programs on this host before they are started.

use anyhow::Context;
use cachemate_core::Topology;
use cachemate_linux::kernel::LinuxHost;
use cachemate_linux::sense::sched_cache;
use cachemate_papers::placement::{Placement, place};
use cachemate_papers::schemes::{self, SharedCache};
use cachemate_report::terminal::plan_boxes;
use cachemate_study::{DEFAULT_SCHEME, KernelFootprint, ProfileTarget, pair_costs, plan_result};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::slurm_node::AdviseSlurmNode;
use crate::args::JsonArg;
use crate::commands::status::SocketArg;
use crate::commands::topology::as_machine::{self, HostFacts};
use crate::complete::prediction::{INTERVAL_MODEL, interval_costs};
use crate::complete::programs::{ProfiledInput, load_all};
use crate::host_machine;
use crate::session::Session;
use cachemate_daemon::{host, socket};
use cachemate_page::describe_thread;

/// Advise where to run programs on this host before they are started, with reasons
///
/// A program is a profile file, a recording, or the name of a bundled recording. The caches are this host's; latencies
/// are assumed, and the answer lists the assumptions. Nothing is started or changed. If a daemon is running, the
/// programs that it manages are listed with the plan.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Advise {
    #[command(subcommand)]
    other: Option<AdviseCommand>,
    /// Profile files, recordings, or names of bundled recordings
    #[arg(value_name = "PROGRAM", required = true)]
    programs: Vec<String>,
    /// Model that predicts slowdowns: interval, statcc, sdc, pain, animal, miss-rate, access-rate, ...
    #[arg(long, value_name = "MODEL", default_value = INTERVAL_MODEL)]
    model: String,
    #[command(flatten)]
    socket: SocketArg,
    #[command(flatten)]
    json: JsonArg,
}

#[derive(Subcommand)]
enum AdviseCommand {
    SlurmNode(AdviseSlurmNode),
}

/// `cachemate advise --json`.
#[derive(Serialize)]
struct AdviseJson<'a> {
    model: &'a str,
    cache_bytes: u64,
    /// Names of figures that were assumed because the kernel does not report them.
    assumed: Vec<String>,
    /// State of the kernel's cache-aware scheduling on this host.
    kernel: String,
    /// Verdict of the kernel's footprint test on each program, compared with the program's own curve.
    footprints: Vec<FootprintJson>,
    /// Programs that a daemon manages at present.
    running: Vec<RunningJson>,
    #[serde(flatten)]
    placement: &'a Placement,
}

#[derive(Serialize)]
struct FootprintJson {
    program: String,
    #[serde(flatten)]
    judged: KernelFootprint,
}

#[derive(Serialize)]
struct RunningJson {
    name: String,
    pid: i32,
    cpu: Option<u32>,
    cache: Option<u32>,
    intensity: Option<f64>,
}

/// Assumed figures, typical of current server processors: latencies of a miss and of a hit in cycles, instructions
/// per cycle and in flight, and misses in flight.
const MISS_CYCLES: f64 = 250.0;
const HIT_CYCLES: f64 = 45.0;
const ISSUE_WIDTH: f64 = 4.0;
const WINDOW: f64 = 256.0;
const MISSES_AT_ONCE: f64 = 12.0;

impl Advise {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if let Some(AdviseCommand::SlurmNode(command)) = &self.other {
            return command.run(session);
        }

        let host = host::survey_host(false)?;
        let (cache, target, mut assumed) = survey_shared_cache(&host.topology)?;
        let programs = load_all(session, &self.programs, target)?;
        let names: Vec<String> = programs
            .iter()
            .map(|program| program.name.clone())
            .collect();
        let built_machine = (self.model == INTERVAL_MODEL).then(|| {
            let calibration = host_machine::find_or_measure(session, &host.topology);
            as_machine::build_machine(
                "this host",
                &host.topology,
                HostFacts::read("/".as_ref()),
                calibration.as_ref(),
            )
        });
        let (model, costs) = match built_machine {
            Some(Ok(machine)) => {
                let (costs, bases) = interval_costs(&programs, &machine)?;
                assumed.push("the machine as topology --as-machine prints it".into());
                assumed.extend(
                    names
                        .iter()
                        .zip(bases)
                        .map(|(name, basis)| format!("{name}: {}", basis.describe())),
                );
                (INTERVAL_MODEL, costs)
            }
            described => {
                let model = if described.is_some() {
                    DEFAULT_SCHEME
                } else {
                    self.model.as_str()
                };
                if let Some(Err(error)) = described {
                    assumed.push(format!(
                        "model {model}, because this host has no machine description: {error:#}"
                    ));
                }
                let profiles: Vec<_> = programs.iter().map(|program| &program.profile).collect();
                (
                    model,
                    pair_costs(
                        schemes::find_scheme(model)?.as_ref(),
                        &names,
                        &profiles,
                        &cache,
                    )?,
                )
            }
        };
        let placement = place(&names, &costs, &costs, &host.topology, 0)?;
        assumed.extend(host.warnings);
        let footprint_of = |program: &ProfiledInput| {
            KernelFootprint::from_profile(&program.file, cache.size_bytes)
        };
        let footprint_row = |program: &ProfiledInput| {
            Some(FootprintJson {
                program: program.name.clone(),
                judged: footprint_of(program)?,
            })
        };
        let kernel = sched_cache::read(&LinuxHost::new("/"));
        let result = AdviseJson {
            model,
            cache_bytes: cache.size_bytes,
            assumed,
            kernel: kernel.detail.clone(),
            footprints: programs.iter().filter_map(footprint_row).collect(),
            running: self.query_running_tasks(),
            placement: &placement,
        };
        session.print_result(self.json.json, &result, || {
            let mut text = plan_boxes(
                &plan_result(&placement, "this host", model, costs.kind),
                session.paint(),
            );
            result
                .assumed
                .iter()
                .for_each(|assumption| text.push_str(&format!("assumed: {assumption}\n")));
            text.push_str(&format!(
                "the kernel's cache-aware scheduling: {}\n",
                result.kernel
            ));
            for footprint in result
                .footprints
                .iter()
                .filter(|footprint| kernel.is_aggregating() || footprint.judged.is_misjudged())
            {
                text.push_str(&format!("{} {}\n", footprint.program, footprint.judged));
            }
            for task in &result.running {
                let cpu = task
                    .cpu
                    .map_or(String::new(), |cpu| format!(" on CPU {cpu}"));
                let intensity = task
                    .intensity
                    .map_or(String::new(), |value| format!(", intensity {value:.2}"));
                text.push_str(&format!(
                    "running now{cpu}: {}{intensity}\n",
                    describe_thread(&task.name, task.pid)
                ));
            }
            text
        })
    }

    /// Programs that a running daemon manages; empty without a daemon, because advice does not need one.
    fn query_running_tasks(&self) -> Vec<RunningJson> {
        let Ok(status) = socket::query_status(&self.socket.path()) else {
            return Vec::new();
        };
        let busy_tasks = status
            .snapshot
            .tasks
            .into_iter()
            .filter(|task| task.cpu_share.is_some_and(|share| share >= 0.05));
        busy_tasks
            .map(|task| RunningJson {
                name: task.name,
                pid: task.pid,
                cpu: task.cpu,
                cache: task.cache,
                intensity: task.intensity.map(|intensity| intensity.value),
            })
            .collect()
    }
}

/// The host's contended cache, as model and as profiling target, and the assumptions about it.
fn survey_shared_cache(
    topology: &Topology,
) -> anyhow::Result<(SharedCache, ProfileTarget, Vec<String>)> {
    let cache = topology
        .last_level_caches()
        .next()
        .context("the kernel reports no last-level cache")?;
    let mut assumed = vec![format!(
        "{MISS_CYCLES} cycles a miss, {HIT_CYCLES} a hit, {ISSUE_WIDTH} instructions a cycle, {WINDOW} in flight"
    )];
    let mut value_or_assumed = |value: Option<u64>, assumed_value: u64, label: &str| {
        value.unwrap_or_else(|| {
            assumed.push(format!(
                "{assumed_value} {label} (not reported by the kernel)"
            ));
            assumed_value
        })
    };
    let size_bytes = value_or_assumed(cache.size_bytes, 32 << 20, "bytes of last-level cache");
    let ways = value_or_assumed(cache.ways.map(u64::from), 16, "ways") as u32;
    let line_bytes = value_or_assumed(cache.line_bytes.map(u64::from), 64, "bytes a line") as u32;
    let cache_model = SharedCache {
        hit_latency_cycles: HIT_CYCLES,
        issue_width: ISSUE_WIDTH,
        window_instructions: WINDOW,
        max_overlapping_misses: MISSES_AT_ONCE,
        ..SharedCache::new(size_bytes, ways, line_bytes, MISS_CYCLES)
    };
    Ok((
        cache_model,
        ProfileTarget {
            level: cache.level,
            size_bytes,
            ways,
            line_bytes,
            slices: 1,
        },
        assumed,
    ))
}
