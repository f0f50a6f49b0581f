//! Service state that a running daemon tracks from window to window: learned profiles, rules that match nothing, and
//! the plugin of the container runtime.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use cachemate_core::HostReport;
use cachemate_linux::nri::{
    ContainerStarts, ContainerUpdates, NriChannels, NriOptions, NriState, NriThread,
};
use cachemate_linux::sense::service_directory::{ContainerRecord, ServiceDirectory};
use cachemate_page::{ServiceSnapshot, Snapshot};
use cachemate_spec::ManageConfig;

use crate::host::LiveLoop;
use crate::rule_report::RuleCheck;
use crate::service_profiles::ProfileStore;

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

    /// Observes one window: adds what the container runtime reports to the snapshot's services, learns profiles, and
    /// checks the rules once a minute. Returns the rules that match nothing, if they were checked.
    pub(crate) fn observe(
        &mut self,
        control_loop: &mut LiveLoop,
        host: &HostReport,
        snapshot: &mut Snapshot,
        report: &dyn Fn(&str),
    ) -> Option<Vec<String>> {
        if !self.directory.is_empty() {
            for service in &mut snapshot.services {
                if let Some(record) = self.directory.find_by_identity(&service.identity()) {
                    add_container(service, &record);
                }
            }
        }
        let profiles = control_loop.profiler_chain.profiles();
        let machine = &mut control_loop.machine;
        self.profile_store
            .observe(machine.learn(profiles), machine.learned_profiles(), report);
        let profiled_programs = host.profiled_programs.iter().map(String::as_str);
        self.rule_check
            .poll(&self.directory, profiled_programs, report)
    }

    /// The state of the container runtime's plugin; `None` if none is configured.
    pub(crate) fn nri_state(&self) -> Option<NriState> {
        self.nri_plugin.as_ref().map(|(thread, _)| thread.state())
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

/// Adds what the container runtime reports about its image.
fn add_container(service: &mut ServiceSnapshot, record: &ContainerRecord) {
    service.profile = record.labels.get("cachemate.io/profile").cloned();
    let repository = record.image_name.as_deref().map(|name| {
        let last_segment = name.rfind('/').map_or(0, |slash| slash + 1);
        let tag = name[last_segment..]
            .find([':', '@'])
            .map(|colon| last_segment + colon);
        &name[..tag.unwrap_or(name.len())]
    });
    let by_digest = repository
        .zip(record.image.as_deref())
        .map(|(name, digest)| format!("{name}@{digest}"));
    service.images = record
        .image_name
        .clone()
        .into_iter()
        .chain(by_digest)
        .collect();
}

#[cfg(test)]
mod tests {
    use super::*;
    use cachemate_auto::service_losses::{ServiceReport, ServiceSlowdown};
    use cachemate_core::ServiceIdentity;

    /// Is an image known by its name and by its digest, with a registry's port taken for no tag?
    #[test]
    fn an_image_is_known_by_name_and_digest() {
        let report = ServiceReport {
            service: ServiceIdentity::from_pod("shop/cart", Some("redis")),
            tasks: Vec::new(),
            max_slowdown: None,
            cpu_share: 0.0,
            waiting_share: None,
            slowdown: ServiceSlowdown::default(),
            losses: Vec::new(),
            waiting_causes: Vec::new(),
            prevented_losses: Vec::new(),
            reason: None,
        };
        let images_of = |name: &str| {
            let mut status = ServiceSnapshot::new(&report);
            let labels = [("cachemate.io/profile".to_string(), "index".to_string())].into();
            let (image_name, image) = (Some(name.to_string()), Some("sha256:1".to_string()));
            add_container(
                &mut status,
                &ContainerRecord {
                    labels,
                    image_name,
                    image,
                    ..ContainerRecord::default()
                },
            );
            assert_eq!(status.profile.as_deref(), Some("index"));
            status.images
        };
        assert_eq!(
            images_of("docker.io/library/redis:7"),
            [
                "docker.io/library/redis:7",
                "docker.io/library/redis@sha256:1"
            ]
        );
        assert_eq!(
            images_of("host:5000/redis"),
            ["host:5000/redis", "host:5000/redis@sha256:1"]
        );
    }
}
