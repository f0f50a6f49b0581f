//! The configuration of `cachemate manage`: the programs to manage, the policy, and whether to act at all.
//!
//! `docs/live.md` explains every field. All fields are optional; with an empty file, the daemon observes nothing and
//! changes nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cachemate_core::{CpuSet, Goal, ServiceKind, SpellingScope};
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
    /// Minimum length of a window; a policy may request longer ones.
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
    /// Tolerance of the kernel's cache-aware scheduling, 0 to 100; `None` leaves it unchanged.
    pub kernel_cache_tolerance: Option<u32>,
    /// Settings of the roll-back of decisions that made programs slower.
    pub rollback: RollbackSection,
    /// Rules in order; the first match decides.
    pub rules: Vec<RuleConfig>,
    /// Cgroups that are confined to some CPUs as a whole, including all their future processes.
    pub cpusets: Vec<CpusetConfig>,
    /// Minimum work per second of services, reported by their state; the first entry that names a service counts.
    pub service_floors: Vec<ServiceFloorConfig>,
    /// Slowdowns that several services share by weight.
    pub budgets: Vec<BudgetConfig>,
}

/// A slowdown that several services share.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetConfig {
    /// Sum of the maximum slowdowns of the services that run: `0.3` or `"30%"`.
    #[serde(deserialize_with = "crate::goals::required_max_slowdown")]
    pub max_slowdown: f64,
    /// The services with their weights; the first entry that names a service counts.
    pub services: Vec<BudgetServiceConfig>,
}

/// The weight of services in a budget.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetServiceConfig {
    /// The service by its name or `kind/name`; `*` and `?` are wildcards within a component.
    pub service: String,
    /// Weight of each service with this name.
    #[serde(default = "crate::goals::default_priority")]
    pub weight: f64,
}

/// The floor of a service.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceFloorConfig {
    /// The service by its name or `kind/name`; `*` and `?` are wildcards within a component.
    pub service: String,
    /// Work per second of all its threads together: the work that its programs report, or else instructions.
    pub min_rate: f64,
    /// File with the service's total work so far, a whole number that only grows; it replaces the work of its threads.
    pub progress_file: Option<PathBuf>,
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

/// One cgroup and its CPUs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpusetConfig {
    /// Path of the cgroup, as `/proc/PID/cgroup` shows it.
    pub cgroup: String,
    /// CPUs such as `0-3,8`.
    pub cpus: CpuSet,
}

/// Settings of the roll-back.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RollbackSection {
    /// If false, every decision stays in force.
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
        let RollbackSection { enabled, trial_windows, min_loss, cooldown_windows } = *self;
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
        RollbackSection { enabled: true, trial_windows: 5, min_loss: 0.03, cooldown_windows: 60 }
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
    /// Maximum slowdown relative to running alone: `0.05` or `"5%"`; a number greater than 1 needs its unit.
    #[serde(deserialize_with = "crate::goals::max_slowdown")]
    pub max_slowdown: Option<f64>,
    /// Minimum work per second: the work that the program reports, or else instructions of each thread.
    pub min_rate: Option<f64>,
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
pub fn load_manage_config(path: &str, user_id: &dyn Fn(&str) -> Option<u32>) -> Result<ManageConfig, SpecError> {
    parse_manage_config(path, &read_text(path)?, user_id)
}

/// [`load_manage_config`] for a text; `file` is its name in errors. All users in the result are numbers.
pub fn parse_manage_config(
    file: &str,
    text: &str,
    user_id: &dyn Fn(&str) -> Option<u32>,
) -> Result<ManageConfig, SpecError> {
    let located = Located::parse(file, text)?.with_scope(SpellingScope::Configuration);
    let mut config: ManageConfig = located.deserialize_with_overrides(&[])?;
    let resolve_user = |field: String, user: &mut User| match user {
        User::Id(_) => Ok(()),
        User::Name(name) => match user_id(name) {
            Some(id) => {
                *user = User::Id(id);
                Ok(())
            }
            None => Err(located.error_at(&field, format!("'{name}'"), "a user of this host, by name or number")),
        },
    };
    for (index, user) in config.allow_users.iter_mut().enumerate() {
        resolve_user(format!("allow_users[{index}]"), user)?;
    }
    for (index, rule) in config.rules.iter_mut().enumerate() {
        if let Some(user) = &mut rule.user {
            resolve_user(format!("rules[{index}].user"), user)?;
        }
    }
    config.check(&located)?;
    Ok(config)
}

const EXPECTED_SERVICE: &str = "a name, such as 'redis' or 'unit/redis*'";

fn is_service_pattern(pattern: &str) -> bool {
    !pattern.is_empty() && !pattern.starts_with('/')
}

impl ManageConfig {
    fn check(&self, located: &Located<'_>) -> Result<(), SpecError> {
        if self.window_ms == Some(0) {
            return Err(located.error_at("window_ms", "0", "1 or more"));
        }
        if let Some(tolerance) = self.kernel_cache_tolerance.filter(|tolerance| *tolerance > 100) {
            return Err(located.error_at("kernel_cache_tolerance", tolerance.to_string(), "0 to 100"));
        }
        let paths = [
            ("state_dir", &self.state_dir),
            ("socket", &self.socket),
            ("run_log", &self.run_log),
            ("metrics_textfile", &self.metrics_textfile),
            ("metrics_token_file", &self.metrics_token_file),
            ("gang_scheduler_socket", &self.gang_scheduler_socket),
        ];
        let profiles = self.profiles.iter().enumerate().map(|(index, path)| (format!("profiles[{index}]"), path));
        let named_paths = paths.into_iter().filter_map(|(field, path)| Some((field.to_string(), path.as_ref()?)));
        for (field, path) in named_paths.chain(profiles) {
            if path.as_os_str().is_empty() {
                return Err(located.error_at(&field, "''", "a path"));
            }
        }
        if let Some(address) = &self.metrics_address {
            let socket_address: Option<std::net::SocketAddr> = address.parse().ok();
            let has_token = self.metrics_token_file.is_some();
            if socket_address.is_none_or(|address| !address.ip().is_loopback() && !has_token) {
                let expected =
                    "a loopback address and port, such as 127.0.0.1:9753, or with metrics_token_file another";
                return Err(located.error_at("metrics_address", format!("'{address}'"), expected));
            }
        }
        let RollbackSection { trial_windows, min_loss, .. } = self.rollback;
        if trial_windows < 2 {
            return Err(located.error_at("rollback.trial_windows", trial_windows.to_string(), "2 or more"));
        }
        if !(0.0..1.0).contains(&min_loss) {
            return Err(located.error_at("rollback.min_loss", min_loss.to_string(), "0 to 1"));
        }
        self.rules.iter().enumerate().try_for_each(|(index, rule)| rule.check(index, located))?;
        self.check_cpusets(located)?;
        for (index, floor) in self.service_floors.iter().enumerate() {
            let floor_error = |field: &str, found: String, expected: &str| {
                Err(located.error_at(&format!("service_floors[{index}].{field}"), found, expected))
            };
            if !is_service_pattern(&floor.service) {
                return floor_error("service", format!("'{}'", floor.service), EXPECTED_SERVICE);
            }
            if !(floor.min_rate.is_finite() && floor.min_rate > 0.0) {
                return floor_error("min_rate", floor.min_rate.to_string(), "a positive number, in work a second");
            }
            if floor.progress_file.as_ref().is_some_and(|path| !path.is_absolute()) {
                return floor_error("progress_file", format!("{:?}", floor.progress_file), "an absolute path");
            }
        }
        self.check_budgets(located)
    }

    fn check_budgets(&self, located: &Located<'_>) -> Result<(), SpecError> {
        for (index, budget) in self.budgets.iter().enumerate() {
            let field = format!("budgets[{index}].services");
            if budget.services.is_empty() {
                return Err(located.error_at(&field, "no service", "at least one"));
            }
            for (position, BudgetServiceConfig { service, weight }) in budget.services.iter().enumerate() {
                let entry_error = |key: &str, found: String, expected: &str| {
                    Err(located.error_at(&format!("{field}[{position}].{key}"), found, expected))
                };
                if !is_service_pattern(service) {
                    return entry_error("service", format!("'{service}'"), EXPECTED_SERVICE);
                }
                if !(weight.is_finite() && *weight > 0.0) {
                    return entry_error("weight", weight.to_string(), "a positive number");
                }
            }
        }
        Ok(())
    }

    fn check_cpusets(&self, located: &Located<'_>) -> Result<(), SpecError> {
        for (index, cpuset) in self.cpusets.iter().enumerate() {
            let (field, path) = (format!("cpusets[{index}]"), &cpuset.cgroup);
            let names: Vec<&str> = path.trim_end_matches('/').split('/').skip(1).collect();
            let is_below_root = path.starts_with('/') && !names.is_empty();
            if !is_below_root || names.iter().any(|name| matches!(*name, "" | "." | "..")) {
                let expected = "a path below the root such as '/system.slice/backup.service'";
                return Err(located.error_at(&format!("{field}.cgroup"), format!("'{path}'"), expected));
            }
            if path.contains(['*', '?']) {
                let expected = "one cgroup, because wildcards work in rules only";
                return Err(located.error_at(&format!("{field}.cgroup"), format!("'{path}'"), expected));
            }
            if cpuset.cpus.is_empty() {
                return Err(located.error_at(&format!("{field}.cpus"), "no CPU", "at least one, such as '0-3'"));
            }
            if self.cpusets[..index].iter().any(|other| other.cgroup == *path) {
                return Err(located.error_at(
                    &format!("{field}.cgroup"),
                    format!("'{path}' again"),
                    "each cgroup once",
                ));
            }
        }
        Ok(())
    }
}

impl RuleConfig {
    fn check(&self, index: usize, located: &Located<'_>) -> Result<(), SpecError> {
        let rule_error = |field: &str, found: String, expected: &str| {
            Err(located.error_at(&format!("rules[{index}].{field}"), found, expected))
        };
        if let Some(command) = self.command.as_ref().filter(|command| command.is_empty() || command.len() > 15) {
            // The kernel truncates names at 15 bytes, so a longer pattern without a star would never match.
            if command.is_empty() || !command.contains('*') {
                return rule_error(
                    "command",
                    format!("'{command}'"),
                    "1 to 15 bytes, because the kernel truncates names; or a '*'",
                );
            }
        }
        if let Some(cgroup) = self.cgroup.as_ref().filter(|path| !path.starts_with('/')) {
            return rule_error("cgroup", format!("'{cgroup}'"), "a path from the root such as '/system.slice'");
        }
        let names =
            [("service", &self.service, EXPECTED_SERVICE), ("namespace", &self.namespace, "a name, such as 'web'")];
        for (field, value, expected) in names {
            if value.as_ref().is_some_and(String::is_empty) {
                return rule_error(field, "''".to_string(), expected);
            }
        }
        if let Some(service) = &self.service
            && service.starts_with('/')
        {
            return rule_error("service", format!("'{service}'"), "a service's name; 'cgroup' takes paths");
        }
        if let Some(pid) = self.pid.filter(|&pid| pid <= 0) {
            return rule_error("pid", pid.to_string(), "1 or more");
        }
        if let Some(priority) = self.priority.filter(|priority| !(priority.is_finite() && *priority > 0.0)) {
            return rule_error("priority", priority.to_string(), "a positive number");
        }
        if let Some(rate) = self.min_rate.filter(|rate| !(rate.is_finite() && *rate > 0.0)) {
            return rule_error("min_rate", rate.to_string(), "a positive number, in work a second");
        }
        if self.goal().is_some() && self.action != RuleAction::Manage {
            return rule_error(
                "action",
                format!("{:?}", self.action).to_lowercase(),
                "'manage', because the rule has a goal",
            );
        }
        Ok(())
    }

    /// Goal of the matching programs; `None` if the rule has none.
    pub fn goal(&self) -> Option<Goal> {
        let goal =
            Goal { priority: self.priority.unwrap_or(1.0), max_slowdown: self.max_slowdown, min_rate: self.min_rate };
        (self.priority.is_some() || goal.is_promised()).then_some(goal)
    }
}
