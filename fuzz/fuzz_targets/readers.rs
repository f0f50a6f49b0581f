//! Feeds any bytes to the reader that `CACHEMATE_TARGET` names: no panic, no abort, no unbounded memory.
#![no_main]

use std::sync::OnceLock;

use cachemate_fuzzing::{FuzzTarget, MAX_INPUT_BYTES, TARGETS, find_target};
use libfuzzer_sys::fuzz_target;

fn chosen_target() -> &'static FuzzTarget {
    static CHOSEN: OnceLock<&'static FuzzTarget> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("CACHEMATE_TARGET").unwrap_or_default();
        let known: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        find_target(&name).unwrap_or_else(|| {
            panic!(
                "CACHEMATE_TARGET is '{name}', expected one of {}",
                known.join(", ")
            )
        })
    })
}

fuzz_target!(|data: &[u8]| (chosen_target().run)(&data[..data.len().min(MAX_INPUT_BYTES)]));
