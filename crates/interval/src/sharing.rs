//! Remote transfers: accesses to lines of a shared region that another cache holds.
//!
//! Method: accesses to a region's lines are random. A read finds its line modified elsewhere if another cache has
//! written the line since the reader's cache last touched it. With rates per line, the probability is `writes
//! elsewhere / (writes elsewhere + accesses here)`. A write must invalidate its line elsewhere if another cache has
//! touched the line since the last write here: `accesses elsewhere / (accesses elsewhere + writes here)`. All rates
//! per line contain the region's size, which cancels. Properties: users of one cache cause no transfers; a region
//! without writes costs nothing.

/// One cache's accesses of one region, per cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RegionRates {
    reads: f64,
    writes: f64,
}

/// The rates at which each cache accesses each region.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Regions {
    cache_count: usize,
    /// Numbers of regions in programs, in order of first mention.
    region_numbers: Vec<u32>,
    /// Rates by region, then by cache.
    rates: Vec<RegionRates>,
}

/// Mean number of remote transfers per access.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RemoteTransfers {
    pub per_read: f64,
    pub per_write: f64,
    /// Share of remote accesses served within the package; each cache serves in proportion to its accesses.
    pub same_package_share: f64,
}

impl Regions {
    pub fn new(cache_count: usize) -> Self {
        Regions {
            cache_count,
            ..Regions::default()
        }
    }

    /// The region's position in this table, which grows if the region is new.
    pub fn find_or_add_region(&mut self, number: u32) -> usize {
        if let Some(position) = self
            .region_numbers
            .iter()
            .position(|&known_number| known_number == number)
        {
            return position;
        }
        self.region_numbers.push(number);
        self.rates
            .resize(self.rates.len() + self.cache_count, RegionRates::default());
        self.region_numbers.len() - 1
    }

    pub fn is_empty(&self) -> bool {
        self.region_numbers.is_empty()
    }

    /// Adds to (or subtracts from) the rates at which a cache accesses a region.
    pub fn add(
        &mut self,
        region: usize,
        cache: usize,
        reads_per_cycle: f64,
        writes_per_cycle: f64,
    ) {
        let rates = &mut self.rates[region * self.cache_count + cache];
        rates.reads = (rates.reads + reads_per_cycle).max(0.0);
        rates.writes = (rates.writes + writes_per_cycle).max(0.0);
    }

    /// Present cost of accesses from one cache. `is_same_package` marks the caches of the same
    /// package.
    pub fn remote_transfers(
        &self,
        region: usize,
        cache: usize,
        is_same_package: impl Fn(usize) -> bool,
    ) -> RemoteTransfers {
        let region_rates = &self.rates[region * self.cache_count..(region + 1) * self.cache_count];
        let (mut reads, mut writes, mut near_accesses) = (0.0, 0.0, 0.0);
        for (index, rates) in region_rates
            .iter()
            .enumerate()
            .filter(|(index, _)| *index != cache)
        {
            reads += rates.reads;
            writes += rates.writes;
            near_accesses += if is_same_package(index) {
                rates.reads + rates.writes
            } else {
                0.0
            };
        }

        let own_rates = region_rates[cache];
        let transfer_probability = |remote_rate: f64, local_rate: f64| {
            if remote_rate > 0.0 {
                remote_rate / (remote_rate + local_rate)
            } else {
                0.0
            }
        };
        RemoteTransfers {
            per_read: transfer_probability(writes, own_rates.reads + own_rates.writes),
            per_write: transfer_probability(reads + writes, own_rates.writes),
            same_package_share: if reads + writes > 0.0 {
                near_accesses / (reads + writes)
            } else {
                0.0
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the rate of remote transfers of two caches with random accesses match an exact simulation of one line?
    #[test]
    fn remote_transfers_match_an_exact_simulation_of_one_line() {
        let (own, other) = ((3.0, 1.0), (2.0, 0.5));
        let mut regions = Regions::new(2);
        let region = regions.find_or_add_region(7);
        regions.add(region, 0, own.0, own.1);
        regions.add(region, 1, other.0, other.1);
        let expected = regions.remote_transfers(region, 0, |_| true);

        // One line: the events since cache 0 last touched it, and since it last wrote it.
        let mut state = 88_172_645_463_325_252u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };

        let (mut was_written, mut was_touched) = (false, false);
        let (mut reads, mut remote_reads, mut writes, mut remote_writes) = (0, 0, 0, 0);
        for _ in 0..400_000 {
            let pick = next() * 6.5;
            if pick < 3.0 {
                reads += 1;
                remote_reads += u32::from(was_written);
                was_written = false;
            } else if pick < 4.0 {
                writes += 1;
                remote_writes += u32::from(was_touched);
                (was_written, was_touched) = (false, false);
            } else {
                was_touched = true;
                was_written |= pick >= 6.0;
            }
        }
        let found = (
            f64::from(remote_reads) / f64::from(reads),
            f64::from(remote_writes) / f64::from(writes),
        );
        assert!(
            (found.0 - expected.per_read).abs() < 0.01,
            "{found:?} {expected:?}"
        );
        assert!(
            (found.1 - expected.per_write).abs() < 0.01,
            "{found:?} {expected:?}"
        );
    }

    /// Do users of one cache and readers of a region without writes cause no cost?
    #[test]
    fn one_cache_and_read_only_regions_cost_nothing() {
        let mut regions = Regions::new(2);
        let region = regions.find_or_add_region(1);
        regions.add(region, 0, 5.0, 2.0);
        assert_eq!(
            regions.remote_transfers(region, 0, |_| true),
            RemoteTransfers::default()
        );
        let read_only = regions.find_or_add_region(2);
        regions.add(read_only, 0, 5.0, 0.0);
        regions.add(read_only, 1, 5.0, 0.0);
        assert_eq!(
            regions.remote_transfers(read_only, 0, |_| true).per_read,
            0.0
        );
    }
}
