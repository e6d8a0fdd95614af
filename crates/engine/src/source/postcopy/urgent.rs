//! Dedicated path: the thread that reads a request from an urgent channel sends the page at once.

use super::super::sender::{Sender, SenderContext, SenderError};
use super::{Claims, Wanted, no_such_page};
use crate::awake::LatencyRequest;
use crate::channel::{SendError, Stream};
use std::sync::{Arc, Mutex, PoisonError};
use vmferry_wire::{REQUEST_BYTES, Request, WireError};

/// Sending side of an urgent channel.
///
/// The channel's own thread sends. On the interleaved baseline, bulk threads send, so a lock is
/// needed.
pub(crate) struct UrgentOut<'a> {
    stream: Arc<Stream>,
    sender: Mutex<Sender<'a, Arc<Stream>>>,
    pass: u32,
}

impl<'a> UrgentOut<'a> {
    pub(crate) fn new(shared: SenderContext<'a>, stream: Arc<Stream>, index: u16, pass: u32) -> Self {
        let sender = Mutex::new(Sender::new(shared, Arc::clone(&stream), index));
        Self { stream, sender, pass }
    }

    /// Sends a page that the guest waits for, and then the pages requested ahead, until another
    /// request arrives.
    pub(crate) fn send(&self, claims: &Claims, wanted: Wanted) -> Result<(), SenderError> {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.send_wanted(self.pass, claims, wanted)?;
        sender.send_ahead(self.pass, claims, wanted, || self.stream.has_input())
    }
}

/// Reads requests from channel `channel` until it ends. Returns the error that ended it.
pub(crate) fn serve_urgent(
    claims: &Claims,
    out: &UrgentOut<'_>,
    channel: usize,
    awake: LatencyRequest,
) -> SenderError {
    vmferry_thread::scheduling::prefer_latency();
    let _awake = awake.hold();
    let mut bytes = [0; REQUEST_BYTES];
    loop {
        if let Err(error) = out.stream.receive_bytes(&mut bytes) {
            return SenderError::Link(SendError { nothing_left: true, error }, out.stream.peer.clone());
        }
        let served = match Request::decode(&bytes) {
            Ok(request) => serve(claims, out, channel, request),
            Err(error) => Err(wrong(&out.stream, error)),
        };
        if let Err(error) = served {
            return error;
        }
    }
}

fn serve(claims: &Claims, out: &UrgentOut<'_>, channel: usize, request: Request) -> Result<(), SenderError> {
    let Request::Page { region: id, page, ahead, again } = request else {
        let error = WireError::Message("an echo on an urgent channel".into());
        return Err(wrong(&out.stream, error));
    };
    let region = claims.position(id).filter(|region| page.0 < claims.regions[*region].1.len());
    let region = region.ok_or_else(|| no_such_page(id, page.0))?;
    let wanted = Wanted { region, page: page.0, ahead, again };
    if ahead > 0 {
        claims.guest_runs_on(region, page.0.saturating_add(ahead.into()));
    }
    if let Some(queue) = &claims.baseline
        && queue.leave(&claims.regions[region].1, wanted, channel)
    {
        return Ok(());
    }
    out.send(claims, wanted)
}

/// Returns a link error: a peer that violates the protocol is treated as lost.
fn wrong(stream: &Stream, error: WireError) -> SenderError {
    let error = std::io::Error::other(error);
    SenderError::Link(SendError { nothing_left: true, error }, stream.peer.clone())
}
