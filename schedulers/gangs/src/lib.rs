//! The pure part of the gang scheduler: what a plan may say, how long a turn is, when to give the CPUs back, what is kept
//! to put tasks back. No I/O and no clock here but in [`journal`]'s and [`tasks`]' callers; `main.rs` has the loader.

pub mod journal;
pub mod maps;
pub mod plan;
pub mod quantum;
pub mod starvation_guard;
