//! Measures speed as ratios: all contenders of a comparison run in turn in one process. Prints a table, or JSON.

mod groups;
mod harness;
mod memory;
mod olken;
mod traces;

use clap::Parser;
use groups::{GROUPS, Options};
use std::process::ExitCode;
use traces::{KINDS, TraceKind};

#[global_allocator]
static ALLOCATOR: memory::PeakAllocator = memory::PeakAllocator;

/// Measures what cachemate promises about speed, as ratios within one run.
#[derive(Parser)]
struct Arguments {
    /// Groups to run [default: all]; --list shows them.
    groups: Vec<String>,
    /// Accesses per synthetic trace (K and M are thousands and millions).
    #[arg(long, default_value = "20M", value_parser = parse_count)]
    accesses: usize,
    /// Rounds: every contender runs once in each.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Traces to use: zipf, scan, mixed.
    #[arg(long, value_delimiter = ',', value_parser = parse_kind, default_value = "zipf,scan,mixed")]
    traces: Vec<TraceKind>,
    /// One JSON object on standard output instead of a table.
    #[arg(long)]
    json: bool,
    /// Lists the groups.
    #[arg(long)]
    list: bool,
}

fn parse_count(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1000),
        None => text
            .strip_suffix(['m', 'M'])
            .map_or((text, 1), |digits| (digits, 1_000_000)),
    };
    let count = digits
        .parse::<usize>()
        .ok()
        .and_then(|count| count.checked_mul(unit))
        .filter(|&count| count > 0);
    count
        .ok_or_else(|| format!("found '{text}', expected a number above 0, as 500000, 500K or 20M"))
}

fn parse_kind(text: &str) -> Result<TraceKind, String> {
    KINDS
        .into_iter()
        .find(|kind| kind.name() == text)
        .ok_or_else(|| format!("no trace '{text}'"))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        GROUPS
            .iter()
            .for_each(|group| println!("{:<10} {}", group.name, group.about));
        return ExitCode::SUCCESS;
    }
    if let Some(unknown) = arguments
        .groups
        .iter()
        .find(|name| GROUPS.iter().all(|group| group.name != **name))
    {
        eprintln!(
            "no group '{unknown}'; there are {}",
            GROUPS.iter().map(|g| g.name).collect::<Vec<_>>().join(", ")
        );
        return ExitCode::from(2);
    }
    let options = Options {
        accesses: arguments.accesses,
        rounds: arguments.rounds as usize,
        traces: arguments.traces,
    };
    let is_selected = |name: &str| {
        arguments.groups.is_empty() || arguments.groups.iter().any(|group| group == name)
    };
    let mut rows = Vec::new();
    for group in GROUPS.iter().filter(|group| is_selected(group.name)) {
        rows.extend((group.run)(&options));
    }
    if arguments.json {
        let report = serde_json::json!({ "accesses": options.accesses, "rounds": options.rounds, "rows": rows });
        println!("{report}");
    } else {
        harness::print_table(&rows);
    }
    ExitCode::SUCCESS
}
