//! The baseline of all comparisons: changes nothing. Problem: every gain is relative to a baseline. Method: an idle
//! plan in every window. Properties: requests no probes, moves no tasks, needs no evidence.

use super::{ParameterError, ParameterRange};
use cachemate_core::{Decision, Plan, Policy, View, WindowLength};
use serde::Deserialize;

/// Parameters shared by the policies that only place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    /// Length of a window.
    pub window_ns: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters { window_ns: 100_000_000 }
    }
}

impl Parameters {
    /// Parses TOML.
    ///
    /// # Errors
    /// An unknown or ill-typed parameter, or a window of length 0.
    pub fn parse(text: &str) -> Result<Self, ParameterError> {
        let parsed: Parameters = super::parameters(text)?;
        ParameterRange::OneOrMore.check([("window_ns", parsed.window_ns as f64)])?;
        Ok(parsed)
    }
    /// Returns an idle plan for the next window.
    pub fn idle(&self) -> Plan {
        Plan::idle(WindowLength::Time { ns: self.window_ns })
    }
}

struct DefaultPolicy(Parameters);

impl Policy for DefaultPolicy {
    fn decide(&mut self, _: &View<'_>) -> Decision {
        Decision::new(self.0.idle(), Vec::new())
    }
}

/// Builds the policy for the registry.
pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(DefaultPolicy(Parameters::parse(parameters)?)))
}
