//! Sharing: tasks that share data run on one cache.

use std::collections::BTreeMap;

use super::PlanSearch;
use crate::auto::model::layout::SiteLayout;

impl PlanSearch<'_> {
    /// Puts each cluster on one site as far as there is room, and all other tasks wherever room is left.
    pub(super) fn cluster_sharers(&self, default: &SiteLayout) -> SiteLayout {
        let movable_tasks = self.movable_tasks();
        let mut clusters: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &index in &movable_tasks {
            if let Some(cluster) = self.problem.tasks[index].cluster {
                clusters.entry(cluster).or_default().push(index);
            }
        }
        let mut ordered_clusters: Vec<Vec<usize>> = clusters.into_values().collect();
        ordered_clusters.sort_by_key(|members| std::cmp::Reverse(members.len()));
        let mut free_seats = self.seats_per_site();
        let mut site_by_task = default.site_by_task.clone();
        for index in self
            .problem
            .known_tasks()
            .filter(|index| !movable_tasks.contains(index))
        {
            if let Some(site) = site_by_task[index] {
                free_seats[site] = free_seats[site].saturating_sub(1);
            }
        }

        for members in &ordered_clusters {
            let present_members = |site: usize| {
                members
                    .iter()
                    .filter(|&&at| default.site_by_task[at] == Some(site))
                    .count()
            };

            let fitting_members = |site: usize| free_seats[site].min(members.len());
            let best_site = (0..free_seats.len()).reduce(|a, b| {
                if (fitting_members(b), present_members(b))
                    > (fitting_members(a), present_members(a))
                {
                    b
                } else {
                    a
                }
            });
            let Some(site) = best_site else { continue };

            for &index in members {
                let target = if free_seats[site] > 0 {
                    Some(site)
                } else {
                    (0..free_seats.len()).find(|&other_site| free_seats[other_site] > 0)
                };
                if let Some(target) = target {
                    free_seats[target] -= 1;
                    site_by_task[index] = Some(target);
                }
            }
        }

        for index in movable_tasks
            .into_iter()
            .filter(|&index| self.problem.tasks[index].cluster.is_none())
        {
            let current_site = site_by_task[index].filter(|&site| free_seats[site] > 0);
            let freest_site = (0..free_seats.len())
                .reduce(|a, b| if free_seats[b] > free_seats[a] { b } else { a });
            if let Some(site) = current_site.or(freest_site) {
                free_seats[site] = free_seats[site].saturating_sub(1);
                site_by_task[index] = Some(site);
            }
        }
        SiteLayout::without_partitions(self.problem, site_by_task, true)
    }
}
