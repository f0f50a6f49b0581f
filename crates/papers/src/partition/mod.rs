//! Partitions of a shared cache: units (colors or ways), demand curves of programs, costs of changes, and measured
//! speeds.

pub mod demand_curve;
pub mod partitioned_cache;
pub mod units;
