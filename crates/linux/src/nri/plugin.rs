//! The plugin's responses to the runtime's messages, without any socket.

use std::collections::BTreeMap;

use super::wire::{
    FieldValue, MessageBuilder, PLUGIN_CONNECTION, REQUEST, RESPONSE, WireError, WireMessage,
    parse_fields,
};
use crate::sense::service_directory::{ContainerRecord, ServiceDirectory};

/// Events of the runtime that the plugin subscribes to, by their numbers: a pod was removed; a container is about to
/// start, was updated, stopped or removed.
const EVENTS: [u64; 5] = [3, 6, 9, 10, 11];
const START_CONTAINER: u64 = 6;
const REMOVE_CONTAINER: u64 = 11;

/// State of one registration.
#[derive(Debug, Default)]
pub struct NriPlugin {
    directory: ServiceDirectory,
    pods: BTreeMap<String, PodRecord>,
    /// Containers of a synchronization that comes in several messages.
    synchronized_containers: BTreeMap<String, ContainerRecord>,
    runtime: Option<String>,
    is_registered: bool,
    /// The container that has just started, with its process.
    pending_start: Option<(String, i32)>,
}

/// A pod as the runtime describes it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct PodRecord {
    id: String,
    name: String,
    namespace: String,
    labels: BTreeMap<String, String>,
}

/// A container, with the id of its pod.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct ReportedContainer {
    id: String,
    pod: String,
    /// The container's first process; 0 if it has not started yet.
    pid: i32,
    record: ContainerRecord,
}

impl NriPlugin {
    /// A plugin that keeps this directory.
    pub fn new(directory: ServiceDirectory) -> Self {
        NriPlugin {
            directory,
            ..NriPlugin::default()
        }
    }

    /// The runtime and its version, once it has configured the plugin.
    pub fn runtime(&self) -> Option<&str> {
        self.runtime.as_deref()
    }

    /// Whether the runtime has configured the plugin since the last call of this function.
    pub fn take_registration(&mut self) -> bool {
        std::mem::take(&mut self.is_registered)
    }

    /// The container that has started since the last call, with the process that becomes its program.
    pub fn take_start(&mut self) -> Option<(String, i32)> {
        self.pending_start.take()
    }

    /// Handles a message, and returns the body of the response; `None` for a message that needs no response.
    ///
    /// # Errors
    /// The message is broken, or the runtime refuses the plugin.
    pub fn handle(&mut self, message: &WireMessage) -> Result<Option<Vec<u8>>, WireError> {
        match (message.connection, message.kind) {
            (PLUGIN_CONNECTION, REQUEST) => {
                let (mut method, mut payload) = (String::new(), &[][..]);
                for (field, value) in parse_fields(&message.body)? {
                    match field {
                        2 => method = value.to_text(),
                        3 => payload = value.bytes(),
                        _ => {}
                    }
                }
                let response_payload = self.answer(&method, payload)?;
                Ok(Some(
                    MessageBuilder::default()
                        .with_bytes(2, &response_payload)
                        .build(),
                ))
            }
            (_, RESPONSE) => check_status(&message.body, "a registered plugin").map(|()| None),
            _ => Ok(None),
        }
    }

    fn answer(&mut self, method: &str, payload: &[u8]) -> Result<Vec<u8>, WireError> {
        match method {
            "Configure" => {
                let name_and_version = text_fields(payload, [2, 3])?;
                self.runtime = Some(name_and_version.join(" ").trim().to_string());
                self.is_registered = true;
                let events = EVENTS.iter().fold(0, |mask, event| mask | 1 << (event - 1));
                Ok(MessageBuilder::default().with_number(2, events).build())
            }
            "Synchronize" => self.synchronize(payload),
            "StateChange" => {
                self.handle_state_change(payload)?;
                Ok(Vec::new())
            }
            // Requests that other versions of the runtime send: nothing is changed.
            _ => Ok(Vec::new()),
        }
    }

    fn synchronize(&mut self, payload: &[u8]) -> Result<Vec<u8>, WireError> {
        let mut more_messages = 0;
        for (field, value) in parse_fields(payload)? {
            match field {
                1 => {
                    let pod = parse_pod(value)?;
                    self.pods.insert(pod.id.clone(), pod);
                }
                2 => {
                    let container = self.add_pod_fields(parse_container(value)?, None);
                    self.synchronized_containers
                        .insert(container.id, container.record);
                }
                3 => more_messages = value.to_number(),
                _ => {}
            }
        }
        if more_messages == 0 {
            self.directory
                .replace(std::mem::take(&mut self.synchronized_containers));
        }
        Ok(MessageBuilder::default()
            .with_number(2, more_messages)
            .build())
    }

    fn handle_state_change(&mut self, payload: &[u8]) -> Result<(), WireError> {
        let (mut event, mut reported_container, mut reported_pod) = (0, None, None);
        for (field, value) in parse_fields(payload)? {
            match field {
                1 => event = value.to_number(),
                2 => reported_pod = Some(parse_pod(value)?),
                3 => reported_container = Some(parse_container(value)?),
                _ => {}
            }
        }
        match (event, reported_container) {
            (REMOVE_CONTAINER, Some(container)) => self.directory.remove(&container.id),
            (_, Some(container)) => {
                if event == START_CONTAINER {
                    self.pending_start = Some((container.id.clone(), container.pid));
                }
                let container = self.add_pod_fields(container, reported_pod.as_ref());
                self.directory.insert(&container.id, container.record);
            }
            (_, None) => {
                if let Some(pod) = reported_pod {
                    self.pods.remove(&pod.id);
                }
            }
        }
        Ok(())
    }

    /// A container with the names and labels of its pod.
    fn add_pod_fields(
        &self,
        mut container: ReportedContainer,
        pod: Option<&PodRecord>,
    ) -> ReportedContainer {
        if let Some(pod) = pod.or_else(|| self.pods.get(&container.pod)) {
            container.record.pod.clone_from(&pod.name);
            container.record.namespace.clone_from(&pod.namespace);
            container.record.labels.clone_from(&pod.labels);
        }
        container
    }
}

/// Checks the status in a response of the runtime.
///
/// # Errors
/// The status is an error; the message contains its code and text.
pub(super) fn check_status(body: &[u8], expected: &'static str) -> Result<(), WireError> {
    for (_, status) in parse_fields(body)?
        .into_iter()
        .filter(|(field, _)| *field == 1)
    {
        let mut code = 0;
        let mut message = String::new();
        for (field, value) in parse_fields(status.bytes())? {
            match field {
                1 => code = value.to_number(),
                2 => message = value.to_text(),
                _ => {}
            }
        }
        if code != 0 {
            return Err(WireError {
                found: format!("error {code}: {message}"),
                expected,
            });
        }
    }
    Ok(())
}

/// The texts of some fields; empty where there is none.
fn text_fields<const N: usize>(
    payload: &[u8],
    field_numbers: [u64; N],
) -> Result<[String; N], WireError> {
    let fields = parse_fields(payload)?;
    Ok(field_numbers.map(|number| {
        let value = fields.iter().rev().find(|(field, _)| *field == number);
        value.map_or(String::new(), |(_, value)| value.to_text())
    }))
}

/// Annotations that are read. Kubernetes allows 256 KiB of them for a pod, so all others are left out.
const ANNOTATIONS: [&str; 2] = ["cachemate.io/max-slowdown", "cachemate.io/profile"];
/// Maximum length of a name or value that is kept; a label cannot be longer, with its prefix.
const MAX_TEXT_BYTES: usize = 317;
const MAX_VALUE_BYTES: usize = 253;
/// Maximum number of labels that are kept for a pod.
const MAX_LABELS: usize = 256;

fn parse_pod(message: FieldValue<'_>) -> Result<PodRecord, WireError> {
    let [id, name, namespace] = text_fields(message.bytes(), [1, 2, 4])?;
    let mut labels = BTreeMap::new();
    // Annotations follow the labels; those meant for cachemate may have values that labels cannot have.
    for (field, entry) in parse_fields(message.bytes())?
        .into_iter()
        .filter(|(field, _)| matches!(field, 5 | 6))
    {
        let [key, value] = text_fields(entry.bytes(), [1, 2])?;
        let is_read = field == 5 && labels.len() < MAX_LABELS || ANNOTATIONS.contains(&&*key);
        if is_read && key.len() <= MAX_TEXT_BYTES && value.len() <= MAX_VALUE_BYTES {
            labels.insert(key, value);
        }
    }
    Ok(PodRecord {
        id,
        name,
        namespace,
        labels,
    })
}

fn parse_container(message: FieldValue<'_>) -> Result<ReportedContainer, WireError> {
    let [id, pod, name] = text_fields(message.bytes(), [1, 2, 3])?;
    let (mut record, mut pid) = (
        ContainerRecord {
            name,
            ..ContainerRecord::default()
        },
        0,
    );
    for (field, value) in parse_fields(message.bytes())? {
        match field {
            12 => pid = i32::try_from(value.to_number()).unwrap_or(0),
            11 => [record.cgroup] = text_fields(value.bytes(), [5])?,
            22 => {
                let [name, digest] = text_fields(value.bytes(), [1, 2])?;
                record.image_name = Some(name).filter(|name| !name.is_empty());
                record.image = Some(digest).filter(|digest| !digest.is_empty());
            }
            _ => {}
        }
    }
    Ok(ReportedContainer {
        id,
        pod,
        pid,
        record,
    })
}
