//! Address spaces over colored frames: faults, shared segments, and pages that migrate while the
//! program runs (CP 4.4).
//!
//! A partition by page colors is changed by copying pages, and whether a policy may change its mind
//! depends on what that costs, so each page is moved one at a time at the machine's measured cost.
//! A process without colors gets any frame. A process with colors gets frames of its allowed colors
//! in turn; if none of them is free, it gets a frame of another color, and the fallback is counted,
//! because swapping would cost more.
//!
//! For example, a process with 1,000 pages on four of sixteen colors gets four more. Its pages
//! would overfill the old colors, so half of them move, every other one, because neighbors are used
//! together: 500 pages at 11,051 cycles are 5.5 million cycles. Taking the four colors back moves
//! the same number, as every page in a revoked color has to go.
//!
//! They move all at once, hottest first, when next touched, or never. Pages that several address
//! spaces share are not moved.

use cachemate_core::{IndexSet, PageMigration};

use super::frames::FrameAllocator;
use super::page_table::PageTable;

/// Pages that several address spaces map at the same virtual address.
#[derive(Clone, Debug)]
struct SharedSegment {
    first_page: u64,
    pages: u64,
    table: PageTable,
}

/// Number of contiguous frames requested at a time in a shared segment.
const SEGMENT_RUN_PAGES: u32 = 8;

/// The colors that a process may use, with the progress of moving its pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Coloring {
    pub allowed_colors: IndexSet,
    pub migration: PageMigration,
    /// Number of pages that were allocated, or had to stay, in a color that was not allowed; continued when the colors
    /// of the process change.
    pub fallback_pages: u64,
    pub moved_pages: u64,
    /// Pages still to be moved, the next one last; used by [`PageMigration::All`] and [`PageMigration::HotFirst`].
    pending_moves: Vec<u64>,
    /// Number of pages that had to be moved at the start.
    pub total_pages: u64,
    /// Whether touched marks are being collected to determine the order (hottest first).
    pub is_sampling: bool,
}

impl Coloring {
    /// Pages still to be moved.
    pub fn pending_pages(&self) -> u64 {
        self.pending_moves.len() as u64
    }
}

#[derive(Clone, Debug, Default)]
struct AddressSpace {
    table: PageTable,
    segments: Vec<usize>,
    coloring: Option<Coloring>,
    next_color: u32,
    pages_per_color: Vec<u64>,
    pages_per_node: Vec<u64>,
}

/// A page that has moved to another frame. Its translations must be dropped, and the lines of the old frame flushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MovedPage {
    pub process: usize,
    pub page: u64,
    pub old_frame: u32,
    pub frame: u32,
}

/// The result of looking up a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageLookup {
    Resident(u32),
    /// The page was not resident, and has been allocated in this frame.
    Fault(u32),
    /// This lookup has moved the page, because migration is lazy. Contains the new frame and the old one.
    Moved(u32, u32),
}

/// The memory of the machine, with all address spaces and frames.
pub struct VirtualMemory {
    pub frames: FrameAllocator,
    spaces: Vec<AddressSpace>,
    segments: Vec<SharedSegment>,
    /// Migrated pages with their old frames, which become free with the next call of
    /// [`VirtualMemory::take_moved_pages`].
    pages_to_flush: Vec<MovedPage>,
    /// Whether a page was needed when no frame was free.
    pub is_exhausted: bool,
}

impl VirtualMemory {
    pub fn new(frames: FrameAllocator) -> Self {
        VirtualMemory {
            frames,
            spaces: Vec::new(),
            segments: Vec::new(),
            pages_to_flush: Vec::new(),
            is_exhausted: false,
        }
    }

    /// Adds an empty address space, and returns its index.
    pub fn add_process(&mut self) -> usize {
        self.spaces.push(self.empty_space());
        self.spaces.len() - 1
    }

    fn empty_space(&self) -> AddressSpace {
        AddressSpace {
            pages_per_color: vec![0; self.frames.color_count() as usize],
            pages_per_node: vec![0; self.frames.node_count()],
            ..AddressSpace::default()
        }
    }

    /// Adds a segment of `pages` from virtual page `first_page` on, for several address spaces, and returns its index.
    pub fn add_segment(&mut self, first_page: u64, pages: u64) -> usize {
        self.segments.push(SharedSegment {
            first_page,
            pages,
            table: PageTable::default(),
        });
        self.segments.len() - 1
    }

    pub fn map_segment(&mut self, process: usize, segment: usize) {
        self.spaces[process].segments.push(segment);
    }

    fn segment_of(&self, process: usize, page: u64) -> Option<usize> {
        let contains_page = |segment: &SharedSegment| {
            (segment.first_page..segment.first_page + segment.pages).contains(&page)
        };
        self.spaces[process]
            .segments
            .iter()
            .copied()
            .find(|&segment| contains_page(&self.segments[segment]))
    }

    /// Allocates or moves the page, which is touched on `cpu`, if needed.
    ///
    /// If memory is exhausted, the frame is one that is in use, and [`VirtualMemory::is_exhausted`]
    /// is set; the run must then end.
    pub fn look_up(&mut self, process: usize, page: u64, cpu: u32) -> PageLookup {
        if let Some(segment) = self.segment_of(process, page) {
            return self.look_up_shared(process, segment, page, cpu);
        }
        if let Some(frame) = self.spaces[process].table.touch(page) {
            return match self.move_page_lazily(process, page, frame, cpu) {
                Some(new_frame) => PageLookup::Moved(new_frame, frame),
                None => PageLookup::Resident(frame),
            };
        }
        let frame = self.allocate_frame(process, cpu);
        self.spaces[process].table.map(page, frame);
        self.spaces[process].table.touch(page);
        self.count_page(process, frame);
        PageLookup::Fault(frame)
    }

    fn look_up_shared(
        &mut self,
        process: usize,
        segment: usize,
        page: u64,
        cpu: u32,
    ) -> PageLookup {
        if let Some(frame) = self.segments[segment].table.touch(page) {
            return PageLookup::Resident(frame);
        }
        // A group of pages is allocated at once in adjacent frames, as with bulk requests for shared memory.
        let run_pages = u64::from(SEGMENT_RUN_PAGES);
        let (first_page, page_count) = (
            self.segments[segment].first_page,
            self.segments[segment].pages,
        );
        let run_start = first_page + (page - first_page) / run_pages * run_pages;
        let fits_segment = run_start + run_pages <= first_page + page_count;
        let is_unmapped = (run_start..run_start + run_pages)
            .all(|page| self.segments[segment].table.frame(page).is_none());
        if fits_segment && is_unmapped {
            let allowed_colors = self.spaces[process]
                .coloring
                .as_ref()
                .map(|coloring| coloring.allowed_colors.clone());
            if let Some(run) = self
                .frames
                .take_run(cpu, SEGMENT_RUN_PAGES, allowed_colors.as_ref())
            {
                for step in 0..SEGMENT_RUN_PAGES {
                    self.segments[segment]
                        .table
                        .map(run_start + u64::from(step), run + step);
                }
            }
        }
        if self.segments[segment].table.frame(page).is_none() {
            let frame = self.allocate_frame(process, cpu);
            self.segments[segment].table.map(page, frame);
        }
        PageLookup::Fault(self.segments[segment].table.touch(page).unwrap_or(0))
    }

    fn allocate_frame(&mut self, process: usize, cpu: u32) -> u32 {
        let space = &mut self.spaces[process];
        let frame = match &mut space.coloring {
            None => self.frames.take_any(cpu),
            Some(coloring) => {
                let colored_frame =
                    self.frames
                        .take_colored(cpu, &coloring.allowed_colors, space.next_color);
                colored_frame
                    .inspect(|&frame| space.next_color = self.frames.color_of(frame) + 1)
                    .or_else(|| {
                        coloring.fallback_pages += 1;
                        self.frames.take_any(cpu)
                    })
            }
        };

        frame.unwrap_or_else(|| {
            self.is_exhausted = true;
            0
        })
    }

    fn move_page_lazily(&mut self, process: usize, page: u64, frame: u32, cpu: u32) -> Option<u32> {
        let coloring = self.spaces[process].coloring.as_ref()?;
        let is_wrong_color = !coloring
            .allowed_colors
            .contains(self.frames.color_of(frame));
        if coloring.migration != PageMigration::Lazy || !is_wrong_color {
            return None;
        }
        let new_frame = self.take_frame_of_allowed_color(process, cpu)?;
        self.remap(process, page, frame, new_frame);
        Some(new_frame)
    }

    fn take_frame_of_allowed_color(&mut self, process: usize, cpu: u32) -> Option<u32> {
        let space = &mut self.spaces[process];
        let allowed_colors = &space.coloring.as_ref()?.allowed_colors;
        let new_frame = self
            .frames
            .take_colored(cpu, allowed_colors, space.next_color)?;
        space.next_color = self.frames.color_of(new_frame) + 1;
        Some(new_frame)
    }

    fn count_page(&mut self, process: usize, frame: u32) {
        let space = &mut self.spaces[process];
        space.pages_per_color[self.frames.color_of(frame) as usize] += 1;
        space.pages_per_node[self.frames.node_of(frame) as usize] += 1;
    }

    fn remap(&mut self, process: usize, page: u64, old_frame: u32, new_frame: u32) {
        let space = &mut self.spaces[process];
        space.table.map(page, new_frame);
        space.pages_per_color[self.frames.color_of(old_frame) as usize] -= 1;
        space.pages_per_node[self.frames.node_of(old_frame) as usize] -= 1;
        if let Some(coloring) = &mut space.coloring {
            coloring.moved_pages += 1;
        }
        self.count_page(process, new_frame);
        self.pages_to_flush.push(MovedPage {
            process,
            page,
            old_frame,
            frame: new_frame,
        });
    }

    /// Pages that migrated since the last call. Their old frames are free from now on, so
    /// translations must be dropped and lines flushed before a task runs again.
    pub fn take_moved_pages(&mut self, cpu: u32) -> Vec<MovedPage> {
        let moved_pages = std::mem::take(&mut self.pages_to_flush);
        moved_pages
            .iter()
            .for_each(|page| self.frames.release_frame(cpu, page.old_frame));
        moved_pages
    }

    /// Sets the colors of a process; setting the same colors and migration again changes nothing.
    ///
    /// If the result is `true`, translations of all pages of the process must be dropped, so that touches are observed
    /// (lazy migration, hottest first).
    pub fn set_colors(
        &mut self,
        process: usize,
        allowed_colors: &IndexSet,
        migration: PageMigration,
    ) -> bool {
        let previous_coloring = self.spaces[process].coloring.take();
        if let Some(unchanged) = previous_coloring.as_ref().filter(|same_coloring| {
            same_coloring.allowed_colors == *allowed_colors && same_coloring.migration == migration
        }) {
            self.spaces[process].coloring = Some(unchanged.clone());
            return false;
        }

        let mut coloring = Coloring {
            allowed_colors: allowed_colors.clone(),
            migration,
            fallback_pages: previous_coloring.map_or(0, |earlier| earlier.fallback_pages),
            moved_pages: 0,
            pending_moves: Vec::new(),
            total_pages: 0,
            is_sampling: false,
        };
        if matches!(migration, PageMigration::All | PageMigration::HotFirst) {
            coloring.pending_moves = self.misplaced_pages(process, allowed_colors);
            coloring.pending_moves.reverse();
            coloring.total_pages = coloring.pending_moves.len() as u64;
            coloring.is_sampling =
                migration == PageMigration::HotFirst && !coloring.pending_moves.is_empty();
        }

        let must_drop_translations = migration == PageMigration::Lazy || coloring.is_sampling;
        if coloring.is_sampling {
            self.spaces[process].table.clear_touched();
        }
        self.spaces[process].coloring = Some(coloring);
        must_drop_translations
    }

    /// Allows all colors again; pages stay where they are.
    pub fn clear_colors(&mut self, process: usize) {
        self.spaces[process].coloring = None;
    }

    /// The pages outside the allowed colors, and the pages that overfill a color after the process
    /// got more colors, in ascending order.  Growing a partition moves a part of its pages;
    /// shrinking moves all pages in revoked colors. The pages that stay are spread evenly among the
    /// pages of their color, because neighbors are used together and should not all remain in the
    /// old colors.
    fn misplaced_pages(&self, process: usize, allowed_colors: &IndexSet) -> Vec<u64> {
        let space = &self.spaces[process];
        let max_pages_per_color = space
            .table
            .resident_pages()
            .div_ceil(u64::from(allowed_colors.count().max(1)));
        let mut visited_pages_by_color = vec![0; self.frames.color_count() as usize];
        let is_misplaced = |&(_, frame, _): &(u64, u32, bool)| {
            let color = self.frames.color_of(frame);
            let color_pages = space.pages_per_color[color as usize].max(1);
            let (staying_pages, page_index) = (
                max_pages_per_color.min(color_pages),
                visited_pages_by_color[color as usize],
            );
            visited_pages_by_color[color as usize] += 1;
            !allowed_colors.contains(color)
                || (page_index + 1) * staying_pages / color_pages
                    == page_index * staying_pages / color_pages
        };
        space
            .table
            .iter()
            .filter(is_misplaced)
            .map(|(page, _, _)| page)
            .collect()
    }

    /// Ends the collection of touches since the colors were set, so that touched pages move first.
    pub fn end_sampling(&mut self, process: usize) {
        let space = &mut self.spaces[process];
        let Some(coloring) = space
            .coloring
            .as_mut()
            .filter(|coloring| coloring.is_sampling)
        else {
            return;
        };
        coloring.is_sampling = false;

        let touched_pages: std::collections::BTreeSet<u64> = space
            .table
            .iter()
            .filter(|&(_, _, is_touched)| is_touched)
            .map(|(page, _, _)| page)
            .collect();
        // The last page in the list moves first: cold pages precede touched ones, and both parts are in descending
        // order of pages.
        coloring
            .pending_moves
            .sort_by_key(|&page| (touched_pages.contains(&page), std::cmp::Reverse(page)));
    }

    /// Moves the next page, and returns it; `None` if no page is left that can be moved. If no frame of an allowed
    /// color is free for a page, the page stays and counts as a fallback.
    pub fn move_next_page(&mut self, process: usize, cpu: u32) -> Option<MovedPage> {
        loop {
            let space = &mut self.spaces[process];
            let page = space
                .coloring
                .as_mut()
                .filter(|coloring| !coloring.is_sampling)?
                .pending_moves
                .pop()?;
            let Some(old_frame) = space.table.frame(page) else {
                continue;
            };

            match self.take_frame_of_emptiest_color(process, cpu) {
                Some(new_frame) => {
                    self.remap(process, page, old_frame, new_frame);
                    return Some(MovedPage {
                        process,
                        page,
                        old_frame,
                        frame: new_frame,
                    });
                }
                None => {
                    let is_wrong_color = !self.is_allowed_frame(process, old_frame);
                    if let Some(coloring) = self.spaces[process]
                        .coloring
                        .as_mut()
                        .filter(|_| is_wrong_color)
                    {
                        coloring.fallback_pages += 1;
                    }
                }
            }
        }
    }

    fn is_allowed_frame(&self, process: usize, frame: u32) -> bool {
        let color = self.frames.color_of(frame);
        self.spaces[process]
            .coloring
            .as_ref()
            .is_none_or(|coloring| coloring.allowed_colors.contains(color))
    }

    /// Allocates a frame of the allowed color in which the process has the fewest pages, so that moved pages are spread
    /// evenly.
    fn take_frame_of_emptiest_color(&mut self, process: usize, cpu: u32) -> Option<u32> {
        let space = &self.spaces[process];
        let allowed_colors = &space.coloring.as_ref()?.allowed_colors;
        let emptiest = allowed_colors
            .iter()
            .min_by_key(|&color| space.pages_per_color[color as usize])?;
        let color_set: IndexSet = std::iter::once(emptiest).collect();
        self.frames
            .take_colored(cpu, &color_set, 0)
            .or_else(|| self.take_frame_of_allowed_color(process, cpu))
    }

    pub fn coloring(&self, process: usize) -> Option<&Coloring> {
        self.spaces[process].coloring.as_ref()
    }

    /// The process's own pages, without those of shared segments.
    pub fn pages_per_color(&self, process: usize) -> &[u64] {
        &self.spaces[process].pages_per_color
    }

    /// The process's own pages, without those of shared segments.
    pub fn pages_per_node(&self, process: usize) -> &[u64] {
        &self.spaces[process].pages_per_node
    }

    /// Resident pages of the process, and those of them that have allowed colors; without shared
    /// segments.
    pub fn count_allowed_pages(&self, process: usize) -> (u64, u64) {
        let space = &self.spaces[process];
        let allowed_pages =
            space
                .coloring
                .as_ref()
                .map_or(space.table.resident_pages(), |coloring| {
                    coloring
                        .allowed_colors
                        .iter()
                        .map(|color| space.pages_per_color.get(color as usize).unwrap_or(&0))
                        .sum()
                });
        (space.table.resident_pages(), allowed_pages)
    }

    /// Pages with their frames, in ascending order.
    pub fn pages(&self, process: usize) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.spaces[process]
            .table
            .iter()
            .map(|(page, frame, _)| (page, frame))
    }

    /// Releases the memory of an exited process, and returns its own frames, which are now free.
    pub fn release_process(&mut self, process: usize, cpu: u32) -> Vec<u32> {
        let empty_space = self.empty_space();
        let exited_space = std::mem::replace(&mut self.spaces[process], empty_space);
        let freed_frames: Vec<u32> = exited_space
            .table
            .iter()
            .map(|(_, frame, _)| frame)
            .collect();
        for &frame in &freed_frames {
            self.frames.release_frame(cpu, frame);
        }
        freed_frames
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::frames::FrameAllocatorSpec;
    use super::*;

    fn sample_memory(frames: u64, colors: u32) -> VirtualMemory {
        memory_on(1, frames, colors)
    }
    fn memory_on(nodes: u32, frames: u64, colors: u32) -> VirtualMemory {
        let node_of_cpu = [0, nodes - 1];
        let spec = FrameAllocatorSpec {
            frame_count: frames,
            node_count: nodes,
            color_count: colors,
            node_of_cpu: &node_of_cpu,
            max_piece_order: 10,
            seed: 7,
        };
        VirtualMemory::new(FrameAllocator::new(spec))
    }
    fn set(colors: &[u32]) -> IndexSet {
        colors.iter().copied().collect()
    }
    fn drain(memory: &mut VirtualMemory, process: usize) -> u64 {
        std::iter::from_fn(|| memory.move_next_page(process, 0)).count() as u64
    }

    /// Do shrinking and growing move the pages that CP states: all pages of revoked colors, and an even part to new
    /// colors?
    #[test]
    fn shrinking_empties_revoked_colors_and_growing_evens_out() {
        let mut memory = sample_memory(4096, 16);
        let process = memory.add_process();
        memory.set_colors(process, &set(&[0, 1, 2, 3]), PageMigration::All);
        (0..400).for_each(|page| _ = memory.look_up(process, page, 0));
        assert_eq!(
            memory.pages_per_color(process)[..5],
            [100, 100, 100, 100, 0]
        );
        memory.set_colors(process, &set(&[0, 1]), PageMigration::All);
        assert_eq!(drain(&mut memory, process), 200);
        assert_eq!(memory.pages_per_color(process)[..5], [200, 200, 0, 0, 0]);
        memory.set_colors(process, &set(&[0, 1, 8, 9]), PageMigration::All);
        assert_eq!(drain(&mut memory, process), 200);
        assert_eq!(memory.pages_per_color(process)[8..10], [100, 100]);
        assert_eq!(memory.count_allowed_pages(process), (400, 400));
        assert_eq!(memory.coloring(process).unwrap().fallback_pages, 0);
    }

    /// When a process gets more colors, are neighboring pages spread over all colors, as if the larger share had been
    /// set from the start?
    #[test]
    fn neighboring_pages_spread_over_all_colors_after_growing() {
        let mut memory = sample_memory(4096, 16);
        let process = memory.add_process();
        memory.set_colors(process, &(0..8).collect(), PageMigration::All);
        (0..512).for_each(|page| _ = memory.look_up(process, page, 0));
        memory.set_colors(process, &(0..16).collect(), PageMigration::All);
        assert_eq!(drain(&mut memory, process), 256);
        for first in (0..512).step_by(64) {
            let mut by_color = [0; 16];
            for (page, frame) in memory.pages(process) {
                if (first..first + 64).contains(&page) {
                    by_color[memory.frames.color_of(frame) as usize] += 1;
                }
            }
            // A perfectly even distribution would have four pages of each color.
            assert!(
                by_color.iter().all(|pages| (2..=6).contains(pages)),
                "from page {first}: {by_color:?}"
            );
        }
    }

    /// If the allowed colors are exhausted, is a frame of another color taken and counted?
    #[test]
    fn exhausted_colors_fall_back_and_are_counted() {
        let mut memory = sample_memory(256, 16);
        let process = memory.add_process();
        memory.set_colors(process, &set(&[5]), PageMigration::Never);
        (0..40).for_each(|page| _ = memory.look_up(process, page, 0));
        assert_eq!(memory.pages_per_color(process)[5], 16);
        assert_eq!(memory.coloring(process).unwrap().fallback_pages, 24);
        assert!(!memory.is_exhausted);
        (40..300).for_each(|page| _ = memory.look_up(process, page, 0));
        assert!(memory.is_exhausted);
    }

    /// Do the four kinds of migration differ as documented?
    #[test]
    fn the_four_kinds_of_migration_differ_as_documented() {
        let mut memory = sample_memory(4096, 4);
        let process = memory.add_process();
        (0..100).for_each(|page| _ = memory.look_up(process, page, 0));
        assert!(!memory.set_colors(process, &set(&[1]), PageMigration::Never));
        assert_eq!(drain(&mut memory, process), 0);
        assert!(memory.set_colors(process, &set(&[1]), PageMigration::Lazy));
        let wrong = memory
            .pages(process)
            .filter(|(_, frame)| frame % 4 != 1)
            .map(|(page, _)| page);
        let wrong: Vec<u64> = wrong.collect();
        assert!(
            matches!(memory.look_up(process, wrong[0], 0), PageLookup::Moved(fresh, _) if fresh % 4 == 1)
        );
        assert!(matches!(
            memory.look_up(process, wrong[0], 0),
            PageLookup::Resident(_)
        ));
        assert!(memory.set_colors(process, &set(&[1]), PageMigration::HotFirst));
        let hot = [wrong[9], wrong[30]];
        hot.iter()
            .for_each(|&page| _ = memory.look_up(process, page, 0));
        assert_eq!(
            memory.move_next_page(process, 0),
            None,
            "moving waits for the touches"
        );
        memory.end_sampling(process);
        let order: Vec<u64> = std::iter::from_fn(|| memory.move_next_page(process, 0))
            .map(|moved| moved.page)
            .collect();
        assert_eq!(order[..2], hot);
        assert_eq!(order.len(), wrong.len() - 1);
    }

    /// Do two address spaces use the same frame for a shared page, and does the page stay when one of them changes
    /// colors?
    #[test]
    fn a_shared_page_has_one_frame_and_stays_at_a_color_change() {
        let mut memory = sample_memory(4096, 16);
        let (a, b) = (memory.add_process(), memory.add_process());
        let segment = memory.add_segment(1000, 64);
        memory.map_segment(a, segment);
        memory.map_segment(b, segment);
        let PageLookup::Fault(frame) = memory.look_up(a, 1010, 0) else {
            panic!("first touch")
        };
        assert_eq!(memory.look_up(b, 1010, 1), PageLookup::Resident(frame));
        let color = (frame % 16 + 1) % 16;
        memory.set_colors(a, &set(&[color]), PageMigration::All);
        assert_eq!(drain(&mut memory, a), 0);
        assert_eq!(memory.look_up(a, 1010, 0), PageLookup::Resident(frame));
    }

    proptest! {
        /// Do page moves neither lose a page nor share or leak a frame, whatever is set, touched and moved in between?
        #[test]
        fn page_moves_lose_no_page(
            nodes in 1u32..3,
            steps in prop::collection::vec((0u32..6, 0u64..200, 0u32..8, 0u32..4), 1..120),
        ) {
            let mut memory = memory_on(nodes, 600, 8);
            let processes = [memory.add_process(), memory.add_process()];
            let mut mapped = [BTreeSet::new(), BTreeSet::new()];

            for (step, page, color, way) in steps {
                let index = (page % 2) as usize;
                let process = processes[index];
                match step {
                    0..=2 => for page in page..page + 8 {
                        memory.look_up(process, page, color % 2);
                        mapped[index].insert(page);
                    },
                    3 => {
                        let moving =
                            [PageMigration::All, PageMigration::HotFirst, PageMigration::Lazy, PageMigration::Never][way as usize];
                        memory.set_colors(process, &set(&[color, (color + 2) % 8]), moving);
                    }
                    4 => memory.end_sampling(process),
                    _ => (0..page).for_each(|_| _ = memory.move_next_page(process, 0)),
                }

                memory.take_moved_pages(0);
                let mut frames = BTreeSet::new();
                for (process, mapped) in processes.iter().zip(&mapped) {
                    let pages: Vec<(u64, u32)> = memory.pages(*process).collect();
                    prop_assert!(pages.iter().map(|(page, _)| page).eq(mapped));
                    prop_assert!(pages.iter().all(|(_, frame)| frames.insert(*frame)));
                    let mut by_color = vec![0; 8];
                    pages.iter().for_each(|(_, frame)| by_color[(frame % 8) as usize] += 1);
                    prop_assert_eq!(memory.pages_per_color(*process), by_color);
                    let mut by_node = vec![0; nodes as usize];
                    pages.iter().for_each(|(_, frame)| by_node[(frame / (600 / nodes)) as usize] += 1);
                    prop_assert_eq!(memory.pages_per_node(*process), by_node);
                }
                prop_assert_eq!(memory.frames.free_frames(), 600 - frames.len() as u64);
            }
        }
    }
}
