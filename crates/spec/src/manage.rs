//! The configuration of `cachemate manage`: what to manage, by which policy, and whether to act at all.
//!
//! `docs/live.md` explains every field. Everything is optional; an empty file observes nothing and changes nothing.

use std::path::PathBuf;

use cachemate_core::{CpuSet, Goal};
use serde::{Deserialize, Serialize};

use crate::located_toml::Located;
use crate::{PolicyChoice, SpecError, read_text};

/// As written in `cachemate.toml`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ManageConfig {
    /// Without it nothing on the host is changed.
    pub act: bool,
    /// The deciding policy and its parameters; the one that changes nothing where none is named.
    pub policy: Option<PolicyChoice>,
    /// Whatever the policy draws at random comes from it.
    pub seed: u64,
    /// Shortest time between two looks at the host; a policy may ask for longer windows.
    pub window_ms: Option<u64>,
    /// Where the restore journal lies.
    pub state_dir: Option<PathBuf>,
    /// Where `status`, `top` and `explain` ask.
    pub socket: Option<PathBuf>,
    /// Address and port of the metrics page; loopback only. None where it is not given.
    pub metrics: Option<String>,
    /// Users besides root and the daemon's own who may ask at the socket: numbers or names.
    pub allow_users: Vec<User>,
    /// Recorded profiles (`*.json`), recognised by the program's name.
    pub profiles: Vec<PathBuf>,
    /// Where every window goes, for `replay`; packed where the name ends in `.zst`.
    pub run_log: Option<PathBuf>,
    /// Where the gang scheduler listens; its usual socket where none is named, and `off` = gangs are idle turns.
    pub gang_scheduler: Option<PathBuf>,
    /// What the kernel's cache-aware scheduling is to tolerate, 0 to 100; left as it is where nothing is said.
    pub sched_cache_tolerance: Option<u32>,
    /// When decisions that made things worse are taken back.
    pub guard: GuardSection,
    /// Rules in order; the first that matches decides.
    pub rules: Vec<RuleConfig>,
    /// Groups of processes that are kept to some CPUs as a whole, whatever is born in them.
    pub groups: Vec<GroupConfig>,
}

/// One group and its CPUs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupConfig {
    /// Path of the cgroup, as `/proc/PID/cgroup` shows it.
    pub cgroup: String,
    /// CPUs such as `0-3,8`.
    pub cpus: CpuSet,
}

/// When a decision is taken back.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GuardSection {
    /// False leaves every decision in force, whatever follows from it.
    pub enabled: bool,
    /// Windows that are measured before and after a decision.
    pub windows: u32,
    /// Losses below this share are not worth a roll-back.
    pub loss_at_least: f64,
    /// Windows for which a decision that was taken back stays out.
    pub keep_out_windows: u32,
}

impl GuardSection {
    /// As a pipeline takes it; `None` where it is switched off.
    pub fn in_force(&self) -> Option<cachemate_core::GuardConfig> {
        let GuardSection { enabled, windows, loss_at_least, keep_out_windows } = *self;
        enabled.then_some(cachemate_core::GuardConfig {
            windows,
            min_loss: loss_at_least,
            cooldown_windows: keep_out_windows,
            wait_for_reference: true,
            ..Default::default()
        })
    }
}

impl Default for GuardSection {
    fn default() -> Self {
        GuardSection { enabled: true, windows: 5, loss_at_least: 0.03, keep_out_windows: 60 }
    }
}

/// A user by number or by name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum User {
    /// The number of the user on this host. A configuration that was read and checked has no other kind.
    Id(u32),
    /// The name as it is written in the file.
    Name(String),
}

/// One rule; all conditions that are given must hold.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuleConfig {
    /// Command name as the kernel keeps it (15 bytes); `*` and `?` stand for others.
    pub command: Option<String>,
    /// The cgroup or one above it.
    pub cgroup: Option<String>,
    /// The process or one that it descends from.
    pub pid: Option<i32>,
    /// The user whose process it is.
    pub user: Option<User>,
    /// What is done with the programs that match; they are managed where nothing is said.
    pub action: RuleAction,
    /// Relative weight of its slowdown.
    pub priority: Option<f64>,
    /// Never slower than this over alone: 0.05 = 5 %.
    pub degradation_at_most: Option<f64>,
    /// Never less work a second than this: work that the program reports, else instructions of each thread.
    pub rate_at_least: Option<f64>,
}

/// What is done with programs that match.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuleAction {
    /// Measured and, where the configuration says act, placed.
    #[default]
    Manage,
    /// Measured, never moved.
    Observe,
    /// Neither.
    Leave,
}

/// Reads and checks a configuration. `user_id` finds the number of a user's name.
///
/// # Errors
/// An unreadable file, broken TOML, unknown or ill-typed fields, values out of range, unknown users: with the line.
pub fn load_manage_config(path: &str, user_id: &dyn Fn(&str) -> Option<u32>) -> Result<ManageConfig, SpecError> {
    parse_manage_config(path, &read_text(path)?, user_id)
}

/// The same from a text; `file` is what errors call it. Users come back as numbers.
///
/// # Errors
/// As [`load_manage_config`].
pub fn parse_manage_config(
    file: &str,
    text: &str,
    user_id: &dyn Fn(&str) -> Option<u32>,
) -> Result<ManageConfig, SpecError> {
    let located = Located::parse(file, text)?;
    let mut config: ManageConfig = located.read(&[])?;
    let resolve = |field: String, user: &mut User| match user {
        User::Id(_) => Ok(()),
        User::Name(name) => match user_id(name) {
            Some(id) => {
                *user = User::Id(id);
                Ok(())
            }
            None => Err(located.at(&field, format!("'{name}'"), "a user of this host, by name or number")),
        },
    };
    for (at, user) in config.allow_users.iter_mut().enumerate() {
        resolve(format!("allow_users[{at}]"), user)?;
    }
    for (at, rule) in config.rules.iter_mut().enumerate() {
        if let Some(user) = &mut rule.user {
            resolve(format!("rules[{at}].user"), user)?;
        }
    }
    config.check(&located)?;
    Ok(config)
}

impl ManageConfig {
    fn check(&self, located: &Located<'_>) -> Result<(), SpecError> {
        if self.window_ms == Some(0) {
            return Err(located.at("window_ms", "0", "1 or more"));
        }
        if let Some(tolerance) = self.sched_cache_tolerance.filter(|tolerance| *tolerance > 100) {
            return Err(located.at("sched_cache_tolerance", tolerance.to_string(), "0 to 100"));
        }
        let places = [
            ("state_dir", &self.state_dir),
            ("socket", &self.socket),
            ("run_log", &self.run_log),
            ("gang_scheduler", &self.gang_scheduler),
        ];
        let profiles = self.profiles.iter().enumerate().map(|(at, path)| (format!("profiles[{at}]"), path));
        let named = places.into_iter().filter_map(|(field, path)| Some((field.to_string(), path.as_ref()?)));
        for (field, path) in named.chain(profiles) {
            if path.as_os_str().is_empty() {
                return Err(located.at(&field, "''", "a path"));
            }
        }
        if let Some(address) = &self.metrics {
            let parsed: Option<std::net::SocketAddr> = address.parse().ok();
            if parsed.is_none_or(|address| !address.ip().is_loopback()) {
                return Err(located.at(
                    "metrics",
                    format!("'{address}'"),
                    "a loopback address and port: 127.0.0.1:9753",
                ));
            }
        }
        let guard = &self.guard;
        if guard.windows < 2 {
            return Err(located.at("guard.windows", guard.windows.to_string(), "2 or more"));
        }
        if !(guard.loss_at_least >= 0.0 && guard.loss_at_least < 1.0) {
            return Err(located.at("guard.loss_at_least", guard.loss_at_least.to_string(), "0 to 1"));
        }
        self.rules.iter().enumerate().try_for_each(|(at, rule)| rule.check(at, located))?;
        self.check_groups(located)
    }

    fn check_groups(&self, located: &Located<'_>) -> Result<(), SpecError> {
        for (at, group) in self.groups.iter().enumerate() {
            let (place, path) = (format!("groups[{at}]"), &group.cgroup);
            let fields: Vec<&str> = path.trim_end_matches('/').split('/').skip(1).collect();
            let below_root = path.starts_with('/') && !fields.is_empty();
            if !below_root || fields.iter().any(|part| matches!(*part, "" | "." | "..")) {
                let expected = "a path below the root such as '/system.slice/backup.service'";
                return Err(located.at(&format!("{place}.cgroup"), format!("'{path}'"), expected));
            }
            if group.cpus.is_empty() {
                return Err(located.at(&format!("{place}.cpus"), "no CPU", "at least one, such as '0-3'"));
            }
            if self.groups[..at].iter().any(|other| other.cgroup == *path) {
                return Err(located.at(&format!("{place}.cgroup"), format!("'{path}' again"), "each group once"));
            }
        }
        Ok(())
    }
}

impl RuleConfig {
    fn check(&self, at: usize, located: &Located<'_>) -> Result<(), SpecError> {
        let fail = |field: &str, found: String, expected: &str| {
            Err(located.at(&format!("rules[{at}].{field}"), found, expected))
        };
        if let Some(command) = self.command.as_ref().filter(|command| command.is_empty() || command.len() > 15) {
            // The kernel cuts names at 15 bytes: a longer pattern without a star would never match.
            if command.is_empty() || !command.contains('*') {
                return fail("command", format!("'{command}'"), "1 to 15 bytes, as the kernel keeps names; or a '*'");
            }
        }
        if let Some(cgroup) = self.cgroup.as_ref().filter(|path| !path.starts_with('/')) {
            return fail("cgroup", format!("'{cgroup}'"), "a path from the root such as '/system.slice'");
        }
        if let Some(pid) = self.pid.filter(|&pid| pid <= 0) {
            return fail("pid", pid.to_string(), "1 or more");
        }
        if let Some(priority) = self.priority.filter(|priority| !(priority.is_finite() && *priority > 0.0)) {
            return fail("priority", priority.to_string(), "a positive number");
        }
        if let Some(most) = self.degradation_at_most.filter(|most| !(most.is_finite() && *most >= 0.0)) {
            return fail("degradation_at_most", most.to_string(), "0 or more (0.05 = 5 %)");
        }
        if let Some(least) = self.rate_at_least.filter(|least| !(least.is_finite() && *least > 0.0)) {
            return fail("rate_at_least", least.to_string(), "a positive number, in work a second");
        }
        if self.goal().is_some() && self.action != RuleAction::Manage {
            return fail(
                "action",
                format!("{:?}", self.action).to_lowercase(),
                "'manage' where something is asked for",
            );
        }
        Ok(())
    }

    /// What is asked for the programs that match; `None` where nothing is.
    pub fn goal(&self) -> Option<Goal> {
        let goal = Goal {
            priority: self.priority.unwrap_or(1.0),
            max_slowdown: self.degradation_at_most,
            min_rate: self.rate_at_least,
        };
        (self.priority.is_some() || goal.is_promised()).then_some(goal)
    }
}
