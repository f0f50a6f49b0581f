//! Curves on several threads, in shards, and of caches with ways: the same digits as on one thread.

use std::path::Path;

use crate::common::{command, run};

/// Writes a recording of 2.2 million accesses to 200 000 lines, of which some are popular.
fn write_recording(dir: &Path) {
    let mut state = 1u64;
    let mut bytes = Vec::new();
    for _ in 0..2_200_000 {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let wide = state >> 33;
        let line = if wide.is_multiple_of(4) {
            wide % 200_000
        } else {
            wide % 3_000
        };
        bytes.extend_from_slice(&(line * 64).to_le_bytes());
    }
    std::fs::write(dir.join("t.u64"), &bytes).unwrap();
    std::fs::write(dir.join("cut.u64"), &bytes[..bytes.len() - 3]).unwrap();
    run(dir, &["record", "--from", "t.u64", "-o", "t.cmt"]).ok();
}

/// Do ranges of a recording and of a raw file, and segments of a stream, on several threads give the digits of one thread,
/// with a list of all distances and without, sampled, by thread and with ways?
#[test]
fn curves_on_several_threads_have_the_digits_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_recording(root);
    let ways = ["--ways", "8", "--sizes", "64K,256K,1M", "--l1", "32K:8"];
    for options in [
        &["--by", "thread"][..],
        &["--sample-rate", "0.1"],
        &["--histogram", "distances", "--force"],
        &ways,
    ] {
        let curve = |file: &str, how: &[&str]| {
            let args = [&["mrc", file, "--json"], options, how].concat();
            let mut curve = run(root, &args).json();
            curve["file"].take();
            (curve, std::fs::read(root.join("distances")).ok())
        };
        let expected = curve("t.cmt", &["--threads", "1"]);
        for file in ["t.cmt", "t.u64"] {
            for threads in ["1", "2", "5"] {
                // A file that may be damaged is read in order.
                for salvage in [&[][..], &["--salvage"]] {
                    let found = curve(file, &[&["--threads", threads], salvage].concat());
                    assert!(
                        found == expected,
                        "{options:?} {file} {threads} {salvage:?}: {}",
                        found.0
                    );
                }
            }
        }
    }
    for threads in ["1", "2", "5"] {
        let words = "byte 17599992: found 5 bytes before the end, expected entries of 8 bytes";
        run(root, &["mrc", "cut.u64", "--threads", threads]).exits_with(1, &[words]);
    }
}

/// Do shards, one of them killed and started again, give the digits of one process after they are joined in any order?
#[test]
fn shards_of_a_curve_print_the_same_as_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_recording(root);
    let curve = |more: &[&str]| run(root, &[&["mrc", "t.cmt", "--json"], more].concat()).json();
    let expected = curve(&[]);

    let shard = ["mrc", "t.cmt", "--json", "--shard", "1/2", "--store", "a"];
    let mut killed = command(root, &shard).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    killed.kill().unwrap();
    killed.wait().unwrap();
    let first = run(root, &shard).json();
    let second = curve(&["--shard", "2/2", "--store", "b"]);
    assert_eq!((&first["runs"], &second["runs"]), (&1.into(), &1.into()));

    let merged = run(root, &["merge", "all", "b", "a", "--json"]).json();
    assert_eq!(merged["copied"], 2, "{merged}");
    assert_eq!(curve(&["--store", "all"]), expected);
    // Without the second shard, its part is measured now.
    assert_eq!(curve(&["--store", "a"]), expected);

    let mut raw = run(root, &["mrc", "t.u64", "--json", "--store", "raw"]).json();
    raw["file"] = expected["file"].clone();
    assert_eq!(raw, expected);
}

/// Are inputs and sizes refused that shards cannot divide or store?
#[test]
fn shards_refuse_what_they_cannot_divide_or_store() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write_recording(root);
    std::fs::write(root.join("t.din"), "0 1000\n0 1040\n").unwrap();
    let refused = |args: &[&str], words: &[&str]| {
        run(root, &[&["mrc"], args].concat()).exits_with(2, words);
    };
    refused(&["t.cmt", "--shard", "1/2"], &["--store"]);
    refused(
        &["t.din", "--store", "a"],
        &["t.din", "read in order", "record --from"],
    );
    refused(
        &["t.cmt", "--store", "a", "--sizes", "4G"],
        &["--sizes: found 4G", "128M"],
    );
    refused(
        &["t.cmt", "--store", "a", "--histogram", "h"],
        &["--histogram"],
    );
}
