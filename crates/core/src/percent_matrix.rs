//! A matrix of percentages as written in its file, before it is interpreted.

/// Columns with names, and rows with names and values in percent. Nothing is checked yet but that numbers are numbers.
#[derive(Clone, PartialEq, Debug)]
pub struct PercentMatrix {
    /// Its name in errors: a path, or a title.
    pub file: Box<str>,
    /// The line of the columns' names, from 1.
    pub header_line: u32,
    /// The columns' names, in their order.
    pub columns: Vec<String>,
    /// Rows in the order of the file.
    pub rows: Vec<PercentRow>,
}

/// One row of a [`PercentMatrix`].
#[derive(Clone, PartialEq, Debug)]
pub struct PercentRow {
    /// Its line, from 1.
    pub line: u32,
    /// The name of the row: its first field.
    pub name: String,
    /// Finite, in the order of the columns; `None` where the field is empty. There may be more or fewer than columns.
    pub values_percent: Vec<Option<f64>>,
}
