//! Request to keep processors awake while a thread waits for pages.
//!
//! A remote fault wakes several threads in a row, on two hosts: the thread that reads the fault,
//! the thread that sends the page, the thread that places the page, and the vCPU. Between them, it
//! wakes the network stacks of both kernels. The processors are otherwise idle, so they fall asleep
//! between two of these threads. Waking a processor takes longer than the work that follows: tens
//! of microseconds if the sleep is deep, or if the processor is itself a vCPU that its host must
//! schedule again.
//!
//! Linux lets a process limit the wake-up latency (`Documentation/power/pm_qos_interface.rst`), if
//! the process may write `/dev/cpu_dma_latency`. By default only root may do so. The owner of the
//! host therefore decides about the limit through the permissions of this file.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;

/// Device that takes the request. A process writes the allowed latency in microseconds, and
/// withdraws the request by closing the file.
const DEVICE: &str = "/dev/cpu_dma_latency";
/// File with the name of the driver that puts processors to sleep.
const DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";

/// Allowed wake-up latency on hardware, in microseconds. This value still allows the shallowest
/// sleep (C1), which frees the resources of a core for its other hardware thread.
const SHALLOW: i32 = 2;
/// Allowed wake-up latency in a virtual machine, in microseconds. A virtual machine has no shallow
/// sleep: the only state other than polling returns the processor to the host.
const NONE: i32 = 0;

/// Opened device, without a request yet. A thread opens the device before it starts the thread that
/// makes the request, because the other thread may not be allowed to open files.
#[derive(Debug, Default)]
pub(crate) struct LatencyRequest(Option<File>);

impl LatencyRequest {
    /// Opens the device. If the kernel refuses, the value makes no request, and threads wait
    /// somewhat longer for pages.
    pub(crate) fn open() -> Self {
        let opened = OpenOptions::new().write(true).open(DEVICE);
        if let Err(error) = &opened {
            tracing::debug!("processors are not kept awake for the guest's faults: {DEVICE}: {error}");
        }
        // Computed on this thread, because finding the value opens a file, too.
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

/// Active request. While the value lives, waking a processor of this host takes only microseconds,
/// if the owner of the host permits the request.
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
