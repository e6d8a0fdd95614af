//! The 16550 at port 0x3f8. Each byte is an exit (17 us on the hosts where it was measured), so lines are terse.

use crate::cpu::{in8, out8};
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

const DATA: u16 = 0x3f8;
const FIFO_CONTROL: u16 = DATA + 2;
const LINE_CONTROL: u16 = DATA + 3;
const LINE_STATUS: u16 = DATA + 5;
const TRANSMITTER_EMPTY: u8 = 0x20;

/// Bytes that the transmitter takes at once.
const FIFO: usize = 16;

/// Reads of the status before the next bytes are sent anyway: a port that nobody serves must not stop the guest.
const PATIENCE: u32 = 1000;

/// The longest line; the rest is cut.
const LINE: usize = 256;

static BUSY: AtomicBool = AtomicBool::new(false);

/// 8 bits, no parity, FIFOs on.
pub(crate) fn init() {
    out8(LINE_CONTROL, 0x03);
    out8(FIFO_CONTROL, 0x07);
}

/// Prints a line unless another vCPU is printing: waiting for it would look like a stall. Returns whether it was printed.
pub(crate) fn try_line(line: fmt::Arguments<'_>) -> bool {
    if BUSY.swap(true, Ordering::Acquire) {
        return false;
    }
    send(line);
    BUSY.store(false, Ordering::Release);
    true
}

/// Prints a line, after waiting for its turn.
pub(crate) fn line(line: fmt::Arguments<'_>) {
    while !try_line(line) {
        core::hint::spin_loop();
    }
}

/// Prints a line even if another vCPU never ends its own.
pub(crate) fn force(line: fmt::Arguments<'_>) {
    for _ in 0..1_000_000 {
        if try_line(line) {
            return;
        }
        core::hint::spin_loop();
    }
    send(line);
}

fn send(line: fmt::Arguments<'_>) {
    let mut buffer = Buffer { bytes: [0; LINE], len: 0 };
    // An error only means that the line was cut.
    let _ = buffer.write_fmt(line);
    buffer.bytes[buffer.len] = b'\n';
    for chunk in buffer.bytes[..=buffer.len].chunks(FIFO) {
        for _ in 0..PATIENCE {
            if in8(LINE_STATUS) & TRANSMITTER_EMPTY != 0 {
                break;
            }
        }
        for byte in chunk {
            out8(DATA, *byte);
        }
    }
}

struct Buffer {
    bytes: [u8; LINE],
    /// Below `LINE`: the newline has room.
    len: usize,
}

impl Write for Buffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if self.len == LINE - 1 {
                return Err(fmt::Error);
            }
            // One line is one line, whatever a command line contains.
            self.bytes[self.len] = if byte == b'\n' { b' ' } else { byte };
            self.len += 1;
        }
        Ok(())
    }
}
