//! A measured degradation matrix from CSV, as CA's Table 1 prints it: row suffers from column.
//!
//! ```text
//! ,mcf,milc,gamess,namd
//! mcf,48.01%,65.63%,2.0%,2.11%
//! milc,24.75%,45.39%,1.23%,1.11%
//! ```
//! Values are per cent of the run time alone, with or without the sign; the diagonal is a program beside a copy of
//! itself and may be empty. Rows may come in any order. Fields are cut at commas, semicolons or tabs (whichever the
//! first line has), may be quoted, and lines that are empty or begin with `#` are skipped.

use std::collections::BTreeMap;

use cachemate_core::nearest;

use crate::matrix::{CostKind, PairCosts};

/// A matrix and the names of its programs, in the order of the columns.
#[derive(Clone, PartialEq, Debug)]
pub struct Measured {
    pub names: Vec<String>,
    pub costs: PairCosts,
    /// Whether the diagonal entry was given (absent ones are 0 in `costs`).
    pub beside_a_copy: Vec<bool>,
}

/// A CSV that is no degradation matrix.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{file}:{line}:{column}: found {found}, expected {expected}")]
pub struct BadMatrix {
    pub file: Box<str>,
    /// From 1.
    pub line: u32,
    /// The field's number from 1.
    pub column: u32,
    pub found: Box<str>,
    pub expected: Box<str>,
}

/// More programs than this are no measured matrix.
const PROGRAMS_AT_MOST: usize = 4096;

/// Reads a matrix; `file` is what errors call it.
///
/// # Errors
/// Names that are missing, doubled or differ between rows and columns; a field that is no finite number; a row that is
/// too short or too long, each with line and field.
pub fn parse(file: &str, text: &str) -> Result<Measured, BadMatrix> {
    let fail = |line: usize, column: usize, found: String, expected: &str| {
        Err(BadMatrix {
            file: file.into(),
            line: line as u32,
            column: column as u32,
            found: found.into(),
            expected: expected.into(),
        })
    };
    let text = text.trim_start_matches('\u{feff}');
    let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line)).filter(|(_, line)| !is_comment(line));
    let Some((first_line, header)) = lines.next() else {
        return fail(1, 1, "an empty file".to_string(), "a first line with the programs' names");
    };
    let cut = [';', '\t'].into_iter().find(|&cut| header.contains(cut)).unwrap_or(',');
    let names: Vec<String> = fields(header, cut).skip(1).map(str::to_string).collect();
    if names.is_empty() || names.len() > PROGRAMS_AT_MOST {
        let expected = format!("1 to {PROGRAMS_AT_MOST} names after an empty first field");
        return fail(first_line, 2, format!("{} names", names.len()), &expected);
    }
    let mut place = BTreeMap::new();
    for (at, name) in names.iter().enumerate() {
        if name.is_empty() || place.insert(name.as_str(), at).is_some() {
            return fail(first_line, at + 2, format!("'{name}'"), "a name that is not yet there");
        }
    }
    let mut rows: Vec<Option<Vec<f64>>> = vec![None; names.len()];
    let mut beside_a_copy = vec![false; names.len()];
    let mut last_line = first_line;
    for (at, line) in lines {
        last_line = at;
        let row: Vec<&str> = fields(line, cut).collect();
        let Some(&program) = place.get(row[0]) else {
            let meant = nearest(row[0], names.iter().map(String::as_str));
            let meant = meant.map_or(String::new(), |meant| format!(" (did you mean '{meant}'?)"));
            return fail(at, 1, format!("'{}'", row[0]), &format!("one of the columns: {}{meant}", names.join(", ")));
        };
        if rows[program].is_some() {
            return fail(at, 1, format!("'{}' again", row[0]), "one row for each program");
        }
        if row.len() != names.len() + 1 {
            let column = row.len().min(names.len() + 1) + 1;
            return fail(at, column, format!("{} values", row.len() - 1), &format!("{}", names.len()));
        }
        let mut values = Vec::with_capacity(names.len());
        for (column, field) in row[1..].iter().enumerate() {
            let own = column == program;
            if own && field.is_empty() {
                values.push(0.0);
                continue;
            }
            match field.trim_end_matches('%').trim().parse::<f64>() {
                Ok(percent) if percent.is_finite() && percent > -100.0 => values.push(percent / 100.0),
                _ => return fail(at, column + 2, format!("'{field}'"), "per cent, such as 24.75% or -1.2"),
            }
            beside_a_copy[program] |= own;
        }
        rows[program] = Some(values);
    }
    if let Some(missing) = rows.iter().position(Option::is_none) {
        return fail(last_line + 1, 1, "the end".to_string(), &format!("a row for '{}'", names[missing]));
    }
    let cost = rows.into_iter().flatten().collect();
    Ok(Measured { names, costs: PairCosts { kind: CostKind::Degradation, cost }, beside_a_copy })
}

fn is_comment(line: &str) -> bool {
    line.trim().is_empty() || line.trim_start().starts_with('#')
}

fn fields(line: &str, cut: char) -> impl Iterator<Item = &str> {
    line.split(cut).map(|field| field.trim().trim_matches('"').trim())
}

impl Measured {
    /// The matrix of just these programs, in this order; a name given twice is a program and its copy.
    ///
    /// # Errors
    /// A name that has no row (with the nearest), or two copies where the diagonal was left empty.
    pub fn of(&self, wanted: &[String]) -> Result<PairCosts, String> {
        let place = |name: &String| {
            self.names.iter().position(|known| known == name).ok_or_else(|| {
                let meant = nearest(name, self.names.iter().map(String::as_str));
                let meant = meant.map_or(String::new(), |meant| format!(" (did you mean '{meant}'?)"));
                format!("'{name}' is not in the measured matrix, which has {}{meant}", self.names.join(", "))
            })
        };
        let places: Vec<usize> = wanted.iter().map(place).collect::<Result<_, _>>()?;
        for (nth, &at) in places.iter().enumerate() {
            if places[..nth].contains(&at) && !self.beside_a_copy[at] {
                return Err(format!("'{}' is given twice, but its own column in its row is empty", self.names[at]));
            }
        }
        let cost = places.iter().map(|&i| places.iter().map(|&j| self.costs.cost[i][j]).collect()).collect();
        Ok(PairCosts { kind: self.costs.kind, cost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE_1: &str = "\
,mcf,milc,gamess,namd
mcf,48.01%,65.63%,2.0%,2.11%
# a remark
milc,24.75%,45.39%,1.23%,1.11%
gamess,2.67%,4.48%,-1.01%,-1.21%
namd,1.48%,3.45%,-1.19%,-0.93%
";

    /// Does the published table read, whatever the order of its rows, the signs and the separator?
    #[test]
    fn the_published_table_reads_in_every_notation() {
        let table = parse("t", TABLE_1).unwrap();
        assert_eq!(table.names, ["mcf", "milc", "gamess", "namd"]);
        assert_eq!(table.costs.cost[0][1], 0.6563);
        assert!((table.costs.mutual(0, 1) - 0.9038).abs() < 1e-12);
        let mut lines: Vec<&str> = TABLE_1.lines().collect();
        lines.swap(1, 4);
        let other = lines.join("\r\n").replace('%', "").replace(',', "; ");
        assert_eq!(parse("t", &other).unwrap(), table);
        let two = table.of(&["namd".to_string(), "mcf".to_string(), "mcf".to_string()]).unwrap();
        let near = |(a, b): (&f64, f64)| (a - b).abs() < 1e-12;
        assert!(two.cost[1].iter().zip([0.0211, 0.4801, 0.4801]).all(near), "{two:?}");
        assert!(table.of(&["mfc".to_string()]).unwrap_err().contains("did you mean 'mcf'"));
    }

    /// Is every wrong file refused with line and field?
    #[test]
    fn wrong_matrices_are_refused_at_their_place() {
        let error = |old: &str, new: &str| parse("m.csv", &TABLE_1.replacen(old, new, 1)).unwrap_err().to_string();
        assert_eq!(error("1.23%", "much"), "m.csv:4:4: found 'much', expected per cent, such as 24.75% or -1.2");
        assert_eq!(error("1.23%", "inf"), "m.csv:4:4: found 'inf', expected per cent, such as 24.75% or -1.2");
        assert_eq!(
            error("\nmilc", "\nmlic"),
            "m.csv:4:1: found 'mlic', expected one of the columns: mcf, milc, gamess, namd (did you mean 'milc'?)"
        );
        assert_eq!(error("\nmilc", "\nmcf"), "m.csv:4:1: found 'mcf' again, expected one row for each program");
        assert_eq!(error(",1.11%", ""), "m.csv:4:5: found 3 values, expected 4");
        assert_eq!(error("1.11%", "1.11%,2"), "m.csv:4:6: found 5 values, expected 4");
        assert_eq!(error(",milc", ",mcf"), "m.csv:1:3: found 'mcf', expected a name that is not yet there");
        let short = TABLE_1.lines().take(4).collect::<Vec<_>>().join("\n");
        assert_eq!(
            parse("m.csv", &short).unwrap_err().to_string(),
            "m.csv:5:1: found the end, expected a row for 'gamess'"
        );
        assert!(parse("m.csv", "").is_err() && parse("m.csv", "mcf").is_err());
        let twice = parse("m.csv", ",a\na,").unwrap().of(&["a".to_string(), "a".to_string()]);
        assert!(twice.unwrap_err().contains("given twice"));
    }
}
