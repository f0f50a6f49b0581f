//! `top` on a terminal: a full-screen view of the daemon's status, redrawn in every iteration.
//!
//! The head shows the daemon's state. Below, each cache lists its programs, the busiest first; this part scrolls,
//! because a host may have many caches. The foot shows the turns of gangs and the last decisions. If the daemon does
//! not answer, the screen reports this and polls until it does. The terminal is restored however the view ends.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use cachemate_report::Align;
use cachemate_report::text::EscapedText;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph};

use crate::service_text::render_services;
use crate::status_text::{
    COLUMNS, decisions_heading, decisions_text, gang_lines, problems_text, shares_text,
    status_head, task_row, tasks_by_cache,
};
use cachemate_daemon::socket;
use cachemate_daemon::status::DaemonStatus;
use cachemate_page::{ContentionClass, TaskSnapshot};

/// Maximum number of lines of the foot: gangs, refused changes and decisions.
const MAX_FOOTER_LINES: usize = 12;
/// Maximum number of services listed above the caches.
const MAX_SERVICES: usize = 20;
/// Maximum delay of the response to a key or a signal.
const MAX_KEY_DELAY: Duration = Duration::from_millis(100);
const KEY_HELP: &str = " q: quit   arrows, page keys: scroll   space: pause";

/// State of the screen: settings that keys change, and the last poll.
#[derive(Default)]
struct ScreenState {
    scroll: usize,
    is_paused: bool,
    has_color: bool,
    /// Error of the last poll.
    error: Option<String>,
}

/// Options of `top`.
pub struct ScreenOptions<'a> {
    pub socket: &'a Path,
    pub interval: Duration,
    pub iterations: Option<u64>,
    pub color: bool,
}

impl ScreenOptions<'_> {
    /// Shows the status until `q`, Ctrl-C, `stop`, or the last iteration.
    pub fn run(&self, stop: &AtomicBool) -> anyhow::Result<()> {
        let first_status = socket::query_status(self.socket)?;
        let mut terminal = ratatui::try_init().context("cannot set up the terminal")?;
        let outcome = self.run_loop(&mut terminal, first_status, stop);
        let restore_result = ratatui::try_restore().context("cannot restore the terminal");
        outcome.and(restore_result)
    }

    fn run_loop(
        &self,
        terminal: &mut ratatui::DefaultTerminal,
        mut status: DaemonStatus,
        stop: &AtomicBool,
    ) -> anyhow::Result<()> {
        let mut state = ScreenState {
            has_color: self.color,
            ..ScreenState::default()
        };
        let (mut iterations, mut next_iteration) = (1, Instant::now() + self.interval);
        while !stop.load(Ordering::Relaxed) {
            terminal
                .draw(|frame| state.draw(frame, &status))
                .context("cannot draw on the terminal")?;
            let remaining = next_iteration.saturating_duration_since(Instant::now());
            if event::poll(remaining.min(MAX_KEY_DELAY)).context("cannot read the keys")? {
                match event::read().context("cannot read the keys")? {
                    Event::Key(key) if !state.handle_key(key) => break,
                    _ => {}
                }
            }
            if Instant::now() < next_iteration {
                continue;
            }
            if self
                .iterations
                .is_some_and(|max_iterations| iterations >= max_iterations)
            {
                break;
            }
            next_iteration = Instant::now() + self.interval;
            iterations += 1;
            if !state.is_paused {
                match socket::query_status(self.socket) {
                    Ok(new_status) => (status, state.error) = (new_status, None),
                    Err(error) => state.error = Some(format!("{error:#}")),
                }
            }
        }
        Ok(())
    }
}

impl ScreenState {
    /// Handles a key; returns false to quit.
    fn handle_key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return true;
        }
        let has_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('c') if has_control => return false, // raw mode does not turn it into a signal
            KeyCode::Char(' ') => self.is_paused = !self.is_paused,
            KeyCode::Down | KeyCode::Char('j') => self.scroll += 1,
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll += 10,
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(10),
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = usize::MAX / 2,
            _ => {}
        }
        true
    }

    fn color_style(&self, color: Color) -> Style {
        if self.has_color {
            Style::new().fg(color)
        } else {
            Style::new()
        }
    }

    fn draw(&mut self, frame: &mut Frame<'_>, status: &DaemonStatus) {
        let head_lines: Vec<Line<'_>> = EscapedText::for_output(&status_head(status))
            .as_str()
            .lines()
            .map(|line| Line::from(line.to_string()))
            .collect();
        let details = self.detail_lines(status);
        let detail_height = if details.is_empty() {
            0
        } else {
            details.len() as u16 + 1
        };
        let heights = [
            Constraint::Length(head_lines.len() as u16),
            Constraint::Min(3),
            Constraint::Length(detail_height),
            Constraint::Length(1),
        ];
        let [head_area, body_area, details_area, footer_area] =
            Layout::vertical(heights).areas(frame.area());
        frame.render_widget(Paragraph::new(head_lines), head_area);
        let lines = self.body_lines(status);
        self.scroll = self
            .scroll
            .min(lines.len().saturating_sub(usize::from(body_area.height)));
        let visible_lines = lines
            .into_iter()
            .skip(self.scroll)
            .take(usize::from(body_area.height))
            .collect::<Vec<_>>();
        frame.render_widget(Paragraph::new(visible_lines), body_area);
        let block = Block::new()
            .borders(Borders::TOP)
            .title(decisions_heading(status.mode));
        frame.render_widget(Paragraph::new(details).block(block), details_area);
        frame.render_widget(Paragraph::new(self.footer()), footer_area);
    }

    fn footer(&self) -> Line<'static> {
        match (&self.error, self.is_paused) {
            (Some(error), _) => Line::styled(
                format!(" {}", EscapedText::for_line(error)),
                self.color_style(Color::Red),
            ),
            (None, true) => Line::styled(format!("{KEY_HELP}   (paused)"), Modifier::REVERSED),
            (None, false) => Line::styled(KEY_HELP, Modifier::DIM),
        }
    }

    /// Lines about gangs and cache partitions, decisions, and refused changes.
    fn detail_lines(&self, status: &DaemonStatus) -> Vec<Line<'static>> {
        let style_text = |text: String, style: Style| {
            let text = EscapedText::for_output(&text);
            text.as_str()
                .lines()
                .map(|line| Line::styled(line.to_string(), style))
                .collect::<Vec<_>>()
        };
        let mut lines = style_text(
            gang_lines(status),
            Style::new().add_modifier(Modifier::BOLD),
        );
        lines.extend(style_text(
            shares_text(status),
            Style::new().add_modifier(Modifier::BOLD),
        ));
        lines.extend(style_text(
            decisions_text(&status.decisions, 6),
            Style::new(),
        ));
        lines.extend(style_text(
            problems_text(status),
            self.color_style(Color::Yellow),
        ));
        lines.truncate(MAX_FOOTER_LINES);
        lines
    }

    /// The services, then the column names and the lines of each cache with its programs.
    fn body_lines(&self, status: &DaemonStatus) -> Vec<Line<'static>> {
        let groups = tasks_by_cache(status);
        let names: Vec<String> = COLUMNS.iter().map(|(name, _)| name.to_string()).collect();
        let rows: Vec<Vec<String>> = status.snapshot.tasks.iter().map(task_row).collect();
        let width = |index: usize| {
            rows.iter()
                .chain([&names])
                .map(|cells| cells[index].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
        let services = render_services(&status.snapshot.services, MAX_SERVICES);
        let services = EscapedText::for_output(services.trim_start());
        let mut lines: Vec<Line<'_>> = match status.snapshot.services.is_empty() {
            true => Vec::new(),
            false => services
                .as_str()
                .lines()
                .chain([""])
                .map(|line| Line::from(line.to_string()))
                .collect(),
        };
        let header = pad_cells(&names, &widths)
            .map(Span::raw)
            .collect::<Line<'_>>();
        lines.push(header.style(Modifier::REVERSED));
        for (title, tasks) in groups {
            lines.push(Line::styled(title.trim_end().to_string(), Modifier::BOLD));
            lines.extend(
                tasks
                    .into_iter()
                    .map(|task| self.program_line(task, &widths)),
            );
        }
        lines
    }

    fn program_line(&self, task: &TaskSnapshot, widths: &[usize]) -> Line<'static> {
        let cells = task_row(task);
        let spans = pad_cells(&cells, widths)
            .zip(COLUMNS)
            .map(|(text, (name, _))| {
                let style = match *name {
                    "class" => self.color_style(class_color(task.class)),
                    "forecast" => self.color_style(slowdown_color(task.forecast_slowdown)),
                    "measured" => self.color_style(slowdown_color(task.measured_slowdown)),
                    _ => Style::new(),
                };
                Span::styled(text, style)
            });
        spans.collect()
    }
}

/// Pads the cells of a row to the widths of their columns.
fn pad_cells<'a>(texts: &'a [String], widths: &'a [usize]) -> impl Iterator<Item = String> + 'a {
    texts
        .iter()
        .zip(widths)
        .zip(COLUMNS)
        .map(|((text, &width), (_, align))| match align {
            Align::Left => format!("{text:<width$}  "),
            Align::Right => format!("{text:>width$}  "),
        })
}

fn class_color(class: Option<ContentionClass>) -> Color {
    match class {
        Some(ContentionClass::AggressorAndVictim) => Color::Magenta,
        Some(ContentionClass::Aggressor) => Color::Red,
        Some(ContentionClass::Victim) => Color::Yellow,
        Some(ContentionClass::Quiet) => Color::Green,
        Some(ContentionClass::NotAggressor | ContentionClass::NotVictim) | None => Color::Reset,
    }
}

fn slowdown_color(relative_slowdown: Option<f64>) -> Color {
    match relative_slowdown {
        Some(slowdown) if slowdown >= 0.5 => Color::Red,
        Some(slowdown) if slowdown >= 0.1 => Color::Yellow,
        Some(_) => Color::Green,
        None => Color::Reset,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn sample_status() -> DaemonStatus {
        let task_json = |id: u32, name: &str, cache: u32, share: f64, intensity: f64| {
            serde_json::json!({
                "task": id, "pid": 100 + id, "tid": 100 + id, "name": name, "observed_only": false, "cpu": id, "cache": cache,
                "cpu_share": share, "intensity": { "value": intensity, "low": 0.0, "high": 1.0 },
                "class": if intensity > 0.15 { "aggressor" } else { "quiet" },
                "forecast_slowdown": intensity / 2.0, "reasons": []
            })
        };
        let cache_json = |id: u32, cpus: &str, tasks: &[u32]| serde_json::json!({ "cache": id, "level": "L3", "cpus": cpus, "size_bytes": 33_554_432, "tasks": tasks });
        let mut json = serde_json::to_value(DaemonStatus::default()).unwrap();
        json["version"] = "0.1.0".into();
        json["pid"] = 7.into();
        json["calibrated"] = true.into();
        json["policy"] = "intensity-gangs".into();
        json["caches"] = vec![cache_json(0, "0-3", &[0, 2]), cache_json(1, "4-7", &[1])].into();
        json["tasks"] = vec![
            task_json(0, "db", 0, 0.5, 0.0),
            task_json(1, "web", 1, 0.2, 0.1),
            task_json(2, "scan", 0, 0.9, 0.6),
        ]
        .into();
        json["decisions"] = serde_json::json!([{ "window": 4, "tasks": [2], "reason": "scan(102) alone", "numbers": [] }]);
        serde_json::from_value(json).unwrap()
    }

    fn render_screen(view: &mut ScreenState, size: (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
        terminal
            .draw(|frame| view.draw(frame, &sample_status()))
            .unwrap();
        let buffer = terminal.backend().buffer();
        let screen_line = |y| {
            (0..size.0)
                .map(|x| buffer[(x, y)].symbol())
                .collect::<String>()
                .trim_end()
                .to_string()
                + "\n"
        };
        (0..size.1).map(screen_line).collect()
    }

    /// Does a screen show every cache with its programs, the busiest first, and the last decisions?
    #[test]
    fn a_screen_shows_caches_programs_and_decisions() {
        let text = render_screen(&mut ScreenState::default(), (110, 12));
        let order = [
            "observing",
            "class",
            "CPUs 0-3",
            "scan",
            "db",
            "CPUs 4-7",
            "web",
            "last decisions",
            "scan(102) alone",
        ];
        let mut rest = text.as_str();
        for part in order.into_iter().chain([KEY_HELP.trim()]) {
            let at = rest
                .find(part)
                .unwrap_or_else(|| panic!("'{part}' is not where it should be:\n{text}"));
            rest = &rest[at + part.len()..];
        }
        let scan = text
            .lines()
            .find(|line| line.contains("scan "))
            .unwrap_or_default();
        assert!(
            scan.contains("aggressor") && scan.contains("0.60") && scan.contains("+30 %"),
            "{scan}"
        );
    }

    /// A host with two caches, whose services have measured losses.
    fn busy_status() -> DaemonStatus {
        let task_json = |id: u32,
                         name: &str,
                         cache: u32,
                         class: &str,
                         intensity: f64,
                         slowdown: f64| {
            serde_json::json!({
                "task": id, "pid": 100 + id, "tid": 100 + id, "name": name, "observed_only": false, "cpu": 4 * cache + id % 4,
                "cache": cache, "cpu_share": 0.9, "intensity": { "value": intensity, "low": 0.0, "high": 1.0 },
                "sensitivity": { "value": 1.1 * slowdown, "low": 0.0, "high": 1.0 },
                "class": class, "forecast_slowdown": 0.9 * slowdown, "measured_slowdown": slowdown, "reasons": []
            })
        };
        let service_json = |name: &str, task: u32, percent: f64, by: serde_json::Value| {
            serde_json::json!({
                "kind": "unit", "name": name, "pod": null, "container": null, "tasks": 1, "task_ids": [task],
                "unread_programs": null, "cpu_share": 0.9, "run_time_percent": percent, "run_time_range_percent": null, "cache_percent": percent,
                "cache_range_percent": null, "cache_source": "measured", "cache_by": by, "waiting_percent": 0.0,
                "waiting_range_percent": null, "waiting_by": [], "prevented": [], "reason": null, "max_slowdown_percent": null, "floor": null
            })
        };
        let cause = serde_json::json!([{
            "service": "backup.service", "kind": "unit", "percent": 31.0, "range_percent": [27.0, 35.0],
            "source": "measured", "forecast_percent": 28.0, "windows": 9
        }]);
        let mut json = serde_json::to_value(sample_status()).unwrap();
        json["policy"] = "auto".into();
        (json["mode"], json["level"], json["windows"]) = ("observe".into(), 1.into(), 42.into());
        (json["duration_s"], json["running_ns"], json["cpu_ns"]) =
            (1.0.into(), 42_000_000_000u64.into(), 120_000_000u64.into());
        json["caches"][0]["tasks"] = serde_json::json!([0, 2]);
        json["services"] = vec![
            service_json("redis.service", 0, 31.0, cause),
            service_json("nginx.service", 1, 2.0, serde_json::json!([])),
            service_json("backup.service", 2, 4.0, serde_json::json!([])),
        ]
        .into();
        json["tasks"] = vec![
            task_json(0, "redis-server", 0, "victim", 0.04, 0.31),
            task_json(1, "nginx", 1, "quiet", 0.01, 0.02),
            task_json(2, "restic", 0, "aggressor", 0.62, 0.04),
        ]
        .into();
        json["decisions"] = serde_json::json!([
            { "window": 41, "tasks": [2], "reason": "restic(102) moves to the cache of CPUs 4-7, away from redis-server(100)", "numbers": [] }
        ]);
        serde_json::from_value(json).unwrap()
    }

    fn color_code(color: Color) -> &'static str {
        match color {
            Color::Red => "#ff8a70",
            Color::Yellow => "#f0c64a",
            Color::Green => "#7fcf8a",
            Color::Magenta => "#d79bf0",
            _ => "#d8dee9",
        }
    }

    /// The screen as SVG, one text element for each word or phrase of one style.
    fn screen_picture(status: &DaemonStatus, (columns, lines): (u16, u16)) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
        let mut view = ScreenState {
            has_color: true,
            ..ScreenState::default()
        };
        terminal.draw(|frame| view.draw(frame, status)).unwrap();
        let buffer = terminal.backend().buffer();
        let (width, height) = (columns * 8 + 24, lines * 18 + 20);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
             style=\"max-width:100%;height:auto\" role=\"img\" aria-label=\"cachemate top: services, caches with their programs, and the last decision\" \
             font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" font-size=\"13\">\n\
             <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#1d2430\"/>\n"
        );
        for y in 0..lines {
            let mut x = 0;
            while x < columns {
                let style = buffer[(x, y)].style();
                let has_style = |at: &u16| buffer[(*at, y)].style() == style;
                let stretch: Vec<&str> = (x..columns)
                    .take_while(has_style)
                    .map(|at| buffer[(at, y)].symbol())
                    .collect();
                let (left, base) = (|at: usize| 12 + 8 * (x as usize + at), 22 + 18 * y);
                let mut color = color_code(style.fg.unwrap_or(Color::Reset));
                if style.add_modifier.contains(Modifier::REVERSED) {
                    let (from, top, wide) = (left(0), base - 13, 8 * stretch.len());
                    svg += &format!(
                        "<rect x=\"{from}\" y=\"{top}\" width=\"{wide}\" height=\"18\" fill=\"{color}\"/>\n"
                    );
                    color = "#1d2430";
                }
                let bold = if style.add_modifier.contains(Modifier::BOLD) {
                    " font-weight=\"bold\""
                } else {
                    ""
                };
                // Several spaces in a row, which SVG would join, separate phrases.
                let is_gap = |at: usize| {
                    stretch[at] == " " && stretch.get(at + 1).is_none_or(|next| *next == " ")
                };
                let mut at = 0;
                while at < stretch.len() {
                    let end = (at..stretch.len())
                        .find(|&next| is_gap(next))
                        .unwrap_or(stretch.len());
                    if end > at {
                        let phrase = stretch[at..end].concat();
                        let text = phrase
                            .trim_start()
                            .replace('&', "&amp;")
                            .replace('<', "&lt;");
                        let blank = phrase.chars().count() - phrase.trim_start().chars().count();
                        let (from, wide) = (left(at + blank), 8 * (end - at - blank));
                        svg += &format!(
                            "<text x=\"{from}\" y=\"{base}\" fill=\"{color}\"{bold} textLength=\"{wide}\">{text}</text>\n"
                        );
                    }
                    at = end + 1;
                }
                x += stretch.len() as u16;
            }
        }
        svg + "</svg>\n"
    }

    /// Is the picture in the README what the screen shows? `UPDATE_EXPECT=1` draws it again.
    #[test]
    fn the_readmes_picture_of_top_matches_the_screen() {
        let picture = screen_picture(&busy_status(), (112, 20));
        assert!(
            picture.contains("backup.service slows redis.service by +31 %"),
            "{picture}"
        );
        expect_test::expect_file!["../../../docs/pictures/top.svg"].assert_eq(&picture);
    }

    /// Does the middle scroll only to its end, and does a screen that is too small show the part that fits?
    #[test]
    fn scrolling_stops_at_the_end() {
        let mut view = ScreenState::default();
        assert!(view.handle_key(KeyEvent::from(KeyCode::End)));
        let text = render_screen(&mut view, (110, 9));
        assert!(
            text.contains("web") && !text.contains("L3 of CPUs 0-3"),
            "{text}"
        );
        assert!(view.scroll <= 5, "{}", view.scroll);
        render_screen(&mut view, (10, 2));
    }

    /// Do only q, Esc and Ctrl-C end the view?
    #[test]
    fn only_q_escape_and_control_c_end_the_view() {
        let mut view = ScreenState::default();
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        for ends in [KeyCode::Char('q').into(), KeyCode::Esc.into(), control_c] {
            assert!(!view.handle_key(ends));
        }
        assert!(
            view.handle_key(KeyCode::Char('c').into())
                && view.handle_key(KeyCode::Char(' ').into())
                && view.is_paused
        );
    }

    /// Does the screen report that the daemon has ended, together with the last known state?
    #[test]
    fn top_reports_a_lost_daemon() {
        let mut view = ScreenState {
            error: Some("no daemon answers there".into()),
            ..ScreenState::default()
        };
        let text = render_screen(&mut view, (110, 12));
        assert!(
            text.contains("no daemon answers") && text.contains("scan"),
            "{text}"
        );
    }
}
