//! Process guests that run, stand still and move, and process guests that run on the target before their memory is there, over links
//! and beside peers that do harm.

#[path = "../../../engine/src/channel/tls/authority.rs"]
mod authority;
mod blocked;
mod cuts;
mod encrypted;
mod evil;
mod free_pages;
mod guest;
mod hostile;
mod lazy;
mod recovery;
mod rig;
