//! Standard input that an interruption ends.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Standard input that reports end of file after an interruption. Because a pipe may stay silent forever and the
/// kernel restarts reads after a signal, a read starts only when input is available.
pub struct InterruptibleStdin {
    pub is_interrupted: Arc<AtomicBool>,
}

const POLL_PERIOD: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

impl Read for InterruptibleStdin {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let input = io::stdin();
        loop {
            if self.is_interrupted.load(Ordering::Relaxed) {
                return Ok(0);
            }
            match poll(
                &mut [PollFd::new(&input, PollFlags::IN)],
                Some(&POLL_PERIOD),
            ) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return rustix::io::read(&input, bytes).map_err(io::Error::from),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
