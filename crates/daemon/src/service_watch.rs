//! Service state that a running daemon tracks from window to window: learned profiles, rules that match nothing, and
//! the plugin of the container runtime.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use cachemate_linux::nri::{ContainerStarts, ContainerUpdates, NriChannels, NriOptions, NriThread};
use cachemate_linux::sense::service_directory::ServiceDirectory;
use cachemate_spec::ManageConfig;

use crate::host::LiveLoop;
use crate::rule_report::RuleCheck;
use crate::service_profiles::ProfileStore;

use crate::status::DaemonStatus;

/// The tracked state of services.
pub(crate) struct ServiceWatch {
    pub(crate) profile_store: ProfileStore,
    rule_check: RuleCheck,
    directory: ServiceDirectory,
    nri_plugin: Option<(NriThread, NriChannels)>,
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
        let start_plugin = |options| {
            let (starts, updates) = (ContainerStarts::default(), ContainerUpdates::new()?);
            let channels = NriChannels {
                directory: directory.clone(),
                starts,
                updates,
                wake,
            };
            std::io::Result::Ok((NriThread::start(options, channels.clone())?, channels))
        };
        let nri_plugin = nri
            .map(start_plugin)
            .transpose()
            .context("cannot start the thread of the container runtime's plugin")?;
        Ok(ServiceWatch {
            profile_store: ProfileStore::new(state_dir),
            rule_check: RuleCheck::new(config.clone()),
            directory,
            nri_plugin,
        })
    }

    /// Everything that the plugin shares with the machine.
    pub(crate) fn nri_channels(&self) -> Option<NriChannels> {
        self.nri_plugin
            .as_ref()
            .map(|(_, channels)| channels.clone())
    }

    /// Observes one window.
    pub(crate) fn observe(
        &mut self,
        control_loop: &mut LiveLoop,
        status: &mut DaemonStatus,
        report: &dyn Fn(&str),
    ) {
        let (machine, profiles) = control_loop.machine_and_profiles();
        if let Some(unread_programs) = machine.unread_programs() {
            for service in &mut status.services {
                service.unread_programs = Some(
                    unread_programs
                        .get(&service.identity())
                        .copied()
                        .unwrap_or(0),
                );
            }
        }
        if !self.directory.is_empty() {
            for service in &mut status.services {
                let record = self.directory.find_by_identity(&service.identity());
                record
                    .into_iter()
                    .for_each(|record| service.add_container(&record));
            }
        }
        let idle_threads = machine.idle_threads();
        for service in &mut status.services {
            service.tasks += idle_threads.get(&service.identity()).copied().unwrap_or(0);
        }
        self.profile_store
            .observe(machine.learn(profiles), machine.learned_profiles(), report);
        if let Some(unmatched_rules) =
            self.rule_check
                .poll(&self.directory, machine.profiled_programs(), report)
        {
            status.unmatched_rules = unmatched_rules;
        }
        status.nri = self.nri_plugin.as_ref().map(|(thread, _)| thread.state());
    }

    /// Replaces the configuration after a reload.
    pub(crate) fn set_config(&mut self, config: ManageConfig) {
        self.rule_check = RuleCheck::new(config);
    }

    /// Stores everything that was learned.
    pub(crate) fn store_profiles(&mut self, control_loop: &LiveLoop, report: &dyn Fn(&str)) {
        self.profile_store
            .write(control_loop.machine.learned_profiles(), report);
    }
}
