//! A matrix of percentages from CSV, such as measured slowdowns.
//!
//! ```text
//! ,mcf,milc,gamess,namd
//! mcf,48.01%,65.63%,2.0%,2.11%
//! milc,24.75%,45.39%,1.23%,1.11%
//! ```
//! Fields are separated by commas, semicolons or tabs (the separator of the first line applies) and may be quoted.
//! Values are percentages, with or without the sign. Lines that are empty or begin with `#` are skipped.

use cachemate_core::{PercentMatrix, PercentRow};
use csv::{ReaderBuilder, StringRecord, Trim};

use crate::{SpecError, read_text};

/// Reads a file with a matrix.
///
/// # Errors
/// An unreadable file; everything that [`parse_percent_matrix`] rejects.
pub fn load_percent_matrix(path: &str) -> Result<PercentMatrix, SpecError> {
    parse_percent_matrix(path, &read_text(path)?)
}

/// Parses a matrix; `file` is its name in errors. The column in an error is the number of the field, from 1.
///
/// # Errors
/// A text without a first line; a value that is not a finite number.
pub fn parse_percent_matrix(file: &str, text: &str) -> Result<PercentMatrix, SpecError> {
    let text = text.trim_start_matches('\u{feff}');
    let header = text.lines().find(|line| !is_skipped(line)).unwrap_or_default();
    let separator = [b';', b'\t'].into_iter().find(|&cut| header.as_bytes().contains(&cut)).unwrap_or(b',');
    let mut reader = ReaderBuilder::new()
        .delimiter(separator)
        .comment(Some(b'#'))
        .trim(Trim::All)
        .flexible(true)
        .has_headers(false)
        .from_reader(text.as_bytes());
    let mut line_counter = LineCounter { text, offset: 0, line: 1 };
    let (mut columns, mut rows) = (None, Vec::new());
    for record in reader.records() {
        let record = record.map_err(|error| SpecError::for_file(file, error.to_string(), "CSV"))?;
        let line = line_counter.advance_to(&record);
        let name = record.get(0).unwrap_or_default();
        if name.starts_with('#') || (name.is_empty() && record.len() == 1) {
            continue;
        }
        if columns.is_none() {
            columns = Some((line, record.iter().skip(1).map(str::to_string).collect()));
            continue;
        }
        let parse_value = |(index, field): (usize, &str)| {
            parse_percent(field)
                .map_err(|()| field_error(file, line, index + 1, field, "percent, such as 24.75% or -1.2"))
        };
        let values_percent = record.iter().enumerate().skip(1).map(parse_value).collect::<Result<_, _>>()?;
        rows.push(PercentRow { line, name: name.to_string(), values_percent });
    }
    match columns {
        Some((header_line, columns)) => Ok(PercentMatrix { file: file.into(), header_line, columns, rows }),
        None => Err(SpecError {
            line_column: Some((1, 1)),
            ..SpecError::for_file(file, "an empty file", "a first line with the columns' names")
        }),
    }
}

/// Parses a value; `None` for an empty field.
fn parse_percent(field: &str) -> Result<Option<f64>, ()> {
    if field.is_empty() {
        return Ok(None);
    }
    let value = field.trim_end_matches('%').trim().parse::<f64>();
    value.ok().filter(|value| value.is_finite()).map(Some).ok_or(())
}

fn field_error(file: &str, line: u32, field: usize, found: &str, expected: &str) -> SpecError {
    SpecError {
        line_column: Some((line, field as u32)),
        ..SpecError::for_file(file, format!("'{found}'"), expected.to_string())
    }
}

fn is_skipped(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

/// Counts lines up to a record, because the reader's own position is that of the empty lines and comments before it.
struct LineCounter<'a> {
    text: &'a str,
    offset: usize,
    line: u32,
}

impl LineCounter<'_> {
    fn advance_to(&mut self, record: &StringRecord) -> u32 {
        let start = record.position().map_or(self.offset, |position| position.byte() as usize);
        while let Some(line) = self.text.get(self.offset..).and_then(|rest| rest.split_inclusive('\n').next()) {
            if self.offset >= start && !is_skipped(line) {
                break;
            }
            self.offset += line.len();
            self.line += 1;
        }
        self.line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# measured\n\n,a,\"b, c\"\n\n  # a remark\na,1.5%, \nb,-2,3 %\n";

    /// Are names, values, missing values and lines read in every notation?
    #[test]
    fn a_matrix_reads_in_every_notation() {
        let matrix = parse_percent_matrix("m.csv", TEXT).unwrap();
        assert_eq!((matrix.header_line, matrix.columns.as_slice()), (3, &["a".to_string(), "b, c".to_string()][..]));
        let row = |line, name: &str, values: [Option<f64>; 2]| PercentRow {
            line,
            name: name.to_string(),
            values_percent: values.into(),
        };
        assert_eq!(matrix.rows, [row(6, "a", [Some(1.5), None]), row(7, "b", [Some(-2.0), Some(3.0)])]);
        let other = format!("\u{feff}{}", TEXT.replace("\"b, c\"", "b").replace(',', ";").replace('\n', "\r\n"));
        assert_eq!(parse_percent_matrix("m.csv", &other).unwrap().rows, matrix.rows);
        let tabs = TEXT.replace("\"b, c\"", "b").replace(',', "\t");
        assert_eq!(parse_percent_matrix("m.csv", &tabs).unwrap().rows, matrix.rows);
    }

    /// Is a value that is not a number rejected with line and field, and an empty text as such?
    #[test]
    fn a_value_that_is_not_a_number_is_rejected_with_its_place() {
        for wrong in ["much", "inf", "NaN", "1e999", "1.5.2"] {
            let error = parse_percent_matrix("m.csv", &TEXT.replace("1.5%", wrong)).unwrap_err().to_string();
            assert_eq!(error, format!("m.csv:6:2: found '{wrong}', expected percent, such as 24.75% or -1.2"));
        }
        for empty in ["", "\n\n", "# nothing\n", " \n"] {
            let error = parse_percent_matrix("m.csv", empty).unwrap_err().to_string();
            assert_eq!(error, "m.csv:1:1: found an empty file, expected a first line with the columns' names");
        }
        assert!(load_percent_matrix("no/such/file.csv").is_err());
    }
}
