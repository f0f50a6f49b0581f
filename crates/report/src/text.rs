//! Formats numbers and text for display.

/// Bytes with the largest of K, M, G (powers of 1024) that keeps at most three decimals exact: `64K`, `1.5M`, `100`. A
/// size that would need four digits and decimals is rounded in the next larger unit: `1.41M`.
pub fn format_size(bytes: u64) -> String {
    for (unit, shift) in [("G", 30), ("M", 20), ("K", 10)] {
        let whole_units = bytes >> shift;
        if whole_units == 0 {
            continue;
        }
        let eighths = bytes % (1 << shift) * 8;
        let has_decimals = !bytes.is_multiple_of(1 << shift);
        if eighths.is_multiple_of(1 << shift) && !(whole_units >= 1000 && has_decimals) {
            return format!(
                "{}{unit}",
                trim_zeros(format!(
                    "{:.3}",
                    whole_units as f64 + (eighths >> shift) as f64 / 8.0
                ))
            );
        }
    }
    // The size is not a multiple of an eighth, so it gets two decimals in the largest unit, which keeps columns
    // narrow.
    for (unit, shift) in [("G", 30), ("M", 20), ("K", 10)] {
        if bytes >> shift > 0 {
            return format!("{:.2}{unit}", bytes as f64 / (1u64 << shift) as f64);
        }
    }
    bytes.to_string()
}

/// Groups of three digits: `1,234,567`. The separator is a comma rather than a blank, so that a
/// field remains one word for tools that read the output.
pub fn format_count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with its noun: `1 package`, `2 packages`, `1,234 phases`. The plural is `singular` with
/// an s.
pub fn format_count_of(count: u64, singular: &str) -> String {
    format!(
        "{} {singular}{}",
        format_count(count),
        if count == 1 { "" } else { "s" }
    )
}

/// Lists at most `max_names` names, and the number of the others: `a, b and 3 more`.
pub fn format_names(names: &[String], max_names: usize) -> String {
    let shown_names = &names[..names.len().min(max_names)];
    let hidden_count = names.len() - shown_names.len();
    shown_names.join(", ")
        + &if hidden_count > 0 {
            format!(" and {hidden_count} more")
        } else {
            String::new()
        }
}

/// 0.0231 with two decimals is `2.31 %`.
pub fn format_percent(fraction: f64, decimals: usize) -> String {
    format!("{} %", format_fixed(fraction * 100.0, decimals))
}

/// No sign before a zero. A number of more than nine digits is written as a power of ten, because
/// hundreds of digits are unreadable.
pub fn format_fixed(value: f64, decimals: usize) -> String {
    match value {
        _ if !value.is_finite() => "–".to_string(),
        _ if value.abs() >= 1e9 => format!("{value:.2e}"),
        _ if value.abs() * libm::pow(10.0, decimals as f64) < 0.5 => format!("{:.decimals$}", 0.0),
        _ => format!("{value:.decimals$}"),
    }
}

/// Makes an untrusted text, such as a program's name, safe for a terminal, a table's row or a log's line. All
/// characters without a visible glyph are escaped: control characters, line ends, and marks that change the direction
/// of writing. A backslash is doubled, so that an escape cannot be forged.
pub fn escape_controls(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\'' => escaped.push(c),
            _ => escaped.extend(c.escape_debug()),
        }
    }
    escaped
}

/// Text that cannot affect the reader's terminal. It contains no escape sequence, no control character, and no mark
/// that has no width or changes the direction of writing. Every function of the command that writes output accepts
/// only this type.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct EscapedText(String);

impl EscapedText {
    /// Escapes an output of several lines. Line ends, tabs and colors ([`crate::terminal::TerminalStyle`]) are kept; names from
    /// untrusted sources are already [`escape_controls`] wherever a line end in them could forge a row. Escaping is
    /// idempotent.
    pub fn for_output(text: &str) -> Self {
        let mut escaped = String::with_capacity(text.len());
        let mut remaining_text = text;
        while let Some(index) = remaining_text.find(is_acting) {
            let (plain_text, sequence) = remaining_text.split_at(index);
            escaped.push_str(plain_text);
            let sequence_length = color_sequence_length(sequence);
            escaped.push_str(&sequence[..sequence_length]);
            let mut following_chars = sequence[sequence_length..].chars();
            if sequence_length == 0 {
                escaped.extend(
                    following_chars
                        .next()
                        .into_iter()
                        .flat_map(char::escape_unicode),
                );
            }
            remaining_text = following_chars.as_str();
        }
        EscapedText(escaped + remaining_text)
    }

    /// Escapes one line, such as a log message, with the line ends in it.
    pub fn for_line(text: &str) -> Self {
        let EscapedText(output) = EscapedText::for_output(text);
        EscapedText(output.replace('\n', "\\n"))
    }

    /// Escapes text or markup of a page, with the terminal colors in it, because they have no effect there.
    pub fn for_page(text: &str) -> Self {
        let escape = |c: char| {
            if is_acting(c) {
                c.escape_unicode().to_string()
            } else {
                c.to_string()
            }
        };
        EscapedText(text.chars().map(escape).collect())
    }

    /// Escapes JSON inside a page: no text in it can end the enclosing element or change the order of the displayed
    /// text.
    pub fn embedded_json(json: &str) -> Self {
        let escape = |c: char| match c {
            '<' => "\\u003c".to_string(),
            c if is_acting(c) => format!("\\{}", c.escape_unicode()),
            c => c.to_string(),
        };
        EscapedText(json.chars().map(escape).collect())
    }

    /// JSON of the same value, in which JSON escapes replace the control and direction characters
    /// of strings.
    pub fn for_json(text: &str) -> Self {
        let mut escaped = String::with_capacity(text.len());
        for c in text.chars() {
            match is_acting(c) {
                true => c
                    .encode_utf16(&mut [0; 2])
                    .iter()
                    .for_each(|unit| escaped.push_str(&format!("\\u{unit:04x}"))),
                false => escaped.push(c),
            }
        }
        EscapedText(escaped)
    }

    /// Safe to write anywhere.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for EscapedText {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

/// Whether a character can affect a terminal, or the order or number of the characters beside it.
fn is_acting(c: char) -> bool {
    let is_invisible = matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}');
    (c.is_control() && !matches!(c, '\n' | '\t')) || is_invisible
}

/// Bytes of a leading escape sequence that only sets a color; 0 if there is none.
fn color_sequence_length(text: &str) -> usize {
    let Some(parameters) = text.strip_prefix("\u{1b}[") else {
        return 0;
    };
    let end = parameters.find(|c: char| !c.is_ascii_digit() && c != ';');
    end.filter(|&end| parameters[end..].starts_with('m'))
        .map_or(0, |end| "\u{1b}[".len() + end + 1)
}

/// About three significant digits, and no trailing zeros.
pub fn format_number(value: f64) -> String {
    if !value.is_finite() {
        return "–".to_string();
    }
    if value == 0.0 {
        return "0".to_string();
    }
    let magnitude = libm::floor(libm::log10(value.abs()));
    if !(-5.0..=6.0).contains(&magnitude) {
        return format!("{value:.2e}");
    }
    let decimals = (2.0 - magnitude).clamp(0.0, 7.0) as usize;
    trim_zeros(format!("{value:.decimals$}"))
}

/// Removes trailing zeros after the point, and a minus before zero.
pub(crate) fn trim_zeros(text: String) -> String {
    let trimmed_text = if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.')
    } else {
        &text
    };
    if trimmed_text == "-0" {
        "0".to_string()
    } else {
        trimmed_text.to_string()
    }
}

/// A dash, because an absent value is not zero.
pub fn value_or_dash(value: Option<String>) -> String {
    value.unwrap_or_else(|| "–".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are all names listed up to the limit, and the others counted beyond it?
    #[test]
    fn names_beyond_the_limit_are_counted() {
        let names = ["a", "b", "c"].map(String::from);
        assert_eq!(format_names(&names, 3), "a, b, c");
        assert_eq!(format_names(&names, 2), "a, b and 1 more");
        assert_eq!(format_names(&[], 2), "");
    }

    /// Are sizes formatted as users write them, also at the edges of the units?
    #[test]
    fn sizes_take_the_largest_unit_that_stays_short() {
        let cases = [
            (0, "0"),
            (100, "100"),
            (1023, "1023"),
            (1024, "1K"),
            (65536, "64K"),
            (3 << 19, "1.5M"),
            (15 << 17, "1.875M"),
            (1 << 20, "1M"),
            (36 << 20, "36M"),
            (1_000_000, "976.56K"),
            (1 << 30, "1G"),
            (1448 * 1024 + 128, "1.41M"),
            (1448 << 10, "1448K"),
            (999 * 1024 + 128, "999.125K"),
        ];

        for (bytes, want) in cases {
            assert_eq!(format_size(bytes), want, "{bytes}");
        }
    }

    /// Do names with escapes, line ends, quotes and direction marks stay on one line, distinct from any other name?
    #[test]
    fn names_cannot_command_a_terminal_or_forge_a_row() {
        let cases = [
            ("gzip", "gzip"),
            ("naïve 漢字", "naïve 漢字"),
            ("\u{1b}[2J\u{1b}]0;x\u{7}", r"\u{1b}[2J\u{1b}]0;x\u{7}"),
            ("a\nroot 0 b\r\tc", r"a\nroot 0 b\r\tc"),
            ("say \"hi\" 'there'", "say \"hi\" 'there'"),
            (r"a\nb", r"a\\nb"),
            (
                "\u{202e}txt.exe\u{2066}\u{200b}\u{85}\u{9b}",
                r"\u{202e}txt.exe\u{2066}\u{200b}\u{85}\u{9b}",
            ),
        ];
        for (name, shown) in cases {
            assert_eq!(escape_controls(name), shown);
        }
        assert_ne!(escape_controls("\n"), escape_controls(r"\n"));
    }

    /// Does an output keep its lines and colors, and no other active sequence? Is escaping idempotent?
    #[test]
    fn an_output_keeps_lines_and_colors_and_no_other_sequence() {
        let cases = [
            ("a\tb\nc 1\u{202f}234", "a\tb\nc 1\u{202f}234"),
            (
                "\u{1b}[97;48;5;160mred\u{1b}[0m",
                "\u{1b}[97;48;5;160mred\u{1b}[0m",
            ),
            (
                "\u{1b}[2J\u{1b}]0;x\u{7}\r",
                r"\u{1b}[2J\u{1b}]0;x\u{7}\u{d}",
            ),
            ("\u{1b}[1", r"\u{1b}[1"),
            (
                "a\u{202e}b\u{2066}c\u{200b}\u{9b}",
                r"a\u{202e}b\u{2066}c\u{200b}\u{9b}",
            ),
        ];

        for (text, shown) in cases {
            let once = EscapedText::for_output(text);
            assert_eq!(once.as_str(), shown);
            assert_eq!(EscapedText::for_output(once.as_str()), once);
        }
        assert_eq!(EscapedText::for_line("a\nb").as_str(), r"a\nb");
        assert_eq!(
            EscapedText::for_json("\"\u{202e}\u{e0001}\"").as_str(),
            r#""\u202e\udb40\udc01""#
        );
    }

    /// Is a number of hundreds of digits written as a power of ten?
    #[test]
    fn huge_numbers_are_written_as_powers_of_ten() {
        assert_eq!(
            [
                format_fixed(1e308, 1),
                format_fixed(-1e9, 0),
                format_fixed(f64::INFINITY, 2)
            ],
            ["1.00e308", "-1.00e9", "–"]
        );
        assert_eq!(
            [
                format_fixed(12.345, 1),
                format_fixed(999_999_999.0, 0),
                format_fixed(0.0, 2)
            ],
            ["12.3", "999999999", "0.00"]
        );
        assert_eq!(format_percent(1e300, 1), "1.00e302 %");
    }

    /// Do numbers keep three digits, without a misleading zero?
    #[test]
    fn numbers_keep_three_digits() {
        let cases = [
            (0.0, "0"),
            (1.0, "1"),
            (12.345, "12.3"),
            (0.012345, "0.0123"),
            (1234.5, "1234"),
            (-2.50, "-2.5"),
        ];
        for (value, want) in cases {
            assert_eq!(format_number(value), want);
        }
        assert_eq!(format_number(f64::NAN), "–");
        assert_eq!(format_percent(0.0231, 2), "2.31 %");
        assert_eq!(format_percent(-0.000_001, 1), "0.0 %");
        assert_eq!(format_count(1_234_567), "1,234,567");
        assert_eq!(format_count(12), "12");
    }
}
