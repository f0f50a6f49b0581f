//! Report of what the rules of a configuration match on this host now.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::Context;
use cachemate_core::ServiceIdentity;
use cachemate_linux::act::budgets::SlowdownBudget;
use cachemate_linux::kernel::LinuxHost;
use cachemate_linux::sense::rule_matches::{RuleMatch, find_rule_matches};
use cachemate_linux::sense::service_directory::ServiceDirectory;
use cachemate_report::text::escape_controls;
use cachemate_spec::{ManageConfig, RuleAction, RuleConfig, User};

use crate::host;

/// Maximum number of process names listed for one rule.
const MAX_NAMES: usize = 5;

/// Matches of the rules, as lines of text.
#[derive(Default)]
pub struct RuleReport {
    /// One line for each rule.
    pub lines: Vec<String>,
    /// Rules that decide about no process, with the nearest cgroups or names.
    pub warnings: Vec<String>,
}

/// Tests every process of this host against the rules.
///
/// # Errors
/// The processes of this host cannot be listed.
pub fn build_rule_report(config: &ManageConfig) -> anyhow::Result<RuleReport> {
    let matches =
        find_rule_matches(&LinuxHost::new("/"), &host::manage_rules(&config.rules), &ServiceDirectory::default());
    let matches = matches.context("cannot read the processes of this host")?;
    let mut report = RuleReport::default();
    for (index, (rule, rule_match)) in config.rules.iter().zip(&matches).enumerate() {
        report.lines.push(format!("rules[{index}] ({}): {}", describe_conditions(rule), describe_match(rule_match)));
    }
    report.warnings = describe_unmatched_rules(&config.rules, &matches);
    let managed = config.rules.iter().zip(&matches).filter(|(rule, _)| rule.action == RuleAction::Manage);
    let services: BTreeSet<ServiceIdentity> = managed.flat_map(|(_, matched)| matched.services.clone()).collect();
    for (index, budget) in host::slowdown_budgets(config).iter().enumerate() {
        let limits = budget.divide(services.clone());
        if limits.is_empty() {
            report.warnings.push(format!("budgets[{index}]: no managed service now"));
            continue;
        }
        report.lines.push(format!("budgets[{index}] {}", describe_budget(budget, &limits)));
    }
    Ok(report)
}

/// A budget with the limits of its services, the largest first.
fn describe_budget(budget: &SlowdownBudget, limits: &BTreeMap<ServiceIdentity, f64>) -> String {
    let mut limits: Vec<(&ServiceIdentity, f64)> = limits.iter().map(|(service, limit)| (service, *limit)).collect();
    limits.sort_by(|a, b| b.1.total_cmp(&a.1));
    let describe_limit = |(service, limit): &(&ServiceIdentity, f64)| {
        format!("{} {:.1} %", escape_controls(&service.to_string()), 100.0 * limit)
    };
    let listed: Vec<String> = limits.iter().take(MAX_NAMES).map(describe_limit).collect();
    let ellipsis = if limits.len() > MAX_NAMES { ", ..." } else { "" };
    format!("({:.1} %): {}{ellipsis}", 100.0 * budget.max_slowdown, listed.join(", "))
}

/// Interval between checks of the rules of a running daemon.
const RULE_CHECK_PERIOD: Duration = Duration::from_secs(60);

/// Tracks which rules of a running daemon match nothing.
pub(crate) struct RuleCheck {
    rules: Vec<RuleConfig>,
    last_check: Instant,
    warnings: Vec<String>,
}

impl RuleCheck {
    /// Builds the check. The first comparison takes place one interval from now, so a rule may match nothing for a
    /// minute.
    pub(crate) fn new(rules: Vec<RuleConfig>) -> Self {
        RuleCheck { rules, last_check: Instant::now(), warnings: Vec::new() }
    }

    /// Returns the rules that match nothing, once a minute; `None` between checks. Logs rules that were not in the
    /// previous result.
    pub(crate) fn poll(&mut self, directory: &ServiceDirectory, report: &dyn Fn(&str)) -> Option<Vec<String>> {
        if self.last_check.elapsed() < RULE_CHECK_PERIOD {
            return None;
        }
        self.last_check = Instant::now();
        let matches = find_rule_matches(&LinuxHost::new("/"), &host::manage_rules(&self.rules), directory).ok()?;
        let unmatched_texts = describe_unmatched_rules(&self.rules, &matches);
        unmatched_texts.iter().filter(|text| !self.warnings.contains(text)).for_each(|text| report(text));
        self.warnings.clone_from(&unmatched_texts);
        Some(unmatched_texts)
    }
}

/// Describes the rules that decide about no process, because they match none or an earlier rule applies first.
fn describe_unmatched_rules(rules: &[RuleConfig], matches: &[RuleMatch]) -> Vec<String> {
    let rules = rules.iter().zip(matches).enumerate();
    let rules = rules.filter(|(_, (_, matched))| matched.decided_commands.is_empty());
    let describe_rule = |(index, (rule, matched)): (usize, (&RuleConfig, &RuleMatch))| {
        format!("rules[{index}] ({}) {}", describe_conditions(rule), describe_absence(matched))
    };
    rules.map(describe_rule).collect()
}

fn describe_conditions(rule: &RuleConfig) -> String {
    let user = rule.user.as_ref().map(|user| match user {
        User::Id(id) => format!("user {id}"),
        User::Name(name) => format!("user '{}'", escape_controls(name)),
    });
    let conditions = [
        rule.command.as_ref().map(|pattern| format!("command '{}'", escape_controls(pattern))),
        rule.cgroup.as_ref().map(|path| format!("cgroup '{}'", escape_controls(path))),
        rule.pid.map(|pid| format!("pid {pid}")),
        user,
        rule.service.as_ref().map(|pattern| format!("service '{}'", escape_controls(pattern))),
        rule.kind.map(|kind| format!("kind {kind}")),
        rule.namespace.as_ref().map(|pattern| format!("namespace '{}'", escape_controls(pattern))),
        (!rule.labels.is_empty()).then(|| format!("labels {}", describe_labels(&rule.labels))),
    ];
    let stated_conditions: Vec<String> = conditions.into_iter().flatten().collect();
    if stated_conditions.is_empty() { "every program".to_string() } else { stated_conditions.join(", ") }
}

fn describe_labels(labels: &BTreeMap<String, String>) -> String {
    let pairs: Vec<String> = labels.iter().map(|(name, value)| escape_controls(&format!("{name}={value}"))).collect();
    pairs.join(",")
}

fn describe_match(rule_match: &RuleMatch) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in &rule_match.decided_commands {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let shown_names: Vec<String> = names.iter().take(MAX_NAMES).map(|name| escape_controls(name)).collect();
    let ellipsis = if names.len() > MAX_NAMES { ", ..." } else { "" };
    let count = match rule_match.decided_commands.len() {
        0 => "0 processes".to_string(),
        1 => "1 process".to_string(),
        count => format!("{count} processes"),
    };
    if shown_names.is_empty() { count } else { format!("{count}: {}{ellipsis}", shown_names.join(", ")) }
}

fn describe_absence(rule_match: &RuleMatch) -> String {
    if rule_match.earlier_count > 0 {
        let count = rule_match.earlier_count;
        return format!(
            "decides nothing now, because earlier rules apply first to the processes that it matches ({count})"
        );
    }
    match rule_match.nearest.as_slice() {
        [] => "matches nothing now".to_string(),
        nearest_names => {
            let quoted_names: Vec<String> =
                nearest_names.iter().map(|name| format!("'{}'", escape_controls(name))).collect();
            format!("matches nothing now; nearest: {}", quoted_names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::ServiceKind;

    /// Does a rule list each name once with the number of processes, and escape names that could control a terminal?
    #[test]
    fn names_are_listed_once_and_escaped() {
        let decided = ["redis", "redis", "evil\x1b[2J"].map(String::from).to_vec();
        let matched = RuleMatch { decided_commands: decided, ..RuleMatch::default() };
        assert_eq!(describe_match(&matched), "3 processes: redis, evil\\u{1b}[2J");
        let budget = SlowdownBudget { max_slowdown: 0.3, weights: vec![("*".into(), 1.0), ("unit/*".into(), 2.0)] };
        let services = [ServiceIdentity::command("a\x1b"), ServiceIdentity::new(ServiceKind::Unit, "b.service")];
        let limits = budget.divide(services.into());
        assert_eq!(describe_budget(&budget, &limits), "(30.0 %): unit/b.service 15.0 %, command/a\\u{1b} 15.0 %");
        let shadowed = RuleMatch { earlier_count: 2, ..RuleMatch::default() };
        assert!(describe_absence(&shadowed).contains("earlier rules apply first"));
    }
}
