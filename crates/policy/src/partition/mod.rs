//! Partitions of a shared cache: which units (colors or ways) a group gets, what a change of them moves, what a
//! program does with space, and who shares a partition.

pub(crate) mod ab_test;
pub(crate) mod allocate;
pub mod demand_curve;
pub(crate) mod partitioned_cache;
pub(crate) mod share_controller;
pub(crate) mod speed_history;
pub mod units;
