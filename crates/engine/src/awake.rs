//! Request to keep processors awake while a thread waits for pages.
//!
//! A remote fault wakes five threads in a row, on two hosts: the one that reads the fault, the one
//! that sends the page, the one that places it, and the vCPU, and between them the kernels' network
//! stacks. The processors are otherwise idle, so they fall asleep between two of these threads.
//! Waking a processor costs more than the work that follows: tens of microseconds from a deep
//! sleep, or if the processor is itself a vCPU that its host must schedule again. Linux lets a
//! process limit the wake-up latency (`Documentation/power/pm_qos_interface.rst`). A process that
//! may write `/dev/cpu_dma_latency` (by default root) may set the limit, so the file's permissions
//! are the consent of the host's owner.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;

/// Device of the request. A process writes a number of microseconds, and withdraws the request by
/// closing the file.
const DEVICE: &str = "/dev/cpu_dma_latency";
/// File with the name of the driver that puts processors to sleep.
const DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";

/// Allowed wake-up latency on hardware, in microseconds. It leaves the shallowest sleep (C1), which
/// frees a core's resources for its other hardware thread.
const SHALLOW: i32 = 2;
/// Allowed wake-up latency in a virtual machine. There is no shallow sleep: the only state behind
/// the guest's own polling returns the processor to the host.
const NONE: i32 = 0;

/// Opened device, without a request yet. The thread that starts another thread opens it, because
/// the other thread need not be able to open files.
#[derive(Debug, Default)]
pub(crate) struct LatencyRequest(Option<File>);

impl LatencyRequest {
    /// Opens the device. A refusal is not an error: threads that wait for pages then wait somewhat
    /// longer.
    pub(crate) fn open() -> Self {
        let opened = OpenOptions::new().write(true).open(DEVICE);
        if let Err(error) = &opened {
            tracing::debug!("processors are not kept awake for the guest's faults: {DEVICE}: {error}");
        }
        // The value is computed on this thread, because it needs to open a file, too.
        longest();
        Self(opened.ok())
    }

    /// Makes the request.
    pub(crate) fn hold(self) -> LatencyHold {
        let write = |mut request: File| request.write_all(&longest().to_ne_bytes()).map(|()| request);
        let written = self.0.map(write).transpose();
        if let Err(error) = &written {
            tracing::debug!("processors are not kept awake for the guest's faults: {DEVICE}: {error}");
        }
        LatencyHold { _request: written.ok().flatten() }
    }
}

/// Active request. While the value lives, waking a processor of this host takes microseconds, if
/// the host's owner permits the request.
#[derive(Debug, Default)]
pub(crate) struct LatencyHold {
    _request: Option<File>,
}

/// Returns the wake-up latency to request on this host, in microseconds.
fn longest() -> i32 {
    static LONGEST: OnceLock<i32> = OnceLock::new();
    *LONGEST.get_or_init(|| {
        let virtual_machine = std::fs::read_to_string(DRIVER).is_ok_and(|driver| driver.trim() == "haltpoll");
        if virtual_machine { NONE } else { SHALLOW }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use vmferry_testkit::{Need, skip};

    /// Returns the present limit of this host, in microseconds.
    fn limit() -> Option<i32> {
        let mut bytes = [0; 4];
        File::open(DEVICE).and_then(|mut file| file.read_exact(&mut bytes)).ok()?;
        Some(i32::from_ne_bytes(bytes))
    }

    #[test]
    fn wake_up_latency_is_limited_until_the_request_is_dropped() {
        let Some(before) = limit() else {
            return skip(Need::Root, format!("{DEVICE} cannot be read"));
        };
        let awake = LatencyRequest::open().hold();
        if awake._request.is_none() {
            return skip(Need::Root, format!("{DEVICE} cannot be written"));
        }
        assert!(limit().unwrap() <= SHALLOW);
        drop(awake);
        // Other processes may have requests as well. The one of this test is gone at least.
        assert!(limit().unwrap() >= before.min(SHALLOW));
    }
}
