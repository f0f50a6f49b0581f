//! Report of what the rules of a configuration match on this host now.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use cachemate_core::CpusetGroup;
use cachemate_linux::act::rules::{ManageRule, bind_to_processes};
use cachemate_linux::kernel::LinuxHost;
use cachemate_linux::sense::rule_matches::{RuleMatch, find_rule_matches};
use cachemate_linux::sense::service_directory::ServiceDirectory;
use cachemate_report::text::{escape_controls, format_number};
use cachemate_spec::{ManageConfig, RuleAction, RuleConfig, User};

use crate::host;

/// Maximum number of process names listed for one rule.
const MAX_NAMES: usize = 5;

/// Matches of the rules and of the other entries that name programs, as lines of text.
#[derive(Default)]
pub struct RuleReport {
    /// One line for each entry: how it is understood, and what it matches.
    pub lines: Vec<String>,
    /// Entries that match nothing, with the nearest cgroups or names, and limits that this host may not be able to
    /// measure.
    pub warnings: Vec<String>,
}

/// Tests every process of this host against the rules, the cpusets and the profiles of `profiled_programs`.
///
/// # Errors
/// The processes of this host cannot be listed.
pub fn build_rule_report<'a>(
    config: &ManageConfig,
    profiled_programs: impl Iterator<Item = &'a str>,
) -> anyhow::Result<RuleReport> {
    let rules = host::manage_rules(&config.rules);
    let directory = ServiceDirectory::default();
    let mut report = match_entries(config, rules, profiled_programs, &directory)
        .context("cannot read the processes of this host")?;
    for (index, rule) in config.rules.iter().enumerate() {
        if let Some(path) = &rule.progress_file
            && !cachemate_files::path_exists(path)
        {
            report.warnings.push(format!(
                "rules[{index}].progress_file: {}: no such file now",
                path.display()
            ));
        }
    }
    let has_limits = config.rules.iter().any(|rule| rule.max_slowdown.is_some());
    if has_limits && host::survey_host(false)?.capability_survey.level != 1 {
        report.warnings.push(
            "max_slowdown: without counters (cachemate doctor), a limit is measured only for programs that report \
             progress, or by probes in mode act; for others its state stays unknown"
                .to_string(),
        );
    }
    Ok(report)
}

/// Matches of the entries that name programs. One pass over the processes tests all
/// entries: rules come first, so that they decide, and the other entries match whatever the rules decide.
fn match_entries<'a>(
    config: &ManageConfig,
    mut rules: Vec<ManageRule>,
    profiled_programs: impl Iterator<Item = &'a str>,
    directory: &ServiceDirectory,
) -> std::io::Result<RuleReport> {
    let named_programs = named_programs(config, profiled_programs);
    let entry_rules: Vec<RuleConfig> = named_programs
        .iter()
        .map(|(_, rule)| rule.clone())
        .collect();
    rules.extend(host::manage_rules(&entry_rules));
    let matches = find_rule_matches(&LinuxHost::new("/"), &rules, directory)?;
    let (rule_matches, entry_matches) = matches.split_at(config.rules.len());
    let mut report = RuleReport::default();
    for (index, (rule, rule_match)) in config.rules.iter().zip(rule_matches).enumerate() {
        let label = format!("rules[{index}] ({})", describe_conditions(rule));
        let commands = &rule_match.decided_commands;
        report.lines.push(format!(
            "{label} {}: {}",
            describe_treatment(rule),
            describe_commands(commands)
        ));
        if commands.is_empty() {
            report
                .warnings
                .push(format!("{label} {}", describe_absence(rule_match)));
        }
    }
    for ((label, _), entry_match) in named_programs.iter().zip(entry_matches) {
        let commands = [
            entry_match.decided_commands.as_slice(),
            &entry_match.earlier_commands,
        ]
        .concat();
        match commands.is_empty() {
            true => report
                .warnings
                .push(format!("{label} {}", describe_absence(entry_match))),
            false => report
                .lines
                .push(format!("{label}: {}", describe_commands(&commands))),
        }
    }
    Ok(report)
}

/// The cpusets and profiles as rules that match the same programs, with their descriptions.
fn named_programs<'a>(
    config: &ManageConfig,
    profiled_programs: impl Iterator<Item = &'a str>,
) -> Vec<(String, RuleConfig)> {
    let cpuset_rule = |(index, cpuset): (usize, &CpusetGroup)| {
        let rule = RuleConfig {
            cgroup: Some(cpuset.cgroup.clone()),
            ..RuleConfig::default()
        };
        (
            format!(
                "cpusets[{index}] ({}) to CPUs {}",
                describe_conditions(&rule),
                cpuset.cpus
            ),
            rule,
        )
    };
    let profile_rule = |name: &str| {
        let label = format!("profile of '{}'", escape_controls(name));
        (
            label,
            RuleConfig {
                command: Some(name.to_string()),
                ..RuleConfig::default()
            },
        )
    };
    let cpuset_rules = config.cpusets.iter().enumerate().map(cpuset_rule);
    cpuset_rules
        .chain(profiled_programs.map(profile_rule))
        .collect()
}

/// The treatment of the programs that match a rule, with their goals as they were understood.
fn describe_treatment(rule: &RuleConfig) -> String {
    let action = match rule.action {
        RuleAction::Manage => "managed",
        RuleAction::Observe => "only measured",
        RuleAction::Ignore => "ignored",
    };
    let goals = [
        rule.max_slowdown
            .map(|limit| format!("at most {} % slower", format_number(100.0 * limit))),
        rule.min_rate
            .map(|rate| format!("at least {} a second", format_number(rate))),
        rule.progress_file
            .as_ref()
            .map(|path| format!("counted by {}", path.display())),
        rule.priority
            .map(|priority| format!("priority {}", format_number(priority))),
    ];
    [action.to_string()]
        .into_iter()
        .chain(goals.into_iter().flatten())
        .collect::<Vec<_>>()
        .join(", ")
}

/// Interval between checks of the rules of a running daemon.
const RULE_CHECK_PERIOD: Duration = Duration::from_secs(60);

/// Tracks which rules and other entries of a running daemon match nothing.
pub(crate) struct RuleCheck {
    config: ManageConfig,
    /// The rules of the configuration, with the processes that they mean.
    rules: Vec<ManageRule>,
    last_check: Instant,
    warnings: Vec<String>,
}

impl RuleCheck {
    /// Builds the check. The first comparison takes place one interval from now, so a rule may match nothing for a
    /// minute.
    pub(crate) fn new(config: ManageConfig) -> Self {
        let mut rules = host::manage_rules(&config.rules);
        bind_to_processes(&mut rules, &LinuxHost::new("/"));
        RuleCheck {
            config,
            rules,
            last_check: Instant::now(),
            warnings: Vec::new(),
        }
    }

    /// Entries that match nothing, once a minute; `None` between checks. Logs rules that were not in the previous
    /// result.
    pub(crate) fn poll<'a>(
        &mut self,
        directory: &ServiceDirectory,
        profiled_programs: impl Iterator<Item = &'a str>,
        report: &dyn Fn(&str),
    ) -> Option<Vec<String>> {
        if self.last_check.elapsed() < RULE_CHECK_PERIOD {
            return None;
        }
        self.last_check = Instant::now();
        let rules = self.rules.clone();
        let unmatched_texts = match_entries(&self.config, rules, profiled_programs, directory)
            .ok()?
            .warnings;
        unmatched_texts
            .iter()
            .filter(|text| !self.warnings.contains(text))
            .for_each(|text| report(text));
        self.warnings.clone_from(&unmatched_texts);
        Some(unmatched_texts)
    }
}

fn describe_conditions(rule: &RuleConfig) -> String {
    let user = rule.user.as_ref().map(|user| match user {
        User::Id(id) => format!("user {id}"),
        User::Name(name) => format!("user '{}'", escape_controls(name)),
    });
    let conditions = [
        rule.command
            .as_ref()
            .map(|pattern| format!("command '{}'", escape_controls(pattern))),
        rule.cgroup
            .as_ref()
            .map(|path| format!("cgroup '{}'", escape_controls(path))),
        rule.pid.map(|pid| format!("pid {pid}")),
        user,
        rule.service
            .as_ref()
            .map(|pattern| format!("service '{}'", escape_controls(pattern))),
        rule.kind.map(|kind| format!("kind {kind}")),
        rule.namespace
            .as_ref()
            .map(|pattern| format!("namespace '{}'", escape_controls(pattern))),
        (!rule.labels.is_empty()).then(|| format!("labels {}", describe_labels(&rule.labels))),
    ];
    let stated_conditions: Vec<String> = conditions.into_iter().flatten().collect();
    if stated_conditions.is_empty() {
        "every program".to_string()
    } else {
        stated_conditions.join(", ")
    }
}

fn describe_labels(labels: &BTreeMap<String, String>) -> String {
    let pairs: Vec<String> = labels
        .iter()
        .map(|(name, value)| escape_controls(&format!("{name}={value}")))
        .collect();
    pairs.join(",")
}

fn describe_commands(commands: &[String]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in commands {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    let shown_names: Vec<String> = names
        .iter()
        .take(MAX_NAMES)
        .map(|name| escape_controls(name))
        .collect();
    let ellipsis = if names.len() > MAX_NAMES { ", ..." } else { "" };
    let count = match commands.len() {
        0 => "0 processes".to_string(),
        1 => "1 process".to_string(),
        count => format!("{count} processes"),
    };
    if shown_names.is_empty() {
        count
    } else {
        format!("{count}: {}{ellipsis}", shown_names.join(", "))
    }
}

fn describe_absence(rule_match: &RuleMatch) -> String {
    let count = rule_match.earlier_commands.len();
    if count > 0 {
        return format!(
            "decides nothing now, because earlier rules apply first to the processes that it matches ({count})"
        );
    }
    match rule_match.nearest.as_slice() {
        [] => "matches nothing now".to_string(),
        nearest_names => {
            let quoted_names: Vec<String> = nearest_names
                .iter()
                .map(|name| format!("'{}'", escape_controls(name)))
                .collect();
            format!("matches nothing now; nearest: {}", quoted_names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a rule list each name once with the number of processes, and escape names that could control a terminal?
    #[test]
    fn names_are_listed_once_and_escaped() {
        let decided = ["redis", "redis", "evil\x1b[2J"].map(String::from).to_vec();
        assert_eq!(
            describe_commands(&decided),
            "3 processes: redis, evil\\u{1b}[2J"
        );
        let shadowed = RuleMatch {
            earlier_commands: vec![String::new(); 2],
            ..RuleMatch::default()
        };
        assert!(describe_absence(&shadowed).contains("earlier rules apply first"));
    }

    /// Is a limit stated as it was understood, and is an entry that matches nothing a warning?
    #[test]
    fn entries_are_stated_as_understood() {
        let text = "[[rules]]\npid = 1\nmax_slowdown = '0.05%'\n[[cpusets]]\ncgroup = '/no/such.service'\ncpus = '0'\n\
                    [[rules]]\nservice = 'no-such-service'\nmin_rate = 5\nprogress_file = '/no/such/file'";
        let config = cachemate_spec::parse_manage_config("c.toml", text, &|_| None).unwrap();
        let report = build_rule_report(&config, std::iter::once("no-such-program")).unwrap();
        assert!(
            report.lines[0].starts_with("rules[0] (pid 1) managed, at most 0.05 % slower: "),
            "{:?}",
            report.lines
        );
        let starts = [
            "cpusets[0] (cgroup '/no/such.service') to CPUs 0 matches nothing now",
            "rules[1] (service 'no-such-service') matches nothing now",
            "rules[1].progress_file: /no/such/file: no such file now",
            "profile of 'no-such-program' matches nothing now",
        ];
        for start in starts {
            assert!(
                report
                    .warnings
                    .iter()
                    .any(|warning| warning.starts_with(start)),
                "{start}: {:?}",
                report.warnings
            );
        }
    }
}
