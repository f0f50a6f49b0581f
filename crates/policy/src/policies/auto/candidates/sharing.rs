//! Sharing: tasks that share data run on one cache.

use std::collections::BTreeMap;

use super::PlanSearch;
use crate::policies::auto::model::layout::SiteLayout;

impl PlanSearch<'_> {
    /// Puts each cluster on one site as far as there is room, and all other tasks wherever room is left.
    pub(super) fn cluster_sharers(&self, default: &SiteLayout) -> SiteLayout {
        let movable = self.movable_tasks();
        let mut clusters: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &index in &movable {
            if let Some(cluster) = self.problem.tasks[index].cluster {
                clusters.entry(cluster).or_default().push(index);
            }
        }
        let mut order: Vec<Vec<usize>> = clusters.into_values().collect();
        order.sort_by_key(|members| std::cmp::Reverse(members.len()));
        let mut free = self.free_seats();
        let mut home = default.site_of.clone();
        for index in self.problem.known_tasks().filter(|index| !movable.contains(index)) {
            if let Some(site) = home[index] {
                free[site] = free[site].saturating_sub(1);
            }
        }
        for members in &order {
            let near = |site: usize| members.iter().filter(|&&at| default.site_of[at] == Some(site)).count();
            let fits = |site: usize| free[site].min(members.len());
            let best = (0..free.len()).reduce(|a, b| if (fits(b), near(b)) > (fits(a), near(a)) { b } else { a });
            let Some(site) = best else { continue };
            for &index in members {
                let to = if free[site] > 0 { Some(site) } else { (0..free.len()).find(|&other| free[other] > 0) };
                if let Some(to) = to {
                    free[to] -= 1;
                    home[index] = Some(to);
                }
            }
        }
        for index in movable.into_iter().filter(|&index| self.problem.tasks[index].cluster.is_none()) {
            let stays = home[index].filter(|&site| free[site] > 0);
            let most = (0..free.len()).reduce(|a, b| if free[b] > free[a] { b } else { a });
            if let Some(site) = stays.or(most) {
                free[site] = free[site].saturating_sub(1);
                home[index] = Some(site);
            }
        }
        SiteLayout::unpartitioned(self.problem, home, true)
    }
}
