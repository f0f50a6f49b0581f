//! The access stream of a kernel: data accesses paced to the program's instruction mix, and code as loops and calls.
//!
//! Problem: an algorithm specifies only the data that it must touch. A compiled program also executes the instructions
//! between, fetches them, and spends many of its loads and stores on spills, locals and constants that stay in the
//! first-level cache.
//!
//! Method: [`AccessEmitter`] adds these at fixed published ratios ([`AccessPace`]), by Bresenham's line, which is exact
//! in the long run and takes a few additions per access, without random numbers. Code is a row of equal functions. Each
//! runs as a loop of its own length until the kernel enters another, so the instruction pointer never leaves the
//! declared code.
//!
//! Properties: no stack access falls between a load and the load that depends on it. The stream does not depend on how
//! it is cut into batches.

use cachemate_core::{Access, AccessKind, BatchEnd};
use serde::Deserialize;

/// Size of one instruction in bytes: the papers' machines (SPARC, POWER) have fixed four-byte instructions.
pub const INSTRUCTION_BYTES: u64 = 4;
/// Address at which a process's code starts; data regions start far above.
pub const CODE_BASE: u64 = 0x40_0000;
/// Size of a thread's window of stack, in bytes.
pub const STACK_BYTES: u64 = 4096;

const FIXED_POINT_ONE: u32 = 1 << 16;

/// Number of bytes at the top of the stack within which every second access stays.
const STACK_TOP_BYTES: u64 = 32;

/// Every second access stays within the top 32 bytes, every fourth within 64, and so on up to the
/// whole window. In real programs, 59 to 92 % of stack accesses return within 64 bytes of stack
/// distance, and 92 to 99 % within 512 (docs/programs.md).
#[inline]
fn stack_offset(access_number: u64) -> u64 {
    let window = (STACK_TOP_BYTES << access_number.trailing_zeros().min(7)).min(STACK_BYTES);
    // Knuth's multiplicative hash selects any word of the window without the state of a generator.
    ((access_number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % window) & !7
}

/// The ratios that an algorithm does not determine by itself.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
pub struct AccessPace {
    /// Number of instructions per data access, including the access.
    pub instructions_per_access: f64,
    /// Number of accesses to the thread's stack window per access of the algorithm.
    pub stack_per_access: f64,
}

/// The code of a program, as equal functions in a row.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
pub struct CodeLayout {
    /// Number of functions; at least one.
    pub functions: u32,
    /// Length of each function in instructions, which is also the length of its loop.
    pub function_instr: u32,
}

impl CodeLayout {
    /// All functions together, in bytes.
    pub const fn bytes(self) -> u64 {
        self.functions as u64 * self.function_instr as u64 * INSTRUCTION_BYTES
    }
}

/// The target to which a kernel emits its accesses.
pub(crate) struct AccessEmitter {
    pub(super) batch: Vec<Access>,
    pub(super) batch_end: BatchEnd,
    /// Work done by the kernel since its start, which the kernel counts.
    pub work_done: u64,
    gap_per_access: u32,
    pending_gap: u32,
    stack_per_access: u32,
    pending_stack: u32,
    stack_base: u64,
    stack_access_count: u64,
    code: CodeLayout,
    block_start: u64,
    instructions_left: i32,
}

impl AccessEmitter {
    pub(super) fn new(pace: AccessPace, code: CodeLayout, stack_base: u64) -> Self {
        let mut out = AccessEmitter {
            batch: Vec::new(),
            batch_end: BatchEnd::More,
            work_done: 0,
            gap_per_access: 0,
            pending_gap: 0,
            stack_per_access: (pace.stack_per_access * f64::from(FIXED_POINT_ONE)) as u32,
            pending_stack: 0,
            stack_base,
            stack_access_count: 0,
            code,
            block_start: CODE_BASE,
            instructions_left: 0,
        };
        out.set_pace(pace.instructions_per_access);
        out
    }

    /// Ends the batch here, because the thread leaves the processor or posts.
    pub fn end_batch(&mut self, batch_end: BatchEnd) {
        self.batch_end = batch_end;
    }

    /// Sets the number of instructions per access from here on, for programs whose phases have different ratios.
    pub fn set_pace(&mut self, instructions_per_access: f64) {
        self.gap_per_access = ((instructions_per_access - 1.0) * f64::from(FIXED_POINT_ONE)) as u32;
    }

    #[inline]
    fn push_access(&mut self, kind: AccessKind, address: u64, is_dependent: bool) {
        self.pending_gap += self.gap_per_access;
        let gap = self.pending_gap >> 16;
        self.pending_gap &= FIXED_POINT_ONE - 1;
        self.instructions_left -= gap as i32 + 1;
        if self.instructions_left < 0 {
            self.emit_loop_back(gap);
        }
        self.batch
            .push(Access::new(kind, address, gap, is_dependent));
    }

    /// Emits the jump back to the start of the current function, which falls into the gap before an access.
    fn emit_loop_back(&mut self, gap: u32) {
        self.batch.push(Access::jump(self.block_start, 0));
        self.instructions_left = self.code.function_instr as i32 - gap as i32 - 1;
        debug_assert!(
            self.instructions_left >= 0,
            "a function is shorter than one gap"
        );
    }

    /// Emits the stack accesses that are due. Callers must not call it between a load and the load that depends on it.
    #[inline]
    fn emit_due_stack_accesses(&mut self) {
        while self.pending_stack >= FIXED_POINT_ONE {
            self.pending_stack -= FIXED_POINT_ONE;
            self.stack_access_count += 1;
            let address = self.stack_base + stack_offset(self.stack_access_count);
            // A third of the stack accesses are stores (spills).
            let kind = if self.stack_access_count.is_multiple_of(3) {
                AccessKind::Store
            } else {
                AccessKind::Load
            };
            self.push_access(kind, address, false);
        }
    }

    #[inline]
    pub fn load(&mut self, address: u64) {
        self.emit_due_stack_accesses();
        self.pending_stack += self.stack_per_access;
        self.push_access(AccessKind::Load, address, false);
    }

    /// Emits a load whose address came from the preceding load.
    #[inline]
    pub fn load_dependent(&mut self, address: u64) {
        self.pending_stack += self.stack_per_access;
        self.push_access(AccessKind::Load, address, true);
    }

    #[inline]
    pub fn store(&mut self, address: u64) {
        self.emit_due_stack_accesses();
        self.pending_stack += self.stack_per_access;
        self.push_access(AccessKind::Store, address, false);
    }

    /// Calls function `index`, modulo the number of functions; code is fetched from it in a loop until the next call.
    #[inline]
    pub fn enter_function(&mut self, index: u32) {
        let index = if index < self.code.functions {
            index
        } else {
            index % self.code.functions
        };
        let size = u64::from(self.code.function_instr) * INSTRUCTION_BYTES;
        self.block_start = CODE_BASE + u64::from(index) * size;
        self.instructions_left = self.code.function_instr as i32;
        self.batch.push(Access::jump(self.block_start, 0));
    }

    /// Functions of the program's code.
    #[inline]
    pub fn function_count(&self) -> u32 {
        self.code.functions
    }

    /// Data accesses and jumps so far in this batch.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.batch.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do stack accesses return at the same distances as those of recorded programs (docs/programs.md), without ever
    /// leaving the stack?
    #[test]
    fn the_stack_is_reused_near_its_top() {
        const LINE_BYTES: u64 = 16;
        let mut recent: Vec<u64> = Vec::new();
        let mut hit_counts = [0u32; 4]; // 64, 128, 256, 512 bytes
        const TURNS: u32 = 100_000;

        for turn in 1..=u64::from(TURNS) {
            let offset = stack_offset(turn);
            assert!(offset + 8 <= STACK_BYTES && offset.is_multiple_of(8));
            let line = offset / LINE_BYTES;
            let distance = recent.iter().position(|&other| other == line);
            if let Some(at) = distance {
                recent.remove(at);
                let bytes = at as u64 * LINE_BYTES;
                (0..4)
                    .filter(|&k| bytes < 64 << k)
                    .for_each(|k| hit_counts[k] += 1);
            }
            recent.insert(0, line);
        }

        let share = hit_counts.map(|hits| f64::from(hits) / f64::from(TURNS));
        let bounds = [(0.59, 0.92), (0.77, 0.99), (0.87, 0.99), (0.92, 0.99)];
        for (share, (low, high)) in share.into_iter().zip(bounds) {
            assert!((low..=high).contains(&share), "{share}: {hit_counts:?}");
        }
    }
}
