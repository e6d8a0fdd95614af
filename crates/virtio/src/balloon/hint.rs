//! Free page hinting (5.5.6.4): free pages that need not be sent.
//!
//! The host writes a command to the configuration. The driver puts the command that it answers into
//! the queue, as a readable buffer of 4 bytes. Free pages follow as writable buffers, and [`STOP`]
//! follows the last one. Hints for a command that is no longer current are ignored and counted,
//! because a driver can be late.

use super::control::{BalloonState, FIRST, STOP};
use super::metrics::add;
use crate::queue::Buffer;
use crate::runs::Gather;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// Processes a buffer of the hinting queue. `stream` is the command that the driver is answering.
pub(super) fn buffer<M: GuestMemory>(
    shared: &BalloonState,
    stream: &mut Option<u32>,
    gather: &mut Gather,
    buffer: &Buffer,
    memory: &M,
) {
    gather.clear();
    for part in buffer.parts() {
        if part.writable {
            if let Err(why) = gather.add(&shared.layout, part.gpa, part.len.into()) {
                shared.bad_range("hint", why);
            }
            continue;
        }
        // The hints before the command in this buffer belong to the previous command.
        pass_on(shared, *stream, gather);
        if part.len != 4 {
            shared.malformed("hints");
            return;
        }
        match memory.read_obj::<u32>(GuestAddress(part.gpa)).map(u32::from_le) {
            Ok(command) => begin(shared, stream, command),
            Err(_) => shared.malformed("hints"),
        }
    }
    pass_on(shared, *stream, gather);
}

/// Handles the driver's announcement of the command that it answers from now on.
fn begin(shared: &BalloonState, stream: &mut Option<u32>, command: u32) {
    if command == STOP {
        if let Some(ended) = stream.take() {
            shared.host.hints_end(ended);
        }
    } else if command >= FIRST && command == shared.command.load(Ordering::Acquire) {
        *stream = Some(command);
    } else {
        *stream = None;
        add(&shared.metrics.stale_hints, 1);
    }
}

fn pass_on(shared: &BalloonState, stream: Option<u32>, gather: &mut Gather) {
    let runs = gather.merged();
    if runs.is_empty() {
        return;
    }
    // The command may have changed since the driver named it, and may change after this check as
    // well. The ID is passed on with the hints, so that the host can compare it.
    match stream.filter(|command| *command == shared.command.load(Ordering::Acquire)) {
        Some(command) => {
            add(&shared.metrics.hinted_pages, runs.iter().map(|run| run.run.count).sum());
            shared.host.hinted(command, runs);
        }
        None => add(&shared.metrics.stale_hints, 1),
    }
    gather.clear();
}
