//! Start of a guest before all of its memory has arrived.

use super::super::channels::Link;
use super::super::session::Event;
use super::super::urgent::{DemandPager, UrgentChannels};
use crate::missing_pages::CollectedPages;
use std::sync::Arc;
use std::thread::JoinHandle;
use vmferry_core::{DemandPaging, Layout, TargetVm};
use vmferry_wire::{MissingPages, Refusal, RefusalCode};

/// Missing pages, from the messages that name them to the threads that serve the guest's faults.
pub(super) struct Handover {
    /// Memory that takes pages while the guest runs. `None` before such a guest was announced.
    memory: Option<Arc<dyn DemandPaging>>,
    /// Pages that the source has named so far.
    missing: CollectedPages,
    threads: Vec<JoinHandle<()>>,
}

fn failed(code: RefusalCode, detail: impl Into<String>) -> Event {
    Event::LocalFailure(Refusal::new(code, detail.into()))
}

impl Handover {
    pub(super) fn new(layout: &Layout) -> Self {
        Self { memory: None, missing: CollectedPages::new(layout), threads: Vec::new() }
    }

    /// Checks that the VM can take pages while the guest runs.
    pub(super) fn prepare(&mut self, vm: &mut dyn TargetVm) -> Event {
        match vm.demand_paging() {
            Ok(memory) => {
                self.memory = Some(memory);
                Event::Prepared
            }
            Err(error) => failed(RefusalCode::Feature, error.to_string()),
        }
    }

    /// Adds pages that the source names as missing.
    pub(super) fn add(&mut self, piece: &MissingPages) -> Option<Event> {
        let wrong = self.missing.add(piece).err()?;
        Some(failed(RefusalCode::Protocol, wrong))
    }

    /// Begins demand paging after all `pages` missing pages were named. From here on memory is
    /// written only by placing missing pages and by loading the state.
    pub(super) fn begin(
        &mut self,
        link: &mut Link,
        vm: &dyn TargetVm,
        stay_awake: bool,
        pages: u64,
    ) -> Option<Event> {
        let empty = CollectedPages::new(link.memory.layout());
        let missing = match std::mem::replace(&mut self.missing, empty).complete(pages) {
            Ok(missing) => missing,
            Err(wrong) => return Some(failed(RefusalCode::Protocol, wrong)),
        };
        let Some(memory) = self.memory.clone() else {
            let detail = "the source hands over a guest that it did not announce";
            return Some(failed(RefusalCode::Protocol, detail));
        };
        if !link.arrivals.seal_but_for(&missing) {
            let detail = "a page with a digest mismatch is not among the missing pages";
            return Some(failed(RefusalCode::Protocol, detail));
        }
        if let Err(error) = memory.begin(&missing) {
            return Some(failed(RefusalCode::Memory, format!("demand paging cannot begin: {error}")));
        }
        let all_arrived = missing.is_empty();
        let source = UrgentChannels::new(stay_awake);
        let pager = Arc::new(DemandPager::new(source, memory, &missing, vm.config().vcpus));
        pager.pages.hold(Arc::clone(&link.memory));
        link.arrivals.go_on_with(Arc::clone(&pager));
        match link.serve_faults() {
            Ok(threads) => self.threads = threads,
            Err(error) => {
                let detail = format!("a thread for the guest's faults could not be started: {error}");
                return Some(failed(RefusalCode::Other, detail));
            }
        }
        all_arrived.then(|| Event::MissingArrived(pager.pages.figures()))
    }

    /// Returns the threads that serve the guest's faults.
    pub(super) fn take_threads(&mut self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut self.threads)
    }
}
