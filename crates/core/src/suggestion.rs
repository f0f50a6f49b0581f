//! Suggests the known name that the user of an unknown one probably meant.

/// The candidate with the smallest edit distance to `name`, the first of equally close ones. `None` if more than a
/// third of the letters differ in every candidate, and neither name is a prefix of the other.
pub fn nearest_name<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lowercase_name = name.to_lowercase();
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let known = candidate.to_lowercase();
        let begins =
            !lowercase_name.is_empty() && (known.starts_with(&lowercase_name) || lowercase_name.starts_with(&known));
        let distance = if begins { 1 } else { strsim::osa_distance(&lowercase_name, &known) };
        let allowed = lowercase_name.chars().count().max(known.chars().count()).div_ceil(3);
        if distance <= allowed && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is the intended name found, and none if no name is close?
    #[test]
    fn the_nearest_name_is_the_one_that_was_meant() {
        let known = ["xeon-x5365", "opteron-2350", "power5-2x2x2", "smt-av"];
        assert_eq!(nearest_name("xeon-x5356", known), Some("xeon-x5365"));
        assert_eq!(nearest_name("Opteron", known), Some("opteron-2350"));
        assert_eq!(nearest_name("smtav", known), Some("smt-av"));
        assert_eq!(nearest_name("quantum", known), None);
        assert_eq!(nearest_name("", known), None);
        // A transposition of two letters counts once, and case does not count.
        assert_eq!(nearest_name("STAITC", ["static", "random"]), Some("static"));
        assert_eq!(nearest_name("kitten", ["sitting", "mitten"]), Some("mitten"));
    }
}
