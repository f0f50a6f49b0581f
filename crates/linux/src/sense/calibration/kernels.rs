//! The measured loops: random walks, strides, and streams of reads and writes.

use std::hint::black_box;

/// One line of memory.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct MemoryLine([u64; 8]);

/// Memory that the loops use: zeros, so that a loaded value changes no address but must arrive before the next one is known.
pub struct LineBuffer {
    lines: Vec<MemoryLine>,
}

const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
const INCREMENT: u64 = 1_442_695_040_888_963_407;

impl LineBuffer {
    /// Allocates memory in pages as every program gets them, and touches all of it.
    pub fn new(bytes: u64) -> Self {
        let lines = vec![MemoryLine([0; 8]); (bytes / 64).max(64) as usize];
        let mut buffer = LineBuffer { lines };
        buffer.write_all(0, buffer.lines.len());
        buffer
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        64 * self.lines.len() as u64
    }

    /// Walks over the first `line_count` lines in `WALKS` independent chains of loads. Within a chain each address depends on
    /// the value of the load before it, and every line is equally likely, so that the share of hits is the share of the
    /// lines that a cache holds.
    pub fn walk<const WALKS: usize>(&self, bytes: u64, steps: u64, seed: u64) {
        let line_count = (bytes / 64).clamp(1, self.lines.len() as u64) as usize;
        let lines = &self.lines[..line_count];
        let mut states: [u64; WALKS] =
            std::array::from_fn(|walk| (seed + walk as u64 + 1).wrapping_mul(MULTIPLIER));
        for _ in 0..steps {
            for state in &mut states {
                let next = state.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
                let index = ((next >> 32) * lines.len() as u64) >> 32;
                *state = next.wrapping_add(lines[index as usize].0[0]);
            }
        }
        black_box(states);
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

    /// Reads lines in order, from `start` on, and returns the next one to read.
    fn read(&self, start: usize, line_count: usize) -> usize {
        let end = (start + line_count).min(self.lines.len());
        let mut sums = [0u64; 8];
        for line in &self.lines[start..end] {
            for (sum, word) in sums.iter_mut().zip(line.0) {
                *sum = sum.wrapping_add(word);
            }
        }
        black_box(sums);
        if end == self.lines.len() { 0 } else { end }
    }

    /// Reads this many lines in order, beginning again at the end, and returns the next one to read.
    pub fn read_all(&self, start: usize, line_count: usize) -> usize {
        let (mut next, mut left) = (start, line_count);
        while left > 0 {
            let count = left.min(self.lines.len() - next);
            next = self.read(next, count);
            left -= count;
        }
        next
    }

    /// Does the same as [`LineBuffer::read_all`] with writes.
    pub fn write_all(&mut self, start: usize, line_count: usize) -> usize {
        let (mut next, mut left) = (start, line_count);
        while left > 0 {
            let count = left.min(self.lines.len() - next);
            next = self.write(next, count);
            left -= count;
        }
        next
    }

    /// Writes zeros to lines in order, from `start` on, and returns the next one to write.
    fn write(&mut self, start: usize, line_count: usize) -> usize {
        let end = (start + line_count).min(self.lines.len());
        let zero = black_box(0u64);
        for line in &mut self.lines[start..end] {
            line.0 = [zero; 8];
        }
        black_box(&mut self.lines);
        if end == self.lines.len() { 0 } else { end }
    }
}

/// Makes this many draws, and branches on a bit of each: at random with the highest bit, which the branch predictor gets
/// wrong every second time, and never with `bit` 0. The draws do not wait for the branches.
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

/// Does this many dependent multiplications, with an exclusive or between them, so that the compiler cannot regroup them.
pub fn multiply(steps: u64) {
    let (mut product, factor) = (black_box(3u64), black_box(5u64));
    for _ in 0..steps {
        product = (product ^ factor).wrapping_mul(factor);
    }
    black_box(product);
}

/// Cycles of a dependent multiplication of 64 bits, three on every x86-64 processor since 2008, and of an exclusive or.
pub const MULTIPLICATION_CYCLES: f64 = 4.0;
