//! Writes SVG with escaped text, and with short numbers that do not depend on the host.

use std::fmt::Write;

use maud::{Markup, PreEscaped, Render, html};

use crate::text::{EscapedText, trim_zeros};

/// Formats a coordinate, rounded to a hundredth of a pixel.
pub(super) fn format_px(value: f64) -> String {
    trim_zeros(format!("{value:.2}"))
}

/// Escapes text for use between tags and in attributes. Characters that XML does not allow are escaped visibly or
/// removed.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in EscapedText::for_page(text).as_str().chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => {}
            c => escaped.push(c),
        }
    }
    escaped
}

/// The anchor of a text relative to its point.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    fn attribute(self) -> &'static str {
        match self {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        }
    }
}

/// A drawing under construction.
pub(super) struct Svg {
    width: f64,
    height: f64,
    /// Text for screen readers.
    label: String,
    body: String,
}

impl Svg {
    /// Builds an empty drawing. The first of `labels` that is not blank is the text for screen readers: the title or,
    /// without a title, the names of the axes.
    pub fn new(width: f64, height: f64, labels: &[&str]) -> Self {
        let label = labels.iter().find(|label| !label.trim().is_empty());
        Svg {
            width,
            height,
            label: escape(label.unwrap_or(&"figure")),
            body: String::new(),
        }
    }

    /// Draws the title in as many lines as the width requires, and returns the y below it.
    pub fn draw_heading(&mut self, title: &str, untitled_top: f64) -> f64 {
        let mut line = String::new();
        let mut y = 24.0;
        for word in title.split(' ') {
            if !line.is_empty() && heading_width(&format!("{line} {word}")) > self.width - 24.0 {
                self.draw_text("t", (12.0, y), Anchor::Start, &std::mem::take(&mut line));
                y += 19.0;
            }
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
        if title.is_empty() {
            return untitled_top;
        }
        self.draw_text("t", (12.0, y), Anchor::Start, &line);
        y + 14.0
    }

    /// The width in user units of the SVG.
    pub fn width(&self) -> f64 {
        self.width
    }

    /// Makes the drawing at least this high, and returns its height.
    pub fn grow(&mut self, height: f64) -> f64 {
        self.height = self.height.max(height);
        self.height
    }

    fn push_element(&mut self, arguments: std::fmt::Arguments<'_>) {
        // Writing into a String cannot fail.
        let _ = self.body.write_fmt(arguments);
        self.body.push('\n');
    }

    pub fn draw_line(&mut self, class: &str, start: (f64, f64), end: (f64, f64)) {
        let (x1, y1, x2, y2) = (
            format_px(start.0),
            format_px(start.1),
            format_px(end.0),
            format_px(end.1),
        );
        self.push_element(format_args!(
            r#"<line class="{class}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>"#
        ));
    }

    /// Draws a rectangle from its upper left corner; negative extents count as zero. `title` is the tooltip.
    pub fn draw_rect(
        &mut self,
        class: &str,
        corner: (f64, f64),
        extent: (f64, f64),
        opacity: Option<f64>,
        title: &str,
    ) {
        let opacity = opacity
            .map(|o| format!(r#" fill-opacity="{}""#, format_px(o)))
            .unwrap_or_default();
        let (x, y) = (format_px(corner.0), format_px(corner.1));
        let (w, h) = (format_px(extent.0.max(0.0)), format_px(extent.1.max(0.0)));
        let title_markup = title_element(title);
        self.push_element(format_args!(
            r#"<rect class="{class}" x="{x}" y="{y}" width="{w}" height="{h}"{opacity}>{title_markup}</rect>"#
        ));
    }

    /// Draws a line through the points, or an area if the style fills `class`.
    pub fn draw_path(&mut self, class: &str, points: &[(f64, f64)], is_closed: bool) {
        if points.is_empty() {
            return;
        }
        let mut d = String::new();
        for (index, (x, y)) in points.iter().enumerate() {
            let _ = write!(
                d,
                "{}{} {}",
                if index == 0 { "M" } else { "L" },
                format_px(*x),
                format_px(*y)
            );
        }
        let close = if is_closed { "Z" } else { "" };
        self.push_element(format_args!(r#"<path class="{class}" d="{d}{close}"/>"#));
    }

    pub fn draw_circle(&mut self, class: &str, center: (f64, f64), radius: f64, title: &str) {
        let (x, y, r) = (format_px(center.0), format_px(center.1), format_px(radius));
        let title_markup = title_element(title);
        self.push_element(format_args!(
            r#"<circle class="{class}" cx="{x}" cy="{y}" r="{r}">{title_markup}</circle>"#
        ));
    }

    pub fn draw_text(&mut self, class: &str, point: (f64, f64), anchor: Anchor, text: &str) {
        let (x, y, anchor, text) = (
            format_px(point.0),
            format_px(point.1),
            anchor.attribute(),
            escape(text),
        );
        self.push_element(format_args!(
            r#"<text class="{class}" x="{x}" y="{y}"{anchor}>{text}</text>"#
        ));
    }

    /// Draws a text that reads upward, centered at `point`.
    pub fn draw_text_upwards(&mut self, class: &str, point: (f64, f64), text: &str) {
        let (x, y, text) = (format_px(point.0), format_px(point.1), escape(text));
        self.push_element(format_args!(
            r#"<text class="{class}" text-anchor="middle" transform="translate({x} {y}) rotate(-90)">{text}</text>"#
        ));
    }

    /// Draws a slanted text that ends at `point`, for long names under columns.
    pub fn draw_text_leaning(&mut self, class: &str, point: (f64, f64), text: &str) {
        let (x, y, text) = (format_px(point.0), format_px(point.1), escape(text));
        self.push_element(format_args!(
            r#"<text class="{class}" text-anchor="end" transform="translate({x} {y}) rotate(-35)">{text}</text>"#
        ));
    }

    /// The drawing for a page that contains [`super::STYLE`].
    pub fn inline(self) -> Drawing {
        let Svg {
            width,
            height,
            label,
            body,
        } = self;
        let (w, h) = (format_px(width), format_px(height));
        Drawing(format!(
            "<svg class=\"cm\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" height=\"{h}\" \
             style=\"min-width:min(40rem,{w}px)\" role=\"img\" aria-label=\"{label}\">\n{body}</svg>\n"
        ))
    }

    /// A file that contains its own style.
    pub fn standalone(self) -> String {
        let Drawing(inline) = self.inline();
        // The first line is the opening tag, by construction above.
        let (opening_tag, content) = inline.split_once('\n').unwrap_or((&inline, ""));
        format!(
            "{opening_tag}\n<style>{}</style>\n<rect width=\"100%\" height=\"100%\" style=\"fill:var(--paper)\"/>\n{content}",
            super::STYLE
        )
    }
}

/// A finished drawing without its style. Only this module creates drawings, so that a page cannot mistake untrusted
/// text for markup.
#[derive(Clone, PartialEq, Debug)]
pub struct Drawing(String);

impl Drawing {
    /// One SVG element; its texts are escaped.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Render for Drawing {
    /// Wraps the drawing in a box that scrolls, also by keyboard, if the window is narrower than the drawing.
    fn render(&self) -> Markup {
        html! { div.figure tabindex="0" { (PreEscaped(&self.0)) } }
    }
}

fn title_element(title: &str) -> String {
    if title.is_empty() {
        String::new()
    } else {
        format!("<title>{}</title>", escape(title))
    }
}

/// Estimates the width of a title. In DejaVu Sans, the widest of the style's fonts and often the only one on Linux, a
/// bold title of 15 pixels is 1.3 to 1.5 times as wide as the estimate for a label.
pub(super) fn heading_width(title: &str) -> f64 {
    1.5 * text_width(title)
}

/// Estimates the width of a text in pixels, because no font is available to measure it. For the style's font, the
/// estimate is slightly too large.
pub(super) fn text_width(text: &str) -> f64 {
    text.chars()
        .map(|c| {
            if "ilj.,:;|!' ".contains(c) {
                4.0
            } else if c.is_uppercase() {
                9.0
            } else {
                7.4
            }
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is no title wider than its estimate? The widths are those of DejaVu Sans Bold at 15 pixels, from its `hmtx`
    /// table.
    #[test]
    fn no_title_is_wider_than_its_estimate() {
        let widths = [
            ("CA-2: maximum memory bandwidth", 302.2),
            (
                "Slowdown of every pair on one cache, percent of the solo run time",
                564.1,
            ),
        ];
        assert!(
            widths
                .iter()
                .all(|(title, width)| heading_width(title) >= *width)
        );
    }
}
