//! State that the threads of a `run` share, and vmferry's own commands.
//!
//! The threads of the control socket read the shared state, and pass orders to the thread that owns
//! the machine. The owner may be busy with a migration. Therefore commands that must work during a
//! migration (`status`, `cancel`) do not need the owner.

mod latest;
mod quit;

use super::audience::ReportReaders;
use super::event_sender::EventSender;
use super::options::Options;
use super::pause_gate::PauseGate;
use super::rate::Measurement;
use super::{DirtyRateRequest, MigrateRequest, SnapshotRequest};
use crate::arbiter::ArbiterThread;
use crate::args::RunArgs;
use crate::branch::BranchRequest;
use crate::descriptors::Descriptors;
use crate::guest::SharedProbe;
use crate::limit::Limited;
use crate::plan::PlanRequest;
use crate::sandbox::SandboxArgs;
use crate::speed::{Speed, Start};
use crate::successor::Started;
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use vmferry_confine::InForce;
use vmferry_control::{Events, QmpError};
use vmferry_engine::arbiter::Arbiter;
use vmferry_engine::{
    Arrival, FillState, KnownPages, MigrationHandle, MigrationState, PostcopyState, PostcopyWatch,
    PrefetchProgress, RestoreProgress, Tls, Uri,
};

/// Longest time that the machine's owner may take for a command.
const PATIENCE: Duration = Duration::from_secs(20);

/// Longest time for which one call waits for the pause of a snapshot.
const HOOK_WAIT: Duration = Duration::from_secs(1);

/// Order for the machine's owner.
pub(crate) enum Order {
    Pause,
    Resume,
    Migrate(Box<MigrateRequest>),
    Snapshot(Box<SnapshotRequest>),
    Recover {
        take: bool,
    },
    DirtyRate(DirtyRateRequest),
    Plan(Box<PlanRequest>),
    Branch(BranchRequest),
    /// End the recording of the working set.
    EndRecording,
    /// Check whether the guest has ended, or the process must end.
    Look,
    /// Limit the dirty rate of a vCPU, or of each vCPU, in bytes per second.
    Limit {
        cpu: Option<usize>,
        limit: Option<f64>,
    },
}

impl Order {
    /// Returns whether the order protects, copies or replaces the memory of the guest.
    pub(crate) fn uses_memory(&self) -> bool {
        match self {
            Self::Migrate(_) | Self::Snapshot(_) | Self::DirtyRate(_) | Self::Plan(_) | Self::Branch(_) => {
                true
            }
            Self::Pause
            | Self::Resume
            | Self::Recover { .. }
            | Self::EndRecording
            | Self::Look
            | Self::Limit { .. } => false,
        }
    }
}

/// An order, and the channel for its answer: an empty object, unless the order asks for a value.
pub(crate) struct PendingOrder {
    pub(crate) order: Order,
    pub(crate) reply: SyncSender<Result<Value, String>>,
    pub(crate) turn: Arc<Turn>,
}

/// Decision whether the machine's owner begins an order before its caller gives it up. Exactly one
/// of them succeeds: a caller that was told that the order will not be executed can rely on it.
#[derive(Debug, Default)]
pub(crate) struct Turn(AtomicBool);

impl Turn {
    /// Begins the order, or gives it up. Returns false if the owner or the caller has
    /// decided before.
    pub(crate) fn take(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}

/// Place of the guest of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum GuestPlace {
    /// The guest has not arrived.
    Awaited,
    Running,
    Paused,
    /// The guest is being migrated, or a snapshot of it is being written. It runs in this process
    /// until the switchover.
    Moving,
    /// The guest is at the target.
    Moved,
    /// The owner is unknown: see `recover`.
    Unknown,
    Ended,
}

/// Address at which to wait for a guest, and the channel for the result.
pub(crate) type Incoming = (Uri, SyncSender<Result<(), String>>);

/// Current or latest migration.
#[derive(Default)]
pub(crate) struct Migration {
    pub(crate) handle: Option<Arc<MigrationHandle>>,
    /// Report, once the migration has ended.
    pub(crate) report: Option<Value>,
    /// State of the guest at the beginning of the migration.
    start: Option<Start>,
    /// The guest may run at the target before its memory is complete.
    goes_over: bool,
}

/// Function that returns the progress of a restore, or of a prefetch.
type Watch<T> = Box<dyn Fn() -> T + Send + Sync>;

/// State that all threads of a `run` share.
pub(crate) struct RunContext {
    pub(crate) kind: String,
    /// Command line of this process.
    started: Started,
    pub(crate) probe: SharedProbe,
    pub(crate) speed: Speed,
    pub(crate) event_sender: EventSender,
    /// Guest memory in bytes.
    memory: u64,
    /// Connections to other hosts may be unencrypted.
    pub(super) insecure: bool,
    /// Credentials for encrypted connections, unless a migration brings its own.
    pub(crate) tls: Option<Tls>,
    /// Arbiter for unknown ownership, unless a migration brings its own.
    pub(crate) arbiter: Option<Arc<dyn Arbiter>>,
    /// Arbiter of the current or latest migration.
    current_arbiter: Mutex<Option<ArbiterThread>>,
    /// This host's processors stay awake in postcopy, at the source and at the target.
    pub(crate) stay_awake: bool,
    pub(crate) arrival: Arrival,
    pub(crate) quit: AtomicBool,
    /// The process was told to end before its guest arrived, or while the owner of its guest was
    /// unknown.
    quit_early: AtomicBool,
    /// Readers that have seen the report of a migration that has ended.
    pub(crate) audience: ReportReaders,
    /// The process stays after its guest has moved, until a client tells it to end.
    pub(crate) stay: AtomicBool,
    quit_reason: Mutex<&'static str>,
    pub(super) measurement: Measurement,
    /// Pause of a snapshot, in which the client executes hooks.
    pub(crate) pause_gate: PauseGate,
    limited: Mutex<Vec<Limited>>,
    options: Mutex<Options>,
    /// Channel to the thread that waits for an address, with `--incoming defer`. The inner `None`
    /// means that the address was given.
    deferred: Mutex<Option<Option<SyncSender<Incoming>>>>,
    place: Mutex<GuestPlace>,
    /// The operator has paused the guest.
    held: AtomicBool,
    migration: Mutex<Migration>,
    incoming: Mutex<Option<String>>,
    received: Mutex<Option<Value>>,
    /// Missing pages of a guest that runs before its memory is complete.
    postcopy: Mutex<Option<PostcopyWatch>>,
    /// Progress of the restore of a guest that already runs.
    restore: Mutex<Option<Watch<RestoreProgress>>>,
    /// Progress of the prefetch of a working set.
    prefetch: Mutex<Option<Watch<PrefetchProgress>>>,
    orders: SyncSender<PendingOrder>,
    /// Sockets for migrations that were passed to this process.
    pub(crate) descriptors: Descriptors,
    /// Requested confinement of the process.
    pub(crate) sandbox: SandboxArgs,
    /// Listening socket of the metrics, if they are served.
    pub(crate) metrics: OnceLock<OwnedFd>,
    /// Confinement that is in force, once it is.
    pub(crate) confinement: OnceLock<InForce>,
}

/// Parses the arguments of a command.
fn fit<T: serde::de::DeserializeOwned>(arguments: &Value) -> Result<T> {
    serde_json::from_value(arguments.clone()).context("the arguments do not fit the command")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RunContext {
    pub(crate) fn new(
        (args, started): (&RunArgs, Started),
        (tls, descriptors): (Option<Tls>, Descriptors),
        (arbiter, known): (Option<Arc<dyn Arbiter>>, Option<Arc<KnownPages>>),
        probe: SharedProbe,
        orders: SyncSender<PendingOrder>,
        events: Events,
    ) -> Self {
        let stay_awake = args.stay_awake.into();
        Self {
            kind: args.guest.to_string(),
            started,
            probe,
            speed: Speed::default(),
            event_sender: EventSender::new(events),
            memory: args.memory,
            insecure: args.insecure,
            tls,
            stay_awake,
            arrival: Arrival::new(args.peer_timeout)
                .stay_awake(stay_awake)
                .arbiter(arbiter.clone())
                .known_pages(known)
                .local_memory(true),
            arbiter,
            current_arbiter: Mutex::default(),
            quit: AtomicBool::new(false),
            quit_early: AtomicBool::new(false),
            audience: ReportReaders::new(args.metrics.is_some()),
            stay: AtomicBool::new(false),
            quit_reason: Mutex::new("host-signal"),
            measurement: Measurement::default(),
            pause_gate: PauseGate::default(),
            limited: Mutex::default(),
            options: Mutex::default(),
            deferred: Mutex::default(),
            place: Mutex::new(GuestPlace::Awaited),
            held: AtomicBool::new(false),
            migration: Mutex::default(),
            incoming: Mutex::default(),
            received: Mutex::default(),
            postcopy: Mutex::default(),
            restore: Mutex::default(),
            prefetch: Mutex::default(),
            orders,
            descriptors,
            sandbox: args.sandbox.clone(),
            metrics: OnceLock::new(),
            confinement: OnceLock::new(),
        }
    }

    pub(crate) fn place(&self) -> GuestPlace {
        *lock(&self.place)
    }

    pub(crate) fn set_place(&self, place: GuestPlace) {
        *lock(&self.place) = place;
    }

    /// Records that this process has the guest, running or paused, and sends an event.
    pub(crate) fn record_guest(&self, place: GuestPlace) {
        self.held.store(place == GuestPlace::Paused, Ordering::Release);
        self.set_place(place);
        if place == GuestPlace::Running {
            self.event_sender.guest_runs();
        } else {
            self.event_sender.guest_stopped();
        }
    }

    /// Returns whether the operator has paused the guest, also during a migration.
    pub(super) fn held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    pub(crate) fn set_incoming(&self, uri: String) {
        *lock(&self.incoming) = Some(uri);
    }

    pub(crate) fn set_received(&self, received: Value) {
        *lock(&self.received) = Some(received);
    }

    pub(crate) fn set_postcopy(&self, postcopy: PostcopyWatch) {
        *lock(&self.postcopy) = Some(postcopy);
    }

    pub(crate) fn set_restore(&self, watch: impl Fn() -> RestoreProgress + Send + Sync + 'static) {
        *lock(&self.restore) = Some(Box::new(watch));
    }

    pub(crate) fn set_prefetch(&self, watch: impl Fn() -> PrefetchProgress + Send + Sync + 'static) {
        *lock(&self.prefetch) = Some(Box::new(watch));
    }

    pub(super) fn prefetch(&self) -> Option<PrefetchProgress> {
        lock(&self.prefetch).as_ref().map(|watch| watch())
    }

    /// Returns the address at which a target waits for its guest.
    pub(super) fn incoming(&self) -> Option<String> {
        lock(&self.incoming).clone()
    }

    /// Returns the report on the arrival of the guest, if it has arrived.
    pub(super) fn received(&self) -> Option<Value> {
        lock(&self.received).clone()
    }

    /// Returns the state of a guest that runs before its memory is complete.
    pub(super) fn postcopy(&self) -> Option<PostcopyState> {
        lock(&self.postcopy).as_ref().map(PostcopyWatch::now)
    }

    /// Returns the guest memory in bytes.
    pub(super) fn memory(&self) -> u64 {
        self.memory
    }

    /// Returns the settings for the next migration.
    pub(super) fn options(&self) -> Options {
        lock(&self.options).clone()
    }

    pub(super) fn change_options(
        &self,
        change: impl FnOnce(&mut Options) -> Result<(), QmpError>,
    ) -> Result<(), QmpError> {
        let mut options = lock(&self.options);
        change(&mut options)?;
        self.event_sender.of_migrations(options.has("events"));
        Ok(())
    }

    /// Allows clients to give the address at which to wait for a guest. Returns the channel that
    /// delivers the address.
    pub(crate) fn defer(&self) -> Receiver<Incoming> {
        let (sender, incoming) = sync_channel(1);
        *lock(&self.deferred) = Some(Some(sender));
        incoming
    }

    /// Makes a deferred target wait at `uri`. Fails if the target cannot wait at `uri`.
    pub(super) fn wait_at(&self, uri: Uri) -> Result<()> {
        let sender = match &mut *lock(&self.deferred) {
            None => bail!(
                "--incoming defer was not given: this process waits for no guest, or has its address from the command line"
            ),
            Some(None) => bail!("the incoming migration has already been started"),
            Some(sender) => sender.take(),
        };
        let Some(sender) = sender else { bail!("the incoming migration has already been started") };
        let (reply, answer) = sync_channel(1);
        let waits = match sender.try_send((uri, reply)) {
            Ok(()) => answer.recv_timeout(PATIENCE).context("this process is busy or ends")?,
            Err(_) => bail!("this process is ending"),
        };
        if waits.is_err() {
            // The client may try another address.
            *lock(&self.deferred) = Some(Some(sender));
        }
        waits.map_err(|why| anyhow!(why))
    }

    /// Returns the vCPUs that have a limit, with their last measured rates.
    pub(super) fn limited(&self) -> Vec<Limited> {
        lock(&self.limited).clone()
    }

    pub(crate) fn set_limited(&self, limited: Vec<Limited>) {
        *lock(&self.limited) = limited;
    }

    /// Observes values that no component reports. Called periodically.
    pub(crate) fn observe(&self) {
        self.speed.take_sample(&self.probe);
        let balloon = self.probe.balloon().map(|balloon| balloon.actual());
        self.event_sender.observe(balloon, self.postcopy().map(|postcopy| postcopy.state));
    }

    pub(super) fn restore(&self) -> Option<RestoreProgress> {
        lock(&self.restore).as_ref().map(|watch| watch())
    }

    /// Returns whether the guest runs in this process without all of its memory: the source still
    /// has pages, or pages of the file cannot be read.
    pub(crate) fn has_missing_pages(&self) -> bool {
        lock(&self.postcopy)
            .as_ref()
            .is_some_and(|postcopy| postcopy.now().state != MigrationState::Completed)
            || self.restore().is_some_and(|restore| restore.state == FillState::Failed)
    }

    /// Checks that all pages of the guest have arrived. Otherwise a thread that reads all memory
    /// would wait for them.
    pub(crate) fn require_all_pages(&self) -> Result<()> {
        match self.restore() {
            Some(RestoreProgress { state: FillState::Completed, .. }) => Ok(()),
            Some(RestoreProgress { error: Some(why), .. }) => {
                bail!("pages of the guest cannot be read from its file: {why}")
            }
            Some(RestoreProgress { placed, pages, .. }) => {
                bail!(
                    "{placed} of {pages} pages of the guest have been read from its file; wait for the rest"
                )
            }
            None if self.has_missing_pages() => {
                bail!("pages of the guest are still at the source; wait until they have arrived")
            }
            None => Ok(()),
        }
    }

    /// Makes the machine's owner check the state of the guest and the process. An owner that has
    /// other orders checks it anyway.
    pub(crate) fn request_check(&self) {
        let (reply, _) = sync_channel(1);
        let _ = self.orders.try_send(PendingOrder { order: Order::Look, reply, turn: Arc::default() });
    }

    /// Switches a guest that may run before its memory is complete to the target now.
    fn switch(&self) -> Result<()> {
        match (&*lock(&self.migration), self.place()) {
            (Migration { handle: Some(handle), goes_over: true, .. }, GuestPlace::Moving) => {
                handle.switch_now()
            }
            (_, GuestPlace::Moving) => bail!(
                "this migration switches the guest with all of its memory or not at all; start it with --mode hybrid or --on-timeout postcopy to \
                 send the rest of the memory afterwards"
            ),
            _ => bail!("no migration is under way"),
        }
        Ok(())
    }

    /// Executes a vmferry command, by its name without `x-vmferry-`.
    pub(super) fn answer(&self, command: &str, arguments: &Value) -> Result<Value> {
        match command {
            "arguments" => return self.started.answer(arguments, &self.descriptors),
            "pass-descriptors" => return self.pass_descriptors(arguments),
            "status" => return Ok(self.status()),
            "writes" => return self.writes(),
            "stalls" => return self.stalls(),
            "balloon" => return crate::balloon::answer(self, arguments),
            "alloc" => return super::alloc::answer(&self.probe),
            "cancel" if self.handed_over() => bail!(
                "too late to cancel: the guest runs at the target, and its state at the source is old; the migration ends by itself, or with \
                 recover --abandon once its link is lost"
            ),
            "cancel" if self.undecided() => bail!(
                "too late to cancel: the guest was handed over, and it is not known yet whether the target runs it"
            ),
            "cancel" => match (&*lock(&self.migration), self.place()) {
                (Migration { handle: Some(handle), .. }, GuestPlace::Moving) => {
                    self.event_sender.migration("cancelling");
                    handle.cancel();
                }
                _ => bail!("no migration is under way"),
            },
            "switch" => self.switch()?,
            "recover" if self.place() == GuestPlace::Moving => self.recover(arguments)?,
            "verify-guest" => self.verify_guest(arguments)?,
            "quit" if self.handed_over() => bail!(
                "the guest runs at the target and still needs pages that only this process has; this process ends when the target has all"
            ),
            "quit" if self.undecided() => bail!(
                "it is not known whether the target runs this guest; wait for the link or the arbiter, or decide with recover --take or --abandon"
            ),
            "quit" if self.place() == GuestPlace::Moving => {
                bail!("the guest is being migrated; cancel the migration first");
            }
            "quit" if self.place() == GuestPlace::Unknown => {
                bail!(
                    "it is not known whether the target runs this guest; decide with recover --take or --abandon"
                );
            }
            "quit" => self.request_quit("host-qmp-quit"),
            "powerdown" => crate::signals::press_power_button(self)?,
            "pause" => return self.order(Order::Pause),
            "resume" => return self.order(Order::Resume),
            "recover" => {
                let take = arguments["take"].as_bool().context(
                    "no postcopy link of this process is lost; to resolve unknown ownership, use --take or --abandon",
                )?;
                return self.order(Order::Recover { take });
            }
            "migrate" => return self.order(Order::Migrate(fit(arguments)?)),
            "snapshot" => return self.order(Order::Snapshot(fit(arguments)?)),
            "snapshot-pause" => return Ok(json!({ "paused": self.pause_gate.wait_for_pause(HOOK_WAIT) })),
            "snapshot-resume" => {
                self.pause_gate.answer(arguments["error"].as_str().map(str::to_owned))?;
            }
            "dirty-rate" => return self.order(Order::DirtyRate(fit(arguments)?)),
            "plan" => return self.order(Order::Plan(fit(arguments)?)),
            "branch" => return self.order(Order::Branch(fit(arguments)?)),
            "record-end" => return self.order(Order::EndRecording),
            _ => bail!("there is no command '{command}'"),
        }
        Ok(json!({}))
    }

    /// Executes `verify-guest`. The statistics page belongs to the process that runs the guest.
    fn verify_guest(&self, arguments: &Value) -> Result<()> {
        if matches!(self.place(), GuestPlace::Awaited | GuestPlace::Moved) {
            bail!("the guest does not run in this process");
        }
        self.require_not_handed_over()?;
        let request = arguments["request"].as_u64().context("verify-guest needs a number `request`")?;
        if !self.probe.request_verify(request) {
            bail!("the guest has no statistics page, or has not arrived yet; try again later");
        }
        Ok(())
    }

    /// Checks whether `order` may be executed where the guest is now.
    ///
    /// The thread that passes an order checks it, so that a refusal does not wait for the machine's
    /// owner. The owner checks it again before it executes the order: meanwhile, it may have
    /// executed orders that were queued before, and one of them may have moved the guest away.
    /// Without the second check, a queued `resume` would run the old copy of such a guest.
    pub(crate) fn permits(&self, order: &Order) -> Result<()> {
        match self.place() {
            _ if matches!(order, Order::Look) => Ok(()),
            GuestPlace::Moving => bail!(
                "the guest is being migrated, or a snapshot of it is being written; wait, or cancel this first"
            ),
            GuestPlace::Awaited => bail!("the guest has not arrived yet"),
            GuestPlace::Moved => bail!("the guest has moved to its target"),
            GuestPlace::Ended => bail!("the guest has ended"),
            GuestPlace::Unknown if !matches!(order, Order::Recover { .. }) => {
                bail!(
                    "it is not known whether the target runs this guest; decide with recover --take or --abandon"
                );
            }
            GuestPlace::Running | GuestPlace::Paused
                if matches!(order, Order::Migrate(_) | Order::Snapshot(_)) && self.has_missing_pages() =>
            {
                bail!(
                    "pages of this guest are still at the source or in its file; wait until all have arrived"
                );
            }
            GuestPlace::Running | GuestPlace::Paused | GuestPlace::Unknown => Ok(()),
        }
    }

    /// Passes an order to the machine's owner and waits for its answer.
    pub(super) fn order(&self, order: Order) -> Result<Value> {
        self.permits(&order)?;
        let (reply, answer) = sync_channel(1);
        let turn = Arc::new(Turn::default());
        let patience = match &order {
            Order::DirtyRate(request) => PATIENCE + request.longest(),
            Order::Plan(_) => PATIENCE + crate::plan::LONGEST,
            _ => PATIENCE,
        };
        let errand = PendingOrder { order, reply, turn: Arc::clone(&turn) };
        self.orders.try_send(errand).map_err(|error| match error {
            TrySendError::Full(_) => anyhow!("this process is busy with other commands; try again"),
            TrySendError::Disconnected(_) => anyhow!("this process is ending"),
        })?;
        let answer = match answer.recv_timeout(patience) {
            Err(RecvTimeoutError::Timeout) if turn.take() => {
                bail!("the machine's thread was busy for too long; the command will not be executed")
            }
            // The owner has begun the order, so only its answer tells what became of it.
            Err(RecvTimeoutError::Timeout) => answer.recv().ok(),
            answer => answer.ok(),
        };
        answer.context("the machine's thread has ended without an answer")?.map_err(|why| anyhow!(why))
    }
}
