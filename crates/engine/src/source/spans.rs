//! Phases of a migration as spans of `tracing`.
//!
//! A subscriber can observe when each phase begins and ends. Without a subscriber, a span costs one
//! load.

use tracing::{Span, info_span};

/// Span of the migration, and spans of its current phase and pass. A span ends when it is replaced.
#[derive(Debug)]
pub(super) struct Spans {
    migration: Span,
    phase: Span,
    pass: Span,
}

impl Default for Spans {
    fn default() -> Self {
        Self { migration: Span::none(), phase: Span::none(), pass: Span::none() }
    }
}

impl Spans {
    /// Creates the span of a migration, and the span of its setup phase.
    pub(super) fn begin(id: &str, mode: &str) -> Self {
        let migration = info_span!(
            parent: None,
            "migration",
            id,
            mode,
            outcome = tracing::field::Empty,
            // OpenTelemetry reads a span's status from this field.
            otel.status_code = tracing::field::Empty,
        );
        let mut spans = Self { migration, ..Self::default() };
        spans.setup();
        spans
    }

    pub(super) fn setup(&mut self) {
        self.phase = info_span!(parent: &self.migration, "setup");
    }

    pub(super) fn pass(&mut self, number: u32, pages: u64) {
        // The previous pass must end first, because it belongs to its own phase.
        self.pass = Span::none();
        // OpenTelemetry has only signed integers. An unsigned one would be exported as text.
        let (number, pages) = (i64::from(number), i64::try_from(pages).unwrap_or(i64::MAX));
        self.pass = info_span!(parent: &self.phase, "pass", number, pages);
    }

    pub(super) fn precopy(&mut self) {
        self.phase = info_span!(parent: &self.migration, "precopy");
    }

    pub(super) fn switchover(&mut self) {
        self.pass = Span::none();
        self.phase = info_span!(parent: &self.migration, "switchover");
    }

    pub(super) fn verify(&mut self) {
        self.pass = info_span!(parent: &self.phase, "verify");
    }

    pub(super) fn verified(&mut self) {
        self.pass = Span::none();
    }

    pub(super) fn postcopy(&mut self) {
        self.pass = Span::none();
        self.phase = info_span!(parent: &self.migration, "postcopy");
    }

    pub(super) fn end(&mut self, outcome: &str) {
        (self.pass, self.phase) = (Span::none(), Span::none());
        self.migration.record("outcome", outcome);
        // A cancelled migration is not an error: the operator got the requested result.
        if !matches!(outcome, "completed" | "cancelled") {
            self.migration.record("otel.status_code", "ERROR");
        }
        self.migration = Span::none();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    /// Subscriber that records when each span began and ended.
    #[derive(Default)]
    struct SpanRecorder {
        next: AtomicU64,
        names: Arc<Mutex<Vec<(u64, &'static str)>>>,
        lines: Arc<Mutex<Vec<String>>>,
    }

    impl Subscriber for SpanRecorder {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, span: &Attributes<'_>) -> Id {
            let (id, name) = (self.next.fetch_add(1, Ordering::Relaxed) + 1, span.metadata().name());
            let names = &mut *self.names.lock().unwrap();
            let parent =
                span.parent().and_then(|parent| names.iter().find(|(own, _)| *own == parent.into_u64()));
            self.lines.lock().unwrap().push(format!("{}>{name}", parent.map_or("", |(_, name)| name)));
            names.push((id, name));
            Id::from_u64(id)
        }

        fn try_close(&self, id: Id) -> bool {
            let names = self.names.lock().unwrap();
            let name = names.iter().find(|(own, _)| *own == id.into_u64()).unwrap().1;
            self.lines.lock().unwrap().push(format!("end {name}"));
            true
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn phases_follow_each_other_under_their_migration() {
        let diary = SpanRecorder::default();
        let lines = Arc::clone(&diary.lines);
        tracing::subscriber::with_default(diary, || {
            let mut spans = Spans::begin("ab", "hybrid");
            spans.precopy();
            spans.pass(0, 8);
            spans.pass(1, 2);
            spans.switchover();
            spans.verify();
            spans.verified();
            spans.postcopy();
            spans.end("completed");
        });
        let want = [
            ">migration",
            "migration>setup",
            "migration>precopy",
            "end setup",
            "precopy>pass",
            "end pass",
            "precopy>pass",
            "end pass",
            "migration>switchover",
            "end precopy",
            "switchover>verify",
            "end verify",
            "migration>postcopy",
            "end switchover",
            "end postcopy",
            "end migration",
        ];
        assert_eq!(*lines.lock().unwrap(), want);
    }
}
