//! Processor time of a migrating process, without that of its guest.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::time::Duration;

/// Meter of the processor time that a process spends besides running its guest.
///
/// A busy vCPU thread uses a whole core whatever the migration does. Therefore the vCPU threads,
/// which are known by their names, are left out. The rest is the work of the migration and of the
/// device model. Threads that start and end between two samples are counted.
#[derive(Debug)]
pub struct CpuMeter {
    pid: u32,
    is_vcpu: fn(&str) -> bool,
    start: Sample,
}

/// Processor time that was used up to one moment.
#[derive(Debug)]
struct Sample {
    process: Duration,
    /// Time of each vCPU thread, by thread id.
    vcpus: BTreeMap<u32, Duration>,
}

impl CpuMeter {
    /// Starts to measure the process `pid`. Its vCPU threads are those whose names `is_vcpu`
    /// accepts.
    ///
    /// # Errors
    ///
    /// Fails if the times of the process cannot be read.
    pub fn start(pid: u32, is_vcpu: fn(&str) -> bool) -> io::Result<Self> {
        Ok(CpuMeter { pid, is_vcpu, start: sample(pid, is_vcpu)? })
    }

    /// Returns the user and system time since the start, without the vCPU threads.
    ///
    /// # Errors
    ///
    /// Fails if the process no longer exists.
    pub fn used(&self) -> io::Result<Duration> {
        let now = sample(self.pid, self.is_vcpu)?;
        let vcpus: Duration = now
            .vcpus
            .iter()
            .map(|(thread, used)| {
                used.saturating_sub(self.start.vcpus.get(thread).copied().unwrap_or_default())
            })
            .sum();
        Ok(now.process.saturating_sub(self.start.process).saturating_sub(vcpus))
    }
}

fn sample(pid: u32, is_vcpu: fn(&str) -> bool) -> io::Result<Sample> {
    let mut vcpus = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = entry?.path();
        let Some(thread) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) else { continue };
        // A thread that ends between the listing and the read is not a vCPU thread.
        let Ok(name) = fs::read_to_string(path.join("comm")) else { continue };
        if is_vcpu(name.trim_end()) {
            vcpus.insert(thread, thread_time(&fs::read_to_string(path.join("schedstat"))?)?);
        }
    }
    Ok(Sample { process: process_time(pid)?, vcpus })
}

/// Parses the first field of schedstat: nanoseconds on a processor
/// (Documentation/scheduler/sched-stats).
fn thread_time(schedstat: &str) -> io::Result<Duration> {
    schedstat
        .split_whitespace()
        .next()
        .and_then(|field| field.parse().ok())
        .map(Duration::from_nanos)
        .ok_or_else(|| io::Error::other(format!("schedstat reads {schedstat:?}")))
}

/// Returns the time of all threads of a process, including ended ones, in nanoseconds.
///
/// /proc/PID/stat counts only in ticks of 10 ms.
fn process_time(pid: u32) -> io::Result<Duration> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    let mut clock: libc::clockid_t = 0;
    // SAFETY: `clock` is a valid place for the id, which is all that the call writes.
    let status = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
    if status != 0 {
        return Err(io::Error::from_raw_os_error(status));
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec for the call to fill in.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).map_err(io::Error::other)?;
    let nanos = u32::try_from(time.tv_nsec).map_err(io::Error::other)?;
    Ok(Duration::new(seconds, nanos))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::time::{ClockId, clock_gettime};

    /// Uses `span` of processor time on this thread, however long the thread has to wait for a
    /// processor.
    fn burn(span: Duration) {
        let used = || {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap())
        };
        let end = used() + span;
        while used() < end {
            std::hint::spin_loop();
        }
    }

    /// Runs `work` on a thread named `name`, and calls `look` while the thread still exists.
    fn on_thread<T>(name: &str, work: impl FnOnce() + Send, look: impl FnOnce() -> T) -> T {
        let (done, worked) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name(name.into())
                .spawn_scoped(scope, move || {
                    work();
                    done.send(()).unwrap();
                    let _ = released.recv();
                })
                .unwrap();
            worked.recv().unwrap();
            let seen = look();
            drop(release);
            seen
        })
    }

    #[test]
    fn counts_threads_but_not_vcpus() {
        // Other tests of this process run at the same time, so the test runs in a separate process.
        if std::env::var_os("VMFERRY_CPU_TEST").is_none() {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "cpu::tests::counts_threads_but_not_vcpus", "--test-threads=1"])
                .env("VMFERRY_CPU_TEST", "1")
                .stdout(std::process::Stdio::null())
                .status()
                .unwrap();
            assert!(status.success());
            return;
        }
        let meter = CpuMeter::start(std::process::id(), |name| name == "CPU 0/KVM").unwrap();
        let used = on_thread("sender", || burn(Duration::from_millis(100)), || meter.used().unwrap());
        assert!(used >= Duration::from_millis(100), "{used:?}");
        let meter = CpuMeter::start(std::process::id(), |name| name == "CPU 0/KVM").unwrap();
        let used_by_vcpu =
            on_thread("CPU 0/KVM", || burn(Duration::from_millis(100)), || meter.used().unwrap());
        assert!(used_by_vcpu < Duration::from_millis(20), "{used_by_vcpu:?}");
    }

    #[test]
    fn missing_process_and_malformed_schedstat_are_errors() {
        assert!(CpuMeter::start(u32::MAX, |_| false).is_err());
        assert!(thread_time("").is_err());
        assert!(thread_time("x 1 2").is_err());
    }
}
