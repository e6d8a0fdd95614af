//! 16550 serial port at port 0x3f8. Each byte is an exit (17 us on the measured hosts), so lines
//! are short.

use crate::cpu::{in8, out8};
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering};

const DATA: u16 = 0x3f8;
const FIFO_CONTROL: u16 = DATA + 2;
const LINE_CONTROL: u16 = DATA + 3;
const LINE_STATUS: u16 = DATA + 5;
const TRANSMITTER_EMPTY: u8 = 0x20;

/// Number of bytes that the transmitter accepts at once.
const FIFO: usize = 16;

/// Number of reads of the status before the next bytes are sent anyway: a port without a device
/// must not stop the guest.
const PATIENCE: u32 = 1000;

/// Maximum length of a line. The rest is cut.
const LINE: usize = 256;

static BUSY: AtomicBool = AtomicBool::new(false);

/// Initializes the port: 8 bits, no parity, FIFOs on.
pub(crate) fn init() {
    out8(LINE_CONTROL, 0x03);
    out8(FIFO_CONTROL, 0x07);
}

/// Prints a line unless another vCPU is printing, because waiting for it would look like a stall.
/// Returns true if the line was printed.
pub(crate) fn try_line(line: fmt::Arguments<'_>) -> bool {
    if BUSY.swap(true, Ordering::Acquire) {
        return false;
    }
    send(line);
    BUSY.store(false, Ordering::Release);
    true
}

/// Prints a line, after waiting for other vCPUs.
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
    /// Length of the text, below `LINE`, so that there is room for the newline.
    len: usize,
}

impl Write for Buffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if self.len == LINE - 1 {
                return Err(fmt::Error);
            }
            // Newlines are replaced, so that one line stays one line whatever a command line
            // contains.
            self.bytes[self.len] = if byte == b'\n' { b' ' } else { byte };
            self.len += 1;
        }
        Ok(())
    }
}
