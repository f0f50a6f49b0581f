//! Splits a trace of several processes and threads into separate LRU stacks.

use super::{DistanceHistogram, StackDistances, StackError};
use std::collections::BTreeMap;

/// The unit of the trace that has an LRU stack of its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum StackUnit {
    /// All accesses share one stack. Equal addresses of different processes are different lines.
    All,
    /// Each process has a stack, which its threads share.
    Process,
    /// Each thread has a stack.
    Thread,
}

/// The process and the thread that a histogram covers; `None` means all of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct StackScope {
    /// Number of the process in the trace.
    pub process: Option<u32>,
    /// Number of the thread in the trace.
    pub thread: Option<u32>,
}

/// Exact stack distances of a trace, separately for each part of it.
#[derive(Debug)]
pub struct SplitStackDistances {
    unit: StackUnit,
    engines: BTreeMap<StackScope, StackDistances>,
    /// Address space of each process, numbered in order of arrival.
    space_of_process: BTreeMap<u32, u32>,
}

impl SplitStackDistances {
    /// Builds a splitter without any accesses.
    pub fn new(unit: StackUnit) -> Self {
        SplitStackDistances { unit, engines: BTreeMap::new(), space_of_process: BTreeMap::new() }
    }

    /// Adds the next accesses of one thread, as line addresses of its process.
    pub fn push(&mut self, process: u32, thread: u32, lines: &[u64]) -> Result<(), StackError> {
        let next_space = self.space_of_process.len() as u32;
        let space = *self.space_of_process.entry(process).or_insert(next_space);
        let (scope, space) = match self.unit {
            StackUnit::All => (StackScope { process: None, thread: None }, space),
            StackUnit::Process => (StackScope { process: Some(process), thread: None }, 0),
            StackUnit::Thread => (StackScope { process: Some(process), thread: Some(thread) }, 0),
        };
        self.engines.entry(scope).or_default().push_in_space(space, lines)
    }

    /// Returns the histogram of every part of the trace.
    pub fn finish(self) -> Result<BTreeMap<StackScope, DistanceHistogram>, StackError> {
        self.engines.into_iter().map(|(scope, engine)| Ok((scope, engine.finish()?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does each part receive its own accesses, and do lines of different processes stay separate in a common stack?
    #[test]
    fn parts_are_kept_apart() {
        let split = |unit| {
            let mut split = SplitStackDistances::new(unit);
            for (process, thread, lines) in [(5, 1, [1, 2]), (5, 2, [2, 1]), (9, 1, [1, 2]), (5, 1, [1, 1])] {
                split.push(process, thread, &lines).unwrap();
            }
            split.finish().unwrap()
        };
        let scope_of = |process, thread| StackScope { process, thread };
        let whole_histogram = DistanceHistogram::new(4, [(0, 2), (1, 1), (2, 1)]);
        assert_eq!(split(StackUnit::All), BTreeMap::from([(scope_of(None, None), whole_histogram)]));
        let of_5 = DistanceHistogram::new(2, [(0, 3), (1, 1)]);
        let of_9 = DistanceHistogram::new(2, []);
        let expected = BTreeMap::from([(scope_of(Some(5), None), of_5), (scope_of(Some(9), None), of_9.clone())]);
        assert_eq!(split(StackUnit::Process), expected);
        let expected = BTreeMap::from([
            (scope_of(Some(5), Some(1)), DistanceHistogram::new(2, [(0, 1), (1, 1)])),
            (scope_of(Some(5), Some(2)), of_9.clone()),
            (scope_of(Some(9), Some(1)), of_9),
        ]);
        assert_eq!(split(StackUnit::Thread), expected);
    }
}
