//! Placements in flight, which nodes cannot have published yet. Without this ledger, all pods that kube-scheduler
//! binds before a node publishes its next state would be sent to the same node.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::scorer::NodeCacheState;

/// Lifetime of a guess. Nodes publish every 30 s, so the node has published the placement before its guess expires.
const GUESS_SECONDS: f64 = 40.0;
/// Time after which a pod is taken to run, so that a later state of its node contains it. A start takes seconds.
const START_SECONDS: f64 = 10.0;
/// Maximum number of guesses; the oldest is dropped first.
const MAX_GUESSES: usize = 4096;

/// A placement that its node has not published yet.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct PlacementGuess {
    pub(crate) pod: String,
    pub(crate) node: String,
    pub(crate) cache: usize,
    pub(crate) busy_cpus: f64,
    pub(crate) fill_bytes_per_second: f64,
    pub(crate) bytes: f64,
    pub(crate) created_at: f64,
}

/// The placements in flight, at most one per pod.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct PlacementLedger {
    /// Guesses by serial number, the oldest first.
    guesses: BTreeMap<u64, PlacementGuess>,
    number_by_pod: BTreeMap<String, u64>,
    numbers_by_node: BTreeMap<String, Vec<u64>>,
    last_number: u64,
}

impl PlacementLedger {
    pub(crate) fn len(&self) -> usize {
        self.guesses.len()
    }

    /// Drops expired guesses, and returns their nodes.
    pub(crate) fn drop_expired(&mut self, now: f64) -> Vec<String> {
        let is_live =
            |guess: &PlacementGuess| (0.0..=GUESS_SECONDS).contains(&(now - guess.created_at));
        let mut nodes = Vec::new();
        // Guesses in the future also expire, because the clock may have been set backward.
        while let Some((&number, _)) = self
            .guesses
            .first_key_value()
            .filter(|(_, guess)| !is_live(guess))
        {
            nodes.extend(self.remove(number));
        }

        while let Some((&number, _)) = self
            .guesses
            .last_key_value()
            .filter(|(_, guess)| !is_live(guess))
        {
            nodes.extend(self.remove(number));
        }
        nodes
    }

    /// Drops the guesses that the states of their nodes contain by now, and returns their nodes. If they were kept
    /// until they expire, a pod would count twice.
    pub(crate) fn drop_published(
        &mut self,
        published_at: impl Fn(&str) -> Option<f64>,
    ) -> Vec<String> {
        let is_published = |guess: &PlacementGuess| {
            published_at(&guess.node)
                .is_some_and(|published_at| published_at - guess.created_at >= START_SECONDS)
        };
        let guesses = self.guesses.iter().filter(|(_, guess)| is_published(guess));
        let numbers: Vec<u64> = guesses.map(|(&number, _)| number).collect();
        numbers
            .into_iter()
            .filter_map(|number| self.remove(number))
            .collect()
    }

    /// `None` without a guess.
    pub(crate) fn node_of(&self, pod: &str) -> Option<&str> {
        self.guesses
            .get(self.number_by_pod.get(pod)?)
            .map(|guess| guess.node.as_str())
    }

    /// Drops the guess for a pod, and returns its node.
    pub(crate) fn remove_pod(&mut self, pod: &str) -> Option<String> {
        let number = *self.number_by_pod.get(pod)?;
        self.remove(number)
    }

    fn remove(&mut self, number: u64) -> Option<String> {
        let guess = self.guesses.remove(&number)?;
        self.number_by_pod.remove(&guess.pod);
        if let Some(numbers) = self.numbers_by_node.get_mut(&guess.node) {
            numbers.retain(|guess_number| *guess_number != number);
            if numbers.is_empty() {
                self.numbers_by_node.remove(&guess.node);
            }
        }
        Some(guess.node)
    }

    /// Adds a guess for a pod that has none. If there are too many guesses, the oldest is dropped and its node
    /// returned.
    pub(crate) fn insert_guess(&mut self, guess: PlacementGuess) -> Option<String> {
        let oldest = self.guesses.first_key_value().map(|(&number, _)| number);
        let node_of_dropped_guess = oldest
            .filter(|_| self.guesses.len() >= MAX_GUESSES)
            .and_then(|oldest| self.remove(oldest));
        self.last_number += 1;
        self.number_by_pod
            .insert(guess.pod.clone(), self.last_number);
        self.numbers_by_node
            .entry(guess.node.clone())
            .or_default()
            .push(self.last_number);
        self.guesses.insert(self.last_number, guess);
        node_of_dropped_guess
    }

    /// The guesses for a node, except that of the pod itself.
    fn other_guesses<'a>(
        &'a self,
        node: &str,
        pod: &'a str,
    ) -> impl Iterator<Item = &'a PlacementGuess> {
        let numbers = self.numbers_by_node.get(node).into_iter().flatten();
        numbers
            .filter_map(|number| self.guesses.get(number))
            .filter(move |guess| guess.pod != pod)
    }

    /// The busy CPUs of the placements in flight on a node, except those of the pod itself.
    pub(crate) fn busy_cpus(&self, node: &str, pod: &str) -> f64 {
        self.other_guesses(node, pod)
            .map(|guess| guess.busy_cpus)
            .sum()
    }

    /// A node's state with the placements in flight added, except that of the pod itself.
    pub(crate) fn adjusted_state<'a>(
        &self,
        node: &str,
        state: &'a NodeCacheState,
        pod: &str,
    ) -> Cow<'a, NodeCacheState> {
        let mut adjusted_state = Cow::Borrowed(state);
        for guess in self.other_guesses(node, pod) {
            if let Some(cache) = adjusted_state.to_mut().caches.get_mut(guess.cache) {
                cache.busy_cpus += guess.busy_cpus;
                cache.fill_bytes_per_second = cache
                    .fill_bytes_per_second
                    .map(|fills| fills + guess.fill_bytes_per_second);
                cache.occupancy_bytes = (cache.occupancy_bytes + guess.bytes).min(cache.size_bytes);
                let bandwidth_left = cache.bandwidth_left_bytes_per_second;
                cache.bandwidth_left_bytes_per_second =
                    bandwidth_left.map(|left| (left - guess.fill_bytes_per_second).max(0.0));
            }
        }

        adjusted_state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scorer::tests::empty_node;

    fn sample_guess(pod: &str, node: &str, made_at: f64) -> PlacementGuess {
        PlacementGuess {
            pod: pod.to_string(),
            node: node.to_string(),
            cache: 0,
            busy_cpus: 1.0,
            fill_bytes_per_second: 1e9,
            bytes: 1e6,
            created_at: made_at,
        }
    }

    /// Does a guess end with the first state of its node that can contain the pod, and not with an earlier one?
    #[test]
    fn a_published_pod_counts_once() {
        let mut ledger = PlacementLedger::default();
        ledger.insert_guess(sample_guess("1", "a", 100.0));
        ledger.insert_guess(sample_guess("2", "a", 108.0));
        ledger.insert_guess(sample_guess("3", "unknown", 100.0));
        let state_at = |time: f64| move |node: &str| (node == "a").then_some(time);
        assert!(ledger.drop_published(state_at(109.0)).is_empty());
        assert_eq!(ledger.drop_published(state_at(112.0)), ["a"]);
        assert_eq!(
            (ledger.len(), ledger.node_of("1"), ledger.node_of("2")),
            (2, None, Some("a"))
        );
    }

    /// Do guesses expire by time, even if the clock is set back, and by number, and is the node of each returned?
    #[test]
    fn guesses_expire_by_time_and_by_number() {
        let mut ledger = PlacementLedger::default();
        ledger.insert_guess(sample_guess("1", "a", 100.0));
        ledger.insert_guess(sample_guess("2", "a", 110.0));
        ledger.insert_guess(sample_guess("3", "b", 120.0));
        let state = empty_node(1);
        assert_eq!(
            ledger.adjusted_state("a", &state, "1").caches[0].busy_cpus,
            state.caches[0].busy_cpus + 1.0
        );
        assert_eq!(ledger.drop_expired(141.0), ["a"]);
        assert_eq!(ledger.drop_expired(115.0), ["b"]);
        assert_eq!(
            (ledger.len(), ledger.node_of("2"), ledger.node_of("3")),
            (1, Some("a"), None)
        );
        for pod in 0..MAX_GUESSES - 1 {
            assert_eq!(
                ledger.insert_guess(sample_guess(&format!("pod-{pod}"), "c", 120.0)),
                None
            );
        }
        assert_eq!(
            ledger
                .insert_guess(sample_guess("last", "c", 120.0))
                .as_deref(),
            Some("a")
        );
        assert_eq!(ledger.len(), MAX_GUESSES);
    }
}
