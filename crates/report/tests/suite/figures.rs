//! Do figures stay unchanged, accept any data, and put no reader at risk?

use cachemate_report::figure::*;
use expect_test::{Expect, expect, expect_file};

fn sample_chart() -> Chart {
    let point = |x: f64, y: f64| ChartPoint {
        x,
        y,
        interval: Some((y * 0.8, y * 1.2)),
        title: None,
    };
    let line = |name: &str, ys: [f64; 4]| Series {
        name: name.into(),
        points: ys
            .iter()
            .enumerate()
            .map(|(index, y)| point(65536.0 * f64::from(1 << (2 * index)), *y))
            .collect(),
        ..Series::default()
    };
    let mut steps = line("steps", [4.0, 4.0, 3.0, 2.5]);
    steps.mark = Mark::Steps;
    steps.has_whiskers = true;
    steps.is_dashed = true;

    Chart {
        title: "Misses <of> \"two\" & more".into(),
        x: Axis::bytes("cache size"),
        y: Axis::linear("misses per 1000 instructions"),
        series: vec![line("mcf", [30.0, 22.0, 9.0, 1.0]), steps],
        references: vec![
            ReferenceLine::X {
                label: "2M L2".into(),
                position: 2097152.0,
            },
            ReferenceLine::YBand {
                label: "published".into(),
                from: 10.0,
                to: 15.0,
            },
            ReferenceLine::Y {
                label: "mean".into(),
                level: 5.0,
            },
            ReferenceLine::XBand {
                label: "warm-up".into(),
                from: 65536.0,
                to: 131072.0,
            },
        ],
        size: None,
    }
}

fn heat_map() -> HeatMap {
    let names = vec!["mcf".to_string(), "libquantum".to_string()];
    HeatMap {
        title: "Slowdown by neighbor".into(),
        rows: names.clone(),
        columns: names,
        row_label: "suffers".into(),
        column_label: "beside".into(),
        values: vec![vec![Some(0.0), Some(48.0)], vec![Some(-2.0), None]],
        unit: "%".into(),
        ..HeatMap::default()
    }
}

fn bars(stacked: bool) -> BarChart {
    let group = |name: &str, values: [f64; 3]| BarGroup {
        name: name.into(),
        bars: values
            .iter()
            .map(|v| ChartBar {
                value: Some(*v),
                interval: Some((v - 1.0, v + 1.0)),
            })
            .collect(),
    };

    BarChart {
        title: "Where the slowdown comes from".into(),
        y: Axis::linear("% of solo run time"),
        series: vec!["cache".into(), "bus".into(), "memory".into()],
        groups: vec![
            group("soplex", [12.0, 20.0, 5.0]),
            group("a rather long program name", [3.0, -4.0, 9.0]),
        ],
        is_stacked: stacked,
        references: vec![("half".into(), 20.0)],
        size: None,
    }
}

/// Is the drawing of each kind of figure unchanged? (`UPDATE_EXPECT=1` after looking at the new one.)
#[test]
fn the_drawing_of_each_figure_is_unchanged() {
    expect_file!["../snapshots/chart.svg"].assert_eq(&sample_chart().svg());
    expect_file!["../snapshots/heat_map.svg"].assert_eq(&heat_map().svg());
    expect_file!["../snapshots/bars.svg"].assert_eq(&bars(false).svg());
    expect_file!["../snapshots/bars_stacked.svg"].assert_eq(&bars(true).svg());
}

/// Tags closed in order, attributes quoted, no stray angle bracket or ampersand: as much of XML as the figures use.
fn well_formed(xml: &str) -> Result<(), String> {
    let mut open_tags: Vec<&str> = Vec::new();
    let mut remaining_xml = xml;
    while let Some(tag_start) = remaining_xml.find('<') {
        let (text, tag_and_rest) = remaining_xml.split_at(tag_start);
        if text.contains('>') {
            return Err(format!("stray '>' in {text:?}"));
        }

        let end = tag_and_rest.find('>').ok_or("tag without end")?;
        let tag = &tag_and_rest[1..end];
        remaining_xml = &tag_and_rest[end + 1..];
        let name = tag
            .trim_start_matches('/')
            .split([' ', '/'])
            .next()
            .unwrap_or("");
        if tag.matches('"').count() % 2 != 0 {
            return Err(format!("quotes in {tag}"));
        }

        if tag.starts_with('/') {
            if open_tags.pop() != Some(name) {
                return Err(format!("</{name}> closes nothing"));
            }
        } else if !tag.ends_with('/') {
            open_tags.push(name);
        }
    }

    for (position, _) in xml.match_indices('&') {
        let is_entity = ["&amp;", "&lt;", "&gt;", "&quot;"]
            .iter()
            .any(|entity| xml[position..].starts_with(entity));
        if !is_entity {
            return Err(format!("stray & at {position}"));
        }
    }

    if open_tags.is_empty() {
        Ok(())
    } else {
        Err(format!("left open: {open_tags:?}"))
    }
}

/// Does every figure stay well-formed with hostile names, and with data that is empty, huge or not finite?
#[test]
fn figures_stay_well_formed_with_hostile_names_and_odd_data() {
    let evil = "</svg><script>&\"'\u{0}\u{b}\u{202e}";
    let odd = [f64::NAN, f64::INFINITY, -1e300, 0.0, 1e300];
    let mut chart = sample_chart();
    let mut map = heat_map();
    let mut bars = bars(false);
    for title in [&mut chart.title, &mut map.title, &mut bars.title] {
        *title = evil.into();
    }

    chart.series[0].name = evil.into();
    chart.series[0].points = odd.iter().map(|v| ChartPoint::new(*v, *v)).collect();
    chart.x.label = evil.into();
    map.rows[0] = evil.into();
    map.values = vec![
        odd.iter().map(|v| Some(*v)).collect(),
        vec![],
        vec![Some(1.0)],
    ];
    bars.groups[0].bars = odd.iter().map(|v| ChartBar::from(*v)).collect();
    let drawn = [chart.svg(), map.svg(), bars.svg()];

    let empty = [
        Chart::default().svg(),
        HeatMap::default().svg(),
        BarChart::default().svg(),
    ];
    for svg in drawn.iter().chain(&empty) {
        well_formed(svg).unwrap_or_else(|error| panic!("{error}\n{svg}"));
        assert!(!svg.contains("NaN") && !svg.contains("inf\""), "{svg}");
        assert!(!svg.contains("<script") && !svg.contains('\u{202e}'));
    }
}

/// Does a name always have the same color, and are more than eight series distinct?
#[test]
fn a_name_keeps_its_color_and_many_series_are_distinct() {
    let series = (0..10).map(|index| Series {
        name: format!("s{index}"),
        points: vec![ChartPoint::new(1.0, 1.0), ChartPoint::new(2.0, 2.0)],
        ..Series::default()
    });
    let drawing = Chart {
        series: series.collect(),
        ..Chart::default()
    }
    .inline();
    let svg = drawing.as_str();
    let count = |class: &str| {
        svg.matches(&format!("<path class=\"{class}\""))
            .count()
            .to_string()
    };

    let check = |got: String, want: Expect| want.assert_eq(&got);
    check(count("l s0"), expect!["1"]);
    check(count("l s0 d"), expect!["1"]);
    check(count("l s7"), expect!["1"]);
}

/// Does the legend of a wide figure end within the part that a telephone shows, so that no series is hidden?
#[test]
fn a_legend_fits_into_a_narrow_window() {
    let names = [
        "balance sets: throughput gain %",
        "of which mix %",
        "random",
        "worst",
    ];
    let series = names.map(|name| Series {
        name: name.into(),
        points: vec![ChartPoint::new(1.0, 1.0)],
        ..Series::default()
    });
    let chart = Chart {
        series: series.into(),
        size: Some((860.0, 400.0)),
        ..Chart::default()
    };
    let svg = chart.svg();
    for name in names {
        let (before, _) = svg.split_once(&format!(">{name}</text>")).expect(name);
        let (_, x) = before.rsplit_once("x=\"").expect("the text has a place");
        let left: f64 = x.split('"').next().unwrap().parse().unwrap();
        let right = left + 7.4 * name.chars().count() as f64;
        assert!(right <= 375.0, "{name} ends at {right}");
    }
}
