//! Computes solo profiles of programs from their access streams, as inputs of schemes and offline policies.
//!
//! Method: the stream passes through a private LRU cache and then the last-level cache, as in CA 2.2 (there by binary
//! instrumentation). The profile has hits by LRU stack position, references, misses, and sampled reuse times of the
//! accesses to the last level. Properties: it involves no co-runner, no prefetcher and no timing; the first part, which
//! fills the caches, is left out.

use cachemate_core::{
    Access, AccessKind, BatchEnd, CacheLevel, CacheSpec, Estimate, Fact, FactSource, MachineSpec,
    Profile,
};
use cachemate_locality::cachesim::{CacheGeometry, CacheSim, Replacement};
use cachemate_locality::reuse::ReuseSampler;

use crate::error::{Result, failed};
use crate::recordings;
use crate::run_request::sources_of;
use crate::store::{self, RunName};
use crate::workload::WorkloadJob;

/// One of this many accesses is watched until its line is touched again.
const REUSE_SAMPLING_INTERVAL: u32 = 64;

/// The profile of a single-threaded job on the machine's last-level cache, over this many data
/// accesses after as many for warm-up.
pub fn profile_job(job: &WorkloadJob, machine: &MachineSpec, accesses: u64) -> Result<Profile> {
    let recordings: Vec<String> = job
        .recording
        .as_deref()
        .map(recordings::file_digest)
        .into_iter()
        .collect();
    let sources = sources_of(module_path!(), &recordings);
    let label = format!("profile of {} on {}", job.name, machine.name);
    let inputs = (job, &machine.caches, accesses, recordings);
    let name = RunName::new("profile", label, sources, &inputs)?;
    store::find_or_make(name, || measure(job, machine, accesses))
}

fn measure(job: &WorkloadJob, machine: &MachineSpec, accesses: u64) -> Result<Profile> {
    let mut threads = job.start_threads(0)?;
    let [source] = threads.as_mut_slice() else {
        return Err(failed(&job.name)("it has several threads, expected one"));
    };

    let last_level = machine
        .last_level_cache()
        .ok_or_else(|| failed(&machine.name)("no data cache to share"))?;
    let earlier_caches = machine
        .caches
        .iter()
        .take_while(|cache| cache.level != last_level.level);
    let private_cache = earlier_caches
        .filter(|cache| cache.level != CacheLevel::L1Instruction)
        .last();
    let mut private_sim = private_cache.map(build_cache_sim).transpose()?;
    let mut shared_cache = build_cache_sim(last_level)?;
    let mut reuse = ReuseSampler::new(REUSE_SAMPLING_INTERVAL, job.seed);
    let shift = last_level.line_bytes.trailing_zeros();
    let (mut batch, mut lines, mut missed_lines): (Vec<Access>, Vec<u64>, Vec<u64>) =
        Default::default();

    let (mut access_count, mut instructions) = (0u64, 0u64);
    let mut counts_after_warm_up = None;
    while access_count < 2 * accesses {
        batch.clear();
        if source.next_batch(&mut batch) == BatchEnd::Exit {
            break;
        }
        if access_count >= accesses && counts_after_warm_up.is_none() {
            counts_after_warm_up = Some((position_counts(&shared_cache), instructions));
        }
        let is_data_access =
            |access: &&Access| matches!(access.kind(), AccessKind::Load | AccessKind::Store);
        lines.clear();
        lines.extend(
            batch
                .iter()
                .filter(is_data_access)
                .map(|access| access.address() >> shift),
        );
        instructions += batch
            .iter()
            .map(|access| access.instructions())
            .sum::<u64>();
        access_count += lines.len() as u64;
        missed_lines.clear();
        match &mut private_sim {
            Some(private) => _ = private.push_collecting(&lines, &mut missed_lines),
            None => missed_lines.extend(&lines),
        }
        shared_cache.push(&missed_lines);
        if counts_after_warm_up.is_some() {
            missed_lines.iter().for_each(|&line| reuse.touch(line));
        }
    }
    let (warm_access_count, warm_instr) =
        counts_after_warm_up.ok_or_else(|| failed(&job.name)("it ended while it warmed up"))?;
    let per_mega_instr =
        |count: u64| count as f64 * 1e6 / (instructions - warm_instr).max(1) as f64;
    let hits_per_mega_instr: Vec<f64> = position_counts(&shared_cache)
        .iter()
        .zip(&warm_access_count)
        .map(|(now, warm_count)| per_mega_instr(now - warm_count))
        .collect();
    let references = Estimate::exact(hits_per_mega_instr.iter().sum());
    let mut profile = Profile::default();
    profile.rates.llc_refs_per_mega_instr = Some(Fact::from_measurement(
        references,
        FactSource::ExactTrace,
        0,
    ));
    profile.locality.stack_positions =
        Some(Fact::new(hits_per_mega_instr, FactSource::ExactTrace, 0));
    profile.locality.reuse_times = reuse
        .finish()
        .to_profile()
        .map(|times| Fact::new(times, FactSource::ExactTrace, 0));
    Ok(profile)
}

/// The numbers of hits by stack position, followed by the number of misses.
fn position_counts(cache: &CacheSim) -> Vec<u64> {
    let positions = cache.positions().unwrap_or_default();
    positions
        .hits
        .iter()
        .copied()
        .chain([positions.misses])
        .collect()
}

fn build_cache_sim(cache: &CacheSpec) -> Result<CacheSim> {
    let cache_error = failed("cache");
    let geometry = CacheGeometry::from_bytes(
        cache.size_bytes,
        u64::from(cache.line_bytes),
        cache.ways,
        cache.slices,
    );
    CacheSim::new(geometry.map_err(&cache_error)?, Replacement::Lru).map_err(&cache_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a profile distinguish a program that streams from one that stays in its cache?
    #[test]
    fn profiles_distinguish_streams_from_quiet_programs() {
        let machine = cachemate_spec::load_machine("xeon-x5365-4").unwrap();
        let profile_of =
            |name: &str| profile_job(&WorkloadJob::new(name, 1), &machine, 300_000).unwrap();
        let profile_mpki = |profile: &Profile| *profile.stack_positions().unwrap().last().unwrap();
        let (stream, quiet) = (profile_of("libquantum"), profile_of("gamess"));
        assert!(
            profile_mpki(&stream) > 1_000.0 && profile_mpki(&stream) > 20.0 * profile_mpki(&quiet),
            "{stream:?} {quiet:?}"
        );
        assert_eq!(stream.stack_positions().map(<[f64]>::len), Some(17));
        assert!(stream.reuse_times().is_some());
        assert!(
            profile_job(&WorkloadJob::new("rubis", 1), &machine, 1_000)
                .unwrap_err()
                .to_string()
                .contains("several threads")
        );
    }
}
