//! Programs for the simulator and the locality engines: streams of memory accesses, each with the number of
//! instructions that precede it.

use std::fmt;

/// The kind of an [`Access`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessKind {
    /// A data load from a byte address.
    Load,
    /// A data store to a byte address.
    Store,
    /// A jump to this code address; the instructions that follow are fetched from there in sequence. The jump itself
    /// executes no instruction, but its gap still counts.
    Jump,
    /// Instructions that touch no data: the address field holds their number, in addition to the gap.
    Compute,
}

/// One access, packed into eight bytes: a byte address (48 bits), its kind, a flag for dependence on the preceding load
/// (a pointer chase, which out-of-order execution cannot overlap), and the gap. The gap is the number of instructions
/// executed between the previous access and this one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Access(u64);

impl Access {
    /// Exclusive upper bound of addresses, and of the instruction counts of [`AccessKind::Compute`].
    pub const ADDRESS_LIMIT: u64 = 1 << 48;
    /// Exclusive upper bound of gaps; a longer gap needs a [`AccessKind::Compute`] record.
    pub const GAP_LIMIT: u32 = 1 << 13;

    /// Packs one access. Bits of `address` at or above 48 and of `gap` at or above 13 are rejected in debug builds and
    /// truncated otherwise, so callers keep to the limits above.
    #[inline]
    pub fn new(kind: AccessKind, address: u64, gap: u32, is_dependent: bool) -> Self {
        debug_assert!(address < Self::ADDRESS_LIMIT && gap < Self::GAP_LIMIT);
        Access(
            (address & (Self::ADDRESS_LIMIT - 1))
                | (kind as u64) << 48
                | u64::from(is_dependent) << 50
                | u64::from(gap & (Self::GAP_LIMIT - 1)) << 51,
        )
    }
    /// A load, `gap` instructions after the preceding record.
    #[inline]
    pub fn load(address: u64, gap: u32) -> Self {
        Self::new(AccessKind::Load, address, gap, false)
    }
    /// A load that cannot issue before the preceding load has returned, because its address depends
    /// on it.
    #[inline]
    pub fn dependent_load(address: u64, gap: u32) -> Self {
        Self::new(AccessKind::Load, address, gap, true)
    }
    /// A store; `gap` as in [`Self::load`].
    #[inline]
    pub fn store(address: u64, gap: u32) -> Self {
        Self::new(AccessKind::Store, address, gap, false)
    }
    /// Instructions that touch no data, all in one record.
    #[inline]
    pub fn compute(instructions: u64) -> Self {
        Self::new(AccessKind::Compute, instructions, 0, false)
    }
    /// The code that follows is at `code_address`; a source without jumps has no code.
    #[inline]
    pub fn jump(code_address: u64, gap: u32) -> Self {
        Self::new(AccessKind::Jump, code_address, gap, false)
    }
    /// Its meaning follows [`Self::kind`]: the byte address of a load or store, the code address of
    /// a jump, or the number of instructions of a compute record.
    #[inline]
    pub fn address(self) -> u64 {
        self.0 & (Self::ADDRESS_LIMIT - 1)
    }
    /// Decides what [`Self::address`] means.
    #[inline]
    pub fn kind(self) -> AccessKind {
        match self.0 >> 48 & 3 {
            0 => AccessKind::Load,
            1 => AccessKind::Store,
            2 => AccessKind::Jump,
            _ => AccessKind::Compute,
        }
    }
    /// A load or a store, as opposed to jumps and compute records.
    #[inline]
    pub fn is_data(self) -> bool {
        self.0 >> 49 & 1 == 0
    }
    /// False for loads, and for records that touch no data.
    #[inline]
    pub fn is_store(self) -> bool {
        self.0 >> 48 & 3 == AccessKind::Store as u64
    }
    /// Whether the record waits for the preceding load, because its address depends on it.
    #[inline]
    pub fn is_dependent(self) -> bool {
        self.0 >> 50 & 1 == 1
    }
    /// Instructions without data accesses between the preceding record and this one.
    #[inline]
    pub fn gap(self) -> u32 {
        (self.0 >> 51) as u32
    }
    /// Instructions that this record represents: its gap, plus the access itself if it is an instruction.
    #[inline]
    pub fn instructions(self) -> u64 {
        u64::from(self.gap())
            + match self.kind() {
                AccessKind::Load | AccessKind::Store => 1,
                AccessKind::Jump => 0,
                AccessKind::Compute => self.address(),
            }
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wait = if self.is_dependent() {
            " dependent"
        } else {
            ""
        };
        write!(
            out,
            "+{} {:?} {:#x}{wait}",
            self.gap(),
            self.kind(),
            self.address()
        )
    }
}

/// The way in which a batch of accesses ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchEnd {
    /// The next batch follows immediately.
    More,
    /// The thread sleeps for this long after the batch.
    Sleep {
        /// Duration of the sleep.
        ns: u64,
    },
    /// After the batch, the thread waits until the other threads of the process have posted to this channel as often as
    /// it was waited on (a counting semaphore).
    Wait {
        /// The same number means the same channel in every thread of the process.
        channel: u32,
    },
    /// The thread posts to a channel after the batch, and continues.
    Post {
        /// The same number means the same channel in every thread of the process.
        channel: u32,
    },
    /// The program ends after the batch.
    Exit,
}

/// One thread of a program, which produces its accesses in batches. Endless programs never return [`BatchEnd::Exit`].
///
/// Addresses are virtual, in the address space of the thread's process. A source is resumable and deterministic: the
/// same construction (parameters, seed) gives the same stream, however it is divided into batches.
pub trait AccessSource: Send {
    /// Appends a batch of at most a few thousand accesses. The batch may be empty only if the result is not
    /// [`BatchEnd::More`].
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd;

    /// Work done so far, in the program's own unit (rounds, operations); `None` if it has none.
    fn progress(&self) -> Option<f64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are all fields recovered from the eight bytes, also at their limits?
    #[test]
    fn an_access_keeps_its_fields_at_their_limits() {
        let last_address = Access::ADDRESS_LIMIT - 1;
        let kinds = [
            AccessKind::Load,
            AccessKind::Store,
            AccessKind::Jump,
            AccessKind::Compute,
        ];

        for kind in kinds {
            for (address, gap, dependent) in [
                (0, 0, false),
                (last_address, Access::GAP_LIMIT - 1, true),
                (64, 7, false),
            ] {
                let access = Access::new(kind, address, gap, dependent);
                let decoded_fields = (
                    access.kind(),
                    access.address(),
                    access.gap(),
                    access.is_dependent(),
                );
                assert_eq!(decoded_fields, (kind, address, gap, dependent));
            }
        }
        assert_eq!(Access::load(64, 3).instructions(), 4);
        assert_eq!(Access::compute(100).instructions(), 100);
        assert_eq!(Access::jump(64, 3).instructions(), 3);
    }
}
