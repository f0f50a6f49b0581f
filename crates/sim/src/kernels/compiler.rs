//! gcc and parser: many small allocations, and a dictionary with memoized search.
//!
//! Method, gcc: functions are read one by one, with the sizes of real programs. Each becomes a chain of small nodes
//! allocated in a row, with operands that point back into the function. Two dozen passes walk the chain, each with its
//! own code, and one computes the sets of live registers; names are looked up in a symbol table. Then the function's
//! obstack is freed, so the next function is built in the same memory. A copy of each function that is short enough to
//! be inlined is kept (gcc 2.7's integrate.c), which is why the heap grows.
//!
//! Method, parser: each word of a sentence is searched in a tree of words. Then all spans of the sentence are matched
//! through a hash table of partial results, whose chains are followed.

use super::emitter::AccessEmitter;
use super::random::{Rng, hash_value, map_to_range, scatter};
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[
    ("gcc", |setup| setup.add_single_kernel(Compiler::new)),
    ("parser", |setup| setup.add_single_kernel(LinkParser::new)),
];

/// Size of a node, with nodes per byte of machine code.
///
/// gcc 12 -O2 expands two large C files (17 600 instructions of 4.1 bytes after assembly) into as many RTL instructions
/// of 5.0 expressions each. Laid out as in gcc 2.7 on a 64-bit machine (8 bytes and 8 for each operand), these have 158
/// bytes.
const NODE_BYTES: u64 = 32;
const NODES_PER_CODE_BYTE: f64 = 5.0 / 4.1;
/// Maximum number of nodes of a function that is kept for inlining. The limit of gcc 2.7 is 8 * (8 + parameters)
/// instructions, here for two parameters and 5 nodes per instruction.
const MAX_INLINE_NODES: u64 = 8 * (8 + 2) * 5;
const PASSES: u32 = 24;
/// Pass before which the lives of registers are analyzed.
///
/// A set of all registers is kept at the start and at the end of each basic block (gcc 2.7's flow.c), in three rounds
/// over the blocks (estimate: one, one for loops, one without a change).
const LIVENESS_PASS: u32 = 8;
const LIVENESS_ROUNDS: u64 = 3;
/// Number of nodes per register and per basic block (measured like [`NODE_BYTES`]: 0.47 registers and 0.18 blocks per
/// instruction).
const NODES_PER_REGISTER: f64 = 5.0 / 0.47;
const NODES_PER_BLOCK: f64 = 5.0 / 0.18;

/// Quantiles of the size of functions in real programs, as pairs of fraction and bytes of machine code.
///
/// They come from the dynamic symbol tables of cc1, perl, python 3.11, sqlite3 and glibc's loader of Debian 12, x86-64
/// (34 608 functions, 12.8 MB). Half of all code is in functions above a kilobyte, a tenth in functions above 13.
const CODE_BYTES: [(f64, f64); 18] = [
    (0.0, 1.0),
    (0.05, 7.0),
    (0.1, 15.0),
    (0.25, 55.0),
    (0.5, 123.0),
    (0.75, 296.0),
    (0.9, 793.0),
    (0.95, 1082.0),
    (0.98, 2338.0),
    (0.99, 4308.0),
    (0.995, 7670.0),
    (0.998, 10781.0),
    (0.999, 14295.0),
    (0.9995, 20092.0),
    (0.9998, 30350.0),
    (0.9999, 55644.0),
    (0.99997, 63684.0),
    (1.0, 311460.0),
];

/// Size of the function at the quantile `share`, by geometric interpolation between the quantiles
/// of the table.
fn code_bytes(share: f64) -> f64 {
    let index = CODE_BYTES
        .iter()
        .position(|&(quantile, _)| quantile > share)
        .unwrap_or(CODE_BYTES.len() - 1);
    let ((low_quantile, small_bytes), (high_quantile, large_bytes)) =
        (CODE_BYTES[index - 1], CODE_BYTES[index]);
    small_bytes
        * libm::pow(
            large_bytes / small_bytes,
            (share - low_quantile) / (high_quantile - low_quantile),
        )
}

struct Compiler {
    /// Copies of functions that can be inlined, one after the other, which are never freed.
    inline_copies: Region,
    /// The obstack of the current function.
    obstack: Region,
    symbols: Region,
    rng: Rng,
    node_count: u64,
    pass_number: u32,
    next_node: u64,
    /// Basic blocks whose register sets are still to be computed.
    blocks_left: u64,
    kept_offset: u64,
    salt: u64,
}

impl Compiler {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let symbols = setup.add_shared_region("symbol table", (2 << 20).min(bytes / 8));
        // The obstack has room for the largest function of the table and its register sets.
        let obstack = setup.add_shared_region("function obstack", bytes / 6 * 5);
        let inline_copies =
            setup.add_shared_region("kept for inlining", bytes - symbols.bytes - obstack.bytes);
        let mut rng = setup.rng.clone();
        let salt = rng.next_bits();

        let (node_count, pass_number, next_node, blocks_left, kept_offset) = (0, 0, 0, 0, 0);
        let mut compiler = Compiler {
            inline_copies,
            obstack,
            symbols,
            rng,
            node_count,
            pass_number,
            next_node,
            blocks_left,
            kept_offset,
            salt,
        };
        compiler.read_function();
        compiler
    }

    fn read_function(&mut self) {
        const STEPS: u64 = 1 << 24;
        let draw = self.rng.draw_below(STEPS) as f64 / STEPS as f64;
        let capacity = self.obstack.bytes / NODE_BYTES;
        self.node_count = ((code_bytes(draw) * NODES_PER_CODE_BYTE) as u64).clamp(8, capacity);
    }

    /// Bytes of a set of the function's registers, and the number of its basic blocks, limited to
    /// what fits the obstack.
    fn set_bytes_and_blocks(&self) -> (u64, u64) {
        let bytes = ((self.node_count as f64 / NODES_PER_REGISTER) as u64 + 64).div_ceil(64) * 8;
        let max_blocks = (self.obstack.bytes - self.node_count * NODE_BYTES) / (2 * bytes);
        (
            bytes,
            ((self.node_count as f64 / NODES_PER_BLOCK) as u64).min(max_blocks),
        )
    }

    /// Emits the analysis of one block: the registers live at its end are those at the start of its successors, and
    /// those at its own start differ in a few.
    fn emit_liveness(&mut self, out: &mut AccessEmitter) {
        let (bytes, blocks) = self.set_bytes_and_blocks();
        let set_base = self.obstack.base + self.node_count * NODE_BYTES;
        let block = (self.blocks_left - 1) % blocks;
        let branch = map_to_range(hash_value(block ^ self.salt), blocks);
        for word in (0..bytes).step_by(8) {
            out.load(set_base + (block + 1) % blocks * bytes + word);
            out.load(set_base + branch * bytes + word);
            out.store(set_base + (blocks + block) * bytes + word);
            out.load(set_base + block * bytes + word);
            out.store(set_base + block * bytes + word);
        }
        self.blocks_left -= 1;
    }

    fn end_pass(&mut self, out: &mut AccessEmitter) {
        self.next_node = 0;
        self.pass_number += 1;
        if self.pass_number == LIVENESS_PASS {
            self.blocks_left = LIVENESS_ROUNDS * self.set_bytes_and_blocks().1;
        } else if self.pass_number == PASSES {
            self.pass_number = 0;
            self.end_function(out);
        }
    }

    /// Ends a function, of which a copy goes into permanent memory if it is short.
    fn end_function(&mut self, out: &mut AccessEmitter) {
        if self.node_count <= MAX_INLINE_NODES {
            for offset in (0..self.node_count * NODE_BYTES).step_by(8) {
                if self.kept_offset + 8 > self.inline_copies.bytes {
                    self.kept_offset = 0;
                }
                out.load(self.obstack.base + offset);
                out.store(self.inline_copies.base + self.kept_offset);
                self.kept_offset += 8;
            }
        }
        out.work_done += 1;
        self.read_function();
    }

    fn node_address(&self, index: u64) -> u64 {
        self.obstack.element_address(index, NODE_BYTES)
    }

    /// Emits the construction of a node, which is allocated and filled. The name of every fourth node is looked up.
    fn emit_node_build(&mut self, index: u64, out: &mut AccessEmitter) {
        let node = self.node_address(index);
        for word in 0..NODE_BYTES / 8 {
            out.store(node + word * 8);
        }
        if index.is_multiple_of(4) {
            let buckets = self.symbols.bytes / 64;
            let symbol = self
                .symbols
                .element_address(self.rng.draw_skewed(buckets), 64);
            out.load(symbol);
            out.load(symbol + 24);
            out.load_dependent(symbol + 40);
        }
    }

    fn emit_node_visit(&self, index: u64, out: &mut AccessEmitter) {
        let node = self.node_address(index);
        out.load(node + 8);
        let hash = hash_value(index ^ self.salt ^ u64::from(self.pass_number) << 40);
        // Most operands are just before the node; one in eight is anywhere in the function.
        let distance = if hash & 7 == 0 {
            map_to_range(hash, index + 1)
        } else {
            map_to_range(hash, 24.min(index + 1))
        };
        out.load(node + 16);
        out.load_dependent(self.node_address(index - distance));
        out.load(self.node_address(index - distance) + 8);
        if hash & 0x30 == 0 {
            out.store(node + 24);
        }
        out.load(node);
    }
}

impl WorkloadKernel for Compiler {
    fn step(&mut self, out: &mut AccessEmitter) {
        let pass_functions = out.function_count() / PASSES;
        if self.blocks_left > 0 {
            out.enter_function(self.pass_number * pass_functions);
            self.emit_liveness(out);
            return;
        }
        let end_node = (self.next_node + 32).min(self.node_count);
        for index in self.next_node..end_node {
            if index.is_multiple_of(4) {
                // Each pass has its own functions, chosen by the node's kind; a few kinds are frequent.
                out.enter_function(
                    self.pass_number * pass_functions
                        + self.rng.draw_function(u64::from(pass_functions)),
                );
            }
            if self.pass_number == 0 {
                self.emit_node_build(index, out)
            } else {
                self.emit_node_visit(index, out)
            }
        }
        self.next_node = end_node;
        if end_node == self.node_count {
            self.end_pass(out);
        }
    }
}

const WORD_BYTES: u64 = 64;
/// Number of recent entries of the memo table, 32 KiB of them, to which a recursion returns.
const RECENT_SPANS: u64 = 1024;

struct LinkParser {
    dictionary: Region,
    expressions: Region,
    table: Region,
    word_count: u64,
    rng: Rng,
    sentence_words: u64,
    words_to_look_up: u64,
    spans_left: u64,
    pool_offset: u64,
}

impl LinkParser {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        // 60 000 words in trees; their connector expressions; the memo table of one sentence.
        let dictionary = setup.add_shared_region("word trees", bytes / 8);
        let table = setup.add_shared_region("memo table", (1 << 20).min(bytes / 8));
        let expressions =
            setup.add_shared_region("expressions", bytes - dictionary.bytes - table.bytes);
        let word_count = dictionary.bytes / WORD_BYTES;
        LinkParser {
            dictionary,
            expressions,
            table,
            word_count,
            rng: setup.rng.clone(),
            sentence_words: 0,
            words_to_look_up: 0,
            spans_left: 0,
            pool_offset: 0,
        }
    }

    /// Emits a search for a word in the balanced tree, and the copy of its expression into the sentence's pool.
    fn emit_word_search(&mut self, out: &mut AccessEmitter) {
        // A few words make up most of a text, and one in sixteen is drawn from all words.
        let rank = if self.rng.draw_below(16) == 0 {
            self.rng.draw_below(self.word_count)
        } else {
            self.rng.draw_skewed(self.word_count)
        };
        let word = scatter(rank, self.word_count);
        let (mut low, mut high) = (0, self.word_count);
        while low < high {
            let middle = (low + high) / 2;
            // Tree nodes lie in the order in which the dictionary was read, scattered relative to the alphabet.
            let node = self
                .dictionary
                .element_address(scatter(middle, self.word_count), WORD_BYTES);
            out.load_dependent(node);
            out.load(node + 16);
            if middle == word {
                break;
            }

            if middle < word {
                low = middle + 1
            } else {
                high = middle
            }
        }

        let blocks = self.expressions.bytes / 256;
        let expression = self.expressions.element_address(
            (word * blocks + self.rng.draw_below(self.word_count)) / self.word_count,
            256,
        );
        for offset in (0..256).step_by(16) {
            out.load(expression + offset);
            self.pool_offset = (self.pool_offset + 16) % (self.expressions.bytes.min(64 << 10));
            out.store(self.expressions.base + self.pool_offset);
        }
    }

    /// Emits the matching of one span's pieces: probes the memo table and follows the chain.
    fn emit_span_matching(&mut self, out: &mut AccessEmitter) {
        // A sentence uses a part of the table in proportion to its length. The recursion over a span's words requests
        // the spans that it has just entered again; one in 32 is drawn from all, as in the recorded parser of the same
        // grammar.
        let used_spans = ((self.table.bytes / 32) * self.sentence_words / 40).max(1);
        let recent_spans = used_spans.min(RECENT_SPANS);
        let slot = match self.rng.draw_below(32) {
            0 => self.rng.draw_below(used_spans),
            _ => {
                out.work_done * RECENT_SPANS % (used_spans - recent_spans + 1)
                    + self.rng.draw_skewed(recent_spans)
            }
        };

        for link in 0..1 + self.rng.draw_below(3) {
            let entry = self
                .table
                .element_address((slot + link * 97) % (self.table.bytes / 32), 32);
            if link == 0 {
                out.load(entry)
            } else {
                out.load_dependent(entry)
            }
            out.load(entry + 8);
            out.load(entry + 16);
        }

        if self.rng.draw_below(4) == 0 {
            out.store(self.table.element_address(slot, 32) + 24);
        }
    }
}

impl WorkloadKernel for LinkParser {
    fn step(&mut self, out: &mut AccessEmitter) {
        if self.spans_left == 0 {
            self.sentence_words = 4 + self.rng.draw_below(37);
            self.words_to_look_up = self.sentence_words;
            // The number of spans per word is pruned such that the fraction of look-ups is that of the recorded
            // program.
            self.spans_left = self.sentence_words * self.sentence_words * self.sentence_words / 5;
            out.work_done += 1;
        }
        if self.words_to_look_up > 0 {
            out.enter_function(self.words_to_look_up as u32 % 16);
            self.emit_word_search(out);
            self.words_to_look_up -= 1;
            return;
        }

        for _ in 0..self.spans_left.min(8) {
            out.enter_function(16 + self.rng.draw_function(48));
            self.emit_span_matching(out);
        }
        self.spans_left -= self.spans_left.min(8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are the drawn functions as large as the measured ones (369 bytes on average, half of all code in functions of
    /// more than 1004 bytes, a tenth in functions of more than 13 231)?
    #[test]
    fn drawn_functions_are_as_large_as_measured_ones() {
        const DRAWS: u32 = 400_000;
        let sizes: Vec<f64> = (0..DRAWS)
            .map(|k| code_bytes((f64::from(k) + 0.5) / f64::from(DRAWS)))
            .collect();
        assert!(sizes.is_sorted());
        let total: f64 = sizes.iter().sum();
        let is_near = |size: f64, reference: f64| (size / reference - 1.0).abs() < 0.15;
        assert!(
            is_near(total / f64::from(DRAWS), 369.0),
            "{}",
            total / f64::from(DRAWS)
        );
        let by_code = |share: f64| {
            let mut sum = 0.0;
            let middle = sizes.iter().find(|&&size| {
                sum += size;
                sum >= share * total
            });
            *middle.expect("shares are below one")
        };
        for (share, measured) in [
            (0.1, 156.0),
            (0.25, 383.0),
            (0.5, 1004.0),
            (0.75, 5363.0),
            (0.9, 13_231.0),
        ] {
            let size = by_code(share);
            assert!(
                is_near(size, measured),
                "{share} of the code: {size} instead of {measured}"
            );
        }
    }
}
