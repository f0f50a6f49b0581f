//! The configuration of `cachemate manage`: the programs to manage, the policy, and whether to act
//! at all.
//!
//! A mistake in this file is made at night on many hosts, so it may cost a restart and never a
//! program. All fields are optional, with an empty file the daemon observes nothing and changes
//! nothing, and an unknown field is an error with its line and the nearest known one, instead of
//! being ignored. `docs/live.md` explains every field.
//!
//! For example, `max_slowdown = "5%"` and `max_slowdown = 0.05` are the same promise, and
//! `max_slowdown = 5`, which could mean either 5 % or a factor of five, is refused.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cachemate_core::{CpusetGroup, Goal, ServiceKind};
use serde::{Deserialize, Serialize};

use crate::located_toml::Located;
use crate::{PolicyChoice, SpecError, read_text};

/// The content of `cachemate.toml`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ManageConfig {
    /// Does the daemon change the host, or only show its plans?
    pub mode: ManageMode,
    /// The policy and its parameters; `auto` if none is named.
    pub policy: Option<PolicyChoice>,
    /// Seed of the policy's random choices.
    pub seed: u64,
    /// Length of a window, unless the policy's parameters have `window_ns`; `None` for the policy's own.
    pub window_ms: Option<u64>,
    /// Directory of the restore journal.
    pub state_dir: Option<PathBuf>,
    /// Control socket for `status`, `top` and `explain`.
    pub socket: Option<PathBuf>,
    /// Address and port at which metrics are served; `None` for no metrics. Other hosts need the token.
    pub metrics_address: Option<String>,
    /// File with the token that a request for metrics must contain; required unless the address is a loopback one.
    pub metrics_token_file: Option<PathBuf>,
    /// File to which the metrics are written every 15 seconds, for the textfile collector of node exporter.
    pub metrics_textfile: Option<PathBuf>,
    /// Users who may query the socket, besides root and the daemon's own user: numbers or names.
    pub allow_users: Vec<User>,
    /// Recorded profiles (`*.json`), matched by the program's name.
    pub profiles: Vec<PathBuf>,
    /// File to which every window is written, for `replay`; compressed if the name ends in `.zst`.
    pub run_log: Option<PathBuf>,
    /// Socket of the gang scheduler; `None` for its default socket, and `off` to run gangs by idle turns.
    pub gang_scheduler_socket: Option<PathBuf>,
    /// Settings of the roll-back of decisions that made programs slower.
    pub rollback: RollbackSection,
    /// Rules in order; the first match decides.
    pub rules: Vec<RuleConfig>,
    /// Cgroups that are confined to some CPUs as a whole, including all their future processes.
    pub cpusets: Vec<CpusetGroup>,
}

/// Whether the daemon changes the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ManageMode {
    /// The daemon measures and shows its plans, but changes nothing.
    #[default]
    Observe,
    /// The daemon also applies its plans.
    Act,
}

/// Settings of the roll-back.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RollbackSection {
    /// If false, only changes that the policy itself proposes for verification are undone.
    pub enabled: bool,
    /// Windows that are measured before and after a decision.
    pub trial_windows: u32,
    /// Smallest loss of speed, as a fraction, that causes a roll-back.
    pub min_loss: f64,
    /// Windows for which a plan that was rolled back is not retried.
    pub cooldown_windows: u32,
}

impl RollbackSection {
    /// The configuration of the pipeline's guard; `None` if roll-backs are disabled.
    pub fn guard_config(&self) -> Option<cachemate_core::GuardConfig> {
        let RollbackSection {
            enabled,
            trial_windows,
            min_loss,
            cooldown_windows,
        } = *self;
        enabled.then_some(cachemate_core::GuardConfig {
            trial_windows,
            min_loss,
            cooldown_windows,
            waits_for_reference: true,
            ..Default::default()
        })
    }
}

impl Default for RollbackSection {
    fn default() -> Self {
        RollbackSection {
            enabled: true,
            trial_windows: 5,
            min_loss: 0.03,
            cooldown_windows: 60,
        }
    }
}

/// A user by number or by name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum User {
    /// Numeric id of the user on this host; the only variant in a checked configuration.
    Id(u32),
    /// Name as written in the file.
    Name(String),
}

/// One rule; all given conditions must hold.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuleConfig {
    /// Command name as the kernel stores it (15 bytes); `*` and `?` are wildcards.
    pub command: Option<String>,
    /// The cgroup or one of its ancestors; `*` and `?` are wildcards within a component.
    pub cgroup: Option<String>,
    /// The process or one of its ancestors.
    pub pid: Option<i32>,
    /// The owner of the process.
    pub user: Option<User>,
    /// The service by its name or `kind/name`; `*` and `?` are wildcards within a component.
    pub service: Option<String>,
    /// Kind of the service.
    pub kind: Option<ServiceKind>,
    /// Namespace of the pod, if the container runtime reports it; `*` and `?` are wildcards.
    pub namespace: Option<String>,
    /// Labels of the pod, if the container runtime reports them; all must match, and values may contain wildcards.
    pub labels: BTreeMap<String, String>,
    /// Treatment of the matching programs; they are managed by default.
    pub action: RuleAction,
    /// Relative weight of its slowdown.
    pub priority: Option<f64>,
    /// Maximum slowdown relative to running alone: `0.05` or `"5%"`; a number of 1 or more needs its unit.
    #[serde(deserialize_with = "crate::goals::max_slowdown")]
    pub max_slowdown: Option<f64>,
    /// Who else may promise a limit: nobody by default.
    pub promises_from: Option<PromiseSource>,
    /// Minimum work per second: the work that the program reports, or else instructions of each thread.
    pub min_rate: Option<f64>,
    /// File with the total work so far of all programs that the rule matches, a whole number that only grows.
    pub progress_file: Option<PathBuf>,
}

/// Who may promise a limit to the programs of a rule that states none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PromiseSource {
    /// The owner of the pod, by its label or annotation `cachemate.io/max-slowdown`.
    Labels,
}

/// Treatment of the programs that match a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuleAction {
    /// Measured and, if the mode is `act`, placed.
    #[default]
    Manage,
    /// Measured, but never moved.
    Observe,
    /// Neither measured nor moved.
    Ignore,
}

/// Reads and checks a configuration; `user_id` resolves a user's name to a numeric id.
///
/// # Errors
/// An unreadable file, invalid TOML, unknown or ill-typed fields, values out of range, or unknown users; with the line.
pub fn load_manage_config(
    path: &str,
    user_id: &dyn Fn(&str) -> Option<u32>,
) -> Result<ManageConfig, SpecError> {
    parse_manage_config(path, &read_text(path)?, user_id)
}

/// [`load_manage_config`] for a text; `file` is its name in errors. All users in the result are numbers.
pub fn parse_manage_config(
    file: &str,
    text: &str,
    user_id: &dyn Fn(&str) -> Option<u32>,
) -> Result<ManageConfig, SpecError> {
    let located = Located::parse(file, text)?;
    let (config, errors) = located.deserialize_usable::<ManageConfig>(|_| Ok(()))?;
    let mut check = FieldCheck {
        located: &located,
        errors,
    };
    let Some(mut config) = config else {
        return check.finish(ManageConfig::default());
    };
    let listed_users = config
        .allow_users
        .iter_mut()
        .enumerate()
        .map(|(index, user)| (format!("allow_users[{index}]"), user));

    let rule_users = config.rules.iter_mut().enumerate();
    let rule_users = rule_users
        .filter_map(|(index, rule)| Some((format!("rules[{index}].user"), rule.user.as_mut()?)));
    for (field, user) in listed_users.chain(rule_users) {
        let User::Name(name) = user else { continue };
        match user_id(name) {
            Some(id) => *user = User::Id(id),
            None => check.require(
                false,
                &field,
                format!("'{name}'"),
                "a user of this host, by name or number",
            ),
        }
    }
    config.check(&mut check);
    check.finish(config)
}

/// The errors that were found in the fields of one file.
struct FieldCheck<'a> {
    located: &'a Located<'a>,
    errors: Vec<SpecError>,
}

impl FieldCheck<'_> {
    /// Records an error unless the field is valid.
    fn require(
        &mut self,
        is_valid: bool,
        field: &str,
        found: impl std::fmt::Display,
        expected: &str,
    ) {
        if !is_valid {
            self.errors
                .push(self.located.error_at(field, found.to_string(), expected));
        }
    }

    fn is_reported(&self, field: &str) -> bool {
        self.errors
            .iter()
            .any(|error| error.field.as_deref() == Some(field))
    }

    fn finish<T>(self, value: T) -> Result<T, SpecError> {
        SpecError::join(self.errors).map_or(Ok(value), Err)
    }
}

fn is_positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

impl ManageConfig {
    fn check(&self, check: &mut FieldCheck<'_>) {
        check.require(self.window_ms != Some(0), "window_ms", 0, "1 or more");
        let paths = [
            ("state_dir", &self.state_dir),
            ("socket", &self.socket),
            ("run_log", &self.run_log),
            ("metrics_textfile", &self.metrics_textfile),
            ("metrics_token_file", &self.metrics_token_file),
            ("gang_scheduler_socket", &self.gang_scheduler_socket),
        ];

        let profiles = self
            .profiles
            .iter()
            .enumerate()
            .map(|(index, path)| (format!("profiles[{index}]"), path));
        let named_paths = paths
            .into_iter()
            .filter_map(|(field, path)| Some((field.to_string(), path.as_ref()?)));
        for (field, path) in named_paths.chain(profiles) {
            check.require(!path.as_os_str().is_empty(), &field, "''", "a path");
        }

        if let Some(address) = &self.metrics_address {
            let socket_address: Option<std::net::SocketAddr> = address.parse().ok();
            let has_token =
                self.metrics_token_file.is_some() || check.is_reported("metrics_token_file");
            let is_valid =
                socket_address.is_some_and(|address| address.ip().is_loopback() || has_token);
            let expected = "a loopback address and port, such as 127.0.0.1:9753, or with metrics_token_file another";
            check.require(
                is_valid,
                "metrics_address",
                format!("'{address}'"),
                expected,
            );
        }
        let RollbackSection {
            trial_windows,
            min_loss,
            ..
        } = self.rollback;
        check.require(
            trial_windows >= 2,
            "rollback.trial_windows",
            trial_windows,
            "2 or more",
        );
        check.require(
            (0.0..1.0).contains(&min_loss),
            "rollback.min_loss",
            min_loss,
            "0 to 1",
        );
        self.rules
            .iter()
            .enumerate()
            .for_each(|(index, rule)| rule.check(index, check));
        self.check_cpusets(check);
    }

    fn check_cpusets(&self, check: &mut FieldCheck<'_>) {
        for (index, cpuset) in self.cpusets.iter().enumerate() {
            let (field, path) = (format!("cpusets[{index}].cgroup"), &cpuset.cgroup);
            let names: Vec<&str> = path.trim_end_matches('/').split('/').skip(1).collect();
            let is_below_root = path.starts_with('/') && !names.is_empty();
            let is_path =
                is_below_root && !names.iter().any(|name| matches!(*name, "" | "." | ".."));
            let expected = "a path below the root such as '/system.slice/backup.service'";
            check.require(is_path, &field, format!("'{path}'"), expected);
            let expected = "one cgroup, because wildcards work in rules only";
            check.require(
                !path.contains(['*', '?']),
                &field,
                format!("'{path}'"),
                expected,
            );
            let is_repeated = self.cpusets[..index]
                .iter()
                .any(|other| other.cgroup == *path);
            check.require(
                !is_repeated,
                &field,
                format!("'{path}' again"),
                "each cgroup once",
            );
            let cpus_field = format!("cpusets[{index}].cpus");
            check.require(
                !cpuset.cpus.is_empty(),
                &cpus_field,
                "no CPU",
                "at least one, such as '0-3'",
            );
        }
    }
}

impl RuleConfig {
    fn check(&self, index: usize, check: &mut FieldCheck<'_>) {
        let field = |key: &str| format!("rules[{index}].{key}");
        if let Some(command) = &self.command {
            // The kernel truncates names at 15 bytes, so a longer pattern without a star would never match.
            let is_valid = !command.is_empty() && (command.len() <= 15 || command.contains('*'));
            let expected = "1 to 15 bytes, because the kernel truncates names; or a '*'";
            check.require(
                is_valid,
                &field("command"),
                format!("'{command}'"),
                expected,
            );
        }
        if let Some(cgroup) = &self.cgroup {
            let expected = "a path from the root such as '/system.slice'";
            check.require(
                cgroup.starts_with('/'),
                &field("cgroup"),
                format!("'{cgroup}'"),
                expected,
            );
        }
        let names = [
            (
                "service",
                &self.service,
                "a name, such as 'redis' or 'unit/redis*'",
            ),
            ("namespace", &self.namespace, "a name, such as 'web'"),
        ];
        for (key, value, expected) in names {
            check.require(
                value.as_ref().is_none_or(|name| !name.is_empty()),
                &field(key),
                "''",
                expected,
            );
        }
        if let Some(service) = &self.service {
            let expected = "a service's name; 'cgroup' takes paths";
            check.require(
                !service.starts_with('/'),
                &field("service"),
                format!("'{service}'"),
                expected,
            );
        }
        let pid = self.pid.unwrap_or(1);
        check.require(pid > 0, &field("pid"), pid, "1 or more");
        let priority = self.priority.unwrap_or(1.0);
        check.require(
            is_positive(priority),
            &field("priority"),
            priority,
            "a positive number",
        );
        let min_rate = self.min_rate.unwrap_or(1.0);
        check.require(
            is_positive(min_rate),
            &field("min_rate"),
            min_rate,
            "a positive number, in work a second",
        );
        if let Some(path) = &self.progress_file {
            check.require(
                path.is_absolute(),
                &field("progress_file"),
                format!("'{}'", path.display()),
                "an absolute path",
            );
        }
        let has_goal = self.goal().is_some() || self.progress_file.is_some();
        let has_unmanaged_goal = has_goal && self.action != RuleAction::Manage;
        let action = format!("{:?}", self.action).to_lowercase();
        check.require(
            !has_unmanaged_goal,
            &field("action"),
            action,
            "'manage', because the rule has a goal",
        );
    }

    /// Goal of the matching programs; `None` if the rule has none.
    pub fn goal(&self) -> Option<Goal> {
        let goal = Goal {
            priority: self.priority.unwrap_or(1.0),
            max_slowdown: self.max_slowdown,
            min_rate: self.min_rate,
            is_rate_reported: self.progress_file.is_some(),
        };
        (self.priority.is_some() || goal.is_promised()).then_some(goal)
    }
}
