use super::*;
use crate::reason_wait::{LIMIT, MOST_INPUTS};
use crate::run::ActionQueue;
use crate::source::Settings;
use std::collections::VecDeque;
use vmferry_core::MachineConfig;
use vmferry_protocol::source::Action;

/// Host whose clock and queue are set by the test.
struct Scripted {
    now: Duration,
    session: Session,
    action_queue: ActionQueue<Action>,
    inbox: Inbox,
    queue: VecDeque<Input>,
    /// True if the target sends pongs without end.
    floods: bool,
    taken: u32,
}

/// Idle result: the queue is empty.
#[derive(Debug)]
struct Empty;

impl Scripted {
    fn new() -> Self {
        let machine =
            MachineConfig { kind: "test".into(), vcpus: 1, regions: vec![], extra: vec![], features: vec![] };
        let (session, first) = Session::begin(Settings::default().session(), machine, 16, Duration::ZERO);
        Self {
            now: Duration::ZERO,
            session,
            action_queue: ActionQueue::new(first),
            inbox: Inbox::new(Duration::ZERO),
            queue: VecDeque::new(),
            floods: false,
            taken: 0,
        }
    }

    /// Returns a host that lost a bulk channel at time 0 and looks again at `now`.
    fn after_a_loss(now: Duration) -> Self {
        let mut host = Self::new();
        host.inbox.hold(Duration::ZERO, "the link broke".into());
        host.now = now;
        host
    }

    /// Returns the first event that is no tick.
    fn event(&mut self) -> Result<Event, Empty> {
        loop {
            match next(self)? {
                Event::Tick => {}
                event => return Ok(event),
            }
        }
    }
}

impl Host for Scripted {
    type Session = Session;
    type Idle = Empty;

    fn now(&self) -> Duration {
        self.now
    }

    fn session(&self) -> &Session {
        &self.session
    }

    fn action_queue(&mut self) -> &mut ActionQueue<Action> {
        &mut self.action_queue
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        self.session.handle(self.now, event)
    }

    fn perform(&mut self, _: Action) -> Result<Option<Event>, Empty> {
        Err(Empty)
    }

    fn next(&mut self) -> Result<Option<Event>, Empty> {
        next(self).map(Some)
    }
}

impl Sources for Scripted {
    fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }

    fn pong(&mut self, _: u64, _: Duration) {}

    fn cancelled(&self) -> bool {
        false
    }

    fn answer(&mut self) -> Option<Result<Ownership, ArbiterError>> {
        None
    }

    fn request(&mut self) -> Option<Event> {
        None
    }

    fn streamed(&mut self) -> Option<Event> {
        None
    }

    fn receive(&mut self, _: Duration) -> Result<Option<Numbered>, Empty> {
        self.taken += 1;
        let flood = self.floods.then_some(Input::Message(ToSource::Pong(1), self.now));
        let input = flood.or_else(|| self.queue.pop_front()).ok_or(Empty)?;
        Ok(Some((self.inbox.generation(), input)))
    }

    fn unsent(&self) -> u64 {
        0
    }

    fn record_message(&mut self, _: &ToSource) {}

    fn pass_sent(&mut self) -> Event {
        Event::PassSent { bytes: 0, listing: Duration::ZERO, held: Duration::ZERO }
    }
}

fn reason() -> ToSource {
    ToSource::Failed(Refusal::new(RefusalCode::Memory, "the target's disk is full"))
}

#[test]
fn queued_reason_is_used_if_the_driver_wakes_after_the_deadline() {
    let mut host = Scripted::after_a_loss(20 * LIMIT);
    host.queue.push_back(Input::Wake);
    host.queue.push_back(Input::Message(ToSource::Pong(1), host.now));
    host.queue.push_back(Input::Message(reason(), host.now));
    let event = host.event().unwrap();
    assert!(matches!(&event, Event::Message(message) if *message == reason()), "{event:?}");
}

#[test]
fn lost_link_is_reported_at_the_deadline_if_no_reason_is_queued() {
    let mut host = Scripted::after_a_loss(LIMIT - Duration::from_millis(1));
    assert!(host.event().is_err(), "reported before the deadline");
    host.now = LIMIT;
    let event = host.event().unwrap();
    assert!(matches!(&event, Event::PeerLost(why) if why == "the link broke"), "{event:?}");
    host.now = 2 * LIMIT;
    assert!(host.event().is_err(), "reported twice");
}

#[test]
fn flood_of_messages_does_not_postpone_the_end_of_the_wait() {
    let mut host = Scripted { floods: true, ..Scripted::after_a_loss(LIMIT) };
    let event = host.event().unwrap();
    assert!(matches!(event, Event::PeerLost(_)), "{event:?}");
    assert_eq!(host.taken, MOST_INPUTS);
}
