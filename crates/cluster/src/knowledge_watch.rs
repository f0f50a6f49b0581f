//! Follows the two resources on an API server: a list, then a watch from the list's version.
//!
//! A watch that ends or breaks is opened again from the last version that it received; a version that has expired needs
//! a new list. If the server is unreachable, the last known objects stay in use, and the states of nodes age until the
//! scores are neutral. Therefore no failure here delays a request of the scheduler.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cachemate_fleet::extender::ClusterKnowledge;
use serde::Deserialize;
use serde_json::Value;

use crate::api_server::{ApiServer, RESOURCE_PATH};
use crate::knowledge_objects::{MAX_OBJECT_BYTES, insert_object};

/// Resources that are watched: their kinds, and their names in paths.
const RESOURCES: [(&str, &str); 2] = [
    ("WorkloadProfile", "workloadprofiles"),
    ("NodeCacheState", "nodecachestates"),
];
/// Objects on one page of a list, and the maximum size of the page.
const OBJECTS_PER_PAGE: u32 = 500;
const MAX_PAGE_BYTES: u64 = 128 << 20;
/// Maximum number of pages of a list; a longer list means that the server repeats itself.
const MAX_PAGES: usize = 400;
/// Deadline for each read of a list.
const LIST_DEADLINE: Duration = Duration::from_secs(30);
/// Time between two attempts: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Changes in flight between a watch and the reader of the knowledge.
const MAX_CHANGES: usize = 1024;

/// A change that a watch reports.
enum KnowledgeChange {
    /// All objects of a kind.
    Listed(&'static str, Vec<Value>),
    /// A new or changed object.
    Changed(&'static str, Value),
    /// An object that was deleted.
    Deleted(&'static str, Value),
    /// The server could not be queried, with the reason.
    Failed(String),
}

/// The watched knowledge.
pub struct KnowledgeWatch {
    change_receiver: Receiver<KnowledgeChange>,
    knowledge: ClusterKnowledge,
    /// Reasons why objects were skipped, by kind and name, so that each is reported once.
    refusals: BTreeMap<String, String>,
}

impl KnowledgeWatch {
    /// Starts watching the resources. A watch that is silent for `max_silence` is reopened.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn start(server: ApiServer, max_silence: Duration) -> anyhow::Result<Self> {
        let server = Arc::new(server);
        let (sender, change_receiver) = sync_channel(MAX_CHANGES);
        for (kind, plural) in RESOURCES {
            let (server, sender) = (Arc::clone(&server), sender.clone());
            let follow = move || {
                // The receiver no longer exists when the command ends.
                let _ = ResourceWatch {
                    server: &server,
                    kind,
                    plural,
                    max_silence,
                    change_sender: &sender,
                }
                .follow();
            };
            std::thread::Builder::new()
                .name(format!("cachemate-{plural}"))
                .spawn(follow)?;
        }
        Ok(KnowledgeWatch {
            change_receiver,
            knowledge: ClusterKnowledge::default(),
            refusals: BTreeMap::new(),
        })
    }

    /// Applies the changes that have arrived since the last call. Returns the knowledge if it is new, and messages for
    /// the log.
    pub fn apply_changes(&mut self) -> (Option<ClusterKnowledge>, Vec<String>) {
        let (mut is_new, mut messages) = (false, Vec::new());
        while let Ok(change) = self.change_receiver.try_recv() {
            match change {
                KnowledgeChange::Failed(reason) => messages.push(reason),
                KnowledgeChange::Listed(kind, objects) => {
                    is_new = true;
                    self.remove_kind(kind);
                    objects
                        .into_iter()
                        .for_each(|object| self.insert(kind, object, &mut messages));
                }
                KnowledgeChange::Changed(kind, object) => {
                    is_new = true;
                    self.insert(kind, object, &mut messages);
                }
                KnowledgeChange::Deleted(kind, object) => {
                    is_new = true;
                    self.remove(kind, object_name(&object));
                }
            }
        }
        (is_new.then(|| self.knowledge.clone()), messages)
    }

    /// Adds an object. An invalid object is skipped, and its earlier content is removed.
    fn insert(&mut self, kind: &str, mut object: Value, messages: &mut Vec<String>) {
        let name = object_name(&object).to_string();
        self.remove(kind, &name);
        // Lists may leave out what all of their objects share.
        if let Some(fields) = object.as_object_mut() {
            fields.entry("kind").or_insert_with(|| kind.into());
        }
        let object_label = format!("{kind} {name}");
        match insert_object(object, &mut self.knowledge) {
            Ok(()) => drop(self.refusals.remove(&object_label)),
            Err(error) => {
                let reason = format!("{error:#}");
                if self.refusals.get(&object_label) != Some(&reason) {
                    messages.push(format!("{object_label}: skipped: {reason}"));
                    self.refusals.insert(object_label, reason);
                }
            }
        }
    }

    fn remove(&mut self, kind: &str, name: &str) {
        if kind == RESOURCES[0].0 {
            self.knowledge.profiles.remove(name);
            self.knowledge.images.retain(|_, profile| profile != name);
        } else {
            self.knowledge.nodes.remove(name);
        }
    }

    fn remove_kind(&mut self, kind: &str) {
        if kind == RESOURCES[0].0 {
            self.knowledge.profiles.clear();
            self.knowledge.images.clear();
        } else {
            self.knowledge.nodes.clear();
        }
    }
}

fn object_name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or("")
}

/// One page of a list.
#[derive(Deserialize)]
struct ObjectPage {
    metadata: PageMetadata,
    #[serde(default)]
    items: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    resource_version: String,
    #[serde(rename = "continue")]
    next_page: Option<String>,
}

/// One line of a watch.
#[derive(Deserialize)]
struct WatchLine {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

enum WatchEnd {
    /// The server closed it, as it does every few minutes.
    Closed,
    /// The version is too old.
    Expired,
    /// The command ends.
    Stopped,
}

struct ResourceWatch<'a> {
    server: &'a ApiServer,
    kind: &'static str,
    plural: &'static str,
    max_silence: Duration,
    change_sender: &'a SyncSender<KnowledgeChange>,
}

impl ResourceWatch<'_> {
    /// Lists and watches until the receiver of the changes no longer exists.
    fn follow(&self) -> Result<(), SendError<KnowledgeChange>> {
        let mut pause = FIRST_PAUSE;
        let mut version: Option<String> = None;
        loop {
            let start_time = Instant::now();
            let outcome = match &mut version {
                None => match self.list() {
                    Ok((objects, listed_version)) => {
                        self.change_sender
                            .send(KnowledgeChange::Listed(self.kind, objects))?;
                        version = Some(listed_version);
                        pause = FIRST_PAUSE;
                        continue;
                    }
                    Err(error) => Err(error),
                },
                Some(last_version) => self.watch(last_version),
            };
            match outcome {
                Ok(WatchEnd::Stopped) => return Ok(()),
                Ok(WatchEnd::Expired) => version = None,
                Ok(WatchEnd::Closed) => pause = FIRST_PAUSE,
                Err(error) => {
                    let reason = format!("{}: {error:#}; asking again", self.plural);
                    self.change_sender.send(KnowledgeChange::Failed(reason))?;
                }
            }
            // The interval grows as long as the server ends the watch, or fails, at once.
            if start_time.elapsed() < pause {
                std::thread::sleep(pause);
                pause = (2 * pause).min(MAX_PAUSE);
            }
        }
    }

    fn list(&self) -> anyhow::Result<(Vec<Value>, String)> {
        let (mut objects, mut page_query) = (Vec::new(), String::new());
        for _ in 0..MAX_PAGES {
            let path = format!(
                "{RESOURCE_PATH}/{}?limit={OBJECTS_PER_PAGE}{page_query}",
                self.plural
            );
            let response = self.server.get(&path, LIST_DEADLINE)?;
            ensure!(
                response.status == 200,
                "found status {}, expected 200",
                response.status
            );
            let page: ObjectPage =
                serde_json::from_reader(BufReader::new(response.take(MAX_PAGE_BYTES)))
                    .context("expected a list of objects")?;
            objects.extend(page.items);
            match page.metadata.next_page.filter(|next| !next.is_empty()) {
                None => return Ok((objects, page.metadata.resource_version)),
                Some(token) => page_query = format!("&continue={}", percent_encode(&token)),
            }
        }
        anyhow::bail!("found more than {MAX_PAGES} pages, expected fewer")
    }

    /// Follows changes from a version, which advances with them.
    fn watch(&self, version: &mut String) -> anyhow::Result<WatchEnd> {
        let path = format!(
            "{RESOURCE_PATH}/{}?watch=true&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={}",
            self.plural,
            percent_encode(version),
            self.max_silence.as_secs()
        );
        let response = self.server.get(&path, self.max_silence)?;
        if response.status == 410 {
            return Ok(WatchEnd::Expired);
        }
        ensure!(
            response.status == 200,
            "found status {}, expected 200",
            response.status
        );
        let mut lines = BufReader::new(response);
        loop {
            let mut line = Vec::new();
            (&mut lines)
                .take(MAX_OBJECT_BYTES)
                .read_until(b'\n', &mut line)?;
            if line.is_empty() {
                return Ok(WatchEnd::Closed);
            }
            let WatchLine { kind, object } =
                serde_json::from_slice(&line).context("expected a line of a watch")?;
            if kind == "ERROR" {
                let (code, message) = (&object["code"], object["message"].as_str().unwrap_or(""));
                ensure!(code == 410, "the watch ended with {code}: {message}");
                return Ok(WatchEnd::Expired);
            }
            if let Some(new_version) = object["metadata"]["resourceVersion"].as_str() {
                *version = new_version.to_string();
            }
            let change = match kind.as_str() {
                "ADDED" | "MODIFIED" => KnowledgeChange::Changed(self.kind, object),
                "DELETED" => KnowledgeChange::Deleted(self.kind, object),
                _ => continue,
            };
            if self.change_sender.send(change).is_err() {
                return Ok(WatchEnd::Stopped);
            }
        }
    }
}

fn percent_encode(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| {
            if is_plain(byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}
