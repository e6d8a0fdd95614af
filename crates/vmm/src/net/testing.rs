//! Network namespace with a tap, the host's end of it, and a driver that the test controls.

use super::VmNet;
use crate::bus::MmioDevice;
use crate::memory::GuestRam;
use crate::options::{NetOptions, VmOptions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};
use vmferry_fault::PagingSlot;
use vmferry_virtio::net::HEADER;
use vmferry_virtio::signals::Interrupt;

use vmferry_testkit::{Need, skip, wait};
pub(super) use vmferry_virtio::net::{RX, TX};

/// EtherType for local experiments (IEEE 802), which no kernel sends by itself.
const KIND: u16 = 0x88b5;
/// Maximum number of buffers and descriptors of a queue.
const SIZE: u16 = 32;
/// Size of a receive buffer in bytes.
const BUFFER: u32 = 4096;

#[derive(Debug, Default)]
pub(super) struct NoLine(AtomicU32);

impl Interrupt for NoLine {
    fn trigger(&self) -> std::io::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

pub(super) fn ram() -> Arc<GuestRam> {
    let mut options = VmOptions::new(8 << 20, 1);
    options.huge_pages = false;
    Arc::new(GuestRam::new(&options).unwrap())
}

/// Runs `test` with a tap that is up, in a network namespace that ends with the test. Skips the
/// calling test where this is not allowed.
pub(super) fn sandbox(test: impl FnOnce(&str) + Send) {
    // The thread that carries frames can only make the system calls of its role.
    vmferry_confine::confine_threads().unwrap();
    let run = || {
        // SAFETY: changes only the network namespace of this thread.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            let error = std::io::Error::last_os_error();
            return Err(format!("no network namespace: {error}"));
        }
        // Otherwise the kernel sends frames by itself in the first seconds, which use up the
        // receive buffers of a test. A kernel without IPv6 does not have these files.
        for of in ["all", "default"] {
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6"), "1");
        }
        make_tap("tap0").map_err(|error| format!("no tap: {error}"))?;
        test("tap0");
        Ok(())
    };
    std::thread::scope(|scope| match scope.spawn(run).join() {
        Ok(Ok(())) => {}
        Ok(Err(why)) => skip(Need::Root, why),
        Err(panic) => std::panic::resume_unwind(panic),
    });
}

fn last(result: i32) -> std::io::Result<i32> {
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result) }
}

fn interface(name: &str) -> libc::ifreq {
    // SAFETY: plain numbers.
    let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in interface.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte.cast_signed();
    }
    interface
}

fn socket(kind: i32, protocol: u16) -> std::io::Result<OwnedFd> {
    let domain = if kind == libc::SOCK_RAW { libc::AF_PACKET } else { libc::AF_INET };
    // SAFETY: creates a descriptor, which this function owns.
    let fd = last(unsafe { libc::socket(domain, kind | libc::SOCK_CLOEXEC, protocol.to_be().into()) })?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Creates a tap that lasts as long as its namespace, without IPv6, and up.
fn make_tap(name: &str) -> std::io::Result<()> {
    let fd = std::fs::File::options().read(true).write(true).open("/dev/net/tun")?;
    let mut request = interface(name);
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_TAP | libc::IFF_NO_PI).unwrap();
    // SAFETY: the request has this structure.
    last(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    // SAFETY: the request takes a number.
    last(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETPERSIST, 1) })?;
    let socket = socket(libc::SOCK_DGRAM, 0)?;
    let mut request = interface(name);
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_UP).unwrap();
    // SAFETY: the request has this structure.
    last(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) })?;
    Ok(())
}

/// Returns true if frames that are sent to the tap reach it. The kernel notices only some time
/// after the open that the tap is in use, and drops frames until then.
fn runs(name: &str) -> bool {
    let Ok(socket) = socket(libc::SOCK_DGRAM, 0) else { return false };
    let mut request = interface(name);
    // SAFETY: the request takes this structure, and returns flags in it.
    let got = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } == 0;
    // SAFETY: as above.
    got && i32::from(unsafe { request.ifr_ifru.ifru_flags }) & libc::IFF_RUNNING != 0
}

/// Host's end of a tap. Frames that it sends go to the guest, and it sees the frames of the guest.
pub(super) struct Host {
    socket: OwnedFd,
}

impl Host {
    pub(super) fn at(tap: &str) -> Self {
        let all = u16::try_from(libc::ETH_P_ALL).unwrap();
        let socket = socket(libc::SOCK_RAW, all).unwrap();
        let name = std::ffi::CString::new(tap).unwrap();
        // SAFETY: plain numbers.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
        address.sll_protocol = all.to_be();
        // SAFETY: a text that ends with zero.
        address.sll_ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) }.try_into().unwrap();
        let len = u32::try_from(size_of_val(&address)).unwrap();
        // SAFETY: an address of this length.
        last(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) }).unwrap();
        Self { socket }
    }

    /// Creates another tap in the same namespace. Returns its host's end.
    pub(super) fn another(&self, name: &str) -> Self {
        make_tap(name).unwrap();
        Self::at(name)
    }

    /// Returns frame `number` of `len` bytes, as sent by the host.
    pub(super) fn frame(&self, number: u8, len: usize) -> Vec<u8> {
        frame([2, 0, 0, 0, 0, 1], number, len)
    }

    pub(super) fn send(&self, number: u8, len: usize) {
        rustix::net::send(&self.socket, &self.frame(number, len), rustix::net::SendFlags::empty()).unwrap();
    }

    /// Returns the next frame of this kind that arrived from the guest within `time`.
    pub(super) fn receive_kind(&self, kind: u16, time: Duration) -> Option<Vec<u8>> {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.checked_duration_since(Instant::now())?;
            let mut ready = [rustix::event::PollFd::new(&self.socket, rustix::event::PollFlags::IN)];
            let left =
                rustix::event::Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().min(50_000_000).into() };
            if rustix::event::poll(&mut ready, Some(&left)).unwrap() == 0 {
                continue;
            }
            let mut bytes = vec![0; 70_000];
            let got =
                rustix::net::recv(&self.socket, &mut bytes[..], rustix::net::RecvFlags::empty()).unwrap();
            bytes.truncate(got.0);
            // The socket also sees the frames that it sent itself.
            if bytes[12..14] == kind.to_be_bytes() && bytes[6..12] != [2, 0, 0, 0, 0, 1] {
                return Some(bytes);
            }
        }
    }

    /// Returns the next frame of the tests' kind.
    pub(super) fn receive_own(&self, time: Duration) -> Option<Vec<u8>> {
        self.receive_kind(KIND, time)
    }
}

fn frame(from: [u8; 6], number: u8, len: usize) -> Vec<u8> {
    let head = [&[0xff; 6][..], &from, &KIND.to_be_bytes()].concat();
    let body = (14..len).map(|at| number.wrapping_add(at.to_le_bytes()[0]));
    head.into_iter().chain(body).collect()
}

/// Driver of a guest: one descriptor per buffer, no event index, each receive buffer a page.
pub(super) struct Driver {
    pub(super) net: VmNet,
    pub(super) ram: Arc<GuestRam>,
    pub(super) paging: Arc<PagingSlot>,
    /// Number of buffers added to each queue, and number of buffers seen to be given back.
    put: [u16; 2],
    seen: [u16; 2],
}

impl Driver {
    pub(super) fn new(tap: &str, mac: Option<&str>) -> Self {
        let (ram, paging) = (ram(), Arc::new(PagingSlot::new(1)));
        let mut options = NetOptions::new(tap);
        options.mac = mac.map(|mac| mac.parse().unwrap());
        let net = VmNet::new((&ram, &paging), &options, 0, (Box::new(NoLine::default()), None)).unwrap();
        wait("the tap to run", || runs(tap));
        Self { net, ram, paging, put: [0; 2], seen: [0; 2] }
    }

    pub(super) fn device(&self) -> &dyn MmioDevice {
        &**self.net.device()
    }

    /// Continues as the driver of `other`: memory and all.
    pub(super) fn take_over(&mut self, other: &Self) {
        let mut page = [0; 4096];
        for at in (0..8u64 << 20).step_by(4096).map(GuestAddress) {
            other.ram.map().read_slice(&mut page, at).unwrap();
            self.ram.map().write_slice(&page, at).unwrap();
        }
        (self.put, self.seen) = (other.put, other.seen);
    }

    pub(super) fn rings(queue: u16) -> u64 {
        0x10_0000 + 0x4000 * u64::from(queue)
    }

    /// Returns the address of receive buffer `n`.
    pub(super) fn buffer(&self, n: u16) -> u64 {
        0x20_0000 + u64::from(BUFFER) * u64::from(n)
    }

    /// Returns the address from which frames are sent.
    pub(super) fn frame_at(&self) -> u64 {
        0x30_0000
    }

    fn set(&self, at: u64, value: u32) {
        self.device().write(at, &value.to_le_bytes());
    }

    /// Makes the driver ready, with mergeable buffers and no other feature.
    pub(super) fn start(&self) {
        self.set(0x70, 3);
        for (select, bits) in [(0, 1 << 15), (1, 1)] {
            self.set(0x24, select);
            self.set(0x20, bits);
        }
        self.set(0x70, 0xb);
        for queue in [RX, TX] {
            self.set(0x30, queue.into());
            self.set(0x38, SIZE.into());
            let at = u32::try_from(Self::rings(queue)).unwrap();
            for (register, address) in [(0x80, at), (0x90, at + 0x1000), (0xa0, at + 0x2000)] {
                self.set(register, address);
                self.set(register + 4, 0);
            }
            self.set(0x44, 1);
        }
        self.set(0x70, 0xf);
        while self.device().due() && self.device().work() {}
        assert!(self.net.status().driver);
    }

    fn offer(&mut self, queue: u16, index: u16, gpa: u64, len: u32) {
        let (map, at, which) = (self.ram.map(), Self::rings(queue), usize::from(queue));
        let flags = if queue == RX { 2u16 } else { 0 };
        let descriptor = [&gpa.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &[0; 2]].concat();
        map.write_slice(&descriptor, GuestAddress(at + 16 * u64::from(index))).unwrap();
        let slot = at + 0x1000 + 4 + 2 * u64::from(self.put[which] % SIZE);
        map.write_obj(index, GuestAddress(slot)).unwrap();
        self.put[which] = self.put[which].wrapping_add(1);
        map.store(self.put[which], GuestAddress(at + 0x1002), Ordering::Release).unwrap();
    }

    /// Adds receive buffer `n`.
    pub(super) fn post(&mut self, n: u16) {
        let gpa = self.buffer(n);
        self.offer(RX, n, gpa, BUFFER);
    }

    pub(super) fn notify(&self, queue: u16) {
        self.set(0x50, queue.into());
    }

    /// Returns the number of buffers of `queue` that were given back.
    pub(super) fn used(&self, queue: u16) -> u16 {
        self.ram.map().load(GuestAddress(Self::rings(queue) + 0x2002), Ordering::Acquire).unwrap()
    }

    /// Returns the next frame of the tests' kind, and the number of its buffer.
    pub(super) fn next_frame(&mut self) -> (u16, Vec<u8>) {
        loop {
            let seen = self.seen[usize::from(RX)];
            wait("a frame", || self.used(RX) != seen);
            self.seen[usize::from(RX)] = seen.wrapping_add(1);
            let at = Self::rings(RX) + 0x2004 + 8 * u64::from(seen % SIZE);
            let [buffer, len]: [u32; 2] = self.ram.map().read_obj(GuestAddress(at)).unwrap();
            let buffer = u16::try_from(buffer).unwrap();
            let mut bytes = vec![0; usize::try_from(len).unwrap()];
            self.ram.map().read_slice(&mut bytes, GuestAddress(self.buffer(buffer))).unwrap();
            assert_eq!(bytes[10..12], [1, 0], "one buffer");
            if bytes[HEADER + 12..HEADER + 14] == KIND.to_be_bytes() {
                return (buffer, bytes.split_off(HEADER));
            }
            // A frame that the host's kernel sent by itself: the buffer is added again.
            self.post(buffer);
        }
    }

    /// Sends frame `number` of `len` bytes, and returns it.
    pub(super) fn send(&mut self, number: u8, len: usize) -> Vec<u8> {
        let bytes = frame([2, 0, 0, 0, 0, 2], number, len);
        let (at, whole) = (self.frame_at(), [&[0; HEADER][..], &bytes].concat());
        // Writes as the guest's vCPU does, which marks nothing in the VMM.
        let window = self.ram.host_range(vmferry_core::Gpa(at), whole.len()).unwrap();
        // SAFETY: this many bytes of memory without references; the device reads them when it is
        // notified.
        unsafe { std::ptr::copy_nonoverlapping(whole.as_ptr(), window.as_ptr(), whole.len()) };
        let index = self.put[usize::from(TX)] % SIZE;
        self.offer(TX, index, at, u32::try_from(whole.len()).unwrap());
        self.notify(TX);
        bytes
    }
}
