//! Reading and writing a file at an offset, straight into and out of guest memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use vmferry_core::Window;

/// Writes all of `from` at byte `at`.
pub(super) fn write_at(file: &File, from: Window<'_>, at: u64) -> io::Result<()> {
    each(from.len(), at, io::ErrorKind::WriteZero, |done, at| {
        // SAFETY: `done` is at most the window's length, which is mapped for as long as the window lives; the kernel
        // only reads it, and that others may write it meanwhile is what a window says.
        unsafe {
            libc::pwrite(file.as_raw_fd(), from.as_ptr().add(done).cast_const().cast(), from.len() - done, at)
        }
    })
}

/// Fills all of `to` from byte `at`; `UnexpectedEof` if the file ends before.
pub(super) fn read_at(file: &File, to: Window<'_>, at: u64) -> io::Result<()> {
    each(to.len(), at, io::ErrorKind::UnexpectedEof, |done, at| {
        // SAFETY: as in `write_at`; the mapping is writable (promise of `Window::new`), and nobody holds a reference to it.
        unsafe { libc::pread(file.as_raw_fd(), to.as_ptr().add(done).cast(), to.len() - done, at) }
    })
}

/// Calls `call` with what is done and the offset that follows, until `len` bytes are done.
fn each(
    len: usize,
    at: u64,
    nothing: io::ErrorKind,
    call: impl Fn(usize, libc::off_t) -> isize,
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let offset = at.checked_add(done as u64).and_then(|at| libc::off_t::try_from(at).ok());
        let offset = offset.ok_or(io::ErrorKind::FileTooLarge)?;
        match usize::try_from(call(done, offset)) {
            Ok(0) => return Err(nothing.into()),
            Ok(moved) => done += moved,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}

/// Tells the kernel that these bytes will be read soon.
pub(super) fn will_need(file: &File, at: u64, len: u64) {
    let (Ok(at), Ok(len)) = (libc::off_t::try_from(at), libc::off_t::try_from(len)) else { return };
    // SAFETY: takes no pointer. A hint: its failure is nobody's loss.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), at, len, libc::POSIX_FADV_WILLNEED) };
}
