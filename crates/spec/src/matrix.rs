//! A measured slowdown matrix from CSV, in the form of CA's Table 1: the slowdown of the row's program beside the
//! column's.
//!
//! ```text
//! ,mcf,milc,gamess,namd
//! mcf,48.01%,65.63%,2.0%,2.11%
//! milc,24.75%,45.39%,1.23%,1.11%
//! ```
//! Fields are separated by commas, semicolons or tabs (the separator of the first line applies) and may be quoted.
//! Values are percent of the solo run time, with or without the sign. The diagonal is a program beside a copy of itself
//! and may be empty. Rows may come in any order. Lines that are empty or begin with `#` are skipped.

use std::collections::BTreeMap;

use cachemate_core::{MeasuredMatrix, nearest_name};
use csv::{ReaderBuilder, StringRecord, Trim};

use crate::{SpecError, read_text};

/// Largest number of programs in a matrix.
const MAX_PROGRAMS: usize = 4096;

/// A matrix of percentages as written. So far, only the syntax of the numbers has been checked.
#[derive(Debug)]
struct PercentMatrix<'a> {
    /// The name that errors give: a path, or a title.
    file: &'a str,
    header_line: u32,
    /// The names of the columns, in the order of the file.
    columns: Vec<String>,
    rows: Vec<PercentRow>,
}

/// One row of a [`PercentMatrix`].
#[derive(PartialEq, Debug)]
struct PercentRow {
    line: u32,
    /// The row's name, which is its first field.
    name: String,
    /// Finite values, in the order of the columns; `None` if the field is empty. Their number may differ from the
    /// number of columns.
    values_percent: Vec<Option<f64>>,
}

/// Reads a file with a matrix.
///
/// # Errors
/// An unreadable file; everything that [`parse_measured_matrix`] rejects.
pub fn load_measured_matrix(path: &str) -> Result<MeasuredMatrix, SpecError> {
    parse_measured_matrix(path, &read_text(path)?)
}

/// Parses a matrix; `file` is its name in errors. The column in an error is the number of the field, from 1.
///
/// # Errors
/// A text without a first line; a value that is not a finite number. Names that are missing, repeated or differ between
/// rows and columns, rows that are too short or too long, and values that are missing or not slowdowns.
pub fn parse_measured_matrix(file: &str, text: &str) -> Result<MeasuredMatrix, SpecError> {
    parse_percent_matrix(file, text)?.check()
}

fn parse_percent_matrix<'a>(file: &'a str, text: &str) -> Result<PercentMatrix<'a>, SpecError> {
    let text = text.trim_start_matches('\u{feff}');
    let header = text
        .lines()
        .find(|line| !is_skipped(line))
        .unwrap_or_default();
    let separator = [b';', b'\t']
        .into_iter()
        .find(|&cut| header.as_bytes().contains(&cut))
        .unwrap_or(b',');
    let mut reader = ReaderBuilder::new()
        .delimiter(separator)
        .comment(Some(b'#'))
        .trim(Trim::All)
        .flexible(true)
        .has_headers(false)
        .from_reader(text.as_bytes());

    let mut line_counter = LineCounter {
        text,
        offset: 0,
        line: 1,
    };

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
            parse_percent(field).map_err(|()| {
                field_error(
                    file,
                    line,
                    index + 1,
                    format!("'{field}'"),
                    "percent, such as 24.75% or -1.2",
                )
            })
        };
        let values_percent = record
            .iter()
            .enumerate()
            .skip(1)
            .map(parse_value)
            .collect::<Result<_, _>>()?;
        rows.push(PercentRow {
            line,
            name: name.to_string(),
            values_percent,
        });
    }

    match columns {
        Some((header_line, columns)) => Ok(PercentMatrix {
            file,
            header_line,
            columns,
            rows,
        }),
        None => Err(SpecError {
            line_column: Some((1, 1)),
            ..SpecError::for_file(
                file,
                "an empty file",
                "a first line with the columns' names",
            )
        }),
    }
}

/// Parses a value; `None` for an empty field.
fn parse_percent(field: &str) -> Result<Option<f64>, ()> {
    if field.is_empty() {
        return Ok(None);
    }
    let value = field.trim_end_matches('%').trim().parse::<f64>();
    value
        .ok()
        .filter(|value| value.is_finite())
        .map(Some)
        .ok_or(())
}

fn field_error(
    file: &str,
    line: u32,
    field: usize,
    found: String,
    expected: impl Into<Box<str>>,
) -> SpecError {
    SpecError {
        line_column: Some((line, field as u32)),
        ..SpecError::for_file(file, found, expected)
    }
}

impl PercentMatrix<'_> {
    fn check(self) -> Result<MeasuredMatrix, SpecError> {
        let columns = self.column_by_name()?;
        let error_at = |line: u32, found: String, expected: String| {
            field_error(self.file, line, 1, found, expected)
        };
        let mut rows: Vec<Option<(Vec<f64>, bool)>> = vec![None; self.columns.len()];
        for row in &self.rows {
            let Some(&program) = columns.get(row.name.as_str()) else {
                let nearest =
                    nearest_name(&row.name, self.columns.iter().map(String::as_str)).map(Box::from);
                let expected = format!("one of the columns: {}", self.columns.join(", "));
                return Err(SpecError {
                    nearest,
                    ..error_at(row.line, format!("'{}'", row.name), expected)
                });
            };
            if rows[program].is_some() {
                return Err(error_at(
                    row.line,
                    format!("'{}' again", row.name),
                    "one row for each program".to_string(),
                ));
            }
            rows[program] = Some(self.row_values(row, program)?);
        }

        if let Some(missing_row) = rows.iter().position(Option::is_none) {
            let line = self.rows.last().map_or(self.header_line, |row| row.line) + 1;
            return Err(error_at(
                line,
                "the end".to_string(),
                format!("a row for '{}'", self.columns[missing_row]),
            ));
        }

        let (slowdowns, has_diagonal) = rows.into_iter().flatten().unzip();
        Ok(MeasuredMatrix {
            names: self.columns,
            slowdowns,
            has_diagonal,
        })
    }

    fn column_by_name(&self) -> Result<BTreeMap<&str, usize>, SpecError> {
        let error_at = |field: usize, found: String, expected: String| {
            Err(field_error(
                self.file,
                self.header_line,
                field,
                found,
                expected,
            ))
        };
        if self.columns.is_empty() || self.columns.len() > MAX_PROGRAMS {
            let expected = format!("1 to {MAX_PROGRAMS} names after an empty first field");
            return error_at(2, format!("{} names", self.columns.len()), expected);
        }

        let mut columns = BTreeMap::new();
        for (index, name) in self.columns.iter().enumerate() {
            if name.is_empty() || columns.insert(name.as_str(), index).is_some() {
                return error_at(
                    index + 2,
                    format!("'{name}'"),
                    "a name that is not repeated".to_string(),
                );
            }
        }
        Ok(columns)
    }

    /// Values are fractions; the second one tells whether the row has a value beside its copy.
    fn row_values(&self, row: &PercentRow, program: usize) -> Result<(Vec<f64>, bool), SpecError> {
        let (value_count, column_count) = (row.values_percent.len(), self.columns.len());
        if value_count != column_count {
            let field = value_count.min(column_count) + 2;
            let (found, expected) = (format!("{value_count} values"), column_count.to_string());
            return Err(field_error(self.file, row.line, field, found, expected));
        }

        let mut values = Vec::with_capacity(column_count);
        for (column, &percent) in row.values_percent.iter().enumerate() {
            match percent {
                Some(percent) if percent > -100.0 => values.push(percent / 100.0),
                None if column == program => values.push(0.0),
                _ => {
                    let found =
                        percent.map_or("nothing".to_string(), |percent| format!("{percent}"));
                    let expected = "percent above -100, such as 24.75% or -1.2";
                    return Err(field_error(
                        self.file,
                        row.line,
                        column + 2,
                        found,
                        expected,
                    ));
                }
            }
        }

        Ok((values, row.values_percent[program].is_some()))
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
        let start = record
            .position()
            .map_or(self.offset, |position| position.byte() as usize);
        while let Some(line) = self
            .text
            .get(self.offset..)
            .and_then(|rest| rest.split_inclusive('\n').next())
        {
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
        assert_eq!(
            (matrix.header_line, matrix.columns.as_slice()),
            (3, &["a".to_string(), "b, c".to_string()][..])
        );
        let row = |line, name: &str, values: [Option<f64>; 2]| PercentRow {
            line,
            name: name.to_string(),
            values_percent: values.into(),
        };
        assert_eq!(
            matrix.rows,
            [
                row(6, "a", [Some(1.5), None]),
                row(7, "b", [Some(-2.0), Some(3.0)])
            ]
        );
        let other = format!(
            "\u{feff}{}",
            TEXT.replace("\"b, c\"", "b")
                .replace(',', ";")
                .replace('\n', "\r\n")
        );
        assert_eq!(
            parse_percent_matrix("m.csv", &other).unwrap().rows,
            matrix.rows
        );
        let tabs = TEXT.replace("\"b, c\"", "b").replace(',', "\t");
        assert_eq!(
            parse_percent_matrix("m.csv", &tabs).unwrap().rows,
            matrix.rows
        );
    }

    /// Is a value that is not a number rejected with line and field, and an empty text as such?
    #[test]
    fn a_value_that_is_not_a_number_is_rejected_with_its_place() {
        for wrong in ["much", "inf", "NaN", "1e999", "1.5.2"] {
            let error = parse_percent_matrix("m.csv", &TEXT.replace("1.5%", wrong))
                .unwrap_err()
                .to_string();
            assert_eq!(
                error,
                format!("m.csv:6:2: found '{wrong}', expected percent, such as 24.75% or -1.2")
            );
        }
        for empty in ["", "\n\n", "# nothing\n", " \n"] {
            let error = parse_percent_matrix("m.csv", empty)
                .unwrap_err()
                .to_string();
            assert_eq!(
                error,
                "m.csv:1:1: found an empty file, expected a first line with the columns' names"
            );
        }
        assert!(load_measured_matrix("no/such/file.csv").is_err());
    }

    const TABLE_1: &str = "\
,mcf,milc,gamess,namd
mcf,48.01%,65.63%,2.0%,2.11%
# a remark
milc,24.75%,45.39%,1.23%,1.11%
gamess,2.67%,4.48%,-1.01%,-1.21%
namd,1.48%,3.45%,-1.19%,-0.93%
";

    /// Is the published table read whatever the order of its rows, its signs and its separator?
    #[test]
    fn the_published_table_reads_in_every_notation() {
        let table = parse_measured_matrix("t", TABLE_1).unwrap();
        assert_eq!(table.names, ["mcf", "milc", "gamess", "namd"]);
        assert_eq!(table.slowdowns[0][1], 0.6563);
        assert!((table.slowdowns[0][1] + table.slowdowns[1][0] - 0.9038).abs() < 1e-12);
        let mut lines: Vec<&str> = TABLE_1.lines().collect();
        lines.swap(1, 4);
        let rewritten = lines.join("\r\n").replace('%', "").replace(',', "; ");
        assert_eq!(parse_measured_matrix("t", &rewritten).unwrap(), table);
        let two = table
            .slowdowns_of(&["namd".to_string(), "mcf".to_string(), "mcf".to_string()])
            .unwrap();
        let is_near = |(a, b): (&f64, f64)| (a - b).abs() < 1e-12;
        assert!(
            two[1].iter().zip([0.0211, 0.4801, 0.4801]).all(is_near),
            "{two:?}"
        );
        assert!(
            table
                .slowdowns_of(&["mfc".to_string()])
                .unwrap_err()
                .to_string()
                .contains("did you mean 'mcf'")
        );
    }

    /// Is every invalid file refused with line and field?
    #[test]
    fn invalid_matrices_are_refused_with_line_and_field() {
        let error = |pattern: &str, replacement: &str| {
            parse_measured_matrix("m.csv", &TABLE_1.replacen(pattern, replacement, 1))
                .unwrap_err()
                .to_string()
        };
        let percent = "expected percent above -100, such as 24.75% or -1.2";
        assert_eq!(
            error("1.23%", ""),
            format!("m.csv:4:4: found nothing, {percent}")
        );
        assert_eq!(
            error("1.23%", "-100"),
            format!("m.csv:4:4: found -100, {percent}")
        );
        assert_eq!(
            error("\nmilc", "\nmlic"),
            "m.csv:4:1: found 'mlic', expected one of the columns: mcf, milc, gamess, namd (did you mean 'milc'?)"
        );
        assert_eq!(
            error("\nmilc", "\nmcf"),
            "m.csv:4:1: found 'mcf' again, expected one row for each program"
        );
        assert_eq!(error(",1.11%", ""), "m.csv:4:5: found 3 values, expected 4");
        assert_eq!(
            error("1.11%", "1.11%,2"),
            "m.csv:4:6: found 5 values, expected 4"
        );
        assert_eq!(
            error(",milc", ",mcf"),
            "m.csv:1:3: found 'mcf', expected a name that is not repeated"
        );
        let short = TABLE_1.lines().take(4).collect::<Vec<_>>().join("\n");
        assert_eq!(
            parse_measured_matrix("m.csv", &short)
                .unwrap_err()
                .to_string(),
            "m.csv:5:1: found the end, expected a row for 'gamess'"
        );
        assert!(parse_measured_matrix("m.csv", "mcf").is_err());
        let twice = parse_measured_matrix("m.csv", ",a\na,")
            .unwrap()
            .slowdowns_of(&["a".to_string(), "a".to_string()]);
        assert!(twice.unwrap_err().to_string().contains("given twice"));
    }
}
