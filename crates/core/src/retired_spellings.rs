//! Spellings of earlier drafts and their successors, so that an error can name the new spelling.
//!
//! Old spellings are rejected, never accepted: help, completions and files use one name for each thing.

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

/// All retired spellings. A test of the command iterates over this table.
pub const RETIRED_SPELLINGS: &[RetiredSpelling] = &[
    retired_spelling(SpellingScope::Command, "color", "page-color"),
    retired_spelling(SpellingScope::Command, "page", "dashboard"),
    retired_spelling(SpellingScope::Command, "reset", "restore"),
    retired_spelling(SpellingScope::Command, "validate", "validate-model"),
    retired_spelling(SpellingScope::Command, "whatif", "compare"),
    retired_spelling(SpellingScope::Command, "decompose", "attribute"),
    retired_spelling(SpellingScope::Option, "repro --cache", "--store"),
    retired_spelling(SpellingScope::Option, "repro --no-cache", "--no-store"),
    retired_spelling(SpellingScope::Option, "attribute --cache", "--store"),
    retired_spelling(SpellingScope::Option, "attribute --no-cache", "--no-store"),
    retired_spelling(SpellingScope::Option, "manage --page", "--dashboard"),
    retired_spelling(SpellingScope::Option, "manage --page-without-token", "--dashboard-no-auth"),
    retired_spelling(SpellingScope::Option, "record --max", "--max-accesses"),
    retired_spelling(SpellingScope::Option, "record --skip", "--skip-accesses"),
    retired_spelling(SpellingScope::Option, "record --stop", "--kill-at-max"),
    retired_spelling(SpellingScope::Option, "record --level", "--compression-level"),
    retired_spelling(SpellingScope::Option, "convert --level", "--compression-level"),
    retired_spelling(SpellingScope::Option, "mrc --per", "--by"),
    retired_spelling(SpellingScope::Option, "mrc --sample", "--sample-rate"),
    retired_spelling(SpellingScope::Option, "cachesim --policy", "--replacement"),
    retired_spelling(SpellingScope::Option, "predict --scheme", "--model"),
    retired_spelling(SpellingScope::Option, "plan --scheme", "--model"),
    retired_spelling(SpellingScope::Option, "report --scheme", "--model"),
    retired_spelling(SpellingScope::Option, "advise --scheme", "--model"),
    retired_spelling(SpellingScope::Option, "plan --measured", "--slowdowns"),
    retired_spelling(SpellingScope::Option, "page-color discover --bytes", "--memory"),
    retired_spelling(SpellingScope::Option, "page-color discover --seconds", "--timeout"),
    retired_spelling(SpellingScope::Option, "page-color run --hold", "--max-held"),
    retired_spelling(SpellingScope::Option, "top --every", "--interval"),
    retired_spelling(SpellingScope::Option, "top --looks", "--iterations"),
    retired_spelling(SpellingScope::Option, "manage --windows", "--max-windows"),
    retired_spelling(SpellingScope::Option, "manage --observe", "--observe-only"),
    retired_spelling(SpellingScope::Option, "run --observe", "--observe-only"),
    retired_spelling(SpellingScope::Option, "run --seconds", "--timeout"),
    retired_spelling(SpellingScope::Option, "sweep run --again", "--retry-failed"),
    retired_spelling(SpellingScope::Option, "sweep run --group", "--batch-size"),
    retired_spelling(SpellingScope::Option, "sweep run --patience", "--idle-timeout"),
    retired_spelling(SpellingScope::Option, "sweep run --stale-seconds", "--heartbeat-timeout"),
    retired_spelling(SpellingScope::Option, "profile --max", "--max-accesses"),
    retired_spelling(SpellingScope::Option, "profile --skip", "--skip-accesses"),
    retired_spelling(SpellingScope::Option, "profile --stop", "--kill-at-max"),
    retired_spelling(SpellingScope::Option, "profile --level", "--compression-level"),
    retired_spelling(SpellingScope::Option, "repro --group", "--batch-size"),
    retired_spelling(SpellingScope::Option, "repro --patience", "--idle-timeout"),
    retired_spelling(SpellingScope::Option, "repro --stale-seconds", "--heartbeat-timeout"),
    retired_spelling(SpellingScope::Option, "sweep merge --partial", "--allow-incomplete"),
    retired_spelling(SpellingScope::Option, "lab run --files", "--programs-dir"),
    retired_spelling(SpellingScope::Environment, "CACHEMATE_PACK", "CACHEMATE_RECORDINGS"),
    retired_spelling(SpellingScope::Configuration, "act", "mode"),
    retired_spelling(SpellingScope::Configuration, "guard", "rollback"),
    retired_spelling(SpellingScope::Configuration, "guard.windows", "rollback.trial_windows"),
    retired_spelling(SpellingScope::Configuration, "guard.loss_at_least", "rollback.min_loss"),
    retired_spelling(SpellingScope::Configuration, "guard.keep_out_windows", "rollback.cooldown_windows"),
    retired_spelling(SpellingScope::Configuration, "rules.degradation_at_most", "rules.max_slowdown"),
    retired_spelling(SpellingScope::Configuration, "rules.rate_at_least", "rules.min_rate"),
    retired_spelling(SpellingScope::Configuration, "rules.action = leave", "rules.action = ignore"),
    retired_spelling(SpellingScope::Configuration, "groups", "cpusets"),
    retired_spelling(SpellingScope::Configuration, "metrics", "metrics_address"),
    retired_spelling(SpellingScope::Configuration, "gang_scheduler", "gang_scheduler_socket"),
    retired_spelling(SpellingScope::Configuration, "sched_cache_tolerance", "kernel_cache_tolerance"),
    retired_spelling(SpellingScope::PolicyParameter, "auto.without", "disable"),
    retired_spelling(SpellingScope::PolicyParameter, "auto.least_gain", "min_gain"),
    retired_spelling(SpellingScope::PolicyParameter, "cache-sizing.least_gain", "min_gain"),
    retired_spelling(SpellingScope::PolicyParameter, "intensity-gangs.gain_at_least", "min_gain"),
    retired_spelling(SpellingScope::PolicyParameter, "auto.effort", "max_evaluations"),
    retired_spelling(SpellingScope::PolicyParameter, "auto.moving", "page_migration"),
    retired_spelling(SpellingScope::PolicyParameter, "cache-sizing.moving", "page_migration"),
    retired_spelling(SpellingScope::PolicyParameter, "static-partition.moving", "page_migration"),
    retired_spelling(SpellingScope::PolicyParameter, "service-level.moving", "page_migration"),
    retired_spelling(SpellingScope::PolicyParameter, "auto.horizon_ns", "payback_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "cache-sizing.horizon_ns", "payback_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "auto.settle_windows", "warmup_windows"),
    retired_spelling(SpellingScope::PolicyParameter, "cache-sizing.settle_windows", "warmup_windows"),
    retired_spelling(SpellingScope::PolicyParameter, "cache-sizing.judge_windows", "measure_windows"),
    retired_spelling(SpellingScope::PolicyParameter, "cache-sizing.insensitive", "insensitive_below"),
    retired_spelling(SpellingScope::PolicyParameter, "intensity-gangs.ganged_at_most", "max_ganged"),
    retired_spelling(SpellingScope::PolicyParameter, "intensity-gangs.probing_at_most", "max_probe_share"),
    retired_spelling(SpellingScope::PolicyParameter, "intensity-gangs.active_from", "min_cpu_share"),
    retired_spelling(SpellingScope::PolicyParameter, "intensity-gangs.shared_below_ns", "shared_max_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "intensity-gangs.split_from_ns", "split_min_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "casc.row_at_most_ns", "max_row_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "casc.error_at_most", "max_error"),
    retired_spelling(SpellingScope::PolicyParameter, "casc.departs_by", "drift_threshold"),
    retired_spelling(SpellingScope::PolicyParameter, "casc.departs_windows", "drift_windows"),
    retired_spelling(SpellingScope::PolicyParameter, "casc.relax", "threshold_step"),
    retired_spelling(SpellingScope::PolicyParameter, "activity-vector.behind_at_most_samples", "max_lag_samples"),
    retired_spelling(SpellingScope::PolicyParameter, "counter-driven.behind_at_most_samples", "max_lag_samples"),
    retired_spelling(SpellingScope::PolicyParameter, "balance-set.extension", "group_model"),
    retired_spelling(SpellingScope::PolicyParameter, "balance-set.turns", "rotation"),
    retired_spelling(SpellingScope::PolicyParameter, "thread-clustering.inside", "within_chip"),
    retired_spelling(SpellingScope::PolicyParameter, "static-partition.repeat_ns", "period_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "best-by-matrix.degradation", "slowdowns"),
    retired_spelling(SpellingScope::PolicyParameter, "worst-by-matrix.degradation", "slowdowns"),
    retired_spelling(SpellingScope::PolicyParameter, "balance-set.longest_wait_ns", "max_wait_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "intensity-gangs.longest_wait_ns", "max_wait_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "casc.run_time_variation_at_most", "max_run_time_variation"),
    retired_spelling(SpellingScope::PolicyParameter, "thread-clustering.detection_ns_at_most", "max_detection_ns"),
    retired_spelling(SpellingScope::PolicyParameter, "thread-clustering.imbalance_limit", "max_imbalance"),
    retired_spelling(SpellingScope::Scenario, "model", "simulator"),
    retired_spelling(SpellingScope::Scenario, "interval.turns", "interval.time_sharing"),
    retired_spelling(SpellingScope::Scenario, "interval.stretch", "interval.phase_scale"),
    retired_spelling(SpellingScope::Scenario, "interval.counters.turn_noise", "interval.counters.multiplexing_noise"),
    retired_spelling(SpellingScope::Scenario, "interval.events.outside", "interval.events.external_traffic"),
    retired_spelling(SpellingScope::Scenario, "interval.events.separate", "interval.events.split_cpus"),
    retired_spelling(SpellingScope::Scenario, "interval.events.shrink", "interval.events.resize_cache"),
    retired_spelling(
        SpellingScope::Scenario,
        "interval.events.shrink.to_share",
        "interval.events.resize_cache.size_share",
    ),
    retired_spelling(SpellingScope::Scenario, "interval.mixes.of", "interval.mixes.programs"),
    retired_spelling(SpellingScope::Scenario, "interval.mixes.gap_ns", "interval.mixes.interarrival_ns"),
    retired_spelling(SpellingScope::Scenario, "programs.gap_ns", "programs.interarrival_ns"),
    retired_spelling(SpellingScope::Scenario, "programs.goal.degradation_at_most", "programs.goal.max_slowdown"),
    retired_spelling(SpellingScope::Scenario, "programs.goal.rate_at_least", "programs.goal.min_rate"),
    retired_spelling(SpellingScope::Machine, "counters.at_once", "counters.count"),
    retired_spelling(SpellingScope::Machine, "caches.inclusion = neither", "caches.inclusion = non-inclusive"),
    retired_spelling(SpellingScope::Machine, "caches.way_partitions.ways_at_least", "caches.way_partitions.min_ways"),
    retired_spelling(SpellingScope::Machine, "memory.scheduling.demand_first", "memory.scheduling.demand_priority"),
    retired_spelling(SpellingScope::Machine, "pages.move_page_cycles", "pages.migration_cycles"),
];

/// Returns the spelling that replaced `spelling`, or `None` if `spelling` was never valid there.
pub fn successor_of(scope: SpellingScope, spelling: &str) -> Option<&'static str> {
    let row = RETIRED_SPELLINGS.iter().find(|row| row.scope == scope && row.old == spelling);
    row.map(|row| row.new)
}

/// Returns the spelling that replaced the key or value `path` of a file; the tables around the key may have their new
/// names.
pub fn key_successor(scope: SpellingScope, path: &str) -> Option<&'static str> {
    let is_in_new_table = |row: &RetiredSpelling| {
        let key = row.old.rsplit('.').next().unwrap_or(row.old);
        row.new.rsplit_once('.').is_some_and(|(table, _)| path.strip_prefix(table) == Some(format!(".{key}").as_str()))
    };
    let row = RETIRED_SPELLINGS.iter().find(|row| row.scope == scope && (row.old == path || is_in_new_table(row)));
    row.map(|row| row.new)
}

const fn retired_spelling(scope: SpellingScope, old: &'static str, new: &'static str) -> RetiredSpelling {
    RetiredSpelling { scope, old, new }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does each old spelling have one successor, which is not retired itself?
    #[test]
    fn every_spelling_has_one_successor_that_is_valid() {
        for row in RETIRED_SPELLINGS {
            let same = RETIRED_SPELLINGS.iter().filter(|other| other.scope == row.scope && other.old == row.old);
            assert_eq!(same.count(), 1, "{row:?}");
            assert_eq!(successor_of(row.scope, row.old), Some(row.new));
            assert_eq!(successor_of(row.scope, row.new), None, "{row:?}");
        }
        assert_eq!(successor_of(SpellingScope::Command, "manage"), None);
    }
}
