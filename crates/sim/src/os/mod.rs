//! The operating system on the simulated hardware: memory and the processor's time.

pub mod dispatch;
pub mod domains;
pub mod frames;
pub mod gangs;
pub mod memory;
pub mod page_table;
pub mod queues;
pub mod schedulers;
pub mod system;

#[cfg(test)]
mod dispatch_tests;
