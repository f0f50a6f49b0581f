//! Verification that the reference frames of each color still have one color.
//!
//! Problem: on a shared host one test result is weak evidence. Other programs on the same core evict lines as well,
//! and if the host has moved a frame, frames of its former color no longer evict it. Method: each frame is tested
//! against its own color, which must evict it, and against the next one, which must not. If both evict it, another
//! program does, and the test is void; if neither does in rounds that are apart in time, the frame has moved.
//! Properties: a color that has passed once is accepted; moved frames are distinguished from a host that is too noisy
//! for a result.

use std::path::Path;
use std::time::{Duration, Instant};

use cachemate_agent::timing::{Calibration, ReferenceSet};

use super::ColorError;

/// Maximum time that a proof waits for quiet moments.
const PATIENCE: Duration = Duration::from_secs(4);
const ROUND_PAUSE: Duration = Duration::from_millis(25);
/// Frames of each color that are tested in one round; at least [`MIN_RIGHT`] of them must have their color.
const TESTED_FRAMES: u32 = 8;
const MIN_RIGHT: u32 = 5;
/// Number of rounds in which a color's frames must behave like moved ones to count as moved.
const MOVED_ROUNDS: u32 = 4;

/// Result of one frame, or of a round of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProofResult {
    /// The frame's own color evicts it, and the next one does not.
    Confirmed,
    /// Neither its own color nor the next one evicts it.
    Changed,
    /// Frames of another color evicted it, too.
    Disturbed,
}

/// Tests one frame against its own color and the next one.
///
/// # Safety
/// The page must belong to the reference set.
unsafe fn verify_frame(kit: &mut ReferenceSet, page: *const u8, color: u32) -> ProofResult {
    // SAFETY: the caller's promise.
    let (own_proof, next_proof) =
        unsafe { (kit.has_color(page, color), kit.has_color(page, (color + 1) % kit.colors())) };
    match (own_proof, next_proof) {
        (true, false) => ProofResult::Confirmed,
        (false, false) => ProofResult::Changed,
        (_, true) => ProofResult::Disturbed,
    }
}

/// Results of a color over all rounds.
#[derive(Clone, Copy, Default, Debug)]
struct ColorProof {
    is_confirmed: bool,
    moved_rounds: u32,
}

impl ColorProof {
    /// Adds a round: the numbers of frames, out of [`TESTED_FRAMES`], that held and that moved.
    fn add(&mut self, held_frames: u32, moved_frames: u32) {
        self.is_confirmed |= held_frames >= MIN_RIGHT;
        self.moved_rounds += u32::from(moved_frames >= MIN_RIGHT);
    }
    fn is_settled(&self) -> bool {
        self.is_confirmed || self.moved_rounds >= MOVED_ROUNDS
    }
}

/// Verifies that each color's frames evict each other, and that the next color's do not.
///
/// # Errors
/// Hits and misses cannot be distinguished, or not every color could be verified in time because of noise; or frames
/// have moved.
pub(super) fn verify_reference_set(kit: &mut ReferenceSet, path: &Path) -> Result<Calibration, ColorError> {
    let start = Instant::now();
    let mut colors = vec![ColorProof::default(); kit.colors() as usize];
    let mut calibration = kit.calibrate();
    for round in 0.. {
        if calibration.threshold_cycles().is_some() {
            for (index, color) in colors.iter_mut().enumerate().filter(|(_, color)| !color.is_settled()) {
                let (held_frames, moved_frames) = test_round(kit, index as u32, round);
                color.add(held_frames, moved_frames);
            }
        }
        if colors.iter().all(ColorProof::is_settled) || start.elapsed() > PATIENCE {
            break;
        }
        std::thread::sleep(ROUND_PAUSE);
        calibration = kit.calibrate();
    }
    let unsettled_colors = colors.iter().filter(|color| !color.is_settled()).count();
    let moved_colors = colors.iter().filter(|color| !color.is_confirmed && color.is_settled()).count();
    if unsettled_colors == 0 && moved_colors == 0 {
        return Ok(calibration);
    }
    if calibration.threshold_cycles().is_none() {
        return Err(ColorError::Noisy(format!(
            "a hit takes {} cycles and a miss {}: too close to tell colors",
            calibration.hit_cycles, calibration.miss_cycles
        )));
    }
    if moved_colors == 0 {
        return Err(ColorError::Noisy(format!(
            "{unsettled_colors} of {} colors could not be verified in {:.0} s: another program fills this core's cache",
            colors.len(),
            PATIENCE.as_secs_f64()
        )));
    }
    let problem = format!(
        "frames of {moved_colors} of {} colors are no longer of one color, in {MOVED_ROUNDS} rounds each: the host moved them",
        colors.len()
    );
    Err(ColorError::BadReferenceSet(path.to_path_buf(), problem))
}

/// Numbers of frames that hold and that have moved, among the frames that are tested in this round.
fn test_round(kit: &mut ReferenceSet, color: u32, round: u32) -> (u32, u32) {
    let members: Vec<*const u8> = kit.frames_of_color(color).collect();
    let (mut held_frames, mut moved_frames) = (0, 0);
    for index in 0..TESTED_FRAMES {
        let page = members[((round * TESTED_FRAMES + index) as usize) % members.len()];
        // SAFETY: a frame of the mapped reference set.
        match unsafe { verify_frame(kit, page, color) } {
            ProofResult::Confirmed => held_frames += 1,
            ProofResult::Changed => moved_frames += 1,
            ProofResult::Disturbed => {}
        }
    }
    (held_frames, moved_frames)
}

/// Results of repeated tests of one color's frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct ColorVerification {
    /// Frames of the reference set that have this color.
    pub frames: u64,
    /// Frames that held in more than half of their valid tests.
    pub frames_hold: u64,
    /// Frames that appeared moved more often than they held.
    pub frames_moved: u64,
    /// All tests, including disturbed ones.
    pub answers: u64,
    /// Void tests, in which the next color evicted the frame as well.
    pub answers_disturbed: u64,
}

impl ColorVerification {
    /// Do enough of its frames hold for a proof?
    pub fn is_usable(&self) -> bool {
        self.frames_hold * u64::from(TESTED_FRAMES) >= self.frames * u64::from(MIN_RIGHT)
    }
}

/// Tests every frame of the reference set once per round, until `max_time` has passed or `stop` returns true; results by
/// color.
pub fn watch(kit: &mut ReferenceSet, max_time: Duration, stop: &dyn Fn() -> bool) -> Vec<ColorVerification> {
    let start = Instant::now();
    let pages: Vec<(u32, *const u8)> = (0..kit.colors())
        .flat_map(|color| kit.frames_of_color(color).map(move |page| (color, page)).collect::<Vec<_>>())
        .collect();
    // Counts by frame: confirmed, moved, disturbed.
    let mut shown = vec![[0u64; 3]; pages.len()];
    loop {
        kit.calibrate();
        for ((color, page), counts) in pages.iter().zip(&mut shown) {
            // SAFETY: frames of the mapped reference set.
            counts[unsafe { verify_frame(kit, *page, *color) } as usize] += 1;
        }
        if start.elapsed() >= max_time || stop() {
            break;
        }
        std::thread::sleep(ROUND_PAUSE);
    }
    let mut colors = vec![ColorVerification::default(); kit.colors() as usize];
    for ((color, _), [holds, moved, disturbed]) in pages.iter().zip(shown) {
        let verification = &mut colors[*color as usize];
        verification.frames += 1;
        verification.frames_hold += u64::from(holds > moved);
        verification.frames_moved += u64::from(moved > holds);
        verification.answers += holds + moved + disturbed;
        verification.answers_disturbed += disturbed;
    }
    colors
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does one good round confirm a color, do only four bad ones refute it, and do disturbed ones not count?
    #[test]
    fn a_color_holds_by_one_round_and_has_moved_by_four() {
        let mut color = ColorProof::default();
        (0..100).for_each(|_| color.add(2, 2)); // the rest was disturbed
        assert!(!color.is_settled());
        (0..MOVED_ROUNDS - 1).for_each(|_| color.add(0, TESTED_FRAMES));
        assert!(!color.is_settled());
        let mut actual_color = color;
        actual_color.add(MIN_RIGHT, 0);
        assert!(actual_color.is_settled() && actual_color.is_confirmed);
        color.add(0, MIN_RIGHT);
        assert!(color.is_settled() && !color.is_confirmed);
        let watched = |frames_hold| ColorVerification { frames: 32, frames_hold, ..ColorVerification::default() };
        assert!(watched(20).is_usable() && !watched(19).is_usable());
    }
}
