//! Branch in the process of the parent.

use super::{FAILED, POINT, READY, files, ms, tell};
use crate::advice;
use crate::api::{GuestPlace, RunContext};
use crate::guest::Machine;
use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::SyncSender;
use vmferry_engine::{BranchError, VmError, branch};

/// Time for which the parent waits until the children are ready.
const CHILDREN: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// Arguments of `branch`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct BranchRequest {
    /// Name of the passed Unix socket over which the branch point is sent.
    fd: String,
    /// Number of files for copies of the disks, which the client passes over the socket first.
    #[serde(default)]
    disks: usize,
}

/// Branches the guest. The client gets its answer when the branch has begun, and the result over
/// the socket that the request names.
pub(crate) fn order(
    machine: &mut Machine,
    shared: &RunContext,
    request: &BranchRequest,
    reply: &SyncSender<Result<Value, String>>,
) {
    let socket = match take(shared, request) {
        Ok(socket) => {
            let _ = reply.send(Ok(json!({})));
            socket
        }
        Err(error) => {
            let _ = reply.send(Err(advice::told(&error)));
            return;
        }
    };
    let done = perform(machine, shared, request, &socket);
    // A later branch must not change the disks of these children.
    machine.set_disk_copies(Vec::new());
    if let Err(error) = done {
        tracing::warn!("a branch failed: {error:#}");
        let line = format!("{}\n", json!({ "error": advice::told(&error) }));
        // A client that has ended does not need the reason.
        let _ = tell(&socket, &[FAILED]).and_then(|()| tell(&socket, line.as_bytes()));
    }
}

fn take(shared: &RunContext, request: &BranchRequest) -> Result<OwnedFd> {
    shared.require_all_pages()?;
    let mut sockets = shared.descriptors.take(std::slice::from_ref(&request.fd))?;
    sockets.pop().context("no descriptor was passed")
}

/// Branches the guest, and sends the branch point and the times over `socket`.
fn perform(
    machine: &mut Machine,
    shared: &RunContext,
    request: &BranchRequest,
    socket: &OwnedFd,
) -> Result<()> {
    if request.disks > 0 {
        machine.set_disk_copies(files::receive(socket.as_fd(), request.disks)?);
    }
    let mut branched = match branch(machine.source(), &mut || await_children(socket.as_fd())) {
        Err(error @ BranchError::NotResumed(_)) => {
            shared.record_guest(GuestPlace::Paused);
            return Err(error.into());
        }
        branched => branched?,
    };
    tell(socket, &[POINT])?;
    branched.point.send(socket.as_fd()).context("the branch could not be passed to its children")?;
    // The children already run while the old mappings are removed and the files are sealed.
    let sealed = branched.seal();
    let mut figures = json!({
        "prepare_ms": ms(branched.prepare),
        "pause_ms": ms(branched.pause),
        "save_ms": ms(branched.save),
        "disks_ms": ms(branched.disks),
        "copy_ms": ms(branched.copy),
        "freeze_ms": ms(branched.freeze),
        "copied_pages": branched.copied_pages,
    });
    if let Err(error) = sealed {
        figures = json!({ "error": advice::told(&error.into()) });
    }
    tell(socket, format!("{figures}\n").as_bytes())
}

/// Waits until the client says that the children are ready.
fn await_children(socket: BorrowedFd<'_>) -> Result<(), VmError> {
    let read = || -> Result<()> {
        // A signal begins the wait again. The command limits the time as a whole.
        let ready = retry_on_intr(|| poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&CHILDREN)))?;
        if ready == 0 {
            bail!("the children were not ready in time");
        }
        let mut byte = [0];
        match rustix::io::read(socket, &mut byte)? {
            1 if byte == [READY] => Ok(()),
            0 => bail!("the command that starts the children has ended"),
            _ => bail!("the command that starts the children sent something unexpected"),
        }
    };
    read().map_err(|error| VmError::new(error.to_string()))
}
