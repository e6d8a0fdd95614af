//! Control messages with attached descriptors (`SCM_RIGHTS`, unix(7)), for a peer on the same host.
//!
//! The kernel passes descriptors with the first byte that they are sent with. Therefore a receiver
//! only expects them with the header of a message.

use super::stream::{SendError, Stream};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use vmferry_core::MAX_REGIONS;
use vmferry_wire::{CONTROL_HEADER_BYTES, ControlHeader, decode_control, encode_control};

/// Size of the buffer for the descriptors of one message: one descriptor for each region.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_REGIONS));

/// Returns an error if descriptors cannot be passed over `stream` to another process, or from it.
///
/// The peer must be a process of this user or of root. A process of another user could otherwise
/// keep a guest's memory, and change it while the guest runs.
pub(crate) fn passes_descriptors(stream: &Stream) -> io::Result<()> {
    if stream.is_encrypted() {
        return Err(io::Error::other("the connection is encrypted; use a plain Unix socket"));
    }
    let socket = socket2::SockRef::from(stream);
    if socket.domain()? != socket2::Domain::UNIX {
        return Err(io::Error::other("the connection is not a Unix socket"));
    }
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
        let (other, own) = (peer.uid.as_raw(), rustix::process::geteuid().as_raw());
        return Err(io::Error::other(format!(
            "the peer runs as user {other}, and this process as user {own}; run both as the same user"
        )));
    }
    Ok(())
}

/// Sends one message with `descriptors`. Fails after the time `within`, like
/// [`send_message`](super::send_message).
pub(crate) fn send_message_with<M: Serialize>(
    stream: &Stream,
    message: &M,
    descriptors: &[BorrowedFd<'_>],
    within: Duration,
) -> Result<(), SendError> {
    let unsent = |error| SendError { nothing_left: true, error };
    let bytes = encode_control(message).map_err(|error| unsent(io::Error::other(error)))?;
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    // A buffer for an even number of descriptors has room for one more.
    let fits = descriptors.len() <= MAX_REGIONS;
    if !fits || !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(unsent(io::Error::other(format!("more than {MAX_REGIONS} descriptors"))));
    }
    let sent = loop {
        let whole = [IoSlice::new(&bytes)];
        match sendmsg(stream.as_fd(), &whole, &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(sent) => break sent,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(unsent(error.into())),
        }
    };
    let rest = bytes.get(sent..).unwrap_or_default();
    let failed = |failed: SendError| SendError { nothing_left: false, ..failed };
    stream.send_bytes_within(rest, within).map_err(failed)
}

/// Receives one message, and the descriptors that came with it. At most [`MAX_REGIONS`] descriptors
/// are accepted. They are closed when they are dropped, and no program that this process starts
/// inherits them.
pub(crate) fn read_message_with<M: DeserializeOwned>(stream: &Stream) -> io::Result<(M, Vec<OwnedFd>)> {
    let (mut header, mut received, mut descriptors) = ([0; CONTROL_HEADER_BYTES], 0, Vec::new());
    while let Some(rest) = header.get_mut(received..).filter(|rest| !rest.is_empty()) {
        received += receive_with(stream, rest, &mut descriptors)?;
    }
    let header = ControlHeader::decode(&header).map_err(io::Error::other)?;
    let mut body = vec![0; header.len];
    // The kernel closes descriptors that are received without room for them.
    stream.receive_bytes(&mut body)?;
    let message = decode_control(header, &body).map_err(io::Error::other)?;
    Ok((message, descriptors))
}

/// Receives at least one byte into `bytes`, and adds the descriptors that came with the bytes to
/// `descriptors`. Returns the number of bytes.
fn receive_with(stream: &Stream, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut room = [IoSliceMut::new(bytes)];
        match recvmsg(stream.as_fd(), &mut room, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            // With a timeout on the socket, the kernel reports this.
            Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            received => break received?,
        }
    };
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    if received.flags.contains(rustix::net::ReturnFlags::CTRUNC) || descriptors.len() > MAX_REGIONS {
        return Err(io::Error::other(format!("more than {MAX_REGIONS} descriptors came with a message")));
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};
    use std::os::unix::fs::MetadataExt;
    use vmferry_core::RegionId;
    use vmferry_wire::{LocalRegion, ToTarget};

    fn pair() -> (Stream, Stream) {
        let (a, b) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        (Stream::new(a, "a".into()).unwrap(), Stream::new(b, "b".into()).unwrap())
    }

    fn memory(regions: usize) -> ToTarget {
        ToTarget::LocalMemory {
            regions: vec![LocalRegion { region: RegionId(0), len: 4096, offset: 0 }; regions],
        }
    }

    fn files(count: usize) -> Vec<OwnedFd> {
        let file = |_| rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        (0..count).map(file).collect()
    }

    fn send(stream: &Stream, message: &ToTarget, files: &[OwnedFd]) -> Result<(), SendError> {
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send_message_with(stream, message, &borrowed, Duration::from_secs(10))
    }

    fn inode(file: &OwnedFd) -> u64 {
        std::fs::File::from(file.try_clone().unwrap()).metadata().unwrap().ino()
    }

    #[test]
    fn descriptors_arrive_with_their_message_and_only_with_it() {
        let (a, b) = pair();
        let sent = files(MAX_REGIONS);
        send(&a, &memory(MAX_REGIONS), &sent).unwrap();
        super::super::send_message(&a, &ToTarget::Ping(7), Duration::from_secs(10)).unwrap();
        let (message, received) = read_message_with::<ToTarget>(&b).unwrap();
        assert_eq!(message, memory(MAX_REGIONS));
        let inodes = |files: &[OwnedFd]| files.iter().map(inode).collect::<Vec<_>>();
        assert_eq!(inodes(&received), inodes(&sent));
        for file in &received {
            assert!(rustix::io::fcntl_getfd(file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
        let (message, received) = read_message_with::<ToTarget>(&b).unwrap();
        assert_eq!((message, received.len()), (ToTarget::Ping(7), 0));
    }

    #[test]
    fn too_many_descriptors_are_neither_sent_nor_received() {
        let (a, b) = pair();
        let sent = files(MAX_REGIONS + 1);
        assert!(send(&a, &memory(1), &sent).unwrap_err().nothing_left);
        // A hostile peer has no such limit.
        let borrowed: Vec<_> = sent.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_REGIONS + 1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)));
        let bytes = encode_control(&memory(1)).unwrap();
        sendmsg(a.as_fd(), &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        let error = read_message_with::<ToTarget>(&b).unwrap_err().to_string();
        assert!(error.contains("more than 64 descriptors"), "{error}");
    }

    #[test]
    fn descriptors_pass_only_over_plain_unix_sockets() {
        let (a, _b) = pair();
        assert!(passes_descriptors(&a).is_ok());
        let (tcp, _peer) = crate::channel::test_pair();
        assert!(passes_descriptors(&tcp).unwrap_err().to_string().contains("not a Unix socket"));
    }
}
