//! The answer to a name that is not known: what there is, and the nearest.

use crate::TraceError;

/// The error for `name` among `known`, with the nearest where it is near (two letters, or a third of it, differ).
pub fn unknown_name(what: &'static str, name: &str, known: impl IntoIterator<Item = String>) -> TraceError {
    let known: Vec<String> = known.into_iter().collect();
    let nearest = known
        .iter()
        .map(|candidate| (edit_distance(name, candidate), candidate))
        .min()
        .filter(|&(distance, candidate)| distance <= (candidate.chars().count() / 3).max(2))
        .map(|(_, candidate)| candidate.clone());
    TraceError::Unknown { what, name: name.to_string(), nearest, known }
}

/// Letters to insert, delete or change, case not counted; names beyond 64 letters are compared by their start.
fn edit_distance(a: &str, b: &str) -> usize {
    let letters = |text: &str| text.chars().take(64).flat_map(char::to_lowercase).collect::<Vec<char>>();
    let (a, b) = (letters(a), letters(b));
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a slip of the finger name the nearest, and nonsense only what there is?
    #[test]
    fn a_misspelt_name_gets_the_nearest_and_nonsense_gets_the_list() {
        let known = || ["gzip", "bzip2", "sqlite3"].map(String::from);
        let near = unknown_name("program", "gzpi", known()).to_string();
        assert_eq!(near, "no program is named 'gzpi' (did you mean 'gzip'?); there are: gzip, bzip2, sqlite3");
        let far = unknown_name("program", "quake", known()).to_string();
        assert_eq!(far, "no program is named 'quake'; there are: gzip, bzip2, sqlite3");
    }
}
