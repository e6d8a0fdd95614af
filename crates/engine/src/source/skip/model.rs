//! Model of the exchange about free pages (stateright), in which every reachable state is checked.
//!
//! The actors are a guest that takes, writes and frees pages and answers questions, a channel's
//! thread, and the driver's thread. The driver's thread runs the shipped code: [`Session`] decides,
//! and [`PendingPages`], [`PassPages`] and [`Skipping`] act.
//!
//! The model has two pages, few steps of the guest, and two passes besides the last. The tracker
//! behaves like KVM's dirty log, as in the tests of `skip`.

mod world;

use super::{Candidates, Flaw, Skipping, SkippingState, State as SkipState};
use crate::model::{any, shortest, wants_shortest};
use crate::source::pending::{PageTurn, PassPages, PendingPages, Takers};
use crate::source::session::Session;
use crate::source::{OnTimeout, Settings};
use crate::sync::unscheduled;
use stateright::{Checker, Model, Property};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_core::{AnswerMode, MachineConfig, RunState};
use vmferry_protocol::source::{Action, Event, Outcome, Pass};
use vmferry_wire::{ToSource, ToTarget, Token};
use world::{
    ChannelStep, PAGES, Page, Questions, REGION, Sets, Source, Todo, Tracker, Use, World, layout, mask_of,
    region, set_of,
};

const LIMIT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Take(usize),
    Write(usize),
    Free(usize),
    /// The guest begins an answer, examines one more page for it, or gives it.
    Answer,
    /// The driver has time for a step of `Skipping`.
    Step,
    /// The driver performs an action of the session.
    Do,
    /// The channel's thread takes a page, protects it, reads it, sends it, or ends the pass.
    Channel,
    Cancel,
}

#[derive(Debug, Clone)]
struct Move {
    answer_mode: AnswerMode,
    flaw: Flaw,
    operations: u8,
    cancels: bool,
}

impl Move {
    fn skipping(&self, world: &World) -> (Skipping, Arc<Mutex<Questions>>) {
        let said = Arc::new(Mutex::new(world.said.clone()));
        let free = |(at, page): (usize, &Page)| u64::from(page.used == Use::Free) << at;
        let free = world.pages.iter().enumerate().map(free).sum();
        let source = Source { answer_mode: self.answer_mode, free, said: Arc::clone(&said) };
        (Skipping::resume(Box::new(source), &layout(), &world.kept, self.flaw), said)
    }

    /// Runs the shipped code on this state.
    fn work<T>(
        &self,
        world: &mut World,
        work: impl FnOnce(&mut Skipping, &mut PendingPages, &Tracker<'_>) -> T,
    ) -> T {
        let (mut skipping, said) = self.skipping(world);
        let Sets { next, skipped, pass } = world.sets;
        let pass = pass
            .map(|(first, last, pages)| Arc::new(PassPages::of_parts(&set_of(first), &set_of(last), pages)));
        let mut pending = PendingPages::of([set_of(next), set_of(skipped)], pass);
        let done = work(&mut skipping, &mut pending, &Tracker(Mutex::new(&mut world.pages)));
        let [next, skipped] = pending.sets().map(mask_of);
        let pass = pending.pass().map(|pass| {
            let [first, last] = pass.sets(0).map(|map| map.word(0));
            (first, last, pass.pages())
        });
        world.sets = Sets { next, skipped, pass };
        world.late |= skipping.figures().late_reports > 0;
        world.kept = skipping.keep();
        world.said = said.lock().unwrap_or_else(PoisonError::into_inner).clone();
        done
    }

    /// Passes an event to the session, and performs the resulting actions. Messages to the target
    /// are answered at once.
    fn tell(&self, world: &mut World, event: Event) {
        for action in self.handle(world, Duration::ZERO, event) {
            self.act(world, action);
        }
    }

    fn handle(&self, world: &mut World, now: Duration, event: Event) -> Vec<Action> {
        let actions = world.session.handle(now, event);
        let mut hasher = std::hash::DefaultHasher::new();
        format!("{:?}", world.session).hash(&mut hasher);
        world.session_key = hasher.finish();
        actions
    }

    fn act(&self, world: &mut World, action: Action) {
        let message = |message| Event::Message(message);
        match action {
            Action::Send(ToTarget::Setup { .. }) => {
                let [bulk, urgent, resume] = [1, 2, 3].map(|byte| Token([byte; 16]));
                self.tell(world, message(ToSource::Accept { bulk, urgent, resume }));
            }
            Action::OpenChannels { .. } => {
                self.tell(world, Event::ChannelsOpened);
                self.tell(world, message(ToSource::ChannelsUp));
            }
            Action::StartTracker => {
                world.pages.iter_mut().for_each(|page| (page.protected, page.marked) = (false, true));
                self.tell(world, Event::TrackerStarted);
            }
            Action::TrialPause { .. } => self.tell(
                world,
                Event::TrialPaused {
                    stop: Duration::ZERO,
                    save: Duration::ZERO,
                    quiesce: Duration::ZERO,
                    paused: Duration::ZERO,
                    state_bytes: 0,
                    trial: None,
                },
            ),
            Action::Harvest => world.todo.push(Todo::Harvest),
            Action::Pause => world.todo.push(Todo::Pause),
            Action::Save { .. } => world.todo.push(Todo::Save),
            Action::Release => self.tell(world, Event::Released),
            Action::Resume => world.todo.push(Todo::Resume),
            Action::SendPass { number, pass: Pass::Dirty { .. } } => {
                world.todo.push(Todo::Send);
                world.sending = Some(number);
            }
            Action::Send(ToTarget::Load) => self.tell(world, message(ToSource::Ready { load_us: 0 })),
            Action::Send(ToTarget::Commit) => {
                self.tell(world, message(ToSource::Running { start_us: 0, cpu_us: 0 }));
            }
            Action::Finish(outcome) => {
                world.todo.clear();
                world.sending = None;
                world.channel_step = None;
                self.work(world, |skipping, _, _| skipping.close());
                world.ended = Some(outcome == Outcome::Completed);
            }
            Action::Remember { .. } | Action::Send(_) => {}
            other => panic!("the model has no action {other:?}"),
        }
    }

    fn perform(&self, world: &mut World, todo: Todo) {
        match todo {
            Todo::Harvest => {
                let (pages, paused) = (world.pages, world.paused);
                let count = self.work(world, |skipping, pending, _| {
                    skipping.close();
                    pending.end_pass();
                    let next = pending.next().region_mut(REGION).expect("the one region");
                    (0..).zip(&pages).filter(|(_, page)| page.marked).for_each(|(at, _)| {
                        next.set(at);
                    });
                    if paused {
                        skipping.skip_free(pending);
                    }
                    pending.count()
                });
                self.tell(world, Event::Harvested { pages: count, writers: Vec::new() });
            }
            Todo::Pause => {
                self.work(world, |skipping, _, _| skipping.close());
                world.paused = true;
                self.tell(world, Event::Paused { wanted: RunState::Running });
            }
            Todo::Save => self.tell(world, Event::Saved { sections: Vec::new() }),
            Todo::Send => {
                let paused = world.paused;
                world.live_passes += u8::from(!paused);
                self.work(world, |skipping, pending, _| {
                    let pass = pending.begin_pass(None, Takers::SHARED);
                    if !paused {
                        skipping.begin(&pass);
                    }
                });
                if world.live_passes == 2 {
                    // The timeout has expired, so the guest is stopped after this pass.
                    let actions = self.handle(world, LIMIT * 2, Event::Tick);
                    assert!(actions.iter().all(|action| matches!(action, Action::Send(ToTarget::Ping(_)))));
                }
            }
            Todo::Resume => {
                self.work(world, |skipping, _, _| skipping.close());
                world.paused = false;
                self.tell(world, Event::Resumed);
            }
        }
    }

    fn channel(&self, world: &mut World) {
        let number = world.sending.expect("a pass");
        match world.channel_step {
            Some(ChannelStep::Taken(page)) => {
                (world.pages[page].protected, world.pages[page].marked) = (true, false);
                world.channel_step = Some(ChannelStep::Protected(page));
            }
            Some(ChannelStep::Protected(page)) => {
                world.channel_step = Some(ChannelStep::Read(page, world.pages[page].content));
            }
            Some(ChannelStep::Read(page, content)) => {
                world.pages[page].copy = content;
                world.channel_step = None;
            }
            None => {
                let taken = self.work(world, |_, pending, _| {
                    let pass = pending.pass().expect("a pass");
                    let take = |turn, page: usize| pass.take_64(0, turn, 0, 1 << page) != 0;
                    [PageTurn::First, PageTurn::Last]
                        .into_iter()
                        .find_map(|turn| (0..PAGES).find(|page| take(turn, *page)))
                });
                world.channel_step = taken.map(ChannelStep::Taken);
                if taken.is_none() {
                    world.sending = None;
                    self.tell(
                        world,
                        Event::PassSent { bytes: 0, listing: Duration::ZERO, held: Duration::ZERO },
                    );
                    let received = ToSource::Received { pass: number, mismatches: 0, runs: Vec::new() };
                    self.tell(world, Event::Message(received));
                }
            }
        }
    }

    fn answer(&self, world: &mut World) {
        let said = &mut world.said;
        match said.walk.take() {
            None => said.walk = said.open.map(|question| (question, 0, 0)),
            Some((question, PAGES, free)) => said.answers.push((question, free)),
            Some((question, at, free)) => {
                let bit = u64::from(world.pages[at].used == Use::Free) << at;
                said.walk = Some((question, at + 1, free | bit));
            }
        }
    }
}

impl Model for Move {
    type State = World;
    type Action = Operation;

    fn init_states(&self) -> Vec<World> {
        let settings = Settings {
            channels: 1,
            timeout: Some(LIMIT),
            on_timeout: OnTimeout::Switch,
            ..Settings::default()
        };
        let config = MachineConfig {
            kind: "model".into(),
            vcpus: 1,
            regions: vec![region()],
            extra: vec![],
            features: vec![],
        };
        let (session, first) = Session::begin(settings.session(), config, PAGES as u64, Duration::ZERO);
        let page = |used| Page { used, content: 1, protected: false, marked: false, copy: 0 };
        let mut world = World {
            pages: [page(Use::Free), page(Use::Used)],
            said: Questions::default(),
            sets: Sets { next: (1 << PAGES) - 1, skipped: 0, pass: None },
            kept: SkippingState {
                state: SkipState::Idle,
                question: 0,
                worth: Candidates::Named(set_of(0)),
                round: 0,
            },
            session,
            session_key: 0,
            todo: Vec::new(),
            channel_step: None,
            sending: None,
            paused: false,
            operations: 0,
            live_passes: 0,
            late: false,
            ended: None,
        };
        unscheduled(|| first.into_iter().for_each(|action| self.act(&mut world, action)));
        vec![world]
    }

    fn actions(&self, world: &World, operations: &mut Vec<Operation>) {
        if world.ended.is_some() {
            return;
        }
        if !world.paused {
            for (at, page) in world.pages.iter().enumerate() {
                match page.used {
                    _ if world.operations >= self.operations && page.used != Use::Taken => {}
                    Use::Free => operations.push(Operation::Take(at)),
                    Use::Taken => operations.push(Operation::Write(at)),
                    Use::Used => operations.extend([Operation::Write(at), Operation::Free(at)]),
                }
            }
            let may_answer = world.said.walk.is_some() || world.said.open.is_some();
            if self.answer_mode == AnswerMode::ByGuest && may_answer && world.said.answers.len() < 2 {
                operations.push(Operation::Answer);
            }
        }
        if !world.todo.is_empty() {
            operations.push(Operation::Do);
        }
        if world.todo.is_empty() && world.kept.state != SkipState::Idle {
            operations.push(Operation::Step);
        }
        // A pass is sent once the driver has given it to the channel.
        if world.sending.is_some() && !world.todo.contains(&Todo::Send) {
            operations.push(Operation::Channel);
        }
        if self.cancels && !world.session.committed() {
            operations.push(Operation::Cancel);
        }
    }

    fn next_state(&self, world: &World, operation: Operation) -> Option<World> {
        let mut next = world.clone();
        unscheduled(|| match operation {
            Operation::Take(page) => {
                next.operations += 1;
                next.pages[page].used = Use::Taken;
            }
            Operation::Write(at) => {
                next.operations += u8::from(next.pages[at].used == Use::Used);
                let page = &mut next.pages[at];
                page.used = Use::Used;
                page.content += 1;
                if page.protected {
                    (page.protected, page.marked) = (false, true);
                }
            }
            Operation::Free(page) => {
                next.operations += 1;
                next.pages[page].used = Use::Free;
            }
            Operation::Answer => self.answer(&mut next),
            Operation::Step => {
                self.work(&mut next, |skipping, pending, tracker| skipping.step(pending, tracker));
            }
            Operation::Do => {
                let todo = next.todo.remove(0);
                self.perform(&mut next, todo);
            }
            Operation::Channel => self.channel(&mut next),
            Operation::Cancel => {
                // As in the driver, a cancel drops the pending steps.
                if next.todo.contains(&Todo::Send) {
                    next.sending = None;
                }
                next.todo.clear();
                self.tell(&mut next, Event::Cancel);
            }
        });
        // A step that changes nothing, for example a driver that finds no answer, is no transition.
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing that the guest will read is missed", |_, world: &World| {
                let same = |page: &Page| page.used != Use::Used || page.copy == page.content;
                world.ended != Some(true) || world.pages.iter().all(same)
            }),
            Property::always("no question is open after the end", |_, world: &World| {
                world.ended.is_none() || world.said.open.is_none()
            }),
            Property::always("a page is in one place", |_, world: &World| {
                let Sets { next, pass, .. } = world.sets;
                let (first, last, _) = pass.unwrap_or_default();
                first & last == 0 && next & (first | last) == 0
            }),
            Property::sometimes("a page is skipped and the guest moves", |_, world: &World| {
                world.ended == Some(true) && world.sets.skipped != 0
            }),
            Property::sometimes("a page is skipped while the guest runs", |_, world: &World| {
                !world.paused && world.sets.skipped != 0
            }),
            Property::sometimes("a page that was skipped is written and sent", |_, world: &World| {
                world.ended == Some(true) && world.pages[0].copy > 1
            }),
            Property::sometimes("the guest moves", |_, world: &World| world.ended == Some(true)),
        ]
    }
}

const LOST: &str = "nothing that the guest will read is missed";

fn model(answer_mode: AnswerMode, flaw: Flaw) -> Move {
    Move { answer_mode, flaw, operations: 3, cancels: false }
}

#[test]
fn no_order_of_events_misses_a_page() {
    if vmferry_testkit::skip_long_search_if_emulated() {
        return;
    }
    for (answer_mode, cancels) in
        [(AnswerMode::AtOnce, false), (AnswerMode::ByGuest, false), (AnswerMode::AtOnce, true)]
    {
        let operations = if answer_mode == AnswerMode::ByGuest || cancels { 2 } else { 3 };
        let checker =
            Move { cancels, operations, ..model(answer_mode, Flaw::None) }.checker().spawn_dfs().join();
        let states = checker.unique_state_count();
        vmferry_testkit::print_line(format!("model: {answer_mode:?}, cancels {cancels}: {states} states"));
        checker.assert_properties();
    }
}

#[test]
fn each_wrong_order_misses_a_page() {
    if vmferry_testkit::skip_long_search_if_emulated() {
        return;
    }
    let mut rows = Vec::new();
    for (answer_mode, flaw, what) in [
        (
            AnswerMode::ByGuest,
            Flaw::AsksFirst,
            "an answer counts for pages that were protected after it was asked for",
        ),
        (AnswerMode::AtOnce, Flaw::AsksFirst, "the same, of a map of free pages"),
        (AnswerMode::ByGuest, Flaw::ProtectsLate, "pages are protected when the answer has come"),
        (AnswerMode::AtOnce, Flaw::ProtectsSent, "pages are protected anew that were sent"),
        (
            AnswerMode::ByGuest,
            Flaw::TakesLate,
            "hint applied late: it counts for the pass after the one it was asked in",
        ),
        (AnswerMode::AtOnce, Flaw::SettlesEarly, "what was free before the pause is left out after it"),
    ] {
        let model = model(answer_mode, flaw);
        let found = if wants_shortest() { shortest(&model) } else { any(&model) };
        let (property, path) = found.unwrap_or_else(|| panic!("{flaw:?} was not found"));
        assert_eq!(property, LOST, "{flaw:?}");
        let steps: Vec<_> =
            path.into_iter().filter_map(|(_, operation)| Some(format!("{:?}", operation?))).collect();
        rows.push(format!("| {what} | {property} | {} | {} |", steps.len(), steps.join("; ")));
    }
    let head = "| mutation | what breaks | steps | a trace |\n|---|---|---|---|";
    println!("{head}\n{}", rows.join("\n"));
}
