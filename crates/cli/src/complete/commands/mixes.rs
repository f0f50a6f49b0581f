//! `cachemate repro mixes`: runs random mixes under every policy.

use cachemate_report::Table;
use cachemate_report::text::format_number;
use cachemate_repro::ExperimentContext;
use cachemate_repro::mixes::{MixOptions, PolicyScore, RandomMix, RandomMixes, score_random_mixes};
use cachemate_trace::bundled_recordings;

use crate::session::Session;

/// Draws random mixes, runs them under every policy and prints the scores.
pub fn run_mixes(
    session: &Session,
    quick: bool,
    seed: u64,
    count: u32,
    machine: &str,
    json: bool,
) -> anyhow::Result<()> {
    let stop = session.interrupt_flag();
    let bar = session.progress_bar("mixes", None);
    let report_progress = |message: &str| bar.set_message(message.to_string());
    let context = ExperimentContext {
        quick,
        progress: &report_progress,
        ..ExperimentContext::for_seed(seed, &stop)
    };
    let options = MixOptions {
        machine,
        mix_count: count,
        recordings: bundled_recordings(),
    };
    let mixes = score_random_mixes(&context, &options)?;
    bar.finish_and_clear();
    session.print_result(json, &mixes, || render(&mixes))
}

fn render(mixes: &RandomMixes) -> String {
    let mut text = format!(
        "{} mixes on {}, seed {}, time scale {}\n\nmean over mixes\n{}",
        mixes.mixes.len(),
        mixes.machine,
        mixes.seed,
        mixes.time_scale,
        score_table(&mixes.mean)
    );
    text.push_str(
        "\nthroughput: instructions over the default scheduler's; of it mix: changed shares of time at the default's speeds, \
         contention: changed speeds at the new shares.\nspeed-up: sum of the programs' speeds over their speeds alone; \
         harmonic mean: the same, low where one program is slow; worst slowdown: of a single program, 1 = none.\n",
    );
    for mix in &mixes.mixes {
        text.push_str(&format!(
            "\n{}\n{}{}",
            mix.programs.join(", "),
            score_table(&mix.policies),
            remarks_text(mix)
        ));
    }
    text
}

/// Remarks on a mix: programs that did not finish, and policies without a score.
fn remarks_text(mix: &RandomMix) -> String {
    let mut text = String::new();
    for score in mix
        .policies
        .iter()
        .filter(|score| !score.unfinished.is_empty())
    {
        let unfinished_names = score.unfinished.join(", ");
        text.push_str(&format!(
            "under {}, not finished when the run was abandoned: {unfinished_names}\n",
            score.policy
        ));
    }
    for pair in &mix.unfinished_pairs {
        text.push_str(&format!(
            "{pair}: not finished, so the optimum uses a lower bound\n"
        ));
    }
    for failure in &mix.failed {
        text.push_str(&format!(
            "no score: {}: {}\n",
            failure.policy, failure.reason
        ));
    }
    text
}

fn score_table(scores: &[PolicyScore]) -> String {
    let mut table = Table::with_columns(
        "policy",
        "throughput % | of it mix | contention | weighted speed-up | over default % | of best by matrix % | harmonic mean | worst slowdown",
    );
    for score in scores {
        let signed_percent = |percent: f64| format!("{percent:+.1}");
        table.add_row([
            score.policy.clone(),
            signed_percent(score.throughput_gain_percent),
            signed_percent(score.mix_gain_percent),
            signed_percent(score.contention_gain_percent),
            format_number(score.weighted_speedup),
            signed_percent(score.weighted_speedup_gain_percent),
            format!("{:.1}", score.of_best_by_matrix_percent),
            format_number(score.harmonic_mean),
            format_number(score.worst_slowdown),
        ]);
    }
    table.text()
}
