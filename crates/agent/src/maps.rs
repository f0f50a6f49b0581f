//! The program's own anonymous memory, read from `/proc/self/maps` without allocating.

use crate::layout::parse_hexadecimal;
use crate::sys;

/// Maximum number of ranges per scan; more are left to a later one.
pub const MAX_RANGES: usize = 4096;

/// A line of `/proc/PID/maps`: addresses and permissions.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct AddressRange {
    /// Address of the first byte.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
    /// Is it currently writable? Only such pages can be moved.
    pub is_writable: bool,
    /// Is it currently readable? Other ranges are reserved address space, which may be huge.
    pub is_readable: bool,
}

/// The ranges of the last scan.
pub struct AddressRanges {
    ranges: [AddressRange; MAX_RANGES],
    count: usize,
}

impl Default for AddressRanges {
    fn default() -> Self {
        AddressRanges {
            ranges: [AddressRange::default(); MAX_RANGES],
            count: 0,
        }
    }
}

impl AddressRanges {
    /// The ranges in the order of their addresses.
    pub fn as_slice(&self) -> &[AddressRange] {
        &self.ranges[..self.count]
    }
    fn clear(&mut self) {
        self.count = 0;
    }
    fn push(&mut self, range: AddressRange) {
        if let Some(slot) = self.ranges.get_mut(self.count) {
            *slot = range;
            self.count += 1;
        }
    }
}

/// Fields of a line of `/proc/PID/maps`.
struct MapsLine<'a> {
    range: AddressRange,
    is_private: bool,
    inode: u64,
    name: &'a [u8],
}

/// Parses a line; `None` if it is malformed.
fn parse_maps_line(line: &[u8]) -> Option<MapsLine<'_>> {
    let mut words = line
        .split(|&byte| byte == b' ')
        .filter(|word| !word.is_empty());
    let mut addresses = words.next()?.split(|&byte| byte == b'-');
    let (start, end) = (
        parse_hexadecimal(addresses.next()?)?,
        parse_hexadecimal(addresses.next()?)?,
    );
    let permissions = words.next()?;
    let (_offset, _device) = (words.next()?, words.next()?);
    let inode = words.next()?.iter().try_fold(0u64, |number, &digit| {
        digit.is_ascii_digit().then(|| {
            number
                .wrapping_mul(10)
                .wrapping_add(u64::from(digit - b'0'))
        })
    })?;
    let name = words.next().unwrap_or_default();
    let range = AddressRange {
        start,
        end,
        is_writable: permissions.get(1) == Some(&b'w'),
        is_readable: permissions.first() == Some(&b'r'),
    };
    Some(MapsLine {
        range,
        is_private: permissions.get(3) == Some(&b'p'),
        inode,
        name,
    })
}

/// Selects the program's own anonymous memory line by line, including the first thread's stack. It omits the kernel's
/// mappings and the zeroed data of libraries, which follows their files. These libraries include the C library and the
/// agent, whose data the handler itself may touch.
#[derive(Default, Debug)]
pub struct MappingFilter {
    file_end: u64,
    is_program_file: bool,
}

impl MappingFilter {
    /// The range of the next line, if its pages are to be colored; `program` is the path of the program's file.
    pub fn pick_range(&mut self, line: &[u8], program: &[u8]) -> Option<AddressRange> {
        let line = parse_maps_line(line)?;
        if line.inode != 0 {
            self.file_end = line.range.end;
            self.is_program_file = !program.is_empty() && line.name == program;
            return None;
        }
        let is_special =
            line.name == b"[heap]" || line.name == b"[stack]" || line.name.starts_with(b"[anon:");
        let is_anonymous = line.name.is_empty() || is_special;
        let is_library_data =
            line.name.is_empty() && line.range.start == self.file_end && !self.is_program_file;
        if is_library_data {
            self.file_end = line.range.end; // another part of the library's data may follow
        }
        (line.is_private && is_anonymous && !is_library_data).then_some(line.range)
    }
}

/// Reads all ranges, except those that overlap the addresses from the first to before the second of `excluded`.
pub fn read_ranges(
    ranges: &mut AddressRanges,
    excluded: (u64, u64),
    program: &[u8],
    buffer: &mut [u8],
) {
    ranges.clear();
    let fd = sys::open(c"/proc/self/maps", 0);
    if fd < 0 {
        return;
    }

    let (mut mapping_filter, mut filled_bytes) = (MappingFilter::default(), 0);
    loop {
        let read_bytes = sys::read(fd, &mut buffer[filled_bytes..]);
        if read_bytes <= 0 {
            break;
        }

        filled_bytes += read_bytes as usize;
        let mut parsed_bytes = 0;
        while let Some(length) = buffer[parsed_bytes..filled_bytes]
            .iter()
            .position(|&byte| byte == b'\n')
        {
            if let Some(range) =
                mapping_filter.pick_range(&buffer[parsed_bytes..parsed_bytes + length], program)
                && !(range.start < excluded.1 && excluded.0 < range.end)
            {
                ranges.push(range);
            }
            parsed_bytes += length + 1;
        }
        buffer.copy_within(parsed_bytes..filled_bytes, 0);
        filled_bytes -= parsed_bytes;
        if filled_bytes == buffer.len() {
            filled_bytes = 0; // a line longer than the buffer names a file, so it is not anonymous memory
        }
    }

    sys::close(fd);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;
    use std::vec;
    use std::vec::Vec;

    /// Are heap, mappings and stacks included, and files, libraries' data and the kernel's mappings excluded?
    #[test]
    fn only_the_programs_own_anonymous_memory_is_picked() {
        let text: [&[u8]; 11] = [
            b"00400000-00452000 r-xp 00000000 08:02 173521      /usr/bin/prog",
            b"00651000-00652000 rw-p 00051000 08:02 173521      /usr/bin/prog",
            b"00652000-00653000 rw-p 00000000 00:00 0 ",
            b"00e03000-00e24000 rw-p 00000000 00:00 0           [heap]",
            b"35b1a21000-35b1a22000 rw-p 00021000 08:02 135522  /lib/libc.so.6",
            b"35b1a22000-35b1a23000 rw-p 00000000 00:00 0 ",
            b"7f2c66d0000-7f2c66d1000 ---p 00000000 00:00 0 ",
            b"7f2c66d1000-7f2c66e0000 rw-p 00000000 00:00 0     [anon:glibc: malloc]",
            b"7f2c67000000-7f2c67100000 rw-s 00000000 00:01 12  /dev/zero (deleted)",
            b"7ffe00000000-7ffe00021000 rw-p 00000000 00:00 0   [stack]",
            b"7ffe00100000-7ffe00102000 r-xp 00000000 00:00 0   [vdso]",
        ];

        let mut picker = MappingFilter::default();
        let picked: Vec<u64> = text
            .iter()
            .filter_map(|line| picker.pick_range(line, b"/usr/bin/prog"))
            .map(|range| range.start)
            .collect();
        assert_eq!(
            picked,
            [
                0x65_2000,
                0xe0_3000,
                0x7f2_c66d_0000,
                0x7f2_c66d_1000,
                0x7ffe_0000_0000
            ]
        );
    }

    /// Does a scan of this process find a mapping that was just created, whatever the buffer's size?
    #[test]
    fn a_fresh_mapping_is_found() {
        let fresh = sys::map(1 << 20, 3, 0x22, -1).unwrap() as u64;
        for bytes in [512, 4096, 65536] {
            let mut ranges = Box::new(AddressRanges::default());
            read_ranges(&mut ranges, (0, 0), b"", &mut vec![0; bytes]);
            let contains_mapping = |range: &AddressRange| {
                range.start <= fresh && fresh + (1 << 20) <= range.end && range.is_writable
            };
            assert!(
                ranges.as_slice().iter().any(contains_mapping),
                "buffer of {bytes}"
            );
            read_ranges(&mut ranges, (fresh, fresh + 1), b"", &mut vec![0; bytes]);
            assert!(!ranges.as_slice().iter().any(contains_mapping));
        }
    }
}
