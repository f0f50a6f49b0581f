//! Common parts of the command line: global options, sizes, lists of sizes.

use std::path::PathBuf;
use std::str::FromStr;

use cachemate_daemon::loss_history::MAX_AGE_S;
use clap::{Args, ValueEnum};

#[derive(Args)]
pub struct Global {
    /// Print no messages and no progress bar
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Colored output; NO_COLOR disables it as well
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub color: ColorChoice,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ColorChoice {
    /// Color if the output is a terminal
    #[default]
    Auto,
    Always,
    Never,
}

#[derive(Args)]
pub struct JsonArg {
    /// Print one JSON object on standard output and nothing else
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct OutputArgs {
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Overwrite existing files
    #[arg(long)]
    pub force: bool,
}

/// A size in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let size_problem =
            || format!("found '{text}', expected a size such as 4096, 64K, 1.5M or 2G");
        let digits = text
            .trim_end_matches(['B', 'b'])
            .trim_end_matches(['i', 'I']);
        let (number, shift) = match digits.as_bytes().last() {
            Some(b'K' | b'k') => (&digits[..digits.len() - 1], 10),
            Some(b'M' | b'm') => (&digits[..digits.len() - 1], 20),
            Some(b'G' | b'g') => (&digits[..digits.len() - 1], 30),
            Some(b'T' | b't') => (&digits[..digits.len() - 1], 40),
            Some(b'0'..=b'9') if !text.contains(['i', 'I']) => (digits, 0),
            _ => return Err(size_problem()),
        };
        let is_decimal =
            |number: &str| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        let (whole_digits, fraction_digits) = number.split_once('.').unwrap_or((number, "0"));
        if !is_decimal(whole_digits)
            || !is_decimal(fraction_digits)
            || fraction_digits.len() > 9
            || (shift == 0 && number.contains('.'))
        {
            return Err(size_problem());
        }
        let whole_part: u64 = whole_digits.parse().map_err(|_| size_problem())?;
        let fraction: u128 = fraction_digits
            .parse::<u128>()
            .map_err(|_| size_problem())?
            << shift;
        let scale = 10u128.pow(
            number
                .split_once('.')
                .map_or(1, |(_, decimals)| decimals.len() as u32),
        );
        let bytes = (u128::from(whole_part) << shift) + fraction / scale;
        match u64::try_from(bytes) {
            Ok(bytes) if bytes > 0 && bytes <= 1 << 50 => Ok(ByteSize(bytes)),
            _ => Err(format!(
                "found '{text}', expected a size from 1 byte to 1024T"
            )),
        }
    }
}

/// A time before now: `30m`, `3h`, `2d` or `1w`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TimeAgo {
    text: String,
    seconds: u64,
}

impl TimeAgo {
    pub fn seconds(&self) -> u64 {
        self.seconds
    }
}

impl std::fmt::Display for TimeAgo {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.text)
    }
}

impl FromStr for TimeAgo {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let problem = || format!("found '{text}', expected a time such as 30m, 3h, 2d or 1w");
        let unit_seconds = match text.chars().last() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3_600,
            Some('d') => 86_400,
            Some('w') => 7 * 86_400,
            _ => return Err(problem()),
        };
        let count: u64 = text[..text.len() - 1].parse().map_err(|_| problem())?;
        match count.checked_mul(unit_seconds) {
            Some(seconds) if (1..=MAX_AGE_S).contains(&seconds) => Ok(TimeAgo {
                text: text.to_string(),
                seconds,
            }),
            _ => Err(format!(
                "found '{text}', expected 1s to {}d, because the history is no longer",
                MAX_AGE_S / 86_400
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Are K, M, G and T powers of 1024, and is everything else rejected with an example?
    #[test]
    fn sizes_are_read_as_powers_of_1024() {
        let good = [
            ("64K", 65536),
            ("64k", 65536),
            ("1.5M", 3 << 19),
            ("2G", 2 << 30),
            ("1T", 1 << 40),
            ("4096", 4096),
            ("1MiB", 1 << 20),
        ];
        for (text, expected) in good {
            assert_eq!(text.parse(), Ok(ByteSize(expected)), "{text}");
        }
        for text in [
            "",
            "K",
            "-1",
            "0",
            "1.5",
            "1P",
            "1..5K",
            "1e3",
            "99999999999999999999",
            "1.K",
            "ｋ",
            "12i",
            "9999999G",
        ] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    /// Are times read in all units, and is everything else rejected with an example?
    #[test]
    fn times_are_read_in_all_units() {
        let seconds = |text: &str| text.parse::<TimeAgo>().map(|time| time.seconds());
        for (text, expected) in [("90s", 90), ("30m", 1_800), ("3h", 10_800), ("1w", 604_800)] {
            assert_eq!(seconds(text), Ok(expected), "{text}");
        }
        for text in [
            "",
            "3",
            "h",
            "-1h",
            "3 h",
            "0m",
            "9d",
            "99999999999999999999w",
            "3ｈ",
            "1.5h",
        ] {
            assert!(seconds(text).unwrap_err().contains("expected"), "{text}");
        }
    }
}
