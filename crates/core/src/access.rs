//! A program as the simulator and the locality engines see it: a stream of accesses with the instructions between.

use std::fmt;

/// The kind of an [`Access`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessKind {
    /// A data load from the byte address.
    Load,
    /// A data store to the byte address.
    Store,
    /// Control moves to this code address; the instructions that follow are fetched from there on, in sequence.
    /// Executes no instruction itself; its gap still counts.
    Jump,
    /// Instructions that touch no data: the address field is how many, on top of the gap.
    Compute,
}

/// One access in eight bytes: a byte address (48 bits), its kind, whether it waits for the load before it (a pointer
/// chase: no overlap out of order), and the gap: instructions executed since the previous access, without this one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Access(u64);

impl Access {
    /// Addresses, and the instructions of [`AccessKind::Compute`], are below this.
    pub const ADDRESS_LIMIT: u64 = 1 << 48;
    /// Gaps are below this; longer ones take a [`AccessKind::Compute`] record.
    pub const GAP_LIMIT: u32 = 1 << 13;

    /// Packs one access. Bits of `address` at or above 48 and of `gap` at or above 13 are refused in debug builds and
    /// cut off otherwise: callers keep to the limits above.
    #[inline]
    pub fn new(kind: AccessKind, address: u64, gap: u32, dependent: bool) -> Self {
        debug_assert!(address < Self::ADDRESS_LIMIT && gap < Self::GAP_LIMIT);
        Access(
            (address & (Self::ADDRESS_LIMIT - 1))
                | (kind as u64) << 48
                | u64::from(dependent) << 50
                | u64::from(gap & (Self::GAP_LIMIT - 1)) << 51,
        )
    }
    /// A load from a byte address, `gap` instructions after the record before it.
    #[inline]
    pub fn load(address: u64, gap: u32) -> Self {
        Self::new(AccessKind::Load, address, gap, false)
    }
    /// A load whose address came from the load before it.
    #[inline]
    pub fn dependent_load(address: u64, gap: u32) -> Self {
        Self::new(AccessKind::Load, address, gap, true)
    }
    /// A store to a byte address, `gap` instructions after the record before it.
    #[inline]
    pub fn store(address: u64, gap: u32) -> Self {
        Self::new(AccessKind::Store, address, gap, false)
    }
    /// `instructions` that touch no data.
    #[inline]
    pub fn compute(instructions: u64) -> Self {
        Self::new(AccessKind::Compute, instructions, 0, false)
    }
    /// Control moves to `code_address`.
    #[inline]
    pub fn jump(code_address: u64, gap: u32) -> Self {
        Self::new(AccessKind::Jump, code_address, gap, false)
    }
    /// Byte address of a load or store, code address of a jump, number of instructions of a compute record.
    #[inline]
    pub fn address(self) -> u64 {
        self.0 & (Self::ADDRESS_LIMIT - 1)
    }
    /// The kind of the record.
    #[inline]
    pub fn kind(self) -> AccessKind {
        match self.0 >> 48 & 3 {
            0 => AccessKind::Load,
            1 => AccessKind::Store,
            2 => AccessKind::Jump,
            _ => AccessKind::Compute,
        }
    }
    /// Does it load or store?
    #[inline]
    pub fn is_data(self) -> bool {
        self.0 >> 49 & 1 == 0
    }
    /// Does it store?
    #[inline]
    pub fn is_store(self) -> bool {
        self.0 >> 48 & 3 == AccessKind::Store as u64
    }
    /// Its address came from the load before it, so it waits for that load.
    #[inline]
    pub fn is_dependent(self) -> bool {
        self.0 >> 50 & 1 == 1
    }
    /// Instructions without data accesses between the record before and this one.
    #[inline]
    pub fn gap(self) -> u32 {
        (self.0 >> 51) as u32
    }
    /// Instructions this record stands for: its gap, and itself where it is an instruction.
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
        let wait = if self.is_dependent() { " dependent" } else { "" };
        write!(out, "+{} {:?} {:#x}{wait}", self.gap(), self.kind(), self.address())
    }
}

/// How a batch of accesses ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchEnd {
    /// More follows at once.
    More,
    /// Nothing to do for this long, after the batch.
    Sleep {
        /// Time asleep.
        ns: u64,
    },
    /// Off processor until another thread of the process has posted to this channel as often as it was waited on
    /// (a counting semaphore), after the batch.
    Wait {
        /// The same number means the same channel in every thread of the process.
        channel: u32,
    },
    /// Posts to a channel after the batch, and goes on.
    Post {
        /// The same number means the same channel in every thread of the process.
        channel: u32,
    },
    /// The program is done after the batch.
    Exit,
}

/// One thread of a program, producing its accesses in batches. Endless programs never say [`BatchEnd::Exit`].
///
/// Addresses are virtual, in the address space of the thread's process. Resumable and deterministic: the same
/// construction (parameters, seed) gives the same stream, however it is cut into batches.
pub trait AccessSource: Send {
    /// Appends at least one access, or none where the turn is not [`BatchEnd::More`]; a few thousand at most.
    fn next_batch(&mut self, batch: &mut Vec<Access>) -> BatchEnd;

    /// Work done so far, in the program's own unit (rounds, operations), where it has one.
    fn progress(&self) -> Option<f64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does every field come back out of the eight bytes, at its limits too?
    #[test]
    fn an_access_keeps_its_fields_at_their_limits() {
        let top = Access::ADDRESS_LIMIT - 1;
        let kinds = [AccessKind::Load, AccessKind::Store, AccessKind::Jump, AccessKind::Compute];
        for kind in kinds {
            for (address, gap, dependent) in [(0, 0, false), (top, Access::GAP_LIMIT - 1, true), (64, 7, false)] {
                let access = Access::new(kind, address, gap, dependent);
                let back = (access.kind(), access.address(), access.gap(), access.is_dependent());
                assert_eq!(back, (kind, address, gap, dependent));
            }
        }
        assert_eq!(Access::load(64, 3).instructions(), 4);
        assert_eq!(Access::compute(100).instructions(), 100);
        assert_eq!(Access::jump(64, 3).instructions(), 3);
    }
}
