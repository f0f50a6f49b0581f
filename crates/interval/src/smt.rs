//! Contexts of one core: how they share its issue slots.
//!
//! Method: a context that runs alone uses a share of the slots that follows from its instructions, one slot of `1 /
//! width` cycles each. Beside others, an instruction waits for a slot as a line waits at a bus: `slot x (u - own alone)
//! / 2(1 - u)`, with `u` the utilization at which "slots used at these speeds = u". Properties: a context that runs
//! alone never waits; no slot is used twice.

/// Maximum load of a core.
const MAX_LOAD: f32 = 0.9999;
/// Maximum load that one context alone causes.
const MAX_SOLO_LOAD: f32 = 0.99;
const BISECTION_STEPS: u32 = 14;

/// Computes the cycles per instruction for which each context waits for slots. Each pair of `contexts` holds the
/// cycles of an instruction without the other contexts, and the context's share of elapsed time.
pub fn compute_slot_waits(slot_cycles: f32, contexts: &[(f32, f32)], waits: &mut [f32]) {
    let slot_wait_at_load = |utilization: f32, &(cycles, share): &(f32, f32)| {
        slot_cycles / (2.0 * (1.0 - utilization))
            * (utilization - (slot_cycles * share / cycles).min(MAX_SOLO_LOAD)).max(0.0)
    };
    let slot_utilization = |utilization: f32| -> f32 {
        contexts
            .iter()
            .map(|context| {
                slot_cycles * context.1 / (context.0 + slot_wait_at_load(utilization, context))
            })
            .sum()
    };

    let (mut low, mut high) = (0.0f32, MAX_LOAD);
    for _ in 0..BISECTION_STEPS {
        let middle_utilization = 0.5 * (low + high);
        if slot_utilization(middle_utilization) > middle_utilization {
            low = middle_utilization
        } else {
            high = middle_utilization
        }
    }
    let utilization = 0.5 * (low + high);
    for (wait, context) in waits.iter_mut().zip(contexts) {
        *wait = if contexts.len() < 2 {
            0.0
        } else {
            slot_wait_at_load(utilization, context)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does a context alone never wait, and do four contexts that could each fill the core get a quarter each?
    #[test]
    fn four_full_contexts_get_a_quarter_of_the_core_each() {
        let mut wait_cycles = [9.0; 1];
        compute_slot_waits(1.0, &[(1.25, 1.0)], &mut wait_cycles);
        assert_eq!(wait_cycles[0], 0.0);
        let contexts = [(1.1, 1.0); 4];
        let mut wait_cycles = [0.0; 4];
        compute_slot_waits(1.0, &contexts, &mut wait_cycles);
        let total: f32 = wait_cycles.iter().map(|wait| 1.0 / (1.1 + wait)).sum();
        assert!((0.93..=1.001).contains(&total), "{total}");
    }

    /// Do contexts that mostly wait for memory hardly disturb each other?
    #[test]
    fn contexts_that_wait_for_memory_hardly_disturb_each_other() {
        let mut wait_cycles = [0.0; 4];
        compute_slot_waits(1.0, &[(12.0, 1.0); 4], &mut wait_cycles);
        assert!(
            wait_cycles.iter().all(|wait| *wait < 0.25),
            "{wait_cycles:?}"
        );
    }
}
