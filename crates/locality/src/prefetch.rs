//! Prefetchers of a cache, shared by all its users: constant strides, streams, and the other line of a pair.
//!
//! None of them uses a program counter: streams are distinguished by physical page, and never leave the page (the next
//! frames may belong to another process). If all streams are in use, the one idle longest is replaced.
//!
//! *Stride*: two equal steps in a row confirm a stream; from then on, every demand miss, and every first hit on a
//! prefetched line, requests the next `degree` lines. *Next line*: the same for steps of one line upward only.
//!
//! *Streamer* (Intel 64 Optimization Reference Manual 248966, data prefetch logic of the Core microarchitecture): there
//! are separate tables of pages accessed upward and downward. The second access to a page makes it a stream; lines may
//! be skipped. The streamer stays up to a certain number of lines ahead of the last access, fewer if the bus is busier,
//! and requests two lines at a time.

use cachemate_core::PrefetcherSpec;

#[derive(Clone, Copy, Default)]
struct StrideStream {
    /// Page + 1; 0 if the entry is free.
    page: u64,
    last_line: u64,
    stride: i64,
    is_confirmed: bool,
    last_use: u64,
}

/// A page that is accessed in one direction.
#[derive(Clone, Copy, Default)]
struct PageStream {
    /// Page + 1; 0 if the entry is free.
    page: u64,
    last_line: u64,
    /// The furthest line requested.
    furthest_line: u64,
    /// Whether a second access confirmed the stream.
    is_confirmed: bool,
    last_use: u64,
}

/// Number of lines requested after one access.
const MAX_LINES_PER_ACCESS: u64 = 2;

#[derive(Default)]
struct Streamer {
    ascending: Vec<PageStream>,
    descending: Vec<PageStream>,
    ahead_lines: u64,
}

/// The prefetchers of one cache.
pub struct Prefetcher {
    lines_per_page_shift: u32,
    fetches_pair_line: bool,
    streams: Vec<StrideStream>,
    degree: u32,
    /// Whether only steps of one line upward confirm a stream.
    is_next_line: bool,
    streamer: Option<Streamer>,
    access_count: u64,
}

impl Prefetcher {
    /// Builds the prefetchers of a cache; returns `None` if the cache has none.
    pub fn new(
        specs: impl Iterator<Item = PrefetcherSpec>,
        lines_per_page_shift: u32,
    ) -> Option<Self> {
        let (streams, streamer) = (Vec::new(), None);
        let mut prefetcher = Prefetcher {
            lines_per_page_shift,
            fetches_pair_line: false,
            streams,
            degree: 0,
            is_next_line: false,
            streamer,
            access_count: 0,
        };
        let mut has_any = false;
        for spec in specs {
            has_any = true;
            match spec {
                PrefetcherSpec::AdjacentLine { .. } => prefetcher.fetches_pair_line = true,
                PrefetcherSpec::Stride {
                    streams, degree, ..
                }
                | PrefetcherSpec::NextLine {
                    streams, degree, ..
                } => {
                    prefetcher.streams = vec![StrideStream::default(); streams as usize];
                    prefetcher.degree = degree;
                    prefetcher.is_next_line = matches!(spec, PrefetcherSpec::NextLine { .. });
                }
                PrefetcherSpec::Streamer {
                    up_streams,
                    down_streams,
                    ahead_lines,
                    ..
                } => {
                    let new_streams = |count: u32| vec![PageStream::default(); count as usize];
                    let (up, down) = (new_streams(up_streams), new_streams(down_streams));
                    prefetcher.streamer = Some(Streamer {
                        ascending: up,
                        descending: down,
                        ahead_lines: u64::from(ahead_lines),
                    });
                }
            }
        }
        has_any.then_some(prefetcher)
    }

    /// Observes a demand miss, or the first hit on a prefetched line. Calls `request` with each line to request.
    /// `free_room_permille` returns the free share of bus and memory, on which the number of requests may depend.
    pub fn observe_demand(
        &mut self,
        line: u64,
        free_room_permille: impl FnOnce() -> u64,
        mut request: impl FnMut(u64),
    ) {
        if self.fetches_pair_line {
            request(line ^ 1);
        }
        self.access_count += 1;
        if let Some(streamer) = &mut self.streamer {
            streamer.observe_demand(
                line,
                self.lines_per_page_shift,
                self.access_count,
                free_room_permille,
                &mut request,
            );
        }
        let page = (line >> self.lines_per_page_shift) + 1;
        let Some(index) = self.streams.iter().position(|stream| stream.page == page) else {
            let oldest_stream = self.streams.iter_mut().min_by_key(|stream| stream.last_use);
            if let Some(oldest_stream) = oldest_stream {
                *oldest_stream = StrideStream {
                    page,
                    last_line: line,
                    stride: 0,
                    is_confirmed: false,
                    last_use: self.access_count,
                };
            }
            return;
        };
        let stream = &mut self.streams[index];
        let step = line as i64 - stream.last_line as i64;
        if step == 0 {
            return;
        }
        stream.is_confirmed = step == stream.stride && (step == 1 || !self.is_next_line);
        (stream.stride, stream.last_line, stream.last_use) = (step, line, self.access_count);
        if stream.is_confirmed {
            let next_lines =
                (1..=i64::from(self.degree)).map(|nth| line.wrapping_add_signed(nth * step));
            next_lines
                .filter(|next| (next >> self.lines_per_page_shift) + 1 == page)
                .for_each(request);
        }
    }
}

/// Replaces the stream that was idle longest. A stream starts at a page's first access, or at the second one if that
/// reverses the direction.
fn start_stream(streams: &mut [PageStream], new_stream: PageStream) {
    if let Some(oldest_stream) = streams.iter_mut().min_by_key(|stream| stream.last_use) {
        *oldest_stream = new_stream;
    }
}

impl Streamer {
    fn observe_demand(
        &mut self,
        line: u64,
        page_shift: u32,
        clock: u64,
        free_room_permille: impl FnOnce() -> u64,
        request: &mut impl FnMut(u64),
    ) {
        let page = (line >> page_shift) + 1;
        // If bus and memory are free, the distance is `ahead_lines`; if they have no room, it is 0 and no line is
        // prefetched.
        let ahead_lines = self.ahead_lines;
        let ahead_distance = || (ahead_lines * free_room_permille()).div_ceil(1000);
        if let Some(stream) = self.descending.iter_mut().find(|walk| walk.page == page) {
            stream.last_use = clock;
            return stream.descend(line, page_shift, ahead_distance, request);
        }
        let Some(index) = self.ascending.iter().position(|walk| walk.page == page) else {
            return start_stream(
                &mut self.ascending,
                PageStream {
                    page,
                    last_line: line,
                    furthest_line: line,
                    is_confirmed: false,
                    last_use: clock,
                },
            );
        };
        let stream = &mut self.ascending[index];
        if line < stream.last_line && !stream.is_confirmed {
            let mut descending_stream = PageStream {
                is_confirmed: true,
                last_use: clock,
                ..std::mem::take(stream)
            };
            descending_stream.descend(line, page_shift, ahead_distance, request);
            return start_stream(&mut self.descending, descending_stream);
        }
        stream.last_use = clock;
        stream.ascend(line, page_shift, ahead_distance, request);
    }
}

impl PageStream {
    fn ascend(
        &mut self,
        line: u64,
        page_shift: u32,
        distance: impl FnOnce() -> u64,
        request: &mut impl FnMut(u64),
    ) {
        if line > self.last_line {
            (self.last_line, self.furthest_line, self.is_confirmed) =
                (line, self.furthest_line.max(line), true);
            let limit_line = (line + distance()).min((self.page << page_shift) - 1);
            let line_count = limit_line
                .saturating_sub(self.furthest_line)
                .min(MAX_LINES_PER_ACCESS);
            (1..=line_count).for_each(|nth| request(self.furthest_line + nth));
            self.furthest_line += line_count;
        }
    }

    fn descend(
        &mut self,
        line: u64,
        page_shift: u32,
        distance: impl FnOnce() -> u64,
        request: &mut impl FnMut(u64),
    ) {
        if line < self.last_line {
            (self.last_line, self.furthest_line) = (line, self.furthest_line.min(line));
            let limit_line = line
                .saturating_sub(distance())
                .max((self.page - 1) << page_shift);
            let line_count = self
                .furthest_line
                .saturating_sub(limit_line)
                .min(MAX_LINES_PER_ACCESS);
            (1..=line_count).for_each(|nth| request(self.furthest_line - nth));
            self.furthest_line -= line_count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_streamer(up_streams: u32, down_streams: u32) -> Prefetcher {
        let level = cachemate_core::CacheLevel::L2;
        let spec = PrefetcherSpec::Streamer {
            level,
            up_streams,
            down_streams,
            ahead_lines: 8,
        };
        Prefetcher::new([spec].into_iter(), 6).expect("there is one")
    }

    fn requested_lines(prefetcher: &mut Prefetcher, line: u64, room: u64) -> Vec<u64> {
        let mut lines = Vec::new();
        prefetcher.observe_demand(line, || room, |line| lines.push(line));
        lines
    }

    /// Does the streamer start at the second access, two lines at a time, up to eight ahead, without leaving the page?
    #[test]
    fn the_streamer_starts_at_the_second_access_eight_ahead() {
        let mut up = new_streamer(12, 4);
        assert_eq!(requested_lines(&mut up, 640, 1000), []);
        assert_eq!(requested_lines(&mut up, 641, 1000), [642, 643]);
        let distances: Vec<u64> = (642..660)
            .map(|line| {
                requested_lines(&mut up, line, 1000)
                    .last()
                    .map_or(0, |last| last - line)
            })
            .collect();
        assert_eq!(distances[..7], [3, 4, 5, 6, 7, 8, 8]);
        assert_eq!(
            requested_lines(&mut up, 700, 1000),
            [701, 702],
            "lines may be left out"
        );
        assert_eq!(requested_lines(&mut up, 703, 1000), [], "the page ends");
    }

    /// Does the streamer follow a page downward from the second access, and request nothing when the bus is full?
    #[test]
    fn the_streamer_follows_pages_down_and_yields_to_a_full_bus() {
        let mut down = new_streamer(12, 4);
        assert_eq!(requested_lines(&mut down, 650, 1000), []);
        assert_eq!(requested_lines(&mut down, 648, 1000), [647, 646]);
        assert_eq!(requested_lines(&mut down, 647, 0), []);
        assert_eq!(
            requested_lines(&mut down, 646, 100),
            [645],
            "one of eight lines for a tenth of the room"
        );
        assert_eq!(requested_lines(&mut down, 641, 1000), [640]);
    }

    /// Are as many pages followed as there are entries, with the one idle longest replaced, separately for each
    /// direction?
    #[test]
    fn as_many_pages_are_followed_as_there_are_entries() {
        for (pages, follows) in [(12, true), (13, false)] {
            let mut up = new_streamer(12, 4);
            (0..pages).for_each(|page| drop(requested_lines(&mut up, page * 64, 1000)));
            let second: usize = (0..pages)
                .map(|page| requested_lines(&mut up, page * 64 + 1, 1000).len())
                .sum();
            assert_eq!(
                second == 2 * pages as usize,
                follows,
                "{pages} pages: {second} lines"
            );
        }
        let mut both = new_streamer(12, 4);
        for page in 0..4 {
            requested_lines(&mut both, page * 64 + 9, 1000);
            assert_eq!(requested_lines(&mut both, page * 64 + 8, 1000).len(), 2);
        }
        (10..22).for_each(|page| drop(requested_lines(&mut both, page * 64, 1000)));
        assert!(
            (0..4).all(|page| !requested_lines(&mut both, page * 64 + 7, 1000).is_empty()),
            "downward pages stay"
        );
    }
}
