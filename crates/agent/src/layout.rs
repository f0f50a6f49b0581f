//! Files of the directory that the command and the preloaded library share.
//!
//! ```text
//! BASE/reference-set       frames of known colors (this module's header, then pages)
//! BASE/ledger              one byte per frame of the host: 0 if unknown, else its color + 1
//! BASE/PID/wanted          the colors allowed to process PID, 16 hexadecimal digits, `a` (all pages move) or `n` (new ones
//!                          only), and a newline
//! BASE/PID/status          its agent's counters: lines of `name number`, the first and the last one equal
//! ```
//! `wanted` has a fixed width, so that one write replaces it whole and the restore journal can restore it like any
//! control file. Everything else is written by one side only.

/// Size of a page in bytes; a host with another page size is rejected when colors are discovered.
pub const PAGE_BYTES: usize = 4096;
/// Maximum number of colors, which fit a mask of 64 bits; a host with more is rejected when colors are discovered.
pub const MAX_COLORS: u32 = 64;
/// First eight bytes of the reference set.
pub const REFERENCE_SET_MAGIC: u64 = u64::from_le_bytes(*b"cmcolor1");
/// Environment variable with the directory's path, for programs that are started colored.
pub const DIR_VARIABLE: &str = "CACHEMATE_COLOR";
/// Environment variable with the colors that a program starts with, as in `wanted`.
pub const MASK_VARIABLE: &str = "CACHEMATE_COLOR_MASK";
/// Environment variable with the maximum memory in bytes that one agent may hold, including frames of other colors.
pub const HOLD_VARIABLE: &str = "CACHEMATE_COLOR_HOLD";
/// Bytes of the `wanted` file.
pub const TARGET_BYTES: usize = 18;
/// Maximum interval at which the agent reads `wanted`.
pub const TICK_MS: u64 = 10;

/// Header of the reference set's file; all words are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReferenceSetHeader {
    /// Number of colors that this host distinguishes, 2 to [`MAX_COLORS`].
    pub colors: u32,
    /// Frames of each color in the reference set, 4 to 256.
    pub frames_per_color: u32,
    /// Id of the discovery that made it; colors of different discoveries are not comparable.
    pub id: u64,
}

impl ReferenceSetHeader {
    /// Bytes of the header, before the table.
    pub const BYTES: usize = 32;
    /// Pages of header and table; the frames of known colors follow.
    pub const PAGES: usize = 17;

    /// The bytes that [`ReferenceSetHeader::from_bytes`] reads.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [
            REFERENCE_SET_MAGIC,
            u64::from(self.colors),
            u64::from(self.frames_per_color),
            self.id,
        ];
        for (index, word) in words.iter().enumerate() {
            bytes[index * 8..index * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Parses a header; `None` if this is not a reference set, or one that this version cannot use.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let read_word = |index: usize| {
            Some(u64::from_le_bytes(
                bytes.get(index * 8..index * 8 + 8)?.try_into().ok()?,
            ))
        };
        let header = ReferenceSetHeader {
            colors: u32::try_from(read_word(1)?).ok()?,
            frames_per_color: u32::try_from(read_word(2)?).ok()?,
            id: read_word(3)?,
        };
        let is_valid = (2..=MAX_COLORS).contains(&header.colors)
            && (4..=256).contains(&header.frames_per_color);
        (read_word(0)? == REFERENCE_SET_MAGIC && is_valid).then_some(header)
    }

    /// Number of entries of the table that follows the header: page numbers of the file, 32 bits each, by color and
    /// then by member.
    pub fn table_len(&self) -> usize {
        self.colors as usize * self.frames_per_color as usize
    }
}

/// Content of the `wanted` file. With `must_move_all`, existing pages of the program move as well.
pub fn format_target(mask: u64, must_move_all: bool) -> [u8; TARGET_BYTES] {
    let mut text = [b'\n'; TARGET_BYTES];
    text[16] = if must_move_all { b'a' } else { b'n' };
    for (index, byte) in text[..16].iter_mut().enumerate() {
        *byte = b"0123456789abcdef"[(mask >> (60 - 4 * index) & 15) as usize];
    }
    text
}

/// Parses the `wanted` file: the mask, and whether all pages move; `None` if it is incomplete, because it is being
/// written.
pub fn parse_target(text: &[u8]) -> Option<(u64, bool)> {
    let digits = text.get(..16)?;
    let must_move_all = match text.get(16)? {
        b'a' => true,
        b'n' => false,
        _ => return None,
    };
    Some((parse_hexadecimal(digits)?, must_move_all))
}

/// Parses lower-case hexadecimal digits, of which there must be at least one.
pub(crate) fn parse_hexadecimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |number, &digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u64::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is every mask recovered from its text, and none from half a text?
    #[test]
    fn masks_are_recovered_from_their_text() {
        for mask in [0, 1, 0xff, u64::MAX, 1 << 63, 0x0123_4567_89ab_cdef] {
            for all in [false, true] {
                assert_eq!(parse_target(&format_target(mask, all)), Some((mask, all)));
            }
        }
        assert_eq!(&format_target(0x2a, true), b"000000000000002aa\n");
        let text = format_target(0x21, true);
        // The newline alone may be missing: it is no part of the value.
        for end in 0..TARGET_BYTES - 1 {
            assert_eq!(parse_target(&text[..end]), None, "{end}");
        }
        let mut reordered = text;
        reordered.swap(15, 16);
        assert_eq!(
            parse_target(&reordered),
            None,
            "two parts of one write in the other order"
        );
        assert_eq!(parse_target(b"00ff"), None);
        assert_eq!(parse_target(b"000000000000002Ga\n"), None);
        assert_eq!(parse_target(b"000000000000002a\n"), None);
    }

    /// Is a header read as it was written, and anything else rejected?
    #[test]
    fn headers_are_read_as_written_and_others_rejected() {
        let header = ReferenceSetHeader {
            colors: 32,
            frames_per_color: 24,
            id: 7,
        };
        assert_eq!(
            ReferenceSetHeader::from_bytes(&header.to_bytes()),
            Some(header)
        );
        assert_eq!(
            ReferenceSetHeader::from_bytes(&header.to_bytes()[..31]),
            None
        );
        assert_eq!(
            ReferenceSetHeader::from_bytes(
                &ReferenceSetHeader {
                    colors: 65,
                    ..header
                }
                .to_bytes()
            ),
            None
        );
        assert_eq!(ReferenceSetHeader::from_bytes(&[0; 64]), None);
    }
}
