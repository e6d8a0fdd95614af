//! Tests of the engine over real sockets, with a toy VM as source and target: successful
//! migrations, failures, broken links, hostile peers.

mod arbiter;
#[cfg(feature = "ring")]
#[path = "../../src/channel/tls/authority.rs"]
mod authority;
mod background;
mod busy;
mod clumsy;
mod codecs;
mod connectors;
#[cfg(feature = "ring")]
mod encrypted;
mod faulting;
mod free_pages;
mod freeing;
mod incoming;
mod increments;
mod known;
mod liars;
mod links;
mod moves;
mod passed;
mod recorded;
mod renounced;
mod rig;
mod slow;
mod snapshots;
mod toy;
mod unknown_peers;
