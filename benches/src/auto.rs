//! Part (h): cost and changes of `auto` with programs that no plan can help.

use std::time::Duration;

use anyhow::Context;
use cachemate_core::{CpuSet, median};
use cachemate_linux::kernel::{Kernel, LinuxHost};

use crate::bench_host::{BenchHost, BenchRow};
use crate::overhead::{BenchDaemon, describe_ratios, measure_pairs};
use crate::programs::Actor;

/// Windows before the comparison, in which `auto` profiles the programs and searches for a plan.
const LEARNING_TIME: Duration = Duration::from_secs(25);

/// CPUs and scheduling policy of each program's main thread.
fn actor_states(actors: &[Actor]) -> Vec<(Option<CpuSet>, Option<u32>)> {
    let host = LinuxHost::new("/");
    let actor_state = |actor: &Actor| {
        let policy = host.stat(actor.pid()).ok().map(|stat| stat.policy);
        (host.affinity(actor.pid()).ok(), policy)
    };
    actors.iter().map(actor_state).collect()
}

/// Measures part (h).
///
/// # Errors
/// A program or the daemon cannot be started.
pub fn bench_rows(bench_host: &BenchHost) -> anyhow::Result<Vec<BenchRow>> {
    const COST_TITLE: &str =
        "throughput of two programs that nothing can help, under 'auto' against unmanaged";
    const CHANGE_TITLE: &str = "programs of which 'auto' changed CPUs or scheduling there";
    let actors = [
        Actor::start_own(bench_host, "spared-1", "quiet", 0)?,
        Actor::start_own(bench_host, "spared-2", "quiet", 0)?,
    ];
    let format_rule = |actor: &Actor| format!("[[rules]]\npid = {}\n", actor.pid());
    let rules: String = actors.iter().map(format_rule).collect();
    std::fs::write(
        bench_host.work_dir.join("spared.toml"),
        format!("mode = \"act\"\nwindow_ms = 1000\n{rules}"),
    )
    .context("the daemon's configuration cannot be written")?;
    let states_before = actor_states(&actors);
    let daemon = BenchDaemon::start(bench_host, "spared", "spared", &[])?;
    daemon.wait_until_started(bench_host);
    bench_host.sleep_unless_stopped(LEARNING_TIME);
    let (managed_ratios, control_ratios) = measure_pairs(bench_host, &actors, &daemon);
    let states_after = actor_states(&actors);
    drop(daemon);
    let changed_count = states_before
        .iter()
        .zip(&states_after)
        .filter(|(before, after)| before != after)
        .count();
    let cost = match median(&managed_ratios).zip(median(&control_ratios)) {
        None => BenchRow::skipped("h", COST_TITLE, "no round came to its end".to_string()),
        Some((ratio, _)) => {
            // A control ratio as high as the managed ratio means that the host causes it, not the policy.
            let measured = describe_ratios(&managed_ratios, &control_ratios);
            BenchRow::from_target("h", COST_TITLE, "1 % less at most", measured, ratio >= 0.99)
        }
    };
    Ok(vec![
        cost,
        BenchRow::from_target(
            "h",
            CHANGE_TITLE,
            "0",
            changed_count.to_string(),
            changed_count == 0,
        ),
    ])
}
