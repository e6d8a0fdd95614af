//! Passing of a branch point to another process of this host, over a Unix socket (`SCM_RIGHTS` in
//! unix(7)).
//!
//! One message has [`MESSAGE`] bytes and the descriptors: the file with the device state, and then
//! the file of each region. All numbers are little-endian.
//!
//! | bytes | content |
//! |---|---|
//! | 0 to 7 | `VMFBRCH` and the version of the message, 1 |
//! | 8 to 11 | number of regions |
//! | 12 to 15 | 0 |
//! | 16 and more | for each region its id (4 bytes), 0 (4 bytes), and its offset in its file (8 bytes) |

use super::BranchPoint;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use vmferry_core::{MAX_REGIONS, RegionFile, RegionId};

const MAGIC: [u8; 8] = *b"VMFBRCH\x01";
const FIXED: usize = 16;
const ENTRY: usize = 16;
/// Length of a message in bytes.
const MESSAGE: usize = FIXED + MAX_REGIONS * ENTRY;
/// Maximum number of descriptors. The kernel passes up to 253 at once.
const MOST: usize = 1 + MAX_REGIONS;

fn wrong(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

impl BranchPoint {
    /// Passes the point over `socket`, a Unix stream socket. The other process receives it with
    /// [`receive`](Self::receive).
    ///
    /// # Errors
    /// If `socket` is another kind of socket, or if the other process has closed it.
    pub fn send(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        // A socket of another family would send the bytes without the descriptors.
        if sockopt::socket_domain(socket)? != AddressFamily::UNIX {
            return Err(wrong("descriptors can be passed over a Unix socket only"));
        }
        let mut bytes = encode(self.regions());
        let files: Vec<_> = std::iter::once(self.state().as_fd())
            .chain(self.regions().iter().map(|region| region.file.as_fd()))
            .collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(wrong(format!("{} files are too many", files.len())));
        }
        loop {
            match sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(sent) if sent == bytes.len() => return Ok(()),
                // The descriptors went with the first byte.
                Ok(sent) => drop(bytes.drain(..sent)),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            ancillary.clear();
        }
    }

    /// Receives a point that another process has [sent](Self::send). Returns `None` if that process
    /// has closed the socket without sending one.
    ///
    /// The files are not trusted: [`join_branch`](crate::join_branch) checks them.
    ///
    /// # Errors
    /// If the message is not complete or not valid.
    pub fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let (mut bytes, mut have, mut files) = ([0; MESSAGE], 0, Vec::new());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
        while have < MESSAGE {
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut rest = [IoSliceMut::new(&mut bytes[have..])];
            let received = match recvmsg(socket, &mut rest, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => continue,
                received => received?.bytes,
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(passed) = message {
                    files.extend(passed);
                }
            }
            match received {
                0 if have == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => have += count,
            }
        }
        decode(&bytes, files).map(Some)
    }
}

fn encode(regions: &[RegionFile]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(MESSAGE);
    bytes.extend(MAGIC);
    bytes.extend(u32::try_from(regions.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend([0; 4]);
    for region in regions {
        bytes.extend(region.region.0.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(region.offset.to_le_bytes());
    }
    bytes.resize(MESSAGE, 0);
    bytes
}

fn decode(bytes: &[u8; MESSAGE], files: Vec<OwnedFd>) -> io::Result<BranchPoint> {
    let word = |at: usize| bytes[at..at + 4].iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte));
    if bytes[..MAGIC.len()] != MAGIC {
        return Err(wrong("the message is not a branch of this version"));
    }
    let count = usize::try_from(word(8)).unwrap_or(usize::MAX);
    if count == 0 || count > MAX_REGIONS {
        return Err(wrong(format!("{count} regions are not possible: 1 to {MAX_REGIONS}")));
    }
    if files.len() != 1 + count {
        let have = files.len();
        return Err(wrong(format!("{have} files were passed for the state and {count} regions")));
    }
    let mut files = files.into_iter();
    let state = files.next().ok_or(io::ErrorKind::InvalidData)?;
    let regions = files.enumerate().map(|(index, file)| {
        let at = FIXED + index * ENTRY;
        let offset = u64::from(word(at + 8)) | u64::from(word(at + 12)) << 32;
        RegionFile { region: RegionId(word(at)), file: Arc::new(file), offset }
    });
    Ok(BranchPoint::passed(state, regions.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    fn file() -> OwnedFd {
        rustix::fs::memfd_create("pass", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    fn inode(file: &OwnedFd) -> u64 {
        std::fs::File::from(file.try_clone().unwrap()).metadata().unwrap().ino()
    }

    fn point(count: u32) -> BranchPoint {
        let region = |id| RegionFile {
            region: RegionId(id),
            file: Arc::new(file()),
            offset: u64::from(id) * 0x1_2345_6000,
        };
        BranchPoint::passed(file(), (0..count).map(region).collect())
    }

    #[test]
    fn point_arrives_with_all_files() {
        for count in [1, 2, u32::try_from(MAX_REGIONS).unwrap()] {
            let (one, two) = UnixStream::pair().unwrap();
            let sent = point(count);
            sent.send(one.as_fd()).unwrap();
            let came = BranchPoint::receive(two.as_fd()).unwrap().unwrap();
            assert_eq!(inode(came.state()), inode(sent.state()));
            assert_eq!(came.regions().len(), count as usize);
            for (came, sent) in came.regions().iter().zip(sent.regions()) {
                assert_eq!((came.region, came.offset), (sent.region, sent.offset));
                assert_eq!(inode(&came.file), inode(&sent.file));
            }
            drop(one);
            assert!(BranchPoint::receive(two.as_fd()).unwrap().is_none());
        }
    }

    #[test]
    fn wrong_messages_are_errors() {
        let bytes = |change: fn(&mut Vec<u8>)| {
            let mut bytes = encode(point(1).regions());
            change(&mut bytes);
            <[u8; MESSAGE]>::try_from(bytes).unwrap()
        };
        let refused = |bytes: [u8; MESSAGE], files: usize| {
            decode(&bytes, (0..files).map(|_| file()).collect()).unwrap_err().to_string()
        };
        assert!(decode(&bytes(|_| ()), vec![file(), file()]).is_ok());
        assert!(refused(bytes(|_| ()), 1).contains("1 files were passed"));
        assert!(refused(bytes(|_| ()), 3).contains("3 files were passed"));
        assert!(refused(bytes(|bytes| bytes[8] = 0), 1).contains("0 regions"));
        assert!(refused(bytes(|bytes| bytes[8] = 65), 66).contains("65 regions"));
        assert!(refused(bytes(|bytes| bytes[7] = 2), 2).contains("of this version"));
    }

    #[test]
    fn part_of_a_message_is_an_error() {
        use std::io::Write;
        let (mut one, two) = UnixStream::pair().unwrap();
        one.write_all(&encode(point(1).regions())[..100]).unwrap();
        drop(one);
        let error = BranchPoint::receive(two.as_fd()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn only_unix_sockets_pass_files() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let error = point(1).send(socket.as_fd()).unwrap_err();
        assert!(error.to_string().contains("Unix socket"), "{error}");
    }
}
