//! Sharing: tasks that share data run on one cache.

use std::collections::BTreeMap;

use super::PlanSearch;
use crate::policies::auto::model::layout::SiteLayout;

impl PlanSearch<'_> {
    /// Puts each cluster onto one site as far as there is room, and all other tasks where room is left.
    pub(super) fn clustered(&self, default: &SiteLayout) -> SiteLayout {
        let movable = self.movable();
        let mut clusters: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &at in &movable {
            if let Some(cluster) = self.scene.tasks[at].cluster {
                clusters.entry(cluster).or_default().push(at);
            }
        }
        let mut order: Vec<Vec<usize>> = clusters.into_values().collect();
        order.sort_by_key(|members| std::cmp::Reverse(members.len()));
        let mut free = self.free_seats();
        let mut home = default.site_of.clone();
        for at in self.scene.known().filter(|at| !movable.contains(at)) {
            if let Some(site) = home[at] {
                free[site] = free[site].saturating_sub(1);
            }
        }
        for members in &order {
            let near = |site: usize| members.iter().filter(|&&at| default.site_of[at] == Some(site)).count();
            let fits = |site: usize| free[site].min(members.len());
            let best = (0..free.len()).reduce(|a, b| if (fits(b), near(b)) > (fits(a), near(a)) { b } else { a });
            let Some(site) = best else { continue };
            for &at in members {
                let to = if free[site] > 0 { Some(site) } else { (0..free.len()).find(|&other| free[other] > 0) };
                if let Some(to) = to {
                    free[to] -= 1;
                    home[at] = Some(to);
                }
            }
        }
        for at in movable.into_iter().filter(|&at| self.scene.tasks[at].cluster.is_none()) {
            let stays = home[at].filter(|&site| free[site] > 0);
            let most = (0..free.len()).reduce(|a, b| if free[b] > free[a] { b } else { a });
            if let Some(site) = stays.or(most) {
                free[site] = free[site].saturating_sub(1);
                home[at] = Some(site);
            }
        }
        SiteLayout::at(self.scene, home, true)
    }
}
