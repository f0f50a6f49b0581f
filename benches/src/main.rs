//! `cachemate-bench`: benches of the live host, and the programs that they load it with. Not shipped.
//!
//! The benches run the shipped command as a user does. Only the bench of gangs calls the daemon's library instead, to
//! control each window.

mod auto;
mod bench_host;
mod colors;
mod corun;
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
    command: BenchCommand,
}

#[derive(Subcommand)]
enum BenchCommand {
    Live(live::LiveBench),
    Corun(corun::CorunBench),
    /// Run a load program, which reports its work in the file named in CACHEMATE_PROGRESS
    Load {
        #[arg(value_parser = loads::LOAD_KINDS)]
        kind: String,
        /// Memory that it accesses; for count, additions of each thread
        #[arg(default_value_t = 0)]
        bytes: u64,
    },
    /// Started by the bench of gangs, never manually
    #[command(hide = true)]
    Guardian {
        #[arg(long)]
        state_dir: PathBuf,
    },
}

fn main() -> ExitCode {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // If the handler cannot be set, the signal ends the program, which is acceptable.
        let _ = signal_hook::flag::register(signal, Arc::clone(&stop));
    }
    let outcome = match BenchArguments::parse().command {
        BenchCommand::Live(live) => live.run(&stop),
        BenchCommand::Corun(corun) => corun.run(&stop),
        BenchCommand::Load { kind, bytes } => loads::run(&kind, bytes, stop),
        BenchCommand::Guardian { state_dir } => {
            cachemate_daemon::guardian::run(&state_dir, &|words| eprintln!("{words}"))
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cachemate-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
