//! Traces: the speed of reading `.cmt`, and the slowdown of a program while it is recorded.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use cachemate_trace::{
    AccessRecord, CmtReader, CmtWriter, Recorder, RecorderTool, TraceHeader, TraceReader,
    TraceTotals, find_recorder_tool,
};

use super::{BenchGroup, Options};
use crate::harness::{BenchClock, Contender, ResultRow, compare};
use crate::traces::checksum;

pub const GROUP: BenchGroup = BenchGroup {
    name: "trace",
    about: "reading .cmt (records, addresses alone) against a copy in memory; gzip recorded against gzip",
    run,
};

fn run(options: &Options) -> Vec<ResultRow> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut rows = Vec::new();
    for kind in &options.traces {
        let lines = kind.generate_lines(options.accesses);
        let path = dir.path().join("trace.cmt");
        write(&path, &lines);
        let copy = || checksum(&lines.iter().map(|line| line * 64).collect::<Vec<u64>>());
        let contenders = vec![
            Contender::new("copy", copy),
            Contender::new("cmt records", || read_records(&path))
                .compare_with(0, None)
                .with_min_millions(Some(50.0)),
            Contender::new("cmt addresses", || read_addresses(&path)).compare_with(0, None),
        ];
        rows.extend(compare(
            "trace",
            kind.name(),
            lines.len(),
            options.rounds,
            BenchClock::Thread,
            false,
            contenders,
        ));
    }
    rows.extend(recording_rows(dir.path(), options));
    rows
}

/// Records like those of a filtered recording: gaps, sizes and stores that vary.
fn write(path: &Path, lines: &[u64]) {
    let out = std::fs::File::create(path).expect("a file in the temporary directory");
    let header = TraceHeader::for_import("bench", true);
    let mut writer = CmtWriter::new(std::io::BufWriter::new(out), "bench", &header, 3)
        .expect("a header that fits");
    for (index, line) in lines.iter().enumerate() {
        let mixed = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        let record = AccessRecord {
            address: line * 64,
            gap: mixed % 60,
            thread: 0,
            size: 1 << (mixed % 4),
            store: mixed.is_multiple_of(3),
            ..AccessRecord::default()
        };
        writer
            .push(&record)
            .expect("room in the temporary directory");
    }
    writer
        .finish(TraceTotals::default())
        .expect("room in the temporary directory");
}

fn read_records(path: &Path) -> u64 {
    let mut reader = CmtReader::open(path).expect("the file just written");
    let (mut sum, mut batch) = (0u64, Vec::new());
    while reader.read_batch(&mut batch).expect("an undamaged file") {
        sum = batch.iter().fold(sum, |sum, record| {
            sum.wrapping_add(record.address ^ record.gap)
        });
    }
    sum
}

fn read_addresses(path: &Path) -> u64 {
    let mut reader = CmtReader::open(path).expect("the file just written");
    let (mut sum, mut batch) = (0u64, Vec::new());
    while reader
        .read_addresses(&mut batch)
        .expect("an undamaged file")
    {
        sum = batch
            .iter()
            .fold(sum, |sum, &address| sum.wrapping_add(address));
    }
    sum
}

/// gzip of 8 MB of text by the wall clock, because the recorder is a separate process beside the compressing one.
fn recording_rows(dir: &Path, options: &Options) -> Vec<ResultRow> {
    let tool = match find_recorder_tool() {
        Ok(tool @ RecorderTool::Tool { .. }) => tool,
        other => {
            eprintln!("trace: recording is not measured: {other:?}");
            return Vec::new();
        }
    };
    let input = dir.join("in.txt");
    let text: String = (0..500_000u64)
        .map(|i| format!("{i} {}\n", i.wrapping_mul(2_654_435_761) % 10_000))
        .collect();
    std::fs::write(&input, &text).expect("room in the temporary directory");
    let command = [
        "gzip".to_string(),
        "-c".to_string(),
        input.display().to_string(),
    ];
    let run_native = || {
        let status = Command::new(&command[0])
            .args(&command[1..])
            .stdout(Stdio::null())
            .status();
        u64::from(status.is_ok_and(|status| status.success()))
    };
    let recorder = Recorder {
        force: true,
        discards_output: (true, true),
        ..Recorder::new(command.to_vec(), dir.join("gzip.cmt"))
    };
    let run_recorded = || {
        let recorded = recorder.run_with(&tool, &AtomicBool::new(false), |_| {});
        u64::from(recorded.is_ok())
    };
    let contenders = vec![
        Contender::new("gzip", run_native),
        Contender::new("gzip recorded", run_recorded).compare_with(0, Some(1.0 / 30.0)),
    ];
    compare(
        "trace",
        "gzip (bytes)",
        text.len(),
        options.rounds,
        BenchClock::Wall,
        true,
        contenders,
    )
}
