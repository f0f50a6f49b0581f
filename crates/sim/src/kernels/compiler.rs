//! gcc and parser: many small allocations, and a dictionary with memoised search.
//!
//! Method, gcc: functions of widely varying size are read one by one; each becomes a chain of small nodes allocated in a
//! row, with operands pointing back into the function; two dozen passes walk it, each with code of its own, and look
//! names up in a symbol table; then the function's memory is given up and the allocator moves on. Method, parser: each
//! word of a sentence is searched in a tree of words; then all spans of the sentence are matched through a hash table of
//! partial results, whose chains are followed.

use cachemate_core::Turn;

use super::out::Out;
use super::random::{Rng, mix, scale, scatter};
use super::registry::ProgramSpec;
use super::setup::{Kernel, Region, Setup, Users};
use super::{Code, Pace};

pub(super) const PROGRAMS: &[ProgramSpec] = &[
    ProgramSpec {
        name: "gcc",
        stands_for: "SPEC CPU2000 176.gcc",
        algorithm: "compiler: small nodes allocated per function, two dozen passes over them, symbol table",
        footprint_bytes: 155_000_000,
        footprint_source: "Henning 2000: 155 MB resident",
        pace: Pace { instructions_per_access: 2.6, stack_per_access: 0.9 },
        pace_source: "Hennessy & Patterson 3rd ed., Fig. 2.32 (gcc: 25.1 % loads, 13.2 % stores)",
        code: Code { functions: 1600, function_instr: 96 },
        code_source: "estimate: 600 KB of passes in use (largest code of the suite)",
        phases: "passes over one function, then the next; large functions now and then",
        unit: "functions compiled",
        threads: (1, 1),
        make: |setup| setup.single(Compiler::new),
    },
    ProgramSpec {
        name: "parser",
        stands_for: "SPEC CPU2000 197.parser",
        algorithm: "link grammar: dictionary tree, memoised matching of all spans of a sentence",
        footprint_bytes: 37_000_000,
        footprint_source: "Henning 2000: 37 MB resident",
        pace: Pace { instructions_per_access: 2.8, stack_per_access: 1.2 },
        pace_source: "Hennessy & Patterson 3rd ed., Fig. 2.32 (integer: about 36 % loads and stores)",
        code: Code { functions: 64, function_instr: 56 },
        code_source: "estimate: count, prune and dictionary routines",
        phases: "dictionary look-ups, then matching, sentence by sentence",
        unit: "sentences",
        threads: (1, 1),
        make: |setup| setup.single(LinkParser::new),
    },
];

const NODE_BYTES: u64 = 48;
const PASSES: u32 = 24;

struct Compiler {
    heap: Region,
    symbols: Region,
    rng: Rng,
    /// The function at hand: first node, nodes, pass, next node.
    first: u64,
    nodes: u64,
    pass: u32,
    next: u64,
    salt: u64,
    functions: u64,
}

impl Compiler {
    fn new(setup: &mut Setup) -> Self {
        let bytes = setup.data_bytes();
        let symbols = setup.region("symbol table", (2 << 20).min(bytes / 8), Users::All);
        let heap = setup.region("heap", bytes - symbols.bytes, Users::All);
        let mut rng = setup.rng.clone();
        let salt = rng.bits();
        let mut compiler = Compiler { heap, symbols, rng, first: 0, nodes: 0, pass: 0, next: 0, salt, functions: 0 };
        compiler.read_function();
        compiler
    }

    fn capacity(&self) -> u64 {
        self.heap.bytes / NODE_BYTES
    }

    /// Sizes from 4 KB to about a thirtieth of the heap; larger ones are rarer (the smaller of two doublings drawn).
    fn read_function(&mut self) {
        let largest = (self.capacity() / 30).max(128);
        let doublings = 64 - u64::from(largest.leading_zeros()) - 6;
        let scale_bits = self.rng.below(doublings).min(self.rng.below(doublings));
        let after = self.first + self.nodes;
        self.nodes = (96u64 << scale_bits).min(largest);
        self.nodes += self.rng.below(self.nodes / 2);
        self.first = if after + self.nodes <= self.capacity() { after } else { 0 };
        self.nodes = self.nodes.min(self.capacity() - self.first);
    }

    fn node(&self, index: u64) -> u64 {
        self.heap.at(self.first + index, NODE_BYTES)
    }

    /// Reading: the node is allocated and filled, its name looked up.
    fn build(&mut self, index: u64, out: &mut Out) {
        let node = self.node(index);
        for word in 0..NODE_BYTES / 8 {
            out.store(node + word * 8);
        }
        if index.is_multiple_of(4) {
            let buckets = self.symbols.bytes / 64;
            let symbol = self.symbols.at(self.rng.skewed(buckets), 64);
            out.load(symbol);
            out.load(symbol + 24);
            out.chase(symbol + 40);
        }
    }

    fn visit(&self, index: u64, out: &mut Out) {
        let node = self.node(index);
        out.load(node + 8);
        let hash = mix(index ^ self.salt ^ u64::from(self.pass) << 40);
        // Operands: mostly just before, one in eight anywhere in the function.
        let back = if hash & 7 == 0 { scale(hash, index + 1) } else { scale(hash, 24.min(index + 1)) };
        out.load(node + 16);
        out.chase(self.node(index - back));
        out.load(self.node(index - back) + 8);
        if hash & 0x30 == 0 {
            out.store(node + 24);
        }
        out.load(node);
    }
}

impl Kernel for Compiler {
    fn step(&mut self, out: &mut Out) -> Turn {
        let end = (self.next + 32).min(self.nodes);
        let own = out.functions() / PASSES;
        for index in self.next..end {
            if index.is_multiple_of(4) {
                // Each pass has functions of its own, chosen by the node's kind: few kinds are frequent.
                out.enter(self.pass * own + self.rng.function(u64::from(own)));
            }
            if self.pass == 0 { self.build(index, out) } else { self.visit(index, out) }
        }
        self.next = end;
        if end == self.nodes {
            self.next = 0;
            self.pass += 1;
            if self.pass == PASSES {
                self.pass = 0;
                self.functions += 1;
                self.read_function();
            }
        }
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.functions as f64
    }
}

const WORD_BYTES: u64 = 64;

struct LinkParser {
    dictionary: Region,
    expressions: Region,
    table: Region,
    words: u64,
    rng: Rng,
    length: u64,
    looked_up: u64,
    spans: u64,
    pool: u64,
    sentences: u64,
}

impl LinkParser {
    fn new(setup: &mut Setup) -> Self {
        let bytes = setup.data_bytes();
        // 60 000 words in trees; their connector expressions; the memo table of one sentence.
        let dictionary = setup.region("word trees", bytes / 8, Users::All);
        let table = setup.region("memo table", (1 << 20).min(bytes / 8), Users::All);
        let expressions = setup.region("expressions", bytes - dictionary.bytes - table.bytes, Users::All);
        let words = dictionary.bytes / WORD_BYTES;
        let rng = setup.rng.clone();
        LinkParser {
            dictionary,
            expressions,
            table,
            words,
            rng,
            length: 0,
            looked_up: 0,
            spans: 0,
            pool: 0,
            sentences: 0,
        }
    }

    /// Searches a word in the balanced tree, then copies its expression into the sentence's pool.
    fn look_up(&mut self, out: &mut Out) {
        // Few words make most of a text; one in sixteen is any word.
        let rank = if self.rng.below(16) == 0 { self.rng.below(self.words) } else { self.rng.skewed(self.words) };
        let word = scatter(rank, self.words);
        let (mut low, mut high) = (0, self.words);
        while low < high {
            let middle = (low + high) / 2;
            // Tree nodes lie in the order the dictionary was read, scattered against the alphabet.
            let node = self.dictionary.at(scatter(middle, self.words), WORD_BYTES);
            out.chase(node);
            out.load(node + 16);
            if middle == word {
                break;
            }
            if middle < word { low = middle + 1 } else { high = middle }
        }
        let blocks = self.expressions.bytes / 256;
        let expression = self.expressions.at((word * blocks + self.rng.below(self.words)) / self.words, 256);
        for offset in (0..256).step_by(16) {
            out.load(expression + offset);
            self.pool = (self.pool + 16) % (self.expressions.bytes.min(64 << 10));
            out.store(self.expressions.base + self.pool);
        }
    }

    /// Matches the pieces of one span: probes the memo table and follows the chain.
    fn span(&mut self, out: &mut Out) {
        // Short spans recur within the sentence; a sentence uses a part of the table in proportion to its length.
        let used = (self.table.bytes / 32) * self.length / 40;
        let slot = self.rng.skewed(used.max(1));
        for link in 0..1 + self.rng.below(3) {
            let entry = self.table.at((slot + link * 97) % (self.table.bytes / 32), 32);
            if link == 0 {
                out.load(entry)
            } else {
                out.chase(entry)
            }
            out.load(entry + 8);
            out.load(entry + 16);
        }
        if self.rng.below(4) == 0 {
            out.store(self.table.at(slot, 32) + 24);
        }
    }
}

impl Kernel for LinkParser {
    fn step(&mut self, out: &mut Out) -> Turn {
        if self.spans == 0 {
            self.length = 4 + self.rng.below(37);
            self.looked_up = self.length;
            self.spans = self.length * self.length * self.length / 2;
            self.sentences += 1;
        }
        if self.looked_up > 0 {
            out.enter(self.looked_up as u32 % 16);
            self.look_up(out);
            self.looked_up -= 1;
            return Turn::More;
        }
        for _ in 0..self.spans.min(8) {
            out.enter(16 + self.rng.function(48));
            self.span(out);
        }
        self.spans -= self.spans.min(8);
        Turn::More
    }

    fn progress(&self) -> f64 {
        self.sentences as f64
    }
}
