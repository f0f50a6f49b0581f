//! This host as a machine, and a policy for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use cachemate_core::{
    Ability, CacheLevel, Capabilities, Machine, PolicyConfig, Profile, RunHeader, ServiceProfiles,
    Support, Topology, WindowLength,
};
use cachemate_linux::act::actuator::GuardianCommand;
use cachemate_linux::act::colors;
use cachemate_linux::act::gang_scheduler;
use cachemate_linux::act::group_owners::GroupOwners;
use cachemate_linux::act::resctrl::{self, Resctrl};
use cachemate_linux::act::rules::{ManageAction, ManageRule};
use cachemate_linux::kernel::LinuxHost;
use cachemate_linux::machine::{LiveMachine, LiveOptions};
use cachemate_linux::nri::NriChannels;
use cachemate_linux::safety::actuation_lock::ActuationLock;
use cachemate_linux::sense::capability_survey::{
    CapabilitySurvey, policy_capabilities, survey_capabilities, test_probe,
};
use cachemate_linux::sense::counters::{EventSurvey, survey};
use cachemate_linux::sense::miss_cost;
use cachemate_linux::sense::progress::ProgressReports;
use cachemate_linux::sense::topology::read_topology;
use cachemate_pipeline::POLICIES;
use cachemate_pipeline::{
    Pipeline, PipelineLoop, StandardPipeline, UnavailableEvidence, VerifiedPolicy, with_size_sweeps,
};
use cachemate_spec::{
    ManageConfig, ManageMode, PolicyChoice, PromiseSource, RuleAction, RuleConfig, User,
};
use cachemate_trace::ProfileFile;

#[cfg(feature = "chaos")]
use crate::chaos_policies::chaos_policy;

/// A loop over this host.
pub type LiveLoop = PipelineLoop<LiveMachine<LinuxHost>>;

/// A loop over this host, and the header of its run log.
pub struct LiveRun {
    /// The loop at its start.
    pub control_loop: LiveLoop,
    /// First line of a run log.
    pub header: RunHeader,
    /// Evidence that the policy requests and this host cannot provide.
    pub missing_evidence: Vec<UnavailableEvidence>,
}

/// Instructions that a counter reading must cover to count (a second's worth at a low rate).
const MIN_READING_INSTRUCTIONS: f64 = 1e8;
/// Instructions that a window must cover to be a point of a size sweep.
const MIN_WINDOW_INSTRUCTIONS: f64 = 1e6;

/// The evidence level that depends on a calibration.
pub const PROBE_LEVEL: u32 = 2;
/// The evidence level while the calibration fails.
const TOPOLOGY_ONLY: u32 = 3;
/// Time between the first failed calibration and the next one; each further failure doubles it, because a calibration
/// takes up to a second of CPU time, and on some hosts none ever succeeds.
const MIN_CALIBRATION_PERIOD: Duration = Duration::from_secs(120);
const MAX_CALIBRATION_PERIOD: Duration = Duration::from_secs(3_600);

/// Survey of this host.
pub struct HostSurvey {
    /// CPUs and caches, as the kernel reports them.
    pub topology: Topology,
    /// Implausible properties of the topology.
    pub warnings: Vec<String>,
    /// Counters that were tested.
    pub event_surveys: Vec<EventSurvey>,
    /// Other facilities, with remedies for those that are missing.
    pub capability_survey: CapabilitySurvey,
    /// The resctrl file system, if it is mounted.
    pub resctrl: Option<Resctrl>,
}

/// Reads and tests this host. With `must_calibrate`, the probe is calibrated too.
///
/// # Errors
/// The kernel's description of the CPUs cannot be read.
pub fn survey_host(must_calibrate: bool) -> anyhow::Result<HostSurvey> {
    let host_topology =
        read_topology(Path::new("/")).context("cannot read the caches of this host")?;
    let kernel = LinuxHost::new("/");
    let event_surveys = survey(&kernel, last_level(&host_topology.topology));
    let resctrl = resctrl::find(&kernel, &host_topology);
    let capability_survey = survey_capabilities(
        &kernel,
        &host_topology.topology,
        &resctrl,
        &event_surveys,
        must_calibrate,
    );
    Ok(HostSurvey {
        topology: host_topology.topology,
        warnings: host_topology.warnings,
        event_surveys,
        capability_survey,
        resctrl: resctrl.ok(),
    })
}

/// The evidence level with a calibrated probe.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct ProbedLevel {
    /// `None` while the probe is calibrated for the first time.
    pub level: Option<u32>,
    /// Why the last calibration failed.
    pub problem: Option<String>,
}

/// A [`ProbedLevel`] that a calibration in another thread changes.
#[derive(Clone, Default)]
pub(crate) struct SharedLevel(Arc<Mutex<ProbedLevel>>);

impl SharedLevel {
    pub fn get(&self) -> ProbedLevel {
        self.0.lock().map(|level| level.clone()).unwrap_or_default()
    }

    fn set(&self, level: u32, problem: Option<String>) {
        if let Ok(mut shared) = self.0.lock() {
            *shared = ProbedLevel {
                level: Some(level),
                problem,
            };
        }
    }
}

/// Determines the evidence level with a calibrated probe, as `doctor` does, but in at most 32 MiB. The calibration runs in
/// a separate thread, so that the daemon does not wait for it; a failed one is repeated.
pub(crate) fn start_calibration(host_survey: &HostSurvey) -> SharedLevel {
    let shared = SharedLevel::default();
    let surveyed_level = host_survey.capability_survey.level;
    if surveyed_level != PROBE_LEVEL {
        shared.set(surveyed_level, None);
        return shared;
    }
    let thread_level = shared.clone();
    let topology = host_survey.topology.clone();
    let spawn_result = std::thread::Builder::new()
        .name("cachemate-calibr".into())
        .spawn(move || {
            // A busy minute blurs the calibration, so a failed one is repeated while the daemon lives.
            let mut period = MIN_CALIBRATION_PERIOD;
            while let Err(error) = test_probe(&topology) {
                thread_level.set(TOPOLOGY_ONLY, Some(error.to_string()));
                std::thread::sleep(period);
                period = (2 * period).min(MAX_CALIBRATION_PERIOD);
            }
            thread_level.set(PROBE_LEVEL, None);
        });
    if spawn_result.is_err() {
        shared.set(surveyed_level, None);
    }
    shared
}

fn last_level(topology: &Topology) -> CacheLevel {
    topology
        .last_level_caches()
        .next()
        .map_or(CacheLevel::L3, |cache| cache.level)
}

/// Options of one managed run, from a configuration or a command line.
pub struct LiveRunOptions {
    /// Policy, guard, windows, groups.
    pub config: ManageConfig,
    /// Rules that select the managed programs.
    pub rules: Vec<ManageRule>,
    /// Directory of the restore journal.
    pub state_dir: PathBuf,
    /// Reports of the programs' progress.
    pub progress: ProgressReports,
    /// Profiles of services' programs from earlier runs.
    pub learned_profiles: ServiceProfiles,
    /// The plugin of a container runtime; `None` if none is registered.
    pub runtime: Option<NriChannels>,
    /// Ends the loop.
    pub stop: Arc<AtomicBool>,
    /// Ends the current window.
    pub wake: Arc<AtomicBool>,
}

/// A loop over this host, at its start.
///
/// # Errors
/// An unknown policy or invalid parameters, a profile that cannot be read, or a state directory that cannot be created.
pub fn build_live_run(
    host_survey: &HostSurvey,
    run_options: &LiveRunOptions,
) -> anyhow::Result<LiveRun> {
    let should_act = run_options.config.mode == ManageMode::Act;
    if should_act {
        crate::paths::create_private_dir(&run_options.state_dir)?;
    }
    let window = window_length(&run_options.config);
    let resctrl = host_survey.resctrl.as_ref();
    let mut capabilities: Capabilities = policy_capabilities(
        &host_survey.capability_survey,
        resctrl.map(Resctrl::partitions).unwrap_or_default(),
        resctrl.map(Resctrl::bandwidth_limits).unwrap_or_default(),
        window.as_nanos() as u64,
    );
    let (color_support, color_partitions) = match colors::survey_partitions(&host_survey.topology) {
        Ok(color_partitions) => (
            Support::Yes {
                note: Some(colors::describe_partitions(&color_partitions)),
            },
            color_partitions,
        ),
        Err(missing) => (
            Support::No {
                reason: missing.reason,
                remedy: missing.remedy,
            },
            Vec::new(),
        ),
    };
    capabilities
        .abilities
        .insert(Ability::Colors, color_support);
    capabilities.partitions.extend(color_partitions);
    let state_dir = run_options.state_dir.display().to_string();
    let options = LiveOptions {
        rules: run_options.rules.clone(),
        cpusets: run_options.config.cpusets.clone(),
        should_act,
        state_dir: run_options.state_dir.clone(),
        guardian: GuardianCommand {
            // After an upgrade, the path by which this process was started may name another file.
            program: PathBuf::from("/proc/self/exe"),
            args: ["restore", "--guardian", "--state-dir", &state_dir]
                .map(str::to_string)
                .to_vec(),
        },
        first_window: window.min(Duration::from_millis(100)),
        probe_share: 0.5,
        progress: run_options.progress.clone(),
        resctrl: host_survey.resctrl.clone(),
        gang_scheduler_socket: gang_scheduler_socket(&run_options.config),
        learned_profiles: run_options.learned_profiles.clone(),
        directory: run_options
            .runtime
            .as_ref()
            .map(|runtime| runtime.directory.clone())
            .unwrap_or_default(),
        starts: run_options
            .runtime
            .as_ref()
            .map(|runtime| runtime.starts.clone())
            .unwrap_or_default(),
        known_profiles: read_known_profiles(&run_options.config.profiles)?,
        actuation_lock: if should_act {
            Some(acquire_actuation_lock(&run_options.state_dir)?)
        } else {
            None
        },
        stop_flag: run_options.stop.clone(),
        wake_flag: run_options.wake.clone(),
    };
    let owners = run_options
        .runtime
        .clone()
        .map(|runtime| GroupOwners::with_runtime(runtime.directory, runtime.updates));
    let kernel = LinuxHost::new("/").with_owners(owners.unwrap_or_default());
    let machine = LiveMachine::new(
        kernel,
        host_survey.topology.clone(),
        capabilities,
        host_survey.event_surveys.clone(),
        options,
    );
    let pipeline = build_pipeline(
        &run_options.config,
        &host_survey.topology,
        machine.capabilities(),
    )?;
    let (header, missing_evidence) = (
        pipeline.build_run_header(&machine),
        pipeline.missing_evidence(&machine),
    );
    Ok(LiveRun {
        control_loop: pipeline.start(machine),
        header,
        missing_evidence,
    })
}

/// Acquires the right to act. Each user has one such right.
///
/// # Errors
/// Another process acts, or crashed and left a journal.
pub(crate) fn acquire_actuation_lock(state_dir: &Path) -> anyhow::Result<Arc<ActuationLock>> {
    // Maximum time that a guardian may need to restore the host.
    const MAX_RESTORE_WAIT: Duration = Duration::from_secs(10);
    let lock_paths = crate::paths::actuation_lock_paths()?;
    match ActuationLock::acquire(
        &LinuxHost::new("/"),
        &lock_paths,
        state_dir,
        MAX_RESTORE_WAIT,
    )? {
        Some(actuation_lock) => Ok(Arc::new(actuation_lock)),
        None => bail!(
            "{}: another cachemate acts, of this user or of root; with --observe-only this one changes nothing",
            lock_paths.lock.display()
        ),
    }
}

/// The socket of the gang scheduler; `None` if gangs are implemented by idle turns.
fn gang_scheduler_socket(config: &ManageConfig) -> Option<PathBuf> {
    match &config.gang_scheduler_socket {
        None => Some(PathBuf::from(gang_scheduler::SOCKET)),
        Some(path) => (path.as_os_str() != "off").then(|| path.clone()),
    }
}

fn window_length(config: &ManageConfig) -> Duration {
    Duration::from_millis(config.window_ms.unwrap_or(1000))
}

/// The standard pipeline of this host under the configuration.
///
/// # Errors
/// An unknown policy, or parameters that it does not accept.
fn build_pipeline(
    config: &ManageConfig,
    topology: &Topology,
    capabilities: &Capabilities,
) -> anyhow::Result<Pipeline> {
    let standard_pipeline = StandardPipeline {
        policy: policy_config(config),
        guard: config.rollback.guard_config(),
        counted_instructions: MIN_READING_INSTRUCTIONS,
        predictor: miss_cost::measure(topology),
        watches_code: false,
        first_window: WindowLength::Time {
            ns: window_length(config).as_nanos() as u64,
        },
    };
    let pipeline_config = with_size_sweeps(
        standard_pipeline.for_machine(topology, capabilities),
        MIN_WINDOW_INSTRUCTIONS,
    );
    Ok(match chaos_policy(&pipeline_config.policy) {
        Some(policy) => Pipeline::with_policy(pipeline_config, policy),
        None => Pipeline::build(pipeline_config)?,
    })
}

/// The policy if the configuration names none. No task is moved unless the mode is `act`.
const DEFAULT_POLICY: &str = "auto";

/// The configured policy, or the default one. Its windows are as long as the configured `window_ms`, unless its own
/// parameters give a length or it has none.
pub(crate) fn policy_config(config: &ManageConfig) -> PolicyConfig {
    let PolicyChoice { name, parameters } = config.policy.clone().unwrap_or(PolicyChoice {
        name: DEFAULT_POLICY.into(),
        parameters: Default::default(),
    });
    if let Some(window_ms) = config.window_ms
        && !parameters.contains_key("window_ns")
    {
        let window_ns = i64::try_from(window_ms.saturating_mul(1_000_000)).unwrap_or(i64::MAX);
        let mut with_window = parameters.clone();
        with_window.insert("window_ns".to_string(), window_ns.into());
        let with_window = with_window.to_string();
        if POLICIES.build(&name, &with_window, config.seed).is_ok() {
            return PolicyConfig {
                name,
                parameters: with_window,
                seed: config.seed,
            };
        }
    }

    PolicyConfig {
        name,
        parameters: parameters.to_string(),
        seed: config.seed,
    }
}

/// Always `None`, because this build lacks the chaos policies, which only tests use.
#[cfg(not(feature = "chaos"))]
fn chaos_policy(_: &PolicyConfig) -> Option<Box<dyn cachemate_core::Policy>> {
    None
}

/// The configured policy under its guard.
///
/// # Errors
/// An unknown policy, or parameters that it does not accept.
pub fn build_verified_policy(config: &ManageConfig) -> anyhow::Result<VerifiedPolicy> {
    let policy = policy_config(config);
    let unguarded_policy = match chaos_policy(&policy) {
        Some(chaos_policy) => chaos_policy,
        None => POLICIES.build(&policy.name, &policy.parameters, policy.seed)?,
    };
    Ok(VerifiedPolicy::new(
        unguarded_policy,
        config.rollback.guard_config(),
    ))
}

/// The configured rules in the machine's form.
pub(crate) fn manage_rules(rules: &[RuleConfig]) -> Vec<ManageRule> {
    let build_rule = |rule: &RuleConfig| ManageRule {
        command: rule.command.clone(),
        cgroup: rule.cgroup.clone(),
        pid: rule.pid,
        meant_process: Default::default(), // the machine binds the rule to a process
        user: match rule.user {
            Some(User::Id(id)) => Some(id),
            _ => None, // names became numbers when the file was read
        },
        service: rule.service.clone(),
        kind: rule.kind,
        namespace: rule.namespace.clone(),
        labels: rule.labels.clone(),
        takes_promises_from_labels: rule.promises_from == Some(PromiseSource::Labels),
        progress_file: rule.progress_file.clone(),
        action: match rule.action {
            RuleAction::Manage => ManageAction::Manage(rule.goal()),
            RuleAction::Observe => ManageAction::Observe,
            RuleAction::Ignore => ManageAction::Ignore,
        },
    };
    rules.iter().map(build_rule).collect()
}

/// Profile files, including those in directories, by the first 15 bytes of the program's name.
pub(crate) fn read_known_profiles(paths: &[PathBuf]) -> anyhow::Result<BTreeMap<String, Profile>> {
    let mut profiles = BTreeMap::new();
    for path in paths {
        let files = if path.is_dir() {
            let mut files = cachemate_files::list_dir(path)
                .with_context(|| format!("{}: cannot be read", path.display()))?;
            files.retain(|file| {
                file.extension()
                    .is_some_and(|extension| extension == "json")
            });
            files
        } else {
            vec![path.clone()]
        };
        for file in files {
            let profile_file = ProfileFile::read(&file)?;
            let name_len = (0..=profile_file.program.len().min(15))
                .rev()
                .find(|&index| profile_file.program.is_char_boundary(index))
                .unwrap_or(0);
            if profiles
                .insert(
                    profile_file.program[..name_len].to_string(),
                    profile_file.profile,
                )
                .is_some()
            {
                bail!(
                    "{}: a second profile of '{}'",
                    file.display(),
                    profile_file.program
                );
            }
        }
    }
    Ok(profiles)
}

#[cfg(all(test, not(feature = "chaos")))]
mod tests {
    use super::*;

    /// Is a window as long as `window_ms`, unless the policy's own parameters say otherwise?
    #[test]
    fn windows_of_a_policy_are_as_long_as_configured() {
        let parameters_of = |text: &str| {
            let config = cachemate_spec::parse_manage_config("c.toml", text, &|_| None)
                .expect("a valid configuration");
            policy_config(&config).parameters.replace(' ', "")
        };
        let own = "window_ms=500\npolicy={name=\"auto\",parameters={window_ns=7}}";
        assert_eq!(parameters_of("window_ms=500").trim(), "window_ns=500000000");
        assert_eq!(parameters_of(own).trim(), "window_ns=7");
        assert_eq!(parameters_of("").trim(), "");
    }

    /// Does a daemon as shipped reject the policies that only tests use?
    #[test]
    fn policies_of_tests_are_not_shipped() {
        for name in ["shake", "squeeze", "astray"] {
            let choice = PolicyChoice {
                name: name.to_string(),
                parameters: Default::default(),
            };
            let config = ManageConfig {
                policy: Some(choice),
                ..ManageConfig::default()
            };
            let error = build_verified_policy(&config)
                .map(|_| ())
                .unwrap_err()
                .to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
