//! Tests of process guests that run, pause and migrate, and that run on the target before their
//! memory has arrived, over faulty links and with hostile peers.

#[path = "../../../engine/src/channel/tls/authority.rs"]
mod authority;
mod blocked;
mod branch;
mod cuts;
mod demand_paging;
mod encrypted;
mod evil;
mod free_pages;
mod guest;
mod hostile;
mod prealloc;
mod recovery;
mod rig;
mod throttle;
