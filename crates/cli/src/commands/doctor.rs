//! `cachemate doctor`: tests the facilities of this host for measuring and acting, and names remedies for missing
//! ones.

use cachemate_linux::kernel::LinuxHost;
use cachemate_linux::sense::capability_survey::{CapabilityCheck, CapabilitySurvey};
use cachemate_linux::sense::kubelet_cpus::find_straddling_containers;
use cachemate_linux::sense::pressure::{self, Pressure};
use cachemate_linux::sense::sched_cache::{self, SchedCacheStatus};
use clap::Args;
use serde::Serialize;

use crate::args::JsonArg;
use crate::host_machine::{self, wrong_lists};
use crate::session::Session;
use cachemate_daemon::host::{self, PROBE_LEVEL};
use cachemate_daemon::status::describe_evidence_level;

/// Test the facilities of this host: counters, probes, placement; report why one is missing and how to enable it
///
/// Every facility is tested rather than assumed: counters run against a loop that must miss, the probe is calibrated, a
/// watchpoint is set. Nothing on the host is changed.
#[derive(Args)]
pub struct Doctor {
    /// Skip the calibration of the probe, which takes processor time
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    json: JsonArg,
}

/// `cachemate doctor --json`.
#[derive(Serialize)]
struct DoctorJson {
    #[serde(flatten)]
    capability_survey: CapabilitySurvey,
    means: String,
    online_cpus: usize,
    shared_last_level_caches: usize,
    topology_warnings: Vec<String>,
    pressure: Pressure,
    /// State of Linux's own cache-aware scheduling, which may run alongside cachemate.
    kernel_cache_scheduling: SchedCacheStatus,
}

impl Doctor {
    pub fn run(&self, session: &Session) -> anyhow::Result<()> {
        let host = host::survey_host(!self.quick)?;
        let shared_count = host
            .topology
            .caches
            .iter()
            .filter(|cache| cache.last_level && cache.cpus.count() > 1)
            .count();
        let result = DoctorJson {
            means: match self.quick && host.capability_survey.level == PROBE_LEVEL {
                true => "evidence level 2 or 3 (1 is best): no counters; --quick skips the calibration that shows whether probes work".to_string(),
                false => describe_evidence_level(host.capability_survey.level, true, None),
            },
            online_cpus: host.topology.online().count() as usize,
            shared_last_level_caches: shared_count,
            topology_warnings: host
                .warnings
                .into_iter()
                .chain(host_machine::find_stored().iter().flat_map(wrong_lists))
                .chain(find_straddling_containers(
                    &LinuxHost::new("/"),
                    &host.topology,
                ))
                .collect(),
            pressure: pressure::read(&LinuxHost::new("/")),
            kernel_cache_scheduling: sched_cache::read_status(&LinuxHost::new("/")),
            capability_survey: host.capability_survey,
        };
        session.print_result(self.json.json, &result, || render(&result))
    }
}

fn render(result: &DoctorJson) -> String {
    let mut text = format!(
        "{}\n{} CPUs online, {} last-level caches shared by two or more\n",
        result.means, result.online_cpus, result.shared_last_level_caches
    );
    text.push_str(&format!(
        "the kernel's own cache-aware scheduling: {}\n",
        result.kernel_cache_scheduling.detail
    ));
    for warning in &result.topology_warnings {
        text.push_str(&format!("note: {warning}\n"));
    }
    for (title, capabilities) in [
        ("measuring, best first", &result.capability_survey.measures),
        ("acting", &result.capability_survey.enforces),
    ] {
        text.push_str(&format!("\n{title}\n"));
        capabilities
            .iter()
            .for_each(|capability| text.push_str(&capability_lines(capability)));
    }
    text
}

fn capability_lines(capability: &CapabilityCheck) -> String {
    let mut text = format!(
        "  {:<8}  {}: {}\n",
        capability.state.describe(),
        capability.name,
        capability.detail
    );
    if !capability.is_usable() {
        text.push_str(&format!(
            "            without it: {}\n",
            capability.consequence
        ));
    }
    if let Some(remedy) = &capability.remedy {
        text.push_str(&format!("            remedy: {remedy}\n"));
    }
    text
}
