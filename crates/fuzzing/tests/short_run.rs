//! A short fixed run of every target, in the ordinary tests: the corpus as it is, then seeded changes to it.
//!
//! `CACHEMATE_FUZZ_SECONDS` sets the run time of each target, and `CACHEMATE_FUZZ_SEED` its seed.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cachemate_core::SplitMix64;
use cachemate_fuzzing::{
    CountingAllocator, FuzzTarget, MAX_INPUT_BYTES, TARGETS, mutate, read_corpus,
};

const CHANGED_INPUTS: u64 = 1_500;
/// No input is worth more time; nothing is expected to come near.
const HANGS_AFTER: Duration = Duration::from_secs(60);

#[global_allocator]
static MEMORY: CountingAllocator = CountingAllocator::new(1 << 30);

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Ends the program and reports the input if it takes too long.
struct Watchdog {
    inputs_done: Arc<AtomicU64>,
    input: Arc<Mutex<(&'static str, Vec<u8>)>>,
}

impl Watchdog {
    fn begin() -> Self {
        let watched = Watchdog {
            inputs_done: Arc::default(),
            input: Arc::default(),
        };
        let (done, input) = (Arc::clone(&watched.inputs_done), Arc::clone(&watched.input));
        std::thread::spawn(move || {
            let (mut last, mut since) = (0, Instant::now());
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let now = done.load(Ordering::Relaxed);
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed() > HANGS_AFTER {
                    let message = input.lock().unwrap();
                    let _ = writeln!(
                        std::io::stderr(),
                        "{} hangs on {}",
                        message.0,
                        message.1.escape_ascii()
                    );
                    std::process::abort();
                }
            }
        });
        watched
    }

    /// Runs a target on one input; answers with the most memory it had.
    fn run(&self, target: &'static FuzzTarget, bytes: &[u8]) -> usize {
        {
            let mut input = self.input.lock().unwrap();
            input.0 = target.name;
            input.1.clear();
            input.1.extend_from_slice(bytes);
        }
        let bytes_before = MEMORY.start();
        let outcome = std::panic::catch_unwind(|| (target.run)(bytes));
        let took = MEMORY.peak_bytes() - bytes_before;
        self.inputs_done.fetch_add(1, Ordering::Relaxed);
        assert!(
            outcome.is_ok(),
            "{} panicked on {}",
            target.name,
            bytes.escape_ascii()
        );
        assert!(
            took <= target.max_memory_bytes,
            "{} took {took} bytes, at most {} stated, on {}",
            target.name,
            target.max_memory_bytes,
            bytes.escape_ascii()
        );
        took
    }
}

/// Does every reader survive every input of the corpus and seeded changes to it: no panic, no abort, no hang, and no
/// memory beyond its stated bound?
///
/// Cost: 6 s of CPU, because a fault shows only after many changed inputs.
#[test]
fn every_reader_survives_every_changed_input() {
    let seconds = env_number("CACHEMATE_FUZZ_SECONDS");
    let watched = Watchdog::begin();
    for (index, target) in TARGETS.iter().enumerate() {
        let corpus = read_corpus(target).unwrap();
        assert!(!corpus.is_empty(), "{}: no corpus", target.name);
        let mut most = corpus
            .iter()
            .map(|bytes| watched.run(target, bytes))
            .max()
            .unwrap_or(0);
        let mut generator =
            SplitMix64::new(env_number("CACHEMATE_FUZZ_SEED").unwrap_or(15) + index as u64);
        let (start, mut runs) = (Instant::now(), 0);
        while seconds.map_or(runs < CHANGED_INPUTS, |seconds| {
            start.elapsed().as_secs() < seconds
        }) {
            let seed = &corpus[generator.draw_below(corpus.len() as u64) as usize];
            let other = &corpus[generator.draw_below(corpus.len() as u64) as usize];
            let bytes = mutate(&mut generator, seed, other, MAX_INPUT_BYTES);
            most = most.max(watched.run(target, &bytes));
            runs += 1;
        }
        println!(
            "{}: {} inputs, {runs} changed ones, at most {} KiB",
            target.name,
            corpus.len(),
            most >> 10
        );
    }
}
