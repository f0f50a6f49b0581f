//! A sample of a program's accesses with their stack distances, from which its timing on any machine follows.
//!
//! Problem: cycles, overlap and prefetches depend on the machine, so no figure of one machine describes a program on
//! another. Method: parts of the stream are kept as they are, at regular positions (systematic sampling, SMARTS:
//! Wunderlich, Wenisch, Falsafi and Hoe, ISCA 2003). Each access has the stack distance that it has in the whole stream,
//! so that caches of any size are warm at the start of a part. The distances of all accesses are kept as well, because
//! counts of misses need no sample. Properties: a part begins with accesses that only fill the window and train
//! prefetchers; a short stream is kept whole.

use std::num::NonZeroU16;

/// Accesses at the start of each part that are not measured.
pub const WARM_UP_ACCESSES: usize = 128;
/// Measured accesses of each part.
pub const MEASURED_ACCESSES: usize = 256;
/// A dependence that lies further back than can be stated.
pub const FAR_DEPENDENCE: u8 = u8::MAX;

/// One access of a sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SampledAccess {
    /// Line address.
    pub line: u64,
    /// Distinct lines since the line was last touched; `None` for a first touch.
    pub distance: Option<u64>,
    /// Instructions that the thread executed since its previous access, including the one that makes this access.
    pub gap: u64,
    /// The thread.
    pub thread: u32,
    /// Whether the access writes.
    pub is_store: bool,
    /// Number of the thread's accesses back to the youngest load on which the address depends: 0 if there is none,
    /// [`FAR_DEPENDENCE`] if it is further back than 254.
    pub dependence: u8,
    /// A hash of the instruction that makes the access; `None` if unknown.
    pub site: Option<NonZeroU16>,
}

/// A stretch of the stream.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StreamPhase {
    /// Instructions of all threads.
    pub instructions: u64,
    /// First touches.
    pub cold_count: u64,
    /// (stack distance, inclusive upper bound of a bucket; accesses), ascending.
    pub distances: Vec<(u64, u64)>,
    /// Parts of the stretch: [`WARM_UP_ACCESSES`], and then [`MEASURED_ACCESSES`] or, at its end, fewer.
    pub parts: Vec<Vec<SampledAccess>>,
}

/// A program's stream of accesses, sampled.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StreamSample {
    /// Line size in bytes.
    pub line_bytes: u32,
    /// Page size in bytes.
    pub page_bytes: u32,
    /// Distinct lines of the whole stream.
    pub footprint_lines: u64,
    /// Whether dependences between loads are recorded.
    pub has_dependences: bool,
    /// The stream in order, in stretches of about equally many accesses.
    pub phases: Vec<StreamPhase>,
}
