//! The project's own checks and generated pages. `cargo test` also runs `tidy` and the check of the
//! pages.
//!
//! Rules that only a reviewer knows are kept for a week. So each rule of STYLE.md that a machine
//! can check is one file here, which returns complaints of the form `file:line: text (rule)`, and
//! the tables of `docs/results/` are generated from data, because a number that is copied by hand
//! into a page is right once.
//!
//! For example, `at most 4 MiB <!-- crates/trace/src/cmt/mod.rs HEADER_JSON_LIMIT -->` on a page is
//! compared with the constant ([`claims`]), so that changing the constant breaks the page and not
//! the reader.

use std::path::Path;
use std::process::ExitCode;

mod ci_time;
mod claims;
mod crate_map;
mod dependency_cycles;
mod file_access;
mod links;
#[cfg(test)]
mod locks;
mod named_tests;
mod page_index;
mod results;
mod rules;
mod source_tree;
mod test_run;
mod tidy;

const USAGE: &str = "usage: cargo run -p xtask -- COMMAND
  tidy                           check the rules of STYLE.md and ARCHITECTURE.md
  test [NAME...]                 run all tests, or those whose names contain NAME, and measure each
  ci-time start                  forget the costs of an earlier run
  ci-time stage NAME COMMAND...  run a command and record its CPU and wall seconds
  ci-time report                 print the costs of this run beside .ci/times.json, and name stages that have grown
  ci-time accept                 make this run's costs the record
  map                            draw the crates and their dependencies into docs/pictures/crates.svg
  results                        generate docs/results/ from its data
  results import FILE.json NAME  import repro's results.json as docs/results/data/NAME.jsonl, then generate
  results figures BINARY [PAGE...]  draw the pictures of pages by quick runs of the command BINARY, then generate";

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace root");
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args[..] {
        ["tidy"] => tidy(root),
        ["test", ref filter @ ..] => test_run::run(root, filter),
        ["ci-time", "start"] => ci_time::remove_stages(root),
        ["ci-time", "stage", name, ref command @ ..] => ci_time::run_stage(root, name, command),
        ["ci-time", "report"] => ci_time::report(root),
        ["ci-time", "accept"] => ci_time::store_record(root),
        ["map"] => crate_map::write(root),
        ["results"] => results::write(root),
        ["results", "import", file, name] => {
            results::import(root, Path::new(file), name).and_then(|()| results::write(root))
        }
        ["results", "figures", binary, ref pages @ ..] => {
            results::draw_figures(root, Path::new(binary), pages)
                .and_then(|()| results::write(root))
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };

    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn tidy(root: &Path) -> Result<(), String> {
    let mut complaints = tidy::check(root).map_err(|error| format!("tidy: {error}"))?;
    complaints.extend(rules::check(root).map_err(|error| format!("tidy: {error}"))?);
    complaints.extend(results::check(root)?);
    complaints.extend(crate_map::check(root)?);
    match complaints.len() {
        0 => Ok(()),
        count => Err(format!(
            "{}\ntidy: {count} complaints; STYLE.md says why",
            complaints.join("\n")
        )),
    }
}
