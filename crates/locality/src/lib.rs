//! Algorithms that measure how programs use caches: exact and sampled miss-rate curves, cache
//! simulation, statistical models and profilers.
//!
//! A cache of every size would have to be simulated to know what a program does with it, if it were
//! not for one fact: under LRU, an access hits exactly in those caches that have more lines than it
//! has distinct lines between it and the access before to its line. One pass over a trace therefore
//! gives the misses of all sizes, and a sample of these *stack distances* an estimate of them. Most
//! of what is here computes such distances, samples them, or infers them from less.
//!
//! For example, in the accesses `a b c a` the second `a` has the distance 2, for `b` and `c`. It
//! hits in a cache of three lines and misses in one of two; the other three are first touches, and
//! miss in all.
//!
//! Addresses are *line* addresses (byte address / line size) unless a name says otherwise.
//!
//! # Invariants
//! - There is no I/O and no clock, and the same input and seed give the same bits on every host.
//! - Statistical models agree with exact simulation within the tolerance that their tests state.
//! - A line waits for no more than the others' lines in flight, and no server transfers more than
//!   it can.

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
