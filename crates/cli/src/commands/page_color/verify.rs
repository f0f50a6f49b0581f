//! `cachemate page-color verify`.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::bail;
use cachemate_linux::act::colors::reference_set::{self, BASE};
use cachemate_linux::act::colors::verification::{ColorVerification, watch};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::session::Session;

/// Ask every frame that defines a color, again and again, whether it still has it
///
/// A frame is put to the frames of its own color, which must push it out of the cache, and to the next color's, which must
/// not. Answers in which both did say that somebody else fills the cache just then, and are counted apart. Programs that run
/// colored are not disturbed. Some frames may be wrong from the start; ends with 1 if a color has lost so many that it can no
/// longer be told ('cachemate page-color discover' makes a new kit then).
#[derive(Args)]
pub struct Verify {
    /// Ask for this long
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
    frames_hold: u64,
    frames_moved: u64,
    answers: u64,
    answers_disturbed: u64,
    /// In order of the colors.
    colors: Vec<ColorVerification>,
}

impl Verify {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        if !(0.1..=86_400.0).contains(&self.seconds) {
            bail!(crate::exit::UsageError("--seconds must be from 0.1 to 86400".into()));
        }
        let (stop, start) = (session.interrupt_flag(), Instant::now());
        let mut kit = reference_set::open_unverified(Path::new(BASE))?;
        let at_most = Duration::from_secs_f64(self.seconds);
        let colors = watch(&mut kit.kit, at_most, &|| stop.load(Ordering::Relaxed));
        let sum = |of: fn(&ColorVerification) -> u64| colors.iter().map(of).sum::<u64>();
        let calibration = kit.kit.calibrate();
        let result = VerifyJson {
            hit_cycles: calibration.hit_cycles,
            miss_cycles: calibration.miss_cycles,
            seconds: start.elapsed().as_secs_f64(),
            frames: sum(|color| color.frames),
            frames_hold: sum(|color| color.frames_hold),
            frames_moved: sum(|color| color.frames_moved),
            answers: sum(|color| color.answers),
            answers_disturbed: sum(|color| color.answers_disturbed),
            colors,
        };
        session.answer(self.json.json, &result, || words(&result))?;
        match result.colors.iter().filter(|color| !color.is_usable()).count() {
            0 => Ok(()),
            lost => bail!("{lost} of {} colors can no longer be told by their frames", result.colors.len()),
        }
    }
}

fn words(told: &VerifyJson) -> String {
    let worst = told.colors.iter().enumerate().max_by_key(|(_, color)| color.frames_moved);
    let worst = worst.filter(|(_, color)| color.frames_moved > 0);
    format!(
        "{} of {} frames have their color, {} have moved, {} were not told; {} answers in {:.1} s, {:.1} % of them disturbed by others; a hit takes {} cycles, a miss {}\n{}",
        told.frames_hold,
        told.frames,
        told.frames_moved,
        told.frames - told.frames_hold - told.frames_moved,
        told.answers,
        told.seconds,
        100.0 * told.answers_disturbed as f64 / told.answers.max(1) as f64,
        told.hit_cycles,
        told.miss_cycles,
        worst.map_or(String::new(), |(at, color)| format!(
            "most of them of color {at}: {} of {}\n",
            color.frames_moved, color.frames
        )),
    )
}
