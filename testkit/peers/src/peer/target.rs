//! Scripted target.

use super::{Listener, answer, answer_with, receive_message, send_message};
use socket2::Socket;
use std::io::Read;
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, RegionRun, Table, ToSource, ToTarget, Token};

/// Target without a guest: it accepts all data of the source and ignores the pages.
#[derive(Debug)]
pub struct Target<'a> {
    listener: &'a Listener,
    /// Control channel.
    pub control: Socket,
    /// Bulk channels and then urgent channels. No page is read unless the script reads it.
    pub data: Vec<Socket>,
}

impl<'a> Target<'a> {
    /// Token with which a source resumes a lost link.
    pub const RESUME: Token = Token([3; 16]);

    /// Waits for a source, and accepts the greeting of its control channel.
    ///
    /// # Panics
    ///
    /// Panics if the source hangs up.
    pub fn accept_control(listener: &'a Listener) -> Self {
        Self::accept_control_with(listener, 0)
    }

    /// Does the same as [`accept_control`](Self::accept_control), and offers `features`.
    ///
    /// # Panics
    ///
    /// Panics if the source hangs up.
    pub fn accept_control_with(listener: &'a Listener, features: u64) -> Self {
        let mut control = listener.connection();
        answer_with(&mut control, features).expect("a hello");
        Self { listener, control, data: Vec::new() }
    }

    /// Sends `message` to the source.
    pub fn send(&mut self, message: &ToSource) {
        send_message(&mut self.control, message);
    }

    /// Returns the next message other than a ping, or `None` at the end of the channel. Answers
    /// pings.
    pub fn receive(&mut self) -> Option<ToTarget> {
        loop {
            match receive_message(&mut self.control)? {
                ToTarget::Ping(number) => self.send(&ToSource::Pong(number)),
                message => return Some(message),
            }
        }
    }

    /// Reads messages, and answers pings, until the source hangs up.
    pub fn listen(&mut self) {
        while self.receive().is_some() {}
    }

    /// Waits for the next connection of the source.
    pub fn connection(&self) -> Socket {
        self.listener.connection()
    }

    /// Accepts the guest that the source offers.
    ///
    /// # Panics
    ///
    /// Panics if the source does not offer a guest.
    pub fn agree(&mut self) {
        assert!(matches!(self.receive(), Some(ToTarget::Setup { .. })));
        self.send(&ToSource::Accept { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Self::RESUME });
    }

    /// Waits for `channels` data channels, and accepts their greetings.
    ///
    /// # Panics
    ///
    /// Panics if the source hangs up.
    pub fn take(&mut self, channels: usize) {
        for _ in 0..channels {
            let mut stream = self.connection();
            assert!(answer(&mut stream).is_some());
            self.data.push(stream);
        }
    }

    /// Accepts the guest, with `channels` data channels.
    pub fn accept(&mut self, channels: usize) {
        self.agree();
        self.take(channels);
        self.send(&ToSource::ChannelsUp);
    }

    /// Reads the header of the next frame of data channel 0. The rest of the frame must not be read.
    ///
    /// # Panics
    ///
    /// Panics if no header of a frame arrives.
    pub fn first_header(&mut self) -> FrameHeader {
        let mut header = [0; FRAME_HEADER_BYTES];
        self.data[0].read_exact(&mut header).expect("a frame");
        FrameHeader::decode(&header).expect("the header of a frame")
    }

    /// Reads the frames of data channel 0 up to a barrier. Returns the pass that the barrier ends.
    ///
    /// # Panics
    ///
    /// Panics if a frame cannot be decoded.
    pub fn swallow_pass(&mut self) -> Option<u32> {
        let bulk = &mut self.data[0];
        loop {
            let mut header = [0; FRAME_HEADER_BYTES];
            bulk.read_exact(&mut header).ok()?;
            let header = FrameHeader::decode(&header).expect("the header of a frame");
            assert_ne!(header.kind, FrameKind::Touched, "the reply to the hello has no feature bit");
            let mut table = vec![0; header.table_bytes()];
            bulk.read_exact(&mut table).ok()?;
            if header.kind == FrameKind::Pages {
                let table = Table::decode(&header, &table, u64::MAX).expect("the table of a frame");
                bulk.read_exact(&mut vec![0; table.content_bytes()]).ok()?;
            }
            if header.kind == FrameKind::Barrier {
                return Some(header.pass);
            }
        }
    }

    /// Reports a received pass and the runs with a digest mismatch.
    pub fn received(&mut self, pass: u32, mismatches: u64, runs: Vec<RegionRun>) {
        self.send(&ToSource::Received { pass, mismatches, runs });
    }

    /// Follows the migration, with one data channel, until the guest has stopped and its last pass
    /// has arrived. Returns the number of that pass, which is not answered.
    ///
    /// # Panics
    ///
    /// Panics if the source sends another message.
    pub fn until_the_last_pass(&mut self) -> u32 {
        self.accept(1);
        loop {
            match self.receive().expect("the next pass") {
                ToTarget::Pass { .. } => {
                    let pass = self.swallow_pass().expect("a whole pass");
                    self.received(pass, 0, vec![]);
                }
                ToTarget::Final { .. } => return self.swallow_pass().expect("the last pass"),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Follows the migration, with one data channel, until the source has requested that the state
    /// is loaded.
    ///
    /// # Panics
    ///
    /// Panics if the source hangs up.
    pub fn until_load(&mut self) {
        let pass = self.until_the_last_pass();
        self.received(pass, 0, vec![]);
        while self.receive().expect("the request to load") != ToTarget::Load {}
    }
}
