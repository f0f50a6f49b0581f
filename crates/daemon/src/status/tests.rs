use super::*;

/// Is the level stated as one sentence, and only once the probe is calibrated?
#[test]
fn the_level_of_evidence_is_one_sentence() {
    assert_eq!(
        describe_evidence_level(2, true, None),
        "evidence level 2 (1 is best, 3 is least): no counters: programs are measured by probes on neighboring CPUs"
    );
    assert!(
        [1, 2, 3]
            .iter()
            .all(|&level| !describe_evidence_level(level, false, None).contains("best"))
    );
    let failed = describe_evidence_level(3, true, Some("a hit takes as long as a miss"));
    assert!(failed.ends_with("; the probe: a hit takes as long as a miss"));
}
