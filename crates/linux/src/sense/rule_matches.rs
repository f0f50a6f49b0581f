//! Programs of this host that each rule matches now, for the check of a configuration.

use std::collections::BTreeSet;
use std::io;

use crate::act::rules::{CgroupPattern, ManageRule};
use crate::kernel::{Kernel, none_if_missing};
use crate::sense::process_properties::{KnownProperties, PropertyReader, read_own_service};
use crate::sense::service_directory::ServiceDirectory;

/// Processes that one rule matches.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RuleMatch {
    /// Command names of the processes that this rule decides, in order of process id.
    pub decided_commands: Vec<String>,
    /// Command names of the processes that this rule matches as well, but an earlier rule decides.
    pub earlier_commands: Vec<String>,
    /// If the rule matches no process: the nearest existing cgroups or command names.
    pub nearest: Vec<String>,
}

/// Maximum number of suggestions for a rule without a match.
const MAX_NEAREST: usize = 3;

/// Matches of each rule among the processes of this host, except for this one.
///
/// # Errors
/// `/proc` cannot be listed or read.
pub fn find_rule_matches(
    kernel: &dyn Kernel,
    rules: &[ManageRule],
    directory: &ServiceDirectory,
) -> io::Result<Vec<RuleMatch>> {
    let mut matches = vec![RuleMatch::default(); rules.len()];
    let (mut commands, mut cgroups, mut services) =
        (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let own_service = read_own_service(kernel);
    let reader = PropertyReader::new(kernel, rules, directory, own_service.as_ref());
    for pid in kernel
        .processes()?
        .into_iter()
        .filter(|&pid| pid != kernel.own_pid())
    {
        let Some(stat) = none_if_missing(kernel.stat(pid))? else {
            continue;
        };
        let properties = reader.read(
            &stat,
            &reader.open_cgroup_file(&stat),
            &KnownProperties::default(),
        )?;
        let Some(subject) = properties.subject() else {
            continue;
        };
        let mut is_decided = false;
        for (_, rule_match) in rules
            .iter()
            .zip(&mut matches)
            .filter(|(rule, _)| rule.matches(&subject))
        {
            match is_decided {
                true => rule_match.earlier_commands.push(stat.name.clone()),
                false => rule_match.decided_commands.push(stat.name.clone()),
            }
            is_decided = true;
        }
        services.insert(properties.service_or_command().name);
        cgroups.extend(properties.cgroups);
        commands.insert(stat.name);
    }
    for (rule, rule_match) in rules.iter().zip(&mut matches) {
        if rule_match.decided_commands.is_empty() && rule_match.earlier_commands.is_empty() {
            rule_match.nearest = find_nearest_names(rule, &commands, &cgroups, &services);
        }
    }
    Ok(matches)
}

fn find_nearest_names(
    rule: &ManageRule,
    commands: &BTreeSet<String>,
    cgroups: &BTreeSet<String>,
    services: &BTreeSet<String>,
) -> Vec<String> {
    if let Some(pattern) = &rule.cgroup
        && !cgroups
            .iter()
            .any(|path| CgroupPattern(pattern).contains(path))
    {
        return find_nearest_cgroups(pattern, cgroups);
    }
    let find_nearest = |pattern: &Option<String>, names: &BTreeSet<String>| {
        let literal = pattern
            .as_ref()?
            .rsplit('/')
            .next()?
            .replace(['*', '?'], "");
        // A rule may omit the suffix of a unit.
        let stems = names.iter().map(|name| {
            name.rsplit_once('.')
                .map_or(name.as_str(), |(stem, _)| stem)
        });
        let nearest =
            cachemate_core::nearest_name(&literal, names.iter().map(String::as_str).chain(stems));
        nearest.map(str::to_string)
    };
    find_nearest(&rule.command, commands)
        .or_else(|| find_nearest(&rule.service, services))
        .into_iter()
        .collect()
}

/// Cgroups one level below the deepest ancestor of the pattern that exists, those with the nearest names first.
fn find_nearest_cgroups(pattern: &str, cgroups: &BTreeSet<String>) -> Vec<String> {
    let names: Vec<&str> = pattern.split('/').filter(|name| !name.is_empty()).collect();
    let depth = (0..names.len())
        .rev()
        .find(|&depth| {
            let parent = format!("/{}", names[..depth].join("/"));
            cgroups
                .iter()
                .any(|path| CgroupPattern(&parent).contains(path))
        })
        .unwrap_or(0);
    let parent = format!("/{}", names[..depth].join("/"));
    let mut child_paths: Vec<String> = cgroups
        .iter()
        .filter(|path| CgroupPattern(&parent).contains(path))
        .map(|path| {
            path.split('/')
                .take(depth + 2)
                .collect::<Vec<&str>>()
                .join("/")
        })
        .filter(|path| path.len() > 1)
        .collect::<BTreeSet<String>>()
        .into_iter()
        .collect();
    let missing_name = names
        .get(depth)
        .map_or(String::new(), |name| name.replace(['*', '?'], ""));
    let best_name = cachemate_core::nearest_name(
        &missing_name,
        child_paths
            .iter()
            .filter_map(|path| path.rsplit('/').next()),
    );
    let best_name = best_name.map(str::to_string);
    // A stable sort: the nearest name first, the others by path.
    child_paths.sort_by_key(|path| path.rsplit('/').next() != best_name.as_deref());
    child_paths.truncate(MAX_NEAREST);
    child_paths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_tests::FakeHost;

    fn sample_rule(command: Option<&str>, cgroup: Option<&str>) -> ManageRule {
        ManageRule {
            command: command.map(Into::into),
            cgroup: cgroup.map(Into::into),
            ..ManageRule::default()
        }
    }

    /// Does each rule list its processes, count those that an earlier rule takes, and suggest existing names if it has
    /// none?
    #[test]
    fn rules_list_their_processes_or_suggest_existing_names() {
        let host = FakeHost::default();
        for (pid, cgroup) in [
            (5, "/kubepods.slice/a/pod1234"),
            (6, "/kubepods.slice/b/pod77"),
            (7, "/system.slice/db"),
            (8, "/system.slice/opscan.service"),
        ] {
            host.add_thread(pid, pid, 1, "0");
            host.set_file(&format!("/proc/{pid}/cgroup"), &format!("0::{cgroup}\n"));
        }
        let rules = [
            sample_rule(None, Some("/kubepods.slice/*/*pod1234*")),
            sample_rule(None, Some("/kubepods.slice")),
            sample_rule(None, Some("/kubepods.slice/a")),
            sample_rule(None, Some("/system.slice/dv/x")),
            sample_rule(None, Some("/kubepods.slice/*/none")),
            ManageRule {
                service: Some("opscn".into()),
                ..ManageRule::default()
            },
        ];
        let matches = find_rule_matches(&host, &rules, &ServiceDirectory::default()).unwrap();
        let counts: Vec<(usize, usize)> = matches
            .iter()
            .map(|entry| (entry.decided_commands.len(), entry.earlier_commands.len()))
            .collect();
        assert_eq!(counts, [(1, 0), (1, 1), (0, 1), (0, 0), (0, 0), (0, 0)]);
        assert_eq!(matches[3].nearest[0], "/system.slice/db");
        assert_eq!(matches[5].nearest, ["opscan"]);
        assert_eq!(
            matches[4].nearest,
            ["/kubepods.slice/a/pod1234", "/kubepods.slice/b/pod77"]
        );
        assert!(matches[..3].iter().all(|entry| entry.nearest.is_empty()));
    }
}
