//! Arbiter of the simulation and of the model: a register that follows the rules of the parent
//! module, and a placeholder for a session's settings.

use super::{Arbiter, ArbiterError, ArbiterRequest, MigrationId, Ownership, Side};
use std::sync::Arc;

/// Placeholder that tells a session that there is an arbiter. In the simulation, sessions ask
/// through their hosts.
#[derive(Debug)]
struct ArbiterPlaceholder;

impl Arbiter for ArbiterPlaceholder {
    fn name(&self) -> String {
        "simulated".into()
    }

    fn register(&self, migration: MigrationId) -> String {
        migration.to_string()
    }

    fn open(&self, _: MigrationId) -> Result<(), ArbiterError> {
        unreachable!("a session never calls its arbiter directly")
    }

    fn request(&self, _: MigrationId, _: ArbiterRequest) -> Result<Ownership, ArbiterError> {
        unreachable!("a session never calls its arbiter directly")
    }

    fn close(&self, _: MigrationId) -> Result<(), ArbiterError> {
        unreachable!("a session never calls its arbiter directly")
    }
}

/// Returns the placeholder for a session's settings.
pub(crate) fn arbiter_placeholder() -> Arc<dyn Arbiter> {
    Arc::new(ArbiterPlaceholder)
}

/// Returns the content of a register that held `held` before `request`.
pub(crate) fn content_after(held: Ownership, request: ArbiterRequest) -> Ownership {
    match (request, held) {
        (ArbiterRequest::Claim(Side::Source), Ownership::Open) | (ArbiterRequest::GiveBack, _) => {
            Ownership::Source
        }
        (ArbiterRequest::Claim(Side::Target), Ownership::Open) => Ownership::Target { runs: false },
        (ArbiterRequest::Runs, Ownership::Target { .. }) => Ownership::Target { runs: true },
        _ => held,
    }
}
