//! Streams of device state.

use std::mem;
use vmferry_core::{StateReader, StreamName, VmError};
use vmferry_protocol::source::Event;
use vmferry_wire::{MAX_STREAM_BYTES, ToTarget};

/// Stream of device state, and whether it was read to its end.
struct Stream {
    reader: Box<dyn StateReader>,
    ended: bool,
}

/// Round of sending, in which all streams are read once.
#[derive(Clone, Copy)]
struct Round {
    /// Stream that is read next.
    next: usize,
    bytes: u64,
    /// Bytes after which the round ends while the guest runs, because a device may produce state
    /// without end. `None` if the guest is paused and all state is sent.
    most: Option<u64>,
}

/// Step of a round.
pub(super) enum Piece {
    Message(ToTarget),
    /// The round has ended.
    Done {
        bytes: u64,
        left: u64,
    },
}

/// Streams of device state. One piece at a time is in memory.
pub(super) struct Streams {
    streams: Vec<Stream>,
    round: Option<Round>,
    buffer: Vec<u8>,
    /// Event that the session must receive.
    report: Option<Event>,
}

impl Streams {
    pub(super) fn new(readers: Vec<Box<dyn StateReader>>) -> Self {
        let buffer = if readers.is_empty() { Vec::new() } else { vec![0; MAX_STREAM_BYTES] };
        let streams = readers.into_iter().map(|reader| Stream { reader, ended: false }).collect();
        Self { streams, round: None, buffer, report: None }
    }

    pub(super) fn names(&self) -> Vec<StreamName> {
        self.streams.iter().map(|stream| stream.reader.name()).collect()
    }

    /// Returns true if there is a piece to send.
    pub(super) fn under_way(&self) -> bool {
        self.round.is_some() && self.report.is_none()
    }

    /// Begins a round.
    pub(super) fn begin(&mut self, paused: bool) -> Result<(), VmError> {
        let most = if paused { None } else { Some(self.left()?) };
        self.round = Some(Round { next: 0, bytes: 0, most });
        Ok(())
    }

    /// Ends the round, and stores `event` for the session.
    pub(super) fn end(&mut self, event: Event) {
        (self.round, self.report) = (None, Some(event));
    }

    pub(super) fn take_report(&mut self) -> Option<Event> {
        self.report.take()
    }

    fn left(&mut self) -> Result<u64, VmError> {
        self.streams.iter_mut().try_fold(0_u64, |sum, stream| {
            let left = if stream.ended { 0 } else { stream.reader.left()? };
            Ok(sum.saturating_add(left))
        })
    }

    /// Reads the next piece of the round.
    pub(super) fn next_piece(&mut self) -> Result<Piece, VmError> {
        let Some(mut round) = self.round else { return Ok(Piece::Done { bytes: 0, left: self.left()? }) };
        while let Some(stream) = self.streams.get_mut(round.next)
            && round.most.is_none_or(|most| round.bytes < most)
        {
            let number = u32::try_from(round.next).unwrap_or(u32::MAX);
            let count = if stream.ended { 0 } else { stream.reader.read(&mut self.buffer)? };
            if count > 0 {
                assert!(count <= self.buffer.len(), "a reader returned more bytes than its buffer holds");
                round.bytes += count as u64;
                self.round = Some(round);
                let bytes = self.buffer[..count].to_vec();
                return Ok(Piece::Message(ToTarget::StreamBytes { stream: number, bytes }));
            }
            round.next += 1;
            // While the guest is paused, a reader that returns no bytes has reached its end.
            if round.most.is_none() && !mem::replace(&mut stream.ended, true) {
                self.round = Some(round);
                return Ok(Piece::Message(ToTarget::StreamEnd { stream: number }));
            }
        }
        Ok(Piece::Done { bytes: round.bytes, left: self.left()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device whose state grows by two bytes at each read while the guest runs.
    struct Growing {
        left: u64,
        grows: bool,
    }

    impl StateReader for Growing {
        fn name(&self) -> StreamName {
            StreamName { name: "growing".into(), instance: 0, version: 1 }
        }

        fn left(&mut self) -> Result<u64, VmError> {
            Ok(self.left)
        }

        fn read(&mut self, buffer: &mut [u8]) -> Result<usize, VmError> {
            let count = self.left.min(2);
            self.left = self.left - count + if self.grows { 2 } else { 0 };
            buffer[..2].fill(7);
            Ok(usize::try_from(count).unwrap())
        }
    }

    /// Returns the messages of a round, abbreviated, and the bytes that were sent and are left.
    fn round(streams: &mut Streams, paused: bool) -> (Vec<String>, (u64, u64)) {
        streams.begin(paused).unwrap();
        let mut messages = Vec::new();
        loop {
            match streams.next_piece().unwrap() {
                Piece::Message(ToTarget::StreamBytes { stream, bytes }) => {
                    messages.push(format!("{stream}: {}", bytes.len()));
                }
                Piece::Message(ToTarget::StreamEnd { stream }) => messages.push(format!("{stream} ends")),
                Piece::Message(other) => panic!("{other:?}"),
                Piece::Done { bytes, left } => return (messages, (bytes, left)),
            }
        }
    }

    fn streams(grows: bool) -> Streams {
        let reader = |left| Box::new(Growing { left, grows }) as Box<dyn StateReader>;
        Streams::new(vec![reader(4), reader(0), reader(3)])
    }

    #[test]
    fn round_ends_although_a_device_produces_state_for_ever() {
        let (messages, account) = round(&mut streams(true), false);
        assert_eq!(messages, ["0: 2", "0: 2", "0: 2", "0: 2"]);
        assert_eq!(account, (8, 7));
    }

    #[test]
    fn each_stream_ends_once_when_the_guest_is_paused() {
        let mut streams = streams(false);
        assert_eq!(
            round(&mut streams, false),
            (vec!["0: 2".into(), "0: 2".into(), "2: 2".into(), "2: 1".into()], (7, 0))
        );
        assert_eq!(
            round(&mut streams, true),
            (vec!["0 ends".into(), "1 ends".into(), "2 ends".into()], (0, 0))
        );
        assert_eq!(round(&mut streams, true), (vec![], (0, 0)));
    }
}
