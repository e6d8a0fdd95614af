//! Passes over the guest's memory: harvested by the driver's thread, sent by one thread a bulk channel.

use super::{Driver, Ground, Input, Job, Numbered, local};
use crate::channel::{Stream, tcp};
use crate::source::events::{Event, Pass};
use crate::source::sender::{Sender, UNSENT};
use crate::vm::caught;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;
use vmferry_core::{NothingToProtect, PageRun, PageSet, Protect};
use vmferry_wire::{Refusal, RefusalCode, RunName};

impl<'e> Driver<'_, 'e> {
    pub(super) fn harvest(&mut self) -> Event {
        let began = Instant::now();
        self.timings.state_sent();
        // The questions of the pass end with it: an answer that comes after the harvest may name what it found.
        self.stop_asking();
        self.pending.land();
        if let Err(error) = self.busy(|_, tracker, pending| tracker.harvest(pending.since())) {
            return local("harvesting dirty pages", &error);
        }
        if self.paused {
            self.settle_free();
        }
        let pages = self.pending.count();
        let seconds = self.dirtied_since.elapsed().as_secs_f64();
        self.dirtied_since = Instant::now();
        self.timings.harvested(began.elapsed(), pages, !self.session.is_waking());
        // What a stopped guest had written in the moment since the last harvest is no rate.
        if !self.paused {
            self.ground
                .monitor
                .update(|progress| progress.dirty_pages_per_s = pages as f64 / seconds.max(1e-6));
        }
        let writers = self.writers();
        Event::Harvested { pages, writers }
    }

    /// Pages that each vCPU wrote since this was asked last.
    fn writers(&mut self) -> Vec<u64> {
        let Some(ring) = self.tracker.ring() else { return Vec::new() };
        let now: Vec<u64> = ring.vcpus.iter().map(|vcpu| vcpu.pages).collect();
        let before = std::mem::replace(&mut self.written, now);
        self.written
            .iter()
            .zip(before.iter().chain(std::iter::repeat(&0)))
            .map(|(now, b)| now.saturating_sub(*b))
            .collect()
    }

    pub(super) fn send_pass(&mut self, number: u32, pass: Pass) -> Option<Event> {
        let began = Instant::now();
        let (flight, first) = match pass {
            Pass::Dirty { first } => (self.pending.take_off(), first),
            Pass::Again(runs) => match self.named(&runs) {
                Ok(set) => (self.pending.resend(&set), false),
                Err(why) => return Some(Event::LocalFailure(Refusal::new(RefusalCode::Protocol, why))),
            },
            Pass::Digests => return Some(self.send_digests(number)),
        };
        self.timings.listed(began);
        if !first {
            self.keep_sockets_short();
        }
        self.begin_pass(number, flight.pages());
        self.give_out(&Job::Pages { pass: number, flight: Arc::clone(&flight), first });
        self.ask_what_is_free(&flight);
        None
    }

    /// Lets pages wait in guest memory, where they can still change, and not in sockets.
    fn keep_sockets_short(&self) {
        /// Two segments of the largest kind: with less the socket would run dry.
        const LEAST: u64 = 128 << 10;
        let Some(rate) = self.session.bandwidth() else { return };
        let each = rate * UNSENT.as_secs_f64() / self.streams.bulk.len().max(1) as f64;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates; no rate is negative"
        )]
        let bytes = u32::try_from((each as u64).max(LEAST)).unwrap_or(u32::MAX);
        // A local socket has no such limit and a short queue by itself.
        for stream in self.streams.bulk.iter().filter(|stream| stream.is_tcp()) {
            if let Err(error) = tcp::set_unsent_limit(stream.as_fd(), bytes) {
                tracing::debug!("pages wait in a socket for longer than they need: {error}");
            }
        }
    }

    /// Gives every bulk thread its part of `job`.
    pub(super) fn give_out(&mut self, job: &Job<'e>) {
        self.inbox.pass_given_to(self.jobs.len());
        for queue in &self.jobs {
            // A sender that is gone has reported why; its input ends the migration, or this set of channels.
            let _ = queue.send(job.clone());
        }
    }

    pub(super) fn begin_pass(&mut self, number: u32, pages: u64) {
        self.timings.begin_pass(number, pages, self.ground.monitor);
        self.ground.monitor.begin_pass(number, pages);
    }

    /// Pages that the target named, which may be anything that a peer can say.
    fn named(&self, runs: &[RunName]) -> Result<PageSet, String> {
        let mut set = PageSet::empty(self.ground.memory.layout());
        for name in runs {
            let run = PageRun::from(name.first..name.first.saturating_add(name.count));
            let region = set.region_mut(name.region).filter(|map| run.end() <= map.len());
            let map = region
                .ok_or_else(|| format!("the target asks for {run} of {}, which is not there", name.region))?;
            map.set_range(run.range());
        }
        Ok(set)
    }

    pub(super) fn start_senders(&mut self) -> io::Result<()> {
        let ground = self.ground;
        for (stream, index) in self.streams.bulk.iter().zip(0..) {
            let (jobs, queue) = sync_channel::<Job<'e>>(1);
            let (inputs, generation, stream) =
                (self.inputs.0.clone(), self.inbox.generation(), Arc::clone(stream));
            let protect = if self.tracking {
                self.tracker.protector()
            } else {
                Arc::new(NothingToProtect) as Arc<dyn Protect>
            };
            let work = move || send_jobs(ground, stream, index, &*protect, &queue, (generation, &inputs));
            let name = format!("source-bulk-{index}");
            let thread = vmferry_thread::spawn_scoped(vmferry_thread::Role::Sender, name, self.scope, work)?;
            self.senders.retain(|thread| !thread.is_finished());
            self.senders.push(thread);
            self.jobs.push(jobs);
        }
        Ok(())
    }
}

/// A bulk channel's thread.
fn send_jobs(
    ground: &Ground<'_>,
    stream: Arc<Stream>,
    index: u16,
    protect: &dyn Protect,
    queue: &Receiver<Job<'_>>,
    (generation, inputs): (u64, &SyncSender<Numbered>),
) {
    let mut sender = Sender::new(ground.shared(protect), stream, index);
    while let Ok(job) = queue.recv() {
        let result = caught(|| match &job {
            Job::Pages { pass, flight, first } => sender.send_pass(*pass, flight, *first),
            Job::Digests { pass, except } => sender.send_digests(*pass, except),
            Job::Rest { pass, claims, urgent } => {
                vmferry_thread::scheduling::give_way();
                sender.send_rest(*pass, claims, urgent)
            }
        });
        drop(job);
        let failed = result.is_err();
        if inputs.send((generation, Input::PassDone(result))).is_err() || failed {
            break;
        }
    }
    ground.monitor.counters.add_thread_cpu();
}
