//! Byte streams from which frames are received.

use crate::channel::{IoBuf, Stream, tcp};
use std::cell::RefCell;
use std::io;
use std::os::fd::AsFd;
use vmferry_core::PAGE_BYTES;
use vmferry_wire::FRAME_HEADER_BYTES;

/// Source of frames.
pub(crate) trait FrameSource {
    /// Fills all of `bufs`.
    fn fill(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()>;

    /// Limits the bytes that wait in the receive queue, because from now on a thread may wait for a
    /// page that is behind these bytes.
    fn keep_short(&self) {}
}

impl FrameSource for &Stream {
    fn fill(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        self.receive(bufs)
    }

    fn keep_short(&self) {
        if let Err(error) = tcp::keep_receive_queue_short(self.as_fd()) {
            tracing::debug!("pages may wait in the queue of {}: {error}", self.peer);
        }
    }
}

/// Reader that reads as many bytes as are available, up to the size of a few frames with one page
/// each. A small frame then takes one system call instead of three.
pub(crate) struct Buffered<'a> {
    stream: &'a Stream,
    state: RefCell<ReadBuffer>,
}

/// Bytes that were read and not yet used. Invariant: `start <= end <= bytes.len()`.
struct ReadBuffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<'a> Buffered<'a> {
    /// Size of four frames of one page.
    const BYTES: usize = 4 * (FRAME_HEADER_BYTES + 16 + PAGE_BYTES);

    pub(crate) fn new(stream: &'a Stream) -> Self {
        let bytes = vec![0; Self::BYTES].into();
        Self { stream, state: RefCell::new(ReadBuffer { bytes, start: 0, end: 0 }) }
    }
}

impl FrameSource for Buffered<'_> {
    fn fill(&self, bufs: &mut [IoBuf<'_>]) -> io::Result<()> {
        let held = &mut *self.state.borrow_mut();
        for buf in bufs {
            while !buf.is_empty() {
                if held.start == held.end {
                    held.start = 0;
                    held.end = self.stream.receive_some(&mut held.bytes)?;
                }
                let bytes = held.bytes.get(held.start..held.end).ok_or(io::ErrorKind::UnexpectedEof)?;
                held.start += buf.copy_from(bytes);
            }
        }
        Ok(())
    }
}
