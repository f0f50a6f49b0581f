//! Does the command line keep the properties on which scripts rely: exit codes, one JSON object, no overwriting, quiet
//! pipes?

use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use crate::common::{command, lackey_text, run, run_with_umask, write_raw_trace};

/// Does mistyped input give exit code 2 and a message, never a panic?
#[test]
fn mistyped_input_gives_exit_code_2_and_never_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    write_raw_trace(dir.path(), "t.u64", 0..100);
    let mistyped: &[&[&str]] = &[
        &[],
        &["mcr", "t.u64"],
        &["mrc"],
        &["mrc", "t.u64", "--sizes", "64Q"],
        &["mrc", "t.u64", "--sizes", "1M..64K:3"],
        &["mrc", "t.u64", "--sizes", ""],
        &["mrc", "t.u64", "--line-bytes", "48"],
        &["mrc", "t.u64", "--line-bytes", "0"],
        &["mrc", "t.u64", "--by", "cpu"],
        &["mrc", "t.u64", "--sample-rate", "x"],
        &["mrc", "t.u64", "--sample-rate", "0"],
        &["mrc", "t.u64", "--sample-rate", "1.5"],
        &["mrc", "t.u64", "--sample-rate", "NaN"],
        &["mrc", "t.u64", "--ways", "4"],
        &["mrc", "t.u64", "--sizes", "2M", "--l1", "32K:8"],
        &["mrc", "t.u64", "--sizes", "2M", "--ways", "0"],
        &["mrc", "t.u64", "--sizes", "2M", "--ways", "-3"],
        &[
            "mrc",
            "t.u64",
            "--sizes",
            "2M",
            "--ways",
            "16",
            "--replacement",
            "mru",
        ],
        &["record", "--from", "t.u64"],
        &["record", "--from", "t.u64", "-o", "x.foo"],
        &[
            "record",
            "--from",
            "t.u64",
            "-o",
            "x.cmt",
            "--compression-level",
            "99",
        ],
        &["topology", "--machine"],
        &["completions", "tcsh9"],
        &["plan", "--machine", "xeon-x5365"],
        &["predict"],
        &["record", "-o", "x.cmt"],
        &["record", "-o", "x.cmt", "--l1", "30K:7", "--", "true"],
        &["record", "-o", "x.cmt", "--children", "adopt", "--", "true"],
    ];
    for args in mistyped {
        let outcome = run(dir.path(), args);
        assert_eq!(outcome.code, Some(2), "{args:?}: {}", outcome.err);
        assert!(
            !outcome.err.is_empty() && !outcome.err.contains("panicked"),
            "{args:?}: {}",
            outcome.err
        );
        assert_eq!(outcome.out, "", "{args:?}");
    }
}

/// Does an error in the input or of the host give exit code 1, with file and place?
#[test]
fn bad_input_gives_exit_code_1_with_file_and_place() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("odd.u64"), [0u8; 12]).unwrap();
    std::fs::write(dir.path().join("text.txt"), "what is this\n").unwrap();
    std::fs::write(dir.path().join("bad.din"), "0 1000\n9 zz\n").unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["mrc", "missing.cmt"], &["missing.cmt"]),
        (&["mrc", "."], &["."]),
        (&["mrc", "odd.u64"], &["odd.u64", "byte 8"]),
        (&["mrc", "text.txt"], &["text.txt", "expected"]),
        (
            &["mrc", "bad.din"],
            &["bad.din", "line 2", "found", "expected"],
        ),
        (
            &["mrc", "odd.u64", "--format", "u46"],
            &["u46", "did you mean 'u64'", "lackey"],
        ),
        (
            &["topology", "--machine", "xeon-x5356"],
            &["xeon-x5356", "did you mean 'xeon-x5365'", "opteron-2350"],
        ),
        (
            &["topology", "--machine", "./nowhere.toml"],
            &["nowhere.toml"],
        ),
        (
            &["plan", "gzpi", "gzip", "--machine", "xeon-x5365-4"],
            &["gzpi"],
        ),
    ];
    for (args, wanted) in cases {
        let outcome = run(dir.path(), args);
        assert_eq!(outcome.code, Some(1), "{args:?}: {}", outcome.err);
        for words in *wanted {
            assert!(
                outcome.err.contains(words),
                "{args:?} should say {words:?}: {}",
                outcome.err
            );
        }
        assert!(!outcome.err.contains("panicked"), "{}", outcome.err);
    }
}

/// Does an error quote the operating system only once?
#[test]
fn an_error_names_its_cause_once() {
    let dir = tempfile::tempdir().unwrap();
    for args in [
        &["mrc", "missing.cmt"][..],
        &["mrc", "missing.din", "--sizes", "1M", "--ways", "16"],
        &["profile", "missing.cmt"],
    ] {
        let outcome = run(dir.path(), args);
        let causes = outcome.err.to_lowercase().matches("no such file").count();
        assert_eq!((outcome.code, causes), (Some(1), 1), "{}", outcome.err);
    }
}

/// Does `mrc` find bundled recordings by name, like `plan`, and list them if the name is unknown?
#[test]
fn mrc_finds_bundled_recordings_by_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.lackey"), lackey_text(64, 10, 3)).unwrap();
    std::fs::create_dir(dir.path().join("recordings")).unwrap();
    run(
        dir.path(),
        &["record", "--from", "t.lackey", "-o", "recordings/small.cmt"],
    )
    .ok();
    let named = run(dir.path(), &["mrc", "small", "--json"]).json();
    assert_eq!(
        named["curve"],
        run(dir.path(), &["mrc", "t.lackey", "--json"]).json()["curve"]
    );
    run(dir.path(), &["mrc", "smal"]).exits_with(1, &["did you mean 'small'"]);
}

/// Is the version printed as a number, followed by the commit if it is known?
#[test]
fn the_version_is_printed_as_a_number() {
    let outcome = run(Path::new("."), &["--version"]).ok();
    let rest = outcome
        .out
        .strip_prefix(concat!("cachemate ", env!("CARGO_PKG_VERSION")))
        .expect(&outcome.out)
        .trim_end();
    let commit = rest
        .strip_prefix(" (")
        .and_then(|rest| rest.strip_suffix(')'));
    let of_describe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    let is_described =
        commit.is_some_and(|commit| !commit.is_empty() && commit.chars().all(of_describe));
    assert!(rest.is_empty() || is_described, "{rest:?}");
}

/// Does a reader that closes early (`| head -1`) cause no error message?
#[test]
fn a_broken_pipe_causes_no_error_message() {
    let dir = tempfile::tempdir().unwrap();
    write_raw_trace(dir.path(), "t.u64", (0..200_000).map(|at| at * 64));
    let args = ["mrc", "t.u64", "--json", "--sizes", "64..1G:5000"];
    let mut child = command(dir.path(), &args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut err = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut err)
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{err}");
    assert_eq!(err, "");
}

/// Are existing files safe without --force, and does a failed command leave nothing behind?
#[test]
fn existing_files_are_kept_without_force() {
    let dir = tempfile::tempdir().unwrap();
    write_raw_trace(dir.path(), "t.u64", 0..1000);
    std::fs::write(dir.path().join("keep.cmt"), "precious").unwrap();
    std::fs::write(dir.path().join("keep.txt"), "precious").unwrap();
    for args in [
        &["record", "--from", "t.u64", "-o", "keep.cmt"][..],
        &["mrc", "t.u64", "--histogram", "keep.txt"],
    ] {
        run(dir.path(), args).exits_with(1, &["--force"]);
    }
    assert_eq!(
        std::fs::read_to_string(dir.path().join("keep.cmt")).unwrap(),
        "precious"
    );
    assert_eq!(
        std::fs::read_to_string(dir.path().join("keep.txt")).unwrap(),
        "precious"
    );
    std::fs::write(dir.path().join("odd.u64"), [0u8; 12]).unwrap();
    assert_eq!(
        run(
            dir.path(),
            &["record", "--from", "odd.u64", "-o", "new.cmt"]
        )
        .code,
        Some(1)
    );
    assert!(!dir.path().join("new.cmt").exists());
    run(
        dir.path(),
        &["record", "--from", "t.u64", "-o", "keep.cmt", "--force"],
    )
    .ok();
    run(dir.path(), &["mrc", "keep.cmt", "--json"]).json();
    let entries: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(entries.len(), 4, "{entries:?}");
}

/// Does an output file get the mode of all output files, less what the umask takes away?
#[test]
fn an_outputs_mode_follows_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    write_raw_trace(dir.path(), "t.u64", 0..100);
    for (umask, mode) in [
        ("000", 0o644),
        ("022", 0o644),
        ("027", 0o640),
        ("077", 0o600),
    ] {
        let name = format!("{umask}.cmt");
        let status = run_with_umask(
            dir.path(),
            umask,
            &["record", "--from", "t.u64", "-o", &name],
        )
        .status()
        .unwrap();
        assert!(status.success(), "umask {umask}");
        let metadata = std::fs::metadata(dir.path().join(&name)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, mode, "umask {umask}");
    }
}

/// Does a trace survive conversion through standard input with its instruction counts?
#[test]
fn a_trace_from_standard_input_keeps_its_counts() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.lackey"), lackey_text(64, 10, 3)).unwrap();
    let input = std::fs::File::open(dir.path().join("t.lackey")).unwrap();
    let args = ["record", "--from", "-", "--format", "lackey", "-o", "t.cmt"];
    assert!(
        command(dir.path(), &args)
            .stdin(input)
            .status()
            .unwrap()
            .success()
    );
    let from_text = run(
        dir.path(),
        &["mrc", "t.lackey", "--json", "--sizes", "2K,4K,8K"],
    )
    .json();
    let from_cmt = run(
        dir.path(),
        &["mrc", "t.cmt", "--json", "--sizes", "2K,4K,8K"],
    )
    .json();
    assert_eq!(from_text["curve"], from_cmt["curve"]);
    assert_eq!(from_cmt["accesses"], 640);
    assert_eq!(from_cmt["cold"], 64);
    assert_eq!(from_cmt["instructions"], 640 * 4);
    assert_eq!(from_cmt["curve"][0]["mpki"], 250.0);
    assert_eq!(from_cmt["curve"][1]["mpki"], 25.0);
}

/// Are help, version, completions and manual pages printed completely?
#[test]
fn help_completions_and_manual_pages_are_complete() {
    let dir = tempfile::tempdir().unwrap();
    let help = run(dir.path(), &["--help"]).ok().out;
    for command in [
        "record", "mrc", "merge", "profile", "topology", "predict", "plan", "report",
    ] {
        assert!(
            help.contains(&format!("  {command}")),
            "{command} in {help}"
        );
        assert!(
            run(dir.path(), &[command, "--help"])
                .ok()
                .out
                .contains("Usage")
        );
    }
    assert!(
        run(dir.path(), &["--version"])
            .ok()
            .out
            .starts_with("cachemate ")
    );
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(dir.path(), &["completions", shell]).ok().out;
        assert!(script.contains("cachemate"), "{shell}");
        // The generators for the other shells do not complete values of options.
        if matches!(shell, "bash" | "zsh" | "fish") {
            assert!(
                script.contains("xeon-x5365-4") && script.contains("intensity-gangs"),
                "{shell}"
            );
        }
    }
    assert!(
        run(dir.path(), &["completions", "--man"])
            .ok()
            .out
            .contains(".TH")
    );
    run(dir.path(), &["completions", "--man", "man/man1"]).ok();
    let page = std::fs::read_to_string(dir.path().join("man/man1/cachemate-mrc.1")).unwrap();
    assert!(
        page.contains("cachemate\\-mrc") && page.contains("\\-\\-sizes"),
        "{page}"
    );
}

/// Is the curve the same with one thread and with several, also for each thread of a program separately?
#[test]
fn threads_do_not_change_the_curve() {
    let dir = tempfile::tempdir().unwrap();
    let addresses = (0..300_000u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44 & !7);
    write_raw_trace(dir.path(), "t.u64", addresses);
    let run_with_threads = |threads: &str| {
        run(
            dir.path(),
            &["mrc", "t.u64", "--json", "--threads", threads],
        )
        .json()
    };
    let single = run_with_threads("1");
    assert!(single["curve"].as_array().unwrap().len() > 20);
    assert_eq!(
        (&single, &single),
        (&run_with_threads("2"), &run_with_threads("3"))
    );
    let per = run(dir.path(), &["mrc", "t.u64", "--json", "--by", "thread"]).json();
    assert_eq!(per["curve"], single["curve"]);
    assert_eq!(per["parts"][0]["curve"], single["curve"]);
}

/// Is a truncated bundled recording rejected with the file's name and the damaged place, and used up to there on
/// request?
#[test]
fn a_truncated_bundled_recording_is_rejected_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let recordings = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recordings");
    std::fs::create_dir(dir.path().join("recordings")).unwrap();
    std::fs::copy(
        recordings.join("xz.cmt"),
        dir.path().join("recordings/xz.cmt"),
    )
    .unwrap();
    let content = std::fs::read(recordings.join("gzip.cmt")).unwrap();
    std::fs::write(
        dir.path().join("recordings/gzip.cmt"),
        &content[..content.len() / 2],
    )
    .unwrap();
    let machine = ["-m", "xeon-x5365-4"];
    for args in [
        &["predict", "xz", "gzip"][..],
        &["plan", "xz", "gzip"],
        &["profile", "gzip", "--json"],
    ] {
        let args = [
            args,
            if args[0] == "profile" {
                &[]
            } else {
                &machine[..]
            },
        ]
        .concat();
        let outcome = run(dir.path(), &args);
        outcome.exits_with(1, &["gzip.cmt", "block"]);
        assert!(
            outcome.out.is_empty() && !outcome.err.contains("panicked"),
            "{args:?}: {}",
            outcome.out
        );
    }
    run(
        dir.path(),
        &["mrc", "recordings/gzip.cmt", "--salvage", "--json"],
    )
    .exits_with(0, &["records before it are used"]);
}

/// Is a noun after the number 1 in the singular?
#[test]
fn a_noun_after_the_number_1_is_singular() {
    let dir = tempfile::tempdir().unwrap();
    let words = run(dir.path(), &["topology", "-m", "xeon-x5365-4"])
        .ok()
        .out;
    assert!(words.contains(", 1 package, 1 memory node\n"), "{words}");
    let words = run(dir.path(), &["topology", "-m", "opteron-2350"])
        .ok()
        .out;
    assert!(words.contains(", 2 packages, 2 memory nodes\n"), "{words}");
}
