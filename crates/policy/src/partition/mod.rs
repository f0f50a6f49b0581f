//! Partitions of a shared cache: which units (colours or ways) a group gets, what a change of them moves, what a
//! program does with space, and who shares a partition.

pub mod deal;
pub mod domain;
pub mod judging;
pub mod record;
pub mod space;
pub mod trial;
pub mod units;
