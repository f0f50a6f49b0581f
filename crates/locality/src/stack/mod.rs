//! Exact LRU stack distances.
//!
//! The stack distance of an access is the number of *other* distinct lines touched since its line was last touched: 0
//! for an immediate repeat, none (cold) for a first touch. A fully associative LRU cache of `s` lines hits exactly the
//! accesses with a distance below `s`, so one histogram of distances is the miss-rate curve for every size at once.

mod histogram;

pub use histogram::{Histogram, ParseHistogramError};
