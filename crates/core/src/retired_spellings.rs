//! Spellings of version 0.1.0 and their successors, so that an error can name the new spelling.
//!
//! Old spellings are rejected, never accepted: help, completions and files use one name for each thing.

use std::sync::LazyLock;

/// The place in which a spelling occurs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpellingScope {
    /// A subcommand of `cachemate`.
    Command,
    /// An option, after its subcommand.
    Option,
    /// An environment variable.
    Environment,
    /// A key of `cachemate.toml`.
    Configuration,
    /// A parameter, after its policy.
    PolicyParameter,
    /// A key of a scenario, by its path without indices.
    Scenario,
    /// A key of a machine file, by its path without indices, or such a key with a value.
    Machine,
}

/// A rejected spelling, and its replacement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetiredSpelling {
    /// The place in which it occurs.
    pub scope: SpellingScope,
    /// The rejected spelling. Options follow their command, parameters their policy (`auto.without`), keys of files
    /// their tables, and values their key (`rules.action = leave`).
    pub old: &'static str,
    /// Replacement of the spelling, without the command or the policy.
    pub new: &'static str,
}

/// The table, one spelling for each line: scope, old spelling, new spelling.
static SPELLINGS: LazyLock<Vec<RetiredSpelling>> = LazyLock::new(|| {
    let parse_line = |line: &'static str| {
        let mut cells = line.split('\t');
        let scope = match cells.next()? {
            "command" => SpellingScope::Command,
            "option" => SpellingScope::Option,
            "environment" => SpellingScope::Environment,
            "configuration" => SpellingScope::Configuration,
            "policy-parameter" => SpellingScope::PolicyParameter,
            "scenario" => SpellingScope::Scenario,
            "machine" => SpellingScope::Machine,
            _ => return None,
        };
        Some(RetiredSpelling {
            scope,
            old: cells.next()?,
            new: cells.next()?,
        })
    };
    include_str!("retired_spellings.tsv")
        .lines()
        .filter_map(parse_line)
        .collect()
});

/// Returns all retired spellings.
pub fn retired_spellings() -> impl Iterator<Item = RetiredSpelling> {
    SPELLINGS.iter().copied()
}

/// Returns the spelling that replaced `spelling`, or `None` if `spelling` was never valid there.
pub fn successor_of(scope: SpellingScope, spelling: &str) -> Option<&'static str> {
    let row = retired_spellings().find(|row| row.scope == scope && row.old == spelling);
    row.map(|row| row.new)
}

/// Returns the spelling that replaced the key or value `path` of a file; the tables around the key may have their new
/// names.
pub fn key_successor(scope: SpellingScope, path: &str) -> Option<&'static str> {
    let is_in_new_table = |row: &RetiredSpelling| {
        let key = row.old.rsplit('.').next().unwrap_or(row.old);
        row.new
            .rsplit_once('.')
            .is_some_and(|(table, _)| path.strip_prefix(table) == Some(format!(".{key}").as_str()))
    };
    let row = retired_spellings()
        .find(|row| row.scope == scope && (row.old == path || is_in_new_table(row)));
    row.map(|row| row.new)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does each old spelling have one successor, which is not retired itself?
    #[test]
    fn every_spelling_has_one_successor_that_is_valid() {
        let table = include_str!("retired_spellings.tsv");
        assert_eq!(
            retired_spellings().count(),
            table.lines().count(),
            "a line without a known scope and two spellings"
        );
        for row in retired_spellings() {
            let same = retired_spellings()
                .filter(|other| other.scope == row.scope && other.old == row.old);
            assert_eq!(same.count(), 1, "{row:?}");
            assert_eq!(successor_of(row.scope, row.old), Some(row.new));
            assert_eq!(successor_of(row.scope, row.new), None, "{row:?}");
        }
        assert_eq!(successor_of(SpellingScope::Command, "manage"), None);
    }
}
