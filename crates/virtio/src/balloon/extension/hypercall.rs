//! Reports of free blocks by a hypercall.

use super::super::control::BalloonState;
use super::super::report;
use crate::runs::Gather;
use vm_memory::{Bytes, GuestAddress, GuestMemory};
use vmferry_guest_abi::balloon::{REPORT_ENTRIES, reported};

/// Processes the page of reports at `gpa`.
pub(super) fn report<M: GuestMemory>(shared: &BalloonState, memory: &M, gpa: u64) {
    let mut page = [0; REPORT_ENTRIES * 8];
    if memory.read_slice(&mut page, GuestAddress(gpa)).is_err() {
        shared.malformed("reports");
        return;
    }
    let mut gather = Gather::default();
    for entry in page.as_chunks().0.iter().map(|entry| u64::from_le_bytes(*entry)).filter(|e| *e != 0) {
        match reported(entry) {
            Some(range) => {
                if let Err(why) = gather.add(&shared.layout, range.gpa, range.len) {
                    shared.bad_range("report", why);
                }
            }
            None => shared.malformed("reports"),
        }
    }
    report::give_back(shared, &mut gather);
}
