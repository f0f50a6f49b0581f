//! Runs before `main`: opens the files that the command left in the shared directory, and starts the handler's thread.
//!
//! The program must not notice the agent. The handler has its own table of descriptors, so that none that the program
//! closes, inherits or passes on belongs to the agent; it receives no signals. A fork has no handler, detects this, and
//! gets its frames from the kernel; a program that it executes starts anew.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::handler::{Agent, Files};
use crate::handshake::{is_count_requested, release, request_count, try_acquire};
use crate::layout::{
    DIR_VARIABLE, HOLD_VARIABLE, MASK_VARIABLE, PAGE_BYTES, ReferenceSetHeader, format_target,
    parse_target,
};
use crate::ledger::Ledger;
use crate::sys::{self, decimal_digits, userfaultfd};
use crate::timing::ReferenceSet;

unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;
    fn mallopt(option: c_int, value: c_int) -> c_int;
    fn malloc(bytes: usize) -> *mut c_void;
    fn free(memory: *mut c_void);
    fn pthread_create(
        thread: *mut usize,
        attributes: *const c_void,
        run: extern "C" fn(*mut c_void) -> *mut c_void,
        argument: *mut c_void,
    ) -> c_int;
    fn pthread_attr_init(attributes: *mut c_void) -> c_int;
    fn pthread_attr_setstack(attributes: *mut c_void, stack: *mut c_void, bytes: usize) -> c_int;
    fn pthread_attr_setdetachstate(attributes: *mut c_void, state: c_int) -> c_int;
    fn pthread_sigmask(how: c_int, set: *const c_void, old: *mut c_void) -> c_int;
    fn sigfillset(set: *mut c_void) -> c_int;
    // The function behind pthread_atfork(3), which is statically linked.
    fn __register_atfork(
        before: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
        library: *mut c_void,
    ) -> c_int;
}

/// The process that the handler serves; 0 for none.
static SERVED_PID: AtomicI32 = AtomicI32::new(0);
/// The program's own descriptor of the userfaultfd, used only for registering.
static REGISTRATION_FD: AtomicI32 = AtomicI32::new(-1);
static IS_READY: AtomicBool = AtomicBool::new(false);

const STACK_BYTES: usize = 512 << 10;
/// The heap grows in large steps, because each step is a range that must be registered before it is touched.
const TOP_PAD_BYTES: c_int = 1 << 30;
const READ_ONLY: usize = 1;
const READ_WRITE: usize = 3;
const SHARED: usize = 1;
const PRIVATE_ANONYMOUS: usize = 0x22;
const NORESERVE: usize = 0x4000;

/// Is the caller the process that the handler serves? A fork is not.
pub fn is_served_process() -> bool {
    let served_pid = SERVED_PID.load(Ordering::Acquire);
    served_pid != 0 && sys::process_id() == served_pid
}

extern "C" fn before_fork() {
    while is_served_process() && !try_acquire() {
        sys::yield_cpu();
    }
}

extern "C" fn after_fork_in_parent() {
    if is_served_process() {
        release();
    }
}

extern "C" fn after_fork_in_child() {
    SERVED_PID.store(0, Ordering::Release);
    release();
}

/// Makes the kernel report missing pages of a fresh mapping. A failure costs only colors, because the handler registers
/// the range later.
pub fn register_mapping(start: usize, bytes: usize) {
    let fd = REGISTRATION_FD.load(Ordering::Relaxed);
    if fd >= 0 && is_served_process() {
        userfaultfd::register_range(
            fd as isize,
            start as u64,
            bytes.next_multiple_of(PAGE_BYTES) as u64,
        );
    }
}

/// A path in the shared directory, on the stack.
struct PathBuffer([u8; 512]);

impl PathBuffer {
    fn new(parts: &[&[u8]]) -> Option<Self> {
        let mut path = PathBuffer([0; 512]);
        let mut position = 0;
        for byte in parts.iter().flat_map(|part| part.iter()) {
            *path.0.get_mut(position)? = *byte;
            position += 1;
        }
        (position < 511).then_some(path)
    }
    fn open(&self, flags: usize) -> Option<isize> {
        let path = CStr::from_bytes_until_nul(&self.0).ok()?;
        // Without following links: the directory contains only regular files.
        let fd = sys::open(path, flags | 0o400_000);
        (fd >= 0).then_some(fd)
    }
}

fn environment_variable(name: &str) -> Option<&'static [u8]> {
    let mut name_buffer = [0u8; 32];
    name_buffer
        .get_mut(..name.len())?
        .copy_from_slice(name.as_bytes());
    // SAFETY: a name that ends with a zero; the result is a string of the environment, which does not change before
    // `main`.
    unsafe {
        let value = getenv(name_buffer.as_ptr().cast());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    }
}

fn parse_decimal(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0u64, |number, &digit| {
        digit.is_ascii_digit().then(|| {
            number
                .saturating_mul(10)
                .saturating_add(u64::from(digit - b'0'))
        })
    })
}

fn map_file(path: &PathBuffer, prot: usize) -> Option<(*mut u8, usize)> {
    let fd = path.open(if prot == READ_WRITE { 2 } else { 0 })?;
    // SAFETY: no memory is passed. The end offset of a seekable file is its size.
    let file_bytes = unsafe { sys::call(sys::LSEEK, [fd as usize, 0, 2]) };
    let start = if file_bytes > 0 {
        sys::map(file_bytes as usize, prot, SHARED, fd)
    } else {
        None
    };
    sys::close(fd);
    Some((start?, file_bytes as usize))
}

/// Does everything that can fail, before anything of the program is changed.
fn prepare() -> Option<(&'static mut Agent, *mut u8)> {
    let dir = environment_variable(DIR_VARIABLE)?;
    let (mask, must_move_all) = parse_target(environment_variable(MASK_VARIABLE)?)?;
    let hold_pages = parse_decimal(environment_variable(HOLD_VARIABLE)?)? as usize / PAGE_BYTES;
    let mut digit_buffer = [0; 20];
    let pid_text = decimal_digits(sys::process_id() as u64, &mut digit_buffer);
    let own_path = PathBuffer::new(&[dir, b"/", pid_text])?;
    // SAFETY: a path that ends with a zero; an existing directory is fine.
    unsafe { sys::call(sys::MKDIR, [own_path.0.as_ptr() as usize, 0o700]) };

    let create_flags = 0o100 | 2 | 0o1000;
    let status_fd = PathBuffer::new(&[dir, b"/", pid_text, b"/status"])?.open(create_flags)?;
    let report_refusal = |status_text: &str| {
        sys::write_at_start(status_fd, status_text.as_bytes());
        None
    };
    let wanted_path = PathBuffer::new(&[dir, b"/", pid_text, b"/wanted"])?;
    let target_fd = wanted_path.open(create_flags)?;
    sys::write_at_start(target_fd, &format_target(mask, must_move_all));

    let set_path = PathBuffer::new(&[dir, b"/reference-set"])?;
    let Some((set_start, set_bytes)) = map_file(&set_path, READ_ONLY) else {
        return report_refusal("refused no reference set\n");
    };
    // SAFETY: the mapping just created, which is never unmapped.
    let Some(mut reference_set) = (set_bytes >= ReferenceSetHeader::PAGES * PAGE_BYTES)
        .then(|| unsafe { ReferenceSet::new(set_start, set_bytes) })
        .flatten()
    else {
        return report_refusal("refused the reference set is of another version\n");
    };

    reference_set.map_frames();
    if !(0..50).any(|_| reference_set.calibrate().threshold_cycles().is_some()) {
        return report_refusal("refused hits and misses take about as long here\n");
    }
    let ledger_path = PathBuffer::new(&[dir, b"/ledger"])?;
    let Some((ledger, ledger_bytes)) = map_file(&ledger_path, READ_WRITE) else {
        return report_refusal("refused no ledger\n");
    };

    let fault_fd = userfaultfd::open();
    if fault_fd < 0 {
        return report_refusal("refused userfaultfd is not permitted\n");
    }
    if userfaultfd::enable_features(
        fault_fd,
        userfaultfd::FEATURE_MOVE | userfaultfd::FEATURE_EVENTS,
    ) < 0
    {
        return report_refusal("refused the kernel cannot move pages (UFFDIO_MOVE, Linux 6.8)\n");
    }
    let Some(memory) = AgentMemory::new(hold_pages) else {
        return report_refusal("refused no address space for the frames held\n");
    };

    let files = Files {
        fault_fd,
        target_fd,
        status_fd,
        pagemap_fd: -1,
    };

    // SAFETY: parts of a fresh mapping, of these sizes and page-aligned, that lives as long as the process.
    unsafe {
        let slot_links = core::slice::from_raw_parts_mut(
            memory.slot_links_start().cast::<u32>(),
            2 * hold_pages,
        );
        let (region, own_range) = (
            memory.region(),
            (memory.start as u64, memory.bytes() as u64),
        );
        let agent = memory.agent();
        agent.write(Agent::new(
            files,
            reference_set,
            Ledger::new(ledger, ledger_bytes),
            region,
            slot_links,
            (mask, must_move_all),
            own_range,
        ));
        Some((&mut *agent, memory.start))
    }
}

/// All memory of the agent in one mapping, so that an external observer can exclude it: the handler's stack, the agent,
/// the lists, and the region that holds frames.
struct AgentMemory {
    start: *mut u8,
    hold_pages: usize,
}

impl AgentMemory {
    const AGENT_BYTES: usize = core::mem::size_of::<Agent>().next_multiple_of(PAGE_BYTES);

    fn new(hold_pages: usize) -> Option<Self> {
        let mut memory = AgentMemory {
            start: core::ptr::null_mut(),
            hold_pages,
        };
        memory.start = sys::map(
            memory.bytes(),
            READ_WRITE,
            PRIVATE_ANONYMOUS | NORESERVE,
            -1,
        )?;

        // SAFETY: ranges of the agent's mapping. No child gets the frames, none of them is part of a huge page, and the
        // handler's stack is populated before the handler starts (MADV_POPULATE_WRITE).
        unsafe {
            let region = memory.region() as usize;
            for (address, bytes, advice) in [
                (memory.start as usize, memory.bytes(), 15),
                (region, 2 * hold_pages * PAGE_BYTES, 10),
                (memory.start as usize, STACK_BYTES + Self::AGENT_BYTES, 23),
            ] {
                sys::call(sys::MADVISE, [address, bytes, advice]);
            }
        }

        Some(memory)
    }
    fn agent(&self) -> *mut Agent {
        // SAFETY: inside the mapping.
        unsafe { self.start.add(STACK_BYTES).cast() }
    }
    fn slot_links_start(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.start.add(STACK_BYTES + Self::AGENT_BYTES) }
    }
    fn region_offset(&self) -> usize {
        STACK_BYTES + Self::AGENT_BYTES + (2 * self.hold_pages * 4).next_multiple_of(PAGE_BYTES)
    }
    fn region(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.start.add(self.region_offset()) }
    }
    fn bytes(&self) -> usize {
        self.region_offset() + 2 * self.hold_pages * PAGE_BYTES
    }
}

fn start_handler() -> Option<()> {
    let (agent, stack) = prepare()?;
    // A high number, because programs rely on low descriptors; this one is only for registering. SAFETY: no memory is
    // passed.
    let registration_fd =
        unsafe { sys::call(sys::FCNTL, [agent.files().fault_fd as usize, 1030, 900]) };
    REGISTRATION_FD.store(registration_fd as i32, Ordering::Relaxed);
    let low_fds = *agent.files();
    let argument = core::ptr::from_mut(agent).cast();

    // SAFETY: attributes and signal sets fit in the buffers passed; the stack is part of the agent's mapping.
    let error_code = unsafe {
        let (mut attributes, mut all_signals, mut previous_mask) =
            ([0u64; 16], [0u64; 16], [0u64; 16]);
        let attributes_ptr = attributes.as_mut_ptr().cast();
        pthread_attr_init(attributes_ptr);
        pthread_attr_setstack(attributes_ptr, stack.cast(), STACK_BYTES);
        pthread_attr_setdetachstate(attributes_ptr, 1);
        sigfillset(all_signals.as_mut_ptr().cast());
        pthread_sigmask(
            2,
            all_signals.as_ptr().cast(),
            previous_mask.as_mut_ptr().cast(),
        );
        let mut thread = 0;
        let error_code = pthread_create(&raw mut thread, attributes_ptr, run_handler, argument);
        pthread_sigmask(2, previous_mask.as_ptr().cast(), core::ptr::null_mut());
        error_code
    };
    if error_code != 0 {
        return None;
    }
    // The handler copies the table of descriptors before it reports that it is ready.
    while !IS_READY.load(Ordering::Acquire) {
        sys::yield_cpu();
    }
    for fd in [low_fds.fault_fd, low_fds.target_fd, low_fds.status_fd] {
        sys::close(fd);
    }
    // SAFETY: as documented in mallopt(3). A single heap grows in large steps and never shrinks, and the allocator
    // makes no mappings of its own, which could not be foreseen. One block makes the heap grow before the program does.
    unsafe {
        mallopt(-4, 0);
        mallopt(-2, TOP_PAD_BYTES);
        mallopt(-1, c_int::MAX);
        let (parent, child) = (
            Some(after_fork_in_parent as _),
            Some(after_fork_in_child as _),
        );
        __register_atfork(Some(before_fork), parent, child, core::ptr::null_mut());
        free(core::hint::black_box(malloc(1 << 20)));
    }
    Some(())
}

extern "C" fn run_handler(argument: *mut c_void) -> *mut c_void {
    // SAFETY: the agent that `prepare` created, which has no other user from now on.
    let agent = unsafe { &mut *argument.cast::<Agent>() };
    if agent.open_own_descriptors() {
        SERVED_PID.store(sys::process_id(), Ordering::Release);
        IS_READY.store(true, Ordering::Release);
        agent.serve();
        SERVED_PID.store(0, Ordering::Release);
    } else {
        let reason =
            b"refused the program's memory could not be registered, or its page map not read\n";
        sys::write_at_start(agent.files().status_fd, reason);
    }
    IS_READY.store(true, Ordering::Release);
    core::ptr::null_mut()
}

/// Constructor, called before `main`.
pub extern "C" fn on_load() {
    // A program without an agent runs as usual; the status file contains the reason.
    let _ = start_handler();
    if is_served_process() {
        // The heap has just grown; its new part is registered before the program touches it.
        request_count();
        wait_for_count(2_000);
    }
}

/// Destructor, called after `main`: requests a final count of resident pages.
pub extern "C" fn on_unload() {
    if is_served_process() {
        request_count();
        wait_for_count(250);
    }
}

fn wait_for_count(max_wait_ms: u32) {
    for _ in 0..max_wait_ms {
        if !is_count_requested() || !is_served_process() {
            return;
        }
        let interval = [0u64, 1_000_000];
        // SAFETY: the kernel reads two words.
        unsafe { sys::call(sys::NANOSLEEP, [interval.as_ptr() as usize]) };
    }
}
