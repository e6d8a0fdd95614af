//! Sockets of the proxy: TCP, and Unix sockets with the descriptors that pass over them
//! (`SCM_RIGHTS`, unix(7)).

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use vmferry_core::MAX_REGIONS;
use vmferry_engine::Uri;

/// Size of the buffer for the descriptors of one message.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_REGIONS));

fn unsupported(uri: &Uri) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, format!("no proxy for {uri}"))
}

/// Connected socket.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    pub(super) fn connect(uri: &Uri) -> io::Result<Self> {
        match uri {
            Uri::Tcp { host, port } => Self::tcp(TcpStream::connect((host.as_str(), *port))?),
            Uri::Unix(path) => Ok(Self(UnixStream::connect(path)?.into())),
            other => Err(unsupported(other)),
        }
    }

    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self(stream.into()))
    }

    pub(super) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Receives bytes, and the descriptors that came with the last of them.
    pub(super) fn receive(&self, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut room = [IoSliceMut::new(bytes)];
            match recvmsg(&self.0, &mut room, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                received => break received?,
            }
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                descriptors.extend(passed);
            }
        }
        Ok((received.bytes, descriptors))
    }

    /// Sends all bytes. The descriptors go with the first of them.
    pub(super) fn send(&self, mut bytes: &[u8], mut descriptors: &[OwnedFd]) -> io::Result<()> {
        while !bytes.is_empty() {
            let passed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            let mut space = [MaybeUninit::uninit(); SPACE];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !passed.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&passed)) {
                return Err(io::Error::other("too many descriptors"));
            }
            match sendmsg(&self.0, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
                Err(rustix::io::Errno::INTR) => {}
                sent => {
                    bytes = bytes.get(sent?..).unwrap_or_default();
                    descriptors = &[];
                }
            }
        }
        Ok(())
    }

    /// Tells the peer that no more bytes follow.
    pub(super) fn end(&self) {
        let _ = shutdown(&self.0, Shutdown::Write);
    }

    /// Ends the connection in both directions.
    pub(super) fn shutdown(&self) {
        let _ = shutdown(&self.0, Shutdown::Both);
    }
}

/// Listening socket.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub(super) fn bind(uri: &Uri) -> io::Result<Self> {
        match uri {
            Uri::Tcp { host, port } => TcpListener::bind((host.as_str(), *port)).map(Self::Tcp),
            Uri::Unix(path) => UnixListener::bind(path).map(Self::Unix),
            other => Err(unsupported(other)),
        }
    }

    /// Returns the address at which a source connects.
    pub(super) fn uri(&self) -> io::Result<Uri> {
        match self {
            Self::Tcp(listener) => {
                let at = listener.local_addr()?;
                Ok(Uri::Tcp { host: at.ip().to_string(), port: at.port() })
            }
            Self::Unix(listener) => {
                let at = listener.local_addr()?;
                let path = at.as_pathname().ok_or(io::ErrorKind::AddrNotAvailable)?;
                Ok(Uri::Unix(path.to_owned()))
            }
        }
    }

    pub(super) fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => Socket::tcp(listener.accept()?.0),
            Self::Unix(listener) => Ok(Socket(listener.accept()?.0.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn descriptors_pass_with_the_first_byte_that_they_are_sent_with() {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&Uri::Unix(folder.path().join("link"))).unwrap();
        let from = Socket::connect(&listener.uri().unwrap()).unwrap();
        let into = listener.accept().unwrap();
        let file = tempfile::tempfile().unwrap();
        let inode = file.metadata().unwrap().ino();
        from.send(b"before", &[]).unwrap();
        from.send(b"with", &[file.into()]).unwrap();
        from.send(b"after", &[]).unwrap();
        from.end();
        let (mut all, mut buffer, mut passed) = (Vec::new(), [0; 64], Vec::new());
        while let Ok((read @ 1.., descriptors)) = into.receive(&mut buffer) {
            all.extend(&buffer[..read]);
            if !descriptors.is_empty() {
                // Bytes that are sent later do not come with them.
                assert!(all.ends_with(b"with"), "{all:?}");
            }
            passed.extend(descriptors);
        }
        assert_eq!(all, b"beforewithafter");
        let inodes: Vec<_> =
            passed.into_iter().map(|fd| std::fs::File::from(fd).metadata().unwrap().ino()).collect();
        assert_eq!(inodes, [inode]);
    }
}
