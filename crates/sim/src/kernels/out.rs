//! How a kernel writes its stream: data accesses paced to the program's instruction mix, code as loops and calls.
//!
//! Problem: an algorithm names only the data it must touch. A compiled program also executes the instructions between,
//! fetches them from somewhere, and spends many of its loads and stores on spills, locals and constants that stay in
//! the first-level cache.
//!
//! Method: [`Out`] adds these at fixed published ratios ([`Pace`]), by Bresenham's line: exact in the long run, no
//! random numbers, a few additions per access. Code is a row of equal functions; each runs as a loop of its own length
//! until the kernel enters another, so that the instruction pointer never leaves the declared code.
//!
//! Properties: no stack access falls between a load and the load that depends on it; the stream does not depend on how
//! it is cut into batches.

use cachemate_core::{Access, AccessKind};

/// Bytes of one instruction: the papers' machines (SPARC, POWER) have fixed four-byte instructions.
pub const INSTRUCTION_BYTES: u64 = 4;
/// Where a process's code starts. Data regions start far above.
pub const CODE_BASE: u64 = 0x40_0000;
/// Size of a thread's hot stack frame window.
pub const STACK_BYTES: u64 = 4096;

const ONE: u32 = 1 << 16;

/// The ratios that an algorithm does not give by itself.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Pace {
    /// Instructions per data access, the access included.
    pub instructions_per_access: f64,
    /// Accesses to the thread's stack window per access that the algorithm makes.
    pub stack_per_access: f64,
}

/// A program's code: equal functions in a row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Code {
    pub functions: u32,
    /// Length of each function, which is also the length of its loop.
    pub function_instr: u32,
}

impl Code {
    pub const fn bytes(self) -> u64 {
        self.functions as u64 * self.function_instr as u64 * INSTRUCTION_BYTES
    }
}

/// Where a kernel writes its accesses.
pub(crate) struct Out {
    pub(super) batch: Vec<Access>,
    gap_step: u32,
    gap_debt: u32,
    stack_step: u32,
    stack_debt: u32,
    stack_base: u64,
    stack_turn: u64,
    code: Code,
    block_start: u64,
    left_instr: i32,
}

impl Out {
    pub(super) fn new(pace: Pace, code: Code, stack_base: u64) -> Self {
        let mut out = Out {
            batch: Vec::new(),
            gap_step: 0,
            gap_debt: 0,
            stack_step: (pace.stack_per_access * f64::from(ONE)) as u32,
            stack_debt: 0,
            stack_base,
            stack_turn: 0,
            code,
            block_start: CODE_BASE,
            left_instr: 0,
        };
        out.pace(pace.instructions_per_access);
        out
    }

    /// Sets the instructions per access from here on, for programs whose phases differ in it.
    pub fn pace(&mut self, instructions_per_access: f64) {
        self.gap_step = ((instructions_per_access - 1.0) * f64::from(ONE)) as u32;
    }

    #[inline]
    fn put(&mut self, kind: AccessKind, address: u64, dependent: bool) {
        self.gap_debt += self.gap_step;
        let gap = self.gap_debt >> 16;
        self.gap_debt &= ONE - 1;
        self.left_instr -= gap as i32 + 1;
        if self.left_instr < 0 {
            self.loop_back(gap);
        }
        self.batch.push(Access::new(kind, address, gap, dependent));
    }

    /// Jumps to the head of the running function, in front of an access with this gap.
    fn loop_back(&mut self, gap: u32) {
        self.batch.push(Access::jump(self.block_start, 0));
        self.left_instr = self.code.function_instr as i32 - gap as i32 - 1;
        debug_assert!(self.left_instr >= 0, "a function is shorter than one gap");
    }

    /// Pays the stack accesses owed: never called between a load and the one that depends on it.
    #[inline]
    fn pay_stack(&mut self) {
        while self.stack_debt >= ONE {
            self.stack_debt -= ONE;
            self.stack_turn += 1;
            // A stride coprime to the window's words walks all of it; a third are stores (spills).
            let address = self.stack_base + self.stack_turn.wrapping_mul(8 * 77) % STACK_BYTES;
            let kind = if self.stack_turn.is_multiple_of(3) { AccessKind::Store } else { AccessKind::Load };
            self.put(kind, address, false);
        }
    }

    #[inline]
    pub fn load(&mut self, address: u64) {
        self.pay_stack();
        self.stack_debt += self.stack_step;
        self.put(AccessKind::Load, address, false);
    }

    /// A load whose address came from the load emitted just before.
    #[inline]
    pub fn chase(&mut self, address: u64) {
        self.stack_debt += self.stack_step;
        self.put(AccessKind::Load, address, true);
    }

    #[inline]
    pub fn store(&mut self, address: u64) {
        self.pay_stack();
        self.stack_debt += self.stack_step;
        self.put(AccessKind::Store, address, false);
    }

    /// Calls function `index` (taken modulo their number): what follows is fetched from there, in a loop.
    #[inline]
    pub fn enter(&mut self, index: u32) {
        let index = if index < self.code.functions { index } else { index % self.code.functions };
        let size = u64::from(self.code.function_instr) * INSTRUCTION_BYTES;
        self.block_start = CODE_BASE + u64::from(index) * size;
        self.left_instr = self.code.function_instr as i32;
        self.batch.push(Access::jump(self.block_start, 0));
    }

    /// Number of functions there are to enter.
    #[inline]
    pub fn functions(&self) -> u32 {
        self.code.functions
    }

    /// Data accesses and jumps so far in this batch.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.batch.len()
    }
}
