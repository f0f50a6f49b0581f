//! The bytes of a stored result: MessagePack, which keeps every bit of a number (JSON has no NaN), so that a result is
//! the same wherever it was made.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{ReproError, Result};

/// Serializes a result; an error if it does not read back as the same value.
pub(crate) fn encode_result<R: Serialize + DeserializeOwned>(
    name: &str,
    result: &R,
) -> Result<Vec<u8>> {
    let encoding_error =
        |problem: String| ReproError::Failed(name.to_string(), format!("its answer: {problem}"));
    let bytes =
        rmp_serde::to_vec_named(result).map_err(|error| encoding_error(error.to_string()))?;
    let reencoded = rmp_serde::to_vec_named(&decode_result::<R>(name, &bytes)?)
        .map_err(|error| encoding_error(error.to_string()))?;
    if reencoded == bytes {
        Ok(bytes)
    } else {
        Err(encoding_error(
            "it does not read back as it was".to_string(),
        ))
    }
}

pub(crate) fn decode_result<R: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<R> {
    let decoding_error = |error: rmp_serde::decode::Error| {
        ReproError::Failed(name.to_string(), format!("an answer: {error}"))
    };
    rmp_serde::from_slice(bytes).map_err(decoding_error)
}

/// Miss-rate curves, by their points.
pub(crate) mod curve {
    use cachemate_locality::curve::MissRateCurve;
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub fn serialize<S: Serializer>(
        curve: &MissRateCurve,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        curve.points().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<MissRateCurve, D::Error> {
        MissRateCurve::new(Vec::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do stored results keep values that JSON cannot represent?
    #[test]
    fn stored_results_keep_every_bit() {
        let answer = (
            f64::NAN.to_bits(),
            f64::NAN,
            -0.0,
            f64::INFINITY,
            None::<f64>,
        );
        let bytes = encode_result("0.0", &answer).unwrap();
        let decoded: (u64, f64, f64, f64, Option<f64>) = decode_result("0.0", &bytes).unwrap();
        assert!(
            decoded.1.to_bits() == answer.0
                && decoded.2.is_sign_negative()
                && decoded.3 == f64::INFINITY
        );
        assert_eq!(decoded.4, None);
        assert!(
            decode_result::<Vec<f64>>("0.0", &bytes)
                .unwrap_err()
                .to_string()
                .contains("0.0: an answer: ")
        );
    }
}
