//! `cachemate lab run`: a user's own programs on a modeled machine.
//!
//! Problem: predict the effect of a policy, or of cache allocation, on a machine that is not at hand. Method: the lab's
//! scripts (a separate package) boot a guest on the machine and run each program alone, all programs together, and all
//! programs under the policy. This file writes the job, starts the script and reports the results.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use cachemate_policy::policies;
use cachemate_report::text::{count_text, size_text};
use cachemate_report::{Align, Table};
use cachemate_spec::{PolicyChoice, parse_toml};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::session::Session;

/// Environment variable with the directory of the lab's scripts.
const VARIABLE: &str = "CACHEMATE_LAB";
const SCRIPT: &str = "programs.sh";

/// Run your own programs on a modeled machine: each alone, all together, and all together under a policy
///
/// Every figure is that of a modeled machine. In each phase, programs are killed after --seconds of the guest's time; only
/// programs that end earlier are compared by run time. Needs the lab's scripts, QEMU and a kernel from Debian packages
/// (docs/lab.md).
#[derive(Args)]
pub struct LabRunArgs {
    /// Bundled machine (lab-2x16M, lab-vm, ...) or TOML file
    #[arg(long, short, value_name = "MACHINE", default_value = "lab-2x16M")]
    machine: String,
    /// The daemon's policy [default: programs run only alone and together]
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// The policy's parameters, as in the daemon's configuration: an inline table such as { steps = [...] }
    #[arg(long, value_name = "TOML", requires = "policy")]
    parameters: Option<String>,
    /// Directory that becomes /programs in the guest, the working directory of the programs
    #[arg(long, value_name = "DIR")]
    programs_dir: Option<PathBuf>,
    /// Seconds of the guest's time for each phase
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    #[command(flatten)]
    json: JsonArg,
    /// One command line each, in quotes: a path on this host or in the directory ('./solve -n 5')
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    programs: Vec<String>,
}

/// One program in one phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct PhaseResult {
    phase: String,
    program: String,
    seconds: f64,
    /// True if the program ended before its time was over.
    ended: bool,
    instructions: u64,
    l3_misses: u64,
    /// Those misses whose lines another task had evicted.
    displaced_by_others: u64,
    memory_bytes: u64,
    /// Sum of its threads' maximum occupancies of an L3.
    held_bytes: u64,
    /// Slowdown against the run alone, by run time if it ended in both runs, else by instructions per second.
    slowdown: Option<f64>,
}

#[derive(Serialize)]
struct LabRunJson {
    /// Always "modeled": no figure here was measured on hardware.
    machine_is: &'static str,
    machine: String,
    policy: Option<String>,
    programs: Vec<PhaseResult>,
}

impl LabRunArgs {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let script = script()?;
        let machine = cachemate_spec::load_machine(&self.machine)?;
        let config = super::config::text(&machine, false, false)?;
        let job = tempfile::tempdir().context("no folder for temporary files")?;
        self.write_job(job.path(), &config)?;
        session.note("booting the modeled machine; each second of the guest takes ten seconds or more");
        let binary = std::env::current_exe().context("this command's own file")?;
        let ran = Command::new(&script).arg(job.path()).arg(&binary).stdout(std::process::Stdio::null()).output();
        let ran = ran.with_context(|| format!("{}: cannot be started", script.display()))?;
        let results = job.path().join("results.tsv");
        let Ok(text) = std::fs::read_to_string(&results) else {
            let stderr = String::from_utf8_lossy(&ran.stderr);
            let console_dir = job.keep(); // the guest's console is there
            bail!("{}: {} ({} is kept)", script.display(), stderr.trim(), console_dir.display());
        };
        let programs = read(&text, &self.programs)?;
        let result = LabRunJson { machine_is: "modeled", machine: machine.name, policy: self.policy.clone(), programs };
        session.answer(self.json.json, &result, || render(&result))
    }

    fn write_job(&self, job: &Path, config: &str) -> anyhow::Result<()> {
        let write = |name: &str, text: &str| {
            std::fs::write(job.join(name), text).with_context(|| format!("{}: cannot be written", job.display()))
        };
        if let Some(odd) = self.programs.iter().find(|line| line.contains(['\n', '\t']) || line.trim().is_empty()) {
            bail!(crate::exit::UsageError(format!("PROGRAM: found {odd:?}, expected one command line")));
        }
        write("machine", config)?;
        write("programs", &format!("{}\n", self.programs.join("\n")))?;
        write("seconds", &format!("{}\n", self.seconds))?;
        if let Some(policy) = &self.policy {
            let parameters = self.parameters.as_ref().map(|table| format!("parameters = {table}\n"));
            let choice = format!("name = \"{policy}\"\n{}", parameters.unwrap_or_default());
            let checked: PolicyChoice = parse_toml("--policy and --parameters", &choice)?;
            policies::build(&checked.name, &checked.parameters.to_string(), 0)?;
            write("policy.toml", &format!("[policy]\n{choice}"))?;
        }
        if let Some(dir) = &self.programs_dir {
            let from = dir.canonicalize().with_context(|| format!("{}: cannot be read", dir.display()))?;
            std::os::unix::fs::symlink(from, job.join("files"))?;
        }
        Ok(())
    }
}

/// The lab's script: in the directory named by the environment, beside this command's build, or installed.
fn script() -> anyhow::Result<PathBuf> {
    let named = std::env::var_os(VARIABLE).map(PathBuf::from);
    let own = std::env::current_exe().ok();
    let beside = own.iter().flat_map(|own| own.ancestors().skip(1).map(|folder| folder.join("lab")));
    let installed = ["/usr/local/lib/cachemate/lab", "/usr/lib/cachemate/lab"].map(PathBuf::from);
    let mut folders = named.into_iter().chain(beside).chain(installed);
    folders.find_map(|folder| Some(folder.join(SCRIPT)).filter(|script| script.is_file())).with_context(|| {
        format!(
            "the lab is not installed: it is a separate package (lab/ of the source); {VARIABLE} may name its directory"
        )
    })
}

/// Parses the script's table; phases are in the order of the run.
fn read(text: &str, programs: &[String]) -> anyhow::Result<Vec<PhaseResult>> {
    let mut all = Vec::new();
    let mut alone: BTreeMap<usize, PhaseResult> = BTreeMap::new();
    for (at, line) in text.lines().enumerate() {
        let fields: Vec<&str> = line.split('\t').collect();
        let bad = || format!("results.tsv, line {}: found {line:?}, expected 10 fields of the lab's script", at + 1);
        let [phase, number, _, seconds, ended, counts @ ..] = &fields[..] else { bail!(bad()) };
        let counts: Vec<f64> = counts.iter().map(|count| count.parse()).collect::<Result<_, _>>()?;
        let [instructions, l3_misses, displaced, memory_bytes, held_bytes] = counts[..] else { bail!(bad()) };
        let number: usize = number.parse().with_context(bad)?;
        let mut ran = PhaseResult {
            phase: (*phase).to_string(),
            program: programs.get(number).with_context(bad)?.clone(),
            seconds: seconds.parse().with_context(bad)?,
            ended: *ended == "yes",
            instructions: instructions as u64,
            l3_misses: l3_misses as u64,
            displaced_by_others: displaced as u64,
            memory_bytes: memory_bytes as u64,
            held_bytes: held_bytes as u64,
            slowdown: None,
        };
        ran.slowdown = alone.get(&number).and_then(|alone| slowdown(alone, &ran));
        if ran.phase == "alone" {
            alone.insert(number, ran.clone());
        }
        all.push(ran);
    }
    Ok(all)
}

fn slowdown(alone: &PhaseResult, now: &PhaseResult) -> Option<f64> {
    let rate = |ran: &PhaseResult| ran.instructions as f64 / ran.seconds;
    let ratio = match alone.ended && now.ended {
        true => now.seconds / alone.seconds,
        false => rate(alone) / rate(now),
    };
    ratio.is_finite().then_some(ratio - 1.0)
}

fn render(result: &LabRunJson) -> String {
    let mut table = Table::new(&[
        ("phase", Align::Left),
        ("program", Align::Left),
        ("seconds", Align::Right),
        ("slowdown", Align::Right),
        ("L3 misses", Align::Right),
        ("evicted by others", Align::Right),
        ("memory", Align::Right),
        ("occupancy", Align::Right),
    ]);
    for ran in &result.programs {
        table.row([
            ran.phase.clone(),
            ran.program.clone(),
            format!("{:.2}{}", ran.seconds, if ran.ended { "" } else { " (killed)" }),
            ran.slowdown.map_or("–".to_string(), |slower| format!("{:.0} %", 100.0 * slower)),
            count_text(ran.l3_misses),
            count_text(ran.displaced_by_others),
            size_text(ran.memory_bytes),
            size_text(ran.held_bytes),
        ]);
    }
    let policy = result.policy.as_ref().map_or(String::new(), |policy| format!(", managed = policy {policy}"));
    format!("{} (modeled machine){policy}\n{}", result.machine, table.text())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a program compared with itself alone, by run time where it ended and by instructions where it did not?
    #[test]
    fn programs_are_compared_with_themselves_alone() {
        let programs = ["./a".to_string(), "./b -n 5".to_string()];
        let text = "alone\t0\t./a\t2\tyes\t1000\t10\t0\t640\t64\n\
                    alone\t1\t./b\t5\tno\t5000\t10\t0\t640\t64\n\
                    together\t0\t./a\t3\tyes\t1000\t90\t80\t640\t64\n\
                    together\t1\t./b\t5\tno\t2500\t10\t0\t640\t64\n";
        let ran = read(text, &programs).unwrap();
        let slower: Vec<Option<f64>> = ran.iter().map(|ran| ran.slowdown).collect();
        assert_eq!(slower, [None, None, Some(0.5), Some(1.0)]);
        assert_eq!((ran[2].displaced_by_others, ran[3].program.as_str()), (80, "./b -n 5"));
        assert!(
            render(&LabRunJson { machine_is: "modeled", machine: "m".into(), policy: None, programs: ran })
                .contains("modeled machine")
        );
    }

    /// Is a table that the script could not have written refused with its line?
    #[test]
    fn another_table_is_refused() {
        let programs = ["./a".to_string()];
        assert!(read("alone\t0\t./a\n", &programs).unwrap_err().to_string().contains("line 1"));
        assert!(read("alone\t7\t./a\t2\tyes\t1\t1\t1\t1\t1\n", &programs).is_err());
    }
}
