//! Thread that carries a network interface's frames.

use super::no_thread;
use super::port::TapPort;
use crate::error::Result;
use crate::virtio::VirtioMmio;
use rustix::event::{Timespec, epoll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vmferry_fault::PagingSlot;
use vmferry_virtio::net::{Announcer, Net, NetControl, Receiver, RxStep, Transmitter, TxStep};

/// Interval at which a tap without room is tried again. A tap does not report when it has room.
const BUSY: Duration = Duration::from_millis(2);

const BELL: u64 = 0;
const FRAMES: u64 = 1;

/// State that the thread and its owner share.
#[derive(Debug, Default)]
struct Common {
    ending: AtomicBool,
    wakeups: AtomicU64,
}

/// Thread that carries frames. Dropping this ends the thread.
///
/// The thread sleeps until the driver notifies or the tap has frames. Both are reported as edges,
/// so that nothing has to be read to clear them. While pages of guest memory are missing, the
/// thread can fall asleep on one: with the device's lock held if the page is part of a ring, and
/// without a lock if the page is a buffer. Then only the guest's vCPUs wait for the thread
/// (hazards.md 18).
#[derive(Debug)]
pub(super) struct Carrier {
    common: Arc<Common>,
    control: NetControl<TapPort>,
    thread: Option<JoinHandle<()>>,
}

impl Carrier {
    /// Starts the thread for `device`, halted until the guest runs.
    pub(super) fn start(
        device: Arc<VirtioMmio<Net<TapPort>>>,
        control: NetControl<TapPort>,
        paging: Arc<PagingSlot>,
    ) -> Result<Self> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from);
        let common = Arc::new(Common::default());
        let worker = Worker {
            poll: poll.map_err(no_thread)?,
            receiver: Receiver::new(control.clone()),
            transmitter: Transmitter::new(control.clone()),
            announcer: Announcer::new(control.clone()),
            control: control.clone(),
            common: Arc::clone(&common),
            device,
            paging,
            listening: false,
        };
        worker.watch().map_err(no_thread)?;
        let name = format!("net {}", control.port().name().unwrap_or("none"));
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Network, name, move || worker.live());
        Ok(Self { common, control, thread: Some(thread.map_err(no_thread)?) })
    }

    pub(super) fn wakeups(&self) -> u64 {
        self.common.wakeups.load(Ordering::Relaxed)
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.common.ending.store(true, Ordering::Release);
        self.control.halt();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

struct Worker {
    poll: OwnedFd,
    receiver: Receiver<TapPort>,
    transmitter: Transmitter<TapPort>,
    announcer: Announcer<TapPort>,
    control: NetControl<TapPort>,
    common: Arc<Common>,
    device: Arc<VirtioMmio<Net<TapPort>>>,
    paging: Arc<PagingSlot>,
    /// True if frames at the tap wake the thread.
    listening: bool,
}

/// Work that is due, and the time until which the rest can wait.
struct DueWork {
    receive: bool,
    transmit: bool,
    at: Option<Instant>,
}

impl Worker {
    fn watch(&self) -> io::Result<()> {
        let port = self.control.port();
        let edge = epoll::EventFlags::ET;
        epoll::add(&self.poll, port.bell(), epoll::EventData::new_u64(BELL), epoll::EventFlags::IN | edge)?;
        if let Some(frames) = port.frames() {
            epoll::add(&self.poll, frames, epoll::EventData::new_u64(FRAMES), edge)?;
        }
        Ok(())
    }

    fn live(mut self) {
        let mut parked = false;
        let mut due = DueWork { receive: true, transmit: true, at: None };
        while !self.common.ending.load(Ordering::Acquire) {
            if self.control.halted() {
                if !parked {
                    self.receiver.park(self.device.transport());
                    parked = true;
                }
                self.control.parked();
                self.device.transport().notify_quiesced();
                self.listen(false);
                self.wait(None);
                due = DueWork { receive: true, transmit: true, at: None };
                continue;
            }
            parked = false;
            self.carry(&mut due);
            if !due.receive && !due.transmit {
                let (bell, frames) = self.wait(due.at);
                // Work may be due at this time.
                let late = due.at.is_some_and(|at| at <= Instant::now());
                // While the thread listens for frames, a notification does not concern receiving.
                let receive = frames || late || bell && !self.listening;
                due = DueWork { receive, transmit: bell || late, at: None };
            }
        }
    }

    /// Does the work that is due, once. Then updates `due` with the work that is due next.
    fn carry(&mut self, due: &mut DueWork) {
        let (transport, memory) = (self.device.transport(), self.device.memory());
        due.at = self.announcer.announce(Instant::now());
        let mut sooner = |at: Instant| due.at = Some(due.at.map_or(at, |other| other.min(at)));
        // Pages can only become missing before a guest runs, so this holds for the whole call.
        let sheltered = self.paging.if_complete(|| ()).is_none();
        if due.transmit {
            let step = self.transmitter.transmit(transport, memory, sheltered);
            due.transmit = step == TxStep::More;
            match step {
                TxStep::Busy => sooner(Instant::now() + BUSY),
                TxStep::Gone => self.control.unplugged(),
                _ => {}
            }
        }
        if due.receive {
            let step = self.receiver.receive(transport, memory, sheltered);
            due.receive = step == RxStep::More;
            match step {
                RxStep::Full(Some(at)) => sooner(at),
                RxStep::Gone => self.control.unplugged(),
                _ => {}
            }
            // Without room for frames, the thread does not listen to the tap, so that frames do not
            // wake it.
            let listening = matches!(step, RxStep::More | RxStep::Dry);
            // Frames that arrived meanwhile are reported when listening begins.
            self.listen(listening);
        }
    }

    /// Sets whether frames at the tap wake the thread.
    fn listen(&mut self, listening: bool) {
        if self.listening == listening {
            return;
        }
        let Some(tap) = self.control.port().frames() else { return };
        let frames = if listening { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let flags = frames | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(FRAMES);
        match epoll::modify(&self.poll, tap, data, flags) {
            Ok(()) => self.listening = listening,
            Err(error) => {
                tracing::warn!(%error, "cannot change which events wake the thread of a network interface; the interface may be slow")
            }
        }
    }

    /// Sleeps until the bell was rung or frames arrived, or until `at`. Returns which of the two
    /// happened.
    fn wait(&self, at: Option<Instant>) -> (bool, bool) {
        let left = at.map(|at| at.saturating_duration_since(Instant::now()));
        // Rounded up, because the thread would otherwise spin for the last fraction.
        let timeout = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let mut events = Vec::with_capacity(2);
        let woken = epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        self.common.wakeups.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = woken
            && error != rustix::io::Errno::INTR
        {
            // The arguments are always valid. The sleep limits the rate of an error that should not
            // occur.
            tracing::warn!(%error, "a network interface cannot wait for frames");
            std::thread::sleep(Duration::from_millis(100));
        }
        let came = |what| events.iter().any(|event: &epoll::Event| event.data.u64() == what);
        (came(BELL), came(FRAMES))
    }
}
