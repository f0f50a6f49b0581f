//! Random changes to inputs, determined by a seed: bytes, pieces, numbers and nesting change, whatever their meaning.

use cachemate_core::SplitMix64;

/// Values that often break parsers of numbers, names and structures.
const ODD_VALUES: &[&str] = &[
    "0",
    "-1",
    "1",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e999",
    "-0.0",
    "nan",
    "inf",
    "null",
    "true",
    "\"\"",
    "[]",
    "{}",
    "''",
    "\u{0}",
    "\n",
    "\u{202e}",
    "../..",
    "0-4294967295",
    "0x",
    "=",
    "[[",
    "{\"a\":",
    "\u{feff}",
];
const MAX_CHANGES: u64 = 6;
const MAX_NESTING: u64 = 4_000;

/// The changed copy has at most `max_bytes` bytes; some changes copy pieces of `other_seed`.
pub fn mutate(
    generator: &mut SplitMix64,
    seed: &[u8],
    other_seed: &[u8],
    max_bytes: usize,
) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=generator.draw_below(MAX_CHANGES) {
        mutate_once(generator, &mut bytes, other_seed);
        bytes.truncate(max_bytes);
    }
    bytes
}

fn mutate_once(generator: &mut SplitMix64, bytes: &mut Vec<u8>, other_seed: &[u8]) {
    let index = random_index(generator, bytes.len() + 1);
    let odd_value = ODD_VALUES[random_index(generator, ODD_VALUES.len())].as_bytes();
    match generator.draw_below(9) {
        0 => bytes
            .iter_mut()
            .skip(index)
            .take(1)
            .for_each(|byte| *byte ^= 1 << generator.draw_below(8)),
        1 => bytes
            .iter_mut()
            .skip(index)
            .take(1)
            .for_each(|byte| *byte = generator.next_u64() as u8),
        2 => bytes.truncate(index),
        3 => drop(bytes.drain(index..index + random_index(generator, bytes.len() - index + 1))),
        4 => {
            let piece = random_piece(generator, bytes);
            bytes.splice(index..index, piece);
        }
        5 => {
            let piece = random_piece(generator, other_seed);
            bytes.splice(index..index, piece);
        }
        6 => drop(bytes.splice(index..index, odd_value.iter().copied())),
        7 => insert_number(generator, bytes, odd_value),
        _ => {
            let opening = [b'[', b'{', b'(', b'"', b' ', b'\n'][random_index(generator, 6)];
            let count = generator.draw_below(MAX_NESTING) as usize;
            bytes.splice(index..index, std::iter::repeat_n(opening, count));
        }
    }
}

/// Replaces one number in a text.
fn insert_number(generator: &mut SplitMix64, bytes: &mut Vec<u8>, odd_value: &[u8]) {
    let begins_number = |position: &usize| {
        bytes[*position].is_ascii_digit()
            && (*position == 0 || !bytes[*position - 1].is_ascii_digit())
    };
    let numbers: Vec<usize> = (0..bytes.len()).filter(begins_number).collect();
    if numbers.is_empty() {
        return;
    }
    let start = numbers[random_index(generator, numbers.len())];
    let end = start
        + bytes[start..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
    bytes.splice(start..end, odd_value.iter().copied());
}

fn random_piece(generator: &mut SplitMix64, source: &[u8]) -> Vec<u8> {
    let start = random_index(generator, source.len() + 1);
    let end = start + random_index(generator, source.len() - start + 1);
    source[start..end].to_vec()
}

fn random_index(generator: &mut SplitMix64, bound: usize) -> usize {
    generator.draw_below(bound as u64) as usize
}
