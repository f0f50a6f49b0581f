//! Partitions of a shared cache: which units (colors or ways) a group gets, what a change of them moves, what a
//! program does with space, and who shares a partition.

pub mod ab_test;
pub mod allocate;
pub mod demand_curve;
pub mod domain;
pub mod share_controller;
pub mod speed_history;
pub mod units;
