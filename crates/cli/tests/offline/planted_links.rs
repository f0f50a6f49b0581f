//! Links that another user has planted where a command of root will write.

use std::os::unix::fs::symlink;

use crate::common::{interval_program, run};

const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recordings/gzip.cmt");
const FLEET: &str = "name = \"one\"\nmachine = \"xeon-x5365-4\"\nhosts = 2\nhours = 1\nservices_per_host = 1\n\
    step_minutes = 60\n[[services]]\nname = \"a\"\ncpus = 1\nload = 0.8\n[services.references]\n\
    base_cycles_per_instr = 0.7\nstall_cycles_per_miss = 60\nreferences_per_kilo_instr = 30\nworking_sets = []\n";

const SCENARIO: &str = "name = \"two\"\ndescription = \"two that reuse\"\nmachine = \"xeon-x5365-4\"\n\
    simulator = \"interval\"\nseed = 3\nlength = { ns = 2_000_000_000 }\npolicy = { name = \"default\" }\n\
    [[programs]]\nprogram = \"reuser.toml\"\ncount = 2\n";

/// Is a link at the output of a command, at its temporary name, and at a second output never followed, with and without
/// `--force`?
#[test]
fn a_link_at_an_output_is_never_followed() {
    let machine = ["--machine", "xeon-x5365-4"];
    let logs = tempfile::tempdir().unwrap();
    std::fs::write(logs.path().join("two.toml"), SCENARIO).unwrap();
    interval_program(logs.path(), "reuser", (512 << 10, 0.02), 0.001);
    run(logs.path(), &["sim", "two.toml", "-o", "run.jsonl"]).ok();
    let log = logs.path().join("run.jsonl").display().to_string();
    let commands: [(&[&str], &[&str]); 11] = [
        (
            &["record", "--from", RECORDING, "-o", "out.csv"],
            &["out.csv"],
        ),
        (
            &[
                "profile", RECORDING, machine[0], machine[1], "-o", "out.json",
            ],
            &["out.json"],
        ),
        (
            &[
                "fleet",
                "fleet.toml",
                "--csv",
                "rows.csv",
                "-o",
                "page.html",
            ],
            &["rows.csv", "page.html"],
        ),
        (&["sim", "two.toml", "-o", "run.jsonl"], &["run.jsonl"]),
        (&["record", "-o", "out.cmt", "--", "true"], &["out.cmt"]),
        (
            &["run", "--observe-only", "-o", "log.jsonl", "--", "true"],
            &["log.jsonl"],
        ),
        (&["mrc", RECORDING, "--histogram", "h.txt"], &["h.txt"]),
        (&["replay", &log, "-o", "page.html"], &["page.html"]),
        (
            &[
                "report",
                RECORDING,
                RECORDING,
                machine[0],
                machine[1],
                "-o",
                "page.html",
            ],
            &["page.html"],
        ),
        (
            &["completions", "--man", "."],
            &["cachemate.1", "cachemate-sim.1"],
        ),
        (
            &["page-color", "discover", "--timeout", "1", "-o", "map.txt"],
            &["map.txt"],
        ),
    ];
    for (args, outputs) in commands {
        for force in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let secret = dir.path().join("secret");
            std::fs::write(&secret, "precious").unwrap();
            std::fs::write(dir.path().join("fleet.toml"), FLEET).unwrap();
            std::fs::write(dir.path().join("two.toml"), SCENARIO).unwrap();
            interval_program(dir.path(), "reuser", (512 << 10, 0.02), 0.001);
            for output in outputs {
                symlink(&secret, dir.path().join(format!("{output}.part"))).unwrap();
                if force {
                    symlink(&secret, dir.path().join(output)).unwrap();
                }
            }
            let position = args
                .iter()
                .position(|arg| *arg == "--")
                .unwrap_or(args.len());
            let mut args = args.to_vec();
            if force {
                args.insert(position, "--force");
            }
            // Whether or not it succeeds (a host may lack Valgrind), the linked file is as it was.
            let outcome = run(dir.path(), &args);
            let text = std::fs::read_to_string(&secret).unwrap();
            assert_eq!(text, "precious", "{args:?}: {}{}", outcome.out, outcome.err);
            if outcome.code == Some(0) {
                for output in outputs {
                    let metadata = dir.path().join(output).symlink_metadata().unwrap();
                    assert!(
                        metadata.is_file(),
                        "{args:?}: {output} is a file of its own"
                    );
                }
            }
        }
    }
}
