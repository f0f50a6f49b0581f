//! The baseline of all comparisons, which changes nothing. Problem: every gain is relative to a baseline. Method:
//! return an idle plan in every window. Properties: the policy requests no probes, moves no tasks, and needs no
//! evidence.

use super::{ParameterError, ParameterRange};
use cachemate_core::{Decision, Plan, Policy, View, WindowLength};
use serde::Deserialize;

/// Parameters of all policies that only place tasks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parameters {
    /// Length of a window, in nanoseconds.
    pub window_ns: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Parameters {
            window_ns: 100_000_000,
        }
    }
}

impl Parameters {
    /// Parses parameters from TOML.
    ///
    /// # Errors
    /// A parameter is unknown or has the wrong type, or the window has length 0.
    pub fn parse(text: &str) -> Result<Self, ParameterError> {
        let parameters: Parameters = super::parse_parameters(text)?;
        ParameterRange::OneOrMore.check([("window_ns", parameters.window_ns as f64)])?;
        Ok(parameters)
    }
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

pub(super) fn build(parameters: &str, _seed: u64) -> Result<Box<dyn Policy>, ParameterError> {
    Ok(Box::new(DefaultPolicy(Parameters::parse(parameters)?)))
}
