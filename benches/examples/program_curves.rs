//! Miss-rate curves of the simulator's programs beside those of recorded real programs of the same family, as the
//! tables of docs/validation.md. `cargo run --release -p cachemate-bench --example program_curves [PROGRAM...]`
//!
//! Both sides pass the recording's filter (128 KiB, 8 ways), over as many data accesses as the recording has, after as
//! many as it skipped (at most 64 M). The accesses that pass are counted by exact stack distances; a first touch is a
//! miss. The last column gives the misses of a 16 KiB 4-way instruction cache, which recordings do not contain.

use cachemate_core::{Access, AccessKind};
use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
use cachemate_locality::curve::MissRateCurve;
use cachemate_locality::stack::StackDistances;
use cachemate_sim::kernels::{INSTRUCTION_BYTES, Options, build_program, programs};
use cachemate_trace::{CmtReader, L1Filter, TraceReader, bundled_recording};
use std::error::Error;

/// Recordings, each with the programs of its family.
const FAMILIES: [(&str, &[&str]); 15] = [
    ("gzip", &["gzip"]),
    ("bzip2", &["bzip2"]),
    ("xz", &["gzip", "bzip2"]),
    ("cc1", &["gcc"]),
    ("perl", &["perl"]),
    ("gawk", &["perl"]),
    ("python3", &["perl"]),
    ("link-parser", &["parser"]),
    ("gap", &["gap"]),
    ("glpsol", &["soplex", "mcf"]),
    ("gnugo", &["gobmk", "crafty"]),
    ("povray", &["povray"]),
    ("sqlite3", &["berkeleydb", "vortex"]),
    ("chase", &["mcf"]),
    ("stencil", &["swim", "mgrid"]),
];

const MAX_SKIP: u64 = 64_000_000;
const SIZES_KIB: [u64; 6] = [256, 512, 1024, 2048, 4096, 8192];

/// Curve and intensity of one side.
struct CurveSide {
    curve: Vec<f64>,
    instructions_per_access: f64,
    /// Misses of the filter per thousand instructions.
    filtered: f64,
    code: Option<f64>,
}

fn miss_rates(stack: StackDistances, instructions: u64) -> Result<Vec<f64>, Box<dyn Error>> {
    let sizes = SIZES_KIB.map(|kib| kib << 10);
    let curve = MissRateCurve::from_histogram(&stack.finish()?, instructions, 64, &sizes)
        .ok_or("no instructions")?;
    Ok(curve.points().iter().map(|point| point.1).collect())
}

/// The recorded program: its curve, the number of skipped accesses, the number of accesses in the window, and its
/// filter.
fn recorded_curve(name: &str) -> Result<(CurveSide, u64, u64, L1Filter), Box<dyn Error>> {
    let mut reader = CmtReader::open(bundled_recording(name)?)?;
    let (mut stack, mut lines, mut batch, mut passed) =
        (StackDistances::new(), Vec::new(), Vec::new(), 0);
    while reader.read_addresses(&mut batch)? {
        lines.clear();
        lines.extend(batch.iter().map(|address| address >> 6));
        passed += lines.len() as u64;
        stack.push(&lines)?;
    }
    let totals = reader.totals().ok_or("no totals")?;
    let (instructions, accesses) = totals
        .instructions
        .zip(totals.program_accesses)
        .ok_or("instructions are not known")?;
    let header = reader.header();
    let filter = header.filter.ok_or("not filtered")?;
    let side = CurveSide {
        curve: miss_rates(stack, instructions)?,
        instructions_per_access: instructions as f64 / accesses as f64,
        filtered: passed as f64 * 1000.0 / instructions as f64,
        code: None,
    };
    Ok((side, header.skip_accesses.min(MAX_SKIP), accesses, filter))
}

/// A program's data lines and fetched code lines, batch by batch.
struct ProgramLines {
    threads: Vec<Box<dyn cachemate_core::AccessSource>>,
    batch: Vec<Access>,
    data: Vec<u64>,
    code: Vec<u64>,
    at: u64,
    instructions: u64,
}

impl ProgramLines {
    fn next(&mut self) {
        self.batch.clear();
        self.data.clear();
        self.code.clear();
        for thread in &mut self.threads {
            thread.next_batch(&mut self.batch);
        }
        for access in &self.batch {
            self.instructions += access.instructions();
            let end = self.at + access.instructions() * INSTRUCTION_BYTES;
            let first = self.at.div_ceil(64);
            self.code.extend(first..end.div_ceil(64));
            self.at = end;
            match access.kind() {
                AccessKind::Jump => {
                    self.at = access.address();
                    self.code.push(self.at / 64);
                }
                AccessKind::Compute => {}
                AccessKind::Load | AccessKind::Store => self.data.push(access.address() >> 6),
            }
        }
    }
}

fn simulated_curve(
    name: &str,
    skip: u64,
    accesses: u64,
    filter: L1Filter,
) -> Result<CurveSide, Box<dyn Error>> {
    let geometry_of = |size, ways| CacheGeometry::from_bytes(size, 64, ways, 1);
    let mut first = CacheSim::new(
        geometry_of(filter.size_bytes, filter.ways)?,
        Replacement::Lru,
    )?;
    let mut code = CacheSim::new(geometry_of(16 << 10, 4)?, Replacement::Lru)?;
    let threads = build_program(name, 1, &Options::default())?.threads;
    let mut lines = ProgramLines {
        threads,
        batch: Vec::new(),
        data: Vec::new(),
        code: Vec::new(),
        at: 0,
        instructions: 0,
    };
    let mut line_count = 0;
    while line_count < skip {
        lines.next();
        line_count += lines.data.len() as u64;
        if line_count + 4_000_000 > skip {
            first.push(&lines.data);
        }
    }
    let (mut stack, mut passed, mut missed) = (StackDistances::new(), 0, Vec::new());
    (line_count, lines.instructions) = (0, 0);
    while line_count < accesses {
        lines.next();
        line_count += lines.data.len() as u64;
        code.push(&lines.code);
        missed.clear();
        passed += first.push_collecting(&lines.data, &mut missed);
        stack.push(&missed)?;
    }
    let kilo = lines.instructions as f64 / 1000.0;
    Ok(CurveSide {
        curve: miss_rates(stack, lines.instructions)?,
        instructions_per_access: lines.instructions as f64 / line_count as f64,
        filtered: passed as f64 / kilo,
        code: Some(code.misses() as f64 / kilo),
    })
}

fn print(name: &str, side: &CurveSide) {
    let points: Vec<String> = side.curve.iter().map(|rate| format!("{rate:.2}")).collect();
    let code = side.code.map_or(String::new(), |code| format!("{code:.1}"));
    println!(
        "| {name} | {:.2} | {:.2} | {} | {code} |",
        side.instructions_per_access,
        side.filtered,
        points.join(" | ")
    );
}

fn main() -> Result<(), Box<dyn Error>> {
    let name_parts: Vec<String> = std::env::args().skip(1).collect();
    let is_selected =
        |name: &str| name_parts.is_empty() || name_parts.iter().any(|name_part| name_part == name);
    let sizes: Vec<String> = SIZES_KIB.iter().map(|kib| format!("{kib} KiB")).collect();
    println!(
        "| program | instructions per access | past the filter | {} | code 16 KiB |",
        sizes.join(" | ")
    );
    println!("|---|---|---|{}---|", "---|".repeat(sizes.len()));
    for (recording, family) in FAMILIES {
        if !family.iter().any(|name| is_selected(name)) {
            continue;
        }
        let (side, skip, accesses, filter) = recorded_curve(recording)?;
        print(&format!("*{recording}*, recorded"), &side);
        for name in family.iter().filter(|name| is_selected(name)) {
            assert!(
                programs().any(|spec| spec.name == *name),
                "a shipped program"
            );
            print(
                &format!("`{name}`"),
                &simulated_curve(name, skip, accesses, filter)?,
            );
        }
    }
    // Programs without a recorded relative run alone, over a window of the usual length.
    let is_related = |name: &str| FAMILIES.iter().any(|(_, family)| family.contains(&name));
    for spec in programs().filter(|spec| !is_related(&spec.name) && is_selected(&spec.name)) {
        print(
            &format!("`{}`", spec.name),
            &simulated_curve(&spec.name, 30_000_000, 30_000_000, L1Filter::default())?,
        );
    }
    Ok(())
}
