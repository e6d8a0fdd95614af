//! The side that a guest comes to.

// What a peer or the host says must not panic a thread of the engine. Tests may.
#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::unreachable,
        clippy::todo,
        clippy::indexing_slicing
    )
)]

mod channels;
mod driver;
pub(crate) mod inbox;
mod incoming;
mod measure;
mod probe;
pub(crate) mod receiver;
mod relink;
mod rest;
pub(crate) mod urgent;

pub use incoming::Incoming;
pub use rest::{Rest, RestState, RestWatch};

pub(crate) use vmferry_protocol::target as session;

use crate::channel::{Listener, answer};
use crate::fence::Arbiter;
use crate::vm::warn_if_panics_abort;
use crate::wake::{Ending, Wakers};
use crate::{MigrateError, channel::Greeted};
use driver::{Attempt, Driver, Input, Numbered};
use measure::Measuring;
use serde::Serialize;
use session::Outcome;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_core::TargetVm;
use vmferry_wire::{Hello, Refusal, RefusalCode, Role, fence_digest};

/// Waits for a guest; share it between the thread that receives and those that may stop it.
#[derive(Debug)]
pub struct Arrival {
    stop: AtomicBool,
    abandon: AtomicBool,
    peer_timeout: Duration,
    stay_awake: bool,
    fence: Option<Arc<dyn Arbiter>>,
    undecided: Mutex<Option<String>>,
    wakers: Wakers,
    #[cfg(test)]
    watched: tests::Watched,
}

impl Arrival {
    /// With how long a source may be silent before it is given up.
    #[must_use]
    pub fn new(peer_timeout: Duration) -> Self {
        Self {
            stop: AtomicBool::default(),
            abandon: AtomicBool::default(),
            peer_timeout,
            stay_awake: true,
            fence: None,
            undecided: Mutex::default(),
            wakers: Wakers::default(),
            #[cfg(test)]
            watched: tests::Watched::default(),
        }
    }

    /// Whether this host's processors are kept awake while the guest waits for pages over the link, where this process may ask
    /// for that (it may unless something else is said here): see [`Settings::stay_awake`](crate::Settings::stay_awake).
    #[must_use]
    pub fn stay_awake(self, stay_awake: bool) -> Self {
        Self { stay_awake, ..self }
    }

    /// With who decides who owns a guest of which neither side can know: the same as [`Settings::fence`](crate::Settings::fence), or its
    /// source is refused.
    #[must_use]
    pub fn fence(self, fence: Option<Arc<dyn Arbiter>>) -> Self {
        Self { fence, ..self }
    }

    /// Why it is not known who owns the guest that was to come, while it is not: its source has handed it over, and the fence does not
    /// say whether it may be run.
    pub fn undecided(&self) -> Option<String> {
        self.undecided.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn show(&self, undecided: Option<&str>) {
        let mut shown = self.undecided.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.as_deref() != undecided {
            *shown = undecided.map(str::to_owned);
        }
    }

    /// Whether a source that says hello asks the same fence, or none as this side.
    fn same_fence(&self, hello: &Hello) -> bool {
        hello.fence == self.fence.as_ref().map_or(0, |fence| fence_digest(&fence.name()))
    }

    /// Stops waiting and gives up a guest that has not been handed over yet; does nothing to one that has.
    ///
    /// With an arbiter, a guest that the target has claimed, or could claim, is given back first.
    /// [`receive`] then returns when the arbiter or the source has heard so, however long that takes.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Puts something into `inputs` at each stop, for as long as the caller keeps what this returns. A full queue needs nothing: its reader
    /// looks for the stop again after the next input.
    fn waking(&self, inputs: &SyncSender<Numbered>) -> Arc<dyn Fn() + Send + Sync> {
        let inputs = inputs.clone();
        self.wakers.register(move || drop(inputs.try_send((0, Input::Wake))))
    }

    /// The same, and [`Rest::finish`] gives up a guest that runs here and whose memory is not all here: whoever waits for a page does so
    /// for ever.
    pub fn abandon(&self) {
        self.abandon.store(true, Ordering::Release);
        self.stop();
    }

    fn stopped(&self) -> bool {
        #[cfg(test)]
        self.watched.looks.fetch_add(1, Ordering::Relaxed);
        self.stop.load(Ordering::Acquire)
    }

    /// Time that a source may take to announce its guest.
    fn setup_timeout(&self) -> Duration {
        #[cfg(test)]
        if self.watched.setup_is_over.load(Ordering::Acquire) {
            return Duration::ZERO;
        }
        inbox::SETUP_TIMEOUT
    }

    fn abandoned(&self) -> bool {
        self.abandon.load(Ordering::Acquire)
    }
}

/// A guest that has arrived and runs.
#[must_use = "if not all of its memory is here, `rest` has to be finished"]
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Received {
    /// Name of the migration, 32 hexadecimal digits.
    pub id: String,
    /// The snapshot that it is a copy of, whose guest went on; its own name is then a new one.
    pub copy_of: Option<String>,
    /// Where it came from.
    pub source: String,
    /// Pages received, counting a page each time it came.
    pub pages: u64,
    /// The operator had paused the guest on the source: its vCPUs stand still here, too, until the operator resumes it.
    pub paused: bool,
    /// Time that loading the device state took, in ms.
    pub load_ms: f64,
    /// CPU time of the engine's threads, in ms.
    pub cpu_ms: f64,
    /// What is still to come, if the guest runs before all of its memory is here: call [`Rest::finish`], on a thread of its own.
    #[serde(skip)]
    pub rest: Option<Rest>,
}

/// Why no guest came.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveFailure {
    /// It was on its way and did not arrive. It has not run here; this VM's memory is no longer empty.
    #[error("the guest did not arrive: {0}; it has not run here")]
    Failed(Refusal),
    /// [`Arrival::stop`] was called while none was on its way.
    #[error("stopped while waiting for a guest")]
    Stopped,
    /// The host.
    #[error(transparent)]
    Host(#[from] MigrateError),
}

/// Waits at `listener` for a source and takes its guest into `vm`; returns once the guest runs.
///
/// Strangers, sources of another version and sources whose machine differs are refused and cost nothing: the wait goes
/// on. Once a fitting guest was announced, its fate ends the call.
///
/// `vm`'s memory has to read as zeros: pages that the guest never touched are not sent. One into which a guest was received in vain
/// ([`ReceiveFailure::Failed`]) is of no further use.
///
/// # Errors
/// [`ReceiveFailure`]: the guest has not run here.
pub fn receive(
    vm: &mut dyn TargetVm,
    listener: &Listener,
    arrival: &Arrival,
) -> Result<Received, ReceiveFailure> {
    warn_if_panics_abort();
    each_source(listener, arrival, None, |queue, attempt, source| {
        Taken::of(Driver::run(vm, arrival, queue, attempt, source, None))
    })
    .map(|((received, rest), queue)| Received {
        rest: rest.map(|rest| rest.with(queue, arrival.peer_timeout)),
        ..received
    })
}

/// The queue of what threads report.
type Queue = (SyncSender<Numbered>, Receiver<Numbered>);

/// Result of serving a source.
enum Taken<T> {
    /// It ends the wait.
    Done(Result<T, ReceiveFailure>),
    /// It was refused. These came meanwhile.
    Refused(Vec<Greeted>),
}

impl Taken<(Received, Option<Rest>)> {
    fn of(attempt: Result<Attempt, MigrateError>) -> Self {
        let attempt = match attempt {
            Ok(attempt) => attempt,
            Err(error) => return Self::Done(Err(error.into())),
        };
        match attempt.outcome {
            Outcome::Completed | Outcome::Running => Self::Done(Ok((attempt.received, attempt.rest))),
            Outcome::Failed(why) if attempt.accepted => Self::Done(Err(ReceiveFailure::Failed(why))),
            Outcome::Failed(why) => {
                tracing::warn!("{} was refused: {why}", attempt.received.source);
                Self::Refused(attempt.waiting)
            }
        }
    }
}

/// Gives each source that comes to `listener` to `take`, until one ends the wait. The source `first`
/// comes before all others. `take` is told the number of the source.
fn each_source<T>(
    listener: &Listener,
    arrival: &Arrival,
    first: Option<Greeted>,
    mut take: impl FnMut((&SyncSender<Numbered>, &Receiver<Numbered>), u64, Greeted) -> Taken<T>,
) -> Result<(T, Queue), ReceiveFailure> {
    // A few are enough, and what a peer says waits in its socket, not in our memory.
    let (sender, inputs) = sync_channel(8);
    let ending = ending()?;
    let _waker = arrival.waking(&sender);
    std::thread::scope(|scope| {
        let forward = driver::forward(&sender);
        // A full queue needs no wake: its reader asks again after each input whether the listener is over.
        let (ended, ending) = (sender.clone(), &ending);
        let accept = move || {
            listener.serve(ending, forward);
            let _ = ended.try_send((0, Input::Wake));
        };
        vmferry_thread::spawn_scoped(vmferry_thread::Role::Listener, "target-accept", scope, accept)
            .map_err(|source| MigrateError::Host { what: "a thread", source })?;
        let over = Over(ending);
        let measuring = Measuring::default();
        let mut waiting: VecDeque<Greeted> = first.into_iter().collect();
        let mut attempts = 0;
        let result = loop {
            if arrival.stopped() {
                break Err(ReceiveFailure::Stopped);
            }
            // Asked first: what the last connection brought is in the queue by then.
            let is_over = listener.is_over();
            let source = match waiting.pop_front() {
                Some(source) => source,
                None => match if is_over { inputs.try_recv().ok() } else { inputs.recv().ok() } {
                    None => break Err(listener.no_source().into()),
                    Some((_, Input::Connected(source))) => *source,
                    Some(_) => continue,
                },
            };
            if source.hello.role == Role::Measure {
                measuring.take(source);
                continue;
            }
            if source.hello.role != Role::Control {
                refuse(&source, RefusalCode::Token);
                continue;
            }
            if !arrival.same_fence(&source.hello) {
                refuse(&source, RefusalCode::Fence);
                continue;
            }
            attempts += 1;
            match take((&sender, &inputs), attempts, source) {
                Taken::Done(result) => break result,
                Taken::Refused(others) => waiting.extend(others),
            }
        };
        drop(over);
        // Otherwise the queue ends here, and whoever still greets finds it closed.
        result.map(|taken| (taken, (sender, inputs)))
    })
}

/// Ends the listener's thread when it is dropped, also by a panic, which the VM's own code may cause: the scope waits for that thread.
struct Over<'a>(&'a Ending);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Returns what ends a listener's thread.
fn ending() -> Result<Ending, MigrateError> {
    Ending::new().map_err(|source| MigrateError::Host { what: "an event", source })
}

fn refuse(incoming: &Greeted, why: RefusalCode) {
    if let Err(error) = answer(&incoming.stream, &incoming.hello, Err(why)) {
        tracing::warn!("{}: {error}", incoming.stream.peer);
    }
}

#[cfg(test)]
mod tests;
