//! Everything about services that a running daemon looks after from window to window: learned profiles, rules without a
//! match, the plugin of the container runtime.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use cachemate_core::ServiceProfiles;
use cachemate_linux::nri::{NriOptions, NriThread};
use cachemate_linux::sense::service_directory::ServiceDirectory;
use cachemate_spec::RuleConfig;

use crate::host::LiveLoop;
use crate::rule_report::RuleCheck;
use crate::service_profiles::ProfileStore;
use crate::service_status::NriStatus;
use crate::status::DaemonStatus;

/// See the module's documentation.
pub(crate) struct ServiceWatch {
    store: ProfileStore,
    rules: RuleCheck,
    directory: ServiceDirectory,
    nri: Option<NriThread>,
}

impl ServiceWatch {
    /// Starts the plugin, if one is wanted.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start(
        state_dir: &std::path::Path,
        rules: Vec<RuleConfig>,
        nri: Option<NriOptions>,
        wake: Arc<AtomicBool>,
    ) -> anyhow::Result<Self> {
        let directory = ServiceDirectory::default();
        let nri = nri.map(|options| NriThread::start(options, directory.clone(), wake));
        let nri = nri.transpose().context("cannot start the thread of the container runtime's plugin")?;
        Ok(ServiceWatch { store: ProfileStore::new(state_dir), rules: RuleCheck::new(rules), directory, nri })
    }

    /// Profiles of earlier runs.
    pub(crate) fn stored_profiles(&self, say: &dyn Fn(&str)) -> ServiceProfiles {
        self.store.read(say)
    }

    /// Containers that the runtime reports.
    pub(crate) fn directory(&self) -> ServiceDirectory {
        self.directory.clone()
    }

    /// Takes in one window.
    pub(crate) fn observe(&mut self, live: &mut LiveLoop, status: &mut DaemonStatus, say: &dyn Fn(&str)) {
        let (machine, profiles) = live.machine_and_profiles();
        self.store.observe(machine.learn(profiles), machine.learned(), say);
        if let Some(unmatched) = self.rules.poll(&self.directory, say) {
            status.unmatched_rules = unmatched;
        }
        status.nri = self.nri.as_ref().map(|nri| NriStatus::from(nri.state()));
    }

    /// The configuration was reloaded.
    pub(crate) fn set_rules(&mut self, rules: Vec<RuleConfig>) {
        self.rules = RuleCheck::new(rules);
    }

    /// Stores whatever was learned.
    pub(crate) fn end(&mut self, live: &LiveLoop, say: &dyn Fn(&str)) {
        self.store.write(live.machine.learned(), say);
    }
}
