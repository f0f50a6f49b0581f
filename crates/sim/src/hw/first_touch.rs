//! Frames without an operating system, for tests and benches of the hardware alone.

use std::collections::BTreeMap;

use cachemate_core::{CpuId, ProcessId};

use super::{FrameLookup, FrameProvider};

/// Assigns frames in the order of first touch, at no cost.
#[derive(Default)]
pub struct FirstTouchFrames {
    frames: BTreeMap<(ProcessId, u64), u64>,
}

impl FrameProvider for FirstTouchFrames {
    fn find_frame(
        &mut self,
        process: ProcessId,
        page: u64,
        _cpu: CpuId,
        _is_store: bool,
    ) -> FrameLookup {
        let next_frame = self.frames.len() as u64;
        FrameLookup {
            frame: *self.frames.entry((process, page)).or_insert(next_frame),
            cost_cycles: 0,
            is_copied: false,
        }
    }
}
