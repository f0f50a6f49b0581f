use super::*;

/// Is the level stated as one sentence, and not before the probe is calibrated?
#[test]
fn the_level_of_evidence_is_one_sentence() {
    assert_eq!(
        evidence_text(2, true),
        "evidence level 2 of 3: no counters: programs are measured by probes on neighboring CPUs"
    );
    assert!([1, 2, 3].iter().all(|&level| !evidence_text(level, false).contains("of 3")));
}

/// Does a program that is called like a terminal's command stay one word of a sentence about it?
#[test]
fn a_name_in_a_reason_cannot_command_a_terminal() {
    let names = BTreeMap::from([(TaskId(7), thread_text("\u{1b}[2J\n  1  1 init", 107))]);
    let reason = Reason { text: "{0} is alone".into(), tasks: vec![TaskId(7)], ..Reason::default() };
    assert_eq!(in_words(&reason, &names), r"\u{1b}[2J\n  1  1 init(107) is alone");
    let names = BTreeMap::from([(TaskId(1), "{1}(1)".to_string()), (TaskId(2), "{0}(2)".to_string())]);
    let reason = Reason { text: "{0} avoids {1}".into(), tasks: vec![TaskId(1), TaskId(2)], ..Reason::default() };
    assert_eq!(in_words(&reason, &names), "{1}(1) avoids {0}(2)");
}
