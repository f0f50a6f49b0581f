//! `cachemate lab report`: writes the results of the lab's tests as one HTML page.

use std::path::PathBuf;

use anyhow::Context;
use cachemate_report::LabResult;
use clap::Args;

use crate::args::OutputArgs;
use crate::files::{refuse_existing, write_file};
use crate::session::Session;

/// Maximum size of a run's `result.json`.
const MAX_RESULT_BYTES: u64 = 16 << 20;

/// Write an HTML page of the lab's results: each figure beside the model's, with its target
///
/// The page is one file that loads nothing. `make lab` writes the results.
#[derive(Args)]
pub struct LabReportArgs {
    /// Results of a lab run
    #[arg(value_name = "RESULT", default_value = "target/lab/result.json")]
    result: PathBuf,
    /// Title of the page
    #[arg(long, value_name = "TEXT", default_value = "Lab results")]
    title: String,
    #[command(flatten)]
    output: OutputArgs,
}

impl LabReportArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        refuse_existing(&self.output.output, self.output.force)?;
        let name = self.result.display();
        let text = crate::files::read_text(&self.result, MAX_RESULT_BYTES)?;
        let result: LabResult = serde_json::from_str(&text)
            .with_context(|| format!("{name}: expected the results of a lab run"))?;
        write_file(
            &self.output.output,
            result.render_html(&self.title).as_bytes(),
            self.output.force,
        )?;
        session.print(&format!("wrote {}\n", self.output.output.display()))
    }
}
