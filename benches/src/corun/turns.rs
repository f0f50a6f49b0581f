//! Programs that take turns beside a measured one.
//!
//! A program that is started anew for each run gets other pages, and after some seconds other guests of the host, so that
//! a chase took 0.8 s and 5.2 s beside the same loop within two minutes. So companions are started once and stopped except
//! in their turns, and a measured program that counts its work is not started anew either: of each turn, the first part
//! fills the cache for the new companion, and CPU time per unit of work is taken over the rest. The turns of a round
//! follow each other within a second.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cachemate_core::CpuId;
use rustix::process::Signal;

use super::workloads::CorunProgram;
use super::{BackgroundGroup, CorunHost, MAX_RUN_TIME, ProcessTime};

/// Start of a turn that is not measured. A chase through 30 MB passes all of its lines in less.
const SETTLING_TIME: Duration = Duration::from_millis(150);
/// The measured rest of a turn of a program that counts its work.
const MEASURED_TIME: Duration = Duration::from_millis(250);
/// Time for which a companion that counts nothing runs before its first turn.
const STARTING_TIME: Duration = Duration::from_secs(1);
const POLL_TIME: Duration = Duration::from_millis(5);

/// A program on the second CPU that runs in its turns only.
pub struct TurnTaker(BackgroundGroup);

impl TurnTaker {
    /// Starts a program, lets it set up its memory, and stops it.
    pub fn start(host: &CorunHost, workload: &CorunProgram) -> anyhow::Result<Self> {
        let group = if workload.units.is_some() {
            CountedProgram::start(host, workload, host.cpus.1)?.group
        } else {
            let script = "while :; do \"$@\" >/dev/null 2>&1 || sleep 0.1; done";
            let mut command = ["sh", "-c", script, "sh"].map(ToString::to_string).to_vec();
            command.extend(workload.endless_command.iter().cloned());
            let group = BackgroundGroup(host.spawn(&command, host.cpus.1)?);
            std::thread::sleep(STARTING_TIME);
            group
        };
        group.signal(Signal::STOP)?;
        Ok(TurnTaker(group))
    }

    /// Lets it run until the turn is dropped.
    pub fn begin_turn(&self) -> anyhow::Result<Turn<'_>> {
        self.0.signal(Signal::CONT)?;
        std::thread::sleep(SETTLING_TIME);
        Ok(Turn(&self.0))
    }
}

/// Time in which a program runs, or does not run.
pub struct Turn<'a>(&'a BackgroundGroup);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // One that has ended needs no signal.
        let _ = self.0.signal(Signal::STOP);
    }
}

/// The program whose speed is measured.
pub enum MeasuredProgram<'a> {
    Counted(CountedProgram),
    /// Started anew for each turn, and run to its end.
    Run(&'a CorunProgram),
}

impl<'a> MeasuredProgram<'a> {
    pub fn start(host: &CorunHost, program: &'a CorunProgram) -> anyhow::Result<Self> {
        if program.units.is_none() {
            return Ok(MeasuredProgram::Run(program));
        }
        let counted = CountedProgram::start(host, program, host.cpus.0)?;
        counted.group.signal(Signal::STOP)?;
        Ok(MeasuredProgram::Counted(counted))
    }

    /// Time of a run's work beside a companion.
    pub fn time_beside(
        &self,
        host: &CorunHost,
        companion: &TurnTaker,
    ) -> anyhow::Result<ProcessTime> {
        match self {
            MeasuredProgram::Run(program) => {
                let _turn = companion.begin_turn()?;
                host.time_program(program)
            }
            MeasuredProgram::Counted(program) => {
                program.group.signal(Signal::CONT)?;
                let _own_turn = Turn(&program.group);
                let _turn = companion.begin_turn()?;
                program.time_of_run()
            }
        }
    }
}

/// A running program that counts its units of work in a file.
pub struct CountedProgram {
    group: BackgroundGroup,
    count: File,
    clock: libc::clockid_t,
    /// Units of one run.
    run_units: u64,
}

impl CountedProgram {
    /// Starts it with much more work than one run's, and waits until it counts.
    fn start(host: &CorunHost, program: &CorunProgram, cpu: CpuId) -> anyhow::Result<Self> {
        let run_units = program.units.context("a program without a count")?;
        let path = host.dir.join(format!("{}-units-{}", program.name, cpu.0));
        let count = create_count(&path)?;
        let mut command = program.endless_command.clone();
        command.push(path.display().to_string());
        let group = BackgroundGroup(host.spawn(&command, cpu)?);
        let mut counted = CountedProgram {
            clock: cpu_clock_of(group.0.id())?,
            group,
            count,
            run_units,
        };
        let start = Instant::now();
        while counted.done_units()? == 0 {
            let exit = counted.group.0.try_wait()?;
            if let Some(status) = exit {
                bail!(
                    "{} ended with {status}, expected endless work",
                    program.name
                );
            }
            if start.elapsed() > MAX_RUN_TIME {
                bail!(
                    "{} has counted nothing for {} s, expected some work after about one",
                    program.name,
                    MAX_RUN_TIME.as_secs()
                );
            }
            std::thread::sleep(POLL_TIME);
        }
        Ok(counted)
    }

    pub fn done_units(&self) -> anyhow::Result<u64> {
        let mut bytes = [0; 8];
        self.count
            .read_exact_at(&mut bytes, 0)
            .context("a program's count of its work")?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// CPU time of one run's work at the speed of now.
    fn time_of_run(&self) -> anyhow::Result<ProcessTime> {
        let sample = || anyhow::Ok((self.done_units()?, seconds_of(self.clock)?));
        let (units_before, before_s) = sample()?;
        std::thread::sleep(MEASURED_TIME);
        let (units_after, after_s) = sample()?;
        if units_after <= units_before {
            bail!(
                "a program did nothing in {} ms, expected work",
                MEASURED_TIME.as_millis()
            );
        }
        let unit_s = (after_s - before_s) / (units_after - units_before) as f64;
        Ok(ProcessTime {
            user_s: self.run_units as f64 * unit_s,
            system_s: 0.0,
        })
    }
}

/// A file of one count, which is zero.
fn create_count(path: &Path) -> anyhow::Result<File> {
    std::fs::write(path, [0; 8]).with_context(|| path.display().to_string())?;
    File::open(path).with_context(|| path.display().to_string())
}

/// The clock of a process's CPU time.
fn cpu_clock_of(pid: u32) -> anyhow::Result<libc::clockid_t> {
    let mut clock = 0;
    // SAFETY: it writes to the variable only.
    match unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) } {
        0 => Ok(clock),
        error => Err(std::io::Error::from_raw_os_error(error)).context("clock_getcpuclockid"),
    }
}

fn seconds_of(clock: libc::clockid_t) -> anyhow::Result<f64> {
    // SAFETY: an all-zero timespec is valid, and clock_gettime writes only to it.
    let (error, time) = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        (libc::clock_gettime(clock, &raw mut time), time)
    };
    if error != 0 {
        return Err(std::io::Error::last_os_error()).context("a program's CPU time");
    }
    Ok(time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64)
}
