//! A study of four programs on two caches, for tests of its page.

use cachemate_report::*;

/// A study with every part of the page, and intervals in its plan.
pub fn sample_study() -> StudyPage {
    let names = ["mcf", "gamess", "milc", "namd"];
    let programs = names.map(|name| ProgramSummary {
        name: name.into(),
        command: Some(format!("{name} --input <a&b>")),
        class: Some(if name == "milc" { "devil" } else { "turtle" }.into()),
        ..ProgramSummary::default()
    });

    let curve = |scale: f64| {
        let point = |power: u32| CurvePoint {
            bytes: 1 << power,
            miss_ratio: scale / f64::from(power),
            mpki: Some(scale * 100.0 / f64::from(power)),
            miss_ratio_error: None,
        };
        (16..26).map(point).collect()
    };

    let placed = |name: &str| PlacementRow {
        name: name.into(),
        cpu: None,
        slowdown: Some(2.31),
        interval: Some(PercentRange {
            low_percent: -0.4,
            high_percent: 5.2,
        }),
        reason: format!("{name} keeps away from milc."),
    };
    let cache = |index: usize| CacheAssignment {
        cache: format!("L2 #{index}"),
        cpus: format!("{}-{}", 2 * index, 2 * index + 1),
        programs: vec![placed(names[2 * index]), placed(names[2 * index + 1])],
    };

    let plan = PlanResult {
        model: "measured".into(),
        unit: "percent".into(),
        solver: "matching".into(),
        optimal: true,
        caches: vec![cache(0), cache(1)],
        expected: Alternatives {
            plan: Some(2.3),
            best: Some(2.3),
            worst: Some(22.0),
            random: Some(8.9),
        },
        ..PlanResult::default()
    };

    let matrix = CostTable {
        model: "measured".into(),
        unit: "percent".into(),
        names: names.map(String::from).to_vec(),
        values: vec![vec![Some(0.02); 4]; 4],
        ..CostTable::default()
    };
    StudyPage {
        title: "Four programs on two caches".into(),
        programs: programs.to_vec(),
        curves: (1..5).map(|index| curve(f64::from(index))).collect(),
        matrix,
        plan: Some(plan),
        method: vec![("recorded".into(), "by <hand>".into())],
        ..StudyPage::default()
    }
}
