//! The scheduler extender's answers: pods and node names in, remaining names and scores out.
//!
//! The message types are those of `k8s.io/kube-scheduler/extender/v1` with `nodeCacheCapable: true`. Time is a
//! parameter, so equal calls give equal answers. The ledger contains placements that nodes cannot have published yet:
//! kube-scheduler binds several pods before a node publishes its next state, and would otherwise send all of them to
//! the same node.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::cluster_export::{ExportedPod, limit_percent, pod_mark, requested_amount};
use crate::profile::{FleetFieldError, WorkloadProfile};
use crate::scorer::{
    MAX_CACHES, NEUTRAL_SCORE, NodeCacheState, PlacementForecast, ServiceDemand, ServiceForecaster, keeps_limits,
    scores,
};

/// Maximum number of node names in one request.
pub const MAX_NODES: usize = 20_000;
/// Maximum age of a state; the node of an older one has stopped publishing.
pub const MAX_STATE_AGE_SECONDS: f64 = 60.0;
/// Lifetime of a guess, within which the node publishes the placement: its interval of 30 s, and some seconds.
const GUESS_SECONDS: f64 = 40.0;
/// Maximum number of guesses; the oldest is dropped first.
const MAX_GUESSES: usize = 4096;
/// Busy CPUs of a pod without a request.
const LEAST_CPUS: f64 = 0.1;

/// A request of kube-scheduler.
#[derive(Debug, Deserialize)]
pub struct ExtenderRequest {
    /// The pod to place.
    pub pod: ExportedPod,
    /// Candidates; missing if the scheduler is not configured with `nodeCacheCapable: true`.
    #[serde(default)]
    pub nodenames: Option<Vec<String>>,
}

/// Answer to `filter`.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct FilterAnswer {
    /// Candidates that remain.
    pub nodenames: Vec<String>,
    /// The others, with the reason.
    #[serde(rename = "failedNodes")]
    pub failed_nodes: BTreeMap<String, String>,
    /// Empty if there is no error.
    pub error: String,
}

/// One entry of the answer to `prioritize`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct NodeScore {
    /// Name of the node.
    pub host: String,
    /// Score from 0 to 10.
    pub score: u8,
}

/// Published knowledge: profiles by name, and states by node with the time of their publication.
#[derive(Clone, Debug, Default)]
pub struct ClusterKnowledge {
    /// Profiles by name.
    pub profiles: BTreeMap<String, WorkloadProfile>,
    /// Name of the profile by image, with its digest or tag.
    pub images: BTreeMap<String, String>,
    /// Seconds since the epoch, and the state, by node.
    pub nodes: BTreeMap<String, (f64, NodeCacheState)>,
}

/// A placement that its node has not published yet.
#[derive(Clone, PartialEq, Debug)]
struct PlacementGuess {
    pod: String,
    node: String,
    cache: usize,
    busy_cpus: f64,
    fill_bytes_per_second: f64,
    bytes: f64,
    made_at: f64,
}

/// Placements that no node has published yet.
#[derive(Clone, Debug, Default)]
pub struct PlacementLedger {
    guesses: Vec<PlacementGuess>,
}

/// A pod as the scorer sees it.
struct ScoredPod<'a> {
    identity: String,
    demand: ServiceDemand<'a>,
}

impl ClusterKnowledge {
    /// The pod's profile: by its annotation, else by the image of a container.
    pub fn profile(&self, pod: &ExportedPod) -> Option<&WorkloadProfile> {
        if let Some(name) = pod_mark(&pod.metadata, "cachemate.io/profile") {
            return self.profiles.get(name);
        }
        let images = pod.spec.containers.iter().filter_map(|container| self.images.get(&container.image));
        images.filter_map(|name| self.profiles.get(name)).next()
    }

    /// A request that is not a valid quantity counts as unknown, and so does an invalid limit: neither blocks a pod.
    fn score<'a>(&'a self, pod: &ExportedPod) -> ScoredPod<'a> {
        let limit = pod_mark(&pod.metadata, "cachemate.io/max-slowdown").and_then(|text| limit_percent(text).ok());
        let demand = ServiceDemand {
            profile: self.profile(pod),
            busy_cpus: requested_amount(pod, "cpu").unwrap_or(0.0).clamp(LEAST_CPUS, crate::spec::MAX_CPUS),
            max_slowdown_percent: limit,
        };
        let metadata = &pod.metadata;
        let identity = if metadata.uid.is_empty() {
            format!("{}/{}", metadata.namespace, metadata.name)
        } else {
            metadata.uid.clone()
        };
        ScoredPod { identity, demand }
    }

    fn forecasts(
        &self,
        pod: &ScoredPod<'_>,
        names: &[String],
        ledger: &PlacementLedger,
        now: f64,
    ) -> Vec<Option<PlacementForecast>> {
        if pod.demand.profile.is_none() {
            return vec![None; names.len()];
        }
        let mut forecaster = ServiceForecaster::new(&pod.demand);
        // Most nodes have no pending placement, so the ledger is searched only for the others.
        let guessed: BTreeSet<&str> = ledger.guesses.iter().map(|guess| guess.node.as_str()).collect();
        let forecast = |name: &String| {
            let state = self.fresh_state(name, now)?;
            let state = match guessed.contains(name.as_str()) {
                true => ledger.adjust(name, state, &pod.identity),
                false => Cow::Borrowed(state),
            };
            forecaster.node_forecast(&state).map(|(_, forecast)| forecast)
        };
        names.iter().map(forecast).collect()
    }

    fn fresh_state(&self, name: &str, now: f64) -> Option<&NodeCacheState> {
        let (published, state) = self.nodes.get(name)?;
        // A clock that is a minute ahead is as wrong as a silent node.
        ((now - published).abs() <= MAX_STATE_AGE_SECONDS).then_some(state)
    }
}

impl PlacementLedger {
    /// Number of guesses that have not expired.
    pub fn len(&self) -> usize {
        self.guesses.len()
    }

    /// Are there no recent placements?
    pub fn is_empty(&self) -> bool {
        self.guesses.is_empty()
    }

    fn expire(&mut self, now: f64) {
        self.guesses.retain(|guess| (0.0..=GUESS_SECONDS).contains(&(now - guess.made_at)));
    }

    /// A node's state with the pending placements added, except those of the pod itself.
    fn adjust<'a>(&self, name: &str, state: &'a NodeCacheState, pod: &str) -> Cow<'a, NodeCacheState> {
        let mut adjusted = Cow::Borrowed(state);
        for guess in self.guesses.iter().filter(|guess| guess.node == name && guess.pod != pod) {
            if let Some(cache) = adjusted.to_mut().caches.get_mut(guess.cache) {
                cache.busy_cpus += guess.busy_cpus;
                cache.fill_bytes_per_second += guess.fill_bytes_per_second;
                cache.occupancy_bytes = (cache.occupancy_bytes + guess.bytes).min(cache.size_bytes);
                let left = cache.bandwidth_left_bytes_per_second - guess.fill_bytes_per_second;
                cache.bandwidth_left_bytes_per_second = left.max(0.0);
            }
        }
        adjusted
    }

    /// Records the node with the highest score, which the scheduler probably chooses. A pod has one guess.
    fn record(&mut self, knowledge: &ClusterKnowledge, pod: &ScoredPod<'_>, answer: &[NodeScore], now: f64) {
        self.guesses.retain(|guess| guess.pod != pod.identity);
        let Some(profile) = pod.demand.profile else { return };
        let Some(best) = answer.iter().rev().max_by_key(|node_score| node_score.score) else { return };
        let Some(state) = knowledge.fresh_state(&best.host, now) else { return };
        let adjusted = self.adjust(&best.host, state, &pod.identity);
        let Some((cache, _)) = ServiceForecaster::new(&pod.demand).node_forecast(&adjusted) else { return };
        if self.guesses.len() >= MAX_GUESSES {
            self.guesses.remove(0);
        }
        let size = state.caches[cache].size_bytes;
        let bytes = profile.footprint_bytes().min(0.5 * size);
        let fills = profile.fills_per_cycle(bytes) * state.hertz * pod.demand.busy_cpus * 64.0;
        self.guesses.push(PlacementGuess {
            pod: pod.identity.clone(),
            node: best.host.clone(),
            cache: cache.min(MAX_CACHES),
            busy_cpus: pod.demand.busy_cpus,
            fill_bytes_per_second: fills,
            bytes,
            made_at: now,
        });
    }
}

/// The node names of a request.
///
/// # Errors
/// There are none, or too many.
fn names(request: &ExtenderRequest) -> Result<&[String], FleetFieldError> {
    match &request.nodenames {
        None => Err(FleetFieldError::new(
            "nodenames",
            "none",
            "names (nodeCacheCapable: true in the scheduler's configuration)",
        )),
        Some(names) if names.len() > MAX_NODES => {
            Err(FleetFieldError::new("nodenames", names.len(), &format!("at most {MAX_NODES}")))
        }
        Some(names) => Ok(names),
    }
}

/// Answers `filter`: nodes on which a limit would break are left out, unless no other node remains.
///
/// # Errors
/// The request names no nodes, or too many.
pub fn filter(
    knowledge: &ClusterKnowledge,
    ledger: &mut PlacementLedger,
    request: &ExtenderRequest,
    now: f64,
) -> Result<FilterAnswer, FleetFieldError> {
    let names = names(request)?;
    ledger.expire(now);
    let pod = knowledge.score(&request.pod);
    let limits_kept = keeps_limits(&knowledge.forecasts(&pod, names, ledger, now));
    let mut answer = FilterAnswer::default();
    for (name, is_kept) in names.iter().zip(limits_kept) {
        if is_kept {
            answer.nodenames.push(name.clone());
        } else {
            answer.failed_nodes.insert(name.clone(), "a slowdown limit would break on its cache".to_string());
        }
    }
    Ok(answer)
}

/// Answers `prioritize`, and records the likely placement.
///
/// # Errors
/// The request names no nodes, or too many.
pub fn prioritize(
    knowledge: &ClusterKnowledge,
    ledger: &mut PlacementLedger,
    request: &ExtenderRequest,
    now: f64,
) -> Result<Vec<NodeScore>, FleetFieldError> {
    let names = names(request)?;
    ledger.expire(now);
    let pod = knowledge.score(&request.pod);
    let known = knowledge.forecasts(&pod, names, ledger, now);
    let ranks =
        if known.iter().all(Option::is_none) { vec![NEUTRAL_SCORE; names.len()] } else { scores(&pod.demand, &known) };
    let answer: Vec<NodeScore> =
        names.iter().zip(ranks).map(|(host, score)| NodeScore { host: host.clone(), score }).collect();
    ledger.record(knowledge, &pod, &answer, now);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::tests::mix;
    use crate::scorer::tests::empty_node;

    const MIB: f64 = 1024.0 * 1024.0;

    fn knowledge(nodes: &[&str]) -> ClusterKnowledge {
        let mut known = ClusterKnowledge::default();
        known.profiles.insert("index".to_string(), mix(20.0, &[(20.0 * MIB, 0.95)]).profile());
        known.images.insert("registry/index:3".to_string(), "index".to_string());
        known.nodes.extend(nodes.iter().map(|name| (name.to_string(), (1000.0, empty_node(1)))));
        known
    }

    fn request(uid: &str, mark: bool, names: &[&str]) -> ExtenderRequest {
        let mut pod = ExportedPod::default();
        pod.metadata.uid = uid.to_string();
        if mark {
            pod.metadata.annotations.insert("cachemate.io/profile".to_string(), "index".to_string());
            pod.metadata.labels.insert("cachemate.io/max-slowdown".to_string(), "5%".to_string());
        }
        pod.spec
            .containers
            .push(crate::cluster_export::PodContainer { image: "registry/index:3".to_string(), ..Default::default() });
        ExtenderRequest { pod, nodenames: Some(names.iter().map(|name| name.to_string()).collect()) }
    }

    /// Do pods in flight spread, although no node has published any of them?
    #[test]
    fn placements_in_flight_count() {
        let known = knowledge(&["a", "b", "c"]);
        let mut ledger = PlacementLedger::default();
        let mut chosen = Vec::new();
        for uid in ["1", "2", "3"] {
            let answer = prioritize(&known, &mut ledger, &request(uid, true, &["a", "b", "c"]), 1001.0).unwrap();
            chosen.push(answer.iter().rev().max_by_key(|one| one.score).unwrap().host.clone());
        }
        assert_eq!(chosen, ["a", "b", "c"]);
        assert_eq!(ledger.len(), 3);
        prioritize(&known, &mut ledger, &request("1", true, &["a", "b", "c"]), 1002.0).unwrap();
        assert_eq!(ledger.len(), 3, "a pod that is asked about again has one guess");
        filter(&known, &mut ledger, &request("9", true, &["a"]), 1050.0).unwrap();
        assert!(ledger.is_empty(), "guesses end");
    }

    /// Are answers neutral without a profile, and with states that are too old?
    #[test]
    fn without_knowledge_answers_are_neutral() {
        let known = knowledge(&["a", "b"]);
        let mut unknown = knowledge(&["a", "b"]);
        unknown.profiles.clear();
        for (known, now) in [(&unknown, 1001.0), (&known, 1000.0 + MAX_STATE_AGE_SECONDS + 1.0)] {
            let mut ledger = PlacementLedger::default();
            let asked = request("1", true, &["a", "b", "new"]);
            let answer = prioritize(known, &mut ledger, &asked, now).unwrap();
            assert!(answer.iter().all(|one| one.score == NEUTRAL_SCORE), "{answer:?}");
            let kept = filter(known, &mut ledger, &asked, now).unwrap();
            assert_eq!((kept.nodenames.len(), kept.failed_nodes.len()), (3, 0));
            assert!(ledger.is_empty());
        }
    }

    /// Is a pod without an annotation known by its image, and a request without names refused in words?
    #[test]
    fn images_name_profiles_and_names_are_required() {
        let known = knowledge(&["a"]);
        assert!(known.profile(&request("1", false, &["a"]).pod).is_some());
        let bare = ExtenderRequest { pod: ExportedPod::default(), nodenames: None };
        let refusal = filter(&known, &mut PlacementLedger::default(), &bare, 0.0).unwrap_err();
        assert!(refusal.to_string().contains("nodeCacheCapable"), "{refusal}");
    }
}
