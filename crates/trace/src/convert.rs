//! Converts any readable format to `.cmt`.

use std::io::Write;

use crate::{CmtWriter, TraceError, TraceReader, TraceTotals};

/// The result of a conversion.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConversionSummary {
    /// The reader's totals.
    pub totals: TraceTotals,
    /// Bytes written.
    pub bytes: u64,
}

/// Copies all of `reader` into a `.cmt` at zstd `level`, and calls `progress` with the number of records after every
/// batch; header and totals are preserved.
///
/// # Errors
/// The reader's or the writer's own. The output written until then is a truncated `.cmt`, readable to its last block.
pub fn convert(
    reader: &mut dyn TraceReader,
    out: impl Write,
    out_name: &str,
    level: i32,
    mut progress: impl FnMut(u64),
) -> Result<ConversionSummary, TraceError> {
    // The header of a foreign trace states whether instructions are known once a batch was read.
    let mut batch = Vec::new();
    let mut has_more = reader.read_batch(&mut batch);
    let mut out = CountingWriter { out, bytes: 0 };
    let mut writer = CmtWriter::new(&mut out, out_name, reader.header(), level)?;
    loop {
        if !matches!(has_more, Ok(true)) {
            writer.flush_block()?;
        }
        if !has_more? {
            break;
        }
        writer.push_all(&batch)?;
        progress(writer.records());
        has_more = reader.read_batch(&mut batch);
    }

    let (_, totals) = writer.finish(reader.totals().cloned().unwrap_or_default())?;
    Ok(ConversionSummary {
        totals,
        bytes: out.bytes,
    })
}

struct CountingWriter<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for CountingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written_bytes = self.out.write(bytes)?;
        self.bytes += written_bytes as u64;
        Ok(written_bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}
