//! Input of the assignment of clusters to chips, and the plan that follows from its result.

use cachemate_core::ReasonKind;

use super::*;

/// Threads, clusters and chips by number, as the input of [`assign`].
pub(super) struct ClusterAssignmentInput {
    pub(super) tasks: Vec<TaskId>,
    pub(super) threads: Vec<ThreadToPlace>,
    pub(super) clusters: Vec<Vec<usize>>,
    pub(super) unclustered_threads: Vec<usize>,
    pub(super) chips: Vec<Chip>,
}

impl ClusterAssignmentInput {
    pub(super) fn new(
        threads: &[&TaskSample],
        clusters: &[Option<usize>],
        domains: &[CpuSet],
        current_placement: &BTreeMap<TaskId, CpuSet>,
        view: &View<'_>,
    ) -> Self {
        let chip_of = |task: &TaskSample| {
            let longest_stay = task
                .on_cpu_ns
                .iter()
                .max_by_key(|(cpu, ns)| (*ns, std::cmp::Reverse(*cpu)));
            let cpu = longest_stay.map(|(cpu, _)| *cpu).or(task.cpu)?;
            domains.iter().position(|domain| domain.contains(cpu.0))
        };

        // Counts unmovable threads, and threads of other processes that an earlier round placed there.
        let count_fixed = |chip: usize| {
            let is_fixed = |task: &&TaskSample| match current_placement.get(&task.task) {
                Some(cpus) => {
                    cpus.is_subset(&domains[chip])
                        && threads.iter().all(|thread| thread.task != task.task)
                }
                None => task.unmovable && !task.exited && chip_of(task) == Some(chip),
            };
            view.observation.tasks.iter().filter(is_fixed).count()
        };

        let count = clusters.iter().flatten().max().map_or(0, |last| last + 1);
        let mut members = vec![Vec::new(); count];
        for (at, cluster) in clusters.iter().enumerate() {
            if let Some(cluster) = *cluster {
                members[cluster].push(at);
            }
        }

        ClusterAssignmentInput {
            tasks: threads.iter().map(|task| task.task).collect(),
            threads: threads
                .iter()
                .map(|task| ThreadToPlace {
                    chip: chip_of(task),
                    is_fixed: task.unmovable,
                })
                .collect(),
            clusters: members,
            unclustered_threads: (0..threads.len())
                .filter(|&index| clusters[index].is_none())
                .collect(),
            chips: (0..domains.len())
                .map(|index| Chip {
                    cpu_count: domains[index].count(),
                    fixed_threads: count_fixed(index),
                })
                .collect(),
        }
    }

    pub(super) fn assign(&self, max_imbalance: f64) -> Assignment {
        assign(
            &self.threads,
            &self.clusters,
            &self.unclustered_threads,
            &self.chips,
            max_imbalance,
        )
    }

    /// `None` for a thread that the assignment leaves where it is.
    pub(super) fn cpus_by_thread(
        &self,
        assignment: &Assignment,
        domains: &[CpuSet],
        within_chip: ChipPlacement,
        view: &View<'_>,
    ) -> Vec<Option<CpuSet>> {
        let mut assigned_counts = vec![0; domains.len()];
        // One CPU of every core comes first, because contexts of a core share its pipeline and its first-level caches.
        let chip_cpus: Vec<Vec<u32>> = domains
            .iter()
            .map(|domain| cpus_in_core_order(domain, view))
            .collect();
        let cpus_on_chip = |chip: usize, dealt: &mut Vec<usize>| match within_chip {
            ChipPlacement::Free => domains[chip].clone(),
            ChipPlacement::Spread => {
                dealt[chip] += 1;
                [chip_cpus[chip][(dealt[chip] - 1) % chip_cpus[chip].len()]]
                    .into_iter()
                    .collect()
            }
        };

        assignment
            .chip_by_thread
            .iter()
            .map(|chip| chip.map(|chip| cpus_on_chip(chip, &mut assigned_counts)))
            .collect()
    }

    /// The fraction of cycles in remote stalls that the assignment should remove, as a mean over all threads: each
    /// thread's own fraction times the share of its partners that it joins.
    pub(super) fn removed_stall_share(
        &self,
        assignment: &Assignment,
        view: &View<'_>,
        hit_cycles: f64,
    ) -> f64 {
        let stall_share_of = |thread_index: usize| {
            let sample = view
                .observation
                .tasks
                .iter()
                .find(|sample| sample.task == self.tasks[thread_index])?;
            remote_share(view, sample.process, hit_cycles)
        };

        let mut removed_stalls = 0.0;
        for members in &self.clusters {
            for &index in members {
                let partners = members.iter().filter(|&&partner| partner != index);
                let is_joined = |partner: &&usize| {
                    self.threads[**partner].chip != self.threads[index].chip
                        && assignment.chip_by_thread[**partner].is_some()
                        && assignment.chip_by_thread[**partner] == assignment.chip_by_thread[index]
                };
                let share =
                    partners.filter(is_joined).count() as f64 / (members.len() - 1).max(1) as f64;
                removed_stalls += share * stall_share_of(index).unwrap_or(0.0);
            }
        }
        removed_stalls / self.tasks.len().max(1) as f64
    }

    /// The cluster of every thread whose cluster has a chip; clusters are numbered from `first_number` on.
    pub(super) fn placed_clusters(
        &self,
        assignment: &Assignment,
        first_number: usize,
    ) -> BTreeMap<TaskId, usize> {
        let placed_clusters = (0..self.clusters.len())
            .filter(|&cluster| assignment.chip_of_cluster[cluster].is_some());
        let members = placed_clusters
            .enumerate()
            .flat_map(|(number, index)| self.clusters[index].iter().map(move |&t| (t, number)));
        members
            .map(|(thread, number)| (self.tasks[thread], first_number + number))
            .collect()
    }

    pub(super) fn placement_reasons(
        &self,
        assignment: &Assignment,
        domains: &[CpuSet],
        round: &SamplingRound,
    ) -> Vec<Reason> {
        let numbers = vec![
            ("samples_count".to_string(), round.sample_count as f64),
            ("sampling_cost_ns".to_string(), round.cost_ns as f64),
            (
                "remote_stall_percent".to_string(),
                100.0 * round.remote_share,
            ),
        ];

        let tasks_of = |members: &[usize]| {
            members
                .iter()
                .map(|&index| self.tasks[index])
                .collect::<Vec<_>>()
        };
        let placeholder_list = |count: usize| {
            (0..count)
                .map(|number| format!("{{{number}}}"))
                .collect::<Vec<_>>()
                .join(", ")
        };

        let mut reasons = Vec::new();
        for (members, chip) in self.clusters.iter().zip(&assignment.chip_of_cluster) {
            let tasks = tasks_of(members);
            let text = match chip {
                Some(chip) => {
                    format!(
                        "{} share data: together on CPUs {}",
                        placeholder_list(tasks.len()),
                        domains[*chip]
                    )
                }
                None => {
                    let task_list = placeholder_list(tasks.len());
                    format!(
                        "{task_list} share data but would unbalance one chip: not placed together"
                    )
                }
            };
            reasons.push(Reason {
                kind: ReasonKind::ClusterFound,
                tasks,
                text,
                numbers: numbers.clone(),
            });
        }

        if !self.unclustered_threads.is_empty() {
            let tasks = tasks_of(&self.unclustered_threads);
            let text = format!(
                "{} are in no cluster: they balance the loads of the chips",
                placeholder_list(tasks.len())
            );
            reasons.push(Reason::new(tasks, text, numbers));
        }
        reasons
    }
}

/// The CPUs of a chip: the first CPU of every core, then the second ones.
fn cpus_in_core_order(domain: &CpuSet, view: &View<'_>) -> Vec<u32> {
    let core_of = |cpu: u32| {
        view.topology
            .cpus
            .iter()
            .find(|cpu_info| cpu_info.id.0 == cpu)
            .map(|cpu| cpu.core)
    };

    let cpus: Vec<u32> = domain.iter().collect();
    let rank_in_core = |index: usize| {
        cpus[..index]
            .iter()
            .filter(|&&sibling| core_of(sibling) == core_of(cpus[index]))
            .count()
    };
    let mut ranked_cpus: Vec<(usize, u32)> = cpus
        .iter()
        .enumerate()
        .map(|(index, &cpu)| (rank_in_core(index), cpu))
        .collect();
    ranked_cpus.sort_unstable();
    ranked_cpus.into_iter().map(|(_, cpu)| cpu).collect()
}
