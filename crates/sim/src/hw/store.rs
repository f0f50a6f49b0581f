//! The tags of one cache: sets, replacement, way masks, and the MESI state, owner and sharers of
//! each line.
//!
//! There are tens of caches with millions of lines, which are looked up a hundred million times a
//! second, so what counts is how many lines of the *host's* caches a look-up touches. Each line
//! takes twelve bytes, stored set by set (tags, then the rest, then ages or predictions of reuse;
//! random replacement has none), and the state needed for a hit is stored together. Zero means
//! absent, so that the host commits memory only for sets that were used.
//!
//! For example, an L3 of 32 MiB has 524,288 lines and takes 6 MiB here. The sixteen tags of a set
//! fill one line of the host, and are compared with a few vector instructions.
//!
//! Ways keep their position, because way masks need it. LRU is therefore an age per line, from a
//! clock of the cache which is renumbered before it could wrap, and not the order of the lines,
//! which would have to be moved at every hit. In a virtually indexed cache, the set's upper bits
//! are those of the page (`page_index`). A tag is the line number without its set bits (if the
//! number of sets is a power of two), plus one; set and tag together restore the line number when
//! the line leaves.

use cachemate_core::{CacheSpec, ReplacementPolicy, SplitMix64};

use super::core_kind;
use super::host_prefetch::{HOST_LINE_WORDS, prefetch};
use super::page_index::SetBits;
use super::rrip;
use super::scan::{MinAgeScan, equal_4, equal_mask, find_tag};

/// MESI states. Invalid lines are absent.
pub(crate) const SHARED: u32 = 1;
pub(crate) const EXCLUSIVE: u32 = 2;
pub(crate) const MODIFIED: u32 = 3;
const STATE_MASK: u32 = 3;
/// The line's data is still on its way; the pending table has the tick of its arrival.
pub(crate) const PENDING: u32 = 4;
/// A prefetcher brought the line, and no demand access has used it yet.
pub(crate) const PREFETCHED: u32 = 8;
/// A hit on a line with one of these bits takes the slow path.
pub(crate) const SLOW_PATH_BITS: u32 = PENDING | PREFETCHED;
const SHARERS_SHIFT: u32 = 4;
/// Number of bits for children that may hold the line (or for sectors, in a victim cache). If there are more children,
/// they share bits.
pub(crate) const SHARER_BITS: u32 = 12;
pub(crate) const ALL_SHARERS: u32 = (1 << SHARER_BITS) - 1;
const OWNER_SHIFT: u32 = 16;

/// The metadata of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LineMeta(pub u32);

impl LineMeta {
    pub fn new(state: u32, sharers: u32, owner: u16) -> Self {
        LineMeta(state | sharers << SHARERS_SHIFT | u32::from(owner) << OWNER_SHIFT)
    }
    #[inline]
    pub fn state(self) -> u32 {
        self.0 & STATE_MASK
    }
    pub fn with_state(self, state: u32) -> Self {
        LineMeta(self.0 & !STATE_MASK | state)
    }
    /// Metadata after a hit by a store or a load. There is no branch, because `MODIFIED` has all
    /// bits of the state.
    #[inline]
    pub fn after_hit(self, is_store: bool) -> Self {
        LineMeta(self.0 | (MODIFIED * u32::from(is_store)))
    }
    /// Whether an access affects more than this cache: a fill to wait for, a prefetch's first use,
    /// or a store to a line that others may have.
    #[inline]
    pub fn needs_slow_path(self, is_store: bool, writes_through: bool) -> bool {
        (self.0 & SLOW_PATH_BITS != 0) | (is_store & (writes_through | (self.state() == SHARED)))
    }
    pub fn sharers(self) -> u32 {
        self.0 >> SHARERS_SHIFT & ALL_SHARERS
    }
    pub fn with_sharers(self, sharers: u32) -> Self {
        LineMeta(self.0 & !(ALL_SHARERS << SHARERS_SHIFT) | sharers << SHARERS_SHIFT)
    }
    pub fn owner(self) -> u16 {
        (self.0 >> OWNER_SHIFT) as u16
    }
}

/// A line that was evicted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvictedLine {
    pub line: u64,
    pub meta: LineMeta,
}

/// The position of each line, and its tag.
#[derive(Clone, Copy)]
pub(crate) struct TagLayout {
    ways: usize,
    words_per_set: usize,
    /// Index at which a line of the host's caches begins, so that sets straddle fewer of them.
    first_word: usize,
    /// Number of bits of the line number that the set determines: none if the number of sets is not a power of two.
    tag_shift: u32,
    /// Masks of the set's bits: those that are low bits of the line, and those that lie `high_shift` further up (of the
    /// virtual page).
    low_mask: u64,
    high_mask: u64,
    high_shift: u32,
    /// Whether bits alone do not determine the set: the number of sets is not a power of two, or a hash selects the
    /// slice.
    needs_division_or_hash: bool,
    sets: u64,
    slices: u64,
}

impl TagLayout {
    fn new(spec: &CacheSpec, set_bits: Option<SetBits>) -> Self {
        let (sets, slices, ways) = (
            spec.sets_per_slice(),
            u64::from(spec.slices),
            spec.ways as usize,
        );
        let mask = if sets.is_power_of_two() { sets - 1 } else { 0 };
        let page_mask = set_bits.map_or(mask, |bits| (1 << bits.line_bits_within_page) - 1);
        TagLayout {
            ways,
            words_per_set: if spec.replacement == ReplacementPolicy::Random {
                2 * ways
            } else {
                3 * ways
            },
            first_word: 0,
            tag_shift: TagStore::tag_shift(spec, set_bits),
            low_mask: page_mask,
            high_mask: mask & !page_mask,
            high_shift: set_bits.map_or(0, |bits| bits.page_bits_shift),
            needs_division_or_hash: set_bits.is_none() && (slices > 1 || !sets.is_power_of_two()),
            sets,
            slices,
        }
    }

    #[inline(always)]
    fn tag_of(&self, line: u64) -> u32 {
        (line >> self.tag_shift) as u32 + 1
    }

    /// Low line bits select the set, so that page colors partition the sets; a hash of all bits
    /// selects the slice.
    #[inline(always)]
    fn set_of(&self, line: u64) -> u64 {
        if self.needs_division_or_hash {
            self.set_by_division_and_hash(line)
        } else {
            line & self.low_mask | line >> self.high_shift & self.high_mask
        }
    }

    fn set_by_division_and_hash(&self, line: u64) -> u64 {
        let set = if self.sets.is_power_of_two() {
            line & (self.sets - 1)
        } else {
            line % self.sets
        };
        let hash = (line / 2).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        ((hash * self.slices) >> 32) * self.sets + set
    }

    #[inline(always)]
    fn set_start(&self, line: u64) -> usize {
        self.first_word + self.set_of(line) as usize * self.words_per_set
    }

    #[inline(always)]
    fn find_way(&self, words: &[u32], base: usize, tag: u32) -> Option<usize> {
        let words = &words[base..base + self.ways];
        if let Ok(four) = words.try_into() {
            let mask = equal_4(four, tag);
            return (mask != 0).then(|| mask.trailing_zeros() as usize);
        }
        match *words {
            [first, second] if first == tag || second == tag => Some(usize::from(first != tag)),
            [_, _] => None,
            _ => find_tag(words, tag),
        }
    }

    #[inline(always)]
    fn find(&self, words: &[u32], line: u64) -> Option<usize> {
        let base = self.set_start(line);
        self.find_way(words, base, self.tag_of(line))
            .map(|way| base + way)
    }

    /// Points the tree away from a way. Tree bits are stored in place of the ages: node 1 is the root, the children of
    /// n are 2n and 2n+1; a bit shows which half was *not* used last.
    fn record_tree_use(&self, words: &mut [u32], line: u64, tag_index: usize) {
        let base = self.set_start(line);
        let mut node = tag_index - base + self.ways;
        while node > 1 {
            words[base + 2 * self.ways + node / 2] = u32::from(node & 1 == 0);
            node /= 2;
        }
    }
}

pub(crate) struct TagStore {
    layout: TagLayout,
    replacement: ReplacementPolicy,
    /// From the layout's `first_word` on, `words_per_set` words for each set: tags, metas, ages (or tree bits), with
    /// `ways` of each.
    words: Vec<u32>,
    min_age_scan: MinAgeScan,
    clock: u32,
    random: SplitMix64,
    duel: rrip::SetDuel,
}

impl TagStore {
    pub fn new(spec: &CacheSpec, set_bits: Option<SetBits>, seed: u64) -> Self {
        let layout = TagLayout::new(spec, set_bits);
        let set_count = (layout.sets * layout.slices) as usize;
        let words = vec![0; set_count * layout.words_per_set + HOST_LINE_WORDS];
        let first_word = words
            .as_ptr()
            .align_offset(4 * HOST_LINE_WORDS)
            .min(HOST_LINE_WORDS);

        TagStore {
            layout: TagLayout {
                first_word,
                ..layout
            },
            replacement: spec.replacement,
            words,
            min_age_scan: MinAgeScan::for_ways(layout.ways),
            clock: 0,
            random: SplitMix64::new(seed),
            duel: rrip::SetDuel::default(),
        }
    }

    /// Line bits that tags omit.
    pub fn tag_shift(spec: &CacheSpec, set_bits: Option<SetBits>) -> u32 {
        if let Some(bits) = set_bits {
            return bits.line_bits_within_page;
        }
        let sets = spec.sets_per_slice();
        if sets.is_power_of_two() {
            sets.trailing_zeros()
        } else {
            0
        }
    }

    /// Handles an access that affects only this cache: its state, and its place in the order of use. For any other
    /// access, nothing is done, and the error contains the line's position, if it is present. `shape` is that of the
    /// cache.
    #[inline(always)]
    pub fn record_hit(
        &mut self,
        line: u64,
        is_store: bool,
        writes_through: bool,
        shape: usize,
    ) -> Result<(), Option<usize>> {
        let is_lru = !core_kind::is_random(shape);
        if shape == core_kind::ANY_SHAPE || (is_lru && self.clock == u32::MAX) {
            return self.record_general_hit(line, is_store, writes_through);
        }

        let (layout, ways) = (&self.layout, core_kind::ways_of_shape(shape));
        let words_per_set = if is_lru { 3 * ways } else { 2 * ways };
        let set = (line & layout.low_mask | line >> layout.high_shift & layout.high_mask) as usize;
        let base = layout.first_word + set * words_per_set;
        let words = &mut self.words[base..base + words_per_set];
        let mask = equal_mask(&words[..ways], layout.tag_of(line));
        if mask == 0 {
            return Err(None);
        }

        let way = mask.trailing_zeros() as usize % ways;
        let meta = LineMeta(words[ways + way]);
        if meta.needs_slow_path(is_store, writes_through) {
            return Err(Some(base + way));
        }
        words[ways + way] = meta.after_hit(is_store).0;
        if is_lru {
            self.clock += 1;
            words[2 * ways + way] = self.clock;
        }

        Ok(())
    }

    #[inline(never)]
    fn record_general_hit(
        &mut self,
        line: u64,
        is_store: bool,
        writes_through: bool,
    ) -> Result<(), Option<usize>> {
        let tag_index = self.find(line);
        let Some(hit_tag_index) = tag_index.filter(|&index| {
            !self
                .line_meta(index)
                .needs_slow_path(is_store, writes_through)
        }) else {
            return Err(tag_index);
        };
        self.set_meta(
            hit_tag_index,
            self.line_meta(hit_tag_index).after_hit(is_store),
        );
        self.touch(line, hit_tag_index);
        Ok(())
    }

    /// The line with this tag in the set of another line, which may also be given by its set.
    #[inline(always)]
    fn line_of(&self, tag: u32, set_line: u64) -> u64 {
        (u64::from(tag) - 1) << self.layout.tag_shift
            | set_line & ((1 << self.layout.tag_shift) - 1)
    }

    /// Sets of all slices together.
    pub fn total_sets(&self) -> u64 {
        self.layout.sets * self.layout.slices
    }

    /// See [`TagLayout::set_of`].
    #[inline(always)]
    pub fn set_of(&self, line: u64) -> u64 {
        self.layout.set_of(line)
    }

    /// The index of the line's tag word, which the functions below take. The replacement state does
    /// not change.
    #[inline(always)]
    pub fn find(&self, line: u64) -> Option<usize> {
        self.layout.find(&self.words, line)
    }

    /// Hints to the host that the line's set will be read.
    #[inline(always)]
    pub fn prefetch_host_set(&self, line: u64) {
        let base = self.layout.set_start(line);
        prefetch(&self.words[base..base + self.layout.words_per_set]);
    }

    #[inline(always)]
    pub fn line_meta(&self, tag_index: usize) -> LineMeta {
        LineMeta(self.words[tag_index + self.layout.ways])
    }

    #[inline(always)]
    pub fn set_meta(&mut self, tag_index: usize, meta: LineMeta) {
        self.words[tag_index + self.layout.ways] = meta.0;
    }

    /// The line becomes the most recent of its set; under random replacement, nothing changes.
    #[inline(always)]
    pub fn touch(&mut self, line: u64, tag_index: usize) {
        match self.replacement {
            ReplacementPolicy::Lru => {
                if self.clock == u32::MAX {
                    self.renumber_ages();
                }
                self.clock += 1;
                self.words[tag_index + 2 * self.layout.ways] = self.clock;
            }
            ReplacementPolicy::TreePlru => {
                self.layout
                    .record_tree_use(&mut self.words, line, tag_index)
            }
            ReplacementPolicy::Srrip | ReplacementPolicy::Drrip => {
                self.words[tag_index + 2 * self.layout.ways] = rrip::NEAR;
            }
            ReplacementPolicy::Random => {}
        }
    }

    /// Makes the line at `tag_index`, which was just inserted, the most recent of its set, or one that its policy
    /// expects later.
    #[inline(always)]
    fn place(&mut self, line: u64, tag_index: usize) {
        let prediction = match self.replacement {
            ReplacementPolicy::Srrip => rrip::LONG,
            ReplacementPolicy::Drrip => {
                let set = (tag_index - self.layout.first_word) / self.layout.words_per_set;
                let sets = self.total_sets();
                self.duel.insertion(set as u64, sets, &mut self.random)
            }
            _ => return self.touch(line, tag_index),
        };
        self.words[tag_index + 2 * self.layout.ways] = prediction;
    }

    /// An allowed way of a full set whose line is expected last. All predictions of the allowed
    /// ways are raised until one is.
    fn choose_rrip_victim(&mut self, base: usize, is_allowed: impl Fn(usize) -> bool) -> usize {
        let predictions = &mut self.words[base + 2 * self.layout.ways..base + 3 * self.layout.ways];
        let allowed = || (0..predictions.len()).filter(|&way| is_allowed(way));
        let latest = allowed().map(|way| predictions[way]).max().unwrap_or(0);
        let victim = allowed()
            .find(|&way| predictions[way] == latest)
            .unwrap_or(0);
        let raise = rrip::DISTANT.saturating_sub(latest);
        for (way, prediction) in predictions.iter_mut().enumerate() {
            if is_allowed(way) {
                *prediction += raise;
            }
        }
        victim
    }

    /// The lines of every set get the ages 1, 2, ... in their present order, so that the clock can
    /// start again.
    #[cold]
    fn renumber_ages(&mut self) {
        for set in self.words[self.layout.first_word..].chunks_exact_mut(self.layout.words_per_set)
        {
            let (tags, metas_and_ages) = set.split_at_mut(self.layout.ways);
            let ages = &mut metas_and_ages[self.layout.ways..];
            let mut ways_by_age: Vec<usize> = (0..self.layout.ways)
                .filter(|&way| tags[way] != 0)
                .collect();
            ways_by_age.sort_by_key(|&way| ages[way]);
            ways_by_age
                .iter()
                .zip(1..)
                .for_each(|(&way, age)| ages[way] = age);
        }
        self.clock = self.layout.ways as u32 + 1;
    }

    fn choose_tree_victim(&self, base: usize, is_allowed: impl Fn(usize) -> bool) -> usize {
        let has_allowed_leaf = |mut low_node: usize, mut high_node: usize| {
            while low_node < self.layout.ways {
                (low_node, high_node) = (2 * low_node, 2 * high_node + 1);
            }
            (low_node - self.layout.ways..=high_node - self.layout.ways).any(&is_allowed)
        };
        let mut node = 1;
        while node < self.layout.ways {
            let child = 2 * node + self.words[base + 2 * self.layout.ways + node] as usize;
            node = if has_allowed_leaf(child, child) {
                child
            } else {
                child ^ 1
            };
        }
        node - self.layout.ways
    }

    /// The way with the smallest age under LRU. An absent line has age 0, so its way comes first.
    #[inline(always)]
    fn oldest_way(&self, base: usize) -> usize {
        self.min_age_scan
            .oldest_way(&self.words[base + 2 * self.layout.ways..base + 3 * self.layout.ways])
    }

    /// An empty allowed way, otherwise one by policy. `mask` of `None` allows all ways.
    #[inline]
    fn choose_victim(&mut self, base: usize, mask: Option<u64>) -> usize {
        if let Some(mask) = mask {
            return self.choose_masked_victim(base, mask);
        }
        if self.replacement == ReplacementPolicy::Lru {
            // Absent lines have age 0, so they go first.
            return self.oldest_way(base);
        }
        if let Some(empty_way) = self.layout.find_way(&self.words, base, 0) {
            return empty_way;
        }
        match self.replacement {
            ReplacementPolicy::Random => self.draw_way(self.layout.ways as u64),
            ReplacementPolicy::Srrip | ReplacementPolicy::Drrip => {
                self.choose_rrip_victim(base, |_| true)
            }
            _ => self.choose_tree_victim(base, |_| true),
        }
    }

    /// Does the same as [`TagStore::choose_victim`] for a known shape.
    #[inline(always)]
    fn choose_victim_of_shape(&mut self, base: usize, mask: Option<u64>, shape: usize) -> usize {
        let ways = core_kind::ways_of_shape(shape);
        if let Some(mask) = mask {
            return self.choose_masked_victim(base, mask);
        }
        if core_kind::is_random(shape) {
            let empty_ways = equal_mask(&self.words[base..base + ways], 0);
            return if empty_ways != 0 {
                empty_ways.trailing_zeros() as usize
            } else {
                self.draw_way(ways as u64)
            };
        }
        self.oldest_way(base)
    }

    fn choose_masked_victim(&mut self, base: usize, mask: u64) -> usize {
        let is_allowed = |way: &usize| mask >> way & 1 == 1;
        let words = &self.words[base..base + self.layout.words_per_set];
        if self.replacement == ReplacementPolicy::Lru {
            return (0..self.layout.ways)
                .filter(is_allowed)
                .min_by_key(|way| words[2 * self.layout.ways + way])
                .unwrap_or(0);
        }

        if let Some(empty_way) = (0..self.layout.ways)
            .filter(is_allowed)
            .find(|&way| words[way] == 0)
        {
            return empty_way;
        }

        match self.replacement {
            ReplacementPolicy::Random => {
                let allowed_index =
                    self.draw_way((0..self.layout.ways).filter(is_allowed).count() as u64);
                (0..self.layout.ways)
                    .filter(is_allowed)
                    .nth(allowed_index)
                    .unwrap_or(0)
            }
            ReplacementPolicy::Srrip | ReplacementPolicy::Drrip => {
                self.choose_rrip_victim(base, |way| is_allowed(&way))
            }
            _ => self.choose_tree_victim(base, |way| is_allowed(&way)),
        }
    }

    /// Uniform below `count`.
    fn draw_way(&mut self, count: u64) -> usize {
        self.random.draw_below(count) as usize
    }

    /// Inserts an absent line as the most recent one, and returns the evicted line.
    #[inline(always)]
    pub fn insert(
        &mut self,
        line: u64,
        meta: LineMeta,
        mask: Option<u64>,
        shape: usize,
    ) -> Option<EvictedLine> {
        let base = self.layout.set_start(line);
        let way = if shape == core_kind::ANY_SHAPE {
            self.choose_victim(base, mask)
        } else {
            self.choose_victim_of_shape(base, mask, shape)
        };
        let tag_index = base + way;
        let old_tag = self.words[tag_index];
        let evicted = (old_tag != 0).then(|| EvictedLine {
            line: self.line_of(old_tag, line),
            meta: self.line_meta(tag_index),
        });

        self.words[tag_index] = self.layout.tag_of(line);
        self.set_meta(tag_index, meta);
        if !core_kind::is_random(shape) {
            self.place(line, tag_index);
        }
        evicted
    }

    /// Whether ages alone decide the next victim.
    pub fn is_lru(&self) -> bool {
        self.replacement == ReplacementPolicy::Lru
    }

    /// The line that this one would displace, under LRU and without masks. `None` if there is none.
    pub fn next_victim(&self, line: u64) -> Option<EvictedLine> {
        let base = self.layout.set_start(line);
        let tag_index = base + self.oldest_way(base);
        let tag = self.words[tag_index];
        (tag != 0).then(|| EvictedLine {
            line: self.line_of(tag, line),
            meta: self.line_meta(tag_index),
        })
    }

    /// The way becomes empty; a modified line is not written back here.
    pub fn remove(&mut self, tag_index: usize) {
        self.words[tag_index] = 0;
        self.set_meta(tag_index, LineMeta(0));
        if self.replacement == ReplacementPolicy::Lru {
            self.words[tag_index + 2 * self.layout.ways] = 0;
        }
    }

    /// All lines that are present, set by set.
    #[cfg(test)]
    pub fn lines(&self) -> impl Iterator<Item = (u64, LineMeta)> + '_ {
        let set_count = self.total_sets() as usize;
        let sets = self.words[self.layout.first_word..]
            .chunks_exact(self.layout.words_per_set)
            .take(set_count)
            .enumerate();
        sets.flat_map(move |(index, set)| {
            let present_ways = (0..self.layout.ways).filter(move |&way| set[way] != 0);
            present_ways.map(move |way| {
                (
                    self.line_of(set[way], index as u64 % self.layout.sets),
                    LineMeta(set[way + self.layout.ways]),
                )
            })
        })
    }
}
