//! Process guests that run on the target before their memory is there, over links and beside peers that do harm.

mod blocked;
mod cuts;
mod evil;
mod hostile;
mod proxy;
mod recovery;
mod rig;
