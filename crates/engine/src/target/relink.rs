//! Restoring of a lost link over a new control channel.

use super::channels::Link;
use super::driver::{Input, Numbered};
use crate::channel::Greeted;
use std::io;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Maximum number of connections that are kept while channels are ended. A source needs one.
const MOST_LATE: usize = 16;

impl Link {
    /// Returns true if `incoming` names this migration, with the token that only its source was
    /// given.
    pub(super) fn named_by(&self, incoming: &Greeted) -> bool {
        let hello = &incoming.hello;
        hello.migration == self.migration && hello.token == self.tokens.resume && self.same_source(incoming)
    }

    /// Returns true if `incoming` has the same certificate as the control channel. Because of this
    /// check, a stolen token is useless to another host.
    pub(super) fn same_source(&self, incoming: &Greeted) -> bool {
        incoming.stream.peer_certificate() == self.control.peer_certificate()
    }

    /// Replaces the control channel by `incoming`, after all old channels and their threads have
    /// ended.
    ///
    /// The old threads must have ended for two reasons. If a frame were still being received when
    /// the source is told which pages are missing, a page that is being placed would be sent again.
    /// If a commit were still being read, the source could be told that the guest will not run on
    /// the target, and the guest could nevertheless run there.
    pub(super) fn take_up(
        &mut self,
        incoming: Greeted,
        inputs: &Receiver<Numbered>,
        peer_timeout: Duration,
    ) -> io::Result<()> {
        self.end_channels(inputs);
        self.attempt += 1;
        self.control = incoming.stream;
        self.control.set_timeouts(Some(peer_timeout), Some(peer_timeout))?;
        self.read_control(peer_timeout, false)
    }

    /// Ends every channel and its thread.
    pub(super) fn end_channels(&mut self, inputs: &Receiver<Numbered>) {
        // The channels are shut down first, so that no fault thread blocks while it sends a
        // request.
        self.shutdown();
        self.control.shutdown();
        if let Some(pager) = self.arrivals.pager() {
            pager.source.replace(&pager.pages, Vec::new());
        }
        // Threads that wait for room in the queue must find room until they have ended. A source
        // that noticed the loss first may already have reconnected.
        while self.at_work() {
            if let Ok((_, Input::Connected(incoming))) = inputs.recv_timeout(Duration::from_millis(1))
                && self.late.len() < MOST_LATE
            {
                self.late.push_back(*incoming);
            }
        }
        self.join();
    }
}
