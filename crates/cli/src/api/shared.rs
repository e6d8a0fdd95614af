//! What the threads of a `run` share, and the commands of our own.
//!
//! Whoever asks reads the shared state, and passes what the machine has to do to the thread that owns it, which may be busy migrating;
//! what must work during a migration (`status`, `cancel`) needs nothing of that thread.

mod latest;
mod quit;

use super::audience::Audience;
use super::options::Options;
use super::rate::Measurement;
use super::tell::Tell;
use super::{DirtyRateRequest, MigrateRequest};
use crate::args::RunArgs;
use crate::descriptors::Descriptors;
use crate::fence::Asked;
use crate::guest::SharedProbe;
use crate::limit::Limited;
use crate::plan::PlanRequest;
use crate::sandbox::SandboxArgs;
use crate::speed::{Speed, Start};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use vmferry_confine::InForce;
use vmferry_control::{Events, QmpError};
use vmferry_engine::fence::Arbiter;
use vmferry_engine::{
    Arrival, FillState, LazyProgress, MigrationState, Monitor, RestState, RestWatch, Tls, Uri,
};

/// How long the machine's owner may take for a command.
const PATIENCE: Duration = Duration::from_secs(20);

/// What the owner of the machine is asked to do, and where the answer goes.
pub(crate) enum Order {
    Pause,
    Resume,
    Migrate(Box<MigrateRequest>),
    Recover {
        take: bool,
    },
    DirtyRate(DirtyRateRequest),
    Plan(Box<PlanRequest>),
    /// Look whether the guest has ended, or the process is to end.
    Look,
    /// Bytes a second that a vCPU, or each, may dirty.
    Limit {
        cpu: Option<usize>,
        limit: Option<f64>,
    },
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

/// Where a guest is to be waited for, and where it is said whether it is.
pub(crate) type Incoming = (Uri, SyncSender<Result<(), String>>);

/// What is known of the migration under way, or of the last one.
#[derive(Default)]
pub(crate) struct Migration {
    pub(crate) monitor: Option<Arc<Monitor>>,
    /// The report, once it has ended.
    pub(crate) report: Option<Value>,
    /// State of the guest when it began.
    start: Option<Start>,
    /// The guest may run on the target before all of its memory is there.
    goes_over: bool,
}

/// Looks at a restore.
type Watch = Box<dyn Fn() -> LazyProgress + Send + Sync>;

/// What all threads of a `run` share.
pub(crate) struct Shared {
    pub(crate) kind: String,
    pub(crate) probe: SharedProbe,
    pub(crate) speed: Speed,
    pub(crate) tell: Tell,
    /// Bytes of the guest's memory.
    memory: u64,
    /// Whether connections to other hosts may be unencrypted.
    pub(super) insecure: bool,
    /// For encrypted connections, unless a migration says otherwise.
    pub(crate) tls: Option<Tls>,
    /// Who decides who owns a guest of which nobody knows, unless a migration says otherwise.
    pub(crate) fence: Option<Arc<dyn Arbiter>>,
    /// The same, of the migration under way or the last one.
    fence_now: Mutex<Option<Asked>>,
    /// Whether this host's processors stay awake in postcopy, whichever side of it this is.
    pub(crate) stay_awake: bool,
    pub(crate) arrival: Arrival,
    pub(crate) quit: AtomicBool,
    /// Who has seen the report of a migration that has ended.
    pub(crate) audience: Audience,
    /// The process stays when its guest has moved away, until somebody says that it is to end.
    pub(crate) stay: AtomicBool,
    quit_reason: Mutex<&'static str>,
    pub(super) measurement: Measurement,
    limited: Mutex<Vec<Limited>>,
    options: Mutex<Options>,
    /// Who waits to be told where to wait for a guest, if anybody does; `None` in it once that was told.
    deferred: Mutex<Option<Option<SyncSender<Incoming>>>>,
    place: Mutex<Place>,
    /// The operator has paused the guest.
    held: AtomicBool,
    migration: Mutex<Migration>,
    incoming: Mutex<Option<String>>,
    received: Mutex<Option<Value>>,
    /// What is still to come of a guest that came before its memory.
    rest: Mutex<Option<RestWatch>>,
    /// How far a guest that already runs has come out of its file.
    restore: Mutex<Option<Watch>>,
    orders: SyncSender<Errand>,
    /// Sockets for migrations that were passed to this process.
    pub(crate) descriptors: Descriptors,
    /// What the process was to be confined to.
    pub(crate) sandbox: SandboxArgs,
    /// What is in force of that, once it is.
    pub(crate) confinement: OnceLock<InForce>,
}

/// The arguments of a command, as what it takes.
fn fit<T: serde::de::DeserializeOwned>(arguments: &Value) -> Result<T> {
    serde_json::from_value(arguments.clone()).context("the arguments do not fit")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(
        (args, tls, descriptors): (&RunArgs, Option<Tls>, Descriptors),
        fence: Option<Arc<dyn Arbiter>>,
        probe: SharedProbe,
        orders: SyncSender<Errand>,
        events: Events,
    ) -> Self {
        let stay_awake = args.stay_awake.into();
        Self {
            kind: args.guest.to_string(),
            probe,
            speed: Speed::default(),
            tell: Tell::new(events),
            memory: args.memory,
            insecure: args.insecure,
            tls,
            stay_awake,
            arrival: Arrival::new(args.peer_timeout).stay_awake(stay_awake).fence(fence.clone()),
            fence,
            fence_now: Mutex::default(),
            quit: AtomicBool::new(false),
            audience: Audience::new(args.metrics.is_some()),
            stay: AtomicBool::new(false),
            quit_reason: Mutex::new("host-signal"),
            measurement: Measurement::default(),
            limited: Mutex::default(),
            options: Mutex::default(),
            deferred: Mutex::default(),
            place: Mutex::new(Place::Awaited),
            held: AtomicBool::new(false),
            migration: Mutex::default(),
            incoming: Mutex::default(),
            received: Mutex::default(),
            rest: Mutex::default(),
            restore: Mutex::default(),
            orders,
            descriptors,
            sandbox: args.sandbox.clone(),
            confinement: OnceLock::new(),
        }
    }

    pub(crate) fn place(&self) -> Place {
        *lock(&self.place)
    }

    pub(crate) fn set_place(&self, place: Place) {
        *lock(&self.place) = place;
    }

    /// Notes that the guest is here, where it runs or is paused, and tells the clients.
    pub(crate) fn is_here(&self, place: Place) {
        self.held.store(place == Place::Paused, Ordering::Release);
        self.set_place(place);
        if place == Place::Running {
            self.tell.runs();
        } else {
            self.tell.stands();
        }
    }

    /// Returns true if the operator has paused the guest, also while it is moved.
    pub(super) fn held(&self) -> bool {
        self.held.load(Ordering::Acquire)
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

    /// Where a target waits for its guest.
    pub(super) fn incoming(&self) -> Option<String> {
        lock(&self.incoming).clone()
    }

    /// What is known of how a guest came, if one did.
    pub(super) fn received(&self) -> Option<Value> {
        lock(&self.received).clone()
    }

    /// How a guest is doing that came before its memory.
    pub(super) fn rest(&self) -> Option<RestState> {
        lock(&self.rest).as_ref().map(RestWatch::now)
    }

    /// Bytes of the guest's memory.
    pub(super) fn memory(&self) -> u64 {
        self.memory
    }

    /// What holds for the next migration.
    pub(super) fn options(&self) -> Options {
        lock(&self.options).clone()
    }

    pub(super) fn change_options(
        &self,
        change: impl FnOnce(&mut Options) -> Result<(), QmpError>,
    ) -> Result<(), QmpError> {
        let mut options = lock(&self.options);
        change(&mut options)?;
        self.tell.of_migrations(options.has("events"));
        Ok(())
    }

    /// Lets it be said where to wait for a guest; what is said comes out of this.
    pub(crate) fn defer(&self) -> Receiver<Incoming> {
        let (sender, incoming) = sync_channel(1);
        *lock(&self.deferred) = Some(Some(sender));
        incoming
    }

    /// Has a target that was deferred wait at `uri`; fails if it cannot.
    pub(super) fn wait_at(&self, uri: Uri) -> Result<()> {
        let sender = match &mut *lock(&self.deferred) {
            None => bail!(
                "--incoming defer was not given: this process waits for no guest, or was told where before"
            ),
            Some(None) => bail!("the incoming migration has already been started"),
            Some(sender) => sender.take(),
        };
        let Some(sender) = sender else { bail!("the incoming migration has already been started") };
        let (reply, answer) = sync_channel(1);
        let waits = match sender.try_send((uri, reply)) {
            Ok(()) => answer.recv_timeout(PATIENCE).context("this process is busy or ends")?,
            Err(_) => bail!("it is ending"),
        };
        if waits.is_err() {
            // Another address may do.
            *lock(&self.deferred) = Some(Some(sender));
        }
        waits.map_err(|why| anyhow!(why))
    }

    /// The vCPUs that have a limit, as they were seen last.
    pub(super) fn limited(&self) -> Vec<Limited> {
        lock(&self.limited).clone()
    }

    pub(crate) fn set_limited(&self, limited: Vec<Limited>) {
        *lock(&self.limited) = limited;
    }

    /// Looks at what nobody reports; called now and then.
    pub(crate) fn observe(&self) {
        self.speed.look(&self.probe);
        let balloon = self.probe.balloon().map(|balloon| balloon.status().actual);
        self.tell.look(balloon, self.rest().map(|rest| rest.state));
    }

    pub(super) fn restore(&self) -> Option<LazyProgress> {
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

    /// Has the machine's owner look around. One that has other orders does so anyway.
    pub(crate) fn look(&self) {
        let (reply, _) = sync_channel(1);
        let _ = self.orders.try_send(Errand { order: Order::Look, reply, abandoned: Arc::default() });
    }

    /// Has a guest that may go over before all of its memory is there do that now.
    fn switch(&self) -> Result<()> {
        match (&*lock(&self.migration), self.place()) {
            (Migration { monitor: Some(monitor), goes_over: true, .. }, Place::Moving) => {
                monitor.switch_now()
            }
            (_, Place::Moving) => bail!(
                "this guest goes over with all of its memory or not at all, as its migration was begun; to have the rest follow \
                 takes --mode hybrid, or --on-timeout postcopy"
            ),
            _ => bail!("no migration is under way"),
        }
        Ok(())
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
            "cancel" if self.undecided() => {
                bail!("too late to cancel: the guest was handed over, and the fence is asked who owns it")
            }
            "cancel" => match (&*lock(&self.migration), self.place()) {
                (Migration { monitor: Some(monitor), .. }, Place::Moving) => {
                    self.tell.migration("cancelling");
                    monitor.cancel();
                }
                _ => bail!("no migration is under way"),
            },
            "switch" => self.switch()?,
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
            "quit" if self.undecided() => bail!(
                "nobody knows whether the target runs this guest, and the fence is asked; wait, or decide with recover --take or --abandon"
            ),
            "quit" if self.place() == Place::Moving => {
                bail!("the guest is being moved; cancel that first");
            }
            "quit" if self.place() == Place::Unknown => {
                bail!(
                    "nobody knows whether the target runs this guest; decide with recover --take or --abandon"
                );
            }
            "quit" => self.ask_to_quit("host-qmp-quit"),
            "powerdown" => crate::signals::press_power_button(self)?,
            "pause" => return self.order(Order::Pause),
            "resume" => return self.order(Order::Resume),
            "recover" => {
                let take = arguments["take"].as_bool().context(
                    "no link of a postcopy is lost here; to decide about a guest of which nobody knows, say --take or --abandon",
                )?;
                return self.order(Order::Recover { take });
            }
            "migrate" => return self.order(Order::Migrate(fit(arguments)?)),
            "dirty-rate" => return self.order(Order::DirtyRate(fit(arguments)?)),
            "plan" => return self.order(Order::Plan(fit(arguments)?)),
            _ => bail!("there is no command '{command}'"),
        }
        Ok(json!({}))
    }

    /// Passes an order to the machine's owner and waits until it was taken.
    pub(super) fn order(&self, order: Order) -> Result<Value> {
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
            Place::Running | Place::Paused if matches!(order, Order::Migrate(_)) && self.lacks_pages() => {
                bail!("pages of this guest are still coming from where it was; wait until all are here");
            }
            Place::Running | Place::Paused | Place::Unknown => {}
        }
        let (reply, answer) = sync_channel(1);
        let abandoned = Arc::new(AtomicBool::new(false));
        let patience = match &order {
            Order::DirtyRate(request) => PATIENCE + request.longest(),
            Order::Plan(_) => PATIENCE + crate::plan::LONGEST,
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
