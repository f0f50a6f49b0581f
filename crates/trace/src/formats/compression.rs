//! Compressed inputs, recognized by their first bytes and decompressed while they are read.
//!
//! Memory is bounded whatever the input declares: a zstd window by [`MAX_ZSTD_WINDOW_LOG`], an xz dictionary by
//! [`MAX_XZ_MEMORY_BYTES`]; gzip needs 32 KiB.

use std::io::{self, Read};

use flate2::read::MultiGzDecoder;
use liblzma::read::XzDecoder;
use liblzma::stream::{CONCATENATED, Stream};

const MAX_ZSTD_WINDOW_LOG: u32 = 27;
/// `xz -9` needs 65 MiB.
const MAX_XZ_MEMORY_BYTES: u64 = 128 << 20;

/// File name extensions of compressed inputs.
const EXTENSIONS: [&str; 3] = [".zst", ".gz", ".xz"];

/// Returns the name without the extension of its compression.
pub(super) fn uncompressed_name(file: &str) -> &str {
    EXTENSIONS
        .iter()
        .find_map(|extension| file.strip_suffix(extension))
        .unwrap_or(file)
}

pub(crate) const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const XZ_MAGIC: &[u8] = b"\xfd7zXZ\0";

/// Returns whether an input with these first bytes is compressed.
pub(super) fn is_compressed(start: &[u8]) -> bool {
    [ZSTD_MAGIC, GZIP_MAGIC, XZ_MAGIC]
        .iter()
        .any(|magic| start.starts_with(magic))
}

/// Returns the decompressed input, or the input itself if it is not compressed. `start` contains its first bytes.
pub(super) fn unpack(
    start: &[u8],
    input: impl Read + Send + 'static,
) -> io::Result<Box<dyn Read + Send>> {
    if start.starts_with(ZSTD_MAGIC) {
        let mut decoder = zstd::stream::read::Decoder::new(input)?;
        decoder.window_log_max(MAX_ZSTD_WINDOW_LOG)?;
        return Ok(Box::new(decoder));
    }
    if start.starts_with(GZIP_MAGIC) {
        return Ok(Box::new(MultiGzDecoder::new(input)));
    }
    if start.starts_with(XZ_MAGIC) {
        let stream = Stream::new_stream_decoder(MAX_XZ_MEMORY_BYTES, CONCATENATED)?;
        return Ok(Box::new(XzDecoder::new_stream(input, stream)));
    }
    Ok(Box::new(input))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use crate::{AccessRecord, open};

    /// Is a trace the same in each of the three compressions, also in several members, and is a truncated one rejected?
    #[test]
    fn compressed_traces_read_as_the_plain_one() {
        let dir = tempfile::tempdir().unwrap();
        let plain_bytes: Vec<u8> = (0..5000u64)
            .flat_map(|at| (at * 64 % 7777).to_le_bytes())
            .collect();
        let (first, second) = plain_bytes.split_at(16_000);
        let gzip = |bytes: &[u8]| {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        let xz = |bytes: &[u8]| {
            let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 9);
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        let zst = |bytes: &[u8]| zstd::stream::encode_all(bytes, 3).unwrap();
        let compressions: [(&str, &dyn Fn(&[u8]) -> Vec<u8>); 3] =
            [("gz", &gzip), ("xz", &xz), ("zst", &zst)];
        for (ending, compress) in compressions {
            let path = dir.path().join(format!("t.u64.{ending}"));
            let read = |bytes: &[u8]| {
                std::fs::write(&path, bytes).unwrap();
                let mut reader = open(path.to_str().unwrap(), None)?;
                let (mut all, mut batch): (Vec<AccessRecord>, _) = (Vec::new(), Vec::new());
                while reader.read_batch(&mut batch)? {
                    all.append(&mut batch);
                }
                Ok::<_, crate::TraceError>(
                    all.iter()
                        .flat_map(|record| record.address.to_le_bytes())
                        .collect::<Vec<u8>>(),
                )
            };
            assert_eq!(
                read(&compress(&plain_bytes)).unwrap(),
                plain_bytes,
                "{ending}"
            );
            assert_eq!(
                read(&[compress(first), compress(second)].concat()).unwrap(),
                plain_bytes,
                "{ending}: two members"
            );
            let cut = compress(&plain_bytes);
            assert!(read(&cut[..cut.len() / 2]).is_err(), "{ending}: cut");
        }
    }
}
