//! Postcopy on the target: receives the missing pages of a guest that already runs.

use super::channels::{Link, fresh_tokens};
use super::driver::{Numbered, forward};
use super::inbox::{self, Inbox, Sources};
use super::session::{Action, Event, Outcome, Session};
use super::{Arrival, EndOnDrop, ending};
use crate::arbiter::ArbiterAnswer;
use crate::channel::{Greeted, Listener, answer, send_message};
use crate::clock::Clock;
use crate::handle::MigrationState;
use crate::missing_pages::pieces;
use crate::report::PostcopyFigures;
use crate::run::{self, ActionQueue, Host};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use vmferry_wire::{RefusalCode, Role, ToSource};

/// Number of peer timeouts after which a link counts as lost although the source answers, because
/// no page has arrived or a thread has waited for one page for that long. This finds a channel that
/// is dead although neither end has received an error.
const PATIENCE: u32 = 3;

/// Receiver of the missing pages of a guest that already runs.
///
/// Threads of the engine receive the pages and place them. In addition,
/// [`finish`](PostcopyReceiver::finish) must be called: it tells the source when all pages have
/// arrived, and restores the link after a loss.
///
/// If the value is dropped while pages are missing, its channels end. The source keeps the missing
/// pages, and reports that the link is lost. A thread of the target that needs a missing page
/// sleeps for ever, because missing pages are never replaced by zeros.
#[must_use = "the guest's pages come, but nobody tells its source when all are here: call `finish`"]
pub struct PostcopyReceiver {
    session: Session,
    action_queue: ActionQueue<Action>,
    inbox: Inbox,
    clock: Clock,
    link: Link,
    fault_threads: Vec<JoinHandle<()>>,
    queue: Option<(SyncSender<Numbered>, Receiver<Numbered>)>,
    watch: PostcopyWatch,
    peer_timeout: Duration,
    suspended_at: Option<Duration>,
    /// Time at which the current link came up.
    up_since: Duration,
    /// Number of missing pages after the last page arrived, and the time of its arrival.
    last_page: (u64, Duration),
    /// Events that occurred while the loop did other work, oldest first.
    pending: VecDeque<Event>,
}

/// View of the progress of a [`PostcopyReceiver`] for other threads.
#[derive(Debug, Clone)]
pub struct PostcopyWatch(Arc<Watched>);

#[derive(Debug)]
struct Watched {
    pager: Option<Arc<super::urgent::DemandPager>>,
    state: Mutex<PostcopyState>,
}

/// Progress of a [`PostcopyReceiver`].
#[must_use = "it may not have come to its end"]
#[derive(Debug, Clone, Default, serde::Serialize)]
#[non_exhaustive]
pub struct PostcopyState {
    /// State: [`MigrationState::Postcopy`] while pages arrive, [`MigrationState::PostcopyPaused`]
    /// while there is no link, or [`MigrationState::Completed`] once all pages have arrived.
    pub state: MigrationState,
    /// Reason why there is no link. `None` while there is a link.
    pub why: Option<String>,
    /// Number of times that the link was lost.
    pub interruptions: u64,
    /// Number of missing pages.
    pub left: u64,
    /// Figures of demand paging so far.
    pub postcopy: PostcopyFigures,
}

impl PostcopyWatch {
    /// Returns the current progress.
    pub fn now(&self) -> PostcopyState {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(pager) = &self.0.pager {
            state.left = pager.pages.left();
            state.postcopy = PostcopyFigures::from(&pager.pages.figures());
        }
        state
    }

    fn update(&self, change: impl FnOnce(&mut PostcopyState)) {
        change(&mut self.0.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl fmt::Debug for PostcopyReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rest").field("watch", &self.watch).finish_non_exhaustive()
    }
}

impl PostcopyReceiver {
    /// Continues with a session and its pending actions.
    pub(super) fn new(
        (session, action_queue): (Session, ActionQueue<Action>),
        link: Link,
        fault_threads: Vec<JoinHandle<()>>,
    ) -> Self {
        let state = PostcopyState { state: MigrationState::Postcopy, ..PostcopyState::default() };
        let watched = Watched { pager: link.arrivals.pager().cloned(), state: Mutex::new(state) };
        Self {
            session,
            action_queue,
            inbox: Inbox::new(Duration::ZERO),
            clock: Clock::start(),
            link,
            fault_threads,
            queue: None,
            watch: PostcopyWatch(Arc::new(watched)),
            peer_timeout: Duration::ZERO,
            suspended_at: None,
            up_since: Duration::ZERO,
            last_page: (0, Duration::ZERO),
            pending: VecDeque::new(),
        }
    }

    /// Sets the queue to which the channels report.
    pub(super) fn with(
        mut self,
        queue: (SyncSender<Numbered>, Receiver<Numbered>),
        peer_timeout: Duration,
    ) -> Self {
        self.queue = Some(queue);
        self.peer_timeout = peer_timeout;
        self
    }

    /// Returns a view of the progress for other threads.
    #[must_use]
    pub fn watch(&self) -> PostcopyWatch {
        self.watch.clone()
    }

    /// Blocks until all pages have arrived and the source knows this, and meanwhile restores the
    /// link whenever it is lost.
    ///
    /// If the link is lost, the source connects to `listener` again. Because the guest cannot run
    /// without its pages, this method waits for the source without a time limit.
    /// [`Arrival::abandon`] ends the wait. An abandoned guest must not continue to run, because a
    /// vCPU that touches a missing page waits for ever.
    ///
    /// Returns the final progress. Its state is [`MigrationState::Completed`], or
    /// [`MigrationState::PostcopyPaused`] if the guest was abandoned. An abandoned guest is lost,
    /// so stop its devices and drop its VM.
    pub fn finish(mut self, listener: &Listener, arrival: &Arrival) -> PostcopyState {
        let Some((sender, inputs)) = self.queue.take() else { return self.watch.now() };
        let _waker = arrival.waking(&sender);
        let ending = ending().inspect_err(|error| warn_not_listening(error));
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
                    warn_not_listening(&error);
                }
                EndOnDrop(ending)
            });
            let mut host = PostcopyHost { receiver: &mut self, inputs: &inputs, arrival };
            if let Ok(outcome) = run::advance(&mut host) {
                debug_assert_eq!(outcome, Outcome::Completed, "the guest runs: nothing else is left to come");
                self.watch.update(|state| state.state = MigrationState::Completed);
            }
            drop(over);
            self.end_channels(&inputs);
            drop(inputs);
        });
        self.watch.now()
    }

    /// Returns true if all pages have arrived, and the source, which does not know this, does not
    /// reconnect. The target is then complete, but continues to listen, so that the source can
    /// still learn this.
    fn source_stays_away(&self) -> bool {
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
        let unheard = self.source_stays_away();
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

    /// Returns the reason why a link that seems to be up counts as lost, or `None` if pages arrive.
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
            return Some(format!("{left} pages are missing, and none has arrived for {patience:?}"));
        }
        (pages.longest_wait() > patience)
            .then(|| format!("a requested page has not arrived for {patience:?}"))
    }

    fn note_loss(&mut self, why: &str) {
        if !self.session.suspended() {
            tracing::warn!(
                "the link to the source {} is lost ({why}); the guest runs until it needs a missing page",
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
                Err(error) => {
                    Some(Event::PeerLost(format!("the thread of a channel could not be started: {error}")))
                }
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

    /// Handles a last page that arrived while the channels were being ended. The report of its
    /// arrival was then dropped with the other reports.
    fn last_page_after_all(&mut self) {
        let all_arrived = self.link.arrivals.pager().is_some_and(|pager| pager.pages.left() == 0);
        if all_arrived && !self.session.complete() {
            let event = self.all_arrived();
            self.pending.extend(event);
        }
    }

    fn all_arrived(&self) -> Option<Event> {
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
            // The other actions belong to the time before the guest ran.
            _ => None,
        }
    }

    fn send(&mut self, message: &ToSource) -> Option<Event> {
        let failed = send_message(&self.link.control, message, self.peer_timeout).err()?;
        self.lost(format!("the control channel is lost: {}", failed.error))
    }

    fn retell(&mut self) -> Option<Event> {
        let pager = Arc::clone(self.link.arrivals.pager()?);
        let missing = pager.pages.missing(self.link.memory.layout());
        for piece in pieces(&missing) {
            if let Some(lost) = self.send(&ToSource::Lacking(piece)) {
                return Some(lost);
            }
        }
        match fresh_tokens() {
            Ok(tokens) => {
                // The token for a new control channel does not change.
                (self.link.tokens.bulk, self.link.tokens.urgent) = (tokens.bulk, tokens.urgent);
                Some(Event::MissingNamed { pages: missing.count(), tokens: (tokens.bulk, tokens.urgent) })
            }
            Err(error) => self.lost(error.to_string()),
        }
    }
}

fn warn_not_listening(error: &dyn fmt::Display) {
    tracing::error!("a lost link cannot be taken up again: the listener does not work: {error}");
}

/// Reason for the end of the loop: the caller has given up the guest ([`Arrival::abandon`]).
struct Abandoned;

/// Host of the target's session once the guest runs.
struct PostcopyHost<'a> {
    receiver: &'a mut PostcopyReceiver,
    inputs: &'a Receiver<Numbered>,
    arrival: &'a Arrival,
}

impl Host for PostcopyHost<'_> {
    type Session = Session;
    type Idle = Abandoned;

    fn now(&self) -> Duration {
        self.receiver.clock.now()
    }

    fn session(&self) -> &Session {
        &self.receiver.session
    }

    fn action_queue(&mut self) -> &mut ActionQueue<Action> {
        &mut self.receiver.action_queue
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.receiver.session.handle(event)
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, Abandoned> {
        Ok(self.receiver.perform(action, self.inputs))
    }

    fn next(&mut self) -> Result<Option<Event>, Abandoned> {
        if self.arrival.abandoned() { Err(Abandoned) } else { inbox::next(self) }
    }

    fn publish_progress(&mut self) {
        self.receiver.show_state();
    }
}

impl Sources for PostcopyHost<'_> {
    type Connection = Box<Greeted>;

    fn inbox(&mut self) -> &mut Inbox {
        &mut self.receiver.inbox
    }

    fn peer(&self) -> &str {
        &self.receiver.link.control.peer
    }

    fn peer_timeout(&self) -> Duration {
        self.receiver.peer_timeout
    }

    fn attempt(&self) -> u64 {
        self.receiver.link.attempt
    }

    fn stopped(&self) -> bool {
        // The guest runs on the target, so a stop has no effect.
        false
    }

    fn setup_timeout(&self) -> Duration {
        Duration::MAX
    }

    fn answer(&mut self) -> Option<ArbiterAnswer> {
        None
    }

    fn found(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.receiver.pending.pop_front() {
                return Some(event);
            }
            let incoming = self.receiver.link.late.pop_front()?;
            if let Some(event) = self.receiver.connected(incoming, self.inputs) {
                return Some(event);
            }
        }
    }

    fn stalled(&mut self) -> Option<String> {
        self.receiver.why_stalled()
    }

    fn receive(&mut self, until: Duration) -> Result<Option<Numbered>, Abandoned> {
        Ok(self.inputs.recv_timeout(until.saturating_sub(self.now())).ok())
    }

    fn connected(&mut self, incoming: Box<Greeted>) -> Option<Event> {
        self.receiver.connected(*incoming, self.inputs)
    }

    fn all_arrived(&self) -> Option<Event> {
        self.receiver.all_arrived()
    }

    fn note_loss(&mut self, why: &str) {
        self.receiver.note_loss(why);
    }
}

/// Ends all threads, whether all pages have arrived, the guest was abandoned, or the value was
/// dropped early.
impl Drop for PostcopyReceiver {
    fn drop(&mut self) {
        // Once the receiver of the queue is dropped, sending to the queue fails at once, so no
        // thread waits for room in it.
        self.queue = None;
        self.link.shutdown();
        self.link.control.shutdown();
        self.link.join();
        if let Some(pager) = self.link.arrivals.pager() {
            // While pages are missing, vCPUs of the guest may sleep at their access to such a page,
            // and must not be woken to see zeros.
            if pager.pages.left() == 0 { pager.pages.end() } else { pager.pages.stop() }
        }
        for thread in self.fault_threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a fault thread panicked");
            }
        }
    }
}
