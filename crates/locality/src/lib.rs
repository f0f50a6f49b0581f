//! Algorithms that measure how programs use caches: exact and sampled miss-rate curves, cache simulation, statistical
//! models and profilers.
//!
//! All algorithms are pure: no I/O, no clock, and the same bits for the same input and seed. Addresses are *line*
//! addresses (byte address / line size) unless a name says otherwise.

#![warn(missing_docs)]

pub mod activity;
pub mod animal;
pub mod cachesim;
pub mod curve;
pub mod hash;
pub mod memory_queue;
pub mod phases;
pub mod prefetch;
pub mod profilers;
pub mod rapidmrc;
pub mod reuse;
pub mod sampled;
pub mod shmap;
pub mod signature;
pub mod simd;
pub mod stack;
pub mod statcache;
pub mod statcc;
pub mod statstack;
pub mod stream_sampler;
pub mod window_walk;
