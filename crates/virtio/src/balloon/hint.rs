//! Free pages that need not be sent: free page hinting (5.5.6.4).
//!
//! The host sets a command in the configuration; the driver puts the command that it answers into the queue, as a readable buffer of 4
//! bytes, then free pages as writable buffers, then [`STOP`] when it has no more. A driver can be late: hints for a command that is no
//! longer the current one are ignored and counted.

use super::control::{FIRST, STOP, Shared};
use super::metrics::add;
use crate::queue::Buffer;
use crate::runs::Gather;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, GuestAddress, GuestMemory};

/// A buffer of the hinting queue. `stream` is the command that the driver answers at the moment.
pub(super) fn buffer<M: GuestMemory>(
    shared: &Shared,
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
        // What came before it in this buffer belongs to the command before.
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

/// The driver says what it answers from now on.
fn begin(shared: &Shared, stream: &mut Option<u32>, command: u32) {
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

fn pass_on(shared: &Shared, stream: Option<u32>, gather: &mut Gather) {
    let runs = gather.merged();
    if runs.is_empty() {
        return;
    }
    // The command may have changed since the driver named it. It may do so after this look as well: the id goes with the hints, for
    // which the host compares.
    match stream.filter(|command| *command == shared.command.load(Ordering::Acquire)) {
        Some(command) => {
            add(&shared.metrics.hinted_pages, runs.iter().map(|run| run.run.count).sum());
            shared.host.hinted(command, runs);
        }
        None => add(&shared.metrics.stale_hints, 1),
    }
    gather.clear();
}
