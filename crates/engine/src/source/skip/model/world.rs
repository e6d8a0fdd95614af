//! State of the model, and the environment that the shipped code runs in.

use crate::source::session::Session;
use crate::source::skip::SkippingState;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};
use vmferry_bitmap::Bitmap;
use vmferry_core::{
    Answer, AnswerMode, FreePages, FreeReport, Gpa, Layout, PageRun, PageSet, Protect, Region, RegionId,
    VmError,
};

pub(super) const PAGES: usize = 2;
pub(super) const REGION: RegionId = RegionId(0);

/// A set of pages as a bit mask.
pub(super) type Mask = u64;

pub(super) fn region() -> Region {
    Region { id: REGION, gpa: Gpa(0), len: (PAGES as u64) << 12 }
}

pub(super) fn layout() -> Layout {
    Layout::new(vec![region()]).expect("one region")
}

pub(super) fn set_of(mask: Mask) -> PageSet {
    let mut set = PageSet::empty(&layout());
    set.region_mut(REGION).expect("the one region").union_word(0, mask);
    set
}

pub(super) fn mask_of(set: &PageSet) -> Mask {
    set.region(REGION).expect("the one region").word(0)
}

/// Use of a page by the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Use {
    Free,
    /// The page is not free any more, and was not written since.
    Taken,
    Used,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Page {
    pub(super) used: Use,
    pub(super) content: u8,
    pub(super) protected: bool,
    pub(super) marked: bool,
    /// Content that the target has.
    pub(super) copy: u8,
}

/// Question to the guest, and its answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Questions {
    pub(super) open: Option<u64>,
    /// Question that the guest is answering, the next page that it examines, and the pages that it
    /// has found free so far.
    pub(super) walk: Option<(u64, usize, Mask)>,
    pub(super) answers: Vec<(u64, Mask)>,
}

/// Sets of [`PendingPages`], and those of the current pass with the number of pages that it began
/// with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Sets {
    pub(super) next: Mask,
    pub(super) skipped: Mask,
    pub(super) pass: Option<(Mask, Mask, u64)>,
}

/// Step of the channel's thread with the page that it has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ChannelStep {
    Taken(usize),
    Protected(usize),
    Read(usize, u8),
}

/// Next step of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Todo {
    Harvest,
    Pause,
    Save,
    Send,
    Resume,
}

#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) pages: [Page; PAGES],
    pub(super) said: Questions,
    pub(super) sets: Sets,
    pub(super) kept: SkippingState,
    pub(super) session: Session,
    /// Hash of the session's debug output, which tells two sessions apart.
    pub(super) session_key: u64,
    pub(super) todo: Vec<Todo>,
    pub(super) channel_step: Option<ChannelStep>,
    /// Pass that the channel sends, until it has reported the end of the pass.
    pub(super) sending: Option<u32>,
    pub(super) paused: bool,
    pub(super) operations: u8,
    pub(super) live_passes: u8,
    pub(super) late: bool,
    pub(super) ended: Option<bool>,
}

impl World {
    /// Returns all that tells two states apart.
    fn key(&self) -> impl Hash + PartialEq + use<> {
        let kept = (
            self.kept.state,
            self.kept.question,
            mask_of(&self.kept.worth.pages(&set_of(0))),
            self.kept.round,
        );
        let steps = (self.todo.clone(), self.channel_step, self.sending, self.paused);
        let counts = (self.operations, self.live_passes, self.late, self.ended);
        (self.pages, self.said.clone(), self.sets.clone(), kept, steps, counts, self.session_key)
    }
}

impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl PartialEq for World {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

#[derive(Debug)]
pub(super) struct Source {
    pub(super) answer_mode: AnswerMode,
    /// Free pages, as a source that answers at once reads them.
    pub(super) free: Mask,
    pub(super) said: Arc<Mutex<Questions>>,
}

impl FreePages for Source {
    fn answer_mode(&self) -> AnswerMode {
        self.answer_mode
    }

    fn request(&mut self, question: u64) -> Result<(), VmError> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).open = Some(question);
        Ok(())
    }

    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError> {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let (question, free) = match self.answer_mode {
            AnswerMode::AtOnce => match said.open {
                Some(question) => (question, self.free),
                None => return Ok(None),
            },
            AnswerMode::ByGuest if said.answers.is_empty() => return Ok(None),
            AnswerMode::ByGuest => said.answers.remove(0),
        };
        report.add_pages(&set_of(free));
        Ok(Some(Answer { question, complete: true }))
    }

    fn stop(&mut self) {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).open = None;
    }
}

pub(super) struct Tracker<'a>(pub(super) Mutex<&'a mut [Page; PAGES]>);

impl Protect for Tracker<'_> {
    fn protect(&self, _: RegionId, chunk: PageRun, pages: &Bitmap) -> Result<(), VmError> {
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for page in pages.bits_in(chunk.range()) {
            let page = &mut own[usize::try_from(page).expect("a few pages")];
            (page.protected, page.marked) = (true, false);
        }
        Ok(())
    }
}
