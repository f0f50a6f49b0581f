//! `cachemate convert`: converts traces of other tools to `.cmt`.

use cachemate_report::text::{format_count, format_size};
use clap::Args;

use crate::args::OutputArgs;
use crate::exit::UsageError;
use crate::files::OutputFile;
use crate::session::Session;
use crate::traces::{TraceArgs, TraceInput};

/// Convert a trace of another tool (lackey, Dinero din, CSV, drmemtrace, raw u64, ChampSim, oracleGeneral) to .cmt
///
/// After Ctrl-C, the records converted so far form an intact file. --salvage makes an intact file of a damaged one.
#[derive(Args)]
pub struct Convert {
    /// The trace; - is standard input
    #[arg(value_name = "FILE")]
    file: String,
    #[command(flatten)]
    trace: TraceArgs,
    /// zstd level: higher levels are smaller and slower
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(i32).range(1..=19))]
    compression_level: i32,
    #[command(flatten)]
    output: OutputArgs,
}

impl Convert {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let path = &self.output.output;
        if path.extension().is_none_or(|ending| ending != "cmt") {
            anyhow::bail!(UsageError(format!(
                "{}: found another ending than .cmt, the written format",
                path.display()
            )));
        }
        let mut output = OutputFile::create(path, self.output.force)?;
        let mut trace = TraceInput::open(session, &self.file, &self.trace, "converting")?;
        let name = path.display().to_string();
        let conversion = cachemate_trace::convert(
            &mut trace,
            output.file(),
            &name,
            self.compression_level,
            |_| {},
        )?;
        trace.finish(session);
        output.persist()?;
        let records = format_count(conversion.totals.records);
        session.note(&format!(
            "{name}: {records} records, {}",
            format_size(conversion.bytes)
        ));
        trace.check_whole()
    }
}
