use cachemate_core::test_support::alternating::{self, alternating_config};
use cachemate_core::*;

use super::*;

/// Writes the log of a run, and returns its records.
fn write_sample_log(path: &std::path::Path) -> Vec<WindowRecord> {
    let (header, records) = alternating::recorded_run();
    let mut log = RunLogWriter::create(path, false, &header).unwrap();
    records.iter().for_each(|record| log.push(record).unwrap());
    log.finish().unwrap();
    records
}

fn read_all(mut log: RunLogReader) -> (Vec<WindowRecord>, Option<TraceError>) {
    let mut records = Vec::new();
    loop {
        match log.next_record() {
            Ok(Some(record)) => records.push(record),
            Ok(None) => return (records, None),
            Err(error) => return (records, Some(error)),
        }
    }
}

/// Does a log, compressed or not, read back bit for bit?
#[test]
fn a_written_log_reads_back_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["run.jsonl", "run.jsonl.zst"] {
        let path = dir.path().join(name);
        let records = write_sample_log(&path);
        let log = RunLogReader::open(&path).unwrap();
        assert_eq!(
            (log.header().pipeline.clone(), log.header().format),
            (alternating_config(), RUN_LOG_VERSION)
        );
        let (read_records, error) = read_all(log);
        assert!(error.is_none());
        assert_eq!(read_records, records);
        assert_eq!(
            serde_json::to_string(&read_records).unwrap(),
            serde_json::to_string(&records).unwrap()
        );
    }
}

/// Does a log truncated anywhere give every complete record, and then the damaged line?
#[test]
fn a_truncated_log_gives_complete_records_and_the_damaged_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.jsonl");
    let records = write_sample_log(&path);
    let bytes = std::fs::read(&path).unwrap();
    let ends: Vec<usize> = bytes
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'\n')
        .map(|(index, _)| index + 1)
        .collect();

    for (cut, whole_records) in [
        (ends[2], 2),
        (ends[2] + 5, 2),
        (ends[3] - 1, 2),
        (ends[6], 6),
    ] {
        let log = RunLogReader::new(
            Box::new(std::io::Cursor::new(bytes[..cut].to_vec())),
            "run.jsonl",
        )
        .unwrap();
        let (read_records, error) = read_all(log);
        assert_eq!(read_records, records[..whole_records]);
        let text = error.unwrap().to_string();
        assert!(
            text.starts_with(&format!(
                "run.jsonl: line {}: found the end of the file",
                whole_records + 2
            )),
            "{text}"
        );
    }
    let mut damaged = bytes.clone();
    damaged[ends[1] + 1] = b'!';
    let log = RunLogReader::new(Box::new(std::io::Cursor::new(damaged)), "run.jsonl").unwrap();
    let (read_records, error) = read_all(log);
    assert_eq!(read_records, records[..1]);
    assert!(matches!(
        error,
        Some(TraceError::Bad {
            place: crate::FilePosition::Line(3),
            ..
        })
    ));
    let packed = dir.path().join("run.jsonl.zst");
    write_sample_log(&packed);
    let bytes = std::fs::read(&packed).unwrap();
    let cut = bytes[..bytes.len() - 40].to_vec();
    let (read_records, error) =
        read_all(RunLogReader::new(Box::new(std::io::Cursor::new(cut)), "run.jsonl.zst").unwrap());
    assert!(records.starts_with(&read_records) && !read_records.is_empty());
    assert!(
        error
            .unwrap()
            .to_string()
            .starts_with(&format!("run.jsonl.zst: line {}:", read_records.len() + 2))
    );
}

/// Is a number that JSON cannot represent rejected when written, rather than when read?
#[test]
fn an_infinite_number_is_rejected_when_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut record = write_sample_log(&dir.path().join("a")).remove(0);
    record
        .forecast
        .cache_miss_ratio
        .insert(CacheId(0), Estimate::exact(f64::NAN));
    let mut optional = record.clone();
    optional.forecast = Forecast::default();
    optional.observation.tasks[0].progress = Some(f64::INFINITY);

    let header = RunLogReader::open(dir.path().join("a"))
        .unwrap()
        .header()
        .clone();
    let mut log = RunLogWriter::create(dir.path().join("b"), false, &header).unwrap();
    for record in [record, optional] {
        let error = log.push(&record).unwrap_err().to_string();
        assert!(
            error.contains("line 2") && error.contains("JSON cannot hold"),
            "{error}"
        );
    }
}

/// Is a log of another format rejected with its format and the expected one?
#[test]
fn another_format_is_rejected_with_both_numbers() {
    for format in [5, 7] {
        let header = format!(
            r#"{{"format":{format},"topology":{{"cpus":[],"caches":[]}},"policy":"default","seed":1}}"#
        );
        let input = Box::new(std::io::Cursor::new(format!("{header}\n").into_bytes()));
        let error = RunLogReader::new(input, "run.jsonl")
            .err()
            .unwrap()
            .to_string();
        assert_eq!(
            error,
            format!("run.jsonl: line 1: found run log format {format}, expected format 6")
        );
    }
}
