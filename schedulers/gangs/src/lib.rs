//! The pure part of the gang scheduler: the plan's format, the quantum, the starvation guard, and the journal. No I/O
//! and no clock here but in [`journal`]'s and [`tasks`]' callers; `main.rs` has the loader.

pub mod journal;
pub mod maps;
pub mod plan;
pub mod quantum;
pub mod starvation_guard;
