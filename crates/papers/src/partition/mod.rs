//! Partitions of a shared cache: units (colors or ways), demand curves of programs, costs of changes, and measured
//! speeds.

pub mod demand_curve;
pub mod partitioned_cache;
pub mod units;

use cachemate_core::PageMigration;
use serde::Deserialize;

/// The mode in which pages migrate to new colors, as in [`PageMigration`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationMode {
    /// Pages keep their colors.
    Never,
    /// A page is copied at its next access.
    Lazy,
    /// Pages with many accesses are copied first.
    HotFirst,
    /// All pages are copied at once.
    #[default]
    All,
}

impl From<MigrationMode> for PageMigration {
    fn from(mode: MigrationMode) -> Self {
        match mode {
            MigrationMode::Never => PageMigration::Never,
            MigrationMode::Lazy => PageMigration::Lazy,
            MigrationMode::HotFirst => PageMigration::HotFirst,
            MigrationMode::All => PageMigration::All,
        }
    }
}
