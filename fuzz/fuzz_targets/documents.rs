//! Any bytes as a profile file and as a run log: no panic.
#![no_main]

use cachemate_trace::{ProfileFile, RunLogReader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    ProfileFile::parse(data, "fuzzed").ok();
    if let Ok(mut log) = RunLogReader::new(Box::new(std::io::Cursor::new(data.to_vec())), "fuzzed") {
        while let Ok(Some(_)) = log.next_record() {}
    }
});
