//! What the driver does so that the guest may run before its memory is here.

use super::super::lazy::Lazy;
use super::super::session::Event;
use super::Driver;
use crate::lacking::Collected;
use std::sync::Arc;
use vmferry_wire::{LackingPages, Refusal, RefusalCode};

impl Driver<'_> {
    pub(super) fn prepare_lazily(&mut self) -> Event {
        match self.vm.lazy_memory() {
            Ok(memory) => {
                self.lazy_memory = Some(memory);
                Event::Prepared
            }
            Err(error) => Event::LocalFailure(Refusal::new(RefusalCode::Feature, error.to_string())),
        }
    }

    pub(super) fn take_lacking(&mut self, piece: &LackingPages) -> Option<Event> {
        let wrong = self.lacking.add(piece).err()?;
        Some(Event::LocalFailure(Refusal::new(RefusalCode::Protocol, wrong)))
    }

    /// From here on memory is written by placing what was missing, and by the loading of the state.
    pub(super) fn begin_lazily(&mut self, pages: u64) -> Option<Event> {
        let failed = |code, detail: String| Some(Event::LocalFailure(Refusal::new(code, detail)));
        let empty = Collected::new(self.link.memory.layout());
        let lacking = match std::mem::replace(&mut self.lacking, empty).complete(pages) {
            Ok(lacking) => lacking,
            Err(wrong) => return failed(RefusalCode::Protocol, wrong),
        };
        let Some(memory) = self.lazy_memory.clone() else {
            return failed(
                RefusalCode::Protocol,
                "the source hands over a guest that it did not announce".into(),
            );
        };
        if !self.link.arrivals.seal_but_for(&lacking) {
            let detail = "a page that arrived damaged is not among those that are to come again";
            return failed(RefusalCode::Protocol, detail.into());
        }
        if let Err(error) = memory.begin(&lacking) {
            return failed(RefusalCode::Memory, format!("pages cannot be taken one by one: {error}"));
        }
        let all_here = lacking.is_empty();
        let mut lazy = Lazy::new(memory, &lacking, self.vm.config().vcpus);
        lazy.origin.stay_awake = self.arrival.stay_awake;
        let lazy = Arc::new(lazy);
        self.link.arrivals.go_on_lazily(Arc::clone(&lazy));
        match self.link.serve_faults() {
            Ok(threads) => self.fault_threads = threads,
            Err(error) => {
                return failed(RefusalCode::Other, format!("no thread for the guest's faults: {error}"));
            }
        }
        all_here.then(|| Event::AllHere(lazy.figures()))
    }
}
