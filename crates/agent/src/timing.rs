//! Timing that shows whether lines of other pages evict a page's lines from the private cache.
//!
//! Prime and probe (Liu et al., S&P 2015) with one line per page: load the target, load one line of each page of a set,
//! and load the target again. The second load is slow only if at least as many pages of the set as the cache has ways
//! map to its sets. All lines are at the same offset in their pages, so the first-level cache loses the target every
//! time: the timing distinguishes the second level from the levels behind it.

use crate::layout::{PAGE_BYTES, ReferenceSetHeader};

/// Bytes of a cache line on every supported processor.
pub const LINE_BYTES: usize = 64;
const LINES_PER_PAGE: usize = PAGE_BYTES / LINE_BYTES;
/// Passes over the set after which the target is evicted; more than one, because replacement is rarely true LRU.
const PASS_COUNT: u32 = 2;

/// Can loads be timed on this processor?
pub const IS_SUPPORTED: bool = cfg!(target_arch = "x86_64");

#[cfg(target_arch = "x86_64")]
#[inline]
fn read_cycle_counter() -> u64 {
    let mut core = 0;
    // SAFETY: rdtscp and lfence exist wherever userfaultfd can move pages; only the local variable is written.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        let now = core::arch::x86_64::__rdtscp(&raw mut core);
        core::arch::x86_64::_mm_lfence();
        now
    }
}
#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn read_cycle_counter() -> u64 {
    0
}

#[inline]
unsafe fn load(address: *const u8) {
    // SAFETY: the caller's promise; volatile, so that the load happens.
    unsafe { core::ptr::read_volatile(address.cast::<u64>()) };
}

/// Cycles of the load of line `line` of `target`, after one line of each of `pages` was loaded.
///
/// # Safety
/// All pages are mapped and readable for [`PAGE_BYTES`], and remain so.
pub unsafe fn reload_cycles(
    target: *const u8,
    pages: impl Iterator<Item = *const u8> + Clone,
    line: usize,
) -> u64 {
    let offset = line % LINES_PER_PAGE * LINE_BYTES;

    // SAFETY: offsets stay inside the pages, which the caller promises are mapped.
    unsafe {
        load(target.add(offset));
        for _ in 0..PASS_COUNT {
            for page in pages.clone() {
                load(page.add(offset));
            }
        }

        // The measured time must not include the translation: a line half a page away is in another set, but on the
        // same page.
        load(target.add((offset + PAGE_BYTES / 2) % PAGE_BYTES));
        let start = read_cycle_counter();
        load(target.add(offset));
        read_cycle_counter() - start
    }
}

/// [`reload_cycles`] for several targets at once, at most [`BATCH_PAGES`]: one traversal of `pages`, which is the
/// expensive part, serves all of them. Targets are timed in an order without a pattern, because consecutive pages would
/// be prefetched.
///
/// # Safety
/// The conditions of [`reload_cycles`].
unsafe fn reload_each(
    targets: &[*const u8],
    pages: impl Iterator<Item = *const u8> + Clone,
    line: usize,
    mut record_cycles: impl FnMut(usize, u64),
) {
    let offset = line % LINES_PER_PAGE * LINE_BYTES;

    // SAFETY: offsets stay inside the pages, which the caller promises are mapped.
    unsafe {
        targets.iter().for_each(|target| load(target.add(offset)));
        for _ in 0..PASS_COUNT {
            pages.clone().for_each(|page| load(page.add(offset)));
        }

        for step in 0..BATCH_PAGES {
            let index =
                (step.reverse_bits() >> (usize::BITS - BATCH_PAGES.ilog2())) ^ (line % BATCH_PAGES);
            let Some(target) = targets.get(index) else {
                continue;
            };
            load(target.add((offset + PAGE_BYTES / 2) % PAGE_BYTES));
            let start = read_cycle_counter();
            load(target.add(offset));
            record_cycles(index, read_cycle_counter() - start);
        }
    }
}

/// Decides by Wald's sequential test whether reloads are slow, because a single reload may mislead. Replacement that is
/// not LRU sometimes keeps a line that should be evicted (measured: slow in 70 to 75 of 100 cases in which it should
/// be). A neighbor on the same core evicts a line that should stay in 1 to 5 of 100. So one slow reload weighs as much
/// as three fast ones.
pub fn is_slow(mut is_reload_slow: impl FnMut() -> bool) -> bool {
    const MAX_TESTS: u32 = 24;
    let mut score = 0;
    for _ in 0..MAX_TESTS {
        score += if is_reload_slow() { 3 } else { -1 };
        if score >= 8 || score <= -5 {
            break;
        }
    }
    score > 0
}

/// Maximum number of pages that [`ReferenceSet::classify_all`] classifies together: two per color on average, far from
/// filling a set.
pub const BATCH_PAGES: usize = 64;
/// Maximum number of tests for each side of each bit; most pages need three or four.
const MAX_ROUNDS: usize = 8;
/// Bits of a color number.
const COLOR_BITS: usize = crate::layout::MAX_COLORS.ilog2() as usize;

/// For each bit of one page's color, the votes for it and against it, weighted as in [`is_slow`].
#[derive(Clone, Copy, Default, Debug)]
struct Votes([i32; COLOR_BITS]);

impl Votes {
    const MIN_VOTES: i32 = 8;

    /// Counts a traversal of the colors that have this bit set or clear, which did or did not evict the page.
    fn record_traversal(&mut self, bit: usize, is_set: bool, is_slow: bool) {
        let weight = if is_slow { 3 } else { -1 };
        self.0[bit] += if is_set { weight } else { -weight };
    }

    fn is_settled(&self, bits: usize) -> bool {
        self.0[..bits]
            .iter()
            .all(|votes| votes.abs() >= Self::MIN_VOTES)
    }

    fn decode_color(&self, bits: usize) -> u32 {
        (0..bits).fold(0, |color, bit| color | u32::from(self.0[bit] > 0) << bit)
    }
}

/// Frames of known colors, as [`crate::layout`] describes the file.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceSet {
    file: *const u8,
    /// Pages of the file, by color and then by member.
    page_numbers: *const u32,
    colors: u32,
    frames_per_color: u32,
    /// A load that takes longer was served from behind the private cache.
    threshold_cycles: u64,
    line_index: usize,
}

/// Median times of hits and misses; their difference distinguishes colors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Calibration {
    /// Median time of a load that hits the private cache.
    pub hit_cycles: u64,
    /// Median time of a load after frames of its own color were loaded.
    pub miss_cycles: u64,
}

impl Calibration {
    /// Upper limit of hits; `None` if hits and misses cannot be distinguished.
    pub fn threshold_cycles(&self) -> Option<u64> {
        (self.miss_cycles >= self.hit_cycles + self.hit_cycles / 4 + 8)
            .then_some((self.hit_cycles + self.miss_cycles) / 2)
    }
}

const CALIBRATION_SAMPLES: usize = 64;

impl ReferenceSet {
    /// A reference set in a mapped file, not calibrated yet; `None` if the bytes are not a reference set, or refer to
    /// pages that do not exist.
    ///
    /// # Safety
    /// `file` points to `bytes` readable bytes that stay mapped as long as the reference set is used.
    pub unsafe fn new(file: *const u8, bytes: usize) -> Option<Self> {
        // SAFETY: the caller's promise.
        let content = unsafe { core::slice::from_raw_parts(file, bytes) };
        let header = ReferenceSetHeader::from_bytes(content)?;
        let table = content
            .get(ReferenceSetHeader::BYTES..ReferenceSetHeader::BYTES + 4 * header.table_len())?;
        let is_inside_file = |entry: &[u8]| {
            let page = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) as usize;
            page >= ReferenceSetHeader::PAGES && (page + 1) * PAGE_BYTES <= bytes
        };
        if !table.chunks_exact(4).all(is_inside_file) {
            return None;
        }

        let (colors, frames_per_color) = (header.colors, header.frames_per_color);
        Some(ReferenceSet {
            file,
            page_numbers: table.as_ptr().cast(),
            colors,
            frames_per_color,
            threshold_cycles: u64::MAX,
            line_index: 0,
        })
    }

    /// Number of frames of each color, 4 to 256.
    pub fn frames_per_color(&self) -> u32 {
        self.frames_per_color
    }

    /// Number of colors, 2 to [`crate::layout::MAX_COLORS`].
    pub fn colors(&self) -> u32 {
        self.colors
    }

    fn page_address(&self, index: u32) -> *const u8 {
        // SAFETY: callers stay below colors * frames_per_color, and `new` has checked every entry of the table, which
        // begins at a multiple of four bytes of a page.
        unsafe {
            self.file
                .add(self.page_numbers.add(index as usize).read() as usize * PAGE_BYTES)
        }
    }

    fn page_addresses(
        &self,
        colors: core::ops::Range<u32>,
    ) -> impl Iterator<Item = *const u8> + Clone + '_ {
        (colors.start * self.frames_per_color..colors.end * self.frames_per_color)
            .map(|index| self.page_address(index))
    }

    /// Measures the time of a hit and of a miss with the reference frames themselves. If they cannot be distinguished
    /// now, the previous threshold stays.
    pub fn calibrate(&mut self) -> Calibration {
        let (mut hit_samples, mut miss_samples) =
            ([0; CALIBRATION_SAMPLES], [0; CALIBRATION_SAMPLES]);
        for index in 0..CALIBRATION_SAMPLES {
            let color = index as u32 % self.colors;
            let other_color = (color + 1) % self.colors;
            let target = self.page_address(color * self.frames_per_color);
            let own_pages = (color * self.frames_per_color + 1
                ..(color + 1) * self.frames_per_color)
                .map(|index| self.page_address(index));
            // SAFETY: pages of the reference set.
            unsafe {
                hit_samples[index] = reload_cycles(
                    target,
                    self.page_addresses(other_color..other_color + 1),
                    index * 7 + 1,
                );
                miss_samples[index] = reload_cycles(target, own_pages, index * 7 + 1);
            }
        }
        hit_samples.sort_unstable();
        miss_samples.sort_unstable();
        let calibration = Calibration {
            hit_cycles: hit_samples[CALIBRATION_SAMPLES / 2],
            miss_cycles: miss_samples[CALIBRATION_SAMPLES / 2],
        };
        self.threshold_cycles = calibration
            .threshold_cycles()
            .unwrap_or(self.threshold_cycles);
        calibration
    }

    /// Maps every reference frame, so that no first touch is timed later. The rest of the file is holes, which a touch
    /// would fill.
    pub fn map_frames(&self) {
        // SAFETY: pages of the reference set.
        self.page_addresses(0..self.colors)
            .for_each(|page| unsafe { load(page) });
    }

    /// Addresses of the reference frames of one color.
    pub fn frames_of_color(&self, color: u32) -> impl Iterator<Item = *const u8> + Clone + '_ {
        self.page_addresses(color..color + 1)
    }

    /// A load that takes longer has left the private cache; [`u64::MAX`] until [`ReferenceSet::calibrate`] has
    /// distinguished hits from misses.
    pub fn threshold_cycles(&self) -> u64 {
        self.threshold_cycles
    }

    /// Do frames of these colors evict the page's lines?
    unsafe fn evicts(&mut self, page: *const u8, colors: core::ops::Range<u32>) -> bool {
        let (reference_set, mut line_index) = (*self, self.line_index);
        let is_evicted = is_slow(|| {
            line_index = line_index.wrapping_add(13);
            // SAFETY: the caller's promise for the page; the reference set owns its pages.
            let cycles = unsafe {
                reload_cycles(
                    page,
                    reference_set
                        .page_addresses(colors.clone())
                        .filter(|evictor| *evictor != page),
                    line_index,
                )
            };
            cycles > reference_set.threshold_cycles
        });
        self.line_index = line_index;
        is_evicted
    }

    /// Does the page have this color?
    ///
    /// # Safety
    /// The page is mapped and readable, and stays present meanwhile.
    pub unsafe fn has_color(&mut self, page: *const u8, color: u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.evicts(page, color..color + 1) }
    }

    /// The page's color: found by bisection, then verified against the remaining color and against its neighbor, which
    /// must not evict it; if every color evicts it, another program on this core does. `None` if three tries give no
    /// result (noise, or a frame that behaves like no reference frame).
    ///
    /// # Safety
    /// The conditions of [`ReferenceSet::has_color`].
    pub unsafe fn classify(&mut self, page: *const u8) -> Option<u32> {
        for _ in 0..3 {
            let (mut low, mut high) = (0, self.colors);
            while high - low > 1 {
                let middle = low.midpoint(high);
                // SAFETY: the caller's promise.
                if unsafe { self.evicts(page, low..middle) } {
                    high = middle;
                } else {
                    low = middle;
                }
            }

            // SAFETY: the caller's promise.
            if unsafe {
                self.has_color(page, low) && !self.has_color(page, (low + 1) % self.colors)
            } {
                return Some(low);
            }
        }

        None
    }

    /// [`ReferenceSet::classify`] for many pages, up to [`BATCH_PAGES`] at a time: do the colors whose number has a bit
    /// set evict them, or those whose number has it clear? A page of a reference color loses its line to one of the
    /// two, for each bit; a page that loses it to both or to neither gets no votes and is tested alone. `colors` is as
    /// long as `pages`.
    ///
    /// # Safety
    /// The conditions of [`ReferenceSet::has_color`], for each page.
    pub unsafe fn classify_all(&mut self, pages: &[*const u8], colors: &mut [Option<u32>]) {
        for (pages, colors) in pages
            .chunks(BATCH_PAGES)
            .zip(colors.chunks_mut(BATCH_PAGES))
        {
            // SAFETY: the caller's promise.
            unsafe { self.classify_batch(pages, colors) };
        }
    }

    unsafe fn classify_batch(&mut self, pages: &[*const u8], page_colors: &mut [Option<u32>]) {
        // For so few pages, testing each alone costs less.
        if pages.len() < 4 {
            for (page, page_class) in pages.iter().zip(page_colors) {
                // SAFETY: the caller's promise.
                *page_class = unsafe { self.classify(*page) };
            }
            return;
        }

        let bits = (u32::BITS - (self.colors - 1).leading_zeros()) as usize;
        let mut votes = [Votes::default(); BATCH_PAGES];
        let votes = &mut votes[..pages.len()];
        for _ in 0..MAX_ROUNDS {
            for traversal in 0..2 * bits {
                let (bit, is_set) = (traversal / 2, traversal % 2 == 1);
                // SAFETY: the caller's promise for the pages; the reference set owns its own.
                unsafe { self.test_bit(pages, bit, is_set, votes) };
            }
            // For the few that are left, testing each alone costs less.
            if votes.iter().filter(|votes| !votes.is_settled(bits)).count() <= pages.len() / 16 {
                break;
            }
        }

        for ((page, votes), page_color) in pages.iter().zip(votes).zip(page_colors) {
            let color = Some(votes.decode_color(bits))
                .filter(|color| votes.is_settled(bits) && *color < self.colors);
            // SAFETY: as above.
            *page_color = color.or_else(|| unsafe { self.classify(*page) });
        }
    }

    unsafe fn test_bit(
        &mut self,
        pages: &[*const u8],
        bit: usize,
        is_set: bool,
        votes: &mut [Votes],
    ) {
        let reference_set = *self;
        self.line_index = self.line_index.wrapping_add(13);
        let half_colors =
            (0..reference_set.colors).filter(|color| (color >> bit & 1 == 1) == is_set);
        let frames = half_colors.flat_map(|color| reference_set.page_addresses(color..color + 1));
        // SAFETY: the caller's promise.
        unsafe {
            reload_each(pages, frames, self.line_index, |page, taken_cycles| {
                votes[page].record_traversal(
                    bit,
                    is_set,
                    taken_cycles > reference_set.threshold_cycles,
                );
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// True in this number of 100 cases.
    fn percent_chance(mut state: u64) -> impl FnMut(u64) -> bool {
        move |percent| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % 100 < percent
        }
    }

    /// At the measured error rates: is the decision nearly always right, and made in a few tests?
    #[test]
    fn decisions_at_measured_error_rates_are_nearly_always_right() {
        let mut chance = percent_chance(1);
        let (mut missed, mut mistaken, mut trials) = (0, 0, 0);
        for _ in 0..10_000 {
            missed += u32::from(!is_slow(|| chance(72)));
            mistaken += u32::from(is_slow(|| {
                trials += 1;
                chance(3)
            }));
        }
        assert!(
            missed < 150 && mistaken < 20,
            "{missed} missed and {mistaken} mistaken of 10 000"
        );
        assert!(trials < 80_000, "{trials} questions for 10 000 answers");
    }

    /// At the measured error rates: do votes settle on the page's color in a few rounds, and on none if no reference
    /// frame, or every one, evicts the page?
    #[test]
    fn votes_settle_on_the_color() {
        let mut chance = percent_chance(7);
        let (mut wrong, mut settled, mut strays) = (0, 0, 0);
        for index in 0..10_000u32 {
            let (color, mut votes, mut stray) = (index % 32, Votes::default(), Votes::default());
            for _ in 0..MAX_ROUNDS {
                for ask in 0..10 {
                    let (bit, set) = (ask / 2, ask % 2 == 1);
                    let is_own_half = (color >> bit & 1 == 1) == set;
                    votes.record_traversal(bit, set, chance(if is_own_half { 72 } else { 3 }));
                    stray.record_traversal(bit, set, chance(3));
                }
            }

            settled += u32::from(votes.is_settled(5));
            wrong += u32::from(votes.is_settled(5) && votes.decode_color(5) != color);
            strays += u32::from(stray.is_settled(5));
        }

        assert!(
            settled > 9_500 && wrong < 10 && strays == 0,
            "{settled} settled, {wrong} wrong, {strays} strays"
        );
    }

    /// Are hits and misses that are too close rejected, and is the threshold between the two?
    #[test]
    fn a_threshold_is_between_hits_and_misses_or_is_rejected() {
        let calibrated = |hit_cycles, miss_cycles| {
            Calibration {
                hit_cycles,
                miss_cycles,
            }
            .threshold_cycles()
        };
        assert_eq!(calibrated(40, 120), Some(80));
        assert_eq!(calibrated(40, 50), None);
        assert_eq!(calibrated(40, 30), None);
    }
}
