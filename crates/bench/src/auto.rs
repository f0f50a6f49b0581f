//! Part (h): cost and changes of `auto` with programs that no plan can help.

use std::time::Duration;

use anyhow::Context;
use cachemate_core::CpuSet;
use cachemate_linux::kernel::{Kernel, LinuxHost};

use crate::bench_host::{BenchHost, BenchRow, median};
use crate::overhead::{BenchDaemon, measure_pairs, ratio_text};
use crate::programs::Actor;

/// Windows before the comparison, in which `auto` profiles the programs and searches for a plan.
const LEARNING_TIME: Duration = Duration::from_secs(25);

/// CPUs and scheduling policy of each program's main thread.
fn actor_states(actors: &[Actor]) -> Vec<(Option<CpuSet>, Option<u32>)> {
    let host = LinuxHost::new("/");
    let state = |actor: &Actor| {
        let policy = host.stat(actor.pid()).ok().map(|stat| stat.policy);
        (host.affinity(actor.pid()).ok(), policy)
    };
    actors.iter().map(state).collect()
}

/// # Errors
/// A program or the daemon cannot be started.
pub fn bench_rows(place: &BenchHost) -> anyhow::Result<Vec<BenchRow>> {
    const COST: &str = "throughput of two programs that nothing can help, under 'auto' against unmanaged";
    const CHANGED: &str = "programs of which 'auto' changed CPUs or scheduling there";
    let actors = [Actor::start_own(place, "spared-1", "quiet", 0)?, Actor::start_own(place, "spared-2", "quiet", 0)?];
    let rule = |actor: &Actor| format!("[[rules]]\npid = {}\n", actor.pid());
    let rules: String = actors.iter().map(rule).collect();
    std::fs::write(place.dir.join("spared.toml"), format!("mode = \"act\"\nwindow_ms = 1000\n{rules}"))
        .context("the daemon's configuration cannot be written")?;
    let states_before = actor_states(&actors);
    let daemon = BenchDaemon::start(place, "spared", "spared", &[])?;
    daemon.wait_until_started(place);
    place.sleep_unless_stopped(LEARNING_TIME);
    let (managed, control) = measure_pairs(place, &actors, &daemon);
    let states_after = actor_states(&actors);
    drop(daemon);
    let changed_count = states_before.iter().zip(&states_after).filter(|(before, after)| before != after).count();
    let cost = match median(&managed).zip(median(&control)) {
        None => BenchRow::not_shown("h", COST, "no round came to its end".to_string()),
        Some((ratio, _)) => {
            // A control ratio as high as the managed ratio means that the host causes it, not the policy.
            let measured = ratio_text(&managed, &control);
            BenchRow::judged_row("h", COST, "1 % less at most", measured, ratio >= 0.99)
        }
    };
    Ok(vec![cost, BenchRow::judged_row("h", CHANGED, "0", changed_count.to_string(), changed_count == 0)])
}
