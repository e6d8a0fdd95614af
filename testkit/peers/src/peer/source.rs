//! Scripted source.

use super::{connect_with, hello, receive_message, send_message};
use socket2::Socket;
use std::io::Write;
use std::ops::Range;
use vmferry_core::{MachineConfig, PageDigest, PageIndex, RegionId};
use vmferry_engine::Uri;
use vmferry_wire::{FrameHeader, FrameKind, Mode, RefusalCode, Role, TableWriter, ToSource, ToTarget, Token};

/// Frame with one page, which a test may change before it is sent.
#[derive(Debug)]
pub struct Frame {
    /// Header of the frame.
    pub header: FrameHeader,
    /// Encoded table of the frame.
    pub table: Vec<u8>,
    /// Content of the page.
    pub content: Vec<u8>,
}

/// Source that follows the protocol unless its script deviates.
#[derive(Debug)]
pub struct Source {
    uri: Uri,
    /// Control channel.
    pub control: Socket,
    /// Bulk channels and then urgent channels, each with the number of its next frame.
    pub data: Vec<(Socket, u64)>,
    /// Token with which a lost link is resumed.
    pub resume: Token,
}

impl Source {
    /// Opens the control channel to the target at `uri`.
    ///
    /// # Panics
    ///
    /// Panics if the target refuses the channel.
    pub fn new(uri: &Uri) -> Self {
        let control = Self::control(uri, Token::NONE);
        Self { uri: uri.clone(), control, data: Vec::new(), resume: Token::NONE }
    }

    fn control(uri: &Uri, token: Token) -> Socket {
        let (control, refused) = connect_with(uri, &hello(Role::Control, 0, token));
        assert_eq!(refused, None);
        control
    }

    /// Opens a control channel that resumes the lost link.
    ///
    /// # Panics
    ///
    /// Panics if the target refuses the channel.
    pub fn reconnect(&mut self) {
        self.control = Self::control(&self.uri, self.resume);
    }

    /// Greets the target as `role` with `token`, on a separate connection. Returns the reason of a
    /// refusal.
    pub fn refused(&self, role: Role, token: Token) -> Option<RefusalCode> {
        connect_with(&self.uri, &hello(role, 0, token)).1
    }

    /// Sends `message` to the target.
    pub fn send(&mut self, message: &ToTarget) {
        send_message(&mut self.control, message);
    }

    /// Returns the next message of the target, or `None` at the end of the channel.
    pub fn receive(&mut self) -> Option<ToSource> {
        receive_message(&mut self.control)
    }

    /// Offers a guest. Returns the reply of the target.
    pub fn offer(&mut self, machine: &MachineConfig, mode: Mode, bulk: u16, urgent: u16) -> Option<ToSource> {
        let machine = machine.clone();
        self.send(&ToTarget::Setup {
            machine,
            mode,
            bulk_channels: bulk,
            urgent_channels: urgent,
            probe: false,
        });
        let answer = self.receive();
        if let Some(ToSource::Accept { resume, .. }) = answer {
            self.resume = resume;
        }
        answer
    }

    /// Opens the data channels, and checks that each is refused a second time.
    ///
    /// # Panics
    ///
    /// Panics if a channel is refused, or accepted twice.
    pub fn open(&mut self, bulk: (u16, Token), urgent: (u16, Token)) {
        let hellos = |role, (count, token)| (0..count).map(move |index| hello(role, index, token));
        for hello in hellos(Role::Bulk, bulk).chain(hellos(Role::Urgent, urgent)) {
            let (stream, refused) = connect_with(&self.uri, &hello);
            assert_eq!(refused, None);
            assert_eq!(connect_with(&self.uri, &hello).1, Some(RefusalCode::Token), "the same channel twice");
            self.data.push((stream, 0));
        }
        assert_eq!(self.receive(), Some(ToSource::ChannelsUp));
    }

    /// Sends a frame with `content` as `page` of region 0, after `change` was applied to it.
    ///
    /// The digest of the page and the checksum of the table are those before `change`.
    pub fn frame(
        &mut self,
        channel: usize,
        pass: u32,
        page: u64,
        content: &[u8],
        change: impl FnOnce(&mut Frame),
    ) {
        let (stream, sequence) = &mut self.data[channel];
        let mut writer = TableWriter::default();
        assert!(writer.push(PageIndex(page), Some(PageDigest::of(content))));
        let (header, table) = writer.finish(FrameKind::Pages, RegionId(0), pass, *sequence);
        let mut frame = Frame { header, table: table.to_vec(), content: content.to_vec() };
        change(&mut frame);
        *sequence += 1;
        let _ = stream.write_all(&[&frame.header.encode()[..], &frame.table, &frame.content].concat());
    }

    /// Announces pages of `region` as pages that the guest has touched.
    pub fn announce(&mut self, channel: usize, region: RegionId, pages: Range<u64>) {
        let (stream, sequence) = &mut self.data[channel];
        let mut writer = TableWriter::default();
        assert!(writer.push_zeros(pages.into()));
        let (header, table) = writer.finish(FrameKind::Touched, region, 0, *sequence);
        let _ = stream.write_all(&[&header.encode()[..], table].concat());
        *sequence += 1;
    }

    /// Ends `pass` on a channel.
    pub fn barrier(&mut self, channel: usize, pass: u32) {
        let (stream, sequence) = &mut self.data[channel];
        let _ = stream.write_all(&FrameHeader::barrier(pass, *sequence).encode());
        *sequence += 1;
    }
}
