//! Goals as users write them: a limit is a fraction below 1, or a percentage with its sign.

use cachemate_core::Goal;
use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer};

const EXPECTED_LIMIT: &str =
    "a number below 1 such as 0.05 without quotes, or a percentage such as \"5%\"";

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenLimit {
    Share(f64),
    Text(String),
}

/// A limit of slowdown as a fraction. A number of 1 or more is rejected, because its author may have meant percent.
pub(crate) fn max_slowdown<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<f64>, D::Error> {
    let written_limit = Option::<WrittenLimit>::deserialize(deserializer)?;
    let refuse_value = |found: &str| {
        Err(D::Error::invalid_value(
            Unexpected::Other(found),
            &EXPECTED_LIMIT,
        ))
    };

    match written_limit {
        None => Ok(None),
        Some(WrittenLimit::Share(share)) if (0.0..1.0).contains(&share) => Ok(Some(share)),
        Some(WrittenLimit::Share(share)) => refuse_value(&share.to_string()),
        Some(WrittenLimit::Text(text)) => {
            let percent = text
                .strip_suffix('%')
                .and_then(|number| number.trim().parse::<f64>().ok());
            match percent.filter(|percent| percent.is_finite() && *percent >= 0.0) {
                Some(percent) => Ok(Some(percent / 100.0)),
                None => refuse_value(&format!("'{text}'")),
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenGoal {
    #[serde(default = "default_priority")]
    priority: f64,
    #[serde(default, deserialize_with = "max_slowdown")]
    max_slowdown: Option<f64>,
    min_rate: Option<f64>,
}

pub(crate) fn default_priority() -> f64 {
    Goal::default().priority
}

/// The goal of a scenario's program; its priority has a default.
pub(crate) fn goal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Goal>, D::Error> {
    let written_goal = Option::<WrittenGoal>::deserialize(deserializer)?;
    Ok(written_goal.map(
        |WrittenGoal {
             priority,
             max_slowdown,
             min_rate,
         }| Goal {
            priority,
            max_slowdown,
            min_rate,
            ..Goal::default()
        },
    ))
}
