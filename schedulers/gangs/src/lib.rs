//! The pure part of the gang scheduler: the plan's format, the quantum, the starvation guard, and the journal. Only the
//! callers of [`journal`] and [`tasks`] do I/O or read a clock; `main.rs` contains the loader.

pub mod journal;
pub mod maps;
pub mod plan;
pub mod quantum;
pub mod starvation_guard;
