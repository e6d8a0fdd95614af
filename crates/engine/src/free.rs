//! Pages whose content does not count, because the guest says that they are free.
//!
//! # Why no write is lost
//! A page may be left out of what is sent if there is an instant `T` with two properties:
//!
//! 1. *At `T` the page is free*: whoever uses it after `T` writes it before reading it.
//! 2. *Every write after `T` is found*: the page was protected ([`Protect`](crate::Protect)) before `T`.
//!
//! The target then has zeros or an old version of the page, which nobody reads: whoever uses the page writes it first (1), that
//! write is found by a harvest, and the page is sent (2). Nothing that was written before `T` counts.
//!
//! The source of answers promises (1) for some instant between the call of [`FreePages::ask`] and the return of the
//! [`FreePages::poll`] that brings the page. (2) is the engine's business, and not to be had for nothing: a log that is
//! "initially set" (hazards.md 3) tracks a page only after it was protected once, and to protect all of memory before the first
//! page is sent would have that page wait for 4 to 5 ms for each GiB. So the order is, in each pass:
//!
//! | step | what for |
//! |---|---|
//! | The pass begins: its pages go to the senders. | The first page waits for nothing. |
//! | A source that answers [at once](Answers::AtOnce) is asked. | To know which pages are worth the trouble; nothing is left out because of this answer. From a source that has to [ask the guest](Answers::ByGuest) an answer is dear: all pages are taken to be worth it. |
//! | Those pages are *taken* from the senders, chunk by chunk, by the atomic bit that also says who sends them. | A page that was sent must not be protected a second time: that would forget a write since. |
//! | They are protected, and put behind all others of this pass. | 4 to 5 ms/GiB, beside the senders and not before them; a page that is protected sooner than it is sent may be sent twice. |
//! | The source is asked: `T` comes after the protection. | (2) holds for whatever this answer names. |
//! | What it names, and no sender has begun with, is left out. | (1) and (2). |
//! | What it does not name is sent at the end of this pass. | Nobody waits for an answer. |
//!
//! Only pages that the pass was given can be left out; what a harvest finds later is in another
//! [set](crate::source::pending), which no answer touches. A pass ends with its questions: an answer that comes after it is dropped and counted, because
//! the harvest in between may have found a write to a page that it names. The page of such a write belongs to the next pass, and
//! can be left out of that one, by questions that are asked after the harvest.
//!
//! That free pages stay unused until the guest is told that they may be used (Linux isolates the pages that it hints) would make
//! a `T` as late as that, and pages could be protected when the answer has come. The engine does not count on it: a guest that is
//! short of memory takes such pages back before it is told.
//!
//! While the guest is paused nobody writes, so (2) holds for nothing: what it keeps [itself](Answers::AtOnce) is asked once more
//! after the last harvest, and its answer counts at once.
//!
//! # In postcopy
//! A page that is left out is not named among those that the target lacks. The target finds it not populated and answers a
//! fault on it with zeros; or it has an old version.
