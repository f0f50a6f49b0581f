//! Does the page contain the result, the reasons and every number, and load nothing from outside?

use crate::study::sample_study;
use cachemate_report::*;

#[test]
fn the_matrix_comes_first_and_every_section_is_present() {
    let html = sample_study().html();
    let order = [
        "Pairwise slowdowns",
        "The plan",
        "Why",
        "Against the alternatives",
        "The programs",
        "Miss-rate curves",
    ];
    let places: Vec<usize> = order
        .iter()
        .map(|h| html.find(&format!("<h2>{h}</h2>")).unwrap())
        .collect();
    assert!(places.is_sorted(), "{places:?}");
    assert!(html.contains("mcf keeps away from milc."));
    assert!(html.contains("by &lt;hand&gt;") && html.contains("--input &lt;a&amp;b&gt;"));
    assert_eq!(html.matches("<svg").count(), 1 + 1 + 4);
}

/// Does a report that is mailed and opened years later load nothing?
#[test]
fn the_page_loads_nothing() {
    let html = sample_study()
        .html()
        .replace("http://www.w3.org/2000/svg", "");
    for outside in [
        "http:", "https:", "src=", "@import", "url(", "<script", "<link",
    ] {
        assert!(!html.contains(outside), "{outside}");
    }
}

/// Do names that hold markup, an escape sequence, a line end or a mark that turns the direction of writing act on no
/// page: a study, a lab run?
#[test]
fn hostile_names_have_no_effect_on_a_page() {
    let evil = "</title><script>x</script>\u{1b}[31m\u{202e}\" onload=\"x";
    let mut study = sample_study();
    study.title = evil.into();
    study.programs[0].name = evil.into();
    study.programs[0].command = Some(evil.into());
    study.matrix.names[0] = evil.into();
    if let Some(plan) = &mut study.plan {
        plan.caches[0].programs[0].name = evil.into();
        plan.caches[0].programs[0].reason = evil.into();
    }
    let page = study.html();
    assert!(
        !page.contains("<script") && !page.contains("\" onload"),
        "{page}"
    );
    assert!(
        !page.contains(['\u{1b}', '\u{202e}']) && page.contains("\\u{202e}"),
        "{page}"
    );
}

#[test]
fn an_empty_study_gives_a_page_without_nan() {
    let html = StudyPage::default().html();
    assert!(html.starts_with("<!DOCTYPE html>") && !html.contains("NaN"));
}
