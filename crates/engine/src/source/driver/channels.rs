//! Opening channels, and closing them.

use super::Driver;
use crate::channel::{Stream, connect};
use crate::source::events::Event;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vmferry_wire::{Refusal, RefusalCode, Role, Token};

/// The channels of a migration but for the control channel.
#[derive(Debug, Default)]
pub(super) struct Streams {
    pub(super) bulk: Vec<Arc<Stream>>,
    pub(super) urgent: Vec<Arc<Stream>>,
    pub(super) probe: Option<Arc<Stream>>,
}

impl Streams {
    pub(super) fn shutdown(&self) {
        self.bulk.iter().chain(&self.urgent).chain(&self.probe).for_each(|stream| stream.shutdown());
    }
}

impl Driver<'_, '_> {
    /// Ends all channels but the control channel, and whatever a thread waits for in them.
    pub(super) fn shutdown(&self) {
        self.ground.stop.store(true, Ordering::Release);
        self.streams.shutdown();
    }

    pub(super) fn open_channels(&mut self, bulk: Token, urgent: Token) -> Event {
        let settings = self.ground.settings;
        // Once the guest is handed over it is too late for that.
        let cancel = (!self.session.handed_over()).then_some(self.ground.monitor);
        let open = |role, count: u16, token| {
            let open = |index| {
                let channel = (self.ground.migration, role, index, token);
                let stream = connect(self.ground.uri, channel, settings, cancel)?;
                // A bulk channel is never read, an urgent one is silent while nobody waits; a send without progress for
                // this long is a dead peer.
                let _ = stream.set_timeouts(None, Some(settings.peer_timeout));
                Ok(Arc::new(stream))
            };
            (0..count).map(open).collect::<Result<Vec<_>, crate::MigrateError>>()
        };
        let all = || {
            Ok::<_, crate::MigrateError>(Streams {
                bulk: open(Role::Bulk, settings.channels, bulk)?,
                urgent: open(Role::Urgent, settings.urgent_count(), urgent)?,
                probe: open(Role::Probe, settings.probe().into(), urgent)?.pop(),
            })
        };
        match all() {
            Ok(streams) => {
                self.streams = streams;
                self.opened_again()
            }
            Err(crate::MigrateError::Cancelled { .. }) => {
                self.inbox.cancel_told();
                Event::Cancel
            }
            Err(error) if self.session.handed_over() => Event::PeerLost(error.to_string()),
            Err(error) => Event::LocalFailure(Refusal::new(RefusalCode::Other, error.to_string())),
        }
    }
}

impl Drop for Driver<'_, '_> {
    /// After a panic, which the VM's own code may cause: whoever waits for the channels' threads waits for no peer.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shutdown();
            self.control.shutdown();
        }
    }
}
