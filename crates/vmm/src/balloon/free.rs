//! Answers to the engine's questions about free pages, from the guest's map or its driver.

use super::BalloonHandle;
use vmferry_core::PageSet;
use vmferry_engine::{Answer, AnswerMode, FreePages, FreeReport, VmError};
use vmferry_virtio::balloon::extension::MapError;

/// Source of free pages: the guest's map if the guest keeps one that fits its memory, otherwise
/// hints.
///
/// If the map becomes unusable during a migration, the source continues with hints. The open
/// question then ends with an empty answer. Hints are requested only by a question that the engine
/// asks afterwards, because the engine protects pages before it asks for hints.
///
/// A driver that gives hints keeps the named pages unused until it is told to use them again, and
/// may not name a page a second time before that. The engine therefore calls
/// [`stop`](FreePages::stop) at the end of each pass, which tells the driver.
#[derive(Debug)]
pub(crate) struct BalloonFree {
    balloon: BalloonHandle,
    answer_mode: AnswerMode,
    /// Open question, and the driver's ID for it.
    open: Option<(u64, u32)>,
    /// Scratch space.
    pages: PageSet,
}

impl BalloonFree {
    /// Returns `None` if the guest's driver does not report free pages, or relies on their content.
    /// A skipped page reads as zeros or as some earlier content. A guest that reads pages that it
    /// has freed (to find its poison, or zeros) would see this.
    pub(crate) fn new(balloon: BalloonHandle) -> Option<Self> {
        let answer_mode = if balloon.relies_on_free_pages() {
            return None;
        } else if balloon.keeps_map() {
            AnswerMode::AtOnce
        } else if balloon.gives_hints() {
            AnswerMode::ByGuest
        } else {
            return None;
        };
        let pages = PageSet::empty(balloon.layout());
        Some(Self { balloon, answer_mode, open: None, pages })
    }

    fn poll_map(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError> {
        let Some((question, _)) = self.open.take() else { return Ok(None) };
        self.pages.clear();
        match self.balloon.read_map(&mut self.pages) {
            Ok(_) => report.add_pages(&self.pages),
            Err(error) => self.continue_with_hints(error)?,
        }
        Ok(Some(Answer { question, complete: true }))
    }

    /// Changes to hints after the map could not be read because of `error`.
    ///
    /// # Errors
    /// Returns `error` if hints cannot replace the map.
    fn continue_with_hints(&mut self, error: MapError) -> Result<(), VmError> {
        let replaceable = matches!(error, MapError::None | MapError::Misfit { .. });
        if !replaceable || self.balloon.relies_on_free_pages() || !self.balloon.gives_hints() {
            return Err(VmError::new(error));
        }
        tracing::warn!("{error}; from now on, the guest is asked for hints");
        self.answer_mode = AnswerMode::ByGuest;
        Ok(())
    }

    fn poll_hints(&mut self, report: &mut FreeReport) -> Option<Answer> {
        let (question, command) = self.open?;
        let hints = self.balloon.take_hints(command, &mut self.pages)?;
        if hints.pages > 0 {
            report.add_pages(&self.pages);
            self.pages.clear();
        }
        (hints.pages > 0 || hints.ended).then_some(Answer { question, complete: hints.ended })
    }
}

impl FreePages for BalloonFree {
    fn answer_mode(&self) -> AnswerMode {
        self.answer_mode
    }

    fn request(&mut self, question: u64) -> Result<(), VmError> {
        // See `new`. The guest may have started another driver since the last question.
        if self.balloon.relies_on_free_pages() {
            return Err(VmError::new("the guest's driver relies on the content of free pages"));
        }
        let command = match self.answer_mode {
            AnswerMode::ByGuest => self.balloon.request_hints().map_err(VmError::new)?,
            _ => 0,
        };
        self.open = Some((question, command));
        Ok(())
    }

    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError> {
        match self.answer_mode {
            AnswerMode::ByGuest => Ok(self.poll_hints(report)),
            _ => self.poll_map(report),
        }
    }

    fn stop(&mut self) {
        if self.open.take().is_some() && self.answer_mode == AnswerMode::ByGuest {
            self.balloon.end_hints();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::plugged;
    use super::*;
    use crate::bus::MmioDevice;
    use crate::memory::GuestRam;
    use std::sync::Arc;
    use vm_memory::{Bytes, GuestAddress};
    use vmferry_core::{PageRun, RegionId};
    use vmferry_guest_abi::balloon::{FEATURE_FREE_MAP, free_map};
    use vmferry_virtio::balloon::feature::{FREE_PAGE_HINT, PAGE_POISON};
    use vmferry_virtio::runs::GuestRun;

    const PAGES: u64 = 2048;
    /// Feature bit of `VIRTIO_F_VERSION_1`.
    const VERSION_1: u32 = 32;

    /// Returns a balloon whose driver has accepted these features.
    fn balloon(features: &[u32]) -> (BalloonHandle, Arc<GuestRam>) {
        let (balloon, ram) = plugged(PAGES << 12);
        let write = |offset: u64, value: u32| balloon.device().write(offset, &value.to_le_bytes());
        for status in [1, 3] {
            write(0x70, status);
        }
        for bank in 0..4 {
            let of_bank = features.iter().chain([&VERSION_1]).filter(|bit| **bit / 32 == bank);
            write(0x24, bank);
            write(0x20, of_bank.fold(0, |bits, bit| bits | 1 << (bit % 32)));
        }
        for status in [11, 15] {
            write(0x70, status);
        }
        (BalloonHandle(Arc::new(balloon)), ram)
    }

    fn polled(free: &mut BalloonFree, report: &mut FreeReport) -> Option<Answer> {
        free.poll(report).unwrap()
    }

    #[test]
    fn map_is_read_at_once_and_once_per_question() {
        let (handle, ram) = balloon(&[FEATURE_FREE_MAP, FREE_PAGE_HINT]);
        let whole: u64 =
            crate::boot::whole_pages(ram.layout()).iter().map(|w| w.pages.end - w.pages.start).sum();
        // Only the last page of memory is free.
        let (gpa, last) = (0x20_0000, whole - 1);
        ram.map().write_obj(1u8 << (last % 8), GuestAddress(gpa + last / 8)).unwrap();
        handle.0.device().write(0x100 + free_map::PAGES, &whole.to_le_bytes());
        handle.0.device().write(0x100 + free_map::GPA, &gpa.to_le_bytes());
        let mut free = BalloonFree::new(handle.clone()).expect("a map");
        assert_eq!(free.answer_mode(), AnswerMode::AtOnce);
        let mut report = FreeReport::new(ram.layout());
        assert_eq!(polled(&mut free, &mut report), None);
        free.request(7).unwrap();
        assert_eq!(polled(&mut free, &mut report), Some(Answer { question: 7, complete: true }));
        assert!(report.pages().region(RegionId(0)).unwrap().bits().eq([PAGES - 1]));
        assert_eq!(polled(&mut free, &mut report), None);
    }

    #[test]
    fn unusable_map_is_replaced_by_hints() {
        let (handle, ram) = balloon(&[FEATURE_FREE_MAP, FREE_PAGE_HINT]);
        let map = |pages: u64, gpa: u64| {
            handle.0.device().write(0x100 + free_map::PAGES, &pages.to_le_bytes());
            handle.0.device().write(0x100 + free_map::GPA, &gpa.to_le_bytes());
        };
        let whole: u64 =
            crate::boot::whole_pages(ram.layout()).iter().map(|w| w.pages.end - w.pages.start).sum();
        for (pages, gpa) in [(whole + 1, 0x20_0000), (whole, 0x20_0008), (whole, 1 << 40)] {
            map(pages, gpa);
            let free = BalloonFree::new(handle.clone()).expect("hints");
            assert_eq!(free.answer_mode(), AnswerMode::ByGuest, "{pages} {gpa:#x}");
        }
        for (pages, gpa) in [(whole, 0), (whole + 1, 0x20_0000)] {
            map(whole, 0x20_0000);
            let mut free = BalloonFree::new(handle.clone()).expect("a map");
            free.request(1).unwrap();
            map(pages, gpa);
            let mut report = FreeReport::new(ram.layout());
            let answer = polled(&mut free, &mut report);
            assert_eq!(answer, Some(Answer { question: 1, complete: true }), "{pages} {gpa:#x}");
            assert_eq!((report.pages().count(), free.answer_mode()), (0, AnswerMode::ByGuest));
            free.request(2).unwrap();
            let (_, command) = free.open.unwrap();
            handle.0.hints.add(command, &[GuestRun { region: RegionId(0), run: PageRun::from(5..6) }]);
            handle.0.hints.end(command);
            assert_eq!(polled(&mut free, &mut report), Some(Answer { question: 2, complete: true }));
            assert_eq!(report.pages().count(), 1);
            free.stop();
        }
    }

    #[test]
    fn unusable_map_without_hints_is_an_error() {
        let (handle, ram) = balloon(&[FEATURE_FREE_MAP]);
        let whole: u64 =
            crate::boot::whole_pages(ram.layout()).iter().map(|w| w.pages.end - w.pages.start).sum();
        handle.0.device().write(0x100 + free_map::PAGES, &whole.to_le_bytes());
        handle.0.device().write(0x100 + free_map::GPA, &0x20_0000u64.to_le_bytes());
        let mut free = BalloonFree::new(handle.clone()).expect("a map");
        handle.0.device().write(0x100 + free_map::GPA, &0u64.to_le_bytes());
        free.request(1).unwrap();
        assert!(free.poll(&mut FreeReport::new(ram.layout())).is_err());
    }

    #[test]
    fn hints_arrive_in_parts_for_the_open_question() {
        let (handle, ram) = balloon(&[FREE_PAGE_HINT]);
        let mut free = BalloonFree::new(handle.clone()).expect("hints");
        assert_eq!(free.answer_mode(), AnswerMode::ByGuest);
        let mut report = FreeReport::new(ram.layout());
        let runs = |run| [GuestRun { region: RegionId(0), run: PageRun::from(run) }];
        free.request(1).unwrap();
        let (_, first) = free.open.unwrap();
        free.stop();
        free.request(2).unwrap();
        let (_, second) = free.open.unwrap();
        assert_ne!(first, second);
        handle.0.hints.add(first, &runs(0..9));
        assert_eq!(polled(&mut free, &mut report), None);
        handle.0.hints.add(second, &runs(100..164));
        assert_eq!(polled(&mut free, &mut report), Some(Answer { question: 2, complete: false }));
        handle.0.hints.add(second, &runs(200..201));
        handle.0.hints.end(second);
        assert_eq!(polled(&mut free, &mut report), Some(Answer { question: 2, complete: true }));
        assert!(report.pages().region(RegionId(0)).unwrap().runs().eq([100..164, 200..201]));
        free.stop();
        assert_eq!(polled(&mut free, &mut report), None);
    }

    #[test]
    fn guest_that_reads_freed_pages_is_not_asked() {
        for features in [&[][..], &[FREE_PAGE_HINT, PAGE_POISON], &[FEATURE_FREE_MAP]] {
            // The last guest has not published its map.
            assert!(BalloonFree::new(balloon(features).0).is_none(), "{features:?}");
        }
    }
}
