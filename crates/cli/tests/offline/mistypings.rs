//! Forty mistypings of an operator: does each message name the place, what was found, and what to write instead?

use std::path::Path;

use crate::common::{CommandResult, lackey_text, run, write_raw_trace};

/// Words that no message may contain: names of types, codes of the operating system, traces of a crash.
const INTERNAL_WORDS: [&str; 5] = ["struct ", "enum ", "os error", "panicked", "RUST_BACKTRACE"];

#[track_caller]
fn check_message(subject: &str, outcome: &CommandResult, code: i32, wanted: &[&str]) {
    let message = &outcome.err;
    assert_eq!(outcome.code, Some(code), "{subject}: {message}");
    for words in wanted {
        assert!(
            message.contains(words),
            "{subject} should say {words:?}: {message}"
        );
    }
    for words in INTERNAL_WORDS {
        assert!(
            !message.contains(words),
            "{subject} says {words:?}: {message}"
        );
    }
    assert!(message.lines().count() <= 12, "{subject}: {message}");
}

/// A configuration with one mistyped line, behind a line that is right.
fn check_config(dir: &Path, text: &str) -> CommandResult {
    std::fs::write(dir.join("c.toml"), format!("seed = 1\n{text}\n")).unwrap();
    run(dir, &["manage", "--check", "--config", "c.toml"])
}

/// In thirteen configurations?
#[test]
fn thirteen_mistyped_configurations_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let rule = |line: &str| format!("[[rules]]\nservice = \"redis\"\n{line}");
    let cases: [(String, &[&str]); 13] = [
        (
            "mode = \"actt\"".into(),
            &["c.toml:2:", "'actt'", "did you mean 'act'"],
        ),
        (
            "mode = \"act".into(),
            &["c.toml:2:", "a string without its end"],
        ),
        (
            "mode = act".into(),
            &["c.toml:2:", "a text without quotes", "a string in quotes"],
        ),
        (
            "polcy = { name = \"auto\" }".into(),
            &["c.toml:2:", "did you mean 'policy'"],
        ),
        (
            "policy = { name = \"atuo\" }".into(),
            &["c.toml: policy", "'atuo'", "did you mean 'auto'"],
        ),
        (
            "window_ms = \"1s\"".into(),
            &["c.toml:2:", "window_ms", "found string", "expected"],
        ),
        (
            rule("max_slowdown = 5"),
            &["c.toml:4:", "max_slowdown", "expected"],
        ),
        (
            "rules = [\"redis\"]".into(),
            &["c.toml:2:", "'rules[0]'", "below a line [[rules]]"],
        ),
        (
            rule("max_slowdwn = \"5%\""),
            &["c.toml:4:", "did you mean 'max_slowdown'"],
        ),
        (
            rule("kind = \"units\""),
            &["c.toml:4:", "'units'", "did you mean 'unit'"],
        ),
        (
            rule("action = \"ignor\""),
            &["c.toml:4:", "did you mean 'ignore'"],
        ),
        (
            "[[rule]]\nservice = \"redis\"".into(),
            &["c.toml:2:", "did you mean 'rules'"],
        ),
        (
            "[[rules]\nservice = \"redis\"".into(),
            &["c.toml:2:", "without its end", "[[NAME]]"],
        ),
    ];
    for (text, wanted) in cases {
        let wanted = [wanted, &[": found ", ", expected "]].concat();
        check_message(&text, &check_config(dir.path(), &text), 1, &wanted);
    }
}

/// In twenty-seven commands?
#[test]
fn twenty_seven_mistyped_commands_are_explained() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    write_raw_trace(at, "t.u64", 0..100);
    std::fs::write(at.join("small.lackey"), lackey_text(64, 4, 2)).unwrap();
    run(at, &["record", "--from", "small.lackey", "-o", "small.cmt"]).ok();
    let usage: [(&[&str], &[&str]); 16] = [
        (&["statsu"], &["'statsu'", "'status'"]),
        (
            &["record", "-o", "x.cmt", "ls"],
            &["'ls'", "put '--' before the program"],
        ),
        (
            &["record", "-o", "x.cmt", "--maxaccesses", "5", "--", "ls"],
            &["--max-accesses"],
        ),
        (
            &["mrc", "t.u64", "--sizes", "256Q"],
            &["256Q", "expected a size"],
        ),
        (
            &["mrc", "t.u64", "--sizes", "1M..256K:3"],
            &["1M..256K:3", "LO below HI"],
        ),
        (
            &["mrc", "t.u64", "--sizes", "1M..256K"],
            &["1M..256K", "expected LO..HI:N"],
        ),
        (&["mrc", "t.u64", "--way", "4"], &["--way", "--ways"]),
        (&["mrc", "t.u64", "--line-bytes", "48"], &["48", "power"]),
        (&["mrc"], &["<FILE>"]),
        (&["plan", "--machine"], &["--machine"]),
        (
            &["top", "--interval", "0"],
            &["--interval", "expected 0.1 to 3600"],
        ),
        (
            &["history", "--since", "yesterday"],
            &["'yesterday'", "30m, 3h, 2d"],
        ),
        (
            &["mrc", "t.u64", "--cache", "1M"],
            &["'--cache'", "Usage: cachemate mrc"],
        ),
        (&["status", "--jsn"], &["--jsn", "--json"]),
        (
            &["manage", "--check", "--dry-run"],
            &["--check", "--dry-run"],
        ),
        (&["explain"], &["SERVICE|PID|NAME"]),
    ];
    for (args, wanted) in usage {
        let outcome = run(at, args);
        check_message(&format!("{args:?}"), &outcome, 2, wanted);
        assert!(
            !outcome.err.contains("as a value"),
            "{args:?}: {}",
            outcome.err
        );
    }
    let failures: [(&[&str], &[&str]); 11] = [
        (
            &["mrc", "smal.cmt"],
            &["smal.cmt", "found no such file", "did you mean 'small.cmt'"],
        ),
        (&["mrc", "."], &["found a directory", "expected"]),
        (
            &["mrc", "t.u64", "--format", "u46"],
            &["u46", "did you mean 'u64'"],
        ),
        (
            &["record", "--from", "small.lackey", "-o", "small.cmt"],
            &["small.cmt: the file exists", "--force"],
        ),
        (
            &["topology", "--machine", "xeon-x5356"],
            &["xeon-x5356", "did you mean 'xeon-x5365'"],
        ),
        (
            &["topology", "--machine", "./nowhere.toml"],
            &["./nowhere.toml", "found no such file"],
        ),
        (
            &["topology", "--machine", "xeon"],
            &["'xeon'", "one of p4-xeon-ht, xeon-6980p, xeon-8380,"],
        ),
        // A name is looked up before this host is measured.
        (
            &["plan", "gzpi", "gzip"],
            &["'gzpi'", "CACHEMATE_RECORDINGS"],
        ),
        (
            &["explain", "redes", "--socket", "s.sock"],
            &["s.sock", "cachemate manage starts one"],
        ),
        (
            &["history", "--state-dir", "nowhere"],
            &["nowhere", "there is no history"],
        ),
        (
            &["manage", "--check", "--config", "c.tml"],
            &["c.tml", "found no such file"],
        ),
    ];
    for (args, wanted) in failures {
        let outcome = run(at, args);
        check_message(&format!("{args:?}"), &outcome, 1, wanted);
        assert!(!outcome.err.contains("measuring"), "{}", outcome.err);
    }
}
