//! The life of the daemon: acquire the lock, restore what an earlier run left changed, run the loop, reload, restore
//! the host.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_core::{ControlLoopError, Forecast, Machine, Plan, RunHeader, WindowRecord};
use cachemate_linux::act::group_owners::GroupOwners;
use cachemate_linux::kernel::{LinuxHost, lock};
use cachemate_linux::nri::NriOptions;
use cachemate_linux::safety::guardian::{DaemonLock, RecoveryReport, restore_left_behind};
use cachemate_linux::safety::restore::{RestoreOutcome, RestoredObject};
use cachemate_linux::sense::miss_cost::cycle_ns;
use cachemate_linux::sense::progress::ProgressReports;
use cachemate_page::serve::page::PageAddress;
use cachemate_page::{Snapshot, SnapshotBuilder};
use cachemate_spec::{ManageConfig, ManageMode, User, load_manage_config};
use cachemate_trace::RunLogWriter;
use sd_notify::NotifyState;

use crate::endpoints::Endpoints;
use crate::host::{self, LiveLoop, LiveRunOptions, SharedLevel};
use crate::host_means::describe_means;
use crate::loss_history::{HistoryRecorder, unix_time_s};
use crate::metrics::{MetricsAddress, MetricsTextfile};
use crate::paths;
use crate::service_watch::ServiceWatch;
pub use crate::socket::ControlFlags;
use crate::socket::{self, SharedStatus};
use crate::status::{DaemonParts, DaemonStatus, StatusTracker, describe_evidence_level};

/// Maximum time that a start waits for a guardian that is restoring the host.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// The configuration, and the command-line options that override it.
#[derive(Clone)]
pub struct ConfigSource {
    /// The configuration file; `None` for the default one.
    pub file: Option<PathBuf>,
    /// Was the file named explicitly? If so, its absence is an error.
    pub is_named: bool,
    /// Policy that overrides the configured one.
    pub policy: Option<String>,
    /// If true, change nothing, whatever the configuration says.
    pub is_observe_only: bool,
    /// State directory that overrides the configured one.
    pub state_dir: Option<PathBuf>,
    /// Socket that overrides the configured one.
    pub socket: Option<PathBuf>,
    /// Address of the dashboard; `None` for no dashboard.
    pub page: Option<PageAddress>,
    /// The plugin of the container runtime; `None` if containers are identified by their control groups only.
    pub nri: Option<NriOptions>,
}

impl ConfigSource {
    /// The path of the configuration, whether or not the file exists.
    pub fn path(&self) -> PathBuf {
        self.file.clone().unwrap_or_else(paths::config_file)
    }

    /// Describes a missing configuration; `None` if the file exists.
    pub fn describe_absence(&self) -> Option<String> {
        let path = self.path();
        let message = "no such file, so the defaults apply and no program is managed; [[rules]] select programs";
        (!cachemate_files::path_exists(&path)).then(|| format!("{}: {message}", path.display()))
    }

    /// Reads the configuration and applies the overriding options.
    ///
    /// # Errors
    /// The file cannot be read, or is invalid; the error names the line.
    pub fn read(&self) -> anyhow::Result<ManageConfig> {
        let file = self.path();
        let mut config = match cachemate_files::path_exists(&file) || self.is_named {
            true => load_manage_config(&file.display().to_string(), &paths::find_user_id)?,
            false => ManageConfig::default(),
        };
        if let Some(name) = &self.policy {
            let is_configured_policy = config
                .policy
                .as_ref()
                .is_some_and(|choice| choice.name == *name);
            if !is_configured_policy {
                let name = name.clone();
                config.policy = Some(cachemate_spec::PolicyChoice {
                    name,
                    parameters: Default::default(),
                });
            }
        }
        if self.is_observe_only {
            config.mode = ManageMode::Observe;
        }
        config.state_dir = self
            .state_dir
            .clone()
            .or(config.state_dir)
            .or_else(|| Some(paths::state_dir()));
        config.socket = self
            .socket
            .clone()
            .or(config.socket)
            .or_else(|| Some(paths::default_socket()));
        let is_policy_from_file = self.policy.is_none();
        host::build_verified_policy(&config).map_err(|error| match is_policy_from_file {
            true => error.context(file.display().to_string()),
            false => error,
        })?;
        Ok(config)
    }
}

/// Runs the daemon until it is stopped, and restores the host before returning.
///
/// # Errors
/// Another daemon runs, an earlier run could not be restored completely, the host cannot be read, or a step failed. In
/// each case all changes have been restored, or are recorded in the journal.
pub fn run(
    source: &ConfigSource,
    flags: &ControlFlags,
    report: &dyn Fn(&str),
) -> anyhow::Result<()> {
    let start_time = Instant::now();
    let config = source.read()?;
    let state_dir = config.state_dir.clone().unwrap_or_else(paths::state_dir);
    paths::create_private_dir(&state_dir)?;
    let Some(_lock) = DaemonLock::acquire_within(&state_dir, LOCK_TIMEOUT)? else {
        bail!("another daemon holds {}", state_dir.display());
    };
    let recovery = restore_left_behind(
        &LinuxHost::new("/").with_owners(GroupOwners::default()),
        &state_dir,
    )?;
    report_damage(&recovery, report);
    report_failures(&recovery.restored_objects, report)?;
    let host_survey = host::survey_host(false)?;
    let progress = ProgressReports::default();
    let service_watch =
        ServiceWatch::start(&state_dir, &config, source.nri.clone(), flags.wake.clone())?;
    let options = LiveRunOptions {
        rules: host::manage_rules(&config.rules),
        learned_profiles: service_watch.profile_store.read(report),
        runtime: service_watch.nri_channels(),
        state_dir,
        progress,
        stop: flags.stop.clone(),
        wake: flags.wake.clone(),
        config,
    };
    let host::LiveRun {
        control_loop: mut live,
        header,
        missing_evidence,
    } = host::build_live_run(&host_survey, &options)?;
    missing_evidence
        .iter()
        .for_each(|evidence| report(&evidence.to_string()));
    let shared_status = new_shared_status(&options, flags);
    let missing_config = source.describe_absence();
    missing_config.iter().for_each(|absence| report(absence));
    let shared_level = host::start_calibration(&host_survey);
    let probed = shared_level.get();
    let means = describe_means(live.machine.topology(), live.machine.capabilities());
    let status = DaemonStatus {
        config: missing_config
            .is_none()
            .then(|| source.path().display().to_string()),
        version: env!("CARGO_PKG_VERSION").to_string(),
        pid: std::process::id(),
        level: host_survey.capability_survey.level,
        calibrated: probed.level.is_some(),
        hertz: Some(1e9 / cycle_ns(live.machine.topology())),
        mode: options.config.mode,
        policy: live.policy_name.clone(),
        colors: Some(describe_colors(&live)),
        means: Some(means.clone()),
        state_dir: Some(options.state_dir.display().to_string()),
        ..DaemonStatus::default()
    };
    let mut status_tracker = StatusTracker::new(status, &header, start_time);
    publish(&shared_status, &status_tracker);
    let socket_path = options
        .config
        .socket
        .clone()
        .unwrap_or_else(paths::default_socket);
    let _server = socket::serve(&socket_path, shared_status.clone())?;
    let metrics_address = MetricsAddress::from_config(&options.config)?;
    let create_textfile = |path: &PathBuf| MetricsTextfile::create(path, shared_status.clone());
    let _textfile = options
        .config
        .metrics_textfile
        .as_ref()
        .map(create_textfile)
        .transpose()?;
    let endpoints = Endpoints::open(
        metrics_address,
        source.page.as_ref(),
        &shared_status,
        &header,
        report,
    )?;
    status_tracker
        .status
        .unavailable
        .clone_from(&endpoints.unavailable);
    publish(&shared_status, &status_tracker);
    let log = create_run_log(&options.config, &header)?;
    // An error means that systemd did not start this process, so there is nothing to notify.
    let _ = sd_notify::notify(false, &[NotifyState::Ready]);
    report(&format!(
        "{} with policy '{}', {} (cachemate doctor); socket {}",
        if options.config.mode == ManageMode::Act {
            "managing"
        } else {
            "observing only"
        },
        live.policy_name,
        describe_evidence_level(
            host_survey.capability_survey.level,
            probed.level.is_some(),
            None
        ),
        socket_path.display()
    ));
    report(&format!("this host: {means}"));
    let sinks = WindowSinks {
        history: HistoryRecorder::new(&options.state_dir),
        shared_status,
        log,
        endpoints,
        header,
        services: service_watch,
    };
    live.machine
        .set_heartbeat(|| _ = sd_notify::notify(false, &[NotifyState::Watchdog]));
    let outcome = WindowLoop {
        source,
        flags,
        builder: SnapshotBuilder::new(&sinks.header),
        control_loop: &mut live,
        status_tracker,
        sinks,
        shared_level,
        report,
    }
    .run();
    let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
    let restored_objects = live.machine.restore_all()?;
    report_failures(&restored_objects, report)?;
    outcome
}

/// The page colors that this daemon can use, for the status. `doctor` may report more, because its user may have more
/// rights than the daemon.
fn describe_colors(control_loop: &LiveLoop) -> String {
    use cachemate_core::{Ability, Support};
    match control_loop
        .machine
        .capabilities()
        .abilities
        .get(&Ability::Colors)
    {
        Some(Support::Yes { note }) => note.clone().unwrap_or_default(),
        Some(Support::No {
            reason: why,
            remedy: Some(remedy),
        }) => format!("none: {why} (remedy: {remedy})"),
        Some(Support::No {
            reason: why,
            remedy: None,
        }) => format!("none: {why}"),
        None => "none".to_string(),
    }
}

fn new_shared_status(options: &LiveRunOptions, flags: &ControlFlags) -> SharedStatus {
    SharedStatus {
        flags: flags.clone(),
        allow_users: Arc::new(Mutex::new(allowed_user_ids(&options.config))),
        progress: options.progress.clone(),
    }
}

fn allowed_user_ids(config: &ManageConfig) -> Vec<u32> {
    let numeric_id = |user: &User| match user {
        User::Id(id) => Some(*id),
        User::Name(_) => None, // names became numbers when the file was read
    };
    config.allow_users.iter().filter_map(numeric_id).collect()
}

/// Creates the run log. The file of an earlier run is kept as `PATH.1`.
fn create_run_log(
    config: &ManageConfig,
    header: &RunHeader,
) -> anyhow::Result<Option<RunLogWriter>> {
    let Some(path) = &config.run_log else {
        return Ok(None);
    };
    if path
        .symlink_metadata()
        .is_ok_and(|metadata| metadata.is_file())
    {
        let mut earlier_path = path.clone().into_os_string();
        earlier_path.push(".1");
        std::fs::rename(path, &earlier_path).with_context(|| {
            format!("{}: the earlier run log cannot be renamed", path.display())
        })?;
    }
    Ok(Some(RunLogWriter::create(path, true, header)?))
}

fn publish(shared_status: &SharedStatus, status_tracker: &StatusTracker) {
    lock(&shared_status.flags.status).clone_from(&status_tracker.status);
}

/// Receivers of each window: the control socket, the metrics, the run log, and the dashboard.
struct WindowSinks {
    shared_status: SharedStatus,
    log: Option<RunLogWriter>,
    endpoints: Endpoints,
    header: RunHeader,
    services: ServiceWatch,
    history: HistoryRecorder,
}

/// The loop of the daemon, window by window.
struct WindowLoop<'a> {
    source: &'a ConfigSource,
    flags: &'a ControlFlags,
    control_loop: &'a mut LiveLoop,
    builder: SnapshotBuilder,
    status_tracker: StatusTracker,
    sinks: WindowSinks,
    shared_level: SharedLevel,
    report: &'a dyn Fn(&str),
}

impl WindowLoop<'_> {
    fn run(mut self) -> anyhow::Result<()> {
        let report = self.report;
        loop {
            if self.flags.reload.swap(false, Ordering::Relaxed) {
                self.reload();
            }
            match self.control_loop.step() {
                Ok(Some(record)) => self.pass_on(&record),
                Ok(None) => break,
                Err(ControlLoopError::Plan { bad, window, .. }) => {
                    end_log(&mut self.sinks.log, "a plan was refused", report);
                    if self.status_tracker.refuse_plan(window, &bad) {
                        report(&format!(
                            "the plan of window {window} is invalid, so the previous plan stays in force: {bad}"
                        ));
                    }
                    publish(&self.sinks.shared_status, &self.status_tracker);
                }
                Err(error) => {
                    self.store_what_was_learned();
                    return Err(error.into());
                }
            }
            let _ = sd_notify::notify(false, &[NotifyState::Watchdog]);
        }

        self.store_what_was_learned();
        if let Some(writer) = self.sinks.log {
            writer.finish()?;
        }
        Ok(())
    }

    fn store_what_was_learned(&mut self) {
        self.sinks
            .services
            .store_profiles(self.control_loop, self.report);
        self.sinks.history.write(self.report);
    }

    /// Builds the snapshot of a window, and passes it on to everything that shows or stores it.
    fn pass_on(&mut self, record: &WindowRecord) {
        let WindowLoop {
            control_loop,
            status_tracker,
            sinks,
            report,
            ..
        } = self;
        // If the disk is full, the log ends but the management continues.
        if let Some(Err(error)) = sinks.log.as_mut().map(|writer| writer.push(record)) {
            report(&format!("the run log ends here: {error}"));
            sinks.log = None;
        }

        let host = control_loop.machine.host_report();
        let mut snapshot =
            self.builder
                .build_snapshot(record, control_loop.profiles(), Some(&host));
        let unmatched_rules = sinks
            .services
            .observe(control_loop, &host, &mut snapshot, *report);
        sinks
            .history
            .observe(&snapshot.services, unix_time_s(), *report);

        sinks
            .endpoints
            .retry_unavailable(&sinks.shared_status, &sinks.header, *report);
        let probed = self.shared_level.get();
        let before = &status_tracker.status;
        if let Some(level) = probed.level
            && (!before.calibrated || level != before.level)
        {
            report(&describe_evidence_level(
                level,
                true,
                probed.problem.as_deref(),
            ));
        }
        if before.mode == ManageMode::Act && !host.is_acting {
            report(
                "root's cachemate is now managing this host: this daemon has restored its changes and only observes",
            );
            report_restored(&control_loop.machine.take_overruled(), *report);
        }
        let parts = DaemonParts {
            probed,
            unavailable: sinks.endpoints.unavailable.clone(),
            nri: sinks.services.nri_state(),
            unmatched_rules,
        };
        status_tracker.observe(record, snapshot, &host, parts);
        publish(&sinks.shared_status, status_tracker);

        if let Some(feed) = &sinks.endpoints.feed {
            let snapshot = Snapshot {
                daemon: Some(status_tracker.status.for_page()),
                ..status_tracker.status.snapshot.clone()
            };
            feed.push(snapshot, control_loop.profiles());
        }
    }

    /// Reloads the configuration. If it is invalid, the previous one stays in force.
    fn reload(&mut self) {
        let WindowLoop {
            source,
            control_loop,
            status_tracker,
            sinks,
            report,
            ..
        } = self;
        let _ = sd_notify::notify(false, &[NotifyState::Reloading]);
        // A file that was there and is gone was moved by accident or is being replaced: no rules would be left.
        let vanished_file = status_tracker
            .status
            .config
            .as_ref()
            .filter(|file| !cachemate_files::path_exists(std::path::Path::new(file)));
        let config = match vanished_file {
            Some(file) => Err(anyhow::anyhow!(
                "{file}: the file is gone, expected the configuration"
            )),
            None => source.read(),
        };
        let outcome = config.and_then(|config| {
            let policy = host::build_verified_policy(&config)?;
            let policy_config = host::policy_config(&config);
            let guard = config.rollback.guard_config();
            let is_acting = config.mode == ManageMode::Act;
            let new_lock = if is_acting && !control_loop.machine.may_act() {
                Some(host::acquire_actuation_lock(
                    &config.state_dir.clone().unwrap_or_else(paths::state_dir),
                )?)
            } else {
                None
            };
            // The last step that can fail: it keeps the old rules and policy, but a change to `observe` may already
            // have restored the host.
            let restored_objects = control_loop.machine.set_rules(
                host::manage_rules(&config.rules),
                config.cpusets.clone(),
                is_acting,
            )?;
            if let Some(actuation_lock) = new_lock {
                control_loop.machine.set_actuation_lock(actuation_lock);
            }
            report_restored(&restored_objects, *report);
            let is_same_mode = status_tracker.status.mode == config.mode;
            if !is_same_mode {
                // A proposal is confirmed before it comes into force, and what was in force is restored.
                control_loop.plan = Plan::idle(control_loop.plan.window);
                control_loop.forecast = Forecast::default();
            }
            // The same policy goes on with its evidence and cooldowns, and the log stays replayable.
            let pipeline = &mut sinks.header.pipeline;
            let is_same_policy = (&pipeline.policy, &pipeline.guard) == (&policy_config, &guard);
            if !(is_same_mode && is_same_policy) {
                let name = policy_config.name.clone();
                cachemate_pipeline::replace_policy(control_loop, name, policy);
                (pipeline.policy, pipeline.guard) = (policy_config, guard);
                end_log(&mut sinks.log, "the policy was replaced", *report);
            }
            *lock(&sinks.shared_status.allow_users) = allowed_user_ids(&config);
            Ok(config)
        });
        match outcome {
            Ok(config) => {
                status_tracker.reload(Ok((config.mode, control_loop.policy_name.clone())));
                sinks.services.set_config(config);
                report("configuration reloaded");
            }
            Err(error) => {
                report(&format!("configuration not reloaded: {error:#}"));
                status_tracker.reload(Err(format!("{error:#}")));
            }
        }
        let _ = sd_notify::notify(false, &[NotifyState::Ready]);
    }
}

/// Ends the run log, because its header does not describe later windows, and a replay would decide differently.
fn end_log(log: &mut Option<RunLogWriter>, reason: &str, report: &dyn Fn(&str)) {
    match log.take().map(RunLogWriter::finish) {
        None => {}
        Some(Ok(())) => report(&format!("the run log ends here: {reason}")),
        Some(Err(error)) => report(&format!("the run log could not be closed: {error}")),
    }
}

/// Reports objects that could not be restored, or were left unchanged because another process has changed them.
///
/// # Errors
/// An object could not be restored; the journal is kept.
pub fn report_failures(
    restored_objects: &[RestoredObject],
    report: &dyn Fn(&str),
) -> anyhow::Result<()> {
    let mut failure_count = 0;
    for restored in restored_objects {
        match &restored.outcome {
            RestoreOutcome::Failed(reason) => {
                failure_count += 1;
                report(&format!("not restored: {:?}: {reason}", restored.object));
            }
            RestoreOutcome::ChangedByOther(current_state) => report(&format!(
                "left alone, changed by another process: {:?} is {current_state}",
                restored.object
            )),
            _ => {}
        }
    }
    if failure_count > 0 {
        bail!(
            "{failure_count} objects could not be restored; the journal is kept, and cachemate restore tries again"
        );
    }
    Ok(())
}

/// Reports the same failures while the daemon continues. Objects that could not be restored stay in the journal and
/// are retried at the end.
fn report_restored(restored_objects: &[RestoredObject], report: &dyn Fn(&str)) {
    if let Err(error) = report_failures(restored_objects, report) {
        report(&format!("{error:#}"));
    }
}

/// Reports which part of an earlier run's journal was lost, how long its daemon had been silent, and why its journal
/// could not be removed.
pub(crate) fn report_damage(recovery: &RecoveryReport, report: &dyn Fn(&str)) {
    if let Some(damage) = &recovery.damage {
        report(&damage.to_string());
    }
    if let Some(silence) = recovery.silence {
        report(&format!(
            "no heartbeat from the daemon for {} s: the host is being restored",
            silence.as_secs()
        ));
    }
    if let Some(error) = &recovery.removal_error {
        report(&format!("the journal could not be removed: {error}"));
    }
}

/// Makes SIGHUP reload the configuration and end the window.
///
/// # Errors
/// The handler cannot be set.
pub fn handle_hangup(flags: &ControlFlags) -> anyhow::Result<()> {
    for flag in [&flags.reload, &flags.wake] {
        signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::clone(flag))
            .context("cannot handle SIGHUP")?;
    }
    Ok(())
}
