//! Prefetchers beside a cache, shared by all its users: constant strides, and the other line of a pair.
//!
//! The stride prefetcher has no program counter: it tells streams apart by physical page, and never leaves the page
//! (frames behind it are somebody else's). Two equal steps in a row confirm a stream; from then on every demand miss,
//! and every first hit on a prefetched line, asks for the next `degree` lines. With all streams in use the one idle
//! longest is replaced.

use cachemate_core::PrefetcherSpec;

#[derive(Clone, Copy, Default)]
struct Stream {
    /// Page + 1; 0 = free.
    page: u64,
    last: u64,
    stride: i64,
    confirmed: bool,
    used_at: u64,
}

pub(crate) struct Prefetcher {
    lines_per_page_shift: u32,
    adjacent: bool,
    streams: Vec<Stream>,
    degree: u32,
    clock: u64,
}

impl Prefetcher {
    /// `None` where there is none at this cache.
    pub fn new(specs: impl Iterator<Item = PrefetcherSpec>, lines_per_page_shift: u32) -> Option<Self> {
        let mut made = Prefetcher { lines_per_page_shift, adjacent: false, streams: Vec::new(), degree: 0, clock: 0 };
        let mut any = false;
        for spec in specs {
            any = true;
            match spec {
                PrefetcherSpec::AdjacentLine { .. } => made.adjacent = true,
                PrefetcherSpec::Stride { streams, degree, .. } => {
                    made.streams = vec![Stream::default(); streams as usize];
                    made.degree = degree;
                }
            }
        }
        any.then_some(made)
    }

    /// Told of a demand miss, or of the first hit on a prefetched line; names the lines to ask for.
    pub fn wants(&mut self, line: u64, mut wanted: impl FnMut(u64)) {
        if self.adjacent {
            wanted(line ^ 1);
        }
        self.clock += 1;
        let page = (line >> self.lines_per_page_shift) + 1;
        let Some(at) = self.streams.iter().position(|stream| stream.page == page) else {
            let idle = self.streams.iter_mut().min_by_key(|stream| stream.used_at);
            if let Some(idle) = idle {
                *idle = Stream { page, last: line, stride: 0, confirmed: false, used_at: self.clock };
            }
            return;
        };
        let stream = &mut self.streams[at];
        let step = line as i64 - stream.last as i64;
        if step == 0 {
            return;
        }
        stream.confirmed = step == stream.stride;
        (stream.stride, stream.last, stream.used_at) = (step, line, self.clock);
        if stream.confirmed {
            let ahead = (1..=i64::from(self.degree)).map(|nth| line.wrapping_add_signed(nth * step));
            ahead.filter(|next| (next >> self.lines_per_page_shift) + 1 == page).for_each(wanted);
        }
    }
}
