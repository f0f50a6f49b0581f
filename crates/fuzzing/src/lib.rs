//! Everything that reads what others wrote, as functions of bytes.
//!
//! Problem: files, `/proc` and sysfs texts come from hands that are not ours, and one panic, abort or endless loop ends a daemon
//! that others depend on. Method: one table of targets, each a function of bytes with a bound on its memory. Two drivers use
//! it: a short fixed run in the ordinary tests (`tests/short_run.rs`: the corpus, and seeded changes to it), and libFuzzer,
//! which goes by coverage (`fuzz/`). Properties: a target reads bytes and drops what it has read; it changes nothing but files
//! in a folder of its own. Requests to the socket and to the metrics page are put to the daemon itself
//! (`crates/cli/tests/requests.rs`). docs/fuzzing.md says what was run.

#![warn(missing_docs)]

mod changes;
mod host;
mod memory;
mod targets;

pub use changes::change;
pub use memory::CountingAllocator;
pub use targets::{FuzzTarget, INPUT_BYTES_AT_MOST, TARGETS, corpus, target};
