//! Target of a migration: receives a guest.

// Input from a peer or from the host must not panic a thread of the engine. Tests may panic.
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
mod postcopy;
mod probe;
pub(crate) mod receiver;
mod relink;
pub(crate) mod urgent;

pub use incoming::Incoming;
pub use postcopy::{PostcopyReceiver, PostcopyState, PostcopyWatch};

pub(crate) use vmferry_protocol::target as session;

use crate::arbiter::Arbiter;
use crate::channel::{Listener, answer};
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
use vmferry_wire::{Hello, Refusal, RefusalCode, Role, arbiter_digest};

/// Control of a wait for a guest. Share it between the thread that receives and the threads that
/// may stop the wait.
#[derive(Debug)]
pub struct Arrival {
    stop: AtomicBool,
    abandon: AtomicBool,
    peer_timeout: Duration,
    stay_awake: bool,
    arbiter: Option<Arc<dyn Arbiter>>,
    undecided: Mutex<Option<String>>,
    wakers: Wakers,
    #[cfg(test)]
    watched: tests::Watched,
}

impl Arrival {
    /// Returns the control of a wait whose sources may be silent for `peer_timeout` before they
    /// count as lost.
    #[must_use]
    pub fn new(peer_timeout: Duration) -> Self {
        Self {
            stop: AtomicBool::default(),
            abandon: AtomicBool::default(),
            peer_timeout,
            stay_awake: true,
            arbiter: None,
            undecided: Mutex::default(),
            wakers: Wakers::default(),
            #[cfg(test)]
            watched: tests::Watched::default(),
        }
    }

    /// Sets whether this host's processors are kept awake while the guest waits for pages over the
    /// link. The default is true. It has an effect only if this process may ask the kernel for
    /// this: see [`Settings::stay_awake`](crate::Settings::stay_awake).
    #[must_use]
    pub fn stay_awake(self, stay_awake: bool) -> Self {
        Self { stay_awake, ..self }
    }

    /// Sets the arbiter that resolves unknown ownership of a guest. It must be the same as
    /// [`Settings::arbiter`](crate::Settings::arbiter) of the source, otherwise the source is
    /// refused.
    #[must_use]
    pub fn arbiter(self, arbiter: Option<Arc<dyn Arbiter>>) -> Self {
        Self { arbiter, ..self }
    }

    /// Returns why the owner of the guest is unknown, while it is unknown: the source has handed
    /// the guest over, and the arbiter does not answer whether the target may run it.
    pub fn undecided(&self) -> Option<String> {
        self.undecided.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn publish_undecided(&self, undecided: Option<&str>) {
        let mut shown = self.undecided.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.as_deref() != undecided {
            *shown = undecided.map(str::to_owned);
        }
    }

    /// Returns true if the source of this hello uses the same arbiter as this target, or if neither
    /// uses one.
    fn same_arbiter(&self, hello: &Hello) -> bool {
        hello.arbiter == self.arbiter.as_ref().map_or(0, |arbiter| arbiter_digest(&arbiter.name()))
    }

    /// Stops waiting and gives up a guest that has not been handed over yet. Does nothing to a
    /// guest that has been handed over.
    ///
    /// With an arbiter, a guest that the target has claimed, or could claim, is given back first.
    /// [`receive`] then returns after the arbiter or the source has acknowledged this, however long
    /// that takes.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Puts an input into `inputs` at each stop, for as long as the caller keeps the returned
    /// value. A full queue needs no input, because its reader checks for the stop after the next
    /// input.
    fn waking(&self, inputs: &SyncSender<Numbered>) -> Arc<dyn Fn() + Send + Sync> {
        let inputs = inputs.clone();
        self.wakers.register(move || drop(inputs.try_send((0, Input::Wake))))
    }

    /// Does the same as [`stop`](Self::stop). In addition, [`PostcopyReceiver::finish`] gives up a
    /// guest that runs on the target and still has missing pages: a thread that waits for such a
    /// page waits for ever.
    pub fn abandon(&self) {
        self.abandon.store(true, Ordering::Release);
        self.stop();
    }

    fn stopped(&self) -> bool {
        #[cfg(test)]
        self.watched.looks.fetch_add(1, Ordering::Relaxed);
        self.stop.load(Ordering::Acquire)
    }

    /// Returns the time within which a source must announce its guest.
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

/// Guest that has arrived and runs.
#[must_use = "if not all of its memory is here, `postcopy` has to be finished"]
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Received {
    /// Id of the migration, 32 hexadecimal digits.
    pub id: String,
    /// Id of the snapshot that the guest is a copy of, if the original guest continued to run. `id`
    /// is then a new one.
    pub copy_of: Option<String>,
    /// Address of the source.
    pub source: String,
    /// Number of pages received. A page counts each time it arrives.
    pub pages: u64,
    /// True if the operator had paused the guest on the source. Its vCPUs stay stopped on the
    /// target, too, until the operator resumes the guest.
    pub paused: bool,
    /// Time that loading the device state took, in milliseconds.
    pub load_ms: f64,
    /// CPU time of the engine's threads, in milliseconds.
    pub cpu_ms: f64,
    /// Missing pages, if the guest runs before all of its memory has arrived. Call
    /// [`PostcopyReceiver::finish`] on a thread of its own.
    #[serde(skip)]
    pub postcopy: Option<PostcopyReceiver>,
}

/// Reason why no guest arrived.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveFailure {
    /// The migration failed. The guest has not run on the target, and the memory of the target's VM
    /// is no longer empty.
    #[error("the guest did not arrive: {0}; it has not run on the target")]
    Failed(Refusal),
    /// [`Arrival::stop`] was called while no guest was arriving.
    #[error("stopped while waiting for a guest")]
    Stopped,
    /// The host failed.
    #[error(transparent)]
    Host(#[from] MigrateError),
}

/// Waits at `listener` for a source and receives its guest into `vm`. Returns once the guest runs.
///
/// Connections of other programs, of sources of another version, and of sources whose machine
/// differs are refused, and the wait continues. After a guest that fits was announced, the result
/// of its migration ends the call.
///
/// The memory of `vm` must read as zeros, because the source does not send pages that the guest
/// never touched. After [`ReceiveFailure::Failed`], a VM cannot be used again.
///
/// # Errors
/// [`ReceiveFailure`] if no guest arrived. The guest has not run on the target.
pub fn receive(
    vm: &mut dyn TargetVm,
    listener: &Listener,
    arrival: &Arrival,
) -> Result<Received, ReceiveFailure> {
    warn_if_panics_abort();
    each_source(listener, arrival, None, |queue, attempt, source| {
        Taken::of(Driver::run(vm, arrival, queue, attempt, source, None))
    })
    .map(|((received, postcopy), queue)| Received {
        postcopy: postcopy.map(|postcopy| postcopy.with(queue, arrival.peer_timeout)),
        ..received
    })
}

/// Queue of the reports of threads.
type Queue = (SyncSender<Numbered>, Receiver<Numbered>);

/// Result of serving a source.
enum Taken<T> {
    /// The source ends the wait.
    Done(Result<T, ReceiveFailure>),
    /// The source was refused. The sources in the list connected meanwhile.
    Refused(Vec<Greeted>),
}

impl Taken<(Received, Option<PostcopyReceiver>)> {
    fn of(attempt: Result<Attempt, MigrateError>) -> Self {
        let attempt = match attempt {
            Ok(attempt) => attempt,
            Err(error) => return Self::Done(Err(error.into())),
        };
        match attempt.outcome {
            Outcome::Completed | Outcome::Running => Self::Done(Ok((attempt.received, attempt.postcopy))),
            Outcome::Failed(why) if attempt.accepted => Self::Done(Err(ReceiveFailure::Failed(why))),
            Outcome::Failed(why) => {
                tracing::warn!("{} was refused: {why}", attempt.received.source);
                Self::Refused(attempt.waiting)
            }
        }
    }
}

/// Gives each source that connects to `listener` to `take`, until one ends the wait. The source
/// `first` comes before all others. `take` gets the number of the source.
fn each_source<T>(
    listener: &Listener,
    arrival: &Arrival,
    first: Option<Greeted>,
    mut take: impl FnMut((&SyncSender<Numbered>, &Receiver<Numbered>), u64, Greeted) -> Taken<T>,
) -> Result<(T, Queue), ReceiveFailure> {
    // A short queue suffices: further bytes of a peer wait in its socket instead of in memory.
    let (sender, inputs) = sync_channel(8);
    let ending = ending()?;
    let _waker = arrival.waking(&sender);
    std::thread::scope(|scope| {
        let forward = driver::forward(&sender);
        // A full queue needs no wake: its reader checks after each input whether the listener has
        // ended.
        let (ended, ending) = (sender.clone(), &ending);
        let accept = move || {
            listener.serve(ending, forward);
            let _ = ended.try_send((0, Input::Wake));
        };
        vmferry_thread::spawn_scoped(vmferry_thread::Role::Listener, "target-accept", scope, accept)
            .map_err(|source| MigrateError::Host { what: "a thread", source })?;
        let over = EndOnDrop(ending);
        let measuring = Measuring::default();
        let mut waiting: VecDeque<Greeted> = first.into_iter().collect();
        let mut attempts = 0;
        let result = loop {
            if arrival.stopped() {
                break Err(ReceiveFailure::Stopped);
            }
            // Checked first: the last connection of an ended listener is then already in the queue.
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
            if !arrival.same_arbiter(&source.hello) {
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
        // After an error the queue ends here, and a thread that still handles a hello finds it
        // closed.
        result.map(|taken| (taken, (sender, inputs)))
    })
}

/// Guard that ends the listener's thread when dropped. The scope waits for that thread, also after
/// a panic, which code of the VMM may cause.
struct EndOnDrop<'a>(&'a Ending);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Returns the event that ends a listener's thread.
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
