//! A tap interface: Ethernet frames of the host's network, each behind a header with its offloads (Linux,
//! Documentation/networking/tuntap.rst and `linux/if_tun.h`).

use crate::SysError;
use crate::error::common;
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Bytes of the header in front of each frame: `struct virtio_net_hdr_v1` (virtio 1.2, section 5.1.6), as modern drivers have it.
pub const HEADER: usize = 12;

/// Most pieces that a frame can be sent from or received into: what a call takes, less one.
pub const MAX_PIECES: usize = 1023;

/// The reader computes checksums.
pub const OFFLOAD_CSUM: u32 = libc::TUN_F_CSUM;
/// The reader takes TCP segments over IPv4 of up to 64 KiB.
pub const OFFLOAD_TSO4: u32 = libc::TUN_F_TSO4;
/// Likewise over IPv6.
pub const OFFLOAD_TSO6: u32 = libc::TUN_F_TSO6;
/// Such segments may carry congestion notification.
pub const OFFLOAD_ECN: u32 = libc::TUN_F_TSO_ECN;

/// Why a tap cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapError {
    /// No interface can have this name.
    #[error("'{0}' is no name of an interface: it has 1 to 15 bytes, no slash, no space")]
    Name(String),
    /// The kernel has no tap driver, or this user may not open it.
    #[error("cannot open /dev/net/tun: {source} ({meaning})")]
    Driver {
        /// What the kernel said.
        source: io::Error,
        /// What can be done.
        meaning: &'static str,
    },
    /// There is no such interface.
    #[error(
        "there is no tap '{0}' in this network namespace; make it with: ip tuntap add dev {0} mode tap vnet_hdr user $USER && \
         ip link set {0} up"
    )]
    Missing(String),
    /// Another process reads from it.
    #[error(
        "the tap '{0}' is in use by another process (another VM perhaps); end that one, or give this VM a tap of its own"
    )]
    Busy(String),
    /// It belongs to somebody else.
    #[error(
        "no permission to use the tap '{0}': make it for this user (ip tuntap add dev {0} mode tap vnet_hdr user $USER), or run with \
         CAP_NET_ADMIN"
    )]
    Permission(String),
    /// It is another kind of interface.
    #[error(
        "'{0}' is not a tap (an interface of another kind, or a tun): make one with: ip tuntap add dev NAME mode tap vnet_hdr"
    )]
    Kind(String),
    /// Something else.
    #[error(transparent)]
    Refused(#[from] SysError),
}

/// Opens the tap `name`, which must exist, not blocking, with headers of [`HEADER`] bytes and no offloads.
///
/// # Errors
/// [`TapError`], in words for whoever set it up.
pub fn open(name: &str) -> Result<OwnedFd, TapError> {
    let usable = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b'%';
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.starts_with('.') || !name.bytes().all(usable) {
        return Err(TapError::Name(name.to_owned()));
    }
    if !exists(name) {
        // The kernel would make one, for a user who may.
        return Err(TapError::Missing(name.to_owned()));
    }
    // SAFETY: a path that ends with zero; what comes back is a descriptor of ours.
    let fd =
        unsafe { libc::open(c"/dev/net/tun".as_ptr(), libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC) };
    if fd < 0 {
        let source = io::Error::last_os_error();
        let meaning = match source.raw_os_error().unwrap_or(0) {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => "the kernel has no tun driver: modprobe tun",
            libc::EACCES | libc::EPERM => "this user may not open it",
            other => common(other),
        };
        return Err(TapError::Driver { source, meaning });
    }
    // SAFETY: open and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    attach(&fd, name)?;
    let size = i32::try_from(HEADER).unwrap_or(i32::MAX);
    request("TUNSETVNETHDRSZ", name, || {
        // SAFETY: the request reads an int.
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const size) }
    })?;
    set_offloads(rustix::fd::AsFd::as_fd(&fd), 0)?;
    Ok(fd)
}

/// Says which frames may be read that are not whole yet: `OFFLOAD_*`.
///
/// # Errors
/// If the kernel knows less.
pub fn set_offloads(fd: BorrowedFd<'_>, offloads: u32) -> Result<(), SysError> {
    request("TUNSETOFFLOAD", "a tap", || {
        // SAFETY: the request takes a number.
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) }
    })
}

/// The largest packet that the interface `name` carries, in bytes without the Ethernet header, and whether it is up.
///
/// # Errors
/// If there is no such interface any more.
pub fn mtu(name: &str) -> Result<(u32, bool), SysError> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None);
    let failed = |source: io::Error| SysError::from_io("socket", name.to_owned(), source, common);
    let socket = socket.map_err(|error| failed(error.into()))?;
    let mut interface = interface(name);
    request("SIOCGIFMTU", name, || {
        // SAFETY: the request fills the structure that it is given.
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut interface) }
    })?;
    // SAFETY: the request has set this member, a plain number.
    let mtu = unsafe { interface.ifr_ifru.ifru_mtu };
    request("SIOCGIFFLAGS", name, || {
        // SAFETY: as above.
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut interface) }
    })?;
    // SAFETY: as above.
    let flags = unsafe { interface.ifr_ifru.ifru_flags };
    Ok((u32::try_from(mtu).unwrap_or(0), i32::from(flags) & libc::IFF_UP != 0))
}

/// Sends the header and the frame that `pieces` are, one after the other.
///
/// # Errors
/// What the kernel says; `WouldBlock` if it has no room now.
///
/// # Safety
/// Each piece (start, bytes) is mapped readable while this runs. It may be written meanwhile: what goes out is then either.
pub unsafe fn send(fd: BorrowedFd<'_>, pieces: impl Iterator<Item = (*mut u8, usize)>) -> io::Result<usize> {
    let mut list = Pieces::new();
    let count = list.take(pieces, MAX_PIECES)?;
    loop {
        // SAFETY: `count` of the list are set; the caller vouches for what they point at.
        let sent = unsafe { libc::writev(fd.as_raw_fd(), list.start(), count) };
        match usize::try_from(sent) {
            Ok(sent) => return Ok(sent),
            Err(_) => again()?,
        }
    }
}

/// A frame that was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Its bytes, header included, as far as they were written to the pieces.
    pub bytes: usize,
    /// It was longer than the pieces, and the rest is lost.
    pub cut: bool,
}

/// Receives the next frame, behind its header, into `pieces`, one after the other. Of the header's 12 bytes the last two are left alone.
///
/// # Errors
/// What the kernel says; `WouldBlock` if there is none. Pieces may have been written to then.
///
/// # Safety
/// Each piece (start, bytes) is mapped writable while this runs, and nobody minds that it is written to.
pub unsafe fn receive(
    fd: BorrowedFd<'_>,
    pieces: impl Iterator<Item = (*mut u8, usize)>,
) -> io::Result<Received> {
    let (mut list, mut spill) = (Pieces::new(), 0u8);
    let count = list.take(pieces, MAX_PIECES)?;
    let room = list.bytes;
    // A frame that is too long is cut without a word; a byte more tells.
    let count = count + list.take(std::iter::once((&raw mut spill, 1)), 1)?;
    loop {
        // SAFETY: `count` of the list are set; the caller vouches for what they point at, and the last is ours.
        let got = unsafe { libc::readv(fd.as_raw_fd(), list.start(), count) };
        match usize::try_from(got) {
            Ok(got) => return Ok(Received { bytes: got.min(room), cut: got > room }),
            Err(_) => again()?,
        }
    }
}

/// The list that `readv` and `writev` take, on the stack: one a frame.
struct Pieces {
    list: [MaybeUninit<libc::iovec>; MAX_PIECES + 1],
    /// Those that are set.
    used: usize,
    /// Bytes in them.
    bytes: usize,
}

impl Pieces {
    fn new() -> Self {
        Self { list: [const { MaybeUninit::uninit() }; MAX_PIECES + 1], used: 0, bytes: 0 }
    }

    /// Adds at most `most` of `pieces`; says how many there were.
    fn take(&mut self, pieces: impl Iterator<Item = (*mut u8, usize)>, most: usize) -> io::Result<i32> {
        let before = self.used;
        for (start, bytes) in pieces {
            let Some(place) = self.list.get_mut(self.used).filter(|_| self.used - before < most) else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            place.write(libc::iovec { iov_base: start.cast(), iov_len: bytes });
            self.used += 1;
            self.bytes = self.bytes.saturating_add(bytes);
        }
        Ok(i32::try_from(self.used - before).unwrap_or(i32::MAX))
    }

    fn start(&self) -> *const libc::iovec {
        self.list.as_ptr().cast()
    }
}

/// `Ok` if a call was only interrupted.
fn again() -> io::Result<()> {
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}

fn exists(name: &str) -> bool {
    let Ok(name) = CString::new(name) else { return false };
    // SAFETY: a text that ends with zero.
    unsafe { libc::if_nametoindex(name.as_ptr()) != 0 }
}

/// A request's structure for the interface `name`, which fits.
fn interface(name: &str) -> libc::ifreq {
    // SAFETY: plain numbers and bytes, for which zeros are fine.
    let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero.
    for (place, byte) in interface.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(name.bytes()) {
        *place = libc::c_char::from_ne_bytes([byte]);
    }
    interface
}

/// Makes `fd` the reader and writer of the tap `name`.
fn attach(fd: &OwnedFd, name: &str) -> Result<(), TapError> {
    let mut interface = interface(name);
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    // One that was made for several queues must be asked for one of them.
    let mut refused = 0;
    for more in [0, libc::IFF_MULTI_QUEUE] {
        // The bits are the low 16 of the flags.
        let [a, b, _, _] = (flags | more).to_ne_bytes();
        interface.ifr_ifru.ifru_flags = libc::c_short::from_ne_bytes([a, b]);
        // SAFETY: the request reads and writes this structure.
        if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut interface) } == 0 {
            return Ok(());
        }
        refused = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        if refused != libc::EINVAL {
            break;
        }
    }
    Err(match refused {
        libc::EBUSY => TapError::Busy(name.to_owned()),
        libc::EPERM | libc::EACCES => TapError::Permission(name.to_owned()),
        libc::EINVAL => TapError::Kind(name.to_owned()),
        other => {
            let source = io::Error::from_raw_os_error(other);
            SysError::from_io("TUNSETIFF", name.to_owned(), source, common).into()
        }
    })
}

fn request(call: &'static str, target: &str, ask: impl FnOnce() -> i32) -> Result<(), SysError> {
    if ask() < 0 { Err(SysError::last(call, || target.to_owned(), common)) } else { Ok(()) }
}
