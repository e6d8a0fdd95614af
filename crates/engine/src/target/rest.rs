//! What is left to do for a guest that runs before all of its memory is here.

use super::channels::{Link, fresh_tokens};
use super::driver::{Numbered, forward};
use super::inbox::{self, Inbox, Sources};
use super::session::{Action, Event, Outcome, Session};
use super::{Arrival, Over, ending};
use crate::channel::{Greeted, Listener, answer, send_message};
use crate::clock::Clock;
use crate::fence::Ruled;
use crate::lacking::pieces;
use crate::monitor::MigrationState;
use crate::report::PostcopyFigures;
use crate::run::{self, Agenda, Host};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use vmferry_wire::{RefusalCode, Role, ToSource};

/// How many times the peer's timeout pages may stay away, or somebody wait for one, while the source still answers: a
/// channel can be dead without either end being told.
const PATIENCE: u32 = 3;

/// The pages of a guest that runs already. They come, and are placed, by threads of their own; but somebody must keep
/// house: say that all is here, take up the link again when it is lost. That is [`finish`](Rest::finish).
///
/// Dropped while pages are lacking, it ends its channels: the source keeps those pages and says that the link is lost, and
/// whoever needs one of them here sleeps for ever. Nothing is made up.
#[must_use = "the guest's pages come, but nobody tells its source when all are here: call `finish`"]
pub struct Rest {
    session: Session,
    agenda: Agenda<Action>,
    inbox: Inbox,
    clock: Clock,
    link: Link,
    fault_threads: Vec<JoinHandle<()>>,
    queue: Option<(SyncSender<Numbered>, Receiver<Numbered>)>,
    watch: RestWatch,
    peer_timeout: Duration,
    suspended_at: Option<Duration>,
    /// Since when the link is up.
    up_since: Duration,
    /// How many pages were lacking when the last came, and when that was.
    last_page: (u64, Duration),
    /// What happened while something else was done, oldest first.
    pending: VecDeque<Event>,
}

/// A view of a [`Rest`] for other threads.
#[derive(Debug, Clone)]
pub struct RestWatch(Arc<Watched>);

#[derive(Debug)]
struct Watched {
    pager: Option<Arc<super::urgent::DemandPager>>,
    state: Mutex<RestState>,
}

/// How a [`Rest`] is doing.
#[must_use = "it may not have come to its end"]
#[derive(Debug, Clone, Default, serde::Serialize)]
#[non_exhaustive]
pub struct RestState {
    /// `Postcopy`, `PostcopyPaused` while there is no link, or `Completed`.
    pub state: MigrationState,
    /// Why there is no link, if there is none.
    pub why: Option<String>,
    /// How often the link was lost.
    pub interruptions: u64,
    /// Pages that are still to come.
    pub left: u64,
    /// How it has gone so far.
    pub postcopy: PostcopyFigures,
}

impl RestWatch {
    /// How it is doing now.
    pub fn now(&self) -> RestState {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(pager) = &self.0.pager {
            state.left = pager.pages.left();
            state.postcopy = PostcopyFigures::from(&pager.pages.figures());
        }
        state
    }

    fn update(&self, change: impl FnOnce(&mut RestState)) {
        change(&mut self.0.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl fmt::Debug for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rest").field("watch", &self.watch).finish_non_exhaustive()
    }
}

impl Rest {
    /// Goes on with a session and the actions that it has still asked for.
    pub(super) fn new(
        (session, agenda): (Session, Agenda<Action>),
        link: Link,
        fault_threads: Vec<JoinHandle<()>>,
    ) -> Self {
        let state = RestState { state: MigrationState::Postcopy, ..RestState::default() };
        let watched = Watched { pager: link.arrivals.pager().cloned(), state: Mutex::new(state) };
        Self {
            session,
            agenda,
            inbox: Inbox::new(Duration::ZERO),
            clock: Clock::start(),
            link,
            fault_threads,
            queue: None,
            watch: RestWatch(Arc::new(watched)),
            peer_timeout: Duration::ZERO,
            suspended_at: None,
            up_since: Duration::ZERO,
            last_page: (0, Duration::ZERO),
            pending: VecDeque::new(),
        }
    }

    /// Goes on with the queue that its channels report to.
    pub(super) fn with(
        mut self,
        queue: (SyncSender<Numbered>, Receiver<Numbered>),
        peer_timeout: Duration,
    ) -> Self {
        self.queue = Some(queue);
        self.peer_timeout = peer_timeout;
        self
    }

    /// A view of it.
    #[must_use]
    pub fn watch(&self) -> RestWatch {
        self.watch.clone()
    }

    /// Serves the rest of a postcopy until all pages have arrived and the source knows it. Blocks meanwhile.
    ///
    /// If the link is lost, the source connects to `listener` again. The guest cannot run without its pages, so this waits for the
    /// source without limit. [`Arrival::abandon`] ends the wait. An abandoned guest must not run on: a vCPU that touches a missing page
    /// waits for ever.
    ///
    /// Returns the final state. It is `Completed`, or `PostcopyPaused` if the guest was abandoned. Such a guest is lost: end its devices, and
    /// drop its VM.
    pub fn finish(mut self, listener: &Listener, arrival: &Arrival) -> RestState {
        let Some((sender, inputs)) = self.queue.take() else { return self.watch.now() };
        let _waker = arrival.waking(&sender);
        let ending = ending().inspect_err(|error| not_again(error));
        std::thread::scope(|scope| {
            let over = ending.as_ref().ok().map(|ending| {
                let take = forward(&sender);
                let accept = || listener.serve(ending, take);
                let spawned = vmferry_thread::spawn_scoped(
                    vmferry_thread::Role::Listener,
                    "target-accept",
                    scope,
                    accept,
                );
                if let Err(error) = spawned {
                    not_again(&error);
                }
                Over(ending)
            });
            let mut house = House { rest: &mut self, inputs: &inputs, arrival };
            if let Ok(outcome) = run::advance(&mut house) {
                debug_assert_eq!(outcome, Outcome::Completed, "the guest runs: nothing else is left to come");
                self.watch.update(|state| state.state = MigrationState::Completed);
            }
            drop(over);
            self.end_channels(&inputs);
            drop(inputs);
        });
        self.watch.now()
    }

    /// All is here, and the source, which does not know it, stays away: this side is done, but goes on listening, so that the
    /// source can hear it whenever it comes.
    fn nobody_asks_any_more(&self) -> bool {
        self.session.complete()
            && self
                .suspended_at
                .is_some_and(|since| self.clock.since(since) > self.peer_timeout.saturating_mul(2))
    }

    fn show_state(&mut self) {
        let suspended = self.session.suspended();
        if suspended && self.suspended_at.is_none() {
            self.suspended_at = Some(self.clock.now());
        } else if !suspended && self.suspended_at.take().is_some() {
            self.up_since = self.clock.now();
        }
        let unheard = self.nobody_asks_any_more();
        self.watch.update(|state| {
            state.state = match suspended {
                true if unheard => MigrationState::Completed,
                true => MigrationState::PostcopyPaused,
                false => MigrationState::Postcopy,
            };
            if !suspended {
                state.why = None;
            }
        });
    }

    /// Why a link that seems to be up brings nothing, if so.
    fn why_stalled(&mut self) -> Option<String> {
        let patience = self.peer_timeout.saturating_mul(PATIENCE);
        let pages = &self.link.arrivals.pager()?.pages;
        let (left, suspended) = (pages.left(), self.session.suspended());
        if suspended || left != self.last_page.0 {
            self.last_page = (left, self.clock.now());
        }
        if suspended || left == 0 || self.clock.since(self.up_since) <= patience {
            return None;
        }
        if self.clock.since(self.last_page.1) > patience {
            return Some(format!("{left} pages are lacking, and none has come for {patience:?}"));
        }
        (pages.longest_wait() > patience)
            .then(|| format!("a page that was asked for has not come for {patience:?}"))
    }

    fn note_loss(&mut self, why: &str) {
        if !self.session.suspended() {
            tracing::warn!(
                "the link to the source {} is lost ({why}); the guest goes on until it needs a page that is not here",
                self.link.control.peer
            );
            self.watch.update(|state| {
                state.why = Some(why.to_owned());
                state.interruptions += 1;
            });
        }
    }

    fn lost(&mut self, why: String) -> Option<Event> {
        self.note_loss(&why);
        Some(Event::PeerLost(why))
    }

    fn connected(&mut self, incoming: Greeted, inputs: &Receiver<Numbered>) -> Option<Event> {
        if incoming.hello.role != Role::Control {
            return match self.link.connected(incoming)? {
                Ok(()) => Some(Event::ChannelUp),
                Err(error) => Some(Event::PeerLost(format!("no thread for a channel: {error}"))),
            };
        }
        let ours = self.link.named_by(&incoming);
        let verdict = if ours { Ok(()) } else { Err(RefusalCode::Busy) };
        if let Err(error) = answer(&incoming.stream, &incoming.hello, verdict) {
            tracing::warn!("{}: the answer to its hello was lost: {error}", incoming.stream.peer);
            return None;
        }
        if !ours {
            return None;
        }
        self.inbox.reopened();
        let taken = self.link.take_up(incoming, inputs, self.peer_timeout);
        self.last_page_after_all();
        match taken {
            Ok(()) => {
                self.pending.push_back(Event::ControlReopened);
                self.pending.pop_front()
            }
            Err(error) => self.lost(format!("the new control channel cannot be used: {error}")),
        }
    }

    fn end_channels(&mut self, inputs: &Receiver<Numbered>) {
        self.link.end_channels(inputs);
        self.last_page_after_all();
    }

    /// The last page may have come while the channels were ended, and the word of it been dropped with what else they reported.
    fn last_page_after_all(&mut self) {
        let all_here = self.link.arrivals.pager().is_some_and(|pager| pager.pages.left() == 0);
        if all_here && !self.session.complete() {
            let event = self.all_here();
            self.pending.extend(event);
        }
    }

    fn all_here(&self) -> Option<Event> {
        let mut figures = self.link.arrivals.pager()?.pages.figures();
        figures.cpu_us = self.link.cpu_us.load(Ordering::Relaxed);
        Some(Event::MissingArrived(figures))
    }

    fn perform(&mut self, action: Action, inputs: &Receiver<Numbered>) -> Option<Event> {
        match action {
            Action::Send(message) => self.send(&message),
            Action::AwaitChannels(channels) => {
                self.link.await_channels(channels);
                None
            }
            Action::Disconnect => {
                self.end_channels(inputs);
                None
            }
            Action::NameMissing => self.retell(),
            Action::RequestAgain => {
                let pager = self.link.arrivals.pager()?;
                pager.source.replace(&pager.pages, self.link.urgent_channels());
                None
            }
            Action::EndDemandPaging => {
                self.link.arrivals.pager()?.pages.end();
                None
            }
            // Before the guest ran.
            _ => None,
        }
    }

    fn send(&mut self, message: &ToSource) -> Option<Event> {
        let failed = send_message(&self.link.control, message, self.peer_timeout).err()?;
        self.lost(format!("the control channel is lost: {}", failed.error))
    }

    fn retell(&mut self) -> Option<Event> {
        let pager = Arc::clone(self.link.arrivals.pager()?);
        let lacking = pager.pages.missing(self.link.memory.layout());
        for piece in pieces(&lacking) {
            if let Some(lost) = self.send(&ToSource::Lacking(piece)) {
                return Some(lost);
            }
        }
        match fresh_tokens() {
            Ok(tokens) => {
                // The name by which the control channel can be taken up again stays.
                (self.link.tokens.bulk, self.link.tokens.urgent) = (tokens.bulk, tokens.urgent);
                Some(Event::MissingNamed { pages: lacking.count(), tokens: (tokens.bulk, tokens.urgent) })
            }
            Err(error) => self.lost(error.to_string()),
        }
    }
}

fn not_again(error: &dyn fmt::Display) {
    tracing::error!("a link that is lost cannot be taken up again: there is nothing to listen with: {error}");
}

/// The caller gave the guest up: see [`Arrival::abandon`].
struct Abandoned;

/// The target's host once the guest runs.
struct House<'a> {
    rest: &'a mut Rest,
    inputs: &'a Receiver<Numbered>,
    arrival: &'a Arrival,
}

impl Host for House<'_> {
    type Session = Session;
    type Idle = Abandoned;

    fn now(&self) -> Duration {
        self.rest.clock.now()
    }

    fn session(&self) -> &Session {
        &self.rest.session
    }

    fn agenda(&mut self) -> &mut Agenda<Action> {
        &mut self.rest.agenda
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.rest.session.handle(event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Abandoned> {
        Ok(self.rest.perform(action, self.inputs))
    }

    fn next(&mut self) -> Result<Option<Event>, Abandoned> {
        if self.arrival.abandoned() { Err(Abandoned) } else { inbox::next(self) }
    }

    fn show(&mut self) {
        self.rest.show_state();
    }
}

impl Sources for House<'_> {
    type Connection = Box<Greeted>;

    fn inbox(&mut self) -> &mut Inbox {
        &mut self.rest.inbox
    }

    fn peer(&self) -> &str {
        &self.rest.link.control.peer
    }

    fn peer_timeout(&self) -> Duration {
        self.rest.peer_timeout
    }

    fn attempt(&self) -> u64 {
        self.rest.link.attempt
    }

    fn stopped(&self) -> bool {
        // The guest runs here.
        false
    }

    fn setup_timeout(&self) -> Duration {
        Duration::MAX
    }

    fn answer(&mut self) -> Option<Ruled> {
        None
    }

    fn found(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.rest.pending.pop_front() {
                return Some(event);
            }
            let incoming = self.rest.link.late.pop_front()?;
            if let Some(event) = self.rest.connected(incoming, self.inputs) {
                return Some(event);
            }
        }
    }

    fn stalled(&mut self) -> Option<String> {
        self.rest.why_stalled()
    }

    fn receive(&mut self, until: Duration) -> Result<Option<Numbered>, Abandoned> {
        Ok(self.inputs.recv_timeout(until.saturating_sub(self.now())).ok())
    }

    fn connected(&mut self, incoming: Box<Greeted>) -> Option<Event> {
        self.rest.connected(*incoming, self.inputs)
    }

    fn all_here(&self) -> Option<Event> {
        self.rest.all_here()
    }

    fn note_loss(&mut self, why: &str) {
        self.rest.note_loss(why);
    }
}

/// Leaves no thread behind, whether it was finished, told to stop, or forgotten.
impl Drop for Rest {
    fn drop(&mut self) {
        // Without its reader the queue takes nothing, so nobody waits for room in it.
        self.queue = None;
        self.link.shutdown();
        self.link.control.shutdown();
        self.link.join();
        if let Some(pager) = self.link.arrivals.pager() {
            // While pages are lacking the guest's vCPUs may sleep on them, and must not be given zeros.
            if pager.pages.left() == 0 { pager.pages.end() } else { pager.pages.stop() }
        }
        for thread in self.fault_threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a fault thread panicked");
            }
        }
    }
}
