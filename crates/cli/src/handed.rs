//! Descriptors that a process hands to its successor over a socket (`SCM_RIGHTS`, unix(7)): the
//! taps of its guest, which only one process can open at a time, and the listening socket of its
//! metrics.
//!
//! Both processes have these descriptors until the old process ends. The device of the guest that
//! does not run in a process does not read its tap, and frames that arrive while no device reads
//! stay in the tap.

use crate::api::{Client, RunContext};
use anyhow::{Context, Result, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Most descriptors that are handed over: those of all devices that fit into a machine.
const MOST: usize = 64;
/// Longest wait for the descriptors. They are in the socket before the answer of the process.
const PATIENCE: Duration = Duration::from_secs(5);

/// Arguments of `x-vmferry-pass-descriptors`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PassArguments {
    /// Name of the socket over which the descriptors are sent (`getfd`).
    fdname: String,
}

/// Answer to `x-vmferry-pass-descriptors`. The descriptors arrive in the order of the fields.
#[derive(Debug, Serialize, Deserialize)]
struct PassAnswer {
    /// Number of taps, in the order of the guest's network interfaces.
    taps: usize,
    /// True if the listening socket of the metrics follows.
    metrics: bool,
}

/// Descriptors of a running process.
#[derive(Debug, Default)]
pub(crate) struct Handed {
    /// Taps, in the order of the guest's network interfaces.
    pub(crate) taps: Vec<OwnedFd>,
    /// Listening socket of the metrics.
    pub(crate) metrics: Option<OwnedFd>,
}

impl RunContext {
    /// Executes `x-vmferry-pass-descriptors`.
    pub(crate) fn pass_descriptors(&self, arguments: &Value) -> Result<Value> {
        let PassArguments { fdname } = serde_json::from_value(arguments.clone())?;
        let [socket] = <[OwnedFd; 1]>::try_from(self.descriptors.take(&[fdname])?)
            .map_err(|_| anyhow::anyhow!("the socket was not passed"))?;
        let taps = self.probe.kvm().map(|vm| vm.taps()).unwrap_or_default();
        let metrics = self.metrics.get().map(AsFd::as_fd);
        let answer = PassAnswer { taps: taps.len(), metrics: metrics.is_some() };
        let all: Vec<_> = taps.into_iter().chain(metrics).collect();
        if !all.is_empty() {
            send(&socket, &all).context("cannot pass the descriptors")?;
        }
        Ok(json!(answer))
    }
}

/// Sends `descriptors` over `socket`, which is new and empty.
pub(crate) fn send(socket: &OwnedFd, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ensure!(
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors)),
        "{} descriptors are more than {MOST}",
        descriptors.len()
    );
    // The socket is new, so there is room for one byte.
    sendmsg(socket, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

impl Handed {
    /// Returns the descriptors of the process that `client` is connected to.
    ///
    /// # Errors
    /// If the process does not pass them.
    pub(crate) fn ask(client: &mut Client) -> Result<Self> {
        let (answer, own) = call(client, "pass-descriptors")?;
        let PassAnswer { taps, metrics } = serde_json::from_value(answer)?;
        let count = taps + usize::from(metrics);
        if count == 0 {
            return Ok(Self::default());
        }
        let mut all = receive(&own)?;
        if all.len() != count {
            bail!("{} descriptors came instead of {count}", all.len());
        }
        let metrics = if metrics { all.pop() } else { None };
        Ok(Self { taps: all, metrics })
    }

    /// Returns all descriptors, for a process that inherits them.
    pub(crate) fn all(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.taps.iter().chain(&self.metrics).map(AsFd::as_fd)
    }
}

/// Sends `command` with a socket for descriptors. Returns the answer, and the socket from which the
/// descriptors are [received](receive).
pub(crate) fn call(client: &mut Client, command: &str) -> Result<(Value, UnixStream)> {
    let (own, other) = UnixStream::pair().context("cannot create a pair of sockets")?;
    own.set_read_timeout(Some(PATIENCE))?;
    let name = format!("vmferry-{}-{command}", std::process::id());
    client.pass(&name, other.as_fd())?;
    drop(other);
    let answer = client.call(command, json!({ "fdname": name })).inspect_err(|_| {
        // A process that has refused the command still has the socket.
        let _ = client.close(&name);
    })?;
    Ok((answer, own))
}

/// Returns the descriptors that [`send`] has sent to `socket`.
pub(crate) fn receive(socket: &UnixStream) -> Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let passed = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(passed.flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_arrive_in_their_order() {
        let (one, other) = UnixStream::pair().unwrap();
        let pipes: Vec<_> = (0..3).map(|_| std::io::pipe().unwrap()).collect();
        let sent: Vec<_> = pipes.iter().map(|(reader, _)| reader.as_fd()).collect();
        send(&OwnedFd::from(one), &sent).unwrap();
        let received = receive(&other).unwrap();
        let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
        let inodes: Vec<_> = received.iter().map(|fd| inode(fd.as_fd())).collect();
        assert_eq!(inodes, sent.iter().map(|fd| inode(*fd)).collect::<Vec<_>>());
    }
}
