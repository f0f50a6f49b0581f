//! Service state that a running daemon tracks from window to window: learned profiles, rules that match nothing, and
//! the plugin of the container runtime.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use cachemate_core::{Observation, ServiceProfiles};
use cachemate_linux::nri::{ContainerStarts, ContainerUpdates, NriChannels, NriOptions, NriThread};
use cachemate_linux::sense::service_directory::ServiceDirectory;
use cachemate_spec::ManageConfig;

use crate::host::LiveLoop;
use crate::rule_report::RuleCheck;
use crate::service_floors::ServiceFloors;
use crate::service_profiles::ProfileStore;
use crate::service_status::NriStatus;
use crate::status::DaemonStatus;

/// The tracked state of services.
pub(crate) struct ServiceWatch {
    store: ProfileStore,
    rules: RuleCheck,
    floors: ServiceFloors,
    directory: ServiceDirectory,
    nri: Option<(NriThread, NriChannels)>,
}

impl ServiceWatch {
    /// Starts the plugin, if it is configured.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start(
        state_dir: &std::path::Path,
        config: &ManageConfig,
        nri: Option<NriOptions>,
        wake: Arc<AtomicBool>,
    ) -> anyhow::Result<Self> {
        let directory = ServiceDirectory::default();
        let register_plugin = |options| {
            let (starts, updates) = (ContainerStarts::default(), ContainerUpdates::new()?);
            let channels = NriChannels { directory: directory.clone(), starts, updates, wake };
            std::io::Result::Ok((NriThread::start(options, channels.clone())?, channels))
        };
        let nri = nri
            .map(register_plugin)
            .transpose()
            .context("cannot start the thread of the container runtime's plugin")?;
        Ok(ServiceWatch {
            store: ProfileStore::new(state_dir),
            rules: RuleCheck::new(config.rules.clone()),
            floors: ServiceFloors::new(config.service_floors.clone()),
            directory,
            nri,
        })
    }

    /// Profiles of earlier runs.
    pub(crate) fn stored_profiles(&self, say: &dyn Fn(&str)) -> ServiceProfiles {
        self.store.read(say)
    }

    /// Everything that the plugin shares with the machine.
    pub(crate) fn runtime(&self) -> Option<NriChannels> {
        self.nri.as_ref().map(|(_, channels)| channels.clone())
    }

    /// Observes one window.
    pub(crate) fn observe(
        &mut self,
        live: &mut LiveLoop,
        observation: &Observation,
        status: &mut DaemonStatus,
        say: &dyn Fn(&str),
    ) {
        self.floors.observe(observation, &mut status.services);
        let (machine, profiles) = live.machine_and_profiles();
        if let Some(programs) = machine.unread_programs() {
            for service in &mut status.services {
                service.unread_programs = Some(programs.get(&service.identity()).copied().unwrap_or(0));
            }
        }
        let idle_threads = machine.idle_threads();
        for service in &mut status.services {
            service.tasks += idle_threads.get(&service.identity()).copied().unwrap_or(0);
        }
        self.store.observe(machine.learn(profiles), machine.learned_profiles(), say);
        if let Some(unmatched) = self.rules.poll(&self.directory, say) {
            status.unmatched_rules = unmatched;
        }
        status.nri = self.nri.as_ref().map(|(thread, _)| NriStatus::from(thread.state()));
    }

    /// Replaces the configuration after a reload.
    pub(crate) fn set_config(&mut self, config: ManageConfig) {
        self.rules = RuleCheck::new(config.rules);
        self.floors = ServiceFloors::new(config.service_floors);
    }

    /// Stores everything that was learned.
    pub(crate) fn store_profiles(&mut self, live: &LiveLoop, say: &dyn Fn(&str)) {
        self.store.write(live.machine.learned_profiles(), say);
    }
}
