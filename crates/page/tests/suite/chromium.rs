//! The page of a recording in a real browser.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::common::{Browser, page_header};
use crate::screenshots::sample_services;
use cachemate_core::{Estimate, ReasonKind};
use cachemate_page::{
    BandwidthSnapshot, CurveSnapshot, DecisionSnapshot, MatrixSnapshot, ProbeSnapshot,
    ProgramSnapshot, RecordedRun, ShareSnapshot, Snapshot, page_html,
};
use serde_json::json;

/// One browser at a time, because others would disturb measurements of time.
static TURN: Mutex<()> = Mutex::new(());

fn open_browser(subject: &str) -> Option<(Browser, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let browser = Browser::start();
    if browser.is_none() {
        crate::not_shown::report_unchecked(subject, "no Chromium");
    }
    Some((browser?, turn))
}

/// Parts that scroll although no key reaches them.
const SCROLLS_BY_KEYS: &str = "[...document.querySelectorAll('main *')].filter((part) => \
    part.scrollWidth > part.clientWidth + 1 && ['auto', 'scroll'].includes(getComputedStyle(part).overflowX) && \
    part.tabIndex < 0 && !part.querySelector('button, [tabindex]')).map((part) => part.id || part.className)";

const NAMES: [&str; 8] = [
    "gzip",
    "mcf",
    "libquantum",
    "povray",
    "postgres",
    "redis-server",
    "clang",
    "stream",
];

/// Rounds to four digits, as the builder of snapshots does.
fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// A run with these numbers of programs and caches; every tenth window moves some programs, and every figure changes in
/// every window.
fn run(programs: u32, caches: u32, windows: u64, name: impl Fn(u32) -> String) -> RecordedRun {
    let head = page_header(caches);
    let mut state = 1u64;
    let mut draw = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        rounded((state >> 40) as f64 / f64::from(1 << 24))
    };
    let mut places: Vec<u32> = (0..programs).map(|program| program % caches).collect();

    let snapshots = (0..windows).map(|window| {
        let mut decisions = Vec::new();
        if window % 10 == 5 {
            for _ in 0..1 + programs / 20 {
                let program = ((draw() * f64::from(programs)) as u32).min(programs - 1);
                places[program as usize] = (places[program as usize] + 1) % caches;
                decisions.push(DecisionSnapshot {
                    window,
                    kind: if window % 20 == 5 {
                        ReasonKind::Explanation
                    } else {
                        ReasonKind::RolledBack
                    },
                    tasks: Vec::new(),
                    programs: vec![program],
                    reason: format!(
                        "{} goes to cache {}",
                        name(program),
                        places[program as usize]
                    ),
                    numbers: vec![("gain_share".into(), 0.12)],
                });
            }
        }

        let programs_shown = (0..programs).map(|program| {
            let slowdown = rounded(0.4 * f64::from(program * 7 % 5) / 5.0 + 0.05 * draw());
            ProgramSnapshot {
                program,
                name: name(program),
                threads: 1 + program % 3,
                places: vec![(places[program as usize], 1 + program % 3)],
                cpu_share: Some(draw()),
                speed_per_s: Some((1e9 * draw()).round()),
                speed_unit: Some("instructions".into()),
                instr_per_cycle: Some(draw()),
                slowdown: Some(slowdown),
                forecast_slowdown: Some(Estimate {
                    value: rounded(1.1 * slowdown),
                    low: slowdown,
                    high: rounded(1.4 * slowdown),
                }),
                ..ProgramSnapshot::default()
            }
        });

        let programs_shown: Vec<_> = programs_shown.collect();
        let members = programs.min(16) as usize;
        let mut table = || {
            (0..members)
                .map(|_| (0..members).map(|_| Some(rounded(0.4 * draw()))).collect())
                .collect()
        };
        let matrix = MatrixSnapshot {
            programs: (0..members as u32).collect(),
            forecast: table(),
            measured: table(),
            windows: vec![vec![3; members]; members],
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

        let share = |group: u32, indices: &str| ShareSnapshot {
            group,
            cache: 0,
            ways: Some(indices.into()),
            unit_count: Some(16),
            programs: vec![group],
            occupancy_bytes: Some(7 << 20),
            ..ShareSnapshot::default()
        };

        Snapshot {
            window,
            at_s: window as f64 + 1.0,
            duration_s: 1.0,
            plan_changed: !decisions.is_empty(),
            new_decisions: decisions,
            programs: programs_shown,
            shares: vec![share(0, "0-3"), share(1, "4-15")],
            bandwidth_limits: vec![BandwidthSnapshot {
                group: 0,
                cache: 0,
                limit: "50 %".into(),
                tasks: Vec::new(),
                programs: vec![1],
            }],
            probes: vec![ProbeSnapshot {
                kind: "evicted lines".into(),
                cost_s: 0.02,
                program: Some(1),
            }],
            refused: if window % 9 == 8 {
                vec!["CPUs of mcf: no permission".into()]
            } else {
                Vec::new()
            },
            curves: if window == 0 {
                (0..programs).map(curve).collect()
            } else {
                Vec::new()
            },
            matrix: (window % 8 == 0).then_some(matrix),
            ..Snapshot::default()
        }
    });

    RecordedRun {
        snapshots: snapshots.collect(),
        head,
    }
}

fn plain_name(program: u32) -> String {
    NAMES[program as usize % NAMES.len()].to_string()
}

fn open(browser: &mut Browser, run: &RecordedRun) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("page.html");
    std::fs::write(&file, page_html(Some(run)).unwrap()).unwrap();
    browser.open(&format!("file://{}", file.display()));
    browser.wait_until("window.cachemate && cachemate.store.windows.length");
    dir
}

/// Wide and narrow, light and dark: does nothing extend beyond the window, has every control a name, and is every
/// program in its box?
#[test]
fn the_page_fits_the_window_and_every_control_has_a_name() {
    let Some((mut browser, _turn)) = open_browser("the page's layout") else {
        return;
    };
    let _dir = open(&mut browser, &run(8, 2, 40, plain_name));
    browser.eval("cachemate.show(30); cachemate.choose(2)");

    let mut papers = Vec::new();
    for (width, scheme) in [
        (1280, "light"),
        (1280, "dark"),
        (375, "light"),
        (320, "dark"),
    ] {
        browser.set_viewport(width, 900, scheme);
        browser.wait_until("document.querySelectorAll('#detail canvas').length === 3");
        browser.save_screenshot(&format!("page-{width}-{scheme}.png"));
        let wide = browser.eval("document.documentElement.scrollWidth");
        assert!(
            wide.as_u64() <= Some(u64::from(width)),
            "{width} {scheme}: {wide}"
        );
        assert_eq!(browser.eval(SCROLLS_BY_KEYS), json!([]), "{width} {scheme}");
        papers.push(browser.eval("getComputedStyle(document.body).backgroundColor"));
    }
    assert_ne!(papers[0], papers[1], "light and dark differ");
    let inside = "[...document.querySelectorAll('.chip')].every((chip) => { const a = chip.getBoundingClientRect(), \
                  b = chip.closest('.box').getBoundingClientRect(); return a.left >= b.left && a.right <= b.right && a.bottom <= b.bottom; })";
    // Programs move into their boxes, so the picture is correct only when they have arrived.
    browser.wait_until(inside);
    assert_eq!(
        browser.eval("document.querySelectorAll('.chip').length"),
        json!(8)
    );
    let tree = browser.call("Accessibility.getFullAXTree", json!({}));
    let controls = tree["nodes"].as_array().unwrap().iter().filter(|node| {
        let role = node["role"]["value"].as_str().unwrap_or_default();
        ["button", "slider", "textbox"].contains(&role) && node["ignored"] != json!(true)
    });
    let names: Vec<String> = controls
        .map(|node| {
            node["name"]["value"]
                .as_str()
                .unwrap_or_default()
                .to_string()
        })
        .collect();
    assert!(
        names.len() > 12 && names.iter().all(|name| !name.is_empty()),
        "{names:?}"
    );
    assert!(
        names
            .iter()
            .any(|name| name.starts_with("libquantum ×3") && name.contains("3 threads, in cache")),
        "{names:?}"
    );
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// Does a recording play, step and jump, by mouse and keyboard, and show the state of each window?
#[test]
fn a_recording_plays_back() {
    let Some((mut browser, _turn)) = open_browser("playback") else {
        return;
    };
    let snapshots = run(4, 2, 40, plain_name);
    let _dir = open(&mut browser, &snapshots);
    let clock = "document.getElementById('clock').textContent";
    assert_eq!(
        browser.eval(clock),
        json!("window 39, 40 s"),
        "it opens where most is known"
    );
    assert_eq!(
        browser.eval("document.getElementById('slider').value"),
        json!("39")
    );
    browser.press_key("Home");
    browser.wait_until(&format!("{clock} === 'window 0, 1 s'"));
    browser.press_key("ArrowRight");
    browser.press_key("ArrowRight");
    browser.wait_until("document.getElementById('clock').textContent.startsWith('window 2,')");
    browser.press_key("End");
    browser.wait_until("document.getElementById('slider').value === '39'");
    for (index, snapshot) in snapshots.snapshots.iter().enumerate().step_by(7) {
        browser.eval(&format!("(() => {{ const s = document.getElementById('slider'); s.value = {index}; s.dispatchEvent(new Event('input')); }})()"));
        let places = browser.eval(
            "[...document.querySelectorAll('.chip')].map((chip) => [Number(chip.dataset.program), Number(chip.closest('.box').querySelector('.soft').textContent.split(' ').pop())]).sort((a, b) => a[0] - b[0])",
        );
        let expected: Vec<(u32, u32)> = snapshot
            .programs
            .iter()
            .map(|p| (p.program, p.places[0].0))
            .collect();
        assert_eq!(places, json!(expected), "window {index}");
    }
    assert_eq!(
        browser.eval("document.querySelectorAll('.mark').length"),
        json!(4)
    );
    browser.eval("document.querySelector('.mark').click()");
    let shown = browser
        .eval("document.getElementById('decision').open && document.getElementById('decision-texts').textContent");
    assert_eq!(shown, json!(snapshots.snapshots[5].new_decisions[0].reason));
    browser.press_key("Escape");
    browser.wait_until("!document.getElementById('decision').open");
    let limits = "[...document.querySelectorAll('#shares p')].map((limit) => limit.textContent)";
    let name = plain_name(1);
    assert_eq!(
        browser.eval(limits),
        json!([format!(
            "{name} #1: at most 50 % of the memory bandwidth of L3 0"
        )])
    );
    browser.eval("cachemate.show(0)");
    browser.press_key(" ");
    browser.wait_until("cachemate.at >= 2");
    browser.press_key(" ");
    browser.wait_until("cachemate.timer === null");
    browser.eval("document.querySelector('.chip').focus()");
    browser.press_key("ArrowRight");
    assert_eq!(
        browser.eval("document.activeElement === document.querySelectorAll('.chip')[1]"),
        json!(true)
    );
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// Does a recording with losses open at its worst window, with both culprits, and do the strip and its button choose
/// windows?
#[test]
fn a_recording_opens_at_its_worst_moment() {
    let Some((mut browser, _turn)) = open_browser("worst moment") else {
        return;
    };
    let mut snapshots = run(4, 2, 40, plain_name);
    for snapshot in &mut snapshots.snapshots {
        snapshot.services = sample_services(snapshot.window);
    }

    let _dir = open(&mut browser, &snapshots);
    let clock = "document.getElementById('clock').textContent";
    assert_eq!(browser.eval(clock), json!("window 8, 9 s"));
    let culprit = browser.eval("document.getElementById('culprit').textContent");
    let culprit = culprit.as_str().unwrap();
    for words in [
        "Cache: backup.service slows redis.service by +8.0 %",
        "Waiting: redis.service takes 70 % longer because it waits for CPUs",
        "spinner.service 100 %",
    ] {
        assert!(culprit.contains(words), "{words}: {culprit}");
    }

    let rows = "document.querySelectorAll('#strip .lost')";
    assert_eq!(browser.eval(&format!("{rows}.length")), json!(2));
    let most = browser.eval(&format!("{rows}[0].textContent"));
    assert!(
        most.as_str().unwrap().starts_with("redis.service"),
        "{most}"
    );
    browser.eval(&format!(
        "[...{rows}[0].querySelectorAll('.loss')].at(-1).dispatchEvent(new MouseEvent('click'))"
    ));
    browser.wait_until(&format!("{clock} === 'window 39, 40 s'"));
    browser.eval("document.getElementById('worst').click()");
    browser.wait_until(&format!("{clock} === 'window 8, 9 s'"));
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// Is a page with an hour of windows, in which all numbers change, at most 5 MB? A tenth of the hour at three windows a
/// second represents it.
#[test]
fn a_page_with_an_hour_of_windows_is_at_most_5_mb() {
    let bytes = page_html(Some(&run(8, 2, 1080, plain_name))).unwrap().len()
        - page_html(None).unwrap().len();
    assert!(10 * bytes < 5_000_000, "{bytes} bytes for a tenth");
}

/// Is a long recording stored whole, drawn by few points that keep its extremes, and read closely after zooming, by
/// keys as well; and do programs of one name have names of their own?
#[test]
fn a_long_recording_is_zoomed_and_equal_names_distinguished() {
    let Some((mut browser, _turn)) = open_browser("zooming") else {
        return;
    };
    let mut long = run(16, 2, 2000, plain_name);
    long.snapshots[1234].programs[1].speed_per_s = Some(7e12);
    let _dir = open(&mut browser, &long);
    browser.wait_until("cachemate.store.windows.length === 2000");
    browser.eval("cachemate.choose(1); cachemate.show(1234)");
    browser.wait_until("document.querySelectorAll('#detail canvas').length === 3");
    let points = "cachemate.charts.plots.speed.data[0].length";
    assert!(browser.eval(points).as_u64() <= Some(300));
    assert_eq!(
        browser
            .eval("Math.max(...cachemate.charts.plots.speed.data[2])")
            .as_f64(),
        Some(7e12),
        "an extreme"
    );
    browser.save_screenshot("page-long.png");
    browser.eval("document.getElementById('closer').focus()");
    for _ in 0..3 {
        browser.press_key(" ");
    }
    browser.wait_until("cachemate.charts.range !== null");
    assert_eq!(
        browser.eval(points),
        json!(249),
        "every window of an eighth"
    );
    assert_eq!(
        browser.eval("document.getElementById('range').textContent"),
        json!("18:30 to 22:39")
    );
    for _ in 0..3 {
        browser.eval("document.getElementById('wider').click()");
    }
    assert_eq!(browser.eval("cachemate.charts.range"), json!(null));
    let labels = "new Set([...document.querySelectorAll('.chip .name')].map((name) => name.textContent)).size";
    assert_eq!(browser.eval(labels), json!(16));
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// Is a program whose name looks like markup, a script or the end of one shown by that name, without any effect?
#[test]
fn a_name_like_markup_is_shown_as_text() {
    let Some((mut browser, _turn)) = open_browser("hostile names") else {
        return;
    };
    let hostile = [
        "<img src=x onerror=\"window.hacked=1\">",
        "</script><script>window.hacked=1</script>",
        "javascript:window.hacked=1",
        "\" onclick=\"window.hacked=1",
        "<svg onload=window.hacked=1>",
        "'-alert(1)-'${window.hacked=1}",
    ];
    let _dir = open(
        &mut browser,
        &run(6, 2, 20, |program| hostile[program as usize].to_string()),
    );
    for index in 0..6 {
        browser.eval(&format!("cachemate.show(null); cachemate.choose({index}); document.querySelectorAll('.mark').forEach((mark) => mark.click()); document.getElementById('decision').close()"));
    }
    let shown = browser.eval("document.body.textContent");
    for name in hostile {
        assert!(shown.as_str().unwrap().contains(name), "{name}");
    }
    assert_eq!(
        browser.eval("window.hacked === undefined && document.querySelectorAll('img, main script').length === 0"),
        json!(true)
    );
    assert_eq!(
        browser.complaints,
        Vec::<String>::new(),
        "the content policy had nothing to keep out"
    );
    browser.eval(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=1\">')",
    );
    browser.wait_until("document.images[0].complete");
    assert_eq!(
        browser.eval("window.hacked === undefined"),
        json!(true),
        "and it would keep it out"
    );
    assert!(!browser.complaints.is_empty());
}

/// With 200 programs on 16 caches whose numbers all change: does an update cost less than redrawing the boxes? The
/// count is the CPU time of the page's main thread: script, style and layout, which each update forces. Painting
/// happens elsewhere and later.
#[test]
fn an_update_costs_less_than_redrawing_the_boxes() {
    let Some((mut browser, _turn)) = open_browser("the cost of an update") else {
        return;
    };
    let _dir = open(&mut browser, &run(200, 16, 120, plain_name));
    browser.set_viewport(1400, 900, "light");
    browser.eval(
        "(() => { const page = cachemate; window.told = page.store.windows.slice(); page.head({ ...page.store.head, run: 'again' });
         page.choose(3); told.slice(0, 20).forEach((one) => page.window(one)); })()",
    );
    let thread_ms = |browser: &mut Browser| {
        let metrics = browser.call("Performance.getMetrics", json!({}));
        let time = metrics["metrics"]
            .as_array()
            .unwrap()
            .iter()
            .find(|metric| metric["name"] == "ThreadTime");
        1000.0 * time.unwrap()["value"].as_f64().unwrap()
    };
    let start = thread_ms(&mut browser);
    browser.eval("told.slice(20).forEach((one) => cachemate.window(one))");
    let updated = thread_ms(&mut browser);
    browser.eval(
        "told.slice(20).forEach((one) => { cachemate.boxes.build(cachemate.store.head); cachemate.boxes.show(one, 3, true); void document.body.offsetHeight; })",
    );
    let (update, anew) = (
        (updated - start) / 100.0,
        (thread_ms(&mut browser) - updated) / 100.0,
    );
    browser.save_screenshot("page-200.png");
    let wall = browser
        .eval("cachemate.spent.slice(20).sort((a, b) => a - b)[50]")
        .as_f64()
        .unwrap();
    println!(
        "200 programs on 16 caches, script, style and layout of an update: {wall:.1} ms by the clock (median, bar 16 ms), \
         {update:.1} ms of the main thread (mean); drawing the boxes anew {anew:.1} ms"
    );
    assert_eq!(browser.eval("cachemate.store.windows.length"), json!(120));
    assert!(update < anew, "{update} and {anew}");
    assert_eq!(browser.complaints, Vec::<String>::new());
}
