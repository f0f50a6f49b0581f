//! Measures what `cachemate validate` compares with, and scores it: `interval_truth FILE [quick] [seed]`.

use std::sync::atomic::AtomicBool;

use cachemate_repro::Context;
use cachemate_repro::interval::{Truth, score, truth};

fn main() {
    let mut given = std::env::args().skip(1);
    let file = given.next().expect("a file");
    let rest: Vec<String> = given.collect();
    let seed = rest.iter().find_map(|word| word.parse().ok()).unwrap_or(1);
    let stop = AtomicBool::new(false);
    let progress = |what: &str| eprintln!("{what}");
    let quick = rest.iter().any(|word| word == "quick");
    let context = Context { quick, seeds: vec![seed], stop: &stop, mixes: None, machine: None, progress: &progress };
    let found: Truth = match std::fs::read_to_string(&file) {
        Ok(text) => serde_json::from_str(&text).expect("a truth file"),
        Err(_) => truth(&context).expect("measured"),
    };
    std::fs::write(&file, serde_json::to_string(&found).expect("written")).expect("written");
    let scored = score::score(&found).expect("scored");
    println!("{}", serde_json::to_string_pretty(&scored).expect("shown"));
}
