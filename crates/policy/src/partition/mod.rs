//! Partitions of a shared cache: units (colors or ways), demand curves of programs, allocation, costs of changes, and
//! trials by measured speed.

pub(crate) mod ab_test;
pub(crate) mod allocate;
pub mod demand_curve;
pub(crate) mod partitioned_cache;
pub(crate) mod share_controller;
pub(crate) mod speed_history;
pub(crate) mod trace_planner;
pub mod units;
