//! The directory with the frames that define this host's colors.
//!
//! Problem: the label of a color is meaningful only while the frames that define it exist, and two programs that are to
//! be separated must use the same labels. Method: some frames of each color are kept in a file in memory until the next
//! boot (removing the directory frees them), and every other frame is classified against them. A ledger beside them
//! remembers colors by frame number; an entry is verified by one timing before it is used, because a host may give a
//! guest frame other memory after it was free (free page reporting).

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use cachemate_agent::layout::{PAGE_BYTES, ReferenceSetHeader};
use cachemate_agent::ledger::Ledger;
use cachemate_agent::timing::{Calibration, ReferenceSet};
use cachemate_files::{DirAccess, TrustedDir};
use rustix::fs::OFlags;

use super::grouping::EvictionOracle;
use super::pool::TimingOracle;
use super::{ColorError, verification};
use crate::kernel::memory_map::MemoryMap;

/// The directory's path: in memory, so that the reference set is a set of frames.
pub const BASE: &str = "/dev/shm/cachemate-color";
/// Reference frames of each color for a cache of that many ways. If replacement is not LRU, one frame more than
/// the ways evicts a line in 1 of 50 tries, 1.5 times as many frames in half of them, and twice as many almost always.
pub fn frames_per_color(ways: usize) -> usize {
    2 * ways
}

/// Additional candidate frames of each color; only the best frames are kept.
const SPARE_FRAMES: usize = 8;

/// The reference set of this host, mapped and calibrated.
#[derive(Debug)]
pub struct LoadedReferenceSet {
    /// The frames, calibrated and completely mapped.
    pub frames: ReferenceSet,
    /// Times of hits and misses when it was opened.
    pub calibration: Calibration,
    _mapping: MemoryMap,
}

/// Opens and verifies the reference set in `base`.
///
/// # Errors
/// There is none, it is of another version, hits and misses cannot be distinguished now, or its frames are no longer
/// of one color each (the host moved them).
pub fn open(base: &Path) -> Result<LoadedReferenceSet, ColorError> {
    open_file(base, REFERENCE_SET_FILE)
}

/// Opens the reference set that [`create`] has made, before it is accepted.
///
/// # Errors
/// The errors of [`open`], but an invalid reference set is reported as noise.
pub fn open_new(base: &Path) -> Result<LoadedReferenceSet, ColorError> {
    open_file(base, NEW_REFERENCE_SET_FILE).map_err(|error| match error {
        ColorError::BadReferenceSet(_, reason) => ColorError::Noisy(reason),
        other => other,
    })
}

/// Replaces the previous reference set by the new one.
///
/// # Errors
/// The errors of the file system.
pub fn accept_new(base: &Path) -> Result<(), ColorError> {
    let rename_result =
        open_base(base).and_then(|dir| dir.rename(NEW_REFERENCE_SET_FILE, REFERENCE_SET_FILE));
    rename_result.map_err(|source| ColorError::io_error(&base.join(NEW_REFERENCE_SET_FILE), source))
}

/// Opens for reading and writing, and creates a missing file; opening changes no content.
const READ_WRITE: OFlags = OFlags::RDWR.union(OFlags::CREATE);

/// Opens the directory of colors for changes. Programs find it by its path.
fn open_base(base: &Path) -> io::Result<TrustedDir> {
    TrustedDir::open_anchored(base, DirAccess::ReadWrite)
}

const REFERENCE_SET_FILE: &str = "reference-set";
const NEW_REFERENCE_SET_FILE: &str = "reference-set.new";

fn open_file(base: &Path, name: &str) -> Result<LoadedReferenceSet, ColorError> {
    let mut loaded_set = load(base, name)?;
    loaded_set.calibration =
        verification::verify_reference_set(&mut loaded_set.frames, &base.join(name))?;
    Ok(loaded_set)
}

/// Opens the reference set in `base` for callers that verify its frames themselves.
///
/// # Errors
/// There is none, or it is of another version.
pub fn open_unverified(base: &Path) -> Result<LoadedReferenceSet, ColorError> {
    load(base, REFERENCE_SET_FILE)
}

fn load(base: &Path, name: &str) -> Result<LoadedReferenceSet, ColorError> {
    let (mapping, _) = map_reference_set(base, name)?;
    // SAFETY: the result contains both the mapping and the reference set, so they are dropped together.
    let reference_set = unsafe { ReferenceSet::new(mapping.start(), mapping.bytes()) };
    let Some(mut reference_set) = reference_set else {
        return Err(ColorError::BadReferenceSet(
            base.join(name),
            "its table names pages that are not there".to_string(),
        ));
    };
    reference_set.map_frames();
    let calibration = reference_set.calibrate();
    Ok(LoadedReferenceSet {
        frames: reference_set,
        calibration,
        _mapping: mapping,
    })
}

/// The discovery that made the reference set in `base`; the frames are not verified.
///
/// # Errors
/// There is none, or it is of another version.
pub fn read_id(base: &Path) -> Result<u64, ColorError> {
    Ok(map_reference_set(base, REFERENCE_SET_FILE)?.1)
}

fn map_reference_set(base: &Path, name: &str) -> Result<(MemoryMap, u64), ColorError> {
    let path = base.join(name);
    let io_error = |source| ColorError::io_error(&path, source);
    let set_error = |problem: String| ColorError::BadReferenceSet(path.clone(), problem);
    let dir = TrustedDir::open_anchored(base, DirAccess::ReadOnly);
    let file = match dir.and_then(|dir| dir.open_file(Path::new(name), OFlags::RDONLY)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ColorError::NoReferenceSet(path));
        }
        other => other.map_err(io_error)?,
    };
    let bytes = file.metadata().map_err(io_error)?.len() as usize;
    if bytes < ReferenceSetHeader::PAGES * PAGE_BYTES {
        return Err(set_error(format!(
            "found {bytes} bytes, expected a header of {} pages",
            ReferenceSetHeader::PAGES
        )));
    }
    let mapping = MemoryMap::of_file(&file, bytes, false).map_err(io_error)?;
    // SAFETY: the first bytes of a mapping that is longer than they are.
    let header_bytes =
        unsafe { std::slice::from_raw_parts(mapping.start(), ReferenceSetHeader::BYTES) };
    let header = ReferenceSetHeader::from_bytes(header_bytes)
        .ok_or_else(|| set_error("no reference set of this version".to_string()))?;
    Ok((mapping, header.id))
}

/// Makes a reference set from classes of pages found elsewhere: fresh pages of a file in memory are tested against the
/// classes until each class has enough.
///
/// # Errors
/// No room in memory, or too few pages of some class.
pub fn create(
    base: &Path,
    ways: usize,
    id: u64,
    classes: &mut ColorClasses<'_>,
) -> Result<(), ColorError> {
    let dir =
        TrustedDir::create_anchored(base).map_err(|source| ColorError::io_error(base, source))?;
    let path = base.join(NEW_REFERENCE_SET_FILE);
    let io_error = |source| ColorError::io_error(&path, source);
    let (colors, per_color) = (classes.classes.len(), frames_per_color(ways));
    let file = dir
        .open_file(Path::new(NEW_REFERENCE_SET_FILE), READ_WRITE)
        .map_err(io_error)?;
    file.set_len(0).map_err(io_error)?;
    let pages = ReferenceSetHeader::PAGES + 3 * colors * per_color;
    file.set_len((pages * PAGE_BYTES) as u64)
        .map_err(io_error)?;
    let mapping = MemoryMap::of_file(&file, pages * PAGE_BYTES, true).map_err(io_error)?;
    let mut pages_by_color = vec![Vec::new(); colors];
    let mut unused_pages = Vec::new();
    for index in ReferenceSetHeader::PAGES..pages {
        // SAFETY: inside the mapping. Written, so that the page has a frame.
        let page = unsafe { mapping.start().add(index * PAGE_BYTES) };
        // SAFETY: as above.
        unsafe { page.write_volatile(1) };
        if Instant::now() > classes.deadline {
            return Err(ColorError::Noisy(
                "the time was over before every color had its frames".to_string(),
            ));
        }
        match classes
            .find_sole_class(page)
            .filter(|&color| pages_by_color[color].len() < per_color + SPARE_FRAMES)
        {
            Some(color) => pages_by_color[color].push(index as u32),
            None => unused_pages.push(index),
        }
    }
    let page_at = |at: usize| mapping.start().wrapping_add(at * PAGE_BYTES).cast_const();
    let mut oracle = TimingOracle {
        page_address: &page_at,
        threshold_cycles: classes.threshold_cycles,
        line_index: 3,
        deadline: classes.deadline,
    };
    unused_pages.extend(keep_best(&mut oracle, &mut pages_by_color, per_color));
    if let Some(short_class) = pages_by_color
        .iter()
        .find(|members| members.len() < per_color)
    {
        return Err(ColorError::Noisy(format!(
            "{} frames of one color for the reference set, {per_color} needed",
            short_class.len()
        )));
    }
    for index in unused_pages {
        let (offset, length) = (
            (index * PAGE_BYTES) as libc::off_t,
            PAGE_BYTES as libc::off_t,
        );
        // SAFETY: no memory is passed; a hole gives the frame back.
        unsafe {
            libc::fallocate(
                file.as_raw_fd(),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                offset,
                length,
            )
        };
    }
    let header = ReferenceSetHeader {
        colors: colors as u32,
        frames_per_color: per_color as u32,
        id,
    };
    let mut header_and_table = header.to_bytes().to_vec();
    header_and_table.extend(
        pages_by_color
            .iter()
            .flatten()
            .flat_map(|page| page.to_le_bytes()),
    );
    file.write_all_at(&header_and_table, 0).map_err(io_error)
}

/// Tests the reference frames against each other: each must be evicted by those of its color and not by those of the
/// next. Keeps the `per_color` frames of each color that passed most often, unless they failed more than one round;
/// returns the removed frames.
fn keep_best(
    oracle: &mut impl EvictionOracle,
    pages_by_color: &mut [Vec<u32>],
    per_color: usize,
) -> Vec<usize> {
    const ROUNDS: usize = 4;
    let sets: Vec<Vec<usize>> = pages_by_color
        .iter()
        .map(|members| {
            members
                .iter()
                .take(per_color)
                .map(|&member| member as usize)
                .collect()
        })
        .collect();
    let mut removed_indices = Vec::new();
    for (color, members) in pages_by_color.iter_mut().enumerate() {
        let next_set = &sets[(color + 1) % sets.len()];
        let mut scored_members: Vec<(usize, u32)> = Vec::with_capacity(members.len());
        for &index in members.iter() {
            let own_set: Vec<usize> = sets[color]
                .iter()
                .copied()
                .filter(|&other| other != index as usize)
                .collect();
            let is_confirmed = |_: &usize| {
                oracle.evicts(index as usize, &own_set) && !oracle.evicts(index as usize, next_set)
            };
            scored_members.push(((0..ROUNDS).filter(is_confirmed).count(), index));
        }
        // A stable sort keeps the first among equals.
        scored_members.sort_by_key(|(rounds, _)| std::cmp::Reverse(*rounds));
        let confirmed_count = scored_members
            .iter()
            .take(per_color)
            .filter(|(rounds, _)| rounds + 1 >= ROUNDS)
            .count();
        removed_indices.extend(
            scored_members
                .split_off(confirmed_count)
                .into_iter()
                .map(|(_, member)| member as usize),
        );
        *members = scored_members
            .into_iter()
            .map(|(_, member)| member)
            .collect();
    }
    removed_indices
}

/// Classes of a pool's pages, and the parameters for testing against them.
pub struct ColorClasses<'a> {
    /// Address of the page of an item.
    pub page: &'a dyn Fn(usize) -> *const u8,
    /// A load that takes longer has left the private cache.
    pub threshold_cycles: u64,
    /// The items of each class; the index of a class is its color.
    pub classes: &'a [Vec<usize>],
    /// Maximum number of a class's members that a page is tested against.
    pub per_class: usize,
    /// Time at which testing stops.
    pub deadline: Instant,
}

impl ColorClasses<'_> {
    /// The only class that evicts the page; `None` if no class or several evict it.
    fn find_sole_class(&mut self, page: *const u8) -> Option<usize> {
        let page_of = |item: usize| {
            if item == usize::MAX {
                page
            } else {
                (self.page)(item)
            }
        };
        let mut oracle = TimingOracle {
            page_address: &page_of,
            threshold_cycles: self.threshold_cycles,
            line_index: 5,
            deadline: self.deadline,
        };
        let mut class_index = None;
        for (index, class) in self.classes.iter().enumerate() {
            if oracle.evicts(usize::MAX, &class[..class.len().min(self.per_class)]) {
                if class_index.is_some() {
                    return None;
                }
                class_index = Some(index);
            }
        }
        class_index
    }
}

const LEDGER: &str = "ledger";

/// The ledger of this host, mapped.
#[derive(Debug)]
pub struct FrameLedger {
    ledger: Ledger,
    _mapping: MemoryMap,
}

impl std::ops::Deref for FrameLedger {
    type Target = Ledger;

    fn deref(&self) -> &Ledger {
        &self.ledger
    }
}

impl FrameLedger {
    /// Opens the ledger in `base`, and creates it if it is missing.
    ///
    /// # Errors
    /// The errors of the file system, or the kernel does not report the number of frames.
    pub fn open(base: &Path) -> Result<Self, ColorError> {
        let path = base.join(LEDGER);
        let io_error = |source| ColorError::io_error(&path, source);
        let frame_count = read_end_frame()
            .map_err(|source| ColorError::io_error(Path::new("/proc/zoneinfo"), source))?;
        let file = open_base(base)
            .and_then(|dir| dir.open_file(Path::new(LEDGER), READ_WRITE))
            .map_err(io_error)?;
        if (file.metadata().map_err(io_error)?.len() as usize) < frame_count {
            file.set_len(frame_count as u64).map_err(io_error)?; // a hole: memory is taken only where frames are known
        }
        let mapping = MemoryMap::of_file(&file, frame_count, true).map_err(io_error)?;
        // SAFETY: the result contains both the mapping and the ledger, so they are dropped together.
        let ledger = unsafe { Ledger::new(mapping.start(), mapping.bytes()) };
        Ok(FrameLedger {
            ledger,
            _mapping: mapping,
        })
    }
}

/// Frame number at the end of the last zone of memory.
fn read_end_frame() -> io::Result<usize> {
    let zoneinfo =
        cachemate_files::read_text_limited(std::path::Path::new("/proc/zoneinfo"), 16 << 20)?;
    let mut spanned_frames = 0;
    let mut end_frame = 0;
    for line in zoneinfo.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match words[..] {
            ["spanned", number] => spanned_frames = number.parse().unwrap_or(0),
            ["start_pfn:", number] if spanned_frames > 0 => {
                end_frame = end_frame.max(number.parse().unwrap_or(0) + spanned_frames)
            }
            _ => {}
        }
    }
    if end_frame == 0 {
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "no zone with frames",
        ))
    } else {
        Ok(end_frame)
    }
}

/// Replaces a file of the directory atomically, by a rename.
///
/// # Errors
/// The errors of the file system.
pub fn replace_file(base: &Path, name: &str, text: &[u8]) -> Result<(), ColorError> {
    let new_name = format!("{name}.new");
    let write_and_rename = || {
        let dir = open_base(base)?;
        let mut file = dir.open_file(Path::new(&new_name), READ_WRITE)?;
        file.set_len(0)?;
        file.write_all(text)?;
        dir.rename(&new_name, name)
    };
    write_and_rename().map_err(|source| ColorError::io_error(&base.join(name), source))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames with true colors, independent of the table that lists them.
    struct TrueColors(fn(usize) -> usize);

    impl EvictionOracle for TrueColors {
        fn evicts(&mut self, target: usize, set: &[usize]) -> bool {
            set.iter()
                .filter(|&&at| (self.0)(at) == (self.0)(target))
                .count()
                >= 4
        }
    }

    /// Is a frame that is listed under a wrong color replaced in the reference set by a spare one?
    #[test]
    fn a_frame_of_another_color_is_replaced_in_the_reference_set() {
        // Colors by remainder; frame 9 is listed under color 0 and has color 1.
        let mut table = vec![
            vec![0, 4, 8, 9, 12, 16, 20, 24],
            (0..8).map(|at| 4 * at + 1).filter(|at| *at != 9).collect(),
        ];
        let gone = keep_best(&mut TrueColors(|at| at % 4), &mut table, 6);
        assert_eq!(table[0], [0, 4, 8, 12, 16, 20]);
        assert_eq!(table[1], [1, 5, 13, 17, 21, 25]);
        assert_eq!(gone, [24, 9, 29]);
        // Too few correct frames: the caller notices this by their number.
        let mut table = vec![vec![0, 4, 8, 12, 16, 1, 5], vec![3, 7, 11, 15, 19, 23]];
        keep_best(&mut TrueColors(|at| at % 4), &mut table, 6);
        assert_eq!(table[0].len(), 5);
    }
}
