//! Tap as a network device's port.

use crate::error::Result;
use crate::options::{NetOptions, OpenTap};
use rustix::event::EventfdFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;
use vmferry_sys::tap;
use vmferry_virtio::net::{FramePort, HEADER, Offloads, PortError, ReceivedFrame};

/// Maximum number of old frames that are dropped when a driver starts. A tap keeps 500 or 1000.
const STALE: u32 = 4096;

const _: () = assert!(HEADER == tap::HEADER);

/// Tap with its name.
#[derive(Debug)]
struct Tap {
    name: String,
    fd: Arc<OwnedFd>,
}

/// Tap, and the bell of the thread that carries its frames. A port without a tap behaves like one
/// whose tap has gone: its link is down.
#[derive(Debug)]
pub(crate) struct TapPort {
    tap: Option<Tap>,
    bell: OwnedFd,
}

impl TapPort {
    /// Opens the tap of `options`, if there is one, or takes it from another process that has
    /// opened it.
    ///
    /// # Errors
    /// Returns the [`tap::TapError`] unchanged.
    pub(crate) fn open(options: &NetOptions) -> Result<Self> {
        let open = |name: &String| {
            let fd = match &options.open {
                Some(OpenTap(fd)) => {
                    tap::check(fd.as_fd(), name)?;
                    Arc::clone(fd)
                }
                None => Arc::new(tap::open(name)?),
            };
            Ok::<_, tap::TapError>(Tap { name: name.clone(), fd })
        };
        let tap = options.tap.as_ref().map(open).transpose()?;
        let bell = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let bell = bell.map_err(|error| super::no_thread(error.into()))?;
        Ok(Self { tap, bell })
    }

    /// Returns the size of the largest packet that the tap carries, in bytes. Logs a warning if the
    /// tap is down. A port without a tap carries packets of any size, because it drops them.
    pub(crate) fn mtu(&self) -> Result<u16> {
        let Some(Tap { name, .. }) = &self.tap else { return Ok(u16::MAX) };
        let (mtu, up) = tap::mtu(name).map_err(tap::TapError::from)?;
        if !up {
            tracing::warn!(
                "the tap {name} is down, and the guest's frames are lost; run: ip link set {name} up"
            );
        }
        Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.tap.as_ref().map(|tap| tap.name.as_str())
    }

    /// Returns the descriptor that is readable while frames wait, if there is a tap.
    pub(super) fn frames(&self) -> Option<BorrowedFd<'_>> {
        self.tap.as_ref().map(|tap| tap.fd.as_fd())
    }

    /// Returns the descriptor of the tap, or the error of a tap that has gone.
    fn fd(&self) -> std::result::Result<BorrowedFd<'_>, PortError> {
        self.frames().ok_or_else(|| PortError::Gone(io::Error::from_raw_os_error(libc::ENODEV)))
    }

    /// Returns the descriptor that is readable after each [`kick`](FramePort::kicked).
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

fn failed(error: io::Error) -> PortError {
    match error.raw_os_error().unwrap_or(0) {
        libc::EAGAIN => PortError::NotNow,
        libc::EBADF | libc::EBADFD | libc::ENODEV => PortError::Gone(error),
        _ => PortError::Refused(error),
    }
}

impl FramePort for TapPort {
    fn send<B: BitmapSlice>(&self, pieces: &[VolatileSlice<'_, B>]) -> std::result::Result<(), PortError> {
        let each = pieces.iter().map(|piece| (piece.ptr_guard_mut().as_ptr(), piece.len()));
        // SAFETY: a slice is mapped, readable and writable, for as long as it is borrowed, and the
        // guards of mapped memory guard nothing (they are for Xen memory). The guest may write the
        // memory at any time, which `send` allows.
        unsafe { tap::send(self.fd()?, each) }.map(|_| ()).map_err(failed)
    }

    fn receive<B: BitmapSlice>(
        &self,
        pieces: &[VolatileSlice<'_, B>],
    ) -> std::result::Result<ReceivedFrame, PortError> {
        let each = pieces.iter().map(|piece| (piece.ptr_guard_mut().as_ptr(), piece.len()));
        // SAFETY: as above; the written memory is the guest's buffers, or a buffer of ours without
        // other users.
        let received = unsafe { tap::receive(self.fd()?, each) };
        let received = received.map_err(|error| match error.raw_os_error() {
            // A frame that the kernel cannot describe.
            Some(libc::EAGAIN | libc::EINVAL) => failed(error),
            // The error would be the same the next time.
            _ => PortError::Gone(error),
        })?;
        Ok(ReceivedFrame { bytes: received.bytes, cut: received.cut })
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        let bits = [
            (offloads.csum, tap::OFFLOAD_CSUM),
            (offloads.tso4, tap::OFFLOAD_TSO4),
            (offloads.tso6, tap::OFFLOAD_TSO6),
            (offloads.ecn, tap::OFFLOAD_ECN),
        ];
        let bits = bits.iter().filter(|(on, _)| *on).fold(0, |all, (_, bit)| all | bit);
        match self.frames() {
            Some(tap) => tap::set_offloads(tap, bits).map_err(io::Error::other),
            None => Ok(()),
        }
    }

    fn flush(&self) {
        let Some(tap) = self.frames() else { return };
        let mut byte = [0];
        for _ in 0..STALE {
            // A read removes the whole frame, however little of it fits. A frame without room for
            // its header is refused, and removed as well.
            match rustix::io::read(tap, &mut byte) {
                Ok(_) | Err(rustix::io::Errno::INVAL) => {}
                Err(_) => break,
            }
        }
    }

    fn kicked(&self) {
        // The write fails only if 2^64 - 1 kicks are pending.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}
