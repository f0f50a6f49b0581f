//! A matrix of percentages as written in its file, before it is interpreted.

/// Named columns, and named rows with values in percent. So far, only the syntax of the numbers has been checked.
#[derive(Clone, PartialEq, Debug)]
pub struct PercentMatrix {
    /// The name that errors give: a path, or a title.
    pub file: Box<str>,
    /// The line number of the header, from 1.
    pub header_line: u32,
    /// The names of the columns, in the order of the file.
    pub columns: Vec<String>,
    /// Rows in the order of the file.
    pub rows: Vec<PercentRow>,
}

/// One row of a [`PercentMatrix`].
#[derive(Clone, PartialEq, Debug)]
pub struct PercentRow {
    /// Line number of the row, from 1.
    pub line: u32,
    /// The row's name, which is its first field.
    pub name: String,
    /// Finite values, in the order of the columns; `None` if the field is empty. Their number may differ from the
    /// number of columns.
    pub values_percent: Vec<Option<f64>>,
}
