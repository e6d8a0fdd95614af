//! First accesses to memory that a child shares with its parent, by two ways to share it.
//!
//! Both ways map a memfd privately, so that a write copies the page. With [`Sharing::Private`], the
//! kernel serves the page faults. With [`Sharing::MinorFaults`], each page that is not mapped yet
//! raises a minor fault of userfaultfd, and a thread maps it and its neighbours
//! (`UFFDIO_CONTINUE`).

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vmferry_sys::uffd::{Event, Userfaultfd};

use crate::reaper::to_f64;

/// Size of the memory in bytes.
const BYTES: usize = 64 << 20;
/// Size of a page in bytes.
const PAGE: usize = 4096;
/// Bytes that are mapped for one fault, as many as the kernel maps around one.
const AROUND: u64 = 16 * PAGE as u64;
/// Feature of userfaultfd: minor faults in memfds (`UFFD_FEATURE_MINOR_SHMEM`).
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
/// Interval at which the thread that maps pages checks whether it must end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// Way to share memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    Private,
    MinorFaults,
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Private => "private-mapping",
            Self::MinorFaults => "minor-faults",
        })
    }
}

/// Mean times of the first accesses to the pages, in order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Touches {
    /// Time for each page that is read, in microseconds.
    pub(crate) read_us: f64,
    /// Time for each page that is written, in microseconds.
    pub(crate) write_us: f64,
}

/// Measures the accesses to memory whose pages are all present in the memfd.
pub(crate) fn measure(way: Sharing) -> io::Result<Touches> {
    let file = File::from(memfd_create("first-touch", MemfdFlags::CLOEXEC)?);
    ftruncate(&file, BYTES as u64)?;
    let block = vec![7; 1 << 20];
    for at in (0..BYTES).step_by(block.len()) {
        file.write_all_at(&block, at as u64)?;
    }
    let file = OwnedFd::from(file);
    let mean = |time: Duration| time.as_secs_f64() * 1e6 / to_f64((BYTES / PAGE) as u64);
    let reading = accessed(&file, way, |page| {
        // SAFETY: the page is mapped readable for as long as the mapping exists.
        let _ = unsafe { ptr::read_volatile(page) };
    })?;
    let writing = accessed(&file, way, |page| {
        // SAFETY: as above; the mapping is writable, and no reference to its bytes exists.
        unsafe { ptr::write_volatile(page, 9) };
    })?;
    Ok(Touches { read_us: mean(reading), write_us: mean(writing) })
}

/// Maps `file`, and returns the time that `access` to each page takes.
fn accessed(file: &OwnedFd, way: Sharing, access: impl Fn(*mut u8)) -> io::Result<Duration> {
    let mapping = Private::new(file)?;
    let all = || {
        let began = Instant::now();
        (0..BYTES).step_by(PAGE).for_each(|at| access(mapping.0.wrapping_add(at)));
        began.elapsed()
    };
    if way == Sharing::Private {
        return Ok(all());
    }
    let uffd = Userfaultfd::open(FEATURE_MINOR_SHMEM).map_err(io::Error::other)?;
    uffd.register_unmapped(mapping.span()).map_err(io::Error::other)?;
    let (ended, span) = (AtomicBool::new(false), mapping.span());
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let served = serve(&uffd, &span, &ended);
            if served.is_err() {
                // No thread waits for a page of memory that is not registered.
                let _ = uffd.unregister(span.clone());
            }
            served
        });
        let time = all();
        ended.store(true, Ordering::Release);
        serving.join().unwrap_or_else(|_| Err(io::Error::other("the thread that maps pages panicked")))?;
        Ok(time)
    })
}

/// Maps the pages of faults until `ended` is true.
fn serve(uffd: &Userfaultfd, span: &Range<u64>, ended: &AtomicBool) -> io::Result<()> {
    while !ended.load(Ordering::Acquire) {
        if poll(&mut [PollFd::new(uffd, PollFlags::IN)], Some(&LOOK))? == 0 {
            continue;
        }
        while let Some(event) = uffd.next_event().map_err(io::Error::other)? {
            let Event::Fault { address, .. } = event else { continue };
            let start = address / AROUND * AROUND;
            let run = start.max(span.start)..(start + AROUND).min(span.end);
            // SAFETY: no reference to the memory exists.
            let mapped = unsafe { uffd.map_present(run.clone()) };
            if mapped.is_err() {
                // A page of the run is mapped already. The one of the fault is not.
                let page = address..address + PAGE as u64;
                // SAFETY: as above.
                unsafe { uffd.map_present(page) }.map_err(io::Error::other)?;
            }
        }
    }
    Ok(())
}

/// Private mapping of a memfd, unmapped when dropped.
struct Private(*mut u8);

impl Private {
    fn new(file: &OwnedFd) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice changes no other mapping.
        let start = unsafe { mmap(ptr::null_mut(), BYTES, access, MapFlags::PRIVATE, file, 0)? };
        Ok(Self(start.cast()))
    }

    fn span(&self) -> Range<u64> {
        let start = self.0.addr() as u64;
        start..start + BYTES as u64
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: only this value owns the mapping.
        let _ = unsafe { munmap(self.0.cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_testkit::{Need, skip};

    #[test]
    fn both_ways_reach_all_pages() {
        assert!(measure(Sharing::Private).unwrap().write_us > 0.0);
        match measure(Sharing::MinorFaults) {
            Ok(touches) => assert!(touches.read_us > 0.0),
            Err(error) => skip(Need::Uffd, error),
        }
    }
}
