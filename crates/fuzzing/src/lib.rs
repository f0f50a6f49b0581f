//! All parsers of untrusted input, as functions of bytes.
//!
//! Problem: other programs and users write the files, `/proc` and sysfs texts that cachemate reads, and one panic,
//! abort or endless loop ends a daemon. Method: one table of targets, each a function of bytes with a bound on its
//! memory. Two drivers use it: a short fixed run in the ordinary tests (`tests/short_run.rs`: the corpus, and seeded
//! changes to it), and libFuzzer, which is guided by coverage (`fuzz/`). Properties: a target reads bytes and drops
//! the result; it writes files only in a directory of its own. Requests to the socket and to the metrics page are
//! tested against the daemon itself (`crates/cli/tests/requests.rs`). docs/fuzzing.md lists the runs.

#![warn(missing_docs)]

mod changes;
mod host;
mod memory;
mod targets;

pub use changes::mutate;
pub use memory::CountingAllocator;
pub use targets::{FuzzTarget, MAX_INPUT_BYTES, TARGETS, find_target, read_corpus};
