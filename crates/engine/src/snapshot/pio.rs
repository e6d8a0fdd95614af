//! Reading from and writing to a file at an offset, directly into and from guest memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use vmferry_core::Window;

/// Writes all of `from` at byte `at` of the file.
pub(crate) fn write_at(file: &File, from: Window<'_>, at: u64) -> io::Result<()> {
    each(from.len(), at, io::ErrorKind::WriteZero, |done, at| {
        // SAFETY: `done` is at most the length of the window, whose bytes are mapped for as long as
        // the window lives. The kernel only reads the bytes, and a window allows other threads to
        // write them at the same time.
        unsafe {
            libc::pwrite(file.as_raw_fd(), from.as_ptr().add(done).cast_const().cast(), from.len() - done, at)
        }
    })
}

/// Fills all of `to` from byte `at` of the file on. Returns `UnexpectedEof` if the file ends before
/// `to` is full.
pub(super) fn read_at(file: &File, to: Window<'_>, at: u64) -> io::Result<()> {
    each(to.len(), at, io::ErrorKind::UnexpectedEof, |done, at| {
        // SAFETY: as in `write_at`. The mapping is writable (promise of `Window::new`), and no Rust
        // reference to it exists.
        unsafe { libc::pread(file.as_raw_fd(), to.as_ptr().add(done).cast(), to.len() - done, at) }
    })
}

/// Calls `call` with the number of bytes that are done and the next file offset, until `len` bytes
/// are done. `nothing` is the error if a call transfers no byte.
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

/// Tells the kernel that the `len` bytes from byte `at` on will be read soon.
pub(super) fn will_need(file: &File, at: u64, len: u64) {
    let (Ok(at), Ok(len)) = (libc::off_t::try_from(at), libc::off_t::try_from(len)) else { return };
    // SAFETY: the call takes no pointer. It is a hint, so its failure has no consequence.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), at, len, libc::POSIX_FADV_WILLNEED) };
}
