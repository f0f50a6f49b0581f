//! Compares sampled miss-rate curves, with their error bars, to the exact textbook engine.

use super::stack::olken_histogram;
use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use cachemate_locality::sampled::{FixedRateSampler, SampledCurve};

pub const GROUP: BenchGroup = BenchGroup {
    name: "sampled",
    about: "miss-rate curves from 1 % of the lines against the textbook engine on all, one core",
    run,
};

/// Sizes at which curves are compared: four per factor of two.
fn compared_sizes() -> Vec<u64> {
    (40..84)
        .map(|index| libm::exp2(f64::from(index) / 4.0) as u64)
        .collect()
}

fn sampled_curve(lines: &[u64]) -> SampledCurve {
    let mut sample = FixedRateSampler::new(0.01, 1).expect("a valid rate");
    sample
        .push(lines)
        .and_then(|()| sample.finish())
        .expect("the traces have fewer lines than the limit")
}

fn run(options: &Options) -> Vec<ResultRow> {
    let mut rows = Vec::new();
    for kind in &options.traces {
        let lines = &kind.generate_lines(options.accesses);
        let contenders = vec![
            Contender::new("olken", || olken_histogram(lines).accesses()),
            Contender::new("1 % sampled", || sampled_curve(lines).sampled_accesses())
                .compare_with(0, Some(60.0)),
        ];
        rows.extend(compare(
            "sampled",
            kind.name(),
            lines.len(),
            options.rounds,
            BenchClock::Thread,
            false,
            contenders,
        ));
        let truth = olken_histogram(lines);
        let curve = sampled_curve(lines);
        let errors = compared_sizes().into_iter().filter_map(|size| {
            let exact = truth.misses_at(size) as f64 / truth.accesses() as f64;
            Some((curve.find_point(size)?.miss_ratio - exact).abs())
        });
        let errors: Vec<f64> = errors.collect();
        let bar = curve
            .error_bar(&compared_sizes())
            .map_or("none".into(), |bar| format!("{:.4}", bar.mean_half_width));
        eprintln!(
            "sampled {}: mean error {:.4}, greatest {:.4}, mean half-width (95 %) {bar}",
            kind.name(),
            errors.iter().sum::<f64>() / errors.len().max(1) as f64,
            errors.iter().copied().fold(0.0, f64::max),
        );
    }
    rows
}
