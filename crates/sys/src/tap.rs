//! Tap interfaces, which exchange Ethernet frames with the host's network. Each frame follows a
//! header that describes its offloads (Linux `Documentation/networking/tuntap.rst` and
//! `linux/if_tun.h`).

use crate::SysError;
use crate::error::common;
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Length of the header before each frame in bytes: `struct virtio_net_hdr_v1` (virtio 1.2, section
/// 5.1.6), as modern drivers use it.
pub const HEADER: usize = 12;

/// Maximum number of pieces of memory from which a frame can be sent, or into which it can be
/// received: the kernel's limit for one call, less one.
pub const MAX_PIECES: usize = 1023;

/// Offload: the reader computes checksums.
pub const OFFLOAD_CSUM: u32 = libc::TUN_F_CSUM;
/// Offload: the reader accepts TCP segments over IPv4 of up to 64 KiB.
pub const OFFLOAD_TSO4: u32 = libc::TUN_F_TSO4;
/// Offload: the reader accepts TCP segments over IPv6 of up to 64 KiB.
pub const OFFLOAD_TSO6: u32 = libc::TUN_F_TSO6;
/// Offload: large TCP segments may carry congestion notification.
pub const OFFLOAD_ECN: u32 = libc::TUN_F_TSO_ECN;

/// Error that opening a tap returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TapError {
    /// The name is not valid for an interface.
    #[error("'{0}' is not a valid interface name: use 1 to 15 bytes, no slash, no space")]
    Name(String),
    /// The kernel has no tap driver, or this user may not open it.
    #[error("cannot open /dev/net/tun: {source} ({meaning})")]
    Driver {
        /// Error that the kernel returned.
        source: io::Error,
        /// Remedy, or the meaning of the error.
        meaning: &'static str,
    },
    /// No interface has this name.
    #[error(
        "there is no tap '{0}' in this network namespace; make it with: ip tuntap add dev {0} mode tap vnet_hdr user $USER && \
         ip link set {0} up"
    )]
    Missing(String),
    /// Another process has the tap open.
    #[error(
        "the tap '{0}' is in use by another process (another VM perhaps); stop that process, or give this VM its own tap"
    )]
    Busy(String),
    /// The tap belongs to another user.
    #[error(
        "no permission to use the tap '{0}': make it for this user (ip tuntap add dev {0} mode tap vnet_hdr user $USER), or run with \
         CAP_NET_ADMIN"
    )]
    Permission(String),
    /// The interface is not a tap.
    #[error(
        "'{0}' is not a tap (an interface of another kind, or a tun): make one with: ip tuntap add dev NAME mode tap vnet_hdr"
    )]
    Kind(String),
    /// A descriptor that another process has passed is not the tap.
    #[error("the descriptor that was passed for the tap '{name}' is another one: {why}")]
    Passed {
        /// Name of the tap.
        name: String,
        /// The difference.
        why: String,
    },
    /// Another call failed.
    #[error(transparent)]
    Refused(#[from] SysError),
}

/// Opens the existing tap interface `name` in non-blocking mode, with headers of [`HEADER`] bytes
/// and without offloads.
///
/// # Errors
/// Returns a [`TapError`] with the cause and, where possible, a remedy, for example the command
/// that creates the tap.
pub fn open(name: &str) -> Result<OwnedFd, TapError> {
    let usable = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b'%';
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.starts_with('.') || !name.bytes().all(usable) {
        return Err(TapError::Name(name.to_owned()));
    }
    if !exists(name) {
        // If the user has the permission, the kernel would create the tap.
        return Err(TapError::Missing(name.to_owned()));
    }
    // SAFETY: the path ends with a zero byte, and the result is a new descriptor.
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
    // SAFETY: the descriptor is open and has no other owner.
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

/// Checks that `fd`, which another process has opened, is the tap interface `name`. Its settings
/// are left as they are, because the other process may still use it.
///
/// # Errors
/// Returns [`TapError::Passed`] if it is not.
pub fn check(fd: BorrowedFd<'_>, name: &str) -> Result<(), TapError> {
    let passed = |why: String| TapError::Passed { name: name.to_owned(), why };
    let mut found = interface("");
    request("TUNGETIFF", name, || {
        // SAFETY: the request fills the structure.
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &raw mut found) }
    })
    .map_err(|error| passed(error.to_string()))?;
    let found: Vec<u8> =
        found.ifr_name.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0).collect();
    if found == name.as_bytes() {
        return Ok(());
    }
    Err(passed(format!("it is {}", String::from_utf8_lossy(&found).escape_debug())))
}

/// Sets the offloads (`OFFLOAD_*`) that the reader of the tap supports. For these, the kernel
/// delivers frames on which the reader has to complete the work, such as checksums.
///
/// # Errors
/// Returns an error if the kernel does not support the offloads.
pub fn set_offloads(fd: BorrowedFd<'_>, offloads: u32) -> Result<(), SysError> {
    request("TUNSETOFFLOAD", "a tap", || {
        // SAFETY: the request takes a number.
        unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads)) }
    })
}

/// Returns the MTU of the interface `name`, in bytes without the Ethernet header, and true if the
/// interface is up.
///
/// # Errors
/// Returns an error if the interface does not exist.
pub fn mtu(name: &str) -> Result<(u32, bool), SysError> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None);
    let failed = |source: io::Error| SysError::from_io("socket", name.to_owned(), source, common);
    let socket = socket.map_err(|error| failed(error.into()))?;
    let mut interface = interface(name);
    request("SIOCGIFMTU", name, || {
        // SAFETY: the request fills the structure.
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut interface) }
    })?;
    // SAFETY: the request has set this member, which is a plain number.
    let mtu = unsafe { interface.ifr_ifru.ifru_mtu };
    request("SIOCGIFFLAGS", name, || {
        // SAFETY: the request fills the structure.
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut interface) }
    })?;
    // SAFETY: the request has set this member, which is a plain number.
    let flags = unsafe { interface.ifr_ifru.ifru_flags };
    Ok((u32::try_from(mtu).unwrap_or(0), i32::from(flags) & libc::IFF_UP != 0))
}

/// Sends one header and one frame, which consist of `pieces` in this order. Returns the number of
/// sent bytes.
///
/// # Errors
/// Returns `InvalidInput` if there are more than [`MAX_PIECES`] pieces, `WouldBlock` if the kernel
/// has no room at present, and otherwise the error of the kernel.
///
/// # Safety
/// Each piece (start address, length in bytes) is mapped readable during the call. Other threads
/// may write to it during the call, and then either the old or the new bytes are sent.
pub unsafe fn send(fd: BorrowedFd<'_>, pieces: impl Iterator<Item = (*mut u8, usize)>) -> io::Result<usize> {
    let mut list = Pieces::new();
    let count = list.take(pieces, MAX_PIECES)?;
    loop {
        // SAFETY: `count` entries of the list are set, and the caller guarantees that they point to
        // readable memory.
        let sent = unsafe { libc::writev(fd.as_raw_fd(), list.start(), count) };
        match usize::try_from(sent) {
            Ok(sent) => return Ok(sent),
            Err(_) => again()?,
        }
    }
}

/// Result of [`receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes that were written to the pieces, including the header.
    pub bytes: usize,
    /// True if the frame was longer than the pieces. The rest of the frame is lost.
    pub cut: bool,
}

/// Receives the next header and frame into `pieces`, which are filled in this order. The last two
/// of the 12 header bytes are not written.
///
/// # Errors
/// Returns `InvalidInput` if there are more than [`MAX_PIECES`] pieces, `WouldBlock` if no frame is
/// waiting, and otherwise the error of the kernel. The pieces may have been written even if the
/// call fails.
///
/// # Safety
/// Each piece (start address, length in bytes) is mapped writable during the call, and no Rust
/// reference covers it.
pub unsafe fn receive(
    fd: BorrowedFd<'_>,
    pieces: impl Iterator<Item = (*mut u8, usize)>,
) -> io::Result<Received> {
    let (mut list, mut spill) = (Pieces::new(), 0u8);
    let count = list.take(pieces, MAX_PIECES)?;
    let room = list.bytes;
    // The kernel cuts a frame that is too long without an error. One additional byte shows the cut.
    let count = count + list.take(std::iter::once((&raw mut spill, 1)), 1)?;
    loop {
        // SAFETY: `count` entries of the list are set. The caller guarantees that they point to
        // writable memory, and the last one points to `spill`.
        let got = unsafe { libc::readv(fd.as_raw_fd(), list.start(), count) };
        match usize::try_from(got) {
            Ok(got) => return Ok(Received { bytes: got.min(room), cut: got > room }),
            Err(_) => again()?,
        }
    }
}

/// List of pieces for `readv` and `writev`, on the stack. Each frame has its own list.
struct Pieces {
    list: [MaybeUninit<libc::iovec>; MAX_PIECES + 1],
    /// Number of entries that are set.
    used: usize,
    /// Number of bytes in the entries that are set.
    bytes: usize,
}

impl Pieces {
    fn new() -> Self {
        Self { list: [const { MaybeUninit::uninit() }; MAX_PIECES + 1], used: 0, bytes: 0 }
    }

    /// Adds `pieces` to the list and returns their number. Fails if there are more than `most`.
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

/// Returns `Ok` if the last call was only interrupted.
fn again() -> io::Result<()> {
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}

fn exists(name: &str) -> bool {
    let Ok(name) = CString::new(name) else { return false };
    // SAFETY: the text ends with a zero byte.
    unsafe { libc::if_nametoindex(name.as_ptr()) != 0 }
}

/// Returns the request structure for the interface `name`, whose length was checked.
fn interface(name: &str) -> libc::ifreq {
    // SAFETY: the structure consists of plain numbers and bytes, for which zeros are valid.
    let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero.
    for (place, byte) in interface.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(name.bytes()) {
        *place = libc::c_char::from_ne_bytes([byte]);
    }
    interface
}

/// Attaches `fd` to the tap `name` as its reader and writer.
fn attach(fd: &OwnedFd, name: &str) -> Result<(), TapError> {
    let mut interface = interface(name);
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    // A tap that was created with several queues must be opened with the multi-queue flag.
    let mut refused = 0;
    for more in [0, libc::IFF_MULTI_QUEUE] {
        // The flags are the low 16 bits.
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
