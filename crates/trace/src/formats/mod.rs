//! Readers for traces of other tools, and the selection among all formats.

mod binary;
mod compression;
mod csv;
mod frames;
mod import;
mod lines;
mod open;
mod text;

pub(crate) use compression::ZSTD_MAGIC;
pub(crate) use text::lackey_reader;

pub use open::{Format, open, open_input, open_near};

#[cfg(test)]
mod tests;
