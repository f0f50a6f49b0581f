//! Compressed inputs, recognized by their first bytes and decompressed while they are read.
//!
//! Memory is bounded whatever the input declares: a zstd window by [`MAX_ZSTD_WINDOW_LOG`], an xz dictionary by
//! [`MAX_XZ_MEMORY_BYTES`]; gzip needs 32 KiB.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::GzDecoder;
use liblzma::read::XzDecoder;
use liblzma::stream::{CONCATENATED, Stream};

pub(super) const MAX_ZSTD_WINDOW_LOG: u32 = 27;
/// `xz -9` needs 65 MiB.
const MAX_XZ_MEMORY_BYTES: u64 = 128 << 20;

/// File name extensions of compressed inputs.
const EXTENSIONS: [&str; 3] = [".zst", ".gz", ".xz"];

/// The name without the extension of its compression.
pub(super) fn uncompressed_name(file: &str) -> &str {
    EXTENSIONS
        .iter()
        .find_map(|extension| file.strip_suffix(extension))
        .unwrap_or(file)
}

pub(crate) const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const XZ_MAGIC: &[u8] = b"\xfd7zXZ\0";

/// Whether an input with these first bytes is compressed.
pub(super) fn is_compressed(start: &[u8]) -> bool {
    [ZSTD_MAGIC, GZIP_MAGIC, XZ_MAGIC]
        .iter()
        .any(|magic| start.starts_with(magic))
}

/// The decompressed input, or the input itself if it is not compressed. `start` contains its first bytes.
pub(super) fn unpack(
    start: &[u8],
    input: impl Read + Send + 'static,
) -> io::Result<Box<dyn Read + Send>> {
    if start.starts_with(ZSTD_MAGIC) {
        let mut decoder = zstd::stream::read::Decoder::new(input)?;
        decoder.window_log_max(MAX_ZSTD_WINDOW_LOG)?;
        return Ok(Box::new(BoundedDecoder::new_zstd(decoder)));
    }

    if start.starts_with(GZIP_MAGIC) {
        return Ok(Box::new(GzipMembers {
            decoder: Some(GzDecoder::new(BufReader::new(input))),
        }));
    }

    if start.starts_with(XZ_MAGIC) {
        let stream = Stream::new_stream_decoder(MAX_XZ_MEMORY_BYTES, CONCATENATED)?;
        return Ok(Box::new(BoundedDecoder {
            decoder: XzDecoder::new_stream(input, stream),
            remedy: "xz -dc",
        }));
    }
    Ok(Box::new(input))
}

/// A decoder with a bound on its memory; an error about memory names the command that unpacks the input without one.
pub(super) struct BoundedDecoder<R> {
    decoder: R,
    remedy: &'static str,
}

impl<R> BoundedDecoder<R> {
    pub(super) fn new_zstd(decoder: R) -> Self {
        BoundedDecoder {
            decoder,
            remedy: "zstd -dc --long=31",
        }
    }
}

impl<R: Read> Read for BoundedDecoder<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.decoder.read(bytes).map_err(|error| {
            if !error.to_string().contains("memory") {
                return error;
            }
            let remedy = self.remedy;
            let message =
                format!("{error}: unpack it by '{remedy} FILE', and pass '-' for FILE here");
            io::Error::new(error.kind(), message)
        })
    }
}

/// The members of a gzip file, one after another. Zeros behind the last one, with which tapes and disks pad files, are
/// skipped as by gzip itself.
struct GzipMembers<R> {
    /// `None` at the end.
    decoder: Option<GzDecoder<BufReader<R>>>,
}

impl<R: Read> Read for GzipMembers<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.decoder {
            let length = decoder.read(bytes)?;
            if length > 0 || bytes.is_empty() {
                return Ok(length);
            }
            let Some(decoder) = self.decoder.take() else {
                break;
            };
            let mut rest = decoder.into_inner();
            if skip_zeros(&mut rest)? {
                self.decoder = Some(GzDecoder::new(rest));
            }
        }
        Ok(0)
    }
}

/// Skips zeros; returns whether another byte follows.
fn skip_zeros(input: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let buffer = input.fill_buf()?;
        if buffer.is_empty() {
            return Ok(false);
        }
        let zeros = buffer.iter().take_while(|byte| **byte == 0).count();
        let has_more = zeros < buffer.len();
        input.consume(zeros);
        if has_more {
            return Ok(true);
        }
    }
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
            if ending == "gz" {
                let padded = [compress(&plain_bytes), vec![0; 70_000]].concat();
                assert_eq!(read(&padded).unwrap(), plain_bytes, "zeros behind");
            }
            let cut = compress(&plain_bytes);
            assert!(read(&cut[..cut.len() / 2]).is_err(), "{ending}: cut");
        }
    }

    /// Does an input that needs more memory than is granted name the command that unpacks it?
    #[test]
    fn an_input_that_needs_more_memory_names_the_remedy() {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.long_distance_matching(true).unwrap();
        encoder.window_log(30).unwrap();
        encoder.write_all(&[7; 64]).unwrap();
        let packed = encoder.finish().unwrap();
        let input = Box::new(std::io::Cursor::new(packed));
        let refusal = crate::open_input(input, "t.u64.zst", None).err().unwrap();
        assert!(
            refusal.to_string().contains("'zstd -dc --long=31 FILE'"),
            "{refusal}"
        );
    }
}
