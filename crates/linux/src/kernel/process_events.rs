//! The kernel's messages about processes that start, change and exit: the process connector (`CN_PROC` over netlink).
//!
//! Problem: a listing of `/proc` finds every process that lives at that time, at a cost for each of them, and misses
//! those that live between two listings. Method: the connector sends one message for each fork, exec, exit and change
//! of user or name; they wait in the socket until they are taken. Properties: it needs `CAP_NET_ADMIN` and the host's
//! first PID namespace; elsewhere there are no events. If the socket's buffer overflows, the loss is reported.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::{CONNECTOR, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
    sockopt,
};

/// `CN_IDX_PROC` and `CN_VAL_PROC`: the connector's address, and its multicast group.
const PROCESS_CONNECTOR: u32 = 1;
const LISTEN_OPERATION: u32 = 1;
const IGNORE_OPERATION: u32 = 2;
/// Lengths of the two headers before an event, and of the event's own header.
const NETLINK_HEADER_BYTES: usize = 16;
const CONNECTOR_HEADER_BYTES: usize = 20;
const EVENT_HEADER_BYTES: usize = 16;
/// An event with its headers has 76 bytes.
const MAX_MESSAGE_BYTES: usize = 256;
/// A message takes less than a kilobyte of the buffer, so ten thousand threads may start at the same time.
const BUFFER_BYTES: usize = 16 << 20;

/// A change of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessEvent {
    /// A process has begun.
    ProcessStart {
        /// The process that started it.
        parent_pid: i32,
        /// The new process.
        pid: i32,
    },
    /// A thread has begun.
    ThreadStart {
        /// The thread's process.
        pid: i32,
        /// The thread.
        tid: i32,
    },
    /// The program, or the name of a thread, has changed.
    ProgramChange {
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
pub struct ProcessEventSubscription {
    socket: OwnedFd,
}

impl ProcessEventSubscription {
    /// Subscribes to the events of all processes.
    ///
    /// # Errors
    /// The kernel has no connector, or this process may not listen.
    pub fn subscribe() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::DGRAM,
            flags,
            Some(CONNECTOR),
        )?;
        bind(&socket, &SocketAddrNetlink::new(0, PROCESS_CONNECTOR))?;
        sockopt::set_socket_recv_buffer_size_force(&socket, BUFFER_BYTES)?;
        let events = ProcessEventSubscription { socket };
        events.request(LISTEN_OPERATION)?;
        // The kernel acknowledges before `send` returns, unless it ignores the request, as in a PID namespace.
        let mut message = [0; MAX_MESSAGE_BYTES];
        match events.next_message(&mut message)? {
            Some(message) if is_acknowledgment(message) => Ok(events),
            _ => Err(io::Error::other(
                "the kernel does not acknowledge the request",
            )),
        }
    }

    fn request(&self, operation: u32) -> io::Result<()> {
        let length = (NETLINK_HEADER_BYTES + CONNECTOR_HEADER_BYTES + 4) as u32;
        // Netlink: length, type "done" without flags, sequence, port. Connector: address, sequence, acknowledgment,
        // length of the rest without flags.
        let words = [
            length,
            3,
            0,
            0,
            PROCESS_CONNECTOR,
            PROCESS_CONNECTOR,
            0,
            0,
            4,
            operation,
        ];
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

    /// Passes the waiting events to `handle_event`, in order.
    ///
    /// # Errors
    /// Events were lost; the next call delivers the events after them.
    pub fn deliver_events(&mut self, mut handle_event: impl FnMut(ProcessEvent)) -> io::Result<()> {
        let mut buffer = [0; MAX_MESSAGE_BYTES];
        while let Some(message) = self.next_message(&mut buffer)? {
            parse_message(message)
                .into_iter()
                .for_each(&mut handle_event);
        }
        Ok(())
    }
}

impl Drop for ProcessEventSubscription {
    /// Ends the subscription, because before Linux 6.6 the kernel does not notice that a subscriber has exited.
    fn drop(&mut self) {
        let _ = self.request(IGNORE_OPERATION);
    }
}

fn read_word(message: &[u8], index: usize) -> Option<u32> {
    let offset = NETLINK_HEADER_BYTES + CONNECTOR_HEADER_BYTES + 4 * index;
    Some(u32::from_ne_bytes(
        message.get(offset..offset + 4)?.try_into().ok()?,
    ))
}

fn is_acknowledgment(message: &[u8]) -> bool {
    read_word(message, 0) == Some(0) && read_word(message, EVENT_HEADER_BYTES / 4) == Some(0)
}

/// The event in a message; `None` if the message contains no event, or one that is not used here.
pub fn parse_message(message: &[u8]) -> Option<ProcessEvent> {
    let read_id = |index| {
        Some(read_word(message, EVENT_HEADER_BYTES / 4 + index)? as i32).filter(|id| *id > 0)
    };
    match read_word(message, 0)? {
        // Parent's thread and process, child's thread and process.
        1 => match (read_id(2)?, read_id(3)?) {
            (tid, pid) if tid == pid => Some(ProcessEvent::ProcessStart {
                parent_pid: read_id(1)?,
                pid,
            }),
            (tid, pid) => Some(ProcessEvent::ThreadStart { pid, tid }),
        },
        // Thread and process: exec, name, user.
        2 | 0x200 => Some(ProcessEvent::ProgramChange { pid: read_id(1)? }),
        4 => Some(ProcessEvent::UserChange { pid: read_id(1)? }),
        0x8000_0000 => Some(ProcessEvent::Exit {
            tid: read_id(0)?,
            pid: read_id(1)?,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skip_test::report_unchecked;
    use std::collections::BTreeSet;

    /// Does the kernel report the start, exec and exit of a child process, and the start of a thread?
    #[test]
    fn starts_execs_and_exits_of_children_are_reported() {
        let mut events = match ProcessEventSubscription::subscribe() {
            Ok(events) => events,
            Err(error) => return report_unchecked("events of the process connector", error),
        };
        let own_pid = std::process::id() as i32;
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        let tid = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().get())
            .join()
            .unwrap();
        let mut received_events = Vec::new();
        events
            .deliver_events(|event| received_events.push(event))
            .unwrap();
        for expected in [
            ProcessEvent::ProcessStart {
                parent_pid: own_pid,
                pid,
            },
            ProcessEvent::ProgramChange { pid },
            ProcessEvent::Exit { pid, tid: pid },
            ProcessEvent::ThreadStart { pid: own_pid, tid },
        ] {
            assert!(
                received_events.contains(&expected),
                "{expected:?} in {received_events:?}"
            );
        }
    }

    /// Is a truncated message ignored, whatever its length, and a message of another kind too?
    #[test]
    fn a_truncated_message_is_no_event() {
        let mut message = vec![0u8; NETLINK_HEADER_BYTES + CONNECTOR_HEADER_BYTES];
        for word in [1u32, 0, 0, 0, 7, 7, 9, 9] {
            message.extend(word.to_ne_bytes());
        }
        assert_eq!(
            parse_message(&message),
            Some(ProcessEvent::ProcessStart {
                parent_pid: 7,
                pid: 9
            })
        );
        let outcomes_by_length: BTreeSet<bool> = (0..message.len())
            .map(|length| parse_message(&message[..length]).is_some())
            .collect();
        assert_eq!(outcomes_by_length, BTreeSet::from([false]));
        message[NETLINK_HEADER_BYTES + CONNECTOR_HEADER_BYTES] = 0x40;
        assert_eq!(parse_message(&message), None);
    }
}
