//! Another user of the host beside root's daemon: each item of docs/threat-model.md, by a program that runs as
//! `nobody`.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{ChildGuard, run, start_daemon, status_when, stop};

const NOBODY: u32 = 65_534;
const PATIENCE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(180));
/// Variable with the test's directory, for the other user's part of it.
const DIR: &str = "CACHEMATE_TEST_FOLDER";

/// A directory that all users may read; `None` if not root, which is reported.
fn make_shared_dir(subject: &str) -> Option<tempfile::TempDir> {
    if !rustix::process::geteuid().is_root() {
        println!("not shown here: {subject}: needs root to become another user");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    open_to_all(dir.path());
    Some(dir)
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs one of the tests below as `nobody` until it reports that it is done; it continues until it is dropped.
fn as_nobody(dir: &Path, part: &str) -> ChildGuard {
    // The test program may be where `nobody` cannot read it. Another process copies it: a file that this one writes may
    // be open in a child that another test has just forked, and a file that is open for writing cannot be executed.
    let program = dir.join(part);
    let copied = Command::new("cp")
        .arg(std::env::current_exe().unwrap())
        .arg(&program)
        .status()
        .unwrap();
    assert!(copied.success(), "{copied}");
    open_to_all(&program);
    let mut command = Command::new(&program);
    command
        .args(["--exact", part, "--ignored", "--nocapture"])
        .env(DIR, dir)
        .current_dir(dir);
    command
        .uid(NOBODY)
        .gid(NOBODY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut running = ChildGuard(command.spawn().unwrap());
    let mut output = String::new();
    let mut lines = BufReader::new(running.0.stdout.take().unwrap());
    while lines.read_line(&mut output).unwrap() > 0 && !output.ends_with("done\n") {}
    assert!(output.ends_with("done\n"), "{output}");
    running
}

/// The other user's side: reports that its part is done, and stays until the test ends.
fn report_done() {
    println!("\ndone");
    let _ = std::io::stdin().read(&mut [0]);
}

fn stranger_dir() -> Option<PathBuf> {
    std::env::var_os(DIR).map(PathBuf::from)
}

fn wait_until_ready(dir: &Path) {
    status_when(dir, "a window", PATIENCE, |status| {
        status["windows"].as_u64() > Some(0)
    });
}

/// Does another user at the socket get no information, and root an answer, however many connections that user holds?
#[test]
fn other_users_get_no_information_and_delay_no_answer() {
    let Some(dir) = make_shared_dir("a stranger's connections") else {
        return;
    };
    let _daemon = start_daemon(dir.path(), "window_ms = 100\n");
    wait_until_ready(dir.path());
    let _stranger = as_nobody(dir.path(), "part_of_a_stranger_at_the_socket");
    for _ in 0..5 {
        run(dir.path(), &["status", "--json", "--socket", "s.sock"]).json();
    }
}

#[test]
#[ignore = "run by the test above, as nobody"]
fn part_of_a_stranger_at_the_socket() {
    let Some(dir) = stranger_dir() else { return };
    for request in ["status\n", "reload\n"] {
        let mut stream = UnixStream::connect(dir.join("s.sock")).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("user 65534 may not ask here"), "{answer}");
    }
    let held: Vec<UnixStream> = (0..300)
        .map(|_| UnixStream::connect(dir.join("s.sock")).unwrap())
        .collect();
    report_done();
    drop(held);
}

/// Does the work that another user's program reports count for that program, and for no program of root's?
///
/// Cost: some seconds, because the daemon must see windows of both programs.
#[test]
fn other_users_cannot_report_for_roots_program() {
    let Some(dir) = make_shared_dir("a stranger's reports") else {
        return;
    };
    let program = ChildGuard(
        Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap(),
    );
    let part = "part_of_a_stranger_who_reports_work";
    let config = format!(
        "window_ms = 100\n[[rules]]\npid = {}\naction = \"observe\"\n\
         [[rules]]\ncommand = \"{}\"\naction = \"observe\"\n",
        program.pid(),
        &part[..15],
    );
    let _daemon = start_daemon(dir.path(), &config);
    wait_until_ready(dir.path());
    let stranger = as_nobody(dir.path(), part);
    let reporters = |status: &serde_json::Value| -> Vec<i64> {
        let tasks = status["tasks"].as_array().cloned().unwrap_or_default();
        let is_reporter = |task: &&serde_json::Value| task["progress_unit"] == "work reported";
        let pids = tasks.iter().filter(is_reporter);
        pids.filter_map(|task| task["pid"].as_i64()).collect()
    };
    let status = status_when(dir.path(), "a report", PATIENCE, |status| {
        !reporters(status).is_empty()
    });
    assert_eq!(reporters(&status), [i64::from(stranger.pid())]);
    assert!(
        !dir.path().join("progress").exists(),
        "no folder that all may write"
    );
}

#[test]
#[ignore = "run by the test above, as nobody"]
fn part_of_a_stranger_who_reports_work() {
    use std::os::unix::fs::FileExt;
    let Some(dir) = stranger_dir() else { return };
    let memory = cachemate_daemon::socket::request_report_memory(&dir.join("s.sock")).unwrap();
    assert!(memory.set_len(0).is_err());
    std::thread::spawn(move || {
        for count in 0u64.. {
            memory.write_all_at(&count.to_ne_bytes(), 0).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    report_done();
}

/// Are the journal and the locks inaccessible to other users for reading, writing and removing while a daemon runs?
#[test]
fn the_state_directory_is_inaccessible_to_other_users() {
    let Some(dir) = make_shared_dir("a stranger at the state directory") else {
        return;
    };
    let _daemon = start_daemon(dir.path(), "window_ms = 100\n");
    wait_until_ready(dir.path());
    let _stranger = as_nobody(dir.path(), "part_of_a_stranger_at_the_state_directory");
}

#[test]
#[ignore = "run by the test above, as nobody"]
fn part_of_a_stranger_at_the_state_directory() {
    let Some(dir) = stranger_dir() else { return };
    let state = dir.join("state");
    assert!(std::fs::read_dir(&state).is_err());
    assert!(std::fs::File::open(state.join("daemon.lock")).is_err());
    assert!(std::fs::write(state.join("restore.journal"), "").is_err());
    assert!(std::fs::rename(&state, dir.join("elsewhere")).is_err());
    report_done();
}

/// Names that imitate a terminal command and another row, an argument of a reason, the other direction of writing, the
/// end of a label, and the end of a script.
const NAMES: [(&str, &str); 4] = [
    ("\u{1b}[2J\n 1 1 init", r"\u{1b}[2J\n 1 1 init"),
    ("{1}\u{202e}exe", r"{1}\u{202e}exe"),
    ("a\"} 1\n# EOF\n", r#"a"} 1\n# EOF\n"#),
    ("<script>{0}", "<script>{0}"),
];

/// Do other users' programs with such names have no effect on any front end: tables, reasons, JSON, metrics, the
/// daemon's log, the page of a recording?
#[test]
fn other_users_program_names_affect_no_front_end() {
    let Some(dir) = make_shared_dir("a stranger's program") else {
        return;
    };
    let at = dir.path();
    let mut config = String::from(
        "window_ms = 100\nrun_log = \"run.jsonl\"\nmetrics_textfile = \"metrics.prom\"\npolicy = { name = \"default\" }\n",
    );
    let mut programs = Vec::new();
    for (name, _) in NAMES {
        let program = at.join(name.replace('/', "_"));
        std::fs::copy("/bin/sleep", &program).unwrap();
        open_to_all(&program);
        let sleeper = ChildGuard(
            Command::new(&program)
                .arg("100")
                .uid(NOBODY)
                .gid(NOBODY)
                .spawn()
                .unwrap(),
        );
        config.push_str(&format!(
            "[[rules]]\npid = {}\naction = \"observe\"\n",
            sleeper.pid()
        ));
        programs.push(sleeper);
    }
    let mut daemon = start_daemon(at, &config);
    status_when(at, "the programs", PATIENCE, |status| {
        let tasks = status["tasks"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        NAMES
            .iter()
            .all(|(name, _)| tasks.iter().any(|task| task["name"] == *name))
    });
    let is_acting = |c: char| matches!(c, '\u{1b}' | '\u{202e}');
    let check_output = |command: &str, text: &str, has_names: bool| {
        assert!(!text.contains(is_acting), "{command}: {text}");
        for (_, shown) in NAMES.iter().filter(|_| has_names) {
            assert!(text.contains(shown), "{command}: {shown} in {text}");
        }
        let is_forged = |line: &str| line.starts_with(" 1 1 init") || line.trim() == "# EOF";
        assert!(
            text.lines().filter(|line| is_forged(line)).count()
                <= usize::from(command == "metrics.prom"),
            "{command}: {text}"
        );
    };
    let pids: Vec<String> = programs
        .iter()
        .map(|program| program.pid().to_string())
        .collect();
    let mut commands: Vec<Vec<&str>> = vec![
        vec!["status"],
        vec!["status", "--threads"],
        vec!["status", "--json"],
    ];
    commands.extend([vec!["top", "-n", "1"], vec!["explain", &pids[0], "--json"]]);
    commands.extend(pids.iter().map(|pid| vec!["explain", pid.as_str()]));
    commands.extend(NAMES.iter().map(|(name, _)| vec!["explain", name]));
    for args in commands {
        let output = run(at, &[&args[..], &["--socket", "s.sock"]].concat()).ok();
        let has_names = matches!(args[..], ["status", "--threads"] | ["top", ..]);
        check_output(&args.join(" "), &output.out, has_names);
        check_output(&args.join(" "), &output.err, false);
    }
    let check_file = |file: &str| {
        check_output(
            file,
            &std::fs::read_to_string(at.join(file)).unwrap(),
            false,
        )
    };
    check_file("metrics.prom");
    stop(&mut daemon);
    let page = run(at, &["replay", "run.jsonl", "-o", "run.html"]).ok();
    check_output("dashboard", &(page.out + &page.err), false);
    check_file("run.html");
    let page = std::fs::read_to_string(at.join("run.html")).unwrap();
    assert!(!page.contains("<script>{0}"), "a name opens a script");
}
