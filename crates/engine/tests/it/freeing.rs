//! Free pages of the toy VM.

use crate::toy::Board;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU64, fence};
use std::time::{Duration, Instant};
use vmferry_core::{PageIndex, PageRun, RegionId};
use vmferry_engine::{Answer, AnswerMode, FreePages, FreeReport, VmError};

/// Way in which the toy VM answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FreeKind {
    /// At once, from a map.
    AtOnce,
    /// After this delay, with the pages that were free right after the question.
    After(Duration),
    /// After this delay, in two parts, and then again with all pages for a question that is closed.
    Repeats(Duration),
    /// Never.
    Never,
    /// With an error when it is asked.
    Fails,
    /// Once, and with an error after that.
    FailsLater,
    /// With memory that does not exist, in addition.
    Outside,
}

type Pages = Vec<(RegionId, u64)>;

pub(crate) struct Freeing {
    kind: FreeKind,
    board: Arc<Board>,
    stopped: Arc<AtomicU64>,
    open: Option<u64>,
    /// Future answers: time, number of the question, pages, and whether the answer is complete.
    coming: Vec<(Instant, u64, Pages, bool)>,
}

impl fmt::Debug for Freeing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl Freeing {
    pub(crate) fn new(kind: FreeKind, board: Arc<Board>, stopped: Arc<AtomicU64>) -> Self {
        Self { kind, board, stopped, open: None, coming: Vec::new() }
    }

    fn look(&self) -> Pages {
        fence(SeqCst);
        let free = self.board.rams.iter().flat_map(|ram| {
            (0..ram.region.pages()).filter(|page| ram.free.test(*page)).map(|page| (ram.region.id, page))
        });
        free.collect()
    }
}

impl FreePages for Freeing {
    fn answer_mode(&self) -> AnswerMode {
        match self.kind {
            FreeKind::AtOnce | FreeKind::Outside => AnswerMode::AtOnce,
            _ => AnswerMode::ByGuest,
        }
    }

    fn request(&mut self, question: u64) -> Result<(), VmError> {
        if self.kind == FreeKind::Fails {
            return Err(VmError::new("the guest has no balloon"));
        }
        self.open = Some(question);
        let now = Instant::now();
        match self.kind {
            FreeKind::After(delay) => self.coming.push((now + delay, question, self.look(), true)),
            FreeKind::Repeats(delay) => {
                let mut first = self.look();
                let second = first.split_off(first.len() / 2);
                self.coming.push((now + delay / 2, question, first, false));
                self.coming.push((now + delay, question, second, true));
                // Not sorted by time: an old answer comes again late, which is the purpose.
                self.coming.push((now + delay * 2, question, self.look(), true));
            }
            FreeKind::FailsLater => self.coming.push((now, question, self.look(), true)),
            _ => {}
        }
        Ok(())
    }

    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError> {
        let answer = match self.kind {
            FreeKind::AtOnce | FreeKind::Outside => self.open.map(|question| (question, self.look(), true)),
            _ => {
                let due = self.coming.iter().position(|(at, ..)| *at <= Instant::now());
                due.map(|at| self.coming.remove(at))
                    .map(|(_, question, pages, complete)| (question, pages, complete))
            }
        };
        if self.kind == FreeKind::FailsLater && answer.is_none() {
            return Err(VmError::new("the guest's balloon is gone"));
        }
        let Some((question, pages, complete)) = answer else { return Ok(None) };
        if self.kind == FreeKind::Outside {
            report.add(RegionId(77), PageRun::from(0..u64::MAX));
            report.add(RegionId(0), PageRun::from(u64::MAX - 5..u64::MAX));
            report.add_range(vmferry_core::Gpa(u64::MAX - 4096), u64::MAX);
        }
        for (region, page) in pages {
            report.add(region, PageRun::new(PageIndex(page), 1));
        }
        Ok(Some(Answer { question, complete }))
    }

    fn stop(&mut self) {
        if self.open.take().is_some() {
            self.stopped.fetch_add(1, Relaxed);
        }
    }
}
