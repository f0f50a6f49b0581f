//! Decisions in words and numbers: what was weighed, why this one, and what was measured after.

use cachemate_core::{Reason, ReasonKind, TaskId, View};

use super::asks::Asks;
use super::layout::Layout;
use super::scene::Scene;
use super::score::speeds;
use super::search::{Candidate, Judge};

/// A look for a better plan, and what it found.
pub struct Chosen<'a> {
    pub scene: &'a Scene,
    pub candidates: &'a [Candidate],
    pub best: &'a Candidate,
    pub held: &'a Layout,
    pub judge: Judge,
    /// Over what holds, as a share, and how likely it is worth it.
    pub gain: f64,
    pub likely: f64,
}

fn number(name: impl Into<String>, value: f64) -> (String, f64) {
    (name.into(), value)
}

impl Chosen<'_> {
    fn weighed(&self, asks: &Asks, text: String) -> Reason {
        let mut numbers: Vec<(String, f64)> = self
            .candidates
            .iter()
            .map(|one| {
                number(format!("score_of_{}", one.what.replace(' ', "_")), one.score.value(self.judge.objective))
            })
            .collect();
        numbers.push(number("gain_percent", 100.0 * self.gain));
        numbers.push(number("likely_percent", 100.0 * self.likely));
        numbers.push(number("probing_percent_of_processor_time", 100.0 * asks.spent_share()));
        let tasks: Vec<TaskId> = self.scene.known().map(|at| self.scene.tasks[at].task).collect();
        Reason { kind: ReasonKind::Plain, tasks, text, numbers }
    }

    /// What holds stays.
    pub fn stays(&self, asks: &Asks, why: &mut Vec<Reason>) {
        let text = format!(
            "what holds stays: of {} plans weighed, '{}' promises {:+.1} %, worth it with {:.0} %",
            self.candidates.len(),
            self.best.what,
            100.0 * self.gain,
            100.0 * self.likely
        );
        why.push(self.weighed(asks, text));
    }

    /// The best plan is made, or tried.
    pub fn changes(&self, how: &str, asks: &Asks, why: &mut Vec<Reason>) {
        let text = format!(
            "'{}' is {how}: of {} plans weighed it promises most, {:+.1} %, worth it with {:.0} %",
            self.best.what,
            self.candidates.len(),
            100.0 * self.gain,
            100.0 * self.likely
        );
        why.push(self.weighed(asks, text));
        let (before, after) = (speeds(self.scene, self.held), speeds(self.scene, &self.best.layout));
        for at in self.scene.known() {
            let (Some(old), Some(new)) = (before[at], after[at]) else { continue };
            let mut text = format!(
                "{{0}}: {:.0} % of its speed alone, {:.0} % before",
                100.0 * new.over_alone,
                100.0 * old.over_alone
            );
            text += &self.place(at);
            let mut numbers = vec![
                number("speed_over_alone", new.over_alone),
                number("speed_over_alone_before", old.over_alone),
                number("held_bytes", new.held_bytes),
                number("held_bytes_before", old.held_bytes),
            ];
            numbers.extend(self.known(at));
            let (tasks, kind) = (vec![self.scene.tasks[at].task], ReasonKind::Plain);
            why.push(Reason { kind, tasks, text, numbers });
        }
    }

    /// What the forecast rests on.
    fn known(&self, at: usize) -> Vec<(String, f64)> {
        let Some(program) = &self.scene.tasks[at].program else { return Vec::new() };
        let bytes = self.scene.sites.iter().map(|site| site.bytes).fold(0.0, f64::max);
        let misses = |share: f64| 1000.0 * program.misses(share * bytes);
        vec![
            number("misses_per_kilo_instr_alone", misses(1.0)),
            number("misses_per_kilo_instr_on_half", misses(0.5)),
            number("misses_per_kilo_instr_on_an_eighth", misses(0.125)),
            number("cycles_per_miss", program.cycles_per_miss),
            number("cycles_per_instr_without_misses", program.base_cycles),
            number("holds_over_composed", program.holds),
        ]
    }

    fn place(&self, at: usize) -> String {
        let layout = &self.best.layout;
        let Some(site) = layout.home[at] else { return String::new() };
        let mut text = String::new();
        if layout.held[at] {
            text += &format!(", on cache {}", self.scene.sites[site].cache.0);
        }
        if let Some(group) = layout.cuts[site].iter().find(|group| group.members.contains(&at)) {
            let units = self.scene.sites[site].divided.map_or(0, |divided| divided.units());
            text += &format!(", with {} of {units} parts of it", group.units);
            if group.members.len() > 1 {
                text += &format!(" together with {} more", group.members.len() - 1);
            }
        }
        if let Some(turns) = &layout.turns[site]
            && let Some(gang) = turns.gangs.iter().find(|gang| gang.contains(&at))
        {
            let ms = turns.slice_ns / 1_000_000;
            text += &format!(", in turns of {ms} ms with {} more", gang.len() - 1);
        }
        if self.scene.tasks[at].cluster.is_some() {
            text += ", and shares data";
        }
        text
    }
}

/// What a change was measured to do.
pub fn verdict(view: &View<'_>, kept: bool, found: (f64, f64), forecast: f64, windows: u32) -> Reason {
    let measured = 100.0 * libm::expm1(found.0);
    let how = if windows > 0 { format!("tried for {windows} windows") } else { "watched".to_string() };
    let what = if kept { "it stays" } else { "it is taken back" };
    let text = format!("the change was {how}: {measured:+.1} %, forecast {:+.1} %; {what}", 100.0 * forecast);
    let numbers = vec![
        number("measured_percent", measured),
        number("standard_error_percent", 100.0 * found.1.min(1e6)),
        number("forecast_percent", 100.0 * forecast),
    ];
    let tasks = view.present().map(|task| task.task).collect();
    Reason { kind: ReasonKind::TrialVerdict, tasks, text, numbers }
}
