//! Pages that need not be sent, because the guest reports them as free.
//!
//! # Why no write is lost
//! The source may skip a page if there is an instant `T` with two properties:
//!
//! 1. *The page is free at `T`*: the guest writes the page after `T` before it reads it.
//! 2. *Every write after `T` is found*: the page was protected ([`Protect`](crate::Protect)) before
//!    `T`.
//!
//! The target then has zeros or an old version of the page, which no code reads. The guest writes
//! the page before it uses it (1), a harvest finds that write, and the source sends the page (2). A
//! write before `T` does not matter.
//!
//! The source of free pages promises (1) for some instant between the call of
//! [`FreePages::request`] and the return of the [`FreePages::poll`] that brings the page. (2) is
//! the responsibility of the engine, and it has a cost. A log that is "initially set" (hazards.md
//! 3) tracks a page only after the page was protected once. To protect all of memory before the
//! first page is sent would delay that page by 4 to 5 ms for each GiB. Each pass therefore works in
//! this order:
//!
//! | step | reason |
//! |---|---|
//! | The pass begins: its pages go to the senders. | The first page is not delayed. |
//! | A source that answers [at once](AnswerMode::AtOnce) is asked. | The answer shows which pages may be free. No page is skipped because of this answer. An answer of a source that has to [ask the guest](AnswerMode::ByGuest) is expensive: all pages are assumed to be possibly free. |
//! | Those pages are *taken* from the senders, chunk by chunk, by the atomic bit that also assigns pages to senders. | A page that was sent must not be protected a second time: a write in between would be forgotten. |
//! | They are protected, and moved to the end of this pass. | 4 to 5 ms/GiB, at the same time as the senders and not before them. A page that is protected earlier than needed may be sent twice. |
//! | The source is asked: `T` comes after the protection. | (2) holds for each page of this answer. |
//! | A page of the answer that no sender has started is skipped. | (1) and (2). |
//! | The other pages are sent at the end of this pass. | No sender waits for an answer. |
//!
//! Only pages that the pass was given can be skipped. Pages that a later harvest finds are in
//! another [set](crate::source::pending), which no answer changes. The questions of a pass end with
//! the pass: a later answer is dropped and counted, because the harvest in between may have found a
//! write to one of its pages. Such a page belongs to the next pass and can be skipped in that pass,
//! by questions that are asked after the harvest.
//!
//! Free pages may stay unused until the guest is told that it may use them (Linux isolates the
//! pages that it hints). `T` would then be as late as that, and pages could be protected after the
//! answer. The engine does not rely on this: a guest that is short of memory takes such pages back
//! before it is told.
//!
//! While the guest is paused, it writes nothing, so (2) holds without protection. A source that
//! answers [at once](AnswerMode::AtOnce) is asked once more after the last harvest, and its answer
//! is used immediately.
//!
//! # In postcopy
//! A skipped page is not named among the missing pages. Either it is not populated on the target,
//! and a fault on it is answered with zeros, or it has an old version.
