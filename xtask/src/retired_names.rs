//! Retired names with their successors, so that none returns by mistake.

use crate::source_tree::contains;

/// Parts of words that must not occur in any spelling.
const SPELLINGS: &[(&str, &str)] =
    &[("colour", "color"), ("neighbour", "neighbor"), ("modelled", "modeled"), ("modelling", "modeling")];

/// Whole identifiers and paths.
const NAMES: &[(&str, &str)] = &[
    ("TaskSeen", "TaskSample"),
    ("cachemate_core::Record", "cachemate_core::WindowRecord"),
    ("Clash", "CoRunPenalty"),
    ("clash_weight", "penalty_weight"),
    ("Item::Allowed", "PlanItem::Affinity"),
    ("Item::Clashes", "PlanItem::Penalties"),
    ("Ability::Clashes", "Ability::Penalties"),
    ("view.before", "view.previous_plan"),
    ("in_force.allowed", "in_force.affinity"),
    ("plan.allowed", "plan.affinity"),
    ("plan.clashes", "plan.penalties"),
    ("Dealt", "StickyPlacement"),
    ("Refills", "ReloadCosts"),
    ("Rung", "CapabilityCheck"),
    ("Ladder", "CapabilitySurvey"),
    ("Cast", "ProbePlacement"),
    ("of_optimal_percent", "of_best_by_matrix_percent"),
    ("policies::optimal", "policies::best_by_matrix"),
    ("policies::worst", "policies::worst_by_matrix"),
    ("policies/optimal.md", "policies/baselines.md"),
    ("policies/worst.md", "policies/baselines.md"),
    ("policy::company", "policy::coschedule"),
    ("policy::dealing", "policy::llc_placement"),
    ("policy::evening", "policy::load_balance"),
    ("partition::judging", "cache_sizing::share_controller"),
    ("partition::trial", "cache_sizing::ab_test"),
    ("partition::deal", "cache_sizing::allocate"),
    ("partition::space", "partition::demand_curve"),
    ("partition::record", "partition::speed_history"),
    ("linux::ladder", "linux::sense::capability_survey"),
    ("linux::journal", "linux::safety::journal"),
    ("linux::actuator", "linux::act::actuator"),
    ("crate::company", "crate::coschedule"),
    ("crate::evening", "crate::load_balance"),
    ("partition::domain", "partition::partitioned_cache"),
    ("llc_placement::Domain", "LlcTasks"),
    ("ab_test::Trial", "AbTest"),
    ("allocate::deal", "allocate::allocate"),
    ("Kind::Lane", "PartitionKind::TimeShare"),
    ("changes::Made", "changes::ChangeOutcome"),
    ("actuator.promise", "actuator.journal_originals"),
    ("Class::Presses", "ContentionClass::Aggressor"),
    ("Class::Feels", "ContentionClass::Victim"),
    ("presses and feels", "aggressor and victim"),
    ("live::shake", "daemon::chaos_policies"),
    ("live::chaos_policies", "daemon::chaos_policies"),
    ("live::live_bench", "crates/bench"),
    ("live-program", "cachemate-bench load"),
    ("cachemate live", "cachemate-bench live"),
    ("repro::cmt", "repro::niagara"),
    ("hw::near", "hw::l1_fast_path"),
    ("kernels::out", "kernels::emitter"),
    ("agent::stock", "agent::frame_pool"),
    ("Yardstick", "ReferencePredictor"),
    ("RowProfiler", "PcmrProfiler"),
    ("BesideProfiler", "CoRunSlowdownProfiler"),
    ("EvictedProfiler", "PrimeProbeProfiler"),
    ("KnownProfiler", "StoredProfileProfiler"),
];

/// Checks a text that is code, a page or a configuration.
pub fn check(shown_path: &str, text: &str, complaints: &mut Vec<String>) {
    let lower_text = text.to_lowercase();
    let names: Vec<_> = NAMES.iter().filter(|(retired, _)| contains(text, retired)).collect();
    let spellings: Vec<_> = SPELLINGS.iter().filter(|(retired, _)| contains(&lower_text, retired)).collect();
    if names.is_empty() && spellings.is_empty() {
        return;
    }
    for (index, line) in text.lines().enumerate() {
        let lower_line = line.to_lowercase();
        let spelling_matches = spellings.iter().copied().filter(|(retired, _)| lower_line.contains(retired));
        let retired_names = names.iter().copied().filter(|(retired, _)| has_name(line, retired));
        for (retired, now) in spelling_matches.chain(retired_names) {
            complaints.push(format!("{shown_path}:{}: '{retired}' is '{now}' now", index + 1));
        }
    }
}

/// Returns whether the name occurs as a whole, rather than as a part of a longer name.
fn has_name(line: &str, name: &str) -> bool {
    let is_word_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(name).any(|(index, _)| {
        let continues_before = line[..index].chars().next_back().is_some_and(is_word_part);
        let continues_after = line[index + name.len()..].chars().next().is_some_and(is_word_part);
        !continues_before && !continues_after
    })
}

/// Returns whether this file is checked. The list itself and the history of changes must contain retired names.
pub fn is_checked(path: &str) -> bool {
    let is_text =
        ["rs", "md", "toml", "sh", "html", "js", "py"].iter().any(|known| path.ends_with(&format!(".{known}")));
    is_text && path != "xtask/src/retired_names.rs" && path != "CHANGELOG.md"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a retired name found as a word and in any spelling, and are longer names accepted?
    #[test]
    fn retired_names_are_found_and_longer_ones_are_accepted() {
        let complaints_about = |text: &str| {
            let mut complaints = Vec::new();
            check("x.rs", text, &mut complaints);
            complaints
        };
        assert_eq!(complaints_about("let seen: TaskSeen;"), ["x.rs:1: 'TaskSeen' is 'TaskSample' now"]);
        assert_eq!(complaints_about("\nper_Colour"), ["x.rs:2: 'colour' is 'color' now"]);
        assert_eq!(complaints_about("TaskSeenBefore, Cassette, partition::dealer, MyClash"), [] as [&str; 0]);
    }
}
