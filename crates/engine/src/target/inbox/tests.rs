use super::*;
use crate::reason_wait::{LIMIT, MOST_INPUTS};
use crate::run::ActionQueue;
use crate::target::session::{Action, Tokens};
use std::collections::VecDeque;
use vmferry_core::MachineConfig;
use vmferry_wire::Token;

/// Host whose clock and queue the test sets.
struct Scripted {
    now: Duration,
    session: Session,
    action_queue: ActionQueue<Action>,
    inbox: Inbox,
    queue: VecDeque<Input<()>>,
    /// True if the queue is never empty.
    floods: bool,
    taken: u32,
}

/// Error for an empty queue.
#[derive(Debug)]
struct Empty;

impl Scripted {
    fn new() -> Self {
        let machine =
            MachineConfig { kind: "test".into(), vcpus: 1, regions: vec![], extra: vec![], features: vec![] };
        let tokens = Tokens { bulk: Token([1; 16]), urgent: Token([2; 16]), resume: Token([3; 16]) };
        Self {
            now: Duration::ZERO,
            session: Session::begin(machine, tokens),
            action_queue: ActionQueue::new(Vec::new()),
            inbox: Inbox::new(Duration::ZERO),
            queue: VecDeque::new(),
            floods: false,
            taken: 0,
        }
    }

    /// Returns a host that lost a bulk channel at time 0 and whose driver thread runs again at
    /// `now`.
    fn after_a_loss(now: Duration) -> Self {
        let mut host = Self::new();
        let error = ReceiveError::Link(io::ErrorKind::UnexpectedEof.into());
        host.queue.push_back(Input::ChannelLost { role: Role::Bulk, channel: 0, error });
        assert!(host.event().is_err(), "blamed at once");
        (host.now, host.taken) = (now, 0);
        host
    }

    /// Returns the next event.
    fn event(&mut self) -> Result<Event, Empty> {
        loop {
            if let Some(event) = next(self)? {
                return Ok(event);
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
        self.session.handle(event)
    }

    fn perform(&mut self, _: Action) -> Result<Option<Event>, Empty> {
        Err(Empty)
    }

    fn next(&mut self) -> Result<Option<Event>, Empty> {
        next(self)
    }
}

impl Sources for Scripted {
    type Connection = ();

    fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }

    fn peer(&self) -> &'static str {
        "10.0.0.1"
    }

    fn peer_timeout(&self) -> Duration {
        Duration::MAX
    }

    fn attempt(&self) -> u64 {
        1
    }

    fn stopped(&self) -> bool {
        false
    }

    fn setup_timeout(&self) -> Duration {
        Duration::MAX
    }

    fn answer(&mut self) -> Option<ArbiterAnswer> {
        None
    }

    fn found(&mut self) -> Option<Event> {
        None
    }

    fn receive(&mut self, _: Duration) -> Result<Option<Numbered<()>>, Empty> {
        self.taken += 1;
        // A wake is not an event.
        let flood = self.floods.then_some(Input::Wake);
        Ok(Some((1, flood.or_else(|| self.queue.pop_front()).ok_or(Empty)?)))
    }

    fn connected(&mut self, (): ()) -> Option<Event> {
        None
    }

    fn all_arrived(&self) -> Option<Event> {
        None
    }
}

#[test]
fn queued_reason_counts_although_the_driver_stood_still_past_the_deadline() {
    let reason = ToTarget::Cancel(Refusal::new(RefusalCode::Cancelled, "the operator cancelled"));
    let mut host = Scripted::after_a_loss(20 * LIMIT);
    host.queue.extend([Input::Wake, Input::Message(reason.clone())]);
    let event = host.event().unwrap();
    assert!(matches!(&event, Event::Message(message) if *message == reason), "{event:?}");
}

#[test]
fn lost_channel_is_blamed_at_the_deadline_if_no_reason_is_queued() {
    let mut host = Scripted::after_a_loss(LIMIT - Duration::from_millis(1));
    assert!(host.event().is_err(), "blamed before the deadline");
    host.now = LIMIT;
    let event = host.event().unwrap();
    assert!(matches!(&event, Event::PeerLost(why) if why.contains("closed a channel")), "{event:?}");
    host.now = 2 * LIMIT;
    assert!(host.event().is_err(), "blamed twice");
}

#[test]
fn flood_of_inputs_does_not_postpone_the_end_of_the_wait() {
    let mut host = Scripted { floods: true, ..Scripted::after_a_loss(LIMIT) };
    let event = host.event().unwrap();
    assert!(matches!(event, Event::PeerLost(_)), "{event:?}");
    assert_eq!(host.taken, MOST_INPUTS);
}
