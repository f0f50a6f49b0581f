//! Verification that the reference frames of each color still have one color.
//!
//! Problem: on a shared host one test result is weak evidence. Other programs on the same core evict lines as well,
//! and if the host has moved a frame, frames of its former color no longer evict it. Method: each frame is tested
//! against its own color, which must evict it, and against the next one, which must not. If both evict it, a co-runner
//! is to blame and the test is void; if neither does, in rounds that are apart in time, the host has moved the frame.
//! Properties: a color that has passed once is accepted; moved frames are distinguished from a host that is too noisy
//! for a result.

use std::path::Path;
use std::time::{Duration, Instant};

use cachemate_agent::timing::{Calibration, ReferenceSet};

use super::ColorError;

/// Maximum time that a proof waits for quiet moments.
const MAX_PROOF_TIME: Duration = Duration::from_secs(4);
const ROUND_PAUSE: Duration = Duration::from_millis(25);
/// Frames of each color that are tested in one round; at least [`MIN_AGREEING_FRAMES`] of them must have their color.
const TESTED_FRAMES: u32 = 8;
const MIN_AGREEING_FRAMES: u32 = 5;
/// Number of rounds in which a color's frames must behave like moved ones to count as moved.
const MIN_MOVED_ROUNDS: u32 = 4;

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
unsafe fn verify_frame(
    reference_set: &mut ReferenceSet,
    page: *const u8,
    color: u32,
) -> ProofResult {
    // SAFETY: the caller's promise.
    let (is_evicted_by_own, is_evicted_by_next) = unsafe {
        (
            reference_set.has_color(page, color),
            reference_set.has_color(page, (color + 1) % reference_set.colors()),
        )
    };
    match (is_evicted_by_own, is_evicted_by_next) {
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
    fn add_round(&mut self, confirmed_frames: u32, moved_frames: u32) {
        self.is_confirmed |= confirmed_frames >= MIN_AGREEING_FRAMES;
        self.moved_rounds += u32::from(moved_frames >= MIN_AGREEING_FRAMES);
    }
    fn is_settled(&self) -> bool {
        self.is_confirmed || self.moved_rounds >= MIN_MOVED_ROUNDS
    }
}

/// Verifies that each color's frames evict each other, and that the next color's do not.
///
/// # Errors
/// Hits and misses cannot be distinguished, or not every color could be verified in time because of noise; or frames
/// have moved.
pub(super) fn verify_reference_set(
    reference_set: &mut ReferenceSet,
    path: &Path,
) -> Result<Calibration, ColorError> {
    let start = Instant::now();
    let mut color_proofs = vec![ColorProof::default(); reference_set.colors() as usize];
    let mut calibration = reference_set.calibrate();
    for round in 0.. {
        if calibration.threshold_cycles().is_some() {
            for (index, color) in color_proofs
                .iter_mut()
                .enumerate()
                .filter(|(_, color)| !color.is_settled())
            {
                let (confirmed_frames, moved_frames) =
                    test_round(reference_set, index as u32, round);
                color.add_round(confirmed_frames, moved_frames);
            }
        }
        if color_proofs.iter().all(ColorProof::is_settled) || start.elapsed() > MAX_PROOF_TIME {
            break;
        }
        std::thread::sleep(ROUND_PAUSE);
        calibration = reference_set.calibrate();
    }
    let unsettled_colors = color_proofs
        .iter()
        .filter(|proof| !proof.is_settled())
        .count();
    let moved_colors = color_proofs
        .iter()
        .filter(|proof| !proof.is_confirmed && proof.is_settled())
        .count();
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
            color_proofs.len(),
            MAX_PROOF_TIME.as_secs_f64()
        )));
    }
    let problem = format!(
        "frames of {moved_colors} of {} colors are no longer of one color, in {MIN_MOVED_ROUNDS} rounds each: the host moved them",
        color_proofs.len()
    );
    Err(ColorError::BadReferenceSet(path.to_path_buf(), problem))
}

/// Tests some frames of a color; returns the numbers of frames that were confirmed and that have moved.
fn test_round(reference_set: &mut ReferenceSet, color: u32, round: u32) -> (u32, u32) {
    let members: Vec<*const u8> = reference_set.frames_of_color(color).collect();
    let (mut confirmed_frames, mut moved_frames) = (0, 0);
    for index in 0..TESTED_FRAMES {
        let page = members[((round * TESTED_FRAMES + index) as usize) % members.len()];
        // SAFETY: a frame of the mapped reference set.
        match unsafe { verify_frame(reference_set, page, color) } {
            ProofResult::Confirmed => confirmed_frames += 1,
            ProofResult::Changed => moved_frames += 1,
            ProofResult::Disturbed => {}
        }
    }
    (confirmed_frames, moved_frames)
}

/// Results of repeated tests of one color's frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub struct ColorVerification {
    /// Frames of the reference set that have this color.
    pub frames: u64,
    /// Frames that held in more than half of their valid tests.
    pub stable_frames: u64,
    /// Frames that appeared moved more often than they held.
    pub frames_moved: u64,
    /// All tests, including disturbed ones.
    pub answers: u64,
    /// Void tests, in which the next color evicted the frame as well.
    pub disturbed_answers: u64,
}

impl ColorVerification {
    /// Do enough of its frames hold for a proof?
    pub fn is_usable(&self) -> bool {
        self.stable_frames * u64::from(TESTED_FRAMES)
            >= self.frames * u64::from(MIN_AGREEING_FRAMES)
    }
}

/// Tests every frame of the reference set once per round, until `max_time` has passed or the callback returns true.
/// The results are in order of color.
pub fn observe_colors(
    reference_set: &mut ReferenceSet,
    max_time: Duration,
    should_stop: &dyn Fn() -> bool,
) -> Vec<ColorVerification> {
    let start = Instant::now();
    let pages: Vec<(u32, *const u8)> = (0..reference_set.colors())
        .flat_map(|color| {
            reference_set
                .frames_of_color(color)
                .map(move |page| (color, page))
                .collect::<Vec<_>>()
        })
        .collect();
    // Counts by frame: confirmed, moved, disturbed.
    let mut result_counts = vec![[0u64; 3]; pages.len()];
    loop {
        reference_set.calibrate();
        for ((color, page), counts) in pages.iter().zip(&mut result_counts) {
            // SAFETY: frames of the mapped reference set.
            counts[unsafe { verify_frame(reference_set, *page, *color) } as usize] += 1;
        }
        if start.elapsed() >= max_time || should_stop() {
            break;
        }
        std::thread::sleep(ROUND_PAUSE);
    }
    let mut verifications = vec![ColorVerification::default(); reference_set.colors() as usize];
    for ((color, _), [confirmed_count, moved_count, disturbed_count]) in
        pages.iter().zip(result_counts)
    {
        let verification = &mut verifications[*color as usize];
        verification.frames += 1;
        verification.stable_frames += u64::from(confirmed_count > moved_count);
        verification.frames_moved += u64::from(moved_count > confirmed_count);
        verification.answers += confirmed_count + moved_count + disturbed_count;
        verification.disturbed_answers += disturbed_count;
    }
    verifications
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does one good round confirm a color, do only four bad ones refute it, and do disturbed ones not count?
    #[test]
    fn one_good_round_confirms_a_color_and_four_bad_ones_refute_it() {
        let mut color = ColorProof::default();
        (0..100).for_each(|_| color.add_round(2, 2)); // the rest was disturbed
        assert!(!color.is_settled());
        (0..MIN_MOVED_ROUNDS - 1).for_each(|_| color.add_round(0, TESTED_FRAMES));
        assert!(!color.is_settled());
        let mut actual_color = color;
        actual_color.add_round(MIN_AGREEING_FRAMES, 0);
        assert!(actual_color.is_settled() && actual_color.is_confirmed);
        color.add_round(0, MIN_AGREEING_FRAMES);
        assert!(color.is_settled() && !color.is_confirmed);
        let watched = |stable_frames| ColorVerification {
            frames: 32,
            stable_frames,
            ..ColorVerification::default()
        };
        assert!(watched(20).is_usable() && !watched(19).is_usable());
    }
}
