//! A study's result as an HTML page, as CSV, and as a table.

use cachemate_report::figure::{Axis, BarChart, BarGroup, Chart, ChartPoint, Series};
use cachemate_report::text::{format_number, format_percent, value_or_dash};
use cachemate_report::{Table, render_page, scroll_box};
use maud::{Markup, html};

use crate::outcome::SlowdownHistogram;
use crate::spec::FleetSpec;
use crate::study::{FleetResult, VariantOutcome};

/// Minimum upper end of a distribution's axis, in percent of slowdown; the 99th percentile extends it.
const MIN_AXIS_PERCENT: f64 = 20.0;
/// Number of points of a distribution.
const POINT_INTERVALS: u32 = 100;

impl FleetResult {
    /// Renders the page. `cpu_seconds` is the CPU time of the run.
    pub fn render_html(&self, spec: &FleetSpec, cpu_seconds: f64) -> String {
        let body = html! {
            h1 { (spec.name) }
            p.lead { (self.render_lead_text(spec)) }
            h2 { "Policies" }
            (self.table_section())
            h2 { "Hosts needed for the same promise" }
            (self.hosts_section())
            h2 { "Slowdown" }
            p.soft { "Share of the samples up to a slowdown. Every figure has the same axes." }
            div.small { @for variant in &self.variants {
                (self.distribution_chart(variant).inline())
            } }
            h2 { "Energy" }
            (self.energy_chart().inline())
            h2 { "Method" }
            (self.method_section(spec, cpu_seconds))
        };
        render_page(&spec.name, &body)
    }

    fn render_lead_text(&self, spec: &FleetSpec) -> String {
        let services = self
            .variants
            .first()
            .map_or(0, |variant| variant.total.services);
        let lead_sentence = format!(
            "{services} services on {} hosts ({}) for {} h of nominal time.",
            spec.hosts,
            spec.machine,
            format_number(spec.hours)
        );
        let variant_with_fewest_hosts = self
            .variants
            .iter()
            .filter(|variant| variant.hosts_needed.is_some())
            .min_by_key(|variant| variant.hosts_needed);
        match (variant_with_fewest_hosts, self.promise) {
            (Some(fewest), Some(promise)) => format!(
                "{lead_sentence} To keep {} of the limits, '{}' needs the fewest hosts: {}.",
                format_percent(promise, 1),
                fewest.name,
                value_or_dash(fewest.hosts_needed.map(|hosts| hosts.to_string()))
            ),
            _ => lead_sentence,
        }
    }

    fn table_section(&self) -> Markup {
        html! {
            (scroll_box("Policies", &html! { table {
                thead { tr {
                    th { "policy" } th { "limits kept" } th { "median" } th { "95 %" } th { "99 %" } th { "hosts needed" }
                    th { "moves" } th { "moves in hosts" } th { "waiting" } th { "kWh" }
                } }
                tbody { @for variant in &self.variants { tr { @for cell in variant_cells(variant) { td { (cell) } } } } }
            } }))
            p.soft {
                "Slowdown: cycles per instruction over those alone on an idle host, one sample for each service and step. "
                "Waiting: services without room, in samples."
            }
        }
    }

    fn hosts_section(&self) -> Markup {
        let share_series = self.variants.iter().map(|variant| Series {
            name: variant.name.clone(),
            points: variant
                .searched
                .iter()
                .map(|&(hosts, share)| ChartPoint::new(f64::from(hosts), share * 100.0))
                .collect(),
            ..Series::default()
        });

        let hosts_chart = BarChart {
            y: Axis::linear("hosts"),
            series: vec!["hosts needed".to_string()],
            groups: self
                .variants
                .iter()
                .map(|variant| bar_group(variant, variant.hosts_needed.map(f64::from)))
                .collect(),
            size: Some((860.0, 320.0)),
            ..BarChart::default()
        };

        let share_chart = Chart {
            x: Axis::linear("hosts of the searched cell"),
            y: Axis::linear("limits kept, %"),
            series: share_series.collect(),
            size: Some((860.0, 360.0)),
            ..Chart::default()
        };
        html! {
            (hosts_chart.inline())
            (share_chart.inline())
        }
    }

    fn distribution_chart(&self, variant: &VariantOutcome) -> Chart {
        let p99_percents = self
            .variants
            .iter()
            .filter_map(|variant| variant.total.slowdowns.percentile(0.99));
        let max_percent = p99_percents.fold(MIN_AXIS_PERCENT, f64::max);
        let slowdowns: &SlowdownHistogram = &variant.total.slowdowns;
        let point_at = |step: u32| {
            let percent = max_percent * f64::from(step) / f64::from(POINT_INTERVALS);
            Some(ChartPoint::new(
                percent,
                slowdowns.share_up_to(percent)? * 100.0,
            ))
        };

        Chart {
            title: variant.name.clone(),
            x: Axis::linear("slowdown, %").with_range(0.0, max_percent),
            y: Axis::linear("samples, %").with_range(0.0, 100.0),
            series: vec![Series {
                points: (0..=POINT_INTERVALS).filter_map(point_at).collect(),
                color: Some(0),
                ..Series::default()
            }],
            size: Some((320.0, 220.0)),
            ..Chart::default()
        }
    }

    fn energy_chart(&self) -> BarChart {
        BarChart {
            y: Axis::linear("kWh"),
            series: vec!["energy".to_string()],
            groups: self
                .variants
                .iter()
                .map(|variant| bar_group(variant, Some(variant.total.energy_kwh)))
                .collect(),
            size: Some((860.0, 320.0)),
            ..BarChart::default()
        }
    }

    fn method_section(&self, spec: &FleetSpec, cpu_seconds: f64) -> Markup {
        html! {
            dl.how {
                dt { "seed" } dd { (spec.seed) }
                dt { "promise" } dd { (value_or_dash(self.promise.map(|promise| format_percent(promise, 1)))) " of the limits" }
                dt { "searched" } dd { "the first cell, of " (self.searched_hosts) " hosts; hosts needed are scaled to the fleet" }
                dt { "speeds" } dd { "the interval machine" }
                dt { "power" } dd {
                    (format_number(spec.power.sleep_watts)) " W empty, " (format_number(spec.power.idle_watts)) " W idle, "
                    (format_number(spec.power.busy_watts)) " W with all CPUs busy, and "
                    (format_number(spec.power.watts_per_gb_per_second)) " W for each GB/s of memory traffic"
                }
                dt { "moves" } dd { (format_number(spec.moves.seconds)) " s of service time each" }
                dt { "processor time" } dd { (format_number(cpu_seconds)) " s" }
            }
        }
    }

    /// Renders the CSV: the names of the columns, then one row for each policy.
    pub fn csv(&self) -> String {
        let mut text = String::from(
            "policy,limits_kept_share,slowdown_p50_percent,slowdown_p95_percent,slowdown_p99_percent,hosts_needed,moves,\
             node_moves,waiting_samples,samples,energy_kwh,host_hours\n",
        );
        for variant in &self.variants {
            let total = &variant.total;
            let value_or_empty =
                |value: Option<f64>| value.map_or(String::new(), |value| value.to_string());
            let percentile_or_empty =
                |share: f64| value_or_empty(total.slowdowns.percentile(share));
            let row = [
                format!("\"{}\"", variant.name.replace('"', "\"\"")),
                value_or_empty(total.limit_kept_share()),
                percentile_or_empty(0.5),
                percentile_or_empty(0.95),
                percentile_or_empty(0.99),
                value_or_empty(variant.hosts_needed.map(f64::from)),
                total.moves.to_string(),
                total.node_moves.to_string(),
                total.waiting_samples.to_string(),
                total.slowdowns.sample_count().to_string(),
                total.energy_kwh.to_string(),
                total.host_hours.to_string(),
            ];
            text.push_str(&row.join(","));
            text.push('\n');
        }
        text
    }

    /// For a terminal: a row for each policy, and for each change of `--what-if` under it.
    pub fn table(&self) -> Table {
        let mut table = Table::with_columns(
            "policy",
            "limits kept | median | 95 % | 99 % | hosts needed | moves | moves in hosts | waiting | kWh",
        );
        for variant in &self.variants {
            table.add_row(variant_cells(variant));
        }
        table
    }
}

fn variant_cells(variant: &VariantOutcome) -> Vec<String> {
    let total = &variant.total;
    let percentile = |share: f64| {
        value_or_dash(
            total
                .slowdowns
                .percentile(share)
                .map(|percent| format!("{percent:.1} %")),
        )
    };

    vec![
        variant.name.clone(),
        value_or_dash(
            total
                .limit_kept_share()
                .map(|share| format_percent(share, 1)),
        ),
        percentile(0.5),
        percentile(0.95),
        percentile(0.99),
        value_or_dash(variant.hosts_needed.map(|hosts| hosts.to_string())),
        total.moves.to_string(),
        total.node_moves.to_string(),
        total.waiting_samples.to_string(),
        format_number(total.energy_kwh),
    ]
}

fn bar_group(variant: &VariantOutcome, value: Option<f64>) -> BarGroup {
    let bar = cachemate_report::figure::ChartBar {
        value,
        interval: None,
    };
    BarGroup {
        name: variant.name.clone(),
        bars: vec![bar],
    }
}
