//! Physical page frames: their allocation, and their colors.
//!
//! Problem: the frame number of a page determines which cache sets it occupies. A default kernel allocates frames in an
//! order that results from its history. A coloring kernel must find frames of given colors fast, and must not fail
//! while any frame is free (CP 4.4.1).
//!
//! Method: on each memory node, free memory looks like that of a long-running buddy allocator. Blocks of 1024 frames
//! are in shuffled order and cut into aligned pieces; half of the memory stays in whole blocks, a quarter in halves,
//! and so on. Pieces are shuffled among those of eight blocks. Frames within a piece are allocated in ascending order,
//! and CPUs draw them in batches, as with per-CPU page lists. Colored requests go to per-CPU lists per color (CP 4.4.1,
//! the second version: colored lists that are refilled until the color is found, so that no `MaxTry` is needed).
//!
//! Properties: no frame is allocated twice. As long as any frame is free, a request succeeds. A colored request gets an
//! allowed color as long as one is free anywhere, from local memory first. The same seed gives the same order. Memory
//! for the lists is proportional to the frames drawn, not to the machine's memory.

use cachemate_core::{IndexSet, SplitMix64};

/// Number of frames of a buddy block of the largest order.
const BLOCK_FRAMES: u32 = 1 << BLOCK_ORDER;
const BLOCK_ORDER: u32 = 10;
/// Number of blocks whose pieces are shuffled together.
const BLOCKS_AT_ONCE: usize = 8;
/// Number of frames that a CPU draws from the buddy lists at once (the default batch of Linux).
const BATCH_FRAMES: usize = 31;

/// Options of the frame allocator.
#[derive(Clone, Copy, Debug)]
pub struct FrameAllocatorSpec<'a> {
    pub frames: u64,
    /// Number of memory nodes, which are equal consecutive parts of the frames.
    pub nodes: u32,
    /// Number of colors that the kernel distinguishes; 1 means that it does not color.
    pub colors: u32,
    /// Home node of each CPU.
    pub node_of_cpu: &'a [u32],
    /// Maximum order of the pieces of free memory: 10 models memory after boot and use, and 0 makes every frame
    /// separate.
    pub max_piece_order: u32,
    pub seed: u64,
}

struct NodeFrames {
    /// Whole blocks that have not been cut yet, in the order in which they will be cut.
    blocks: Vec<u32>,
    /// First frame and length of each piece; the last piece is used first.
    pieces: Vec<(u32, u32)>,
}

#[derive(Default)]
struct CpuLists {
    /// Frames drawn for requests without colors, of which the last one is used first.
    batch: Vec<u32>,
    /// Frames drawn or freed, by node and color; the last one of each list is used first.
    by_color: Vec<Vec<u32>>,
}

/// The allocator of all frames of the machine.
pub struct FrameAllocator {
    colors: u32,
    frames_per_node: u32,
    nodes: Vec<NodeFrames>,
    cpus: Vec<CpuLists>,
    node_of_cpu: Vec<u32>,
    max_order: u32,
    random: SplitMix64,
    free_count: u64,
}

impl FrameAllocator {
    pub fn new(spec: FrameAllocatorSpec<'_>) -> Self {
        let mut random = SplitMix64::new(spec.seed ^ 0x6672_616d_6573);
        let per_node = (spec.frames / u64::from(spec.nodes)) as u32;
        let nodes = (0..spec.nodes)
            .map(|node| {
                let first = node * per_node;
                let mut blocks: Vec<u32> =
                    (0..per_node.div_ceil(BLOCK_FRAMES)).map(|index| first + index * BLOCK_FRAMES).collect();
                random.shuffle(&mut blocks);
                NodeFrames { blocks, pieces: Vec::new() }
            })
            .collect();
        let new_lists =
            || CpuLists { batch: Vec::new(), by_color: vec![Vec::new(); (spec.colors * spec.nodes) as usize] };
        FrameAllocator {
            colors: spec.colors,
            frames_per_node: per_node,
            nodes,
            cpus: spec.node_of_cpu.iter().map(|_| new_lists()).collect(),
            node_of_cpu: spec.node_of_cpu.to_vec(),
            max_order: spec.max_piece_order.min(BLOCK_ORDER),
            random,
            free_count: u64::from(per_node) * u64::from(spec.nodes),
        }
    }

    pub fn colors(&self) -> u32 {
        self.colors
    }
    pub fn color_of(&self, frame: u32) -> u32 {
        frame % self.colors
    }
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }
    pub fn node_of(&self, frame: u32) -> u32 {
        frame / self.frames_per_node
    }
    #[cfg(test)]
    pub(crate) fn free_frames(&self) -> u64 {
        self.free_count
    }

    /// Allocates any frame, from local memory first; `None` if memory is full.
    pub fn take_any(&mut self, cpu: u32) -> Option<u32> {
        let home = self.node_of_cpu[cpu as usize];
        if self.cpus[cpu as usize].batch.is_empty() {
            let drawn = self.nodes_from(home).find_map(|node| {
                let batch = self.draw_frames(node, BATCH_FRAMES);
                (!batch.is_empty()).then_some(batch)
            });
            self.cpus[cpu as usize].batch = drawn.unwrap_or_default();
            self.cpus[cpu as usize].batch.reverse();
        }
        let frame = self.cpus[cpu as usize].batch.pop().or_else(|| self.take_listed(home));
        self.free_count -= u64::from(frame.is_some());
        frame
    }

    /// Allocates a frame of an allowed color. Colors are tried in order, starting at `first_color`, on the local node
    /// and then on the others. `None` if no such frame is free anywhere.
    pub fn take_colored(&mut self, cpu: u32, allowed: &IndexSet, first_color: u32) -> Option<u32> {
        let home = self.node_of_cpu[cpu as usize];
        let in_turn: Vec<u32> = allowed
            .iter()
            .filter(|&color| color >= first_color)
            .chain(allowed.iter().filter(|&color| color < first_color))
            .collect();
        let frame =
            self.nodes_from(home).find_map(|node| in_turn.iter().find_map(|&color| self.take_of(cpu, node, color)));
        self.free_count -= u64::from(frame.is_some());
        frame
    }

    /// Allocates `pages` contiguous frames, aligned to their number, and returns the first one.
    ///
    /// `pages` is a power of two, at most 1024. All frames have allowed colors, which are therefore adjacent (CP
    /// 4.4.1). `None` if free memory has no such run.
    pub fn take_run(&mut self, cpu: u32, pages: u32, allowed: Option<&IndexSet>) -> Option<u32> {
        debug_assert!(pages.is_power_of_two() && pages <= BLOCK_FRAMES);
        let home = self.node_of_cpu[cpu as usize];
        let run = self.nodes_from(home).find_map(|node| self.allocate_run(node, pages, allowed));
        self.free_count -= u64::from(if run.is_some() { pages } else { 0 });
        run
    }

    /// Frees a frame, which goes to the lists of the CPU that frees it.
    pub fn release_frame(&mut self, cpu: u32, frame: u32) {
        let list = self.list_of(self.node_of(frame), self.color_of(frame));
        self.cpus[cpu as usize].by_color[list].push(frame);
        self.free_count += 1;
    }

    fn nodes_from(&self, home: u32) -> impl Iterator<Item = u32> + use<> {
        let nodes = self.nodes.len() as u32;
        (0..nodes).map(move |step| (home + step) % nodes)
    }
    fn list_of(&self, node: u32, color: u32) -> usize {
        (node * self.colors + color) as usize
    }

    /// Cuts more blocks if no piece is left. Returns `false` if the node's buddy lists are empty.
    fn refill(&mut self, node: u32) -> bool {
        if !self.nodes[node as usize].pieces.is_empty() {
            return true;
        }
        let end = (node + 1) * self.frames_per_node;
        let first_block = self.nodes[node as usize].blocks.len().saturating_sub(BLOCKS_AT_ONCE);
        let blocks = self.nodes[node as usize].blocks.split_off(first_block);
        let mut pieces = Vec::new();
        for block in blocks {
            self.split_block(block, BLOCK_ORDER, end, &mut pieces);
        }
        self.random.shuffle(&mut pieces);
        self.nodes[node as usize].pieces = pieces;
        !self.nodes[node as usize].pieces.is_empty()
    }

    fn split_block(&mut self, first: u32, order: u32, end: u32, pieces: &mut Vec<(u32, u32)>) {
        if first >= end {
            return;
        }
        let is_whole = first + (1 << order) <= end && order <= self.max_order;
        if is_whole && (order == 0 || self.random.draw_below(2) == 0) {
            pieces.push((first, 1 << order));
        } else {
            self.split_block(first, order - 1, end, pieces);
            self.split_block(first + (1 << (order - 1)), order - 1, end, pieces);
        }
    }

    /// Draws up to `max_frames` frames from a node's buddy lists, in ascending order within a piece.
    fn draw_frames(&mut self, node: u32, max_frames: usize) -> Vec<u32> {
        let mut drawn = Vec::new();
        while drawn.len() < max_frames && self.refill(node) {
            let pieces = &mut self.nodes[node as usize].pieces;
            if let Some((first, frames)) = pieces.pop() {
                let take = frames.min((max_frames - drawn.len()) as u32);
                drawn.extend(first..first + take);
                if take < frames {
                    pieces.push((first + take, frames - take));
                }
            }
        }
        drawn
    }

    fn take_of(&mut self, cpu: u32, node: u32, color: u32) -> Option<u32> {
        let at = self.list_of(node, color);
        loop {
            if let Some(frame) = self.cpus[cpu as usize].by_color[at].pop() {
                return Some(frame);
            }
            let drawn = self.draw_frames(node, BATCH_FRAMES);
            if drawn.is_empty() {
                break;
            }
            for frame in drawn.into_iter().rev() {
                let list = self.list_of(node, self.color_of(frame));
                self.cpus[cpu as usize].by_color[list].push(frame);
            }
        }
        let in_batch = |frame: &u32| *frame / self.frames_per_node == node && *frame % self.colors == color;
        let frame = self
            .cpus
            .iter()
            .enumerate()
            .find_map(|(at_cpu, lists)| lists.batch.iter().position(in_batch).map(|index| (at_cpu, index)));
        match frame {
            Some((at_cpu, index)) => Some(self.cpus[at_cpu].batch.remove(index)),
            None => self.cpus.iter_mut().find_map(|lists| lists.by_color[at].pop()),
        }
    }

    /// Allocates a frame from any list of any CPU, which is the last resort once the buddy lists are empty.
    fn take_listed(&mut self, home: u32) -> Option<u32> {
        let colors = self.colors;
        self.nodes_from(home).find_map(|node| {
            let lists = (node * colors) as usize..((node + 1) * colors) as usize;
            self.cpus.iter_mut().find_map(|cpu| {
                let longest = lists.clone().rev().max_by_key(|&index| cpu.by_color[index].len())?;
                cpu.by_color[longest].pop().or_else(|| cpu.batch.pop())
            })
        })
    }

    fn allocate_run(&mut self, node: u32, pages: u32, allowed: Option<&IndexSet>) -> Option<u32> {
        let colors = self.colors;
        let is_allowed_run = |first: u32| {
            first.is_multiple_of(pages)
                && allowed.is_none_or(|allowed| (first..first + pages).all(|frame| allowed.contains(frame % colors)))
        };
        let mut looked_at = 0;
        while self.refill(node) {
            let pieces = &self.nodes[node as usize].pieces;
            let whole_page_runs = |&(first, frames): &(u32, u32)| {
                let start = first.next_multiple_of(pages);
                (start..first + frames)
                    .step_by(pages as usize)
                    .find(|&run| run + pages <= first + frames && is_allowed_run(run))
            };
            if let Some((index, run)) =
                pieces.iter().enumerate().rev().find_map(|(index, piece)| Some((index, whole_page_runs(piece)?)))
            {
                let (first, frames) = self.nodes[node as usize].pieces.remove(index);
                let remaining_runs = [(run + pages, first + frames - run - pages), (first, run - first)];
                let at_end = remaining_runs.into_iter().filter(|&(_, frames)| frames > 0);
                self.nodes[node as usize].pieces.extend(at_end);
                return Some(run);
            }
            // Further blocks are cut; the pieces that were examined are kept for other requests.
            looked_at += 1;
            let scanned_pieces = std::mem::take(&mut self.nodes[node as usize].pieces);
            let refilled = self.refill(node);
            self.nodes[node as usize].pieces.extend(scanned_pieces);
            if !refilled || looked_at > 64 {
                return None;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn sample_pool(frames: u64, nodes: u32, colors: u32) -> FrameAllocator {
        let node_of_cpu: Vec<u32> = (0..4).map(|cpu| cpu % nodes).collect();
        let spec =
            FrameAllocatorSpec { frames, nodes, colors, node_of_cpu: &node_of_cpu, max_piece_order: 10, seed: 1 };
        FrameAllocator::new(spec)
    }

    /// Does a colored request get an allowed color while one is free anywhere, and fail after that?
    #[test]
    fn colored_requests_get_their_colors_until_the_last_frame_of_them_is_gone() {
        let mut frames = sample_pool(4096, 2, 16);
        let allowed: IndexSet = [3, 4].into_iter().collect();
        let frames_taken: Vec<u32> = std::iter::from_fn(|| frames.take_colored(1, &allowed, 0)).collect();
        assert_eq!(frames_taken.len(), 4096 / 16 * 2);
        assert!(frames_taken.iter().all(|frame| allowed.contains(frame % 16)));
        // Frames come from local memory first, and CPU 1 belongs to node 1.
        assert!(frames_taken[..256].iter().all(|&frame| frames.node_of(frame) == 1));
        assert_eq!(frames.free_frames(), 4096 - 512);
        let remaining_frames: Vec<u32> = std::iter::from_fn(|| frames.take_any(2)).collect();
        assert_eq!(remaining_frames.len(), 4096 - 512);
        assert_eq!(frames.free_frames(), 0);
    }

    /// Are contiguous requests served with adjacent allowed colors only?
    #[test]
    fn contiguous_requests_stay_within_adjacent_allowed_colors() {
        let mut frames = sample_pool(1 << 14, 1, 16);
        let allowed: IndexSet = (4..8).collect();
        let run = frames.take_run(0, 4, Some(&allowed)).unwrap();
        assert_eq!(run % 16, 4);
        // No aligned run of eight frames has only these four colors.
        assert_eq!(frames.take_run(0, 8, Some(&allowed)), None);
        assert_eq!(frames.free_frames(), (1 << 14) - 4);
    }

    /// Does the default order have runs without being sequential, as in an aged buddy allocator?
    #[test]
    fn default_frames_come_in_runs_at_shuffled_places() {
        let mut frames = sample_pool(1 << 18, 1, 1);
        let taken_frames: Vec<u32> = (0..8192).map(|_| frames.take_any(0).unwrap()).collect();
        let ascending = taken_frames.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!((6000..8191).contains(&ascending), "{ascending}");
        let span = taken_frames.iter().max().unwrap() - taken_frames.iter().min().unwrap();
        assert!(span > 1 << 14, "{span}");
    }

    proptest! {
        /// Is no frame allocated twice or lost, whatever is allocated, freed and requested?
        #[test]
        fn no_frame_is_lost_or_given_twice(steps in prop::collection::vec((0u32..5, 0u32..4, 0u32..8), 1..400)) {
            let mut frames = sample_pool(3000, 2, 8);
            let mut held_frames = BTreeSet::new();
            for (step, cpu, color) in steps {
                let allowed: IndexSet = [color, (color + 3) % 8].into_iter().collect();
                let got: Vec<u32> = match step {
                    0 => frames.take_any(cpu).into_iter().collect(),
                    1 => frames.take_colored(cpu, &allowed, color).into_iter().collect(),
                    2 => frames.take_run(cpu, 4, None).map(|run| (run..run + 4).collect()).unwrap_or_default(),
                    3 => (0..100).filter_map(|_| frames.take_any(cpu)).collect(),
                    _ => {
                        let returned_frames: Vec<u32> = held_frames.iter().copied().step_by(2).collect();
                        for frame in returned_frames {
                            held_frames.remove(&frame);
                            frames.release_frame(cpu, frame);
                        }
                        Vec::new()
                    }
                };
                for frame in got {
                    prop_assert!(frame < 3000 && held_frames.insert(frame));
                }
                prop_assert_eq!(frames.free_frames(), 3000 - held_frames.len() as u64);
            }
            while let Some(frame) = frames.take_any(0) {
                prop_assert!(held_frames.insert(frame));
            }
            prop_assert_eq!(held_frames.len(), 3000);
        }
    }
}
