//! Rules that select the host's programs to be managed, and their goals.
//!
//! Rules are tried in order; the first that matches decides. A program that no rule matches is not managed: it is not
//! changed, and it does not appear among the tasks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cachemate_core::{Goal, ServiceIdentity, ServiceKind};

use crate::kernel::{Kernel, ThreadKey};
use crate::sense::service_directory::ContainerRecord;

/// A rule. All its conditions must hold; a rule without conditions matches every program.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ManageRule {
    /// Command name as the kernel keeps it (15 bytes), `*` and `?` allowed.
    pub command: Option<String>,
    /// Path of the cgroup, or of one above it; `*` and `?` match within a component.
    pub cgroup: Option<String>,
    /// The process or one of its ancestors.
    pub pid: Option<i32>,
    /// Which process of that number the rule means.
    pub meant_process: MeantProcess,
    /// Numeric user id of the process.
    pub user: Option<u32>,
    /// Name of the service, or `kind/name`; `*` and `?` match within a component.
    pub service: Option<String>,
    /// Kind of the service.
    pub kind: Option<ServiceKind>,
    /// Namespace of the pod, as the container runtime reports it; `*` and `?` allowed.
    pub namespace: Option<String>,
    /// Labels that the pod must have, as the container runtime reports them; values may contain `*` and `?`.
    pub labels: BTreeMap<String, String>,
    /// Whether the pod's own limit is a promise, if the rule states none.
    pub takes_promises_from_labels: bool,
    /// File with the total work so far of all processes that the rule decides about.
    pub progress_file: Option<PathBuf>,
    /// Treatment of a program that meets all conditions.
    pub action: ManageAction,
}

/// The process that a rule means by its number, which the kernel gives to a later process when the first has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MeantProcess {
    /// Whichever has the number, for rules that are only tested now.
    #[default]
    Any,
    /// The process that started at this clock tick.
    StartedAt(u64),
    /// None had the number when the rule was loaded.
    Missing,
}

/// Makes each rule with a process id mean the process that has it now, and no later one.
pub fn bind_to_processes(rules: &mut [ManageRule], kernel: &dyn Kernel) {
    for rule in rules {
        if let Some(pid) = rule.pid {
            rule.meant_process = match kernel.stat(pid) {
                Ok(stat) => MeantProcess::StartedAt(stat.key.start_ticks),
                Err(_) => MeantProcess::Missing,
            };
        }
    }
}

/// Treatment of a program that a rule matches.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum ManageAction {
    /// Measured and placed, with its goal if it has one.
    Manage(Option<Goal>),
    /// Measured, but never moved.
    Observe,
    /// Neither measured nor moved, as if no rule matched.
    #[default]
    Ignore,
}

/// Properties of a program that rules test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleSubject<'a> {
    /// Command name as the kernel keeps it: 15 bytes at most.
    pub command: &'a str,
    /// Paths of its control groups, one for each hierarchy in which they differ.
    pub cgroups: &'a [String],
    /// The process, its parent, the parent's parent, ...; at least the process itself.
    pub lineage: &'a [ThreadKey],
    /// Real user id; `None` if unknown.
    pub user: Option<u32>,
    /// Service of the process; `None` if the service is the command.
    pub service: Option<&'a ServiceIdentity>,
    /// Whether it belongs to the runtime rather than to the service.
    pub is_helper: bool,
    /// Container of the process, if the runtime reports it.
    pub container: Option<&'a ContainerRecord>,
}

impl MeantProcess {
    fn is_started_at(self, process: &ThreadKey) -> bool {
        match self {
            MeantProcess::Any => true,
            MeantProcess::StartedAt(ticks) => process.start_ticks == ticks,
            MeantProcess::Missing => false,
        }
    }
}

impl ManageRule {
    /// Whether the process meets all conditions.
    pub(crate) fn matches(&self, subject: &RuleSubject<'_>) -> bool {
        let matches_command = self
            .command
            .as_ref()
            .is_none_or(|pattern| matches_glob(pattern, subject.command));
        let is_below = |above: &String| {
            subject
                .cgroups
                .iter()
                .any(|path| CgroupPattern(above).contains(path))
        };
        let matches_cgroup = self.cgroup.as_ref().is_none_or(is_below);
        let matches_pid = self.pid.is_none_or(|pid| {
            subject
                .lineage
                .iter()
                .any(|process| process.tid == pid && self.meant_process.is_started_at(process))
        });
        let matches_user = self.user.is_none_or(|user| subject.user == Some(user));
        matches_command
            && matches_cgroup
            && matches_pid
            && matches_user
            && self.matches_service(subject)
            && self.accepts_helper(subject)
    }

    fn matches_service(&self, subject: &RuleSubject<'_>) -> bool {
        let service_kind = subject
            .service
            .map_or(ServiceKind::Command, |service| service.kind);
        let is_named = |pattern: &String| match subject.service {
            Some(service) => matches_service_name(pattern, service),
            None => matches_service_name(pattern, &ServiceIdentity::command(subject.command)),
        };
        let matches_container_field =
            |pattern: &str, select_field: fn(&ContainerRecord) -> &str| {
                subject
                    .container
                    .is_some_and(|container| matches_glob(pattern, select_field(container)))
            };
        let has_label = |(name, pattern): (&String, &String)| {
            let label_value = subject
                .container
                .and_then(|container| container.labels.get(name));
            label_value.is_some_and(|value| matches_glob(pattern, value))
        };
        self.kind
            .is_none_or(|required_kind| required_kind == service_kind)
            && self.service.as_ref().is_none_or(is_named)
            && self.namespace.as_ref().is_none_or(|namespace| {
                matches_container_field(namespace, |record| &record.namespace)
            })
            && self.labels.iter().all(has_label)
    }

    /// Whether the rule may match the program. A rule applies to the programs of a service, so it matches a helper of
    /// the runtime only if it names the command or the process.
    fn accepts_helper(&self, subject: &RuleSubject<'_>) -> bool {
        !subject.is_helper
            || self.command.as_ref().is_some_and(|pattern| pattern != "*")
            || self.pid.is_some()
    }
}

/// `redis`, `redis.service`, `unit/redis*`, `pod/shop/*/redis`: a pattern with wildcards is tried on the name and on
/// `kind/name`.
pub fn matches_service_name(pattern: &str, service: &ServiceIdentity) -> bool {
    if !pattern.contains(['*', '?']) {
        return service.is_named(pattern);
    }
    let kind_and_name = service.to_string();
    let matches_components = |text: &str| {
        let mut names = text.split('/');
        pattern
            .split('/')
            .all(|part| names.next().is_some_and(|name| matches_glob(part, name)))
            && names.next().is_none()
    };
    matches_components(&kind_and_name)
        || service.has_trusted_name() && matches_components(&service.name)
}

/// The rule that decides about the process: the first that matches.
pub(crate) fn find_rule<'a>(
    rules: &'a [ManageRule],
    subject: &RuleSubject<'_>,
) -> Option<&'a ManageRule> {
    rules.iter().find(|rule| rule.matches(subject))
}

/// The action of the first rule that matches; [`ManageAction::Ignore`] if none does. A rule without a limit leaves it
/// to the pod's owner, if it says so.
pub fn decide(rules: &[ManageRule], subject: &RuleSubject<'_>) -> ManageAction {
    let Some(rule) = find_rule(rules, subject) else {
        return ManageAction::Ignore;
    };
    let limit_of_pod = if rule.takes_promises_from_labels {
        subject.container.and_then(ContainerRecord::max_slowdown)
    } else {
        None
    };
    match (rule.action, limit_of_pod) {
        (ManageAction::Manage(goal), Some(limit))
            if goal.is_none_or(|goal| goal.max_slowdown.is_none()) =>
        {
            ManageAction::Manage(Some(Goal {
                max_slowdown: Some(limit),
                ..goal.unwrap_or_default()
            }))
        }
        _ => rule.action,
    }
}

/// Pattern for the path of a cgroup, matched component by component, so that a wildcard never spans a `/`.
pub(crate) struct CgroupPattern<'a>(pub &'a str);

impl CgroupPattern<'_> {
    /// Whether `path` matches, or lies below a cgroup that does.
    pub(crate) fn contains(&self, path: &str) -> bool {
        let mut names = path.split('/');
        self.0
            .trim_end_matches('/')
            .split('/')
            .all(|pattern| names.next().is_some_and(|name| matches_glob(pattern, name)))
    }
}

/// Whether `text` matches the pattern, in which `*` matches any number of characters and `?` one character. Backtracks
/// only to the last star.
fn matches_glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut pattern_index, mut text_index, mut last_star) = (0, 0, None);
    while text_index < text.len() {
        match pattern.get(pattern_index) {
            Some('*') => {
                last_star = Some((pattern_index, text_index));
                pattern_index += 1;
            }
            Some(&c) if c == '?' || c == text[text_index] => {
                pattern_index += 1;
                text_index += 1;
            }
            _ => match last_star {
                Some((star_pattern_index, star_text_index)) => {
                    pattern_index = star_pattern_index + 1;
                    text_index = star_text_index + 1;
                    last_star = Some((star_pattern_index, star_text_index + 1));
                }
                None => return false,
            },
        }
    }
    pattern[pattern_index..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::fake_tests::FakeHost;

    const LINEAGE: [ThreadKey; 3] = [process(7), process(3), process(1)];

    /// The process of this id that started first.
    const fn process(tid: i32) -> ThreadKey {
        ThreadKey {
            tid,
            start_ticks: 10 * tid as u64,
        }
    }

    /// Does a rule that names a process go on to match its children, and no later process of its number, whether the
    /// first has ended or never was?
    #[test]
    fn a_rule_means_the_process_that_had_the_number_when_it_was_loaded() {
        let host = FakeHost::with_threads([3]);
        let mut rules = [3, 4].map(|pid| ManageRule {
            pid: Some(pid),
            action: ManageAction::Observe,
            ..ManageRule::default()
        });
        bind_to_processes(&mut rules, &host);
        let decide_for = |lineage: &[ThreadKey]| {
            decide(
                &rules,
                &RuleSubject {
                    lineage,
                    ..subject("redis")
                },
            )
        };
        assert_eq!(decide_for(&LINEAGE), ManageAction::Observe);
        let later = ThreadKey {
            start_ticks: 9_000,
            ..process(3)
        };
        assert_eq!(decide_for(&[later]), ManageAction::Ignore);
        assert_eq!(decide_for(&[process(7), later]), ManageAction::Ignore);
        assert_eq!(decide_for(&[process(4)]), ManageAction::Ignore);
    }

    fn subject(command: &'static str) -> RuleSubject<'static> {
        static CGROUPS: LazyLock<Vec<String>> =
            LazyLock::new(|| vec!["/system.slice/db.service".to_string()]);
        RuleSubject {
            command,
            cgroups: &CGROUPS,
            lineage: &LINEAGE,
            user: Some(1000),
            service: None,
            is_helper: false,
            container: None,
        }
    }

    /// Do conditions on services match by kind, by name with and without wildcards, and by the runtime's report?
    #[test]
    fn services_match_by_kind_name_and_report() {
        let unit = ServiceIdentity::new(ServiceKind::Unit, "db.service");
        let pod = ServiceIdentity::from_pod("shop/cart-1", Some("redis"));
        let record = ContainerRecord {
            namespace: "shop".into(),
            labels: [("app".to_string(), "cart".to_string())].into(),
            ..ContainerRecord::default()
        };
        let base = subject("x");
        let of_unit = RuleSubject {
            service: Some(&unit),
            ..base.clone()
        };
        let of_pod = RuleSubject {
            service: Some(&pod),
            container: Some(&record),
            ..base.clone()
        };
        let by_service = |pattern: &str| ManageRule {
            service: Some(pattern.into()),
            ..ManageRule::default()
        };
        for (pattern, expected) in [
            ("db", [true, false, false]),
            ("unit/*", [true, false, false]),
            ("d?.service", [true, false, false]),
            ("pod/shop/*/redis", [false, true, false]),
            ("shop/*/redis", [false, true, false]),
            ("shop/*", [false, false, false]),
            ("x", [false, false, true]),
            ("command/*", [false, false, true]),
        ] {
            let found =
                [&of_unit, &of_pod, &base].map(|subject| by_service(pattern).matches(subject));
            assert_eq!(found, expected, "{pattern}");
        }
        let pods = ManageRule {
            kind: Some(ServiceKind::Pod),
            ..ManageRule::default()
        };
        assert_eq!(
            [&of_unit, &of_pod, &base].map(|subject| pods.matches(subject)),
            [false, true, false]
        );
        let space = ManageRule {
            namespace: Some("sh*".into()),
            ..ManageRule::default()
        };
        assert_eq!(
            [&of_unit, &of_pod].map(|subject| space.matches(subject)),
            [false, true]
        );
        let label = |value: &str| ManageRule {
            labels: [("app".into(), value.into())].into(),
            ..ManageRule::default()
        };
        assert!(
            label("c*").matches(&of_pod)
                && !label("web").matches(&of_pod)
                && !label("*").matches(&of_unit)
        );
    }

    /// Does a pod's own limit apply where its rule has none and allows it, never below the least one, and an invalid
    /// one nowhere?
    #[test]
    fn a_pods_limit_applies_where_its_rule_allows_it() {
        let limit_by = |mark: &str, goal: Option<Goal>, takes_promises_from_labels: bool| {
            let labels = [("cachemate.io/max-slowdown".to_string(), mark.to_string())].into();
            let record = ContainerRecord {
                labels,
                ..ContainerRecord::default()
            };
            let of_pod = RuleSubject {
                container: Some(&record),
                ..subject("x")
            };
            let rules = [ManageRule {
                action: ManageAction::Manage(goal),
                takes_promises_from_labels,
                ..ManageRule::default()
            }];
            match decide(&rules, &of_pod) {
                ManageAction::Manage(goal) => goal.map(|goal| (goal.priority, goal.max_slowdown)),
                action => panic!("{action:?}"),
            }
        };
        let limit_of = |mark: &str, goal: Option<Goal>| limit_by(mark, goal, true);
        assert_eq!(limit_by("10%", None, false), None);
        assert_eq!(limit_of("0.001%", None), Some((1.0, Some(0.01))));
        assert_eq!(limit_of("10%", None), Some((1.0, Some(0.1))));
        assert_eq!(
            limit_of(
                "5",
                Some(Goal {
                    priority: 3.0,
                    ..Goal::default()
                })
            ),
            Some((3.0, Some(0.05)))
        );
        assert_eq!(
            limit_of(
                "5%",
                Some(Goal {
                    max_slowdown: Some(0.2),
                    ..Goal::default()
                })
            ),
            Some((1.0, Some(0.2)))
        );
        assert_eq!(
            [
                limit_of("-5%", None),
                limit_of("soon", None),
                limit_of("inf", None)
            ],
            [None; 3]
        );
    }

    /// Is a helper of a runtime matched only by a rule that names its command or its process?
    #[test]
    fn helpers_are_matched_by_name_only() {
        let helper = RuleSubject {
            is_helper: true,
            ..subject("pause")
        };
        let command = |pattern: &str| ManageRule {
            command: Some(pattern.into()),
            ..ManageRule::default()
        };
        assert!(!ManageRule::default().matches(&helper) && !command("*").matches(&helper));
        assert!(command("pause").matches(&helper));
        assert!(
            ManageRule {
                pid: Some(3),
                ..ManageRule::default()
            }
            .matches(&helper)
        );
    }

    /// Do stars and question marks match as in a shell?
    #[test]
    fn globs_match_as_in_a_shell() {
        for (pattern, text, expected) in [
            ("mysql*", "mysqld", true),
            ("*d", "mysqld", true),
            ("m?sqld", "mysqld", true),
            ("mysql", "mysqld", false),
            ("*a*b", "xxaxxb", true),
            ("", "", true),
            ("*", "", true),
            ("?", "", false),
        ] {
            assert_eq!(matches_glob(pattern, text), expected, "{pattern} {text}");
        }
    }

    /// Does a wildcard of a cgroup match within one component, and a path without one match itself and all below it?
    #[test]
    fn wildcards_of_cgroups_stay_in_their_component() {
        for (pattern, path, expected) in [
            (
                "/kubepods.slice/*/*pod1234*",
                "/kubepods.slice/burstable/kubepods-pod1234.slice/cri",
                true,
            ),
            (
                "/kubepods.slice/*pod1234*",
                "/kubepods.slice/burstable/pod1234",
                false,
            ),
            ("/*/db.service", "/system.slice/db.service", true),
            ("/*", "/system.slice/db.service", true),
            ("/", "/system.slice", true),
            ("/system.slice/", "/system.slice", true),
            ("/system.slice/d", "/system.slice/db", false),
            ("/system.slice/db/x", "/system.slice/db", false),
        ] {
            assert_eq!(
                CgroupPattern(pattern).contains(path),
                expected,
                "{pattern} {path}"
            );
        }
    }

    /// Does the first matching rule decide, must all its conditions hold, and is an unmatched program ignored?
    #[test]
    fn the_first_matching_rule_decides() {
        let leave = ManageRule {
            command: Some("mysql*".into()),
            action: ManageAction::Ignore,
            ..ManageRule::default()
        };
        let group = ManageRule {
            cgroup: Some("/system.slice".into()),
            action: ManageAction::Manage(None),
            ..ManageRule::default()
        };
        let other = ManageRule {
            cgroup: Some("/system.slice/db".into()),
            action: ManageAction::Observe,
            ..ManageRule::default()
        };
        let rules = [leave, group.clone()];
        assert_eq!(decide(&rules, &subject("mysqld")), ManageAction::Ignore);
        assert_eq!(
            decide(&rules, &subject("redis")),
            ManageAction::Manage(None)
        );
        assert_eq!(
            decide(&[other], &subject("redis")),
            ManageAction::Ignore,
            "a name that only begins alike is no parent"
        );
        let parent = ManageRule {
            pid: Some(3),
            action: ManageAction::Observe,
            ..ManageRule::default()
        };
        assert_eq!(
            decide(&[parent], &subject("redis")),
            ManageAction::Observe,
            "children of a named process belong to it"
        );
        let both = ManageRule {
            user: Some(0),
            ..group
        };
        assert_eq!(decide(&[both], &subject("redis")), ManageAction::Ignore);
    }
}
