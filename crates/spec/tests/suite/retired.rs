//! Retired spellings of scenarios and machines.

use cachemate_core::{SpellingScope, retired_spellings};
use cachemate_spec::{SpecError, parse_machine, parse_scenario};

/// Keys whose values are lists of tables.
const LISTS: [&str; 5] = [
    "programs",
    "caches",
    "interval.events",
    "interval.mixes",
    "prefetchers",
];

/// A file with one key, by its path without indices; `path = value` sets that value.
fn text_with(spelling: &str) -> String {
    let (path, value) = spelling
        .split_once(" = ")
        .map_or((spelling, "1".into()), |(p, v)| (p, format!("\"{v}\"")));
    let steps: Vec<&str> = path.split('.').collect();
    let mut text = format!("{} = {value}", steps[steps.len() - 1]);
    for depth in (1..steps.len()).rev() {
        let is_list = LISTS.contains(&steps[..depth].join(".").as_str());
        let entry_text = if is_list {
            format!("[{{ {text} }}]")
        } else {
            format!("{{ {text} }}")
        };
        text = format!("{} = {entry_text}", steps[depth - 1]);
    }
    text
}

fn refusal_of(scope: SpellingScope, spelling: &str) -> Option<SpecError> {
    let text = text_with(spelling);
    match scope {
        SpellingScope::Scenario => parse_scenario("s.toml", &text).err(),
        SpellingScope::Machine => parse_machine("s.toml", &text).err(),
        _ => None,
    }
}

/// Does each retired spelling of a scenario or machine give an error with its place and its successor, and is the
/// successor valid there?
#[test]
fn retired_spellings_give_an_error_with_their_successor() {
    let rows = retired_spellings().filter(|row| refusal_of(row.scope, row.old).is_some());
    let mut count = 0;
    for row in rows {
        let retired = refusal_of(row.scope, row.old).unwrap();
        assert_eq!(
            retired.to_string().split_once(": ").unwrap().1,
            format!("'{}' is now '{}'", row.old, row.new)
        );
        assert!(
            retired.line_column.is_some_and(|(line, _)| line == 1),
            "{retired:?}"
        );
        let current = refusal_of(row.scope, row.new).unwrap();
        let name = row.new.rsplit(['.', ' ']).next().unwrap();
        assert!(
            current.successor.is_none() && *current.found != *format!("'{name}'"),
            "{current}"
        );
        count += 1;
    }
    assert!(count > 15, "{count} rows");
}

/// Is a retired spelling also rejected if an override or a field of a sweep sets it?
#[test]
fn retired_spellings_are_rejected_in_overrides() {
    let error = cachemate_spec::load_machine("xeon-8592?counters.at_once=4")
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "xeon-8592:71:1: 'counters.at_once' is now 'counters.count'"
    );
}
