//! The kernel's own messages about processes that begin, change and end: the process connector (`CN_PROC` over netlink).
//!
//! Problem: a listing of `/proc` finds every process that lives at that time, at a cost for each of them, and misses
//! those that live between two listings. Method: the connector sends one message for each fork, exec, exit and change of
//! user or name; they wait in the socket until they are taken. Properties: it needs `CAP_NET_ADMIN` and the host's first
//! PID namespace; elsewhere there are no events. If the socket's buffer overflows, the loss is reported.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::{CONNECTOR, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with, sockopt,
};

/// `CN_IDX_PROC` and `CN_VAL_PROC`: the connector's address, and its multicast group.
const PROCESS_CONNECTOR: u32 = 1;
const LISTEN: u32 = 1;
const IGNORE: u32 = 2;
/// Lengths of the two headers before an event, and of the event's own header.
const NETLINK_HEADER: usize = 16;
const CONNECTOR_HEADER: usize = 20;
const EVENT_HEADER: usize = 16;
/// An event with its headers has 76 bytes.
const MAX_MESSAGE_BYTES: usize = 256;
/// A message takes less than a kilobyte of the buffer, so ten thousand threads may begin at once.
const BUFFER_BYTES: usize = 16 << 20;

/// A change of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessEvent {
    /// A process has begun.
    Birth {
        /// The process that started it.
        parent: i32,
        /// The new process.
        pid: i32,
    },
    /// A thread has begun.
    ThreadBirth {
        /// The thread's process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// The program, or the name of a thread, has changed.
    Change {
        /// The process.
        pid: i32,
    },
    /// The user of a thread has changed.
    UserChange {
        /// The process.
        pid: i32,
    },
    /// A thread has ended; the process ends with its last one.
    Exit {
        /// The thread's process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
}

/// A subscription to the connector.
#[derive(Debug)]
pub struct ProcessEvents {
    socket: OwnedFd,
}

impl ProcessEvents {
    /// # Errors
    /// The kernel has no connector, or this process may not listen.
    pub fn subscribe() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(CONNECTOR))?;
        bind(&socket, &SocketAddrNetlink::new(0, PROCESS_CONNECTOR))?;
        sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER_BYTES)?;
        let events = ProcessEvents { socket };
        events.request(LISTEN)?;
        // The kernel acknowledges before `send` returns, unless it ignores the request, as in a PID namespace.
        let mut message = [0; MAX_MESSAGE_BYTES];
        match events.next_message(&mut message)? {
            Some(message) if is_acknowledgment(message) => Ok(events),
            _ => Err(io::Error::other("the kernel does not acknowledge the request")),
        }
    }

    fn request(&self, operation: u32) -> io::Result<()> {
        let length = (NETLINK_HEADER + CONNECTOR_HEADER + 4) as u32;
        // Netlink: length, type "done" without flags, sequence, port. Connector: address, sequence, acknowledgment,
        // length of the rest without flags.
        let words = [length, 3, 0, 0, PROCESS_CONNECTOR, PROCESS_CONNECTOR, 0, 0, 4, operation];
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        send(&self.socket, &bytes, SendFlags::empty())?;
        Ok(())
    }

    /// The next waiting message; `None` if there is none.
    fn next_message<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
        match rustix::io::retry_on_intr(|| recv(&self.socket, &mut *buffer, RecvFlags::empty())) {
            Ok((length, _)) => Ok(Some(&buffer[..length])),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Passes the waiting events on, in order.
    ///
    /// # Errors
    /// Events were lost; those after them follow with the next call.
    pub fn take(&mut self, mut take_event: impl FnMut(ProcessEvent)) -> io::Result<()> {
        let mut buffer = [0; MAX_MESSAGE_BYTES];
        while let Some(message) = self.next_message(&mut buffer)? {
            parse_message(message).into_iter().for_each(&mut take_event);
        }
        Ok(())
    }
}

impl Drop for ProcessEvents {
    /// Before Linux 6.6, the kernel does not notice the end of a subscriber and would send messages for ever.
    fn drop(&mut self) {
        let _ = self.request(IGNORE);
    }
}

fn read_word(message: &[u8], index: usize) -> Option<u32> {
    let offset = NETLINK_HEADER + CONNECTOR_HEADER + 4 * index;
    Some(u32::from_ne_bytes(message.get(offset..offset + 4)?.try_into().ok()?))
}

fn is_acknowledgment(message: &[u8]) -> bool {
    read_word(message, 0) == Some(0) && read_word(message, EVENT_HEADER / 4) == Some(0)
}

/// The event in a message; `None` if it is no event, or one that is not used here.
pub fn parse_message(message: &[u8]) -> Option<ProcessEvent> {
    let id = |index| Some(read_word(message, EVENT_HEADER / 4 + index)? as i32).filter(|id| *id > 0);
    match read_word(message, 0)? {
        // Parent's thread and process, child's thread and process.
        1 => match (id(2)?, id(3)?) {
            (tid, pid) if tid == pid => Some(ProcessEvent::Birth { parent: id(1)?, pid }),
            (tid, pid) => Some(ProcessEvent::ThreadBirth { pid, tid }),
        },
        // Thread and process: exec, name, user.
        2 | 0x200 => Some(ProcessEvent::Change { pid: id(1)? }),
        4 => Some(ProcessEvent::UserChange { pid: id(1)? }),
        0x8000_0000 => Some(ProcessEvent::Exit { tid: id(0)?, pid: id(1)? }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skip_test::report_unchecked;
    use std::collections::BTreeSet;

    /// Do the kernel's messages name the birth, the program and the end of a child, and the birth of a thread?
    #[test]
    fn a_childs_life_is_reported() {
        let mut events = match ProcessEvents::subscribe() {
            Ok(events) => events,
            Err(error) => return report_unchecked("events of the process connector", error),
        };
        let own_pid = std::process::id() as i32;
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        let tid = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().get()).join().unwrap();
        let mut seen = Vec::new();
        events.take(|event| seen.push(event)).unwrap();
        for expected in [
            ProcessEvent::Birth { parent: own_pid, pid },
            ProcessEvent::Change { pid },
            ProcessEvent::Exit { pid, tid: pid },
            ProcessEvent::ThreadBirth { pid: own_pid, tid },
        ] {
            assert!(seen.contains(&expected), "{expected:?} in {seen:?}");
        }
    }

    /// Is a message cut at any place no event, and is one of another kind none?
    #[test]
    fn a_message_that_is_cut_is_no_event() {
        let mut message = vec![0u8; NETLINK_HEADER + CONNECTOR_HEADER];
        for word in [1u32, 0, 0, 0, 7, 7, 9, 9] {
            message.extend(word.to_ne_bytes());
        }
        assert_eq!(parse_message(&message), Some(ProcessEvent::Birth { parent: 7, pid: 9 }));
        let events: BTreeSet<bool> =
            (0..message.len()).map(|length| parse_message(&message[..length]).is_some()).collect();
        assert_eq!(events, BTreeSet::from([false]));
        message[NETLINK_HEADER + CONNECTOR_HEADER] = 0x40;
        assert_eq!(parse_message(&message), None);
    }
}
