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
    /// Its replacement, without the command or the policy.
    pub new: &'static str,
}

/// All retired spellings. A test of the command iterates over this table.
pub const RETIRED_SPELLINGS: &[RetiredSpelling] = &[
    spelling(SpellingScope::Command, "color", "page-color"),
    spelling(SpellingScope::Command, "page", "dashboard"),
    spelling(SpellingScope::Command, "reset", "restore"),
    spelling(SpellingScope::Command, "validate", "validate-model"),
    spelling(SpellingScope::Command, "whatif", "compare"),
    spelling(SpellingScope::Command, "decompose", "attribute"),
    spelling(SpellingScope::Option, "repro --cache", "--store"),
    spelling(SpellingScope::Option, "repro --no-cache", "--no-store"),
    spelling(SpellingScope::Option, "attribute --cache", "--store"),
    spelling(SpellingScope::Option, "attribute --no-cache", "--no-store"),
    spelling(SpellingScope::Option, "manage --page", "--dashboard"),
    spelling(SpellingScope::Option, "manage --page-without-token", "--dashboard-no-auth"),
    spelling(SpellingScope::Option, "record --max", "--max-accesses"),
    spelling(SpellingScope::Option, "record --skip", "--skip-accesses"),
    spelling(SpellingScope::Option, "record --stop", "--kill-at-max"),
    spelling(SpellingScope::Option, "record --level", "--compression-level"),
    spelling(SpellingScope::Option, "convert --level", "--compression-level"),
    spelling(SpellingScope::Option, "mrc --per", "--by"),
    spelling(SpellingScope::Option, "mrc --sample", "--sample-rate"),
    spelling(SpellingScope::Option, "cachesim --policy", "--replacement"),
    spelling(SpellingScope::Option, "predict --scheme", "--model"),
    spelling(SpellingScope::Option, "plan --scheme", "--model"),
    spelling(SpellingScope::Option, "report --scheme", "--model"),
    spelling(SpellingScope::Option, "advise --scheme", "--model"),
    spelling(SpellingScope::Option, "plan --measured", "--slowdowns"),
    spelling(SpellingScope::Option, "page-color discover --bytes", "--memory"),
    spelling(SpellingScope::Option, "page-color discover --seconds", "--timeout"),
    spelling(SpellingScope::Option, "page-color run --hold", "--max-held"),
    spelling(SpellingScope::Option, "top --every", "--interval"),
    spelling(SpellingScope::Option, "top --looks", "--iterations"),
    spelling(SpellingScope::Option, "manage --windows", "--max-windows"),
    spelling(SpellingScope::Option, "manage --observe", "--observe-only"),
    spelling(SpellingScope::Option, "run --observe", "--observe-only"),
    spelling(SpellingScope::Option, "run --seconds", "--timeout"),
    spelling(SpellingScope::Option, "sweep run --again", "--retry-failed"),
    spelling(SpellingScope::Option, "sweep run --group", "--batch-size"),
    spelling(SpellingScope::Option, "sweep run --patience", "--idle-timeout"),
    spelling(SpellingScope::Option, "sweep run --stale-seconds", "--heartbeat-timeout"),
    spelling(SpellingScope::Option, "profile --max", "--max-accesses"),
    spelling(SpellingScope::Option, "profile --skip", "--skip-accesses"),
    spelling(SpellingScope::Option, "profile --stop", "--kill-at-max"),
    spelling(SpellingScope::Option, "profile --level", "--compression-level"),
    spelling(SpellingScope::Option, "repro --group", "--batch-size"),
    spelling(SpellingScope::Option, "repro --patience", "--idle-timeout"),
    spelling(SpellingScope::Option, "repro --stale-seconds", "--heartbeat-timeout"),
    spelling(SpellingScope::Option, "sweep merge --partial", "--allow-incomplete"),
    spelling(SpellingScope::Option, "lab run --files", "--programs-dir"),
    spelling(SpellingScope::Environment, "CACHEMATE_PACK", "CACHEMATE_RECORDINGS"),
    spelling(SpellingScope::Configuration, "act", "mode"),
    spelling(SpellingScope::Configuration, "guard", "rollback"),
    spelling(SpellingScope::Configuration, "guard.windows", "rollback.trial_windows"),
    spelling(SpellingScope::Configuration, "guard.loss_at_least", "rollback.min_loss"),
    spelling(SpellingScope::Configuration, "guard.keep_out_windows", "rollback.cooldown_windows"),
    spelling(SpellingScope::Configuration, "rules.degradation_at_most", "rules.max_slowdown"),
    spelling(SpellingScope::Configuration, "rules.rate_at_least", "rules.min_rate"),
    spelling(SpellingScope::Configuration, "rules.action = leave", "rules.action = ignore"),
    spelling(SpellingScope::Configuration, "groups", "cpusets"),
    spelling(SpellingScope::Configuration, "metrics", "metrics_address"),
    spelling(SpellingScope::Configuration, "gang_scheduler", "gang_scheduler_socket"),
    spelling(SpellingScope::Configuration, "sched_cache_tolerance", "kernel_cache_tolerance"),
    spelling(SpellingScope::PolicyParameter, "auto.without", "disable"),
    spelling(SpellingScope::PolicyParameter, "auto.least_gain", "min_gain"),
    spelling(SpellingScope::PolicyParameter, "cache-sizing.least_gain", "min_gain"),
    spelling(SpellingScope::PolicyParameter, "intensity-gangs.gain_at_least", "min_gain"),
    spelling(SpellingScope::PolicyParameter, "auto.effort", "max_evaluations"),
    spelling(SpellingScope::PolicyParameter, "auto.moving", "page_migration"),
    spelling(SpellingScope::PolicyParameter, "cache-sizing.moving", "page_migration"),
    spelling(SpellingScope::PolicyParameter, "static-partition.moving", "page_migration"),
    spelling(SpellingScope::PolicyParameter, "service-level.moving", "page_migration"),
    spelling(SpellingScope::PolicyParameter, "auto.horizon_ns", "payback_ns"),
    spelling(SpellingScope::PolicyParameter, "cache-sizing.horizon_ns", "payback_ns"),
    spelling(SpellingScope::PolicyParameter, "auto.settle_windows", "warmup_windows"),
    spelling(SpellingScope::PolicyParameter, "cache-sizing.settle_windows", "warmup_windows"),
    spelling(SpellingScope::PolicyParameter, "cache-sizing.judge_windows", "measure_windows"),
    spelling(SpellingScope::PolicyParameter, "cache-sizing.insensitive", "insensitive_below"),
    spelling(SpellingScope::PolicyParameter, "intensity-gangs.ganged_at_most", "max_ganged"),
    spelling(SpellingScope::PolicyParameter, "intensity-gangs.probing_at_most", "max_probe_share"),
    spelling(SpellingScope::PolicyParameter, "intensity-gangs.active_from", "min_cpu_share"),
    spelling(SpellingScope::PolicyParameter, "intensity-gangs.shared_below_ns", "shared_max_ns"),
    spelling(SpellingScope::PolicyParameter, "intensity-gangs.split_from_ns", "split_min_ns"),
    spelling(SpellingScope::PolicyParameter, "casc.row_at_most_ns", "max_row_ns"),
    spelling(SpellingScope::PolicyParameter, "casc.error_at_most", "max_error"),
    spelling(SpellingScope::PolicyParameter, "casc.departs_by", "drift_threshold"),
    spelling(SpellingScope::PolicyParameter, "casc.departs_windows", "drift_windows"),
    spelling(SpellingScope::PolicyParameter, "casc.relax", "threshold_step"),
    spelling(SpellingScope::PolicyParameter, "activity-vector.behind_at_most_samples", "max_lag_samples"),
    spelling(SpellingScope::PolicyParameter, "counter-driven.behind_at_most_samples", "max_lag_samples"),
    spelling(SpellingScope::PolicyParameter, "balance-set.extension", "group_model"),
    spelling(SpellingScope::PolicyParameter, "balance-set.turns", "rotation"),
    spelling(SpellingScope::PolicyParameter, "thread-clustering.inside", "within_chip"),
    spelling(SpellingScope::PolicyParameter, "static-partition.repeat_ns", "period_ns"),
    spelling(SpellingScope::PolicyParameter, "best-by-matrix.degradation", "slowdowns"),
    spelling(SpellingScope::PolicyParameter, "worst-by-matrix.degradation", "slowdowns"),
    spelling(SpellingScope::PolicyParameter, "balance-set.longest_wait_ns", "max_wait_ns"),
    spelling(SpellingScope::PolicyParameter, "intensity-gangs.longest_wait_ns", "max_wait_ns"),
    spelling(SpellingScope::PolicyParameter, "casc.run_time_variation_at_most", "max_run_time_variation"),
    spelling(SpellingScope::PolicyParameter, "thread-clustering.detection_ns_at_most", "max_detection_ns"),
    spelling(SpellingScope::PolicyParameter, "thread-clustering.imbalance_limit", "max_imbalance"),
    spelling(SpellingScope::Scenario, "model", "simulator"),
    spelling(SpellingScope::Scenario, "interval.turns", "interval.time_sharing"),
    spelling(SpellingScope::Scenario, "interval.stretch", "interval.phase_scale"),
    spelling(SpellingScope::Scenario, "interval.counters.turn_noise", "interval.counters.multiplexing_noise"),
    spelling(SpellingScope::Scenario, "interval.events.outside", "interval.events.external_traffic"),
    spelling(SpellingScope::Scenario, "interval.events.separate", "interval.events.split_cpus"),
    spelling(SpellingScope::Scenario, "interval.events.shrink", "interval.events.resize_cache"),
    spelling(SpellingScope::Scenario, "interval.events.shrink.to_share", "interval.events.resize_cache.size_share"),
    spelling(SpellingScope::Scenario, "interval.mixes.of", "interval.mixes.programs"),
    spelling(SpellingScope::Scenario, "interval.mixes.gap_ns", "interval.mixes.interarrival_ns"),
    spelling(SpellingScope::Scenario, "programs.gap_ns", "programs.interarrival_ns"),
    spelling(SpellingScope::Scenario, "programs.goal.degradation_at_most", "programs.goal.max_slowdown"),
    spelling(SpellingScope::Scenario, "programs.goal.rate_at_least", "programs.goal.min_rate"),
    spelling(SpellingScope::Machine, "counters.at_once", "counters.count"),
    spelling(SpellingScope::Machine, "caches.inclusion = neither", "caches.inclusion = non-inclusive"),
    spelling(SpellingScope::Machine, "caches.way_partitions.ways_at_least", "caches.way_partitions.min_ways"),
    spelling(SpellingScope::Machine, "memory.scheduling.demand_first", "memory.scheduling.demand_priority"),
    spelling(SpellingScope::Machine, "pages.move_page_cycles", "pages.migration_cycles"),
];

/// The spelling that replaced `old`, or `None` if `old` was never valid there.
pub fn successor(scope: SpellingScope, spelling: &str) -> Option<&'static str> {
    let row = RETIRED_SPELLINGS.iter().find(|row| row.scope == scope && row.old == spelling);
    row.map(|row| row.new)
}

/// The spelling that replaced the key or value `path` of a file; the tables around the key may have their new names.
pub fn key_successor(scope: SpellingScope, path: &str) -> Option<&'static str> {
    let in_new_table = |row: &RetiredSpelling| {
        let key = row.old.rsplit('.').next().unwrap_or(row.old);
        row.new.rsplit_once('.').is_some_and(|(table, _)| path.strip_prefix(table) == Some(format!(".{key}").as_str()))
    };
    let row = RETIRED_SPELLINGS.iter().find(|row| row.scope == scope && (row.old == path || in_new_table(row)));
    row.map(|row| row.new)
}

const fn spelling(scope: SpellingScope, old: &'static str, new: &'static str) -> RetiredSpelling {
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
            assert_eq!(successor(row.scope, row.old), Some(row.new));
            assert_eq!(successor(row.scope, row.new), None, "{row:?}");
        }
        assert_eq!(successor(SpellingScope::Command, "manage"), None);
    }
}
