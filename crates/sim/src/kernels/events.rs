//! omnetpp: discrete-event simulation of a network.
//!
//! Method: a real binary heap of times, stored on the host, points to message objects. Each event pops the earliest
//! message, visits its module and that module's gates, and schedules a later message to a neighboring module.
//! Comparisons read the messages through the heap's pointers.

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::setup::{KernelMaker, KernelSetup, Region, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] =
    &[("omnetpp", |setup| setup.add_single_kernel(Network::new))];

const MODULE_BYTES: u64 = 1024;
const MESSAGE_BYTES: u64 = 256;

struct Network {
    modules: Region,
    messages: Region,
    heap: Region,
    module_count: u64,
    /// Binary heap of (time, message) pairs.
    queue: Vec<(u64, u32)>,
    free_messages: Vec<u32>,
    /// Module to which each message goes.
    target_modules: Vec<u32>,
    rng: Rng,
}

impl Network {
    fn new(setup: &mut KernelSetup) -> Self {
        let bytes = setup.data_bytes();
        let message_count = (bytes / 4 / MESSAGE_BYTES).max(8);
        let messages = setup.add_shared_region("messages", message_count * MESSAGE_BYTES);
        // A quarter of the messages is scheduled at any time; the others are in the free list.
        let scheduled_count = message_count / 4;
        let heap = setup.add_shared_region("event heap", (scheduled_count + 1) * 8);
        let modules = setup.add_shared_region("modules", bytes - messages.bytes - heap.bytes);
        let module_count = modules.bytes / MODULE_BYTES;
        let mut rng = setup.rng.clone();
        let mut queue: Vec<(u64, u32)> = (0..scheduled_count as u32)
            .map(|message| (rng.draw_below(1 << 20), message))
            .collect();

        // A sorted list satisfies the heap order.
        queue.sort_unstable();
        let target_modules = (0..message_count)
            .map(|_| rng.draw_below(module_count) as u32)
            .collect();
        let free_messages = (scheduled_count as u32..message_count as u32).collect();
        Network {
            modules,
            messages,
            heap,
            module_count,
            queue,
            free_messages,
            target_modules,
            rng,
        }
    }

    fn message_address(&self, message: u32) -> u64 {
        self.messages
            .element_address(u64::from(message), MESSAGE_BYTES)
    }

    fn emit_entry_read(&self, heap_index: usize, out: &mut AccessEmitter) {
        out.load(self.heap.element_address(heap_index as u64, 8));
        out.load_dependent(self.message_address(self.queue[heap_index].1) + 24);
    }

    /// Removes the earliest event from the heap, and moves the last one to its place.
    fn pop_event(&mut self, out: &mut AccessEmitter) -> (u64, u32) {
        self.emit_entry_read(0, out);
        let first_event = self.queue[0];
        let last_event = self
            .queue
            .pop()
            .expect("as many events are scheduled as taken, and one is always there");
        if self.queue.is_empty() {
            return last_event;
        }

        let mut heap_index = 0;
        loop {
            let mut child = 2 * heap_index + 1;
            if child >= self.queue.len() {
                break;
            }

            self.emit_entry_read(child, out);
            if child + 1 < self.queue.len() {
                self.emit_entry_read(child + 1, out);
                if self.queue[child + 1] < self.queue[child] {
                    child += 1;
                }
            }
            if self.queue[child] >= last_event {
                break;
            }

            self.queue[heap_index] = self.queue[child];
            out.store(self.heap.element_address(heap_index as u64, 8));
            heap_index = child;
        }
        self.queue[heap_index] = last_event;
        out.store(self.heap.element_address(heap_index as u64, 8));
        first_event
    }

    fn push_event(&mut self, event: (u64, u32), out: &mut AccessEmitter) {
        self.queue.push(event);
        let mut heap_index = self.queue.len() - 1;
        while heap_index > 0 {
            let parent = (heap_index - 1) / 2;
            self.emit_entry_read(parent, out);
            if self.queue[parent] <= event {
                break;
            }
            self.queue[heap_index] = self.queue[parent];
            out.store(self.heap.element_address(heap_index as u64, 8));
            heap_index = parent;
        }
        self.queue[heap_index] = event;
        out.store(self.heap.element_address(heap_index as u64, 8));
    }

    /// Emits the accesses of a module that handles a message: its state, one of its gates, and a queue or statistic
    /// further on in its object.
    fn emit_module_accesses(&mut self, module: u64, out: &mut AccessEmitter) {
        let base = self.modules.element_address(module, MODULE_BYTES);
        out.load_dependent(base);
        out.load(base + 16);
        out.load(base + 64);
        let offset = 128 + self.rng.draw_below(14) * 64;
        out.load_dependent(base + offset);
        out.load(base + offset + 8);
        out.store(base + offset + 16);
        out.store(base + 72);
    }
}

impl WorkloadKernel for Network {
    fn step(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.function_count());
        out.enter_function(0);
        let (time, message) = self.pop_event(out);
        let module = u64::from(self.target_modules[message as usize]);
        out.enter_function(1 + self.rng.draw_function(functions - 1));
        self.emit_module_accesses(module, out);

        // Half of the events stay in the module (timers), the others go to a neighbor, a few far away.
        let target_module = match self.rng.draw_below(8) {
            0..4 => module,
            4..7 => (module + 1 + self.rng.draw_below(8)) % self.module_count,
            _ => self.rng.draw_below(self.module_count),
        };

        // The message is deleted, and a new one is allocated from a random position of the free list.
        let free_index = self.rng.draw_below(self.free_messages.len() as u64) as usize;
        let new_message = std::mem::replace(&mut self.free_messages[free_index], message);
        let new_address = self.message_address(new_message);
        for offset in [0, 8, 24, 64, 72, 128, 192] {
            out.store(new_address + offset);
        }

        self.target_modules[new_message as usize] = target_module as u32;
        out.enter_function(1 + self.rng.draw_function(functions - 1));
        let event_time = time + 1 + self.rng.draw_skewed(1 << 20);
        self.push_event((event_time, new_message), out);
        out.work_done += 1;
    }
}
