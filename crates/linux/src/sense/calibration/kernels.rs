//! The measured loops: random walks, strides, and streams of reads and writes.

use std::hint::black_box;

/// One line of memory.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct MemoryLine([u64; 8]);

/// Memory that the loops use: zeros, so that a loaded value changes no address but must arrive before the next one is
/// known.
pub struct LineBuffer {
    lines: Vec<MemoryLine>,
}

const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
const INCREMENT: u64 = 1_442_695_040_888_963_407;

impl LineBuffer {
    /// Allocates memory in pages as every program gets them, and touches all of it.
    pub fn new(bytes: u64) -> Self {
        let line_count = (bytes / 64).max(64) as usize / STREAMS * STREAMS;
        let mut buffer = LineBuffer {
            lines: vec![MemoryLine([0; 8]); line_count],
        };
        buffer.write_all(0, line_count);
        buffer
    }

    /// 64 bytes for each line.
    pub fn bytes(&self) -> u64 {
        64 * self.lines.len() as u64
    }

    /// Walks over the first `line_count` lines in `WALKS` independent chains of loads. Within a chain each address
    /// depends on the value of the load before it, and every line is equally likely, so that the share of hits is the
    /// share of the lines that a cache holds.
    pub fn walk<const WALKS: usize>(&self, bytes: u64, steps: u64, seed: u64) {
        self.spaced_walk::<WALKS, 0>(bytes, steps, seed);
    }

    /// Walks as [`Self::walk`], with `2 * PAIRS` other instructions behind each load, so that the loads of two chains
    /// overlap if the core's window has room for what lies between them (Wong, Measuring reorder buffer capacity,
    /// 2013).
    pub fn spaced_walk<const WALKS: usize, const PAIRS: usize>(
        &self,
        bytes: u64,
        steps: u64,
        seed: u64,
    ) {
        let line_count = (bytes / 64).clamp(1, self.lines.len() as u64) as usize;
        let lines = &self.lines[..line_count];
        let mut states: [u64; WALKS] =
            std::array::from_fn(|walk| (seed + walk as u64 + 1).wrapping_mul(MULTIPLIER));
        for _ in 0..steps {
            for state in &mut states {
                let next = state.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
                let index = ((next >> 32) * lines.len() as u64) >> 32;
                *state = next.wrapping_add(lines[index as usize].0[0]);
                if PAIRS > 0 {
                    pass_instructions::<PAIRS>();
                }
            }
        }
        black_box(states);
    }

    /// Touches this many of the first lines, of which there are a power of two, each once and far from the one before it, so
    /// that no prefetcher follows. The loads overlap, or each waits for the one before it.
    pub fn scatter<const DEPENDENT: bool>(&self, bytes: u64, steps: u64) {
        let line_count = 1 << (bytes as usize / 64).min(self.lines.len()).ilog2();
        let step = scattering_step(line_count);
        let (mut index, mut sum) = (0, 0);
        for _ in 0..steps {
            let value = self.lines[index].0[0];
            let wait = if DEPENDENT { value as usize } else { 0 };
            index = (index + step + wait) & (line_count - 1);
            sum += value;
        }
        black_box(sum);
    }

    /// Removes the first lines from all caches; false where no instruction does that.
    #[cfg(target_arch = "x86_64")]
    pub fn empty_caches(&self, bytes: u64) -> bool {
        let line_count = (bytes as usize / 64).min(self.lines.len());
        for line in &self.lines[..line_count] {
            // SAFETY: SSE2 is part of x86-64, and flushing a line that we may read changes no value.
            unsafe { std::arch::x86_64::_mm_clflush(std::ptr::from_ref(line).cast()) };
        }
        // SAFETY: SSE2, as above.
        unsafe { std::arch::x86_64::_mm_mfence() };
        true
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn empty_caches(&self, _: u64) -> bool {
        false
    }

    /// Loads lines a constant number apart, each address dependent on the load before it.
    pub fn stride(&self, stride_lines: usize, start: usize, steps: u64) -> usize {
        let mut index = start % self.lines.len();
        for _ in 0..steps {
            index += stride_lines + self.lines[index].0[0] as usize;
            if index >= self.lines.len() {
                index -= self.lines.len();
            }
        }
        index
    }

    /// Reads this many of the first lines of the buffer in [`STREAMS`] streams, each through its own part of them.
    /// Begins with line `start` of each part, and again at their ends; returns the next line to read.
    pub fn read_all(&self, bytes: u64, start: usize, line_count: usize) -> usize {
        let part_lines = (bytes as usize / 64).clamp(STREAMS, self.lines.len()) / STREAMS;
        let mut sums = [0u64; 8];
        let next = for_each_stretch(part_lines, start, line_count / STREAMS, |lines| {
            let parts: [&[MemoryLine]; STREAMS] =
                std::array::from_fn(|part| &self.lines[part * part_lines..][lines.clone()]);
            for index in 0..lines.len() {
                for part in parts {
                    for (sum, word) in sums.iter_mut().zip(part[index].0) {
                        *sum = sum.wrapping_add(word);
                    }
                }
            }
        });
        black_box(sums);
        next
    }

    /// Writes zeros to this many lines of the whole buffer in the same way.
    pub fn write_all(&mut self, start: usize, line_count: usize) -> usize {
        let part_lines = self.lines.len() / STREAMS;
        let zero = black_box(0u64);
        let next = for_each_stretch(part_lines, start, line_count / STREAMS, |lines| {
            for index in lines {
                for part in 0..STREAMS {
                    self.lines[part * part_lines + index].0 = [zero; 8];
                }
            }
        });
        black_box(&mut self.lines);
        next
    }
}

/// Streams at once in loops that measure a bandwidth, as many as in STREAM's triad and one more: prefetchers begin anew
/// with each page, so that one stream alone waits at each beginning.
const STREAMS: usize = 4;

/// Calls `process` for `count` lines of a part in order, from `start` on and from its beginning after its end; returns
/// the next line.
fn for_each_stretch(
    part_lines: usize,
    start: usize,
    count: usize,
    mut process: impl FnMut(std::ops::Range<usize>),
) -> usize {
    let (mut next, mut left) = (start % part_lines, count);
    while left > 0 {
        let end = (next + left).min(part_lines);
        process(next..end);
        left -= end - next;
        next = if end == part_lines { 0 } else { end };
    }
    next
}

/// A step that comes to each of a power of two of lines once, near their golden section: odd.
fn scattering_step(line_count: usize) -> usize {
    (0.618 * line_count as f64) as usize | 1
}

/// Instructions of a step of [`LineBuffer::spaced_walk`] besides those that `PAIRS` counts.
pub const SPACED_STEP_INSTR: f64 = 8.0;

/// Executes pairs of instructions that wait for no load: an addition, which takes a register, and one that does
/// nothing.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn pass_instructions<const PAIRS: usize>() {
    // SAFETY: writes one register, which is declared, and the flags.
    unsafe {
        std::arch::asm!(
            ".rept {pairs}", "add {sum:e}, 1", "nop", ".endr",
            pairs = const PAIRS, sum = inout(reg) 0u64 => _, options(nomem, nostack)
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn pass_instructions<const PAIRS: usize>() {}

/// Executes this many blocks of [`MIX_INSTR`] instructions of the kinds of compiled code, all in the first cache and
/// with few dependences: a quarter loads, a tenth stores, a tenth branches that are never taken, each with a
/// comparison.
#[cfg(target_arch = "x86_64")]
pub fn instruction_mix(steps: u64) {
    let mut words = MemoryLine([1; 8]);
    let place = words.0.as_mut_ptr();
    for _ in 0..steps {
        // SAFETY: reads and writes `words`, and writes declared registers and the flags.
        unsafe {
            std::arch::asm!(
                ".rept 10",
                "mov {a:e}, [{p}]", "add {c:e}, 1", "add {d:e}, {a:e}", "lea {e:e}, [{c:e} + 3]",
                "mov {b:e}, [{p} + 8]", "xor {f:e}, {b:e}", "test {c:e}, {c:e}", "jc 2f",
                "mov [{p} + 16], {e:e}", "mov {a:e}, [{p} + 24]", "add {d:e}, 1", "shl {a:e}, 1",
                "mov {b:e}, [{p} + 32]", "sub {e:e}, {b:e}", "add {f:e}, 7", "test {a:e}, {a:e}",
                "jc 2f", "mov {a:e}, [{p} + 40]", "and {a:e}, 15", "mov [{p} + 48], {a:e}",
                ".endr", "2:",
                p = in(reg) place, a = out(reg) _, b = out(reg) _,
                c = inout(reg) 1u64 => _, d = inout(reg) 1u64 => _, e = out(reg) _, f = inout(reg) 1u64 => _,
                options(nostack)
            );
        }
    }
    black_box(&mut words);
}

#[cfg(not(target_arch = "x86_64"))]
pub fn instruction_mix(_: u64) {}

/// Instructions of a step of [`instruction_mix`].
pub const MIX_INSTR: f64 = 200.0;

/// Makes this many draws, and branches on a bit of each: at random with the highest bit, which the branch predictor
/// gets wrong every second time, and never with `bit` 0. The draws do not wait for the branches.
pub fn branch(steps: u64, bit: u64, seed: u64) {
    let (mut state, bit) = (seed, black_box(bit));
    let mut taken = 0u64;
    for _ in 0..steps {
        state = state.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
        if state & bit != 0 {
            // What the compiler cannot see through, so that the branch stays one.
            black_box(&mut taken);
        }
    }
    black_box((state, taken));
}

/// Does this many dependent multiplications, with an exclusive or between them, so that the compiler cannot regroup
/// them.
pub fn multiply(steps: u64) {
    let (mut product, factor) = (black_box(3u64), black_box(5u64));
    for _ in 0..steps {
        product = (product ^ factor).wrapping_mul(factor);
    }
    black_box(product);
}

/// Cycles of a dependent multiplication of 64 bits, three on every x86-64 processor since 2008, and of an exclusive or.
pub const MULTIPLICATION_CYCLES: f64 = 4.0;

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a scattered pass come to each line once, and never to one of the page before?
    #[test]
    fn a_scattered_pass_comes_to_each_line_once() {
        for line_count in [256, 32_768] {
            let step = scattering_step(line_count);
            let mut seen = vec![false; line_count];
            let mut index = 0;
            for _ in 0..line_count {
                assert!(!std::mem::replace(&mut seen[index], true), "{index}");
                let next = (index + step) % line_count;
                assert!(next.abs_diff(index) >= 64, "{index} {next}");
                index = next;
            }
        }
    }
}
