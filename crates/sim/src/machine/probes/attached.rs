//! Probes attached to a task's thread in the hardware: traces, samples, reuse times and super sets.

use cachemate_core::{
    AddressKind, CacheLevel, CpuId, ProbeEvidence, ProbeKind, ProcessId, RefusalReason,
    ReuseSample, SamplerModel, SuperSetCount, TaskId,
};

use super::super::SimMachine;
use super::ProbeRefusal;
use crate::hw::{ActivityProbe, SampleProbe, TaskCounters, TraceProbe, WatchProbe};
use crate::os::queues::Slot;

/// Mean number of accesses between two watched locations, before scaling.
const ACCESSES_PER_WATCH: u64 = 1_000;

enum AttachedKind {
    Trace {
        entries: u32,
        includes_code: bool,
        counters_before: Box<TaskCounters>,
    },
    Samples {
        processes: Vec<ProcessId>,
        sample_period: u32,
        counts_remote_only: bool,
        max_samples: u32,
        taken_samples: u32,
        event_count: u64,
    },
    /// Watched locations; `all_set_cycle` is the cycle at which the last one was set.
    Reuses {
        locations: u32,
        all_set_cycle: Option<u64>,
    },
    Activity {
        level: CacheLevel,
        super_sets: u32,
    },
}

pub(super) struct AttachedProbe {
    kind: AttachedKind,
    slots: Vec<Slot>,
    start_cycle: u64,
    /// Number of interrupt ticks of each slot before the probe.
    ticks_before: Vec<u64>,
}

impl AttachedProbe {
    pub fn new(probe_kind: &ProbeKind, machine: &mut SimMachine) -> Result<Self, ProbeRefusal> {
        let live_slot = |task: &TaskId| {
            let exited_refusal = (RefusalReason::NotFound, format!("{task:?} has ended"));
            machine
                .slot_of(*task)
                .filter(|_| !machine.has_exited(*task))
                .ok_or(exited_refusal)
        };

        let (kind, slots) = match probe_kind {
            ProbeKind::MissTrace {
                task,
                entries,
                includes_code: code,
            } => {
                let slot = live_slot(task)?;
                let start_counters = Box::new(machine.system.task_counters(slot));
                (
                    AttachedKind::Trace {
                        entries: (*entries).max(1),
                        includes_code: *code,
                        counters_before: start_counters,
                    },
                    vec![slot],
                )
            }
            ProbeKind::AccessSamples {
                processes,
                sample_period: one_in,
                remote_only,
                max_samples: at_most,
            } => {
                // The number is not scaled, because the cost of each sample is, and the scale must apply to a round's
                // share of the time only once.
                let max_samples = (*at_most).max(1);
                let (processes, one_in, remote_only) =
                    (processes.clone(), (*one_in).max(1), *remote_only);
                (
                    AttachedKind::Samples {
                        processes,
                        sample_period: one_in,
                        counts_remote_only: remote_only,
                        max_samples,
                        taken_samples: 0,
                        event_count: 0,
                    },
                    Vec::new(),
                )
            }
            ProbeKind::ReuseTimes { task, locations } => (
                AttachedKind::Reuses {
                    locations: (*locations).max(1),
                    all_set_cycle: None,
                },
                vec![live_slot(task)?],
            ),
            ProbeKind::SuperSets {
                tasks,
                level,
                super_sets,
            } => {
                if !machine.levels.contains(level)
                    || machine.spec.counters.sampler != SamplerModel::Ideal
                    || *super_sets == 0
                {
                    return Err((
                        RefusalReason::NotSupported,
                        format!("no super-set counts of {level:?} here"),
                    ));
                }

                let slots = tasks
                    .iter()
                    .map(live_slot)
                    .collect::<Result<Vec<Slot>, ProbeRefusal>>()?;
                (
                    AttachedKind::Activity {
                        level: *level,
                        super_sets: *super_sets,
                    },
                    slots,
                )
            }
            _ => {
                return Err((
                    RefusalReason::NotSupported,
                    "not a probe of a thread".to_string(),
                ));
            }
        };

        let mut attached_probe = AttachedProbe {
            kind,
            slots: Vec::new(),
            start_cycle: machine.system.now(),
            ticks_before: Vec::new(),
        };
        for slot in slots {
            if let Err(refusal) = attached_probe.attach_to_slot(slot, machine) {
                // The tasks before this one have the probe already, and would be busy for ever.
                attached_probe.end(machine);
                return Err(refusal);
            }
        }
        attached_probe.poll(machine);
        Ok(attached_probe)
    }

    fn attach_to_slot(&mut self, slot: Slot, machine: &mut SimMachine) -> Result<(), ProbeRefusal> {
        let one_in = machine.clock.scale_down(ACCESSES_PER_WATCH) as u32;
        // The models describe the last level, so the watched locations have the size of its lines.
        let cache_of_level = |level: CacheLevel| {
            machine
                .spec
                .caches
                .iter()
                .find(|cache| cache.level == level)
        };

        let last_level = machine.spec.last_level_cache();
        let doublings_from = |first: CacheLevel| {
            cache_of_level(first)
                .zip(last_level)
                .map_or(0, |(first, last)| {
                    last.line_bytes.ilog2() - first.line_bytes.ilog2()
                })
        };
        let (data_doublings, code_doublings) = (
            doublings_from(CacheLevel::L1Data),
            doublings_from(CacheLevel::L1Instruction),
        );
        let Some(thread) = machine.system.thread_mut(slot) else {
            return Ok(());
        };
        let probes = &mut thread.probes;
        let is_taken = match &self.kind {
            AttachedKind::Trace { .. } => probes.trace.is_some(),
            AttachedKind::Samples { .. } => probes.samples.is_some(),
            AttachedKind::Reuses { .. } => probes.watch.is_some(),
            AttachedKind::Activity { level, .. } => probes
                .activity
                .iter()
                .any(|activity| activity.level == *level),
        };
        if is_taken {
            return Err((
                RefusalReason::Busy,
                "the task already has a probe of this kind".to_string(),
            ));
        }
        match &self.kind {
            AttachedKind::Trace {
                entries,
                includes_code: code,
                ..
            } => {
                let (max_entries, logs_code) = (*entries, *code);
                probes.trace = Some(TraceProbe {
                    max_entries,
                    logs_code,
                    ..TraceProbe::default()
                });
            }
            AttachedKind::Samples {
                sample_period: one_in,
                counts_remote_only: remote_only,
                max_samples: at_most,
                ..
            } => {
                let (one_in, counts_remote_only, max_samples) = (*one_in, *remote_only, *at_most);
                probes.samples = Some(SampleProbe {
                    sample_period: one_in,
                    counts_remote_only,
                    max_samples,
                    ..SampleProbe::default()
                });
            }
            AttachedKind::Reuses { locations, .. } => {
                let locations = *locations;
                let watch = WatchProbe {
                    max_locations: locations,
                    watch_period: one_in,
                    data_line_doublings: data_doublings,
                    code_line_doublings: code_doublings,
                    ..WatchProbe::default()
                };
                probes.watch = Some(watch);
            }
            AttachedKind::Activity { level, super_sets } => probes
                .activity
                .push(new_activity_probe(*level, *super_sets)),
        }
        self.ticks_before.push(probes.cost_ticks);
        self.slots.push(slot);
        Ok(())
    }

    /// Checks the hardware, and returns whether all results are present.
    pub fn poll(&mut self, machine: &mut SimMachine) -> bool {
        self.attach_new_threads(machine);
        let slots = &self.slots;
        let have_all_exited = slots
            .iter()
            .all(|&slot| machine.system.task(slot).exited_cycle.is_some());
        let probes_of = |slot: Slot| machine.system.thread(slot).map(|thread| &thread.probes);

        match &mut self.kind {
            AttachedKind::Trace { entries, .. } => {
                let trace_probe = slots
                    .first()
                    .and_then(|&slot| probes_of(slot)?.trace.as_ref());
                have_all_exited
                    || trace_probe.is_none_or(|trace| trace.lines.len() >= *entries as usize)
            }
            AttachedKind::Samples {
                max_samples: at_most,
                taken_samples: taken,
                ..
            } => {
                let sample_count =
                    |slot: &Slot| Some(probes_of(*slot)?.samples.as_ref()?.samples.len());
                let new_count: usize = slots.iter().filter_map(sample_count).sum();
                *taken as usize + new_count >= *at_most as usize
            }
            AttachedKind::Reuses {
                locations,
                all_set_cycle: all_set,
            } => {
                let now = machine.system.now();
                let Some(watch) = slots
                    .first()
                    .and_then(|&slot| probes_of(slot)?.watch.as_ref())
                else {
                    return true;
                };
                if watch.watch_count >= *locations {
                    // A location that is not touched again for as long as it took to set all locations is abandoned.
                    let max_wait = all_set.get_or_insert(now).saturating_sub(self.start_cycle);
                    return have_all_exited
                        || watch.open_watches.is_empty()
                        || now >= all_set.unwrap_or(now) + max_wait;
                }

                have_all_exited
            }
            AttachedKind::Activity { .. } => have_all_exited,
        }
    }

    /// Attaches the probe to threads that arrived after the probe began.
    fn attach_new_threads(&mut self, machine: &mut SimMachine) {
        let AttachedKind::Samples { processes, .. } = &self.kind else {
            return;
        };

        let indices: Vec<usize> = processes
            .iter()
            .map(|process| machine.process_index(*process))
            .collect();
        let new_slots: Vec<Slot> = machine
            .tasks
            .iter()
            .map(|sim_task| sim_task.slot)
            .filter(|&slot| {
                indices.contains(&machine.system.task(slot).process) && !self.slots.contains(&slot)
            })
            .filter(|&slot| machine.system.task(slot).exited_cycle.is_none())
            .collect();
        for slot in new_slots {
            // A thread that another probe already samples is left to that probe.
            let _ = self.attach_to_slot(slot, machine);
        }
    }

    pub fn cost_cycles(&self, machine: &SimMachine) -> Vec<(Option<TaskId>, u64)> {
        let ticks_per_cycle = machine.ticks_per_cycle();
        let cost_of_slot = |(slot, earlier_ticks): (&Slot, &u64)| {
            let ticks = machine
                .system
                .thread(*slot)
                .map_or(*earlier_ticks, |thread| thread.probes.cost_ticks);
            (
                machine.task_of_slot.get(slot).copied(),
                ticks.saturating_sub(*earlier_ticks) / ticks_per_cycle,
            )
        };
        self.slots
            .iter()
            .zip(&self.ticks_before)
            .map(cost_of_slot)
            .collect()
    }

    /// The evidence at the end of a window.
    pub fn take_evidence(
        &mut self,
        machine: &mut SimMachine,
        is_complete: bool,
    ) -> Vec<ProbeEvidence> {
        match &self.kind {
            AttachedKind::Trace { .. } if is_complete => {
                self.take_trace(machine).into_iter().collect()
            }
            AttachedKind::Trace { .. } => Vec::new(),
            AttachedKind::Samples { .. } => self.take_samples(machine).into_iter().collect(),
            AttachedKind::Reuses { .. } => {
                self.take_reuses(machine, is_complete).into_iter().collect()
            }
            AttachedKind::Activity { .. } => self.take_activity(machine),
        }
    }

    fn take_trace(&mut self, machine: &mut SimMachine) -> Option<ProbeEvidence> {
        let AttachedKind::Trace {
            counters_before: before,
            ..
        } = &self.kind
        else {
            return None;
        };
        let slot = *self.slots.first()?;
        let elapsed_ns = machine
            .clock
            .to_nominal_ns(machine.system.now() - self.start_cycle);

        let counts = machine
            .system
            .task_counters(slot)
            .since(before)
            .all_event_counts(&machine.levels);
        let trace = machine.system.thread_mut(slot)?.probes.trace.take()?;
        let knows_losses = machine.spec.counters.sampler == SamplerModel::Ideal;
        let line_bytes = machine
            .spec
            .caches
            .iter()
            .find(|cache| cache.level == CacheLevel::L1Data)?
            .line_bytes;

        Some(ProbeEvidence::Trace {
            task: *machine.task_of_slot.get(&slot)?,
            space: AddressKind::Physical,
            line_bytes,
            lines: trace.lines,
            code_positions: trace.code_positions,
            lost: knows_losses.then_some(trace.lost_misses),
            counts,
            elapsed_ns,
        })
    }

    fn take_samples(&mut self, machine: &mut SimMachine) -> Option<ProbeEvidence> {
        let line_bytes = machine
            .spec
            .caches
            .iter()
            .find(|cache| cache.level == CacheLevel::L1Data)?
            .line_bytes;

        let scale = machine.clock.scale;
        let AttachedKind::Samples {
            sample_period: one_in,
            max_samples: at_most,
            taken_samples: taken,
            event_count: events,
            ..
        } = &mut self.kind
        else {
            return None;
        };
        let (mut new_samples, mut event_count) = (Vec::new(), 0);

        for slot in &self.slots {
            let task = machine.task_of_slot.get(slot).copied();
            let Some(probe) = machine
                .system
                .thread_mut(*slot)
                .and_then(|thread| thread.probes.samples.as_mut())
            else {
                continue;
            };
            event_count += probe.event_count;
            let drained_samples = std::mem::take(&mut probe.samples);
            probe.max_samples = probe
                .max_samples
                .saturating_sub(drained_samples.len() as u32)
                .max(1);
            new_samples.extend(drained_samples.into_iter().filter_map(|mut sample| {
                sample.task = task?;
                sample.at_ns *= scale;
                Some(sample)
            }));
        }

        new_samples.sort_by_key(|sample| sample.at_ns);
        new_samples.truncate((*at_most - *taken) as usize);
        *taken += new_samples.len() as u32;
        // Threads that have vanished take their events with them.
        let new_events = event_count.saturating_sub(std::mem::replace(events, event_count));
        let has_evidence = !new_samples.is_empty() || new_events > 0;
        has_evidence.then_some(ProbeEvidence::Samples {
            sample_period: *one_in,
            events: new_events,
            line_bytes,
            samples: new_samples,
        })
    }

    fn take_reuses(
        &mut self,
        machine: &mut SimMachine,
        is_complete: bool,
    ) -> Option<ProbeEvidence> {
        let slot = *self.slots.first()?;
        let task = *machine.task_of_slot.get(&slot)?;
        let (clock, ticks_per_cycle, now) = (
            machine.clock,
            machine.ticks_per_cycle(),
            machine.system.now(),
        );
        let watch = machine.system.thread_mut(slot)?.probes.watch.as_mut()?;
        let mut samples = std::mem::take(&mut watch.samples);
        samples
            .iter_mut()
            .for_each(|sample| sample.elapsed_ns *= clock.scale);
        if is_complete {
            let accesses = watch.accesses;
            samples.extend(std::mem::take(&mut watch.open_watches).into_iter().map(
                |(_, accesses_at_set, tick)| ReuseSample {
                    accesses: Some(accesses - accesses_at_set),
                    elapsed_ns: clock.to_nominal_ns(now.saturating_sub(tick / ticks_per_cycle)),
                    reused: false,
                },
            ));
        }
        (!samples.is_empty()).then_some(ProbeEvidence::Reuses { task, samples })
    }

    fn take_activity(&mut self, machine: &mut SimMachine) -> Vec<ProbeEvidence> {
        let AttachedKind::Activity { level, super_sets } = self.kind else {
            return Vec::new();
        };
        let mut evidence = Vec::new();
        for slot in &self.slots {
            let (task, cpu) = (
                machine.task_of_slot.get(slot).copied(),
                machine.system.dispatcher.task(*slot).last_cpu,
            );
            let Some(thread) = machine.system.thread_mut(*slot) else {
                continue;
            };
            let probe = thread
                .probes
                .activity
                .iter_mut()
                .find(|probe| probe.level == level);
            let counts =
                probe.map(|probe| std::mem::replace(probe, new_activity_probe(level, super_sets)));
            if let (Some(task), Some(cpu), Some(counts)) = (task, cpu, counts)
                && counts.super_sets.iter().any(|count| count.accesses > 0)
            {
                evidence.push(ProbeEvidence::Activity {
                    task,
                    cpu: CpuId(cpu),
                    level,
                    super_sets: counts.super_sets,
                });
            }
        }
        evidence
    }

    pub fn end(&mut self, machine: &mut SimMachine) {
        for &slot in &self.slots {
            let Some(thread) = machine.system.thread_mut(slot) else {
                continue;
            };
            match &self.kind {
                AttachedKind::Trace { .. } => thread.probes.trace = None,
                AttachedKind::Samples { .. } => thread.probes.samples = None,
                AttachedKind::Reuses { .. } => thread.probes.watch = None,
                AttachedKind::Activity { level, .. } => {
                    thread.probes.activity.retain(|probe| probe.level != *level)
                }
            }
        }
    }
}

/// Builds a probe that groups super sets by low set bits, as one passage of AV does; contiguous ranges follow another
/// passage.
fn new_activity_probe(level: CacheLevel, super_sets: u32) -> ActivityProbe {
    ActivityProbe {
        level,
        is_contiguous: false,
        super_sets: vec![
            SuperSetCount {
                accesses: 0,
                misses: 0
            };
            super_sets as usize
        ],
    }
}
