//! All parsers of untrusted input, as functions of bytes.
//!
//! Other programs and users write the files, the `/proc` and sysfs texts that cachemate reads, and
//! one panic, abort or endless loop ends a daemon that acts for everybody. A reader can be tested
//! with any bytes only if it can be called with any bytes, so one table ([`TARGETS`]) makes of each
//! a function of bytes with a bound on its memory. Two drivers use it: a short fixed run in the
//! ordinary tests (`tests/short_run.rs`: the corpus, and seeded changes to it), and libFuzzer,
//! which is guided by coverage (`fuzz/`).
//!
//! For example, the target `trace` takes the first byte as the format and the rest as a file. A
//! header that claims 4 GiB of JSON must be refused within 32 MiB, which a reader that allocates
//! what a length says does not survive.
//!
//! A target drops the result, because whether it is right is for the tests of the reader. Requests
//! to the socket and to the metrics page are tested against the daemon itself
//! (`crates/cli/tests/requests.rs`). docs/fuzzing.md lists the runs.
//!
//! # Invariants
//! - No input makes a target panic, exit, loop forever, or use more than its memory.
//! - A target writes files only in a directory of its own.
//! - The short run is the same in every run of the tests: its changes come from a seed.

#![warn(missing_docs)]

mod changes;
mod host;
mod memory;
mod targets;

pub use changes::mutate;
pub use memory::CountingAllocator;
pub use targets::{FuzzTarget, MAX_INPUT_BYTES, TARGETS, find_target, read_corpus};
