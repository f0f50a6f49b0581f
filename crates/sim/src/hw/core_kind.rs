//! Kinds of cores that the engine is compiled for. A kind's properties are constants in every loop; the general kind
//! reads them from the machine.
//!
//! Kinds change only the speed: a core of any machine can run as the general kind, and a test compares both.

use cachemate_core::{
    CacheLevel, CacheSpec, CoreModel, MachineSpec, ReplacementPolicy, WritePolicy,
};

const RANDOM_SHAPE: usize = 64;

/// Value for a cache or page size without a specialized loop.
pub(crate) const ANY_SHAPE: usize = 0;
pub(crate) const LRU_2: usize = 2;
pub(crate) const LRU_4: usize = 4;
pub(crate) const LRU_8: usize = 8;
pub(crate) const RANDOM_4: usize = RANDOM_SHAPE + 4;

/// The size of pages of all shapes but [`ANY_SHAPE`], as a shift.
pub(crate) const SPECIALIZED_PAGE_SHIFT: u32 = 12;

pub(crate) const fn ways_of_shape(shape: usize) -> usize {
    shape % RANDOM_SHAPE
}

pub(crate) const fn is_random(shape: usize) -> bool {
    shape >= RANDOM_SHAPE
}

/// Constants in the loops of a core.
pub(crate) trait CoreKind {
    /// Whether the thread's probes observe every single access.
    const IS_WATCHED: bool = false;
    /// Shapes of the L1s, of data and of code: ways and replacement in one number, as a parameter of functions has to
    /// be; pages have 4 KB.
    const DATA_SHAPE: usize = ANY_SHAPE;
    const CODE_SHAPE: usize = ANY_SHAPE;
    /// `None` if the machine decides.
    const IS_IN_ORDER: Option<bool> = None;
    /// The data L1's policy for stores; `None` if the machine decides.
    const WRITE_POLICY: Option<WritePolicy> = None;
}

/// The general kind, for any machine.
pub(crate) struct AnyCore;

impl CoreKind for AnyCore {}

/// The general kind, for threads whose probes observe every access.
pub(crate) struct WatchedCore;

impl CoreKind for WatchedCore {
    const IS_WATCHED: bool = true;
}

/// A core that issues in order and has small write-through L1s, such as the UltraSPARC T1.
pub(crate) struct InOrderWriteThroughCore;

impl CoreKind for InOrderWriteThroughCore {
    const DATA_SHAPE: usize = RANDOM_4;
    const CODE_SHAPE: usize = LRU_4;
    const IS_IN_ORDER: Option<bool> = Some(true);
    const WRITE_POLICY: Option<WritePolicy> = Some(WritePolicy::Through);
}

/// A core that issues out of order and has write-through L1s, such as the POWER5.
pub(crate) struct OutOfOrderWriteThroughCore;

impl CoreKind for OutOfOrderWriteThroughCore {
    const DATA_SHAPE: usize = LRU_4;
    const CODE_SHAPE: usize = LRU_2;
    const IS_IN_ORDER: Option<bool> = Some(false);
    const WRITE_POLICY: Option<WritePolicy> = Some(WritePolicy::Through);
}

/// A core whose L1s write back and have the ways of `SHAPE`, such as the Opteron, Core, Zen and Neoverse.
pub(crate) struct WriteBackCore<const SHAPE: usize>;

impl<const SHAPE: usize> CoreKind for WriteBackCore<SHAPE> {
    const DATA_SHAPE: usize = SHAPE;
    const CODE_SHAPE: usize = SHAPE;
    const WRITE_POLICY: Option<WritePolicy> = Some(WritePolicy::Back);
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
    /// [`CoreKindName::Any`] unless a compiled kind fits the first-level caches and the page size.
    pub fn from_machine(machine: &MachineSpec) -> Self {
        let first_level_cache = |level| machine.caches.iter().find(|cache| cache.level == level);
        let (Some(data), Some(code)) = (
            first_level_cache(CacheLevel::L1Data),
            first_level_cache(CacheLevel::L1Instruction),
        ) else {
            return CoreKindName::Any;
        };

        let is_in_order = matches!(machine.pipeline, CoreModel::InOrder { .. });
        let writes_through = data.write == WritePolicy::Through;
        if machine.pages.page_bytes != 1 << SPECIALIZED_PAGE_SHIFT {
            return CoreKindName::Any;
        }

        match (
            is_in_order,
            writes_through,
            compiled_shape(data),
            compiled_shape(code),
        ) {
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
    let is_set_from_bits = cache.slices == 1 && cache.sets_per_slice().is_power_of_two();
    match cache.replacement {
        _ if !is_set_from_bits => ANY_SHAPE,
        ReplacementPolicy::Lru => cache.ways as usize,
        ReplacementPolicy::Random => RANDOM_SHAPE + cache.ways as usize,
        ReplacementPolicy::TreePlru | ReplacementPolicy::Srrip | ReplacementPolicy::Drrip => {
            ANY_SHAPE
        }
    }
}
