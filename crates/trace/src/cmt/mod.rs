//! The `.cmt` trace format (`docs/formats.md` describes every byte).
//!
//! Problem: a recording must be small, fast to read, readable while it grows, and must reveal damage. Method:
//! independent blocks of at most 65 536 records, stored by column (a control byte, sizes, gaps, address differences, dependences, sites)
//! and compressed with zstd; every block has its own checksum; totals and an index close the file. Properties: writer
//! and reader need memory for one block and a bounded index; each block can be decoded separately; everything before a
//! damaged block stays readable; all lengths are checked before anything is allocated.

mod block;
mod read;
mod write;

pub use read::CmtReader;
pub use write::CmtWriter;

/// The version that this library writes.
pub const CMT_VERSION: u32 = 2;
/// The oldest version that it reads, whose records have no dependences and no sites.
const OLDEST_CMT_VERSION: u32 = 1;
/// Maximum number of records per block.
pub const BLOCK_RECORDS: usize = 1 << 16;

pub(crate) const FILE_MAGIC: [u8; 8] = *b"CMTRACE\0";
const BLOCK_MAGIC: [u8; 4] = *b"CMTB";
const FOOTER_MAGIC: [u8; 4] = *b"CMTE";
const END_MAGIC: [u8; 8] = *b"CMTREND\0";
/// Bytes before a block's payload.
const BLOCK_HEADER_BYTES: usize = 32;
/// Bytes before the footer's payload.
const FOOTER_HEADER_BYTES: usize = 24;
const TRAILER_BYTES: usize = 16;
/// Maximum size of the header's JSON, which fits a command line (the kernel's own limit is 2 MiB for arguments and
/// environment).
const HEADER_JSON_LIMIT: usize = 4 << 20;
/// Maximum uncompressed size of the footer's payload: a full index, and totals of some 100 000 threads.
const FOOTER_LIMIT: usize = 64 << 20;
/// Maximum number of index entries; beyond it, every second one is dropped, and the stride doubles.
const INDEX_ENTRIES_LIMIT: usize = 1 << 20;

/// The start of a block: its byte offset and the number of its first record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct IndexEntry {
    offset: u64,
    first_record: u64,
    block: u64,
}

pub(crate) fn u32_at(bytes: &[u8], index: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[index..index + 4]);
    u32::from_le_bytes(four)
}
pub(crate) fn u64_at(bytes: &[u8], index: usize) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[index..index + 8]);
    u64::from_le_bytes(eight)
}

#[cfg(test)]
mod tests;
