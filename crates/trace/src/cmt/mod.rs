//! The `.cmt` trace format (`docs/formats.md` describes every byte).
//!
//! Problem: a recording has to be small, quick to read, readable while it grows, and honest when it is damaged.
//! Method: independent blocks of at most 65 536 records, stored by column (a control byte, sizes, gaps, address
//! differences) and compressed with zstd; every block carries its own checksum; totals and an index close the file.
//! Properties: writer and reader need memory for one block and a bounded index; a block can be decoded alone; what
//! stands before a damaged block stays readable; all lengths are checked before anything is allocated.

mod block;
mod read;
mod write;

pub use read::CmtReader;
pub use write::CmtWriter;

/// The version this library writes; it reads no other.
pub const CMT_VERSION: u32 = 1;
/// Records per block at most.
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
/// The header's JSON at most: a command line fits (the kernel's own limit is 2 MiB for arguments and environment).
const HEADER_JSON_LIMIT: usize = 4 << 20;
/// The footer's payload at most, unpacked: a full index and totals of some 100 000 threads.
const FOOTER_LIMIT: usize = 64 << 20;
/// Entries of the index at most: beyond, every second one is dropped and the stride doubles.
const INDEX_ENTRIES_LIMIT: usize = 1 << 20;

/// The start of a block: its byte offset and the number of its first record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct IndexEntry {
    offset: u64,
    first_record: u64,
    block: u64,
}

fn u32_at(bytes: &[u8], index: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[index..index + 4]);
    u32::from_le_bytes(four)
}
fn u64_at(bytes: &[u8], index: usize) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[index..index + 8]);
    u64::from_le_bytes(eight)
}

#[cfg(test)]
mod tests;
