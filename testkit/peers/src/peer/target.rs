//! A target that follows a script.

use super::{Listener, answer, hear, say};
use socket2::Socket;
use std::io::Read;
use vmferry_wire::{FRAME_HEADER_BYTES, FrameHeader, FrameKind, RunName, ToSource, ToTarget, Token};

/// A target that has no guest: it takes what the source sends and looks at no page.
#[derive(Debug)]
pub struct Target<'a> {
    listener: &'a Listener,
    /// The control channel.
    pub control: Socket,
    /// The bulk channels, then the urgent ones. No page is read unless the script says so.
    pub data: Vec<Socket>,
}

impl<'a> Target<'a> {
    /// Token with which a source takes a lost link up again.
    pub const RESUME: Token = Token([3; 16]);

    /// Waits for a source, and accepts the greeting of its control channel.
    ///
    /// # Panics
    ///
    /// Panics if the source hangs up.
    pub fn meet(listener: &'a Listener) -> Self {
        let mut control = listener.connection();
        answer(&mut control).expect("a hello");
        Self { listener, control, data: Vec::new() }
    }

    /// Says `message` to the source.
    pub fn say(&mut self, message: &ToSource) {
        say(&mut self.control, message);
    }

    /// Returns the next message that is no ping, or `None` at the end. Pings are answered.
    pub fn hear(&mut self) -> Option<ToTarget> {
        loop {
            match hear(&mut self.control)? {
                ToTarget::Ping(number) => self.say(&ToSource::Pong(number)),
                message => return Some(message),
            }
        }
    }

    /// Reads on, and answers pings, until the source hangs up.
    pub fn listen(&mut self) {
        while self.hear().is_some() {}
    }

    /// Waits for the next connection of the source.
    pub fn connection(&self) -> Socket {
        self.listener.connection()
    }

    /// Says that it takes the guest.
    ///
    /// # Panics
    ///
    /// Panics if the source does not offer a guest.
    pub fn agree(&mut self) {
        assert!(matches!(self.hear(), Some(ToTarget::Setup { .. })));
        self.say(&ToSource::Accept { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Self::RESUME });
    }

    /// Waits for so many data channels, and accepts their greetings.
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

    /// Takes the guest, with so many data channels.
    pub fn accept(&mut self, channels: usize) {
        self.agree();
        self.take(channels);
        self.say(&ToSource::ChannelsUp);
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
            let data = if header.kind == FrameKind::Pages { header.pages * 4096 } else { 0 };
            bulk.read_exact(&mut vec![0; header.table_bytes() + data]).ok()?;
            if header.kind == FrameKind::Barrier {
                return Some(header.pass);
            }
        }
    }

    /// Says that a pass was received, and what of it is damaged.
    pub fn received(&mut self, pass: u32, suspects: u64, runs: Vec<RunName>) {
        self.say(&ToSource::Received { pass, suspects, runs });
    }

    /// Goes along, with one data channel, until the guest has stopped and its last pass has arrived.
    /// Returns that pass, which is not answered.
    ///
    /// # Panics
    ///
    /// Panics if the source says something else.
    pub fn until_the_last_pass(&mut self) -> u32 {
        self.accept(1);
        loop {
            match self.hear().expect("the next pass") {
                ToTarget::Pass { .. } => {
                    let pass = self.swallow_pass().expect("a whole pass");
                    self.received(pass, 0, vec![]);
                }
                ToTarget::Final { .. } => return self.swallow_pass().expect("the last pass"),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Goes along, with one data channel, until the source has asked for the state to be loaded.
    ///
    /// # Panics
    ///
    /// Panics if the source hangs up.
    pub fn until_load(&mut self) {
        let pass = self.until_the_last_pass();
        self.received(pass, 0, vec![]);
        while self.hear().expect("the request to load") != ToTarget::Load {}
    }
}
