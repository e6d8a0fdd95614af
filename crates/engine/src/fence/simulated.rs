//! What the simulation and the model have of an arbiter: its register, by the module's rules, and a name for sessions.

use super::{Arbiter, ArbiterError, MigrationId, Ruling, Side, Word};
use std::sync::Arc;

/// Says to a session that there is a fence. Sessions ask through their hosts.
#[derive(Debug)]
struct AskedByTheHost;

impl Arbiter for AskedByTheHost {
    fn name(&self) -> String {
        "simulated".into()
    }

    fn register(&self, migration: MigrationId) -> String {
        migration.to_string()
    }

    fn open(&self, _: MigrationId) -> Result<(), ArbiterError> {
        unreachable!("a session asks nobody")
    }

    fn say(&self, _: MigrationId, _: Word) -> Result<Ruling, ArbiterError> {
        unreachable!("a session asks nobody")
    }

    fn close(&self, _: MigrationId) -> Result<(), ArbiterError> {
        unreachable!("a session asks nobody")
    }
}

/// For a session's settings.
pub(crate) fn asked_by_the_host() -> Arc<dyn Arbiter> {
    Arc::new(AskedByTheHost)
}

/// What a register holds once it has heard `word`.
pub(crate) fn heard(held: Ruling, word: Word) -> Ruling {
    match (word, held) {
        (Word::Claim(Side::Source), Ruling::Open) | (Word::GiveBack, _) => Ruling::Source,
        (Word::Claim(Side::Target), Ruling::Open) => Ruling::Target { runs: false },
        (Word::Runs, Ruling::Target { .. }) => Ruling::Target { runs: true },
        _ => held,
    }
}
