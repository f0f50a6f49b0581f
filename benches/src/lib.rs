//! Load programs for benches and tests. The program of this crate, `cachemate-bench`, is not shipped.

pub mod loads;
pub mod resident;
