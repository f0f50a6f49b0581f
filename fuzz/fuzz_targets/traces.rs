//! Any bytes as a trace of any format: no panic, no unbounded memory (`-rss_limit_mb=512`).
#![no_main]

use cachemate_trace::{CmtReader, Format, TraceReader, open_input};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&choice, bytes)) = data.split_first() else { return };
    let format = Format::ALL.get(usize::from(choice)).copied();
    let input = Box::new(std::io::Cursor::new(bytes.to_vec()));
    let mut batch = Vec::new();
    if let Ok(mut reader) = open_input(input, "fuzzed", format) {
        while let Ok(true) = reader.read_batch(&mut batch) {
            assert!(!batch.is_empty());
        }
    }
    if let Ok(mut reader) = CmtReader::new(bytes, "fuzzed") {
        reader.salvage();
        while reader.read_batch(&mut batch).expect("a salvaging reader does not fail on bytes in memory") {}
    }
});
