//! Do the pages look as they did when their pictures were last stored?
//!
//! A screenshot is compared as a grid of mean brightness, so that antialiasing and a shifted letter do not count, but a
//! missing, moved or recolored part does. `UPDATE_EXPECT=1` stores new grids; look at the screenshots in the directory
//! `CACHEMATE_PICTURES` first.

use std::path::Path;

use crate::common::{Browser, page_header};
use cachemate_auto::service_losses::{
    LossSource, ServiceLoss, ServiceReport, ServiceSlowdown, WaitingCause,
};
use cachemate_core::{Estimate, ServiceIdentity, ServiceKind, TaskId};
use cachemate_page::{
    CurveSnapshot, MatrixSnapshot, ProgramSnapshot, RecordedRun, ServiceSnapshot, Snapshot,
    page_html,
};
use serde_json::json;

/// Height of the compared part in pixels, and width and height of a cell.
const HEIGHT: u32 = 1500;
const CELL: u32 = 25;
/// Difference of brightness from which a cell counts as changed, in levels of 64.
const CHANGED_LEVELS: u8 = 3;
/// Maximum share of the cells that may have changed.
const MAX_CHANGED: f64 = 0.005;

/// Mean brightness of every cell as a character, of 64 from `0` on, a line for each row. The first line is the width of
/// a text, which identifies the fonts of the host.
fn brightness_grid(browser: &mut Browser) -> String {
    let fonts = browser.eval(
        "(() => { const pen = document.createElement('canvas').getContext('2d'); \
          pen.font = '16px ' + getComputedStyle(document.body).fontFamily; \
          return pen.measureText('Which programs should share a cache 0123456789').width.toFixed(1); })()",
    );
    let screenshot = browser.call(
        "Page.captureScreenshot",
        json!({"captureBeyondViewport": false}),
    );
    let script = format!(
        "(async () => {{ const picture = new Image(); picture.src = 'data:image/png;base64,{}'; await picture.decode(); \
         const canvas = document.createElement('canvas'); canvas.width = picture.width; canvas.height = picture.height; \
         const pen = canvas.getContext('2d'); pen.drawImage(picture, 0, 0); const lines = []; \
         for (let y = 0; y < picture.height; y += {CELL}) {{ let line = ''; \
         for (let x = 0; x < picture.width; x += {CELL}) {{ const data = pen.getImageData(x, y, {CELL}, {CELL}).data; \
         let sum = 0, count = 0; for (let at = 0; at < data.length; at += 4) if (data[at + 3]) {{ \
         sum += 0.3 * data[at] + 0.59 * data[at + 1] + 0.11 * data[at + 2]; count += 1; }} \
         line += String.fromCharCode(48 + Math.min(63, Math.floor(sum / count / 4))); }} lines.push(line); }} \
         return lines.join('\\n'); }})()",
        screenshot["data"].as_str().unwrap()
    );
    browser.open("about:blank");
    let grid = browser.eval(&script).as_str().unwrap().to_string();
    format!("fonts {}\n{grid}\n", fonts.as_str().unwrap())
}

/// Share of the cells that have changed; 1 if the grids have different shapes.
fn changed_share(expected: &str, found: &str) -> f64 {
    if expected.len() != found.len() {
        return 1.0;
    }
    let changed = expected
        .bytes()
        .zip(found.bytes())
        .filter(|(a, b)| a.abs_diff(*b) >= CHANGED_LEVELS);
    changed.count() as f64 / expected.len().max(1) as f64
}

/// Opens a page of a file at a width, waits until it stands still, and compares it with the stored grid.
fn check_look(browser: &mut Browser, name: &str, file: &Path, width: u32, hide: &str) {
    browser.set_viewport(width, HEIGHT, "light");
    let look = |browser: &mut Browser| {
        browser.open(&format!("file://{}", file.display()));
        browser
            .eval("document.fonts.ready.then(() => new Promise((done) => setTimeout(done, 600)))");
    };
    look(browser);
    browser.save_screenshot(&format!("{name}-{width}.png"));
    let found = brightness_grid(browser);
    let stored =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/looks/{name}-{width}.txt"));
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&stored, &found).unwrap();
    }

    let expected = std::fs::read_to_string(&stored).unwrap();
    let (expected_fonts, expected) = expected.split_once('\n').unwrap();
    let (fonts, found) = found.split_once('\n').unwrap();
    if fonts != expected_fonts {
        crate::not_shown::report_unchecked(
            &format!("the look of {name}"),
            "other fonts than those of the stored picture",
        );
        return;
    }
    let changed = changed_share(expected, found);
    assert!(
        changed <= MAX_CHANGED,
        "{name} at {width}: {changed:.3} of the cells differ\n{expected}\nnow\n{found}"
    );
    // The comparison has to notice a part that is missing.
    look(browser);
    browser.eval(&format!(
        "document.querySelectorAll('{hide}').forEach((part) => {{ part.style.visibility = 'hidden'; }})"
    ));
    browser.eval("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))");
    let without = brightness_grid(browser);
    let changed = changed_share(expected, without.split_once('\n').unwrap().1);
    assert!(
        changed > MAX_CHANGED,
        "{name} at {width}: without {hide}, only {changed:.3} of the cells differ"
    );
}

/// A Redis that loses most in the middle of the run, to a backup through the cache and to a spinner on its CPUs.
pub(crate) fn sample_services(window: u64) -> Vec<ServiceSnapshot> {
    let around = |value: f64| Estimate {
        value,
        low: 0.8 * value,
        high: 1.2 * value,
    };
    let unit = |name: &str| ServiceIdentity::new(ServiceKind::Unit, name);
    let waiting = if (8..13).contains(&window) { 0.7 } else { 0.1 };

    let service = |name: &str, cache: f64, waiting: f64| {
        ServiceSnapshot::new(&ServiceReport {
            service: unit(name),
            tasks: [0, 1].map(TaskId).to_vec(),
            max_slowdown: None,
            cpu_share: 0.5,
            waiting_share: None,
            slowdown: ServiceSlowdown {
                cache: Some((around(cache), LossSource::Measured)),
                waiting: Some(around(waiting)),
                ..ServiceSlowdown::default()
            },
            losses: vec![ServiceLoss {
                cause: unit("backup.service"),
                loss: around(cache),
                source: LossSource::Measured,
                forecast: None,
                windows: 9,
            }],
            waiting_causes: vec![WaitingCause {
                cause: Some(unit("spinner.service")),
                loss: waiting,
                share: 1.0,
            }],
            prevented_losses: Vec::new(),
            reason: None,
        })
    };

    vec![
        service("redis.service", 0.08, waiting),
        service("web.service", 0.03, 0.02),
    ]
}

/// A run of two programs on two caches, with a matrix and a curve.
fn sample_run() -> RecordedRun {
    let head = page_header(2);
    let program = |program: u32, window: u64| ProgramSnapshot {
        program,
        name: ["mcf", "povray", "redis-server", "gzip"][program as usize].into(),
        threads: 1 + program,
        places: vec![(program % 2, 1 + program)],
        cpu_share: Some(0.25 * f64::from(program + 1)),
        speed_per_s: Some(1e9 + 1e7 * (window * u64::from(program + 3) % 10) as f64),
        speed_unit: Some("instructions".into()),
        slowdown: Some(0.1 * f64::from(program)),
        forecast_slowdown: Some(Estimate {
            value: 0.11 * f64::from(program),
            low: 0.0,
            high: 0.5,
        }),
        ..ProgramSnapshot::default()
    };

    let table = || {
        (0..4)
            .map(|row| {
                (0..4)
                    .map(|column| Some(0.05 * f64::from(row * column)))
                    .collect()
            })
            .collect()
    };

    let curve = |program| CurveSnapshot {
        program,
        level: "L3".into(),
        source: "stall-counters".into(),
        points: (1..=32)
            .map(|step| {
                (
                    step << 20,
                    20.0 / step as f64,
                    18.0 / step as f64,
                    23.0 / step as f64,
                )
            })
            .collect(),
    };

    let snapshot = |window: u64| Snapshot {
        window,
        at_s: window as f64 + 1.0,
        duration_s: 1.0,
        programs: (0..4).map(|number| program(number, window)).collect(),
        services: sample_services(window),
        curves: if window == 0 {
            (0..4).map(curve).collect()
        } else {
            Vec::new()
        },
        matrix: Some(MatrixSnapshot {
            programs: (0..4).collect(),
            forecast: table(),
            measured: table(),
            windows: vec![vec![3; 4]; 4],
        }),
        ..Snapshot::default()
    };

    RecordedRun {
        snapshots: (0..20).map(snapshot).collect(),
        head,
    }
}

/// On a wide and a narrow window: is the look of a run's page and of a study's report that of the stored pictures?
#[test]
fn the_pages_match_the_stored_pictures() {
    let Some(mut browser) = Browser::start() else {
        crate::not_shown::report_unchecked("the look of the pages", "no Chromium");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (run, report) = (dir.path().join("run.html"), dir.path().join("report.html"));
    std::fs::write(&run, page_html(Some(&sample_run())).unwrap()).unwrap();
    std::fs::write(&report, crate::study::sample_study().html()).unwrap();
    for width in [1280, 375] {
        check_look(&mut browser, "run", &run, width, "#services");
        check_look(&mut browser, "report", &report, width, ".cards");
    }
}
