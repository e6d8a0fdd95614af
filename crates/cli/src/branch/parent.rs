//! Branch in the process of the parent.

use super::{READY, ms};
use crate::api::{GuestPlace, RunContext};
use crate::guest::Machine;
use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;
use vmferry_engine::{BranchError, VmError, branch};

/// Longest time that a branch takes: the copy of the memory for a later branch, and the wait for the
/// children.
pub(crate) const LONGEST: Duration = Duration::from_secs(25);
/// Time for which the parent waits until the children are ready.
const CHILDREN: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// Arguments of `branch`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct BranchRequest {
    /// Name of the passed Unix socket over which the branch point is sent.
    fd: String,
}

/// Branches the guest, and sends the branch point over the socket that the request names.
pub(crate) fn order(machine: &mut Machine, shared: &RunContext, request: &BranchRequest) -> Result<Value> {
    shared.require_all_pages()?;
    let sockets = shared.descriptors.take(std::slice::from_ref(&request.fd))?;
    let socket = sockets.first().context("no descriptor was passed")?.as_fd();
    let branched = match branch(machine.source(), &mut || await_children(socket)) {
        Err(error @ BranchError::NotResumed(_)) => {
            shared.record_guest(GuestPlace::Paused);
            return Err(error.into());
        }
        branched => branched?,
    };
    branched.point.send(socket).context("the branch could not be passed to its children")?;
    // The children already run while the files are sealed.
    branched.point.seal()?;
    Ok(json!({
        "prepare_ms": ms(branched.prepare),
        "pause_ms": ms(branched.pause),
        "save_ms": ms(branched.save),
        "copy_ms": ms(branched.copy),
        "freeze_ms": ms(branched.freeze),
        "copied_pages": branched.copied_pages,
    }))
}

/// Waits until the client says that the children are ready.
fn await_children(socket: BorrowedFd<'_>) -> Result<(), VmError> {
    let read = || -> Result<()> {
        if poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&CHILDREN))? == 0 {
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
