//! Programs, which are real algorithms over simulated memory, as endless streams of accesses.
//!
//! Problem: the papers measured licensed programs. A scheduling result depends on how a program's misses depend on the
//! cache that it gets. A substitute must therefore derive its curve from the algorithm and the published footprint,
//! never from the expected result.
//!
//! Method: each kernel runs its program's algorithm batch by batch. Simulated bytes are not host bytes: layouts are
//! implicit, and values that only steer control flow are hashes of the index. State that the algorithm must remember
//! (positions, trees, heaps) is stored on the host. Footprints, instruction mixes and code sizes are in `programs.toml`
//! with their source ([`programs`]; printed in docs/programs.md), and were fixed before any policy was run.
//!
//! Properties: the same name, seed and options give the same stream. A seed changes input and layout, never the
//! footprint. Every address is below 2^48 and inside a declared region or the code.

mod emitter;
mod random;
mod registry;
mod setup;

mod basis;
mod btree;
mod chat;
mod compiler;
mod compress;
mod database;
mod events;
mod gauge;
mod interpreter;
mod lattice;
mod media;
mod molecules;
mod network;
mod neural;
mod placement;
mod scoreboard;
mod search;
mod servers;
mod sparse;
mod stencil;

pub use emitter::{AccessPace, CODE_BASE, CodeLayout, INSTRUCTION_BYTES, STACK_BYTES};
pub use registry::{ProgramError, build_program, build_threads, programs};
pub use setup::{KernelProgram, KernelSpec, Options, Region, RegionUsers};
