//! One stored value as bytes: a magic line, a SHA-256 over the rest, and the compressed record.

use std::io::Read as _;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const FORMAT_LINE: &[u8] = b"cachemate run 1\n";
const CHECKSUM_BYTES: usize = 32;
/// Maximum size of a stored value, in its file and unpacked; larger ones are not stored.
pub(super) const MAX_ENTRY_BYTES: u64 = 64 << 20;

/// A value, and everything that it depends on.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StoredEntry {
    /// The kind of run, such as `alone`.
    pub kind: String,
    /// One line for users: machine and programs.
    pub label: String,
    /// Digest of the sources that can change the value.
    pub sources: String,
    /// All other inputs, as JSON.
    pub inputs: String,
    /// Processor time spent on the value.
    pub cpu_seconds: f64,
    /// The value in MessagePack.
    #[serde(skip)]
    pub answer: Vec<u8>,
}

/// The reason why bytes are not an entry.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// A different first line.
    #[error("found another first line, expected 'cachemate run 1'")]
    Magic,
    /// Content that does not match its checksum.
    #[error("found a checksum that does not fit, expected the file as it was written")]
    Checksum,
    /// Content that is not a record.
    #[error("found no record ({0}), expected one")]
    Record(String),
}

/// A hash over everything that the value depends on.
pub(super) fn entry_name(kind: &str, sources: &str, inputs: &str) -> String {
    let mut digest = Sha256::new();
    for part in [kind, sources, inputs] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    hex_digits(&digest.finalize())
}

fn hex_digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl StoredEntry {
    pub(super) fn name(&self) -> String {
        entry_name(&self.kind, &self.sources, &self.inputs)
    }

    /// The bytes of the file; `None` if the value is larger than [`MAX_ENTRY_BYTES`].
    pub(super) fn to_bytes(&self) -> Result<Option<Vec<u8>>, EntryError> {
        let encoding_error = |error: &dyn std::fmt::Display| EntryError::Record(error.to_string());
        let encoded_head = rmp_serde::to_vec_named(self).map_err(|error| encoding_error(&error))?;
        let mut record = (encoded_head.len() as u64).to_le_bytes().to_vec();
        record.extend_from_slice(&encoded_head);
        record.extend_from_slice(&self.answer);
        if record.len() as u64 > MAX_ENTRY_BYTES {
            return Ok(None);
        }
        let compressed_record =
            zstd::bulk::compress(&record, 1).map_err(|error| encoding_error(&error))?;
        let mut bytes = FORMAT_LINE.to_vec();
        bytes.extend_from_slice(&Sha256::digest(&compressed_record));
        bytes.extend_from_slice(&compressed_record);
        let is_small = bytes.len() as u64 <= MAX_ENTRY_BYTES;
        Ok(is_small.then_some(bytes))
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, EntryError> {
        let body = bytes.strip_prefix(FORMAT_LINE).ok_or(EntryError::Magic)?;
        let (checksum, compressed_record) = body
            .split_at_checked(CHECKSUM_BYTES)
            .ok_or(EntryError::Checksum)?;
        if Sha256::digest(compressed_record).as_slice() != checksum {
            return Err(EntryError::Checksum);
        }

        let record_error = |error: &dyn std::fmt::Display| EntryError::Record(error.to_string());
        let mut record = Vec::new();
        let decoder =
            zstd::Decoder::new(compressed_record).map_err(|error| record_error(&error))?;
        decoder
            .take(MAX_ENTRY_BYTES + 1)
            .read_to_end(&mut record)
            .map_err(|error| record_error(&error))?;
        if record.len() as u64 > MAX_ENTRY_BYTES {
            return Err(record_error(&"more than 64 MiB"));
        }

        let (length, tail) = record
            .split_first_chunk::<8>()
            .ok_or_else(|| record_error(&"no length"))?;
        let length =
            usize::try_from(u64::from_le_bytes(*length)).map_err(|error| record_error(&error))?;
        let (head, answer) = tail
            .split_at_checked(length)
            .ok_or_else(|| record_error(&"a length beyond its end"))?;
        let mut entry: StoredEntry =
            rmp_serde::from_slice(head).map_err(|error| record_error(&error))?;
        entry.answer = answer.to_vec();
        Ok(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_entry() -> StoredEntry {
        StoredEntry {
            kind: "alone".into(),
            label: "milc on a machine".into(),
            sources: "abc".into(),
            inputs: "{}".into(),
            cpu_seconds: 0.25,
            answer: (0..=255).cycle().take(3_000).collect(),
        }
    }

    /// Does an entry read back unchanged, and is one that is truncated at any length, or changed in any byte, rejected?
    #[test]
    fn a_cut_or_changed_entry_is_rejected() {
        let bytes = sample_entry().to_bytes().unwrap().unwrap();
        assert_eq!(StoredEntry::from_bytes(&bytes), Ok(sample_entry()));
        for length in 0..bytes.len() {
            assert!(
                StoredEntry::from_bytes(&bytes[..length]).is_err(),
                "cut at {length}"
            );
        }
        for position in 0..bytes.len() {
            let mut changed_bytes = bytes.clone();
            changed_bytes[position] ^= 0x10;
            assert!(
                StoredEntry::from_bytes(&changed_bytes).is_err(),
                "changed at {position}"
            );
        }
    }

    /// Is a value that would unpack to more than the bound neither written nor read?
    #[test]
    fn a_value_beyond_the_bound_is_neither_written_nor_read() {
        let mut entry = sample_entry();
        entry.answer = vec![0; MAX_ENTRY_BYTES as usize];
        assert_eq!(entry.to_bytes(), Ok(None));
        let packed = zstd::bulk::compress(&vec![0; MAX_ENTRY_BYTES as usize + 1], 1).unwrap();
        let mut bytes = FORMAT_LINE.to_vec();
        bytes.extend_from_slice(&Sha256::digest(&packed));
        bytes.extend_from_slice(&packed);
        let error = StoredEntry::from_bytes(&bytes).unwrap_err();
        assert!(error.to_string().contains("more than 64 MiB"), "{error}");
    }

    /// Do inputs with the same concatenation have different names?
    #[test]
    fn inputs_of_equal_concatenation_have_different_names() {
        assert_ne!(entry_name("a", "bc", "d"), entry_name("ab", "c", "d"));
        assert_ne!(entry_name("a", "b", "c"), entry_name("a", "b", "d"));
        assert_eq!(sample_entry().name(), entry_name("alone", "abc", "{}"));
    }
}
