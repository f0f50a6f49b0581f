//! Renders the table of programs as a page (docs/programs.md).

use std::fmt::Write;

use super::registry::programs;
use super::setup::KernelSpec;

const PAGE_INTRODUCTION: &str = "\
# Simulated programs

The programs of the simulated machines are real algorithms over simulated memory, endless and seeded. The seed changes
input and layout but never the footprint. All figures were fixed before any policy was run, and none is fitted to a
paper's result. Published miss rates of the real programs determined only one figure, the number of stack accesses
(first-level hits) per access of the algorithm. The algorithms of gobmk, gamess, mcf, mcf-2006 and gcc were corrected
toward the real programs while results of CA were known. [validation.md](validation.md) compares the programs with real
ones.

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

const DATA_LAYOUT: &str = "
## Data layout and loop order

The layout of a program's data and the order of its loops determine its miss rate. This table compares the kernels
behind missed targets with published facts about the real programs.

| program | real program | source | kernel | deviation |
|---|---|---|---|---|
| milc | doubles; matrices of 144 bytes, vectors of 48, sites of 1808 | MILC 6, `ks_imp_dyn/lattice.h`, `include/su3.h`; 433.milc's build flags (`FN`, temporary vectors and links) in public compiler output | the same | none |
| milc | `dslash` reads fat and long links, four per site, 576 contiguous bytes, even and odd sites in turn | MILC, `generic_ks/dslash_fn2.c` | the same | none |
| milc | 2000 shifts, 1032 force sums, 624 vector sums per fermion force; 253 935 flops per site | MILC, `generic_ks/fermion_force_asqtad.c` | in these proportions | none |
| milc | gauge force 153 004 flops per site, of paths of 3 and 5 links; fat links 61 632 | MILC, `gauge_stuff.c`, `quark_stuff.c` | paths of 4 steps, staples of 7 loops | products of long links are omitted |
| milc | solver over 58 % of the time, fermion force 22, gauge force 10, fat links 9 | Shi, Gottlieb, Kindratenko, MILC on GPUs (a production run) | the same, of accesses | 433.milc's own shares: no source found |
| milc | whole sweeps of a routine, then the next | MILC, `update.c` | time slices of all loops in turn, each at its own place | runs are shorter than a step; reuse distances between loops are unchanged |
| lbm | cells of 19 distributions and flags, 160 bytes; two grids; 100 x 100 x 130 | 470.lbm, `lbm_1d_array.h` | the same | none |
| lbm | D3Q19: five distributions up, five down, nine in the plane | the same | the same | none |
| libquantum | nodes of an amplitude (2 floats) and a 64-bit state, 16 bytes; a gate sweeps them and tests control bits | libquantum, `qureg.h`, `gates.c` | the same | none |
| libquantum | only a few gates use the hash table | libquantum, `qureg.c` | absent | absent from the sweeps too |
| soplex | nonzeros of 16 bytes (value, index); columns in one array, their headers in another | SoPlex, `svector.h`, `svset.h` | the same | none |
| soplex | columns of pds-50 have 2 to 3 nonzeros and unit ones | netlib's `pds` models: 275 814 columns, 83 060 rows | 8 per column | no count for 450.soplex' own input found; 128 contiguous bytes per column are more than in the real one |
| sphinx | 8 Gaussians of 39 dimensions per state, means and variances as floats in separate arrays | Sphinx-3, `cont_mgau.h`; the model's own files | the same bytes, means and variances together, two floats per load | one stream of 2.4 KB instead of two of 1.2; half as many loads |
| art | neurons of eight doubles, 64 bytes; weights row by row, a column scanned for each of F2 | 179.art, `scanner.c` | the same | pointers to rows are not loaded, because their array (80 KB) is read in order |
| twolf | cells, terminals and nets as small heap records linked by pointers | TimberWolfSC, `standard.h` | records of 128, 32 and 64 bytes | sizes are estimates: no source found for the 64-bit sizes |
| swim | thirteen arrays of doubles, 1335 x 1335, three nests | 171.swim, `swim.f` | the same | none |
| swim | arrays contiguous in a common block, a row of 10 680 bytes | the same | each starts on its own page | affects page colors only |

The example `program_probe` prints the misses of the kernels per thousand instructions in a 4 MB 16-way LRU cache: 28.9
for milc and 27.4 for lbm. No published figures for 4 MB were found.

## Stack accesses

The stack is reused near its top, as in recorded programs (`valgrind --tool=lackey --trace-mem=yes`, lines of 16 bytes,
LRU). This is the share of stack accesses within a stack distance:

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
    page.push_str(DATA_LAYOUT);
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
