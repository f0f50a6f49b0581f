//! Claims on tasks. A claim is a file that is created with its full content, is touched as long as its owner lives, and
//! is taken over after the owner's death.
//!
//! Owners in the same boot and process namespace are checked directly; other owners count as alive as long as they
//! touch their claim. The claim of a frozen owner is also taken over, so its task may run twice; the store therefore
//! compares results.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::SweepError;
use crate::failures::{FailedAttempt, FailureKind};
use crate::manifest::SweepTaskId;
use crate::owner::ClaimOwner;
use crate::store::{Store, link_if_absent};

/// Number of deaths of workers after which a task is abandoned, because the task may have killed them.
pub const MAX_DEATHS: usize = 5;

/// Outcome of claiming a task.
pub enum ClaimOutcome<'a> {
    /// This process holds the claim until the value is dropped.
    Acquired(ClaimGuard<'a>),
    /// Another process holds the claim; the text names it for display.
    HeldByOther(String),
}

/// A claim that is released when dropped.
pub struct ClaimGuard<'a> {
    store: &'a Store,
    id: SweepTaskId,
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        self.store.heartbeat.release(&claim_path(self.id));
        // The claim must not be removed if another process took it over while this process was frozen.
        if self
            .store
            .claim_owner(self.id)
            .is_some_and(|owner| owner == self.store.owner)
        {
            let _ = self.store.remove_claim(self.id);
        }
    }
}

const CLAIMS_DIR: &str = "claims";
/// Maximum size of a claim, which is one line of JSON.
const CLAIM_BYTES_LIMIT: u64 = 4 << 10;

fn claim_path(id: SweepTaskId) -> String {
    format!("{CLAIMS_DIR}/{id}")
}

impl Store {
    fn claim_owner(&self, id: SweepTaskId) -> Option<ClaimOwner> {
        serde_json::from_str(&self.claim_text(&claim_path(id))?).ok()
    }

    fn claim_text(&self, path: &str) -> Option<String> {
        self.root()
            .read_text(Path::new(path), CLAIM_BYTES_LIMIT)
            .ok()?
    }

    fn remove_claim(&self, id: SweepTaskId) -> Result<(), SweepError> {
        self.dir(CLAIMS_DIR)?
            .remove(&id.to_string())
            .map_err(self.io_error(CLAIMS_DIR))
    }

    /// Claims a task, or returns its owner. A dead owner's claim is taken over, and its death is recorded.
    pub(crate) fn claim(&self, id: SweepTaskId) -> Result<ClaimOutcome<'_>, SweepError> {
        let claim_json =
            serde_json::to_string(&self.owner).expect("texts and numbers can be written");
        let (claims_dir, name) = (self.dir(CLAIMS_DIR)?, id.to_string());
        let (partial_dir, partial_name) =
            self.write_partial(&format!("{id}-claim"), claim_json.as_bytes())?;
        let mut link_result = link_if_absent(&partial_dir, &partial_name, &claims_dir, &name);
        if link_result
            .as_ref()
            .is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists)
        {
            let dead_claim = self.claim_text(&claim_path(id));
            if let Some(owner_name) = self.live_owner_name(id) {
                let _ = partial_dir.remove(&partial_name);
                return Ok(ClaimOutcome::HeldByOther(owner_name));
            }
            self.remove_dead_claim(id, dead_claim)?;
            link_result = link_if_absent(&partial_dir, &partial_name, &claims_dir, &name);
        }
        let _ = partial_dir.remove(&partial_name);
        match link_result {
            Ok(()) => {
                self.heartbeat.hold(&claim_path(id));
                Ok(ClaimOutcome::Acquired(ClaimGuard { store: self, id }))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(ClaimOutcome::HeldByOther("another worker".into()))
            }
            Err(error) => Err(self.io_error(CLAIMS_DIR)(error)),
        }
    }

    /// Returns the name of the live owner of the task's claim, for display; `None` if the claim has no live owner.
    pub(crate) fn live_owner_name(&self, id: SweepTaskId) -> Option<String> {
        let touched_at = self.modified_time(&claim_path(id))?;
        let owner = self.claim_owner(id);
        let is_dead = owner.as_ref().and_then(|owner| owner.is_alive(&self.owner)) == Some(false);
        let now = self.server_time().unwrap_or(touched_at);
        let is_stale = now
            .duration_since(touched_at)
            .is_ok_and(|age| age > self.stale_after);
        let owner_name = owner.map_or("another worker".to_string(), |owner| owner.to_string());
        (!is_dead && !is_stale).then_some(owner_name)
    }

    /// Current time by the clock of the file server; a command that only reports uses its own host's clock.
    fn server_time(&self) -> Option<std::time::SystemTime> {
        if self.is_read_only() {
            return Some(std::time::SystemTime::now());
        }
        let (partial_dir, clock_name) = self.write_partial("clock", b"").ok()?;
        let now = self.modified_time(&format!("partial/{clock_name}"));
        let _ = partial_dir.remove(&clock_name);
        now
    }

    /// Removes a dead owner's claim, whose content is `dead_claim`, and records the death. A worker that was faster may
    /// have put its own claim in the place: that one is linked again.
    fn remove_dead_claim(
        &self,
        id: SweepTaskId,
        dead_claim: Option<String>,
    ) -> Result<(), SweepError> {
        let (claims_dir, partial_dir) = (self.dir(CLAIMS_DIR)?, self.dir("partial")?);
        let (host, pid) = (&self.owner.host, self.owner.pid);
        let dead_name = format!("{id}-dead.{host}.{pid}.0");
        if claims_dir
            .rename_into(&id.to_string(), &partial_dir, &dead_name)
            .is_err()
        {
            return Ok(()); // another worker was faster
        }
        let is_dead_claim = self.claim_text(&format!("partial/{dead_name}")) == dead_claim;
        if !is_dead_claim {
            let _ = link_if_absent(&partial_dir, &dead_name, &claims_dir, &id.to_string());
        }
        let _ = partial_dir.remove(&dead_name);
        if !is_dead_claim {
            return Ok(());
        }
        let owner: Option<ClaimOwner> =
            dead_claim.and_then(|text| serde_json::from_str(&text).ok());
        let owner_name = owner.map_or("its worker".to_string(), |owner| owner.to_string());
        let message = format!("{owner_name} died or froze while it ran the task");
        self.record_attempt(
            id,
            &FailedAttempt::from_owner(FailureKind::Death, message, &self.owner),
        )
    }

    /// Ids of tasks with a claim, whether or not the owner is alive.
    pub(crate) fn claimed_tasks(&self) -> Result<Vec<SweepTaskId>, SweepError> {
        Ok(self
            .names_in(CLAIMS_DIR)?
            .into_iter()
            .filter_map(|name| name.parse().ok())
            .collect())
    }

    /// Removes claims on finished tasks. A worker that is killed after publishing leaves such a claim, and a finished
    /// task is never claimed again. A worker that still runs such a task compares its result without needing the
    /// claim.
    pub(crate) fn remove_claims_on(
        &self,
        finished_ids: &BTreeSet<SweepTaskId>,
    ) -> Result<(), SweepError> {
        for id in self
            .claimed_tasks()?
            .into_iter()
            .filter(|id| finished_ids.contains(id))
        {
            let _ = self.remove_claim(id);
        }
        Ok(())
    }

    /// Tasks whose claims have live owners, with the owner's name.
    ///
    /// # Errors
    /// The directory of claims cannot be read.
    pub fn running_tasks(&self) -> Result<Vec<(SweepTaskId, String)>, SweepError> {
        Ok(self
            .claimed_tasks()?
            .into_iter()
            .filter_map(|id| Some((id, self.live_owner_name(id)?)))
            .collect())
    }
}

/// Have the workers of a task died too often? Only recorded deaths count.
pub(crate) fn has_too_many_deaths(attempts: &[FailedAttempt]) -> bool {
    attempts
        .iter()
        .filter(|attempt| attempt.ending == FailureKind::Death)
        .count()
        >= MAX_DEATHS
}
