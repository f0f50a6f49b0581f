//! Renders the table of programs as a page (docs/programs.md).

use std::fmt::Write;

use super::registry::programs;
use super::setup::KernelSpec;

const PAGE_INTRODUCTION: &str = "\
# Simulated programs

The programs of the simulated machines are real algorithms over simulated memory, endless and seeded. The seed changes
input and layout but never the footprint. All figures were fixed before any policy was run, and none is fitted to a
paper's result. Published miss rates of the real programs determined only one figure, the number of stack accesses
(first-level hits) per access of the algorithm. [validation.md](validation.md) compares the programs with real ones.

A scenario may set these options of a program:

| option | meaning |
|---|---|
| `footprint_bytes` | the footprint |
| `threads` | threads of each group |
| `groups`, `group_sizes` | groups of threads |
| `background_threads` | further threads |
| `regroup_after` | a change of phase |

";

const SOURCES: &str = "
## Sources

Figures were entered from memory of the publication and rounded. An *estimate* is this project's own.

| short | publication |
|---|---|
| Henning 2000 | the SPEC CPU2000 memory footprint page |
| Henning 2007 | SPEC CPU2006 memory footprint, Computer Architecture News 35(1) |
| H&P | Hennessy & Patterson, 3rd edition; Fig. 2.32 is of integer programs, Fig. 2.33 of floating-point programs |
| Phansalkar 2007 | Phansalkar et al., Analysis of redundancy and application balance in SPEC CPU2006, ISCA |

";

const CORRECTIONS: &str = "
## Corrections

Some algorithms were corrected to match real programs, never to match results. The last column names the results that
were known at that time.

| program | correction | known results |
|---|---|---|
| bzip2 | passes of a sort move the same suffixes | none |
| gobmk | matchers loop over the board | none, then CA's |
| gamess | types of shells choose the routines | none, then CA's |
| mcf, mcf-2006, gcc | the algorithms of the real programs, while looking for the cause of CA's results | CA's |
| all | the stack is reused near its top | none of policies |

The last correction follows recorded programs (`valgrind --tool=lackey --trace-mem=yes`, lines of 16 bytes, LRU). This
is the share of stack accesses within a stack distance:

| program | 64 bytes | 128 | 256 | 512 | 4 KB |
|---|---|---|---|---|---|
| gzip | 89 % | 99 % | 99 % | 99 % | 100 % |
| bzip2 | 92 % | 92 % | 92 % | 92 % | 95 % |
| sqlite3 | 63 % | 78 % | 88 % | 98 % | 100 % |
| python3 | 59 % | 78 % | 94 % | 98 % | 100 % |
| simulated | 68 % | 87 % | 94 % | 96 % | 100 % |
";

/// Returns the page in Markdown: options, figures, algorithms and sources of every program.
pub fn programs_page() -> String {
    let mut page = String::from(PAGE_INTRODUCTION);
    page.push_str(
        "| program | stands for | threads | footprint | instructions per access | stack accesses per access | code |\n",
    );
    page.push_str("|---|---|---|---|---|---|---|\n");
    for spec in programs() {
        write_program_row(&mut page, spec).expect("writing to a string cannot fail");
    }
    page.push_str("\n## Algorithms\n\n| program | algorithm | phases | unit of progress |\n|---|---|---|---|\n");
    for spec in programs() {
        write_algorithm_row(&mut page, spec).expect("writing to a string cannot fail");
    }
    page.push_str(SOURCES);
    page.push_str("| program | footprint | instruction mix | code |\n|---|---|---|---|\n");
    for spec in programs() {
        write_source_row(&mut page, spec).expect("writing to a string cannot fail");
    }
    page.push_str(CORRECTIONS);
    page
}

fn write_program_row(page: &mut String, spec: &KernelSpec) -> std::fmt::Result {
    let threads = match spec.threads {
        (1, 1) => "1".to_string(),
        (threads_per_group, 1) => threads_per_group.to_string(),
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

fn write_algorithm_row(page: &mut String, spec: &KernelSpec) -> std::fmt::Result {
    writeln!(page, "| `{}` | {} | {} | {} |", spec.name, spec.algorithm, spec.phases, spec.unit)
}

fn write_source_row(page: &mut String, spec: &KernelSpec) -> std::fmt::Result {
    writeln!(page, "| `{}` | {} | {} | {} |", spec.name, spec.footprint_source, spec.pace_source, spec.code_source)
}
