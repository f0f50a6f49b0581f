//! The tasks of one site, whose partitions and rotation are searched.

use std::cell::Cell;

use super::TASKS_PER_SCORE;
use crate::auto::model::layout::{GangRotation, PartitionMembers};
use crate::auto::model::problem::PlanningProblem;
use crate::auto::model::score::{LayoutScore, SiteScorer};
use crate::auto::model::score_cache::ScoreCache;

/// Tasks of one site, for which partitions and a rotation are searched.
pub struct SiteTasks<'a> {
    pub problem: &'a PlanningProblem,
    pub site: usize,
    pub members: &'a [usize],
    pub split_shares: &'a [f64],
    /// Remaining evaluations.
    pub remaining_scores: &'a Cell<usize>,
    pub score_cache: &'a ScoreCache,
}

impl SiteTasks<'_> {
    pub fn score(
        &self,
        partitions: &[PartitionMembers],
        rotation: Option<&GangRotation>,
    ) -> LayoutScore {
        let cost = 1 + self.members.len() / TASKS_PER_SCORE;
        self.remaining_scores
            .set(self.remaining_scores.get().saturating_sub(cost));
        let (problem, site, members, split_shares) =
            (self.problem, self.site, self.members, self.split_shares);
        SiteScorer {
            problem,
            site,
            members,
            split_shares,
            partitions,
            rotation,
        }
        .score(self.score_cache)
    }
}
