//! The table of programs as a page (docs/programs.md).

use std::fmt::Write;

use super::registry::programs;
use super::setup::KernelSpec;

const HEAD: &str = "\
# Programs that run on the simulated machine

The programs are real algorithms over simulated memory, endless and seeded. A seed changes input and layout, never the footprint. All figures were
fixed before any policy was run, and none is fitted to a paper's result. Known miss rates of the real programs chose one figure only: how many
first-level hits (stack accesses) stand beside the algorithm's own.

Figures of a publication were entered from memory of it and rounded. Figures marked *estimate* are ours.

| short | publication |
|---|---|
| Henning 2000 | the SPEC CPU2000 memory footprint page |
| Henning 2007 | SPEC CPU2006 memory footprint, Computer Architecture News 35(1) |
| Phansalkar et al. 2007 | Analysis of redundancy and application balance in SPEC CPU2006, ISCA |

[validation.md](validation.md) compares the programs' curves with those of recorded real programs. The algorithms of some programs were corrected
after a comparison, always against real programs and never against results:

| program | corrected | results that had been seen |
|---|---|---|
| bzip2 | passes of a sort move the same suffixes | none |
| gobmk | matchers loop over the board | none, then CA's |
| gamess | types of shells choose the routines | none, then CA's |
| mcf, mcf-2006, gcc | like the real programs' algorithms, to find the cause of CA's results | CA's |
| all | the stack is reused near its top | none of policies |

The share of stack accesses within a stack distance was measured on recorded programs (`valgrind --tool=lackey --trace-mem=yes`, lines of 16 bytes, LRU):

| program | 64 bytes | 128 | 256 | 512 | 4 KB |
|---|---|---|---|---|---|
| gzip | 89 % | 99 % | 99 % | 99 % | 100 % |
| bzip2 | 92 % | 92 % | 92 % | 92 % | 95 % |
| sqlite3 | 63 % | 78 % | 88 % | 98 % | 100 % |
| python3 | 59 % | 78 % | 94 % | 98 % | 100 % |
| simulated | 68 % | 87 % | 94 % | 96 % | 100 % |

A scenario may set these options:

| option | meaning |
|---|---|
| `footprint_bytes` | the footprint |
| `threads` | threads of each group |
| `groups`, `group_sizes` | groups of threads |
| `background_threads` | further threads |
| `regroup_after` | a change of phase |

";

/// The page, with one row a program and one paragraph on each one's behaviour.
pub fn programs_page() -> String {
    let mut page = String::from(HEAD);
    page.push_str(
        "| program | stands for | threads | footprint | instructions per access | stack accesses per access | code |\n",
    );
    page.push_str("|---|---|---|---|---|---|---|\n");
    for spec in programs() {
        row(&mut page, spec).expect("writing to a string cannot fail");
    }
    page.push_str("\n## Algorithms and sources\n");
    for spec in programs() {
        sources(&mut page, spec).expect("writing to a string cannot fail");
    }
    page
}

fn row(page: &mut String, spec: &KernelSpec) -> std::fmt::Result {
    let threads = match spec.threads {
        (1, 1) => "1".to_string(),
        (each, 1) => each.to_string(),
        (each, groups) => format!("{groups} x {each}"),
    };
    writeln!(
        page,
        "| `{}` | {} | {threads} | {:.1} MB | {:.2} | {:.1} | {:.0} KiB |",
        spec.name,
        spec.stands_for,
        spec.footprint_bytes as f64 / 1e6,
        spec.pace.instructions_per_access,
        spec.pace.stack_per_access,
        spec.code.bytes() as f64 / 1024.0,
    )
}

fn sources(page: &mut String, spec: &KernelSpec) -> std::fmt::Result {
    writeln!(page, "\n### {}\n{}. Progress counts {}.\n", spec.name, capital(spec.algorithm), spec.unit)?;
    writeln!(page, "- Footprint: {}.", spec.footprint_source)?;
    writeln!(page, "- Instruction mix: {}.", spec.pace_source)?;
    writeln!(page, "- Code: {}.", spec.code_source)?;
    writeln!(page, "- Phases: {}.", spec.phases)
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}
