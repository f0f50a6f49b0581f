//! `cachemate-bench`: benches of the live host, and the programs that they load it with. Not shipped.
//!
//! What is shown is the shipped command beside this program, run as a user runs it; only gangs are looked at from inside,
//! window by window.

mod auto;
mod bench_host;
mod colors;
mod gangs;
mod live;
mod overhead;
mod programs;
mod ranking;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cachemate_bench::loads;
use clap::{Parser, Subcommand};

/// Benches of the live host, and the programs that they load it with
#[derive(Parser)]
struct BenchArguments {
    #[command(subcommand)]
    what: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    Live(live::LiveBench),
    /// A small program that tells its work in the file named in CACHEMATE_PROGRESS
    Load {
        #[arg(value_parser = loads::KINDS)]
        kind: String,
        /// Memory that it goes over; additions of each thread for count
        #[arg(default_value_t = 0)]
        bytes: u64,
    },
    /// Started by the part that manages the host itself, never by people
    #[command(hide = true)]
    Guardian {
        #[arg(long)]
        state_dir: PathBuf,
    },
}

fn main() -> ExitCode {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // Where a handler cannot be set, the signal ends the program: a fair answer too.
        let _ = signal_hook::flag::register(signal, Arc::clone(&stop));
    }
    let ran = match BenchArguments::parse().what {
        BenchCommand::Live(live) => live.run(&stop),
        BenchCommand::Load { kind, bytes } => loads::run(&kind, bytes, stop),
        BenchCommand::Guardian { state_dir } => {
            cachemate_daemon::guardian::run(&state_dir, &|words| eprintln!("{words}"))
        }
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cachemate-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
