//! Plain text tables. Columns are as wide as their content, have no decoration that would confuse `awk`, and keep
//! every cell at its position, whatever text it contains.

use crate::text::EscapedText;

/// Alignment of a column's text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    /// Left-aligned: names and text.
    Left,
    /// Right-aligned: numbers.
    Right,
}

/// Rows of cells under a header.
#[derive(Clone, Debug)]
pub struct Table {
    header: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Builds an empty table. `header` gives the name of each column and the alignment of its cells.
    pub fn new(header: &[(&str, Align)]) -> Self {
        let escape_cell = |name: &str| EscapedText::for_line(name).to_string();
        Table {
            header: header
                .iter()
                .map(|(name, align)| (escape_cell(name), *align))
                .collect(),
            rows: Vec::new(),
        }
    }

    /// Builds an empty table with left-aligned columns first (`"pair | cache"`) and right-aligned ones after them.
    pub fn with_columns(left: &str, right: &str) -> Self {
        let aligned = [(left, Align::Left), (right, Align::Right)]
            .into_iter()
            .filter(|(names, _)| !names.is_empty());
        let columns =
            aligned.flat_map(|(names, align)| names.split(" | ").map(move |name| (name, align)));
        Table::new(&columns.collect::<Vec<_>>())
    }

    /// Builds an empty table whose header gives the columns in order; `>` marks a right-aligned one (`"pair | >
    /// slowdown | note"`).
    pub fn from_header(header: &str) -> Self {
        let column = |name| {
            str::strip_prefix(name, "> ").map_or((name, Align::Left), |name| (name, Align::Right))
        };
        Table::new(&header.split(" | ").map(column).collect::<Vec<_>>())
    }

    /// Adds one row; cells beyond the header's columns are dropped, and missing ones stay blank.
    pub fn add_row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) -> &mut Self {
        let mut cells: Vec<String> = cells
            .into_iter()
            .map(|cell| EscapedText::for_line(&cell.into()).to_string())
            .collect();
        cells.resize(self.header.len(), String::new());
        self.rows.push(cells);
        self
    }

    /// A table with a header only is empty.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Renders the table: one line per row, each terminated by a newline, without trailing blanks.
    pub fn text(&self) -> String {
        let names: Vec<String> = self.header.iter().map(|(name, _)| name.clone()).collect();
        let lines = || std::iter::once(&names).chain(&self.rows);
        let width_of = |column: usize| {
            lines()
                .map(|line| text_width(&line[column]))
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.header.len()).map(width_of).collect();

        let mut text = String::new();
        for line in lines() {
            let cells = line.iter().zip(&widths).zip(&self.header);
            let padded_cells: Vec<String> = cells
                .map(|((cell, width), (_, align))| pad_text(cell, *width, *align))
                .collect();
            text.push_str(padded_cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

/// Columns without escape sequences. Each character counts as one, because program names and
/// numbers in these tables contain no wide or combining characters.
pub(crate) fn text_width(text: &str) -> usize {
    let mut columns = 0;
    let mut is_in_escape = false;
    for c in text.chars() {
        match (is_in_escape, c) {
            (true, 'm') => is_in_escape = false,
            (true, _) => {}
            (false, '\u{1b}') => is_in_escape = true,
            (false, _) => columns += 1,
        }
    }
    columns
}

/// A longer text is not cut.
pub(crate) fn pad_text(text: &str, columns: usize, align: Align) -> String {
    let blanks = " ".repeat(columns.saturating_sub(text_width(text)));
    match align {
        Align::Left => format!("{text}{blanks}"),
        Align::Right => format!("{blanks}{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do columns line up, also with colored cells and short rows?
    #[test]
    fn columns_line_up() {
        let mut table = Table::from_header("program | > MPKI");
        table
            .add_row(["gzip", "1.25"])
            .add_row(["\u{1b}[31mmcf\u{1b}[0m", "33"])
            .add_row(["perl"]);
        let want = "program  MPKI\ngzip     1.25\n\u{1b}[31mmcf\u{1b}[0m        33\nperl\n";
        assert_eq!(table.text(), want);
    }

    /// Does a foreign text stay in its cell, without a line end, a cursor movement or a change of direction?
    #[test]
    fn a_foreign_text_stays_in_its_cell() {
        let mut table = Table::new(&[("program", Align::Left)]);
        table.add_row(["a\n0 init\u{1b}[2J\u{202e}"]);
        assert_eq!(table.text(), "program\na\\n0 init\\u{1b}[2J\\u{202e}\n");
    }
}
