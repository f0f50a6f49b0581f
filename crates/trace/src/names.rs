//! The error for an unknown name: the known names, and the nearest one.

use cachemate_core::nearest_name;

use crate::TraceError;

/// The error for `name` among `known_names`, with the nearest name if one is close.
pub fn unknown_name_error(
    subject: &'static str,
    name: &str,
    known_names: impl IntoIterator<Item = String>,
) -> TraceError {
    let known_names: Vec<String> = known_names.into_iter().collect();
    let nearest = nearest_name(name, known_names.iter().map(String::as_str)).map(str::to_string);
    TraceError::Unknown {
        what: subject,
        name: name.to_string(),
        nearest,
        known: known_names,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a misspelled name give the nearest one, and nonsense only the list of known ones?
    #[test]
    fn a_misspelled_name_gives_the_nearest_and_nonsense_the_list() {
        let sample_names = || ["gzip", "bzip2", "sqlite3"].map(String::from);
        let near = unknown_name_error("program", "gzpi", sample_names()).to_string();
        assert_eq!(
            near,
            "no program is named 'gzpi' (did you mean 'gzip'?); there are: gzip, bzip2, sqlite3"
        );
        let far = unknown_name_error("program", "quake", sample_names()).to_string();
        assert_eq!(
            far,
            "no program is named 'quake'; there are: gzip, bzip2, sqlite3"
        );
    }
}
