//! Who runs a task now: a file that appears whole, is touched while its owner lives, and is taken over when it does not.
//!
//! Owners of the same boot and process namespace are looked up; others are believed as long as they touch their claim.
//! A frozen owner is taken over too, and its task runs twice: the store compares the results.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::SweepError;
use crate::failures::{FailedAttempt, FailureKind};
use crate::manifest::SweepTaskId;
use crate::owner::ClaimOwner;
use crate::store::{Store, link, names};

/// A task whose workers died so often is given up: it may be what killed them.
pub const DEATHS_AT_MOST: usize = 5;

/// What came of claiming a task.
pub enum ClaimOutcome<'a> {
    /// This process holds it until the value is dropped.
    Acquired(ClaimGuard<'a>),
    /// Its holder, in words.
    HeldByOther(String),
}

/// A claim that is given back when dropped.
pub struct ClaimGuard<'a> {
    store: &'a Store,
    path: PathBuf,
}

impl Drop for ClaimGuard<'_> {
    fn drop(&mut self) {
        self.store.heart.release(&self.path);
        // It may have been taken over while this process was frozen; then it is not ours to remove.
        if owner_of(&self.path).is_some_and(|owner| owner == self.store.owner) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn owner_of(path: &Path) -> Option<ClaimOwner> {
    serde_json::from_str(&fs::read_to_string(path).ok()?).ok()
}

impl Store {
    fn claim_path(&self, id: SweepTaskId) -> PathBuf {
        self.folder().join(format!("claims/{id}"))
    }

    /// Claims a task, or says who has it. A dead owner's claim is taken over, and its death noted.
    pub(crate) fn claim(&self, id: SweepTaskId) -> Result<ClaimOutcome<'_>, SweepError> {
        let path = self.claim_path(id);
        let fresh = self.partial(&format!("{id}.claim"));
        let text = serde_json::to_string(&self.owner).expect("texts and numbers can be written");
        fs::write(&fresh, text).map_err(SweepError::io(&path))?;
        let mut claimed = link(&fresh, &path);
        if claimed.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
            if let Some(living) = self.living(id) {
                let _ = fs::remove_file(&fresh);
                return Ok(ClaimOutcome::HeldByOther(living));
            }
            self.bury(id)?;
            claimed = link(&fresh, &path);
        }
        let _ = fs::remove_file(&fresh);
        match claimed {
            Ok(()) => {
                self.heart.hold(&path);
                Ok(ClaimOutcome::Acquired(ClaimGuard { store: self, path }))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(ClaimOutcome::HeldByOther("another worker".into()))
            }
            Err(error) => Err(SweepError::io(&path)(error)),
        }
    }

    /// Who runs the task now, in words; `None` where nobody does, or its owner is gone.
    pub(crate) fn living(&self, id: SweepTaskId) -> Option<String> {
        let path = self.claim_path(id);
        let touched = fs::metadata(&path).ok()?.modified().ok()?;
        let owner = owner_of(&path);
        let dead = owner.as_ref().and_then(|owner| owner.is_alive(&self.owner)) == Some(false);
        let now = self.now().unwrap_or(touched);
        let stale = now.duration_since(touched).is_ok_and(|age| age > self.stale_after);
        let words = owner.map_or("somebody".to_string(), |owner| owner.to_string());
        (!dead && !stale).then_some(words)
    }

    /// Time by the clock of whoever keeps the files.
    fn now(&self) -> Option<std::time::SystemTime> {
        let clock = self.folder().join(format!("partial/clock.{}.{}.0", self.owner.host, self.owner.pid));
        fs::write(&clock, b"").ok()?;
        let now = fs::metadata(&clock).ok()?.modified().ok();
        let _ = fs::remove_file(&clock);
        now
    }

    /// Takes a dead owner's claim away and notes the death.
    fn bury(&self, id: SweepTaskId) -> Result<(), SweepError> {
        let path = self.claim_path(id);
        let owner = owner_of(&path);
        let aside = self.partial(&format!("{id}.dead"));
        if fs::rename(&path, &aside).is_err() {
            return Ok(()); // somebody else buried it
        }
        let _ = fs::remove_file(&aside);
        let who = owner.map_or("its worker".to_string(), |owner| owner.to_string());
        let what = format!("{who} died or froze while it ran the task");
        self.record_attempt(id, &FailedAttempt::now(FailureKind::Death, what, &self.owner))
    }

    /// Ids that somebody claims, dead or alive.
    pub(crate) fn claimed(&self) -> Result<Vec<SweepTaskId>, SweepError> {
        Ok(names(&self.folder().join("claims"))?.filter_map(|name| name.parse().ok()).collect())
    }

    /// Removes claims on finished tasks: a worker that was killed after its result leaves one, and nobody claims a
    /// finished task again. Another that still runs the task compares its result without a claim.
    pub(crate) fn remove_claims_on(&self, finished: &BTreeSet<SweepTaskId>) -> Result<(), SweepError> {
        for id in self.claimed()?.into_iter().filter(|id| finished.contains(id)) {
            let _ = fs::remove_file(self.claim_path(id));
        }
        Ok(())
    }

    /// Tasks that somebody runs now.
    ///
    /// # Errors
    /// The folder of claims cannot be read.
    pub fn running(&self) -> Result<Vec<(SweepTaskId, String)>, SweepError> {
        Ok(self.claimed()?.into_iter().filter_map(|id| Some((id, self.living(id)?))).collect())
    }
}

/// Deaths are as many as were noted, and one more where a dead owner's claim still stands.
pub(crate) fn too_many_deaths(attempts: &[FailedAttempt]) -> bool {
    attempts.iter().filter(|attempt| attempt.ending == FailureKind::Death).count() >= DEATHS_AT_MOST
}
