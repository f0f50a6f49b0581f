//! What loads a host for benches and tests. The program beside it, `cachemate-bench`, is not shipped.

pub mod loads;
