//! A measured slowdown matrix, in the form of CA's Table 1: the slowdown of the row's program beside the column's
//! program.
//!
//! Values are percent of the solo run time. The diagonal is a program beside a copy of itself and may be empty. Rows
//! may come in any order.

use std::collections::BTreeMap;

use cachemate_core::{PercentMatrix, PercentRow, nearest_name};

use crate::matrix::{CostKind, PairCosts};

/// A matrix and the names of its programs, in the order of the columns.
#[derive(Clone, PartialEq, Debug)]
pub struct MeasuredMatrix {
    /// Names of the programs.
    pub names: Vec<String>,
    /// Slowdowns, rows in the order of the columns; 0.28 = 28 % slower.
    pub costs: PairCosts,
    /// Whether the diagonal entry was given. (Missing ones are 0 in `costs`.)
    pub has_diagonal: Vec<bool>,
}

/// The error for a CSV file that is not a slowdown matrix.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{file}:{line}:{column}: found {found}, expected {expected}")]
pub struct MatrixError {
    /// The name of the file, for messages.
    pub file: Box<str>,
    /// Line number, from 1.
    pub line: u32,
    /// Field number, from 1.
    pub column: u32,
    /// The text at this place.
    pub found: Box<str>,
    /// A description of valid text.
    pub expected: Box<str>,
}

/// Largest number of programs in a matrix.
const MAX_PROGRAMS: usize = 4096;

/// The error for a selection that a [`MeasuredMatrix`] does not contain.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MatrixLookupError {
    /// A program without a row.
    #[error("'{name}' is not in the measured matrix, which has {known}{}", format_hint(.meant.as_deref()))]
    Unknown {
        /// The requested name.
        name: Box<str>,
        /// The names in the matrix.
        known: Box<str>,
        /// The most similar name in the matrix, if any is similar.
        meant: Option<Box<str>>,
    },
    /// A program was requested together with its copy, but the diagonal entry is empty.
    #[error("'{name}' is given twice, but its own column in its row is empty")]
    NotBesideACopy {
        /// The program that was requested twice.
        name: Box<str>,
    },
}

fn format_hint(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |meant| format!(" (did you mean '{meant}'?)"))
}

/// Returns the position of every column by its name.
fn column_by_name(matrix: &PercentMatrix) -> Result<BTreeMap<&str, usize>, MatrixError> {
    let names = &matrix.columns;
    if names.is_empty() || names.len() > MAX_PROGRAMS {
        let expected = format!("1 to {MAX_PROGRAMS} names after an empty first field");
        return Err(matrix_error(matrix, matrix.header_line, 2, format!("{} names", names.len()), &expected));
    }
    let mut columns = BTreeMap::new();
    for (index, name) in names.iter().enumerate() {
        if name.is_empty() || columns.insert(name.as_str(), index).is_some() {
            let found = format!("'{name}'");
            return Err(matrix_error(matrix, matrix.header_line, index + 2, found, "a name that is not repeated"));
        }
    }
    Ok(columns)
}

fn matrix_error(matrix: &PercentMatrix, line: u32, column: usize, found: String, expected: &str) -> MatrixError {
    MatrixError {
        file: matrix.file.clone(),
        line,
        column: column as u32,
        found: found.into(),
        expected: expected.into(),
    }
}

/// Returns the values of the row of `program` as fractions, and whether the row has a value beside its copy.
fn row_values(matrix: &PercentMatrix, row: &PercentRow, program: usize) -> Result<(Vec<f64>, bool), MatrixError> {
    let (value_count, column_count) = (row.values_percent.len(), matrix.columns.len());
    if value_count != column_count {
        let column = value_count.min(column_count) + 2;
        return Err(matrix_error(matrix, row.line, column, format!("{value_count} values"), &column_count.to_string()));
    }
    let mut values = Vec::with_capacity(column_count);
    for (column, &percent) in row.values_percent.iter().enumerate() {
        match percent {
            Some(percent) if percent > -100.0 => values.push(percent / 100.0),
            None if column == program => values.push(0.0),
            _ => {
                let percent_text = percent.map_or("nothing".to_string(), |percent| format!("{percent}"));
                return Err(matrix_error(
                    matrix,
                    row.line,
                    column + 2,
                    percent_text,
                    "percent above -100, such as 24.75% or -1.2",
                ));
            }
        }
    }
    Ok((values, row.values_percent[program].is_some()))
}

impl TryFrom<&PercentMatrix> for MeasuredMatrix {
    type Error = MatrixError;

    /// Refuses names that are missing, repeated or differ between rows and columns, rows that are too short or too
    /// long, and values that are missing or not slowdowns; each error carries line and field.
    fn try_from(matrix: &PercentMatrix) -> Result<Self, MatrixError> {
        let columns = column_by_name(matrix)?;
        let names = matrix.columns.clone();
        let mut rows: Vec<Option<(Vec<f64>, bool)>> = vec![None; names.len()];
        for row in &matrix.rows {
            let Some(&program) = columns.get(row.name.as_str()) else {
                let hint = format_hint(nearest_name(&row.name, names.iter().map(String::as_str)));
                let expected = format!("one of the columns: {}{hint}", names.join(", "));
                return Err(matrix_error(matrix, row.line, 1, format!("'{}'", row.name), &expected));
            };
            if rows[program].is_some() {
                return Err(matrix_error(
                    matrix,
                    row.line,
                    1,
                    format!("'{}' again", row.name),
                    "one row for each program",
                ));
            }
            rows[program] = Some(row_values(matrix, row, program)?);
        }
        if let Some(missing_row) = rows.iter().position(Option::is_none) {
            let line = matrix.rows.last().map_or(matrix.header_line, |row| row.line) + 1;
            return Err(matrix_error(
                matrix,
                line,
                1,
                "the end".to_string(),
                &format!("a row for '{}'", names[missing_row]),
            ));
        }
        let (cost, beside_a_copy) = rows.into_iter().flatten().unzip();
        Ok(MeasuredMatrix {
            names,
            costs: PairCosts { kind: CostKind::Degradation, cost },
            has_diagonal: beside_a_copy,
        })
    }
}

impl MeasuredMatrix {
    /// Returns the matrix of these programs, in this order; a repeated name stands for a program and its copy.
    ///
    /// # Errors
    /// Returns an error if a name has no row (with the most similar name), or if two copies have an empty diagonal.
    pub fn pair_costs(&self, programs: &[String]) -> Result<PairCosts, MatrixLookupError> {
        let find_program = |name: &String| {
            self.names.iter().position(|matrix_name| matrix_name == name).ok_or_else(|| MatrixLookupError::Unknown {
                name: name.as_str().into(),
                known: self.names.join(", ").into(),
                meant: nearest_name(name, self.names.iter().map(String::as_str)).map(Box::from),
            })
        };
        let matrix_rows: Vec<usize> = programs.iter().map(find_program).collect::<Result<_, _>>()?;
        for (index, &row) in matrix_rows.iter().enumerate() {
            if matrix_rows[..index].contains(&row) && !self.has_diagonal[row] {
                return Err(MatrixLookupError::NotBesideACopy { name: self.names[row].as_str().into() });
            }
        }
        let cost = matrix_rows.iter().map(|&i| matrix_rows.iter().map(|&j| self.costs.cost[i][j]).collect()).collect();
        Ok(PairCosts { kind: self.costs.kind, cost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_spec::parse_percent_matrix;

    fn parse(file: &str, text: &str) -> Result<MeasuredMatrix, MatrixError> {
        MeasuredMatrix::try_from(&parse_percent_matrix(file, text).unwrap())
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
        let table = parse("t", TABLE_1).unwrap();
        assert_eq!(table.names, ["mcf", "milc", "gamess", "namd"]);
        assert_eq!(table.costs.cost[0][1], 0.6563);
        assert!((table.costs.mutual_cost(0, 1) - 0.9038).abs() < 1e-12);
        let mut lines: Vec<&str> = TABLE_1.lines().collect();
        lines.swap(1, 4);
        let rewritten = lines.join("\r\n").replace('%', "").replace(',', "; ");
        assert_eq!(parse("t", &rewritten).unwrap(), table);
        let two = table.pair_costs(&["namd".to_string(), "mcf".to_string(), "mcf".to_string()]).unwrap();
        let is_near = |(a, b): (&f64, f64)| (a - b).abs() < 1e-12;
        assert!(two.cost[1].iter().zip([0.0211, 0.4801, 0.4801]).all(is_near), "{two:?}");
        assert!(table.pair_costs(&["mfc".to_string()]).unwrap_err().to_string().contains("did you mean 'mcf'"));
    }

    /// Is every invalid file refused with line and field?
    #[test]
    fn invalid_matrices_are_refused_with_line_and_field() {
        let error = |pattern: &str, replacement: &str| {
            parse("m.csv", &TABLE_1.replacen(pattern, replacement, 1)).unwrap_err().to_string()
        };
        let percent = "expected percent above -100, such as 24.75% or -1.2";
        assert_eq!(error("1.23%", ""), format!("m.csv:4:4: found nothing, {percent}"));
        assert_eq!(error("1.23%", "-100"), format!("m.csv:4:4: found -100, {percent}"));
        assert_eq!(
            error("\nmilc", "\nmlic"),
            "m.csv:4:1: found 'mlic', expected one of the columns: mcf, milc, gamess, namd (did you mean 'milc'?)"
        );
        assert_eq!(error("\nmilc", "\nmcf"), "m.csv:4:1: found 'mcf' again, expected one row for each program");
        assert_eq!(error(",1.11%", ""), "m.csv:4:5: found 3 values, expected 4");
        assert_eq!(error("1.11%", "1.11%,2"), "m.csv:4:6: found 5 values, expected 4");
        assert_eq!(error(",milc", ",mcf"), "m.csv:1:3: found 'mcf', expected a name that is not repeated");
        let short = TABLE_1.lines().take(4).collect::<Vec<_>>().join("\n");
        assert_eq!(
            parse("m.csv", &short).unwrap_err().to_string(),
            "m.csv:5:1: found the end, expected a row for 'gamess'"
        );
        assert!(parse("m.csv", "mcf").is_err());
        let twice = parse("m.csv", ",a\na,").unwrap().pair_costs(&["a".to_string(), "a".to_string()]);
        assert!(twice.unwrap_err().to_string().contains("given twice"));
    }
}
