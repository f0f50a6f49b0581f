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

pub(super) const PROGRAMS: &[KernelMaker] = &[("chatrooms", set_up_rooms)];

const MESSAGE_BYTES: u64 = 256;

/// A room, whose members and message ring its connections share.
#[derive(Clone, Copy)]
struct ChatRoom {
    messages: Region,
    /// Lock, member list and counters of the room.
    state: Region,
    clients: u32,
    /// Channel of the first connection's writer, followed by those of the other writers and then of the readers.
    first_channel: u32,
}

impl ChatRoom {
    fn writer_channel(&self, place: u32) -> u32 {
        self.first_channel + 2 * place
    }

    fn reader_channel(&self, place: u32) -> u32 {
        self.first_channel + 2 * place + 1
    }

    fn message_address(&self, number: u64) -> u64 {
        self.messages.element_address(number % (self.messages.bytes / MESSAGE_BYTES), MESSAGE_BYTES)
    }
}

fn set_up_rooms(setup: &mut KernelSetup) {
    let members = group_members(setup);
    let groups = setup.sizes.len() as u64;
    let data = setup.data_bytes();
    // A quarter of the heap holds the rooms, an eighth the server's own data, the rest the connections' buffers.
    let process = setup.add_region("server", data / 8, RegionUsers::All);
    let mut rooms = Vec::new();
    let mut heap = vec![process];
    let mut channel = 0;
    for group in 0..groups as u32 {
        let users = group_users(setup, group);
        let clients = setup.sizes[group as usize];
        let state = setup.add_region("room", 4096.min(data / 64 / groups), users);
        let messages = setup.add_region("messages", (data / 4 / groups).saturating_sub(state.bytes).max(512), users);
        heap.push(messages);
        rooms.push(ChatRoom { messages, state, clients, first_channel: channel });
        channel += 2 * clients;
    }
    let used_bytes: u64 = setup_bytes(&rooms) + process.bytes;
    let buffer_bytes = (data.saturating_sub(used_bytes) / (2 * members.len() as u64)).max(1024);
    for &(group, place) in &members {
        for role in [Role::Reader, Role::Writer] {
            let thread = setup.thread_count();
            let buffer = setup.add_region("connection buffer", buffer_bytes, RegionUsers::Thread(thread));
            let connection = ChatConnection {
                rooms: rooms.clone(),
                own_room: rooms[group as usize],
                membership: Membership::new(group, place, setup),
                process,
                buffer,
                place,
                role,
                stage: ChatStage::Work,
                messages: 0,
                at: 0,
                rng: Rng::new(setup.rng.bits()),
            };
            setup.add_member(group, place, connection);
        }
    }
    add_collectors(setup, &heap, process);
}

fn setup_bytes(rooms: &[ChatRoom]) -> u64 {
    rooms.iter().map(|room| room.messages.bytes + room.state.bytes).sum()
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
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
    process: Region,
    buffer: Region,
    place: u32,
    role: Role,
    stage: ChatStage,
    messages: u64,
    at: u64,
    rng: Rng,
}

impl ChatConnection {
    fn current_room(&self) -> ChatRoom {
        // A change of phase comes after the same number of the room's messages in both roles, and a reader appends one
        // message in `clients`.
        let messages = match self.role {
            Role::Reader => self.messages * u64::from(self.own_room.clients),
            Role::Writer => self.messages,
        };
        self.rooms[self.membership.phase_at(messages)]
    }

    fn buffer_word(&mut self) -> u64 {
        self.at = (self.at + 8) % self.buffer.bytes;
        self.buffer.base + self.at
    }

    /// Emits reads of the server's own data: sessions, character tables, buffers of the socket layer.
    fn serve(&mut self, out: &mut AccessEmitter) {
        let functions = u64::from(out.functions());
        for _ in 0..3 {
            out.enter_function(self.rng.draw_function(functions));
            for _ in 0..6 {
                let word = self.process.element_address(self.rng.draw_skewed(self.process.bytes / 8), 8);
                out.load(word);
            }
            for _ in 0..8 {
                let word = self.buffer_word();
                out.load(word);
                out.store(word);
            }
        }
        // All threads update one line of statistics.
        out.load(self.process.base);
        out.store(self.process.base);
    }

    /// Emits taking the room's lock, and reading or appending the newest message.
    fn exchange_message(&mut self, out: &mut AccessEmitter) {
        let room = self.current_room();
        self.serve(out);
        out.load(room.state.base);
        out.store(room.state.base);
        for client in 0..u64::from(room.clients) {
            out.load(room.state.base + (64 + client * 16) % room.state.bytes);
        }
        // All members append to the ring in turn, so the newest message has about the number of members times the
        // member's own count.
        let number = self.messages * u64::from(room.clients) + u64::from(self.place);
        let message = match self.role {
            Role::Reader => room.message_address(number),
            Role::Writer => room.message_address(self.messages),
        };
        for word in 0..MESSAGE_BYTES / 8 {
            match self.role {
                Role::Reader => out.store(message + word * 8),
                Role::Writer => {
                    out.load(message + word * 8);
                    let target = self.buffer_word();
                    out.store(target);
                }
            }
        }
        out.store(room.state.base + 8);
        self.messages += 1;
    }
}

impl WorkloadKernel for ChatConnection {
    fn step(&mut self, out: &mut AccessEmitter) -> BatchEnd {
        match (self.role, self.stage) {
            (Role::Reader, ChatStage::Work) => {
                self.exchange_message(out);
                self.stage = ChatStage::Post(0);
                BatchEnd::More
            }
            (Role::Reader, ChatStage::Post(place)) => {
                self.stage =
                    if place + 1 < self.own_room.clients { ChatStage::Post(place + 1) } else { ChatStage::Wait };
                BatchEnd::Post { channel: self.own_room.writer_channel(place) }
            }
            (Role::Reader, ChatStage::Wait) => {
                // The client answers when its own message returns.
                self.stage = ChatStage::Work;
                BatchEnd::Wait { channel: self.own_room.reader_channel(self.place) }
            }
            (Role::Writer, ChatStage::Work) => {
                self.stage = ChatStage::Wait;
                BatchEnd::Wait { channel: self.own_room.writer_channel(self.place) }
            }
            (Role::Writer, ChatStage::Wait) => {
                self.exchange_message(out);
                self.stage = ChatStage::Work;
                // One in `clients` messages is the client's own.
                if self.messages.is_multiple_of(u64::from(self.own_room.clients)) {
                    return BatchEnd::Post { channel: self.own_room.reader_channel(self.place) };
                }
                BatchEnd::More
            }
            (Role::Writer, ChatStage::Post(_)) => unreachable!("writers post in one turn"),
        }
    }

    fn progress(&self) -> f64 {
        self.messages as f64
    }
}
