//! Rate control of the bulk channels while vCPUs on the target wait for single pages.

use super::Context;
use super::channels::Channels;
use crate::channel::{IoBuf, Stream, tcp};
use crate::report::PaceFigures;
use crate::source::pace::{Controller, Decision, Probe, RateControl, TcpBulk};
use crate::source::postcopy::Claims;
use crate::source::settings;
use crate::vm::shielded;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vmferry_wire::{FrameHeader, REQUEST_BYTES, Request};

/// Probe channel, with the sequence number of its next frame.
struct ProbeChannel(Arc<Stream>, u64);

impl Probe for ProbeChannel {
    fn send(&mut self, number: u64) -> io::Result<()> {
        let header = FrameHeader::probe(number, self.1).encode();
        self.1 += 1;
        self.0.send(&mut [IoBuf::from_bytes(&header)]).map_err(|failed| failed.error)
    }

    fn echoes(&mut self, until: Instant, echo: &mut dyn FnMut(u64, Instant)) -> io::Result<()> {
        while self.0.wait_for_input(until)? {
            let mut bytes = [0; REQUEST_BYTES];
            let in_kernel = self.0.receive_stamped(&mut bytes)?;
            let read = Instant::now();
            match Request::decode(&bytes).map_err(io::Error::other)? {
                Request::Echo { number, held_ns } => {
                    // The time that the processors of source and target have added is subtracted,
                    // because it is not caused by a queue on the link.
                    let idle = in_kernel.unwrap_or_default() + Duration::from_nanos(held_ns.into());
                    echo(number, read.checked_sub(idle).unwrap_or(read));
                }
                Request::Page { .. } => return Err(io::Error::other("a request on the probe channel")),
            }
        }
        Ok(())
    }

    fn reached(&mut self) -> io::Result<bool> {
        if self.0.is_tcp() { tcp::all_acknowledged(self.0.as_fd()) } else { Ok(false) }
    }
}

fn fds(streams: &[Arc<Stream>]) -> impl Iterator<Item = BorrowedFd<'_>> {
    streams.iter().map(|stream| stream.as_fd())
}

/// Limits the frames and the unsent bytes of each bulk channel to what `rate`, shared by all
/// channels, allows.
fn fit(streams: &[Arc<Stream>], claims: &Claims, rate: u64) {
    let each = rate / (streams.len() as u64).max(1);
    claims.fit_frames(each);
    let unsent = u32::try_from(claims.unsent_bytes(each)).unwrap_or(u32::MAX);
    for stream in streams {
        // If the limit cannot be set, the queue is longer, which is acceptable.
        let _ = tcp::set_unsent_limit(stream.as_fd(), unsent);
    }
}

/// Limits the bulk channels as the settings require.
///
/// If that fails, vCPUs wait longer for their pages, and the migration continues. `longest` is the
/// time that a step of the target may take.
pub(super) fn pace<'e>(
    context: &'e Context<'e>,
    channels: &Channels<'_, 'e>,
    longest: Duration,
    claims: &Arc<Claims>,
) {
    // A limited channel may make no progress for longer than the peer timeout, because the socket
    // takes more bytes only after much of its content has been sent. Therefore the timeout is
    // longer. The control channel shows whether the target is alive.
    channels.bulk.iter().for_each(|stream| drop(stream.set_timeouts(None, Some(longest))));
    let paced = match context.settings.pace {
        settings::BulkLimit::Off => Ok(()),
        settings::BulkLimit::Rate(rate) => hold_to(&channels.bulk, rate, claims),
        settings::BulkLimit::Auto => find_pace(context, channels, Arc::clone(claims)),
    };
    if let Err(error) = paced {
        release(&channels.bulk);
        tracing::warn!("pages are sent without rate control, so page requests may take longer: {error}");
    }
}

fn hold_to(streams: &[Arc<Stream>], rate: u64, claims: &Claims) -> io::Result<()> {
    let each = rate / (streams.len() as u64).max(1);
    fit(streams, claims, rate);
    streams.iter().try_for_each(|stream| tcp::set_max_pacing_rate(stream.as_fd(), each.max(1)))
}

/// Ends the limits of the bulk channels, because their rate is not controlled any more.
fn release(streams: &[Arc<Stream>]) {
    for stream in streams {
        // A socket of a link that was lost needs no limit.
        let _ = tcp::set_max_pacing_rate(stream.as_fd(), u64::MAX);
        let _ = tcp::set_unsent_limit(stream.as_fd(), u32::MAX);
    }
}

/// Starts the thread that controls the rate.
fn find_pace<'e>(
    context: &'e Context<'e>,
    channels: &Channels<'_, 'e>,
    claims: Arc<Claims>,
) -> io::Result<()> {
    let Some(probe) = channels.probe.clone() else { return Ok(()) };
    // Without the kernel's timestamps, a busy processor looks like a queue.
    let _ = probe.stamp_arrivals();
    let (streams, urgent) = (channels.bulk.clone(), channels.urgent.clone());
    if streams.iter().any(|stream| !stream.is_tcp()) {
        // A local socket has no queue on its path except the one that the receiver empties.
        return Ok(());
    }
    // The sockets are limited before the bulk threads begin, so that no queue forms in them before
    // the first decision.
    hold_to(&streams, Controller::new().pace(), &claims)?;
    let limited = streams.clone();
    let work = move || {
        vmferry_thread::scheduling::prefer_latency();
        let bulk = TcpBulk::of_fitted(fds(&streams), fds(&urgent), || claims.left() > 0);
        let paced = bulk.and_then(|bulk| {
            let mut pace = RateControl::new(ProbeChannel(probe, 0), bulk);
            let (mut fitted, mut sequential) = (0, false);
            let show = |decision: &Decision, _| {
                let changed = decision.rate.abs_diff(fitted) > fitted / 8;
                if changed || claims.is_sequential() != sequential {
                    (fitted, sequential) = (decision.rate, claims.is_sequential());
                    fit(&streams, &claims, decision.rate);
                    context.handle.update(|progress| progress.pace = Some(decision.rate));
                }
            };
            // The rate control usually ends because its channel has ended.
            let ended = pace.run(|| context.stop.load(Ordering::Relaxed), show);
            context.handle.set_pace(PaceFigures::from(&pace.figures()));
            ended
        });
        context.handle.counters.add_thread_cpu();
        if let Err(error) = &paced {
            tracing::debug!("the rate control ended: {error}");
        }
        paced.is_ok()
    };
    let work = move || {
        if !shielded("the rate control failed, so pages are sent without it", work) {
            release(&limited);
        }
    };
    vmferry_thread::spawn_scoped(vmferry_thread::Role::Sender, "source-pace", channels.scope, work).map(drop)
}
