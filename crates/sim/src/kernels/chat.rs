//! chatrooms: VolanoMark's server, with two threads per connection.
//!
//! Method (papers TC, section 3.5.2; 2 rooms x 8 clients, no think time): a connection's reader takes an incoming
//! message and parses it in a private buffer. It appends the message to the room's list under the room's lock, and
//! posts to the writer of every connection of the room. A writer waits for messages, copies each from the room's list
//! and sends it. Clients answer at once, so readers wait for their own writer: a reader continues when its writer has
//! delivered the client's own message. Every wait is paired with one post.

use cachemate_core::BatchEnd;

use super::emitter::AccessEmitter;
use super::random::Rng;
use super::servers::{Membership, add_collectors, group_members, group_users};
use super::setup::{KernelMaker, KernelSetup, Region, RegionUsers, WorkloadKernel};

pub(super) const PROGRAMS: &[KernelMaker] = &[("chatrooms", add_room_threads)];

const MESSAGE_BYTES: u64 = 256;

/// A room, whose members and message ring its connections share.
#[derive(Clone, Copy)]
struct ChatRoom {
    message_ring: Region,
    /// Lock, member list and counters of the room.
    state: Region,
    clients: u32,
    /// First of the room's channels; each connection has two in a row, the writer's and then the reader's.
    first_channel: u32,
}

impl ChatRoom {
    fn writer_channel(&self, client_index: u32) -> u32 {
        self.first_channel + 2 * client_index
    }

    fn reader_channel(&self, member_index: u32) -> u32 {
        self.first_channel + 2 * member_index + 1
    }

    fn message_address(&self, message_index: u64) -> u64 {
        self.message_ring.element_address(
            message_index % (self.message_ring.bytes / MESSAGE_BYTES),
            MESSAGE_BYTES,
        )
    }
}

fn add_room_threads(setup: &mut KernelSetup) {
    let members = group_members(setup);
    let groups = setup.sizes.len() as u64;
    let data_bytes = setup.data_bytes();
    // A quarter of the heap holds the rooms, an eighth the server's own data, the rest the connections' buffers.
    let server_data = setup.add_shared_region("server", data_bytes / 8);
    let mut rooms = Vec::new();
    let mut heap_regions = vec![server_data];
    let mut next_channel = 0;
    for group in 0..groups as u32 {
        let users = group_users(setup, group);
        let clients = setup.sizes[group as usize];
        let state = setup.add_region("room", 4096.min(data_bytes / 64 / groups), users);
        let messages = setup.add_region(
            "messages",
            (data_bytes / 4 / groups)
                .saturating_sub(state.bytes)
                .max(512),
            users,
        );
        heap_regions.push(messages);
        rooms.push(ChatRoom {
            message_ring: messages,
            state,
            clients,
            first_channel: next_channel,
        });
        next_channel += 2 * clients;
    }
    let used_bytes: u64 = total_room_bytes(&rooms) + server_data.bytes;
    let buffer_bytes =
        (data_bytes.saturating_sub(used_bytes) / (2 * members.len() as u64)).max(1024);
    for &(group, member_index) in &members {
        for role in [ConnectionRole::Reader, ConnectionRole::Writer] {
            let thread = setup.thread_count();
            let buffer = setup.add_region(
                "connection buffer",
                buffer_bytes,
                RegionUsers::Thread(thread),
            );
            let connection = ChatConnection {
                rooms: rooms.clone(),
                own_room: rooms[group as usize],
                membership: Membership::new(group, member_index, setup),
                server_data,
                buffer,
                client_index: member_index,
                role,
                stage: ChatStage::Work,
                buffer_offset: 0,
                rng: Rng::new(setup.rng.next_bits()),
            };
            setup.add_member(group, member_index, connection);
        }
    }
    add_collectors(setup, &heap_regions, server_data);
}

fn total_room_bytes(rooms: &[ChatRoom]) -> u64 {
    rooms
        .iter()
        .map(|room| room.message_ring.bytes + room.state.bytes)
        .sum()
}

#[derive(Clone, Copy, PartialEq)]
enum ConnectionRole {
    Reader,
    Writer,
}

/// The stage of a thread between two batches.
#[derive(Clone, Copy)]
enum ChatStage {
    Work,
    /// The reader posts to its writers, and has posted to this many so far.
    Post(u32),
    Wait,
}

struct ChatConnection {
    rooms: Vec<ChatRoom>,
    /// Room whose members the thread wakes. It never changes, so that waits and posts stay paired.
    own_room: ChatRoom,
    /// Group whose messages the thread processes.
    membership: Membership,
    server_data: Region,
    buffer: Region,
    client_index: u32,
    role: ConnectionRole,
    stage: ChatStage,
    buffer_offset: u64,
    rng: Rng,
}

impl ChatConnection {
    fn choose_room(&self, message_count: u64) -> ChatRoom {
        // Both roles change phase after the same number of the room's messages. A reader counts only its own messages,
        // which are one in `clients`.
        let messages = match self.role {
            ConnectionRole::Reader => message_count * u64::from(self.own_room.clients),
            ConnectionRole::Writer => message_count,
        };
        self.rooms[self.membership.current_group(messages)]
    }

    fn next_buffer_word(&mut self) -> u64 {
        self.buffer_offset = (self.buffer_offset + 8) % self.buffer.bytes;
        self.buffer.base + self.buffer_offset
    }

    /// Emits reads of the server's own data: sessions, character tables, buffers of the socket layer.
    fn emit_server_accesses(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.function_count());
        for _ in 0..3 {
            out.enter_function(self.rng.draw_function(functions));
            for _ in 0..6 {
                let word = self
                    .server_data
                    .element_address(self.rng.draw_skewed(self.server_data.bytes / 8), 8);
                out.load(word);
            }
            for _ in 0..8 {
                let word = self.next_buffer_word();
                out.load(word);
                out.store(word);
            }
        }
        // All threads update one line of statistics.
        out.load(self.server_data.base);
        out.store(self.server_data.base);
    }

    /// Emits the accesses that take the room's lock, and read or append the newest message.
    fn emit_message_exchange(&mut self, out: &mut AccessEmitter) {
        let room = self.choose_room(out.work_done);
        self.emit_server_accesses(out);
        out.load(room.state.base);
        out.store(room.state.base);
        for client in 0..u64::from(room.clients) {
            out.load(room.state.base + (64 + client * 16) % room.state.bytes);
        }

        // All members append to the ring in turn, so the index of the newest message is about the member's own count
        // times the number of members.
        let number = out.work_done * u64::from(room.clients) + u64::from(self.client_index);
        let message = match self.role {
            ConnectionRole::Reader => room.message_address(number),
            ConnectionRole::Writer => room.message_address(out.work_done),
        };
        for word in 0..MESSAGE_BYTES / 8 {
            match self.role {
                ConnectionRole::Reader => out.store(message + word * 8),
                ConnectionRole::Writer => {
                    out.load(message + word * 8);
                    let buffer_address = self.next_buffer_word();
                    out.store(buffer_address);
                }
            }
        }
        out.store(room.state.base + 8);
        out.work_done += 1;
    }
}

impl WorkloadKernel for ChatConnection {
    fn step(&mut self, out: &mut AccessEmitter) {
        match (self.role, self.stage) {
            (ConnectionRole::Reader, ChatStage::Work) => {
                self.emit_message_exchange(out);
                self.stage = ChatStage::Post(0);
            }
            (ConnectionRole::Reader, ChatStage::Post(place)) => {
                self.stage = if place + 1 < self.own_room.clients {
                    ChatStage::Post(place + 1)
                } else {
                    ChatStage::Wait
                };
                out.end_batch(BatchEnd::Post {
                    channel: self.own_room.writer_channel(place),
                });
            }
            (ConnectionRole::Reader, ChatStage::Wait) => {
                // The client answers when its own message returns.
                self.stage = ChatStage::Work;
                out.end_batch(BatchEnd::Wait {
                    channel: self.own_room.reader_channel(self.client_index),
                });
            }
            (ConnectionRole::Writer, ChatStage::Work) => {
                self.stage = ChatStage::Wait;
                out.end_batch(BatchEnd::Wait {
                    channel: self.own_room.writer_channel(self.client_index),
                });
            }
            (ConnectionRole::Writer, ChatStage::Wait) => {
                self.emit_message_exchange(out);
                self.stage = ChatStage::Work;
                // One in `clients` messages is the client's own.
                if out
                    .work_done
                    .is_multiple_of(u64::from(self.own_room.clients))
                {
                    out.end_batch(BatchEnd::Post {
                        channel: self.own_room.reader_channel(self.client_index),
                    });
                }
            }
            (ConnectionRole::Writer, ChatStage::Post(_)) => {
                unreachable!("writers post in one turn")
            }
        }
    }
}
