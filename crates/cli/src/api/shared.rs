//! What the threads of a `run` share, and the commands of our own.
//!
//! Whoever asks reads the shared state, and passes what the machine has to do to the thread that owns it, which may be busy migrating;
//! what must work during a migration (`status`, `cancel`) needs nothing of that thread.

use super::{DirtyRateRequest, MigrateRequest};
use crate::guest::SharedProbe;
use crate::speed::{Sample, Speed};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vmferry_engine::{Arrival, FillState, LazyProgress, MigrationState, Monitor, RestWatch};
use vmferry_guest_abi::CpuSnapshot;

/// How long the machine's owner may take for a command.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the owner of the machine is asked to do, and where the answer goes.
pub(crate) enum Order {
    Pause,
    Resume,
    Migrate(Box<MigrateRequest>),
    Recover { take: bool },
    DirtyRate(DirtyRateRequest),
}

/// An order, and where its answer goes: an empty object, unless something was asked for.
pub(crate) struct Errand {
    pub(crate) order: Order,
    pub(crate) reply: SyncSender<Result<Value, String>>,
    /// Whoever asked has been told that nothing came of it: it must not be done any more.
    pub(crate) abandoned: Arc<AtomicBool>,
}

/// Where the guest of this process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Place {
    /// Not here yet.
    Awaited,
    Running,
    Paused,
    /// Being moved away; runs here until that is done.
    Moving,
    /// On the target.
    Moved,
    /// Nobody knows: see `recover`.
    Unknown,
    Ended,
}

/// What is known of the migration under way, or of the last one.
#[derive(Default)]
pub(crate) struct Migration {
    pub(crate) monitor: Option<Arc<Monitor>>,
    /// The report, once it has ended.
    pub(crate) report: Option<Value>,
}

/// Looks at a restore.
type Watch = Box<dyn Fn() -> LazyProgress + Send + Sync>;

/// What all threads of a `run` share.
pub(crate) struct Shared {
    pub(crate) kind: String,
    pub(crate) probe: SharedProbe,
    pub(crate) speed: Speed,
    /// Whether this host's processors stay awake in postcopy, whichever side of it this is.
    pub(crate) stay_awake: bool,
    pub(crate) arrival: Arrival,
    pub(crate) quit: AtomicBool,
    /// Somebody has seen the report of a migration that has ended.
    pub(crate) seen: AtomicBool,
    place: Mutex<Place>,
    migration: Mutex<Migration>,
    incoming: Mutex<Option<String>>,
    received: Mutex<Option<Value>>,
    /// What is still to come of a guest that came before its memory.
    rest: Mutex<Option<RestWatch>>,
    /// How far a guest that already runs has come out of its file.
    restore: Mutex<Option<Watch>>,
    orders: SyncSender<Errand>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(
        kind: String,
        probe: SharedProbe,
        (peer_timeout, stay_awake): (Duration, bool),
        orders: SyncSender<Errand>,
    ) -> Self {
        Self {
            kind,
            probe,
            speed: Speed::default(),
            stay_awake,
            arrival: Arrival::new(peer_timeout).stay_awake(stay_awake),
            quit: AtomicBool::new(false),
            seen: AtomicBool::new(false),
            place: Mutex::new(Place::Awaited),
            migration: Mutex::default(),
            incoming: Mutex::default(),
            received: Mutex::default(),
            rest: Mutex::default(),
            restore: Mutex::default(),
            orders,
        }
    }

    pub(crate) fn place(&self) -> Place {
        *lock(&self.place)
    }

    pub(crate) fn set_place(&self, place: Place) {
        *lock(&self.place) = place;
    }

    pub(crate) fn set_incoming(&self, uri: String) {
        *lock(&self.incoming) = Some(uri);
    }

    pub(crate) fn set_received(&self, received: Value) {
        *lock(&self.received) = Some(received);
    }

    pub(crate) fn set_rest(&self, rest: RestWatch) {
        *lock(&self.rest) = Some(rest);
    }

    pub(crate) fn set_restore(&self, watch: impl Fn() -> LazyProgress + Send + Sync + 'static) {
        *lock(&self.restore) = Some(Box::new(watch));
    }

    fn restore(&self) -> Option<LazyProgress> {
        lock(&self.restore).as_ref().map(|watch| watch())
    }

    /// Whether the guest runs here and its source still has pages of it, or its file some that cannot be had.
    pub(crate) fn lacks_pages(&self) -> bool {
        lock(&self.rest).as_ref().is_some_and(|rest| rest.now().state != MigrationState::Completed)
            || self.restore().is_some_and(|restore| restore.state == FillState::Failed)
    }

    /// Fails while pages of the guest are elsewhere: whoever read all of its memory now would wait for them.
    pub(crate) fn all_here(&self) -> Result<()> {
        match self.restore() {
            Some(LazyProgress { state: FillState::Completed, .. }) => Ok(()),
            Some(LazyProgress { error: Some(why), .. }) => {
                bail!("pages of the guest are in its file and cannot be had: {why}")
            }
            Some(LazyProgress { placed, pages, .. }) => {
                bail!("{placed} of {pages} pages of the guest have come out of its file; wait for the rest")
            }
            None if self.lacks_pages() => bail!("pages of the guest are still at its source; wait for them"),
            None => Ok(()),
        }
    }

    pub(crate) fn begin_migration(&self, monitor: Arc<Monitor>) {
        self.seen.store(false, Ordering::Release);
        *lock(&self.migration) = Migration { monitor: Some(monitor), report: None };
        self.set_place(Place::Moving);
    }

    /// The monitor of the migration that was begun.
    pub(crate) fn monitor(&self) -> Arc<Monitor> {
        lock(&self.migration).monitor.get_or_insert_default().clone()
    }

    pub(crate) fn end_migration(&self, report: Value, place: Place) {
        self.set_place(place);
        lock(&self.migration).report = Some(report);
    }

    /// Whether the guest runs on the target while pages of it are here.
    fn handed_over(&self) -> bool {
        use MigrationState::{Postcopy, PostcopyPaused};
        let migration = lock(&self.migration);
        let state = migration.monitor.as_ref().map(|monitor| monitor.progress().state);
        migration.report.is_none() && matches!(state, Some(Postcopy | PostcopyPaused))
    }

    /// Ends the process as soon as its guest allows it.
    pub(crate) fn ask_to_quit(&self) {
        if self.handed_over() {
            eprintln!(
                "vmferry: the guest runs on the target and still needs pages that are here only; this process ends when it has \
                 all, or with `vmferry recover --abandon` if its link is lost"
            );
        }
        self.quit.store(true, Ordering::Release);
        self.arrival.stop();
    }

    fn status(&self) -> Value {
        let migration = lock(&self.migration);
        let mut status = match (&migration.report, &migration.monitor) {
            (Some(report), _) => report.clone(),
            (None, Some(monitor)) => {
                let progress = monitor.progress();
                json!({ "state": progress.state, "outcome": null, "progress": progress })
            }
            (None, None) => match &*lock(&self.rest) {
                Some(rest) => serde_json::to_value(rest.now()).unwrap_or_default(),
                None => json!({ "state": null, "outcome": null }),
            },
        };
        status["vm"] = self.vm();
        status
    }

    /// Each vCPU's clock and writes, and nothing else: light enough to be asked for many times a second.
    fn writes(&self) -> Result<Value> {
        let stats = self.probe.stats().map_err(|error| anyhow!("{error}"))?;
        Ok(json!({ "vcpus": stats.cpus().iter().map(|cpu| [cpu.t_us, cpu.writes]).collect::<Vec<_>>() }))
    }

    /// What each vCPU's guest says of its stalls, besides that.
    fn stalls(&self) -> Result<Value> {
        let stats = self.probe.stats().map_err(|error| anyhow!("{error}"))?;
        let vcpu = |cpu: &CpuSnapshot| {
            json!({
                "t_us": cpu.t_us,
                "writes": cpu.writes,
                "reports": cpu.reports,
                "windows": cpu.windows().collect::<Vec<_>>(),
                "hist": cpu.hist,
                "hist_sum_us": cpu.hist_sum_us,
            })
        };
        Ok(json!({ "corrupt": stats.corrupt(), "vcpus": stats.cpus().iter().map(vcpu).collect::<Vec<_>>() }))
    }

    fn vm(&self) -> Value {
        let stats = match self.probe.stats() {
            Ok(stats) => {
                let sample = Sample::of(&stats);
                json!({
                    "state": format!("{:?}", stats.state).to_lowercase(),
                    "t_us": sample.t_us,
                    "writes": sample.writes,
                    "writes_per_s": self.speed.recent(),
                    "corrupt": stats.corrupt(),
                    "first_corrupt": stats.first_corrupt().map(|c| format!("{c:?}")),
                    "stall_max_us": stats.cpus().iter().map(|cpu| cpu.stall_max_us).max(),
                    "verify_done": stats.cpus().iter().map(|cpu| cpu.verify_done).min(),
                    "checks": stats.cpus().iter().map(|cpu| cpu.checks).sum::<u64>(),
                })
            }
            Err(error) => json!({ "state": null, "why": error.to_string() }),
        };
        json!({
            "pid": std::process::id(),
            "kind": self.kind,
            "place": self.place(),
            "incoming": *lock(&self.incoming),
            "received": *lock(&self.received),
            "restore": self.restore(),
            "guest": stats,
            "net": self.probe.kvm().map(crate::net::describe),
            "balloon": self.probe.balloon().map(|balloon| crate::balloon::describe(&balloon)),
        })
    }

    /// A command of our own, by its name without `x-vmferry-`.
    pub(super) fn answer(&self, command: &str, arguments: &Value) -> Result<Value> {
        match command {
            "status" => return Ok(self.status()),
            "writes" => return self.writes(),
            "stalls" => return self.stalls(),
            "balloon" => return crate::balloon::answer(self, arguments),
            "alloc" => return super::alloc::answer(&self.probe),
            "cancel" if self.handed_over() => bail!(
                "too late to cancel: the guest runs on the target, and what is here of it is old; it ends by itself, or, once \
                 its link is lost, with recover --abandon"
            ),
            "cancel" => match (&*lock(&self.migration), self.place()) {
                (Migration { monitor: Some(monitor), .. }, Place::Moving) => monitor.cancel(),
                _ => bail!("no migration is under way"),
            },
            "switch" => match (&*lock(&self.migration), self.place()) {
                (Migration { monitor: Some(monitor), .. }, Place::Moving) => monitor.switch_now(),
                _ => bail!("no migration is under way"),
            },
            "recover" if self.place() == Place::Moving => self.recover(arguments)?,
            "verify-guest" => {
                let request =
                    arguments["request"].as_u64().context("verify-guest needs a number `request`")?;
                if !self.probe.request_verify(request) {
                    bail!(
                        "the guest has no statistics page to be asked by, or it has not come yet; try again later"
                    );
                }
            }
            "quit" if self.handed_over() => bail!(
                "the guest runs on the target and still needs pages that are here only; this process ends when it has all"
            ),
            "quit" if self.place() == Place::Moving => {
                bail!("the guest is being moved; cancel that first");
            }
            "quit" if self.place() == Place::Unknown => {
                bail!(
                    "nobody knows whether the target runs this guest; decide with recover --take or --abandon"
                );
            }
            "quit" => self.ask_to_quit(),
            "pause" => return self.order(Order::Pause),
            "resume" => return self.order(Order::Resume),
            "recover" => {
                let take = arguments["take"].as_bool().context(
                    "no link of a postcopy is lost here; to decide about a guest of which nobody knows, say --take or --abandon",
                )?;
                return self.order(Order::Recover { take });
            }
            "migrate" => {
                let request =
                    serde_json::from_value(arguments.clone()).context("the arguments do not fit")?;
                return self.order(Order::Migrate(Box::new(request)));
            }
            "dirty-rate" => {
                let request =
                    serde_json::from_value(arguments.clone()).context("the arguments do not fit")?;
                return self.order(Order::DirtyRate(request));
            }
            _ => bail!("there is no command '{command}'"),
        }
        Ok(json!({}))
    }

    /// Takes up a lost link again, or gives it up.
    fn recover(&self, arguments: &Value) -> Result<()> {
        let migration = lock(&self.migration);
        let monitor = migration.monitor.as_ref().context("no migration is under way")?;
        if monitor.progress().state != MigrationState::PostcopyPaused {
            bail!("the link of this migration is not lost");
        }
        match arguments["take"].as_bool() {
            None => monitor.recover(),
            Some(false) => monitor.abandon(),
            Some(true) if !monitor.progress().runs_there => bail!(
                "nobody knows yet whether the target runs this guest: say recover --abandon to end the attempts to ask it, and then \
                 decide with --take or --abandon"
            ),
            Some(true) => bail!(
                "the guest has run on the target since: what is here of it is old and must not run; --abandon gives it up"
            ),
        }
        Ok(())
    }

    /// Passes an order to the machine's owner and waits until it was taken.
    fn order(&self, order: Order) -> Result<Value> {
        match self.place() {
            Place::Moving => bail!("the guest is being moved; wait, or cancel that first"),
            Place::Awaited => bail!("the guest is not here yet"),
            Place::Moved => bail!("the guest has moved away"),
            Place::Ended => bail!("the guest has ended"),
            Place::Unknown if !matches!(order, Order::Recover { .. }) => {
                bail!(
                    "nobody knows whether the target runs this guest; decide with recover --take or --abandon"
                );
            }
            Place::Running if matches!(order, Order::Migrate(_)) && self.lacks_pages() => {
                bail!("pages of this guest are still coming from where it was; wait until all are here");
            }
            Place::Running | Place::Paused | Place::Unknown => {}
        }
        let (reply, answer) = sync_channel(1);
        let abandoned = Arc::new(AtomicBool::new(false));
        let patience = match &order {
            Order::DirtyRate(request) => PATIENCE + request.longest(),
            _ => PATIENCE,
        };
        let errand = Errand { order, reply, abandoned: Arc::clone(&abandoned) };
        self.orders.try_send(errand).map_err(|error| match error {
            TrySendError::Full(_) => anyhow!("it is busy with other commands; try again"),
            TrySendError::Disconnected(_) => anyhow!("it is ending"),
        })?;
        let answer = answer.recv_timeout(patience).inspect_err(|_| abandoned.store(true, Ordering::Release));
        answer
            .context(
                "the machine's thread was busy for too long; what it has not begun by now it will not do",
            )?
            .map_err(|why| anyhow!(why))
    }
}
