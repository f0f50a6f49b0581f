//! Which of the host's programs are managed, and what is asked for them.
//!
//! Rules are tried in order; the first that matches decides. A program that no rule matches is not managed: nothing of
//! it is changed, and it does not appear among the tasks.

use cachemate_core::Goal;

/// One rule. All conditions that are given must hold; a rule without conditions matches everything.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ManageRule {
    /// Command name as the kernel keeps it (15 bytes), `*` and `?` allowed.
    pub command: Option<String>,
    /// Path of the cgroup, or of one above it; `*` and `?` match within a component.
    pub cgroup: Option<String>,
    /// The process or one that it descends from.
    pub pid: Option<i32>,
    /// Numeric user id of the process.
    pub user: Option<u32>,
    /// Treatment of a program that meets all conditions.
    pub action: ManageAction,
}

/// Treatment of a program that a rule matches.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum ManageAction {
    /// Measured and placed, with what is asked for it.
    Manage(Option<Goal>),
    /// Measured, never moved.
    Observe,
    /// Neither measured nor moved, as where no rule matches.
    #[default]
    Ignore,
}

/// Properties of a program that rules test.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleSubject<'a> {
    /// Command name as the kernel keeps it: 15 bytes at most.
    pub command: &'a str,
    /// Path of its control group; `None` = not known.
    pub cgroup: Option<&'a str>,
    /// The process, its parent, the parent's parent, ...; at least the process itself.
    pub lineage: &'a [i32],
    /// Real user id; `None` = not known.
    pub user: Option<u32>,
}

impl ManageRule {
    /// Whether the process meets all conditions.
    pub(crate) fn matches(&self, subject: &RuleSubject<'_>) -> bool {
        let command = self.command.as_ref().is_none_or(|pattern| glob(pattern, subject.command));
        let cgroup = self
            .cgroup
            .as_ref()
            .is_none_or(|above| subject.cgroup.is_some_and(|path| CgroupPattern(above).contains(path)));
        let pid = self.pid.is_none_or(|pid| subject.lineage.contains(&pid));
        let user = self.user.is_none_or(|user| subject.user == Some(user));
        command && cgroup && pid && user
    }
}

/// The action of the first rule that matches; [`ManageAction::Ignore`] if none does.
pub fn decide(rules: &[ManageRule], subject: &RuleSubject<'_>) -> ManageAction {
    rules.iter().find(|rule| rule.matches(subject)).map_or(ManageAction::Ignore, |rule| rule.action)
}

/// Path of cgroups, component by component: a wildcard never spans a `/`.
pub(crate) struct CgroupPattern<'a>(pub &'a str);

impl CgroupPattern<'_> {
    /// Whether `path` matches, or lies below a cgroup that does.
    pub(crate) fn contains(&self, path: &str) -> bool {
        let mut names = path.split('/');
        self.0.trim_end_matches('/').split('/').all(|pattern| names.next().is_some_and(|name| glob(pattern, name)))
    }
}

/// `*` stands for any run of characters, `?` for one. Linear in time: only the last star is ever gone back to.
fn glob(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    let (mut at, mut from, mut star) = (0, 0, None);
    while from < text.len() {
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(&c) if c == '?' || c == text[from] => {
                at += 1;
                from += 1;
            }
            _ => match star {
                Some((star_at, star_from)) => {
                    at = star_at + 1;
                    from = star_from + 1;
                    star = Some((star_at, star_from + 1));
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(command: &'static str) -> RuleSubject<'static> {
        RuleSubject { command, cgroup: Some("/system.slice/db.service"), lineage: &[7, 3, 1], user: Some(1000) }
    }

    /// Do stars and question marks match as in a shell?
    #[test]
    fn globs_match_as_in_a_shell() {
        for (pattern, text, want) in [
            ("mysql*", "mysqld", true),
            ("*d", "mysqld", true),
            ("m?sqld", "mysqld", true),
            ("mysql", "mysqld", false),
            ("*a*b", "xxaxxb", true),
            ("", "", true),
            ("*", "", true),
            ("?", "", false),
        ] {
            assert_eq!(glob(pattern, text), want, "{pattern} {text}");
        }
    }

    /// Does a wildcard of a cgroup match within one component, and a path without one match itself and all below it?
    #[test]
    fn wildcards_of_cgroups_stay_in_their_component() {
        for (pattern, path, want) in [
            ("/kubepods.slice/*/*pod1234*", "/kubepods.slice/burstable/kubepods-pod1234.slice/cri", true),
            ("/kubepods.slice/*pod1234*", "/kubepods.slice/burstable/pod1234", false),
            ("/*/db.service", "/system.slice/db.service", true),
            ("/*", "/system.slice/db.service", true),
            ("/", "/system.slice", true),
            ("/system.slice/", "/system.slice", true),
            ("/system.slice/d", "/system.slice/db", false),
            ("/system.slice/db/x", "/system.slice/db", false),
        ] {
            assert_eq!(CgroupPattern(pattern).contains(path), want, "{pattern} {path}");
        }
    }

    /// Does the first matching rule decide, must all its conditions hold, and is the unmatched left alone?
    #[test]
    fn the_first_matching_rule_decides() {
        let leave =
            ManageRule { command: Some("mysql*".into()), action: ManageAction::Ignore, ..ManageRule::default() };
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
        assert_eq!(decide(&rules, &subject("redis")), ManageAction::Manage(None));
        assert_eq!(
            decide(&[other], &subject("redis")),
            ManageAction::Ignore,
            "a name that only begins alike is no parent"
        );
        let parent = ManageRule { pid: Some(3), action: ManageAction::Observe, ..ManageRule::default() };
        assert_eq!(
            decide(&[parent], &subject("redis")),
            ManageAction::Observe,
            "children of a named process belong to it"
        );
        let both = ManageRule { user: Some(0), ..group };
        assert_eq!(decide(&[both], &subject("redis")), ManageAction::Ignore);
    }
}
