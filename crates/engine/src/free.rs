//! Pages that need not be sent, because the guest reports them as free.
//!
//! # Why no write is lost
//! The source may skip a page if there is an instant `T` with two properties:
//!
//! 1. *The page is free at `T`*: the guest writes the page after `T` before it reads it.
//! 2. *Every write after `T` is found*: the page was protected ([`Protect`](crate::Protect)) before
//!    `T`.
//!
//! The target then has zeros or an old version of the page, which the guest does not read: it
//! writes the page before it reads it (1), a harvest finds that write, and the source sends the
//! page (2). A write before `T` does not matter.
//!
//! The implementation of [`FreePages`](crate::FreePages) guarantees (1) for some instant between
//! the call of [`request`](crate::FreePages::request) and the return of the call of
//! [`poll`](crate::FreePages::poll) that reports the page. The engine is responsible for (2), which
//! has a cost. A log that is "initially set" (hazards.md 3) tracks a page only after the page was
//! protected once. If all of memory were protected before the first page is sent, that page would
//! be delayed by 4 to 5 ms for each GiB. Each pass therefore works in this order:
//!
//! | step | reason |
//! |---|---|
//! | The pass begins: its pages go to the senders. | The first page is not delayed. |
//! | A source of free pages that answers [at once](crate::AnswerMode::AtOnce) is asked. | The answer shows which pages may be free. No page is skipped because of this answer. A source that has to [ask the guest](crate::AnswerMode::ByGuest) is not asked here, because its answer is expensive: all pages are assumed to be possibly free. |
//! | Those pages are *taken* from the senders, chunk by chunk, by the atomic bit that also assigns pages to senders. | A page that was sent must not be protected a second time: a write in between would be forgotten. |
//! | They are protected, and moved to the end of this pass. | Protecting takes 4 to 5 ms/GiB. It happens while the senders work, and only for these pages, because a page that is protected earlier than needed may be sent twice. |
//! | The source of free pages is asked. | `T` comes after the protection, so (2) holds for each page of this answer. |
//! | A page of the answer that no sender has started is skipped. | (1) and (2). |
//! | The other pages of this group are sent at the end of this pass. | No sender waits for an answer. |
//!
//! Only pages that belong to the pass can be skipped. Pages that a later harvest finds are in
//! another [set](crate::source::pending), which no answer changes. An answer that arrives after the
//! end of its pass is dropped and counted, because the harvest in between may have found a write to
//! one of its pages. Such a page belongs to the next pass, and can be skipped there because of a
//! question that is asked after the harvest.
//!
//! A guest may leave reported pages unused until it is told that it may use them again; Linux
//! isolates the pages that it reports as hints. `T` could then be as late as that moment, and pages
//! could be protected after the answer. The engine does not rely on this, because a guest that is
//! short of memory takes such pages back before it is told.
//!
//! A paused guest writes nothing, so (2) holds without protection while the guest is paused.
//! Therefore a source of free pages that answers [at once](crate::AnswerMode::AtOnce) is asked once
//! more after the last harvest, and its answer is used immediately.
//!
//! # In postcopy
//! A skipped page is not named among the missing pages. If the page is not populated on the target,
//! a fault on it is answered with zeros. Otherwise the target has an old version of the page.
