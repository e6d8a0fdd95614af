//! Branch in the process of a child.

use super::{READY, tell};
use crate::advice;
use crate::api::RunContext;
use crate::guest::Machine;
use anyhow::{Context, Result, anyhow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use vmferry_engine::{BranchPoint, join_branch};

/// Interval at which the child checks whether it must end.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Says that the VM of this process is ready for a branch.
pub(crate) fn ready(socket: &OwnedFd) -> Result<()> {
    tell(socket, &[READY])
}

/// Waits for a branch, and lets its guest run in this process. Returns false if the process was
/// told to end meanwhile.
///
/// # Errors
/// If the guest cannot run. The command that started this process gets the reason.
pub(crate) fn arrive(socket: &OwnedFd, machine: &mut Machine, shared: &RunContext) -> Result<bool> {
    loop {
        if shared.quit.load(Ordering::Acquire) {
            return Ok(false);
        }
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&TICK)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => break,
            Err(error) => return Err(error).context("cannot wait for the branch"),
        }
    }
    let joined = join(socket, machine);
    let (told, result) = match joined {
        Ok(received) => {
            shared.set_received(received);
            (json!({}), Ok(true))
        }
        Err(error) => (json!({ "error": advice::told(&error) }), Err(error)),
    };
    // A command that has ended does not need the line.
    let _ = tell(socket, format!("{told}\n").as_bytes());
    result
}

fn join(socket: &OwnedFd, machine: &mut Machine) -> Result<Value> {
    let point = BranchPoint::receive(socket.as_fd()).context("cannot receive the branch")?;
    let point =
        point.ok_or_else(|| anyhow!("the parent was not branched; see the messages of the command"))?;
    Ok(serde_json::to_value(join_branch(machine.target(), &point)?)?)
}
