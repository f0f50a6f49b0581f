//! Probes attached to a task's thread in the hardware: traces, samples, reuse times and super sets.

use cachemate_core::{
    AddressKind, CacheLevel, CpuId, ProbeEvidence, ProbeKind, ProcessId, RefusalReason, ReuseSample, SamplerModel,
    SuperSetCount, TaskId,
};

use super::super::SimMachine;
use super::ProbeRefusal;
use crate::hw::{ActivityProbe, SampleProbe, TaskCounters, TraceProbe, WatchProbe};
use crate::os::queues::Slot;

/// Mean number of accesses between two watched locations, before scaling.
const WATCH_ONE_IN: u64 = 1_000;

enum AttachedKind {
    Trace {
        entries: u32,
        code: bool,
        before: Box<TaskCounters>,
    },
    Samples {
        processes: Vec<ProcessId>,
        one_in: u32,
        remote_only: bool,
        at_most: u32,
        taken: u32,
        events: u64,
    },
    /// Watched locations; `all_set` is the cycle at which the last one was set.
    Reuses {
        locations: u32,
        all_set: Option<u64>,
    },
    Activity {
        level: CacheLevel,
        super_sets: u32,
    },
}

pub(super) struct AttachedProbe {
    kind: AttachedKind,
    slots: Vec<Slot>,
    begun: u64,
    /// Number of interrupt ticks of each slot before the probe.
    ticks_before: Vec<u64>,
}

impl AttachedProbe {
    pub fn new(probe_kind: &ProbeKind, machine: &mut SimMachine) -> Result<Self, ProbeRefusal> {
        let check_live = |task: &TaskId| {
            let exited_refusal = (RefusalReason::NotFound, format!("{task:?} has ended"));
            machine.slot_of(*task).filter(|_| !machine.is_gone(*task)).ok_or(exited_refusal)
        };
        let (kind, slots) = match probe_kind {
            ProbeKind::MissTrace { task, entries, includes_code: code } => {
                let slot = check_live(task)?;
                let start_counters = Box::new(machine.system.task_counters(slot));
                (AttachedKind::Trace { entries: (*entries).max(1), code: *code, before: start_counters }, vec![slot])
            }
            ProbeKind::AccessSamples { processes, sample_period: one_in, remote_only, max_samples: at_most } => {
                // The number is not scaled, because the cost of each sample is, and the scale must apply to a round's
                // share of the time only once.
                let at_most = (*at_most).max(1);
                let (processes, one_in, remote_only) = (processes.clone(), (*one_in).max(1), *remote_only);
                (AttachedKind::Samples { processes, one_in, remote_only, at_most, taken: 0, events: 0 }, Vec::new())
            }
            ProbeKind::ReuseTimes { task, locations } => {
                (AttachedKind::Reuses { locations: (*locations).max(1), all_set: None }, vec![check_live(task)?])
            }
            ProbeKind::SuperSets { tasks, level, super_sets } => {
                if !machine.levels.contains(level)
                    || machine.spec.counters.sampler != SamplerModel::Ideal
                    || *super_sets == 0
                {
                    return Err((RefusalReason::NotSupported, format!("no super-set counts of {level:?} here")));
                }
                let slots = tasks.iter().map(check_live).collect::<Result<Vec<Slot>, ProbeRefusal>>()?;
                (AttachedKind::Activity { level: *level, super_sets: *super_sets }, slots)
            }
            _ => return Err((RefusalReason::NotSupported, "not a probe of a thread".to_string())),
        };
        let mut attached =
            AttachedProbe { kind, slots: Vec::new(), begun: machine.system.now(), ticks_before: Vec::new() };
        for slot in slots {
            attached.attach_to_slot(slot, machine)?;
        }
        attached.poll(machine);
        Ok(attached)
    }

    fn attach_to_slot(&mut self, slot: Slot, machine: &mut SimMachine) -> Result<(), ProbeRefusal> {
        let one_in = machine.clock.scale(WATCH_ONE_IN) as u32;
        // The models describe the last level, so its lines are watched.
        let of_level = |level: CacheLevel| machine.spec.caches.iter().find(|cache| cache.level == level);
        let last = machine.spec.last_level();
        let line_doublings = |first: CacheLevel| {
            of_level(first).zip(last).map_or(0, |(first, last)| last.line_bytes.ilog2() - first.line_bytes.ilog2())
        };
        let (coarser, coarser_code) = (line_doublings(CacheLevel::L1Data), line_doublings(CacheLevel::L1Instruction));
        let Some(thread) = machine.system.thread_mut(slot) else { return Ok(()) };
        let probes = &mut thread.probes;
        let is_taken = match &self.kind {
            AttachedKind::Trace { .. } => probes.trace.is_some(),
            AttachedKind::Samples { .. } => probes.samples.is_some(),
            AttachedKind::Reuses { .. } => probes.watch.is_some(),
            AttachedKind::Activity { level, .. } => probes.activity.iter().any(|activity| activity.level == *level),
        };
        if is_taken {
            return Err((RefusalReason::Busy, "the task already has a probe of this kind".to_string()));
        }
        match &self.kind {
            AttachedKind::Trace { entries, code, .. } => {
                let (max_entries, code_too) = (*entries, *code);
                probes.trace = Some(TraceProbe { max_entries, code_too, ..TraceProbe::default() });
            }
            AttachedKind::Samples { one_in, remote_only, at_most, .. } => {
                let (one_in, remote_only, at_most) = (*one_in, *remote_only, *at_most);
                probes.samples = Some(SampleProbe { one_in, remote_only, at_most, ..SampleProbe::default() });
            }
            AttachedKind::Reuses { locations, .. } => {
                let locations = *locations;
                let watch = WatchProbe { locations, one_in, coarser, coarser_code, ..WatchProbe::default() };
                probes.watch = Some(watch);
            }
            AttachedKind::Activity { level, super_sets } => probes.activity.push(activity_probe(*level, *super_sets)),
        }
        self.ticks_before.push(probes.cost_ticks);
        self.slots.push(slot);
        Ok(())
    }

    /// Checks the hardware, and returns whether all results are present.
    pub fn poll(&mut self, machine: &mut SimMachine) -> bool {
        self.attach_newcomers(machine);
        let slots = &self.slots;
        let all_exited = slots.iter().all(|&slot| machine.system.task(slot).exited_cycle.is_some());
        let probes_of = |slot: Slot| machine.system.thread(slot).map(|thread| &thread.probes);
        match &mut self.kind {
            AttachedKind::Trace { entries, .. } => {
                let traced = slots.first().and_then(|&slot| probes_of(slot)?.trace.as_ref());
                all_exited || traced.is_none_or(|trace| trace.lines.len() >= *entries as usize)
            }
            AttachedKind::Samples { at_most, taken, .. } => {
                let count = |slot: &Slot| Some(probes_of(*slot)?.samples.as_ref()?.samples.len());
                let new_count: usize = slots.iter().filter_map(count).sum();
                *taken as usize + new_count >= *at_most as usize
            }
            AttachedKind::Reuses { locations, all_set } => {
                let now = machine.system.now();
                let Some(watch) = slots.first().and_then(|&slot| probes_of(slot)?.watch.as_ref()) else { return true };
                if watch.begun >= *locations {
                    // A location that is not touched again for as long as it took to set all locations is abandoned.
                    let patience = all_set.get_or_insert(now).saturating_sub(self.begun);
                    return all_exited || watch.open.is_empty() || now >= all_set.unwrap_or(now) + patience;
                }
                all_exited
            }
            AttachedKind::Activity { .. } => all_exited,
        }
    }

    /// Attaches the probe to threads that arrived after the probe began.
    fn attach_newcomers(&mut self, machine: &mut SimMachine) {
        let AttachedKind::Samples { processes, .. } = &self.kind else { return };
        let indices: Vec<usize> = processes.iter().map(|process| machine.process_index(*process)).collect();
        let new_slots: Vec<Slot> = machine
            .tasks
            .iter()
            .map(|sim_task| sim_task.slot)
            .filter(|&slot| indices.contains(&machine.system.task(slot).process) && !self.slots.contains(&slot))
            .filter(|&slot| machine.system.task(slot).exited_cycle.is_none())
            .collect();
        for slot in new_slots {
            // A thread that another probe already samples is left to that probe.
            let _ = self.attach_to_slot(slot, machine);
        }
    }

    /// Returns the cycle of the next check, which only watches need; traces and samples raise interrupts.
    pub fn next_due(&self) -> u64 {
        u64::MAX
    }

    pub fn cost_cycles(&self, machine: &SimMachine) -> Vec<(Option<TaskId>, u64)> {
        let per_cycle = machine.ticks_per_cycle();
        let cost = |(slot, earlier_ticks): (&Slot, &u64)| {
            let ticks = machine.system.thread(*slot).map_or(*earlier_ticks, |thread| thread.probes.cost_ticks);
            (machine.task_of_slot.get(slot).copied(), ticks.saturating_sub(*earlier_ticks) / per_cycle)
        };
        self.slots.iter().zip(&self.ticks_before).map(cost).collect()
    }

    /// Returns the evidence at the end of a window.
    pub fn take_evidence(&mut self, machine: &mut SimMachine, complete: bool) -> Vec<ProbeEvidence> {
        match &self.kind {
            AttachedKind::Trace { .. } if complete => self.take_trace(machine).into_iter().collect(),
            AttachedKind::Trace { .. } => Vec::new(),
            AttachedKind::Samples { .. } => self.take_samples(machine).into_iter().collect(),
            AttachedKind::Reuses { .. } => self.take_reuses(machine, complete).into_iter().collect(),
            AttachedKind::Activity { .. } => self.take_activity(machine),
        }
    }

    fn take_trace(&mut self, machine: &mut SimMachine) -> Option<ProbeEvidence> {
        let AttachedKind::Trace { before, .. } = &self.kind else { return None };
        let slot = *self.slots.first()?;
        let elapsed_ns = machine.clock.nominal_ns(machine.system.now() - self.begun);
        let counts = machine.system.task_counters(slot).subtract_earlier(before).all_event_counts(&machine.levels);
        let trace = machine.system.thread_mut(slot)?.probes.trace.take()?;
        let counts_losses = machine.spec.counters.sampler == SamplerModel::Ideal;
        let line_bytes = machine.spec.caches.iter().find(|cache| cache.level == CacheLevel::L1Data)?.line_bytes;
        Some(ProbeEvidence::Trace {
            task: *machine.task_of_slot.get(&slot)?,
            space: AddressKind::Physical,
            line_bytes,
            lines: trace.lines,
            code_positions: trace.code,
            lost: counts_losses.then_some(trace.lost_misses),
            counts,
            elapsed_ns,
        })
    }

    fn take_samples(&mut self, machine: &mut SimMachine) -> Option<ProbeEvidence> {
        let line_bytes = machine.spec.caches.iter().find(|cache| cache.level == CacheLevel::L1Data)?.line_bytes;
        let scale = machine.clock.scale;
        let AttachedKind::Samples { one_in, at_most, taken, events, .. } = &mut self.kind else { return None };
        let (mut new_samples, mut passed) = (Vec::new(), 0);
        for slot in &self.slots {
            let task = machine.task_of_slot.get(slot).copied();
            let Some(probe) = machine.system.thread_mut(*slot).and_then(|thread| thread.probes.samples.as_mut()) else {
                continue;
            };
            passed += probe.events;
            let drained = std::mem::take(&mut probe.samples);
            probe.at_most = probe.at_most.saturating_sub(drained.len() as u32).max(1);
            new_samples.extend(drained.into_iter().filter_map(|mut sample| {
                sample.task = task?;
                sample.at_ns *= scale;
                Some(sample)
            }));
        }
        new_samples.sort_by_key(|sample| sample.at_ns);
        new_samples.truncate((*at_most - *taken) as usize);
        *taken += new_samples.len() as u32;
        let events_now = passed - std::mem::replace(events, passed);
        let has_evidence = !new_samples.is_empty() || events_now > 0;
        has_evidence.then_some(ProbeEvidence::Samples {
            sample_period: *one_in,
            events: events_now,
            line_bytes,
            samples: new_samples,
        })
    }

    fn take_reuses(&mut self, machine: &mut SimMachine, complete: bool) -> Option<ProbeEvidence> {
        let slot = *self.slots.first()?;
        let task = *machine.task_of_slot.get(&slot)?;
        let (clock, per_cycle, now) = (machine.clock, machine.ticks_per_cycle(), machine.system.now());
        let watch = machine.system.thread_mut(slot)?.probes.watch.as_mut()?;
        let mut samples = std::mem::take(&mut watch.samples);
        samples.iter_mut().for_each(|sample| sample.elapsed_ns *= clock.scale);
        if complete {
            let accesses = watch.accesses;
            samples.extend(std::mem::take(&mut watch.open).into_iter().map(|(_, set_at, tick)| ReuseSample {
                accesses: Some(accesses - set_at),
                elapsed_ns: clock.nominal_ns(now.saturating_sub(tick / per_cycle)),
                reused: false,
            }));
        }
        (!samples.is_empty()).then_some(ProbeEvidence::Reuses { task, samples })
    }

    fn take_activity(&mut self, machine: &mut SimMachine) -> Vec<ProbeEvidence> {
        let AttachedKind::Activity { level, super_sets } = self.kind else { return Vec::new() };
        let mut evidence = Vec::new();
        for slot in &self.slots {
            let (task, cpu) = (machine.task_of_slot.get(slot).copied(), machine.system.dispatcher.task(*slot).last_cpu);
            let Some(thread) = machine.system.thread_mut(*slot) else { continue };
            let probe = thread.probes.activity.iter_mut().find(|probe| probe.level == level);
            let counts = probe.map(|probe| std::mem::replace(probe, activity_probe(level, super_sets)));
            if let (Some(task), Some(cpu), Some(counts)) = (task, cpu, counts)
                && counts.super_sets.iter().any(|count| count.accesses > 0)
            {
                evidence.push(ProbeEvidence::Activity { task, cpu: CpuId(cpu), level, super_sets: counts.super_sets });
            }
        }
        evidence
    }

    pub fn end(&mut self, machine: &mut SimMachine) {
        for &slot in &self.slots {
            let Some(thread) = machine.system.thread_mut(slot) else { continue };
            match &self.kind {
                AttachedKind::Trace { .. } => thread.probes.trace = None,
                AttachedKind::Samples { .. } => thread.probes.samples = None,
                AttachedKind::Reuses { .. } => thread.probes.watch = None,
                AttachedKind::Activity { level, .. } => thread.probes.activity.retain(|probe| probe.level != *level),
            }
        }
    }
}

/// Builds a probe that groups super sets by low set bits, as one passage of AV does; contiguous ranges follow another
/// passage.
fn activity_probe(level: CacheLevel, super_sets: u32) -> ActivityProbe {
    ActivityProbe {
        level,
        contiguous: false,
        super_sets: vec![SuperSetCount { accesses: 0, misses: 0 }; super_sets as usize],
    }
}
