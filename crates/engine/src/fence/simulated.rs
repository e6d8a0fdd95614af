//! Arbiter of the simulation and the model: its register, which follows the module's rules, and a
//! placeholder for a session's settings.

use super::{Arbiter, ArbiterError, MigrationId, Ruling, Side, Word};
use std::sync::Arc;

/// Placeholder that tells a session that there is an arbiter. In the simulation, sessions ask
/// through their hosts.
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
        unreachable!("a session never calls its arbiter directly")
    }

    fn say(&self, _: MigrationId, _: Word) -> Result<Ruling, ArbiterError> {
        unreachable!("a session never calls its arbiter directly")
    }

    fn close(&self, _: MigrationId) -> Result<(), ArbiterError> {
        unreachable!("a session never calls its arbiter directly")
    }
}

/// Returns the placeholder for a session's settings.
pub(crate) fn asked_by_the_host() -> Arc<dyn Arbiter> {
    Arc::new(AskedByTheHost)
}

/// Returns the content of a register with content `held` after the request `word`.
pub(crate) fn heard(held: Ruling, word: Word) -> Ruling {
    match (word, held) {
        (Word::Claim(Side::Source), Ruling::Open) | (Word::GiveBack, _) => Ruling::Source,
        (Word::Claim(Side::Target), Ruling::Open) => Ruling::Target { runs: false },
        (Word::Runs, Ruling::Target { .. }) => Ruling::Target { runs: true },
        _ => held,
    }
}
