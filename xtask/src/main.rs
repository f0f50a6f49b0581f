//! `cargo run -p xtask -- tidy`: the project's own checks, also run by `cargo test`.

use std::path::Path;
use std::process::ExitCode;

mod tidy;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace root");
    match std::env::args().nth(1).as_deref() {
        Some("tidy") => match tidy::check(root) {
            Ok(complaints) if complaints.is_empty() => ExitCode::SUCCESS,
            Ok(complaints) => {
                complaints.iter().for_each(|complaint| eprintln!("{complaint}"));
                eprintln!("tidy: {} complaints; STYLE.md says why", complaints.len());
                ExitCode::FAILURE
            }
            Err(error) => {
                eprintln!("tidy: {error}");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: cargo run -p xtask -- tidy");
            ExitCode::from(2)
        }
    }
}
