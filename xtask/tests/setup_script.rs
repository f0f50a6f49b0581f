//! Does `scripts/setup.sh` ask before it installs packages, and only where somebody can answer?
//!
//! The script runs with stand-ins for Rust and Debian's tools, by which every package is missing and nothing is
//! installed: `apt-get` writes down what it was called with. `script` provides the terminal.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

const STAND_INS: [(&str, &str); 5] = [
    ("cargo", "exit 0"),
    ("rustc", "echo rustc 999.0.0"),
    ("id", "echo 0"),
    ("dpkg-query", "exit 1"),
    ("apt-get", "echo \"$*\" >>\"$CALLS\""),
];

const QUESTION: &str = "install gcc libc6-dev make by apt-get? (y/N)";
const APT_CALL: &str = "install -y --no-install-recommends gcc libc6-dev make\n";

/// What the script printed, and the calls of `apt-get`, one a line.
struct SetupRun {
    text: String,
    apt_calls: String,
}

/// With `answer`, the script runs on a terminal on which this is typed; otherwise without one.
fn run_setup(answer: Option<&str>, variables: &[(&str, &str)]) -> SetupRun {
    let dir = tempfile::tempdir().unwrap();
    for (name, body) in STAND_INS {
        let path = dir.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let calls = dir.path().join("calls");
    let mut search_path = dir.path().as_os_str().to_owned();
    search_path.push(":");
    search_path.push(std::env::var_os("PATH").unwrap());

    let mut command = match answer {
        Some(_) => {
            let mut terminal = Command::new("script");
            terminal.args(["-qec", "scripts/setup.sh build", "/dev/null"]);
            terminal
        }
        None => {
            let mut direct = Command::new("scripts/setup.sh");
            direct.arg("build");
            direct
        }
    };
    let mut child = command
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .env("PATH", search_path)
        .env("CALLS", &calls)
        .env("SHELL", "/bin/sh")
        .env_remove("CI")
        .env_remove("YES")
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut keyboard = child.stdin.take().unwrap();
    keyboard
        .write_all(answer.unwrap_or_default().as_bytes())
        .unwrap();
    drop(keyboard);

    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{text}");
    SetupRun {
        text,
        apt_calls: fs::read_to_string(&calls).unwrap_or_default(),
    }
}

/// On a terminal, does every answer but a yes leave the host alone, with a list of what is missing?
#[test]
fn on_a_terminal_nothing_is_installed_without_a_yes() {
    for answer in ["n\n", "\n", "yesterday\n", "\u{4}"] {
        let run = run_setup(Some(answer), &[]);
        assert!(run.text.contains(QUESTION), "{answer:?}: {}", run.text);
        assert_eq!(run.apt_calls, "", "{answer:?}: {}", run.text);
        let refusal = "not installed: gcc libc6-dev make";
        assert!(run.text.contains(refusal), "{answer:?}: {}", run.text);
    }
}

/// Does a yes install exactly what the question names?
#[test]
fn a_yes_installs_what_the_question_names() {
    for answer in ["y\n", "YES\n"] {
        let run = run_setup(Some(answer), &[]);
        assert!(run.text.contains(QUESTION), "{answer:?}: {}", run.text);
        assert_eq!(run.apt_calls, APT_CALL, "{answer:?}: {}", run.text);
    }
}

/// Is nobody asked without a terminal, and on one if `YES=1` or `CI` is set?
#[test]
fn nobody_is_asked_who_agreed_or_cannot_answer() {
    for (answer, variables) in [
        (None, None),
        (Some(""), Some(("YES", "1"))),
        (Some(""), Some(("CI", "true"))),
    ] {
        let run = run_setup(answer, variables.as_slice());
        assert!(!run.text.contains("(y/N)"), "{variables:?}: {}", run.text);
        assert_eq!(run.apt_calls, APT_CALL, "{variables:?}: {}", run.text);
    }
}
