//! The message: accepted plans, and errors for bad input.
use cachemate_gangs::SchedulerRequest;
use gangs::maps::{MapTurn, TaskKey, TaskPlace};
use gangs::plan::{self, MAX_BYTES, parse_request};
use serde_json::{Value, json};

fn good_plan() -> Value {
    json!({ "version": 1, "generation": 5, "longest_wait_ms": 300, "turns": [
        { "cache": 0, "gang": 0, "turn_us": 20000, "may_fill": [2] },
        { "cache": 0, "gang": 1, "turn_us": 50000 },
        { "cache": 1, "gang": 2, "turn_us": 20000 },
    ], "tasks": [
        { "process": 100, "gang": 0, "caches": [0] },
        { "thread": 100, "gang": 1, "caches": [0], "weight": 200, "children": true },
    ] })
}

fn check_plan(plan: &Value) -> Result<gangs::plan::CheckedPlan, String> {
    match parse_request(&json!({ "plan": plan }).to_string())? {
        SchedulerRequest::Plan(message) => plan::check_plan(&message, 2, 4),
        other => panic!("{other:?}"),
    }
}

/// Does a valid message give its plan?
#[test]
fn a_valid_message_gives_its_plan() {
    let plan = check_plan(&good_plan()).unwrap();
    assert_eq!(plan.generation, 5);
    let first = MapTurn {
        length_ns: 20_000_000,
        gang: 0,
        may_fill: 4,
    };
    assert_eq!(
        plan.rotations[0],
        [
            first,
            MapTurn {
                length_ns: 50_000_000,
                gang: 1,
                may_fill: 0
            }
        ]
    );
    assert_eq!(plan.rotations[1].len(), 1);
    assert_eq!(
        plan.places[&TaskKey::Process(100)],
        TaskPlace {
            gang: 0,
            caches: 1,
            weight: 100,
            children: false
        }
    );
    assert_eq!(
        plan.places[&TaskKey::Thread(100)],
        TaskPlace {
            gang: 1,
            caches: 1,
            weight: 200,
            children: true
        }
    );
    assert!(matches!(
        parse_request(r#"{"state":{}}"#),
        Ok(SchedulerRequest::State {})
    ));
    assert!(matches!(
        parse_request(r#"{"stop":{}}"#),
        Ok(SchedulerRequest::Stop {})
    ));
}

/// Is each invalid field reported with the value found and the values expected?
#[test]
fn invalid_fields_are_reported_with_found_and_expected() {
    let cases = [
        ("/version", json!(2), "plan.version: found 2, expected 1"),
        (
            "/generation",
            json!(4),
            "plan.generation: found 4, expected more than 4",
        ),
        (
            "/generation",
            json!(u64::MAX),
            "plan.generation: found 18446744073709551615, expected less",
        ),
        (
            "/longest_wait_ms",
            json!(239),
            "plan.turns: a task at cache 0 may wait 240 ms (two rotations and 100 ms), expected at most 239",
        ),
        (
            "/turns/2/cache",
            json!(2),
            "plan.turns[2].cache: found 2, expected below 2",
        ),
        (
            "/turns/1/gang",
            json!(30),
            "plan.turns[1].gang: found 30, expected below 30",
        ),
        (
            "/turns/1/gang",
            json!(0),
            "plan.turns[1].gang: found 0 again, expected one turn at cache 0",
        ),
        (
            "/turns/0/turn_us",
            json!(999),
            "plan.turns[0].turn_us: found 999, expected 1000 to 1000000",
        ),
        (
            "/turns/0/turn_us",
            json!(u64::MAX),
            "plan.turns[0].turn_us: found 18446744073709551615, expected 1000 to 1000000",
        ),
        (
            "/turns/0/may_fill/0",
            json!(0),
            "plan.turns[0].may_fill[0]: found 0, expected another gang than the turn's own",
        ),
        (
            "/turns/0/may_fill/0",
            json!(32),
            "plan.turns[0].may_fill[0]: found 32, expected below 30",
        ),
        (
            "/tasks/0/process",
            json!(0),
            "plan.tasks[0].process: found 0, expected 1 to 2147483647",
        ),
        (
            "/tasks/0/process",
            json!(4294967295u32),
            "plan.tasks[0].process: found 4294967295, expected 1 to 2147483647",
        ),
        (
            "/tasks/0/process",
            json!(null),
            "plan.tasks[0]: expected either 'process' or 'thread'",
        ),
        (
            "/tasks/1/weight",
            json!(0),
            "plan.tasks[1].weight: found 0, expected 1 to 10000",
        ),
        (
            "/tasks/1/caches",
            json!([]),
            "plan.tasks[1].caches: found none, expected at least one",
        ),
        (
            "/tasks/1/caches",
            json!([0, 1]),
            "plan.tasks[1].caches[1]: gang 1 has no turn at cache 1",
        ),
        (
            "/tasks/1/caches",
            json!([40]),
            "plan.tasks[1].caches[0]: found 40, expected below 2",
        ),
        (
            "/tasks/1",
            json!({ "process": 100, "gang": 0, "caches": [0] }),
            "plan.tasks[1]: found Process(100) again, expected each task once",
        ),
    ];
    for (field, value, message) in cases {
        let mut plan = good_plan();
        *plan.pointer_mut(field).unwrap_or_else(|| panic!("{field}")) = value;
        assert_eq!(check_plan(&plan).unwrap_err(), message, "{field}");
    }
}

/// Is text that is not a request rejected, and never taken for an empty plan?
#[test]
fn text_that_is_not_a_request_is_rejected() {
    for text in [
        "",
        "{}",
        "[]",
        "null",
        "{\"plan\":{}}",
        "{\"plan\":1}",
        "{\"state\":{},\"stop\":{}}",
        "{\"go\":{}}",
        "{\"state\":{\"x\":1}}",
    ] {
        let message = parse_request(text).unwrap_err();
        assert!(message.starts_with("message: "), "{text}: {message}");
    }
    let mut plan = good_plan();
    plan["wieght"] = json!(1);
    assert!(
        check_plan(&plan)
            .unwrap_err()
            .contains("unknown field `wieght`")
    );
    let long = " ".repeat(MAX_BYTES + 1);
    assert!(
        parse_request(&long)
            .unwrap_err()
            .contains("expected at most")
    );
}

/// Does any text, truncated or changed anywhere, give an error or a plan, never a panic?
#[test]
fn cut_and_changed_messages_never_panic() {
    let text = json!({ "plan": good_plan() }).to_string();
    let mut accepted_count = 0;
    for index in 0..text.len() {
        assert!(parse_request(&text[..index]).is_err(), "cut at {index}");
        for with in ['9', '-', '"', '}', ' '] {
            let mut changed = text.clone();
            changed.replace_range(index..index + 1, &with.to_string());
            if let Ok(SchedulerRequest::Plan(message)) = parse_request(&changed) {
                accepted_count += usize::from(plan::check_plan(&message, 2, 4).is_ok());
            }
        }
    }
    assert!(
        accepted_count > 0,
        "no change was harmless: the plan is not read at all"
    );
}
