//! Channels of a migration on the target, and the threads that serve them.

use super::ahead;
use super::driver::{Input, Numbered};
use super::frames::{Buffered, FrameSource};
use super::probe::echo_probes;
use super::receiver::{Arrivals, Mark, Receiver as PageReceiver};
use super::session::{Channels, Tokens};
use super::spare::Spare;
use super::urgent::UrgentChannel;
use crate::awake::LatencyRequest;
use crate::channel::{Greeted, Stream, answer, read_message, read_message_with, tcp};
use crate::demand::{again_after_panics, serve_faults};
use crate::handle::thread_cpu_us;
use crate::known::KnownPages;
use crate::vm::{caught, caught_io};
use crate::{MigrateError, random};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_core::GuestMemory;
use vmferry_wire::{MigrationId, RefusalCode, Role, ToTarget, Token};

/// Interval at which a thread checks whether a full queue has room.
const ROOM: Duration = Duration::from_millis(5);

/// Connections of a source and the threads that serve them.
///
/// Each thread reports with the number of the attempt for which it was started, so that late
/// reports of an earlier attempt can be recognised.
pub(super) struct Link {
    pub(super) attempt: u64,
    pub(super) migration: MigrationId,
    pub(super) tokens: Tokens,
    pub(super) control: Arc<Stream>,
    bulk: Vec<Option<Arc<Stream>>>,
    urgent: Vec<Option<Arc<Stream>>>,
    probe: Vec<Option<Arc<Stream>>>,
    threads: Vec<JoinHandle<()>>,
    /// Connections that arrived while channels were being ended.
    pub(super) late: VecDeque<Greeted>,
    pub(super) inputs: SyncSender<Numbered>,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) arrivals: Arc<Arrivals>,
    /// Processors for the threads that populate memory.
    spare: Arc<Spare>,
    /// Pages that the target knows.
    known: Option<Arc<KnownPages>>,
    /// Descriptors that came with the last message with memory.
    descriptors: Arc<Mutex<Vec<OwnedFd>>>,
    pub(super) cpu_us: Arc<AtomicU64>,
}

pub(super) fn fresh_tokens() -> Result<Tokens, MigrateError> {
    Ok(Tokens { bulk: Token(random()?), urgent: Token(random()?), resume: Token(random()?) })
}

impl Link {
    pub(super) fn new(
        attempt: u64,
        incoming: Greeted,
        inputs: SyncSender<Numbered>,
        memory: Arc<dyn GuestMemory>,
    ) -> Result<Self, MigrateError> {
        Ok(Self {
            attempt,
            migration: incoming.hello.migration,
            tokens: fresh_tokens()?,
            control: incoming.stream,
            bulk: Vec::new(),
            urgent: Vec::new(),
            probe: Vec::new(),
            threads: Vec::new(),
            late: VecDeque::new(),
            inputs,
            arrivals: Arc::new(Arrivals::new(&*memory)),
            // Opened on this thread, because threads of channels must not need to open files.
            spare: Arc::new(Spare::open()),
            memory,
            known: None,
            descriptors: Arc::default(),
            cpu_us: Arc::default(),
        })
    }

    /// Sets the pages that the target knows.
    pub(super) fn knowing(mut self, known: Option<Arc<KnownPages>>) -> Self {
        self.known = known;
        self
    }

    /// Takes the descriptors that came with a message.
    pub(super) fn take_descriptors(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.descriptors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Starts the thread that reads the control channel. If the driver takes nothing out of its
    /// queue for `patience`, the thread treats the source as lost: see [`hand_in`].
    ///
    /// With `takes_memory`, the thread accepts descriptors with [`ToTarget::LocalMemory`], and
    /// closes all others.
    pub(super) fn read_control(&mut self, patience: Duration, takes_memory: bool) -> io::Result<()> {
        let (control, inputs, attempt) = (Arc::clone(&self.control), self.inputs.clone(), self.attempt);
        let arrivals = Arc::clone(&self.arrivals);
        let descriptors = Arc::clone(&self.descriptors);
        let next = move |control: &Stream| {
            if !takes_memory {
                return read_message(control);
            }
            let (message, came) = read_message_with(control)?;
            if matches!(message, ToTarget::LocalMemory { .. }) {
                *descriptors.lock().unwrap_or_else(PoisonError::into_inner) = came;
            }
            Ok(message)
        };
        let read = move || loop {
            let input = match caught_io(|| next(&control)) {
                Ok(message) => Input::Message(message),
                Err(error) => {
                    arrivals.lost();
                    Input::ControlLost(error)
                }
            };
            let last = matches!(input, Input::ControlLost(_));
            if !hand_in(&inputs, (attempt, input), &control, &arrivals, patience) || last {
                return;
            }
        };
        self.threads.push(vmferry_thread::spawn(vmferry_thread::Role::Control, "target-control", read)?);
        Ok(())
    }

    /// Accepts these channels from now on.
    pub(super) fn await_channels(&mut self, channels: Channels) {
        self.bulk = vec![None; usize::from(channels.bulk)];
        self.urgent = vec![None; usize::from(channels.urgent)];
        self.probe = vec![None; usize::from(channels.probe)];
    }

    fn places(&mut self, role: Role) -> &mut Vec<Option<Arc<Stream>>> {
        match role {
            Role::Urgent => &mut self.urgent,
            Role::Probe => &mut self.probe,
            // These lists contain neither control channels nor channels of a measurement, so
            // neither is looked up in them.
            Role::Bulk | Role::Control | Role::Measure => &mut self.bulk,
        }
    }

    /// Answers a connection that is not a control channel. Returns `None` if the connection is
    /// refused, or the result of starting its thread if it belongs to this migration.
    pub(super) fn connected(&mut self, incoming: Greeted) -> Option<io::Result<()>> {
        let same_source = self.same_source(&incoming);
        let Greeted { stream, hello } = incoming;
        if hello.role == Role::Measure {
            // A link that carries a guest cannot be measured.
            let _ = answer(&stream, &hello, Err(RefusalCode::Busy));
            return None;
        }
        let wanted = match hello.role {
            Role::Bulk => self.tokens.bulk,
            _ => self.tokens.urgent,
        };
        let known = hello.migration == self.migration && hello.token == wanted && same_source;
        let free = matches!(self.places(hello.role).get(usize::from(hello.index)), Some(None));
        let verdict = if known && free { Ok(()) } else { Err(RefusalCode::Token) };
        if let Err(error) = answer(&stream, &hello, verdict) {
            tracing::warn!("{}: the answer to its hello was lost: {error}", stream.peer);
            return None;
        }
        verdict.ok().map(|()| self.serve(stream, hello.role, hello.index))
    }

    fn serve(&mut self, stream: Arc<Stream>, role: Role, index: u16) -> io::Result<()> {
        // There is no timeout, because a channel is silent while there is nothing to send. The
        // control channel shows whether the peer is alive.
        stream.set_timeouts(None, None)?;
        if let Some(place) = self.places(role).get_mut(usize::from(index)) {
            *place = Some(Arc::clone(&stream));
        }
        let (memory, arrivals) = (Arc::clone(&self.memory), Arc::clone(&self.arrivals));
        let (inputs, cpu_us, attempt) = (self.inputs.clone(), Arc::clone(&self.cpu_us), self.attempt);
        let known = self.known.clone();
        // The file is opened before the thread starts, because the thread reads bytes from an
        // untrusted peer and must not need the permission to open files.
        let latency_request =
            if role == Role::Urgent { LatencyRequest::open() } else { LatencyRequest::default() };
        tcp::learn_limits();
        if role == Role::Bulk {
            self.populate_ahead(index)?;
        }
        let receive = move || {
            let serve = Serve { role, index, arrivals: &arrivals, attempt, inputs: &inputs };
            match role {
                Role::Bulk => {
                    let pages = PageReceiver::new(&*memory, &arrivals, &*stream).knowing(known);
                    serve.all(pages, &cpu_us);
                }
                Role::Probe => {
                    vmferry_thread::scheduling::prefer_latency();
                    let Err(error) = caught(|| Err::<Infallible, _>(echo_probes(&stream)));
                    serve.report(Input::ChannelLost { role, channel: index, error });
                }
                // Latency matters for single pages.
                _ => {
                    vmferry_thread::scheduling::prefer_latency();
                    let pages = PageReceiver::urgent(&*memory, &arrivals, Buffered::new(&stream))
                        .latency_request(latency_request);
                    serve.all(pages, &cpu_us);
                }
            }
        };
        self.threads.push(vmferry_thread::spawn(
            vmferry_thread::Role::Receiver,
            format!("target-{role:?}-{index}").to_lowercase(),
            receive,
        )?);
        Ok(())
    }

    /// Notes that bulk channel `index` brings pages. Starts the thread that populates memory ahead of
    /// the receivers, if this channel has one.
    fn populate_ahead(&mut self, index: u16) -> io::Result<()> {
        self.arrivals.ahead().join();
        // The channels of a recovered link bring pages by demand paging.
        if self.arrivals.ahead().is_closed() || usize::from(index) >= ahead::threads(self.bulk.len()) {
            return Ok(());
        }
        let (memory, arrivals) = (Arc::clone(&self.memory), Arc::clone(&self.arrivals));
        let (spare, cpu_us) = (Arc::clone(&self.spare), Arc::clone(&self.cpu_us));
        let work = move || {
            arrivals.ahead().run(&*memory, &*spare);
            cpu_us.fetch_add(thread_cpu_us(), Ordering::Relaxed);
        };
        let name = format!("target-populate-{index}");
        self.threads.push(vmferry_thread::spawn(vmferry_thread::Role::Receiver, name, work)?);
        Ok(())
    }

    /// Starts the fault threads.
    pub(super) fn serve_faults(&mut self) -> io::Result<Vec<JoinHandle<()>>> {
        let Some(pager) = self.arrivals.pager() else { return Ok(Vec::new()) };
        pager.source.replace(&pager.pages, self.urgent_channels());
        let serve = |shard| {
            let (pager, cpu_us) = (Arc::clone(pager), Arc::clone(&self.cpu_us));
            let work = move || {
                again_after_panics(|| serve_faults(&pager, shard));
                cpu_us.fetch_add(thread_cpu_us(), Ordering::Relaxed);
            };
            vmferry_thread::spawn(vmferry_thread::Role::Fault, format!("target-fault-{shard}"), work)
        };
        (0..pager.pages.memory.shards()).map(serve).collect()
    }

    /// Returns the urgent channels, to send requests on.
    pub(super) fn urgent_channels(&self) -> Vec<Arc<UrgentChannel>> {
        let channel = |stream: &Arc<_>| Arc::new(UrgentChannel::new(Arc::clone(stream)));
        self.urgent.iter().flatten().map(channel).collect()
    }

    /// Shuts down every channel except the control channel, and ends the threads that populate
    /// memory.
    pub(super) fn shutdown(&self) {
        self.arrivals.ahead().stop();
        [&self.bulk, &self.urgent, &self.probe]
            .into_iter()
            .flatten()
            .flatten()
            .for_each(|stream| stream.shutdown());
    }

    /// Returns true if the thread of a channel still runs. Such a thread needs room in the queue to
    /// end.
    pub(super) fn at_work(&self) -> bool {
        self.threads.iter().any(|thread| !thread.is_finished())
    }

    /// Joins the threads, which have all ended or are about to end.
    pub(super) fn join(&mut self) {
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a channel's thread panicked");
            }
        }
    }
}

impl Drop for Link {
    /// Shuts down all channels after a panic, which code of the VMM may cause. The source then
    /// learns that the migration failed, and the threads end.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shutdown();
            self.control.shutdown();
        }
    }
}

/// Context of the thread of a channel.
struct Serve<'a> {
    role: Role,
    index: u16,
    arrivals: &'a Arrivals,
    attempt: u64,
    inputs: &'a SyncSender<Numbered>,
}

impl Serve<'_> {
    /// Receives until the channel ends, and reports each mark.
    fn all(&self, mut receiver: PageReceiver<'_, impl FrameSource>, cpu_us: &AtomicU64) {
        let (role, channel) = (self.role, self.index);
        let mut counted = 0;
        loop {
            let result = caught(|| receiver.receive());
            let used = thread_cpu_us();
            cpu_us.fetch_add(used - counted, Ordering::Relaxed);
            counted = used;
            match result {
                Ok(Mark::Barrier(pass)) => self.report(Input::Barrier { channel, pass }),
                Ok(Mark::AllArrived) => self.report(Input::AllArrived),
                Ok(Mark::LookedUp(looked_up)) => self.report(Input::LookedUp { channel, looked_up }),
                Err(error) => return self.report(Input::ChannelLost { role, channel, error }),
            }
        }
    }

    fn report(&self, input: Input) {
        if matches!(input, Input::ChannelLost { .. }) {
            self.arrivals.lost();
        }
        // If the receiver of the queue is gone, the stream is shut down as well, and the next
        // receive ends the thread.
        let _ = self.inputs.send((self.attempt, input));
    }
}

/// Puts `input` into the queue. Returns false if nothing empties the queue any more.
///
/// The driver may be loading the device state, which can wait for a page that will never arrive.
/// The queue then stays full, but the loss of the source must be noticed nevertheless.
fn hand_in(
    inputs: &SyncSender<Numbered>,
    input: Numbered,
    control: &Stream,
    arrivals: &Arrivals,
    patience: Duration,
) -> bool {
    let mut input = match inputs.try_send(input) {
        Ok(()) => return true,
        Err(TrySendError::Disconnected(_)) => return false,
        Err(TrySendError::Full(input)) => input,
    };
    if arrivals.pager().is_none() {
        // No thread waits for a page yet, so the queue is full only because the source sends a lot,
        // and there will soon be room.
        return inputs.send(input).is_ok();
    }
    let began = Instant::now();
    while !control.hung_up_within(ROOM) && began.elapsed() < patience {
        input = match inputs.try_send(input) {
            Ok(()) => return true,
            Err(TrySendError::Disconnected(_)) => return false,
            Err(TrySendError::Full(input)) => input,
        };
    }
    arrivals.lost();
    inputs.send(input).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::test_pair;
    use crate::mapped::MappedMemory;
    use std::ptr::NonNull;
    use std::sync::mpsc::sync_channel;
    use vmferry_core::{Gpa, Region, RegionId};
    use vmferry_wire::Hello;

    #[repr(align(4096))]
    struct Page(#[expect(dead_code, reason = "it is reached by its address")] [u8; 4096]);

    fn incoming(index: u16) -> (Greeted, Stream) {
        let (stream, other) = test_pair();
        let (migration, token) = (MigrationId([7; 16]), Token::NONE);
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            features: 0,
            migration,
            role: Role::Control,
            index,
            token,
            arbiter: 0,
        };
        (Greeted { stream: Arc::new(stream), hello }, other)
    }

    #[test]
    fn source_that_reconnects_before_the_loss_is_noticed_is_kept() {
        let page = NonNull::from(Box::leak(Box::new(Page([0; 4096]))));
        let region = Region { id: RegionId(0), gpa: Gpa(0), len: 4096 };
        // SAFETY: the page is freed after the memory, and is not accessed in any other way.
        let memory = unsafe { MappedMemory::new(&[(region, page.cast())]) }.unwrap();
        let (sender, inputs) = sync_channel(1);
        let (first, _peer) = incoming(0);
        let mut link = Link::new(1, first, sender.clone(), Arc::new(memory)).unwrap();
        let (back, _its_source) = incoming(4);
        // Simulates the thread of a channel that ends only after its reports have found room in the
        // queue, behind the connection.
        link.threads.push(std::thread::spawn(move || {
            sender.send((0, Input::Connected(Box::new(back)))).unwrap();
            sender.send((1, Input::Wake)).unwrap();
            sender.send((1, Input::Wake)).unwrap();
        }));
        link.end_channels(&inputs);
        assert_eq!(link.late.pop_front().map(|incoming| incoming.hello.index), Some(4));
        assert!(link.late.is_empty());
        drop(link);
        // SAFETY: the pointer came out of a box, and the memory is gone with its link.
        drop(unsafe { Box::from_raw(page.as_ptr()) });
    }
}
