//! Reports of evidence that a policy or profiler requests and the machine does not provide.

use std::fmt;

use cachemate_core::{Ability, Capabilities, EvidenceKind, Profiler, Support};
use cachemate_papers::policies::RequiredEvidence;

use crate::POLICIES;

/// Evidence that a policy or a profiler requests and this machine does not provide.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnavailableEvidence {
    /// The policy and profilers that request the evidence, such as `policy 'casc'` or `profiler 'counters'`.
    pub consumers: Vec<String>,
    /// The missing kinds of evidence; for a policy, any one of them would suffice.
    pub evidence: Vec<EvidenceKind>,
    /// The machine's reason for not providing the evidence.
    pub reason: String,
    /// A remedy; `None` if the machine knows none.
    pub remedy: Option<String>,
}

impl fmt::Display for UnavailableEvidence {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self
            .evidence
            .iter()
            .map(|kind| describe_evidence(*kind))
            .collect();
        let verb = if self.consumers.len() == 1 {
            "has"
        } else {
            "have"
        };

        write!(
            out,
            "{} {verb} no {} here: {}",
            self.consumers.join(", "),
            names.join(" or "),
            self.reason
        )?;
        self.remedy
            .iter()
            .try_for_each(|remedy| write!(out, " ({remedy})"))
    }
}

/// If a policy lists several kinds, any one of them suffices. A profiler is listed only if the
/// policy could use its results. What several of them miss for one reason is listed once.
pub fn missing_evidence(
    policy: &str,
    profilers: &[Box<dyn Profiler>],
    capabilities: &Capabilities,
) -> Vec<UnavailableEvidence> {
    let required_evidence: RequiredEvidence =
        POLICIES.find(policy).map_or(&[], |entry| entry.needs);
    let refusal = |kind: &EvidenceKind| evidence_refusal(*kind, capabilities);
    let policy_gaps = required_evidence.iter().filter_map(|alternatives| {
        let refusals: Option<Vec<(String, Option<String>)>> =
            alternatives.iter().map(refusal).collect();
        let (reason, remedy) = refusals?.into_iter().next()?;
        Some(UnavailableEvidence {
            consumers: vec![format!("policy '{policy}'")],
            evidence: alternatives.to_vec(),
            reason,
            remedy,
        })
    });

    let is_needed = |kind: &EvidenceKind| {
        required_evidence
            .iter()
            .any(|alternatives| alternatives.contains(kind))
    };
    let profiler_gaps = profilers.iter().filter_map(|profiler| {
        let (name, kind) = profiler.evidence();
        let kind = kind.filter(is_needed)?;
        let (reason, remedy) = refusal(&kind)?;
        Some(UnavailableEvidence {
            consumers: vec![format!("profiler '{name}'")],
            evidence: vec![kind],
            reason,
            remedy,
        })
    });

    let mut gaps: Vec<UnavailableEvidence> = Vec::new();
    for gap in policy_gaps.chain(profiler_gaps) {
        let is_same = |other: &&mut UnavailableEvidence| {
            (&other.evidence, &other.reason) == (&gap.evidence, &gap.reason)
        };
        match gaps.iter_mut().find(is_same) {
            Some(same) => same.consumers.extend(gap.consumers),
            None => gaps.push(gap),
        }
    }

    gaps
}

/// The reason, and a remedy if there is one; `None` if the machine provides this evidence.
fn evidence_refusal(
    kind: EvidenceKind,
    capabilities: &Capabilities,
) -> Option<(String, Option<String>)> {
    let ability = match kind {
        EvidenceKind::TaskCounters | EvidenceKind::StallCounters => Ability::CountPerTask,
        EvidenceKind::CoRunRows => Ability::CountPerCache,
        EvidenceKind::MissTraces => Ability::TraceAddresses,
        EvidenceKind::AccessSamples => Ability::SampleAccesses,
        EvidenceKind::ReuseSamples => Ability::SampleReuses,
        EvidenceKind::SuperSets => Ability::CountSuperSets,
        EvidenceKind::PrimeProbe | EvidenceKind::Neighbor => Ability::ProbeFromOutside,
        EvidenceKind::StoredProfiles => return None,
    };

    match capabilities.abilities.get(&ability) {
        Some(Support::Yes { .. }) => None,
        Some(Support::No {
            reason: message,
            remedy,
        }) => Some((message.clone(), remedy.clone())),
        None => Some(("the machine does not report that it can".to_string(), None)),
    }
}

fn describe_evidence(kind: EvidenceKind) -> &'static str {
    match kind {
        EvidenceKind::TaskCounters => "counters of each task",
        EvidenceKind::StallCounters => "stall counters",
        EvidenceKind::CoRunRows => {
            "counters of the shared cache for each set of tasks that ran together"
        }
        EvidenceKind::MissTraces => "traces of misses",
        EvidenceKind::AccessSamples => "samples of data addresses",
        EvidenceKind::ReuseSamples => "reuse times",
        EvidenceKind::SuperSets => "counters per super set",
        EvidenceKind::PrimeProbe => "Prime+Probe",
        EvidenceKind::Neighbor => "a calibrated neighbor",
        EvidenceKind::StoredProfiles => "recorded profiles",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_core::test_support::capabilities_fixture;
    use cachemate_locality::profilers::{CountersProfiler, PcmrProfiler};

    /// Is a policy without evidence reported with the machine's reason, and a policy with sufficient evidence not?
    #[test]
    fn unavailable_evidence_is_named() {
        let mut machine = capabilities_fixture(&[Ability::CountPerTask]);
        let unsupported = Support::No {
            reason: "no such counters".to_string(),
            remedy: Some("a processor".to_string()),
        };
        machine
            .abilities
            .insert(Ability::CountPerCache, unsupported);

        let level = cachemate_core::CacheLevel::L3;
        let profilers: Vec<Box<dyn Profiler>> = vec![
            Box::new(CountersProfiler::new(level, 1.0)),
            Box::new(PcmrProfiler::new(level, Default::default())),
        ];
        let casc: Vec<String> = missing_evidence("casc", &profilers, &machine)
            .iter()
            .map(ToString::to_string)
            .collect();

        let expected =
            "policy 'casc', profiler 'co-run rows (PCMR)' have no counters of the shared cache";
        assert!(casc[0].starts_with(expected), "{casc:?}");
        assert_eq!(casc.len(), 1, "{casc:?}");
        assert!(
            casc[0].ends_with("no such counters (a processor)"),
            "{casc:?}"
        );
        assert_eq!(missing_evidence("dio", &profilers, &machine), []);
        assert_eq!(
            missing_evidence("default", &profilers, &capabilities_fixture(&[])),
            []
        );
    }
}
