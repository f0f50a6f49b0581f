//! The tasks of one site, whose partitions and rotation are searched.

use super::{PlanSearch, TASKS_PER_SCORE};
use crate::auto::model::layout::{GangRotation, PartitionMembers};
use crate::auto::model::program_model::ProgramModel;
use crate::auto::model::score::{LayoutScore, SiteScorer, split_shares};
use crate::auto::model::sites::CacheSite;

/// Tasks of one site, for which partitions and a rotation are searched.
pub struct SiteTasks<'a> {
    pub search: &'a PlanSearch<'a>,
    pub site: usize,
    pub members: &'a [usize],
    split_shares: Vec<f64>,
}

impl<'a> SiteTasks<'a> {
    pub fn new(
        search: &'a PlanSearch<'_>,
        site_by_task: &[Option<usize>],
        site: usize,
        members: &'a [usize],
    ) -> Self {
        SiteTasks {
            search,
            site,
            members,
            split_shares: split_shares(search.problem, site_by_task, members, site),
        }
    }

    pub fn score(
        &self,
        partitions: &[PartitionMembers],
        rotation: Option<&GangRotation>,
    ) -> LayoutScore {
        self.search.spend(1 + self.members.len() / TASKS_PER_SCORE);
        let site_scorer = SiteScorer {
            problem: self.search.problem,
            site: self.site,
            members: self.members,
            split_shares: &self.split_shares,
            partitions,
            rotation,
        };
        site_scorer.score(self.search.score_cache)
    }

    /// The key of the score, by which the search compares.
    pub fn key(&self, partitions: &[PartitionMembers], rotation: Option<&GangRotation>) -> f64 {
        self.search
            .comparator
            .score_key(self.score(partitions, rotation))
    }

    pub fn cache_site(&self) -> &CacheSite {
        &self.search.problem.sites[self.site]
    }

    pub fn program(&self, index: usize) -> Option<&ProgramModel> {
        self.search.problem.tasks[index].program.as_ref()
    }
}
