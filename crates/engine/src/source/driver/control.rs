//! The control channel.

use super::Context;
use crate::MigrateError;
use crate::channel::{SendError, Stream, read_message, send_message, send_message_with};
use crate::heartbeat::Heartbeat;
use crate::source::inbox::{Input, Numbered};
use crate::vm::caught_io;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread::Scope;
use std::time::Duration;
use vmferry_wire::{Refusal, RefusalCode, Role, ToTarget, Token, WireError};

/// The control channel.
pub(super) struct Control {
    pub(super) stream: Arc<Stream>,
    /// Thread that pings the target while the VM works.
    heartbeat: Option<Heartbeat>,
    /// Token that opens the channel again after a loss.
    pub(super) resume: Token,
    /// Time by which all of the device state must be sent.
    state_deadline: Option<Duration>,
}

/// Reason why a message was not sent.
pub(super) struct NotSent {
    pub(super) why: String,
    /// True if the target has closed the channel.
    pub(super) peer_gone: bool,
    /// True if no byte of the message was sent.
    pub(super) nothing_left: bool,
    /// Refusal for a message that is larger than the protocol allows.
    pub(super) too_large: Option<Refusal>,
}

/// Returns true if the peer has closed its side of the connection. Bytes that it sent before may
/// still be unread.
fn closed_by_peer(stream: &Stream) -> bool {
    let mut ended = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut ended, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

impl Control {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream: Arc::new(stream), heartbeat: None, resume: Token::NONE, state_deadline: None }
    }

    pub(super) fn start_heartbeat(&mut self, peer_timeout: Duration) -> io::Result<()> {
        self.heartbeat = Some(Heartbeat::of_source(peer_timeout)?);
        Ok(())
    }

    /// Calls `work`, which may take long, and meanwhile sends pings, which tell the target that the
    /// source is alive.
    pub(super) fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        match &self.heartbeat {
            Some(heartbeat) => heartbeat.during(&self.stream, work),
            None => work(),
        }
    }

    /// Sets the time by which all of the device state must be sent. The guest is paused.
    pub(super) fn expect_state(&mut self, deadline: Duration) {
        self.state_deadline = Some(deadline);
    }

    /// Sends `message`. Returns an error if the message was not sent within the peer timeout. A
    /// message with device state must be sent by the deadline of the state instead.
    pub(super) fn send(&self, context: &Context<'_>, message: &ToTarget) -> Result<(), NotSent> {
        let longest = match (message, self.state_deadline) {
            (ToTarget::Section(_) | ToTarget::StateEnd { .. }, Some(deadline)) => {
                deadline.saturating_sub(context.clock.now())
            }
            _ => context.settings.peer_timeout,
        };
        if *message == ToTarget::Commit && closed_by_peer(&self.stream) {
            // The target has given up, for example because this process was stopped for too long.
            // With a commit that it cannot answer, the owner of the guest would be unknown.
            let error = io::ErrorKind::BrokenPipe.into();
            return self.told(message, Err(SendError { nothing_left: true, error }));
        }
        self.told(message, send_message(&self.stream, message, longest))
    }

    /// Sends `message` with `descriptors`, in the same way.
    pub(super) fn send_with(
        &self,
        context: &Context<'_>,
        message: &ToTarget,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), NotSent> {
        let longest = context.settings.peer_timeout;
        self.told(message, send_message_with(&self.stream, message, descriptors, longest))
    }

    /// Returns the result of sending `message` with the reason of a failure.
    fn told(&self, message: &ToTarget, sent: Result<(), SendError>) -> Result<(), NotSent> {
        sent.map_err(|failed| {
            let too_large = failed.wire_error().filter(|error| matches!(error, WireError::TooLarge { .. }));
            let too_large = too_large.map(|error| {
                let what = match message {
                    ToTarget::Section(section) => format!("the device state '{}'", section.name),
                    _ => "a message to the target".into(),
                };
                Refusal::new(RefusalCode::State, format!("{what} cannot be sent: {error}"))
            });
            let gone = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
            NotSent {
                why: format!("the link to {} failed: {}", self.stream.peer, failed.error),
                peer_gone: gone.contains(&failed.error.kind()),
                nothing_left: failed.nothing_left,
                too_large,
            }
        })
    }

    /// Starts the thread that reads the channel and reports to `inputs`.
    pub(super) fn read<'s, 'e>(
        &self,
        context: &Context<'_>,
        scope: &'s Scope<'s, 'e>,
        inputs: SyncSender<Numbered>,
        generation: u64,
    ) -> io::Result<()> {
        let (stream, clock) = (Arc::clone(&self.stream), context.clock);
        let silence = context.settings.peer_timeout;
        let read = move || loop {
            match caught_io(|| read_message(&stream)) {
                Ok(message) => {
                    let at = clock.now();
                    if inputs.send((generation, Input::Message(message, at))).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let why = lost(&stream.peer, &error, silence);
                    let _ = inputs.send((generation, Input::ControlLost(why)));
                    return;
                }
            }
        };
        vmferry_thread::spawn_scoped(vmferry_thread::Role::Control, "source-control", scope, read).map(drop)
    }

    /// Opens the channel again.
    pub(super) fn reconnect(&mut self, context: &Context<'_>) -> Result<(), MigrateError> {
        let channel = (context.migration, Role::Control, 0, self.resume);
        self.stream = Arc::new(context.dialer.open(channel, None)?);
        Ok(())
    }
}

/// Returns the reason why the control channel has ended, as text.
fn lost(peer: &str, error: &io::Error, silence: Duration) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            format!("the target {peer} closed the connection")
        }
        io::ErrorKind::TimedOut => format!("nothing was heard of the target {peer} for {silence:?}"),
        _ => format!("the link to {peer} failed: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channel_that_the_peer_has_closed_is_recognized_behind_unread_bytes() {
        let (own, peer) = crate::channel::test_pair();
        assert!(!closed_by_peer(&own));
        peer.send_bytes_within(b"bytes", Duration::from_secs(10)).map_err(|failed| failed.error).unwrap();
        assert!(!closed_by_peer(&own));
        drop(peer);
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while !closed_by_peer(&own) {
            assert!(std::time::Instant::now() < deadline, "the end of the channel was not noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
