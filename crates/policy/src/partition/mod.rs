//! Partitions of a shared cache: which units (colours or ways) a group gets, what a change of them moves, and what a
//! program does with space.

pub mod units;
