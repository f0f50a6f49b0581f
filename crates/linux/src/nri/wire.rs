//! The bytes of NRI: frames of several connections on one socket, ttrpc messages in them, protobuf fields in these.
//!
//! A frame is `connection u32, length u32` (big-endian) and that many bytes of the connection's stream. A ttrpc message
//! in a stream is `length u32, stream u32, type u8, flags u8` and its body. Unknown fields are skipped, as protobuf
//! requires. Every length is bounded before anything is allocated.

use std::collections::BTreeMap;

/// Connection of the runtime's requests to the plugin.
pub const PLUGIN_CONNECTION: u32 = 1;
/// Connection of the plugin's requests to the runtime.
pub const RUNTIME_CONNECTION: u32 = 2;
/// Type of a request.
pub const REQUEST: u8 = 1;
/// Type of a response.
pub const RESPONSE: u8 = 2;

/// ttrpc's own limit of a message.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
/// A frame contains at most one message of maximum length with its header.
const MAX_FRAME_BYTES: usize = MAX_MESSAGE_BYTES + MESSAGE_HEADER_BYTES;
const FRAME_HEADER_BYTES: usize = 8;
const MESSAGE_HEADER_BYTES: usize = 10;

/// The error for bytes that do not follow the NRI protocol.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the container runtime's socket: found {found}, expected {expected}")]
pub struct WireError {
    /// The place and the value.
    pub found: String,
    /// The values that are allowed there.
    pub expected: &'static str,
}

fn wire_error(found: impl Into<String>, expected: &'static str) -> WireError {
    WireError {
        found: found.into(),
        expected,
    }
}

/// One ttrpc message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WireMessage {
    /// Number of the connection on which the message arrived.
    pub connection: u32,
    /// Number of the call.
    pub stream: u32,
    /// [`REQUEST`] or [`RESPONSE`].
    pub kind: u8,
    /// The body, a protobuf message.
    pub body: Vec<u8>,
}

impl WireMessage {
    /// The message as one frame for the socket.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes =
            Vec::with_capacity(FRAME_HEADER_BYTES + MESSAGE_HEADER_BYTES + self.body.len());
        bytes.extend(self.connection.to_be_bytes());
        bytes.extend(((MESSAGE_HEADER_BYTES + self.body.len()) as u32).to_be_bytes());
        bytes.extend((self.body.len() as u32).to_be_bytes());
        bytes.extend(self.stream.to_be_bytes());
        bytes.extend([self.kind, 0]);
        bytes.extend(&self.body);
        bytes
    }
}

/// Reassembles messages from the pieces that the socket delivers.
#[derive(Clone, Debug, Default)]
pub struct MessageReader {
    pending_bytes: Vec<u8>,
    stream_bytes: BTreeMap<u32, Vec<u8>>,
}

impl MessageReader {
    /// Adds bytes; removes and returns the messages that are now complete.
    ///
    /// # Errors
    /// A length beyond the limit, or an unknown connection.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<WireMessage>, WireError> {
        self.pending_bytes.extend_from_slice(bytes);
        let mut messages = Vec::new();
        while let Some(head) = self.pending_bytes.first_chunk::<FRAME_HEADER_BYTES>() {
            let [c0, c1, c2, c3, l0, l1, l2, l3] = *head;
            let connection = u32::from_be_bytes([c0, c1, c2, c3]);
            let length = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
            if !matches!(connection, PLUGIN_CONNECTION | RUNTIME_CONNECTION) {
                return Err(wire_error(
                    format!("a frame of connection {connection}"),
                    "connection 1 or 2",
                ));
            }
            if length > MAX_FRAME_BYTES {
                return Err(wire_error(
                    format!("a frame of {length} bytes"),
                    "4 MiB or less",
                ));
            }
            if self.pending_bytes.len() < FRAME_HEADER_BYTES + length {
                break;
            }
            let frame: Vec<u8> = self
                .pending_bytes
                .drain(..FRAME_HEADER_BYTES + length)
                .skip(FRAME_HEADER_BYTES)
                .collect();
            let buffer = self.stream_bytes.entry(connection).or_default();
            buffer.extend(frame);
            take_messages(connection, buffer, &mut messages)?;
        }
        Ok(messages)
    }
}

fn take_messages(
    connection: u32,
    buffer: &mut Vec<u8>,
    messages: &mut Vec<WireMessage>,
) -> Result<(), WireError> {
    while let Some(head) = buffer.first_chunk::<MESSAGE_HEADER_BYTES>() {
        let [l0, l1, l2, l3, s0, s1, s2, s3, kind, _] = *head;
        let length = u32::from_be_bytes([l0, l1, l2, l3]) as usize;
        if length > MAX_MESSAGE_BYTES {
            return Err(wire_error(
                format!("a message of {length} bytes"),
                "4 MiB or less",
            ));
        }
        if buffer.len() < MESSAGE_HEADER_BYTES + length {
            break;
        }
        let body = buffer
            .drain(..MESSAGE_HEADER_BYTES + length)
            .skip(MESSAGE_HEADER_BYTES)
            .collect();
        messages.push(WireMessage {
            connection,
            stream: u32::from_be_bytes([s0, s1, s2, s3]),
            kind,
            body,
        });
    }
    Ok(())
}

/// Value of a protobuf field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FieldValue<'a> {
    /// A number of any width.
    Number(u64),
    /// Text, bytes or a message.
    Bytes(&'a [u8]),
}

impl<'a> FieldValue<'a> {
    /// Converts the value to text, and replaces invalid characters.
    pub fn to_text(self) -> String {
        String::from_utf8_lossy(self.bytes()).into_owned()
    }

    /// The value's bytes; empty for a number.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            FieldValue::Number(_) => &[],
            FieldValue::Bytes(bytes) => bytes,
        }
    }

    /// The value as a number; 0 for bytes.
    pub fn to_number(self) -> u64 {
        match self {
            FieldValue::Number(number) => number,
            FieldValue::Bytes(_) => 0,
        }
    }
}

/// Fields of a protobuf message with their numbers, in order.
///
/// # Errors
/// The message is cut off, or has a field of an unknown kind.
pub fn parse_fields(mut bytes: &[u8]) -> Result<Vec<(u64, FieldValue<'_>)>, WireError> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = parse_varint(&mut bytes)?;
        let value = match key & 7 {
            0 => FieldValue::Number(parse_varint(&mut bytes)?),
            1 => FieldValue::Number(u64::from_le_bytes(take_chunk(&mut bytes)?)),
            5 => FieldValue::Number(u64::from(u32::from_le_bytes(take_chunk(&mut bytes)?))),
            2 => {
                let length = parse_varint(&mut bytes)?;
                let split = usize::try_from(length)
                    .ok()
                    .and_then(|length| bytes.split_at_checked(length));
                let Some((value, remaining_bytes)) = split else {
                    return Err(wire_error(
                        format!("a field of {length} bytes in {}", bytes.len()),
                        "a whole field",
                    ));
                };
                bytes = remaining_bytes;
                FieldValue::Bytes(value)
            }
            kind => {
                return Err(wire_error(
                    format!("a field of kind {kind}"),
                    "kind 0, 1, 2 or 5",
                ));
            }
        };
        fields.push((key >> 3, value));
    }
    Ok(fields)
}

fn take_chunk<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], WireError> {
    let truncation_error = || wire_error(format!("{} bytes", bytes.len()), "a whole number");
    let (chunk, remaining_bytes) = bytes
        .split_first_chunk::<N>()
        .ok_or_else(truncation_error)?;
    let number = *chunk;
    *bytes = remaining_bytes;
    Ok(number)
}

fn parse_varint(bytes: &mut &[u8]) -> Result<u64, WireError> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let [byte] = take_chunk::<1>(bytes)?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(wire_error("a number of more than ten bytes", "at most ten"))
}

/// Builds a protobuf message.
#[derive(Clone, Debug, Default)]
pub struct MessageBuilder(Vec<u8>);

impl MessageBuilder {
    /// Adds text, bytes or a message.
    #[must_use]
    pub fn with_bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.push_varint(field << 3 | 2);
        self.push_varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    /// Adds a number.
    #[must_use]
    pub fn with_number(mut self, field: u64, value: u64) -> Self {
        self.push_varint(field << 3);
        self.push_varint(value);
        self
    }

    /// The message in wire form.
    pub fn build(self) -> Vec<u8> {
        self.0
    }

    fn push_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Do messages come out whole, however the socket cuts them and however frames cut messages?
    #[test]
    fn messages_are_read_whole_however_they_are_cut() {
        let message = |stream, body: &[u8]| WireMessage {
            connection: PLUGIN_CONNECTION,
            stream,
            kind: REQUEST,
            body: body.to_vec(),
        };
        let all = [message(1, b"first"), message(3, b""), message(5, &[7; 300])];
        let bytes: Vec<u8> = all.iter().flat_map(WireMessage::encode).collect();
        for step in [1, 3, 10, bytes.len()] {
            let mut reader = MessageReader::default();
            let read: Vec<WireMessage> = bytes
                .chunks(step)
                .flat_map(|part| reader.push(part).unwrap())
                .collect();
            assert_eq!(read, all, "{step}");
        }
        let encoded = message(1, b"split").encode();
        let frame = |part: &[u8]| {
            [
                &PLUGIN_CONNECTION.to_be_bytes()[..],
                &(part.len() as u32).to_be_bytes(),
                part,
            ]
            .concat()
        };
        let mut reader = MessageReader::default();
        assert_eq!(reader.push(&frame(&encoded[8..14])).unwrap(), []);
        assert_eq!(
            reader.push(&frame(&encoded[14..])).unwrap(),
            [message(1, b"split")]
        );
    }

    /// Are lengths beyond the limit refused before anything is allocated?
    #[test]
    fn messages_beyond_the_limit_are_refused_before_allocation() {
        let head = |connection: u32, length: u32| {
            [connection.to_be_bytes(), length.to_be_bytes()].concat()
        };
        for (bytes, expected) in [
            (head(1, u32::MAX), "4 MiB or less"),
            (head(9, 4), "connection 1 or 2"),
            (
                [head(1, 10), head(u32::MAX, 1), vec![1, 0]].concat(),
                "4 MiB or less",
            ),
        ] {
            assert_eq!(
                MessageReader::default().push(&bytes).unwrap_err().expected,
                expected
            );
        }
    }

    /// Does every field come back, and is a broken message refused?
    #[test]
    fn every_field_is_read_back_and_broken_messages_refused() {
        let bytes = MessageBuilder::default()
            .with_bytes(1, b"name")
            .with_number(2, 300)
            .with_bytes(22, &[])
            .build();
        let read = parse_fields(&bytes).unwrap();
        assert_eq!(
            read,
            [
                (1, FieldValue::Bytes(b"name")),
                (2, FieldValue::Number(300)),
                (22, FieldValue::Bytes(b""))
            ]
        );
        assert_eq!(
            parse_fields(&[0x0d, 1, 0, 0, 0]).unwrap(),
            [(1, FieldValue::Number(1))]
        );
        for broken in [&[0x0a, 5, 1][..], &[0x0b], &[0xff; 12], &[0x09, 1], &[0x80]] {
            assert!(parse_fields(broken).is_err(), "{broken:?}");
        }
    }
}
