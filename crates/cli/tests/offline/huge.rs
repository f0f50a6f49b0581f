//! Sizes from users for which no host has enough memory.

use crate::common::{lackey_text, run};

/// Is a cache of terabytes, for a trace, a profile or a machine, rejected with the value found and the values expected,
/// rather than by an abort of the process?
#[test]
fn terabyte_caches_are_rejected_rather_than_aborting() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("t.lackey"), lackey_text(50, 2, 1)).unwrap();
    let scenario = "name = \"huge\"\ndescription = \"\"\nmachine = \"xeon-x5365-4?caches.l2.size=SIZE\"\nseed = 1\n\
                    length = { cycles = 1000 }\n[[programs]]\nprogram = \"povray\"\n";
    // One size exceeds the number of lines that can be counted, and one is below it.
    for size in ["2048G", "255G"] {
        std::fs::write(dir.path().join("s.toml"), scenario.replace("SIZE", size)).unwrap();
        let machine = format!("xeon-x5365-4?caches.l2.size={size}");
        for args in [
            ["mrc", "--ways", "16", "--sizes", size, "t.lackey"].as_slice(),
            &[
                "mrc",
                "--ways",
                "16",
                "--sizes",
                size,
                "--replacement",
                "plru",
                "t.lackey",
            ],
            &["profile", "--machine", &machine, "-o", "p.json", "t.lackey"],
            &["sim", "s.toml"],
        ] {
            let outcome = run(dir.path(), args);
            let message = format!("{args:?}: {:?}: {}", outcome.code, outcome.err);
            // A host that overcommits memory may start with the smaller one.
            let begun = size == "255G" && outcome.code == Some(0);
            assert!(begun || matches!(outcome.code, Some(1 | 2)), "{message}");
            assert!(
                begun || outcome.err.contains("found") && outcome.err.contains("expected"),
                "{message}"
            );
        }
    }
    // Sizes that are only looked up take no memory.
    run(
        dir.path(),
        &["mrc", "--sizes", "1K..65536G:200", "t.lackey"],
    )
    .ok();
}
