//! Partitions of a shared cache: their units (colors or ways), the cost of changes, demand curves of programs,
//! allocation, and trials by measured speed.

pub(crate) mod ab_test;
pub(crate) mod allocate;
pub mod demand_curve;
pub(crate) mod partitioned_cache;
pub(crate) mod share_controller;
pub(crate) mod speed_history;
pub mod units;
