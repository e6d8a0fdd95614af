//! What the driver does from the handover on, when the guest runs on the target before all of its memory is there.

use super::{Driver, Input, Job, local};
use crate::awake::Asking;
use crate::channel::connect;
use crate::lacking::{Collected, pieces};
use crate::source::events::Event;
use crate::source::postcopy::{Claims, UrgentOut, lacking, serve_urgent};
use crate::source::sender::Shared;
use crate::source::settings::MigrationMode;
use crate::vm::caught;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmferry_core::{NothingToProtect, PageSet};
use vmferry_wire::{Refusal, RefusalCode, Role, RunName, ToTarget};

impl<'e> Driver<'_, 'e> {
    /// What somebody asked for through the monitor.
    pub(super) fn asked(&self) -> Option<Event> {
        let monitor = self.ground.monitor;
        if monitor.take_switch() {
            return Some(Event::SwitchNow);
        }
        if monitor.take_pause() {
            return Some(Event::Pause);
        }
        if monitor.take_abandon() {
            return Some(Event::Abandon);
        }
        monitor.take_recover().then_some(Event::Recover)
    }

    /// The guest stands still: what is pending now is what the target lacks.
    pub(super) fn hand_over(&mut self, also: &[RunName]) -> Event {
        let layout = self.ground.memory.layout();
        self.timings.state_sent();
        if self.ground.settings.mode == MigrationMode::Postcopy {
            // No harvest came before.
            self.settle_free();
        }
        let lacking = match lacking(self.pending.take(PageSet::empty(layout)), layout, also) {
            Ok(lacking) => lacking,
            Err(why) => return Event::LocalFailure(Refusal::new(RefusalCode::Protocol, why)),
        };
        for piece in pieces(&lacking) {
            if let Some(failed) = self.send(&ToTarget::Lacking(piece)) {
                return failed;
            }
        }
        let pages = lacking.count();
        self.pending.forget_skipped(&lacking);
        let lacking = Arc::new(lacking);
        self.handed_over = Some(Arc::clone(&lacking));
        // Without passes before, nothing is known of pages that were never touched.
        let look_up_untouched = self.ground.settings.mode == MigrationMode::Postcopy;
        self.claims = Some(Arc::new(Claims::new(&lacking, self.ground.settings.urgent, look_up_untouched)));
        match self.serve_requests() {
            Ok(()) => Event::HandedOver { pages, skipped: self.pending.skipped_count() },
            Err(error) => local("starting an urgent channel's thread", &crate::VmError::new(error)),
        }
    }

    /// Requests for pages are answered from now on.
    fn serve_requests(&mut self) -> io::Result<()> {
        let Some(claims) = self.claims.clone() else { return Ok(()) };
        let ground = self.ground;
        let out = |(stream, index): (&Arc<_>, u16)| {
            let shared = Shared { pacer: &ground.unpaced, ..ground.shared(&NothingToProtect) };
            UrgentOut::new(shared, Arc::clone(stream), index, 0)
        };
        self.urgent = Arc::new(self.streams.urgent.iter().zip(0..).map(out).collect());
        for channel in 0..self.urgent.len() {
            let (urgent, claims) = (Arc::clone(&self.urgent), Arc::clone(&claims));
            let (inputs, generation) = (self.inputs.0.clone(), self.inbox.generation());
            let awake = if ground.settings.stay_awake { Asking::open() } else { Asking::default() };
            let work = move || {
                let serve = || Err::<Infallible, _>(serve_urgent(&claims, &urgent[channel], channel, awake));
                let Err(lost) = caught(serve);
                ground.monitor.counters.add_thread_cpu();
                let _ = inputs.send((generation, Input::UrgentLost(lost)));
            };
            vmferry_thread::spawn_scoped(
                vmferry_thread::Role::Sender,
                format!("source-urgent-{channel}"),
                self.scope,
                work,
            )?;
        }
        Ok(())
    }

    pub(super) fn send_rest(&mut self, number: u32) -> Option<Event> {
        let claims = self.claims.clone()?;
        if self.jobs.is_empty()
            && let Err(error) = self.start_senders()
        {
            return Some(local("starting a channel's thread", &crate::VmError::new(error)));
        }
        self.begin_pass(number, claims.left());
        // The guest stands still no more.
        self.ground.pacer.set(self.ground.settings.max_bandwidth);
        self.pace(&claims);
        let job = Job::Rest { pass: number, claims, urgent: Arc::clone(&self.urgent) };
        self.give_out(&job);
        None
    }

    pub(super) fn disconnect(&mut self) {
        self.shutdown();
        self.control.shutdown();
        self.jobs.clear();
        // What its threads still report counts no more, and the pages that they claimed are the target's to name.
        self.inbox.closed();
        self.claims = None;
        self.urgent = Arc::default();
    }

    pub(super) fn reconnect(&mut self, after: Duration) -> Event {
        let until = Instant::now() + after;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            // Threads of the lost channels need room in the queue to end.
            let _ = self.inputs.1.recv_timeout(left);
        }
        let ground = self.ground;
        let settings = ground.settings;
        let channel = (ground.migration, Role::Control, 0, self.resume);
        match connect(ground.uri, channel, settings, None) {
            Ok(control) => {
                self.control = Arc::new(control);
                self.inbox.reopened();
            }
            Err(error) => return Event::NotReconnected(error.to_string()),
        }
        ground.stop.store(false, Ordering::Release);
        self.lacking = Collected::new(ground.memory.layout());
        match self.read_control() {
            Ok(()) => Event::Reconnected,
            Err(error) => Event::NotReconnected(format!("no thread for the link: {error}")),
        }
    }

    /// The target has named what it lacks; what was claimed for lost channels is claimed anew.
    pub(super) fn serve_again(&mut self, pages: u64) -> Option<Event> {
        let empty = Collected::new(self.ground.memory.layout());
        match std::mem::replace(&mut self.lacking, empty).complete(pages) {
            Ok(lacking) => {
                let look_up_untouched = self.ground.settings.mode == MigrationMode::Postcopy;
                self.claims =
                    Some(Arc::new(Claims::new(&lacking, self.ground.settings.urgent, look_up_untouched)));
                None
            }
            Err(why) => Some(Event::PeerLost(why)),
        }
    }

    /// Channels that were opened anew serve requests at once.
    pub(super) fn opened_again(&mut self) -> Event {
        if self.claims.is_none() {
            return Event::ChannelsOpened;
        }
        match self.serve_requests() {
            Ok(()) => Event::ChannelsOpened,
            Err(error) => Event::PeerLost(format!("no thread for an urgent channel: {error}")),
        }
    }
}
