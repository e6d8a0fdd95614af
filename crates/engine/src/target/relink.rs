//! A link that was lost, taken up again over a new control channel.

use super::channels::Link;
use super::driver::{Input, Numbered};
use crate::channel::Greeted;
use std::io;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// Connections that are kept while channels are ended; a source needs one.
const MOST_LATE: usize = 16;

impl Link {
    /// Whether `incoming` names this migration, with the token that only its source was given.
    pub(super) fn named_by(&self, incoming: &Greeted) -> bool {
        let hello = &incoming.hello;
        hello.migration == self.migration && hello.token == self.tokens.resume && self.same_source(incoming)
    }

    /// Whether it is the source of the control channel, as far as its certificate tells: a token that got out is of no use to
    /// another host.
    pub(super) fn same_source(&self, incoming: &Greeted) -> bool {
        incoming.stream.peer_certificate() == self.control.peer_certificate()
    }

    /// Nothing of the old channels may be under way when the source is told what is lacking, or a page that is just being
    /// placed would be sent again; nor a commit when it is told that the guest will not run here.
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
        self.read_control(peer_timeout)
    }

    /// Ends every channel and its thread.
    pub(super) fn end_channels(&mut self, inputs: &Receiver<Numbered>) {
        // First: whoever asks on one of them must not be waited for.
        self.shutdown();
        self.control.shutdown();
        if let Some(pager) = self.arrivals.pager() {
            pager.source.replace(&pager.pages, Vec::new());
        }
        // Threads that wait for room in the queue must find it until they have ended. A source that noticed the loss first may
        // have come back already.
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
