//! The pure part of the gang scheduler: the plan's format, the quantum, the starvation guard, and the journal. I/O
//! and clocks are used only in `main.rs`, which contains the loader, and in callers of [`journal`] and [`tasks`].

pub mod journal;
pub mod maps;
pub mod plan;
pub mod quantum;
pub mod starvation_guard;
