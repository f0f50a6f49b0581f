//! A measured slowdown matrix, in the form of CA's Table 1: the slowdown of the row's program beside the column's
//! program.

use crate::{nearest_name, suggestion};

/// A matrix and the names of its programs.
#[derive(Clone, PartialEq, Debug)]
pub struct MeasuredMatrix {
    /// Names of the programs, in the order of rows and of columns.
    pub names: Vec<String>,
    /// Slowdowns by row and column; 0.28 = 28 % slower.
    pub slowdowns: Vec<Vec<f64>>,
    /// Whether the diagonal entry was given. (Missing ones are 0 in `slowdowns`.)
    pub has_diagonal: Vec<bool>,
}

/// The error for a selection that a [`MeasuredMatrix`] does not contain.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MatrixLookupError {
    /// A program without a row.
    #[error("'{name}' is not in the measured matrix, which has {known}{}", suggestion(.meant.as_deref()))]
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

impl MeasuredMatrix {
    /// Slowdowns in the order of `programs`; a repeated name stands for a program and its copy.
    ///
    /// # Errors
    /// A name has no row (the error has the most similar name), or two copies have an empty
    /// diagonal.
    pub fn slowdowns_of(&self, programs: &[String]) -> Result<Vec<Vec<f64>>, MatrixLookupError> {
        let find_program = |name: &String| {
            self.names
                .iter()
                .position(|matrix_name| matrix_name == name)
                .ok_or_else(|| MatrixLookupError::Unknown {
                    name: name.as_str().into(),
                    known: self.names.join(", ").into(),
                    meant: nearest_name(name, self.names.iter().map(String::as_str)).map(Box::from),
                })
        };
        let matrix_rows: Vec<usize> = programs
            .iter()
            .map(find_program)
            .collect::<Result<_, _>>()?;
        for (index, &row) in matrix_rows.iter().enumerate() {
            if matrix_rows[..index].contains(&row) && !self.has_diagonal[row] {
                return Err(MatrixLookupError::NotBesideACopy {
                    name: self.names[row].as_str().into(),
                });
            }
        }

        Ok(matrix_rows
            .iter()
            .map(|&i| matrix_rows.iter().map(|&j| self.slowdowns[i][j]).collect())
            .collect())
    }
}
