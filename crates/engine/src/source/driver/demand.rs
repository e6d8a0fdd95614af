//! Missing pages of a guest that runs on the target. Requests for them are answered, and the bulk
//! threads send the rest.

use super::Context;
use super::channels::Channels;
use crate::awake::LatencyRequest;
use crate::missing_pages::CollectedPages;
use crate::source::MigrationMode;
use crate::source::inbox::{Input, Numbered};
use crate::source::postcopy::{Claims, UrgentOut, serve_urgent};
use crate::source::sender::SenderContext;
use crate::vm::caught;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use vmferry_core::{Layout, NothingToProtect, PageSet};

/// Missing pages, and the urgent channels that serve them.
pub(super) struct Demand<'e> {
    /// Missing pages that were not sent over the current channels. `None` before the handover, and
    /// while there is no link.
    claims: Option<Arc<Claims>>,
    urgent: Arc<Vec<UrgentOut<'e>>>,
    /// Missing pages that the target has named so far over a new link.
    pub(super) missing: CollectedPages,
}

impl<'e> Demand<'e> {
    pub(super) fn new(layout: &Layout) -> Self {
        Self { claims: None, urgent: Arc::default(), missing: CollectedPages::new(layout) }
    }

    pub(super) fn claims(&self) -> Option<Arc<Claims>> {
        self.claims.clone()
    }

    pub(super) fn urgent(&self) -> Arc<Vec<UrgentOut<'e>>> {
        Arc::clone(&self.urgent)
    }

    /// Returns the number of missing pages that were not sent over the current channels.
    pub(super) fn left(&self) -> Option<u64> {
        self.claims.as_ref().map(|claims| claims.left())
    }

    /// Starts with the pages that the target was told are missing.
    pub(super) fn begin(&mut self, context: &Context<'_>, missing: PageSet) {
        // If there was no precopy, no pass has found out which pages were never touched.
        let look_up_untouched = context.settings.mode == MigrationMode::Postcopy;
        self.claims = Some(Arc::new(Claims::new(missing, context.settings.urgent, look_up_untouched)));
    }

    /// Drops the claims, because the link is lost. The target will name the pages that were in
    /// flight.
    pub(super) fn end(&mut self) {
        self.claims = None;
        self.urgent = Arc::default();
    }

    /// Prepares for the target to name its missing pages, over a new link.
    pub(super) fn reset_missing(&mut self, layout: &Layout) {
        self.missing = CollectedPages::new(layout);
    }

    /// Starts again with the missing pages that the target has named. `pages` is their number.
    pub(super) fn named_again(&mut self, context: &Context<'_>, pages: u64) -> Result<(), String> {
        let empty = CollectedPages::new(context.memory.layout());
        let missing = std::mem::replace(&mut self.missing, empty).complete(pages)?;
        self.begin(context, missing);
        Ok(())
    }

    /// Starts a thread for each urgent channel, which answers requests for missing pages. Before
    /// the handover there is nothing to serve.
    pub(super) fn serve(
        &mut self,
        context: &'e Context<'e>,
        channels: &Channels<'_, 'e>,
        inputs: &SyncSender<Numbered>,
        generation: u64,
    ) -> io::Result<()> {
        let Some(claims) = &self.claims else { return Ok(()) };
        let out = |(stream, index): (&Arc<_>, u16)| {
            let shared =
                SenderContext { pacer: &context.unpaced, ..context.sender_context(&NothingToProtect) };
            UrgentOut::new(shared, Arc::clone(stream), index, 0)
        };
        self.urgent = Arc::new(channels.urgent.iter().zip(0..).map(out).collect());
        for channel in 0..self.urgent.len() {
            let (urgent, claims, inputs) = (Arc::clone(&self.urgent), Arc::clone(claims), inputs.clone());
            let awake =
                if context.settings.stay_awake { LatencyRequest::open() } else { LatencyRequest::default() };
            let work = move || {
                let serve = || Err::<Infallible, _>(serve_urgent(&claims, &urgent[channel], channel, awake));
                let Err(lost) = caught(serve);
                context.handle.counters.add_thread_cpu();
                let _ = inputs.send((generation, Input::UrgentLost(lost)));
            };
            vmferry_thread::spawn_scoped(
                vmferry_thread::Role::Sender,
                format!("source-urgent-{channel}"),
                channels.scope,
                work,
            )?;
        }
        Ok(())
    }
}
