//! Process guests that run on the target before their memory is there, over links and beside peers that do harm.

#[path = "../../../engine/src/channel/tls/authority.rs"]
mod authority;
mod blocked;
mod cuts;
mod encrypted;
mod evil;
mod hostile;
mod proxy;
mod recovery;
mod rig;
