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

mod ahead;
mod channels;
mod decode;
mod driver;
pub(crate) mod frames;
pub(crate) mod inbox;
mod incoming;
mod measure;
mod postcopy;
mod probe;
pub(crate) mod receiver;
mod relink;
mod spare;
pub(crate) mod urgent;

pub use incoming::Incoming;
pub use postcopy::{PostcopyReceiver, PostcopyState, PostcopyWatch};

pub(crate) use vmferry_protocol::target as session;

use crate::arbiter::Arbiter;
use crate::channel::{Listener, Stream, TargetFeatures, answer, passes_descriptors};
use crate::vm::warn_if_panics_abort;
use crate::wake::{Ending, Wakers};
use crate::{KnownPages, MigrateError, channel::Greeted};
use driver::{Attempt, Driver, Input, Numbered};
use measure::Measuring;
use serde::Serialize;
use session::Outcome;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vmferry_core::TargetVm;
use vmferry_wire::{FEATURE_LOCAL_MEMORY, Hello, Refusal, RefusalCode, Role, Token, arbiter_digest};

/// Most sources that wait until the attempt of another source has ended. Further ones are refused.
const MOST_WAITING: usize = 16;

/// Settings of a wait for a guest, and the means to stop the wait.
///
/// Share the value between the thread that receives the guest and the threads that may stop the
/// wait.
#[derive(Debug)]
pub struct Arrival {
    stop: AtomicBool,
    abandon: AtomicBool,
    peer_timeout: Duration,
    stay_awake: bool,
    arbiter: Option<Arc<dyn Arbiter>>,
    /// Files with pages, until a guest has arrived.
    known_pages: Mutex<Option<Arc<KnownPages>>>,
    local_memory: bool,
    undecided: Mutex<Option<String>>,
    wakers: Wakers,
    #[cfg(test)]
    watched: tests::Watched,
}

impl Arrival {
    /// Returns the settings of a wait in which a source counts as lost after it has been silent for
    /// `peer_timeout`.
    #[must_use]
    pub fn new(peer_timeout: Duration) -> Self {
        Self {
            stop: AtomicBool::default(),
            abandon: AtomicBool::default(),
            peer_timeout,
            stay_awake: true,
            arbiter: None,
            known_pages: Mutex::default(),
            local_memory: false,
            undecided: Mutex::default(),
            wakers: Wakers::default(),
            #[cfg(test)]
            watched: tests::Watched::default(),
        }
    }

    /// Sets whether the processors of the target host are kept awake during postcopy. The default
    /// is true. See [`Settings::stay_awake`](crate::Settings::stay_awake) for the effect and the
    /// permission that the process needs.
    #[must_use]
    pub fn stay_awake(self, stay_awake: bool) -> Self {
        Self { stay_awake, ..self }
    }

    /// Sets the arbiter that decides who owns a guest if neither source nor target can know. The
    /// target refuses a source whose [`Settings::arbiter`](crate::Settings::arbiter) is another
    /// one.
    #[must_use]
    pub fn arbiter(self, arbiter: Option<Arc<dyn Arbiter>>) -> Self {
        Self { arbiter, ..self }
    }

    /// Sets the pages that the target has in files, so that the source need not send them. The
    /// default is `None`.
    ///
    /// A source of an earlier version sends all pages nevertheless. The files have no effect on
    /// pages that are sent after the first pass, or in postcopy. When a guest has arrived, they are
    /// dropped.
    #[must_use]
    pub fn known_pages(self, known_pages: Option<Arc<KnownPages>>) -> Self {
        Self { known_pages: Mutex::new(known_pages.filter(|known| known.pages() > 0)), ..self }
    }

    /// Sets whether the target takes over the memory of a source on the same host that offers it
    /// ([`MigrationMode::Local`](crate::MigrationMode::Local)), with
    /// [`TargetVm::take_memory`]. The default is false: such a source is told that the target does
    /// not support this.
    ///
    /// If this is true, memory is taken from processes of the same user and of root, over Unix
    /// sockets only. The source process keeps its mapping of the memory until it ends.
    #[must_use]
    pub fn local_memory(self, takes: bool) -> Self {
        Self { local_memory: takes, ..self }
    }

    fn known(&self) -> MutexGuard<'_, Option<Arc<KnownPages>>> {
        self.known_pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the features of this target that depend on its settings, for a source on `control`.
    fn features(&self, control: &Stream, hello: &Hello) -> TargetFeatures {
        let asked = hello.features & FEATURE_LOCAL_MEMORY != 0;
        let local_memory = asked && self.local_memory && passes_descriptors(control).is_ok();
        TargetFeatures { known_pages: self.known().is_some(), local_memory }
    }

    /// Returns the reason why the owner of the guest is unknown, or `None` if the owner is known.
    ///
    /// The owner is unknown while the arbiter does not answer a target that has read the commit, or
    /// that gives a guest back.
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

    /// Stops the wait, and gives up a guest that is arriving and that the target has not begun to
    /// start. A guest that the target starts or runs is not affected.
    ///
    /// With an arbiter, the target first gives back a guest that it has claimed or could still
    /// claim. [`receive`] then returns only after the arbiter or the source has acknowledged this,
    /// however long that takes.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wakers.wake();
    }

    /// Puts an input into `inputs` at each call of `stop`, for as long as the caller keeps the
    /// returned value. If the queue is full, no input is needed, because the reader of the queue
    /// checks for the stop after the next input.
    fn waking(&self, inputs: &SyncSender<Numbered>) -> Arc<dyn Fn() + Send + Sync> {
        let inputs = inputs.clone();
        self.wakers.register(move || drop(inputs.try_send((0, Input::Wake))))
    }

    /// Does the same as [`stop`](Self::stop), and also makes [`PostcopyReceiver::finish`] give up a
    /// guest that runs on the target and still has missing pages. A thread that waits for such a
    /// page then waits for ever.
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

/// Guest that has arrived and runs, or that stays paused because the operator has paused it.
#[must_use = "if not all of its memory is here, `postcopy` has to be finished"]
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Received {
    /// Id of the migration, 32 hexadecimal digits.
    pub id: String,
    /// Id of the snapshot, if the guest is a copy whose original continued to run. In that case,
    /// `id` is newly generated.
    pub copy_of: Option<String>,
    /// Address of the source, or name of the file.
    pub source: String,
    /// Number of pages received. A page counts each time it arrives.
    pub pages: u64,
    /// Number of these pages whose content came from known pages
    /// ([`Arrival::known_pages`]). Each has 4096 bytes.
    pub known_pages: u64,
    /// True if the operator had paused the guest on the source. Its vCPUs then stay stopped on the
    /// target until the operator resumes the guest.
    pub paused: bool,
    /// Time that loading the device state took, in milliseconds.
    pub load_ms: f64,
    /// CPU time that the engine's threads have used so far, in milliseconds.
    pub cpu_ms: f64,
    /// Receiver of the missing pages, if the guest runs before all of its memory has arrived. Call
    /// [`PostcopyReceiver::finish`] on a separate thread.
    #[serde(skip)]
    pub postcopy: Option<PostcopyReceiver>,
}

/// Reason why no guest has arrived.
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
    /// A system call of the host failed, or the listener cannot accept connections any more.
    #[error(transparent)]
    Host(#[from] MigrateError),
}

/// Waits at `listener` for a source, receives its guest into `vm`, and returns once the guest runs.
///
/// The target refuses connections of other programs, of sources of an incompatible version, and of
/// sources whose machine differs, and continues to wait. Once a source has announced a guest that
/// fits, the result of its migration ends the call.
///
/// The memory of `vm` must read as zeros, because the source does not send pages that the guest
/// never touched. For the same reason, `vm` cannot receive a guest again after
/// [`ReceiveFailure::Failed`].
///
/// # Errors
/// [`ReceiveFailure`] if no guest arrived. A guest that was arriving has not run on the target.
pub fn receive(
    vm: &mut dyn TargetVm,
    listener: &Listener,
    arrival: &Arrival,
) -> Result<Received, ReceiveFailure> {
    warn_if_panics_abort();
    each_source(listener, arrival, None, |queue, attempt, source| {
        Taken::of(Driver::run(vm, arrival, queue, attempt, source, None))
    })
    .map(|taken| arrived(taken, arrival))
}

/// Returns the result of a guest that has arrived.
fn arrived(
    ((received, postcopy), queue): ((Received, Option<PostcopyReceiver>), Queue),
    arrival: &Arrival,
) -> Received {
    // Closes the files: their pages are used only in the first pass.
    *arrival.known() = None;
    Received { postcopy: postcopy.map(|postcopy| postcopy.with(queue, arrival.peer_timeout)), ..received }
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

/// Passes each source that connects to `listener` to `take`, together with the number of the
/// source, until one source ends the wait. `first` comes before all other sources.
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
            // Checked before the queue: if the listener has ended, its last connection is already
            // in the queue.
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
            if source.hello.token != Token::NONE {
                // The source of a migration whose target process has ended takes up its link here.
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
                Taken::Refused(others) => {
                    waiting.extend(others);
                    let room = MOST_WAITING.min(waiting.len());
                    waiting.drain(room..).for_each(|source| refuse(&source, RefusalCode::Busy));
                }
            }
        };
        drop(over);
        // After an error the queue ends here, and a thread that still handles a hello finds it
        // closed.
        result.map(|taken| (taken, (sender, inputs)))
    })
}

/// Guard that ends the listener's thread when dropped. The scope waits for that thread even after a
/// panic, which code of the VMM may cause.
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
