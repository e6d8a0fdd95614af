//! Passing of files over a Unix socket (`SCM_RIGHTS` in unix(7)), with one byte that carries them.

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Byte that carries the files.
const FILES: u8 = b'd';
/// Maximum number of files, which is more than the number of disks of a guest.
pub(super) const MOST: usize = 64;
/// Time for which the parent waits for the files.
const PATIENCE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Passes `files` over `socket`.
pub(super) fn send(socket: BorrowedFd<'_>, files: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ensure!(ancillary.push(SendAncillaryMessage::ScmRights(files)), "{} disks are too many", files.len());
    let sent = sendmsg(socket, &[IoSlice::new(&[FILES])], &mut ancillary, SendFlags::NOSIGNAL);
    sent.map(drop).context("the files for the disks cannot be passed to the process of the parent")
}

/// Receives `count` files over `socket`.
pub(super) fn receive(socket: BorrowedFd<'_>, count: usize) -> Result<Vec<OwnedFd>> {
    if poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&PATIENCE))? == 0 {
        bail!("the files for the disks were not passed in time");
    }
    let (mut byte, mut files) = ([0], Vec::new());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            files.extend(passed);
        }
    }
    ensure!(byte == [FILES] && files.len() == count, "{} files were passed for {count} disks", files.len());
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn files_arrive_and_their_number_is_checked() {
        let (one, two) = UnixStream::pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let send = |count: usize| send(one.as_fd(), &vec![null.as_fd(); count]).unwrap();
        send(2);
        assert_eq!(receive(two.as_fd(), 2).unwrap().len(), 2);
        send(MOST);
        assert_eq!(receive(two.as_fd(), MOST).unwrap().len(), MOST);
        send(1);
        let error = receive(two.as_fd(), 2).unwrap_err().to_string();
        assert!(error.contains("1 files were passed for 2 disks"), "{error}");
        drop(one);
        assert!(receive(two.as_fd(), 1).is_err());
    }
}
