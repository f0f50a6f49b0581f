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
//! Properties: no frame is allocated twice. As long as any frame is free, a request for one frame succeeds. A colored
//! request gets an allowed color as long as one is free anywhere, from local memory first. A request for contiguous
//! frames fails if the blocks that it looks through have no such run: frames in the lists of CPUs, where freed frames
//! go, are never joined again, as Linux joins only what is back in the buddy lists. The same seed gives the same order.
//! Memory for the lists is proportional to the frames drawn, not to the machine's memory.

use cachemate_core::{IndexSet, SplitMix64};

/// Number of frames of a buddy block of the largest order.
const BLOCK_FRAMES: u32 = 1 << BLOCK_ORDER;
const BLOCK_ORDER: u32 = 10;
/// Number of blocks whose pieces are shuffled together.
const BLOCKS_PER_SHUFFLE: usize = 8;
/// Number of frames that a CPU draws from the buddy lists at once: the batch of Linux until 2018. Later ones draw 63
/// where a zone has a gigabyte or more, so that the runs of neighboring frames of a CPU are longer there.
const BATCH_FRAMES: usize = 31;
/// Number of times that a request for contiguous frames cuts further blocks.
const MAX_RUN_REFILLS: u32 = 64;

/// Options of the frame allocator.
#[derive(Clone, Copy, Debug)]
pub struct FrameAllocatorSpec<'a> {
    pub frame_count: u64,
    /// Number of memory nodes, which are equal consecutive parts of the frames.
    pub node_count: u32,
    /// Number of colors that the kernel distinguishes; 1 means that it does not color.
    pub color_count: u32,
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
    uncolored_frames: Vec<u32>,
    /// Frames drawn or freed, by node and color; the last one of each list is used first.
    frames_by_node_and_color: Vec<Vec<u32>>,
}

/// The allocator of all frames of the machine.
pub struct FrameAllocator {
    color_count: u32,
    frames_per_node: u32,
    nodes: Vec<NodeFrames>,
    cpus: Vec<CpuLists>,
    node_of_cpu: Vec<u32>,
    max_order: u32,
    generator: SplitMix64,
    free_count: u64,
}

impl FrameAllocator {
    pub fn new(spec: FrameAllocatorSpec<'_>) -> Self {
        let mut generator = SplitMix64::new(spec.seed ^ 0x6672_616d_6573);
        let frames_per_node = (spec.frame_count / u64::from(spec.node_count)) as u32;
        let nodes = (0..spec.node_count)
            .map(|node| {
                let first_frame = node * frames_per_node;
                let mut blocks: Vec<u32> = (0..frames_per_node.div_ceil(BLOCK_FRAMES))
                    .map(|index| first_frame + index * BLOCK_FRAMES)
                    .collect();
                generator.shuffle(&mut blocks);
                NodeFrames {
                    blocks,
                    pieces: Vec::new(),
                }
            })
            .collect();

        let new_lists = || CpuLists {
            uncolored_frames: Vec::new(),
            frames_by_node_and_color: vec![
                Vec::new();
                (spec.color_count * spec.node_count) as usize
            ],
        };
        FrameAllocator {
            color_count: spec.color_count,
            frames_per_node,
            nodes,
            cpus: spec.node_of_cpu.iter().map(|_| new_lists()).collect(),
            node_of_cpu: spec.node_of_cpu.to_vec(),
            max_order: spec.max_piece_order.min(BLOCK_ORDER),
            generator,
            free_count: u64::from(frames_per_node) * u64::from(spec.node_count),
        }
    }

    pub fn color_count(&self) -> u32 {
        self.color_count
    }
    pub fn color_of(&self, frame: u32) -> u32 {
        frame % self.color_count
    }
    pub fn node_count(&self) -> usize {
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
        let local_node = self.node_of_cpu[cpu as usize];
        if self.cpus[cpu as usize].uncolored_frames.is_empty() {
            let drawn_frames = self.nodes_from(local_node).find_map(|node| {
                let batch = self.draw_frames(node, BATCH_FRAMES);
                (!batch.is_empty()).then_some(batch)
            });
            self.cpus[cpu as usize].uncolored_frames = drawn_frames.unwrap_or_default();
            self.cpus[cpu as usize].uncolored_frames.reverse();
        }
        let frame = self.cpus[cpu as usize]
            .uncolored_frames
            .pop()
            .or_else(|| self.take_from_any_list(local_node));
        self.free_count -= u64::from(frame.is_some());
        frame
    }

    /// Allocates a frame of an allowed color. Colors are tried in order, starting at `first_color`, on the local node
    /// and then on the others. Returns `None` if no such frame is free.
    pub fn take_colored(
        &mut self,
        cpu: u32,
        allowed_colors: &IndexSet,
        first_color: u32,
    ) -> Option<u32> {
        let local_node = self.node_of_cpu[cpu as usize];
        let ordered_colors: Vec<u32> = allowed_colors
            .iter()
            .filter(|&color| color >= first_color)
            .chain(allowed_colors.iter().filter(|&color| color < first_color))
            .collect();
        let frame = self.nodes_from(local_node).find_map(|node| {
            ordered_colors
                .iter()
                .find_map(|&color| self.take_of_color(cpu, node, color))
        });
        self.free_count -= u64::from(frame.is_some());
        frame
    }

    /// Allocates `pages` contiguous frames, aligned to their number, and returns the first one.
    ///
    /// `pages` is a power of two, at most 1024. All frames have allowed colors, which are therefore adjacent (CP
    /// 4.4.1). `None` if no node has such a run in its buddy lists, as far as [`MAX_RUN_REFILLS`] refills show.
    pub fn take_run(
        &mut self,
        cpu: u32,
        pages: u32,
        allowed_colors: Option<&IndexSet>,
    ) -> Option<u32> {
        debug_assert!(pages.is_power_of_two() && pages <= BLOCK_FRAMES);
        let local_node = self.node_of_cpu[cpu as usize];
        let first_frame = self
            .nodes_from(local_node)
            .find_map(|node| self.allocate_run(node, pages, allowed_colors));
        self.free_count -= u64::from(if first_frame.is_some() { pages } else { 0 });
        first_frame
    }

    /// Frees a frame, which goes to the lists of the CPU that frees it.
    pub fn release_frame(&mut self, cpu: u32, frame: u32) {
        let list_index = self.list_index(self.node_of(frame), self.color_of(frame));
        self.cpus[cpu as usize].frames_by_node_and_color[list_index].push(frame);
        self.free_count += 1;
    }

    fn nodes_from(&self, local_node: u32) -> impl Iterator<Item = u32> + use<> {
        let nodes = self.nodes.len() as u32;
        (0..nodes).map(move |step| (local_node + step) % nodes)
    }
    fn list_index(&self, node: u32, color: u32) -> usize {
        (node * self.color_count + color) as usize
    }

    /// Cuts more blocks if no piece is left. Returns whether the node has a piece.
    fn refill_pieces(&mut self, node: u32) -> bool {
        if !self.nodes[node as usize].pieces.is_empty() {
            return true;
        }
        let end_frame = (node + 1) * self.frames_per_node;
        let first_block = self.nodes[node as usize]
            .blocks
            .len()
            .saturating_sub(BLOCKS_PER_SHUFFLE);
        let blocks = self.nodes[node as usize].blocks.split_off(first_block);
        let mut pieces = Vec::new();
        for block in blocks {
            self.split_block(block, BLOCK_ORDER, end_frame, &mut pieces);
        }
        self.generator.shuffle(&mut pieces);
        self.nodes[node as usize].pieces = pieces;
        !self.nodes[node as usize].pieces.is_empty()
    }

    fn split_block(
        &mut self,
        first_frame: u32,
        order: u32,
        end_frame: u32,
        pieces: &mut Vec<(u32, u32)>,
    ) {
        if first_frame >= end_frame {
            return;
        }

        let may_stay_whole = first_frame + (1 << order) <= end_frame && order <= self.max_order;
        if may_stay_whole && (order == 0 || self.generator.draw_below(2) == 0) {
            pieces.push((first_frame, 1 << order));
        } else {
            self.split_block(first_frame, order - 1, end_frame, pieces);
            self.split_block(
                first_frame + (1 << (order - 1)),
                order - 1,
                end_frame,
                pieces,
            );
        }
    }

    /// Draws up to `max_frames` frames from a node's buddy lists, in ascending order within a piece.
    fn draw_frames(&mut self, node: u32, max_frames: usize) -> Vec<u32> {
        let mut drawn_frames = Vec::new();
        while drawn_frames.len() < max_frames && self.refill_pieces(node) {
            let pieces = &mut self.nodes[node as usize].pieces;
            if let Some((first_frame, frames)) = pieces.pop() {
                let taken_count = frames.min((max_frames - drawn_frames.len()) as u32);
                drawn_frames.extend(first_frame..first_frame + taken_count);
                if taken_count < frames {
                    pieces.push((first_frame + taken_count, frames - taken_count));
                }
            }
        }
        drawn_frames
    }

    fn take_of_color(&mut self, cpu: u32, node: u32, color: u32) -> Option<u32> {
        let list_index = self.list_index(node, color);
        loop {
            if let Some(frame) = self.cpus[cpu as usize].frames_by_node_and_color[list_index].pop()
            {
                return Some(frame);
            }
            let drawn_frames = self.draw_frames(node, BATCH_FRAMES);
            if drawn_frames.is_empty() {
                break;
            }

            for frame in drawn_frames.into_iter().rev() {
                let drawn_index = self.list_index(node, self.color_of(frame));
                self.cpus[cpu as usize].frames_by_node_and_color[drawn_index].push(frame);
            }
        }

        let is_wanted_frame = |frame: &u32| {
            *frame / self.frames_per_node == node && *frame % self.color_count == color
        };
        let frame = self
            .cpus
            .iter()
            .enumerate()
            .find_map(|(holder_cpu, lists)| {
                lists
                    .uncolored_frames
                    .iter()
                    .position(is_wanted_frame)
                    .map(|index| (holder_cpu, index))
            });

        match frame {
            Some((at_cpu, index)) => Some(self.cpus[at_cpu].uncolored_frames.remove(index)),
            None => self
                .cpus
                .iter_mut()
                .find_map(|lists| lists.frames_by_node_and_color[list_index].pop()),
        }
    }

    /// Allocates a frame from any list of any CPU, which is the last resort once the buddy lists are empty.
    fn take_from_any_list(&mut self, local_node: u32) -> Option<u32> {
        let colors = self.color_count;
        self.nodes_from(local_node).find_map(|node| {
            let list_range = (node * colors) as usize..((node + 1) * colors) as usize;
            self.cpus.iter_mut().find_map(|cpu| {
                let longest_list = list_range
                    .clone()
                    .rev()
                    .max_by_key(|&index| cpu.frames_by_node_and_color[index].len())?;
                cpu.frames_by_node_and_color[longest_list]
                    .pop()
                    .or_else(|| cpu.uncolored_frames.pop())
            })
        })
    }

    fn allocate_run(
        &mut self,
        node: u32,
        pages: u32,
        allowed_colors: Option<&IndexSet>,
    ) -> Option<u32> {
        let colors = self.color_count;
        let is_allowed_run = |first_frame: u32| {
            first_frame.is_multiple_of(pages)
                && allowed_colors.is_none_or(|allowed| {
                    (first_frame..first_frame + pages).all(|frame| allowed.contains(frame % colors))
                })
        };
        let mut refill_count = 0;

        while self.refill_pieces(node) {
            let pieces = &self.nodes[node as usize].pieces;
            let find_run_in_piece = |&(first_frame, frames): &(u32, u32)| {
                let start = first_frame.next_multiple_of(pages);
                (start..first_frame + frames)
                    .step_by(pages as usize)
                    .find(|&run| run + pages <= first_frame + frames && is_allowed_run(run))
            };

            if let Some((index, run)) = pieces
                .iter()
                .enumerate()
                .rev()
                .find_map(|(index, piece)| Some((index, find_run_in_piece(piece)?)))
            {
                let (first_frame, frames) = self.nodes[node as usize].pieces.remove(index);
                let remaining_pieces = [
                    (run + pages, first_frame + frames - run - pages),
                    (first_frame, run - first_frame),
                ];
                let nonempty_pieces = remaining_pieces
                    .into_iter()
                    .filter(|&(_, frames)| frames > 0);
                self.nodes[node as usize].pieces.extend(nonempty_pieces);
                return Some(run);
            }

            // Further blocks are cut; the pieces that were examined are kept for other requests.
            refill_count += 1;
            let scanned_pieces = std::mem::take(&mut self.nodes[node as usize].pieces);
            let has_pieces = self.refill_pieces(node);
            self.nodes[node as usize].pieces.extend(scanned_pieces);
            if !has_pieces || refill_count > MAX_RUN_REFILLS {
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
        let spec = FrameAllocatorSpec {
            frame_count: frames,
            node_count: nodes,
            color_count: colors,
            node_of_cpu: &node_of_cpu,
            max_piece_order: 10,
            seed: 1,
        };
        FrameAllocator::new(spec)
    }

    /// Does a colored request get an allowed color while one is free anywhere, and fail after that?
    #[test]
    fn a_colored_request_gets_its_color_while_one_is_free() {
        let mut frames = sample_pool(4096, 2, 16);
        let allowed: IndexSet = [3, 4].into_iter().collect();
        let frames_taken: Vec<u32> =
            std::iter::from_fn(|| frames.take_colored(1, &allowed, 0)).collect();
        assert_eq!(frames_taken.len(), 4096 / 16 * 2);
        assert!(
            frames_taken
                .iter()
                .all(|frame| allowed.contains(frame % 16))
        );
        // Frames come from local memory first, and CPU 1 belongs to node 1.
        assert!(
            frames_taken[..256]
                .iter()
                .all(|&frame| frames.node_of(frame) == 1)
        );
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
        let ascending = taken_frames
            .windows(2)
            .filter(|pair| pair[1] == pair[0] + 1)
            .count();
        assert!((6000..8191).contains(&ascending), "{ascending}");
        let span = taken_frames.iter().max().unwrap() - taken_frames.iter().min().unwrap();
        assert!(span > 1 << 14, "{span}");
    }

    proptest! {
        /// Is no frame allocated twice or lost, whatever is allocated, freed and requested?
        #[test]
        fn no_frame_is_lost_or_allocated_twice(steps in prop::collection::vec((0u32..5, 0u32..4, 0u32..8), 1..400)) {
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
