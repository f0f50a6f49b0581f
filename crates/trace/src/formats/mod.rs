//! Readers for traces of other tools, and the selection among all formats.

mod binary;
mod compression;
mod lines;
mod open;
mod text;

pub(crate) use compression::ZSTD_MAGIC;

pub use binary::{ChampSimReader, OracleGeneralReader, RawU64Reader};
pub use open::{Format, open, open_input};
pub use text::{CsvReader, DinReader, DrMemTraceReader, LackeyReader};

#[cfg(test)]
mod tests;
