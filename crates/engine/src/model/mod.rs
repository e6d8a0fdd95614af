//! Model of the whole protocol, whose every reachable state is checked (stateright): precopy,
//! postcopy, hybrid and handoffs inside one host, cancel, recovery, crashes of source or target at
//! any step, and links that are late, lost, cut, or cut in part.
//!
//! Both [`Session`](crate::source::session::Session)s are the production sessions: every decision
//! is a call of their `handle`. The model replaces their environment, which the drivers and the
//! kernel are in production: `source` and `memory` are the source's host, `target` and `placing`
//! the target's. The simulation (`sim`) has the same environment with more pages, channels and
//! faults, and samples runs. The model exhausts all runs, with two pages, few writes and few
//! faults. It drives the production run loop ([`crate::run`]) one event at a time. Neither the
//! model nor the simulation runs the drivers' sockets, queues and threads.
//!
//! Time is not a number in the model: any limit may expire at any moment (`Session::project` says
//! why that is sound). An operation of a driver that takes time without a visible difference, such
//! as loading a state, is one step with its consequences, except where it fails. Operations that
//! writes of the guest can interleave with, the sending threads, and all messages are steps of
//! their own.
//!
//! Faults are counted: each bound limits how many may happen in one run. Every run is therefore
//! finite, which `every_run_comes_to_an_end` shows, so that "in the end" is checked exactly.

mod arbiter;
mod cycle;
mod flaw;
mod judge;
mod memory;
mod operations;
mod placing;
mod shortest;
mod source;
mod step;
mod target;
mod tell;
mod world;

use crate::arbiter::simulated::arbiter_placeholder;
use crate::arbiter::{Ownership, Side};
use crate::source::session::Session as SourceSession;
use crate::source::{MigrationMode, Outcome, Settings};
use crate::target::session::Outcome as TargetOutcome;
use arbiter::ModelArbiter;
use flaw::Flaw;
use judge::Promise;
pub(crate) use shortest::{any, is_wanted as wants_shortest, shortest};
use source::settings;
use stateright::{Checker, Expectation, Model, Property};
use std::time::{Duration, Instant};
use step::{Operation, Step, StepFault};
use world::{ALL, DialState, Keyed, Link, PAGES, SourceState, TargetState, World};

/// Number of states that a search visits under an emulator, which needs about ten times as long for
/// each.
const FEW_STATES: usize = 4_000;

const MODES: [MigrationMode; 4] =
    [MigrationMode::Precopy, MigrationMode::Postcopy, MigrationMode::Hybrid, MigrationMode::Local];

/// Bounds of the model.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// Total number of crashes, cuts, failed steps, damaged pages, cancels, silences, and mistakes
    /// of the operator.
    faults: u8,
    /// Writes on the source during passes, and below, writes on the target.
    writes: u8,
    target_writes: u8,
    /// Number of requested pages.
    touches: u8,
    /// Number of passes until the timeout ends them.
    passes: u8,
    verify: bool,
}

impl Bounds {
    const SHORT: Self = Self { faults: 1, writes: 2, target_writes: 1, touches: 1, passes: 2, verify: false };
}

#[derive(Debug, Clone)]
struct Protocol {
    mode: MigrationMode,
    bounds: Bounds,
    /// True if source and target use an arbiter.
    with_arbiter: bool,
    flaw: Option<Flaw>,
}

impl Protocol {
    fn new(mode: MigrationMode, bounds: Bounds) -> Self {
        Self { mode, bounds, with_arbiter: false, flaw: None }
    }

    /// Returns the same model with an arbiter.
    fn with_arbiter(self) -> Self {
        Self { with_arbiter: true, ..self }
    }

    /// Returns the source at the beginning of the migration, when the guest runs there.
    fn first_source(&self, session: SourceSession) -> SourceState {
        SourceState {
            session: Keyed::by(session, SourceSession::project),
            todo: None,
            running: true,
            paused: false,
            holds: true,
            committed: false,
            given_back: false,
            resume_failed: false,
            outcome: None,
            crashed: false,
            link: 0,
            connected: true,
            dial: DialState::No,
            in_vain: false,
            timed_out: false,
            switch_requested: false,
            live_passes: 0,
            memory: [1; PAGES],
            saved: None,
            protected: 0,
            marked: 0,
            pending: ALL,
            in_pass: 0,
            job: None,
            claims: None,
            serving: false,
            early: Vec::new(),
            missing: 0,
            writes_left: self.bounds.writes,
        }
    }

    /// Returns the target at the beginning of the migration.
    fn first_target(&self) -> TargetState {
        TargetState {
            session: Step::new_session(self.mode, self.with_arbiter),
            running: false,
            holds: false,
            outcome: None,
            crashed: false,
            stopped: false,
            link: 0,
            connected: true,
            loss_noticed: false,
            last_came: false,
            collected: 0,
            pages: [0; PAGES],
            shares: false,
            mismatched: 0,
            compared: 0,
            differ: 0,
            loaded: false,
            started: false,
            paging: None,
            in_postcopy: false,
            touches_left: self.bounds.touches,
            writes_left: self.bounds.target_writes,
        }
    }

    fn settings(&self) -> Settings {
        let arbiter = self.with_arbiter.then(arbiter_placeholder);
        Settings { arbiter, ..settings(self.mode, self.bounds.verify) }
    }
}

/// Step in the representation of the checker.
type Happening = (Operation, Option<StepFault>);

impl Model for Protocol {
    type State = World;
    type Action = Happening;

    fn init_states(&self) -> Vec<World> {
        let (session, first) =
            SourceSession::begin(self.settings().session(), world::machine(), PAGES as u64, Duration::ZERO);
        let source = self.first_source(session);
        let target = self.first_target();
        let world = World {
            source,
            target,
            links: vec![Link::default()],
            arbiter: self.with_arbiter.then(ModelArbiter::new),
            faults_left: self.bounds.faults,
            fault_free: true,
            broken: None,
        };
        let mut step = Step::new(self, &world, None);
        step.begin(first);
        vec![step.world]
    }

    fn actions(&self, world: &World, happenings: &mut Vec<Happening>) {
        let mut operations = Vec::new();
        self.operations(world, &mut operations);
        let lost = |at: usize| world.links[at].dead() || world.links[at].source_closed;
        let risky = world.faults_left > 0 || lost(world.source.link) || lost(world.target.link);
        for operation in operations {
            happenings.push((operation, None));
            if risky {
                let step_faults = Step::step_faults(self, world, operation);
                happenings.extend(step_faults.into_iter().map(|step_fault| (operation, Some(step_fault))));
            }
        }
    }

    fn next_state(&self, world: &World, (operation, step_fault): Happening) -> Option<World> {
        Step::new(self, world, step_fault).done(operation)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = Promise::properties();
        properties.push(Property::eventually(
            "in the end source and target have ended with an outcome",
            |_, world: &World| world.source.ended() && world.target.ended(),
        ));
        if self.flaw.is_none() {
            properties.extend(self.reached());
        }
        properties
    }

    fn format_action(&self, happening: &Happening) -> String {
        format!("{happening:?}")
    }
}

impl Protocol {
    /// Returns states that must be reached. Otherwise, the model would prove nothing about them.
    fn reached(&self) -> Vec<Property<Self>> {
        let mut reached = vec![
            Property::sometimes("the guest moves", |_, world: &World| world.completed()),
            Property::sometimes("the migration is cancelled", |_, world: &World| {
                matches!(world.source.outcome, Some(Outcome::Cancelled(_)))
            }),
            Property::sometimes("the guest is given back after the commit", |_, world: &World| {
                world.source.committed && matches!(world.source.outcome, Some(Outcome::Failed(_)))
            }),
        ];
        if self.with_arbiter {
            reached.extend(self.reached_with_an_arbiter());
        } else if self.mode == MigrationMode::Local {
            reached.extend(Self::reached_without_a_second_link());
            reached.extend([
                Property::sometimes("the guest stays after its memory was mapped", |_, world: &World| {
                    world.target.shares && world.source.running && world.source.ended()
                }),
                Property::sometimes("the guest moves after its I/O was busy", |_, world: &World| {
                    world.completed() && world.source.session.is.was_busy()
                }),
            ]);
        } else if self.mode == MigrationMode::Precopy {
            reached.extend(Self::reached_without_a_second_link());
            reached.extend([Property::sometimes("damaged pages are sent again", |_, world: &World| {
                let resent = world.source.session.is.summary().digest_mismatches_resent > 0;
                !world.source.ended() && world.source.committed && resent
            })]);
        } else {
            reached.extend([
                Property::sometimes("the guest moves after its I/O was busy", |_, world: &World| {
                    world.completed() && world.source.session.is.was_busy()
                }),
                Property::sometimes("the guest moves over a second link", |_, world: &World| {
                    world.completed() && world.target.link > 0
                }),
                Property::sometimes("the guest is given back over a second link", |_, world: &World| {
                    world.source.running && world.target.link > 0
                }),
                Property::sometimes(
                    "the guest is lost with its source, which reports it",
                    |_, world: &World| {
                        world.source.crashed && world.target.in_postcopy && world.target.crashed
                    },
                ),
                Property::sometimes("the source dies, and the guest is complete", |_, world: &World| {
                    world.source.crashed && world.target.outcome == Some(TargetOutcome::Completed)
                }),
            ]);
        }
        reached
    }

    /// Returns states of migrations in which the source does not open a lost link again.
    fn reached_without_a_second_link() -> [Property<Self>; 2] {
        [
            Property::sometimes("the owner is unknown, and the guest moved", |_, world: &World| {
                world.unknown() && world.target.running
            }),
            Property::sometimes("the owner is unknown, and the guest did not move", |_, world: &World| {
                world.unknown() && world.target.ended() && !world.target.running
            }),
        ]
    }

    fn reached_with_an_arbiter(&self) -> Vec<Property<Self>> {
        let mut reached = vec![
            Property::sometimes("the arbiter gives the guest to the source", |_, world: &World| {
                world.used_arbiter()
                    && matches!(world.source.outcome, Some(Outcome::Failed(_)))
                    && world.arbiter_permits(Side::Source) == Some(true)
            }),
            Property::sometimes("the target's claim comes too late", |_, world: &World| {
                let refused =
                    world.target.outcome.is_some() && !world.target.crashed && !world.target.started;
                world.source.running && world.source.committed && refused
            }),
            Property::sometimes(
                "the owner dies, and no host is said to run the guest",
                |_, world: &World| {
                    let held = world.arbiter.as_ref().and_then(|arbiter| arbiter.register);
                    world.unknown() && held == Some(Ownership::Target { runs: false })
                },
            ),
        ];
        if matches!(self.mode, MigrationMode::Precopy | MigrationMode::Local) {
            reached
                .push(Property::sometimes("the arbiter reports that the guest moved", |_, world: &World| {
                    world.used_arbiter() && world.completed()
                }));
        }
        reached
    }

    /// Returns a broken promise and a trace to it as text. The trace is the shortest one if the
    /// table for the documentation is wanted.
    fn counterexample(&self) -> Option<(&'static str, Vec<String>)> {
        let (property, path) = if wants_shortest() { shortest(self) } else { any(self) }?;
        let step = |(world, happening): (World, Option<Happening>)| Some(tell::tell(&world, happening?));
        Some((property, path.into_iter().filter_map(step).collect()))
    }

    /// Visits every state, and reports their number. A search in depth takes less memory. A search
    /// in breadth finds the shortest traces.
    ///
    /// Under an emulator only the first [`FEW_STATES`] are visited: no promise may be broken in
    /// these.
    fn explore(self, in_depth: bool) {
        let began = Instant::now();
        let model = self.clone();
        let few = vmferry_testkit::emulator().is_some();
        let checker = self.checker();
        let checker = if few { checker.target_state_count(FEW_STATES) } else { checker };
        if in_depth {
            model.report(checker.spawn_dfs().join(), began, few);
        } else {
            model.report(checker.spawn_bfs().join(), began, few);
        }
    }

    fn report(&self, checker: impl Checker<Self>, began: Instant, few: bool) {
        use std::io::Write;
        // A broken promise ends the search early, so the space was not exhausted.
        let found = checker.discoveries();
        let failed = |property: &Property<Self>| {
            property.expectation != Expectation::Sometimes && found.contains_key(property.name)
        };
        let broken = self.properties().iter().any(failed);
        let _ = writeln!(
            std::io::stdout(),
            "model: {}{}, {:?}: {} states, {} transitions, depth {}, {:.1} s; {}",
            self.mode,
            if self.with_arbiter { " with a fence" } else { "" },
            self.bounds,
            checker.unique_state_count(),
            checker.state_count(),
            checker.max_depth(),
            began.elapsed().as_secs_f64(),
            match (broken, few) {
                (true, _) => "A PROMISE IS BROKEN",
                (false, true) => "the other states were left out",
                (false, false) => "the space is exhausted",
            },
        );
        if few {
            assert!(!broken, "a promise is broken: {:?}", found.keys());
        } else {
            checker.assert_properties();
        }
    }
}

impl World {
    /// Returns true if the source has claimed the guest.
    fn used_arbiter(&self) -> bool {
        self.arbiter.is_some() && !self.source.session.is.register_unneeded()
    }

    fn completed(&self) -> bool {
        self.source.outcome == Some(Outcome::Completed)
    }

    fn unknown(&self) -> bool {
        matches!(self.source.outcome, Some(Outcome::Unknown(_)))
    }
}

/// One test for each space, so that they run in parallel.
mod every_promise_is_kept_in_every_state {
    use super::{Bounds, MigrationMode, Protocol};

    const VERIFIED: Bounds = Bounds { verify: true, writes: 1, ..Bounds::SHORT };

    #[test]
    fn of_a_precopy() {
        Protocol::new(MigrationMode::Precopy, Bounds::SHORT).explore(false);
        Protocol::new(MigrationMode::Precopy, VERIFIED).explore(false);
    }

    #[test]
    fn of_a_postcopy() {
        Protocol::new(MigrationMode::Postcopy, Bounds::SHORT).explore(false);
    }

    #[test]
    fn of_a_hybrid() {
        Protocol::new(MigrationMode::Hybrid, Bounds::SHORT).explore(false);
    }

    #[test]
    fn of_a_handoff() {
        Protocol::new(MigrationMode::Local, Bounds::SHORT).explore(false);
    }

    #[test]
    fn of_a_verified_hybrid() {
        Protocol::new(MigrationMode::Hybrid, VERIFIED).explore(false);
    }
}

#[test]
fn every_promise_is_kept_with_an_arbiter() {
    // A lost link and a missing answer of the arbiter are two faults. The guest's writes have no
    // effect on its owner.
    let bounds = Bounds { faults: 2, writes: 0, target_writes: 0, touches: 0, passes: 1, ..Bounds::SHORT };
    for mode in [MigrationMode::Precopy, MigrationMode::Postcopy, MigrationMode::Local] {
        Protocol::new(mode, bounds).with_arbiter().explore(false);
    }
}

/// Larger bounds, set by `VMFERRY_MODEL_FAULTS` and similar variables. A run takes minutes, and
/// some gigabytes.
#[test]
#[ignore = "takes minutes: cargo test --release -p vmferry-engine --lib model::further -- --ignored --nocapture"]
fn further_than_in_every_build() {
    let number = |name: &str, otherwise| {
        std::env::var(name).map_or(otherwise, |text| text.parse().expect("a small number"))
    };
    let bounds = Bounds {
        faults: number("VMFERRY_MODEL_FAULTS", 2),
        writes: number("VMFERRY_MODEL_WRITES", 2),
        ..Bounds::SHORT
    };
    let only = std::env::var("VMFERRY_MODEL_MODE").ok();
    for mode in MODES.into_iter().filter(|mode| only.as_ref().is_none_or(|only| *only == mode.to_string())) {
        let model = Protocol::new(mode, bounds);
        let with_arbiter = std::env::var("VMFERRY_MODEL_FENCE").is_ok_and(|arbiter| arbiter == "1");
        if with_arbiter { model.with_arbiter() } else { model }.explore(true);
    }
}
