//! `cachemate page-color verify`: tests whether reference frames still have their colors.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::bail;
use cachemate_linux::act::colors::reference_set::{self, BASE};
use cachemate_linux::act::colors::verification::{ColorVerification, observe_colors};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::session::Session;

/// Re-test every reference frame to check that it still has its color
///
/// Frames of its own color must evict a frame from the cache, and frames of the next color must not. If both evict it,
/// another program is filling the cache; such answers are counted as disturbed. Confined programs are not affected. The
/// exit code is 1 if a color has lost so many frames that it can no longer be identified; 'cachemate page-color
/// discover' then makes a new reference set.
#[derive(Args)]
pub struct Verify {
    /// Duration of the test
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate page-color verify --json`.
#[derive(Serialize)]
struct VerifyJson {
    hit_cycles: u64,
    miss_cycles: u64,
    seconds: f64,
    frames: u64,
    stable_frames: u64,
    frames_moved: u64,
    answers: u64,
    disturbed_answers: u64,
    /// Results for each color, ordered by color.
    colors: Vec<ColorVerification>,
}

impl Verify {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if !(0.1..=86_400.0).contains(&self.seconds) {
            bail!(crate::exit::UsageError(
                "--seconds must be from 0.1 to 86400".into()
            ));
        }
        let (stop, start) = (session.interrupt_flag(), Instant::now());
        let mut opened_set = reference_set::open_unverified(Path::new(BASE))?;
        let test_time = Duration::from_secs_f64(self.seconds);
        let colors = observe_colors(&mut opened_set.frames, test_time, &|| {
            stop.load(Ordering::Relaxed)
        });
        let sum_over_colors =
            |value: fn(&ColorVerification) -> u64| colors.iter().map(value).sum::<u64>();
        let calibration = opened_set.frames.calibrate();
        let result = VerifyJson {
            hit_cycles: calibration.hit_cycles,
            miss_cycles: calibration.miss_cycles,
            seconds: start.elapsed().as_secs_f64(),
            frames: sum_over_colors(|color| color.frames),
            stable_frames: sum_over_colors(|color| color.stable_frames),
            frames_moved: sum_over_colors(|color| color.frames_moved),
            answers: sum_over_colors(|color| color.answers),
            disturbed_answers: sum_over_colors(|color| color.disturbed_answers),
            colors,
        };
        session.print_result(self.json.json, &result, || render(&result))?;
        match result
            .colors
            .iter()
            .filter(|color| !color.is_usable())
            .count()
        {
            0 => Ok(()),
            lost_count => {
                bail!(
                    "{lost_count} of {} colors can no longer be identified by their reference frames",
                    result.colors.len()
                )
            }
        }
    }
}

fn render(result: &VerifyJson) -> String {
    let worst_color = result
        .colors
        .iter()
        .enumerate()
        .max_by_key(|(_, color)| color.frames_moved);
    let worst_color = worst_color.filter(|(_, color)| color.frames_moved > 0);
    format!(
        "{} of {} frames still have their color, {} have moved, {} are undecided; {} answers in {:.1} s, {:.1} % of them disturbed by other programs; a hit takes {} cycles, a miss {}\n{}",
        result.stable_frames,
        result.frames,
        result.frames_moved,
        result.frames - result.stable_frames - result.frames_moved,
        result.answers,
        result.seconds,
        100.0 * result.disturbed_answers as f64 / result.answers.max(1) as f64,
        result.hit_cycles,
        result.miss_cycles,
        worst_color.map_or(String::new(), |(color_index, color)| format!(
            "most of the moved frames are of color {color_index}: {} of {}\n",
            color.frames_moved, color.frames
        )),
    )
}
