//! The simulated operating system, which manages memory and processor time.

pub(crate) mod dispatch;
pub(crate) mod domains;
pub(crate) mod frames;
pub(crate) mod gangs;
pub(crate) mod memory;
pub(crate) mod page_table;
pub(crate) mod queues;
pub mod schedulers;
pub(crate) mod system;

#[cfg(test)]
mod dispatch_tests;
