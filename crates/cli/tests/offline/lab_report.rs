//! The script that writes the results of a lab run as a page.

use std::path::Path;
use std::process::Command;

use crate::common::not_shown::report_unchecked;

/// Does the page have every figure once, as text whatever it contains, and does the script replace no file?
#[test]
fn every_figure_is_on_the_labs_page_as_text() {
    let evil = r#"<script>\u202e\u001b\" onload"#;
    let line = |id: &str, passed: &str, reported: &str, modeled: &str| {
        format!(
            "{{\"id\": \"{id}\", \"title\": \"a <figure> {evil}\", \"passed\": {passed}, \"reported\": \"{reported}\", \
             \"modeled\": \"{modeled}\", \"target\": \"-\"}}"
        )
    };
    let lines = [
        line("colors.plain", "true", "26.5", "26.73"),
        line("ways.gain", "false", "static-partition", "4.72"),
        line("colors.end", "null", "-", "3"),
        line("forecast.pair", "null", "0.00", "-1.5"),
    ];
    let dir = tempfile::tempdir().unwrap();
    let result = dir.path().join("result.json");
    let text = format!(
        "{{\"ran\": true, \"kernel\": \"6.18\", \"lines\": [{}]}}",
        lines.join(",")
    );
    std::fs::write(&result, text).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../lab/report.py");
    let write_page = || {
        let mut command = Command::new("python3");
        command.arg("-B").arg(&script).arg(&result).arg("lab.html");
        command.current_dir(dir.path()).output()
    };

    let Ok(output) = write_page() else {
        report_unchecked("the page of the lab", "no python3");
        return;
    };
    assert!(output.status.success(), "{output:?}");
    let page = std::fs::read_to_string(dir.path().join("lab.html")).unwrap();
    assert!(
        page.contains("1 met, 1 missed; 2 figures without one. Kernel: 6.18."),
        "{page}"
    );
    for (text, count) in [
        ("<h2>colors</h2>", 1),
        ("<h2>ways</h2>", 1),
        ("a &lt;figure&gt;", 5),
        ("<circle", 2),
    ] {
        assert_eq!(page.matches(text).count(), count, "{text}: {page}");
    }
    assert!(
        !page.contains(['\u{1b}', '\u{202e}'])
            && !page.contains("<script")
            && !page.contains("\" onload")
    );
    assert!(
        !write_page().unwrap().status.success(),
        "the page is there already"
    );
}
