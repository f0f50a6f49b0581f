//! Shards: the runs of a command, divided among processes that share nothing.
//!
//! Problem: experiments take hours, and a cluster has idle machines, but every cluster has its own way to start and
//! restart processes. Idea: a run is stored under a hash of all that it depends on, so it does not matter who made it.
//! Each of N processes makes every N-th run (`--shard I/N --store DIR`), `cachemate merge` joins their stores, and the
//! same command without `--shard` finds every run in the joined store and prints the result. What starts the processes,
//! and starts them again when they die, is the cluster's own engine (docs/shards.md).

use std::path::Path;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use cachemate_report::text::format_count_of;
use clap::Args;
use serde::Serialize;

use crate::session::Session;

/// The part of the runs that one process makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shard {
    /// From 1 to `count`.
    part: usize,
    count: usize,
}

impl Shard {
    /// Runs are counted from 0, and dealt to the shards in turn.
    fn owns(self, position: usize) -> bool {
        position % self.count == self.part - 1
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let problem = || format!("found '{text}', expected I/N such as 1/4, I from 1 to N");
        let (part, count) = text.split_once('/').ok_or_else(problem)?;
        let shard = Shard {
            part: part.parse().map_err(|_| problem())?,
            count: count.parse().map_err(|_| problem())?,
        };
        if (1..=shard.count).contains(&shard.part) {
            Ok(shard)
        } else {
            Err(problem())
        }
    }
}

impl std::fmt::Display for Shard {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}/{}", self.part, self.count)
    }
}

#[derive(Args)]
pub struct ShardArg {
    /// Make only every N-th run, from the I-th on, and store it; `cachemate merge` joins the stores
    #[arg(long, value_name = "I/N", requires = "store")]
    pub shard: Option<Shard>,
}

impl ShardArg {
    /// The runs of this process: those of its shard, or all.
    pub fn select<T>(&self, runs: impl IntoIterator<Item = T>) -> Vec<T> {
        let is_owned = |position| self.shard.is_none_or(|shard| shard.owns(position));
        runs.into_iter()
            .enumerate()
            .filter(|(position, _)| is_owned(*position))
            .map(|(_, run)| run)
            .collect()
    }
}

/// The result of a shard, for every command with `--shard` and `--json`.
#[derive(Serialize)]
pub struct ShardJson {
    shard: String,
    /// Number of runs, or of other units of work, of this shard.
    runs: usize,
    failures: Vec<String>,
}

/// Prints the result of a shard, whose runs are in the store.
///
/// # Errors
/// A run failed.
pub fn print_shard(
    session: &Session,
    prints_json: bool,
    shard: Shard,
    runs: usize,
    failures: Vec<String>,
) -> anyhow::Result<()> {
    let failure_text = failures.join("; ");
    let result = ShardJson {
        shard: shard.to_string(),
        runs,
        failures,
    };
    session.print_result(prints_json, &result, || {
        let runs_text = format_count_of(runs as u64, "run");
        format!("shard {shard}: {runs_text}; the same command without --shard prints the result\n")
    })?;
    anyhow::ensure!(failure_text.is_empty(), "runs failed: {failure_text}");
    Ok(())
}

/// Computes a value for each item on all CPUs, in the order of the items; `None` for items that were not reached before
/// `should_stop`.
pub fn compute_all<T: Sync, R: Send>(
    items: &[T],
    should_stop: &(dyn Fn() -> bool + Sync),
    compute: impl Fn(&T) -> R + Sync,
) -> Vec<Option<R>> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..cachemate_study::cpu_count().min(items.len()) {
            scope.spawn(|| {
                while !should_stop() {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else {
                        break;
                    };
                    let result = compute(item);
                    *results[index].lock().expect("no holder panics") = Some(result);
                }
            });
        }
    });
    let take = |slot: Mutex<Option<R>>| slot.into_inner().expect("no holder panics");
    results.into_iter().map(take).collect()
}

/// Describes the content of an input file by its digest; `None` if there is no such file.
pub fn content_digest(path: &Path) -> Option<String> {
    let is_file = cachemate_files::path_exists(path);
    is_file.then(|| cachemate_repro::recordings::file_digest(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do the shards of any number of processes make every run exactly once?
    #[test]
    fn shards_make_every_run_once() {
        for count in 1..9 {
            let shards: Vec<Shard> = (1..=count)
                .map(|part| format!("{part}/{count}").parse().unwrap())
                .collect();
            for position in 0..40 {
                let owners = shards.iter().filter(|shard| shard.owns(position)).count();
                assert_eq!(owners, 1, "{position} of {count}");
            }
        }
        for text in ["", "1", "0/4", "5/4", "a/4", "1/0"] {
            let problem = text.parse::<Shard>().unwrap_err();
            assert!(problem.contains("expected I/N"), "{text}: {problem}");
        }
    }

    /// Are values in the order of their items, and is nothing begun after a stop?
    #[test]
    fn values_keep_the_order_of_their_items() {
        let items: Vec<u32> = (0..100).collect();
        let doubled = compute_all(&items, &|| false, |item| item * 2);
        assert!(
            doubled
                .iter()
                .zip(&items)
                .all(|(value, item)| *value == Some(item * 2))
        );
        assert!(
            compute_all(&items, &|| true, |item| *item)
                .iter()
                .all(Option::is_none)
        );
    }
}
