//! Inputs that may stay silent: standard input and pipes.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// An input that reports end of file after an interruption. Because a pipe may stay silent forever and the kernel
/// restarts reads after a signal, a read starts only when input is available.
pub struct InterruptibleInput {
    input: File,
    is_interrupted: Arc<AtomicBool>,
}

impl InterruptibleInput {
    /// Takes an open pipe.
    pub fn new(input: File, is_interrupted: Arc<AtomicBool>) -> Self {
        InterruptibleInput {
            input,
            is_interrupted,
        }
    }

    /// Takes standard input.
    ///
    /// # Errors
    /// Standard input is closed, or no descriptor is left.
    pub fn stdin(is_interrupted: Arc<AtomicBool>) -> io::Result<Self> {
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        Ok(InterruptibleInput::new(input.into(), is_interrupted))
    }
}

const POLL_PERIOD: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

impl Read for InterruptibleInput {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.is_interrupted.load(Ordering::Relaxed) {
                return Ok(0);
            }
            let mut inputs = [PollFd::new(&self.input, PollFlags::IN)];
            match poll(&mut inputs, Some(&POLL_PERIOD)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return self.input.read(bytes),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
