//! The frames of a zstd file, from which several readers can begin.
//!
//! `zstd` writes one frame, which is decoded from its beginning. A file that was joined from many, such as one for each
//! hour, can be read from any of them if each states the size of its content: a reader seeks to the frame of its place.
//! Stated sizes are not trusted, so a reader that comes to the end of a frame checks that the content ends there too.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use zstd::stream::read::Decoder;

use super::compression::{BoundedDecoder, MAX_ZSTD_WINDOW_LOG};

/// Maximum number of frames and of their blocks; a file of more is read in order.
const MAX_BLOCKS: u64 = 1 << 22;
/// No frame has more than this part of the content, because a reader decodes its first frame up to its place in vain.
const MIN_PARTS: u64 = 8;
/// Maximum number of bytes of a frame's header.
const MAX_HEADER_BYTES: usize = 18;
/// First bytes of a frame without content; the lowest four bits are any.
const SKIPPABLE_MAGIC: u32 = 0x184d_2a50;

/// The frames of a file that have content.
pub(super) struct ZstdFrames {
    file: File,
    frames: Vec<ZstdFrame>,
    content_bytes: u64,
}

#[derive(Clone, Copy)]
struct ZstdFrame {
    /// First byte in the file.
    offset: u64,
    content_bytes: u64,
}

impl ZstdFrames {
    /// Finds the frames by the headers of their blocks. `None` if the file is no sequence of many frames of stated sizes.
    pub fn find(file: &File) -> Option<Self> {
        let file_bytes = file.metadata().ok()?.len();
        let (mut frames, mut content_bytes, mut offset) = (Vec::new(), 0u64, 0);
        let mut block_count = 0;
        while offset < file_bytes {
            let mut header = [0; MAX_HEADER_BYTES];
            let header_bytes = (file_bytes - offset).min(MAX_HEADER_BYTES as u64);
            let header = &mut header[..header_bytes as usize];
            file.read_exact_at(header, offset).ok()?;
            let frame = ZstdFrame {
                offset,
                content_bytes: zstd::zstd_safe::get_frame_content_size(header).ok()??,
            };
            offset = find_end(file, header, offset, &mut block_count)?;
            if frame.content_bytes > 0 {
                content_bytes = content_bytes.checked_add(frame.content_bytes)?;
                frames.push(frame);
            }
        }
        let largest = frames.iter().map(|frame| frame.content_bytes).max()?;
        let is_divided = offset == file_bytes && largest <= content_bytes / MIN_PARTS;
        let file = file.try_clone().ok().filter(|_| is_divided)?;
        Some(ZstdFrames {
            file,
            frames,
            content_bytes,
        })
    }

    /// Length of the content of all frames.
    pub fn content_bytes(&self) -> u64 {
        self.content_bytes
    }

    /// Reads the content from this byte on.
    pub fn read_from(&self, place: u64) -> io::Result<BoundedDecoder<FrameReader>> {
        let (mut first, mut frame_start) = (0, 0);
        while let Some(frame) = self.frames.get(first)
            && frame_start + frame.content_bytes <= place
        {
            frame_start += frame.content_bytes;
            first += 1;
        }
        let later_frames = Vec::from(&self.frames[first..]);
        let mut reader = FrameReader {
            file: self.file.try_clone()?,
            later_frames: later_frames.into_iter(),
            decoder: None,
            rest_bytes: 0,
        };
        io::copy(
            &mut (&mut reader).take(place - frame_start),
            &mut io::sink(),
        )?;
        Ok(BoundedDecoder::new_zstd(reader))
    }
}

/// The first byte behind the frame that begins at `offset`.
fn find_end(file: &File, header: &[u8], offset: u64, block_count: &mut u64) -> Option<u64> {
    *block_count += 1;
    let word: u32 = u32::from_le_bytes(*header.first_chunk()?);
    if word & !0xf == SKIPPABLE_MAGIC {
        let length = u32::from_le_bytes(*header.get(4..)?.first_chunk()?);
        return Some(offset + 8 + u64::from(length));
    }
    // The descriptor: lengths of the dictionary's id and of the content's size, whether there are a window and a checksum.
    let descriptor = *header.get(4)?;
    let has_window = descriptor & 0x20 == 0;
    let id_bytes = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size_bytes = [u64::from(!has_window), 2, 4, 8][usize::from(descriptor >> 6)];
    let mut end = offset + 5 + u64::from(has_window) + id_bytes + size_bytes;
    while *block_count < MAX_BLOCKS {
        *block_count += 1;
        let mut block = [0; 4];
        file.read_exact_at(&mut block[..3], end).ok()?;
        let block = u32::from_le_bytes(block);
        // A block of one repeated byte states the length of its content.
        let is_repeated = block >> 1 & 3 == 1;
        end += 3 + if is_repeated {
            1
        } else {
            u64::from(block >> 3)
        };
        if block & 1 == 1 {
            let has_checksum = descriptor & 4 != 0;
            return Some(end + if has_checksum { 4 } else { 0 });
        }
    }
    None
}

/// Reads the content of frames that follow one another.
pub(super) struct FrameReader {
    file: File,
    later_frames: std::vec::IntoIter<ZstdFrame>,
    decoder: Option<Decoder<'static, BufReader<File>>>,
    /// Number of bytes that the frame still has to have.
    rest_bytes: u64,
}

impl Read for FrameReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.decoder.is_none() {
            let Some(frame) = self.later_frames.next() else {
                return Ok(0);
            };
            self.file.seek(SeekFrom::Start(frame.offset))?;
            let mut decoder = Decoder::new(self.file.try_clone()?)?.single_frame();
            decoder.window_log_max(MAX_ZSTD_WINDOW_LOG)?;
            self.rest_bytes = frame.content_bytes;
            self.decoder = Some(decoder);
        }
        let Some(decoder) = &mut self.decoder else {
            return Ok(0);
        };
        let wanted = self.rest_bytes.min(bytes.len() as u64);
        let count = decoder.read(&mut bytes[..wanted as usize])?;
        self.rest_bytes -= count as u64;
        let ends = self.rest_bytes == 0;
        if (count == 0 && wanted > 0) || (ends && decoder.read(&mut [0])? > 0) {
            let message = "a frame of another length than it states";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        if ends {
            self.decoder = None;
        }
        Ok(count)
    }
}
