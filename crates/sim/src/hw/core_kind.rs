//! Kinds of cores that the engine is compiled for. A kind's properties are constants in every loop; the general kind
//! reads them from the machine.
//!
//! Kinds change only the speed: a core of any machine can run as the general kind, and a test compares both.

use cachemate_core::{CacheLevel, CacheSpec, CoreModel, MachineSpec, ReplacementPolicy, WritePolicy};

const RANDOM: usize = 64;

/// Value for a cache or page size without a specialized loop.
pub(crate) const ANY: usize = 0;
pub(crate) const LRU_2: usize = 2;
pub(crate) const LRU_4: usize = 4;
pub(crate) const LRU_8: usize = 8;
pub(crate) const RANDOM_4: usize = RANDOM + 4;

/// The size of pages of all shapes but [`ANY`], as a shift.
pub(crate) const PLAIN_PAGE_SHIFT: u32 = 12;

pub(crate) const fn ways_of_shape(shape: usize) -> usize {
    shape % RANDOM
}

pub(crate) const fn is_random(shape: usize) -> bool {
    shape >= RANDOM
}

/// Constants in the loops of a core.
pub(crate) trait CoreKind {
    /// Whether the thread's probes observe every single access.
    const WATCHED: bool = false;
    /// Shapes of the L1s, of data and of code: ways and replacement in one number, as a parameter of functions has to
    /// be; pages have 4 KB.
    const DATA: usize = ANY;
    const CODE: usize = ANY;
    /// `None` if the machine decides.
    const IN_ORDER: Option<bool> = None;
    /// The data L1's way with stores; `None` if the machine decides.
    const WRITE: Option<WritePolicy> = None;
}

/// The general kind, for any machine.
pub(crate) struct AnyCore;

impl CoreKind for AnyCore {}

/// The general kind, for threads whose probes observe every access.
pub(crate) struct WatchedCore;

impl CoreKind for WatchedCore {
    const WATCHED: bool = true;
}

/// A core that issues in order and has small write-through L1s, such as the UltraSPARC T1.
pub(crate) struct InOrderThroughCore;

impl CoreKind for InOrderThroughCore {
    const DATA: usize = RANDOM_4;
    const CODE: usize = LRU_4;
    const IN_ORDER: Option<bool> = Some(true);
    const WRITE: Option<WritePolicy> = Some(WritePolicy::Through);
}

/// Out of order, with write-through L1s: POWER5.
pub(crate) struct WindowThroughCore;

impl CoreKind for WindowThroughCore {
    const DATA: usize = LRU_4;
    const CODE: usize = LRU_2;
    const IN_ORDER: Option<bool> = Some(false);
    const WRITE: Option<WritePolicy> = Some(WritePolicy::Through);
}

/// Write-back L1s with the ways of `SHAPE`: Opteron, Core, Zen, Neoverse.
pub(crate) struct BackCore<const SHAPE: usize>;

impl<const SHAPE: usize> CoreKind for BackCore<SHAPE> {
    const DATA: usize = SHAPE;
    const CODE: usize = SHAPE;
    const WRITE: Option<WritePolicy> = Some(WritePolicy::Back);
}

/// The kind of a machine's cores, which names the implementation of [`CoreKind`] that runs them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CoreKindName {
    Any,
    InOrderThrough,
    WindowThrough,
    Back2,
    Back4,
    Back8,
}

impl CoreKindName {
    /// Returns the kind of a machine's cores.
    pub fn from_machine(machine: &MachineSpec) -> Self {
        let first_level_cache = |level| machine.caches.iter().find(|cache| cache.level == level);
        let (Some(data), Some(code)) =
            (first_level_cache(CacheLevel::L1Data), first_level_cache(CacheLevel::L1Instruction))
        else {
            return CoreKindName::Any;
        };
        let in_order = matches!(machine.pipeline, CoreModel::InOrder { .. });
        let writes_through = data.write == WritePolicy::Through;
        if machine.pages.page_bytes != 1 << PLAIN_PAGE_SHIFT {
            return CoreKindName::Any;
        }
        match (in_order, writes_through, compiled_shape(data), compiled_shape(code)) {
            (true, true, RANDOM_4, LRU_4) => CoreKindName::InOrderThrough,
            (false, true, LRU_4, LRU_2) => CoreKindName::WindowThrough,
            (_, false, LRU_2, LRU_2) => CoreKindName::Back2,
            (_, false, LRU_4, LRU_4) => CoreKindName::Back4,
            (_, false, LRU_8, LRU_8) => CoreKindName::Back8,
            _ => CoreKindName::Any,
        }
    }
}

fn compiled_shape(cache: &CacheSpec) -> usize {
    let bits_give_the_set = cache.slices == 1 && cache.sets_per_slice().is_power_of_two();
    match cache.replacement {
        _ if !bits_give_the_set => ANY,
        ReplacementPolicy::Lru => cache.ways as usize,
        ReplacementPolicy::Random => RANDOM + cache.ways as usize,
        ReplacementPolicy::TreePlru => ANY,
    }
}
