//! gzip and bzip2: LZ77 with hash chains, and block sorting.
//!
//! Method, gzip: a 64 KiB window slides over the input. Every position is hashed into a head table, and earlier
//! positions with the same hash are followed through a chain and compared. Input and output are streamed.
//!
//! Method, bzip2: a block of up to 900 kB is read. Its suffix pointers are bucket-counted, and sorted by comparisons at
//! random places of the block. Then the block is moved to front and Huffman coded in sequence.

use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value, map_to_range};
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("gzip", |setup| setup.add_single_kernel(Deflate::new)),
    ("bzip2", |setup| setup.add_single_kernel(BlockSort::new)),
];

const WINDOW_BYTES: u64 = 64 << 10;
const HASH_COUNT: u64 = 32 << 10;

struct Deflate {
    input: Region,
    output: Region,
    window: Region,
    head: Region,
    chain: Region,
    /// Position in the endless input; the window is full from the beginning.
    position: u64,
    written_bytes: u64,
    salt: u64,
    hash_count: u64,
    window_bytes: u64,
}

impl Deflate {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        // The format fixes the sizes of the tables; a footprint that is too small for them shrinks them, as memory
        // level 1 does.
        let window_bytes = WINDOW_BYTES.min((bytes / 16).next_power_of_two() / 2);
        let hash_count = HASH_COUNT.min(window_bytes / 2);
        let window = setup.add_shared_region("window", window_bytes);
        let head = setup.add_shared_region("hash heads", hash_count * 2);
        let chain = setup.add_shared_region("hash chains", window_bytes);
        let buffer_bytes = bytes - 2 * window_bytes - hash_count * 2;
        let input = setup.add_shared_region("input", buffer_bytes * 2 / 3);
        let output = setup.add_shared_region("output", buffer_bytes - buffer_bytes * 2 / 3);
        let salt = setup.rng.next_bits();
        let position = window_bytes + setup.rng.draw_below(1 << 24);

        Deflate {
            input,
            output,
            window,
            head,
            chain,
            position,
            written_bytes: 0,
            salt,
            hash_count,
            window_bytes,
        }
    }

    fn window_address(&self, position: u64) -> u64 {
        self.window.base + position % self.window_bytes
    }
}

impl WorkloadKernel for Deflate {
    fn step(&mut self, out: &mut AccessEmitter) {
        let start = self.position;
        let hash = hash_value(start ^ self.salt);
        out.enter_function(map_to_range(hash, u64::from(out.function_count())) as u32);

        // Text repeats, so two in three positions find a match, of 3 to 34 bytes.
        let length = if hash % 3 < 2 {
            3 + (hash >> 8) % 32
        } else {
            1
        };
        for byte in 0..length {
            let position = start + byte;
            if position.is_multiple_of(8) {
                out.load(self.input.base + position % self.input.bytes);
                out.store(self.window_address(position));
            }
            let bucket = map_to_range(hash_value((position / 3) ^ self.salt << 1), self.hash_count);
            out.load(self.window_address(position + 2));
            out.load(self.head.element_address(bucket, 2));
            out.store(self.chain.base + position * 2 % self.chain.bytes);
            out.store(self.head.element_address(bucket, 2));
        }

        // The chain has up to eight candidates, of which later ones are further back.
        let link_count = 1 + (hash >> 16) % 8;
        let mut distance = 0;
        for link in 0..link_count {
            distance += 1 + map_to_range(hash_value(hash ^ link), self.window_bytes / 8);
            let candidate = start.wrapping_sub(distance);
            out.load_dependent(self.window_address(candidate));
            out.load(self.window_address(candidate + length));
            out.load(self.window_address(start + length));
            out.load(self.chain.base + candidate.wrapping_mul(2) % self.chain.bytes);
        }

        // A match or literal costs about two bytes of output, written a word at a time.
        self.written_bytes += 2;
        if self.written_bytes.is_multiple_of(8) {
            out.store(self.output.base + self.written_bytes % self.output.bytes / 8 * 8);
        }
        self.position += length;
        out.work_done += length;
    }
}

const BLOCK_BYTES: u64 = 900_000;

#[derive(Clone, Copy)]
enum BlockSortStage {
    Read,
    Sort,
    Code,
}

struct BlockSort {
    input: Region,
    output: Region,
    block: Region,
    pointers: Region,
    quadrants: Region,
    buckets: Region,
    stage: BlockSortStage,
    /// Position within the stage.
    stage_position: u64,
    /// Position of the block in the input.
    block_start: u64,
    written_words: u64,
    rng: Rng,
}

impl BlockSort {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let block_bytes = BLOCK_BYTES.min(bytes / 12) / 64 * 64;
        let block = setup.add_shared_region("block", block_bytes);
        let pointers = setup.add_shared_region("pointers", block_bytes * 4);
        let quadrants = setup.add_shared_region("quadrants", block_bytes * 2);

        // There are 65 536 counters of four bytes, one for each pair of bytes.
        let buckets = setup.add_shared_region("buckets", (256 << 10).min(bytes / 16));
        let buffer_bytes = bytes - 7 * block.bytes - buckets.bytes;
        let input = setup.add_shared_region("input", buffer_bytes * 3 / 4);
        let output = setup.add_shared_region("output", buffer_bytes - buffer_bytes * 3 / 4);
        BlockSort {
            input,
            output,
            block,
            pointers,
            quadrants,
            buckets,
            stage: BlockSortStage::Read,
            stage_position: 0,
            block_start: 0,
            written_words: 0,
            rng: setup.rng.clone(),
        }
    }

    /// The draw is skewed, because a few pairs of bytes are frequent in text.
    fn draw_bucket_address(&mut self) -> u64 {
        let count = self.buckets.bytes / 4;
        self.buckets.element_address(self.rng.draw_skewed(count), 4)
    }

    fn emit_block_read(&mut self, out: &mut AccessEmitter) {
        for byte in self.stage_position..self.stage_position + 32 {
            if byte.is_multiple_of(8) {
                out.load(self.input.base + (self.block_start + byte) % self.input.bytes);
            }
            out.store(self.block.base + byte);
            let bucket = self.draw_bucket_address();
            out.load(bucket);
            out.store(bucket);
        }
    }

    /// Emits one partition step of the pointer sort within a bucket, which compares suffixes at random places of the
    /// block. All passes over a run of pointers access the same suffixes, in different orders.
    fn emit_sort_step(&mut self, run_length: u64, pass: u64, out: &mut AccessEmitter) {
        let shift = map_to_range(hash_value(pass ^ self.block_start), run_length);
        for pointer in self.stage_position..self.stage_position + 32 {
            let word = self.pointers.element_address(pointer, 4);
            out.load(word);
            let entry = pointer / run_length * run_length + (pointer + shift) % run_length;
            let suffix = map_to_range(
                hash_value(entry ^ self.block_start << 24),
                self.block.bytes - 16,
            );
            out.load_dependent(self.block.base + suffix);
            // Bytes that are equal up to the bucket's depth are skipped; then a few are compared with those of the
            // pivot.
            for byte in 1..1 + self.rng.draw_below(6) {
                out.load(self.block.base + suffix + byte);
            }
            // In repetitive text, the order found for later suffixes decides.
            if self.rng.draw_below(4) == 0 {
                out.load(self.quadrants.base + suffix * 2);
                out.store(self.quadrants.base + suffix * 2);
            }
            out.store(word);
        }
    }

    fn emit_coding_step(&mut self, out: &mut AccessEmitter) {
        for pointer in self.stage_position..self.stage_position + 32 {
            out.load(self.pointers.element_address(pointer, 4));
            let suffix = self.rng.draw_below(self.block.bytes);
            out.load_dependent(self.block.base + suffix);
            // The move-to-front list consists of 256 bytes at the start of the buckets, with most hits near its head.
            let depth = self.rng.draw_skewed(256);
            out.load(self.buckets.base + depth);
            out.store(self.buckets.base);
            self.written_words += u64::from(pointer.is_multiple_of(4));
            if pointer.is_multiple_of(32) {
                out.store(self.output.base + self.written_words % self.output.bytes / 8 * 8);
            }
        }
    }
}

/// Number of times that sorting moves each pointer, which is log2 of the usual bucket size.
const SORT_PASSES: u64 = 6;

impl WorkloadKernel for BlockSort {
    fn step(&mut self, out: &mut AccessEmitter) {
        let block = self.block.bytes;
        let end = match self.stage {
            BlockSortStage::Read => block,
            BlockSortStage::Sort => block * SORT_PASSES,
            BlockSortStage::Code => block,
        };
        let stage_position = self.stage_position;
        match self.stage {
            BlockSortStage::Read => self.emit_block_read(out),
            BlockSortStage::Sort => {
                // Quicksort works bucket by bucket, so all passes over one stretch precede the next stretch.
                let run_length = 1024.min(block);
                let (part, position_in_run) = (
                    stage_position / (run_length * SORT_PASSES),
                    stage_position % run_length,
                );
                self.stage_position = (part * run_length + position_in_run).min(block - 32);
                self.emit_sort_step(run_length, stage_position / run_length % SORT_PASSES, out);
                self.stage_position = stage_position;
            }
            BlockSortStage::Code => {
                self.emit_coding_step(out);
                out.work_done += 32;
            }
        }
        self.stage_position += 32;
        if self.stage_position >= end {
            self.stage_position = 0;
            self.stage = match self.stage {
                BlockSortStage::Read => BlockSortStage::Sort,
                BlockSortStage::Sort => BlockSortStage::Code,
                BlockSortStage::Code => {
                    self.block_start += block;
                    BlockSortStage::Read
                }
            };
        }
        if self.stage_position.is_multiple_of(512) {
            let base = [0, 4, 8][self.stage as usize];
            out.enter_function(base + (self.stage_position / 512) as u32 % 4);
        }
    }
}
