//! Bulk, urgent and probe channels, and the threads that send pages on the bulk channels.

use super::Context;
use crate::MigrateError;
use crate::channel::{Stream, tcp};
use crate::handle::MigrationHandle;
use crate::idle::OpenedLater;
use crate::source::encode::PageEncoder;
use crate::source::hashes::HashSender;
use crate::source::inbox::{Input, Numbered};
use crate::source::pending::PassPages;
use crate::source::postcopy::{Claims, UrgentOut};
use crate::source::sender::{PassKind, Sender, UNSENT};
use crate::vm::caught;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};
use vmferry_core::{PageSet, Protect};
use vmferry_thread::RunDelay;
use vmferry_wire::{FEATURE_TOUCHED, Role, Token};

/// Work for the sender of a bulk channel.
#[derive(Clone)]
pub(super) enum Job<'e> {
    Pages {
        pass: u32,
        pages: Arc<PassPages>,
        kind: PassKind,
        /// True if the guest runs on this host during the pass.
        guest_runs: bool,
    },
    /// Digests of all pages except those of `except`.
    Digests { pass: u32, except: Arc<PageSet> },
    /// Missing pages that no vCPU waits for.
    Remaining { pass: u32, claims: Arc<Claims>, urgent: Arc<Vec<UrgentOut<'e>>> },
}

/// Current set of channels, and the threads of all sets.
pub(super) struct Channels<'s, 'e> {
    pub(super) scope: &'s Scope<'s, 'e>,
    pub(super) bulk: Vec<Arc<Stream>>,
    pub(super) urgent: Vec<Arc<Stream>>,
    pub(super) probe: Option<Arc<Stream>>,
    /// Queue of each sender of the current set.
    jobs: Vec<SyncSender<Job<'e>>>,
    /// Senders of any set that may still protect pages.
    senders: Vec<ScopedJoinHandle<'s, ()>>,
}

impl<'s, 'e> Channels<'s, 'e> {
    pub(super) fn new(scope: &'s Scope<'s, 'e>) -> Self {
        Self { scope, bulk: vec![], urgent: vec![], probe: None, jobs: vec![], senders: vec![] }
    }

    /// Opens a set of channels. Returns an error if the migration is cancelled before all channels
    /// are open.
    pub(super) fn open(
        &mut self,
        context: &Context<'_>,
        (bulk, urgent): (Token, Token),
        cancel: Option<&MigrationHandle>,
    ) -> Result<(), MigrateError> {
        let settings = context.settings;
        let open = |role, count: u16, token| {
            let open = |index| {
                let channel = (context.migration, role, index, token);
                let stream = context.dialer.open(channel, cancel)?;
                // A bulk channel is never read, and an urgent channel is silent while no vCPU
                // waits. A peer is considered dead if a send makes no progress for this long.
                let _ = stream.set_timeouts(None, Some(settings.peer_timeout));
                Ok(Arc::new(stream))
            };
            (0..count).map(open).collect::<Result<Vec<_>, MigrateError>>()
        };
        let opened = (
            open(Role::Bulk, settings.channels, bulk)?,
            open(Role::Urgent, settings.urgent_count(), urgent)?,
            open(Role::Probe, settings.probe().into(), urgent)?.pop(),
        );
        (self.bulk, self.urgent, self.probe) = opened;
        Ok(())
    }

    /// Shuts down the channels. This ends the waits of their threads.
    pub(super) fn shutdown(&self) {
        self.bulk.iter().chain(&self.urgent).chain(&self.probe).for_each(|stream| stream.shutdown());
    }

    /// Starts a sender for each bulk channel.
    pub(super) fn start_senders(
        &mut self,
        context: &'e Context<'e>,
        protector: impl Fn() -> Arc<dyn Protect>,
        inputs: &SyncSender<Numbered>,
        generation: u64,
    ) -> io::Result<()> {
        for (stream, index) in self.bulk.iter().zip(0..) {
            let (jobs, queue) = sync_channel::<Job<'e>>(1);
            let (inputs, stream, protect) = (inputs.clone(), Arc::clone(stream), protector());
            let run_delay = Arc::<OpenedLater>::default();
            let encoder = context.codecs.and_then(|codecs| {
                PageEncoder::new(codecs, context.memory.layout(), context.clock, (&context.idle, &run_delay))
            });
            let encodes = encoder.is_some();
            let (announce, announced) = sync_channel(1);
            let work = move || {
                // The receiver waits, or is not interested.
                let _ = announce.send(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs());
                send_jobs(context, (stream, index), &*protect, encoder, &queue, (generation, &inputs));
            };
            let name = format!("source-bulk-{index}");
            let thread = vmferry_thread::spawn_scoped(vmferry_thread::Role::Sender, name, self.scope, work)?;
            self.senders.retain(|thread| !thread.is_finished());
            self.senders.push(thread);
            self.jobs.push(jobs);
            // A thread that ends before it has announced itself has no use for its counter.
            if encodes && let Ok(thread) = announced.recv() {
                match RunDelay::open(thread) {
                    Ok(counter) => drop(run_delay.set(counter)),
                    Err(error) => {
                        tracing::debug!("cannot measure how long a thread waits for a processor: {error}");
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn has_no_senders(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Passes `job` to every sender, which performs its part. Returns the number of senders.
    pub(super) fn give_out(&self, job: &Job<'e>) -> usize {
        for queue in &self.jobs {
            // A sender that has ended has already reported the reason, which ends the migration or
            // this set of channels.
            let _ = queue.send(job.clone());
        }
        self.jobs.len()
    }

    /// Lets the senders end after their current job.
    pub(super) fn end_jobs(&mut self) {
        self.jobs.clear();
    }

    /// Waits until no sender can protect a page any more.
    pub(super) fn join(&mut self) {
        self.end_jobs();
        for sender in self.senders.drain(..) {
            if sender.join().is_err() {
                tracing::error!("a channel's thread panicked");
            }
        }
    }

    /// Limits the unsent bytes in the sockets. Pages then wait in guest memory instead, so that
    /// their latest content is sent. `rate` is the rate of the link in bytes per second.
    pub(super) fn keep_sockets_short(&self, rate: f64) {
        /// Minimum limit in bytes: two segments of the largest size. With a smaller limit, the
        /// socket would run empty.
        const LEAST: u64 = 128 << 10;
        let each = rate * UNSENT.as_secs_f64() / self.bulk.len().max(1) as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates; no rate is negative"
        )]
        let bytes = u32::try_from((each as u64).max(LEAST)).unwrap_or(u32::MAX);
        // A local socket has no such limit, and its queue is short anyway.
        for stream in self.bulk.iter().filter(|stream| stream.is_tcp()) {
            if let Err(error) = tcp::set_unsent_limit(stream.as_fd(), bytes) {
                tracing::debug!("cannot limit the unsent bytes of a channel: {error}");
            }
        }
    }
}

/// Runs the thread of a bulk channel.
fn send_jobs(
    context: &Context<'_>,
    (stream, index): (Arc<Stream>, u16),
    protect: &dyn Protect,
    encoder: Option<Box<PageEncoder>>,
    queue: &Receiver<Job<'_>>,
    (generation, inputs): (u64, &SyncSender<Numbered>),
) {
    let announces = stream.features & FEATURE_TOUCHED != 0;
    let answers = context.answers.as_ref().and_then(|answers| answers.channel(index));
    let hashes = answers.map(|answers| HashSender::new(answers, context.settings.peer_timeout));
    let sender = Sender::new(context.sender_context(protect), stream, index);
    let mut sender = sender.encoding(encoder).announcing(announces).hashing(hashes);
    while let Ok(job) = queue.recv() {
        let result = caught(|| match &job {
            Job::Pages { pass, pages, kind, guest_runs } => {
                sender.take_breaks(*guest_runs);
                sender.send_pass(*pass, pages, *kind)
            }
            Job::Digests { pass, except } => {
                sender.take_breaks(false);
                sender.send_digests(*pass, except)
            }
            Job::Remaining { pass, claims, urgent } => {
                sender.take_breaks(false);
                vmferry_thread::scheduling::give_way();
                sender.send_remaining(*pass, claims, urgent)
            }
        });
        drop(job);
        let failed = result.is_err();
        if inputs.send((generation, Input::PassDone(result))).is_err() || failed {
            break;
        }
    }
    context.handle.counters.add_thread_cpu();
}
