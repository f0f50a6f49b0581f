//! Partitions of a shared cache: units (colors or ways), demand curves of programs, costs of changes, and measured
//! speeds.

pub mod demand_curve;
pub(crate) mod partitioned_cache;
pub(crate) mod share_speeds;
pub mod units;
