//! Suggests the known name that the user of an unknown one probably meant.

/// The candidate with the smallest edit distance, the first of equally close ones; a prefix counts
/// as one edit, and the number of differing letters breaks ties. `None` if more than a third of the
/// letters differ in every candidate, and neither name is a prefix of the other.
pub fn nearest_name<'a>(
    name: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let lowercase_name = name.to_lowercase();
    let mut best: Option<((usize, usize), &str)> = None;
    for candidate in candidates {
        let lowercase_candidate = candidate.to_lowercase();
        let is_prefix = !lowercase_name.is_empty()
            && (lowercase_candidate.starts_with(&lowercase_name)
                || lowercase_name.starts_with(&lowercase_candidate));
        let edits = strsim::osa_distance(&lowercase_name, &lowercase_candidate);
        let distance = if is_prefix { 1 } else { edits };
        let max_distance = lowercase_name
            .chars()
            .count()
            .max(lowercase_candidate.chars().count())
            .div_ceil(3);
        if distance <= max_distance && best.is_none_or(|(least, _)| (distance, edits) < least) {
            best = Some(((distance, edits), candidate));
        }
    }

    best.map(|(_, candidate)| candidate)
}

/// The end of a message about an unknown name: ` (did you mean 'gzip'?)`, or nothing if no known name is near.
pub fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |name| format!(" (did you mean '{name}'?)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the intended name found, and none if no name is close?
    #[test]
    fn the_nearest_name_is_found_and_a_distant_one_is_not() {
        let machine_names = ["xeon-x5365", "opteron-2350", "power5-2x2x2", "smt-av"];
        assert_eq!(
            nearest_name("xeon-x5356", machine_names),
            Some("xeon-x5365")
        );
        assert_eq!(nearest_name("Opteron", machine_names), Some("opteron-2350"));
        assert_eq!(nearest_name("smtav", machine_names), Some("smt-av"));
        assert_eq!(nearest_name("quantum", machine_names), None);
        assert_eq!(nearest_name("", machine_names), None);
        // A transposition of two letters counts once, and case does not count.
        assert_eq!(nearest_name("STAITC", ["static", "random"]), Some("static"));
        assert_eq!(
            nearest_name("kitten", ["sitting", "mitten"]),
            Some("mitten")
        );
        assert_eq!(nearest_name("dioo", ["di", "dio"]), Some("dio"));
    }
}
