//! Events for clients of the control socket.

use super::migration;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use vmferry_control::Events;
use vmferry_engine::{Change, MigrationState};

/// Shortest interval between events about the balloon.
const BALLOON_EVERY: Duration = Duration::from_secs(1);

/// Sender of events to all clients. Clones send to the same clients.
#[derive(Debug, Clone)]
pub(crate) struct EventSender(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    events: Events,
    /// Clients want events of migrations: the capability `events`.
    migrations: AtomicBool,
    /// The guest runs in this process, according to the last event.
    runs: AtomicBool,
    /// State of the latest migration, according to the last event, sent or suppressed.
    status: Mutex<&'static str>,
    seen: Mutex<Observations>,
}

/// Values at the last observation.
#[derive(Debug, Default)]
struct Observations {
    balloon: Option<(u64, Instant)>,
    postcopy: Option<MigrationState>,
}

impl EventSender {
    pub(crate) fn new(events: Events) -> Self {
        let (migrations, runs) = (AtomicBool::new(false), AtomicBool::new(false));
        let (status, seen) = (Mutex::new("none"), Mutex::default());
        Self(Arc::new(Inner { events, migrations, runs, status, seen }))
    }

    pub(super) fn of_migrations(&self, wanted: bool) {
        self.0.migrations.store(wanted, Ordering::Release);
    }

    /// Records that the guest runs in this process. Sends an event if it did not run before.
    pub(crate) fn guest_runs(&self) {
        if !self.0.runs.swap(true, Ordering::AcqRel) {
            self.0.events.emit("RESUME", Value::Null);
        }
    }

    /// Records that the guest does not run in this process. Sends an event if it ran before.
    pub(crate) fn guest_stopped(&self) {
        if self.0.runs.swap(false, Ordering::AcqRel) {
            self.0.events.emit("STOP", Value::Null);
        }
    }

    /// Sends the event that this process ends, at the request of its guest (`guest`) or of the
    /// operator.
    pub(crate) fn ends(&self, guest: bool, reason: &str) {
        self.0.events.emit("SHUTDOWN", json!({ "guest": guest, "reason": reason }));
    }

    /// Sends the event that the guest was asked to shut down.
    pub(crate) fn power_button(&self) {
        self.0.events.emit("POWERDOWN", Value::Null);
    }

    /// Sends the event that the guest asked for a reset.
    pub(crate) fn reset(&self) {
        self.0.events.emit("RESET", json!({ "guest": true, "reason": "guest-reset" }));
    }

    /// Records a new state of the migration, by its QMP name, and sends an event. A migration that
    /// is being cancelled does not become active again: the engine may still report an earlier
    /// moment.
    pub(crate) fn migration(&self, status: &'static str) {
        let mut last = self.0.status.lock().unwrap_or_else(PoisonError::into_inner);
        let late = *last == "cancelling" && matches!(status, "active" | "device");
        if late || *last == status {
            return;
        }
        *last = status;
        // The lock is held so that events keep this order.
        if self.0.migrations.load(Ordering::Acquire) {
            self.0.events.emit("MIGRATION", json!({ "status": status }));
        }
    }

    /// Records the beginning of a pass. The first pass makes the migration active, which the engine
    /// reports a moment later.
    fn pass(&self, pass: u32) {
        if *self.0.status.lock().unwrap_or_else(PoisonError::into_inner) == "setup" {
            self.migration("active");
        }
        if self.0.migrations.load(Ordering::Acquire) {
            self.0.events.emit("MIGRATION_PASS", json!({ "pass": u64::from(pass) + 1 }));
        }
    }

    /// Handles a change that the source's engine reports. The end of the migration is sent when its
    /// report is available.
    pub(super) fn change(&self, change: Change) {
        use MigrationState::{Postcopy, PostcopyPaused, Precopy, Switchover};
        match change {
            Change::State(state) => {
                if matches!(state, Switchover | Postcopy | PostcopyPaused) {
                    self.guest_stopped();
                }
                if matches!(state, Precopy | Switchover | Postcopy | PostcopyPaused) {
                    self.migration(migration::status(state));
                }
            }
            Change::Pass(pass) => self.pass(pass),
            _ => {}
        }
    }

    /// Observes values that no component reports: the size of the balloon, and the rest of a
    /// postcopy migration at the target.
    pub(super) fn observe(&self, balloon: Option<u64>, postcopy: Option<MigrationState>) {
        self.observe_at(Instant::now(), balloon, postcopy);
    }

    fn observe_at(&self, now: Instant, balloon: Option<u64>, postcopy: Option<MigrationState>) {
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(actual) = balloon {
            let (before, at) = *seen.balloon.get_or_insert((actual, now));
            if before != actual && now - at >= BALLOON_EVERY {
                seen.balloon = Some((actual, now));
                self.0.events.emit("BALLOON_CHANGE", json!({ "actual": actual }));
            }
        }
        if postcopy != seen.postcopy
            && let Some(state) = postcopy
        {
            seen.postcopy = postcopy;
            self.migration(migration::status(state));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_control::{Answer, Arguments, Client, Command, Limits, Machine, QmpError, Server, Version};

    struct Nothing;

    impl Machine for Nothing {
        fn version(&self) -> Version {
            Version { numbers: [0; 3], package: "test".to_owned() }
        }

        fn commands(&self) -> &[Command] {
            &[]
        }

        fn execute(&self, name: &str, _: Arguments) -> Result<Answer, QmpError> {
            Err(QmpError::not_found(name))
        }
    }

    /// Returns the events that a client gets for what `happens`.
    fn emitted(happens: impl FnOnce(&EventSender)) -> Vec<String> {
        let path = std::env::temp_dir().join(format!("vmferry-tell-{:?}", std::thread::current().id()));
        let events = Events::new().unwrap();
        let server = Server::start(&path, Arc::new(Nothing), &events, Limits::default()).unwrap();
        let mut client = Client::connect(&path, vmferry_testkit::PATIENCE).unwrap();
        happens(&EventSender::new(events));
        drop(server);
        let mut names = Vec::new();
        while let Ok(Some(event)) = client.next_event(vmferry_testkit::PATIENCE) {
            let more = ["status", "pass", "actual"].iter().find_map(|name| event.data.get(name));
            names.push(more.map_or(event.name.clone(), |more| format!("{} {more}", event.name)));
        }
        names
    }

    #[test]
    fn migration_events_are_in_order_and_each_state_is_sent_once() {
        let names = emitted(|sender| {
            sender.guest_runs();
            sender.guest_runs();
            sender.migration("setup");
            sender.of_migrations(true);
            sender.migration("setup");
            sender.change(Change::State(MigrationState::Setup));
            sender.change(Change::Pass(0));
            sender.change(Change::State(MigrationState::Precopy));
            sender.change(Change::State(MigrationState::Switchover));
            sender.change(Change::State(MigrationState::Completed));
            sender.migration("completed");
        });
        let migration = ["MIGRATION \"device\"", "MIGRATION \"completed\""];
        let before = ["RESUME", "MIGRATION \"active\"", "MIGRATION_PASS 1", "STOP"];
        assert_eq!(names, [&before[..], &migration].concat());
    }

    #[test]
    fn migration_that_is_cancelled_does_not_become_active_again() {
        let names = emitted(|sender| {
            sender.of_migrations(true);
            sender.migration("cancelling");
            sender.change(Change::State(MigrationState::Precopy));
            sender.migration("cancelled");
            sender.migration("setup");
        });
        assert_eq!(
            names,
            ["\"cancelling\"", "\"cancelled\"", "\"setup\""].map(|name| format!("MIGRATION {name}"))
        );
    }

    #[test]
    fn observed_values_are_sent_when_they_change() {
        let names = emitted(|sender| {
            sender.of_migrations(true);
            let begin = Instant::now();
            for postcopy in [MigrationState::Postcopy, MigrationState::Postcopy, MigrationState::Completed] {
                sender.observe_at(begin, Some(5), Some(postcopy));
            }
            sender.observe_at(begin + BALLOON_EVERY / 2, Some(6), None);
            sender.observe_at(begin + BALLOON_EVERY, Some(7), None);
        });
        let states = ["MIGRATION \"postcopy-active\"", "MIGRATION \"completed\"", "BALLOON_CHANGE 7"];
        assert_eq!(names, states, "a change within a second is sent with the next one");
    }
}
