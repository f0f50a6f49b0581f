use super::*;

/// Is the level stated as one sentence, and only once the probe is calibrated?
#[test]
fn the_level_of_evidence_is_one_sentence() {
    assert_eq!(
        describe_evidence_level(2, true),
        "evidence level 2 (1 is best, 3 is least): no counters: programs are measured by probes on neighboring CPUs"
    );
    assert!(
        [1, 2, 3]
            .iter()
            .all(|&level| !describe_evidence_level(level, false).contains("best"))
    );
}
