//! The argument of curves that lists cache sizes.

use std::str::FromStr;

use cachemate_study::{default_sizes, sizes_in_equal_ratios};

use crate::args::ByteSize;

/// Cache sizes of a curve, ascending and distinct: `64K,1M` or `LO..HI:N` (N sizes in equal ratios).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SizeList(pub Vec<u64>);

/// Maximum number of points of a curve; `--histogram` writes every distance instead.
const MAX_SIZES: usize = 10_000;

impl SizeList {
    /// From 4K to 64M, two sizes per doubling.
    pub fn with_defaults() -> Self {
        SizeList(default_sizes())
    }
}

impl FromStr for SizeList {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for item in text.split(',') {
            match item.split_once("..") {
                None => sizes.push(item.trim().parse::<ByteSize>()?.0),
                Some((low, rest)) => sizes.extend(parse_geometric_range(low, rest, item)?),
            }
            if sizes.len() > MAX_SIZES {
                return Err(format!("more than {MAX_SIZES} sizes"));
            }
        }
        sizes.sort_unstable();
        sizes.dedup();
        Ok(SizeList(sizes))
    }
}

fn parse_geometric_range(low: &str, bound_and_count: &str, item: &str) -> Result<Vec<u64>, String> {
    let problem = || {
        format!(
            "found '{item}', expected LO..HI:N such as 64K..64M:21, LO below HI, N from 2 to {MAX_SIZES}"
        )
    };
    let (high, count) = bound_and_count.split_once(':').ok_or_else(problem)?;
    let (low, high) = (
        low.trim().parse::<ByteSize>()?.0,
        high.trim().parse::<ByteSize>()?.0,
    );
    let count: usize = count.trim().parse().map_err(|_| problem())?;
    if low >= high || !(2..=MAX_SIZES).contains(&count) {
        return Err(problem());
    }
    Ok(sizes_in_equal_ratios(low, high, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a range include both ends and have N sizes in all, and is a list sorted in ascending order?
    #[test]
    fn ranges_include_both_ends_and_lists_are_sorted() {
        let parse_sizes = |text: &str| text.parse::<SizeList>().map(|sizes| sizes.0);
        assert_eq!(parse_sizes("1M,64K,1M"), Ok(vec![65536, 1 << 20]));
        assert_eq!(
            parse_sizes("64K..1M:5"),
            Ok((16..21).map(|power| 1 << power).collect())
        );
        assert_eq!(parse_sizes("64K..1M:9").unwrap().len(), 9);
        assert_eq!(SizeList::with_defaults().0.len(), 29);
        assert!(SizeList::with_defaults().0.contains(&(1 << 20)));
        for text in [
            "1M..64K:3",
            "1K..2K",
            "1K..2K:1",
            "1K..2K:0",
            "1K..1G:99999999",
            "..",
            "1K,,2K",
            "1K..2K:x",
        ] {
            assert!(parse_sizes(text).is_err(), "{text}");
        }
    }
}
