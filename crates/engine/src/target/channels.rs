//! The channels of a migration at its target, and the threads that serve them.

use super::driver::{Input, Numbered};
use super::probe::echo_probes;
use super::receiver::{Arrivals, Buffered, FrameSource, Mark, Receiver as PageReceiver};
use super::session::{Channels, Tokens};
use super::urgent::UrgentChannel;
use crate::awake::Asking;
use crate::channel::{Greeted, Stream, answer, read_message, tcp};
use crate::demand::{again_after_panics, serve_faults};
use crate::monitor::thread_cpu_us;
use crate::vm::{caught, caught_io};
use crate::{MigrateError, random};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_core::GuestMemory;
use vmferry_wire::{MigrationId, RefusalCode, Role, Token};

/// How often it is looked whether a full queue has room.
const ROOM: Duration = Duration::from_millis(5);

/// What a source's connections are, and who serves them. Each reports with the number of the attempt at which it was
/// begun, so that what is left of an earlier one is told apart.
pub(super) struct Link {
    pub(super) attempt: u64,
    pub(super) migration: MigrationId,
    pub(super) tokens: Tokens,
    pub(super) control: Arc<Stream>,
    bulk: Vec<Option<Arc<Stream>>>,
    urgent: Vec<Option<Arc<Stream>>>,
    probe: Vec<Option<Arc<Stream>>>,
    threads: Vec<JoinHandle<()>>,
    /// Connections that came while channels were ended.
    pub(super) late: VecDeque<Greeted>,
    pub(super) inputs: SyncSender<Numbered>,
    pub(super) memory: Arc<dyn GuestMemory>,
    pub(super) arrivals: Arc<Arrivals>,
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
            memory,
            cpu_us: Arc::default(),
        })
    }

    /// Reads the control channel from now on. A driver that takes nothing out of its queue for `patience` is as good as
    /// one that has no source: see [`hand_in`].
    pub(super) fn read_control(&mut self, patience: Duration) -> io::Result<()> {
        let (control, inputs, attempt) = (Arc::clone(&self.control), self.inputs.clone(), self.attempt);
        let arrivals = Arc::clone(&self.arrivals);
        let read = move || loop {
            let input = match caught_io(|| read_message(&control)) {
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

    /// Takes these channels from now on.
    pub(super) fn await_channels(&mut self, channels: Channels) {
        self.bulk = vec![None; usize::from(channels.bulk)];
        self.urgent = vec![None; usize::from(channels.urgent)];
        self.probe = vec![None; usize::from(channels.probe)];
    }

    fn places(&mut self, role: Role) -> &mut Vec<Option<Arc<Stream>>> {
        match role {
            Role::Urgent => &mut self.urgent,
            Role::Probe => &mut self.probe,
            // A control channel, and one that is measured, has no place among these and is never looked up here.
            Role::Bulk | Role::Control | Role::Measure => &mut self.bulk,
        }
    }

    /// Answers a connection that is no control channel. Some: it is one of ours, and served.
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
        // No timeout: a channel is silent while nothing is to be sent; the control channel tells whether the peer lives.
        stream.set_timeouts(None, None)?;
        if let Some(place) = self.places(role).get_mut(usize::from(index)) {
            *place = Some(Arc::clone(&stream));
        }
        let (memory, arrivals) = (Arc::clone(&self.memory), Arc::clone(&self.arrivals));
        let (inputs, cpu_us, attempt) = (self.inputs.clone(), Arc::clone(&self.cpu_us), self.attempt);
        // What the thread, which reads what a stranger may have sent, need not be able to open.
        let asking = if role == Role::Urgent { Asking::open() } else { Asking::default() };
        tcp::learn_limits();
        let receive = move || {
            let serve = Serve { role, index, arrivals: &arrivals, attempt, inputs: &inputs };
            match role {
                Role::Bulk => serve.all(PageReceiver::new(&*memory, &arrivals, &*stream), &cpu_us),
                Role::Probe => {
                    vmferry_thread::scheduling::prefer_latency();
                    let Err(error) = caught(|| Err::<Infallible, _>(echo_probes(&stream)));
                    serve.report(Input::ChannelLost { role, channel: index, error });
                }
                // Single pages: what counts is the time.
                _ => {
                    vmferry_thread::scheduling::prefer_latency();
                    let pages =
                        PageReceiver::urgent(&*memory, &arrivals, Buffered::new(&stream)).asking(asking);
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

    /// Starts to take faults.
    pub(super) fn serve_faults(&mut self) -> io::Result<Vec<JoinHandle<()>>> {
        let Some(pager) = self.arrivals.pager() else { return Ok(Vec::new()) };
        pager.source.replace(&pager.pages, self.urgent_channels());
        let serve = |stripe| {
            let (pager, cpu_us) = (Arc::clone(pager), Arc::clone(&self.cpu_us));
            let work = move || {
                again_after_panics(|| serve_faults(&pager, stripe));
                cpu_us.fetch_add(thread_cpu_us(), Ordering::Relaxed);
            };
            vmferry_thread::spawn(vmferry_thread::Role::Fault, format!("target-fault-{stripe}"), work)
        };
        (0..pager.pages.memory.stripes()).map(serve).collect()
    }

    /// Returns the urgent channels, to send requests on.
    pub(super) fn urgent_channels(&self) -> Vec<Arc<UrgentChannel>> {
        let channel = |stream: &Arc<_>| Arc::new(UrgentChannel::new(Arc::clone(stream)));
        self.urgent.iter().flatten().map(channel).collect()
    }

    /// Ends every channel but the control channel.
    pub(super) fn shutdown(&self) {
        [&self.bulk, &self.urgent, &self.probe]
            .into_iter()
            .flatten()
            .flatten()
            .for_each(|stream| stream.shutdown());
    }

    /// Whether a thread of a channel is still at work. Those that are need room in the queue to end.
    pub(super) fn at_work(&self) -> bool {
        self.threads.iter().any(|thread| !thread.is_finished())
    }

    /// Waits for threads that have nothing left to do.
    pub(super) fn join(&mut self) {
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a channel's thread panicked");
            }
        }
    }
}

impl Drop for Link {
    /// After a panic, which the VM's own code may cause: the source learns that its guest will not come, and the threads end.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shutdown();
            self.control.shutdown();
        }
    }
}

/// A channel's thread.
struct Serve<'a> {
    role: Role,
    index: u16,
    arrivals: &'a Arrivals,
    attempt: u64,
    inputs: &'a SyncSender<Numbered>,
}

impl Serve<'_> {
    /// Receives until the channel ends, and reports where it has got to.
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
                Ok(Mark::AllHere) => self.report(Input::AllHere),
                Err(error) => return self.report(Input::ChannelLost { role, channel, error }),
            }
        }
    }

    fn report(&self, input: Input) {
        if matches!(input, Input::ChannelLost { .. }) {
            self.arrivals.lost();
        }
        // If nobody listens any more the stream is shut down as well, and the next receive ends the thread.
        let _ = self.inputs.send((self.attempt, input));
    }
}

/// Puts what was read into the queue; false if nobody empties it any more. The driver may be loading the state, which
/// waits for a page that will never come: then the queue stays full, and its source's end must be noticed all the same.
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
        // Nothing waits for a page yet: the queue is full because much is said, and there will be room at once.
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
            fence: 0,
        };
        (Greeted { stream: Arc::new(stream), hello }, other)
    }

    #[test]
    fn a_source_that_is_back_before_the_loss_was_noticed_is_not_sent_away() {
        let page = NonNull::from(Box::leak(Box::new(Page([0; 4096]))));
        let region = Region { id: RegionId(0), gpa: Gpa(0), len: 4096 };
        // SAFETY: the page is freed after the memory, and reached in no other way.
        let memory = unsafe { MappedMemory::new(&[(region, page.cast())]) }.unwrap();
        let (sender, inputs) = sync_channel(1);
        let (first, _peer) = incoming(0);
        let mut link = Link::new(1, first, sender.clone(), Arc::new(memory)).unwrap();
        let (back, _its_source) = incoming(4);
        // A channel's thread that ends only when what it tells has found room, behind the connection.
        link.threads.push(std::thread::spawn(move || {
            sender.send((0, Input::Connected(Box::new(back)))).unwrap();
            sender.send((1, Input::Wake)).unwrap();
            sender.send((1, Input::Wake)).unwrap();
        }));
        link.end_channels(&inputs);
        assert_eq!(link.late.pop_front().map(|incoming| incoming.hello.index), Some(4));
        assert!(link.late.is_empty());
        drop(link);
        // SAFETY: it came out of a box, and the memory is gone with its link.
        drop(unsafe { Box::from_raw(page.as_ptr()) });
    }
}
