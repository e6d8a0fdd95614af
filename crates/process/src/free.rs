//! Free pages of the guest, which are the pages of its heap that are not in use.

use crate::heap::Heap;
use crate::ram::Ram;
use vmferry_core::{PageIndex, PageRun};
use vmferry_engine::{Answer, AnswerMode, FreePages, FreeReport, VmError};

/// Reader of the table in which the guest marks the free pages of its heap.
#[derive(Debug)]
pub(crate) struct FreeHeap {
    heap: Heap,
    ram: Ram,
    question: Option<u64>,
}

impl FreeHeap {
    pub(crate) fn new(heap: Heap, ram: Ram) -> Self {
        Self { heap, ram, question: None }
    }
}

impl FreePages for FreeHeap {
    fn answer_mode(&self) -> AnswerMode {
        AnswerMode::AtOnce
    }

    fn request(&mut self, question: u64) -> Result<(), VmError> {
        self.question = Some(question);
        Ok(())
    }

    fn poll(&mut self, report: &mut FreeReport) -> Result<Option<Answer>, VmError> {
        let Some(question) = self.question.take() else { return Ok(None) };
        self.heap.each_free(|page| {
            if let Some((region, page)) = self.ram.place(page) {
                report.add(region, PageRun::new(PageIndex(page), 1));
            }
        });
        Ok(Some(Answer { question, complete: true }))
    }

    fn stop(&mut self) {
        self.question = None;
    }
}
