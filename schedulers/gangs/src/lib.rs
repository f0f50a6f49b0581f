//! The pure part of the gang scheduler: the plan's format, the quantum, the starvation guard, and
//! the journal.
//!
//! A scheduler that goes wrong takes the host with it, so what can be decided without the kernel is
//! decided here, where a test can reach it. I/O and clocks are used only in `main.rs`, which
//! contains the loader, and in callers of [`journal`].
//!
//! For example, the starvation guard sees the time that higher classes took of each CPU in windows
//! of 200 ms. If unmanaged tasks used more than 30 % of one, all managed tasks return to the fair
//! class, and the scheduler is attached again after 1 s, then 2 s, and at most 64 s.
//!
//! # Invariants
//! - A plan in which a task could wait longer than its `longest_wait_ms` is refused.
//! - Every scheduling policy that is changed is in the journal first.

pub mod journal;
pub mod maps;
pub mod plan;
pub mod quantum;
pub mod starvation_guard;
